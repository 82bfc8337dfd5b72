"""Pack int64 tables: each row as steps between values, in as few bytes as they need.

    100 130 160 191   ->   first 100, smallest step 30, the rest in one byte each: 0 0 1

A row with equal steps costs only its header. A row that does not fit is stored in full.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.model import Int

_WIDTHS = (1, 2, 4)
_HEAD = 2  # int64: rows, columns; then first, smallest step and width of each row


@dataclass(frozen=True, slots=True)
class PackedTable:
    """A table of int64 that is kept for many ranks and seldom read."""

    rows: int
    data: bytes
    """Its columns, packed; empty without any."""

    def unpack(self) -> Int:
        """Return the table, int64[rows, n]."""
        return unpack_table(self.data) if self.data else np.zeros((self.rows, 0), np.int64)


def keep_packed(table: Int) -> PackedTable:
    """Pack int64[r, n] to keep it in few bytes."""
    return PackedTable(len(table), pack_table(table) if table.shape[1] else b"")


def pack_table(table: Int) -> bytes:
    """Pack int64[r, n], n >= 1, into bytes."""
    r, n = table.shape
    steps = table[:, 1:] - table[:, :-1]
    low = steps.min(axis=1) if n > 1 else np.zeros(r, np.int64)
    step_range = steps.max(axis=1) - low if n > 1 else low
    width = np.select(
        [step_range == 0, *((step_range > 0) & (step_range < 1 << 8 * w) for w in _WIDTHS)],
        (0, 1, 2, 4),
        8,
    )
    low[width == 8] = 0
    head = np.concatenate([[r, n], table[:, 0], low, width]).astype(np.int64)
    parts = [head.tobytes()]
    for w in (*_WIDTHS, 8):
        rows = np.flatnonzero(width == w)
        if rows.size:
            parts.append((steps[rows] - low[rows, None]).astype(f"<u{w}").tobytes())
    return b"".join(parts)


def read_table_shape(data: bytes) -> tuple[int, int]:
    """Read (rows, columns) of a packed table."""
    r, n = np.frombuffer(data, np.int64, _HEAD).tolist()
    return r, n


def unpack_table(data: bytes) -> Int:
    """Unpack a table, int64[r, n]."""
    r, n = read_table_shape(data)
    first, low, width = np.frombuffer(data, np.int64, 3 * r, 8 * _HEAD).reshape(3, r)
    table = np.empty((r, n), np.int64)
    table[:, 0] = first
    table[width == 0, 1:] = low[width == 0, None]
    offset = 8 * (_HEAD + 3 * r)
    for w in (*_WIDTHS, 8):
        rows = np.flatnonzero(width == w)
        if rows.size:
            count = rows.size * (n - 1)
            steps: NDArray[np.unsignedinteger] = np.frombuffer(data, f"<u{w}", count, offset)
            table[rows, 1:] = (
                steps.reshape(rows.size, n - 1).view(f"<u{w}").astype(np.int64) + low[rows, None]
            )
            offset += count * w
    np.cumsum(table, axis=1, out=table)
    return table
