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


class Source(Protocol):
    """Something that makes records of its own: registrations, rings, helpers."""

    def look(self, now_ns: int) -> None:
        """Notice what is new; called at every tick, so it must be cheap."""
        ...

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
    planned_ns = look_ns = flush_ns = now_ns
    clock_ns = now_ns + CLOCK_NS
    while True:
        for source in sources:
            source.look(now_ns)
        reason = stop(now_ns)
        if reason:
            break
        _sample(slots, now_ns, clock, pace)
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
        due_ns = min((slot.due_ns for slot in slots), default=look_ns)
        planned_ns = min(look_ns, due_ns, flush_ns)
        clock.wait_until(planned_ns)
        now_ns = clock.now_ns()
    last = [record for source in sources for record in source.finish(now_ns)]
    last += _take(slots, now_ns)
    for slot in slots:
        slot.close()
    stopped = Event(now_ns, "recorder-stopped", {"reason": reason, "pid": os.getpid()})
    yield [*last, stopped, clock.read()]


def _sample(slots: Sequence[Slot], now_ns: int, clock: Clock, pace: Pace) -> None:
    for slot in slots:
        if now_ns < slot.due_ns:
            continue
        t_ns = clock.now_ns()  # the collectors before it took their time
        interval_ns = slot.interval_ns * pace.slowdown
        late_ns = t_ns - slot.due_ns
        missed = late_ns // interval_ns
        pace.late_ns += late_ns
        pace.missed += missed
        slot.due_ns += (missed + 1) * interval_ns
        slot.tick(t_ns)


def _next(planned_ns: int, interval_ns: int, now_ns: int) -> int:
    return planned_ns + ((now_ns - planned_ns) // interval_ns + 1) * interval_ns


def _drain(sources: Sequence[Source], now_ns: int) -> Iterator[Record]:
    for source in sources:
        yield from source.take(now_ns)


def _take(slots: Sequence[Slot], now_ns: int) -> list[Record]:
    return [record for slot in slots for record in slot.take(now_ns)]
