"""Puts the columns of a frame's blocks together again; the inverse of `columns`, with numpy.

Every number of a header is somebody's claim: sizes are checked before memory is taken.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.trace import columns as packing
from clusterprof.trace import frame
from clusterprof.trace.frame import Frame, FrameError, UnknownFrameError

_DTYPES = {packing.INT: np.dtype("<i8"), packing.FLOAT: np.dtype("<f8")}


def opened(
    got: Frame, raw_bytes: int, unpacked_bytes: int, blocks: Sequence[frame.Block]
) -> Planes:
    """Return the planes of a frame; raise FrameError when its blocks cannot be made of them."""
    raw = packed = values = 0
    for block in blocks:
        columns, rows, lag = block.columns, block.rows, block.lag
        if columns < 1 or rows < 1 or not 0 <= lag <= rows:
            raise FrameError("a block without a shape")
        values += columns * rows
        for lanes, code in ((lag, block.firsts), (rows - lag, block.planes)):
            if not 0 <= code < packing.PLANE_AS_ABOVE << 14:  # nothing is above the uppermost
                raise FrameError("planes that are stored in no known way")
            if code and lanes:
                of_raw, of_packed, _ = _stored(code)
                raw += of_raw * columns * lanes
                packed += of_packed * columns * lanes
    # The planes must be there in full, so what a frame may claim is bound to what it brings.
    if raw != raw_bytes or packed != unpacked_bytes:
        raise FrameError("the body is not as long as its planes")
    if values * packing.LANE_BYTES > frame.MAX_UNPACKED_BYTES:
        raise FrameError("a frame that would not fit into memory")
    return Planes(got, raw_bytes, unpacked_bytes)


def values_of(blocks: Sequence[frame.Block]) -> int:
    """Return how many values blocks unfold to."""
    return sum([block.columns * block.rows for block in blocks])


@lru_cache(maxsize=1024)
def _stored(code: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """How many planes are raw and packed, and (plane, how it is stored), those of zeros left out,
    from the top."""
    ways = tuple(
        (k, code >> 2 * k & 3) for k in range(packing.LANE_BYTES - 1, -1, -1) if code >> 2 * k & 3
    )
    stored = [how for _, how in ways]
    return stored.count(packing.PLANE_RAW), stored.count(packing.PLANE_PACKED), ways


class Planes:
    """The two places a plane may come from; each is taken once, in the order of the blocks."""

    __slots__ = ("_packed", "_packed_at", "_raw", "_raw_at")

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
        self._raw = np.frombuffer(got.body[:raw_bytes], np.uint8)
        self._packed = np.frombuffer(packed, np.uint8)
        self.rewind()

    def rewind(self) -> None:
        """Begin again with the first block."""
        self._raw_at = self._packed_at = 0

    def into(self, lanes: NDArray[np.uint8], code: int) -> None:
        """Put lanes together from their planes, in uint8[n, 8] of zeros."""
        n = len(lanes)
        if not code or not n:
            return
        at = self._packed_at
        for k, stored in _stored(code)[2]:
            if stored == packing.PLANE_PACKED:
                lanes[:, k] = self._packed[at : at + n]
                at += n
            elif stored == packing.PLANE_RAW:
                lanes[:, k] = self._raw[self._raw_at : self._raw_at + n]
                self._raw_at += n
            else:
                lanes[:, k] = lanes[:, k + 1]
        self._packed_at = at

    def lanes(self, n: int, code: int) -> NDArray[np.uint64]:
        """Put n lanes together from their planes."""
        lanes = np.zeros(n, "<u8")
        self.into(lanes.view(np.uint8).reshape(n, packing.LANE_BYTES), code)
        return lanes


def unpack_block(source: Planes, block: frame.Block) -> NDArray[Any]:
    """Return the next block of a frame, an array of shape (columns, rows)."""
    dtype = _DTYPES[block.kind]
    columns, rows, lag = block.columns, block.rows, block.lag
    firsts = source.lanes(columns * lag, block.firsts)
    rest = source.lanes(columns * (rows - lag), block.planes)
    if block.zigzag:
        unfold(rest)
    if not lag:
        return rest.reshape(columns, rows).view(dtype)
    both = np.empty((columns, rows), "<u8")
    both[:, :lag] = firsts.reshape(columns, lag)
    both[:, lag:] = rest.reshape(columns, rows - lag)
    join = np.bitwise_xor if block.kind == packing.FLOAT else np.add
    if lag == 1:
        join.accumulate(both, axis=1, out=both)
        return both.view(dtype)
    whole, left = divmod(rows, lag)
    body = both[:, : whole * lag].reshape(columns, whole, lag)
    both[:, : whole * lag] = join.accumulate(body, axis=1).reshape(columns, -1)
    if left:
        tail = both[:, whole * lag :]
        join(tail, both[:, (whole - 1) * lag :][:, :left], out=tail)
    return both.view(dtype)


def unfold(lanes: NDArray[np.uint64]) -> None:
    """Undo `columns.fold` in place: 1, 2, 3, 4 … become -1, 1, -2, 2, as uint64."""
    sign = lanes & _ONE
    np.negative(sign, out=sign)
    lanes >>= _ONE
    lanes ^= sign


_ONE = np.uint64(1)
