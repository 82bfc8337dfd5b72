"""Another thread of the training process holds the Python interpreter lock.

## What it sees

Lost time inside a step in which the main thread slept on a lock while another thread of the same
process was on a CPU, or kept the interpreter lock without running.

## Why the GPU waits

One Python interpreter runs one thread at a time (GIL). A thread that computes in Python (metrics, a
progress bar, a loader that uses threads) is asked to release the lock only every 5 ms. The main
thread therefore loses up to 5 ms each time it has released the lock itself, which it does at nearly
every launch.

## How it decides

A thread of the probe asks for the lock some twenty times a second. If it has to wait for more than
8 ms, some thread kept the lock all that time, in C code that does not release it; the main thread
waited for it as far as it was asleep on a lock (`futex` in `wchan`) during that time. A main thread
that mostly waited for a disk meanwhile kept the lock itself: a page fault does not release it.

Where the lock changes hands, scheduler counters show how long the main thread was off CPU in each
lost segment outside any wait for data or other ranks, and how long the busiest other thread of the
process was on a CPU: the smaller of the two is the upper limit. Samples show how much of it counts:
the share of samples, at instants at which the other thread was running, that found the main thread
asleep on a lock, in excess of that share while the other thread was resting. A main thread that
hardly sleeps otherwise shows the same by how much more of the time it is on a lock, as far as the
probe also found the interpreter lock taken more often. If the result is small, nothing is claimed;
nor is more than the share of the probe's own needs of the lock that found it taken: a thread that
computes in C code may have released it. Threads of autograd, NCCL and the driver are left out: they
work for the main thread, and what they launch counts as its launching.

## What to do

Move the work of that thread to a separate process (`multiprocessing`), call it less often, or do it
in code that releases the lock. `py-spy top --pid` shows what the thread runs.

## Where it is blind

Where the lock changes hands, all locks look alike. Who keeps it in C code is not known. A thread is
observed from about one second after its start. If thread names were not recorded, running threads
are not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    compute_sample_ratio,
    compute_sleep_ratios,
    limit_to_lost_time,
    measure_sleep,
    select_phases,
    select_sleep_samples,
)
from clusterprof.analysis.timeline.data_wait.samples import HELPER_THREADS, find_sleep_samples
from clusterprof.analysis.timeline.intervals import (
    Intervals,
    find_containing,
    measure_overlap,
    merge_intervals,
)
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_LOCK,
    DataWaitBreakdown,
    Float,
    Int,
    LostTime,
    Rank,
    ThreadTable,
)
from clusterprof.analysis.timeline.series import compute_column_increase
from clusterprof.analysis.timeline.spans import InterpreterWaitSpans
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence

_MIN_STACK_SAMPLES = 20
_MIN_SAMPLES = 10
"""Number of samples with other threads running, and of those without, that show a difference."""
_UNSEEN_NS = 1_500_000_000
"""A thread is observed from at most this time after its start."""
_LATE_NS = 300_000  # a free lock is had sooner


class CpuGil:
    """Claims time of the main thread on a lock while another thread of its process computes."""

    cause = Cause(
        "cpu-gil",
        "cpu",
        "Another thread of the training process holds the Python interpreter lock",
        "Move what that thread computes to a process of its own",
        precedence=570,
        hidden_cost="interval",
        manual_check=(
            "`py-spy dump --pid PID` some times: another thread holds the GIL (`py-spy top` shows "
            "it) while the main thread waits. `top -H -p PID`: that thread is on a CPU."
        ),
    )
    needs = ("spans", "threads")

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a main thread that waits for the interpreter lock."""

        kept_at_least_ratio: float = 0.04
        """Share of the segments in which it must have slept on a lock while another thread ran."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim time on a lock inside steps, as far as another thread computed or kept the lock."""
        no_claims = Claims(np.zeros(lost.start_ns.size), "B")
        inside = select_phases(lost, PHASE_COMPUTE, PHASE_LOCK)
        thread = rank.main.threads.get(rank.pid)
        if thread is None or not inside.any():
            return no_claims
        other_threads = {tid: table for tid, table in rank.main.threads.items() if tid != rank.pid}
        if not other_threads and layout.INTERPRETER_WAIT not in rank.main.spans:
            return no_claims
        on_lock = find_sleep_samples(thread, rank.chunk.wchan_names, lambda name: "futex" in name)
        kept_lock = _claim_kept_lock(rank, lost, inside, on_lock, limits)
        if not any(table.name for table in other_threads.values()):
            return kept_lock if kept_lock is not None or other_threads else no_claims
        other_threads = {
            tid: table
            for tid, table in other_threads.items()
            if not table.name.startswith(HELPER_THREADS)
        }
        computing = _claim_computing_thread(rank, lost, inside, on_lock, other_threads, limits)
        joined = _join_claims(lost, [claims for claims in (kept_lock, computing) if claims])
        return joined or no_claims


def _join_claims(lost: LostTime, claims_list: list[Claims]) -> Claims | None:
    """Join claims of both kinds: a thread can keep the lock in C code, and compete in Python.

    Of each segment the larger share counts. The evidence and grade are those of the larger part.
    """
    if not claims_list:
        return None
    larger = max(claims_list, key=lambda claims: float((claims.share * lost.lost_ns).sum()))
    share = np.maximum.reduce([claims.share for claims in claims_list])
    return dataclasses.replace(larger, share=share)


def _claim_kept_lock(
    rank: Rank,
    lost: LostTime,
    inside: NDArray[np.bool_],
    on_lock: NDArray[np.bool_],
    limits: CpuGil.Limits,
) -> Claims | None:
    """Claim time on a lock while no other thread could get the interpreter lock.

    inside: bool[n]. on_lock: bool[samples] of the main thread. None = nothing to claim.
    """
    waits = rank.main.get_spans(InterpreterWaitSpans)
    if waits is None or not waits.start_ns.size:
        return None
    kept_ns = np.zeros(lost.start_ns.size)
    segments = lost.start_ns[inside], lost.end_ns[inside]
    kept_ns[inside] = measure_overlap(segments, Intervals(*waits.find_lock_hold_intervals()))
    # What helper threads run they run for the main thread, also with the lock.
    for tid, thread in rank.main.threads.items():
        if tid != rank.pid and thread.name.startswith(HELPER_THREADS):
            ran_ns = compute_column_increase(thread.t_ns, thread.on_cpu_ns, *segments)
            kept_ns[inside] -= np.minimum(np.nan_to_num(ran_ns), kept_ns[inside])
    asleep_ns = measure_sleep(rank, lost, inside)
    asleep_ns *= compute_sleep_ratios(rank, lost, inside, on_lock)
    claim_ns = np.minimum(asleep_ns, kept_ns)
    length = np.maximum(lost.end_ns - lost.start_ns, 1)
    if claim_ns.sum() < limits.kept_at_least_ratio * float(length[inside].sum()):
        return None
    share = limit_to_lost_time(claim_ns, lost, inside) / np.maximum(lost.lost_ns, 1)
    evidence = (
        Evidence(
            "thread.on_lock_ratio",
            compute_claimed_mean(lost, share, asleep_ns / length),
            "ratio",
            "of that time the main thread slept on a lock",
        ),
        Evidence(
            "interpreter.kept_ratio",
            compute_claimed_mean(lost, share, kept_ns / length),
            "ratio",
            "of that time another thread kept the interpreter lock",
        ),
    )
    return Claims(share, "A", evidence)


def _claim_computing_thread(
    rank: Rank,
    lost: LostTime,
    inside: NDArray[np.bool_],
    on_lock: NDArray[np.bool_],
    other_threads: Mapping[int, ThreadTable],
    limits: CpuGil.Limits,
) -> Claims | None:
    """Claim time on a lock while another thread of the process was on a CPU.

    inside: bool[n]. on_lock: bool[samples] of the main thread. None = nothing to claim.
    """
    tid, other_ns = _measure_busiest_threads(rank, lost, inside, sorted(other_threads))
    if not tid:
        return None
    asleep_ns = measure_sleep(rank, lost, inside)
    other_cpu_ns = np.zeros(lost.start_ns.size)
    other_cpu_ns[inside] = other_ns
    claim_ns = np.minimum(asleep_ns, other_cpu_ns)
    t_ns = rank.main.threads[rank.pid].t_ns
    running = np.logical_or.reduce(
        [_find_running_samples(thread, t_ns) for thread in other_threads.values()]
    )
    length = lost.end_ns - lost.start_ns
    lock_ratio = _estimate_lock_ratio(rank, lost, inside, on_lock, running)
    resting = ~running & ~_find_unseen_samples(other_threads, t_ns)
    additional_ratio = _estimate_additional_sleep(rank, lost, inside, on_lock, (running, resting))
    lock_ratio = max(lock_ratio, additional_ratio)
    held_ns = _estimate_held_ratio(rank, lost, inside) * float(length[inside].sum())
    lock_ratio *= min(1.0, held_ns / max(lock_ratio * float(claim_ns.sum()), 1.0))
    min_claim_ns = limits.kept_at_least_ratio * float(length[inside].sum())
    if lock_ratio * float(claim_ns.sum()) < min_claim_ns:
        return None
    share = lock_ratio * limit_to_lost_time(claim_ns, lost, inside) / np.maximum(lost.lost_ns, 1)
    parts = np.stack([asleep_ns * lock_ratio, other_cpu_ns]) / np.maximum(length, 1)
    evidence = (
        Evidence(
            "thread.on_lock_ratio",
            compute_claimed_mean(lost, share, parts[0]),
            "ratio",
            "of that time the main thread slept on a lock",
        ),
        Evidence(
            "other_thread.on_cpu_ratio",
            compute_claimed_mean(lost, share, parts[1]),
            "ratio",
            "of that time another thread of the process was on a CPU",
        ),
    )
    return Claims(share, "B", evidence, f"thread {other_threads[tid].name} {tid}")


def _estimate_lock_ratio(
    rank: Rank,
    lost: LostTime,
    inside: NDArray[np.bool_],
    lock_samples: NDArray[np.bool_],
    other_running: NDArray[np.bool_],
) -> float:
    """Estimate how much more often the main thread was on a lock while another thread ran.

    1 = always against never, 0 = no more often: 8 of 10 times against 3 of 10 times is 5 / 7.
    """
    asleep = select_sleep_samples(rank, lost, inside) & ~_find_kept_samples(rank)
    ratio_running, ratio_resting = (
        compute_sample_ratio(asleep & other_running, lock_samples),
        compute_sample_ratio(asleep & ~other_running, lock_samples),
    )
    return (
        max(0.0, ratio_running - ratio_resting) / (1.0 - ratio_resting)
        if ratio_resting < 1.0
        else 0.0
    )


def _estimate_additional_sleep(
    rank: Rank,
    lost: LostTime,
    inside: NDArray[np.bool_],
    on_lock: NDArray[np.bool_],
    states: tuple[NDArray[np.bool_], NDArray[np.bool_]],
) -> float:
    """Estimate the part of the sleep while others ran that the interpreter lock explains.

    states: bool[samples] of the main thread, others were running, and all others were resting.

    The main thread is on a lock in 0.9 of the time while others run, in 0.2 while they rest; the
    probe finds the interpreter lock taken in 0.9 and 0.3 of its needs: of the 0.7 more 0.6 are a
    wait for that lock, which are two thirds of the sleep. A thread that computes in C code for the
    main thread, which waits for it, leaves the lock free.
    """
    thread, stacks = rank.main.threads[rank.pid], rank.main.stacks
    if stacks is None:
        return 0.0
    segments = merge_intervals((lost.start_ns[inside], lost.end_ns[inside]))
    within = find_containing(thread.t_ns, segments) >= 0
    asleep = select_sleep_samples(rank, lost, inside)
    due = (stacks.thread == 0) & (find_containing(stacks.start_ns, segments) >= 0)
    late = (stacks.end_ns - stacks.start_ns)[due] >= _LATE_NS
    nearest = np.minimum(np.searchsorted(thread.t_ns, stacks.start_ns[due]), thread.t_ns.size - 1)
    on_lock_ratios, held_ratios = [], []
    for state in states:
        if min(np.count_nonzero(within & state), np.count_nonzero(state[nearest])) < _MIN_SAMPLES:
            return 0.0
        on_lock_ratios.append(compute_sample_ratio(within & state, asleep & on_lock))
        held_ratios.append(compute_sample_ratio(state[nearest], late))
    on_lock_excess = on_lock_ratios[0] - on_lock_ratios[1]
    held_excess = held_ratios[0] - held_ratios[1]
    on_lock_asleep = compute_sample_ratio(asleep & states[0], on_lock)
    return on_lock_asleep * min(on_lock_excess, held_excess) / max(on_lock_ratios[0], 1e-9)


def _find_unseen_samples(threads: Mapping[int, ThreadTable], t_ns: Int) -> NDArray[np.bool_]:
    """Find the samples at which a thread may have run that is observed only from later on."""
    unseen = np.zeros(t_ns.size, np.bool_)
    for thread in threads.values():
        if thread.t_ns.size:
            first_ns = int(thread.t_ns[0])
            unseen |= (t_ns >= first_ns - _UNSEEN_NS) & (t_ns < first_ns)
    return unseen


def _estimate_held_ratio(rank: Rank, lost: LostTime, inside: NDArray[np.bool_]) -> float:
    """Estimate the share of the segments in which the interpreter lock was not free.

    The probe's thread asks for it at random times to sample stacks: a sample that comes late found
    the lock taken. 1 = not known.
    """
    stacks = rank.main.stacks
    if stacks is None:
        return 1.0
    segments = merge_intervals((lost.start_ns[inside], lost.end_ns[inside]))
    due = (stacks.thread == 0) & (find_containing(stacks.start_ns, segments) >= 0)
    if np.count_nonzero(due) < _MIN_STACK_SAMPLES:
        return 1.0
    return float(np.mean((stacks.end_ns - stacks.start_ns)[due] >= _LATE_NS))


def _find_kept_samples(rank: Rank) -> NDArray[np.bool_]:
    """Find the samples of the main thread while C code kept the interpreter lock: bool[samples]."""
    t_ns = rank.main.threads[rank.pid].t_ns
    waits = rank.main.get_spans(InterpreterWaitSpans)
    if waits is None or not waits.start_ns.size:
        return np.zeros(t_ns.size, np.bool_)
    return np.asarray(find_containing(t_ns, waits.find_lock_hold_intervals()) >= 0, np.bool_)


def _find_running_samples(thread: ThreadTable, t_ns: Int) -> NDArray[np.bool_]:
    """Find the samples of another thread at which this thread ran: bool[n]; no row = asleep."""
    next_row = np.searchsorted(thread.t_ns, t_ns)
    row = np.minimum(next_row, thread.t_ns.size - 1)
    return np.asarray((thread.t_ns[row] == t_ns) & (thread.state[row] == ord("R")), np.bool_)


def _measure_busiest_threads(
    rank: Rank, lost: LostTime, inside: NDArray[np.bool_], tids: list[int]
) -> tuple[int, Float]:
    """Find the thread with the most CPU time, and measure that of the busiest one of each segment.

    Threads may be started for a task and end with it. float64[m], ns. Thread id 0 = none used any.
    """
    busiest_tid, most_ns, longest_ns = 0, 0.0, np.zeros(int(inside.sum()))
    for tid in tids:
        thread = rank.main.threads[tid]
        cpu_ns = compute_column_increase(
            thread.t_ns, thread.on_cpu_ns, lost.start_ns[inside], lost.end_ns[inside]
        )
        cpu_ns = np.nan_to_num(cpu_ns)
        longest_ns = np.maximum(longest_ns, cpu_ns)
        if cpu_ns.sum() > most_ns:
            busiest_tid, most_ns = tid, float(cpu_ns.sum())
    return busiest_tid, longest_ns
