"""Find pauses of a device: samples in which it had no work because the training thread computed.

    device samples     |  90 % idle | all idle | all idle | 40 % idle |
    training thread    | launches   |====== computes =====|  launches |
    pause                    ^------------------------------^

Slow launching leaves a device partly busy in every sample; what keeps a thread computing for whole
samples launches nothing. Sampled stacks show shorter pauses: an operation of PyTorch releases the
interpreter lock, so a sample comes at once. Code that makes a sample wait launches nothing.
"""

from __future__ import annotations

import re
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.detectors.base import (
    find_drained_segments,
    measure_main_thread,
    select_phases,
)
from clusterprof.analysis.timeline.code_locations import split_at_own_line
from clusterprof.analysis.timeline.device_sync import find_samples_in_waits
from clusterprof.analysis.timeline.intervals import find_containing
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    SOURCE_DEVICE_SAMPLES,
    Float,
    Int,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.series import get_busy_readings
from clusterprof.analysis.timeline.spans import StackSamples
from clusterprof.analysis.timeline.stacks import StackTree
from clusterprof.probe import layout
from clusterprof.report.code import CodeLocation

_MIN_SAMPLE_RATIO = 0.9  # of a slow sampler: two 1 s samples with 0.05 s idle each are no pause
_USUAL_QUANTILE = 0.25  # nearly half of all steps may have pauses, and more of the samples
_MIN_REGULAR_PAUSES = 3  # pauses
_WHOLE_RATIO = 0.95  # of a sample: the device did nothing
_MIN_COMPUTE_RATIO = 0.5  # of a sample: the loss that lies in computation of the training thread
_MAX_PAUSED_RATIO = 0.9  # of the samples: a device that hardly ever works may get tiny kernels
_LATE_NS, _SWITCH_NS = 300_000, 100_000
"""A sample this late waited for the interpreter lock; the switch interval that the probe sets."""
_MIN_LATE_SAMPLES = 8
"""Number of samples, late, in libraries or in files, that show that lines launch nothing."""
_MIN_DISK_WAIT_RATIO, _MIN_DISK_WAITS = 0.1, 3
"""Part and number of a line's samples in waits for a disk from which it reads or writes files."""
_MIN_OWN_RATIO = 0.1
"""Least part of the time on a CPU that such lines have."""
_MIN_LATE_RATIO = 0.5
"""Part of the samples of a line that are like that …"""
_MAX_LATE_RATIO = 0.25
"""… unless more than this part of those in operations comes late: another thread has the lock."""
_SLEEPING, _IN_DISK_WAIT = ord("S"), ord("D")
_LAUNCHING = CodeLocation("", 0, "")
_LINES = "lines-of-stacks"
"""Where a chunk keeps the lines of its stacks: several detectors need them."""
_OBJECT_FILES = re.compile(r"(?:^|/)torch/(?:distributed/distributed_c10d|serialization)\.py$")
"""Files of PyTorch that pickle objects."""
_COMPUTING_FILES = re.compile(
    r"(?:^|/)(?:numpy|scipy|pandas|sklearn|skimage|PIL|cv2|json|re|pickle|csv|gzip|bz2|lzma|zipfile"
    r"|tarfile|hashlib|random|statistics|decimal|fractions|copy|multiprocessing)(?:/|\.py$)"
)
_LAUNCHING_FILES = re.compile(
    r"(?:^|/)(?:torch|jax|jaxlib|flax|tensorflow|keras|cupy|triton|deepspeed|apex|megatron"
    r"|transformer_engine|paddle|mxnet|tinygrad)/"
)


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
    is_pause = lost_ns >= _WHOLE_RATIO * period_ns
    is_pause &= compute_ns >= _MIN_COMPUTE_RATIO * period_ns
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_pause.astype(np.int8), [0]])))
    for first, past in edges.reshape(-1, 2).tolist():
        if (past - first) * period_ns < min_pause_ns:
            is_pause[first:past] = False
    if not is_pause.any() or is_pause.sum() > _MAX_PAUSED_RATIO * np.count_nonzero(compute_ns):
        return out
    paused = is_pause | np.append(is_pause[1:], False) | np.append(False, is_pause[:-1])
    rows = idle & paused[number]
    user_ns = np.nan_to_num(measure_main_thread(rank, "user_ns", lost, rows)) * (
        lost.end_ns - lost.start_ns
    )
    return np.where(rows, np.minimum(user_ns / np.maximum(lost.lost_ns, 1), 1.0), 0.0)


def measure_own_code(rank: Rank, lost: LostTime, column: str = "on_cpu_ns") -> Float:
    """Measure the part of each segment's loss in which the training thread launched nothing.

    It computed in lines outside of PyTorch that keep the interpreter lock. float64[n]; 0 where the
    sampled stacks do not show it. column: "run_delay_ns" for the time in which it was in these
    lines and had no CPU.
    """
    share = np.zeros(lost.start_ns.size)
    inside = select_phases(lost, PHASE_COMPUTE) & (lost.step != 0)
    stacks, table = rank.main.stacks, rank.chunk.stacks
    if stacks is None or not inside.any() or not table.has_paths:
        return share
    sampled = (stacks.thread == 0) & (stacks.stack > 0)
    bounds = lost.start_ns[inside], lost.end_ns[inside]
    asleep = stacks.select(sampled & (stacks.state == _SLEEPING))
    late_ns = _choose_late(asleep.end_ns - asleep.start_ns)
    awake = sampled & (stacks.state != _SLEEPING)
    awake &= find_containing(stacks.start_ns, bounds) >= 0
    awake &= ~find_samples_in_waits(rank.main, stacks.start_ns)
    lines = rank.chunk.shared.setdefault(_LINES, {})
    ratio = _compute_own_ratio(stacks.select(awake), table, late_ns, lines)
    if ratio > 0:
        own_share = ratio * np.nan_to_num(measure_main_thread(rank, column, lost, inside))
        # After a wait for the device all of it is idle time, else as if both were independent.
        scale = (lost.end_ns - lost.start_ns) / np.maximum(lost.lost_ns, 1)
        own_share = np.minimum(
            np.where(find_drained_segments(rank, lost), own_share * scale, own_share), 1.0
        )
        share = np.where(inside, own_share, 0.0)
    return share


def _choose_late(wake_ns: Int) -> float:
    """Return from when on a sample is late, ns: it waited for a switch interval of the probe.

    wake_ns: how late samples of a sleeping thread were, whose lock is free: the machine's own
    delay.
    """
    known_ns = wake_ns[wake_ns > 0]
    if known_ns.size < _MIN_LATE_SAMPLES:
        return _LATE_NS
    return min(float(np.median(known_ns)) + _SWITCH_NS, _LATE_NS)


def _compute_own_ratio(
    samples: StackSamples,
    table: StackTree,
    late_ns: float,
    line_of: dict[int, tuple[CodeLocation, bool]],
) -> float:
    """Compute which part of the time on a CPU of some samples was in lines that launch nothing.

    They keep the interpreter lock, or wait for a disk. line_of: the lines of stacks found before.
    """
    numbers, row = np.unique(samples.stack, return_inverse=True)
    lines = {_LAUNCHING: 0}
    of_stack = np.zeros(numbers.size, np.int64)
    computes = np.zeros(numbers.size, np.bool_)
    for index, number in enumerate(numbers.tolist()):
        if number not in line_of:
            line_of[number] = _find_line(table, number)
        line, computes[index] = line_of[number]
        of_stack[index] = lines.setdefault(line, len(lines))
    of_sample, lateness_ns = of_stack[row], samples.end_ns - samples.start_ns
    in_disk_wait = samples.state == _IN_DISK_WAIT
    waits = np.bincount(of_sample, in_disk_wait, len(lines))
    all_count = np.bincount(of_sample, minlength=len(lines))
    uses_files = waits >= np.maximum(_MIN_DISK_WAIT_RATIO * all_count, _MIN_DISK_WAITS)
    is_evident = computes[row] | uses_files[of_sample]
    late, timed = (lateness_ns >= late_ns) | is_evident, (lateness_ns > 0) | is_evident
    late_count = np.bincount(of_sample, late, len(lines))
    late_ratio = late_count / np.maximum(np.bincount(of_sample, timed, len(lines)), 1)
    if late_count[0] >= _MIN_LATE_SAMPLES and late_ratio[0] > _MAX_LATE_RATIO:
        return 0.0
    is_own = late_ratio >= _MIN_LATE_RATIO
    is_own[0] = False
    on_cpu_ns = np.where(in_disk_wait, 0, np.maximum(samples.interval_ns, 0))
    weight = np.bincount(of_sample, on_cpu_ns, len(lines))
    ratio = float(weight[is_own].sum()) / max(float(weight.sum()), 1.0)
    is_enough = late_count[is_own].sum() >= _MIN_LATE_SAMPLES and ratio >= _MIN_OWN_RATIO
    return ratio if is_enough else 0.0


def _find_line(table: StackTree, stack: int) -> tuple[CodeLocation, bool]:
    """Find the job's own line in a stack, if it has not called PyTorch or its like.

    The second value is True if it has called a library that has nothing to do with devices.
    """
    locations = [table.locations[index] for index in table.list_locations(stack)]
    parts = split_at_own_line(locations)
    if parts is None:
        return _LAUNCHING, False
    own_line, called = parts
    innermost = called[-1].file if called else ""
    launches = any(_LAUNCHING_FILES.search(location.file) for location in called)
    if launches and not _OBJECT_FILES.search(innermost):
        return _LAUNCHING, False
    return own_line, _COMPUTING_FILES.search(innermost) is not None
