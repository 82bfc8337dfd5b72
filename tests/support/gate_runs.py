"""Runs made by hand: two ranks, blocks of one step each, all sums kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clusterprof.output.renderers.json import Json
from clusterprof.report.history import StepStats
from clusterprof.report.model import (
    Cause,
    Culprit,
    Finding,
    JobFacts,
    Metric,
    NodeFacts,
    RankLedger,
    Report,
    RunFingerprint,
)

MS = 1_000_000
RANKS = 2
STORAGE = Cause("storage-local", "storage", "The data path waits for a local disk", "Read less.")


def draw_step_lengths(
    steps: int = 100, ms: float = 100.0, noise: float = 0.01, seed: int = 0
) -> list[int]:
    """Draw step lengths in ns with normal noise."""
    random = np.random.default_rng(seed)
    return [round(ms * MS * (1 + noise * x)) for x in random.standard_normal(steps)]


def find_bin(ns: int) -> int:
    """Find the bin of a length by the definition in the design pages."""
    return int(np.floor(128 * np.log2(ns)))


def make_run(
    title: str = "run",
    steps: Sequence[int] | None = None,
    storage: float = 0.0,
    started: int = 1,
    **facts: object,
) -> Report:
    """A run whose ranks make the same steps (ns) and lose a share of each to storage."""
    lengths = list(draw_step_lengths() if steps is None else steps)
    lost = [round(storage * ns) for ns in lengths]
    in_step, lost_ns = sum(lengths), sum(lost)
    ranks = tuple(
        RankLedger(
            "node-a",
            number,
            100 + number,
            f"GPU-{number}",
            "device-samples",
            in_step,
            0,
            0,
            in_step,
            in_step - lost_ns,
            lost_ns,
            (("storage-local", lost_ns), ("unattributed", 0)),
            (),
            len(lengths),
            1.0,
        )
        for number in range(RANKS)
    )
    both = [RANKS * ns for ns in lengths]
    both_lost = [RANKS * ns for ns in lost]
    busy = [ns - gone for ns, gone in zip(both, both_lost)]
    stats = StepStats(
        1,
        (RANKS,) * len(lengths),
        tuple(both),
        tuple(both),
        tuple(both),
        tuple(busy),
        tuple(both_lost),
        (
            ("storage-local", "storage", tuple(both_lost)),
            ("unattributed", "unattributed", (0,) * len(lengths)),
        ),
        tuple(((find_bin(ns), RANKS),) for ns in lengths),
    )
    share = lost_ns / in_step if in_step else None
    culprits = (Culprit("node-a", 1, "GPU-1", "vda"),)
    result = (
        Finding(STORAGE, RANKS * lost_ns, share or 0.0, None, 0.9, "A", False, False, culprits),
    )
    return Report(
        title=title,
        emulated=False,
        nodes=(NodeFacts("node-a", f"{title}-{started}", "b", in_step, 0, 0, 0.001),),
        ranks=ranks,
        window_ns=RANKS * in_step,
        unmeasured_ns=0,
        outside_ns=0,
        in_step_ns=RANKS * in_step,
        productive_ns=RANKS * (in_step - lost_ns),
        lost_ns=RANKS * lost_ns,
        findings=result if lost_ns else (),
        unattributed_ns=0,
        unattributed_reasons=(),
        outside_buckets=(),
        metrics=_make_metrics(share, lengths),
        coverage_gaps=(),
        job=JobFacts(RANKS, RANKS, 1.0),
        steps=stats,
        fingerprint=dataclasses.replace(_make_fingerprint(title, started), **facts),  # type: ignore[arg-type]
    )


def _make_fingerprint(title: str, started: int) -> RunFingerprint:
    return RunFingerprint(
        started_at_ns=started * 10**9,
        recordings=(f"{title}-{started}",),
        gpu_models=(("H100", RANKS),),
        nodes=1,
        world_size=RANKS,
        batch_size=32.0,
        measured_by=("device-samples",),
        frameworks=(("torch", "2.13.0"),),
        drivers=("580.1",),
        recorder=("0.1.0",),
    )


def _make_metrics(share: float | None, lengths: Sequence[int]) -> tuple[Metric, ...]:
    rest = None if share is None else 1 - share
    p50 = float(sorted(lengths)[(len(lengths) - 1) // 2]) if lengths else None
    return (
        Metric("gpu.busy_ratio", rest, "ratio"),
        Metric("gpu.sm_active_ratio", None, "ratio", "no SM activity was recorded"),
        Metric("lost.ratio", share, "ratio"),
        Metric("productive.ratio", rest, "ratio"),
        Metric("stall.storage_ratio", share, "ratio"),
        Metric("stall.cpu_ratio", 0.0, "ratio"),
        Metric("data_wait.ratio", share, "ratio"),
        Metric("step.p50_ns", p50, "ns"),
        Metric("step.count", float(RANKS * len(lengths)), "count"),
        Metric("stall.checkpoint_ratio", 0.0, "ratio"),
    )


def write_reports(folder: Path) -> None:
    """Write `report.json`, and those of three runs before it, `base1.json` to `base3.json`."""
    for number in range(4):
        name = f"base{number}" if number else "report"
        report = make_run(name, draw_step_lengths(seed=number), 0.02, started=10 - number)
        (folder / f"{name}.json").write_text(Json().render(report))
