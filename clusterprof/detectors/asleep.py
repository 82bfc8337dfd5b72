"""Time of the main thread asleep at a place, told where samples are too far apart for each piece.

How long a thread was on no CPU is counted exactly in every piece; where it was is known at ten
instants a second. Naps shorter than that show in the samples of many steps together:

    asleep      |==30==|   |==30==|   |==30==|     90 ns of three pieces
    samples         J          P          J        2 of 3 in a journal: 60 of the 90 ns
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.detectors.base import main_thread
from clusterprof.probe import layout
from clusterprof.timeline.model import Float, Int, Lost, Rank

_ASLEEP = (ord("S"), ord("D"))
_STRETCH_NS = 1_000_000_000
_MOSTLY = 0.5  # of a record of waits for the device must be waiting, for samples in it to be


def asleep_ns(rank: Rank, lost: Lost, rows: NDArray[np.bool_]) -> Float:
    """Return float64[n]: how long the main thread was on no CPU, nor waited for one; 0 unknown.

    Marked waits for the device do not count.
    """
    length = (lost.end_ns - lost.start_ns).astype(np.float64)
    runs = main_thread(rank, "on_cpu_ns", lost, rows) + np.nan_to_num(
        main_thread(rank, "run_delay_ns", lost, rows)
    )
    asleep = np.clip(1.0 - runs, 0.0, 1.0) * length - synced_ns(rank, lost.start_ns, lost.end_ns)
    return np.where(rows & ~np.isnan(runs), np.maximum(asleep, 0.0), 0.0)


def synced_ns(rank: Rank, start_ns: Int, end_ns: Int) -> Float:
    """Return float64[n]: for how long of each piece the host was in marked waits for the device."""
    table = rank.main.spans.get(layout.SYNC)
    if table is None or not table.start_ns.size:
        return np.zeros(start_ns.size)
    order = np.argsort(table.start_ns, kind="stable")
    start, length = table.start_ns[order], (table.end_ns - table.start_ns)[order]
    edges = np.stack([start, start + length], axis=1).ravel()
    so_far = np.cumsum(np.minimum(table.a[order], length).astype(np.float64))
    before = np.append(0.0, so_far[:-1])
    sums = np.stack([before, so_far], axis=1).ravel()
    return np.interp(end_ns, edges, sums) - np.interp(start_ns, edges, sums)


def _in_sync(rank: Rank, t_ns: Int) -> NDArray[np.bool_]:
    """bool[n]: at which instants the host was in a marked wait for the device."""
    table = rank.main.spans.get(layout.SYNC)
    if table is None or not table.start_ns.size:
        return np.zeros(t_ns.size, np.bool_)
    order = np.argsort(table.start_ns, kind="stable")
    start, end, waited = table.start_ns[order], table.end_ns[order], table.a[order]
    row = np.searchsorted(start, t_ns, side="right") - 1
    at = np.maximum(row, 0)
    mostly = waited[at] >= _MOSTLY * (end[at] - start[at])
    return np.asarray((row >= 0) & (t_ns < end[at]) & mostly, np.bool_)


def there_ratio(rank: Rank, lost: Lost, rows: NDArray[np.bool_], which: NDArray[np.bool_]) -> float:
    """Return the part of the main thread's sleep in the chosen pieces that was at a place.

    `which`: bool per sample of the main thread, true where it slept there.
    """
    return part_of(asleep_samples(rank, lost, rows), which)


def asleep_samples(rank: Rank, lost: Lost, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which samples of the main thread say where it slept in the chosen pieces.

    Those in marked waits for the device are left out, and those without a place tell nothing: it
    woke as it was asked.
    """
    thread = rank.main.threads[rank.pid]
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    row = np.searchsorted(start, thread.t_ns, side="right") - 1
    inside = row >= 0
    inside[inside] = thread.t_ns[inside] < end[row[inside]]
    asleep = inside & np.isin(thread.state, _ASLEEP) & (thread.wchan >= 0)
    return asleep & ~_in_sync(rank, thread.t_ns)


def part_of(whole: NDArray[np.bool_], which: NDArray[np.bool_]) -> float:
    """Return the part of some samples that are of a kind; 0.0 of none."""
    count = int(whole.sum())
    return float((whole & which).sum()) / count if count else 0.0


def spread(wanted_ns: float, room_ns: Float, lost: Lost, rows: NDArray[np.bool_]) -> Float:
    """Return float64[n]: shares of the chosen pieces that give an amount out in proportion to room,
    which is `within` what they lost."""
    room_ns = within(room_ns, lost, rows)
    whole = float(room_ns.sum())
    if whole <= 0 or wanted_ns <= 0:
        return np.zeros(lost.start_ns.size)
    claimed = room_ns * min(1.0, wanted_ns / whole)
    return np.minimum(claimed / np.maximum(lost.lost_ns, 1), 1.0)


def within(room_ns: Float, lost: Lost, rows: NDArray[np.bool_]) -> Float:
    """Return float64[n]: an amount of each piece as far as the piece, or those near it, lost it.

    Devices and threads are sampled ten times a second and not at the same instants: what a piece
    has too much of goes to the other chosen ones of the same second.

        amount  60  20   0   10        three pieces of one second, one of the next
        lost    30  30  40  100
        within  30  26  24   10        30 too many, room for 10 and 40: three fifths of both
    """
    kept = np.minimum(room_ns, lost.lost_ns)
    second = lost.start_ns // _STRETCH_NS
    second = second - second.min(initial=0)
    over = np.bincount(second, weights=room_ns - kept)
    free_ns = np.where(rows, lost.lost_ns - kept, 0.0)
    free = np.bincount(second, weights=free_ns)
    ratio = np.minimum(1.0, over / np.maximum(free, 1.0))
    return kept + free_ns * ratio[second]
