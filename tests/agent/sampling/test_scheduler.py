"""The loop on a fake clock: whole records, hand-computed, in microseconds."""

from __future__ import annotations

import os
from array import array
from typing import Any

import pytest

from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.agent.sampling.scheduler import Budget, OptionalSource, Schedule, record_batches
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import CPU_USER
from clusterprof.trace.schema import Clock, Columns, Event, Gap, Record, Rows
from tests.support.recording_fakes import (
    BOOT_AHEAD_NS,
    EPOCH_NS,
    SECOND_NS,
    T0,
    TICK_NS,
    CountingCollector,
    FakeClock,
    ScriptedCollector,
    SilentSource,
    TableCollector,
    run_service,
)


def columns(t_ns: list[int], user: list[int], runnable: list[int], **masks: Any) -> Columns:
    return Columns(
        "scripted",
        ("cpu.user_ns_total", "cpu.runnable_count"),
        ("all", ""),
        array("q", t_ns),
        [array("q", user), array("q", runnable)],
        [masks.get("user_mask"), None],
    )


def ending(t_ns: int) -> list[Record]:
    return [
        Event(t_ns, "recorder-stopped", {"reason": "the test is over", "pid": os.getpid()}),
        Clock(t_ns, t_ns + BOOT_AHEAD_NS, t_ns + EPOCH_NS),
    ]


def test_the_first_sample_is_flushed_immediately() -> None:
    records = run_service(ScriptedCollector([[1, 2], [3, 4], [5, 6]]))
    # Ticks at 1.0, 1.1, 1.2 s; at 1.3 s the test is over. The first tick is flushed at once.
    assert records == [
        columns([T0], [1], [2]),
        columns([T0 + TICK_NS, T0 + 2 * TICK_NS], [3, 5], [4, 6]),
        *ending(T0 + 3 * TICK_NS),
    ]


def test_flushes_come_often_enough_to_lose_less_than_a_second() -> None:
    records = run_service(CountingCollector(), seconds=3)
    last_of_each = [record.t_ns[-1] for record in records if isinstance(record, Columns)]
    # 1.0, then every 0.8 s: 1.8, 2.6, 3.4, and what is left at the end (3.9)
    assert last_of_each == [
        T0,
        T0 + 8 * TICK_NS,
        T0 + 16 * TICK_NS,
        T0 + 24 * TICK_NS,
        T0 + 29 * TICK_NS,
    ]


def test_a_flush_shares_the_wake_up_of_a_tick() -> None:
    clock = FakeClock(late_ns=2_000_000)
    records = run_service(CountingCollector(), clock=clock, seconds=8)
    assert clock.waits == 80  # ten a second, and none for a flush
    assert sum(isinstance(record, Columns) for record in records) == 11  # 8 s / 0.8 s, and the rest


def test_two_sampling_rates_share_a_loop() -> None:
    fast, slow = CountingCollector(), ScriptedCollector([[1, 1], [2, 2], [3, 3]])
    clock, note = FakeClock(), lambda name, error: None
    slots = [CollectorRunner(fast, TICK_NS, note), CollectorRunner(slow, 10 * TICK_NS, note)]
    for slot in slots:
        slot.open(T0)
    end_ns = T0 + 2 * SECOND_NS
    for _ in record_batches(
        slots,
        [],
        clock,
        Schedule(),
        Budget(10, T0, 0),
        TICK_NS,
        lambda now_ns: "over" if now_ns > end_ns else "",
    ):
        pass
    assert fast.count == 21  # 1.0, 1.1 … 3.0 s
    assert slow.calls == ["open", "sample", "sample", "sample", "close"]  # 1.0, 2.0, 3.0 s


def test_late_ticks_are_recorded_late_and_counted() -> None:
    pace = Schedule()
    records = run_service(
        ScriptedCollector([[1, 1], [2, 2], [3, 3]]), clock=FakeClock(late_ns=7_000_000), pace=pace
    )
    taken = [t for record in records if isinstance(record, Columns) for t in record.t_ns]
    # 1.0 on time; 1.1 and 1.2 planned, each taken 7 ms late, and the grid does not drift
    assert taken == [T0, T0 + 107_000_000, T0 + 207_000_000]
    assert pace == Schedule(late_ns=2 * 7_000_000, missed=0)


def test_missed_ticks_are_counted_without_invented_samples() -> None:
    clock, pace = FakeClock(), Schedule()

    class Slow(CountingCollector):
        def sample(self) -> list[int]:
            if self.count == 0:
                clock.t_ns += 350_000_000  # the first sample takes 0.35 s
            return list(super().sample())

    records = run_service(Slow(), clock=clock, pace=pace, seconds=0.45)
    taken = [t for record in records if isinstance(record, Columns) for t in record.t_ns]
    # Begun at 1.0, it ends at 1.35: the tick of 1.1 is taken then, 0.25 s late; those of 1.2 and
    # 1.3 were missed; 1.4 is on time.
    assert taken == [T0, T0 + 350_000_000, T0 + 4 * TICK_NS]
    assert pace == Schedule(late_ns=250_000_000, missed=2)


def test_clock_frames_come_every_ten_seconds() -> None:
    records = run_service(CountingCollector(), seconds=21)
    clocks = [record.monotonic_ns for record in records if isinstance(record, Clock)]
    # flushes lie on multiples of 0.8 s: the first at or after 10 s is 10.4; 10 s later 20.8; end 21
    assert clocks == [T0 + 10_400_000_000, T0 + 20_800_000_000, T0 + 21 * SECOND_NS]


def test_an_unreadable_value_is_masked_with_a_reason_reported_once() -> None:
    why = Unavailable("denied", "no permission", "ask")
    other = Unavailable("failed", "I/O error")
    records = run_service(
        ScriptedCollector([[1, 1], [why, 2], [why, 3], [other, 4], [5, 5]]), seconds=0.45
    )
    assert records == [
        columns([T0], [1], [1]),
        Gap(T0 + TICK_NS, "scripted", "cpu.user_ns_total", "all", "denied", "no permission", "ask"),
        Gap(T0 + 3 * TICK_NS, "scripted", "cpu.user_ns_total", "all", "failed", "I/O error", ""),
        columns(
            [T0 + k * TICK_NS for k in (1, 2, 3, 4)],
            [0, 0, 0, 5],
            [2, 3, 4, 5],
            user_mask=b"\1\1\1\0",
        ),
        *ending(T0 + 5 * TICK_NS),
    ]


def test_a_failed_tick_is_a_gap_of_the_whole_collector() -> None:
    why = Unavailable("failed", "gone for now")
    records = run_service(ScriptedCollector([[1, 1], why, why, [4, 4], why]), seconds=0.45)
    gap = Gap(T0 + TICK_NS, "scripted", "", "", "failed", "gone for now", "")
    again = Gap(T0 + 4 * TICK_NS, "scripted", "", "", "failed", "gone for now", "")
    assert records == [
        columns([T0], [1], [1]),
        gap,
        again,  # there was a value between, so the same reason is news
        columns([T0 + 3 * TICK_NS], [4], [4]),
        *ending(T0 + 5 * TICK_NS),
    ]


def test_a_tick_without_new_values_is_not_a_gap() -> None:
    why = Unavailable("failed", "gone for now")
    records = run_service(
        ScriptedCollector([[1, 1], NothingNew(), why, NothingNew(), why]), seconds=0.45
    )
    gap = Gap(T0 + 2 * TICK_NS, "scripted", "", "", "failed", "gone for now", "")
    # The reason still holds when nothing came between, so it is not recorded twice.
    assert records == [columns([T0], [1], [1]), gap, *ending(T0 + 5 * TICK_NS)]


def test_changed_devices_reopen_the_collector_with_new_columns() -> None:
    opens = [[(CPU_USER, "cpu0")], [(CPU_USER, "cpu0"), (CPU_USER, "cpu1")]]
    records = run_service(
        ScriptedCollector([[1], DevicesChanged(), [2, 3], [4, 5]], opens), seconds=0.25
    )
    series = [
        (record.devices, list(record.t_ns)) for record in records if isinstance(record, Columns)
    ]
    assert series == [
        (("cpu0",), [T0]),
        (("cpu0", "cpu1"), [T0 + TICK_NS, T0 + 2 * TICK_NS]),  # no tick is lost to the change
    ]


def test_devices_that_appear_later_are_announced() -> None:
    class Growing(ScriptedCollector):
        def inventory(self) -> list[dict[str, Any]]:
            count = self.calls.count("open")
            return [{"id": f"emulated-{n}", "emulated": True} for n in range(count)]

    collector = Growing([[1, 1], DevicesChanged(), [2, 2]])
    slot = CollectorRunner(collector, TICK_NS, lambda name, error: None)
    slot.open(T0)
    assert slot.devices_for_header() == [{"id": "emulated-0", "emulated": True}]
    slot.tick(T0)
    slot.tick(T0 + TICK_NS)
    assert slot.take(T0 + TICK_NS) == [
        columns([T0], [1], [1]),
        Event(T0 + TICK_NS, "device-appeared", {"id": "emulated-1", "emulated": True}),
        columns([T0 + TICK_NS], [2], [2]),  # no tick is lost to the change
    ]


def test_tables_keep_their_rows_and_strings() -> None:
    records = run_service(TableCollector([[(1, 7, 0), (1, 8, -1)], [], [(3, 7, 0)]]))
    names, strings = ("t_ns", "pid", "wchan"), {"wchan": ("futex_wait",)}
    rows = [array("q", [1, 1]), array("q", [7, 8]), array("q", [0, -1])]
    assert records == [
        Rows("table", names, rows, strings),
        Rows("table", names, [array("q", [3]), array("q", [7]), array("q", [0])], strings),
        *ending(T0 + 3 * TICK_NS),
    ]


ANYTHING = [
    ValueError("x"),
    SystemExit(3),
    KeyboardInterrupt(),
    MemoryError(),
    GeneratorExit(),
    RecursionError(),
    OSError(5, "Input/output error"),
    StopIteration(),
    [1],
    [1, 2, 3],
    None,
    ["a", "b"],
    [None, 1],
    [1 << 70, 1],
    object(),
]


@pytest.mark.parametrize("wrong", ANYTHING, ids=lambda wrong: repr(wrong).split(" at ")[0][:24])
def test_a_misbehaving_collector_does_not_affect_another(wrong: Any) -> None:
    notes: list[str] = []
    records = run_service(
        ScriptedCollector([wrong] * 40),
        CountingCollector(),
        seconds=3,
        note=lambda name, error: notes.append(name),
    )
    good = [
        value
        for record in records
        if isinstance(record, Columns) and record.collector == "counting"
        for value in record.values[0]
    ]
    assert good == list(range(1, 31))  # every one of the 30 ticks
    gaps = [record for record in records if isinstance(record, Gap)]
    assert {gap.collector for gap in gaps} == {"scripted"}
    assert {gap.kind for gap in gaps} == {"failed"}
    assert notes.count("counting") == 0


def test_a_faulty_collector_pauses_longer_each_time() -> None:
    collector = ScriptedCollector([ValueError(str(n)) for n in range(100)])
    run_service(collector, seconds=9)
    # Three faults (1.0, 1.1, 1.2 s) and it is closed; rests of 1, 2 and 4 s follow, each ended by
    # open and three faults: 1.2 + 1 -> 2.2 open, 2.3-2.5; + 2 -> 4.5 open; + 4 -> 8.8 open, …
    cycle = ["open", "sample", "sample", "sample", "close"]
    assert collector.calls == cycle * 4


def test_a_collector_that_cannot_be_opened_is_retried() -> None:
    absent = Unavailable("absent", "no such hardware")
    collector = ScriptedCollector([], opens=[absent, absent])
    records = run_service(collector, seconds=0.5)
    # at 1.0 s; 0.1 s later; 0.2 s after that it opens and is sampled, at 1.3 s
    assert collector.calls[:4] == ["open", "open", "open", "sample"]
    assert [record for record in records if isinstance(record, Gap)] == [
        Gap(T0, "scripted", "", "", "absent", "no such hardware", "")
    ]


def test_a_recorder_over_its_budget_halves_and_reports_its_rate() -> None:
    clock, collector, pace = FakeClock(), CountingCollector(), Schedule()
    clock.used_ns = 0

    class Hungry(CountingCollector):
        def sample(self) -> list[int]:
            clock.used_ns += 4_000_000  # 4 ms per tick at 10 Hz: 4 % of a core, budget 3 %
            return list(super().sample())

    collector = Hungry()
    records = run_service(collector, clock=clock, pace=pace, seconds=61)
    slowed = [
        record
        for record in records
        if isinstance(record, Event) and record.kind != "recorder-stopped"
    ]
    assert [(event.kind, event.attributes["slowdown"]) for event in slowed] == [
        ("recorder-slowed", 2)
    ]
    assert abs(slowed[0].attributes["cpu_ratio"] - 0.04) < 0.001
    # 30.4 s (the first flush after the window) at 10 Hz, the rest at 5 Hz: 2 % is within budget
    assert collector.count in range(304 + 152, 304 + 156)
    assert pace.slowdown == 2


def test_registrations_are_read_at_the_start_and_the_end() -> None:
    source, clock = SilentSource(), FakeClock()
    stops = iter(["", "", "over"])
    batches = record_batches(
        [], [source], clock, Schedule(), Budget(10, T0, 0), TICK_NS, lambda _: next(stops)
    )
    assert len(list(batches)) == 2
    assert source.looks == [T0, T0 + TICK_NS, T0 + 2 * TICK_NS]


@pytest.mark.parametrize("method", ["take", "finish"])
def test_the_first_error_of_an_optional_source_ends_it_and_is_logged(method: str) -> None:
    class Broken:
        calls = 0

        def take(self, now_ns: int) -> list[Record]:
            self.calls += 1
            raise OSError("no space left")

        finish = take

    broken, errors = Broken(), []
    source = OptionalSource(
        "autopsy", broken, lambda name, error: errors.append((name, str(error)))
    )
    assert [*getattr(source, method)(0), *source.take(1), *source.finish(2)] == []
    assert (broken.calls, errors) == (1, [("autopsy", "no space left")])


def test_an_optional_source_is_polled_until_the_first_error() -> None:
    class Looking(SilentSource):
        def look(self, now_ns: int) -> bool:  # type: ignore[override]
            super().look(now_ns)
            if now_ns > 1:
                raise OSError("no descriptors")
            return True

    looking, errors = Looking(), []
    source = OptionalSource("dumps", looking, lambda name, error: errors.append(name))
    assert [source.look(now_ns) for now_ns in (1, 2, 3)] == [True, False, False]
    assert (looking.looks, errors) == ([1, 2], ["dumps"])


def test_an_optional_source_without_look_has_nothing_pending() -> None:
    class Blind:
        def take(self, now_ns: int) -> list[Record]:
            return []

        finish = take

    assert not OptionalSource("autopsy", Blind(), lambda name, error: None).look(1)
