"""The loop: wait for the next tick, sample what is due, once in a while hand over what there is.

A generator of records on a given clock. Every collector has its own interval; ticks lie on the
grid `start + k × interval`, so collectors of one rate share a wake-up. A late tick is recorded at
the time it was taken and never invented; ticks that could not be taken are counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from clusterprof.recorder.budget import Budget
from clusterprof.recorder.clock import Clock
from clusterprof.recorder.slot import Slot
from clusterprof.trace.schema import Event, Record

# kill -9 must lose less than a second, the look that a ring lags behind included.
FLUSH_NS = 800_000_000
CLOCK_NS = 10_000_000_000
_NEVER_NS = 1 << 62


class Source(Protocol):
    """Something that makes records of its own: registrations, rings, helpers.

    One in a hurry has a method `look(now_ns)` as well, called at every tick, so it must be cheap.
    """

    def take(self, now_ns: int) -> Sequence[Record]:
        """Return the records since the last call."""
        ...

    def finish(self, now_ns: int) -> Sequence[Record]:
        """Return everything that is left: the recorder ends."""
        ...


@dataclass(slots=True)
class Pace:
    """How well the recorder keeps its own time; the `self` collector records it."""

    late_ns: int = 0
    missed: int = 0
    slowdown: int = 1
    """Intervals are multiplied by this when the recorder exceeds its CPU budget."""


def record(
    slots: Sequence[Slot],
    sources: Sequence[Source],
    clock: Clock,
    pace: Pace,
    budget: Budget,
    tick_ns: int,
    stop: Callable[[int], str],
) -> Iterator[list[Record]]:
    """Yield a recording after its header, batch by batch, until `stop(now_ns)` names a reason.

    `tick_ns` is the longest time between two looks at the sources. Collectors must have been
    opened. The last batch is what is left, the clock, and the event `recorder-stopped`.
    """
    now_ns = clock.now_ns()
    for slot in slots:
        slot.due_ns = max(slot.due_ns, now_ns)
    looks: list[Callable[[int], None]] = [s.look for s in sources if hasattr(s, "look")]
    fast, slow = _tiers(slots)
    fast_due_ns = fast_wake_ns = slow_due_ns = slow_wake_ns = now_ns
    planned_ns = look_ns = flush_ns = now_ns
    clock_ns = now_ns + CLOCK_NS
    while True:
        for look in looks:
            look(now_ns)
        reason = stop(now_ns)
        if reason:
            break
        if now_ns >= fast_due_ns:
            fast_due_ns, fast_wake_ns = _sample(fast, now_ns, clock, pace)
        if now_ns >= slow_due_ns:
            slow_due_ns, slow_wake_ns = _sample(slow, now_ns, clock, pace)
        now_ns = clock.now_ns()
        if planned_ns >= flush_ns:
            # From the grid, not from now: the next flush then shares the wake-up of a tick.
            flush_ns = max(planned_ns + FLUSH_NS, now_ns)
            batch = [*_drain(sources, now_ns), *_take(slots, now_ns)]
            change = budget.check(now_ns, clock.cpu_ns(), pace.slowdown)
            if change is not None:
                pace.slowdown = change.attributes["slowdown"]
                batch.append(change)
            if now_ns >= clock_ns:
                clock_ns = now_ns + CLOCK_NS
                batch.append(clock.read())
            yield batch
        look_ns = _next(look_ns, tick_ns * pace.slowdown, now_ns)
        planned_ns = min(look_ns, fast_wake_ns, slow_wake_ns, flush_ns)
        clock.wait_until(planned_ns)
        now_ns = clock.now_ns()
    last = [record for source in sources for record in source.finish(now_ns)]
    last += _take(slots, now_ns)
    for slot in slots:
        slot.close()
    stopped = Event(now_ns, "recorder-stopped", {"reason": reason, "pid": os.getpid()})
    yield [*last, stopped, clock.read()]


def _tiers(slots: Sequence[Slot]) -> tuple[list[Slot], list[Slot]]:
    """Return those of the shortest interval, and the others, which need no look at every tick."""
    shortest_ns = min((slot.interval_ns for slot in slots), default=0)
    fast = [slot for slot in slots if slot.interval_ns == shortest_ns]
    return fast, [slot for slot in slots if slot.interval_ns > shortest_ns]


def _sample(slots: Sequence[Slot], now_ns: int, clock: Clock, pace: Pace) -> tuple[int, int]:
    """Sample those that are due; return when the next one is, and when it is worth a wake-up.

    One that sees nothing is tried again when somebody else is sampled.
    """
    soonest_ns = wake_ns = _NEVER_NS
    for slot in slots:
        if now_ns >= slot.due_ns:
            t_ns = clock.now_ns()  # the collectors before it took their time
            interval_ns = slot.interval_ns * pace.slowdown
            late_ns = t_ns - slot.due_ns
            missed = late_ns // interval_ns
            pace.late_ns += late_ns
            pace.missed += missed
            slot.due_ns += (missed + 1) * interval_ns
            slot.tick(t_ns)
        due_ns = slot.due_ns
        if due_ns < soonest_ns:
            soonest_ns = due_ns
        if due_ns < wake_ns and slot.status == "available":
            wake_ns = due_ns
    return soonest_ns, wake_ns


def _next(planned_ns: int, interval_ns: int, now_ns: int) -> int:
    return planned_ns + ((now_ns - planned_ns) // interval_ns + 1) * interval_ns


def _drain(sources: Sequence[Source], now_ns: int) -> Iterator[Record]:
    for source in sources:
        yield from source.take(now_ns)


def _take(slots: Sequence[Slot], now_ns: int) -> list[Record]:
    return [record for slot in slots for record in slot.take(now_ns)]
