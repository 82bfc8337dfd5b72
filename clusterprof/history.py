"""What happened when: lost time by cause in equal stretches of the run, waits, and slow steps.

Times are run time: 0 is the start of the run on the clock of all its nodes. For every rank

    sum over stretches of in_step_ns      = RankLedger.in_step_ns
    sum over stretches and causes of lost = RankLedger.lost_ns, to the nanosecond

A cause has the ids of the rank's buckets; time in operations with other ranks, whose causes are
told for the run as a whole, is WAITING.
"""

from __future__ import annotations

from dataclasses import dataclass

WAITING = "waiting-for-ranks"
"""Lost in operations with other ranks: whose fault it was stands in the findings."""


@dataclass(frozen=True, slots=True)
class RankHistory:
    """One rank over the run."""

    rank: int
    """Place in `Report.ranks`."""
    in_step_ns: tuple[int, ...]
    """Time inside steps, by stretch."""
    lost: tuple[tuple[str, tuple[int, ...]], ...]
    """(cause id, "unattributed" or WAITING; lost ns by stretch), the largest first; all together no
    more than `in_step_ns`."""
    step_ends_ns: tuple[int, ...]
    """Ends of steps, or of every nth of them (`History.step_every`)."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One of the longest waits of a rank for another."""

    start_ns: int
    duration_ns: int
    victim: int
    """Place in `Report.ranks`."""
    culprit: int | None
    """Place in `Report.ranks` of the last to come; None when it is not known."""
    cause: str
    """What the culprit was late for; "" when it is not known."""
    step: int | None
    """Number of the step, None when it is not known."""


@dataclass(frozen=True, slots=True)
class SlowStep:
    """One of the slowest steps of the job."""

    number: int
    start_ns: int
    duration_ns: int
    """Of the rank that took longest."""
    rank: int | None
    """Place in `Report.ranks` of the rank that came last; None when it is not known."""
    lost: tuple[tuple[str, int], ...]
    """(cause id or WAITING, lost ns) of all ranks in it, the largest first."""


@dataclass(frozen=True, slots=True)
class History:
    """The run in equal stretches."""

    started_at_ns: int | None
    """Wall clock at run time 0, ns since 1970; None when it is not known."""
    stretch_ns: int
    stretches: int
    ranks: tuple[RankHistory, ...]
    """In the order of `Report.ranks`."""
    waits: tuple[Wait, ...] = ()
    """The longest, by start."""
    slow_steps: tuple[SlowStep, ...] = ()
    """The slowest, slowest first."""
    step_every: int = 1
    """Every so many-th step is in `step_ends_ns`."""
    why_missing: str = ""
    """Reason when there is nothing, or a part is missing."""
    begin_ns: int = 0
    """Run time at which the first stretch begins: 0, but for a part of a run."""
    ended: tuple[tuple[int, int], ...] = ()
    """(place in `Report.ranks`, run time) of ranks that took no more steps while others of their
    job went on: what is lost from then on is lost by fewer ranks, and no change of any."""
