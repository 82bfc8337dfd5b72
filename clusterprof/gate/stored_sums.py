"""The sums that every report keeps; one that does not was cut, edited or mixed up."""

from __future__ import annotations

from collections.abc import Iterator

from clusterprof.findings import UNATTRIBUTED, RankLedger, Report
from clusterprof.units import unit_of

_ONE_AT_MOST = ("gpu.", "lost.", "productive.", "stall.", "unattributed.", "coverage.", "au_")
_LEDGER = ("window_ns", "unmeasured_ns", "outside_ns", "in_step_ns", "productive_ns", "lost_ns")
_CLOSE = 1e-9


def imbalance(report: Report) -> str:
    """Return the first sum that does not hold, in words; "" when all hold."""
    return next(_wrong(report), "")


def _wrong(report: Report) -> Iterator[str]:
    yield from _ledger("all ranks", report)
    for rank in report.ranks:
        yield from _ledger(f"rank {rank.rank}, pid {rank.pid}", rank)
        if sum(ns for _, ns in rank.buckets) != rank.lost_ns:
            yield f"causes of rank {rank.rank}, pid {rank.pid}"
        if sum(ns for _, ns in rank.outside_buckets) != rank.outside_ns:
            yield f"time outside steps of rank {rank.rank}, pid {rank.pid}"
    for name in _LEDGER:
        if getattr(report, name) != sum(getattr(rank, name) for rank in report.ranks):
            yield f"{name} of all ranks"
    if sum(ns for _, ns in report.unattributed_reasons) != report.unattributed_ns:
        yield "reasons of unattributed time"
    if report.unattributed_ns != _bucket(report, UNATTRIBUTED):
        yield "unattributed time of all ranks"
    for finding in report.findings:
        if not finding.outside_steps and finding.lost_ns != _bucket(report, finding.cause.id):
            yield f"the finding {finding.cause.id}"
    yield from _metrics(report)
    yield from _blocks(report)


def _ledger(whose: str, one: Report | RankLedger) -> Iterator[str]:
    if one.window_ns != one.unmeasured_ns + one.outside_ns + one.in_step_ns:
        yield f"the time of {whose}"
    if one.in_step_ns != one.productive_ns + one.lost_ns:
        yield f"the time in steps of {whose}"


def _bucket(report: Report, cause: str) -> int:
    return sum(ns for rank in report.ranks for id_, ns in rank.buckets if id_ == cause)


def _metrics(report: Report) -> Iterator[str]:
    names = [metric.name for metric in report.metrics]
    if len(set(names)) < len(names):
        yield "a metric that is there twice"
    steps = float(sum(rank.steps for rank in report.ranks))
    told = {
        "lost.ratio": _share(report.lost_ns, report),
        "productive.ratio": _share(report.productive_ns, report),
        "unattributed.ratio": _share(report.unattributed_ns, report),
        "step.count": steps,
    }
    for metric in report.metrics:
        value = metric.value
        try:
            unit: str | None = unit_of(metric.name.replace(".", "_"))
        except ValueError:
            unit = None  # one that a later version has
        if unit is not None and unit != metric.unit:
            yield f"the unit of {metric.name}"
        if value is None:
            continue
        if value < 0 or (
            metric.name.startswith(_ONE_AT_MOST) and metric.unit == "ratio" and value > 1
        ):
            yield f"{metric.name} is {value:g}"
        wanted = told.get(metric.name)
        if wanted is not None and abs(value - wanted) > _CLOSE:
            yield f"{metric.name} is {value:g}, its parts say {wanted:g}"


def _share(ns: int, report: Report) -> float | None:
    return ns / report.in_step_ns if report.in_step_ns else None


def _blocks(report: Report) -> Iterator[str]:
    found = report.steps
    if found is None:
        return
    columns = [getattr(found, name) for name in ("step_ns", "in_step_ns", "measured_ns", "busy_ns")]
    columns += [found.lost_ns, found.lengths, *(ns for _, _, ns in found.lost)]
    if any(len(column) != found.blocks for column in columns):
        yield "blocks of steps that differ in number"
        return
    for name in ("in_step_ns", "lost_ns"):
        if sum(getattr(found, name)) != getattr(report, name):
            yield f"{name} of blocks of steps"
    if sum(found.steps) > sum(rank.steps for rank in report.ranks):
        yield "steps of blocks"
    if any(sum(n for _, n in block) != steps for block, steps in zip(found.lengths, found.steps)):
        yield "lengths of steps in a block"
    if any(busy > seen for busy, seen in zip(found.busy_ns, found.measured_ns)):
        yield "busy time of blocks"
    for cause, _, ns in found.lost:
        if sum(ns) != _bucket(report, cause):
            yield f"{cause} in blocks of steps"
