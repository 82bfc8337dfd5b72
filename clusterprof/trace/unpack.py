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

_MANY = 64  # rows that are worth a call each
_DTYPES = {packing.INT: np.dtype("<i8"), packing.FLOAT: np.dtype("<f8")}


def opened(
    got: Frame, raw_bytes: int, unpacked_bytes: int, blocks: Sequence[frame.Block]
) -> Planes:
    """Return the planes of a frame; raise FrameError when its blocks cannot be made of them."""
    raw = packed = values = 0
    for block in blocks:
        columns, rows, lag = block.columns, block.rows, block.lag
        if block.kind not in _DTYPES or columns < 1 or rows < 1 or not 0 <= lag <= rows:
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
    ways: list[tuple[int, int]] = []
    for k in range(packing.LANE_BYTES - 1, -1, -1):
        stored = code >> 2 * k & 3
        of_zeros = stored == packing.PLANE_AS_ABOVE and (not ways or ways[-1][0] != k + 1)
        if stored != packing.PLANE_ZERO and not of_zeros:
            ways.append((k, stored))
    every = [stored for _, stored in ways]
    return every.count(packing.PLANE_RAW), every.count(packing.PLANE_PACKED), tuple(ways)


class Planes:
    """The two places a plane may come from; each is taken once, in the order of the blocks."""

    __slots__ = ("packed", "packed_at", "raw", "raw_at")

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
        self.raw = got.body[:raw_bytes]
        self.packed = packed
        self.rewind()

    def rewind(self) -> None:
        """Begin again with the first block."""
        self.raw_at = self.packed_at = 0

    def some(self, lanes: int, code: int, which: range) -> list[int]:
        """Return some of the next lanes, and pass over all of them."""
        if not lanes or not which:
            self.pass_over(lanes, code)
            return [0] * len(which)
        out = bytearray(packing.LANE_BYTES * len(which))
        plane = b""
        for k, stored in _stored(code)[2]:
            if stored == packing.PLANE_PACKED:
                at = self.packed_at
                plane = self.packed[at + which.start : at + which.stop : which.step]
                self.packed_at = at + lanes
            elif stored == packing.PLANE_RAW:
                at = self.raw_at
                plane = self.raw[at + which.start : at + which.stop : which.step]
                self.raw_at = at + lanes
            out[k :: packing.LANE_BYTES] = plane
        return memoryview(out).cast("Q").tolist()

    def pass_over(self, lanes: int, code: int) -> None:
        """Leave out the next lanes."""
        raw, packed, _ = _stored(code)
        self.raw_at += raw * lanes
        self.packed_at += packed * lanes


class Lanes:
    """Lanes of many frames behind each other, of which only the planes are there yet.

    A frame is short: to put its lanes together on its own costs more for the calls than for them.
    """

    __slots__ = ("_folded", "_parts", "_past", "size")

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[list[bytes]] = [[] for _ in range(packing.LANE_BYTES)]
        self._past = [0] * packing.LANE_BYTES  # how far each plane goes
        self._folded: list[tuple[int, int]] = []

    def add(self, source: Planes, lanes: int, code: int, zigzag: int = 0) -> None:
        """Take the next planes of a frame."""
        if not lanes:
            return
        first = self.size
        self.size = past = first + lanes
        for k, stored in _stored(code)[2]:
            if stored == packing.PLANE_PACKED:
                at = source.packed_at
                source.packed_at = end = at + lanes
                plane = source.packed[at:end]
            elif stored == packing.PLANE_RAW:
                at = source.raw_at
                source.raw_at = end = at + lanes
                plane = source.raw[at:end]
            parts = self._parts[k]  # else the plane is the one above it
            if self._past[k] != first:
                parts.append(bytes(first - self._past[k]))
            parts.append(plane)
            self._past[k] = past
        if zigzag:
            folded = self._folded
            if folded and folded[-1][1] == first:
                folded[-1] = folded[-1][0], past
            else:
                folded.append((first, past))

    def skip(self, lanes: int) -> None:
        """Leave some lanes 0."""
        self.size += lanes

    def into(self, out: NDArray[np.uint64]) -> None:
        """Put the lanes together in uint64[size], which must lie in memory without gaps."""
        if min(self._past) < self.size:
            out[...] = 0
        lanes = out.view(np.uint8).reshape(-1, packing.LANE_BYTES)
        for k, parts in enumerate(self._parts):
            if parts:
                lanes[: self._past[k], k] = np.frombuffer(b"".join(parts), np.uint8)
        for first, past in self._folded:
            unfold(out[first:past])

    def joined(self) -> NDArray[np.uint64]:
        """Return the lanes put together."""
        out = np.empty(self.size, "<u8")
        self.into(out)
        return out


def unpack_blocks(
    frames: Sequence[tuple[Planes, Sequence[frame.Block]]],
) -> list[NDArray[Any]]:
    """Return the blocks of frames that look alike, each as an array (columns, frames, rows).

    Alike are frames whose blocks agree in kind, columns, rows and lag.
    """
    shapes = frames[0][1]
    taken = [(Lanes(), Lanes()) for _ in shapes]
    for planes, blocks in frames:
        planes.rewind()
        for (firsts, rest), block in zip(taken, blocks):
            columns, lag = block.columns, block.lag
            firsts.add(planes, columns * lag, block.firsts)
            rest.add(planes, columns * (block.rows - lag), block.planes, block.zigzag)
    return [
        _undone(block, len(frames), firsts.joined(), rest.joined())
        for block, (firsts, rest) in zip(shapes, taken)
    ]


def ends_of(
    source: Planes, blocks: Sequence[frame.Block], index: int, column: int
) -> tuple[int, int]:
    """Return the first and the last value of one column of int64, modulo 2**64.

    The rest of the block is left alone: readers ask every frame when it was recorded.
    """
    source.rewind()
    for block in blocks[:index]:
        source.pass_over(block.columns * block.lag, block.firsts)
        source.pass_over(block.columns * (block.rows - block.lag), block.planes)
    block = blocks[index]
    lag, left = block.lag, block.rows - block.lag
    first = column * lag
    firsts = source.some(block.columns * lag, block.firsts, range(first, first + lag))
    last = (block.rows - 1) % lag if lag else 0  # which of the first values the last one began as
    own = range(column * left + last, (column + 1) * left, lag or 1)
    rest = source.some(block.columns * left, block.planes, own)
    if block.zigzag:
        rest = [value >> 1 ^ -(value & 1) for value in rest]
    return (firsts[0], firsts[last] + sum(rest)) if lag else (rest[0], rest[-1])


def _undone(
    like: frame.Block, frames: int, firsts: NDArray[np.uint64], rest: NDArray[np.uint64]
) -> NDArray[Any]:
    """Add up the differences of a block, in all frames at once."""
    dtype, columns, rows, lag = _DTYPES[like.kind], like.columns, like.rows, like.lag
    both = np.empty((columns, frames, rows), "<u8")
    both[:, :, :lag] = firsts.reshape(frames, columns, lag).transpose(1, 0, 2)
    both[:, :, lag:] = rest.reshape(frames, columns, rows - lag).transpose(1, 0, 2)
    if lag:
        _add_up(np.bitwise_xor if like.kind == packing.FLOAT else np.add, both, lag)
    return both.view(dtype)


def _add_up(join: np.ufunc, values: NDArray[np.uint64], lag: int) -> None:
    """Join each value of the last axis with the one `lag` before it, in order and in place."""
    rows = values.shape[2]
    if rows > _MANY * lag:  # a frame like no recorder writes
        for offset in range(lag):
            own = values[:, :, offset::lag]
            join.accumulate(own, axis=2, out=own)
        return
    for row in range(lag, rows, lag):
        past = min(row + lag, rows)
        now = values[:, :, row:past]
        join(now, values[:, :, row - lag : past - lag], out=now)


def unfold(lanes: NDArray[np.uint64]) -> None:
    """Undo `columns.fold` in place: 1, 2, 3, 4 … become -1, 1, -2, 2, as uint64."""
    sign = lanes & _ONE
    np.negative(sign, out=sign)
    lanes >>= _ONE
    lanes ^= sign


_ONE = np.uint64(1)
