"""Define causes, evidence, findings and the report: all that renderers, gate and compare
may see.

The ledger behind a report, for every rank and for the sum of all ranks, to the
nanosecond:

    window_ns  = unmeasured_ns + outside_ns + in_step_ns
    in_step_ns = productive_ns + lost_ns
    lost_ns    = sum of the `lost_ns` of all in-step buckets, "unattributed" among them
    outside_ns = sum of the buckets outside steps (start-up before step 1, and the rest)

Sentences of the model are for people: what code must know of them stands in fields beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from clusterprof.report.code import CodeLine, CodeProfile
from clusterprof.report.history import History, SlowStepSummary, StepStats
from clusterprof.report.impact import DeviceUtilization, Impact
from clusterprof.report.life import Life


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """A measurement of the culprits compared with that of their peers."""

    name: str
    """What was measured, named like a signal."""
    unit: str
    """Canonical unit of both numbers."""
    value: float
    """Median over the main culprits."""
    peers_value: float
    """Median over the peers."""
    peer_count: int
    """Number of peers."""
    compared_kind: Literal["rank", "node"]
    """What is compared: ranks or nodes."""
    note: str
    """Text printed after the first number ("of work a step")."""


@dataclass(frozen=True, slots=True)
class Persistence:
    """How the ranks that others waited for change over the run
    (docs/design/waits-between-ranks.md)."""

    kind: Literal["steady", "transient", "wandering"]
    """Constant culprits; one segment of the run only; changing culprits."""
    from_ns: int
    """Run time at which the time bins with most of the waiting begin; `to_ns`: at which they
    end.
    """
    to_ns: int
    waiting_bins: int
    """Number of time bins that hold nine tenths of the waiting."""
    operation_bins: int
    """Number of time bins with operations."""
    culprits: int
    """Number of ranks that were the main culprit in at least one of these time bins."""
    main_culprit_bins: int
    """In how many of these time bins the main culprits took part."""


@dataclass(frozen=True, slots=True)
class Onset:
    """Onset of a cause that was not active from the first step."""

    run_ns: int
    """Run time from which it costs time."""
    step: int | None = None
    """Steps that the main culprit had completed by then; None when unknown."""
    steps: int | None = None
    """Steps of the main culprit in total; None when unknown."""


EFFORTS: Mapping[str, str] = {
    "look": "a check; nothing is changed",
    "setting": "a changed option of the job, and another run",
    "code": "a change of the training code or of its image",
    "site": "a change by the operators of the node, the network or the server",
    "data": "data rewritten, copied or moved",
}
"""How much effort a recommendation takes, the least first."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One recommendation."""

    what: str
    """An instruction, one sentence without a full stop; names node and rank when it applies
    only to these.
    """
    because: str
    """The measurement that supports it."""
    change: str
    """The exact edit or command, and what a user must know about it."""
    gain: str
    """The expected gain: measured here, or published with its source."""
    verify: str
    """How to verify that it worked."""
    worse: str
    """What it would make worse; "" when nothing is known."""
    id: str = ""
    """Name of the recommendation, identical in every run ("more-workers")."""
    diagnose: bool = False
    """True if it says what to record or check to identify the cause, and fixes nothing itself."""
    effort: str = ""
    """A key of `EFFORTS`; "" when unknown."""
    commands: tuple[str, ...] = ()
    """The parts of `change` to paste, in its order, each word for word."""


@dataclass(frozen=True, slots=True)
class RunFingerprint:
    """Facts of a run; None or empty = not known."""

    started_at_ns: int | None = None
    """Wall clock of the first recorder's start, ns since 1970."""
    recordings: tuple[str, ...] = ()
    """Identity of this recording: the names of its nodes' folders."""
    gpu_models: tuple[tuple[str, int], ...] = ()
    """(model, number in the job), by name."""
    nodes: int | None = None
    world_size: int | None = None
    batch_size: float | None = None
    """Samples per rank and step, median over ranks; None when the job did not report it."""
    tokens: float | None = None
    """Tokens per rank and step, median over ranks; None when the job did not report it."""
    measured_by: tuple[str, ...] = ()
    """Where lost time was measured (`RankLedger.source`), of all ranks."""
    frameworks: tuple[tuple[str, str], ...] = ()
    """(name, version) of the frameworks that the ranks had loaded."""
    drivers: tuple[str, ...] = ()
    """Driver versions of its accelerators."""
    recorder: tuple[str, ...] = ()
    """Versions of clusterprof that recorded the run."""
    restarts: int = 0
    """How often ranks restarted within the run."""


Grade = Literal["A", "B", "C", "D"]
HiddenCost = Literal["", "batch", "interval", "pause"]
"""How the cost of a cause hides: "batch" in the production of a batch, which overlaps the step
before; "interval" in the rest of an interval that disappears with it; "pause" also in the
device synchronization that the pause requires."""
UNATTRIBUTED = "unattributed"


@dataclass(frozen=True, slots=True)
class Cause:
    """A named pattern of lost time; its title can follow "the GPU waited:"."""

    id: str
    """Kebab-case identity: file name, page and profile key ("storage-local")."""
    family: str
    """Top-level group of the cause ("storage", "cpu", "h2d", "unattributed", …)."""
    title: str
    """One line that a report can print as a headline, without a full stop."""
    advice: str
    """The first thing to do about it, as an instruction."""
    # The facts below are not part of a report as JSON, and so not of equality.
    tone: int = field(default=0, compare=False, kw_only=True)
    """Tone of the family's color, 0 to 3, that distinguishes it from the family's other causes."""
    manual_check: str = field(default="", compare=False, kw_only=True)
    """How to verify it by hand: what to run, and what must be observed."""
    can_be_node_fault: bool = field(default=False, compare=False, kw_only=True)
    """Whether a bad node can be the reason, whatever job runs there: such causes count when
    `fleet` looks for lemon nodes.
    """
    precedence: int = field(default=0, compare=False, kw_only=True)
    """Order in which claims on the same time are served, lowest first; 0 = it claims no time
    of a rank. Phases 1xx, devices 2xx, copies 3xx, storage 4xx, CPU 5xx, input 6xx, launches 7xx.
    """
    hidden_cost: HiddenCost = field(default="", compare=False, kw_only=True)
    """Cost beyond its lost time that a fix would save; "" = none."""
    trace_spans: tuple[int, ...] = field(default=(), compare=False, kw_only=True)
    """Kinds of spans (`probe.layout`) of which an imported trace must have one to show it."""
    always_traced: bool = field(default=False, compare=False, kw_only=True)
    """True if its detector abstains unless its input is present: marks of the loop, or counters.
    An imported trace then always shows it; without these marks and spans never."""


EvidenceSign = Literal["", "faster-device-idle", "port-unused"]
"""What a piece of evidence shows: a device was idle and is faster than those in use; an RDMA port
had no traffic while the job used TCP."""


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
    """What it indicates about the cause, as half a sentence."""
    # The facts below are what code may ask for, in place of the note; they are not in the JSON.
    sign: EvidenceSign = field(default="", kw_only=True)
    """What the number shows; "" = nothing that advice asks for."""
    device: str = field(default="", kw_only=True)
    """The device that `sign` is about."""


ResourceKind = Literal["", "training-process", "worker", "process", "cpu-set"]
"""What a resource is, where advice asks for it; "" = something else, such as a mount or a NIC."""


@dataclass(frozen=True, slots=True)
class ResourceFacts:
    """What code may ask for of `Culprit.resource`; not part of a report as JSON."""

    kind: ResourceKind = ""
    name: str = ""
    """The mount or disk alone, without what is below it; "" = as in the text."""
    pid: int | None = None
    """Process id on its node; None if it is no process, or several."""


UNKNOWN_RESOURCE = ResourceFacts()


@dataclass(frozen=True, slots=True)
class Culprit:
    """Rank, node, device or resource responsible for a cause."""

    node: str
    """Display name of the node."""
    rank: int | None
    """Global rank; None when the process had none."""
    device: str
    """The accelerator of that rank; "" when no accelerator was measured."""
    resource: str = ""
    """The disk, mount, NIC or worker behind it ("vda", "/data", "worker 1 (pid 4711)")."""
    own_ns: int | None = None
    """Device time the culprit itself lost to the cause; None when it is not known."""
    others_ns: int | None = None
    """Device time that ranks lost waiting for it; None when ranks were not compared."""
    victims: int | None = None
    """Number of ranks that waited for it at least a tenth as long as the rank that waited
    longest.
    """
    recoverable_ns: int | None = None
    """Device time of all ranks recovered if only this culprit is in time."""
    resource_facts: ResourceFacts = field(default=UNKNOWN_RESOURCE, kw_only=True)

    @property
    def caused_ns(self) -> int:
        """Return the device time that it and the ranks waiting for it lost, as far as known."""
        return (self.own_ns or 0) + (self.others_ns or 0)


@dataclass(frozen=True, slots=True)
class CulpritGroup:
    """Group of ranks that are all alike slow, such as a stage of a pipeline."""

    name: str
    """Its name ("stage 1")."""
    ranks: tuple[int, ...]
    """Global ranks of all its members, ascending."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause with the device time lost to it."""

    cause: Cause
    """The cause."""
    lost_ns: int
    """Device time attributed to the cause inside steps, or outside when `outside_steps`."""
    share_ratio: float
    """`lost_ns` over the in-step time (over the window when `outside_steps`)."""
    recoverable_ns: int | None
    """Device time recovered by fixing only this cause: the savings of `CauseImpact.saved_ns`
    on all devices; else the attributed minimum; None when it is not known.
    """
    confidence_ratio: float
    """Confidence in the cause, 0 to 1 (not its size)."""
    grade: Grade
    """Strength of the evidence: A marker and counter agree, B one direct signal, C correlation
    only, D prior.
    """
    upper_bound: bool
    """True when the loss is known only as "at most", because no device was measured."""
    outside_steps: bool
    """True for time before the first or after the last step."""
    culprits: tuple[Culprit, ...] = ()
    """Largest first."""
    evidence: tuple[Evidence, ...] = ()
    """Two or three numbers a reader can check."""
    persistence: Persistence | None = None
    """None when hardly any rank waited because of it, or the run was too short."""
    advice: tuple[Advice, ...] = ()
    """Recommendations, the best first; empty when no evidence supports one."""
    peer_comparison: PeerComparison | None = None
    """What distinguishes the culprits from their peers; None where it was not measured on
    both.
    """
    withheld_advice: tuple[str, ...] = ()
    """Advice a reader may expect, and why it is not given: sentences without a full stop."""
    why_savings_exceed_loss: str = ""
    """Why `recoverable_ns` exceeds `lost_ns`; "" where it does not."""
    onset: Onset | None = None
    """When it began; None where it was present from the start, intermittent, or is not known."""
    culprit_group: CulpritGroup | None = None
    """The group whose ranks are the main culprits; None where they are no group."""
    lines: tuple[CodeLine, ...] = ()
    """Lines of the culprits' own code in which the time was lost, largest first; empty where no
    stack was sampled then."""
    lines_compared: bool = False
    """True if `lines` are those in which the main culprit spends more time than its peers."""


@dataclass(frozen=True, slots=True)
class CoverageGap:
    """Something that could not be observed, and what would make it observable."""

    what: str
    """Collector, signal or cause that is missing."""
    kind: str
    """absent, denied or failed (see `errors.Unavailable`), or "lost" for damaged records."""
    message: str
    """What happened."""
    remedy: str
    """What to do; "" when nothing can be done."""
    source: str = field(default="", kw_only=True)
    """Collector, or first word of the signal, that is missing; "" for other gaps; not in JSON."""


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
    """Observed time, from the first to the last record of the rank."""
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
    """(cause id, ns): culprit time, its own loss plus what ranks lost waiting for it."""
    unobserved_ns: int = 0
    """Part of `productive_ns` in which neither a device nor the training thread was observed: time
    may have been lost there, too."""


@dataclass(frozen=True, slots=True)
class RankSum:
    """Sum of the ledgers of several ranks: those of a node, a rack or a process group."""

    grouped_by: Literal["node", "rack", "group"]
    """What its ranks have in common."""
    name: str
    """Display name of the node, or name of the rack or group; "" = the ranks of no group."""
    ranks: int
    """Number of ranks."""
    steps: int
    """Steps of all ranks."""
    fewest_steps: int
    """Steps of the rank with the fewest."""
    lowest_coverage_ratio: float | None
    """Smallest `RankLedger.coverage_ratio`; None when it is not known of every rank."""
    window_ns: int
    unmeasured_ns: int
    outside_ns: int
    in_step_ns: int
    productive_ns: int
    lost_ns: int
    buckets: tuple[tuple[str, int], ...]
    """(cause id, lost ns) inside steps, largest first; sums to `lost_ns`."""
    outside_buckets: tuple[tuple[str, int], ...]
    """(cause id, ns) outside steps, largest first; sums to `outside_ns`."""
    caused: tuple[tuple[str, int], ...] = ()
    """(cause id, ns): culprit time of its ranks, largest first."""
    unobserved_ns: int = 0
    """As in `RankLedger`."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number a gate may test, or the reason why it is missing."""

    name: str
    """Dotted, with the unit as suffix ("gpu.busy_ratio", "stall.storage_ratio")."""
    value: float | None
    """In canonical units; None when it could not be determined."""
    unit: str
    """Canonical unit."""
    why_missing: str = ""
    """Reason when `value` is None."""
    bound: Literal["exact", "at most", "at least"] = "exact"
    """How `value` relates to the truth; a bound when no device was measured."""


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
    has_host_name: bool = True
    """False for an imported trace that names no host; `name` is then that of the file."""
    is_window: bool = False
    """True for a trace of a window of the job, such as a few steps in a profiler."""
    has_time_unit: bool = True
    """False for a trace that states no unit of time."""
    rack: str = ""
    """Its leaf switch, by the resource manager's topology; "" when it states none."""
    altered_segments: int = 0
    """Files of its recording that were changed or removed after the recorder closed them."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Facts of the recorded job."""

    world_size: int | None
    """Number of ranks the job reports; None when it reports none."""
    gpus: int
    """Accelerators that were measured."""
    coverage_ratio: float | None
    """Share of the ranks' time for which the needed samples exist; None without ranks."""
    clock_bound_ns: int | None = None
    """Remaining error after aligning the nodes' clocks; None when they were not aligned."""
    why_clocks_not_aligned: str = ""
    """Why the clocks were not aligned; "" on one node, where this is not needed."""
    too_little_seen: str = ""
    """Why too little was seen to judge the job; "" = enough was seen."""
    is_window_only: bool = False
    """True if only windows of the job were recorded, such as a few steps in a profiler."""
    has_time_unit: bool = True
    """False if the input states no unit of time: shares and ratios hold, durations do not."""
    name: str = ""
    """Id or name of the job, as its launcher states it; "" when nodes state different ones."""
    user: str = ""
    """User of the job, as the resource manager states it; "" when it states none."""
    account: str = ""
    """Account that the resource manager charges; "" when it states none."""


@dataclass(frozen=True, slots=True)
class Report:
    """Result of an analysis: the source of every output and verdict."""

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
    coverage_gaps: tuple[CoverageGap, ...]
    notes: tuple[str, ...] = field(default=())
    """Sentences a reader must see ("lost time is an upper bound: …")."""
    failures: tuple[str, ...] = ()
    """Those of `notes` that say that the job failed or that its progress stopped."""
    job: JobFacts | None = None
    slow_step_summary: SlowStepSummary | None = None
    """None for a single rank."""
    lost_without_culprit: tuple[tuple[str, int], ...] = ()
    """(cause id, ns) caused by no rank; together with `RankLedger.caused` of all ranks it is
    `lost_ns`.
    """
    device_utilization: DeviceUtilization | None = None
    """Device utilization while busy; separate from lost time."""
    history: History | None = None
    """Lost time over the run; None when it was not requested."""
    impact: Impact | None = None
    """Cost and completion time; None when they were not requested."""
    steps: StepStats | None = None
    """The run in blocks of steps; None where no steps were marked."""
    fingerprint: RunFingerprint | None = None
    """Fingerprint that decides whether another run may be compared with this run."""
    selection_text: str = ""
    """Description of the analyzed part of the run; "" for the whole run."""
    answers: tuple[str, ...] = ()
    """What imported files say about the question they are made for (AU, start-up, bandwidth)."""
    code: CodeProfile | None = None
    """Stacks in which device time was lost; None where no stacks were recorded."""
    unlisted: tuple[RankSum, ...] = ()
    """The ranks that are not in `ranks`, by node: a stored report of a large job lists few ranks.
    Empty after an analysis.
    """
    life: Life | None = None
    """Wall time of the job over all restarts; None without steps, for a part of a run and for
    imported traces.
    """
    groups: tuple[CulpritGroup, ...] = ()
    """Process groups that the job gave a name, by name."""
    causes: Mapping[str, Cause] = field(default_factory=dict, compare=False, repr=False)
    """Every cause that the analysis knows, by id; empty for a report read from JSON."""
    schema_version: int = 1

    @property
    def main_cause(self) -> Finding | None:
        """Return the largest finding inside steps; None if more time was lost without a cause."""
        first = next((finding for finding in self.findings if not finding.outside_steps), None)
        return first if first is not None and first.lost_ns >= self.unattributed_ns else None

    @property
    def too_little_seen(self) -> str:
        """Return why too little was seen to judge the job; "" = enough was seen."""
        return self.job.too_little_seen if self.job is not None else ""

    @property
    def is_window_only(self) -> bool:
        """Return whether only windows of the job were recorded."""
        return self.job is not None and self.job.is_window_only

    @property
    def has_time_unit(self) -> bool:
        """Return whether durations have a unit."""
        return self.job is None or self.job.has_time_unit

    @property
    def ledgers(self) -> tuple[RankLedger | RankSum, ...]:
        """Return the ledgers that add up to the whole: listed ranks, and sums of the others."""
        return (*self.ranks, *self.unlisted)

    @property
    def rank_count(self) -> int:
        """Return the number of ranks, listed or not."""
        return len(self.ranks) + sum(ranks.ranks for ranks in self.unlisted)

    @property
    def fewest_steps(self) -> int:
        """Return the steps of the rank with the fewest; 0 without ranks."""
        listed = [rank.steps for rank in self.ranks]
        return min([*listed, *(ranks.fewest_steps for ranks in self.unlisted)], default=0)

    @property
    def unobserved_ns(self) -> int:
        """Return the time in steps in which neither device nor training thread was observed."""
        return sum(ledger.unobserved_ns for ledger in self.ledgers)
