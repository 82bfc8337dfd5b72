"""Load a report that `analyze --json` wrote, strictly, so that a gate need not analyze
again.

A file that does not fit the schema, does not add up to the nanosecond or contradicts
itself is
rejected: nothing is filled in. Unknown keys are ignored; newer versions only add keys.

Define which fields a stored report must have; every field is required.

Check the sums that every report keeps; a report that fails was cut, edited or mixed up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from clusterprof.errors import NoRecording
from clusterprof.report.history import StepStats
from clusterprof.report.model import (
    UNATTRIBUTED,
    Cause,
    CoverageGap,
    Culprit,
    Finding,
    Grade,
    JobFacts,
    Metric,
    NodeFacts,
    RankLedger,
    Report,
    RunFingerprint,
)
from clusterprof.units import infer_unit

Ns = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
Natural = Annotated[float, msgspec.Meta(ge=0)]


class Struct(msgspec.Struct, frozen=True):
    """Every field is required."""


class BucketStored(Struct, frozen=True):
    cause: str
    ns: Ns


class ReasonStored(Struct, frozen=True):
    reason: str
    ns: Ns


class LedgerStored(Struct, frozen=True):
    window_ns: Ns
    unmeasured_ns: Ns
    outside_ns: Ns
    in_step_ns: Ns
    productive_ns: Ns
    lost_ns: Ns
    buckets: list[BucketStored]
    outside_buckets: list[BucketStored]
    unattributed_ns: Ns
    unattributed_reasons: list[ReasonStored]


class RankStored(Struct, frozen=True):
    node: str
    rank: Ns | None
    pid: int
    device: str
    source: str
    steps: Ns
    coverage_ratio: Ratio | None
    window_ns: Ns
    unmeasured_ns: Ns
    outside_ns: Ns
    in_step_ns: Ns
    productive_ns: Ns
    lost_ns: Ns
    buckets: list[BucketStored]
    outside_buckets: list[BucketStored]


class CulpritStored(Struct, frozen=True):
    node: str
    rank: Ns | None
    device: str
    resource: str


class FindingStored(Struct, frozen=True):
    cause: str
    family: str
    title: str
    advice: str
    lost_ns: Ns
    share_ratio: Ratio | None
    recoverable_ns: Ns | None
    confidence_ratio: Ratio | None
    grade: Grade
    upper_bound: bool
    outside_steps: bool
    culprits: list[CulpritStored]


class MetricStored(Struct, frozen=True):
    name: str
    value: float | None
    unit: str
    bound: Literal["exact", "at most", "at least"]
    why_missing: str


class NodeStored(Struct, frozen=True):
    name: str
    key: str
    boot_id: str
    duration_ns: Ns
    damaged_bytes: Ns
    dropped_spans: Ns
    recorder_cpu_ratio: Natural | None


class JobStored(Struct, frozen=True):
    world_size: Ns | None
    gpus: Ns
    coverage_ratio: Ratio | None


class BlindStored(Struct, frozen=True):
    what: str
    kind: str
    message: str
    remedy: str


class CauseStored(Struct, frozen=True):
    cause: str
    family: str
    ns: list[Ns]


class StepsStored(Struct, frozen=True):
    width: Annotated[int, msgspec.Meta(ge=1)]
    steps: list[Ns]
    step_ns: list[Ns]
    in_step_ns: list[Ns]
    measured_ns: list[Ns]
    busy_ns: list[Ns]
    lost_ns: list[Ns]
    lost: list[CauseStored]
    lengths: list[str]


class ModelStored(Struct, frozen=True):
    model: str
    gpus: Annotated[int, msgspec.Meta(ge=1)]


class VersionStored(Struct, frozen=True):
    name: str
    version: str


class FingerprintStored(Struct, frozen=True):
    started_at_ns: Ns | None
    recordings: list[str]
    gpu_models: list[ModelStored]
    nodes: Ns | None
    world_size: Ns | None
    batch_size: Natural | None
    tokens: Natural | None
    measured_by: list[str]
    frameworks: list[VersionStored]
    drivers: list[str]
    recorder: list[str]
    restarts: Ns


class ReportStored(Struct, frozen=True):
    format: Literal["clusterprof-report"]
    schema_version: Literal[1]
    title: str
    emulated: bool
    job: JobStored | None
    ledger: LedgerStored
    findings: list[FindingStored]
    ranks: list[RankStored]
    metrics: list[MetricStored]
    not_seen: list[BlindStored]
    nodes: list[NodeStored]
    notes: list[str]
    steps: StepsStored | None
    likeness: FingerprintStored | None


_RATIO_PREFIXES = ("gpu.", "lost.", "productive.", "stall.", "unattributed.", "coverage.", "au_")
_LEDGER_FIELDS = (
    "window_ns",
    "unmeasured_ns",
    "outside_ns",
    "in_step_ns",
    "productive_ns",
    "lost_ns",
)
_RATIO_TOLERANCE = 1e-9


def find_imbalance(report: Report) -> str:
    """Return a description of the first sum that does not hold; "" when all hold."""
    return next(_iterate_imbalances(report), "")


def _iterate_imbalances(report: Report) -> Iterator[str]:
    yield from _check_ledger("all ranks", report)
    for rank in report.ranks:
        yield from _check_ledger(f"rank {rank.rank}, pid {rank.pid}", rank)
        if sum(ns for _, ns in rank.buckets) != rank.lost_ns:
            yield f"causes of rank {rank.rank}, pid {rank.pid}"
        if sum(ns for _, ns in rank.outside_buckets) != rank.outside_ns:
            yield f"time outside steps of rank {rank.rank}, pid {rank.pid}"
    for name in _LEDGER_FIELDS:
        if getattr(report, name) != sum(getattr(rank, name) for rank in report.ranks):
            yield f"{name} of all ranks"
    if sum(ns for _, ns in report.unattributed_reasons) != report.unattributed_ns:
        yield "reasons of unattributed time"
    if report.unattributed_ns != _sum_bucket(report, UNATTRIBUTED):
        yield "unattributed time of all ranks"
    for finding in report.findings:
        if not finding.outside_steps and finding.lost_ns != _sum_bucket(report, finding.cause.id):
            yield f"the finding {finding.cause.id}"
    yield from _check_metrics(report)
    yield from _check_blocks(report)


def _check_ledger(owner: str, ledger: Report | RankLedger) -> Iterator[str]:
    if ledger.window_ns != ledger.unmeasured_ns + ledger.outside_ns + ledger.in_step_ns:
        yield f"the time of {owner}"
    if ledger.in_step_ns != ledger.productive_ns + ledger.lost_ns:
        yield f"the time in steps of {owner}"


def _sum_bucket(report: Report, cause: str) -> int:
    return sum(ns for rank in report.ranks for id_, ns in rank.buckets if id_ == cause)


def _check_metrics(report: Report) -> Iterator[str]:
    names = [metric.name for metric in report.metrics]
    if len(set(names)) < len(names):
        yield "a duplicate metric"
    steps = float(sum(rank.steps for rank in report.ranks))
    expected = {
        "lost.ratio": _compute_share(report.lost_ns, report),
        "productive.ratio": _compute_share(report.productive_ns, report),
        "unattributed.ratio": _compute_share(report.unattributed_ns, report),
        "step.count": steps,
    }
    for metric in report.metrics:
        value = metric.value
        try:
            unit: str | None = infer_unit(metric.name.replace(".", "_"))
        except ValueError:
            unit = None  # a unit of a later version
        if unit is not None and unit != metric.unit:
            yield f"the unit of {metric.name}"
        if value is None:
            continue
        if value < 0 or (
            metric.name.startswith(_RATIO_PREFIXES) and metric.unit == "ratio" and value > 1
        ):
            yield f"{metric.name} is {value:g}"
        wanted = expected.get(metric.name)
        if wanted is not None and abs(value - wanted) > _RATIO_TOLERANCE:
            yield f"{metric.name} is {value:g}, but its parts give {wanted:g}"


def _compute_share(ns: int, report: Report) -> float | None:
    return ns / report.in_step_ns if report.in_step_ns else None


def _check_blocks(report: Report) -> Iterator[str]:
    stats = report.steps
    if stats is None:
        return
    columns = [getattr(stats, name) for name in ("step_ns", "in_step_ns", "measured_ns", "busy_ns")]
    columns += [stats.lost_ns, stats.lengths, *(ns for _, _, ns in stats.lost)]
    if any(len(column) != stats.blocks for column in columns):
        yield "blocks of steps that differ in number"
        return
    for name in ("in_step_ns", "lost_ns"):
        if sum(getattr(stats, name)) != getattr(report, name):
            yield f"{name} of blocks of steps"
    if sum(stats.steps) > sum(rank.steps for rank in report.ranks):
        yield "steps of blocks"
    if any(sum(n for _, n in block) != steps for block, steps in zip(stats.lengths, stats.steps)):
        yield "lengths of steps in a block"
    if any(busy > seen for busy, seen in zip(stats.busy_ns, stats.measured_ns)):
        yield "busy time of blocks"
    for cause, _, ns in stats.lost:
        if sum(ns) != _sum_bucket(report, cause):
            yield f"{cause} in blocks of steps"


MAX_BYTES = 1 << 30
_EXPORT_COMMAND = "clusterprof analyze RUN --json -o report.json"


def is_report(path: Path) -> bool:
    """Return whether a path is a file that begins like JSON, rather than a recording."""
    try:
        with open(path, "rb") as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    except OSError:
        return False


def load_report(path: Path) -> Report:
    """Load a stored report.

    Raises: NoRecording when the file cannot be read, is not a report, or does not add up.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise NoRecording(f"{path}: is larger than {MAX_BYTES >> 30} GiB", _EXPORT_COMMAND)
        # decoded as text first: the JSON decoder does not validate the bytes of keys it ignores
        text = path.read_bytes().decode("utf-8")
        stored = msgspec.json.decode(text, type=ReportStored)
        json.loads(text, object_pairs_hook=_check_duplicate_keys)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise NoRecording(f"{path}: {reason}") from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise NoRecording(
            f"{path}: is not a report of this version: {error}", _format_hint()
        ) from None
    try:
        report = _convert_report(stored, str(path))
    except (ValueError, OverflowError) as error:
        raise NoRecording(f"{path}: {error}", _format_hint()) from None
    wrong = find_imbalance(report)
    if wrong:
        raise NoRecording(f"{path}: does not add up: {wrong}", _format_hint())
    return report


def _check_duplicate_keys(pairs: list[tuple[str, Any]]) -> None:
    """Raise ValueError for a duplicate key: the decoder would silently take the last one."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice in an object")


def _format_hint() -> str:
    return f"a report is made by: {_EXPORT_COMMAND}"


def _convert_report(stored: ReportStored, title: str) -> Report:
    ledger = stored.ledger
    if {cause: ns for cause, ns in _convert_buckets(ledger.buckets) if ns} != _sum_buckets(
        stored.ranks
    ):
        raise ValueError("does not add up: causes of all ranks")
    if dict(_convert_buckets(ledger.buckets)).get(UNATTRIBUTED, 0) != ledger.unattributed_ns:
        raise ValueError("does not add up: unattributed time and its bucket")
    return Report(
        title=title,
        emulated=stored.emulated,
        nodes=tuple(NodeFacts(**msgspec.structs.asdict(node)) for node in stored.nodes),
        ranks=tuple(map(_convert_rank, stored.ranks)),
        window_ns=ledger.window_ns,
        unmeasured_ns=ledger.unmeasured_ns,
        outside_ns=ledger.outside_ns,
        in_step_ns=ledger.in_step_ns,
        productive_ns=ledger.productive_ns,
        lost_ns=ledger.lost_ns,
        findings=tuple(map(_convert_finding, stored.findings)),
        unattributed_ns=ledger.unattributed_ns,
        unattributed_reasons=tuple((r.reason, r.ns) for r in ledger.unattributed_reasons),
        outside_buckets=_convert_buckets(ledger.outside_buckets),
        metrics=tuple(map(_convert_metric, stored.metrics)),
        blinds=tuple(CoverageGap(**msgspec.structs.asdict(blind)) for blind in stored.not_seen),
        notes=tuple(stored.notes),
        job=None if stored.job is None else JobFacts(**msgspec.structs.asdict(stored.job)),
        steps=None if stored.steps is None else _convert_steps(stored.steps),
        likeness=None if stored.likeness is None else _convert_fingerprint(stored.likeness),
    )


def _sum_buckets(ranks: list[RankStored]) -> dict[str, int]:
    out: dict[str, int] = {}
    for rank in ranks:
        for cause, ns in _convert_buckets(rank.buckets):
            out[cause] = out.get(cause, 0) + ns
    return {cause: ns for cause, ns in out.items() if ns}


def _convert_rank(stored: RankStored) -> RankLedger:
    fields = msgspec.structs.asdict(stored)
    fields["buckets"], fields["outside_buckets"] = (
        _convert_buckets(stored.buckets),
        _convert_buckets(stored.outside_buckets),
    )
    if stored.coverage_ratio is None:
        fields["coverage_ratio"] = math.nan  # no rule can be decided with it then
    return RankLedger(**fields)


def _convert_buckets(buckets: list[BucketStored]) -> tuple[tuple[str, int], ...]:
    return tuple((bucket.cause, bucket.ns) for bucket in buckets)


def _convert_finding(stored: FindingStored) -> Finding:
    return Finding(
        Cause(stored.cause, stored.family, stored.title, stored.advice),
        stored.lost_ns,
        stored.share_ratio or 0.0,
        stored.recoverable_ns,
        stored.confidence_ratio or 0.0,
        stored.grade,
        stored.upper_bound,
        stored.outside_steps,
        tuple(Culprit(c.node, c.rank, c.device, c.resource) for c in stored.culprits),
    )


def _convert_metric(stored: MetricStored) -> Metric:
    return Metric(stored.name, stored.value, stored.unit, stored.why_missing, stored.bound)


def _convert_steps(stored: StepsStored) -> StepStats:
    columns = ("steps", "step_ns", "in_step_ns", "measured_ns", "busy_ns", "lost_ns")
    return StepStats(
        width=stored.width,
        **{name: tuple(getattr(stored, name)) for name in columns},
        lost=tuple((c.cause, c.family, tuple(c.ns)) for c in stored.lost),
        lengths=tuple(map(_parse_lengths, stored.lengths)),
    )


def _parse_lengths(text: str) -> tuple[tuple[int, int], ...]:
    pairs = tuple(tuple(map(int, word.split(":"))) for word in text.split())
    if any(len(pair) != 2 or not 0 <= pair[0] < 1 << 16 or pair[1] < 1 for pair in pairs):
        raise ValueError("the step lengths are not pairs BIN:COUNT in the valid range")
    return pairs  # type: ignore[return-value]


def _convert_fingerprint(stored: FingerprintStored) -> RunFingerprint:
    fields = msgspec.structs.asdict(stored)
    fields["gpu_models"] = tuple((m.model, m.gpus) for m in stored.gpu_models)
    fields["frameworks"] = tuple((v.name, v.version) for v in stored.frameworks)
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return RunFingerprint(**{**fields, **lists})
