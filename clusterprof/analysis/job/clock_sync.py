"""Align the clocks of all nodes of a recording, and bound the error of the alignment.

    blocks of operations ──> a sample per node ──> offsets ──> order of operations
                             the same operations   checked: no rank leaves
                             on every node         before the last has arrived

Clocks are aligned by the times at which ranks leave operations. A rank that always
leaves later than the others, for example behind a long network path, looks like a clock
that is ahead. But no rank leaves an operation before its last member has arrived, and
this bounds the offset on both sides:

    node 0   arrives |-------------| leaves      the clock of node 1 is ahead by at most
    node 1        arrives |-----------| leaves   leave 1 - arrive 0, at least
                                                 arrive 1 - leave 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.job.ranks import AMBIGUOUS_JOB, compute_wall_clock_offset_ns
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.timeline.clock_sync import (
    UNALIGNED,
    ClockAlignment,
    align_clocks,
    split_rows_by_node,
)
from clusterprof.analysis.timeline.collectives.leave_time_samples import (
    LeaveTimeSamples,
    combine_leaves,
)
from clusterprof.analysis.timeline.collectives.matching import ClockOffset
from clusterprof.analysis.timeline.model import Int

_SAME_CLOCK_NS = 1_000_000_000
_IMPOSSIBLE_RATIO = 0.05
_MAX_NAMED_NODES = 4
_WALL_CLOCK_ERROR_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class NodeClockAlignment:
    """The aligned clocks of all nodes, as far as they could be aligned."""

    clock_of: tuple[int, ...]
    """Number of the clock of each node; nodes of one machine share a clock."""
    clocks: ClockAlignment
    shift_ns: tuple[int, ...]
    """By clock: ns to add to its common time to get wall-clock time.

    For a clock that could not be aligned: ns to add to its own time.
    """
    bound_ns: int | None = None
    """Largest possible error in ns of the common time between two nodes; None = not known."""
    reason: str = ""
    """Why there is no bound, or which nodes it leaves out; "" when it holds for all nodes."""
    notes: tuple[str, ...] = field(default=())

    def fit_offset(self, node: int, begin_ns: int, end_ns: int) -> ClockOffset:
        """Return the straight line that best maps a node's clock onto the common clock.

        begin_ns, end_ns: the interval to fit, ns on the node's own clock.
        """
        begin, end = self.to_common_ns(node, np.array([begin_ns, end_ns])) - [begin_ns, end_ns]
        length_ns = end_ns - begin_ns
        return ClockOffset(
            begin_ns, int(begin), float(end - begin) / length_ns if length_ns else 0.0
        )

    def to_common_ns(self, node: int, t_ns: Int) -> Int:
        """Return a node's times on the common clock.

        Good enough to order operations, not to judge single waits. t_ns: int64[n], ns on the
        node's own clock. Returns int64[n], ns.
        """
        clock = self.clock_of[node]
        if self.clocks.lines[clock] is not None:
            t_ns = self.clocks.to_common_ns(clock, t_ns)
        return t_ns + self.shift_ns[clock]


def align_node_clocks(nodes: Sequence[NodeResult]) -> NodeClockAlignment:
    """Align the clocks of all nodes by the operation samples of their ranks."""
    clock_of = _assign_clock_numbers(nodes)
    n = max(clock_of, default=-1) + 1
    samples: list[list[tuple[int, LeaveTimeSamples]]] = [[] for _ in range(n)]
    if n > 1:
        for clock_number, node in zip(clock_of, nodes):
            for rank in node.ranks:
                if rank.operations is not None and rank.job != AMBIGUOUS_JOB:
                    host_waits = not rank.ledger.device or rank.emulated
                    operation_samples = (
                        rank.operations.leaves if host_waits else rank.operations.barriers
                    )
                    samples[clock_number].append((rank.job, operation_samples))
    sound = [combine_leaves(clock_samples) for clock_samples in samples]
    key, arrive, leave = (
        np.concatenate([np.zeros(0, np.int64), *(clock_leaves[i] for clock_leaves in sound)])
        for i in range(3)
    )
    clock = np.repeat(np.arange(n), [clock_leaves[0].size for clock_leaves in sound])
    clocks = align_clocks(key, clock, leave, n)
    room_ns, impossible = _check_clock_order(clocks, key, clock, arrive, leave)
    clocks = _drop_clocks(clocks, impossible)
    walls = _list_wall_clock_offsets_ns(nodes, clock_of, n)
    summary = _AlignmentSummary(nodes, clock_of, clocks, key, clock, leave)
    bound_ns, reason = summary.bound(room_ns, impossible)
    return NodeClockAlignment(
        clock_of,
        clocks,
        _compute_shifts_ns(clocks, walls, summary.median_leave_ns),
        bound_ns,
        reason,
        summary.wall_notes(walls),
    )


def _assign_clock_numbers(nodes: Sequence[NodeResult]) -> tuple[int, ...]:
    """Number the clocks: recordings of one boot share a clock, unless their times disagree."""
    clocks_of_boot: dict[str, list[tuple[int, int]]] = {}
    out: list[int] = []
    for node in nodes:
        ahead_ns, boot = compute_wall_clock_offset_ns(node), node.facts.boot_id
        matching = [
            clock
            for clock, other_ns in clocks_of_boot.get(boot, ())
            if boot and abs(ahead_ns - other_ns) < _SAME_CLOCK_NS
        ]
        number = matching[0] if matching else max(out, default=-1) + 1
        clocks_of_boot.setdefault(boot, []).append((number, ahead_ns))
        out.append(number)
    return tuple(out)


def _check_clock_order(
    clocks: ClockAlignment, key: Int, clock: Int, arrive: Int, leave: Int
) -> tuple[int, NDArray[np.bool_]]:
    """Return how far clocks could be shifted (ns), and a mask of contradictory clocks.

    In common time no rank leaves an operation before the last arrival on another clock; the
    time between the two is the room for a shift. Returns ns, bool[clocks].
    """
    impossible = np.zeros(len(clocks.lines), np.bool_)
    room = 0
    for component in np.unique(clocks.component[clocks.component != UNALIGNED]):
        rows = np.flatnonzero(clocks.component[clock] == component)
        row_clock, a, b = clock[rows], arrive[rows].copy(), leave[rows].copy()
        by_clock = split_rows_by_node(row_clock)
        for number, rows_of_clock in by_clock:
            a[rows_of_clock], b[rows_of_clock] = (
                clocks.to_common_ns(number, a[rows_of_clock]),
                clocks.to_common_ns(number, b[rows_of_clock]),
            )
        op = np.unique(key[rows], return_inverse=True)[1]
        shared = np.bincount(op)[op] > 1
        ahead = b - _find_max_of_others(op, a)
        back = -_find_max_of_others(op, -b) - a
        for number, all_mine in by_clock:
            rows_of_clock = all_mine[shared[all_mine]]
            if not rows_of_clock.size:
                continue
            allowed = 2 * int(clocks.bound(number, leave[rows][rows_of_clock]).max())
            early = np.minimum(ahead[rows_of_clock], back[rows_of_clock]) < -allowed
            impossible[number] = float(early.mean()) > _IMPOSSIBLE_RATIO
        room = max(
            room,
            _compute_clock_room_ns(
                row_clock[shared], op[shared], a[shared], b[shared], ahead[shared]
            ),
        )
    return room, impossible


def _compute_clock_room_ns(clock: Int, op: Int, arrive: Int, leave: Int, ahead: Int) -> int:
    """Compute how far (ns) any two clocks of a component could be shifted against each other."""
    by_clock = split_rows_by_node(clock)
    if len(by_clock) == 2:
        return max(0, *(int(ahead[rows_of_clock].min()) for _, rows_of_clock in by_clock))
    size = np.bincount(op)
    last = np.full(size.size, np.iinfo(np.int64).min)
    first = np.full(size.size, np.iinfo(np.int64).max)
    np.maximum.at(last, op, leave)
    np.minimum.at(first, op, arrive)
    is_complete = size == len(by_clock)
    if is_complete.any():
        return max(0, int((last - first)[is_complete].min()))
    # No operation has all clocks: relate two of them through a clock that two operations share.
    span = (last - first)[op]
    return 2 * max(0, *(int(span[rows_of_clock].min()) for _, rows_of_clock in by_clock))


def _find_max_of_others(op: Int, value: Int) -> Int:
    """Return for each row the largest value among the other rows of its operation, int64[n]."""
    order = np.lexsort((value, op))
    ops, values = op[order], value[order]
    ends = np.append(np.flatnonzero(ops[1:] != ops[:-1]), ops.size - 1)
    out = np.empty_like(value)
    out[order] = np.where(
        np.arange(ops.size) == ends[ops], values[np.maximum(ends - 1, 0)][ops], values[ends][ops]
    )
    return out


def _drop_clocks(clocks: ClockAlignment, left_out: NDArray[np.bool_]) -> ClockAlignment:
    if not left_out.any():
        return clocks
    lines = tuple(None if out else line for line, out in zip(clocks.lines, left_out))
    return ClockAlignment(lines, np.where(left_out, UNALIGNED, clocks.component))


def _list_wall_clock_offsets_ns(
    nodes: Sequence[NodeResult], clock_of: Sequence[int], n: int
) -> list[int]:
    """List how far the wall clock was ahead of each clock, in ns."""
    walls = [0] * n
    for node, clock in zip(reversed(nodes), reversed(clock_of)):
        walls[clock] = compute_wall_clock_offset_ns(node)
    return walls


def _compute_shifts_ns(
    clocks: ClockAlignment, walls: Sequence[int], middle_ns: Sequence[int]
) -> tuple[int, ...]:
    """Compute the shift of each component to wall-clock time: the median of its wall clocks."""
    out = list(walls)
    for component in np.unique(clocks.component[clocks.component != UNALIGNED]):
        members = np.flatnonzero(clocks.component == component).tolist()
        wall_offsets = sorted(
            walls[member] + _compute_offset_ns(clocks, member, middle_ns[member])
            for member in members
        )
        for member in members:
            out[member] = wall_offsets[(len(wall_offsets) - 1) // 2]
    return tuple(out)


def _compute_offset_ns(clocks: ClockAlignment, clock: int, t_ns: int) -> int:
    return t_ns - int(clocks.to_common_ns(clock, np.array([t_ns]))[0])


@dataclass(frozen=True, slots=True)
class _AlignmentSummary:
    """Describes an alignment: its bound, the reason for a missing bound, notes on wall clocks."""

    nodes: Sequence[NodeResult]
    clock_of: Sequence[int]
    clocks: ClockAlignment
    key: Int
    clock: Int
    leave: Int

    @property
    def median_leave_ns(self) -> list[int]:
        """Return the median of the sampled leave times of each clock, ns."""
        medians = [0] * len(self.clocks.lines)
        for number, rows in split_rows_by_node(self.clock):
            medians[number] = int(np.median(self.leave[rows]))
        return medians

    def bound(self, room_ns: int, impossible: NDArray[np.bool_]) -> tuple[int | None, str]:
        """Return the widest bound between two clocks in ns, and what it does not hold for."""
        n = len(self.clocks.lines)
        if n < 2:
            return (0, "") if len(self.nodes) > 1 else (None, "one node: one clock")
        apart = [number for number in range(n) if self.clocks.component[number] == UNALIGNED]
        reason = self._explain_unaligned(apart, impossible)
        if len(apart) == n:
            return None, reason
        parts = np.unique(self.clocks.component[self.clocks.component != UNALIGNED]).size
        if parts > 1:
            reason = f"{parts} sets of nodes have no operation in common" + (
                f"; {reason}" if reason else ""
            )
        rows_of = dict(split_rows_by_node(self.clock))
        aligned = set(range(n)) - set(apart)
        bounds_ns = sorted(
            int(self.clocks.bound(number, self.leave[rows_of[number]]).max())
            if number in rows_of
            else 0
            for number in aligned
        )
        return room_ns + sum(bounds_ns[-2:]), reason

    def _explain_unaligned(self, apart: Sequence[int], impossible: NDArray[np.bool_]) -> str:
        too_few = [number for number in apart if not impossible[number]]
        wrong = [number for number in apart if impossible[number]]
        reasons = []
        if too_few:
            reasons.append(
                f"too few operations in which their hosts wait for each other:"
                f" {self._format_node_names(too_few)}"
            )
        if wrong:
            reasons.append(
                f"they seem to leave operations before others have arrived:"
                f" {self._format_node_names(wrong)}"
            )
        return "; ".join(reasons)

    def _format_node_names(self, clocks: Sequence[int]) -> str:
        names = [self._node_name(number) for number in clocks]
        unnamed = (
            f" and {len(names) - _MAX_NAMED_NODES} more" if len(names) > _MAX_NAMED_NODES else ""
        )
        return ", ".join(names[:_MAX_NAMED_NODES]) + unnamed

    def _node_name(self, clock: int) -> str:
        return self.nodes[self.clock_of.index(clock)].facts.name

    def wall_notes(self, walls: Sequence[int]) -> tuple[str, ...]:
        """Return a note on each wall clock that is off by more than a second from the first one."""
        middle_ns = self.median_leave_ns
        out = []
        for component in np.unique(self.clocks.component[self.clocks.component != UNALIGNED]):
            first, *other_clocks = np.flatnonzero(self.clocks.component == component).tolist()
            base_ns = walls[first] + _compute_offset_ns(self.clocks, first, middle_ns[first])
            for clock in other_clocks:
                off_ns = (
                    walls[clock]
                    + _compute_offset_ns(self.clocks, clock, middle_ns[clock])
                    - base_ns
                )
                if abs(off_ns) > _WALL_CLOCK_ERROR_NS:
                    direction = "ahead of" if off_ns > 0 else "behind"
                    out.append(
                        f"the wall clock of {self._node_name(clock)} is"
                        f" {abs(off_ns) / 1e9:,.0f} s {direction}"
                        f" that of {self._node_name(first)}; only operations that both took"
                        f" part in were"
                        " used to order what happened"
                    )
        return tuple(out)
