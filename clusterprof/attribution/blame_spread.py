"""How the work of ranks differs: always in the same rank, at random, or by more than chance.

Of each operation it is known by how much everyone worked less than the last to come. In a window of
one team's operations a rank's *level* is how much more than the middle rank it worked on average,
and the *spread* what is typical of the rest:

    work of rank 0   100 103  98 101  99   level 0       spread 2
    work of rank 1   129 131 133 130 127   level 30      beyond four standard errors: its own
    work of rank 2    99 101 160 100  98   level 0       160 is no spread, but an event

A level counts when chance would hardly ever make it. Random differences are *uneven* work when
they are large beside the time between operations, or lean to one side as lengths of sequences do;
jitter goes both ways.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Float, Int

SURE = 4.0
"""Standard errors beyond which a level is no chance (one rank in 30,000)."""
EVENT = 6.0
"""Spreads beyond which a difference is an event of its own, and no jitter."""
LARGE_RATIO = 0.15
"""Uneven: a spread of more than this part of the time from one operation to the next (jitter of a
tenth is found to be up to 0.13 over 40 steps of two ranks) …"""
LEANS = 0.7
"""… or a skewness above this one (lengths of sequences: 1 to 3; chance: 0) …"""
SMALL_RATIO = 0.02
"""… where the spread is at least this part of it. Every machine's noise leans a little."""
_MAD = 1.4826  # median of |x| -> standard deviation of a normal distribution
_ERRORS = 3.0  # and a skewness beyond so many of its standard errors


class Seats(NamedTuple):
    """Ranks in operations, one row each, sorted by window and operation; n rows."""

    window: Int
    operation: Int
    rank: Int
    work_ns: Float
    """How much more it worked than the last to come: 0 of that one, mostly negative."""


class Windows(NamedTuple):
    """What is known of each window; w of each."""

    spread_ns: Float
    uneven: NDArray[np.bool_]
    key: Int
    """window * ranks + rank of the levels, ascending."""
    level_ns: Float
    """0 where it may be chance."""

    def level(self, window: Int, rank: Int, ranks: int) -> Float:
        """Return float64[m]: the level of ranks in windows."""
        at = np.minimum(np.searchsorted(self.key, window * ranks + rank), self.key.size - 1)
        found = self.key[at] == window * ranks + rank
        return np.where(found, self.level_ns[at], 0.0)


def judged(seats: Seats, windows: int, ranks: int, period_ns: Float) -> Windows:
    """Judge windows; `period_ns` is the time from one operation of each to the next."""
    off = seats.work_ns - middle(seats.work_ns, seats.operation)[seats.operation]
    key, at = np.unique(seats.window * ranks + seats.rank, return_inverse=True)
    count = np.bincount(at, minlength=key.size)
    level = np.bincount(at, off, key.size) / np.maximum(count, 1)
    rest = off - level[at]
    of_key = key // ranks
    members = np.bincount(of_key, minlength=windows)
    # Each rank is part of the middle that it is compared to.
    part = np.sqrt(members / np.maximum(members - 1, 1))
    spread = _MAD * middle(np.abs(rest), seats.window, windows) * part
    sure = np.abs(level) > SURE * spread[of_key] / np.sqrt(np.maximum(count, 1))
    skewness, error = _leaning(rest, seats.window, spread, members)
    leans = (skewness > np.maximum(LEANS, _ERRORS * error)) & (spread > SMALL_RATIO * period_ns)
    uneven = leans | (spread > LARGE_RATIO * period_ns)
    return Windows(spread, uneven, key, np.where(sure, level, 0.0))


def _leaning(rest: Float, window: Int, spread: Float, members: Int) -> tuple[Float, Float]:
    """Return the skewness of each window, without events, and its standard error.

    Differences from the middle of few ranks lean less than what they are differences of.
    """
    size = spread.size
    plain = np.abs(rest) <= EVENT * spread[window]
    rest, window = rest[plain], window[plain]
    count = np.maximum(np.bincount(window, minlength=size), 1)
    rest = rest - (np.bincount(window, rest, size) / count)[window]
    square = np.bincount(window, rest**2, size) / count
    cube = np.bincount(window, rest**3, size) / count
    raw = cube / np.maximum(square, 1e-9) ** 1.5
    n = np.maximum(members, 3)
    kept = np.where(members > 2, (n - 2) / np.sqrt(n * (n - 1.0)), np.inf)
    return raw / kept, np.sqrt(6.0 / count) / np.where(members > 2, kept, 1.0)


def middle(value: Float, group: Int, groups: int | None = None) -> Float:
    """Return the median of each group, 0 of an empty one; of an even number the mean of two."""
    size = int(group.max(initial=-1)) + 1 if groups is None else groups
    order = np.lexsort((value, group))
    count = np.bincount(group, minlength=size)
    begin = np.cumsum(count) - count
    if not value.size:
        return np.zeros(size)
    last = value.size - 1
    low = value[order[np.minimum(begin + np.maximum(count - 1, 0) // 2, last)]]
    high = value[order[np.minimum(begin + count // 2, last)]]
    return np.where(count > 0, (low + high) / 2, 0.0)
