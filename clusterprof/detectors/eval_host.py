"""Evaluation, metrics or logging on the host hold the step up.

## What it sees

Lost time inside steps in which the training process evaluated (where that is marked), or in which
its main thread was blocked writing a file or sending over a connection.

## Why the GPU waits

Metrics on the CPU, a log that is synchronised after every line, results that are uploaded before
the next step: while the main thread is at it, it launches nothing.

## How it decides

Its share is the whole of a lost piece inside a mark `clusterprof.span("eval")`. Without a mark it
is the time in which the main thread slept in a kernel function of writing or sending (`wchan`: a
journal, write-back, fsync, a full send buffer), inside a step and outside any wait for data, other
ranks, the device, copies and saves. How long it slept, or worked in the kernel, is counted in each
piece; which part of that was writing is told by the samples of all of them. If the process wrote
meanwhile the grade is B, else C. So is what the main thread computed in its own code while the GPU
stood still for 0.1 s or more in two samples that follow each other, where fewer than half of the
steps have that: slow launching is slow in each. The grade of that is B where such pauses come every
so many steps, else C. **A save is not logging**: blocked for a second or more on end, with
64 MiB or more written in it, is a checkpoint that nobody marked, and is left unattributed.

## What to do

Log from a thread or process of its own, and every few hundred steps. Keep metrics on the GPU, and
fetch them once at the end. Evaluate less often, or on other devices.

## Where it is blind

Logging or metrics that keep the main thread on a CPU for less than 0.1 s on end look like launching
(`launch-bound`). Where `wchan` may not be read, blocked writes are not seen. Waiting for the answer
to an upload is not told from waiting for other ranks, and not claimed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.detectors.asleep import asleep_ns, spread, there_ratio
from clusterprof.detectors.base import Claims, in_phase, main_thread, mean_over
from clusterprof.detectors.pauses import pauses
from clusterprof.findings import Cause, Evidence, Grade
from clusterprof.probe import layout
from clusterprof.timeline.model import (
    PHASE_COMPUTE,
    PHASE_EVAL,
    Feeding,
    Float,
    Lost,
    Rank,
)
from clusterprof.timeline.series import rise_of
from clusterprof.timeline.sleeping import asleep_at, runs

_WORDS = (
    "jbd2", "fsync", "log_wait_commit", "log_force", "xlog", "writeback", "folio_wait_stable",
    "sync_dirty_buffer",
    "balance_dirty", "wait_for_stable", "flush", "sk_stream_wait_memory", "tcp_sendmsg",
    "nfs_file_fsync", "nfs_wb", "nfs_commit",
)  # fmt: skip
_PAGES = ("folio_wait", "wait_on_page", "io_schedule", "rpc_wait", "wbt_", "rq_qos", "submit_bio")
"""Reads sleep here too: they count while the process writes and does not read."""


class EvalHost:
    """Claims marked evaluation, and time of the main thread blocked in writing."""

    cause = Cause(
        "eval-host",
        "eval",
        "Evaluation, metrics or logging on the host hold the step up",
        "Log from a thread of its own and less often, and keep metrics on the GPU",
    )
    needs = ("spans",)

    @dataclass(frozen=True, slots=True)
    class Limits:
        """What is logging and what is a save."""

        blocked_at_least_ratio: float = 0.05
        """A smaller part of the pieces blocked in writing is left unattributed."""
        nothing_launched_at_least_ns: int = 90_000_000
        """So long the GPU must stand still in two samples on end: shorter may be slow launching."""
        on_cpu_at_least_ratio: float = 0.5
        """Part of that time that the main thread must have been on a CPU."""
        save_at_least_ns: int = 1_000_000_000
        """Blocked for so long on end, and with much written: a save that nobody marked."""
        save_at_least_bytes: int = 67_108_864
        """So much written while blocked on end makes it a save."""

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Limits) -> Claims | None:
        """Claim lost pieces of evaluation, and what blocked writes explain of those in steps."""
        share = np.where(in_phase(lost, PHASE_EVAL), 1.0, 0.0)
        evidence = []
        table = rank.main.spans.get(layout.EVAL)
        grade: Grade = "A"
        if share.any() and table is not None:
            length = float((table.end_ns - table.start_ns).mean())
            evidence.append(Evidence("eval.mean_ns", length, "ns", "an evaluation took on average"))
        writing = _writing(rank, lost, limits)
        if writing.any():
            wrote = _rise(rank, "write_chars", lost, writing)
            if writing @ lost.lost_ns > share @ lost.lost_ns:
                grade = "C" if wrote is None or wrote <= 0 else "B"
            evidence.append(
                Evidence(
                    "thread.writing_ratio",
                    mean_over(lost, writing),
                    "ratio",
                    "of that time the main thread was blocked in writing or sending",
                )
            )
            if wrote is not None:
                note = "the process wrote meanwhile"
                evidence.append(Evidence("process.write_chars_total", wrote, "bytes", note))
        alone, regular = pauses(rank, lost, limits)
        if alone.any():
            if alone @ lost.lost_ns > (share + writing) @ lost.lost_ns:
                grade = "B" if regular else "C"
            note = "of that time it computed, and the GPU was given nothing"
            ratio = mean_over(lost, alone)
            evidence.append(Evidence("thread.on_cpu_ratio", ratio, "ratio", note))
        return Claims(share + np.maximum(writing, alone), grade, tuple(evidence))


def _writing(rank: Rank, lost: Lost, limits: EvalHost.Limits) -> Float:
    """float64[n]: the part of each piece inside a step that blocked writes explain."""
    out = np.zeros(lost.start_ns.size)
    inside = in_phase(lost, PHASE_COMPUTE)
    thread = rank.main.threads.get(rank.pid)
    if thread is None or not inside.any():
        return out
    names = rank.chunk.wchan_names
    writes = asleep_at(thread, names, lambda name: any(word in name for word in _WORDS))
    pages = asleep_at(thread, names, lambda name: name.startswith(_PAGES))
    writes |= pages & _only_writes(rank, thread.t_ns)
    if not writes.any():
        return out
    for first, last in zip(*(side.tolist() for side in runs(thread.t_ns, writes))):
        start, end = thread.t_ns[first], thread.t_ns[min(last + 1, thread.t_ns.size - 1)]
        if end - start >= limits.save_at_least_ns and _is_save(rank, start, end, limits):
            writes[first : last + 1] = False
    # A write works in the kernel before it sleeps there, and after.
    length = lost.end_ns - lost.start_ns
    kernel = np.nan_to_num(main_thread(rank, "system_ns", lost, inside)) * length
    away = asleep_ns(rank, lost, inside) + kernel
    held = there_ratio(rank, lost, inside, writes) * float(away.sum())
    if held < limits.blocked_at_least_ratio * float(length[inside].sum()):
        return out
    # While it was blocked nothing was launched: idle time of a piece is its, up to its length.
    return spread(held, away, lost, inside)


def _only_writes(rank: Rank, t_ns: np.ndarray) -> NDArray[np.bool_]:
    """bool[n]: around which samples the process wrote to a device and read from none."""
    io = rank.main.io
    if io is None or io.t_ns.size < 2:
        return np.zeros(t_ns.size, np.bool_)
    row = np.clip(np.searchsorted(io.t_ns, t_ns, side="right") - 1, 0, io.t_ns.size - 2)
    wrote, read = np.diff(io.write_bytes), np.diff(io.read_bytes)
    return (wrote[row] > 0) & (read[row] <= 0)


def _is_save(rank: Rank, start_ns: int, end_ns: int, limits: EvalHost.Limits) -> bool:
    """True for much written at once; what was written is not known: it may be one."""
    io = rank.main.io
    if io is None or io.t_ns.size < 2:
        return True
    low = max(int(np.searchsorted(io.t_ns, start_ns, side="right")) - 1, 0)
    high = min(int(np.searchsorted(io.t_ns, end_ns, side="left")), io.t_ns.size - 1)
    return int(io.write_chars[high] - io.write_chars[low]) >= limits.save_at_least_bytes


def _rise(rank: Rank, column: str, lost: Lost, share: Float) -> float | None:
    io = rank.main.io
    if io is None or io.t_ns.size < 2:
        return None
    some = share > 0
    grown = rise_of(io.t_ns, getattr(io, column), lost.start_ns[some], lost.end_ns[some])
    return None if np.isnan(grown).all() else float(np.nansum(grown))
