"""The training thread sleeps or waits for something outside training.

## What it sees

Lost time inside steps in which the training thread was neither on a CPU nor waiting for
one, and slept in a timer, on a process, a pipe or a connection.

## Why the GPU waits

A thread that sleeps launches nothing. `time.sleep` in a metrics call or a retry loop, a
rate limit, a subprocess, an upload, a question to a server: the queue of the GPU runs
dry, and it waits until the thread goes on.

## How it decides

The scheduler's counters give how long the thread slept in each lost segment outside any wait for
data, other ranks, copies, saves and evaluation. Its samples show where (`wchan`). A timer, or
waiting for a process, counts for as much of the GPU's idle time there as chance would have it,
because a host also sleeps when it waits for its GPU. A connection or a pipe can also be a wait for
the device or for another thread, so it counts only as far as the GPU must have been idle while the
thread slept, and not while another thread of the process ran. A driver waits for its device in
`poll`, too: that counts only where waits for the device have spans. The grade is B for timers and
processes, C for connections and pipes. Locks are not claimed: who holds one is not known (`cpu-gil`
decides where another thread ran). A trace with stacks names the call instead (`sleep`, `acquire`,
`recv`) and the function around it.

## What to do

Find the call: `py-spy dump --pid PID` in the middle of a pause names the line. Move it
to a thread or a process of its own, or call it less often.

## Where it is blind

If `wchan` may not be read, nothing is claimed. Sleeps far shorter than 10 ms are seen in
the counters only. A sleep inside a hooked wait counts as that wait.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.detectors.base import (
    Claims,
    compute_claimed_mean,
    compute_place_ratios,
    find_certain_idle_time,
    is_poll,
    may_wait_in_driver,
    measure_host_work,
    measure_sleep,
    name_host_functions,
    select_phases,
)
from clusterprof.analysis.timeline.data_wait.samples import find_sleep_samples
from clusterprof.analysis.timeline.load.ranks import parse_identity
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    PHASE_NONE,
    SOURCE_HOST_SPANS,
    DataWaitBreakdown,
    Float,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.series import compute_column_increase
from clusterprof.probe import layout
from clusterprof.report.model import Cause, Evidence, Grade

_ASLEEP = (layout.SLEEPING, layout.WAITING_FOR_LOCK)
_TIMER = "nanosleep"
"""Part of the names of kernel functions in which a thread sleeps that asked for a time."""
_PROCESS_PLACES = ("do_wait", "kernel_wait", "kernel_clone", "wait_for_vfork")
"""Beginnings of the names of kernel functions in which a thread waits for a process; "do_wait" also
ends the name of a wait for a lock, `futex_do_wait`.
"""
_CONNECTION_PLACES = (
    "sk_wait",
    "wait_woken",
    "tcp_recv",
    "inet_csk_accept",
    "inet_stream_connect",
    "inet_wait_for_connect",
    "unix_stream",
    "skb_wait",
    "pipe_read",
)


class HostAsleep:
    """Claims idle time of steps in which the training thread slept on purpose."""

    cause = Cause(
        "host-asleep",
        "eval",
        "The training thread sleeps or waits for something outside training",
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
        """Claim idle time in which the main thread slept in a timer or on a connection."""
        none = np.zeros(lost.start_ns.size)
        traced = measure_host_work(rank, lost, *_ASLEEP)
        if traced.any():
            note = "of that time the training thread slept or waited for a lock or a connection"
            ratio = compute_claimed_mean(lost, traced)
            asleep = Evidence("host.asleep_ratio", ratio, "ratio", note)
            return Claims(traced, "A", (*name_host_functions(rank, lost, traced, *_ASLEEP), asleep))
        inside = select_phases(lost, PHASE_COMPUTE if rank.marked else PHASE_NONE)
        thread = rank.main.threads.get(rank.pid)
        if thread is None or not inside.any():
            return Claims(none, "B")
        names = rank.chunk.wchan_names
        timer = find_sleep_samples(thread, names, _is_timer)
        connection = find_sleep_samples(thread, names, _is_connection)
        if not may_wait_in_driver(rank):
            connection |= find_sleep_samples(thread, names, is_poll)
        if _may_wait_unseen(rank):
            connection[:] = False
        if not timer.any() and not connection.any():
            return Claims(none, "B")
        length_ns = (lost.end_ns - lost.start_ns).astype(np.float64)
        asleep_ns = measure_sleep(rank, lost, inside)
        timer_ns = asleep_ns * compute_place_ratios(rank, lost, inside, timer)
        connection_ns = asleep_ns * compute_place_ratios(rank, lost, inside, connection)
        busy_ns = length_ns - lost.lost_ns
        # A host that waits for its device sleeps too, while the device is busy. Without a device
        # the sleep itself is the loss.
        lost_ratio = lost.lost_ns / np.maximum(length_ns, 1.0)
        expected_ns = timer_ns * np.where(lost.source == SOURCE_HOST_SPANS, 1.0, lost_ratio)
        certain_ns = find_certain_idle_time(connection_ns, busy_ns)
        certain_ns -= np.minimum(_measure_other_threads(rank, lost, inside), certain_ns)
        room_ns = expected_ns + certain_ns
        if room_ns.sum() < limits.asleep_at_least_ratio * length_ns[inside].sum():
            return Claims(none, "B")
        share = np.minimum(room_ns / np.maximum(lost.lost_ns, 1), 1.0)
        grade: Grade = "B" if timer_ns.sum() >= connection_ns.sum() else "C"
        return Claims(share, grade, tuple(_build_evidence(lost, share, timer_ns, connection_ns)))


def _may_wait_unseen(rank: Rank) -> bool:
    """Return whether a connection may be a wait for a worker or another rank without a span."""
    if layout.DATA_WAIT not in rank.main.spans:
        return True
    is_alone = parse_identity(rank.main.registration).world_size == 1
    return not is_alone and layout.COLLECTIVE not in rank.main.spans


def _is_timer(name: str) -> bool:
    return _TIMER in name or name.startswith(_PROCESS_PLACES)


def _is_connection(name: str) -> bool:
    return any(part in name for part in _CONNECTION_PLACES)


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
    out = np.zeros(lost.start_ns.size)
    for tid, thread in rank.main.threads.items():
        if tid != rank.pid:
            ran = compute_column_increase(
                thread.t_ns, thread.on_cpu_ns, lost.start_ns[rows], lost.end_ns[rows]
            )
            out[rows] = np.maximum(out[rows], np.nan_to_num(ran))
    return out
