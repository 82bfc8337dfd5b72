"""Pauses in which the main thread computes and the device is given nothing, now and then.

    samples    |  100 ms  |  100 ms  |  100 ms  |
    device     =======....|.......===|==========      70 and 70 idle of 100: one pause of 140
    main       launches  metrics     launches

A pause shorter than two samples may leave none of them idle all the time; two that follow each
other have it between them, and are idle for twice as long as a quarter of such pairs is. Slow
launching is in every step, pauses are in fewer than half of them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.detectors.base import in_phase, main_thread
from clusterprof.probe import layout
from clusterprof.timeline.model import (
    PHASE_COMPUTE,
    SOURCE_DEVICE_SAMPLES,
    Float,
    Int,
    Lost,
    Rank,
)

_MOST_OF_A_SAMPLE = 0.9  # of a slow sampler's: two of 1 s with 0.05 idle each are no pause
_USUAL_QUANTILE = 0.25  # steps with pauses may be nearly half of all, and their samples more
_REGULAR_FROM = 3  # pauses


class Limits(Protocol):
    """What a pause is; those of `eval-host`."""

    @property
    def nothing_launched_at_least_ns(self) -> int: ...

    @property
    def on_cpu_at_least_ratio(self) -> float: ...


def pauses(rank: Rank, lost: Lost, limits: Limits) -> tuple[Float, bool]:
    """Return float64[n]: what the main thread computed of each piece's loss in a pause, and
    whether the pauses come every so many steps."""
    none = np.zeros(lost.start_ns.size)
    idle = in_phase(lost, PHASE_COMPUTE) & (lost.step != 0)
    idle &= lost.source == SOURCE_DEVICE_SAMPLES
    window = _windows(rank, lost.start_ns)
    if window is None or not idle.any():
        return none, False
    length = lost.end_ns - lost.start_ns
    user_ns = np.nan_to_num(main_thread(rank, "user_ns", lost, idle)) * length
    number = window[0] - window[0].min()
    count = int(number.max()) + 1
    idle_ns = np.bincount(number, np.where(idle, lost.lost_ns, 0), count)
    busy_ns = np.bincount(number, np.where(idle, np.minimum(user_ns, lost.lost_ns), 0), count)
    least = max(limits.nothing_launched_at_least_ns, _MOST_OF_A_SAMPLE * window[1])
    both, busy = idle_ns[:-1] + idle_ns[1:], busy_ns[:-1] + busy_ns[1:]
    whole = idle_ns >= least
    pair = (both >= least) & (busy >= limits.on_cpu_at_least_ratio * both)
    if both.size:
        usual = 2 * float(np.quantile(both, _USUAL_QUANTILE))
        pair &= whole[:-1] | whole[1:] | (both >= usual)
    found = np.append(pair, False) | np.append(False, pair)
    beside = ~whole & (np.append(whole[1:], False) | np.append(False, whole[:-1]))
    core = idle & (found & ~beside)[number]
    idle &= found[number]
    if not core.any():
        return none, False
    steps, count = _steps_of_pauses(lost, core, number)
    if 2 * count >= _steps(rank, lost):
        return none, False
    share = np.where(idle, np.minimum(user_ns, lost.lost_ns) / np.maximum(lost.lost_ns, 1), 0.0)
    return share, _regular(steps)


def _windows(rank: Rank, t_ns: Int) -> tuple[Int, float] | None:
    """Number of the device sample after each instant, and how far samples are apart."""
    for signal in (signals.GPU_BUSY_TIME, signals.GPU_BUSY):
        series = rank.chunk.series.get((signal.name, rank.device))
        if series is not None and series.t_ns.size > 1:
            apart = float(np.median(np.diff(series.t_ns)))
            return np.searchsorted(series.t_ns, t_ns, side="right"), apart
    return None


def _steps_of_pauses(lost: Lost, which: NDArray[np.bool_], number: Int) -> tuple[Int, int]:
    """The step of each pause, that of its longest piece, and how many steps have one. Samples on
    end are one pause; it may reach into a second step."""
    (rows,) = which.nonzero()
    pause = np.cumsum(np.append(False, np.diff(number[rows]) > 1))
    order = np.lexsort((lost.lost_ns[rows], pause))
    last = np.append(np.flatnonzero(np.diff(pause[order])), rows.size - 1)
    steps: Int = lost.step[rows[order[last]]]
    pairs = np.unique(np.stack([pause, lost.step[rows]]), axis=1)
    count = np.maximum(np.bincount(pairs[0]) - 1, 1)
    return steps, int(count.sum())


def _steps(rank: Rank, lost: Lost) -> int:
    steps = rank.main.spans.get(layout.STEP)
    if steps is None:
        return 0
    return int(((steps.end_ns > lost.start_ns[0]) & (steps.start_ns < lost.end_ns[-1])).sum())


def _regular(steps: Int) -> bool:
    """True when three quarters of the pauses are as many steps apart as the middle two, by a third:
    one that reaches into a second step may count there."""
    if steps.size < _REGULAR_FROM:
        return False
    in_order = np.sort(steps)
    apart = in_order[1:] - in_order[:-1]
    usual = float(np.median(apart))
    alike = int((3 * np.abs(apart - usual) <= usual).sum())
    return usual > 1 and 4 * alike >= 3 * apart.size
