"""Of the JSON report: how work filled the devices while they were busy."""

from __future__ import annotations

from typing import Any

from clusterprof.renderers.json_values import number, reasons, text
from clusterprof.underfill import RankFill, Underfill


def underfill(found: Underfill | None) -> dict[str, Any] | None:
    """Return the under-filled time of all ranks and of each; None where it was not worked out."""
    if found is None:
        return None
    return {
        **_fill(found),
        "advice": [
            {
                "code": text(one.code),
                "text": text(one.text),
                "measured": one.measured,
                "confidence_ratio": number(one.confidence_ratio),
                "grade": one.grade,
                "ranks": one.ranks,
            }
            for one in found.advice
        ],
        "ranks": [
            {
                "node": text(one.node),
                "rank": one.rank,
                "pid": one.pid,
                "device": text(one.device),
                **_fill(one),
                "levels": _levels(one),
                "advice": [text(code) for code in one.advice],
            }
            for one in found.ranks
        ],
        "why_missing": text(found.why_missing),
    }


def _fill(found: Underfill | RankFill) -> dict[str, Any]:
    return {
        "busy_ns": found.busy_ns,
        "lost_ns": found.lost_ns,
        "filled_ns": found.filled_ns,
        "underfilled_ns": found.underfilled_ns,
        "unmeasured_ns": found.unmeasured_ns,
        "unmeasured_reasons": reasons(found.reasons),
    }


def _levels(one: RankFill) -> dict[str, Any]:
    levels = one.levels
    return {
        "sm_active_ratio": number(levels.sm_active_ratio),
        "sm_active_p90_ratio": number(levels.sm_active_p90_ratio),
        "sm_occupancy_ratio": number(levels.sm_occupancy_ratio),
        "tensor_active_ratio": number(levels.tensor_active_ratio),
        "dram_active_ratio": number(levels.dram_active_ratio),
        "power_ratio": number(levels.power_ratio),
        "memory_used_bytes": levels.memory_used_bytes,
        "memory_total_bytes": levels.memory_total_bytes,
        "host_on_cpu_ratio": number(levels.host_on_cpu_ratio),
    }
