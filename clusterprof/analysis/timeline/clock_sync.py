"""One clock for many nodes, from operations that all members leave together; with a bound.

Every node's CLOCK_MONOTONIC begins elsewhere and runs a little faster or slower. All members leave
a synchronising operation at the same instant, so what a node's clock shows then, less what the
middle of the others shows, is its offset:

    leave of node 0     1 000      2 000      3 000
    leave of node 1     6 000      7 001      8 002        5 000 ahead, and 1 in 1 000 faster

The median over a minute of operations makes a knot, knots are joined by straight lines. A node that
shares no operation with the first ones is aligned through those that do; nodes joined by no chain
of operations *cannot be aligned*, and nothing is said about their order.

The bound is wide on purpose: the middle eight tenths of what single operations say around the line
(leaving late is one-sided, a median of many may be late by as much as that), the bend between
knots, the drift where no line could be drawn, and the bounds of those through whom a node was
aligned. A node that always leaves later than the others, by the same amount, looks like an offset:
no method that sees only when operations end can tell (`engine/aligned` bounds it by when ranks
came). Blame does not need this clock: durations carry it (docs/design.md, section 12). It orders
what happened on different nodes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from clusterprof.timeline.model import Float, Int

KNOT_NS = 60_000_000_000
FEWEST = 8  # operations behind a knot; fewer say too little about late leavers
DRIFT_RATIO = 200e-6  # two crystals at their worst: what is allowed where no line can be drawn
REFINED = 3
APART = -1  # the component of a node that shares no operation with any other


@dataclass(frozen=True, slots=True)
class Line:
    """How far one node's clock is ahead of the common one: knots joined by straight lines."""

    t_ns: Int
    """On the node's own clock; at least one knot."""
    ahead_ns: Float
    bound_ns: Float

    def ahead(self, t_ns: Int) -> Float:
        """Return how far the clock was ahead at its own times; the end lines go on outside."""
        if self.t_ns.size == 1:
            return np.full(len(t_ns), self.ahead_ns[0])
        row = np.clip(np.searchsorted(self.t_ns, t_ns) - 1, 0, self.t_ns.size - 2)
        run = (self.t_ns[row + 1] - self.t_ns[row]).astype(np.float64)
        slope = (self.ahead_ns[row + 1] - self.ahead_ns[row]) / run
        result: Float = self.ahead_ns[row] + slope * (t_ns - self.t_ns[row])
        return result

    def bound(self, t_ns: Int) -> Float:
        """Return how wrong `ahead` may be at each time; it grows outside the knots."""
        outside = np.maximum(self.t_ns[0] - t_ns, t_ns - self.t_ns[-1])
        outside = np.maximum(outside, 0).astype(np.float64)
        inside = np.interp(t_ns, self.t_ns, self.bound_ns)
        if self.t_ns.size == 1:
            result: Float = inside + DRIFT_RATIO * outside
            return result
        run = float(min(self.t_ns[1] - self.t_ns[0], self.t_ns[-1] - self.t_ns[-2]))
        result = inside + outside * np.minimum(DRIFT_RATIO, 2 * inside / run)
        return result


@dataclass(frozen=True, slots=True)
class Clocks:
    """The clocks of all nodes. Only nodes of the same component can be compared."""

    lines: tuple[Line | None, ...]
    """By node; None = cannot be aligned."""
    component: Int
    """By node; `APART` where there is no line."""

    def common(self, node: int, t_ns: Int) -> Int:
        """Return a node's times on the common clock of its component."""
        line = self._line(node)
        t_ns = np.asarray(t_ns, np.int64)
        return t_ns - np.rint(line.ahead(t_ns)).astype(np.int64)

    def bound(self, node: int, t_ns: Int) -> Int:
        """Return how far `common` may be off."""
        found = self._line(node).bound(np.asarray(t_ns, np.int64))
        return np.ceil(found).astype(np.int64)

    def before(self, node: int, t_ns: int, other: int, other_ns: int) -> bool | None:
        """Say whether the first instant came before the second; None = closer than the bound."""
        if node == other:
            return t_ns < other_ns
        if self.component[node] != self.component[other] or self.component[node] == APART:
            return None
        mine, theirs = np.array([t_ns], np.int64), np.array([other_ns], np.int64)
        apart = int(self.common(other, theirs)[0] - self.common(node, mine)[0])
        if abs(apart) <= int(self.bound(node, mine)[0] + self.bound(other, theirs)[0]):
            return None
        return apart > 0

    def _line(self, node: int) -> Line:
        line = self.lines[node]
        if line is None:
            raise ValueError(f"node {node} shares no operation with another: it has no common time")
        return line


def align(operation: Int, node: Int, leave_ns: Int, nodes: int) -> Clocks:
    """Align the clocks of nodes 0 … `nodes` - 1 by who left which operation when.

    Of several ranks of a node the first to leave counts: nobody leaves too early, some leave late.
    """
    rows = _first_per_node(operation, node, leave_ns)
    lines: list[Line | None] = [None] * nodes
    component = np.full(nodes, APART, np.int64)
    number = 0
    while (seed := _widest(rows, component)) is not None:
        ahead = rows.leave_ns[seed] - _middle(rows.operation[seed], rows.leave_ns[seed])
        component = _fitted(rows, seed, ahead, 0.0, lines, component, number)
        if not (component == number).any():
            rows = rows.without(rows.operation[seed])  # too few to say anything
            continue
        while _reached(rows, lines, component, number):
            pass
        number += 1
    return Clocks(tuple(lines), component)


@dataclass(frozen=True, slots=True)
class _Leaves:
    """One row per operation and node, sorted by operation."""

    operation: Int
    node: Int
    leave_ns: Int

    def without(self, operations: Int) -> _Leaves:
        keep = ~np.isin(self.operation, operations)
        return _Leaves(self.operation[keep], self.node[keep], self.leave_ns[keep])


def _first_per_node(operation: Int, node: Int, leave_ns: Int) -> _Leaves:
    order = np.lexsort((leave_ns, node, operation))
    operation, node, leave_ns = operation[order], node[order], leave_ns[order]
    keep = np.ones(operation.size, np.bool_)
    keep[1:] = (operation[1:] != operation[:-1]) | (node[1:] != node[:-1])
    return _Leaves(operation[keep], node[keep], leave_ns[keep])


def _widest(rows: _Leaves, component: Int) -> Int | None:
    """Rows of the operations of the largest set of nodes of which none is aligned yet."""
    _, op, size = np.unique(rows.operation, return_inverse=True, return_counts=True)
    taken = np.bincount(op, weights=component[rows.node] != APART, minlength=size.size)
    size = np.where(taken > 0, 0, size)
    if not size.size or size.max() < 2:
        return None
    # The sets of that size, told apart by a sum of odd multiples; the commonest is taken.
    mark = np.zeros(size.size, np.uint64)
    salt = (rows.node.astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
    np.add.at(mark, op, salt ^ (salt >> np.uint64(29)))
    marks, count = np.unique(mark[size == size.max()], return_counts=True)
    chosen = (size == size.max()) & (mark == marks[np.argmax(count)])
    return np.flatnonzero(chosen[op])


def _middle(operation: Int, values: Int) -> Int:
    """For each row the median of the values of its operation."""
    order = np.lexsort((values, operation))
    _, first, inverse, count = np.unique(
        operation[order], return_index=True, return_inverse=True, return_counts=True
    )
    low = values[order][first + (count - 1) // 2]
    high = values[order][first + count // 2]
    out = np.empty(operation.size, np.int64)
    out[order] = (low + (high - low) // 2)[inverse]
    return out


def _reached(rows: _Leaves, lines: list[Line | None], component: Int, number: int) -> bool:
    """Align nodes that share operations with aligned ones; False when there are no more."""
    known = component[rows.node] == number
    _, op = np.unique(rows.operation, return_inverse=True)
    helped = np.bincount(op, weights=known, minlength=op.max(initial=-1) + 1) > 0
    new = helped[op] & (component[rows.node] == APART)
    if not new.any():
        return False
    aligned = np.flatnonzero(known & np.isin(op, op[new]))
    common = np.empty(aligned.size, np.int64)
    worst = 0.0
    for node in np.unique(rows.node[aligned]):
        line = lines[node]
        assert line is not None
        at = rows.node[aligned] == node
        t_ns = rows.leave_ns[aligned][at]
        common[at] = t_ns - np.rint(line.ahead(t_ns)).astype(np.int64)
        worst = max(worst, float(line.bound(t_ns).max()))
    middle = np.zeros(helped.size, np.int64)
    middle[op[aligned]] = _middle(op[aligned], common)
    seed = np.flatnonzero(new)
    before = int((component == number).sum())
    ahead = rows.leave_ns[seed] - middle[op[seed]]
    component[:] = _fitted(rows, seed, ahead, worst, lines, component, number)
    return int((component == number).sum()) > before


def _fitted(
    rows: _Leaves,
    seed: Int,
    ahead_ns: Int,
    inherited_ns: float,
    lines: list[Line | None],
    component: Int,
    number: int,
) -> Int:
    """Draw the lines of the nodes of these rows; return the components."""
    out = component.copy()
    for node in np.unique(rows.node[seed]):
        at = rows.node[seed] == node
        if int(at.sum()) < FEWEST:
            continue
        lines[node] = line_through(rows.leave_ns[seed][at], ahead_ns[at], inherited_ns)
        out[node] = number
    return out


def line_through(t_ns: Int, ahead_ns: Int, inherited_ns: float = 0.0) -> Line:
    """Join medians of about a minute each; at least two when there are operations enough."""
    order = np.argsort(t_ns, kind="stable")
    t_ns, ahead_ns = t_ns[order], ahead_ns[order]
    span_ns = int(t_ns[-1] - t_ns[0])
    parts = min(max(2, span_ns // KNOT_NS), t_ns.size // FEWEST)
    edges = np.linspace(0, t_ns.size, max(1, parts) + 1).astype(np.int64)
    pieces = [slice(a, b) for a, b in itertools.pairwise(edges)]
    knots = np.array([int(np.median(t_ns[p] - t_ns[0])) + int(t_ns[0]) for p in pieces])
    base = int(ahead_ns[0])
    values = np.array([float(np.median(ahead_ns[p] - base)) + base for p in pieces])
    for _ in range(REFINED):
        # A median of drifting values moves with every late leaver; one of what is left does not.
        rest = ahead_ns - Line(knots, values, values).ahead(t_ns)
        values = values + [float(np.median(rest[p])) for p in pieces]
    rest = ahead_ns - Line(knots, values, values).ahead(t_ns)
    bound = np.array([_spread(rest[p]) for p in pieces])
    if len(pieces) == 1:
        bound = bound + DRIFT_RATIO * span_ns
    if len(pieces) > 2:
        bend = values[1:-1] - _straight(knots, values)
        bound = bound + np.abs(bend).max() / 4
    return Line(knots, values, bound + inherited_ns + 1.0)


def _straight(t_ns: Int, values: Float) -> Float:
    """What the straight line between its neighbours says at each inner knot."""
    share = (t_ns[1:-1] - t_ns[:-2]) / (t_ns[2:] - t_ns[:-2])
    result: Float = values[:-2] + share * (values[2:] - values[:-2])
    return result


def _spread(rest: Float) -> float:
    """Width of the middle eight tenths of what operations say, and more when they are few."""
    low, high = np.quantile(rest, (0.1, 0.9))
    return float(high - low) * (1 + 2 * FEWEST / rest.size)
