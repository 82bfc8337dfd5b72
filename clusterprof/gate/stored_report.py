"""Load a report that `analyze --json` wrote, strictly, so that a gate need not analyze
again.

A file that does not fit `report.document`, does not add up to the nanosecond or contradicts
itself is rejected: nothing is filled in. Unknown keys are ignored, because newer versions add keys;
so are the parts that no verdict needs.

Every report keeps certain sums; a report that fails them was cut, edited or mixed up.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import msgspec.inspect

from clusterprof.errors import NoRecording
from clusterprof.report import document, document_base, model
from clusterprof.report.history import StepStats
from clusterprof.report.model import UNATTRIBUTED, Cause, Finding, RankLedger, RankSum, Report
from clusterprof.units import infer_unit

_Model = TypeVar("_Model")
_Undecoded = dict[str, msgspec.Raw]
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
    owners: list[tuple[str, RankLedger | RankSum]] = [
        *((f"rank {rank.rank}, pid {rank.pid}", rank) for rank in report.ranks),
        *(
            (f"the other ranks of {ranks.grouped_by} {ranks.name}", ranks)
            for ranks in report.unlisted
        ),
    ]
    for owner, ledger in owners:
        yield from _check_ledger(owner, ledger)
        if sum(ns for _, ns in ledger.buckets) != ledger.lost_ns:
            yield f"causes of {owner}"
        if sum(ns for _, ns in ledger.outside_buckets) != ledger.outside_ns:
            yield f"time outside steps of {owner}"
    for name in _LEDGER_FIELDS:
        if getattr(report, name) != sum(getattr(ledger, name) for ledger in report.ledgers):
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


def _check_ledger(owner: str, ledger: Report | RankLedger | RankSum) -> Iterator[str]:
    if ledger.window_ns != ledger.unmeasured_ns + ledger.outside_ns + ledger.in_step_ns:
        yield f"the time of {owner}"
    if ledger.in_step_ns != ledger.productive_ns + ledger.lost_ns:
        yield f"the time in steps of {owner}"


def _sum_bucket(report: Report, cause: str) -> int:
    return sum(ns for ledger in report.ledgers for id_, ns in ledger.buckets if id_ == cause)


def _check_metrics(report: Report) -> Iterator[str]:
    names = [metric.name for metric in report.metrics]
    if len(set(names)) < len(names):
        yield "a duplicate metric"
    steps = float(sum(ledger.steps for ledger in report.ledgers))
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
    if sum(stats.steps) > sum(ledger.steps for ledger in report.ledgers):
        yield "steps of blocks"
    if any(sum(n for _, n in block) != steps for block, steps in zip(stats.lengths, stats.steps)):
        yield "lengths of steps in a block"
    if any(busy > measured for busy, measured in zip(stats.busy_ns, stats.measured_ns)):
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
        stored = _decode_document(text)
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


class _Findings(msgspec.Struct):
    """The findings of a report, their keys not decoded yet."""

    findings: tuple[_Undecoded, ...] = ()


def _decode_document(text: str) -> document.Report:
    """Decode the keys without a default, of the report and its findings, and the unlisted ranks.

    No verdict needs the others.

    Raises: ValidationError with the place of the first wrong value.
    """
    parts: dict[str, object] = {**msgspec.json.decode(text, type=_Undecoded)}
    findings = msgspec.json.decode(text, type=_Findings).findings
    if "findings" in parts:
        parts["findings"] = [_select_required(finding, document.Finding) for finding in findings]
    required = _select_required(parts, document.Report)
    if "unlisted" in parts:  # reports of up to 512 ranks and of older versions have none
        required["unlisted"] = parts["unlisted"]
    return msgspec.json.decode(msgspec.json.encode(required), type=document.Report)


def _select_required(
    parts: Mapping[str, object], type_: type[document_base.Document]
) -> dict[str, object]:
    return {name: parts[name] for name in _list_required_keys(type_) if name in parts}


@cache
def _list_required_keys(type_: type[document_base.Document]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(type_) if field.required)


def _convert_report(stored: document.Report, title: str) -> Report:
    ranks = tuple(map(_convert_rank, stored.ranks))
    unlisted = tuple(_build_model(RankSum, ranks) for ranks in stored.unlisted)
    buckets = {bucket.cause: bucket.ns for bucket in stored.ledger.buckets}
    if {cause: ns for cause, ns in buckets.items() if ns} != _sum_buckets((*ranks, *unlisted)):
        raise ValueError("does not add up: causes of all ranks")
    if buckets.get(UNATTRIBUTED, 0) != stored.ledger.unattributed_ns:
        raise ValueError("does not add up: unattributed time and its bucket")
    return _build_model(
        Report,
        stored.ledger,
        title=title,
        emulated=stored.emulated,
        nodes=tuple(_build_model(model.NodeFacts, node) for node in stored.nodes),
        ranks=ranks,
        unlisted=unlisted,
        findings=tuple(map(_convert_finding, stored.findings)),
        metrics=tuple(_build_model(model.Metric, metric) for metric in stored.metrics),
        coverage_gaps=tuple(_build_model(model.CoverageGap, gap) for gap in stored.not_seen),
        notes=stored.notes,
        job=stored.job and _build_model(model.JobFacts, stored.job),
        steps=stored.steps and _convert_steps(stored.steps),
        fingerprint=stored.likeness and _build_model(model.RunFingerprint, stored.likeness),
    )


def _sum_buckets(ledgers: Iterable[RankLedger | RankSum]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for cause, ns in chain.from_iterable(ledger.buckets for ledger in ledgers):
        sums[cause] = sums.get(cause, 0) + ns
    return {cause: ns for cause, ns in sums.items() if ns}


def _build_model(class_: type[_Model], stored: document_base.Document, **changes: Any) -> _Model:
    """Build an object of the model from the keys that are written from it, and from `changes`."""
    keys = _map_attributes(type(stored))
    values = {
        field.name: _convert_rows(getattr(stored, keys[field.name]))
        for field in dataclasses.fields(class_)  # type: ignore[arg-type]
        if field.name in keys
    }
    return class_(**{**values, **changes})


@cache
def _map_attributes(stored: type[document_base.Document]) -> dict[str, str]:
    """Map the attributes of a class of the model to the keys that are written from them."""
    keys = {}
    for field in msgspec.inspect.type_info(stored).fields:  # type: ignore[attr-defined]
        marks = getattr(field.type, "extra", None) or {}
        keys[marks.get("source", field.name)] = field.name
    return keys


def _convert_rows(value: Any) -> Any:
    """Convert the rows in a value to tuples."""
    if isinstance(value, document_base.Row):
        return _convert_rows(msgspec.structs.astuple(value))
    return tuple(map(_convert_rows, value)) if isinstance(value, tuple) else value


def _convert_rank(stored: document.RankLedger) -> RankLedger:
    unknown = stored.coverage_ratio is None  # no rule can be decided with it then
    coverage_ratio = math.nan if unknown else stored.coverage_ratio
    return _build_model(RankLedger, stored, coverage_ratio=coverage_ratio)


def _convert_finding(stored: document.Finding) -> Finding:
    return _build_model(
        Finding,
        stored,
        cause=Cause(stored.cause, stored.family, stored.title, stored.advice),
        share_ratio=stored.share_ratio or 0.0,
        confidence_ratio=stored.confidence_ratio or 0.0,
        culprits=tuple(_build_model(model.Culprit, culprit) for culprit in stored.culprits),
        culprit_group=stored.culprit_group
        and _build_model(model.CulpritGroup, stored.culprit_group),
        advice=(),
    )


def _convert_steps(stored: document.StepStats) -> StepStats:
    return _build_model(StepStats, stored, lengths=tuple(map(_parse_lengths, stored.lengths)))


def _parse_lengths(text: str) -> tuple[tuple[int, int], ...]:
    pairs = tuple(tuple(map(int, word.split(":"))) for word in text.split())
    if any(len(pair) != 2 or not 0 <= pair[0] < 1 << 16 or pair[1] < 1 for pair in pairs):
        raise ValueError("the step lengths are not pairs BIN:COUNT in the valid range")
    return pairs  # type: ignore[return-value]
