"""Do ranks wait for each other in every step?

Ranks are *synchronous* when their steps carry the same numbers and end together: in nine of ten
steps the distance between the ends of two ranks is, within 5 ms or a tenth of a step, that of the
32 steps around it; and it does not wander off, as that of ranks which are only equally fast does.
Where hosts run ahead of their devices they need not end together: then they never come apart by
more than a few steps, and something tells that they wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from clusterprof.timeline.model import Float, Int

APART_NS, APART_RATIO = 5_000_000, 0.1
AROUND = 32
_WANDERS = 2.5
"""Over 16 steps the distance of ranks that know nothing of each other grows 4 times as much as over
one, that of synchronous ranks not at all."""
_WANDERS_RATIO = 0.01  # of a step: less than that is jitter
FEWEST_STEPS, TOGETHER_RATIO = 8, 0.9
AHEAD_STEPS = 3
"""So many steps more than another a host has done at most: two that its device has not, and one
that it is about to end."""
ALIKE_FROM, FEWEST_LENGTHS = 0.8, 24
"""Rank correlation of the lengths of steps. By chance that of 24 is 0.2, give or take: 0.8 is four
times as much."""
DRIFT_STEPS = 4.0
"""So far ranks would have drifted apart that do not wait for each other."""


def together(ends: Sequence[tuple[Int, Int]]) -> bool:
    """Return whether ranks are synchronous; number and end of the steps of each."""
    numbers = ends[0][0]
    for own, _ in ends[1:]:
        numbers = np.intersect1d(numbers, own)
    most = max(number.size for number, _ in ends)
    if numbers.size < max(FEWEST_STEPS, TOGETHER_RATIO * most):
        return False
    table = np.stack([end[np.searchsorted(number, numbers)] for number, end in ends])
    middle = np.sort(table - table[:, :1], axis=0)[(len(ends) - 1) // 2]
    step_ns = float(np.median(np.diff(middle)))
    return all(_with(row - row[0] - middle, step_ns) for row in table)


def _with(apart_ns: Int, step_ns: float) -> bool:
    """`apart_ns`: from the middle rank's end of each step to another's."""
    allowed = max(APART_NS, APART_RATIO * step_ns)
    near = 0
    for at in range(0, apart_ns.size, AROUND):
        part = apart_ns[at : at + AROUND]
        near += int(np.count_nonzero(np.abs(part - np.median(part)) <= allowed))
    if near < TOGETHER_RATIO * apart_ns.size:
        return False
    far = AROUND // 2
    if apart_ns.size < 2 * far:
        return True
    once = np.median(np.abs(apart_ns[1:] - apart_ns[:-1]))
    later = np.median(np.abs(apart_ns[far:] - apart_ns[:-far]))
    return bool(later <= max(_WANDERS * once, _WANDERS_RATIO * step_ns))


def kept_together(
    ends: Sequence[tuple[Int, Int]], own_ns: Sequence[int], spun: bool = False
) -> bool:
    """Return whether ranks stay within `AHEAD_STEPS` of each other, and are seen to wait for it.

    Hosts run ahead of devices that wait, so that steps need not end together: for how long a host
    is ahead depends on how long its device waits, by how many steps it is does not. Ranks that are
    only equally fast stay together for a while too; one of three things tells that these wait for
    each other: devices that were seen to spin (`spun`), ranks that would have drifted apart by what
    each lost by itself (`own_ns`), lengths of steps that rise and fall together.
    """
    numbers = ends[0][0]
    for own, _ in ends[1:]:
        numbers = np.intersect1d(numbers, own)
    if numbers.size < max(FEWEST_STEPS, TOGETHER_RATIO * max(number.size for number, _ in ends)):
        return False
    table = np.stack([end[np.searchsorted(number, numbers)] for number, end in ends])
    # Clocks of two nodes have nothing in common: ranks are usually where the middle one is.
    usual = np.median(table - table[0], axis=1).astype(np.int64)
    table = np.maximum.accumulate(table - usual[:, None], axis=1)
    middle = np.sort(table, axis=0)[(len(ends) - 1) // 2]
    done = np.stack([np.searchsorted(row, middle, side="right") for row in table])
    if int((done.max(axis=0) - done.min(axis=0)).max()) > AHEAD_STEPS:
        return False
    drift = max(own_ns) - min(own_ns)
    step_ns = float(np.median(np.diff(middle)))
    return spun or drift >= DRIFT_STEPS * step_ns or _alike(np.diff(table), np.diff(middle))


def _alike(lengths_ns: Int, middle_ns: Int) -> bool:
    """Return whether all ranks' steps are long and short when those of the middle rank are.

    By their order: one step that is long everywhere, as the first one is, says nothing.
    """
    order = np.stack([_order(row) for row in (middle_ns, *lengths_ns)])
    if middle_ns.size < FEWEST_LENGTHS or (np.ptp(order, axis=1) == 0).any():
        return False
    table: Any = np.corrcoef(order)
    return bool((table[0, 1:] >= ALIKE_FROM).all())


def _order(row: Int) -> Float:
    """Return the place of each value among the others; equal ones share theirs."""
    _, at, count = np.unique(row, return_inverse=True, return_counts=True)
    places: Float = (np.cumsum(count) - (count - 1) / 2)[at]
    return places
