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
    """Read one block, as `read_blocks`."""
    read_blocks([(data, block)], slot, [out])


def read_blocks(blocks: Sequence[tuple[bytes, Block]], slot: Int, outs: Sequence[Int]) -> None:
    """Read blocks into tables: their rows, time spent at arrival and at leave.

    slot: int64[categories], the row offset of each category. outs: int64[7 + 2 * slots, n], one
    for each block. Blocks of many ranks are alike, and read together.
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
            for at, table in zip(chosen, _spread_categories(tables, block, slot, height)):
                outs[at][:] = table


def _spread_categories(tables: Int, block: Block, slot: Int, height: int) -> Int:
    """Return the rows of blocks, int64[blocks, height, n], from int64[blocks, r, n] as packed."""
    middle = (height - HEAD_ROWS) // 2 + HEAD_ROWS
    arrive_end = block.arrive_categories.size + HEAD_ROWS
    out = np.zeros((len(tables), height, tables.shape[2]), np.int64)
    out[:, :HEAD_ROWS] = tables[:, :HEAD_ROWS]
    for at, row in enumerate(slot[block.arrive_categories].tolist(), HEAD_ROWS):
        out[:, HEAD_ROWS + row] = out[:, middle + row] = tables[:, at]
    for at, row in enumerate(slot[block.leave_categories].tolist(), arrive_end):
        out[:, middle + row] += tables[:, at]
    return out
