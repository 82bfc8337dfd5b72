"""Cause, Evidence, Finding, Blind, Report: all that renderers, gate and compare may see.

The ledger behind a report, for every rank and for the sum of all ranks, to the nanosecond:

    window_ns  = unmeasured_ns + outside_ns + in_step_ns
    in_step_ns = productive_ns + lost_ns
    lost_ns    = sum of the `lost_ns` of all in-step buckets, "unattributed" among them
    outside_ns = sum of the buckets outside steps (start-up before the first step, and the rest)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from clusterprof.advice import Advice
from clusterprof.beside import Beside
from clusterprof.history import History
from clusterprof.likeness import Likeness
from clusterprof.persistence import Persistence, Since
from clusterprof.stepstats import StepStats
from clusterprof.underfill import Underfill
from clusterprof.worth import Worth

Grade = Literal["A", "B", "C", "D"]
UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True)
class Cause:
    """A named pattern of lost time; reads well after "the GPU waited:"."""

    id: str
    """Kebab-case identity: file name, page and profile key ("storage-local")."""
    family: str
    """Top-level group the cause rolls up to ("storage", "cpu", "h2d", "unattributed", …)."""
    title: str
    """One line that a report can print as a headline, without a full stop."""
    advice: str
    """The first thing to do about it, as an instruction."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number behind a claim."""

    name: str
    """What was measured: a signal's name, or a derived quantity named in the same style."""
    value: float
    """The number, in canonical units."""
    unit: str
    """Canonical unit, a word of `clusterprof.units`."""
    note: str = ""
    """What it says about the cause, as half a sentence."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """Whose cause it was."""

    node: str
    """Display name of the node."""
    rank: int | None
    """Global rank; None when the process had none."""
    device: str
    """The accelerator of that rank; "" when none was measured."""
    resource: str = ""
    """The disk, mount, NIC or worker behind it ("vda", "/data", "worker 1 (pid 4711)")."""
    own_ns: int | None = None
    """Device time of the cause that it lost itself; None when it is not known."""
    others_ns: int | None = None
    """Device time that ranks lost waiting for it; None when ranks were not compared."""
    victims: int | None = None
    """How many others waited for it, at least a tenth of what the one did that waited longest."""
    recoverable_ns: int | None = None
    """Device time of all ranks won back when this culprit alone is in time."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The slow steps of a job, and who set them."""

    steps: int
    """Steps of the rank whose steps were looked at."""
    slow: int
    """How many of them were looked at: the slowest hundredth, and at least the slowest few."""
    p50_ns: int | None
    """Step time over all ranks that half of the steps do not exceed."""
    p99_ns: int | None
    set_by: tuple[tuple[str, int | None, int], ...] = ()
    """(node, rank, slow steps it set by coming last), most first."""
    why_missing: str = ""
    """Reason when it cannot be told who set them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause with the device time it took."""

    cause: Cause
    """What it was."""
    lost_ns: int
    """Device time attributed to the cause inside steps, or outside when `outside_steps`."""
    share_ratio: float
    """`lost_ns` over the in-step time (over the window when `outside_steps`)."""
    recoverable_ns: int | None
    """Device time that fixing only this wins: how much sooner the job ends (`CauseWorth.saved_ns`),
    of all its devices; else what attribution adds up to, at least; None when it cannot be said."""
    confidence_ratio: float
    """How sure we are of the cause, 0 to 1 (not how large it is)."""
    grade: Grade
    """A marker and counter agree, B one direct signal, C correlation only, D prior."""
    upper_bound: bool
    """True when the loss is known only as "at most", because no device was measured."""
    outside_steps: bool
    """True for time before the first or after the last step."""
    culprits: tuple[Culprit, ...] = ()
    """Largest first."""
    evidence: tuple[Evidence, ...] = ()
    """Two or three numbers a reader can check."""
    persistence: Persistence | None = None
    """None when hardly anybody waited because of it, or the run was too short to tell."""
    advice: tuple[Advice, ...] = ()
    """What to do, the best first; empty when the evidence speaks for nothing."""
    compared: Beside | None = None
    """What tells the culprits from the others; None where that was not measured on both."""
    withheld: tuple[str, ...] = ()
    """What a reader may expect to be advised, and why it is not: sentences without a full stop."""
    more_why: str = ""
    """Why `recoverable_ns` is more than `lost_ns`; "" where it is not."""
    since: Since | None = None
    """When it began; None where it was there from the start, came and went, or is not known."""


@dataclass(frozen=True, slots=True)
class Blind:
    """Something that could not be seen, and what would let us see it."""

    what: str
    """Collector, signal or cause that is missing."""
    kind: str
    """absent, denied or failed (see `errors.Unavailable`), or "lost" for damaged records."""
    message: str
    """What happened."""
    remedy: str
    """What to do; "" when nothing can be done."""


@dataclass(frozen=True, slots=True)
class RankLedger:
    """Where the device time of one rank went."""

    node: str
    """Display name of the node."""
    rank: int | None
    """Global rank, None if unknown."""
    pid: int
    """Process id of the training process on its node."""
    device: str
    """Accelerator id; "" when none was measured."""
    source: str
    """Where lost time was measured: "kernel-timeline", "stream-events", "device-samples",
    "host-spans" (an upper bound)."""
    window_ns: int
    """Observed device time, from the first to the last record of the rank."""
    unmeasured_ns: int
    """Time in which the device was not measured: neither busy nor idle."""
    outside_ns: int
    """Time before the first and after the last step."""
    in_step_ns: int
    """Time inside steps."""
    productive_ns: int
    """In-step time that was not lost."""
    lost_ns: int
    """In-step time that was lost; the sum of `buckets`."""
    buckets: tuple[tuple[str, int], ...]
    """(cause id, lost ns) inside steps, "unattributed" included; sums to `lost_ns`."""
    outside_buckets: tuple[tuple[str, int], ...]
    """(cause id, ns) outside steps; sums to `outside_ns`."""
    steps: int
    """Steps seen."""
    coverage_ratio: float
    """Share of the window for which the needed samples exist."""
    caused: tuple[tuple[str, int], ...] = ()
    """(cause id, ns): what it lost by itself, and what ranks lost waiting for it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number a gate may test, or the reason why there is none."""

    name: str
    """Dotted, with the unit as suffix ("gpu.busy_ratio", "stall.storage_ratio")."""
    value: float | None
    """In canonical units; None when it could not be determined."""
    unit: str
    """Canonical unit."""
    why_missing: str = ""
    """Reason when `value` is None."""
    bound: Literal["exact", "at most", "at least"] = "exact"
    """What `value` is when no device was measured: the truth lies on one side of it."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One recorded machine."""

    name: str
    """Display name."""
    key: str
    """Name of its folder in the recording."""
    boot_id: str
    """Kernel boot id."""
    duration_ns: int
    """Recorded time."""
    damaged_bytes: int
    """Bytes of the recording that could not be read."""
    dropped_spans: int
    """Spans produced and not stored."""
    recorder_cpu_ratio: float | None
    """CPU time of the recorder over the recorded time; None if unknown."""
    named: bool = True
    """False: of an imported trace that says no host; `name` is then the file's."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What was recorded of the job."""

    world_size: int | None
    """Ranks it has by its own account; None when it gave none."""
    gpus: int
    """Accelerators that were measured."""
    coverage_ratio: float | None
    """Share of the ranks' time for which the needed samples exist; None without ranks."""
    clock_bound_ns: int | None = None
    """The clocks of its nodes were aligned to within this; None when they were not."""
    clock_why: str = ""
    """Why they were not; "" on one node, where one clock is enough."""


@dataclass(frozen=True, slots=True)
class Report:
    """What an analysis found: everything an output or a verdict is made from."""

    title: str
    """The recording's path as the user gave it."""
    emulated: bool
    """True when any accelerator was emulated; every output says so."""
    nodes: tuple[NodeFacts, ...]
    ranks: tuple[RankLedger, ...]
    window_ns: int
    unmeasured_ns: int
    outside_ns: int
    in_step_ns: int
    productive_ns: int
    lost_ns: int
    findings: tuple[Finding, ...]
    """In-step findings by lost time, largest first, then by id; those outside steps last.
    "unattributed" is not among them."""
    unattributed_ns: int
    """In-step lost time without sufficient evidence."""
    unattributed_reasons: tuple[tuple[str, int], ...]
    """(reason, ns), largest first; sums to `unattributed_ns`."""
    outside_buckets: tuple[tuple[str, int], ...]
    """(cause id, ns) outside steps, over all ranks; sums to `outside_ns`."""
    metrics: tuple[Metric, ...]
    blinds: tuple[Blind, ...]
    notes: tuple[str, ...] = field(default=())
    """Sentences a reader must know ("lost time is an upper bound: …")."""
    job: JobFacts | None = None
    tail: Tail | None = None
    """None for a rank alone."""
    nobody: tuple[tuple[str, int], ...] = ()
    """(cause id, ns) that no rank caused: with `RankLedger.caused` of all ranks it is `lost_ns`."""
    underfill: Underfill | None = None
    """How work filled the devices while they were busy; apart from all lost time."""
    history: History | None = None
    """What happened when; None when it was not asked for."""
    worth: Worth | None = None
    """Money and completion time; None when it was not asked for."""
    steps: StepStats | None = None
    """The run in blocks of steps; None where nobody marked one."""
    likeness: Likeness | None = None
    """What another run must be like before the two are compared."""
    part: str = ""
    """What part of the run was analysed, in words; "" for all of it."""
    schema_version: int = 1
