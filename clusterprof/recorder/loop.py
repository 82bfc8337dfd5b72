"""The loop: wait for the next tick, sample what is due, once in a while hand over what there is.

A generator of records on a given clock. Every collector has its own interval; ticks lie on the
grid `start + k × interval`, so collectors of one rate share a wake-up. A late tick is recorded at
the time it was taken and never invented; ticks that could not be taken are counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from clusterprof.recorder.budget import Budget
from clusterprof.recorder.clock import Clock
from clusterprof.recorder.slot import Slot
from clusterprof.recorder.tier import NEVER_NS, Pace, tiers
from clusterprof.trace.schema import Event, Record

# kill -9 must lose less than a second, the look that a ring lags behind included.
FLUSH_NS = 800_000_000
CLOCK_NS = 10_000_000_000


class Source(Protocol):
    """Something that makes records of its own: registrations, rings, helpers.

    One in a hurry has a method `look(now_ns)` as well. It is called when the clock has been told
    that something is there, and in the last two ticks before a flush; at every tick when the clock
    is not told. It returns True when it wants to be called again at the next tick.
    """

    def take(self, now_ns: int) -> Sequence[Record]:
        """Return the records since the last call."""
        ...

    def finish(self, now_ns: int) -> Sequence[Record]:
        """Return everything that is left: the recorder ends."""
        ...


def record(
    slots: Sequence[Slot],
    sources: Sequence[Source],
    clock: Clock,
    pace: Pace,
    budget: Budget,
    tick_ns: int,
    stop: Callable[[int], str],
    end_ns: int = NEVER_NS,
) -> Iterator[list[Record]]:
    """Yield a recording after its header, batch by batch, until `stop(now_ns)` names a reason.

    It is asked after the looks at the sources, and at `end_ns`. `tick_ns` is the longest time
    between two looks where the clock is not attentive. Collectors must have been opened. The last
    batch is what is left, the clock, and the event `recorder-stopped`.
    """
    now_ns = clock.now_ns()
    for slot in slots:
        slot.due_ns = max(slot.due_ns, now_ns)
    looks: list[Callable[[int], bool | None]] = [s.look for s in sources if hasattr(s, "look")]
    fast, slow = tiers(slots)
    fast_due_ns = fast_wake_ns = slow_due_ns = slow_wake_ns = now_ns
    planned_ns = look_ns = flush_ns = now_ns
    clock_ns = now_ns + CLOCK_NS
    told = again = False
    while True:
        looked = told or now_ns >= min(look_ns, end_ns)
        if looked:
            again = True in [look(now_ns) for look in looks]
            reason = stop(now_ns)
            if reason:
                break
        if now_ns >= fast_due_ns:
            fast_due_ns, fast_wake_ns = fast.sample(now_ns, clock, pace)
        if now_ns >= slow_due_ns:
            slow_due_ns, slow_wake_ns = slow.sample(now_ns, clock, pace)
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
        if looked:
            look_ns = _next(look_ns, tick_ns * pace.slowdown, now_ns)
            if clock.attentive and not again:
                look_ns = max(look_ns, flush_ns - tick_ns * pace.slowdown)
        planned_ns = min(look_ns, fast_wake_ns, slow_wake_ns, flush_ns, end_ns)
        told = clock.wait_until(planned_ns)
        now_ns = clock.now_ns()
    yield _last(slots, sources, clock, reason)


def _last(
    slots: Sequence[Slot], sources: Sequence[Source], clock: Clock, reason: str
) -> list[Record]:
    now_ns = clock.now_ns()
    last = [record for source in sources for record in source.finish(now_ns)]
    last += _take(slots, now_ns)
    for slot in slots:
        slot.close()
    stopped = Event(now_ns, "recorder-stopped", {"reason": reason, "pid": os.getpid()})
    return [*last, stopped, clock.read()]


def _next(planned_ns: int, interval_ns: int, now_ns: int) -> int:
    return planned_ns + ((now_ns - planned_ns) // interval_ns + 1) * interval_ns


def _drain(sources: Sequence[Source], now_ns: int) -> Iterator[Record]:
    for source in sources:
        yield from source.take(now_ns)


def _take(slots: Sequence[Slot], now_ns: int) -> list[Record]:
    return [record for slot in slots for record in slot.take(now_ns)]
