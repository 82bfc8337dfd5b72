"""Puts the columns of a frame's blocks together again; the inverse of `columns`, with numpy.

Every number of a header is somebody's claim: sizes are checked before memory is taken.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.trace import columns as packing
from clusterprof.trace import frame
from clusterprof.trace.frame import Frame, FrameError, UnknownFrameError

_DTYPES = {packing.INT: np.dtype("<i8"), packing.FLOAT: np.dtype("<f8")}


def unpack_blocks(
    got: Frame, raw_bytes: int, unpacked_bytes: int, blocks: Sequence[frame.Block]
) -> list[NDArray[Any]]:
    """Return per block an array of shape (columns, rows); raise FrameError when it cannot be."""
    needs = {packing.PLANE_RAW: 0, packing.PLANE_PACKED: 0}
    for block in blocks:
        if block.columns < 1 or block.rows < 1 or not 0 <= block.lag <= block.rows:
            raise FrameError("a block without a shape")
        for rows, code in ((block.lag, block.firsts), (block.rows - block.lag, block.planes)):
            if not 0 <= code < 1 << 16:
                raise FrameError("planes that are stored in no known way")
            for stored in needs:
                planes = sum(code >> 2 * k & 3 == stored for k in range(packing.LANE_BYTES))
                needs[stored] += planes * block.columns * rows
    # The planes must be there in full, so what a frame may claim is bound to what it brings.
    if needs != {packing.PLANE_RAW: raw_bytes, packing.PLANE_PACKED: unpacked_bytes}:
        raise FrameError("the body is not as long as its planes")
    if values_of(blocks) * packing.LANE_BYTES > frame.MAX_UNPACKED_BYTES:
        raise FrameError("a frame that would not fit into memory")
    source = _Source(got, raw_bytes, unpacked_bytes)
    return [_unpack_block(source, block) for block in blocks]


def values_of(blocks: Sequence[frame.Block]) -> int:
    """Return how many values blocks unfold to."""
    return sum(block.columns * block.rows for block in blocks)


class _Source:
    """The two places a plane may come from."""

    def __init__(self, got: Frame, raw_bytes: int, unpacked_bytes: int) -> None:
        if raw_bytes > len(got.body):
            raise FrameError("the body is shorter than the header says")
        packed: bytes = got.body[raw_bytes:]
        if got.codec == frame.CODEC_ZLIB:
            inflate = zlib.decompressobj(-15)
            packed = inflate.decompress(packed, unpacked_bytes + 1)
        elif got.codec != frame.CODEC_NONE:
            raise UnknownFrameError(f"codec {got.codec}")
        if len(packed) != unpacked_bytes:
            raise FrameError("the body is not as long as the header says")
        self._raw = np.frombuffer(got.body, np.uint8, raw_bytes)
        self._packed = np.frombuffer(packed, np.uint8)
        self._raw_at = self._packed_at = 0

    def lanes(self, n: int, code: int) -> NDArray[np.uint64]:
        """Put n lanes together from their planes."""
        lanes = np.zeros((n, 8), np.uint8)
        for k in range(7, -1, -1):
            stored = code >> 2 * k & 3
            if stored == packing.PLANE_PACKED:
                lanes[:, k] = self._packed[self._packed_at : self._packed_at + n]
                self._packed_at += n
            elif stored == packing.PLANE_RAW:
                lanes[:, k] = self._raw[self._raw_at : self._raw_at + n]
                self._raw_at += n
            elif stored == packing.PLANE_AS_ABOVE:
                lanes[:, k] = lanes[:, k + 1]
        return lanes.view("<u8")[:, 0]


def _unpack_block(source: _Source, block: frame.Block) -> NDArray[Any]:
    dtype = _DTYPES[block.kind]
    firsts = source.lanes(block.columns * block.lag, block.firsts)
    rest = source.lanes(block.columns * (block.rows - block.lag), block.planes)
    if block.zigzag:
        rest = rest >> np.uint64(1) ^ (np.uint64(0) - (rest & np.uint64(1)))
    shape = (block.columns, block.rows)
    if not block.lag:
        return rest.reshape(shape).view(dtype)
    both = np.empty(shape, "<u8")
    both[:, : block.lag] = firsts.reshape(block.columns, block.lag)
    both[:, block.lag :] = rest.reshape(block.columns, block.rows - block.lag)
    join = np.bitwise_xor if block.kind == packing.FLOAT else np.add
    whole, left = divmod(block.rows, block.lag)
    if block.lag == 1:
        join.accumulate(both, axis=1, out=both)
    else:
        body = both[:, : whole * block.lag].reshape(block.columns, whole, block.lag)
        both[:, : whole * block.lag] = join.accumulate(body, axis=1).reshape(block.columns, -1)
        if left:
            tail = both[:, whole * block.lag :]
            join(tail, both[:, (whole - 1) * block.lag :][:, :left], out=tail)
    return both.view(dtype)
