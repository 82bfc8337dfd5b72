"""One clock for all nodes of a recording, and how far it may be off.

    blocks of operations ──> a sample per node ──> offsets ──> order of operations
                             the same operations   checked: nobody leaves
                             on every node         before the last has come

The clocks are laid over each other by who left when. A rank that always leaves later than the
others, as behind a long way, looks like a clock that is ahead; but nobody leaves an operation
before the last member has come to it, and by this the offset is bounded from both sides:

    node 0   comes |-------------| leaves      the clock of node 1 is ahead by no more than
    node 1        comes |-----------| leaves   leave 1 - come 0, no less than come 1 - leave 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from clusterprof.engine.jobs import UNCLEAR
from clusterprof.engine.node import NodeResult
from clusterprof.engine.sightings import wall_ahead_ns
from clusterprof.timeline.clocks import APART, Clocks, align
from clusterprof.timeline.collectives_directory import Ahead
from clusterprof.timeline.leaves import Leaves, brought_together
from clusterprof.timeline.model import Int

_SAME_CLOCK_NS = 1_000_000_000
_IMPOSSIBLE_RATIO = 0.05
_WALL_APART_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Alignment:
    """The clocks of all nodes laid over each other as far as they could be."""

    clock_of: tuple[int, ...]
    """Number of the clock of each node: nodes of one machine share one."""
    clocks: Clocks
    shift_ns: tuple[int, ...]
    """What takes the common time of each clock to the wall clocks' time, or its own where it has
    no common one."""
    bound_ns: int | None = None
    """How far the common time of two nodes may be off; None where there is none."""
    reason: str = ""
    """Why there is no bound, or what it leaves out; "" when it holds for all nodes."""
    notes: tuple[str, ...] = field(default=())

    def ahead(self, node: int, begin_ns: int, end_ns: int) -> Ahead:
        """Return the straight line nearest to a node's way onto the common clock."""
        begin, end = self.when_ns(node, np.array([begin_ns, end_ns])) - [begin_ns, end_ns]
        length_ns = end_ns - begin_ns
        return Ahead(begin_ns, int(begin), float(end - begin) / length_ns if length_ns else 0.0)

    def when_ns(self, node: int, t_ns: Int) -> Int:
        """Return a node's times on the common clock: good to order operations, not to judge."""
        clock = self.clock_of[node]
        if self.clocks.lines[clock] is not None:
            t_ns = self.clocks.common(clock, t_ns)
        return t_ns + self.shift_ns[clock]


def aligned(nodes: Sequence[NodeResult]) -> Alignment:
    """Lay the clocks of all nodes over each other by the samples that their ranks have kept."""
    clock_of = _clocks_of(nodes)
    n = max(clock_of, default=-1) + 1
    parts: list[list[tuple[int, Leaves]]] = [[] for _ in range(n)]
    if n > 1:
        for own, node in zip(clock_of, nodes):
            for one in node.books:
                if one.operations is not None and one.job != UNCLEAR:
                    host_waits = not one.ledger.device or one.emulated
                    kept = one.operations.leaves if host_waits else one.operations.barriers
                    parts[own].append((one.job, kept))
    sound = [brought_together(some) for some in parts]
    key, come, leave = (
        np.concatenate([np.zeros(0, np.int64), *(one[i] for one in sound)]) for i in range(3)
    )
    clock = np.repeat(np.arange(n), [one[0].size for one in sound])
    clocks = align(key, clock, leave, n)
    room_ns, impossible = _checked(clocks, key, clock, come, leave)
    clocks = _without(clocks, impossible)
    walls = _walls(nodes, clock_of, n)
    told = _Told(nodes, clock_of, clocks, key, clock, leave)
    bound_ns, reason = told.bound(room_ns, impossible)
    return Alignment(
        clock_of, clocks, _shifts(clocks, walls, told.middle_ns), bound_ns, reason,
        told.wall_notes(walls),
    )  # fmt: skip


def _clocks_of(nodes: Sequence[NodeResult]) -> tuple[int, ...]:
    """Number the clocks: recordings of one boot share theirs, unless their times say otherwise."""
    known: dict[str, list[tuple[int, int]]] = {}
    out: list[int] = []
    for node in nodes:
        ahead_ns, boot = wall_ahead_ns(node), node.facts.boot_id
        same = [
            clock
            for clock, other_ns in known.get(boot, ())
            if boot and abs(ahead_ns - other_ns) < _SAME_CLOCK_NS
        ]
        number = same[0] if same else max(out, default=-1) + 1
        known.setdefault(boot, []).append((number, ahead_ns))
        out.append(number)
    return tuple(out)


def _checked(
    clocks: Clocks, key: Int, clock: Int, come: Int, leave: Int
) -> tuple[int, NDArray[np.bool_]]:
    """Return how far two clocks could be moved at the most, and by clock what contradicts itself.

    In the common time no first leave lies before the last coming on another clock; what is between
    them is how far the clock could be moved.
    """
    impossible = np.zeros(len(clocks.lines), np.bool_)
    room = 0
    for component in np.unique(clocks.component[clocks.component != APART]):
        rows = np.flatnonzero(clocks.component[clock] == component)
        own, a, b = clock[rows], come[rows].copy(), leave[rows].copy()
        for one in np.unique(own):
            mine = own == one
            a[mine], b[mine] = clocks.common(one, a[mine]), clocks.common(one, b[mine])
        op = np.unique(key[rows], return_inverse=True)[1]
        shared = np.bincount(op)[op] > 1
        ahead = b - _last_of_others(op, a)
        back = -_last_of_others(op, -b) - a
        for one in np.unique(own[shared]):
            mine = shared & (own == one)
            allowed = 2 * int(clocks.bound(one, leave[rows][mine]).max())
            early = np.minimum(ahead[mine], back[mine]) < -allowed
            impossible[one] = float(early.mean()) > _IMPOSSIBLE_RATIO
        room = max(room, _room(own[shared], op[shared], a[shared], b[shared], ahead[shared]))
    return room, impossible


def _room(clock: Int, op: Int, come: Int, leave: Int, ahead: Int) -> int:
    """Return how far any two clocks of a component could be moved against each other."""
    own = np.unique(clock)
    if own.size == 2:
        return max(0, *(int(ahead[clock == one].min()) for one in own))
    size = np.bincount(op)
    last = np.full(size.size, np.iinfo(np.int64).min)
    first = np.full(size.size, np.iinfo(np.int64).max)
    np.maximum.at(last, op, leave)
    np.minimum.at(first, op, come)
    whole = size == own.size
    if whole.any():
        return max(0, int((last - first)[whole].min()))
    # No operation has all of them: through one that two operations share.
    span = (last - first)[op]
    return 2 * max(0, *(int(span[clock == one].min()) for one in own))


def _last_of_others(op: Int, value: Int) -> Int:
    """For each row the largest value of the other rows of its operation."""
    order = np.lexsort((value, op))
    ops, values = op[order], value[order]
    ends = np.append(np.flatnonzero(ops[1:] != ops[:-1]), ops.size - 1)
    out = np.empty_like(value)
    out[order] = np.where(
        np.arange(ops.size) == ends[ops], values[np.maximum(ends - 1, 0)][ops], values[ends][ops]
    )
    return out


def _without(clocks: Clocks, left_out: NDArray[np.bool_]) -> Clocks:
    if not left_out.any():
        return clocks
    lines = tuple(None if out else line for line, out in zip(clocks.lines, left_out))
    return Clocks(lines, np.where(left_out, APART, clocks.component))


def _walls(nodes: Sequence[NodeResult], clock_of: Sequence[int], n: int) -> list[int]:
    """How far the wall clock was ahead of each clock."""
    walls = [0] * n
    for node, clock in zip(reversed(nodes), reversed(clock_of)):
        walls[clock] = wall_ahead_ns(node)
    return walls


def _shifts(clocks: Clocks, walls: Sequence[int], middle_ns: Sequence[int]) -> tuple[int, ...]:
    """What takes each component to the wall clocks' time: their median within it."""
    out = list(walls)
    for component in np.unique(clocks.component[clocks.component != APART]):
        members = np.flatnonzero(clocks.component == component).tolist()
        found = sorted(walls[one] + _ahead_ns(clocks, one, middle_ns[one]) for one in members)
        for one in members:
            out[one] = found[(len(found) - 1) // 2]
    return tuple(out)


def _ahead_ns(clocks: Clocks, clock: int, t_ns: int) -> int:
    return t_ns - int(clocks.common(clock, np.array([t_ns]))[0])


@dataclass(frozen=True, slots=True)
class _Told:
    """What is said of an alignment."""

    nodes: Sequence[NodeResult]
    clock_of: Sequence[int]
    clocks: Clocks
    key: Int
    clock: Int
    leave: Int

    @property
    def middle_ns(self) -> list[int]:
        """The middle of the sampled leaves of each clock."""
        n = len(self.clocks.lines)
        return [
            int(np.median(self.leave[self.clock == one])) if (self.clock == one).any() else 0
            for one in range(n)
        ]

    def bound(self, room_ns: int, impossible: NDArray[np.bool_]) -> tuple[int | None, str]:
        """Return the widest bound between two clocks, and what it does not hold for."""
        n = len(self.clocks.lines)
        if n < 2:
            return (0, "") if len(self.nodes) > 1 else (None, "one node: one clock")
        apart = [one for one in range(n) if self.clocks.component[one] == APART]
        reason = self._apart(apart, impossible)
        if len(apart) == n:
            return None, reason
        parts = np.unique(self.clocks.component[self.clocks.component != APART]).size
        if parts > 1:
            reason = f"{parts} sets of nodes share no operation with each other" + (
                f"; {reason}" if reason else ""
            )
        each = sorted(self._bound_of(one) for one in range(n) if one not in apart)
        return room_ns + sum(each[-2:]), reason

    def _bound_of(self, clock: int) -> int:
        rows = self.leave[self.clock == clock]
        return int(self.clocks.bound(clock, rows).max()) if rows.size else 0

    def _apart(self, apart: Sequence[int], impossible: NDArray[np.bool_]) -> str:
        few = [one for one in apart if not impossible[one]]
        wrong = [one for one in apart if impossible[one]]
        said = []
        if few:
            said.append(f"too few operations in which hosts wait together: {self._names(few)}")
        if wrong:
            said.append(f"left operations before others had come: {self._names(wrong)}")
        return "; ".join(said)

    def _names(self, clocks: Sequence[int], most: int = 4) -> str:
        names = [self._name(one) for one in clocks]
        left = f" and {len(names) - most} more" if len(names) > most else ""
        return ", ".join(names[:most]) + left

    def _name(self, clock: int) -> str:
        return self.nodes[self.clock_of.index(clock)].facts.name

    def wall_notes(self, walls: Sequence[int]) -> tuple[str, ...]:
        """Say which wall clocks are wrong by more than a second, seen from the first of them."""
        middle_ns = self.middle_ns
        out = []
        for component in np.unique(self.clocks.component[self.clocks.component != APART]):
            first, *others = np.flatnonzero(self.clocks.component == component).tolist()
            base_ns = walls[first] + _ahead_ns(self.clocks, first, middle_ns[first])
            for one in others:
                off_ns = walls[one] + _ahead_ns(self.clocks, one, middle_ns[one]) - base_ns
                if abs(off_ns) > _WALL_APART_NS:
                    way = "ahead of" if off_ns > 0 else "behind"
                    out.append(
                        f"the wall clock of {self._name(one)} is {abs(off_ns) / 1e9:,.0f} s {way}"
                        f" that of {self._name(first)}; only operations both took part in were"
                        " used to order what happened"
                    )
        return tuple(out)
