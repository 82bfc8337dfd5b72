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
from numpy.typing import NDArray

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
    since_begin,
    unseen,
)
from clusterprof.attribution.blame_skew import device_behind, left_apart, nobody_last
from clusterprof.attribution.blame_sooner import alone, sooner
from clusterprof.attribution.blame_together import last_together
from clusterprof.timeline.model import Int
from clusterprof.timeline.operations import Operations

UNKNOWN_LESS = int(np.iinfo(np.int64).min)
NOBODY = -1
"""The culprit of transfers, and of what a rank that was not recorded may have caused."""
WORK = "work"
IMBALANCE, SLOW_COMPUTE = "sync-imbalance", "sync-slow-compute"
TRANSFER, UNKNOWN_PEER, UNKNOWN = "net-transfer", "sync-unknown-peer", "unattributed"
OWN = (IMBALANCE, SLOW_COMPUTE, TRANSFER, UNKNOWN_PEER, UNKNOWN)
"""The causes that blame adds to the categories, in this order; the first two stand for work."""


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
    """Per operation: the rank that came last; `NOBODY` when only one was seen, or ranks that left
    the operation before apart explain who waited."""
    recoverable_ns: Int
    """Per operation: how much earlier it would have gone on had the last come with the second."""
    co_late: Int
    """Per operation: others that came in the later half of the time between first and last."""
    less_work_ns: Int
    """Per row of the block: how much less the rank had worked than the last to come since both
    left an operation together; `UNKNOWN_LESS` where they left none."""
    sooner_ns: Int
    """int64[K - 1, operations]: how much sooner each would have gone on had no member lost anything
    to the category since the team's operation before. `blame_sooner`."""


def causes(categories: Sequence[str]) -> tuple[str, ...]:
    """Return the names behind the numbers; the last category is work and splits in two."""
    if not categories or categories[-1] != WORK:
        raise ValueError(f"the last category must be {WORK!r}, not {list(categories)[-1:]}")
    return (*categories[:-1], *OWN)


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
    size = np.diff(ops.first)
    wait = ops.blocked_ns - np.repeat(shortest, size)
    some = np.flatnonzero(wait > 0)
    awaited = fresh + np.repeat(last, size)[some]
    ledger, unled, less_work = _charged(
        look, habits, ops, (fresh + some, awaited, wait[some]), carry
    )
    less = np.where(wait < 0, UNKNOWN_LESS, 0)
    less[some] = less_work
    charges = ledger.all()
    gain_ns, co_late = alone(ops, shortest, last)
    keep = kept(look)
    after = Carry(
        look.rows.take(keep), _kept_charges(keep, rows.op.size, charges),
        carry.operations + ops.team.size,
    )  # fmt: skip
    new = slice(int(np.searchsorted(charges.row, fresh)), None)
    width = at_arrive.shape[1] - 1 + len(OWN)
    culprit = charges.key[new] // width
    blamed = Blamed(
        charges.row[new] - fresh,
        culprit - 1,
        charges.key[new] - culprit * width,
        charges.ns[new],
        look.rows.transfer_ns[fresh:],
        np.where((np.diff(ops.first) > 1) & ~unled, ops.rank[last], NOBODY),
        np.where(unled, 0, gain_ns),
        np.where(unled, 0, co_late),
        less,
        sooner(ops, look),
    )
    return blamed, after


def _number(width: int, name: str) -> int:
    return width - len(OWN) + OWN.index(name)


def _charged(
    look: Lookup,
    habits: blame_excess.Habits,
    ops: Operations,
    waits: tuple[Int, Int, Int],
    carry: Carry,
) -> tuple[blame_chains.Ledger, NDArray[np.bool_], Int]:
    """Charge every wait of the block; the ledger holds those of earlier blocks too.

    `waits`: rows of those who waited, of those they waited for, and how long. Second comes back
    which operations nobody came last to (`blame_skew`), third how much less each had worked.
    """
    waiting, awaited, wait = waits
    rows = look.rows
    width = len(rows.at_arrive) - 1 + len(OWN)
    pairs = blame_excess.Pairs(waiting, awaited, *last_together(look, waiting, awaited))
    passes = is_pair(ops.operation)[rows.op[waiting] - carry.operations]
    handed_ns, apart_ns, shares = _shares(look, habits, pairs, wait, passes)
    row, cause, ns = _by_row(shares, wait.size)
    # Who sends does not wait for the receiver: what nothing explains was on its way.
    if passes.any():
        over = np.flatnonzero(cause == _number(width, UNKNOWN))
        sends = passes[row[over]] & (pairs.mine[row[over]] >= 0)
        cause[over[sends]] = _number(width, TRANSFER)
    culprit = rows.rank[awaited]
    # Nothing left together, and it may itself have waited elsewhere: nobody can be named.
    elsewhere = (pairs.mine < 0) & (look.before[awaited] >= 0)
    culprit[elsewhere & ~since_begin(look, waiting, awaited)] = NOBODY
    key = ((culprit + 1) * width)[row]
    key[cause == _number(width, TRANSFER)] = 0  # nobody's
    key[(cause == _number(width, UNKNOWN)) & elsewhere[row]] = 0
    own = Charges(waiting[row], key + cause, ns)
    parts = [carry.charges, own]
    if unseen(ops).any():  # what is not the wait for a seen member
        unseen_ns = rows.wait_ns[look.fresh :].copy()
        unseen_ns[waiting - look.fresh] -= wait
        alone = np.flatnonzero(unseen_ns)
        peer = np.full(alone.size, _number(width, UNKNOWN_PEER))
        parts.append(Charges(look.fresh + alone, peer, unseen_ns[alone]))
    own = _joined(*parts)
    ledger = blame_chains.Ledger(own, rows.op.size)
    some = np.flatnonzero(handed_ns)
    handed = blame_chains.Handed(waiting[some], handed_ns[some], awaited[some], pairs.theirs[some])
    blame_chains.hand_on(look, handed, ledger, _number(width, UNKNOWN), (look.ranks + 1) * width)
    op = rows.op[waiting] - carry.operations
    return ledger, nobody_last(op, wait, apart_ns, ops.team.size), _less_work(rows, pairs, wait)


def _less_work(rows: Rows, pairs: blame_excess.Pairs, wait: Int) -> Int:
    waiting, awaited, mine, theirs = pairs
    less = rows.at_arrive[-1, awaited] - rows.at_leave[-1, theirs]
    less -= rows.at_arrive[-1, waiting] - rows.at_leave[-1, mine]
    less += device_behind(rows, pairs, wait)
    return np.where(mine >= 0, less, UNKNOWN_LESS)


def _shares(
    look: Lookup,
    habits: blame_excess.Habits,
    pairs: blame_excess.Pairs,
    wait: Int,
    passes: NDArray[np.bool_],
) -> tuple[Int, Int, list[tuple[int, Int]]]:
    """Share waits by what the awaited had more of: what is handed on, what comes only of leaving
    apart, and (cause, ns) of each share."""
    which, more = blame_excess.excess(look, pairs, device_behind(look.rows, pairs, wait))
    shares = blame_excess.shared(wait, more)
    work = len(look.rows.at_arrive) - 1
    width = work + len(OWN)
    rest = wait - shares.sum(axis=0)  # what nothing explains
    handed_ns = np.zeros(wait.size, np.int64)
    out: list[tuple[int, Int]] = []
    for column, share, extra in zip(which.tolist(), shares, more):
        if column < work:
            out.append((column, share))
        elif column == work:
            at = np.flatnonzero(share)
            extra = extra[at]
            due = blame_excess.expected_work(look, habits, pairs.take(at), passes[at], extra)
            usual = np.zeros(wait.size, np.int64)
            usual[at] = np.rint(share[at] * (due / extra))
            out += [
                (_number(width, SLOW_COMPUTE), share - usual), (_number(width, IMBALANCE), usual)
            ]  # fmt: skip
        elif column == work + 1:
            out.append((_number(width, TRANSFER), share))
        else:
            handed_ns = share
    apart_ns = np.minimum(rest, left_apart(look.rows, pairs, wait))
    out += [(_number(width, UNKNOWN), rest - apart_ns), (_number(width, TRANSFER), apart_ns)]
    return handed_ns, apart_ns, out


def _by_row(shares: list[tuple[int, Int]], rows: int) -> tuple[Int, Int, Int]:
    """Return (row, name, ns) of all that is not 0, by row."""
    there = [np.flatnonzero(ns) for _, ns in shares]
    size = np.zeros(rows, np.int64)
    for some in there:
        size[some] += 1
    place = size.cumsum() - size
    names, amounts = np.empty((2, int(size.sum())), np.int64)
    for (name, ns), some in zip(shares, there):
        at = place[some]
        names[at], amounts[at] = name, ns[some]
        place[some] += 1
    return np.repeat(np.arange(rows), size), names, amounts


def _joined(*parts: Charges) -> Charges:
    row, key, ns = (np.concatenate(columns) for columns in zip(*parts))
    if np.all(row[1:] >= row[:-1]):
        return Charges(row, key, ns)
    order = np.argsort(row, kind="stable")
    return Charges(row[order], key[order], ns[order])


def _kept_charges(keep: Int, rows: int, charges: Charges) -> Charges:
    """Number the charges of the kept rows as these will be numbered."""
    number = np.full(rows, -1, np.int64)
    number[keep] = np.arange(keep.size)
    row = number[charges.row]
    some = np.flatnonzero(row >= 0)
    return Charges(row[some], charges.key[some], charges.ns[some])


def _nothing() -> Blamed:
    none = np.zeros(0, np.int64)
    return Blamed(none, none, none, none, none, none, none, none, none, np.zeros((0, 0), np.int64))
