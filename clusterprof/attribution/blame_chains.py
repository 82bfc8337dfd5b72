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

from clusterprof.attribution.blame_excess import ranges
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
        """Add entries of `rows`, which had none handed on so far; sorted by row, `count` of each."""
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
    windows = _windows(look, handed)
    for begin, end in _batches(look, handed):
        _one_batch(ledger, handed, windows, (begin, end), nobody, keys)


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
    number: Int
    """Stretch of each of them."""


def _windows(look: Lookup, handed: Handed) -> _Windows:
    base = look.by_rank.size + 1
    code = handed.awaited * base + look.place[handed.since]
    codes, of_share = np.unique(code, return_inverse=True)
    begin = codes % base + 1
    number, place = ranges(begin, look.before[codes // base] + 1)
    row = look.by_rank[place]
    waited = np.flatnonzero(look.rows.wait_ns[row] > 0)
    number, row = number[waited], row[waited]
    first = np.searchsorted(number, np.arange(codes.size + 1))
    return _Windows(of_share, first, row, number)


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


def _one_batch(
    ledger: Ledger,
    handed: Handed,
    windows: _Windows,
    part: tuple[int, int],
    nobody: int,
    keys: int,
) -> None:
    """Share each handed amount among the charges of the awaited rank's waits since."""
    begin, end = part
    wanted, of_share = handed.ns[begin:end], windows.of_share[begin:end]
    low, high = int(of_share.min()), int(of_share.max()) + 1
    some = slice(int(windows.first[low]), int(windows.first[high]))
    which, key, ns = ledger.of(windows.row[some])
    window, key, ns = _summed((windows.number[some] - low)[which], key, ns, keys)
    count = np.bincount(window, minlength=high - low)
    ratio = ns / np.bincount(window, weights=ns, minlength=high - low)[window]
    first = count.cumsum() - count
    mine = of_share - low
    first, count = first[mine], count[mine]
    share, entry = ranges(first, first + count)
    exact = wanted[share] * ratio[entry]
    whole = exact.astype(np.int64)
    given = np.bincount(share, weights=whole, minlength=wanted.size).astype(np.int64)
    short = (given != wanted) & (count > 0)
    if short.any():
        ask = np.flatnonzero(short[share])
        rest = exact[ask] - whole[ask]
        whole[ask] += _remainders(share[ask], rest, wanted - given, count)
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
    rows = handed.row[begin:end]
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


def _remainders(share: Int, rest: np.ndarray, missing: Int, count: Int) -> Int:
    """Return what each entry gets on top so that the entries of each share add up to it.

    `share` is ascending; `missing` and `count`, the number of entries, are those of each share.
    """
    order = np.lexsort((-rest, share))
    ranked = share[order]
    opens = np.flatnonzero(np.append(True, ranked[1:] != ranked[:-1]))
    number = np.arange(ranked.size) - np.repeat(opens, np.diff(np.append(opens, ranked.size)))
    lacking = missing[ranked]
    more = np.zeros(share.size, np.int64)
    # Floats may be off by more than one; the first of the largest remainders takes that too.
    extra = np.where(
        number == 0, np.sign(lacking) * np.maximum(np.abs(lacking) - count[ranked], 0), 0
    )
    more[order] = np.where(number < np.abs(lacking), np.sign(lacking), 0) + extra
    return more
