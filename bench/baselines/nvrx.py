"""NVIDIA Resiliency Extension's straggler scores, re-implemented from its documentation.

Read: NVIDIA/nvidia-resiliency-ext, docs/source/straggler_det/usage_guide.rst and the default
thresholds of `identify_stragglers`, commit d8686d9 (2026-08-07),
https://github.com/NVIDIA/nvidia-resiliency-ext. A score is the ratio of a reference time to a
rank's own median time: of the fastest rank (relative), or of its own best report (individual).
Below 0.75 the rank is a straggler in that section, or its GPU is.

Sections as in the guide's example: "data_loading" (waits for data) and "fwd" (forward spans; where
there are none, the step without waits and operations: the guide asks for a section in which all
ranks have alike to do). The GPU's score, there of CUDA kernels without NCCL's, is here of the
device's busy time per step, only where no operation with other ranks runs on the device. A report
is made after each quarter of the steps.

| its word | as an answer |
|---|---|
| stragglers, by section or GPU, any report | culprits: most reports first, then the worst score |
| nobody below the thresholds | culprits () |
| a cause, an amount, a share | not claimed |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from baselines.recording_tables import read_recording
from baselines.rules_of_thumb import sum_operation_time
from baselines.sagemaker import compute_busy_percent
from baselines.tables import Rank, RecordingTables
from clusterprof.probe import layout
from clusterprof_lab.answer import Answer
from clusterprof_lab.truth import Truth

TOOL = "NVRx straggler scores (re-implemented from documentation, d8686d9)"
BELOW = 0.75
REPORTS = 4
Scores = dict[str, dict[int, float]]
"""Section -> rank -> score."""


def find_stragglers(recording: Path, truth: Truth) -> Answer:
    """Name the stragglers."""
    reports = compute_scores(read_recording(recording, truth.clocks))
    if not any(section for report in reports for section in report.values()):
        return Answer(TOOL, None)
    votes: Counter[int] = Counter()
    worst: dict[int, float] = {}
    for report in reports:
        low = [
            (rank, score)
            for by_rank in report.values()
            for rank, score in by_rank.items()
            if score < BELOW
        ]
        votes.update({rank for rank, _ in low})
        for rank, score in low:
            worst[rank] = min(score, worst.get(rank, 1.0))
    order = sorted(votes, key=lambda rank: (-votes[rank], worst[rank], rank))
    return Answer(TOOL, None, culprits=tuple(order))


def compute_scores(seen: RecordingTables) -> list[Scores]:
    """Return the scores of each report, relative and individual."""
    times = {name: _compute_medians(seen, how) for name, how in SECTIONS.items()}
    out: list[Scores] = []
    for number in range(REPORTS):
        report: Scores = {}
        for name, by_rank in times.items():
            now = {rank: row[number] for rank, row in by_rank.items() if row[number] > 0}
            if len(now) > 1:
                report[f"{name}, relative"] = {r: min(now.values()) / t for r, t in now.items()}
            report[f"{name}, individual"] = {
                rank: min(t for t in by_rank[rank][: number + 1] if t > 0) / time
                for rank, time in now.items()
            }
        out.append(report)
    return out


def _compute_medians(
    seen: RecordingTables, how: Callable[[Rank], np.ndarray | None]
) -> dict[int, list[float]]:
    """By rank, the median time of a section in each report."""
    out = {}
    for number, rank in seen.ranks.items():
        times = how(rank)
        if times is not None and len(times) >= REPORTS:
            parts = np.array_split(times, REPORTS)
            out[number] = [float(np.median(part)) for part in parts]
    return out


def _measure_loading(rank: Rank) -> np.ndarray | None:
    waits = rank.of(layout.DATA_WAIT)
    return waits[:, 1] - waits[:, 0] if len(waits) else None


def _measure_forward(rank: Rank) -> np.ndarray | None:
    spans = rank.of(layout.FORWARD)
    if len(spans):
        return rank.sum_by_step(spans)
    if len(rank.steps) < REPORTS:
        return None
    taken = rank.steps[:, 1] - rank.steps[:, 0]
    return taken - rank.sum_by_step(rank.of(layout.DATA_WAIT)) - sum_operation_time(rank)


def _measure_gpu(rank: Rank) -> np.ndarray | None:
    if len(rank.of(layout.EXPOSED_COLLECTIVE)) or len(rank.steps) < REPORTS:
        return None
    starts, ends = rank.steps[:, 0], rank.steps[:, 1]
    t_ns = np.column_stack([starts, np.maximum(ends, starts + 1)])
    percent = [compute_busy_percent(rank, row) for row in t_ns]
    if any(busy is None for busy in percent):
        return None
    return np.array([busy[0] for busy in percent if busy is not None]) * (ends - starts) / 100


SECTIONS: Mapping[str, Callable[[Rank], np.ndarray | None]] = {
    "data_loading": _measure_loading,
    "fwd": _measure_forward,
    "GPU": _measure_gpu,
}
RULES: Mapping[str, Callable[[Path, Truth], Answer]] = {"NVRx": find_stragglers}
