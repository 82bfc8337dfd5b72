"""Collectors that read at a tick and are understood later: nothing is lost, moved or mixed up."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, ClassVar

from clusterprof.agent.collectors.base import DeferredCollector
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import CPU_RUNNABLE, Signal
from clusterprof.trace.schema import Columns, Gap, Record

SECOND_NS = 1_000_000_000
HIDDEN = Unavailable("denied", "hidden", "ask")


class Later(DeferredCollector):
    """One column per device; what is read is the devices of that moment, each with its value.

    An exception among the readings is raised by `read()`, one in a tuple by `parse()`.
    """

    name: ClassVar[str] = "later"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, readings: Sequence[Any], devices: Sequence[Sequence[str]]) -> None:
        self._readings, self._devices = list(readings), list(devices)
        self.opens = 0
        self.parsed = 0

    def open(self) -> Sequence[tuple[Signal, str]]:
        self._open = self._devices[min(self.opens, len(self._devices) - 1)]
        self.opens += 1
        return [(CPU_RUNNABLE, device) for device in self._open]

    def read(self) -> Any:
        reading = self._readings.pop(0)
        if isinstance(reading, BaseException):
            raise reading
        return reading

    def parse(self, reading: Any) -> Sequence[int]:
        self.parsed += 1
        if isinstance(reading, tuple):
            raise reading[0]
        if list(reading) != list(self._open):
            raise DevicesChanged
        return list(reading.values())

    def close(self) -> None:
        self._open = ()


def taken(collector: Later, ticks: int, notes: list[Any] | None = None) -> list[Record]:
    """Tick at 1, 2, 3 … s, and flush once after them."""
    recorded: list[Any] = [] if notes is None else notes
    slot = CollectorRunner(collector, SECOND_NS, lambda name, error: recorded.append(error))
    slot.open(0)
    for second in range(1, ticks + 1):
        slot.tick(second * SECOND_NS)
    return slot.take((ticks + 1) * SECOND_NS)


def series(devices: Sequence[str], seconds: Sequence[int], *values: Sequence[int]) -> Columns:
    times = array("q", [second * SECOND_NS for second in seconds])
    columns = [array("q", cells) for cells in values]
    names = ("cpu.runnable_count",) * len(devices)
    return Columns("later", names, tuple(devices), times, columns, [None] * len(devices))


def test_readings_keep_their_times_and_are_parsed_at_the_flush() -> None:
    collector = Later([{"a": 3}, {"a": 5}], [["a"]])
    slot = CollectorRunner(collector, SECOND_NS, lambda name, error: None)
    slot.open(0)
    slot.tick(SECOND_NS)
    slot.tick(2 * SECOND_NS)
    assert collector.parsed == 0
    assert slot.take(3 * SECOND_NS) == [series("a", [1, 2], [3, 5])]
    assert slot.take(4 * SECOND_NS) == []


def test_changed_devices_between_flushes_split_the_series() -> None:
    collector = Later([{"a": 1}, {"a": 2, "b": 7}, {"a": 3, "b": 8}], [["a"], ["a", "b"]])
    assert taken(collector, 3) == [series("a", [1], [1]), series("ab", [2, 3], [2, 3], [7, 8])]
    assert collector.opens == 2


def test_readings_of_a_device_that_disappeared_again_are_dropped() -> None:
    # "b" was there at 2 s only; when that comes to light there is "a" alone again
    collector = Later([{"a": 1}, {"a": 2, "b": 7}, {"a": 3}], [["a"]])
    notes: list[Any] = []
    assert taken(collector, 3, notes) == [series("a", [1], [1]), series("a", [3], [3])]
    assert notes == []


def test_devices_that_never_match_suspend_the_collector() -> None:
    collector = Later([{"b": n} for n in range(9)], [["a"]])
    notes: list[Any] = []
    slot = CollectorRunner(collector, SECOND_NS, lambda name, error: notes.append(error))
    slot.open(0)
    gaps: list[Record] = []
    for flush in range(3):
        slot.tick((3 * flush + 1) * SECOND_NS)
        slot.tick((3 * flush + 2) * SECOND_NS)
        gaps += slot.take((3 * flush + 3) * SECOND_NS)
    assert [(type(gap), gap.t_ns, gap.kind) for gap in gaps] == [  # type: ignore[union-attr]
        (Gap, second * SECOND_NS, "failed") for second in (2, 5, 8)
    ]
    assert (slot.status, collector.opens, len(notes)) == ("failed", 4, 3)
    assert slot.due_ns == 8 * SECOND_NS + SECOND_NS


def test_a_reason_found_while_parsing_becomes_a_timed_gap() -> None:
    collector = Later([{"a": 1}, (HIDDEN,), (HIDDEN,), {"a": 4}, (HIDDEN,)], [["a"]])
    gap = ("later", "", "", "denied", "hidden", "ask")
    assert taken(collector, 5) == [
        Gap(2 * SECOND_NS, *gap),
        Gap(5 * SECOND_NS, *gap),  # anew: it had been seen in between
        series("a", [1, 4], [1, 4]),
    ]


def test_readings_around_a_failure_are_kept_with_its_gap() -> None:
    collector = Later([{"a": 1}, HIDDEN, HIDDEN, {"a": 4}, NothingNew()], [["a"]])
    assert taken(collector, 5) == [
        Gap(2 * SECOND_NS, "later", "", "", "denied", "hidden", "ask"),  # once
        series("a", [1, 4], [1, 4]),
    ]


def test_changed_devices_are_read_again_in_the_same_tick() -> None:
    collector = Later([{"a": 1}, DevicesChanged(), {"b": 2}], [["a"], ["b"]])
    assert taken(collector, 2) == [series("a", [1], [1]), series("b", [2], [2])]


def test_three_unparsable_readings_suspend_the_collector() -> None:
    collector = Later([(ValueError("odd"),)] * 4, [["a"]])
    notes: list[Any] = []
    assert taken(collector, 4, notes) == [
        Gap(SECOND_NS, "later", "", "", "failed", "ValueError: odd", "report this as a bug")
    ]
    assert (collector.parsed, [str(note) for note in notes]) == (3, ["odd"])
