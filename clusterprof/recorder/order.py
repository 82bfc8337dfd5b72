"""What a recorder is asked to do, and what it answers once it records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterprof.errors import UsageError
from clusterprof.linux.roots import Roots
from clusterprof.recorder.plan import Plan

DEFAULT_OUT = "clusterprof-out"
_NS_PER = {"": 1e9, "ms": 1e6, "s": 1e9, "m": 60e9, "min": 60e9, "h": 3600e9, "d": 86400e9}


def parse_duration(text: str) -> int:
    """Return nanoseconds of a duration such as 10m, 90s, 1.5h or 45 (seconds)."""
    stripped = text.strip()
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = stripped[len(number) :].strip()
    try:
        value = float(number) * _NS_PER[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value < 2**62:
        raise UsageError(f"{text!r} is not a duration", "write 90s, 10m or 2h")
    return round(value)


@dataclass(frozen=True, slots=True)
class Order:
    """One recording of one node."""

    out: Path
    """Folder of the recording; the node's sub-folder is made in it."""
    run_dir: Path
    plan: Plan
    job: str
    follow: bool = False
    """End when the last registered process is gone."""
    duration_ns: int | None = None
    """End after this time."""
    pid: int | None = None
    """Attach to this running process."""
    roots: Roots = field(default_factory=Roots)


@dataclass(frozen=True, slots=True)
class Unseen:
    """A collector that sees nothing, and why."""

    collector: str
    kind: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Started:
    """The recorder's answer: it records."""

    folder: Path
    """The node's folder."""
    unseen: Sequence[Unseen]
    emulated: bool
    """True when an accelerator it found is emulated."""
