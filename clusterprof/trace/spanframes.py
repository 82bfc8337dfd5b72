"""Frames of spans as they stand in the recording, to be unfolded many at a time.

A frame holds a second of all processes, a chunk of analysis a minute of frames: unfolding frame by
frame would cost more for the calls than for the spans. What could be wrong with a frame is checked
when it is read; here nothing is left that can fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.trace import frame
from clusterprof.trace.schema import SPAN_FIELDS
from clusterprof.trace.unpack import Lanes, Planes


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """All the spans of one frame, still folded."""

    parts: Sequence[frame.SpansPart]
    """Whose spans they are: `rows` of each part, one part after the other."""
    rows: int
    base_ns: int
    constants: Sequence[tuple[int, int]]
    """(row of SPAN_FIELDS, its only value)."""
    blocks: Sequence[tuple[int, frame.Block]]
    """(row of SPAN_FIELDS, block); in rows 0 and 1 stand gap and duration."""
    planes: Planes


def packed_spans(header: frame.SpansHeader, planes: Planes) -> PackedSpans | None:
    """Return a frame as it stands; None when it is not one that our writer could have made."""
    rows = 0
    for part in header.parts:
        if part.rows < 0:
            return None
        rows += part.rows
    varying, constants = _rows_of(tuple([name in header.constants for name in SPAN_FIELDS]))
    usual = (
        rows > 0
        and len(header.blocks) == len(varying)
        and varying[:2] == (0, 1)  # no start, no end that is always the same
        and all([b.columns == 1 and b.rows == rows and not b.lag for b in header.blocks])
    )
    if not usual:
        return None
    values = [(row, header.constants[SPAN_FIELDS[row]]) for row in constants]
    if not all([-(1 << 63) <= value < 1 << 63 for _, value in values]):
        return None
    blocks = list(zip(varying, header.blocks))
    return PackedSpans(header.parts, rows, header.base_ns, values, blocks, planes)


@lru_cache(maxsize=128)  # of the 7 fields each may be constant or not
def _rows_of(constant: tuple[bool, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows of SPAN_FIELDS that vary in a frame and those that do not."""
    rows = range(len(SPAN_FIELDS))
    return tuple(r for r in rows if not constant[r]), tuple(r for r in rows if constant[r])


def unfold(frames: Sequence[PackedSpans], table: NDArray[np.int64]) -> None:
    """Write the fields of all spans, frame after frame, into int64[7, sum of rows].

    Each row of the table must lie in memory without gaps.
    """
    lanes = [Lanes() for _ in table]
    constant: list[tuple[int, int, int, int]] = []
    past = 0
    for one in frames:
        first, past = past, past + one.rows
        one.planes.rewind()
        for row, value in one.constants:
            lanes[row].skip(one.rows)
            if value:
                constant.append((row, first, past, value))
        for row, block in one.blocks:
            lanes[row].add(one.planes, one.rows, block.planes, block.zigzag)
    for row, some in zip(table.view(np.uint64), lanes):
        some.into(row)
    for number, first, past, value in constant:
        table[number, first:past] = value
    _edges(frames, table[0].view(np.uint64), table[1].view(np.uint64))


def _edges(frames: Sequence[PackedSpans], gap: NDArray[Any], duration: NDArray[Any]) -> None:
    """Make starts and ends of gaps and durations: running sums, modulo 2**64, anew per frame."""
    if not frames:
        return
    sizes = [one.rows for one in frames]
    bases = np.array([one.base_ns & (1 << 64) - 1 for one in frames], np.uint64)
    end = np.cumsum(gap + duration, dtype=np.uint64)
    before = np.zeros(len(frames), np.uint64)
    before[1:] = end[np.cumsum(sizes, dtype=np.int64)[:-1] - 1]
    end += np.repeat(bases - before, sizes)
    np.subtract(end, duration, out=gap)
    duration[:] = end
