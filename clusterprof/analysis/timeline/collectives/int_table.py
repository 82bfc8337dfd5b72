"""Pack int64 tables: each row as steps between values, in as few bytes as they need.

    100 130 160 191   ->   first 100, smallest step 30, the rest in one byte each: 0 0 1

A row with equal steps costs only its header. A row that does not fit is stored in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.model import Int

_WIDTHS = (1, 2, 4)
# A range that is negative has overflowed.
_RANGES = np.array([0, 1, *(1 << 8 * w for w in _WIDTHS)], np.int64)
_WIDTH_BY_RANGE = np.array([8, 0, *_WIDTHS, 8], np.int64)
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
    width = _WIDTH_BY_RANGE[np.searchsorted(_RANGES, step_range, side="right")]
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
    return unpack_tables([data])[0]


def read_table_layout(data: bytes) -> bytes:
    """Read what tables must have in common to be unpacked together: shape, width of each row."""
    r, _ = read_table_shape(data)
    return data[: 8 * _HEAD] + data[8 * (_HEAD + 2 * r) : 8 * (_HEAD + 3 * r)]


def unpack_tables(tables: Sequence[bytes]) -> Int:
    """Unpack tables of equal layout (read_table_layout) at once, int64[tables, r, n]."""
    r, n = read_table_shape(tables[0])
    packed = np.frombuffer(b"".join(tables), np.uint8).reshape(len(tables), -1)
    offset = 8 * (_HEAD + 3 * r)
    head = packed[:, 8 * _HEAD : offset].copy().view(np.int64).reshape(-1, 3, r)
    first, low, width = head[:, 0], head[:, 1, :, None], head[0, 2].tolist()
    out = np.empty((len(tables), r, n), np.int64)
    out[:, :, 0] = first
    out[:, :, 1:] = low  # of rows in full it is 0
    for w in (*_WIDTHS, 8):
        rows = [row for row, delta in enumerate(width) if delta == w]
        if rows:
            size = len(rows) * (n - 1) * w
            steps: NDArray[np.unsignedinteger] = (
                packed[:, offset : offset + size].copy().view(f"<u{w}")
            )
            for row, delta in zip(rows, steps.reshape(len(tables), len(rows), -1).swapaxes(0, 1)):
                out[:, row, 1:] += delta.view(np.int64) if w == 8 else delta
            offset += size
    np.cumsum(out, axis=2, out=out)
    return out
