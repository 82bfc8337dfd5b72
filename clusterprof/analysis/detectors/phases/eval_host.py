"""Evaluation, metrics or logging on the host hold the step up.

## What it sees

Lost time inside steps in which the training process evaluated (if it has a span), or in which its
main thread was blocked writing a file or sending over a connection.

## Why the GPU waits

Metrics on the CPU, a log that is synchronized after every line, results that are uploaded before
the next step: while the main thread does this, it launches nothing.

## How it decides

Its share is the whole of a lost segment inside a span `clusterprof.span("eval")`.
Without a span it is the time in which the main thread slept in a kernel function of
writing or sending (`wchan`: a journal, write-back, fsync, a full send buffer), inside a
step and outside any wait for data, other ranks, the device, copies and saves. How long
it slept, or worked in the kernel, is counted in each segment; which part of that was
writing is estimated from the samples of all segments together. If the process wrote
meanwhile the grade is B, else C. Time that the main thread computed in its own code
counts too, while the GPU was idle for 0.1 s or more in two consecutive samples, if
fewer than half of the steps have such a pause: slow launching is slow in every step.
The grade of that is B if the pauses occur at regular numbers of steps, else C. **A save
is not logging**: blocking right after a save that has a span, or while a model's worth of
bytes is written, is `checkpoint`. In a trace with stacks the time counts in which the device had
nothing to do and the training thread was in functions outside of PyTorch that neither prepare data
nor sleep; the evidence names them.

## What to do

Log from a separate thread or process, and every few hundred steps. Keep metrics on the GPU, and
fetch them once at the end. Evaluate less often, or on other devices.

## Where it is blind

Logging or metrics that keep the main thread on a CPU for less than 0.1 s at a time look like
launching (`launch-bound`). If `wchan` may not be read, blocked writes are not seen. Waiting for the
answer to an upload cannot be distinguished from waiting for other ranks and is not claimed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    measure_host_work,
    measure_main_thread,
    name_host_functions,
    select_phases,
    sum_claimed_ns,
)
from clusterprof.analysis.detectors.phases.writes import estimate_write_share, select_log_samples
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_EVAL,
    SOURCE_DEVICE_SAMPLES,
    DataWaitBreakdown,
    Float,
    Int,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.series import compute_column_increase, get_busy_readings
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence, Grade

_MIN_SAMPLE_RATIO = 0.9  # of a slow sampler: two 1 s samples with 0.05 s idle each are no pause
_USUAL_QUANTILE = 0.25  # nearly half of all steps may have pauses, and more of the samples
_MIN_REGULAR_PAUSES = 3  # pauses


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


class EvalHost:
    """Claims evaluation that has a span, and time of the main thread blocked in writing."""

    cause = Cause(
        "eval-host",
        "eval",
        "Evaluation, metrics or logging on the host hold the step up",
        "Log from a thread of its own and less often, and keep metrics on the GPU",
        precedence=130,
        hidden_cost="pause",
        trace_spans=(layout.EVAL, layout.HOST_WORK),
        manual_check=(
            "`py-spy dump --pid PID` in a pause: what the main thread is in; `strace -p PID -e "
            "trace=write,fsync,sendto -T`: how long its writes take."
        ),
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for logging."""

        blocked_at_least_ratio: float = 0.05
        """A smaller share of the segments blocked in writing is left unattributed."""
        nothing_launched_at_least_ns: int = 90_000_000
        """Time for which the GPU must be idle in two consecutive samples: less may be slow
        launching.
        """
        on_cpu_at_least_ratio: float = 0.5
        """Share of that time in which the main thread must have been on a CPU."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim lost time of evaluation, and of blocked writes and pauses inside steps."""
        share = np.where(select_phases(lost, PHASE_EVAL), 1.0, 0.0)
        evidence = []
        table = rank.main.spans.get(layout.EVAL)
        grade: Grade = "A"
        if share.any() and table is not None:
            length = float((table.end_ns - table.start_ns).mean())
            evidence.append(Evidence("eval.mean_ns", length, "ns", "an evaluation took on average"))
        writing = estimate_write_share(
            rank, lost, select_log_samples(rank), limits.blocked_at_least_ratio
        )
        if writing.any():
            written_chars = _measure_io_increase(rank, "write_chars", lost, writing)
            if sum_claimed_ns(lost, writing) > sum_claimed_ns(lost, share):
                grade = "C" if written_chars is None or written_chars <= 0 else "B"
            evidence.append(
                Evidence(
                    "thread.writing_ratio",
                    compute_claimed_mean(lost, writing),
                    "ratio",
                    "of that time the main thread was blocked in writing or sending",
                )
            )
            if written_chars is not None:
                note = "the process wrote meanwhile"
                evidence.append(Evidence("process.write_chars_total", written_chars, "bytes", note))
        pause_share, regular = find_pauses(rank, lost, limits)
        if pause_share.any():
            if sum_claimed_ns(lost, pause_share) > sum_claimed_ns(lost, share + writing):
                grade = "B" if regular else "C"
            note = "of that time the main thread computed, and the GPU had no work"
            ratio = compute_claimed_mean(lost, pause_share)
            evidence.append(Evidence("thread.on_cpu_ratio", ratio, "ratio", note))
        traced = measure_host_work(rank, lost, layout.OTHER_WORK)
        if traced.any():
            note = "of that time the host was in functions outside of training"
            ratio = compute_claimed_mean(lost, traced)
            evidence += name_host_functions(rank, lost, traced, layout.OTHER_WORK)
            evidence.append(Evidence("host.elsewhere_ratio", ratio, "ratio", note))
        others = np.maximum(np.maximum(writing, pause_share), traced)
        return Claims(share + others, grade, tuple(evidence))


def _measure_io_increase(rank: Rank, column: str, lost: LostTime, share: Float) -> float | None:
    io = rank.main.io
    if io is None or io.t_ns.size < 2:
        return None
    claimed = share > 0
    increase = compute_column_increase(
        io.t_ns, getattr(io, column), lost.start_ns[claimed], lost.end_ns[claimed]
    )
    return None if np.isnan(increase).all() else float(np.nansum(increase))
