"""State of the blame at a cut of the run (analysis.timeline.collectives.cuts).

All ranks left the operation of the cut before they arrived at a later one. So two ranks are
compared since that operation or a later one, and no chain of waits goes back beyond it. Three
things do: a rank's previous operation in each process group, its number, and the usual work of
each rank, which it shows in the first operations of a group. The first two are read again from the
context, the operations before the cut. The usual work is carried from slice to slice:

    rank, process group, segments, work, early work       int64[5, n], sorted by group and rank
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clusterprof.analysis.attribution.wait_for.arrivals import (
    MAX_LOOK_BACK_OPERATIONS,
    append_block_rows,
    find_shortest_durations,
    make_empty_rows,
)
from clusterprof.analysis.attribution.wait_for.blame import BlameCarryOver
from clusterprof.analysis.attribution.wait_for.chains import BlameEntries
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.analysis.timeline.model import Int

LOOK_BACK_ROWS = MAX_LOOK_BACK_OPERATIONS
"""Rows of a rank, the cut included, that its next operation can look back to."""
NO_USUAL_WORK = np.zeros((5, 0), np.int64)
"""Usual work before the first slice."""


def begin_carry_over(
    ops: Operations, at_arrive: Int, at_leave: Int, ordinal: Int, usual_work: Int
) -> BlameCarryOver:
    """Begin the blame of a slice with its context, the operation of the cut being its last.

    at_arrive, at_leave: int64[n, K], ns. ordinal: int64[n], number of each row among those of
    its rank. usual_work: int64[5, m], that of the slice before.
    """
    rows = append_block_rows(
        make_empty_rows(at_arrive.shape[1]),
        ops,
        0,
        at_arrive,
        at_leave,
        find_shortest_durations(ops),
    )
    pair_index = _find_pairs(usual_work[1], usual_work[0], rows.group, rows.rank)
    segments, work_ns, early_ns = np.append(usual_work[2:], np.zeros((3, 1), np.int64), axis=1)[
        :, pair_index
    ]
    rows = replace(
        rows, ordinal=ordinal, segments=segments, usual_work_ns=work_ns, early_work_ns=early_ns
    )
    empty = np.zeros(0, np.int64)
    first = int(ordinal[ops.first[-2] :].min())
    return BlameCarryOver(rows, BlameEntries(empty, empty, empty), ops.process_group.size, first)


def _find_pairs(group: Int, rank: Int, wanted_group: Int, wanted_rank: Int) -> Int:
    """Return the position of each wanted pair among sorted pairs, or their number: int64[n]."""
    label = np.unique(np.append(group, wanted_group), return_inverse=True)[1]
    ranks = int(max(rank.max(initial=0), wanted_rank.max(initial=0))) + 1
    key = label[: group.size] * ranks + rank
    wanted = label[group.size :] * ranks + wanted_rank
    position = np.searchsorted(key, wanted)
    is_present = position < key.size
    is_present[is_present] = key[position[is_present]] == wanted[is_present]
    return np.where(is_present, position, key.size)


def select_usual_work(carry_over: BlameCarryOver) -> Int:
    """Select the usual work of the ranks at the end of a slice, int64[5, n]."""
    rows = carry_over.rows
    return _select_last(
        np.stack([rows.rank, rows.group, rows.segments, rows.usual_work_ns, rows.early_work_ns])
    )


def merge_usual_work(earlier: Int, later: Int) -> Int:
    """Return the usual work after a slice: that before it as far as it was not replaced.

    earlier, later: int64[5, n] and int64[5, m]. Pairs without segments are left out.
    """
    merged = _select_last(np.concatenate([earlier, later], axis=1))
    return merged[:, merged[2:].any(axis=0)]


def _select_last(table: Int) -> Int:
    """Return the last column of each group and rank, sorted by these."""
    table = table[:, np.lexsort((table[0], table[1]))]
    last = (np.diff(table[:2], axis=1, append=table[:2, :1] * 0 - 1) != 0).any(axis=0)
    return table[:, last]
