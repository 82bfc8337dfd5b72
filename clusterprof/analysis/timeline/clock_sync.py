"""Clock synchronization of nodes from operations that all members leave together.

Every node's CLOCK_MONOTONIC starts at a different value and runs slightly faster or
slower. All members leave a synchronizing operation at the same instant. A node's clock
reading at that instant, minus the median of the readings of the other members, is its
clock offset:

    leave of node 0     1 000      2 000      3 000
    leave of node 1     6 000      7 001      8 002        5 000 ahead, and 1 in 1 000 faster

The median over one minute of operations makes a knot; knots are joined by straight
lines. A node that shares no operation with the first nodes is aligned through nodes
that do. Nodes that no chain of operations connects *cannot be aligned*, and their order
stays unknown.

The bound is wide on purpose. It includes the width of the middle eight tenths of single
operations around the line (leaving late is one-sided, so a median may be late by that
much), the bend between knots, the drift where no line could be fitted, and the bounds
of the nodes through which a node was aligned. A node that always leaves later by the
same amount looks like a clock offset: a method that sees only leave times cannot
distinguish the two (`analysis.job.clock_sync` bounds it by arrival times). Blame does not
need this clock because it uses durations (docs/design/waits-between-ranks.md). The clock orders
events of different nodes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.timeline.model import Float, Int

KNOT_NS = 60_000_000_000
"""Length of the window behind one knot, in ns."""
MIN_KNOT_OPERATIONS = 8  # minimum operations per knot; fewer say too little about late leavers
# worst case of two crystals: the drift allowed where no line can be fitted
MAX_DRIFT_RATIO = 200e-6
REFINEMENT_PASSES = 3
UNALIGNED = -1  # component of a node that shares no operation with any other node


@dataclass(frozen=True, slots=True)
class OffsetLine:
    """Clock offset of one node against the common clock: knots joined by straight lines."""

    t_ns: Int
    """int64[k], on the node's own clock; at least one knot."""
    offset_ns: Float
    bound_ns: Float

    def offset(self, t_ns: Int) -> Float:
        """Return the clock offset in ns at times of the node's own clock: float64[n].

        The first and last line are extended beyond the knots. t_ns: int64[n].
        """
        if self.t_ns.size == 1:
            return np.full(len(t_ns), self.offset_ns[0])
        row = np.clip(np.searchsorted(self.t_ns, t_ns) - 1, 0, self.t_ns.size - 2)
        knot_distance_ns = (self.t_ns[row + 1] - self.t_ns[row]).astype(np.float64)
        slope = (self.offset_ns[row + 1] - self.offset_ns[row]) / knot_distance_ns
        result: Float = self.offset_ns[row] + slope * (t_ns - self.t_ns[row])
        return result

    def bound(self, t_ns: Int) -> Float:
        """Return the error bound of the offset at each time: float64[n], ns.

        It grows outside the knots.
        """
        outside = np.maximum(self.t_ns[0] - t_ns, t_ns - self.t_ns[-1])
        outside = np.maximum(outside, 0).astype(np.float64)
        inside = np.interp(t_ns, self.t_ns, self.bound_ns)
        if self.t_ns.size == 1:
            result: Float = inside + MAX_DRIFT_RATIO * outside
            return result
        knot_distance_ns = float(min(self.t_ns[1] - self.t_ns[0], self.t_ns[-1] - self.t_ns[-2]))
        result = inside + outside * np.minimum(MAX_DRIFT_RATIO, 2 * inside / knot_distance_ns)
        return result


@dataclass(frozen=True, slots=True)
class ClockAlignment:
    """Clock offsets of all nodes. Only nodes of one component can be compared."""

    lines: tuple[OffsetLine | None, ...]
    """By node; None = cannot be aligned."""
    component: Int
    """int64[nodes]: connected component of each node; `UNALIGNED` if it has no line."""

    def to_common_ns(self, node: int, t_ns: Int) -> Int:
        """Convert a node's times to the common clock of its component: int64[n], ns.

        Raises: ValueError when the node could not be aligned.
        """
        line = self._line(node)
        t_ns = np.asarray(t_ns, np.int64)
        return t_ns - np.rint(line.offset(t_ns)).astype(np.int64)

    def bound(self, node: int, t_ns: Int) -> Int:
        """Return the error bound of converted times: int64[n], ns.

        Raises: ValueError when the node could not be aligned.
        """
        bound_ns = self._line(node).bound(np.asarray(t_ns, np.int64))
        return np.ceil(bound_ns).astype(np.int64)

    def _line(self, node: int) -> OffsetLine:
        line = self.lines[node]
        if line is None:
            raise ValueError(f"node {node} cannot be aligned: it shares no operation with others")
        return line


def align_clocks(operation: Int, node: Int, leave_ns: Int, nodes: int) -> ClockAlignment:
    """Align the clocks of nodes 0 … `nodes` - 1 by the times at which they left operations.

    operation, node, leave_ns: int64[n], one row per leave. Of several ranks of a node the
    first to leave counts: a rank cannot leave too early, but it can leave late.
    """
    rows = _select_first_leave_per_node(operation, node, leave_ns)
    lines: list[OffsetLine | None] = [None] * nodes
    component = np.full(nodes, UNALIGNED, np.int64)
    number = 0
    while (seed := _select_seed_rows(rows, component)) is not None:
        offset_ns = rows.leave_ns[seed] - _compute_operation_medians(
            rows.operation[seed], rows.leave_ns[seed]
        )
        component = _fit_node_lines(rows, seed, offset_ns, 0.0, lines, component, number)
        if not (component == number).any():
            rows = rows.without_operations(rows.operation[seed])  # too few operations for an offset
            continue
        while _align_connected_nodes(rows, lines, component, number):
            pass
        number += 1
    return ClockAlignment(tuple(lines), component)


def split_rows_by_node(node: Int) -> list[tuple[int, Int]]:
    """Split rows by node: (node, its rows ascending, int64[k]), ascending by node.

    node: int64[n]. One sort instead of a pass over all rows for each node.
    """
    order = np.argsort(node, kind="stable")
    numbers, first = np.unique(node[order], return_index=True)
    return list(zip(numbers.tolist(), np.split(order, first[1:]))) if numbers.size else []


@dataclass(frozen=True, slots=True)
class _NodeLeaves:
    """One row per operation and node, sorted by operation."""

    operation: Int
    node: Int
    leave_ns: Int

    def without_operations(self, operations: Int) -> _NodeLeaves:
        keep = ~np.isin(self.operation, operations)
        return _NodeLeaves(self.operation[keep], self.node[keep], self.leave_ns[keep])


def _select_first_leave_per_node(operation: Int, node: Int, leave_ns: Int) -> _NodeLeaves:
    order = np.lexsort((leave_ns, node, operation))
    operation, node, leave_ns = operation[order], node[order], leave_ns[order]
    keep = np.ones(operation.size, np.bool_)
    keep[1:] = (operation[1:] != operation[:-1]) | (node[1:] != node[:-1])
    return _NodeLeaves(operation[keep], node[keep], leave_ns[keep])


def _select_seed_rows(rows: _NodeLeaves, component: Int) -> Int | None:
    """Return rows of the operations of the largest set of unaligned nodes.

    None if there is none.
    """
    _, op, size = np.unique(rows.operation, return_inverse=True, return_counts=True)
    aligned_nodes = np.bincount(op, weights=component[rows.node] != UNALIGNED, minlength=size.size)
    size = np.where(aligned_nodes > 0, 0, size)
    if not size.size or size.max() < 2:
        return None
    # Sets of that size are distinguished by a hash of their nodes; the most frequent set is taken.
    set_hash = np.zeros(size.size, np.uint64)
    salt = (rows.node.astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
    np.add.at(set_hash, op, salt ^ (salt >> np.uint64(29)))
    set_hashes, count = np.unique(set_hash[size == size.max()], return_counts=True)
    chosen = (size == size.max()) & (set_hash == set_hashes[np.argmax(count)])
    return np.flatnonzero(chosen[op])


def _compute_operation_medians(operation: Int, values: Int) -> Int:
    """Return for each row the median of the values of its operation."""
    order = np.lexsort((values, operation))
    _, first, inverse, count = np.unique(
        operation[order], return_index=True, return_inverse=True, return_counts=True
    )
    low = values[order][first + (count - 1) // 2]
    high = values[order][first + count // 2]
    out = np.empty(operation.size, np.int64)
    out[order] = (low + (high - low) // 2)[inverse]
    return out


def _align_connected_nodes(
    rows: _NodeLeaves, lines: list[OffsetLine | None], component: Int, number: int
) -> bool:
    """Align nodes that share operations with aligned nodes; return False if there are no more."""
    is_aligned = component[rows.node] == number
    _, op = np.unique(rows.operation, return_inverse=True)
    has_aligned_member = np.bincount(op, weights=is_aligned, minlength=op.max(initial=-1) + 1) > 0
    is_reachable = has_aligned_member[op] & (component[rows.node] == UNALIGNED)
    if not is_reachable.any():
        return False
    aligned = np.flatnonzero(is_aligned & np.isin(op, op[is_reachable]))
    common = np.empty(aligned.size, np.int64)
    worst = 0.0
    for node, indices in split_rows_by_node(rows.node[aligned]):
        line = lines[node]
        assert line is not None
        t_ns = rows.leave_ns[aligned][indices]
        common[indices] = t_ns - np.rint(line.offset(t_ns)).astype(np.int64)
        worst = max(worst, float(line.bound(t_ns).max()))
    median_ns = np.zeros(has_aligned_member.size, np.int64)
    median_ns[op[aligned]] = _compute_operation_medians(op[aligned], common)
    seed = np.flatnonzero(is_reachable)
    before = int((component == number).sum())
    offset_ns = rows.leave_ns[seed] - median_ns[op[seed]]
    component[:] = _fit_node_lines(rows, seed, offset_ns, worst, lines, component, number)
    return int((component == number).sum()) > before


def _fit_node_lines(
    rows: _NodeLeaves,
    seed: Int,
    offset_ns: Int,
    inherited_ns: float,
    lines: list[OffsetLine | None],
    component: Int,
    number: int,
) -> Int:
    """Fit the lines of the nodes of these rows; return the components."""
    components = component.copy()
    for node, indices in split_rows_by_node(rows.node[seed]):
        if indices.size < MIN_KNOT_OPERATIONS:
            continue
        lines[node] = fit_offset_line(
            rows.leave_ns[seed][indices], offset_ns[indices], inherited_ns
        )
        components[node] = number
    return components


def fit_offset_line(t_ns: Int, offset_ns: Int, inherited_ns: float = 0.0) -> OffsetLine:
    """Fit an offset line through medians of about one minute each.

    At least two medians if there are enough operations. t_ns: int64[n], times on the node's
    own clock. offset_ns: int64[n], offsets in ns. inherited_ns: error bound of the nodes
    through which this one is aligned.
    """
    order = np.argsort(t_ns, kind="stable")
    t_ns, offset_ns = t_ns[order], offset_ns[order]
    span_ns = int(t_ns[-1] - t_ns[0])
    knots_wanted = min(max(2, span_ns // KNOT_NS), t_ns.size // MIN_KNOT_OPERATIONS)
    edges = np.linspace(0, t_ns.size, max(1, knots_wanted) + 1).astype(np.int64)
    sections = [slice(a, b) for a, b in itertools.pairwise(edges)]
    knots = np.array([int(np.median(t_ns[p] - t_ns[0])) + int(t_ns[0]) for p in sections])
    base = int(offset_ns[0])
    values = np.array([float(np.median(offset_ns[p] - base)) + base for p in sections])
    for _ in range(REFINEMENT_PASSES):
        # Late leavers shift a median of drifting values; the median of the residuals is robust.
        residual = offset_ns - OffsetLine(knots, values, values).offset(t_ns)
        values = values + [float(np.median(residual[p])) for p in sections]
    residual = offset_ns - OffsetLine(knots, values, values).offset(t_ns)
    bound = np.array([_measure_spread(residual[p]) for p in sections])
    if len(sections) == 1:
        bound = bound + MAX_DRIFT_RATIO * span_ns
    if len(sections) > 2:
        bend = values[1:-1] - _estimate_inner_knots(knots, values)
        bound = bound + np.abs(bend).max() / 4
    return OffsetLine(knots, values, bound + inherited_ns + 1.0)


def _estimate_inner_knots(t_ns: Int, values: Float) -> Float:
    """Return the value of the straight line between its two neighbors at each inner knot."""
    share = (t_ns[1:-1] - t_ns[:-2]) / (t_ns[2:] - t_ns[:-2])
    result: Float = values[:-2] + share * (values[2:] - values[:-2])
    return result


def _measure_spread(residual: Float) -> float:
    """Measure the width of the middle eight tenths of the residuals, widened if they are few."""
    low, high = np.quantile(residual, (0.1, 0.9))
    return float(high - low) * (1 + 2 * MIN_KNOT_OPERATIONS / residual.size)
