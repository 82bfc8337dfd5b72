"""Define the life of a job: its wall time from submission to end, over all restarts and recordings.

    wall time x devices = the sum of all parts, to the nanosecond

    device 0   queue | start-up |== training ==| down | restart |== done twice ==|== training ==|
    device 1   queue | start-up |== training ==| down | restart |== done twice ==|== training ==|

The parts are in the order in which they are taken off: what is left at the end is training that
counts. A part that is not known has no time; what it took is in another part, which `why_missing`
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

QUEUED, STARTUP, DOWN, RESTART, HANG = "queued", "startup", "down", "restart", "hang"
AFTER, UNMEASURED, CHECKPOINT = "after", "unmeasured", "checkpoint"
EVALUATION, LOST, REPEATED, TRAINING = "evaluation", "lost", "repeated", "training"

LIFE_PARTS: Mapping[str, str] = {
    QUEUED: "in the queue",
    STARTUP: "starting up",
    DOWN: "down between attempts",
    RESTART: "starting up again",
    HANG: "hung",
    AFTER: "after the last step",
    UNMEASURED: "not measured",
    CHECKPOINT: "checkpoints",
    EVALUATION: "evaluation, logging",
    LOST: "lost to other causes",
    REPEATED: "training done again",
    TRAINING: "training",
}
"""Parts of a life, in order, and what each is in words."""


@dataclass(frozen=True, slots=True)
class LifePart:
    """One part of the life of a job."""

    name: str
    """A key of `LIFE_PARTS`."""
    ns: int | None
    """Device time; None = not known."""
    why_missing: str = ""
    """Why it is not known, or not all of it, and what to do."""

    @property
    def title(self) -> str:
        """Return what the part is, in words."""
        return LIFE_PARTS[self.name]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at the job, from a start of its ranks to their end."""

    start_ns: int
    """First record of its ranks, ns after the beginning of the life."""
    end_ns: int
    """Last record of its ranks, ns after the beginning of the life."""
    ranks: int
    """Number of ranks that were recorded."""
    steps: int
    """Steps of the rank with the most."""
    first_job_step: int | None
    """The job's own number of its first step; None = not known."""
    repeated_steps: int | None
    """Its steps that a later attempt did again, of the rank with the most; None = not known."""
    ended: str
    """How it ended ("exit status 1", "signal 9"), from the first rank that failed; "" = no failure
    was seen.
    """


@dataclass(frozen=True, slots=True)
class Life:
    """The life of a job."""

    begin_at_ns: int
    """Wall clock of its beginning: its submission, if that is known. ns since 1970."""
    wall_ns: int
    """From its beginning to the last record."""
    devices: int
    """Devices held: ranks that ran in any attempt, one device each."""
    total_ns: int
    """`wall_ns` times `devices`; the sum of all parts."""
    parts: tuple[LifePart, ...]
    """Every part, in the order of `LIFE_PARTS`."""
    attempts: tuple[Attempt, ...]
    """In the order in which they ran."""
    why_missing: str = ""
    """Why there is no life ("two jobs were given"); then the rest is empty."""
