"""What the host was doing at every instant of a stretch, and how an amount is spread over it.

Each elementary interval (nothing begins or ends inside it) gets exactly one phase, the first that
matches in the precedence of the taxonomy; a wait for data beats garbage collection unless the main
process loads its data itself, for then collection is what it is waiting for:

    device in a collective > start-up > checkpoint > evaluation > copy > wait for a worker > gc >
    own loading > collective > step > none

The first is not what the host does but what its device was seen to do meanwhile
(`timeline.device_waits`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe import layout
from clusterprof.timeline.device_waits import device_waits
from clusterprof.timeline.intervals import EMPTY, Intervals, Pair, union
from clusterprof.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    PHASE_GC,
    PHASE_H2D,
    PHASE_NONE,
    PHASE_STARTUP,
    Int,
    Rank,
    SpanTable,
)

# In rising precedence: what comes later is painted over what came before.
_LAYERS: tuple[tuple[int, int], ...] = (
    (layout.STEP, PHASE_COMPUTE),
    (layout.COLLECTIVE, PHASE_COLLECTIVE),
    (layout.DATA_WAIT, PHASE_DATA_WAIT),
    (layout.GC, PHASE_GC),
    (-layout.DATA_WAIT, PHASE_DATA_WAIT),  # waits for a worker, painted over gc
    (layout.H2D, PHASE_H2D),
    (layout.EVAL, PHASE_EVAL),
    (layout.CHECKPOINT, PHASE_CHECKPOINT),
    (layout.COMPILE, PHASE_STARTUP),
    (layout.EXPOSED_COLLECTIVE, PHASE_COLLECTIVE),
)
# The order in which idle device time of a sample window is given to what the host did in it.
FILL_ORDER = (
    PHASE_STARTUP,
    PHASE_CHECKPOINT,
    PHASE_EVAL,
    PHASE_H2D,
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_NONE,
)


# A sweep along the edges adds up what begins and ends at each: one bit per layer that is open, one
# for a device window, and above them how many steps and how many windows have begun so far.
_PHASES = np.full(1 << len(_LAYERS), PHASE_NONE, np.int64)
for _bit, (_, _phase) in enumerate(_LAYERS):
    _PHASES[1 << _bit : 2 << _bit] = _phase  # the uppermost open layer is what is seen
_IN_WINDOW = 1 << len(_LAYERS)
_COUNT_BITS = 26
_STEP_SHIFT = len(_LAYERS) + 1
_WINDOW_SHIFT = _STEP_SHIFT + _COUNT_BITS
_NAME_BITS = 5  # names of what happens at an edge: at most two per layer, for windows and for steps


@dataclass(frozen=True, slots=True)
class Painted:
    """A stretch cut into elementary intervals; n rows, contiguous and sorted."""

    start_ns: Int
    end_ns: Int
    state: Int
    """What is open in each, and how much has begun by then."""

    @property
    def phase(self) -> Int:
        """Return what the host was doing."""
        return _PHASES[self.state & _IN_WINDOW - 1]

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Return bool[n]: which rows lie in a device window."""
        return (self.state & _IN_WINDOW) != 0

    @property
    def window(self) -> Int:
        """Return the row of the last device window that has begun, -1 before the first."""
        return (self.state >> _WINDOW_SHIFT) - 1

    @property
    def begun(self) -> Int:
        """Return how many steps have begun."""
        return self.state >> _STEP_SHIFT & (1 << _COUNT_BITS) - 1

    def rows(self, which: Int) -> Painted:
        """Return some of the rows."""
        return Painted(self.start_ns[which], self.end_ns[which], self.state[which])


def paint(rank: Rank, start_ns: int, end_ns: int, windows: Pair) -> Painted:
    """Cut `[start_ns, end_ns)` at every edge of spans and windows; name the phase of each part.

    Windows are disjoint and sorted.
    """
    sets = [(*_layer(rank, bit), 1 << bit, -(1 << bit)) for bit in range(len(_LAYERS))]
    sets.append((*windows, _IN_WINDOW + (1 << _WINDOW_SHIFT), -_IN_WINDOW))
    steps = rank.main.spans.get(layout.STEP)
    if steps is not None and steps.start_ns.size == sets[0][0].size:  # they are their own union
        sets[0] = steps.start_ns, steps.end_ns, 1 + (1 << _STEP_SHIFT), -1
    elif steps is not None:
        sets.append((steps.start_ns, steps.end_ns, 1 << _STEP_SHIFT, 0))
    bounds, state = _swept(start_ns, end_ns, [one for one in sets if one[0].size])
    return Painted(bounds[:-1], bounds[1:], state)


def _swept(start_ns: int, end_ns: int, sets: list[tuple[Int, Int, int, int]]) -> tuple[Int, Int]:
    """Return int64[n + 1] all edges of the sets inside a stretch, and int64[n] what is open after
    each: the sum of what every set adds at its starts and at its ends so far.

    An edge is sorted together with the name of what happens there; what began before the stretch
    is open at its start.
    """
    sides = [side for start, end, _, _ in sets for side in (start, end)]
    edges = np.concatenate([[start_ns], *sides, [end_ns]])
    np.maximum(edges, start_ns, out=edges)
    np.minimum(edges, end_ns, out=edges)
    edges -= start_ns
    edges <<= _NAME_BITS
    past = 1
    for name, side in enumerate(sides, 1):
        first, past = past, past + side.size
        edges[first:past] += name
    edges.sort()
    adds = np.array([0, *(amount for *_, begin, end in sets for amount in (begin, end))], np.int64)
    state = adds[edges & (1 << _NAME_BITS) - 1].cumsum()
    edges >>= _NAME_BITS
    (last,) = (edges[1:] != edges[:-1]).nonzero()  # of those at one instant
    bounds = np.empty(last.size + 1, np.int64)
    np.add(edges[last], start_ns, out=bounds[:-1])
    bounds[-1] = end_ns
    return bounds, state[last]


def _layer(rank: Rank, bit: int) -> Intervals:
    """Union of the spans of a layer; a negative kind means: those that waited for a worker."""
    kind = _LAYERS[bit][0]
    table = rank.main.spans.get(abs(kind))
    if table is None:
        return EMPTY
    if kind == layout.EXPOSED_COLLECTIVE:
        waits = device_waits(rank.main)
        if waits is None:
            return EMPTY
        some = waits.end_ns > waits.start_ns
        # Disjoint already; where two touch there is an edge, for each row is part of one of them.
        return Intervals(waits.start_ns[some], waits.end_ns[some])
    if kind == layout.COLLECTIVE:
        form = table.d >> layout.FORM_SHIFT & layout.FORM_MASK
        # A host that issues one goes on; one of an unknown group can be laid beside no other rank.
        counts = (form != layout.ISSUE) & (table.a != 0)
        measured = rank.main.spans.get(layout.EXPOSED_COLLECTIVE)
        if measured is not None:
            counts &= ~np.isin(table.sequence, measured.a)
        if counts.all():
            return union((table.start_ns, table.end_ns))
        return union((table.start_ns[counts], table.end_ns[counts]))
    if kind == layout.CHECKPOINT:
        return union((table.start_ns, table.end_ns), _between(rank, table))
    if kind > 0:
        return union((table.start_ns, table.end_ns))
    waited = table.b != 0
    if waited.all():
        # The same set as that of all waits; over it nothing was painted but collections.
        collects = rank.main.spans.get(layout.GC) is not None
        return union((table.start_ns, table.end_ns)) if collects else EMPTY
    return union((table.start_ns[waited], table.end_ns[waited]))


def _between(rank: Rank, saves: SpanTable) -> Pair:
    """From one save to the next of the same step: nothing is trained there. Shards of one
    checkpoint are synced, renamed and gathered meanwhile."""
    steps = rank.main.spans.get(layout.STEP)
    if steps is None or saves.start_ns.size < 2:
        return EMPTY
    start, end = saves.end_ns[:-1], saves.start_ns[1:]
    row = np.searchsorted(steps.start_ns, start, side="right") - 1
    same = (row >= 0) & (end <= steps.end_ns[np.maximum(row, 0)]) & (end > start)
    return start[same], end[same]


def steps_of(rank: Rank, start_ns: Int, begun: Int) -> Int:
    """Return the step number of each instant, -1 outside steps; `begun` is what `paint` gave."""
    steps = rank.main.spans.get(layout.STEP)
    if steps is None or not steps.start_ns.size:
        return np.full(start_ns.size, -1, np.int64)
    row = np.maximum(begun - 1, 0)
    held = (begun > 0) & (start_ns < steps.end_ns[row])
    return np.where(held, steps.a[row], -1)


def fill(window: Int, phase: Int, capacity_ns: Int, amount_ns: Int, order: tuple[int, ...]) -> Int:
    """Spread `amount_ns[w]` over the rows of each window, phase after phase, never above capacity.

    Within a phase and window the amount goes by length. Rows of one window stand together. Returns
    int64[n]. With 40 ns to spread over a wait of 30 and a step of 70 (wait first): 30 and 10.
    """
    out = np.zeros(window.size, np.int64)
    left = amount_ns.astype(np.float64)
    present = np.bincount(phase, minlength=max(order) + 1).tolist()
    has_room = capacity_ns > 0
    for code in (code for code in order if present[code]):
        if not left.any():
            break
        (rows,) = ((phase == code) & has_room).nonzero()
        if not rows.size:
            continue
        group, room = window[rows], capacity_ns[rows].astype(np.float64)
        room_of = np.bincount(group, weights=room, minlength=left.size)
        taken = np.minimum(left, room_of)
        left -= taken
        ratio = taken[group] / room_of[group]
        until = room.cumsum()
        before = until - room
        base = np.zeros(rows.size)
        base[1:] = np.where(group[1:] != group[:-1], before[1:], 0.0)
        base = np.maximum.accumulate(base)
        # Differences of rounded running sums are integers that add up to the rounded whole.
        part = np.rint((until - base) * ratio) - np.rint((before - base) * ratio)
        out[rows] = np.minimum(part, room)
    return out
