"""Of the JSON report: the run in blocks of steps, and what another run must be like."""

from __future__ import annotations

from typing import Any

from clusterprof.likeness import Likeness
from clusterprof.renderers.text_safety import safe_text
from clusterprof.stepstats import StepStats


def steps(found: StepStats | None) -> dict[str, Any] | None:
    """Return the blocks as columns; a block's lengths of steps are "bin:steps bin:steps"."""
    if found is None:
        return None
    return {
        "width": found.width,
        "steps": list(found.steps),
        "step_ns": list(found.step_ns),
        "in_step_ns": list(found.in_step_ns),
        "measured_ns": list(found.measured_ns),
        "busy_ns": list(found.busy_ns),
        "lost_ns": list(found.lost_ns),
        "lost": [
            {"cause": safe_text(cause), "family": safe_text(family), "ns": list(ns)}
            for cause, family, ns in found.lost
        ],
        "lengths": [" ".join(f"{bin_}:{count}" for bin_, count in one) for one in found.lengths],
    }


def likeness(found: Likeness | None) -> dict[str, Any] | None:
    """Return the facts; null or [] is not known."""
    if found is None:
        return None
    return {
        "started_at_ns": found.started_at_ns,
        "recordings": [safe_text(name, 4096) for name in found.recordings],
        "gpu_models": [
            {"model": safe_text(model), "gpus": count} for model, count in found.gpu_models
        ],
        "nodes": found.nodes,
        "world_size": found.world_size,
        "batch_size": found.batch_size,
        "tokens": found.tokens,
        "measured_by": [safe_text(source) for source in found.measured_by],
        "frameworks": [
            {"name": safe_text(name), "version": safe_text(version)}
            for name, version in found.frameworks
        ],
        "drivers": [safe_text(version) for version in found.drivers],
        "recorder": [safe_text(version) for version in found.recorder],
        "restarts": found.restarts,
    }
