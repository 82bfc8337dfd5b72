"""Read the blocks of operations back that `RankRowBuilder` has stored.

    blocks of many ranks ──> those of equal layout together ──> tables of all ranks

In a large job the blocks are short, and a call for each would take longer than its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.analysis.timeline.collectives.int_table import read_table_layout, unpack_tables
from clusterprof.analysis.timeline.collectives.rows import HEAD_ROWS, Block
from clusterprof.analysis.timeline.model import Int

_MAX_BLOCKS_AT_ONCE = 64
"""Blocks that are unpacked together: their tables stay in the CPU caches."""


def read_block(data: bytes, block: Block, slot: Int, out: Int) -> None:
    """Read one block into a table: its rows, time spent at arrival and at leave.

    out: int64[7 + 2 * slots, n]. slot: int64[categories], the row offset of each category.
    """
    read_blocks([(data, block)], slot, np.arange((len(out) - HEAD_ROWS) // 2), [out])


def read_blocks(
    blocks: Sequence[tuple[bytes, Block]], slot: Int, grown: Int, outs: Sequence[Int]
) -> None:
    """Read blocks of many ranks into tables: rows, time spent at arrival, then at leave.

    slot: int64[categories], the row offset of each category. grown: int64[m], ascending, the slots
    in which ranks spend time in operations: of the others the time at leave is that at arrival.
    outs: int64[7 + slots + m, n], one for each block.
    """
    alike: dict[tuple[bytes, ...], list[int]] = {}
    for at, (data, block) in enumerate(blocks):
        categories = block.arrive_categories.tobytes(), block.leave_categories.tobytes()
        alike.setdefault((read_table_layout(data), *categories), []).append(at)
    for numbers in alike.values():
        for begin in range(0, len(numbers), _MAX_BLOCKS_AT_ONCE):
            chosen = numbers[begin : begin + _MAX_BLOCKS_AT_ONCE]
            tables = unpack_tables([blocks[at][0] for at in chosen])
            block, height = blocks[chosen[0]][1], len(outs[chosen[0]])
            for at, table in zip(chosen, _spread_categories(tables, block, slot, grown, height)):
                outs[at][:] = table


def _spread_categories(tables: Int, block: Block, slot: Int, grown: Int, height: int) -> Int:
    """Return the rows of blocks, int64[blocks, height, n], from int64[blocks, r, n] as packed."""
    out = np.zeros((len(tables), height, tables.shape[2]), np.int64)
    out[:, :HEAD_ROWS] = tables[:, :HEAD_ROWS]
    for at, row in enumerate(slot[block.arrive_categories].tolist(), HEAD_ROWS):
        out[:, HEAD_ROWS + row] = tables[:, at]
    leave = height - grown.size
    for at, row in enumerate(grown.tolist(), leave):
        out[:, at] = out[:, HEAD_ROWS + row]
    increases = np.searchsorted(grown, slot[block.leave_categories])
    arrive_end = block.arrive_categories.size + HEAD_ROWS
    for at, row in enumerate(increases.tolist(), arrive_end):
        out[:, leave + row] += tables[:, at]
    return out
