"""Define where in the code the lost device time went: lines per finding, and stacks of the job.

Python stacks of the training thread and of the data workers are sampled while the job runs, or are
taken from an imported trace. Each sample within lost time carries a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LoaderStage = Literal["", "dataset", "transform", "collate", "pin"]


@dataclass(frozen=True, slots=True)
class CodeLocation:
    """A line of code, in a function of a file."""

    file: str
    """Path as Python knows it; "<string>" and the like for code without a file."""
    line: int
    """0 = unknown."""
    function: str
    """Qualified name where the interpreter knows it ("Decode.__call__"), else the plain name."""


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of the user's own code, and the device time lost while it ran."""

    place: CodeLocation
    """The innermost line outside the standard library and installed packages; where the stack has
    none, the outermost line that is known."""
    library: CodeLocation | None
    """The line of the library that it called; None where it called none."""
    lost_ns: int
    """Device time lost while this line ran, in ns."""
    share_ratio: float
    """Part of the finding's lost time, 0 to 1."""
    error_ratio: float
    """Half width of the 95 % interval of `share_ratio`, from the number of samples."""
    samples: int
    """Number of samples behind it."""
    stage: LoaderStage = ""
    """Stage of the data loader in which it ran; "" outside a loader."""
    transform: str = ""
    """Transform of a composed pipeline in which it ran ("Resize"); "" when there is none."""
    library_ratio: float = 1.0
    """Part of the line's time in `library`, or without a call if that is None, 0 to 1."""


@dataclass(frozen=True, slots=True)
class WorkLine:
    """A line of the user's own code, and the step time that the training thread worked in it."""

    place: CodeLocation
    """As in `CodeLine`."""
    library: CodeLocation | None
    """As in `CodeLine`."""
    worked_ns: int
    """Step time that was not lost while this line ran, over all ranks, in ns."""
    share_ratio: float
    """Part of the step time of these ranks, 0 to 1."""
    error_ratio: float
    """Half width of the 95 % interval of `share_ratio`, from the number of samples."""
    samples: int
    library_ratio: float = 1.0
    """As in `CodeLine`."""


@dataclass(frozen=True, slots=True)
class StackTime:
    """Device time lost under one stack."""

    cause: str
    """Cause id, or "unattributed"."""
    rank: int
    """Index into `Report.ranks`: whose code it is, which may make other ranks wait."""
    places: tuple[int, ...]
    """Indices into `CodeProfile.places`, outermost first; empty = the stack is not known."""
    lost_ns: int
    samples: int
    user_place: int = -1
    """Index of the place that its user can change, as in `CodeLine.place`; -1 = not known."""


@dataclass(frozen=True, slots=True)
class CodeProfile:
    """The stacks of all ranks in which device time was lost."""

    places: tuple[CodeLocation, ...] = ()
    is_library: tuple[bool, ...] = ()
    """Of each place, whether its file is of the standard library or an installed package."""
    stacks: tuple[StackTime, ...] = ()
    """Largest first; small ones are merged into their common outer frames."""
    samples: int = 0
    """Number of samples of all processes."""
    busiest_lines: tuple[WorkLine, ...] = ()
    """Lines in which the training threads worked longest, of ranks whose device was not measured:
    what they compute counts as work, whatever it is. Largest first."""
    unattributed: tuple[CodeLine, ...] = ()
    """Lines that ran while time without a known cause was lost; largest first."""
    why_missing: str = ""
    """Why there are no stacks; "" where there are some."""
    notes: tuple[str, ...] = field(default=())
    """What was not sampled, as sentences."""
