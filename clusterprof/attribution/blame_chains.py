"""Hand on what was itself a wait: A kept B waiting, therefore B kept C waiting.

The share of a wait that goes to an excess of *waiting in other operations* belongs to those whom
the awaited rank's waits since then were charged to, in proportion. Those charges are known when
operations are taken in the order of leaving; all whose waits depend on nothing in the same batch
are handled together.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from clusterprof.attribution.blame_rows import Lookup
from clusterprof.timeline.model import Int


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
    """Row of the awaited rank in the operation that both last left together."""


class Ledger:
    """Charges by row while batches come in."""

    def __init__(self, charges: Charges, rows: int) -> None:
        self._parts = [charges]
        count = np.bincount(charges.row, minlength=rows)
        self._end = np.cumsum(count)
        self._from = self._end - count
        self._handed_from = np.zeros(rows, np.int64)
        self._handed_end = np.zeros(rows, np.int64)
        self._key, self._ns = charges.key, charges.ns
        self._size = charges.row.size

    def add(self, charges: Charges) -> None:
        """Add entries of rows that had none handed on so far; sorted by row."""
        self._parts.append(charges)
        need = self._size + charges.row.size
        if need > self._key.size:
            self._key = _grown(self._key, self._size, 2 * need)
            self._ns = _grown(self._ns, self._size, 2 * need)
        self._key[self._size : need], self._ns[self._size : need] = charges.key, charges.ns
        rows, first, count = np.unique(charges.row, return_index=True, return_counts=True)
        self._handed_from[rows] = self._size + first
        self._handed_end[rows] = self._size + first + count
        self._size = need

    def of(self, rows: Int) -> tuple[Int, Int, Int]:
        """Return (index into rows, key, ns) of all their entries."""
        own, at = ranges(self._from[rows], self._end[rows])
        more, at_more = ranges(self._handed_from[rows], self._handed_end[rows])
        at = np.concatenate([at, at_more])
        return np.concatenate([own, more]), self._key[at], self._ns[at]

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


def ranges(begin: Int, end: Int) -> tuple[Int, Int]:
    """Return for many ranges (number of the range, each index in it).

    0-2 and 5-6 -> ([0, 0, 1], [0, 1, 5])
    """
    count = np.maximum(end - begin, 0)
    which = np.repeat(np.arange(count.size), count)
    before = np.cumsum(count) - count
    return which, np.arange(which.size) - before[which] + begin[which]


def hand_on(look: Lookup, handed: Handed, ledger: Ledger, nobody: int) -> None:
    """Charge the handed shares, batch by batch; `nobody` is the key for what nobody is charged."""
    if not handed.row.size:
        return
    for begin, end in _batches(look, handed):
        part = Handed(*(column[begin:end] for column in handed))
        ledger.add(_one_batch(look, part, ledger, nobody))


def _batches(look: Lookup, handed: Handed) -> list[tuple[int, int]]:
    """Cut the shares, in order of operations, so that none needs the charges of its own batch."""
    by_rank = look.by_rank
    depends = np.zeros(by_rank.size, np.int64)
    depends[look.place[handed.row]] = 1
    # For each place the last one at or before it whose charges are only known after a batch.
    latest = np.maximum.accumulate(np.where(depends > 0, np.arange(by_rank.size), -1))
    at = latest[look.before[handed.awaited]]
    inside = at > look.place[handed.since]
    needs = np.where(inside, look.rows.op[by_rank[np.maximum(at, 0)]], -1)
    op = look.rows.op[handed.row]
    opens = np.flatnonzero(np.concatenate([[True], op[1:] != op[:-1]]))
    worst = np.maximum.reduceat(needs, opens).tolist()
    numbers = op[opens].tolist()
    cuts, current = [], numbers[0]
    for place, (number, need) in enumerate(zip(numbers, worst)):
        if need >= current:
            cuts.append(int(opens[place]))
            current = number
    edges = [0, *cuts, op.size]
    return list(itertools.pairwise(edges))


def _one_batch(look: Lookup, handed: Handed, ledger: Ledger, nobody: int) -> Charges:
    """Share each handed amount among the charges of the awaited rank's waits since."""
    begin = look.place[handed.since] + 1
    end = look.before[handed.awaited] + 1
    # Members of one operation mostly ask for the same stretch of the same rank.
    code = begin * (look.by_rank.size + 1) + end
    codes, window = np.unique(code, return_inverse=True)
    of_window, place = ranges(codes // (look.by_rank.size + 1), codes % (look.by_rank.size + 1))
    rows = look.by_rank[place]
    waited = look.rows.wait_ns[rows] > 0
    of_window, rows = of_window[waited], rows[waited]
    which, key, ns = ledger.of(rows)
    of_entry, key, ns = _summed(of_window[which], key, ns)
    first = np.searchsorted(of_entry, np.arange(codes.size + 1))
    share, entry = ranges(first[window], first[window + 1])
    total = np.bincount(of_entry, weights=ns, minlength=codes.size)[window[share]]
    exact = handed.ns[share] * (ns[entry] / total)
    whole = np.floor(exact).astype(np.int64)
    whole += _remainders(share, exact - whole, handed.ns, whole)
    some = whole > 0
    out = Charges(handed.row[share[some]], key[entry[some]], whole[some])
    empty = np.flatnonzero(first[window] == first[window + 1])
    if not empty.size:
        return out
    lost = Charges(handed.row[empty], np.full(empty.size, nobody), handed.ns[empty])
    both = [np.concatenate(pair) for pair in zip(out, lost)]
    order = np.argsort(both[0], kind="stable")
    return Charges(*(column[order] for column in both))


def _summed(group: Int, key: Int, ns: Int) -> tuple[Int, Int, Int]:
    """Add up what stands there several times; sorted by group and key."""
    if not group.size:
        return group, key, ns
    order = np.lexsort((key, group))
    group, key, ns = group[order], key[order], ns[order]
    opens = np.ones(group.size, np.bool_)
    opens[1:] = (group[1:] != group[:-1]) | (key[1:] != key[:-1])
    at = np.flatnonzero(opens)
    return group[at], key[at], np.add.reduceat(ns, at)


def _remainders(share: Int, rest: np.ndarray, wanted: Int, whole: Int) -> Int:
    """Return what each entry gets on top so that the entries of each share add up to it."""
    given = np.bincount(share, weights=whole, minlength=wanted.size).astype(np.int64)
    missing = wanted - given
    order = np.lexsort((-rest, share))
    ranked = share[order]
    first = np.searchsorted(ranked, ranked)
    number = np.arange(ranked.size) - first
    count = np.bincount(share, minlength=wanted.size)
    more = np.zeros(share.size, np.int64)
    lacking = missing[ranked]
    # Floats may be off by more than one; the first of the largest remainders takes that too.
    extra = np.where(
        number == 0, np.sign(lacking) * np.maximum(np.abs(lacking) - count[ranked], 0), 0
    )
    more[order] = np.where(number < np.abs(lacking), np.sign(lacking), 0) + extra
    return more
