"""Where the kernel's files are: parameters, so that a fixture machine is a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Roots:
    """The mount points of procfs and sysfs."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
