"""What could be better, and who can do it."""

from __future__ import annotations

from dataclasses import dataclass

YOU = "you"
JOB = "job"
ADMIN = "cluster admin"


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that somebody can change."""

    about: str
    """devices, affinity, files, fabric, kernel, sources."""
    message: str
    """What is amiss, and what it costs."""
    remedy: str
    owner: str
    """YOU (an option, a variable, a package), JOB (how the job is submitted), ADMIN."""
