"""Match the collective spans of many ranks to operations: same job, same group, same number.

What cannot be matched honestly is left out and counted with a reason:

| reason | what was seen |
|---|---|
| `group-unknown` | the span names no group |
| `peer-unknown` | a send or receive that does not say with whom |
| `issue-not-seen` · `wait-not-seen` | half of an asynchronous operation |
| `backwards` | it ends before it begins, or blocks for longer than it lasts |
| `seen-twice` | the same rank a second time in one operation |
| `another-operation` | its kind is not what most members of that number did |
| `restart-unclear` | the rank began again more or less often than the others of its group |
| `sequence-skew` | its numbers are off: its leaves fit the operation before or after |

Send and receive are matched by sender, receiver and number; both belong to the team of the pair.
An operation is held back while a member that was recorded may still come: until that member has
been seen in a later operation of the group, or `final` says that nothing comes any more. Held
spans are returned and belong in front of the next block. Operations come out in an order in which
every member left them: by `when_ns`, each rank's leaving on a roughly common clock
(`timeline.clocks`; or nothing at all, when all ranks share a clock).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.collectives_checks import first_of, off_by_some, restarts
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import RECV, SEND, Operations

BLOCKING, ISSUE, WAIT = 0, 1, 2
HELD_MOST = 4096
"""Operations of one team that may wait for a member that does not come."""
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Spans of collective operations, n rows in any order."""

    rank: Int
    """Process: 0 … ranks - 1 over all jobs; a restarted process is another one."""
    global_rank: Int
    """The number by which its job calls it."""
    job: Int
    arrive_ns: Int
    leave_ns: Int
    blocked_ns: Int
    when_ns: Int
    """`leave_ns` on a roughly common clock; only the order of operations depends on it."""
    group: Int
    sequence: Int
    bytes: Int
    operation: Int
    peer: Int
    """Global rank of the other side of a send or receive, -1 for everything else."""
    source: Int

    def take(self, rows: Int | NDArray[np.bool_]) -> Arrivals:
        """Return some of the rows."""
        return Arrivals(*(getattr(self, one.name)[rows] for one in fields(self)))


@dataclass(frozen=True, slots=True)
class Matched:
    """What a block of spans became."""

    operations: Operations
    held: Arrivals
    """To be put in front of the next block."""
    unmatched: Mapping[str, int]
    """Reason -> spans left out."""


def together(*parts: Arrivals) -> Arrivals:
    """Put spans behind each other."""
    return Arrivals(
        *(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Arrivals))
    )


def whole_spans(start_ns: Int, end_ns: Int, a: Int, b: Int, c: Int, d: Int) -> dict[str, Int]:
    """Turn the spans of one process into arrivals and leaves; issues find their waits.

    Returns columns `arrive_ns, leave_ns, blocked_ns, group, sequence, bytes, operation, peer,
    source, leaver` (the last two: rows of the spans that arrive and leave); `unmatched` in the same
    mapping holds rows whose other half was not seen.
    """
    form = (d >> 8) & 15
    order = np.lexsort((start_ns, form, b, a))
    a_, b_, f_ = a[order], b[order], form[order]
    pair = np.zeros(order.size, np.bool_)
    pair[:-1] = (a_[1:] == a_[:-1]) & (b_[1:] == b_[:-1]) & (f_[:-1] == ISSUE) & (f_[1:] == WAIT)
    issue, wait = order[pair], order[np.flatnonzero(pair) + 1]
    plain = np.flatnonzero(form == BLOCKING)
    come = np.concatenate([plain, issue])
    go = np.concatenate([plain, wait])
    left = np.ones(start_ns.size, np.bool_)
    left[come] = left[go] = False
    return {
        "arrive_ns": start_ns[come], "leave_ns": end_ns[go],
        "blocked_ns": end_ns[go] - start_ns[go], "group": a[come], "sequence": b[come],
        "bytes": c[come], "operation": d[come] & 255, "peer": ((d[come] >> 16) & 0xFFFFFFFF) - 1,
        "source": come, "leaver": go, "unmatched": np.flatnonzero(left),
    }  # fmt: skip


def match(
    spans: Arrivals, members: Mapping[tuple[int, int], Int] | None = None, final: bool = True
) -> Matched:
    """Match spans to operations.

    `members` holds the global ranks of each (job, group) that was announced; where it is missing
    the members are those who were seen.
    """
    unmatched: dict[str, int] = {}
    stay = spans.leave_ns - spans.arrive_ns
    (spans,) = _without(
        (spans.blocked_ns < 0) | (spans.blocked_ns > stay), "backwards", unmatched, spans
    )
    spans, team, channel = _labelled(spans, unmatched)
    epoch, clear = restarts(spans.rank, channel, spans.sequence, spans.arrive_ns)
    columns = (team, channel, epoch)
    spans, *columns = _without(~clear, "restart-unclear", unmatched, spans, *columns)
    team, channel, epoch = columns
    spans, team, op = _numbered(spans, team, channel, epoch, unmatched)
    held = _held(spans, team, op, members or {}, final)
    waiting = spans.take(held)
    if held.any():
        spans, team, op = spans.take(~held), team[~held], op[~held]
    return Matched(_ordered(spans, team, op, members or {}), waiting, unmatched)


def _without(
    rows: NDArray[np.bool_], reason: str, unmatched: dict[str, int], spans: Arrivals, *columns: Any
) -> Any:
    """Leave rows out and count them."""
    if not rows.any():
        return (spans, *columns)
    unmatched[reason] = unmatched.get(reason, 0) + int(rows.sum())
    return (spans.take(~rows), *(column[~rows] for column in columns))


def mixed(*columns: Int) -> Int:
    """Return one label for each combination of values (64 bits of a mixing function)."""
    out = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        out = (out ^ column.astype(np.uint64)) * _ODD
        out ^= out >> np.uint64(32)
    return (out >> np.uint64(1)).astype(np.int64)


def _labelled(spans: Arrivals, unmatched: dict[str, int]) -> tuple[Arrivals, Int, Int]:
    """Say for each span which team it belongs to, and within it which row of numbers."""
    pair = (spans.operation == SEND) | (spans.operation == RECV)
    (spans, pair) = _without((spans.group == 0) & ~pair, "group-unknown", unmatched, spans, pair)
    (spans, pair) = _without(pair & (spans.peer < 0), "peer-unknown", unmatched, spans, pair)
    sends = spans.operation == SEND
    giver = np.where(sends, spans.global_rank, spans.peer)
    taker = np.where(sends, spans.peer, spans.global_rank)
    low, high = np.minimum(giver, taker), np.maximum(giver, taker)
    one = np.ones_like(low)
    group = mixed(spans.job, spans.group, 0 * one, 0 * one)
    team = np.where(pair, mixed(spans.job, low, high, one), group)
    way = np.where(pair, mixed(spans.job, spans.group, giver, taker), group)
    return spans, team, way


def _numbered(
    spans: Arrivals, team: Int, channel: Int, epoch: Int, unmatched: dict[str, int]
) -> tuple[Arrivals, Int, Int]:
    """Number the operations; leave out what does not fit into its own."""
    op = np.unique(mixed(channel, epoch, spans.sequence), return_inverse=True)[1]
    twice = ~first_of(op, spans.rank, spans.arrive_ns)
    spans, team, op = _without(twice, "seen-twice", unmatched, spans, team, op)
    kind = np.where(spans.operation == RECV, SEND, spans.operation)
    codes, count = np.unique(op * 256 + kind, return_counts=True)
    best = np.full(op.max(initial=-1) + 1, -1)
    order = np.argsort(count, kind="stable")
    best[codes[order] // 256] = codes[order] % 256
    other = kind != best[op]
    spans, team, op = _without(other, "another-operation", unmatched, spans, team, op)
    pair = (spans.operation == SEND) | (spans.operation == RECV)
    skewed = off_by_some(spans.rank, team, spans.sequence, op, spans.leave_ns, ~pair)
    spans, team, op = _without(skewed, "sequence-skew", unmatched, spans, team, op)
    return spans, team, op


def _held(
    spans: Arrivals, team: Int, op: Int, members: Mapping[tuple[int, int], Int], final: bool
) -> NDArray[np.bool_]:
    """True for spans of operations to which a member may still come, and for all after them."""
    if final or not spans.rank.size:
        return np.zeros(spans.rank.size, np.bool_)
    size = np.bincount(op)
    teams, of_row = np.unique(team, return_inverse=True)
    code = np.unique(of_row * (spans.rank.max() + 1) + spans.rank)
    seen = np.bincount(code // (spans.rank.max() + 1), minlength=teams.size)
    wanted = _sizes(spans, of_row, members, seen)
    # How far each member has come in its team: what all have passed is not waited for.
    reached = np.full(int(code.max()) + 1, -1, np.int64)
    np.maximum.at(reached, of_row * (spans.rank.max() + 1) + spans.rank, spans.sequence)
    slowest = np.full(teams.size, np.iinfo(np.int64).max)
    np.minimum.at(slowest, code // (spans.rank.max() + 1), reached[code])
    slowest[seen < wanted] = -1
    newest = np.zeros(teams.size, np.int64)
    np.maximum.at(newest, of_row, spans.sequence)
    open_ = (size[op] < wanted[of_row]) & (spans.sequence > slowest[of_row])
    open_ &= spans.sequence > newest[of_row] - HELD_MOST
    if not open_.any():
        return open_
    when = np.full(size.size, np.iinfo(np.int64).max)
    np.minimum.at(when, op, spans.when_ns)
    return when[op] >= when[op[open_]].min()


def _sizes(spans: Arrivals, of_row: Int, members: Mapping[tuple[int, int], Int], seen: Int) -> Int:
    """How many members of each team are to come: those announced, else those seen, 2 for pairs."""
    wanted = seen.copy()
    pair = (spans.operation == SEND) | (spans.operation == RECV)
    wanted[of_row[pair]] = 2
    _, first = np.unique(of_row, return_index=True)
    for team, row in enumerate(first.tolist()):
        ranks = members.get((int(spans.job[row]), int(spans.group[row])))
        if ranks is not None and not pair[row]:
            wanted[team] = len(ranks)
    return wanted


def _ordered(
    spans: Arrivals, team: Int, op: Int, members: Mapping[tuple[int, int], Int]
) -> Operations:
    """Sort operations by the middle of when their members left, rows by rank."""
    order = np.lexsort((spans.when_ns, op))
    _, first, size = np.unique(op[order], return_index=True, return_counts=True)
    when = spans.when_ns[order][first + (size - 1) // 2]
    turn = np.argsort(when, kind="stable")
    number = np.empty_like(turn)
    number[turn] = np.arange(turn.size)
    dense = np.unique(op, return_inverse=True)[1]
    rows = np.lexsort((spans.rank, number[dense]))
    spans, team, dense = spans.take(rows), team[rows], number[dense][rows]
    first = np.concatenate([[0], np.cumsum(size[turn])]).astype(np.int64)
    head = first[:-1]
    of_row = np.unique(team, return_inverse=True)[1]
    people = int(spans.rank.max(initial=0)) + 1
    seen = np.bincount(np.unique(of_row * people + spans.rank) // people)
    wanted = _sizes(spans, of_row, members, seen)
    brought = np.maximum.reduceat(spans.bytes, head) if head.size else head
    return Operations(
        first, team[head], spans.operation[head], brought,
        np.diff(first) >= wanted[of_row[head]], spans.rank, spans.arrive_ns, spans.leave_ns,
        spans.blocked_ns, spans.source,
    )  # fmt: skip
