"""What the host was doing at every instant of a stretch, and how an amount is spread over it.

Each elementary interval (nothing begins or ends inside it) gets exactly one phase, the first that
matches in the precedence of the taxonomy; a wait for data beats garbage collection unless the main
process loads its data itself, for then collection is what it is waiting for:

    start-up > checkpoint > evaluation > copy > wait for a worker > gc > own loading > step > none
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.probe import layout
from clusterprof.timeline.intervals import EMPTY, Intervals, clip, passed, union
from clusterprof.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    PHASE_GC,
    PHASE_H2D,
    PHASE_NONE,
    PHASE_STARTUP,
    Int,
    Rank,
)

# In rising precedence: what comes later is painted over what came before.
_LAYERS: tuple[tuple[int, int], ...] = (
    (layout.STEP, PHASE_COMPUTE),
    (layout.DATA_WAIT, PHASE_DATA_WAIT),
    (layout.GC, PHASE_GC),
    (-layout.DATA_WAIT, PHASE_DATA_WAIT),  # waits for a worker, painted over gc
    (layout.H2D, PHASE_H2D),
    (layout.EVAL, PHASE_EVAL),
    (layout.CHECKPOINT, PHASE_CHECKPOINT),
    (layout.COMPILE, PHASE_STARTUP),
)
# The order in which idle device time of a sample window is given to what the host did in it.
FILL_ORDER = (
    PHASE_STARTUP,
    PHASE_CHECKPOINT,
    PHASE_EVAL,
    PHASE_H2D,
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_COMPUTE,
    PHASE_NONE,
)


@dataclass(frozen=True, slots=True)
class Painted:
    """A stretch cut into elementary intervals; n rows, contiguous and sorted."""

    start_ns: Int
    end_ns: Int
    phase: Int
    step: Int
    """Step number, -1 outside steps."""


def paint(rank: Rank, start_ns: int, end_ns: int, cuts: Int) -> Painted:
    """Cut `[start_ns, end_ns)` at every span edge and at `cuts`; name the phase of each part."""
    layers = _layers(rank, start_ns, end_ns)
    steps = rank.main.spans.get(layout.STEP)
    # The edges of their union are among those of the steps.
    step_edges = [] if steps is None else [steps.start_ns, steps.end_ns]
    others = [side for kind, _, pair in layers if kind != layout.STEP for side in pair]
    edges = np.concatenate([cuts, *step_edges, *others])
    inside = np.sort(edges[(edges > start_ns) & (edges < end_ns)])
    bounds = np.concatenate([[start_ns], inside, [end_ns]]).astype(np.int64)
    bounds = bounds[np.append(True, bounds[1:] != bounds[:-1])]  # np.unique hashes: slower
    begin, end = bounds[:-1], bounds[1:]
    phase = np.full(begin.size, PHASE_NONE, np.int64)
    collects = any(kind == layout.GC for kind, _, _ in layers)
    for kind, code, pair in layers:
        if kind != -layout.DATA_WAIT or collects:  # else painted already
            phase[_covered(bounds, pair)] = code
    step = np.full(begin.size, -1, np.int64)
    if steps is not None and steps.start_ns.size:
        row = np.maximum(passed(steps.start_ns, begin) - 1, 0)
        held = (begin >= steps.start_ns[row]) & (begin < steps.end_ns[row])
        step = np.where(held, steps.a[row], -1)
    return Painted(begin, end, phase, step)


def _layers(rank: Rank, start_ns: int, end_ns: int) -> list[tuple[int, int, Intervals]]:
    """(kind, phase, set) of the kinds that occur in the stretch, in the order of painting."""
    found: dict[int, Intervals] = {}
    for kind, _ in _LAYERS:
        pair = found.get(-kind, EMPTY) if _all_waited(rank, kind) else None
        found[kind] = clip(_spans(rank, kind), start_ns, end_ns) if pair is None else pair
    return [(kind, phase, found[kind]) for kind, phase in _LAYERS if found[kind].start_ns.size]


def _all_waited(rank: Rank, kind: int) -> bool:
    """True for the waits for a worker, when all waits are."""
    table = rank.main.spans.get(layout.DATA_WAIT)
    return kind < 0 and table is not None and bool(np.all(table.b != 0))


def _spans(rank: Rank, kind: int) -> Intervals:
    """Union of a kind's spans; a negative kind means: only those that waited for a worker."""
    table = rank.main.spans.get(abs(kind))
    if table is None:
        return EMPTY
    if kind < 0:
        waited = table.b != 0
        return union((table.start_ns[waited], table.end_ns[waited]))
    return union((table.start_ns, table.end_ns))


def _covered(bounds: Int, pair: Intervals) -> np.ndarray:
    """Rows between bounds that lie in the set, all of whose edges are bounds."""
    change = np.zeros(bounds.size, np.int8)
    change[np.searchsorted(bounds, pair.start_ns)] = 1
    change[np.searchsorted(bounds, pair.end_ns)] = -1
    return np.cumsum(change[:-1], dtype=np.int8).view(np.bool_)


def fill(window: Int, phase: Int, capacity_ns: Int, amount_ns: Int, order: tuple[int, ...]) -> Int:
    """Spread `amount_ns[w]` over the rows of each window, phase after phase, never above capacity.

    Within a phase and window the amount goes by length. Rows of one window stand together. Returns
    int64[n]. With 40 ns to spread over a wait of 30 and a step of 70 (wait first): 30 and 10.
    """
    out = np.zeros(window.size, np.int64)
    left = amount_ns.astype(np.float64)
    present = np.bincount(phase, minlength=max(order) + 1)
    for code in (code for code in order if present[code]):
        if not left.any():
            break
        rows = np.flatnonzero((phase == code) & (capacity_ns > 0))
        if not rows.size:
            continue
        group, room = window[rows], capacity_ns[rows].astype(np.float64)
        room_of = np.bincount(group, weights=room, minlength=left.size)
        taken = np.minimum(left, room_of)
        left -= taken
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(room_of > 0, taken / room_of, 0.0)[group]
        until = np.cumsum(room)
        first = np.concatenate([[True], group[1:] != group[:-1]])
        base = np.maximum.accumulate(np.where(first, until - room, 0.0))
        # Differences of rounded running sums are integers that add up to the rounded whole.
        part = np.rint((until - base) * ratio) - np.rint((until - room - base) * ratio)
        out[rows] = np.minimum(part, room).astype(np.int64)
    return out
