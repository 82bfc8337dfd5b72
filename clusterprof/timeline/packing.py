"""Tables of int64 as few bytes: each row as steps from value to value, as narrow as they fit.

    100 130 160 191   ->   first 100, smallest step 30, the rest in one byte each: 0 0 1

A row whose steps are all alike costs nothing but its head. What does not fit is kept whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.timeline.model import Int

_WIDTHS = (1, 2, 4)
_HEAD = 2  # int64: rows, columns; then first, smallest step and width of each row


def packed(table: Int) -> bytes:
    """Return int64[r, n] as bytes; n >= 1."""
    r, n = table.shape
    steps = table[:, 1:] - table[:, :-1]
    low = steps.min(axis=1) if n > 1 else np.zeros(r, np.int64)
    span = steps.max(axis=1) - low if n > 1 else low
    width = np.select(
        [span == 0, *((span > 0) & (span < 1 << 8 * w) for w in _WIDTHS)], (0, 1, 2, 4), 8
    )
    low[width == 8] = 0
    head = np.concatenate([[r, n], table[:, 0], low, width]).astype(np.int64)
    parts = [head.tobytes()]
    for w in (*_WIDTHS, 8):
        some = np.flatnonzero(width == w)
        if some.size:
            parts.append((steps[some] - low[some, None]).astype(f"<u{w}").tobytes())
    return b"".join(parts)


def shape_of(data: bytes) -> tuple[int, int]:
    """Return (rows, columns) of a packed table."""
    r, n = np.frombuffer(data, np.int64, _HEAD).tolist()
    return r, n


def unpacked(data: bytes, out: Int | None = None) -> Int:
    """Return the table again; `out` int64[r, n] takes it when it is given."""
    r, n = shape_of(data)
    first, low, width = np.frombuffer(data, np.int64, 3 * r, 8 * _HEAD).reshape(3, r)
    table = np.empty((r, n), np.int64) if out is None else out
    table[:, 0] = first
    table[width == 0, 1:] = low[width == 0, None]
    at = 8 * (_HEAD + 3 * r)
    for w in (*_WIDTHS, 8):
        some = np.flatnonzero(width == w)
        if some.size:
            count = some.size * (n - 1)
            steps: NDArray[np.unsignedinteger] = np.frombuffer(data, f"<u{w}", count, at)
            table[some, 1:] = (
                steps.reshape(some.size, n - 1).view(f"<u{w}").astype(np.int64) + low[some, None]
            )
            at += count * w
    np.cumsum(table, axis=1, out=table)
    return table
