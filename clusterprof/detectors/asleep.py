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
from clusterprof.timeline.model import Float, Lost, Rank

_ASLEEP = (ord("S"), ord("D"))


def asleep_ns(rank: Rank, lost: Lost, rows: NDArray[np.bool_]) -> Float:
    """Return float64[n]: how long the main thread was on no CPU, nor waited for one; 0 unknown."""
    length = (lost.end_ns - lost.start_ns).astype(np.float64)
    runs = main_thread(rank, "on_cpu_ns", lost, rows) + np.nan_to_num(
        main_thread(rank, "run_delay_ns", lost, rows)
    )
    return np.where(rows & ~np.isnan(runs), np.clip(1.0 - runs, 0.0, 1.0) * length, 0.0)


def there_ratio(rank: Rank, lost: Lost, rows: NDArray[np.bool_], which: NDArray[np.bool_]) -> float:
    """Return the part of the main thread's sleep in the chosen pieces that was at a place.

    `which`: bool per sample of the main thread, true where it slept there. Samples without a place
    tell nothing (it woke as it was asked); 0.0 without any others.
    """
    thread = rank.main.threads[rank.pid]
    start, end = lost.start_ns[rows], lost.end_ns[rows]
    row = np.searchsorted(start, thread.t_ns, side="right") - 1
    inside = row >= 0
    inside[inside] = thread.t_ns[inside] < end[row[inside]]
    asleep = inside & np.isin(thread.state, _ASLEEP) & (thread.wchan >= 0)
    count = int(asleep.sum())
    return float((asleep & which).sum()) / count if count else 0.0


def spread(wanted_ns: float, room_ns: Float, lost: Lost) -> Float:
    """Return float64[n]: shares of the pieces that give an amount out in proportion to room."""
    room_ns = np.minimum(room_ns, lost.lost_ns)
    whole = float(room_ns.sum())
    if whole <= 0 or wanted_ns <= 0:
        return np.zeros(lost.start_ns.size)
    claimed = room_ns * min(1.0, wanted_ns / whole)
    return np.minimum(claimed / np.maximum(lost.lost_ns, 1), 1.0)
