"""Define the base types of the JSON document of a report, its code profile and its utilization.

`report.document` has all other parts, and the rules for keys.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from clusterprof.report.code import LoaderStage
from clusterprof.report.impact import AdviceCode

Ns = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Factor = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]


def take_from(path: str) -> Meta:
    """Mark a key that is written from another attribute, or an attribute of an attribute."""
    return Meta(extra={"source": path})


def limit_to(characters: int) -> Meta:
    """Mark a key whose strings, at any depth, are cut to a number of characters."""
    return Meta(extra={"characters": characters})


def omit_if_empty() -> Meta:
    """Mark a key that is not written where it is empty."""
    return Meta(extra={"omit_if_empty": True})


FORMAT = "clusterprof-report"
MAX_TEXT_CHARACTERS = 4096  # limit of a string without a mark
MAX_BINS, MAX_CAUSES, MAX_SLOW_STEPS, MAX_WAITS = 240, 16, 20, 20
MAX_LINES, MAX_LINE_TOTALS, MAX_STACKS, MAX_FRAMES, MAX_WORK_LINES = 20, 30, 500, 64, 5


class Document(Struct, frozen=True):
    """A JSON object."""


class Row(Document, frozen=True):
    """A JSON object that is a tuple in the model, with its items in this order."""


class Bucket(Row, frozen=True):
    """Device time of one cause."""

    cause: str
    ns: Ns


class Reason(Row, frozen=True):
    """Time with a reason for what is not known about it."""

    reason: str
    ns: Ns


class Place(Document, frozen=True):
    """A line of code, in a function of a file."""

    file: Annotated[str, limit_to(400)]
    """Path as Python knows it; "<string>" and the like for code without a file."""
    line: Count
    """0 = unknown."""
    function: Annotated[str, limit_to(200)]
    """Qualified name where the interpreter knows it ("Decode.__call__"), else the plain name."""


class CodeLine(Document, frozen=True):
    place: Place
    library: Place | None
    lost_ns: Ns
    share_ratio: Ratio | None
    error_ratio: Ratio | None
    samples: Count
    stage: LoaderStage
    transform: Annotated[str, limit_to(200)]
    library_ratio: Ratio = 1.0
    """Part of the line's time in `library`, or without a call if that is null."""


class LineTime(Document, frozen=True):
    """A line of code, and the device time lost while it ran, over all causes and ranks."""

    place: Place
    cause: str
    """Id of the cause that lost most of it."""
    lost_ns: Ns
    samples: Count


class WorkLine(Document, frozen=True):
    """A line of code, and the step time that training threads worked in it."""

    place: Place
    library: Place | None
    worked_ns: Ns
    share_ratio: Ratio
    """Part of the step time of the ranks whose device was not measured."""
    error_ratio: Ratio
    samples: Count
    library_ratio: Ratio = 1.0


class StackTime(Document, frozen=True):
    cause: str
    rank: Count
    """Index into `ranks` of the report: whose code it is, which may make other ranks wait."""
    places: Annotated[tuple[Count, ...], Meta(max_length=MAX_FRAMES)]
    """Indices into `places` of the profile, outermost first; empty = the stack is not known, or it
    is one of those that are left out.
    """
    lost_ns: Ns
    samples: Count


class UnlistedStacks(Document, frozen=True):
    """Stacks of ranks that are not listed."""

    cause: str
    lost_ns: Ns
    samples: Count


class CodeProfile(Document, frozen=True):
    lines: Annotated[tuple[LineTime, ...], Meta(max_length=MAX_LINE_TOTALS)]
    """Lost time by line of the user's own code, of all stacks, largest first."""
    lines_left_out: Count
    """Number of lines that lost less than those of `lines`."""
    places: tuple[Place, ...]
    """The places of `stacks`."""
    is_library: tuple[bool, ...]
    stacks: tuple[StackTime, ...]
    """The 500 largest, then the sums of the others by cause and rank, without places. Together they
    have the lost time of all stacks of listed ranks; `export --to speedscope` has each of them.
    """
    unlisted_stacks: tuple[UnlistedStacks, ...]
    """The stacks of ranks that are not listed, by cause; empty if all are listed."""
    samples: Count
    why_missing: str
    notes: tuple[str, ...]
    work: Annotated[
        tuple[WorkLine, ...], Meta(max_length=MAX_WORK_LINES), take_from("busiest_lines")
    ] = ()
    """Lines in which the training threads worked longest, of ranks without a measured device."""
    unattributed: Annotated[tuple[CodeLine, ...], Meta(max_length=MAX_WORK_LINES)] = ()
    """Lines that ran while time without a known cause was lost, largest first."""


class UtilizationLevels(Document, frozen=True):
    sm_active_ratio: Ratio | None
    sm_active_p90_ratio: Ratio | None
    sm_occupancy_ratio: Ratio | None
    tensor_active_ratio: Ratio | None
    dram_active_ratio: Ratio | None
    power_ratio: Ratio | None
    memory_used_bytes: Count | None
    memory_total_bytes: Count | None
    host_on_cpu_ratio: Ratio | None


class UtilizationAdvice(Document, frozen=True):
    code: AdviceCode
    text: str
    measured: bool
    confidence_ratio: Ratio | None
    grade: Literal["B", "C"]
    ranks: Count


class RankUtilization(Document, frozen=True):
    node: str
    rank: Count | None
    pid: Count
    device: str
    busy_ns: Ns
    lost_ns: Ns
    filled_ns: Annotated[Ns, take_from("well_used_ns")]
    underfilled_ns: Annotated[Ns, take_from("under_used_ns")]
    unmeasured_ns: Ns
    unmeasured_reasons: Annotated[tuple[Reason, ...], take_from("reasons")]
    levels: UtilizationLevels
    advice: tuple[str, ...]


class UtilizationSum(Document, frozen=True):
    """Device utilization of the ranks that are not listed."""

    ranks: Count
    busy_ns: Ns
    lost_ns: Ns
    filled_ns: Annotated[Ns, take_from("well_used_ns")]
    underfilled_ns: Annotated[Ns, take_from("under_used_ns")]
    unmeasured_ns: Ns
    unmeasured_reasons: Annotated[tuple[Reason, ...], take_from("reasons")]


class DeviceUtilization(Document, frozen=True):
    busy_ns: Ns
    """Time in steps with a kernel resident
    = lost_ns + filled_ns + underfilled_ns + unmeasured_ns.
    """
    lost_ns: Ns
    filled_ns: Annotated[Ns, take_from("well_used_ns")]
    underfilled_ns: Annotated[Ns, take_from("under_used_ns")]
    unmeasured_ns: Ns
    unmeasured_reasons: Annotated[tuple[Reason, ...], take_from("reasons")]
    """Sums to unmeasured_ns."""
    advice: tuple[UtilizationAdvice, ...]
    ranks: tuple[RankUtilization, ...]
    """Ranks whose device was measured; the numbers above are their sums, with `unlisted`. Above 512
    ranks, unless with --full, those that `ranks` of the report has.
    """
    why_missing: str
    unlisted: UtilizationSum | None = None
    """The other ranks whose device was measured; null if all are listed."""
