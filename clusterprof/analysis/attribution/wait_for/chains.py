"""Propagate blame along wait-for chains: A made B wait, therefore B made C wait.

If part of a wait is explained by an excess of *waiting in other operations*, this part belongs to
the culprits of those earlier waits of the late rank, in proportion. Shares are resolved batch by
batch: first those that depend on no propagated blame, then those that depend on these, and so on.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from clusterprof.analysis.attribution.wait_for.arrivals import ArrivalIndex
from clusterprof.analysis.attribution.wait_for.late_rank_excess import expand_ranges
from clusterprof.analysis.timeline.model import Float, Int

_TRUE = np.ones(1, np.bool_)


class BlameEntries(NamedTuple):
    """Blame of the waits of rows: n entries, sorted by row."""

    row: Int
    key: Int
    """Culprit and cause combined in one number."""
    ns: Int


class PropagatedShares(NamedTuple):
    """Shares of waits whose blame is to be propagated."""

    row: Int
    """Ascending."""
    ns: Int
    late: Int
    """Row of the late rank in the same operation."""
    since: Int
    """Row of the late rank in the operation that both ranks last left together; -1 = none:
    since its steps began.
    """


class BlameTable:
    """Blame entries by row, to which batches of propagated blame are added."""

    def __init__(self, entries: BlameEntries, rows: int) -> None:
        self._parts = [entries]
        self._rows = rows
        self._key, self._ns, self._size = entries.key, entries.ns, entries.row.size
        self._begin = self._end = np.zeros(0, np.int64)

    def build_index(self) -> None:
        """Build the index by row; required before entries are read or added."""
        # Twice as many as rows: the second half holds the propagated entries.
        count = np.bincount(self._parts[0].row, minlength=2 * self._rows)
        self._end = np.cumsum(count)
        self._begin = self._end - count

    def add(self, entries: BlameEntries, rows: Int, count: Int) -> None:
        """Add sorted entries for rows that had no propagated blame so far.

        count: number of entries of each row.
        """
        self._parts.append(entries)
        need = self._size + entries.row.size
        if need > self._key.size:
            self._key = _expand_buffer(self._key, self._size, 2 * need)
            self._ns = _expand_buffer(self._ns, self._size, 2 * need)
        self._key[self._size : need], self._ns[self._size : need] = entries.key, entries.ns
        rows = rows + self._rows
        self._end[rows] = end = self._size + count.cumsum()
        self._begin[rows] = end - count
        self._size = need

    def get_entries(self, rows: Int) -> tuple[Int, Int, Int]:
        """Return (index into rows, key, ns) of all entries of the rows."""
        slots = np.concatenate([rows, rows + self._rows])
        which, entry = expand_ranges(self._begin[slots], self._end[slots])
        return (
            np.where(which < rows.size, which, which - rows.size),
            self._key[entry],
            self._ns[entry],
        )

    def concat_entries(self) -> BlameEntries:
        """Return all entries, sorted by row."""
        if len(self._parts) == 1:
            return self._parts[0]
        row, key, ns = (np.concatenate(columns) for columns in zip(*self._parts))
        order = np.argsort(row, kind="stable")
        return BlameEntries(row[order], key[order], ns[order])


def _expand_buffer(values: Int, used: int, size: int) -> Int:
    out = np.empty(size, np.int64)
    out[:used] = values[:used]
    return out


def propagate_blame(
    index: ArrivalIndex,
    shares: PropagatedShares,
    blame_table: BlameTable,
    no_culprit: int,
    keys: int,
) -> None:
    """Propagate the shares to the culprits of the late rank's earlier waits, batch by batch.

    no_culprit: key of blame without a culprit. keys: upper bound of all keys.
    """
    if not shares.row.size:
        return
    blame_table.build_index()
    rank = index.rows.rank
    first = np.searchsorted(rank[index.by_rank], rank[shares.late])
    begin = np.where(shares.since < 0, first, index.position[shares.since] + 1)
    earlier_waits = _find_earlier_waits(index, shares, begin)
    end = np.maximum(index.left_before[shares.late] + 1, begin)
    position = index.position[shares.row] + 1
    pending = np.zeros(index.by_rank.size + 1, np.int64)
    pending[position] = 1
    remaining = np.arange(shares.row.size)
    while remaining.size:
        before = np.cumsum(pending)
        ready = before[end[remaining]] == before[begin[remaining]]
        if not ready.any():  # a cycle: asynchronous operations that were left in another order
            op = index.rows.op[shares.row[remaining]]
            ready = op == op.min()
        batch = remaining[ready]
        _propagate_batch(blame_table, shares, earlier_waits, batch, no_culprit, keys)
        pending[position[batch]] = 0
        remaining = remaining[~ready]


class _EarlierWaits(NamedTuple):
    """The earlier rows of the late ranks that each share is propagated to.

    Members of one operation mostly refer to the same range of rows of the same rank.
    """

    range_of_share: Int
    """Index of the row range of each share, ascending by operation."""
    first: Int
    """Where the rows of each range begin, and the end."""
    row: Int
    """Rows of these ranges that contain a wait."""


def _find_earlier_waits(index: ArrivalIndex, shares: PropagatedShares, begin: Int) -> _EarlierWaits:
    base = index.by_rank.size + 1
    codes, range_of_share = np.unique(shares.late * base + begin, return_inverse=True)
    number, position = expand_ranges(codes % base, index.left_before[codes // base] + 1)
    row = index.by_rank[position]
    waited = np.flatnonzero(index.rows.wait_ns[row] > 0)
    number, row = number[waited], row[waited]
    first = np.searchsorted(number, np.arange(codes.size + 1))
    return _EarlierWaits(range_of_share, first, row)


def _propagate_batch(
    blame_table: BlameTable,
    shares: PropagatedShares,
    earlier_waits: _EarlierWaits,
    batch: Int,
    no_culprit: int,
    keys: int,
) -> None:
    """Split a batch of shares among the blame entries of the late rank's earlier waits."""
    wanted, range_of_share = shares.ns[batch], earlier_waits.range_of_share[batch]
    used = np.zeros(earlier_waits.first.size - 1, np.bool_)
    used[range_of_share] = True
    used_ranges = np.flatnonzero(used)
    number = np.cumsum(used) - 1
    range_of_row, row_index = expand_ranges(
        earlier_waits.first[used_ranges], earlier_waits.first[used_ranges + 1]
    )
    which, key, ns = blame_table.get_entries(earlier_waits.row[row_index])
    range_index, key, ns = _sum_by_group(range_of_row[which], key, ns, keys)
    count = np.bincount(range_index, minlength=used_ranges.size)
    ratio = ns / np.bincount(range_index, weights=ns, minlength=used_ranges.size)[range_index]
    first = count.cumsum() - count
    of_batch = number[range_of_share]
    first, count = first[of_batch], count[of_batch]
    share, entry = expand_ranges(first, first + count)
    exact = wanted[share] * ratio[entry]
    whole_ns = exact.astype(np.int64)
    allocated = np.bincount(share, weights=whole_ns, minlength=wanted.size).astype(np.int64)
    short = (allocated != wanted) & (count > 0)
    if short.any():
        incomplete = np.flatnonzero(short[share])
        remainder = exact[incomplete] - whole_ns[incomplete]
        whole_ns[incomplete] += _allocate_remainders(
            share[incomplete], remainder, wanted - allocated
        )
    key = key[entry]
    if not count.all():
        empty = np.flatnonzero(count == 0)
        share = np.concatenate([share, empty])
        key = np.concatenate([key, np.full(empty.size, no_culprit)])
        whole_ns = np.concatenate([whole_ns, wanted[empty]])
        order = np.argsort(share, kind="stable")
        share, key, whole_ns = share[order], key[order], whole_ns[order]
    if not whole_ns.all():
        nonzero = np.flatnonzero(whole_ns)
        share, key, whole_ns = share[nonzero], key[nonzero], whole_ns[nonzero]
    rows = shares.row[batch]
    count = np.bincount(share, minlength=rows.size)
    blame_table.add(BlameEntries(rows[share], key, whole_ns), rows, count)


def _sum_by_group(group: Int, key: Int, ns: Int, keys: int) -> tuple[Int, Int, Int]:
    """Sum ns of entries with equal group and key; sorted by group and key."""
    if not group.size:
        return group, key, ns
    code = group * keys + key
    order = code.argsort(kind="stable")
    code = code[order]
    starts = np.ones(code.size, np.bool_)
    np.not_equal(code[1:], code[:-1], out=starts[1:])
    begins = np.flatnonzero(starts)
    code = code[begins]
    group = code // keys
    return group, code - group * keys, np.add.reduceat(ns[order], begins)


def _allocate_remainders(share: Int, remainder: Float, missing: Int) -> Int:
    """Return the correction of each entry so that the entries of each share add up to it.

    share is ascending, missing is by share; the entry with the largest remainder is corrected
    first.
    """
    out = np.zeros(share.size, np.int64)
    position = np.arange(share.size)
    while share.size:
        starts = np.flatnonzero(np.concatenate([_TRUE, share[1:] != share[:-1]]))
        size = np.diff(starts, append=share.size)
        largest = np.flatnonzero(remainder == np.maximum.reduceat(remainder, starts).repeat(size))
        share_of_largest = share[largest]
        largest = largest[np.concatenate([_TRUE, share_of_largest[1:] != share_of_largest[:-1]])]
        share_of_largest = share[largest]
        step = np.sign(missing[share_of_largest])
        out[position[largest]] += step
        remainder[largest] -= 2.0
        missing[share_of_largest] -= step
        incomplete = np.flatnonzero(missing[share])
        share, remainder, position = share[incomplete], remainder[incomplete], position[incomplete]
    return out
