"""Busy time of an NVIDIA GPU from the driver's samples and from GPM, with clocks that jump.

Times are milliseconds of the recording's clock. The driver stamps its samples with the time of
day, which is `day_ms` ahead, unless a test says otherwise.
"""

from __future__ import annotations

import pytest

from clusterprof.agent.collectors.gpu.nvml_counters import BusyIntegral

MS = 1_000_000
HOUR_MS = 3_600_000
START_MS = 50_000
DAY_MS = 1_790_000_000_000


class Reader:
    """An integral, and a driver that hands over samples."""

    def __init__(self) -> None:
        self.integral = BusyIntegral()
        self.day_ms = DAY_MS
        """The time of day less the recording's clock."""
        self.stamp_ms = DAY_MS
        """The driver's timestamps less the recording's clock."""

    def read(
        self,
        at_ms: int,
        *samples: tuple[int, int],
        percent: int | None = 0,
        filters: bool = False,
        has_buffer: bool = True,
    ) -> tuple[float, float | None]:
        """Read at a time samples (end, percent); return busy time and up to when it counts, ms.

        filters: leave out what is no newer than what was asked for, as the driver does.
        """
        stamped = [((end_ms + self.stamp_ms) * 1000, value) for end_ms, value in samples]
        if filters:
            stamped = [sample for sample in stamped if sample[0] > self.integral.last_us]
        now_ns, day_ns = at_ms * MS, (at_ms + self.day_ms) * MS
        self.integral.add(stamped, percent, now_ns, day_ns, has_buffer)
        return self.state()

    def add_mean(self, share: float, begin_ms: int, end_ms: int) -> tuple[float, float | None]:
        """Add a mean of GPM over a time."""
        day_ns = (end_ms + self.day_ms) * MS
        self.integral.add_mean(share, (end_ms - begin_ms) * MS, end_ms * MS, day_ns)
        return self.state()

    def state(self) -> tuple[float, float | None]:
        until_ns = self.integral.until_ns
        return self.integral.total_ns / MS, None if until_ns is None else until_ns / MS


@pytest.fixture
def reader() -> Reader:
    """Return a reader that has read a sample that ended at 49,900 ms."""
    made = Reader()
    assert made.read(START_MS, (49_900, 100)) == (0, 49_900)  # what was before does not count
    return made


def test_samples_out_of_order_count_once(reader: Reader) -> None:
    samples = ((50_400, 10), (50_200, 50), (50_400, 10), (49_900, 100), (49_700, 100))
    # 300 ms at 50 % and 200 ms at 10 %
    assert reader.read(50_500, *samples) == (170, 50_400)
    assert reader.read(50_600, *samples) == (170, 50_400)
    assert reader.read(50_700, *samples, (50_600, 100)) == (370, 50_600)


def test_several_samples_delivered_together_count_in_full(reader: Reader) -> None:
    """A driver that hands over once a second: six periods of 167 ms, each with its own share."""
    ends = [50_067, 50_234, 50_401, 50_568, 50_735, 50_902]
    assert reader.read(50_300) == (0, 49_900)
    assert reader.read(50_600) == (0, 49_900)
    lump = list(zip(ends, (100, 0, 100, 0, 50, 100), strict=True))
    assert reader.read(51_000, *lump) == (3.5 * 167, 50_902)


@pytest.mark.parametrize("samples", [(), ((49_900, 100), (49_700, 100))])
def test_an_idle_gpu_counts_busy_time_from_utilization(
    reader: Reader, samples: tuple[tuple[int, int], ...]
) -> None:
    """Its buffer is empty, or holds what was counted before."""
    assert reader.read(50_500, *samples, percent=20) == (0, 49_900)  # not yet known to be idle
    assert reader.read(51_000, *samples, percent=20) == (200, 50_900)
    assert reader.read(52_000, *samples, percent=0) == (200, 51_900)
    assert reader.read(53_000, *samples, percent=0) == (200, 52_900)
    # The first sample afterwards covers 150 ms of time that is not counted yet.
    assert reader.read(53_100, *samples, (53_050, 80)) == (320, 53_050)


def test_a_gpu_idle_at_start_counts_from_the_first_sample() -> None:
    reader = Reader()
    assert reader.read(50_000) == (0, None)
    assert reader.read(51_000) == (0, 51_000)
    assert reader.read(51_400, (51_300, 100)) == (300, 51_300)
    early = Reader()
    assert early.read(50_000) == (0, None)
    assert early.read(50_400, (50_300, 100)) == (300, 50_300)


def test_without_utilization_uncovered_time_waits_for_the_next_sample(reader: Reader) -> None:
    assert reader.read(51_500, percent=None) == (0, 49_900)
    assert reader.read(51_600, (51_500, 25), percent=None) == (400, 51_500)


def test_without_a_sample_buffer_busy_time_reaches_each_reading() -> None:
    reader = Reader()
    assert reader.read(50_000, percent=50, has_buffer=False) == (0, None)
    assert reader.read(50_100, percent=50, has_buffer=False) == (50, 50_100)
    assert reader.read(50_300, percent=100, has_buffer=False) == (250, 50_300)


@pytest.mark.parametrize("jump_ms", [HOUR_MS, 10_000])
@pytest.mark.parametrize("filters", [True, False])
def test_a_forward_clock_jump_adds_no_busy_time(
    reader: Reader, jump_ms: int, filters: bool
) -> None:
    assert reader.read(50_200, (50_100, 100), filters=filters) == (200, 50_100)
    reader.day_ms += jump_ms
    reader.stamp_ms += jump_ms
    assert reader.read(50_400, (50_300, 100), filters=filters) == (400, 50_300)
    assert reader.read(50_600, (50_500, 50), filters=filters) == (500, 50_500)


@pytest.mark.parametrize("jump_ms", [HOUR_MS, 10_000])
def test_after_a_backward_clock_jump_utilization_counts_until_newer_samples(
    reader: Reader, jump_ms: int
) -> None:
    assert reader.read(50_200, (50_100, 100), filters=True) == (200, 50_100)
    reader.day_ms -= jump_ms
    reader.stamp_ms -= jump_ms
    # The driver has nothing newer than was asked for.
    assert reader.read(50_400, (50_300, 90), filters=True, percent=90) == (200, 50_100)
    assert reader.read(51_200, (51_100, 90), filters=True, percent=90) == (1100, 51_100)
    # Then samples count again, from where the utilization ended.
    samples = ((51_100, 90), (51_300, 100), (51_500, 50))
    assert reader.read(51_600, *samples, filters=True) == (1400, 51_500)
    assert reader.read(51_800, *samples, (51_700, 100), filters=True) == (1600, 51_700)


def test_a_forward_clock_jump_adds_no_time_on_idle_gpus(reader: Reader) -> None:
    reader.day_ms += 10_000
    reader.stamp_ms += 10_000
    assert reader.read(51_000, percent=0) == (0, 50_900)
    assert reader.read(52_000, percent=0) == (0, 51_900)
    assert reader.read(52_200, (52_100, 100), filters=True) == (200, 52_100)


def test_a_sample_from_before_a_clock_jump_subtracts_nothing(reader: Reader) -> None:
    reader.day_ms += 10_000
    assert reader.read(50_200, (50_100, 100), filters=True) == (200, 49_900)


def test_samples_of_a_changed_clock_begin_where_utilization_ends() -> None:
    reader = Reader()
    reader.stamp_ms = 0
    assert reader.read(50_000, (49_900, 100)) == (0, 50_000)
    reader.stamp_ms = HOUR_MS
    assert reader.read(51_500, (51_400, 100), filters=True, percent=50) == (750, 51_500)
    assert reader.read(51_700, (51_600, 100), filters=True) == (950, 51_700)


def test_busy_time_continues_after_the_driver_clock_steps_back(reader: Reader) -> None:
    assert reader.read(50_200, (50_100, 100)) == (200, 50_100)
    reader.day_ms -= HOUR_MS
    reader.stamp_ms -= HOUR_MS
    assert reader.read(50_400, (50_300, 50)) == (300, 50_300)


def test_a_driver_clock_that_jumps_and_returns_adds_no_time(reader: Reader) -> None:
    """Its timestamps are then not of the time of day, so time counts up to the reading."""
    totals: list[float] = []
    untils: list[float] = []
    for step in range(200):
        at_ms = 50_200 + 200 * step
        reader.stamp_ms = DAY_MS + {50: HOUR_MS, 51: 0, 100: -HOUR_MS}.get(step, 0)
        if step >= 150:
            reader.stamp_ms += HOUR_MS
        filters = step % 2 == 0
        total, until = reader.read(at_ms, (at_ms - 100, 100), percent=100, filters=filters)
        assert until is not None and until <= at_ms
        totals.append(total)
        untils.append(until)
    assert totals == sorted(totals)
    assert untils == sorted(untils)
    # 40 s at 100 %, of which at most a second is lost at each of the four jumps; none is added.
    assert 36_000 <= totals[-1] <= 40_100
    assert totals[-1] <= untils[-1] - 49_900


@pytest.mark.parametrize("stamp_ms", [0, DAY_MS + HOUR_MS, DAY_MS - HOUR_MS, DAY_MS + 1_000])
def test_samples_of_a_foreign_clock_count_up_to_the_reading(stamp_ms: int) -> None:
    """Those of the uptime; of a time zone ahead or behind; a second ahead of the time of day."""
    reader = Reader()
    reader.stamp_ms = stamp_ms
    assert reader.read(50_000, (49_900, 100)) == (0, 50_000)
    assert reader.read(50_200, (50_100, 50), filters=True) == (100, 50_200)
    # Late, but its period still counts as the driver gives it.
    assert reader.read(50_400, (50_200, 100), filters=True) == (200, 50_400)
    assert reader.read(50_500, filters=True) == (200, 50_400)  # nothing was counted


def test_a_timestamp_slightly_ahead_is_not_in_the_future() -> None:
    """The two clocks are read one after the other: a sample may seem to end 2 ms from now."""
    reader = Reader()
    assert reader.read(50_000, (50_002, 100)) == (0, 50_000)
    assert reader.read(50_200, (50_202, 50)) == (100, 50_200)


def test_samples_continue_where_gpm_means_end() -> None:
    reader = Reader()
    assert reader.add_mean(0.5, 49_900, 50_100) == (100, 50_100)
    assert reader.add_mean(1.0, 50_100, 50_300) == (300, 50_300)
    # Of a sample from 50,200 to 50,400 only the second half is not counted yet.
    assert reader.read(50_500, (50_200, 100), (50_400, 80)) == (380, 50_400)
    assert reader.read(50_700, (50_600, 10)) == (400, 50_600)


def test_gpm_means_continue_where_samples_end(reader: Reader) -> None:
    """The mean after a failed reading also covers the time of the failure."""
    assert reader.add_mean(1.0, 49_900, 50_100) == (200, 50_100)
    assert reader.read(50_300, (50_250, 100)) == (350, 50_250)
    # From 50,100 to 50,500, of which samples counted up to 50,250: half of 250 ms.
    assert reader.add_mean(0.5, 50_100, 50_500) == (475, 50_500)
    # A reading failed, and so did the samples: nothing is missing.
    assert reader.add_mean(0.5, 50_500, 55_500) == (2975, 55_500)
    # The counters began again after a long failure, at which the samples ended 50 ms before.
    assert reader.read(75_500, *((end, 10) for end in range(56_000, 75_500, 500))) == (
        pytest.approx(2975 + 1950),
        75_000,
    )
    assert reader.add_mean(1.0, 75_500, 75_600) == (2975 + 1950 + 600, 75_600)


def test_busy_time_restarts_after_an_unmeasured_period(reader: Reader) -> None:
    assert reader.add_mean(1.0, 49_900, 50_100) == (200, 50_100)
    # 20 s later counters are read anew over 100 ms, and there were no samples in between.
    assert reader.add_mean(0.5, 70_000, 70_100) == (50, 70_100)


def test_switching_sources_at_every_reading_counts_time_once(reader: Reader) -> None:
    """A GPU at 100 %: busy time and the time it counts up to are then the same."""
    for step in range(60):
        at_ms = 50_200 + 200 * step
        if step % 3 == 0:
            state = reader.read(at_ms, *((at_ms - lag, 100) for lag in (400, 230, 60)))
        else:  # the second of two begins where the first ended, the first a reading before that
            state = reader.add_mean(1.0, at_ms - 200 * (2 if step % 3 == 1 else 1), at_ms)
        total_ms, until_ms = state
        assert until_ms is not None and until_ms <= at_ms
        assert total_ms == until_ms - 49_900
