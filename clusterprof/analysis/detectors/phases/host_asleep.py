"""The job sleeps, or waits for something outside training.

## What it sees

Lost time inside steps in which the training thread was neither on a CPU nor waiting for
one, and slept in a timer, on a process, a pipe or a connection. In waits for data: time in which
the thread that loads the data slept in a timer or on a process.

## Why the GPU waits

A thread that sleeps launches nothing. `time.sleep` in a metrics call or a retry loop, a
rate limit, a subprocess, an upload, a question to a server: the queue of the GPU runs
dry, and it waits until the thread goes on.

## How it decides

The scheduler's counters give how long the thread slept in each lost segment outside any wait for
data, other ranks, copies, saves and evaluation. Its samples show where (`wchan`). A timer, or
waiting for a process, counts for as much of the GPU's idle time as if both were independent,
because a host also sleeps when it waits for its GPU. A connection or a pipe can also be a wait for
the device or for another thread, so it counts only as far as the GPU must have been idle while the
thread slept, and not while another thread of the process ran. Sampled stacks say whom a thread
waits for: in `multiprocessing`, `queue` or `torch.distributed` for the job itself, which is not
claimed; in `subprocess`, `socket` or `ssl` for something outside. Without stacks, a connection
counts only where waits for batches and other ranks have spans, and `poll` only where waits for the
device have spans, because a driver waits there, too. The grade is B for timers, processes and
known calls, C for other connections and pipes. Waits for another process or thread of the job
that is known (`cpu-preprocess`, `eval-host`) are not claimed. Whether a line sleeps in a loop that
only looks for what others do is read from the job's own files, where they are as they were. Locks
are not claimed: who holds one is not known
(`cpu-gil` decides where another thread ran). A trace with stacks names the call instead (`sleep`,
`acquire`, `recv`) and the function around it.

## What to do

Find the call: `py-spy dump --pid PID` in the middle of a pause names the line. Move it
to a thread or a process of its own, or call it less often. If a loop only looks for something that
is not there yet (`thread.polling_ratio`), its sleep is not the reason: find out who is late.

## Where it is blind

If `wchan` may not be read, nothing is claimed. Sleeps far shorter than 10 ms are seen in
the counters only. A sleep inside a hooked wait counts as that wait.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.detectors.awaited_work import (
    CONNECTION,
    TIMER,
    AwaitedWork,
    find_awaited_work,
    find_feeders,
    measure_poll_ratio,
)
from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    compute_sample_ratio,
    compute_sleep_ratios,
    find_certain_idle_time,
    is_poll,
    may_wait_in_driver,
    measure_host_work,
    measure_sleep,
    name_host_functions,
    select_phases,
    sum_claimed_ns,
)
from clusterprof.analysis.timeline.code_locations import split_at_own_line
from clusterprof.analysis.timeline.data_wait.samples import find_sleep_samples
from clusterprof.analysis.timeline.device_sync import find_samples_in_waits
from clusterprof.analysis.timeline.intervals import find_containing, merge_intervals
from clusterprof.analysis.timeline.load.ranks import parse_job_position
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_NONE,
    SOURCE_HOST_SPANS,
    DataWaitBreakdown,
    Float,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.series import compute_column_increase
from clusterprof.analysis.timeline.spans import FetchSpans
from clusterprof.analysis.timeline.stacks import StackTree
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence, Grade

_ASLEEP = (layout.SLEEPING, layout.WAITING_FOR_LOCK)
_TIMER = "nanosleep"
"""Part of the names of kernel functions in which a thread sleeps that asked for a time."""
_PROCESS_WCHANS = ("do_wait", "kernel_wait", "kernel_clone", "wait_for_vfork")
"""Beginnings of the names of kernel functions in which a thread waits for a process; "do_wait" also
ends the name of a wait for a lock, `futex_do_wait`.
"""
_PIPE_WRITE = "pipe_write"
_CONNECTION_WCHANS = (
    "sk_wait",
    "wait_woken",
    "tcp_recv",
    "inet_csk_accept",
    "inet_stream_connect",
    "inet_wait_for_connect",
    "unix_stream",
    "skb_wait",
    "pipe_read",
    _PIPE_WRITE,
)
_SLEEP_STATES = (ord("S"), ord("D"))
_OF_JOB, _OUTSIDE, _OWN = range(3)
"""What a stack waits for: another part of the job, something outside, not known."""
_JOB_FILES = re.compile(
    r"(?:^|/)(?:multiprocessing|concurrent|torch/distributed|torch/utils/data|horovod|mpi4py|ray)/"
    r"|(?:^|/)(?:queue|threading)\.py$"
)
_OUTSIDE_FILES = re.compile(
    r"(?:^|/)(?:subprocess|socket|ssl|selectors)\.py$|(?:^|/)http/client\.py$"
)
_MIN_STACKS = 8
"""Number of samples that say where a thread slept."""
_MIN_POLL_RATIO = 0.5  # of the sleep
_MIN_AWAITED_RATIO = 0.1  # of the lost time: less is between two samples
_MIN_KNOWN_RATIO = 0.5
"""Part of the waits on connections that is known from which the verdict is as sure as of timers."""


class HostAsleep:
    """Claims idle time in which the thread that trains or loads slept on purpose."""

    cause = Cause(
        "host-asleep",
        "eval",
        "The job sleeps, or waits for something outside training",
        "Find the line that sleeps with py-spy, and move it out of the step",
        precedence=740,
        tone=1,
        hidden_cost="interval",
        trace_spans=(layout.HOST_WORK,),
        manual_check=(
            "`py-spy dump --pid PID` some times in a pause: the line where the main thread sleeps; "
            "`strace -p PID -T`: which call it sleeps in, and for how long."
        ),
    )
    needs = ("threads",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """Limits for a training thread that sleeps."""

        asleep_at_least_ratio: float = 0.02
        """Share of the segments in which it must have slept; less is left unattributed."""

    def claim(
        self, rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown, limits: Limits
    ) -> Claims | None:
        """Claim idle time in which a thread slept in a timer or on a connection."""
        traced = measure_host_work(rank, lost, *_ASLEEP)
        if traced.any():
            note = "of that time the training thread slept or waited for a lock or a connection"
            ratio = compute_claimed_mean(lost, traced)
            asleep = Evidence("host.asleep_ratio", ratio, "ratio", note)
            return Claims(traced, "A", (*name_host_functions(rank, lost, traced, *_ASLEEP), asleep))
        training, evidence, grade = _claim_training_thread(rank, lost, limits)
        loading = _claim_loading_thread(rank, lost, breakdown)
        awaited, work = _claim_awaited_process(rank, lost)
        if work is not None and awaited.any():
            resource = work.resource
            note = f"of that time the training thread waited for {resource}, which slept in a timer"
            ratio = compute_claimed_mean(lost, awaited)
            evidence = [Evidence("awaited.in_timer_ratio", ratio, "ratio", note), *evidence]
            if sum_claimed_ns(lost, awaited) <= sum_claimed_ns(lost, training):
                work = None
            training = np.minimum(training + awaited, 1.0)
        if loading.any():
            note = "of that time the thread that loads the data slept in a timer"
            ratio = compute_claimed_mean(lost, loading)
            evidence = [*evidence, Evidence("worker.in_timer_ratio", ratio, "ratio", note)]
            if sum_claimed_ns(lost, loading) > sum_claimed_ns(lost, training):
                grade, work = "B", find_feeders(rank, lost)
        if work is None:
            return Claims(training + loading, grade, tuple(evidence))
        named = work.resource, work.resource_facts
        return Claims(training + loading, grade, tuple(evidence), *named)


def _claim_awaited_process(rank: Rank, lost: LostTime) -> tuple[Float, AwaitedWork | None]:
    """Return the share of each segment in which the awaited process slept in a timer, and its work.

    float64[n].
    """
    works = [work for work in find_awaited_work(rank, lost) if work.timer_ratio > 0]
    no_share = np.zeros(lost.start_ns.size)
    if not works:
        return no_share, None
    shares = [(work.share - work.active_share) * work.timer_ratio for work in works]
    longest = max(zip(shares, works), key=lambda pair: sum_claimed_ns(lost, pair[0]))[1]
    share = np.maximum(np.sum(shares, axis=0), 0.0)
    return (share, longest) if share.mean() >= _MIN_AWAITED_RATIO else (no_share, None)


def _claim_training_thread(
    rank: Rank, lost: LostTime, limits: HostAsleep.Limits
) -> tuple[Float, list[Evidence], Grade]:
    """Return the share of each segment in which the training thread slept, float64[n]."""
    no_claim: tuple[Float, list[Evidence], Grade] = (np.zeros(lost.start_ns.size), [], "B")
    inside = select_phases(lost, PHASE_COMPUTE if rank.marked else PHASE_NONE)
    thread = rank.main.threads.get(rank.pid)
    if thread is None or not inside.any():
        return no_claim
    timer = find_sleep_samples(thread, rank.chunk.wchan_names, _is_timer)
    connection_ratios, outside_ratio = _measure_connections(rank, lost, inside)
    if not timer.any() and not connection_ratios.any():
        return no_claim
    length_ns = (lost.end_ns - lost.start_ns).astype(np.float64)
    asleep_ns = measure_sleep(rank, lost, inside)
    timer_ns = asleep_ns * compute_sleep_ratios(rank, lost, inside, timer)
    connection_ns = asleep_ns * connection_ratios
    for work in find_awaited_work(rank, lost):  # it waited for a part of the job
        awaited_ns = work.share * length_ns
        if work.wait_reason == TIMER:
            timer_ns = np.maximum(timer_ns - awaited_ns, 0.0)
        if work.wait_reason == CONNECTION:
            connection_ns = np.maximum(connection_ns - awaited_ns, 0.0)
    # A host that waits for its device sleeps too, while the device is busy. Without a device
    # the sleep itself is the loss.
    lost_ratio = lost.lost_ns / np.maximum(length_ns, 1.0)
    expected_ns = timer_ns * np.where(lost.source == SOURCE_HOST_SPANS, 1.0, lost_ratio)
    certain_ns = find_certain_idle_time(connection_ns, length_ns - lost.lost_ns)
    own_ns = _measure_other_threads(rank, lost, inside) * (1.0 - outside_ratio)
    certain_ns -= np.minimum(own_ns, certain_ns)
    room_ns = expected_ns + certain_ns
    if room_ns.sum() < limits.asleep_at_least_ratio * length_ns[inside].sum():
        return no_claim
    share = np.minimum(room_ns / np.maximum(lost.lost_ns, 1), 1.0)
    is_known = timer_ns.sum() >= connection_ns.sum() or outside_ratio >= _MIN_KNOWN_RATIO
    evidence = _build_evidence(lost, share, timer_ns, connection_ns)
    poll_ratio = measure_poll_ratio(rank, lost) if timer_ns.any() else 0.0
    if poll_ratio >= _MIN_POLL_RATIO:
        note = "of that sleep was in a loop that polls; what it polls for is not known"
        evidence.append(Evidence("thread.polling_ratio", poll_ratio, "ratio", note))
    return share, evidence, "B" if is_known else "C"


def _measure_connections(
    rank: Rank, lost: LostTime, inside: NDArray[np.bool_]
) -> tuple[Float, float]:
    """Measure which part of each segment's sleep was on a connection or a pipe: float64[n].

    Waits for batches, other ranks, own threads and the device are left out. Returns also the part
    of these waits that is known to be for something outside the job: in known calls, or in writing
    to a pipe from the job's own code.
    """
    thread, names = rank.main.threads[rank.pid], rank.chunk.wchan_names
    connection = find_sleep_samples(thread, names, _is_connection)
    writing = find_sleep_samples(thread, names, _is_pipe_write)
    poll = find_sleep_samples(thread, names, is_poll)
    calls = _measure_calls(rank, lost, inside)
    if calls is None:
        if _may_wait_for_worker(rank) or _may_wait_for_rank(rank):
            connection[:] = poll[:] = False
        elif may_wait_in_driver(rank):
            poll[:] = False
        return compute_sleep_ratios(rank, lost, inside, connection | poll), 0.0
    outside_ratio, unknown_ratio = calls
    max_ratio = outside_ratio if _may_wait_for_rank(rank) else outside_ratio + unknown_ratio
    on_connection = compute_sleep_ratios(rank, lost, inside, connection)
    on_connection *= _compute_cap(on_connection, inside, max_ratio)
    # A driver polls in any line that needs its device, so only known calls count there.
    in_poll = compute_sleep_ratios(rank, lost, inside, poll)
    max_ratio = min(max_ratio, outside_ratio) if may_wait_in_driver(rank) else max_ratio
    in_poll *= _compute_cap(in_poll, inside, max_ratio)
    known_ratio = min(
        outside_ratio + unknown_ratio * compute_sample_ratio(connection, writing), 1.0
    )
    return on_connection + in_poll, known_ratio / max(outside_ratio + unknown_ratio, 1e-9)


def _compute_cap(ratios: Float, inside: NDArray[np.bool_], max_mean: float) -> float:
    """Compute the factor that makes the mean of some ratios at most `max_mean`."""
    mean = float(ratios[inside].mean())
    return min(max_mean / mean, 1.0) if mean > 0 else 1.0


def _measure_calls(
    rank: Rank, lost: LostTime, inside: NDArray[np.bool_]
) -> tuple[float, float] | None:
    """Measure by stacks in which part of its sleep the thread waited for something outside.

    Returns two parts of the sleep: in calls that are known to wait for something outside, and in
    calls of which nothing is known. The rest waited for another thread, process or rank of the job.
    None if too few stacks are known.
    """
    stacks = rank.main.stacks
    if stacks is None or not rank.chunk.stacks.has_paths:
        return None
    bounds = lost.start_ns[inside], lost.end_ns[inside]
    asleep = (stacks.thread == 0) & np.isin(stacks.state, _SLEEP_STATES) & (stacks.stack > 0)
    asleep &= find_containing(stacks.start_ns, bounds) >= 0
    asleep &= ~find_samples_in_waits(rank.main, stacks.start_ns)
    numbers, inverse = np.unique(stacks.stack[asleep], return_inverse=True)
    kinds = np.array([_classify_stack(rank.chunk.stacks, number) for number in numbers.tolist()])
    if np.count_nonzero(asleep) < _MIN_STACKS:
        return None
    kind, weight = kinds[inverse], stacks.interval_ns[asleep].astype(np.float64)
    total = max(float(weight.sum()), 1.0)
    return float(weight[kind == _OUTSIDE].sum()) / total, float(weight[kind == _OWN].sum()) / total


def _classify_stack(table: StackTree, stack: int) -> int:
    """Classify a stack by what the innermost line of the job's own code called."""
    locations = [table.locations[index] for index in table.list_locations(stack)]
    parts = split_at_own_line(locations)
    called = [location.file for location in (parts[1] if parts else locations)]
    if any(map(_JOB_FILES.search, called)):
        return _OF_JOB
    return _OUTSIDE if any(map(_OUTSIDE_FILES.search, called)) else _OWN


def _claim_loading_thread(rank: Rank, lost: LostTime, breakdown: DataWaitBreakdown) -> Float:
    """Return the share of each wait for data in which the loading thread slept in a timer.

    float64[n].
    """
    share = np.zeros(lost.start_ns.size)
    waits = (lost.phase == PHASE_DATA_WAIT) & (breakdown.unknown > 0)
    for pid in np.unique(breakdown.worker_pid[waits]).tolist():
        process = next((item for item in (rank.main, *rank.workers) if item.pid == pid), None)
        thread = process.threads.get(pid) if process is not None else None
        if process is None or thread is None:
            continue
        fetches = process.get_spans(FetchSpans)
        bounds = lost.start_ns[waits], lost.end_ns[waits]
        if fetches is not None:
            bounds = fetches.start_ns, fetches.end_ns
        asleep = (thread.state == ord("S")) & (thread.wchan >= 0)
        asleep &= find_containing(thread.t_ns, merge_intervals(bounds)) >= 0
        if np.count_nonzero(asleep) < _MIN_STACKS:
            continue
        timer = find_sleep_samples(thread, rank.chunk.wchan_names, _is_timer)
        rows = waits & (breakdown.worker_pid == pid)
        share[rows] = breakdown.unknown[rows] * compute_sample_ratio(asleep, timer)
    return share


def _may_wait_for_worker(rank: Rank) -> bool:
    """Return whether a connection may be a wait for a worker without a span."""
    return layout.DATA_WAIT not in rank.main.spans


def _may_wait_for_rank(rank: Rank) -> bool:
    """Return whether a connection may be a wait for another rank without a span.

    A process that no launcher started as one of several is alone.
    """
    is_alone = (parse_job_position(rank.main.registration).world_size or 1) == 1
    return not is_alone and layout.COLLECTIVE not in rank.main.spans


def _is_timer(name: str) -> bool:
    return _TIMER in name or name.startswith(_PROCESS_WCHANS)


def _is_pipe_write(name: str) -> bool:
    return _PIPE_WRITE in name


def _is_connection(name: str) -> bool:
    return any(part in name for part in _CONNECTION_WCHANS)


def _build_evidence(
    lost: LostTime, share: Float, timer_ns: Float, connection_ns: Float
) -> list[Evidence]:
    length_ns = np.maximum(lost.end_ns - lost.start_ns, 1)
    return [
        Evidence(name, compute_claimed_mean(lost, share, ns / length_ns), "ratio", note)
        for name, ns, note in (
            ("thread.in_timer_ratio", timer_ns, "of that time the main thread slept in a timer"),
            (
                "thread.on_connection_ratio",
                connection_ns,
                "of that time the main thread waited for a connection or a pipe",
            ),
        )
        if ns.any()
    ]


def _measure_other_threads(rank: Rank, lost: LostTime, rows: NDArray[np.bool_]) -> Float:
    """Measure how long the busiest other thread of the process ran in each segment.

    rows: bool[n]. Returns float64[n], ns.
    """
    longest_ns = np.zeros(lost.start_ns.size)
    for tid, thread in rank.main.threads.items():
        if tid != rank.pid:
            ran_ns = compute_column_increase(
                thread.t_ns, thread.on_cpu_ns, lost.start_ns[rows], lost.end_ns[rows]
            )
            longest_ns[rows] = np.maximum(longest_ns[rows], np.nan_to_num(ran_ns))
    return longest_ns
