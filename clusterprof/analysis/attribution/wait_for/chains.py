"""Hand on what was itself a wait: A kept B waiting, therefore B kept C waiting.

The share of a wait that goes to an excess of *waiting in other operations* belongs to those whom
the awaited rank's waits since then were charged to, in proportion. Those charges are known when
batches are taken one after the other: first all that depend on nothing that is handed on itself,
then those that depend on these, and so on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clusterprof.attribution.blame_excess import ranges
from clusterprof.attribution.blame_rows import Lookup
from clusterprof.timeline.model import Float, Int

_TRUE = np.ones(1, np.bool_)


class Charges(NamedTuple):
    """Who is charged for the waits of rows: n entries, sorted by row."""

    row: Int
    key: Int
    """Culprit and cause in one number."""
    ns: Int


class Handed(NamedTuple):
    """Shares of waits that are handed on."""

    row: Int
    """Ascending."""
    ns: Int
    awaited: Int
    """Row of the awaited rank in the same operation."""
    since: Int
    """Row of the awaited rank in the operation that both last left together; -1 = none, since its
    steps began."""


class Ledger:
    """Charges by row while batches come in."""

    def __init__(self, charges: Charges, rows: int) -> None:
        self._parts = [charges]
        self._rows = rows
        self._key, self._ns, self._size = charges.key, charges.ns, charges.row.size
        self._begin = self._end = np.zeros(0, np.int64)

    def open(self) -> None:
        """Get ready to be asked and added to."""
        # Twice as many as rows: the second half stands for what is handed on.
        count = np.bincount(self._parts[0].row, minlength=2 * self._rows)
        self._end = np.cumsum(count)
        self._begin = self._end - count

    def add(self, charges: Charges, rows: Int, count: Int) -> None:
        """Add entries of `rows`, which had none handed on so far, `count` of each; sorted."""
        self._parts.append(charges)
        need = self._size + charges.row.size
        if need > self._key.size:
            self._key = _grown(self._key, self._size, 2 * need)
            self._ns = _grown(self._ns, self._size, 2 * need)
        self._key[self._size : need], self._ns[self._size : need] = charges.key, charges.ns
        rows = rows + self._rows
        self._end[rows] = end = self._size + count.cumsum()
        self._begin[rows] = end - count
        self._size = need

    def of(self, rows: Int) -> tuple[Int, Int, Int]:
        """Return (index into rows, key, ns) of all their entries."""
        both = np.concatenate([rows, rows + self._rows])
        which, at = ranges(self._begin[both], self._end[both])
        return np.where(which < rows.size, which, which - rows.size), self._key[at], self._ns[at]

    def all(self) -> Charges:
        """Return everything, sorted by row."""
        if len(self._parts) == 1:
            return self._parts[0]
        row, key, ns = (np.concatenate(columns) for columns in zip(*self._parts))
        order = np.argsort(row, kind="stable")
        return Charges(row[order], key[order], ns[order])


def _grown(values: Int, used: int, size: int) -> Int:
    out = np.empty(size, np.int64)
    out[:used] = values[:used]
    return out


def hand_on(look: Lookup, handed: Handed, ledger: Ledger, nobody: int, keys: int) -> None:
    """Charge the handed shares, batch by batch.

    `nobody` is the key for what nobody is charged; all keys are below `keys`.
    """
    if not handed.row.size:
        return
    ledger.open()
    rank = look.rows.rank
    first = np.searchsorted(rank[look.by_rank], rank[handed.awaited])
    begin = np.where(handed.since < 0, first, look.place[handed.since] + 1)
    windows = _windows(look, handed, begin)
    end = np.maximum(look.before[handed.awaited] + 1, begin)
    place = look.place[handed.row] + 1
    waiting = np.zeros(look.by_rank.size + 1, np.int64)
    waiting[place] = 1
    left = np.arange(handed.row.size)
    while left.size:
        before = np.cumsum(waiting)
        ready = before[end[left]] == before[begin[left]]
        if not ready.any():  # in a circle: asynchronous operations that were left in another order
            op = look.rows.op[handed.row[left]]
            ready = op == op.min()
        now = left[ready]
        _one_batch(ledger, handed, windows, now, nobody, keys)
        waiting[place[now]] = 0
        left = left[~ready]


class _Windows(NamedTuple):
    """Which earlier rows of the awaited rank shares are handed on to.

    Members of one operation mostly ask for the same stretch of the same rank.
    """

    of_share: Int
    """Number of each share's stretch, ascending by operation."""
    first: Int
    """Where the rows of each stretch begin, and the end."""
    row: Int
    """Rows with a wait."""


def _windows(look: Lookup, handed: Handed, begin: Int) -> _Windows:
    base = look.by_rank.size + 1
    codes, of_share = np.unique(handed.awaited * base + begin, return_inverse=True)
    number, place = ranges(codes % base, look.before[codes // base] + 1)
    row = look.by_rank[place]
    waited = np.flatnonzero(look.rows.wait_ns[row] > 0)
    number, row = number[waited], row[waited]
    first = np.searchsorted(number, np.arange(codes.size + 1))
    return _Windows(of_share, first, row)


def _one_batch(
    ledger: Ledger, handed: Handed, windows: _Windows, now: Int, nobody: int, keys: int
) -> None:
    """Share some handed amounts among the charges of the awaited rank's waits since."""
    wanted, of_share = handed.ns[now], windows.of_share[now]
    used = np.zeros(windows.first.size - 1, np.bool_)
    used[of_share] = True
    stretch = np.flatnonzero(used)
    number = np.cumsum(used) - 1
    of_row, at = ranges(windows.first[stretch], windows.first[stretch + 1])
    which, key, ns = ledger.of(windows.row[at])
    window, key, ns = _summed(of_row[which], key, ns, keys)
    count = np.bincount(window, minlength=stretch.size)
    ratio = ns / np.bincount(window, weights=ns, minlength=stretch.size)[window]
    first = count.cumsum() - count
    mine = number[of_share]
    first, count = first[mine], count[mine]
    share, entry = ranges(first, first + count)
    exact = wanted[share] * ratio[entry]
    whole = exact.astype(np.int64)
    given = np.bincount(share, weights=whole, minlength=wanted.size).astype(np.int64)
    short = (given != wanted) & (count > 0)
    if short.any():
        ask = np.flatnonzero(short[share])
        rest = exact[ask] - whole[ask]
        whole[ask] += _remainders(share[ask], rest, wanted - given)
    key = key[entry]
    if not count.all():
        empty = np.flatnonzero(count == 0)
        share = np.concatenate([share, empty])
        key = np.concatenate([key, np.full(empty.size, nobody)])
        whole = np.concatenate([whole, wanted[empty]])
        order = np.argsort(share, kind="stable")
        share, key, whole = share[order], key[order], whole[order]
    if not whole.all():
        some_ns = np.flatnonzero(whole)
        share, key, whole = share[some_ns], key[some_ns], whole[some_ns]
    rows = handed.row[now]
    count = np.bincount(share, minlength=rows.size)
    ledger.add(Charges(rows[share], key, whole), rows, count)


def _summed(group: Int, key: Int, ns: Int, keys: int) -> tuple[Int, Int, Int]:
    """Add up what stands there several times; sorted by group and key."""
    if not group.size:
        return group, key, ns
    code = group * keys + key
    order = code.argsort(kind="stable")
    code = code[order]
    opens = np.ones(code.size, np.bool_)
    np.not_equal(code[1:], code[:-1], out=opens[1:])
    at = np.flatnonzero(opens)
    code = code[at]
    group = code // keys
    return group, code - group * keys, np.add.reduceat(ns[order], at)


def _remainders(share: Int, rest: Float, missing: Int) -> Int:
    """Return what each entry gets on top so that the entries of each share add up to it.

    `share` is ascending, `missing` is by share; the largest `rest` is served first.
    """
    out = np.zeros(share.size, np.int64)
    place = np.arange(share.size)
    while share.size:
        opens = np.flatnonzero(np.concatenate([_TRUE, share[1:] != share[:-1]]))
        size = np.diff(opens, append=share.size)
        best = np.flatnonzero(rest == np.maximum.reduceat(rest, opens).repeat(size))
        own = share[best]
        best = best[np.concatenate([_TRUE, own[1:] != own[:-1]])]
        own = share[best]
        one = np.sign(missing[own])
        out[place[best]] += one
        rest[best] -= 2.0
        missing[own] -= one
        more = np.flatnonzero(missing[share])
        share, rest, place = share[more], rest[more], place[more]
    return out
