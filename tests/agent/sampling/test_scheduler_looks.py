"""When the loop polls its sources, and which it polls less often: a clock that is notified."""

from __future__ import annotations

from typing import Any

from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.agent.sampling.scheduler import Budget, Schedule, record_batches
from clusterprof.errors import NothingNew
from tests.support.recording_fakes import (
    SECOND_NS,
    T0,
    TICK_NS,
    CountingCollector,
    FakeClock,
    ScriptedCollector,
    SilentSource,
    run_service,
)


class Busy(SilentSource):
    """Has something left to do after its looks at some times."""

    def __init__(self, *again_ns: int) -> None:
        super().__init__()
        self.again_ns = again_ns

    def look(self, now_ns: int) -> bool:
        super().look(now_ns)
        return now_ns in self.again_ns


def looks(
    clock: FakeClock, source: SilentSource, seconds: float, end_ns: int | None = None
) -> list[int]:
    """Return the ticks (10 a second) at which a source was looked at and the recording ended."""
    end_ns = T0 + round(seconds * SECOND_NS) if end_ns is None else end_ns
    slots = [CollectorRunner(CountingCollector(), TICK_NS, lambda name, error: None)]
    slots[0].open(T0)
    for _ in record_batches(
        slots,
        [source],
        clock,
        Schedule(),
        Budget(10, T0, 0),
        TICK_NS,
        lambda now_ns: "over" if now_ns >= end_ns else "",
        end_ns,
    ):
        pass
    return [(at - T0) * 10 // SECOND_NS for at in source.looks]


def test_with_inotify_sources_are_polled_only_around_flushes() -> None:
    clock = FakeClock()
    clock.wakes_on_files = True
    # flushes at 1.0, 1.8, 2.6 s; at 3.2 s the time is over
    assert looks(clock, SilentSource(), 2.2) == [0, 7, 8, 15, 16, 22]


def test_a_notified_source_is_polled_until_empty() -> None:
    clock = FakeClock()
    clock.wakes_on_files = True
    clock.told_at = {T0 + 3 * TICK_NS}
    left = Busy(T0 + 3 * TICK_NS, T0 + 4 * TICK_NS)
    assert looks(clock, left, 1.0) == [0, 3, 4, 5, 7, 8, 10]


def test_a_recording_end_between_ticks_is_on_time() -> None:
    clock, source = FakeClock(), SilentSource()
    clock.wakes_on_files = True
    looks(clock, source, 0, T0 + 333_000_000)
    assert source.looks == [T0, T0 + 333_000_000]


def test_a_collector_without_devices_is_sampled_every_fifth_tick() -> None:
    class Nothing(ScriptedCollector):
        def sample(self) -> Any:
            super().sample()
            raise NothingNew

    collector = Nothing([], opens=[[]])
    run_service(collector, seconds=1)
    assert collector.calls.count("sample") == 2  # at 1.0 and 1.5 s; at 2.0 s the test is over
    one_device = Nothing([])
    run_service(one_device, seconds=1)
    assert one_device.calls.count("sample") == 10
