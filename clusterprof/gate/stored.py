"""A report that `analyze --json` wrote, read back strictly, so that a gate need not analyse again.

Whatever does not fit the schema, does not add up to the nanosecond or contradicts itself is no
report: nothing is filled in. Keys that are not known are passed over; versions only add some.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from clusterprof.errors import NoRecording
from clusterprof.findings import (
    UNATTRIBUTED,
    Blind,
    Cause,
    Culprit,
    Finding,
    JobFacts,
    Metric,
    NodeFacts,
    RankLedger,
    Report,
)
from clusterprof.gate.stored_schema import (
    BucketStored,
    FindingStored,
    LikenessStored,
    MetricStored,
    RankStored,
    ReportStored,
    StepsStored,
)
from clusterprof.gate.stored_sums import imbalance
from clusterprof.likeness import Likeness
from clusterprof.stepstats import StepStats

MAX_BYTES = 1 << 30
_MADE_BY = "clusterprof analyze RUN --json -o report.json"


def is_report(path: Path) -> bool:
    """Return whether a path is a file that begins as JSON does, rather than a recording."""
    try:
        with open(path, "rb") as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    except OSError:
        return False


def load(path: Path) -> Report:
    """Read a report; raise NoRecording for a file that is none, or is not whole."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise NoRecording(f"{path}: is larger than {MAX_BYTES >> 30} GiB", _MADE_BY)
        # as text: bytes of what is passed over are not looked at otherwise
        text = path.read_bytes().decode("utf-8")
        stored = msgspec.json.decode(text, type=ReportStored)
        json.loads(text, object_pairs_hook=_once)
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise NoRecording(f"{path}: {reason}") from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise NoRecording(f"{path}: is no report of this version: {error}", _made()) from None
    try:
        report = _report(stored, str(path))
    except (ValueError, OverflowError) as error:
        raise NoRecording(f"{path}: {error}", _made()) from None
    wrong = imbalance(report)
    if wrong:
        raise NoRecording(f"{path}: does not add up: {wrong}", _made())
    return report


def _once(pairs: list[tuple[str, Any]]) -> None:
    """Raise ValueError for a key that comes twice: of two the decoder silently takes the last."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} comes twice in an object")


def _made() -> str:
    return f"a report is made by: {_MADE_BY}"


def _report(one: ReportStored, title: str) -> Report:
    ledger = one.ledger
    if {cause: ns for cause, ns in _pairs(ledger.buckets) if ns} != _summed(one.ranks):
        raise ValueError("does not add up: causes of all ranks")
    if dict(_pairs(ledger.buckets)).get(UNATTRIBUTED, 0) != ledger.unattributed_ns:
        raise ValueError("does not add up: unattributed time and its bucket")
    return Report(
        title=title,
        emulated=one.emulated,
        nodes=tuple(NodeFacts(**msgspec.structs.asdict(node)) for node in one.nodes),
        ranks=tuple(map(_rank, one.ranks)),
        window_ns=ledger.window_ns,
        unmeasured_ns=ledger.unmeasured_ns,
        outside_ns=ledger.outside_ns,
        in_step_ns=ledger.in_step_ns,
        productive_ns=ledger.productive_ns,
        lost_ns=ledger.lost_ns,
        findings=tuple(map(_finding, one.findings)),
        unattributed_ns=ledger.unattributed_ns,
        unattributed_reasons=tuple((r.reason, r.ns) for r in ledger.unattributed_reasons),
        outside_buckets=_pairs(ledger.outside_buckets),
        metrics=tuple(map(_metric, one.metrics)),
        blinds=tuple(Blind(**msgspec.structs.asdict(blind)) for blind in one.not_seen),
        notes=tuple(one.notes),
        job=None if one.job is None else JobFacts(**msgspec.structs.asdict(one.job)),
        steps=None if one.steps is None else _steps(one.steps),
        likeness=None if one.likeness is None else _likeness(one.likeness),
    )


def _summed(ranks: list[RankStored]) -> dict[str, int]:
    out: dict[str, int] = {}
    for rank in ranks:
        for cause, ns in _pairs(rank.buckets):
            out[cause] = out.get(cause, 0) + ns
    return {cause: ns for cause, ns in out.items() if ns}


def _rank(one: RankStored) -> RankLedger:
    fields = msgspec.structs.asdict(one)
    fields["buckets"], fields["outside_buckets"] = _pairs(one.buckets), _pairs(one.outside_buckets)
    if one.coverage_ratio is None:
        fields["coverage_ratio"] = math.nan  # no rule is told by it then
    return RankLedger(**fields)


def _pairs(buckets: list[BucketStored]) -> tuple[tuple[str, int], ...]:
    return tuple((bucket.cause, bucket.ns) for bucket in buckets)


def _finding(one: FindingStored) -> Finding:
    return Finding(
        Cause(one.cause, one.family, one.title, one.advice),
        one.lost_ns, one.share_ratio or 0.0, one.recoverable_ns, one.confidence_ratio or 0.0,
        one.grade, one.upper_bound, one.outside_steps,
        tuple(Culprit(c.node, c.rank, c.device, c.resource) for c in one.culprits),
    )  # fmt: skip


def _metric(one: MetricStored) -> Metric:
    return Metric(one.name, one.value, one.unit, one.why_missing, one.bound)


def _steps(one: StepsStored) -> StepStats:
    columns = ("steps", "step_ns", "in_step_ns", "measured_ns", "busy_ns", "lost_ns")
    return StepStats(
        width=one.width,
        **{name: tuple(getattr(one, name)) for name in columns},
        lost=tuple((c.cause, c.family, tuple(c.ns)) for c in one.lost),
        lengths=tuple(map(_lengths, one.lengths)),
    )


def _lengths(text: str) -> tuple[tuple[int, int], ...]:
    pairs = tuple(tuple(map(int, word.split(":"))) for word in text.split())
    if any(len(pair) != 2 or not 0 <= pair[0] < 1 << 16 or pair[1] < 1 for pair in pairs):
        raise ValueError("the lengths of steps are not what they should be")
    return pairs  # type: ignore[return-value]


def _likeness(one: LikenessStored) -> Likeness:
    fields = msgspec.structs.asdict(one)
    fields["gpu_models"] = tuple((m.model, m.gpus) for m in one.gpu_models)
    fields["frameworks"] = tuple((v.name, v.version) for v in one.frameworks)
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Likeness(**{**fields, **lists})
