"""xprof's input-pipeline analysis, re-implemented from its documentation.

Read: TensorFlow, "Optimize TensorFlow performance using the Profiler", input pipeline analyzer,
https://www.tensorflow.org/guide/profiler; openxla/xprof, docs/overview_page.md (74e3714) and the
thresholds in xprof/convert/op_stats_to_input_pipeline_analysis.cc (639a619, 2026): of the step
time, waiting for input below 5 % is not input-bound, below 20 % moderately, else highly; kernel
launch and collectives from 3 % on are mentioned. It reads TensorFlow's and JAX's traces only.

| its word | here | as a cause |
|---|---|---|
| waiting for input, of the step time, mean over ranks | data-wait spans | shared out as below |
| reading data on demand / in advance | a fetch off its CPU, in a wait / outside | storage |
| data preprocessing | a fetch on its CPU, or ready for one | cpu, cpu-preprocess |
| enqueuing data to be transferred to the device | host-to-device spans | h2d, h2d-copy |
| other data reading or processing | a wait without any fetch | unattributed |
| device collective communication | time in operations with other ranks | network |

xprof sorts the host's operations by name and scales their times to the time waited; names of
operations are not in a recording, so a fetch's CPU time stands for preprocessing and the rest of it
for reading. It gives shares of the step time; it blames no rank ("not claimed"). The verdict on the
input comes first, as on its overview page, whatever collectives take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baselines.recording_tables import read_recording
from baselines.rules_of_thumb import sum_operation_time
from baselines.tables import END, START, B, C, Rank, RecordingTables
from clusterprof.probe import layout
from clusterprof_lab.answer import Answer, NamedCause
from clusterprof_lab.families import UNATTRIBUTED
from clusterprof_lab.truth import Truth

TOOL = "xprof input-pipeline analysis (re-implemented from documentation, 639a619)"
MODERATELY, HIGHLY = 0.05, 0.20
COLLECTIVES = 0.03


@dataclass(frozen=True)
class Breakdown:
    """Host time of the input pipeline, in ns."""

    demanded_read: float
    advanced_read: float
    preprocessing: float
    enqueue: float
    other: float


def analyze_input_pipeline(recording: Path, truth: Truth) -> Answer:
    """Say how input-bound a job is, and by what."""
    seen = read_recording(recording, truth.clocks)
    waiting = [_list_waits(rank) for rank in seen.ranks.values()]
    if not seen.in_step_ns or not any(len(waits) for waits in waiting):
        return Answer(TOOL, None)
    ranks = list(seen.ranks.values())
    waited = _average(
        [float(rank.sum_by_step(_list_waits(rank)).sum()) / rank.in_step_ns for rank in ranks]
    )
    met = _average([float(sum_operation_time(rank).sum()) / rank.in_step_ns for rank in ranks])
    by_family = _split_parts(compute_breakdown(seen), waited if waited >= MODERATELY else 0.0)
    leaves = {"cpu": "cpu-preprocess", "h2d": "h2d-copy"}
    order = sorted(((ratio, name) for name, ratio in by_family.items() if ratio > 0), reverse=True)
    causes = [NamedCause(family, leaves.get(family), ratio) for ratio, family in order]
    if met >= COLLECTIVES:
        causes.append(NamedCause("network", None, met))
    return Answer(TOOL, tuple(causes))


def format_verdict(waited_ratio: float) -> str:
    """Return the word for a share of step time spent waiting for input."""
    if waited_ratio < MODERATELY:
        return "not input-bound"
    return "moderately input-bound" if waited_ratio < HIGHLY else "highly input-bound"


def compute_breakdown(seen: RecordingTables) -> Breakdown:
    """Sort the host's time in the input pipeline of all ranks."""
    parts = np.zeros(5)
    for rank in seen.ranks.values():
        parts += _add_rank(rank)
    return Breakdown(*parts.tolist())


def _add_rank(rank: Rank) -> np.ndarray:
    fetch, waits = rank.fetches, _list_waits(rank)
    wall = float((fetch[:, END] - fetch[:, START]).sum())
    cpu = float(fetch[:, B].sum() + fetch[:, C].sum())
    ready = sum(rank.node.run_delay_ns.get(pid, 0.0) for pid in rank.workers)
    on_cpu = min(wall, cpu + ready)
    reading = wall - on_cpu
    inside = sum(_measure_overlap(waits, row[START], row[END]) for row in fetch)
    demanded = reading * (inside / wall if wall else 0.0)
    copies = rank.of(layout.H2D)
    enqueue = float((copies[:, END] - copies[:, START]).sum())
    waited = float((waits[:, END] - waits[:, START]).sum())
    other = 0.0 if len(fetch) or enqueue else waited
    return np.array([demanded, reading - demanded, on_cpu, enqueue, other])


def _measure_overlap(waits: np.ndarray, start: int, end: int) -> float:
    return float(
        np.clip(np.minimum(waits[:, END], end) - np.maximum(waits[:, START], start), 0, None).sum()
    )


def _split_parts(parts: Breakdown, waited_ratio: float) -> dict[str, float]:
    by_family = {
        "storage": parts.demanded_read + parts.advanced_read,
        "cpu": parts.preprocessing,
        "h2d": parts.enqueue,
        UNATTRIBUTED: parts.other,
    }
    whole = sum(by_family.values())
    if not whole:
        return {UNATTRIBUTED: waited_ratio}
    return {family: waited_ratio * ns / whole for family, ns in by_family.items()}


def _list_waits(rank: Rank) -> np.ndarray:
    return rank.of(layout.DATA_WAIT)


def _average(values: list[float]) -> float:
    return sum(values) / len(values)


RULES: Mapping[str, Callable[[Path, Truth], Answer]] = {"xprof": analyze_input_pipeline}
