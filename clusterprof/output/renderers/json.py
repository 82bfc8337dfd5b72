"""The complete report as JSON (RFC 8259), described by `schema/report.schema.json`.

Times are integer nanoseconds, so that the sums of the ledger can be recomputed exactly.
Unknown values are null, never 0. Only ASCII is written, and foreign strings pass
`escape_text` as everywhere, so that even `jq -r` prints nothing
that controls a terminal.

Conversion of values to JSON: safe strings, finite numbers.

The history in the JSON report: all ranks together, in equal time bins of the run.

A history per rank would grow with the job; `export --to parquet` and the HTML page have
it. The size here is bounded: at most 240 time bins of 16 causes, 20 slow steps and 20
waits. Sums are exact: over all time bins they equal the ledger.

The run in blocks of steps, and the run's fingerprint, in the JSON report.

Device utilization while busy, in the JSON report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ClassVar

from clusterprof.output.renderers.text import advice
from clusterprof.output.renderers.text.impact import build_impact_document as worth_document
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.output.renderers.text.trend import Trend, detect_trend
from clusterprof.output.renderers.text.wording import sum_buckets
from clusterprof.report.history import WAITING_FOR_RANKS, History, StepStats
from clusterprof.report.impact import DeviceUtilization, RankUtilization
from clusterprof.report.model import (
    Evidence,
    Finding,
    Metric,
    NodeFacts,
    Onset,
    PeerComparison,
    Persistence,
    RankLedger,
    Report,
    RunFingerprint,
    Tail,
)
from clusterprof.util.ranges import format_host_list

_MAX_TEXT_CHARACTERS = 4096  # limit of one foreign string


def escape_string(foreign: str) -> str:
    """Escape a foreign string for JSON."""
    return escape_text(foreign, _MAX_TEXT_CHARACTERS)


def ensure_finite(value: float | None) -> float | None:
    """Return a number, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def convert_reasons(reasons: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Convert (reason, ns) pairs to JSON objects."""
    return [{"reason": escape_string(reason), "ns": ns} for reason, ns in reasons]


MAX_CAUSES, MAX_SLOW_STEPS, MAX_WAITS = 16, 20, 20
MAX_ENDED_RANKS = 64
OTHER_CAUSES = "others"
"""Name of the row that sums the smallest causes."""
_MAX_NAME_CHARACTERS = 200


def convert_history(report: Report) -> dict[str, Any] | None:
    """Convert the history to plain values; None if it was not computed."""
    history = report.history
    if history is None:
        return None
    who = _make_rank_lookup(report)
    longest = sorted(history.waits, key=lambda wait: (-wait.duration_ns, wait.start_ns))[:MAX_WAITS]
    return {
        "started_at_ns": history.started_at_ns,
        "begin_ns": history.begin_ns,
        "stretch_ns": history.stretch_ns,
        "in_step_ns": _sum_columns([rank.in_step_ns for rank in history.ranks], history.stretches),
        "lost": [
            {"cause": escape_text(cause, _MAX_NAME_CHARACTERS), "ns": ns}
            for cause, ns in _sum_lost_by_cause(history)
        ],
        "slow_steps": [
            {
                "number": step.number,
                "start_ns": step.start_ns,
                "duration_ns": step.duration_ns,
                "last_to_come": who(step.rank),
                "lost": [
                    {"cause": escape_text(cause, _MAX_NAME_CHARACTERS), "ns": ns}
                    for cause, ns in step.lost[:MAX_CAUSES]
                ],
            }
            for step in history.slow_steps[:MAX_SLOW_STEPS]
        ],
        "waits": [
            {
                "start_ns": wait.start_ns,
                "duration_ns": wait.duration_ns,
                "victim": who(wait.victim),
                "culprit": who(wait.culprit),
                "cause": escape_text(wait.cause, _MAX_NAME_CHARACTERS),
                "step": wait.step,
            }
            for wait in sorted(longest, key=lambda wait: wait.start_ns)
        ],
        "course": _convert_trend(detect_trend(report)),
        "ended": [{"rank": who(at), "run_ns": ns} for at, ns in history.ended[:MAX_ENDED_RANKS]],
        "why_missing": escape_text(history.why_missing, 400),
    }


def _convert_trend(trend: Trend | None) -> dict[str, Any] | None:
    if trend is None:
        return None
    return {
        "kind": trend.kind,
        "start_ns": trend.start_ns,
        "end_ns": trend.end_ns,
        "level_ratio": ensure_finite(trend.level_ratio),
        "else_ratio": ensure_finite(trend.rest_ratio),
    }


def _sum_lost_by_cause(history: History) -> list[tuple[str, list[int]]]:
    """Sum lost ns of all ranks by cause and time bin, largest first; small causes in one row."""
    rows: dict[str, list[tuple[int, ...]]] = {}
    for cause, ns in chain.from_iterable(rank.lost for rank in history.ranks):
        rows.setdefault(cause, []).append(ns)
    sums = [
        (cause, _sum_columns(cause_rows, history.stretches)) for cause, cause_rows in rows.items()
    ]
    sums.sort(key=lambda line: (-sum(line[1]), line[0] != WAITING_FOR_RANKS, line[0]))
    if len(sums) <= MAX_CAUSES:
        return sums
    kept, rest = sums[: MAX_CAUSES - 1], sums[MAX_CAUSES - 1 :]
    return [*kept, (OTHER_CAUSES, _sum_columns([tuple(ns) for _, ns in rest], history.stretches))]


def _sum_columns(rows: list[tuple[int, ...]], stretches: int) -> list[int]:
    return [sum(column) for column in zip(*rows)] if rows else [0] * stretches


def _make_rank_lookup(report: Report) -> Callable[[int | None], dict[str, Any] | None]:
    def who(at: int | None) -> dict[str, Any] | None:
        if at is None or not 0 <= at < len(report.ranks):
            return None
        rank = report.ranks[at]
        return {
            "node": escape_text(rank.node, _MAX_NAME_CHARACTERS),
            "rank": rank.rank,
            "pid": rank.pid,
        }

    return who


def convert_steps(stats: StepStats | None) -> dict[str, Any] | None:
    """Convert the blocks of steps to columns; step lengths are "bin:steps bin:steps"."""
    if stats is None:
        return None
    return {
        "width": stats.width,
        "steps": list(stats.steps),
        "step_ns": list(stats.step_ns),
        "in_step_ns": list(stats.in_step_ns),
        "measured_ns": list(stats.measured_ns),
        "busy_ns": list(stats.busy_ns),
        "lost_ns": list(stats.lost_ns),
        "lost": [
            {"cause": escape_text(cause), "family": escape_text(family), "ns": list(ns)}
            for cause, family, ns in stats.lost
        ],
        "lengths": [
            " ".join(f"{bin_}:{count}" for bin_, count in histogram) for histogram in stats.lengths
        ],
    }


def convert_fingerprint(fingerprint: RunFingerprint | None) -> dict[str, Any] | None:
    """Convert the run fingerprint to plain values; null or [] means not known."""
    if fingerprint is None:
        return None
    return {
        "started_at_ns": fingerprint.started_at_ns,
        "recordings": [escape_text(name, 4096) for name in fingerprint.recordings],
        "gpu_models": [
            {"model": escape_text(model), "gpus": count} for model, count in fingerprint.gpu_models
        ],
        "nodes": fingerprint.nodes,
        "world_size": fingerprint.world_size,
        "batch_size": fingerprint.batch_size,
        "tokens": fingerprint.tokens,
        "measured_by": [escape_text(source) for source in fingerprint.measured_by],
        "frameworks": [
            {"name": escape_text(name), "version": escape_text(version)}
            for name, version in fingerprint.frameworks
        ],
        "drivers": [escape_text(version) for version in fingerprint.drivers],
        "recorder": [escape_text(version) for version in fingerprint.recorder],
        "restarts": fingerprint.restarts,
    }


def convert_utilization(utilization: DeviceUtilization | None) -> dict[str, Any] | None:
    """Convert the under-used time of all ranks and of each rank; None if it was not computed."""
    if utilization is None:
        return None
    return {
        **_convert_utilization_totals(utilization),
        "advice": [
            {
                "code": escape_string(advice.code),
                "text": escape_string(advice.text),
                "measured": advice.measured,
                "confidence_ratio": ensure_finite(advice.confidence_ratio),
                "grade": advice.grade,
                "ranks": advice.ranks,
            }
            for advice in utilization.advice
        ],
        "ranks": [
            {
                "node": escape_string(rank.node),
                "rank": rank.rank,
                "pid": rank.pid,
                "device": escape_string(rank.device),
                **_convert_utilization_totals(rank),
                "levels": _convert_levels(rank),
                "advice": [escape_string(code) for code in rank.advice],
            }
            for rank in utilization.ranks
        ],
        "why_missing": escape_string(utilization.why_missing),
    }


def _convert_utilization_totals(totals: DeviceUtilization | RankUtilization) -> dict[str, Any]:
    return {
        "busy_ns": totals.busy_ns,
        "lost_ns": totals.lost_ns,
        "filled_ns": totals.filled_ns,
        "underfilled_ns": totals.underfilled_ns,
        "unmeasured_ns": totals.unmeasured_ns,
        "unmeasured_reasons": convert_reasons(totals.reasons),
    }


def _convert_levels(rank: RankUtilization) -> dict[str, Any]:
    levels = rank.levels
    return {
        "sm_active_ratio": ensure_finite(levels.sm_active_ratio),
        "sm_active_p90_ratio": ensure_finite(levels.sm_active_p90_ratio),
        "sm_occupancy_ratio": ensure_finite(levels.sm_occupancy_ratio),
        "tensor_active_ratio": ensure_finite(levels.tensor_active_ratio),
        "dram_active_ratio": ensure_finite(levels.dram_active_ratio),
        "power_ratio": ensure_finite(levels.power_ratio),
        "memory_used_bytes": levels.memory_used_bytes,
        "memory_total_bytes": levels.memory_total_bytes,
        "host_on_cpu_ratio": ensure_finite(levels.host_on_cpu_ratio),
    }


FORMAT = "clusterprof-report"


class Json:
    """The complete report for programs: a versioned schema, exact nanoseconds."""

    name: ClassVar[str] = "json"
    suffix: ClassVar[str] = ".json"

    def render(self, report: Report) -> str:
        """Return one JSON document."""
        return json.dumps(build_document(report), indent=2, allow_nan=False) + "\n"


def build_document(report: Report) -> dict[str, Any]:
    """Build the document as plain values, keys in the order of the schema."""
    return {
        "format": FORMAT,
        "schema_version": report.schema_version,
        "title": escape_string(report.title),
        "emulated": report.emulated,
        "job": _convert_job(report),
        "ledger": {
            "window_ns": report.window_ns,
            "unmeasured_ns": report.unmeasured_ns,
            "outside_ns": report.outside_ns,
            "in_step_ns": report.in_step_ns,
            "productive_ns": report.productive_ns,
            "lost_ns": report.lost_ns,
            "buckets": _convert_buckets(tuple(sum_buckets(report).items())),
            "unattributed_ns": report.unattributed_ns,
            "unattributed_reasons": convert_reasons(report.unattributed_reasons),
            "outside_buckets": _convert_buckets(report.outside_buckets),
            "caused_by_nobody": _convert_buckets(report.nobody),
        },
        "findings": [_convert_finding(finding) for finding in report.findings],
        "ranks": [_convert_rank(rank) for rank in report.ranks],
        "underfill": convert_utilization(report.underfill),
        "worth": worth_document(report.worth),
        "tail": _convert_slow_steps(report.tail),
        "metrics": [_convert_metric(metric) for metric in report.metrics],
        "not_seen": [
            {
                "what": escape_string(blind.what),
                "kind": escape_string(blind.kind),
                "message": escape_string(blind.message),
                "remedy": escape_string(blind.remedy),
            }
            for blind in report.blinds
        ],
        "nodes": [_convert_node(node) for node in report.nodes],
        "notes": [escape_string(note) for note in report.notes],
        "steps": convert_steps(report.steps),
        "likeness": convert_fingerprint(report.likeness),
        "history": convert_history(report),
    }


def _convert_finding(finding: Finding) -> dict[str, Any]:
    cause = finding.cause
    return {
        "cause": escape_string(cause.id),
        "family": escape_string(cause.family),
        "title": escape_string(cause.title),
        "advice": escape_string(cause.advice),
        "lost_ns": finding.lost_ns,
        "share_ratio": ensure_finite(finding.share_ratio),
        "recoverable_ns": finding.recoverable_ns,
        "confidence_ratio": ensure_finite(finding.confidence_ratio),
        "grade": finding.grade,
        "upper_bound": finding.upper_bound,
        "outside_steps": finding.outside_steps,
        "culprits": [
            {
                "node": escape_string(culprit.node),
                "rank": culprit.rank,
                "device": escape_string(culprit.device),
                "resource": escape_string(culprit.resource),
                "own_ns": culprit.own_ns,
                "others_ns": culprit.others_ns,
                "victims": culprit.victims,
                "recoverable_ns": culprit.recoverable_ns,
            }
            for culprit in finding.culprits
        ],
        "persistence": _convert_persistence(finding.persistence),
        "compared": _convert_comparison(finding.compared),
        "since": _convert_onset(finding.since),
        "more_why": escape_string(finding.more_why),
        "withheld": [escape_string(sentence) for sentence in finding.withheld],
        "evidence": [_convert_evidence(item) for item in finding.evidence],
        "remedies": [
            advice.build_advice_document(suggestion, escape_string) for suggestion in finding.advice
        ],
    }


def _convert_onset(onset: Onset | None) -> dict[str, Any] | None:
    if onset is None:
        return None
    return {"run_ns": onset.run_ns, "step": onset.step, "steps": onset.steps}


def _convert_job(report: Report) -> dict[str, Any] | None:
    job = report.job
    if job is None:
        return None
    return {
        "hosts": escape_string(format_host_list(escape_string(node.name) for node in report.nodes)),
        "world_size": job.world_size,
        "gpus": job.gpus,
        "coverage_ratio": ensure_finite(job.coverage_ratio),
        "clock_bound_ns": job.clock_bound_ns,
        "clock_why": escape_string(job.clock_why),
    }


def _convert_slow_steps(tail: Tail | None) -> dict[str, Any] | None:
    if tail is None:
        return None
    return {
        "steps": tail.steps,
        "slow_steps": tail.slow,
        "p50_ns": tail.p50_ns,
        "p99_ns": tail.p99_ns,
        "set_by": [
            {"node": escape_string(node), "rank": rank, "steps": steps}
            for node, rank, steps in tail.set_by
        ],
        "why_missing": escape_string(tail.why_missing),
    }


def _convert_persistence(persistence: Persistence | None) -> dict[str, Any] | None:
    if persistence is None:
        return None
    return {
        "kind": escape_string(persistence.kind),
        "from_ns": persistence.from_ns,
        "to_ns": persistence.to_ns,
        "stretches": persistence.stretches,
        "seen_stretches": persistence.seen,
        "culprits": persistence.culprits,
        "chief_stretches": persistence.most,
    }


def _convert_comparison(comparison: PeerComparison | None) -> dict[str, Any] | None:
    if comparison is None:
        return None
    return {
        "name": escape_string(comparison.name),
        "unit": escape_string(comparison.unit),
        "value": ensure_finite(comparison.value),
        "others_value": ensure_finite(comparison.others),
        "others": comparison.many,
        "of": escape_string(comparison.of),
        "note": escape_string(comparison.note),
    }


def _convert_evidence(item: Evidence) -> dict[str, Any]:
    return {
        "name": escape_string(item.name),
        "value": ensure_finite(item.value),
        "unit": escape_string(item.unit),
        "note": escape_string(item.note),
    }


def _convert_rank(rank: RankLedger) -> dict[str, Any]:
    return {
        "node": escape_string(rank.node),
        "rank": rank.rank,
        "pid": rank.pid,
        "device": escape_string(rank.device),
        "source": escape_string(rank.source),
        "steps": rank.steps,
        "coverage_ratio": ensure_finite(rank.coverage_ratio),
        "window_ns": rank.window_ns,
        "unmeasured_ns": rank.unmeasured_ns,
        "outside_ns": rank.outside_ns,
        "in_step_ns": rank.in_step_ns,
        "productive_ns": rank.productive_ns,
        "lost_ns": rank.lost_ns,
        "buckets": _convert_buckets(rank.buckets),
        "outside_buckets": _convert_buckets(rank.outside_buckets),
        "caused": _convert_buckets(rank.caused),
    }


def _convert_metric(metric: Metric) -> dict[str, Any]:
    return {
        "name": escape_string(metric.name),
        "value": ensure_finite(metric.value),
        "unit": escape_string(metric.unit),
        "bound": metric.bound,
        "why_missing": escape_string(metric.why_missing),
    }


def _convert_node(node: NodeFacts) -> dict[str, Any]:
    return {
        "name": escape_string(node.name),
        "key": escape_string(node.key),
        "boot_id": escape_string(node.boot_id),
        "duration_ns": node.duration_ns,
        "damaged_bytes": node.damaged_bytes,
        "dropped_spans": node.dropped_spans,
        "recorder_cpu_ratio": ensure_finite(node.recorder_cpu_ratio),
    }


def _convert_buckets(buckets: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [{"cause": escape_string(cause), "ns": ns} for cause, ns in buckets]
