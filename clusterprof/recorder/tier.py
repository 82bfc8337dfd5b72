"""Collectors in two tiers: those of the shortest interval, and the others.

The slower ones are passed by as a whole until one of them is due. Each keeps its own grid; those
of the fast tier that only read files are read together (`sweep`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterprof.recorder.clock import Clock
from clusterprof.recorder.slot import Slot
from clusterprof.recorder.sweep import Sweep

NEVER_NS = 1 << 62


@dataclass(slots=True)
class Pace:
    """How well the recorder keeps its own time; the `self` collector records it."""

    late_ns: int = 0
    missed: int = 0
    slowdown: int = 1
    """Intervals are multiplied by this when the recorder exceeds its CPU budget."""

    def next_ns(self, due_ns: int, now_ns: int, interval_ns: int, slots: int) -> int:
        """Note how late so many slots are; return when they are due again."""
        interval_ns *= self.slowdown
        late_ns = now_ns - due_ns
        if late_ns < interval_ns:
            self.late_ns += late_ns * slots
            return due_ns + interval_ns
        missed = late_ns // interval_ns
        self.late_ns += late_ns * slots
        self.missed += missed * slots
        return due_ns + (missed + 1) * interval_ns


def tiers(slots: Sequence[Slot]) -> tuple[Tier, Tier]:
    """Return those of the shortest interval, and the others, which need no look at every tick."""
    shortest_ns = min((slot.interval_ns for slot in slots), default=0)
    fast = [slot for slot in slots if slot.interval_ns == shortest_ns]
    slow = [slot for slot in slots if slot.interval_ns > shortest_ns]
    return Tier(fast, Sweep(fast)), Tier(slow, Sweep(()))


class Tier:
    """Slots that are looked at together."""

    def __init__(self, slots: Sequence[Slot], sweep: Sweep) -> None:
        """`sweep`: reads the files of those among them that have one interval."""
        self._slots = slots
        self._sweep = sweep
        self._single: Sequence[Slot] = slots

    def sample(self, now_ns: int, clock: Clock, pace: Pace) -> tuple[int, int]:
        """Sample those that are due; return when the next one is, and when it is worth a wake-up.

        One that sees nothing is tried again when somebody else is sampled.
        """
        soonest_ns = wake_ns = NEVER_NS
        sweep = self._sweep
        if sweep.stale:
            sweep.gather()
            self._single = [slot for slot in self._slots if slot not in sweep.members]
        members = sweep.members
        if members:
            if now_ns >= sweep.due_ns:
                interval_ns = members[0].interval_ns
                sweep.due_ns = pace.next_ns(sweep.due_ns, now_ns, interval_ns, len(members))
                sweep.tick(now_ns)
            soonest_ns = wake_ns = sweep.due_ns
        for slot in self._single:
            if now_ns >= slot.due_ns:
                t_ns = clock.now_ns()  # the collectors before it took their time
                slot.due_ns = pace.next_ns(slot.due_ns, t_ns, slot.interval_ns, 1)
                slot.tick(t_ns)
            due_ns = slot.due_ns
            if due_ns < soonest_ns:
                soonest_ns = due_ns
            if due_ns < wake_ns and slot.status == "available":
                wake_ns = due_ns
        return soonest_ns, wake_ns
