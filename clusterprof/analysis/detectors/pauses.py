"""Find pauses of a device: samples in which it had no work because the training thread computed.

    device samples     |  90 % idle | all idle | all idle | 40 % idle |
    training thread    | launches   |====== computes =====|  launches |
    pause                    ^------------------------------^

Slow launching leaves a device partly busy in every sample; what keeps a thread computing for whole
samples launches nothing.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.detectors.base import measure_main_thread, select_phases
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    SOURCE_DEVICE_SAMPLES,
    Float,
    Int,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.series import get_busy_readings
from clusterprof.probe import layout

_MIN_SAMPLE_RATIO = 0.9  # of a slow sampler: two 1 s samples with 0.05 s idle each are no pause
_USUAL_QUANTILE = 0.25  # nearly half of all steps may have pauses, and more of the samples
_MIN_REGULAR_PAUSES = 3  # pauses
_WHOLE_RATIO = 0.95  # of a sample: the device did nothing
_MIN_COMPUTE_RATIO = 0.5  # of a sample: the loss that lies in computation of the training thread
_MAX_PAUSED_RATIO = 0.9  # of the samples: a device that hardly ever works may get tiny kernels


class PauseLimits(Protocol):
    """Limits for a pause; those of `eval-host`."""

    @property
    def nothing_launched_at_least_ns(self) -> int: ...

    @property
    def on_cpu_at_least_ratio(self) -> float: ...


def find_pauses(rank: Rank, lost: LostTime, limits: PauseLimits) -> tuple[Float, bool]:
    """Find pauses: the share of each segment's loss that the main thread computed in one.

    float64[n]. The second value is True if the pauses occur at regular numbers of steps.
    """
    zeros = np.zeros(lost.start_ns.size)
    idle = select_phases(lost, PHASE_COMPUTE) & (lost.step != 0)
    idle &= lost.source == SOURCE_DEVICE_SAMPLES
    window = _locate_device_samples(rank, lost.start_ns)
    if window is None or not idle.any():
        return zeros, False
    number = window[0] - window[0].min()
    count = int(number.max()) + 1
    idle_ns = np.bincount(number, np.where(idle, lost.lost_ns, 0), count)
    min_idle_ns = max(limits.nothing_launched_at_least_ns, _MIN_SAMPLE_RATIO * window[1])
    if not (idle_ns[:-1] + idle_ns[1:] >= min_idle_ns).any():
        return zeros, False
    length = lost.end_ns - lost.start_ns
    user_ns = np.nan_to_num(measure_main_thread(rank, "user_ns", lost, idle)) * length
    busy_ns = np.bincount(number, np.where(idle, np.minimum(user_ns, lost.lost_ns), 0), count)
    pair_idle_ns, pair_busy_ns = idle_ns[:-1] + idle_ns[1:], busy_ns[:-1] + busy_ns[1:]
    is_idle = idle_ns >= min_idle_ns
    pair = (pair_idle_ns >= min_idle_ns) & (
        pair_busy_ns >= limits.on_cpu_at_least_ratio * pair_idle_ns
    )
    if pair_idle_ns.size:
        usual_ns = 2 * float(np.quantile(pair_idle_ns, _USUAL_QUANTILE))
        pair &= is_idle[:-1] | is_idle[1:] | (pair_idle_ns >= usual_ns)
    in_pause = np.append(pair, False) | np.append(False, pair)
    is_neighbor = ~is_idle & (np.append(is_idle[1:], False) | np.append(False, is_idle[:-1]))
    core = idle & (in_pause & ~is_neighbor)[number]
    idle &= in_pause[number]
    if not core.any():
        return zeros, False
    steps, count = _find_pause_steps(lost, core, number)
    if 2 * count >= _count_steps(rank, lost):
        return zeros, False
    share = np.where(idle, np.minimum(user_ns, lost.lost_ns) / np.maximum(lost.lost_ns, 1), 0.0)
    return share, _is_regular(steps)


def _locate_device_samples(rank: Rank, t_ns: Int) -> tuple[Int, float] | None:
    """Return the number of the device sample after each instant, and the time between samples."""
    sampled_ns = get_busy_readings(rank)[0]
    if sampled_ns.size < 2:
        return None
    return (np.searchsorted(sampled_ns, t_ns, side="right"), float(np.median(np.diff(sampled_ns))))


def _find_pause_steps(lost: LostTime, selected: NDArray[np.bool_], number: Int) -> tuple[Int, int]:
    """Find the step of each pause (of its longest segment); count the steps with a pause.

    Consecutive samples form one pause; it may reach into a second step.
    """
    (rows,) = selected.nonzero()
    pause = np.cumsum(np.append(False, np.diff(number[rows]) > 1))
    order = np.lexsort((lost.lost_ns[rows], pause))
    last = np.append(np.flatnonzero(np.diff(pause[order])), rows.size - 1)
    steps: Int = lost.step[rows[order[last]]]
    pairs = np.unique(np.stack([pause, lost.step[rows]]), axis=1)
    count = np.maximum(np.bincount(pairs[0]) - 1, 1)
    return steps, int(count.sum())


def _count_steps(rank: Rank, lost: LostTime) -> int:
    steps = rank.main.spans.get(layout.STEP)
    if steps is None:
        return 0
    return int(((steps.end_ns > lost.start_ns[0]) & (steps.start_ns < lost.end_ns[-1])).sum())


def _is_regular(steps: Int) -> bool:
    """Return whether three quarters of the pauses are equally far apart in steps.

    Equal means the median distance, by a third of it: a pause that reaches into a second step may
    count there.
    """
    if steps.size < _MIN_REGULAR_PAUSES:
        return False
    in_order = np.sort(steps)
    distances = in_order[1:] - in_order[:-1]
    median_distance = float(np.median(distances))
    regular_count = int((3 * np.abs(distances - median_distance) <= median_distance).sum())
    return median_distance > 1 and 4 * regular_count >= 3 * distances.size


def has_loader(rank: Rank) -> bool:
    """Return whether the rank gets its batches from a data loader that the probe knows."""
    kinds = (layout.DATA_WAIT, layout.LOADER_START)
    return any(kind in rank.main.spans for kind in kinds)


def find_whole_pauses(rank: Rank, lost: LostTime, min_pause_ns: int) -> Float:
    """Find the pauses of any step in which the device did nothing for whole samples.

    Returns float64[n], the part of each segment's loss that the training thread computed in a pause
    of at least `min_pause_ns`, or in the samples next to it, where pauses begin and end.
    """
    out = np.zeros(lost.start_ns.size)
    idle = select_phases(lost, PHASE_COMPUTE) & (lost.step != 0)
    idle &= lost.source == SOURCE_DEVICE_SAMPLES
    window = _locate_device_samples(rank, lost.start_ns) if idle.any() else None
    if window is None:
        return out
    number, period_ns = window[0] - window[0].min(), window[1]
    count = int(number.max()) + 1
    lost_ns = np.bincount(number, lost.lost_ns, count)
    compute_ns = np.bincount(number, np.where(idle, lost.lost_ns, 0), count)
    whole = lost_ns >= _WHOLE_RATIO * period_ns
    whole &= compute_ns >= _MIN_COMPUTE_RATIO * period_ns
    edges = np.flatnonzero(np.diff(np.concatenate([[0], whole.astype(np.int8), [0]])))
    for first, past in edges.reshape(-1, 2).tolist():
        if (past - first) * period_ns < min_pause_ns:
            whole[first:past] = False
    if not whole.any() or whole.sum() > _MAX_PAUSED_RATIO * np.count_nonzero(compute_ns):
        return out
    paused = whole | np.append(whole[1:], False) | np.append(False, whole[:-1])
    rows = idle & paused[number]
    user_ns = np.nan_to_num(measure_main_thread(rank, "user_ns", lost, rows)) * (
        lost.end_ns - lost.start_ns
    )
    return np.where(rows, np.minimum(user_ns / np.maximum(lost.lost_ns, 1), 1.0), 0.0)
