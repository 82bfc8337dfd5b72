"""Steps that ranks do not end together, put together until they do.

A host that runs ahead of its device ends a step before the device does, one whose data are late
ends it when these have come. So what a rank did wrong and the wait of the others for it may lie in
steps of different numbers. When all end a step together again, both lie behind:

    ends of steps    rank 0   |----|----|----|----|----|
                     rank 1   |----|----|--------|--|--|      its data are late in the third
    operations                |    |    |           |  |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.attribution.frontier import GROUP
from clusterprof.engine.spill import Reader
from clusterprof.engine.synchronous import APART_NS, APART_RATIO, AROUND
from clusterprof.probe import layout
from clusterprof.timeline.model import Int
from clusterprof.timeline.operation_rows import (
    ARRIVE,
    HEAD_ROWS,
    SEQUENCE,
    STAY,
    RankOperations,
    RankRows,
    Store,
    read_block,
)

MOST_STEPS = 16
"""So many are put together at most: in more, several ranks may have been late for each other."""


def ends_of(operations: RankOperations, reader: Reader) -> tuple[Int, Int, Int]:
    """Number and end of all steps of a rank, by number, and the time waited in each."""
    parts = [np.zeros((3, 0), np.int64)]
    for block in operations.blocks:
        kinds = max((int(c) for c in (*block.come, *block.go)), default=-1) + 1
        rows = np.zeros((HEAD_ROWS + 2 * kinds, block.rows), np.int64)
        read_block(reader.get(block.place, block.length), block, np.arange(kinds), rows)
        parts.append(np.stack([rows[SEQUENCE], rows[ARRIVE] + rows[STAY], rows[STAY]]))
    number, end, stay = np.concatenate(parts, axis=1)
    number, first = np.unique(number, return_index=True)
    return number, end[first], stay[first]


def together_at(ends: Sequence[tuple[Int, Int]]) -> Int:
    """Return the numbers of the steps that all ranks end together; number and end of each rank's.

    No more than `MOST_STEPS` apart, and the last that all have is one.
    """
    numbers = ends[0][0]
    for own, _ in ends[1:]:
        numbers = np.intersect1d(numbers, own)
    table = np.stack([end[np.searchsorted(number, numbers)] for number, end in ends])
    step_ns = float(np.median(np.diff(table[0]))) if numbers.size > 1 else 0.0
    apart = table - table[0]
    for at in range(0, numbers.size, AROUND):
        part = apart[:, at : at + AROUND]
        part -= np.median(part, axis=1).astype(np.int64)[:, None]
    spread = apart.max(axis=0) - apart.min(axis=0)
    good = spread <= max(APART_NS, APART_RATIO * step_ns)
    good[-1:] = True
    found, last = [], -1
    for at in np.flatnonzero(good).tolist():
        found += [*range(last + MOST_STEPS, at, MOST_STEPS), at]
        last = at
    return numbers[np.array(found, np.int64)]


def steady(steps: Sequence[tuple[Int, Int, Int]]) -> int:
    """Return for how long all ranks waited alike in every step, all steps together.

    `steps`: number, end, and time waited of each rank's. Synchronous ranks meet in every step, and
    moving data takes about equally long in each: what is more than twice the usual is not counted.
    """
    numbers = steps[0][0]
    for own, _, _ in steps[1:]:
        numbers = np.intersect1d(numbers, own)
    waited = np.stack([stay[np.searchsorted(own, numbers)] for own, _, stay in steps])
    least = waited.min(axis=0)
    return int(np.minimum(least, 2 * int(np.median(least))).sum()) if numbers.size else 0


def merged(
    operations: RankOperations, numbers: Int, reader: Reader, store: Store
) -> RankOperations:
    """Return the steps of a rank put together up to each of some numbers, all waits at the end.

    What lies behind the last of them, or ends without the step of that number, is left out.
    """
    used = [int(c) for block in operations.blocks for c in (*block.come, *block.go)]
    categories = max(used, default=-1) + 1
    parts = []
    for block in operations.blocks:
        rows = np.zeros((HEAD_ROWS + 2 * categories, block.rows), np.int64)
        data = reader.get(block.place, block.length)
        read_block(data, block, np.arange(categories), rows)
        parts.append(rows[: HEAD_ROWS + categories])
    if not parts:
        return operations
    rows = np.concatenate(parts, axis=1)
    upto = np.searchsorted(numbers, rows[SEQUENCE])
    before = np.concatenate([[0], np.cumsum(rows[STAY])])
    last = np.flatnonzero(np.append(np.diff(upto) != 0, True))
    stay = np.diff(before[last + 1], prepend=0)
    whole = upto[last] < numbers.size
    whole[whole] = rows[SEQUENCE, last[whole]] == numbers[upto[last[whole]]]
    last, stay = last[whole], stay[whole]
    end = rows[ARRIVE, last] + rows[STAY, last]
    alike = np.ones_like(end)
    table = np.stack([
        end - stay, end, GROUP * alike, rows[SEQUENCE, last], -alike,
        layout.OTHER_OPERATION * alike, stay,
    ])  # fmt: skip
    spent = rows[HEAD_ROWS:, last]
    out = RankRows(store)
    out.add(table, spent, spent)
    found = out.finish()
    return operations if found is None else found
