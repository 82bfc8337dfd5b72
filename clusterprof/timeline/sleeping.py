"""How long a thread slept at a place, told from the samples of its state and `wchan`.

A sample holds until the next one. The recorder asks for the place of a short sleep only now and
then: one without a name slept where the last one with a name did, if that was less than a second
before, else where the next one will.

    samples    S futex   S ?     R       S ?     S futex
    on a lock  |======================|       |===========|     R is on a CPU or waits for one
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Float, Int, ThreadTable

_HOLDS_NS = 250_000_000  # a sample says nothing of what is later than this
_NAMED_NS = 1_000_000_000
_ASLEEP = (ord("S"), ord("D"))


def asleep_at(
    thread: ThreadTable, names: tuple[str, ...], is_there: Callable[[str], bool]
) -> NDArray[np.bool_]:
    """Return bool[n]: in which samples the thread slept at a place that `is_there` accepts.

    `names` are those of the chunk, to which `thread.wchan` points.
    """
    asleep = (thread.state == _ASLEEP[0]) | (thread.state == _ASLEEP[1])
    there = np.array([*(is_there(name) for name in names), False])
    known = (thread.wchan >= 0) & (thread.wchan < len(names))
    found = there[np.where(known, thread.wchan, -1)] & asleep
    (named,) = (known & asleep).nonzero()
    (nameless,) = (~known & asleep).nonzero()
    if named.size and nameless.size:
        row = named.searchsorted(nameless) - 1
        before, after = named[np.maximum(row, 0)], named[np.minimum(row + 1, named.size - 1)]
        t_ns = thread.t_ns
        recent = (row >= 0) & (t_ns[nameless] - t_ns[before] < _NAMED_NS)
        soon = (after > nameless) & (t_ns[after] - t_ns[nameless] < _NAMED_NS)
        found[nameless] = (recent & found[before]) | (~recent & soon & found[after])
    return found


def held_ns(t_ns: Int, which: NDArray[np.bool_], start_ns: Int, end_ns: Int) -> Float:
    """Return float64[m]: for how much of each interval the chosen samples hold."""
    if t_ns.size < 2:
        return np.zeros(start_ns.size)
    length = np.minimum(np.diff(t_ns), _HOLDS_NS)
    edges = np.stack([t_ns[:-1], t_ns[:-1] + length], axis=1).ravel()
    so_far = np.stack([np.zeros(length.size), which[:-1] * length], axis=1).ravel().cumsum()
    return np.interp(end_ns, edges, so_far) - np.interp(start_ns, edges, so_far)


def runs(t_ns: Int, which: NDArray[np.bool_]) -> tuple[Int, Int]:
    """Return first and last row of every run of chosen samples, a single other one left aside."""
    (rows,) = which.nonzero()
    if not rows.size:
        return rows, rows
    new = np.flatnonzero((np.diff(rows) > 2) | (np.diff(t_ns[rows]) > _NAMED_NS)) + 1
    first = rows[np.concatenate([[0], new])]
    last = rows[np.concatenate([new - 1, [rows.size - 1]])]
    return first, last
