"""The whole report as one JSON document (RFC 8259), described by `schema/report.schema.json`.

Times are integer nanoseconds, so that the sums of the ledger can be redone exactly. What is not
known is null, never 0. Only ASCII is written, and foreign strings pass `safe_text` like everywhere,
so that even `jq -r` prints nothing that controls a terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from clusterprof.findings import (
    Evidence,
    Finding,
    Metric,
    NodeFacts,
    Persistence,
    RankLedger,
    Report,
    Tail,
)
from clusterprof.hostlists import fold
from clusterprof.renderers import advised, json_history, json_steps
from clusterprof.renderers.text_safety import safe_text
from clusterprof.renderers.words import summed
from clusterprof.renderers.worth import document as worth_document
from clusterprof.underfill import RankFill, Underfill

FORMAT = "clusterprof-report"
_LONG = 4096  # characters of one foreign string


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
        "title": _text(report.title),
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
            "unattributed_reasons": _reasons(report.unattributed_reasons),
            "outside_buckets": _buckets(report.outside_buckets),
            "caused_by_nobody": _buckets(report.nobody),
        },
        "findings": [_finding(finding) for finding in report.findings],
        "ranks": [_rank(rank) for rank in report.ranks],
        "underfill": _underfill(report.underfill),
        "worth": worth_document(report.worth),
        "tail": _tail(report.tail),
        "metrics": [_metric(metric) for metric in report.metrics],
        "not_seen": [
            {
                "what": _text(blind.what),
                "kind": _text(blind.kind),
                "message": _text(blind.message),
                "remedy": _text(blind.remedy),
            }
            for blind in report.blinds
        ],
        "nodes": [_node(node) for node in report.nodes],
        "notes": [_text(note) for note in report.notes],
        "steps": json_steps.steps(report.steps),
        "likeness": json_steps.likeness(report.likeness),
        "history": json_history.history(report),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    cause = finding.cause
    return {
        "cause": _text(cause.id),
        "family": _text(cause.family),
        "title": _text(cause.title),
        "advice": _text(cause.advice),
        "lost_ns": finding.lost_ns,
        "share_ratio": _number(finding.share_ratio),
        "recoverable_ns": finding.recoverable_ns,
        "confidence_ratio": _number(finding.confidence_ratio),
        "grade": finding.grade,
        "upper_bound": finding.upper_bound,
        "outside_steps": finding.outside_steps,
        "culprits": [
            {
                "node": _text(culprit.node),
                "rank": culprit.rank,
                "device": _text(culprit.device),
                "resource": _text(culprit.resource),
                "own_ns": culprit.own_ns,
                "others_ns": culprit.others_ns,
                "victims": culprit.victims,
                "recoverable_ns": culprit.recoverable_ns,
            }
            for culprit in finding.culprits
        ],
        "persistence": _persistence(finding.persistence),
        "evidence": [_evidence(item) for item in finding.evidence],
        "remedies": [advised.document(one, _text) for one in finding.advice],
    }


def _job(report: Report) -> dict[str, Any] | None:
    job = report.job
    if job is None:
        return None
    return {
        "hosts": _text(fold(_text(node.name) for node in report.nodes)),
        "world_size": job.world_size,
        "gpus": job.gpus,
        "coverage_ratio": _number(job.coverage_ratio),
        "clock_bound_ns": job.clock_bound_ns,
        "clock_why": _text(job.clock_why),
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
            {"node": _text(node), "rank": rank, "steps": steps} for node, rank, steps in tail.set_by
        ],
        "why_missing": _text(tail.why_missing),
    }


def _persistence(found: Persistence | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "kind": _text(found.kind),
        "from_ns": found.from_ns,
        "to_ns": found.to_ns,
        "stretches": found.stretches,
        "seen_stretches": found.seen,
        "culprits": found.culprits,
        "chief_stretches": found.most,
    }


def _evidence(item: Evidence) -> dict[str, Any]:
    return {
        "name": _text(item.name),
        "value": _number(item.value),
        "unit": _text(item.unit),
        "note": _text(item.note),
    }


def _rank(rank: RankLedger) -> dict[str, Any]:
    return {
        "node": _text(rank.node),
        "rank": rank.rank,
        "pid": rank.pid,
        "device": _text(rank.device),
        "source": _text(rank.source),
        "steps": rank.steps,
        "coverage_ratio": _number(rank.coverage_ratio),
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


def _underfill(found: Underfill | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        **_fill(found),
        "advice": [
            {
                "code": _text(one.code),
                "text": _text(one.text),
                "measured": one.measured,
                "confidence_ratio": _number(one.confidence_ratio),
                "grade": one.grade,
                "ranks": one.ranks,
            }
            for one in found.advice
        ],
        "ranks": [
            {
                "node": _text(one.node),
                "rank": one.rank,
                "pid": one.pid,
                "device": _text(one.device),
                **_fill(one),
                "levels": _levels(one),
                "advice": [_text(code) for code in one.advice],
            }
            for one in found.ranks
        ],
        "why_missing": _text(found.why_missing),
    }


def _fill(found: Underfill | RankFill) -> dict[str, Any]:
    return {
        "busy_ns": found.busy_ns,
        "lost_ns": found.lost_ns,
        "filled_ns": found.filled_ns,
        "underfilled_ns": found.underfilled_ns,
        "unmeasured_ns": found.unmeasured_ns,
        "unmeasured_reasons": _reasons(found.reasons),
    }


def _levels(one: RankFill) -> dict[str, Any]:
    levels = one.levels
    return {
        "sm_active_ratio": _number(levels.sm_active_ratio),
        "sm_active_p90_ratio": _number(levels.sm_active_p90_ratio),
        "sm_occupancy_ratio": _number(levels.sm_occupancy_ratio),
        "tensor_active_ratio": _number(levels.tensor_active_ratio),
        "dram_active_ratio": _number(levels.dram_active_ratio),
        "power_ratio": _number(levels.power_ratio),
        "memory_used_bytes": levels.memory_used_bytes,
        "memory_total_bytes": levels.memory_total_bytes,
        "host_on_cpu_ratio": _number(levels.host_on_cpu_ratio),
    }


def _metric(metric: Metric) -> dict[str, Any]:
    return {
        "name": _text(metric.name),
        "value": _number(metric.value),
        "unit": _text(metric.unit),
        "bound": metric.bound,
        "why_missing": _text(metric.why_missing),
    }


def _node(node: NodeFacts) -> dict[str, Any]:
    return {
        "name": _text(node.name),
        "key": _text(node.key),
        "boot_id": _text(node.boot_id),
        "duration_ns": node.duration_ns,
        "damaged_bytes": node.damaged_bytes,
        "dropped_spans": node.dropped_spans,
        "recorder_cpu_ratio": _number(node.recorder_cpu_ratio),
    }


def _buckets(buckets: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"cause": _text(cause), "ns": ns} for cause, ns in buckets]


def _reasons(reasons: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"reason": _text(reason), "ns": ns} for reason, ns in reasons]


def _text(text: str) -> str:
    return safe_text(text, _LONG)


def _number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity; a number that is none is not known."""
    return value if value is not None and math.isfinite(value) else None
