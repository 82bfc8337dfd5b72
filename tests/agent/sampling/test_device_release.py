"""SIGUSR2 closes what holds a device, and nothing else; the next one opens it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from clusterprof.agent.collectors.registry import COLLECTORS
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.agent.sampling.device_release import DEADLINE_NS, DeviceRelease
from clusterprof.agent.sampling.scheduler import Budget, Schedule, record_batches
from clusterprof.errors import DEVICES_RELEASED, NothingNew, Unavailable
from clusterprof.signals import GPU_POWER, Signal
from clusterprof.trace.schema import Columns, Event, Gap, Record
from tests.support.recording_fakes import SECOND_NS, T0, TICK_NS, CountingCollector, FakeClock

NO_LIBRARY = Unavailable("absent", "the library was not found")


class Device:
    """A device behind a helper: 100 W, or `problem` instead of the device."""

    name: ClassVar[str] = "gpu_test"
    isolated: ClassVar[bool] = True
    interval_ns: ClassVar[int] = TICK_NS

    def __init__(self, problem: BaseException | None = None) -> None:
        self.problem = problem
        self.calls: list[str] = []
        self.ending: list[int] = []

    def open(self) -> Sequence[tuple[Signal, str]]:
        self.calls.append("open")
        if self.problem is not None:
            raise self.problem
        return [(GPU_POWER, "gpu-0")]

    def sample(self) -> Sequence[float]:
        return [100.0]

    def close(self) -> None:
        self.calls.append("close")

    def list_ending_pids(self) -> list[int]:
        return self.ending


class Requests:
    """The signals that have arrived."""

    def __init__(self) -> None:
        self.count = 0

    def send(self) -> None:
        self.count += 1

    def __call__(self, seen: int) -> int:
        return self.count


def record(
    device: Device, *at_ns: int, seconds: float = 4.0, interval_ns: int = TICK_NS
) -> tuple[list[Record], Schedule]:
    """Record a device and a counter; a signal arrives at each of these times."""
    clock, requests, schedule = FakeClock(), Requests(), Schedule()
    clock.script = dict.fromkeys(at_ns, requests.send)
    runners = [
        CollectorRunner(device, interval_ns, lambda name, error: None),
        CollectorRunner(CountingCollector(), TICK_NS, lambda name, error: None),
    ]
    for runner in runners:
        runner.open(T0)
    end_ns = T0 + round(seconds * SECOND_NS)
    batches = record_batches(
        runners,
        [DeviceRelease(runners, requests)],
        clock,
        schedule,
        Budget(10, T0, 0),
        TICK_NS,
        lambda now_ns: "the test is over" if now_ns >= end_ns else "",
    )
    return [record for batch in batches for record in batch], schedule


def times_of(records: Sequence[Record], collector: str) -> list[int]:
    """Return the ticks of a collector with a value, in 0.1 s since the start."""
    return [
        (int(t) - T0) // TICK_NS
        for record in records
        if isinstance(record, Columns) and record.collector == collector
        for row, t in enumerate(record.t_ns)
        if all(mask is None or not mask[row] for mask in record.masks)
    ]


def list_events(records: Sequence[Record]) -> list[tuple[int, str, dict[str, Any]]]:
    return [
        ((event.t_ns - T0) // TICK_NS, event.kind, dict(event.attributes))
        for event in records
        if isinstance(event, Event) and event.kind.startswith("device")
    ]


def test_a_released_device_has_no_values_until_the_next_signal() -> None:
    device = Device()
    records, schedule = record(device, T0 + 10 * TICK_NS, T0 + 25 * TICK_NS)
    # Opened at 0; values at 0 to 0.9 s, closed at 1.0 s, opened and read again from 2.5 s on.
    assert device.calls == ["open", "close", "open", "close"]
    assert times_of(records, "gpu_test") == [*range(10), *range(25, 40)]
    assert times_of(records, "counting") == list(range(40))
    assert list_events(records) == [
        (10, "devices-released", {"collectors": ["gpu_test"]}),
        (10, "devices-closed", {"took_ns": 0}),
        (25, "devices-resumed", {"collectors": ["gpu_test"]}),
    ]
    assert (schedule.late_ns, schedule.missed) == (0, 0)


def test_the_values_that_are_missing_have_a_reason_and_are_no_zeros() -> None:
    records, _ = record(Device(), T0 + 10 * TICK_NS, seconds=2.0)
    gaps = [gap for gap in records if isinstance(gap, Gap)]
    assert {(gap.t_ns, gap.kind, gap.message) for gap in gaps} == {
        (T0 + 10 * TICK_NS, "failed", DEVICES_RELEASED.message)
    }
    # One for the collector as a whole, one for its column: else the last value would hold on.
    assert {(gap.signal, gap.device) for gap in gaps} == {("", ""), ("gpu.power_watts", "gpu-0")}
    assert times_of(records, "gpu_test") == list(range(10))


def test_a_device_with_a_rate_of_its_own_is_opened_again_too() -> None:
    """It is alone in its rate group, which nothing else wakes."""
    device = Device()
    records, schedule = record(device, T0 + SECOND_NS, T0 + 2 * SECOND_NS, interval_ns=TICK_NS // 5)
    assert device.calls == ["open", "close", "open", "close"]
    resumed = [t for t in times_of(records, "gpu_test") if t >= 20]
    assert len(resumed) == 100  # 2.0 to 4.0 s, 50 a second
    assert not [t for t in times_of(records, "gpu_test") if 10 <= t < 20]
    assert schedule.missed == 0


def test_a_collector_that_is_still_opening_is_closed_too() -> None:
    """Its helper looks for devices: it has the driver open."""
    device = Device(NothingNew())
    records, _ = record(device, T0 + 5 * TICK_NS, seconds=2.0)
    assert device.calls[-1] == "close"
    assert list_events(records)[0] == (5, "devices-released", {"collectors": ["gpu_test"]})


def test_a_node_without_the_device_reports_no_release() -> None:
    records, _ = record(Device(NO_LIBRARY), T0 + 5 * TICK_NS, seconds=2.0)
    assert list_events(records)[0] == (5, "devices-released", {"collectors": []})
    assert {gap.message for gap in records if isinstance(gap, Gap)} == {NO_LIBRARY.message}


def test_a_helper_that_does_not_end_is_reported_once() -> None:
    device, requests = Device(), Requests()
    runner = CollectorRunner(device, TICK_NS, lambda name, error: None)
    runner.open(T0)
    release = DeviceRelease([runner], requests)
    assert not release.look(T0)
    device.ending = [77]
    requests.send()
    assert release.look(T0)  # to be called again at the next tick
    assert release.look(T0 + DEADLINE_NS - 1)
    assert [event.kind for event in release.take(T0)] == ["devices-released"]
    assert release.look(T0 + DEADLINE_NS) and release.look(T0 + DEADLINE_NS + 1)
    held = {"collectors": ["gpu_test"], "pids": [77]}
    assert list_events(release.take(T0)) == [(20, "devices-still-held", held)]
    device.ending = []
    assert not release.look(T0 + 3 * SECOND_NS)
    closed = {"took_ns": 3 * SECOND_NS}
    assert list_events(release.finish(T0)) == [(30, "devices-closed", closed)]


def test_two_signals_at_once_open_the_devices_anew() -> None:
    device, requests = Device(), Requests()
    runner = CollectorRunner(device, TICK_NS, lambda name, error: None)
    runner.open(T0)
    release = DeviceRelease([runner], requests)
    requests.count = 2
    release.look(T0)
    assert device.calls == ["open", "close"] and not runner.is_released
    runner.tick(T0)
    assert device.calls == ["open", "close", "open"]


def test_every_collector_of_real_accelerators_is_released() -> None:
    """Emulated ones have no device; everything else has no accelerator open."""
    held = {kind.name for kind in COLLECTORS if getattr(kind, "holds_device", kind.isolated)}
    vendors = {kind.name for kind in COLLECTORS if kind.name.startswith("gpu_")}
    assert held == vendors - {"gpu_emulated"}
