"""How much of a device its work filled: by hand, and its law on random windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clusterprof import signals
from clusterprof.analysis.attribution.accumulator import Accumulator, merge_accumulators
from clusterprof.analysis.attribution.ledger import RankIdentity, build_rank_result
from clusterprof.analysis.attribution.rank.chunk_boundary import RankState
from clusterprof.analysis.attribution.rank.device_activity import DeviceWindows
from clusterprof.analysis.attribution.rank.utilization import (
    MEAN_SIGNALS,
    UtilizationSums,
    sum_utilization,
)
from clusterprof.analysis.findings.utilization import build_device_utilization
from clusterprof.analysis.timeline.model import Rank, Series
from clusterprof.probe import layout
from clusterprof.report.impact import DeviceUtilization, RankUtilization, list_utilization_sums
from tests.support.builders import (
    make_gauge,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)

DEVICE = "emulated-0"
SM = "gpu.sm_active_ratio"
MS = 1_000_000


def device(n: int, spans_of: dict | None = None, doing: str = "", **gauges: list[float]) -> Rank:
    """A rank with n windows of 100 ms; a gauge has one reading at the end of each."""
    ends = [round(0.1 * (at + 1), 1) for at in range(n)]
    names = {
        "sm": SM,
        "power": "gpu.power_watts",
        "limit": "gpu.power_limit_watts",
        "used": "gpu.memory_used_bytes",
        "total": "gpu.memory_total_bytes",
    }
    series = {(names[name], DEVICE): make_gauge(ends, values) for name, values in gauges.items()}
    end = 0.1 * n
    main = make_process(
        100, spans=spans_of, thread=make_thread(parse_activity(doing), end) if doing else None
    )
    return make_rank(end, main, series=series, marked=spans_of is not None)


def windows(*idle_ms: float) -> DeviceWindows:
    start = np.arange(len(idle_ms)) * 100 * MS
    idle = np.array([round(value * MS) for value in idle_ms], np.int64)
    return DeviceWindows(start, start + 100 * MS, idle, np.zeros(idle.size, np.int64))


def sums(
    timeline: Rank,
    of: DeviceWindows,
    lost_ms: Sequence[float] = (),
    perhaps_ms: Sequence[float] = (),
) -> UtilizationSums:
    n = of.start_ns.size
    lost, perhaps = (
        np.array([round(ms * MS) for ms in [*batch, *[0] * n][:n]], np.int64)
        for batch in (lost_ms, perhaps_ms)
    )
    return sum_utilization(timeline, of, of, lost, perhaps)


def in_ms(totals: UtilizationSums, *names: str) -> list[float]:
    return [totals.get((name, 0), 0) / MS for name in names]


def ledger(
    result: UtilizationSums, peers: bool = False
) -> tuple[DeviceUtilization, RankUtilization]:
    """The ledger of one rank with these sums."""
    name = RankIdentity("node", 0, 100, DEVICE, True, False, peers)
    state = RankState(settled_ns=1, step_begin_ns=0, step_end_ns=1, first_ns=0, last_ns=1)
    totals = {"in_step": 1, "lost": 0}
    whole = build_device_utilization(
        [build_rank_result(name, state, Accumulator(totals, utilization=result))]
    )
    return whole, whole.ranks[0]


def test_the_filled_share_is_relative_to_busy_time() -> None:
    # 100 ms, 40 idle, activity 0.30: 30 ms filled of 60 busy ones; then a full and an idle window
    totals = sums(device(3, sm=[0.30, 0.90, 0.0]), windows(40, 0, 100))
    assert in_ms(totals, "busy", "work", "active") == [160, 160, 30 + 90]
    assert in_ms(totals, "sm", "sm_known") == [120, 300]
    levels = {level: ns / MS for (what, level), ns in totals.items() if what == "level"}
    assert levels == {50: 60, 90: 100}
    _, rank_ledger = ledger(totals)
    assert (rank_ledger.well_used_ns, rank_ledger.under_used_ns, rank_ledger.unmeasured_ns) == (
        120 * MS,
        40 * MS,
        0,
    )
    assert rank_ledger.levels.sm_active_ratio == 0.75
    assert rank_ledger.levels.sm_active_p90_ratio == 0.9


def test_lost_time_is_excluded_from_the_filled_share() -> None:
    # half of the first window span for another rank: (0.9 * 50 + 0.05 * 50) / 100 = 0.475, of which
    # 0.475 * 100 = 47.5 is filled, no more than its 50 ms of work
    # in the second all but 10 ms were slowed: of its 90 ms of activity only 10 can be work
    totals = sums(device(2, sm=[0.475, 0.9]), windows(0, 0), lost_ms=[50, 90])
    assert in_ms(totals, "busy", "lost", "work", "active") == [200, 140, 60, 57.5]
    assert not [what for what, _ in totals if what == "level"]


def test_a_possible_wait_is_neither_filled_nor_under_filled() -> None:
    totals = sums(device(1, sm=[0.5]), windows(0), perhaps_ms=[40])
    assert in_ms(totals, "busy", "perhaps-waiting", "work", "active") == [100, 40, 60, 50]
    _, rank_ledger = ledger(totals)
    assert (rank_ledger.well_used_ns, rank_ledger.under_used_ns, rank_ledger.unmeasured_ns) == (
        50 * MS,
        10 * MS,
        40 * MS,
    )
    assert rank_ledger.reasons == (("perhaps-waiting", 40 * MS),)


def test_unknown_activity_is_unmeasured_and_not_zero() -> None:
    nan = float("nan")
    totals = sums(device(4, sm=[nan, -0.1, 1.2, 1.03]), windows(0, 0, 50, 0))
    # a share is never negative, nor a fifth more than all; a little more than all is all
    assert in_ms(totals, "no-reading", "no-sm-activity", "work", "active") == [250, 0, 100, 100]
    without = sums(device(2, power=[500, 500]), windows(0, 100))
    assert in_ms(without, "no-sm-activity", "no-reading", "work") == [100, 0, 0]
    whole, rank_ledger = ledger(without)
    assert (rank_ledger.well_used_ns, rank_ledger.under_used_ns, rank_ledger.unmeasured_ns) == (
        0,
        0,
        100 * MS,
    )
    assert rank_ledger.levels.sm_active_ratio is None and not rank_ledger.is_measured
    assert whole.reasons == (("no-sm-activity", 100 * MS),)
    masked, _ = ledger(sums(device(2, sm=[nan, nan]), windows(0, 0)))  # GPM that is not supported
    assert masked.reasons == (("no-sm-activity", 200 * MS),)


def test_zero_activity_readings_while_kernels_run_are_unmeasured() -> None:
    whole, rank_ledger = ledger(sums(device(20, sm=[0.0] * 20), windows(*[0] * 20)))
    assert (rank_ledger.under_used_ns, rank_ledger.unmeasured_ns) == (0, 2000 * MS)
    assert whole.reasons == (("zero-reading", 2000 * MS),) and whole.advice == ()


def test_a_job_without_a_device_has_no_utilization_ledger() -> None:
    whole, *_ = [build_device_utilization([])]
    assert (whole.ranks, whole.why_missing) == ((), "no accelerator was measured inside steps")


def test_delayed_readings_keep_the_total_utilization() -> None:
    # busy for a second at 0.4, idle for a second, and so on; each second's mean is known at its end
    # and stands for the next one: in the windows of the busy seconds it reads 0
    idle = ([0.0] * 10 + [100.0] * 10) * 5
    late = ([0.0] * 10 + [0.4] * 10) * 5
    _, rank_ledger = ledger(sums(device(100, sm=late), windows(*idle)))
    assert rank_ledger.busy_ns == 5000 * MS
    assert (rank_ledger.well_used_ns, rank_ledger.under_used_ns) == (2000 * MS, 3000 * MS)


def test_a_reading_far_after_a_window_is_not_used() -> None:
    series = {(SM, DEVICE): make_gauge([3.0], [0.5])}
    timeline = make_rank(3, make_process(100), series=series, marked=False)
    totals = sums(timeline, windows(*[0] * 10))  # four end more than 2.5 s before 3.0
    assert in_ms(totals, "no-reading", "work") == [400, 600]


def test_a_cut_window_keeps_its_whole_filled_time() -> None:
    # the device worked in the last 40 ms of the window, at 0.9: 0.36 over its 100
    whole, cut = windows(60), windows(60)
    cut.start_ns[0], cut.idle_ns[0] = 60 * MS, 0
    none = np.zeros(1, np.int64)
    utilization = sum_utilization(device(1, sm=[0.36]), whole, cut, none, none)
    assert in_ms(utilization, "busy", "active", "sm", "sm_known") == [40, 36, 36, 40]


def test_the_power_ratio_is_relative_to_idle_power_and_limit() -> None:
    # idle 90 W; in half-busy windows 240 W: at work 390, (390 - 90) / (690 - 90)
    totals = sums(device(4, power=[90, 240, 240, 90], limit=[690] * 4), windows(100, 50, 50, 100))
    assert ledger(totals)[1].levels.power_ratio == pytest.approx(0.5)
    # never seen idle: 240 / 0.5 of 690 W is the most it can have been
    totals = sums(device(1, power=[240], limit=[690]), windows(50))
    assert ledger(totals)[1].levels.power_ratio == pytest.approx(480 / 690)
    assert ledger(sums(device(1, power=[240]), windows(50)))[1].levels.power_ratio is None


def test_memory_use_is_the_highest_plausible_reading() -> None:
    gib = 1 << 30
    used = [10.0 * gib, 20.0 * gib, 90.0 * gib]  # the last cannot be: there are 80
    levels = ledger(sums(device(3, used=used, total=[80.0 * gib] * 3), windows(0, 0, 0)))[1].levels
    assert (levels.memory_used_bytes, levels.memory_total_bytes) == (20 * gib, 80 * gib)
    assert levels.memory_free_ratio == 0.75


def test_device_waits_are_not_counted_as_launch_time() -> None:
    # of 1 s: 0.2 s asleep in a wait for data, 0.8 s on a CPU, of which 0.4 s in one span of
    # synchronisations that waited for 0.3 s in all; launching 0.5 of 0.5 s
    marks = {
        layout.STEP: make_spans((0, 1, 0)),
        layout.DATA_WAIT: make_spans((0, 0.2, 0, 201, 1)),
        layout.SYNC: make_spans((0.6, 1.0, ns(0.3), 3)),
    }
    item = device(10, marks, "I0.2 U0.8", sm=[0.3] * 10)
    totals = sums(item, windows(*[0] * 10))
    assert in_ms(totals, "host", "host_known") == [500, 500]
    asleep = device(10, marks, "I0.2 U0.4 I0.4", sm=[0.3] * 10)
    assert in_ms(sums(asleep, windows(*[0] * 10)), "host", "host_known") == [400, 500]
    # of each of the last windows 50 ms on a CPU, no longer than it waited there: it span
    spun = device(10, marks, "I0.2 U0.4" + " U0.05 I0.05" * 4, sm=[0.3] * 10)
    assert in_ms(sums(spun, windows(*[0] * 10)), "host", "host_known") == [400, 500]


def test_other_activity_means_are_relative_to_working_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # 0.12 over windows of which 40 of 100 ms were idle is 0.2 at work; the third has no reading,
    # in the last it span too
    ends, values = [0.1, 0.2, 0.3, 0.4], [0.12, 0.12, float("nan"), 0.9]
    series = {(name, DEVICE): make_gauge(ends, values) for name in MEAN_SIGNALS.values()}
    timeline = make_rank(0.4, make_process(100), series=series, marked=False)
    for name in MEAN_SIGNALS.values():
        monkeypatch.setitem(signals.BY_NAME, name, signals.GPU_SM_ACTIVE)
    totals = sums(timeline, windows(40, 40, 0, 0), lost_ms=[0, 0, 0, 10])
    levels = ledger(totals)[1].levels
    known = (levels.sm_occupancy_ratio, levels.tensor_active_ratio, levels.dram_active_ratio)
    assert known == (0.2, 0.2, 0.2)
    monkeypatch.delitem(
        signals.BY_NAME, MEAN_SIGNALS["dram"]
    )  # a name that is no signal is not read
    assert ledger(sums(timeline, windows(40, 40, 0, 0)))[1].levels.dram_active_ratio is None


WINDOWS = st.lists(
    st.tuples(
        st.integers(0, 100 * MS),  # idle
        st.one_of(st.just(0), st.integers(0, 120 * MS)),  # lost, more than there is at times
        st.one_of(st.just(0), st.integers(0, 60 * MS)),  # perhaps
        st.one_of(st.floats(-0.5, 1.5), st.just(float("nan")), st.just(0.0), st.just(1.0)),
    ),
    min_size=1,
    max_size=40,
)


@settings(derandomize=True)
@example([(50 * MS, 0, 0, 1.0)], 1)  # more activity than busy time: another process's
@given(WINDOWS, st.integers(1, 39))
def test_busy_time_is_allocated_exactly_for_any_chunking(rows: list, cut: int) -> None:
    idle, lost, perhaps, values = (list(column) for column in zip(*rows))
    t_ns = (np.arange(len(rows)) + 1) * 100 * MS
    series = {(SM, DEVICE): Series(t_ns, np.array(values), False)}
    timeline = make_rank(0.1 * len(rows), make_process(100), series=series, marked=False)
    all_windows = windows(*[0] * len(rows))
    all_windows.idle_ns[:] = idle
    whole = sum_utilization(timeline, all_windows, all_windows, np.array(lost), np.array(perhaps))
    parts = []
    for keep in (slice(0, cut), slice(cut, None)):
        of = DeviceWindows(
            *(
                column[keep]
                for column in (
                    all_windows.start_ns,
                    all_windows.end_ns,
                    all_windows.idle_ns,
                    all_windows.slowed_ns,
                )
            )
        )
        parts.append(
            sum_utilization(
                timeline, all_windows, of, np.array(lost)[keep], np.array(perhaps)[keep]
            )
        )
    assert (
        merge_accumulators(*(Accumulator(utilization=part) for part in parts)).utilization == whole
    )
    busy = sum(100 * MS - ns for ns in idle)
    if not busy:
        assert ("busy", 0) not in whole
        return
    rank_ledger, mine = ledger(whole)
    assert mine.busy_ns == busy
    assert [line for line in list_utilization_sums(rank_ledger) if line[1] != line[2]] == []
    assert min(mine.lost_ns, mine.well_used_ns, mine.under_used_ns) >= 0
    assert all(ns > 0 for _, ns in mine.reasons)
