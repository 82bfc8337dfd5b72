"""A report as metric families in base units: what OpenMetrics, Prometheus and OTLP are told.

What is not known has no point, and stands in `clusterprof_unknown` with its reason: an absent
number is not 0. Counters are sums over the run; a recording that grows only adds to them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from clusterprof.findings import Metric, RankLedger, Report
from clusterprof.renderers import metric_names as names
from clusterprof.renderers.metric_dcgm import dcgm
from clusterprof.renderers.metric_names import SECOND_NS, Described, Family, Point, Points
from clusterprof.renderers.text_safety import safe_text

_LONG = 1000
_STEP_PERCENTILES = {"step.p50_ns": "50", "step.p95_ns": "95", "step.p99_ns": "99"}
_ELSEWHERE = frozenset({"step.count"})  # it is `clusterprof_steps`, by rank
_STALL = "stall."


def families(report: Report) -> tuple[Family, ...]:
    """Return all families with at least one point, in a fixed order."""
    points: dict[Described, list[Point]] = {described: [] for described in names.ALL}
    points[names.REPORT].append(
        _point(1, title=report.title, emulated=str(report.emulated).lower())
    )
    _ledger(report, points)
    _findings(report, points)
    for metric in report.metrics:
        _metric(metric, points)
    for node in report.nodes:
        points[names.RECORDED].append(_point(node.duration_ns / SECOND_NS, node=node.name))
        points[names.DAMAGED].append(_point(node.damaged_bytes, node=node.name))
        points[names.DROPPED].append(_point(node.dropped_spans, node=node.name))
    dcgm(report, points)
    return tuple(Family(described, _once(described, some)) for described, some in points.items()
                 if some)  # fmt: skip


def _point(value: float, **labels: str) -> Point:
    return Point(tuple((key, safe_text(text, _LONG)) for key, text in labels.items()), value)


def _once(described: Described, points: Iterable[Point]) -> tuple[Point, ...]:
    """Add up counters that carry the same labels (a rank that began anew); else the last holds."""
    found: dict[tuple[tuple[str, str], ...], float] = {}
    for point in points:
        if not math.isfinite(point.value):
            continue
        before = found.get(point.labels, 0.0) if described.kind == "counter" else 0.0
        found[point.labels] = before + point.value
    return tuple(Point(labels, value) for labels, value in found.items())


def _ledger(report: Report, points: Points) -> None:
    for rank in report.ranks:
        who = _who(rank)
        states = {
            "productive": rank.productive_ns,
            "lost": rank.lost_ns,
            "outside_steps": rank.outside_ns,
            "unmeasured": rank.unmeasured_ns,
        }
        for state, ns in states.items():
            points[names.OBSERVED].append(_point(ns / SECOND_NS, state=state, **who))
        for described, buckets in (
            (names.LOST, rank.buckets),
            (names.CAUSED, rank.caused),
            (names.OUTSIDE, rank.outside_buckets),
        ):
            for cause, ns in buckets:
                points[described].append(_point(ns / SECOND_NS, cause=cause, **who))
        points[names.STEPS].append(_point(rank.steps, **who))
    windows: dict[tuple[tuple[str, str], ...], tuple[int, int]] = {}
    for rank in report.ranks:
        key = tuple(_who(rank).items())
        window, unseen = windows.get(key, (0, 0))
        windows[key] = window + rank.window_ns, unseen + rank.unmeasured_ns
    for key, (window, unseen) in windows.items():
        if window:
            points[names.COVERAGE].append(_point(1 - unseen / window, **dict(key)))


def _who(rank: RankLedger) -> dict[str, str]:
    number = "" if rank.rank is None else str(rank.rank)
    return {"node": rank.node, "rank": number, "device": rank.device}


def _findings(report: Report, points: Points) -> None:
    for one in report.findings:
        where: Mapping[str, str] = {
            "cause": one.cause.id, "outside_steps": str(one.outside_steps).lower(),
        }  # fmt: skip
        points[names.CONFIDENCE].append(_point(one.confidence_ratio, **where))
        if one.recoverable_ns is not None:
            points[names.RECOVERABLE].append(_point(one.recoverable_ns / SECOND_NS, **where))
    worth = report.worth
    if worth is None:
        return
    for cause in worth.causes:
        if cause.lost_cost is not None:
            point = _point(cause.lost_cost, cause=cause.cause, currency=worth.currency)
            points[names.COST].append(point)
        if cause.saved_ns is not None:
            point = _point(cause.saved_ns / SECOND_NS, cause=cause.cause)
            points[names.SAVED].append(point)


def _metric(metric: Metric, points: Points) -> None:
    if metric.name in _ELSEWHERE:
        return
    if metric.value is None:
        why = metric.why_missing or "not known"
        points[names.UNKNOWN].append(_point(1, metric=metric.name, reason=why))
        return
    bound: Literal["exact", "at most", "at least"] = metric.bound
    if metric.name in _STEP_PERCENTILES:
        percentile = _STEP_PERCENTILES[metric.name]
        points[names.STEP].append(_point(metric.value / SECOND_NS, percentile=percentile))
    elif metric.name.startswith(_STALL):
        stall = metric.name.removeprefix(_STALL).removesuffix("_ratio")
        points[names.STALL].append(_point(metric.value, stall=stall, bound=bound))
    elif metric.name in names.OF_METRIC:
        points[names.OF_METRIC[metric.name]].append(_point(metric.value, bound=bound))
    else:
        point = _point(metric.value, metric=metric.name, unit=metric.unit, bound=bound)
        points[names.OTHER].append(point)
