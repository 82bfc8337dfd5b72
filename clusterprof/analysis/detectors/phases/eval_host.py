"""Evaluation, metrics or logging on the host delay the step.

## What it sees

Lost time inside steps in which the training process evaluated (if it has a span), or in which its
main thread was blocked writing a file or sending over a connection.

## Why the GPU waits

Metrics on the CPU, a log that is synchronized after every line, results that are uploaded before
the next step: while the main thread does this, it launches nothing.

## How it decides

Its share is the whole of a lost segment inside an evaluation: of a framework, from `model.eval()`
to `model.train()`, or inside a span `clusterprof.span("eval")`. Without one it is the time in which
the main thread slept in a kernel function of writing or sending (`wchan`: a journal, write-back,
fsync, a full send buffer, a request to a mount in user space beside no wait for a page), inside a
step and outside any wait for data, other ranks, the device, copies and saves. How long it slept, or
worked in the kernel, is counted in each segment; which part of that was writing is estimated from
the samples of all segments together. If the process wrote during that time the
grade is B, else C. Time that the main thread computed in its own code
counts too, while the GPU was idle for 0.1 s or more in two consecutive samples, if
fewer than half of the steps have such a pause: slow launching is slow in every step.
The grade of that is B if the pauses occur at regular numbers of steps, or stacks show most of it,
else C. In every step such a pause counts if the GPU did nothing for whole samples, or sampled
stacks show functions outside of PyTorch that keep the interpreter lock, and the job has a data
loader: without one the thread may be building its batches (`cpu-preprocess`). **A save is not
logging**: blocking right after a save that has a span, or while a model's worth of bytes is
written, is `checkpoint`. In a trace with stacks the time counts in which the device had
nothing to do and the training thread was in functions outside of PyTorch that neither prepare data
nor sleep; the evidence names them. If the thread waits to hand something over (a full queue or
pipe, a thread that is joined), the time counts in which the process or thread that takes it worked.

## What to do

Log from a separate thread or process, and every few hundred steps. Keep metrics on the GPU, and
fetch them once at the end. Evaluate less often, or on other devices.

## Where it is blind

Without stacks, logging or metrics that keep the main thread on a CPU for less than 0.1 s at a time
look like launching (`launch-bound`). If `wchan` may not be read, blocked writes are not seen.
Waiting for the answer to an upload cannot be distinguished from waiting for other ranks and is not
claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.detectors.awaited_work import AwaitedWork, find_awaited_work
from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    measure_host_work,
    name_host_functions,
    select_phases,
    sum_claimed_ns,
)
from clusterprof.analysis.detectors.pauses import (
    find_pauses,
    find_whole_pauses,
    has_loader,
    measure_own_code,
)
from clusterprof.analysis.detectors.phases.blocked_files import (
    estimate_blocked_share,
    select_log_samples,
)
from clusterprof.analysis.timeline.model import PHASE_EVAL, DataWaitBreakdown, Float, LostTime, Rank
from clusterprof.analysis.timeline.series import compute_column_increase
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence, Grade


class EvalHost:
    """Claims evaluation that has a span, and time of the main thread blocked in writing."""

    cause = Cause(
        "eval-host",
        "eval",
        "Evaluation, metrics or logging on the host delay the step",
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
        writing = estimate_blocked_share(
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
                note = "the process wrote during that time"
                evidence.append(Evidence("process.write_chars_total", written_chars, "bytes", note))
        pause_share, is_sure = _measure_pauses(rank, lost, limits)
        if pause_share.any():
            if sum_claimed_ns(lost, pause_share) > sum_claimed_ns(lost, share + writing):
                grade = "B" if is_sure else "C"
            note = "of that time the main thread computed, and the GPU had no work"
            ratio = compute_claimed_mean(lost, pause_share)
            evidence.append(Evidence("thread.on_cpu_ratio", ratio, "ratio", note))
        traced = measure_host_work(rank, lost, layout.OTHER_WORK)
        if traced.any():
            note = "of that time the host was in functions outside of training"
            ratio = compute_claimed_mean(lost, traced)
            evidence += name_host_functions(rank, lost, traced, layout.OTHER_WORK)
            evidence.append(Evidence("host.elsewhere_ratio", ratio, "ratio", note))
        other_share = np.maximum(np.maximum(writing, pause_share), traced)
        awaited = [work for work in find_awaited_work(rank, lost) if work.takes_output]
        if not awaited:
            return Claims(share + other_share, grade, tuple(evidence))
        return _claim_receivers(lost, Claims(share + other_share, grade, tuple(evidence)), awaited)


def _claim_receivers(lost: LostTime, claims: Claims, awaited: Sequence[AwaitedWork]) -> Claims:
    """Add the time in which the step waited for those that take what it logs or saves."""
    # Time in which such a process had no CPU is `cpu-contention`.
    parts = [work.active_share - work.runnable_share for work in awaited]
    share = np.minimum(claims.share + np.sum(parts, axis=0), 1.0)
    longest = max(awaited, key=lambda work: sum_claimed_ns(lost, work.active_share))
    note = f"of that time the training thread waited for {longest.resource} to take its output"
    ratio = compute_claimed_mean(lost, share, longest.share)
    evidence = (Evidence("awaited.waiting_ratio", ratio, "ratio", note), *claims.evidence)
    if sum_claimed_ns(lost, share) > 2 * sum_claimed_ns(lost, claims.share):
        grade: Grade = "B" if longest.is_sure else "C"
        return Claims(share, grade, evidence, longest.resource, longest.resource_facts)
    return Claims(share, claims.grade, evidence, claims.resource, claims.resource_facts)


def _measure_pauses(rank: Rank, lost: LostTime, limits: EvalHost.Limits) -> tuple[Float, bool]:
    """Measure the share of each segment's loss that the training thread computed in a pause.

    float64[n]. The second value is True if the pauses are regular, or stacks show most of them.
    """
    share, is_sure = find_pauses(rank, lost, limits)
    if has_loader(rank):  # else the thread may build its batches
        whole_pauses = find_whole_pauses(rank, lost, limits.nothing_launched_at_least_ns)
        own_code = measure_own_code(rank, lost)
        share = np.maximum(np.maximum(share, whole_pauses), own_code)
        is_sure |= 2 * sum_claimed_ns(lost, own_code) > sum_claimed_ns(lost, share)
    return share, is_sure


def _measure_io_increase(rank: Rank, column: str, lost: LostTime, share: Float) -> float | None:
    io = rank.main.io
    if io is None or io.t_ns.size < 2:
        return None
    claimed = share > 0
    increase = compute_column_increase(
        io.t_ns, getattr(io, column), lost.start_ns[claimed], lost.end_ns[claimed]
    )
    return None if np.isnan(increase).all() else float(np.nansum(increase))
