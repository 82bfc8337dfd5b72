"""Blame across ranks: every nanosecond that ranks stood still in operations, felt and caused.

    durations since each rank's previous operation  ─┐
    when it came and left, on its own clock         ─┴─>  wait ─> excess ─> charges ─> books
                                                          transfer ────────────────>

A wait goes to the last to arrive, and there to what it had spent more of since both last left an
operation together (`blame_together`, `blame_excess`); an excess of waiting elsewhere is handed on
(`blame_chains`). The rest of the time in an operation is transfer. Blocks of operations go in one
after the other with what is kept of those before; the cut changes no nanosecond.

Everything is relative to each rank's own clock: no common clock is needed, and none is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof.attribution import blame_chains, blame_excess
from clusterprof.attribution.blame_chains import Charges
from clusterprof.attribution.blame_rows import (
    Lookup,
    Rows,
    is_pair,
    joined,
    kept,
    last_to_arrive,
    looked_up,
    no_rows,
    shortest_stay,
)
from clusterprof.attribution.blame_together import last_together
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import Operations

NOBODY = -1
"""The culprit of transfers, and of what a rank that was not recorded may have caused."""
WORK = "work"
IMBALANCE, SLOW_COMPUTE = "sync-imbalance", "sync-slow-compute"
TRANSFER, UNKNOWN_PEER, UNKNOWN = "net-transfer", "sync-unknown-peer", "unattributed"
OWN = (IMBALANCE, SLOW_COMPUTE, TRANSFER, UNKNOWN_PEER, UNKNOWN)
"""The causes that blame adds to the categories, in this order; the first two stand for work."""
HANDED = -1
"""Stands for a cause where a share is handed on to those who are charged for earlier waits."""


@dataclass(frozen=True, slots=True)
class Carry:
    """What the next block needs of those before."""

    rows: Rows
    charges: Charges
    operations: int
    """How many there were."""


@dataclass(frozen=True, slots=True)
class Blamed:
    """One block: who is charged for which wait, entry by entry, and what was transfer."""

    row: Int
    """Row of the block's `Operations`, ascending."""
    culprit: Int
    cause: Int
    """Index into `causes(categories)`."""
    ns: Int
    transfer_ns: Int
    """Per row of the block: time blocked that was no wait; nobody is charged for it."""
    last: Int
    """Per operation: the rank that came last, `NOBODY` when only one was seen."""
    recoverable_ns: Int
    """Per operation: how much earlier it would have gone on had the last come with the second."""
    co_late: Int
    """Per operation: others that came in the later half of the time between first and last."""


def causes(categories: Sequence[str]) -> tuple[str, ...]:
    """Return the names behind the numbers; the last category is work and splits in two."""
    if not categories or categories[-1] != WORK:
        raise ValueError(f"the last category must be {WORK!r}, not {list(categories)[-1:]}")
    return (*categories[:-1], *OWN)


def spent_until(ops: Operations, since_leaving: Int, base: Int | None = None) -> tuple[Int, Int]:
    """Turn durations since each rank's previous operation into sums at arriving and at leaving.

    For blocking operations, in which nothing is spent. `since_leaving` is n x K; `base` holds per
    rank what it had spent before this block, and is moved on in place.
    """
    order = np.lexsort((ops.leave_ns, ops.rank))
    rank = ops.rank[order]
    opens = np.ones(rank.size, np.bool_)
    opens[1:] = rank[1:] != rank[:-1]
    values = np.rint(since_leaving[order]).astype(np.int64)
    sums = np.cumsum(values, axis=0)
    start = np.flatnonzero(opens)
    sums -= np.repeat(sums[start] - values[start], np.diff([*start, rank.size]), axis=0)
    if base is not None:
        sums += base[rank]
        ends = np.append(start[1:], rank.size)[: start.size] - 1
        base[rank[ends]] = sums[ends]
    out = np.empty_like(sums)
    out[order] = sums
    return out, out


def settle_waits(
    ops: Operations, at_arrive: Int, at_leave: Int, ranks: int, carry: Carry | None = None
) -> tuple[Blamed, Carry]:
    """Blame one block of operations; pass what comes back second to the next block.

    `at_arrive` and `at_leave` are int64[n, K]: what each rank had spent by then, by category, since
    some instant of its own, the last column being work.
    """
    if carry is None:
        none = np.zeros(0, np.int64)
        carry = Carry(no_rows(at_arrive.shape[1]), Charges(none, none, none), 0)
    if not ops.team.size:
        return _nothing(), carry
    shortest = shortest_stay(ops)
    rows = joined(carry.rows, ops, carry.operations, at_arrive, at_leave, shortest)
    fresh = carry.rows.op.size
    look, habits = blame_excess.with_habits(looked_up(rows, fresh, ranks))
    last = last_to_arrive(ops, shortest, look)
    op = rows.op[fresh:] - carry.operations
    waiting = fresh + np.flatnonzero(ops.blocked_ns > shortest[op])
    awaited = fresh + last[op[waiting - fresh]]
    ledger = _charged(look, habits, ops, waiting, awaited, carry)
    charges = ledger.all()
    keep = kept(look)
    after = Carry(keep, _kept_charges(look, keep, charges), carry.operations + ops.team.size)
    new = charges.row >= fresh
    width = at_arrive.shape[1] - 1 + len(OWN)
    blamed = Blamed(
        charges.row[new] - fresh,
        charges.key[new] // width - 1,
        charges.key[new] % width,
        charges.ns[new],
        look.rows.transfer_ns[fresh:],
        np.where(np.diff(ops.first) > 1, ops.rank[last], NOBODY),
        *_gain(ops, shortest, last),
    )
    return blamed, after


def _number(width: int, name: str) -> int:
    return width - len(OWN) + OWN.index(name)


def _charged(
    look: Lookup,
    habits: blame_excess.Habits,
    ops: Operations,
    waiting: Int,
    awaited: Int,
    carry: Carry,
) -> blame_chains.Ledger:
    """Charge every wait of the block; the ledger holds those of earlier blocks too."""
    rows = look.rows
    width = rows.at_arrive.shape[1] - 1 + len(OWN)
    stay = rows.leave_ns[awaited] - rows.arrive_ns[awaited]
    wait = rows.wait_ns[waiting] + rows.transfer_ns[waiting] - stay
    pairs = blame_excess.Pairs(waiting, awaited, *last_together(look, waiting, awaited))
    shares = _shares(look, habits, pairs, wait)
    rest = wait - np.bincount(shares.row, weights=shares.ns, minlength=wait.size).astype(np.int64)
    # Who sends does not wait for the receiver: what nothing explains was on its way.
    sends = is_pair(ops.operation)[rows.op[waiting] - carry.operations] & (pairs.mine >= 0)
    on_its_way = np.where(sends, rest, np.minimum(rest, blame_excess.left_late(look, pairs, wait)))
    rest -= on_its_way
    over, moving = np.flatnonzero(rest), np.flatnonzero(on_its_way)
    late = Charges(over, np.full(over.size, _number(width, UNKNOWN)), rest[over])
    sent = Charges(moving, np.full(moving.size, _number(width, TRANSFER)), on_its_way[moving])
    handed_on = shares.key == HANDED
    own = Charges(*(column[~handed_on] for column in shares))
    own = _joined(own, late, sent)
    culprit = rows.rank[awaited[own.row]]
    # Nothing left together, and it may itself have waited elsewhere: nobody can be named.
    blind = (pairs.mine < 0) & (look.before[awaited] >= 0)
    culprit[(own.key == _number(width, TRANSFER)) | blind[own.row]] = NOBODY
    own = Charges(waiting[own.row], (culprit + 1) * width + own.key, own.ns)
    unseen_ns = rows.wait_ns[look.fresh :].copy()
    unseen_ns[waiting - look.fresh] -= wait
    alone = np.flatnonzero(unseen_ns)
    peer = np.full(alone.size, _number(width, UNKNOWN_PEER))
    own = _joined(carry.charges, own, Charges(look.fresh + alone, peer, unseen_ns[alone]))
    ledger = blame_chains.Ledger(own, rows.op.size)
    some = shares.row[handed_on]
    handed = blame_chains.Handed(
        waiting[some], shares.ns[handed_on], awaited[some], pairs.theirs[some]
    )
    blame_chains.hand_on(look, handed, ledger, _number(width, UNKNOWN))
    return ledger


def _shares(
    look: Lookup, habits: blame_excess.Habits, pairs: blame_excess.Pairs, wait: Int
) -> Charges:
    """Share waits by what the awaited had more of: (number of the pair, cause or `HANDED`, ns)."""
    compared = np.flatnonzero(pairs.mine >= 0)
    known = pairs.take(compared)
    more = blame_excess.excess(look, known)
    table = blame_excess.shared(wait[compared], more)
    width = look.rows.at_arrive.shape[1] - 1 + len(OWN)
    work = more.shape[1] - 3
    cause = np.arange(more.shape[1])
    cause[work:] = _number(width, SLOW_COMPUTE), _number(width, TRANSFER), HANDED
    row, column = np.nonzero(table)
    ns = table[row, column]
    at = np.flatnonzero(column == work)
    extra = more[row[at], work]
    due = np.minimum(blame_excess.expected_work(look, habits, known.take(row[at])), extra)
    usual = np.rint(ns[at] * (due / extra)).astype(np.int64)
    ns[at] -= usual
    name = np.full(at.size, _number(width, IMBALANCE))
    out = _joined(Charges(row, cause[column], ns), Charges(row[at], name, usual))
    some = out.ns > 0
    return Charges(compared[out.row[some]], out.key[some], out.ns[some])


def _joined(*parts: Charges) -> Charges:
    row, key, ns = (np.concatenate(columns) for columns in zip(*parts))
    if np.all(row[1:] >= row[:-1]):
        return Charges(row, key, ns)
    order = np.argsort(row, kind="stable")
    return Charges(row[order], key[order], ns[order])


def _kept_charges(look: Lookup, keep: Rows, charges: Charges) -> Charges:
    """Number the charges of the kept rows as these will be numbered."""
    op_rank = keep.op * look.ranks + keep.rank
    number = np.full(look.rows.op.size, -1, np.int64)
    number[np.searchsorted(look.key, op_rank)] = np.arange(op_rank.size)
    row = number[charges.row]
    return Charges(*(column[row >= 0] for column in (row, charges.key, charges.ns)))


def _gain(ops: Operations, shortest: Int, last: Int) -> tuple[Int, Int]:
    """Return how much the last to arrive alone delayed each operation, and who was late with it."""
    stay = ops.leave_ns - ops.arrive_ns
    op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))
    longest = np.maximum.reduceat(stay, ops.first[:-1])
    others = stay.copy()
    others[last] = np.iinfo(np.int64).max
    second = np.minimum.reduceat(others, ops.first[:-1])
    alone = np.diff(ops.first) < 2
    late = 2 * (stay - shortest[op]) < (longest - shortest)[op]
    late[last] = False
    count = np.bincount(op[late], minlength=ops.team.size)
    return np.where(alone, 0, second - shortest), count


def _nothing() -> Blamed:
    return Blamed(*(np.zeros(0, np.int64) for _ in range(8)))
