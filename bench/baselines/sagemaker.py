"""SageMaker Debugger's built-in profiler rules, re-implemented from their documentation.

Read: AWS, "List of Debugger built-in profiler rules",
https://docs.aws.amazon.com/sagemaker/latest/dg/debugger-built-in-profiler-rules.html, and the
parameters with their defaults and descriptions in awslabs/sagemaker-debugger-rulesconfig, commit
afeb292 (2021-05-12, its last). The rules themselves run only inside AWS. Datapoints are half a
second apart, as there.

| rule | fires | as a cause |
|---|---|---|
| IOBottleneck | GPU < 10 % while I/O wait > 50 %, in more than 50 % of datapoints | storage |
| CPUBottleneck | GPU < 10 % while CPU > 90 %, in more than 50 % of datapoints | cpu |
| LoadBalancing | utilization histograms of two GPUs > 0.5 apart | sync-imbalance |
| BatchSize | p95 of CPU, GPU and GPU memory all below 70 % | launch |
| LowGPUUtilization | p95 below 70 %, or p5 below 10 % (fluctuates) | unattributed: a symptom |
| GPUMemoryIncrease | moving average of memory grows > 5 points | none: about memory |
| OverallSystemUsage | never: it only prints percentiles | none |
| MaxInitializationTime | 20 minutes without a first step | startup, outside steps |
| Dataloader | workers of a node < 70 or > 200 % of its CPUs | cpu-loader-config |
| StepOutlier | over 10 steps above mean + 3 deviations | unattributed: a symptom |

The last three need framework profiling, which AWS ended with PyTorch 2.0; they answer apart, so
that today's tool is not counted for them. No rule gives an amount in device time or blames a rank:
both are "not claimed". Left out: `patience` (1,000 datapoints before a rule looks for the first
time, longer than the recordings here); instead rules look from the first step on. The distance
between histograms is not defined there: taken is half the sum of differences of 10 bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from baselines.recording_tables import read_recording
from baselines.tables import Node, Rank, RecordingTables
from clusterprof.probe import layout
from clusterprof.signals import (
    CPU_IDLE,
    CPU_IOWAIT,
    CPU_STEAL,
    CPU_SYSTEM,
    CPU_USER,
    GPU_BUSY,
    GPU_BUSY_TIME,
    GPU_MEMORY_TOTAL,
    GPU_MEMORY_USED,
)
from clusterprof_lab.answer import Answer, NamedCause
from clusterprof_lab.families import UNATTRIBUTED
from clusterprof_lab.truth import Truth

TOOL = "SageMaker Debugger profiler rules (re-implemented from documentation, rulesconfig afeb292)"
DATAPOINT_NS = 500_000_000
BOTTLENECK_ABOVE, GPU_BELOW, CPU_ABOVE, IOWAIT_ABOVE = 50.0, 10.0, 90.0, 50.0
P95_BELOW, P5_BELOW = 70.0, 10.0
DISTANCE_ABOVE = 0.5
MEMORY_INCREASE, MEMORY_WINDOW = 5.0, 10
WORKERS_PERCENT = (70.0, 200.0)
INITIALIZATION_NS = 20 * 60 * 1_000_000_000
DEVIATIONS, OUTLIERS = 3.0, 10
_CPUS = (CPU_USER.name, CPU_SYSTEM.name, CPU_STEAL.name, CPU_IDLE.name, CPU_IOWAIT.name)


@dataclass(frozen=True)
class Usage:
    """Percent at each datapoint of one GPU and its node; None = not recorded."""

    gpu: np.ndarray
    cpu: np.ndarray | None
    iowait: np.ndarray | None
    memory: np.ndarray | None


def apply_system_rules(recording: Path, truth: Truth) -> Answer:
    """Answer with the rules on system metrics: what the tool says of a job of PyTorch 2."""
    seen = read_recording(recording, truth.clocks)
    usages = list(_list_usages(seen))
    if not usages:
        return Answer(TOOL, None)
    return Answer(
        TOOL,
        tuple(
            cause
            for _, cause in sorted(_list_system_findings(usages), key=lambda firing: -firing[0])
        ),
    )


def apply_all_rules(recording: Path, truth: Truth) -> Answer:
    """Answer with the framework rules, too: what the tool said until PyTorch 2.0."""
    seen = read_recording(recording, truth.clocks)
    firings = [*_list_system_findings(list(_list_usages(seen))), *_list_framework_findings(seen)]
    causes = tuple(cause for _, cause in sorted(firings, key=lambda firing: -firing[0]))
    return Answer(f"{TOOL}, with framework rules", causes if seen.ranks else None)


def _list_system_findings(usages: list[Usage]) -> Iterator[tuple[float, NamedCause]]:
    """What fired, with the share of datapoints it fired on, in percent; symptoms last."""
    for family, busy, above in (("storage", "iowait", IOWAIT_ABOVE), ("cpu", "cpu", CPU_ABOVE)):
        seen = [(usage.gpu, getattr(usage, busy)) for usage in usages]
        percent = [
            100 * np.mean((gpu < GPU_BELOW) & (other > above))
            for gpu, other in seen
            if other is not None
        ]
        if percent and max(percent) > BOTTLENECK_ABOVE:
            yield float(max(percent)), NamedCause(family, None, None)
    if _measure_max_distance(usages) > DISTANCE_ABOVE:
        yield 3.0, NamedCause("synchronization", "sync-imbalance", None)
    if any(_is_batch_small(usage) for usage in usages):
        yield 2.0, NamedCause("launch", None, None)
    if any(_is_utilization_low(usage.gpu) for usage in usages):
        yield 0.0, NamedCause(UNATTRIBUTED, None, None)


def _list_framework_findings(seen: RecordingTables) -> Iterator[tuple[float, NamedCause]]:
    low, high = WORKERS_PERCENT
    for node in seen.nodes:
        ranks = [seen.ranks[rank] for rank in seen.list_node_ranks(node)]
        percent = 100 * sum(_count_workers(rank) for rank in ranks) / max(node.cpus, 1)
        loads = any(len(rank.of(layout.DATA_WAIT)) for rank in ranks)
        if node.cpus and loads and not low <= percent <= high:
            yield 1.5, NamedCause("cpu", "cpu-loader-config", None)
            break
    if any(_list_outliers(rank) > OUTLIERS for rank in seen.ranks.values()):
        yield 0.0, NamedCause(UNATTRIBUTED, None, None)
    sampled = [rank for rank in seen.ranks.values() if rank.node.series]
    starts = [rank.steps[0, 0] - rank.node.span_ns[0] for rank in sampled]
    if starts and min(starts) > INITIALIZATION_NS:
        yield 1.0, NamedCause("startup", "startup", None, outside_steps=True)


def detect_memory_increase(usage: Usage) -> bool:
    """GPUMemoryIncrease: it names no lost time, so no answer holds it."""
    if usage.memory is None or len(usage.memory) < 2 * MEMORY_WINDOW:
        return False
    mean = np.convolve(usage.memory, np.full(MEMORY_WINDOW, 1 / MEMORY_WINDOW), "valid")
    return bool((mean[MEMORY_WINDOW:] - mean[:-MEMORY_WINDOW] > MEMORY_INCREASE).any())


def _is_batch_small(usage: Usage) -> bool:
    all_three = (usage.gpu, usage.cpu, usage.memory)
    return all(series is not None and np.percentile(series, 95) < P95_BELOW for series in all_three)


def _is_utilization_low(gpu: np.ndarray) -> bool:
    high = np.percentile(gpu, 95) >= P95_BELOW
    return bool(not high or np.percentile(gpu, 5) < P5_BELOW)


def _measure_max_distance(usages: list[Usage]) -> float:
    """The largest between the histograms of any two GPUs."""
    bins = np.linspace(0, 100, 11)
    parts = [np.histogram(np.clip(usage.gpu, 0, 100), bins)[0] / len(usage.gpu) for usage in usages]
    table = np.reshape(parts, (-1, 10))
    return max(
        (float(np.abs(table - histogram).sum(axis=1).max()) / 2 for histogram in table), default=0.0
    )


def _count_workers(rank: Rank) -> int:
    return len(rank.workers)


def _list_outliers(rank: Rank) -> int:
    taken = (rank.steps[:, 1] - rank.steps[:, 0]).astype(np.float64)
    return int((taken > taken.mean() + DEVIATIONS * taken.std()).sum())


def _list_usages(seen: RecordingTables) -> Iterator[Usage]:
    for rank in seen.ranks.values():
        t_ns = np.arange(rank.steps[0, 0], rank.steps[-1, 1] + 1, DATAPOINT_NS)
        gpu = compute_busy_percent(rank, t_ns) if len(t_ns) > 1 else None
        if gpu is None:
            continue
        cpu, iowait = _read_cpu_percent(rank.node, t_ns)
        yield Usage(gpu, cpu, iowait, _read_memory_percent(rank, t_ns[1:]))


def compute_busy_percent(rank: Rank, t_ns: np.ndarray) -> np.ndarray | None:
    """GPU utilization between times, in percent; None when it was not recorded."""
    series = rank.node.series
    total = series.get((GPU_BUSY_TIME.name, rank.device))
    if total is not None:
        return 100 * np.diff(total.at(t_ns)) / np.diff(t_ns)
    ratio = series.get((GPU_BUSY.name, rank.device))
    return None if ratio is None else 100 * ratio.at((t_ns[1:] + t_ns[:-1]) / 2)


def _read_cpu_percent(node: Node, t_ns: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    grown = {
        name: np.diff(node.series[name, "all"].at(t_ns))
        for name in _CPUS
        if (name, "all") in node.series
    }
    if CPU_IDLE.name not in grown or CPU_USER.name not in grown:
        return None, None
    whole = np.maximum(sum(grown.values()), 1)
    iowait = grown.get(CPU_IOWAIT.name)
    busy = whole - grown[CPU_IDLE.name] - (0 if iowait is None else iowait)
    return 100 * busy / whole, None if iowait is None else 100 * iowait / whole


def _read_memory_percent(rank: Rank, t_ns: np.ndarray) -> np.ndarray | None:
    used = rank.node.series.get((GPU_MEMORY_USED.name, rank.device))
    total = rank.node.series.get((GPU_MEMORY_TOTAL.name, rank.device))
    if used is None or total is None:
        return None
    return 100 * used.at(t_ns) / np.maximum(total.at(t_ns), 1)


RULES: Mapping[str, Callable[[Path, Truth], Answer]] = {
    "SageMaker Debugger": apply_system_rules,
    "SageMaker Debugger, framework rules too": apply_all_rules,
}
