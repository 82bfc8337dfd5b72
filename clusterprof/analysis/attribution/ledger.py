"""Build the ledger of one rank: integer nanoseconds in, exact sums out.

    window_ns  = unmeasured_ns + outside_ns + in_step_ns
    in_step_ns = productive_ns + lost_ns
    lost_ns    = sum of buckets, "unattributed" among them

Claimed amounts are integers in fixed-point shares of a nanosecond. Each bucket gets its
whole nanoseconds, and the rest is allocated by largest remainder, so that children add
up to the parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from clusterprof.analysis.attribution.accumulator import Accumulator, round_by_largest_remainder
from clusterprof.analysis.attribution.confidence import (
    FAMILY_PRIOR,
    MIN_SCORE_TO_NAME,
    compute_confidence_score,
)
from clusterprof.analysis.attribution.lines.lost_time_by_stack import RankStackTimes
from clusterprof.analysis.attribution.rank.chunk_boundary import OUTSIDE_PART, RankState
from clusterprof.analysis.attribution.rank.claims import BLOCKED
from clusterprof.analysis.attribution.rank.history import RankTimeHistory
from clusterprof.analysis.attribution.rank.step_blocks import StepBlockTable
from clusterprof.analysis.attribution.taxonomy import CAUSES, FAMILIES
from clusterprof.analysis.timeline.collectives.rows import RankOperations
from clusterprof.analysis.timeline.load.ranks import UNREGISTERED, JobPosition
from clusterprof.analysis.timeline.model import SOURCE_HOST_SPANS, Int
from clusterprof.analysis.timeline.series import Period
from clusterprof.report.model import UNATTRIBUTED, RankLedger

LOW_CONFIDENCE = "low-confidence"
STARTUP, AFTER_STEPS, NO_STEPS = "startup", "after-steps", "no-steps"
LONG_FIRST_STEP = "long-first-step"
"""Reason for the part of a first step that was settled before the step was known."""
_WAIT_FAMILIES = ("storage", "cpu")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Lost time of one rank under one id, with its causes and grades."""

    id: str
    """Cause id, or the id of a family."""
    lost_ns: int
    confidence_ratio: float
    by_grade: Mapping[str, int]
    """Grade -> ns in fixed-point shares."""
    upper_bound: bool
    causes: tuple[str, ...]
    """The causes that were claimed, largest first."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """Result of one rank: its ledger and the data behind each line."""

    ledger: RankLedger
    buckets: tuple[Bucket, ...]
    """Largest first, then by id; without "unattributed"."""
    reasons: tuple[tuple[str, int], ...]
    """(reason, ns) of the unattributed time."""
    accumulator: Accumulator
    has_peers: bool
    marked: bool
    emulated: bool
    launcher_variables: Mapping[str, str]
    """Variables that its launcher set, by name."""
    job_position: JobPosition = UNREGISTERED
    """Position of the rank in its job."""
    started_ticks: int = -1
    """Start time of the process; identifies it on its machine, together with the pid."""
    first_ns: int = 0
    """Time of its first record, on its node's clock."""
    last_ns: int = 0
    """Time of its last record, on its node's clock."""
    job: int = 0
    """Number of its job, or of the incarnation that a restart began; -1 if unclear."""
    operations: RankOperations | None = None
    """Its operations with other ranks, until their waits have been attributed."""
    implicit_steps: RankOperations | None = None
    """Its steps as operations, if it marked no operations (analysis.attribution.rank.step_blocks).
    """
    suspected_steps: RankOperations | None = None
    """The steps with suspected busy-waiting as waiting; None if nothing was suspected."""
    period: Period | None = None
    """Period of its lost time in tenths of a second, if it marked no steps."""
    history: RankTimeHistory | None = None
    """When it lost what; None if not requested."""
    blocks: StepBlockTable | None = None
    """Its totals in blocks of steps; None without steps."""
    losses_by_time_bin: tuple[Int, Int] | None = field(default=None, compare=False)
    """Lengths of time bins, and time lost in each by cause (rank.hidden_cost.LossTimeBins); None
    if it has peers.
    """
    code: RankStackTimes | None = field(default=None, compare=False)
    """Stacks sampled in its lost time; None without samples."""
    culprit_ns: Mapping[str, int] = field(default_factory=dict)
    """Cause id -> ns that ranks, including itself, waited in operations because of it."""
    victim_ns: Mapping[str, int] = field(default_factory=dict)
    """Cause id -> ns of the ledger that it waited in operations."""


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Identity of a rank: process, device, and position in its job."""

    node: str
    rank: int | None
    pid: int
    device: str
    marked: bool
    emulated: bool
    has_peers: bool
    launcher_variables: Mapping[str, str] = field(default_factory=dict)
    job_position: JobPosition = UNREGISTERED
    started_ticks: int = -1


def build_rank_result(
    identity: RankIdentity,
    state: RankState,
    accumulator: Accumulator,
    operations: RankOperations | None = None,
) -> RankResult:
    """Build the ledger of one rank from its sums.

    The identities of the module docstring hold by construction. operations: of the rank
    with others, None if it has none.
    """
    totals = accumulator.totals
    window_ns = (state.last_ns or 0) - (state.first_ns or 0)
    in_step_ns = totals.get("in_step", 0)
    unmeasured_ns = totals.get("unmeasured", 0)
    observable = identity.marked or bool(identity.device)
    if not observable:
        unmeasured_ns = window_ns
    outside_ns = window_ns - in_step_ns - unmeasured_ns
    coverage = 1 - unmeasured_ns / window_ns if window_ns > 0 else 0.0
    lost_ns = totals.get("lost", 0)
    buckets, reasons = allocate_buckets(accumulator, lost_ns, coverage)
    ledger = RankLedger(
        node=identity.node,
        rank=identity.rank,
        pid=identity.pid,
        device=identity.device,
        source=_choose_source(identity, totals),
        window_ns=window_ns,
        unmeasured_ns=unmeasured_ns,
        outside_ns=outside_ns,
        in_step_ns=in_step_ns,
        productive_ns=in_step_ns - lost_ns,
        lost_ns=lost_ns,
        buckets=_list_bucket_lines(buckets, reasons),
        outside_buckets=_split_outside_time(state, outside_ns, totals.get("not_asked", 0)),
        steps=sum(accumulator.steps.values()),
        coverage_ratio=coverage,
        unobserved_ns=min(totals.get("unobserved", 0), in_step_ns - lost_ns),
    )
    return RankResult(
        ledger,
        buckets,
        reasons,
        accumulator,
        identity.has_peers,
        identity.marked,
        identity.emulated,
        identity.launcher_variables,
        identity.job_position,
        identity.started_ticks,
        state.first_ns or 0,
        state.last_ns or 0,
        operations=operations,
    )


def with_attributed_waits(
    result: RankResult,
    accumulator: Accumulator,
    victim_ns: Mapping[str, int],
    culprit_ns: Mapping[str, int],
) -> RankResult:
    """Return the result with time in operations moved to its causes; sums do not change."""
    ledger = result.ledger
    buckets, reasons = allocate_buckets(accumulator, ledger.lost_ns, ledger.coverage_ratio)
    return replace(
        result,
        ledger=replace(ledger, buckets=_list_bucket_lines(buckets, reasons)),
        buckets=buckets,
        reasons=reasons,
        accumulator=accumulator,
        operations=None,
        implicit_steps=None,
        suspected_steps=None,
        culprit_ns=culprit_ns,
        victim_ns=victim_ns,
    )


def _list_bucket_lines(
    buckets: tuple[Bucket, ...], reasons: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    lines = [(bucket.id, bucket.lost_ns) for bucket in buckets]
    return (*lines, (UNATTRIBUTED, sum(ns for _, ns in reasons)))


def with_reported_ids(result: RankResult, reported_id: Mapping[str, str]) -> RankResult:
    """Return the result with each cause under the id that the job as a whole reports it under.

    reported_id: cause -> id.
    """
    ledger = result.ledger
    buckets, reasons = allocate_buckets(
        result.accumulator, ledger.lost_ns, ledger.coverage_ratio, reported_id
    )
    ledger = replace(ledger, buckets=_list_bucket_lines(buckets, reasons))
    return replace(result, ledger=ledger, buckets=buckets, reasons=reasons)


def allocate_buckets(
    accumulator: Accumulator,
    lost_ns: int,
    coverage_ratio: float,
    reported_id: Mapping[str, str] | None = None,
) -> tuple[tuple[Bucket, ...], tuple[tuple[str, int], ...]]:
    """Allocate lost time to buckets and reasons, which add up to `lost_ns` exactly.

    reported_id: cause -> id; for other causes the confidence of this rank decides.
    """
    amounts: dict[tuple[str, str], dict[str, int]] = {}
    host: dict[str, int] = {}
    causes: dict[str, dict[str, int]] = {}
    reason_units = {("reason", reason): units for reason, units in accumulator.unexplained.items()}
    for (cause, grade, source), units in sorted(accumulator.claimed.items()):
        id_ = (reported_id or {}).get(cause) or choose_reported_id(
            accumulator, cause, coverage_ratio
        )
        if id_ is None:
            key = ("reason", LOW_CONFIDENCE)
            reason_units[key] = reason_units.get(key, 0) + units
            continue
        by_grade = amounts.setdefault(("bucket", id_), {})
        by_grade[grade] = by_grade.get(grade, 0) + units
        host[id_] = host.get(id_, 0) + (units if source == SOURCE_HOST_SPANS else 0)
        of_cause = causes.setdefault(id_, {})
        of_cause[cause] = of_cause.get(cause, 0) + units
    units_of = {**{key: sum(grades.values()) for key, grades in amounts.items()}, **reason_units}
    allocated = round_by_largest_remainder(units_of, lost_ns)
    unexplained = accumulator.unexplained.get(BLOCKED, 0)
    buckets = [
        Bucket(
            id_,
            allocated[("bucket", id_)],
            _compute_id_confidence(id_, grades, unexplained, coverage_ratio),
            grades,
            2 * host[id_] > sum(grades.values()),
            tuple(sorted(causes[id_], key=lambda leaf: (-causes[id_][leaf], leaf))),
        )
        for (_, id_), grades in amounts.items()
    ]
    reasons = [(reason, ns) for (kind, reason), ns in allocated.items() if kind == "reason" and ns]
    return (
        tuple(sorted(buckets, key=lambda bucket: (-bucket.lost_ns, bucket.id))),
        tuple(sorted(reasons, key=lambda line: (-line[1], line[0]))),
    )


def choose_reported_id(
    accumulator: Accumulator, cause_id: str, coverage_ratio: float
) -> str | None:
    """Choose the id that a claim is reported under: the cause, its family, or None."""
    family = CAUSES[cause_id].family
    unexplained = accumulator.unexplained.get(BLOCKED, 0)
    grades = _sum_grades(accumulator, {cause_id})
    if _compute_id_confidence(cause_id, grades, unexplained, coverage_ratio) >= MIN_SCORE_TO_NAME:
        return cause_id
    siblings = {id_ for id_, _, _ in accumulator.claimed if CAUSES[id_].family == family}
    grades = _sum_grades(accumulator, siblings)
    reaches_score = (
        _compute_id_confidence(family, grades, unexplained, coverage_ratio, family=True)
        >= MIN_SCORE_TO_NAME
    )
    return family if reaches_score else None


def _sum_grades(accumulator: Accumulator, causes: set[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for (cause, grade, _), units in accumulator.claimed.items():
        if cause in causes:
            out[grade] = out.get(grade, 0) + units
    return out


def _compute_id_confidence(
    id_: str,
    grades: Mapping[str, int],
    unexplained: int,
    coverage_ratio: float,
    family: bool = False,
) -> float:
    cause = CAUSES[id_]
    related = unexplained if cause.family in _WAIT_FAMILIES else 0
    if family or cause is FAMILIES.get(id_):
        return compute_confidence_score(grades, related, coverage_ratio, FAMILY_PRIOR)
    return compute_confidence_score(grades, related, coverage_ratio)


def _choose_source(identity: RankIdentity, totals: Mapping[str, int]) -> str:
    if totals.get("host_lost", 0) and not identity.device:
        return "host-spans"  # the larger part is an upper bound, even if a few events were measured
    if totals.get("stream_pieces", 0):
        return "stream-events"
    if identity.device:
        return "device-samples"
    return "host-spans" if identity.marked else "none"


def _split_outside_time(
    state: RankState, outside_ns: int, outside_selection_ns: int
) -> tuple[tuple[str, int], ...]:
    step_begin_ns, reported_begin_ns = state.step_begin_ns, state.reported_begin_ns
    if step_begin_ns is None or state.first_ns is None:
        return ((NO_STEPS, outside_ns),) if outside_ns else ()
    outside_selection_ns = min(outside_selection_ns, outside_ns)
    selected_begin_ns = max(state.first_ns, state.since_ns or state.first_ns)
    reported_begin_ns = max(
        step_begin_ns if reported_begin_ns is None else reported_begin_ns, selected_begin_ns
    )
    startup_ns = min(reported_begin_ns - selected_begin_ns, outside_ns - outside_selection_ns)
    long_ns = min(
        max(step_begin_ns - reported_begin_ns, 0), outside_ns - outside_selection_ns - startup_ns
    )
    rest_ns = outside_ns - startup_ns - long_ns - outside_selection_ns
    lines = (
        (STARTUP, startup_ns),
        (LONG_FIRST_STEP, long_ns),
        (OUTSIDE_PART, outside_selection_ns),
        (AFTER_STEPS, rest_ns),
    )
    return tuple(line for line in lines if line[1])
