"""The whole report as one JSON document (RFC 8259), described by `schema/report.schema.json`.

Times are integer nanoseconds, so that the sums of the ledger can be redone exactly. What is not
known is null, never 0. Only ASCII is written, and foreign strings pass `safe_text` like everywhere,
so that even `jq -r` prints nothing that controls a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from clusterprof.beside import Beside
from clusterprof.findings import Evidence, Finding, Metric, NodeFacts, RankLedger, Report, Tail
from clusterprof.hostlists import fold
from clusterprof.persistence import Persistence, Since
from clusterprof.renderers import advised, json_history, json_steps, json_underfill
from clusterprof.renderers.json_values import number, reasons, text
from clusterprof.renderers.words import summed
from clusterprof.renderers.worth import document as worth_document

FORMAT = "clusterprof-report"


class Json:
    """The whole report for programs: a versioned schema, exact nanoseconds."""

    name: ClassVar[str] = "json"
    suffix: ClassVar[str] = ".json"

    def render(self, report: Report) -> str:
        """Return one JSON document."""
        return json.dumps(document(report), indent=2, allow_nan=False) + "\n"


def document(report: Report) -> dict[str, Any]:
    """Return the document as plain values, in the order of the schema."""
    return {
        "format": FORMAT,
        "schema_version": report.schema_version,
        "title": text(report.title),
        "emulated": report.emulated,
        "job": _job(report),
        "ledger": {
            "window_ns": report.window_ns,
            "unmeasured_ns": report.unmeasured_ns,
            "outside_ns": report.outside_ns,
            "in_step_ns": report.in_step_ns,
            "productive_ns": report.productive_ns,
            "lost_ns": report.lost_ns,
            "buckets": _buckets(tuple(summed(report).items())),
            "unattributed_ns": report.unattributed_ns,
            "unattributed_reasons": reasons(report.unattributed_reasons),
            "outside_buckets": _buckets(report.outside_buckets),
            "caused_by_nobody": _buckets(report.nobody),
        },
        "findings": [_finding(finding) for finding in report.findings],
        "ranks": [_rank(rank) for rank in report.ranks],
        "underfill": json_underfill.underfill(report.underfill),
        "worth": worth_document(report.worth),
        "tail": _tail(report.tail),
        "metrics": [_metric(metric) for metric in report.metrics],
        "not_seen": [
            {
                "what": text(blind.what),
                "kind": text(blind.kind),
                "message": text(blind.message),
                "remedy": text(blind.remedy),
            }
            for blind in report.blinds
        ],
        "nodes": [_node(node) for node in report.nodes],
        "notes": [text(note) for note in report.notes],
        "steps": json_steps.steps(report.steps),
        "likeness": json_steps.likeness(report.likeness),
        "history": json_history.history(report),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    cause = finding.cause
    return {
        "cause": text(cause.id),
        "family": text(cause.family),
        "title": text(cause.title),
        "advice": text(cause.advice),
        "lost_ns": finding.lost_ns,
        "share_ratio": number(finding.share_ratio),
        "recoverable_ns": finding.recoverable_ns,
        "confidence_ratio": number(finding.confidence_ratio),
        "grade": finding.grade,
        "upper_bound": finding.upper_bound,
        "outside_steps": finding.outside_steps,
        "culprits": [
            {
                "node": text(culprit.node),
                "rank": culprit.rank,
                "device": text(culprit.device),
                "resource": text(culprit.resource),
                "own_ns": culprit.own_ns,
                "others_ns": culprit.others_ns,
                "victims": culprit.victims,
                "recoverable_ns": culprit.recoverable_ns,
            }
            for culprit in finding.culprits
        ],
        "persistence": _persistence(finding.persistence),
        "compared": _compared(finding.compared),
        "since": _since(finding.since),
        "more_why": text(finding.more_why),
        "withheld": [text(one) for one in finding.withheld],
        "evidence": [_evidence(item) for item in finding.evidence],
        "remedies": [advised.document(one, text) for one in finding.advice],
    }


def _since(found: Since | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"run_ns": found.run_ns, "step": found.step, "steps": found.steps}


def _job(report: Report) -> dict[str, Any] | None:
    job = report.job
    if job is None:
        return None
    return {
        "hosts": text(fold(text(node.name) for node in report.nodes)),
        "world_size": job.world_size,
        "gpus": job.gpus,
        "coverage_ratio": number(job.coverage_ratio),
        "clock_bound_ns": job.clock_bound_ns,
        "clock_why": text(job.clock_why),
    }


def _tail(tail: Tail | None) -> dict[str, Any] | None:
    if tail is None:
        return None
    return {
        "steps": tail.steps,
        "slow_steps": tail.slow,
        "p50_ns": tail.p50_ns,
        "p99_ns": tail.p99_ns,
        "set_by": [
            {"node": text(node), "rank": rank, "steps": steps} for node, rank, steps in tail.set_by
        ],
        "why_missing": text(tail.why_missing),
    }


def _persistence(found: Persistence | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "kind": text(found.kind),
        "from_ns": found.from_ns,
        "to_ns": found.to_ns,
        "stretches": found.stretches,
        "seen_stretches": found.seen,
        "culprits": found.culprits,
        "chief_stretches": found.most,
    }


def _compared(found: Beside | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "name": text(found.name),
        "unit": text(found.unit),
        "value": number(found.value),
        "others_value": number(found.others),
        "others": found.many,
        "of": text(found.of),
        "note": text(found.note),
    }


def _evidence(item: Evidence) -> dict[str, Any]:
    return {
        "name": text(item.name),
        "value": number(item.value),
        "unit": text(item.unit),
        "note": text(item.note),
    }


def _rank(rank: RankLedger) -> dict[str, Any]:
    return {
        "node": text(rank.node),
        "rank": rank.rank,
        "pid": rank.pid,
        "device": text(rank.device),
        "source": text(rank.source),
        "steps": rank.steps,
        "coverage_ratio": number(rank.coverage_ratio),
        "window_ns": rank.window_ns,
        "unmeasured_ns": rank.unmeasured_ns,
        "outside_ns": rank.outside_ns,
        "in_step_ns": rank.in_step_ns,
        "productive_ns": rank.productive_ns,
        "lost_ns": rank.lost_ns,
        "buckets": _buckets(rank.buckets),
        "outside_buckets": _buckets(rank.outside_buckets),
        "caused": _buckets(rank.caused),
    }


def _metric(metric: Metric) -> dict[str, Any]:
    return {
        "name": text(metric.name),
        "value": number(metric.value),
        "unit": text(metric.unit),
        "bound": metric.bound,
        "why_missing": text(metric.why_missing),
    }


def _node(node: NodeFacts) -> dict[str, Any]:
    return {
        "name": text(node.name),
        "key": text(node.key),
        "boot_id": text(node.boot_id),
        "duration_ns": node.duration_ns,
        "damaged_bytes": node.damaged_bytes,
        "dropped_spans": node.dropped_spans,
        "recorder_cpu_ratio": number(node.recorder_cpu_ratio),
    }


def _buckets(buckets: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"cause": text(cause), "ns": ns} for cause, ns in buckets]
