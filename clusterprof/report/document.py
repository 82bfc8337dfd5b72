"""Define the report as a JSON document: its keys in their order, and their types.

The JSON renderer writes these types and the gate reads them. `schema/report.schema.json` beside the
renderer is generated from them by `make docs`. The schema describes a key by the docstring below
it, or else by that of the attribute in the model (`report.model`, `history`, `impact`) from which
the key is written. A type that describes a class of the model has the name of that class; classes
whose attributes are the keys stand here themselves.

Keys keep name, type, unit and meaning. A key with a default is not needed to judge a stored report,
and reports of older versions may lack it; a written report has every key, but for those that are
left out where they are empty.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from clusterprof.report.document_base import (
    MAX_BINS,
    MAX_CAUSES,
    MAX_LINES,
    MAX_SLOW_STEPS,
    MAX_WAITS,
    Bucket,
    CodeLine,
    CodeProfile,
    Count,
    DeviceUtilization,
    Document,
    Factor,
    Ns,
    Ratio,
    Reason,
    Row,
    limit_to,
    omit_if_empty,
    take_from,
)
from clusterprof.report.model import Grade


class JobFacts(Document, frozen=True, kw_only=True):
    hosts: str = ""
    """Its nodes as a host list in Slurm's notation."""
    world_size: Count | None
    gpus: Count
    coverage_ratio: Ratio | None
    clock_bound_ns: Ns | None = None
    clock_why: Annotated[str, take_from("why_clocks_not_aligned")] = ""
    too_little_seen: str = ""
    window_only: Annotated[bool, take_from("is_window_only")] = False
    has_time_unit: bool = True
    name: Annotated[str, limit_to(200)] = ""
    user: Annotated[str, limit_to(200)] = ""
    account: Annotated[str, limit_to(200)] = ""


class Ledger(Document, frozen=True):
    """Where the device time of all ranks went, to the nanosecond."""

    window_ns: Ns
    """Observed time = unmeasured_ns + outside_ns + in_step_ns."""
    unmeasured_ns: Ns
    """Time in which the device was not measured: neither busy nor idle."""
    outside_ns: Ns
    """Time before the first and after the last step; the sum of outside_buckets."""
    in_step_ns: Ns
    """Time inside steps = productive_ns + lost_ns."""
    productive_ns: Ns
    lost_ns: Ns
    """The sum of buckets."""
    buckets: tuple[Bucket, ...]
    """Lost time inside steps by cause, "unattributed" included. A cause that is too small for a
    finding is only here.
    """
    unattributed_ns: Ns
    """Lost time without sufficient evidence; the sum of unattributed_reasons."""
    unattributed_reasons: tuple[Reason, ...]
    outside_buckets: tuple[Bucket, ...]
    caused_by_nobody: Annotated[tuple[Bucket, ...], take_from("lost_without_culprit")] = ()
    """Lost time that no rank caused (transfers, ranks that were not recorded). With `caused` of
    all ranks it sums to lost_ns; empty when ranks were not compared.
    """


class Persistence(Document, frozen=True):
    kind: Literal["steady", "transient", "wandering"]
    from_ns: Ns
    to_ns: Ns
    stretches: Annotated[Count, take_from("waiting_bins")]
    seen_stretches: Annotated[Count, take_from("operation_bins")]
    culprits: Count
    chief_stretches: Annotated[Count, take_from("main_culprit_bins")]


class PeerComparison(Document, frozen=True):
    name: str
    unit: str
    value: float | None
    others_value: Annotated[float | None, take_from("peers_value")]
    others: Annotated[int, Meta(ge=1), take_from("peer_count")]
    of: Annotated[Literal["rank", "node"], take_from("compared_kind")]
    note: str


class Advice(Document, frozen=True):
    id: str
    what: str
    because: str
    change: str
    gain: str
    verify: str
    worse: str
    diagnose: bool
    effort: Literal["", "look", "setting", "code", "site", "data"]
    """The effort it takes; "" when unknown."""
    commands: tuple[str, ...]


class Culprit(Document, frozen=True):
    node: str
    rank: Count | None
    device: str
    resource: str
    own_ns: Ns | None = None
    others_ns: Ns | None = None
    victims: Count | None = None
    recoverable_ns: Ns | None = None


class CulpritGroup(Document, frozen=True):
    name: str
    ranks: tuple[Count, ...]


class Onset(Document, frozen=True):
    run_ns: Ns
    step: Count | None
    steps: Count | None


class CulpritSum(Document, frozen=True):
    """Sums over culprits that caused less than those of `culprits`; null = not known."""

    culprits: Count
    own_ns: Ns | None
    others_ns: Ns | None


class Evidence(Document, frozen=True):
    name: str
    value: float
    unit: str
    note: str = ""


class Finding(Document, frozen=True):
    cause: Annotated[str, take_from("cause.id")]
    """Id of the cause: `clusterprof explain ID`."""
    family: Annotated[str, take_from("cause.family")]
    """Top-level group of the cause."""
    title: Annotated[str, take_from("cause.title")]
    """The cause in one line, without a full stop."""
    advice: Annotated[str, take_from("cause.advice")]
    """What helps against the cause in general; `remedies` has what to do in this run."""
    lost_ns: Ns
    share_ratio: Ratio | None
    recoverable_ns: Ns | None
    confidence_ratio: Ratio | None
    grade: Grade
    upper_bound: bool
    outside_steps: bool
    culprits: tuple[Culprit, ...]
    """Largest first. Above 512 ranks, unless with --full, the 64 largest."""
    culprits_left_out: CulpritSum | None = None
    """The culprits that `culprits` leaves out; null if it has all."""
    culprit_group: CulpritGroup | None = None
    persistence: Persistence | None = None
    compared: Annotated[PeerComparison | None, take_from("peer_comparison")] = None
    since: Annotated[Onset | None, take_from("onset")] = None
    more_why: Annotated[str, take_from("why_savings_exceed_loss")] = ""
    withheld: Annotated[tuple[str, ...], take_from("withheld_advice")] = ()
    evidence: tuple[Evidence, ...] = ()
    remedies: Annotated[tuple[Advice, ...], take_from("advice")] = ()
    lines: Annotated[tuple[CodeLine, ...], Meta(max_length=MAX_LINES)] = ()
    lines_compared: bool = False


class RankLedger(Document, frozen=True):
    node: str
    rank: Count | None
    pid: Count
    device: str
    source: str
    steps: Count
    coverage_ratio: Ratio | None
    window_ns: Ns
    unmeasured_ns: Ns
    outside_ns: Ns
    in_step_ns: Ns
    productive_ns: Ns
    lost_ns: Ns
    buckets: tuple[Bucket, ...]
    outside_buckets: tuple[Bucket, ...]
    caused: tuple[Bucket, ...] = ()
    unobserved_ns: Ns = 0


class RankSum(Document, frozen=True):
    of: Annotated[Literal["node", "rack", "group"], take_from("grouped_by")]
    name: str
    ranks: Count
    steps: Count
    fewest_steps: Count
    lowest_coverage_ratio: Ratio | None
    window_ns: Ns
    unmeasured_ns: Ns
    outside_ns: Ns
    in_step_ns: Ns
    productive_ns: Ns
    lost_ns: Ns
    buckets: tuple[Bucket, ...]
    outside_buckets: tuple[Bucket, ...]
    caused: tuple[Bucket, ...] = ()
    unobserved_ns: Ns = 0


class CauseImpact(Document, frozen=True):
    cause: str
    outside_steps: bool
    lost_ns: int
    lost_cost: float | None
    saved_ns: int | None
    saved_low_ns: int | None
    saved_high_ns: int | None
    saved_cost: float | None
    why_missing: Annotated[str, limit_to(400)]


class EfficiencyMetric(Row, frozen=True):
    """A common efficiency metric."""

    name: str
    value: float | None
    text: Annotated[str, limit_to(600)]
    """Its definition, or why it is not known."""


class Impact(Document, frozen=True):
    job_ns: int | None
    gpus: int
    price_per_gpu_hour: float | None
    currency: Annotated[str, limit_to(60)]
    lost_cost: float | None
    why_no_cost: Annotated[str, limit_to(400)]
    upper_bound: bool
    saved_ns: int | None
    saved_low_ns: int | None
    saved_high_ns: int | None
    causes: tuple[CauseImpact, ...]
    tokens_per_second: float | None
    tokens_per_second_if_fixed: float | None
    why_no_tokens: Annotated[str, limit_to(400)]
    samples_per_second: float | None
    samples_per_second_if_fixed: float | None
    why_no_samples: Annotated[str, limit_to(400)]
    cost_per_million_tokens: float | None
    cost_per_million_tokens_if_fixed: float | None
    yardsticks: Annotated[tuple[EfficiencyMetric, ...], take_from("efficiency_metrics")]
    """Common efficiency metrics."""


class LifePart(Document, frozen=True):
    name: str
    title: str
    """What it is, in words."""
    ns: Ns | None
    why_missing: Annotated[str, limit_to(400)]


class Attempt(Document, frozen=True):
    start_ns: Ns
    end_ns: Ns
    ranks: Count
    steps: Count
    first_job_step: Count | None
    repeated_steps: Count | None
    ended: Annotated[str, limit_to(200)]


class Life(Document, frozen=True):
    begin_at_ns: int
    wall_ns: Ns
    devices: Count
    total_ns: Ns
    parts: tuple[LifePart, ...]
    attempts: tuple[Attempt, ...]
    why_missing: Annotated[str, limit_to(400)]


class LateRank(Row, frozen=True):
    """A rank that arrived last in slow steps."""

    node: str
    rank: Count | None
    steps: Count


class SlowStepSummary(Document, frozen=True):
    steps: Count
    slow_steps: Annotated[Count, take_from("slow_step_count")]
    p50_ns: Ns | None
    p99_ns: Ns | None
    set_by: Annotated[tuple[LateRank, ...], take_from("late_ranks")]
    """The ranks that arrived last in the slow steps, most first."""
    why_missing: str


class Metric(Document, frozen=True):
    name: str
    value: float | None
    unit: str
    bound: Literal["exact", "at most", "at least"]
    why_missing: str


class CoverageGap(Document, frozen=True):
    what: str
    kind: str
    message: str
    remedy: str


class NodeFacts(Document, frozen=True):
    name: str
    key: str
    boot_id: str
    duration_ns: Ns
    damaged_bytes: Count
    dropped_spans: Count
    recorder_cpu_ratio: Factor | None
    rack: str = ""
    altered_segments: Count = 0


class CauseByBlock(Row, frozen=True):
    """Lost time of one cause by block."""

    cause: str
    family: str
    ns: tuple[Ns, ...]


class StepStats(Document, frozen=True):
    """All ranks by block of steps; every array has one item per block."""

    width: Annotated[int, Meta(ge=1)]
    steps: tuple[Count, ...]
    step_ns: tuple[Ns, ...]
    in_step_ns: tuple[Ns, ...]
    """Sums to in_step_ns of the ledger."""
    measured_ns: tuple[Ns, ...]
    busy_ns: tuple[Ns, ...]
    lost_ns: tuple[Ns, ...]
    """Sums to lost_ns of the ledger."""
    lost: tuple[CauseByBlock, ...]
    """By cause, the largest first; each sums to its bucket of the ledger."""
    lengths: tuple[str, ...]
    """By block "bin:steps bin:steps"; the bin of a length is floor(128 * log2(ns))."""


class GpuModel(Row, frozen=True):
    """Devices of one model."""

    model: str
    gpus: Annotated[int, Meta(ge=1)]


class Framework(Row, frozen=True):
    """A framework that the ranks had loaded."""

    name: str
    version: str


class RunFingerprint(Document, frozen=True):
    started_at_ns: Ns | None
    recordings: Annotated[tuple[str, ...], limit_to(4096)]
    gpu_models: tuple[GpuModel, ...]
    """Devices of the job by model."""
    nodes: Count | None
    world_size: Count | None
    batch_size: Factor | None
    tokens: Factor | None
    measured_by: tuple[str, ...]
    """Where lost time was measured, of all ranks."""
    frameworks: tuple[Framework, ...]
    """Frameworks that the ranks had loaded."""
    drivers: tuple[str, ...]
    recorder: tuple[str, ...]
    restarts: Count


class RankId(Document, frozen=True):
    """A rank, as in `ranks` of the report."""

    node: str
    rank: Count | None
    pid: Count


class CauseByBin(Row, frozen=True):
    """Lost time of one cause by time bin."""

    cause: str
    ns: Annotated[tuple[Ns, ...], Meta(max_length=MAX_BINS)]


class SlowStep(Document, frozen=True):
    number: int
    start_ns: int
    duration_ns: Ns
    last_to_come: Annotated[RankId | None, take_from("rank")]
    """The rank that arrived last; null when it is not known."""
    lost: Annotated[tuple[Bucket, ...], Meta(max_length=MAX_CAUSES)]
    """Lost time of all ranks in this step, the largest first."""


class Wait(Document, frozen=True):
    start_ns: int
    duration_ns: Ns
    victim: RankId | None
    """The rank that waited."""
    culprit: RankId | None
    """The rank that arrived last; null when it is not known."""
    cause: str
    step: int | None


class Trend(Document, frozen=True):
    """How the loss of all ranks changed over the run; null where the run was too short to tell."""

    kind: Literal["steady", "rising", "falling", "from", "until", "between", "apart", "bursts"]
    start_ns: int
    """Run time at which the segment that `kind` describes begins."""
    end_ns: int
    level_ratio: Factor | None
    """Lost share of the time in steps in that segment; for bursts in the worst part, for rising
    and falling at the end.
    """
    else_ratio: Annotated[Factor | None, take_from("rest_ratio")]
    """Lost share in the rest; for bursts in the median part, for rising and falling at the
    beginning.
    """


class EndedRank(Row, frozen=True):
    """A rank that took no more steps while other ranks of its job continued."""

    rank: RankId | None
    run_ns: Ns
    """Run time at which its last step ended."""


class History(Document, frozen=True):
    """The course of the run, all ranks together, in equal time bins; null when it was not computed.
    Times are ns from the start of the run. The HTML page and exports have it rank by rank.
    """

    started_at_ns: int | None
    begin_ns: int
    stretch_ns: Annotated[Ns, take_from("bin_ns")]
    """Length of a time bin."""
    in_step_ns: Annotated[tuple[Ns, ...], Meta(max_length=MAX_BINS)]
    """Time of all ranks inside steps, by time bin; sums to in_step_ns of the ledger."""
    lost: Annotated[tuple[CauseByBin, ...], Meta(max_length=MAX_CAUSES)]
    """Largest first; sums to lost_ns of the ledger. `waiting-for-ranks` is time lost in operations
    with other ranks, whose causes are known only for the run as a whole; `others` are the
    smallest causes.
    """
    slow_steps: Annotated[tuple[SlowStep, ...], Meta(max_length=MAX_SLOW_STEPS)]
    waits: Annotated[tuple[Wait, ...], Meta(max_length=MAX_WAITS)]
    course: Trend | None
    ended: tuple[EndedRank, ...]
    """Ranks that took no more steps while other ranks of their job continued, at most 64. Later
    losses are of fewer ranks, which is no change of any rank.
    """
    why_missing: Annotated[str, limit_to(400)]


class Report(Document, frozen=True, kw_only=True):
    """The output of `clusterprof analyze --json`. Times are integer nanoseconds; what is not known
    is null.
    """

    format: Literal["clusterprof-report"]
    schema_version: Literal[1]
    title: str
    emulated: bool
    answers: tuple[str, ...] = ()
    job: JobFacts | None
    ledger: Ledger
    main_cause: str | None = None
    """Cause that lost most inside steps; null where more was lost without a known cause, or nothing
    was lost.
    """
    findings: tuple[Finding, ...]
    """Those inside steps first, largest first. Unattributed time is in the ledger."""
    ranks: tuple[RankLedger, ...]
    """All ranks; above 512, unless with --full, those that findings, the longest waits, the slowest
    steps or the largest stacks name, and the 32 that lost or caused most.
    """
    unlisted: tuple[RankSum, ...] = ()
    """Sums of the ranks that `ranks` leaves out, by node. With `ranks` they add up to the ledger,
    to the nanosecond; empty if all ranks are listed.
    """
    groups: tuple[RankSum, ...] = ()
    """All ranks summed by rack and by named process group, listed or not. A rank can be in several
    groups. Empty up to 512 ranks.
    """
    underfill: Annotated[DeviceUtilization | None, take_from("device_utilization")] = None
    worth: Annotated[Impact | None, take_from("impact"), limit_to(200)] = None
    life: Life | None = None
    tail: Annotated[SlowStepSummary | None, take_from("slow_step_summary")] = None
    metrics: tuple[Metric, ...]
    not_seen: Annotated[tuple[CoverageGap, ...], take_from("coverage_gaps")]
    nodes: tuple[NodeFacts, ...]
    notes: tuple[str, ...]
    failures: Annotated[tuple[str, ...], omit_if_empty()] = ()
    steps: Annotated[StepStats | None, limit_to(200)]
    likeness: Annotated[RunFingerprint | None, take_from("fingerprint"), limit_to(200)]
    history: Annotated[History | None, limit_to(200)] = None
    code: CodeProfile | None = None
