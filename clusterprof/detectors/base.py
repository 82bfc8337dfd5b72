"""What a detector is: looks at lost intervals of one rank and claims a share, or abstains.

A detector words, ranks and totals nothing and knows no other detector: `attribution/` settles the
claims. Its limits are a frozen dataclass whose names carry units; a profile may change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.findings import Cause, Evidence, Grade
from clusterprof.signals import Signal
from clusterprof.timeline.feeding_ahead import spared
from clusterprof.timeline.model import (
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    Feeding,
    Float,
    Int,
    Lost,
    Rank,
    ThreadTable,
)
from clusterprof.timeline.series import Located, growth_of, located, rise, rise_of, risen

# Names of what is shared (`Lost.shared`, `Chunk.shared`).
_PRESENT, _CLAIMED, _HANDED_OVER, _RUNNABLE = "present", "claimed", "handed-over", "runnable"
_GROWTH, _COMPUTING = "growth", "computing"


@dataclass(frozen=True, slots=True)
class Claims:
    """Shares of lost pieces that one cause explains."""

    share: Float
    """float64[n], 0 to 1: which part of each piece's lost time."""
    grade: Grade
    """How good the evidence is."""
    evidence: tuple[Evidence, ...] = ()
    """Numbers over this chunk that a reader can check; merged by name over chunks."""
    resource: str = ""
    """The disk, mount or worker behind it, when one stands out."""


class Detector(Protocol):
    """One cause."""

    @property
    def cause(self) -> Cause:
        """What it claims."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """Signal names (or "spans", "threads", "device") without which it must abstain."""
        ...

    @property
    def Limits(self) -> type:  # noqa: N802 - it is a class
        """A frozen dataclass of limits with defaults, units in the names."""
        ...

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Any) -> Claims | None:
        """Claim shares of the lost pieces; None = cannot tell. `feeding` has a row per piece."""
        ...


# What several detectors read off the timeline. No detector imports another; they meet here.


def in_phase(lost: Lost, *phases: int) -> NDArray[np.bool_]:
    """Return bool[n]: which pieces lie in one of the phases."""
    present: set[int] | None = lost.shared.get(_PRESENT)
    if present is None:
        present = lost.shared[_PRESENT] = set(np.flatnonzero(np.bincount(lost.phase)).tolist())
    found = np.zeros(lost.phase.size, np.bool_)
    for phase in present.intersection(phases):  # most causes did not happen
        found |= lost.phase == phase
    return found


def waited(lost: Lost, share: Float) -> Float:
    """Return the share of pieces in a data wait, 0 elsewhere."""
    if not share.any():
        return np.zeros(lost.start_ns.size)
    in_wait = in_phase(lost, PHASE_DATA_WAIT)
    return np.where(in_wait, np.minimum(np.maximum(share, 0.0), 1.0), 0.0)


def mean_over(lost: Lost, share: Float, values: Float | None = None) -> float:
    """Return the mean of values (default: of the share itself) over the claimed lost time.

    0.0 when nothing is claimed; unknown values (NaN) carry no weight.
    """
    values = share if values is None else values
    unknown = np.isnan(values)
    weight = np.where(unknown | (share <= 0), 0.0, lost.lost_ns)
    total = float(weight.sum())
    if total <= 0:
        return 0.0
    known = np.nan_to_num(values) if unknown.any() else values
    return float(np.sum(weight * known) / total)


def grown(rank: Rank, name: str, device: str, lost: Lost, share: Float) -> float | None:
    """Return by how much a counter rose over the claimed pieces; None when it was not recorded."""
    series = rank.chunk.series.get((name, device))
    if series is None:
        return None
    claimed = _claimed(lost, share)
    if not claimed.start_ns.size:
        return 0.0
    growth = rank.chunk.shared.get((_GROWTH, name, device))
    if growth is None:
        growth = rank.chunk.shared[_GROWTH, name, device] = growth_of(series.values)
    return float(np.nansum(risen(growth, claimed.among(series.t_ns))))


class _Claimed:
    """The pieces of which a share is claimed, and where they lie among readings."""

    def __init__(self, lost: Lost, share: Float) -> None:
        rows = np.flatnonzero(share > 0)
        self.share = share
        self.start_ns, self.end_ns = lost.start_ns[rows], lost.end_ns[rows]
        self._t_ns: Int | None = None
        self._located: Located | None = None

    def among(self, t_ns: Int) -> Located:
        """Find the pieces; counters of one collector share their times."""
        if self._located is None or self._t_ns is not t_ns:
            self._t_ns, self._located = t_ns, located(t_ns, self.start_ns, self.end_ns)
        return self._located


def _claimed(lost: Lost, share: Float) -> _Claimed:
    """The same for every counter a detector asks about; it has settled its share by then."""
    known: _Claimed | None = lost.shared.get(_CLAIMED)
    if known is None or known.share is not share:
        known = lost.shared[_CLAIMED] = _Claimed(lost, share)
    return known


def pressure(
    rank: Rank, signal: Signal, lost: Lost, share: Float, note: str
) -> tuple[Grade, tuple[Evidence, ...]]:
    """Return what the node's stall time during the claimed pieces says, and the grade it gives.

    A: the kernel counted such stalls too. B, and no evidence, where it keeps no pressure figures.
    """
    pressure_ns = grown(rank, signal.name, "", lost, share)
    length_ns = float(np.sum((lost.end_ns - lost.start_ns)[share > 0]))
    if pressure_ns is None or length_ns <= 0:
        return "B", ()
    name = signal.name.replace("_ns_total", "_ratio")
    ratio = min(1.0, pressure_ns / length_ns)
    return "A" if pressure_ns > 0 else "B", (Evidence(name, ratio, "ratio", note),)


def busiest(rank: Rank, name: str, lost: Lost, share: Float) -> tuple[str, float]:
    """Return the device whose counter rose most over the claimed pieces ("" when none did)."""
    best = ("", 0.0)
    for device in sorted(device for signal, device in rank.chunk.series if signal == name):
        values = rank.chunk.series[(name, device)].values
        if values.size and values[0] != values[-1]:  # most disks of a node do nothing
            amount = grown(rank, name, device, lost, share) or 0.0
            if amount > best[1]:
                best = (device, amount)
    return best


def cpus_left(allowed: int, cores: int, online: int) -> Evidence:
    """Return how many CPUs affinity and cpuset leave, and how many cores those are."""
    some = "" if cores == allowed else f" ({cores} cores)"
    note = f"of {online} CPUs{some} are left to them by affinity or cpuset"
    return Evidence("job.cpus_allowed_count", float(allowed), "count", note)


def main_thread(rank: Rank, column: str, lost: Lost, rows: NDArray[np.bool_]) -> Float:
    """Return float64[n]: part of each chosen piece by which a counter of the main thread rose.

    `column` is "on_cpu_ns" or "run_delay_ns"; NaN where not chosen or not known.
    """
    out = np.full(lost.start_ns.size, np.nan)
    thread = rank.main.threads.get(rank.pid)
    if thread is None or not rows.any():
        return out
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    growth = rise_of(thread.t_ns, getattr(thread, column), start, end)
    out[rows] = np.clip(growth / np.maximum(end - start, 1), 0.0, 1.0)
    return out


def held_back(rank: Rank, lost: Lost, rows: NDArray[np.bool_]) -> Float:
    """Return float64[n]: part of each chosen piece in which the CPU quota had run out; 0 unknown.

    The kernel adds the time up over CPUs, so the part is capped at the whole.
    """
    out = np.zeros(lost.start_ns.size)
    series = rank.chunk.series.get((signals.CGROUP_THROTTLED.name, ""))
    if series is None or not rows.any():
        return out
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    growth = rise(series, start, end) / np.maximum(end - start, 1)
    out[rows] = np.clip(np.nan_to_num(growth), 0.0, 1.0)
    return out


def computing(rank: Rank, lost: Lost, feeding: Feeding) -> tuple[Float, Float]:
    """Return float64[n] twice: part of each piece in which the awaited batch was being computed,
    and which of it a loader that may work further ahead would have spared (`feeding_ahead`)."""
    known = lost.shared.get(_COMPUTING)
    if known is None or known[0] is not feeding:
        share = waited(lost, feeding.user_cpu)
        ahead = np.zeros(share.size)
        rows = np.flatnonzero(share > 0)
        if rows.size and rank.workers:
            ahead[rows] = share[rows] * spared(rank, lost.end_ns[rows])
        known = lost.shared[_COMPUTING] = feeding, (share, ahead)
    return known[1]  # type: ignore[no-any-return]


def hand_over(rank: Rank, lost: Lost, feeding: Feeding, column: str) -> Float:
    """Return float64[n]: part of each piece in which a finished batch was on its way, and the
    worker that had made it kept its interpreter busy with the next one.

    A batch leaves a worker through a thread of its own, which needs the worker's interpreter. What
    the worker's main thread did meanwhile ("user_ns" or "run_delay_ns") holds the batch up.
    """
    out = np.zeros(lost.start_ns.size)
    late, by_worker = _handed_over(rank, lost, feeding)
    for rows, thread, length, at in by_worker:
        growth = risen(growth_of(getattr(thread, column)), at)
        out[rows] = late[rows] * np.clip(np.nan_to_num(growth) / length, 0.0, 1.0)
    return out


_OfWorker = tuple[Int, ThreadTable, Float, Located]


def _handed_over(rank: Rank, lost: Lost, feeding: Feeding) -> tuple[Float, list[_OfWorker]]:
    """Part of each piece in which its batch was on its way, and by worker: the pieces, its main
    thread, how long the batch took, and where that lies among the samples of the thread."""
    known = lost.shared.get(_HANDED_OVER)
    if known is not None and known[0] is feeding:
        return known[1]  # type: ignore[no-any-return]
    late = waited(lost, feeding.delivery)
    rows_late = np.flatnonzero(late > 0)
    owner = feeding.worker_pid[rows_late]
    by_worker: list[_OfWorker] = []
    for pid in sorted(set(owner.tolist())):
        process = rank.chunk.processes.get(pid)
        thread = None if process is None else process.threads.get(pid)
        if thread is None or pid == rank.pid:
            continue
        rows = rows_late[owner == pid]
        end = lost.end_ns[rows]
        length = np.maximum(late[rows] * (end - lost.start_ns[rows]), 1.0)
        at = located(thread.t_ns, end - length.astype(np.int64), end)
        by_worker.append((rows, thread, length, at))
    lost.shared[_HANDED_OVER] = feeding, (late, by_worker)
    return late, by_worker


def runnable(rank: Rank, lost: Lost, feeding: Feeding) -> Float:
    """Return float64[n]: part of each piece in which the thread it hung on had no CPU.

    In a data wait that is the critical thread, inside a step the main thread.
    """
    known = lost.shared.get(_RUNNABLE)
    if known is not None and known[0] is feeding:
        return known[1]  # type: ignore[no-any-return]
    delay = waited(lost, feeding.runnable) + hand_over(rank, lost, feeding, "run_delay_ns")
    inside = in_phase(lost, PHASE_COMPUTE)
    if inside.any():
        own = main_thread(rank, "run_delay_ns", lost, inside)
        delay = np.where(inside, np.nan_to_num(own), delay)
    lost.shared[_RUNNABLE] = feeding, delay
    return delay
