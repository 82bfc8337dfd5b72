"""Unpack the columns in a frame's blocks: the inverse of trace.column_codec, with numpy.

No number in a header is trusted: sizes are checked before memory is allocated.

It also locates the columns of a record in the blocks of its frame, once per shape of frame.

Frames of one collector have one shape, second after second; the plan is computed for
the first and cached.

Decode the columns in the blocks of frames, many frames at a time.

A frame holds one second, and a chunk of the analysis a minute of similar frames: their
blocks are decoded and joined with a few numpy calls. A single column can be requested
as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from clusterprof.trace import column_codec as packing
from clusterprof.trace import frame
from clusterprof.trace.frame import Frame, FrameError, UnknownFrameError

_MIN_BULK_ROWS = 64  # rows from which a call per row would be too slow
_DTYPES = {packing.INT: np.dtype("<i8"), packing.FLOAT: np.dtype("<f8")}


def open_planes(
    source: Frame, raw_bytes: int, unpacked_bytes: int, blocks: Sequence[frame.ColumnBlock]
) -> Planes:
    """Open the planes of a frame.

    Raises: FrameError when its blocks do not match its planes, or would not fit into
    memory.
    """
    raw = packed = values = 0
    for block in blocks:
        columns, rows, lag = block.columns, block.rows, block.lag
        if block.kind not in _DTYPES or columns < 1 or rows < 1 or not 0 <= lag <= rows:
            raise FrameError("a block without a valid shape")
        values += columns * rows
        for lanes, code in ((lag, block.firsts), (rows - lag, block.planes)):
            if not 0 <= code < packing.PLANE_AS_ABOVE << 14:  # no plane is above the uppermost
                raise FrameError("planes with an unknown storage code")
            if code and lanes:
                raw_planes, packed_planes, _ = _parse_plane_code(code)
                raw += raw_planes * columns * lanes
                packed += packed_planes * columns * lanes
    # The planes must be present in full, which limits what a frame may claim.
    if raw != raw_bytes or packed != unpacked_bytes:
        raise FrameError("the body's length does not match its planes")
    if values * packing.LANE_BYTES > frame.MAX_UNPACKED_BYTES:
        raise FrameError("a frame that would not fit into memory")
    return Planes(source, raw_bytes, unpacked_bytes)


def count_values(blocks: Sequence[frame.ColumnBlock]) -> int:
    """Count the values that blocks decode to."""
    return sum([block.columns * block.rows for block in blocks])


@lru_cache(maxsize=1024)
def _parse_plane_code(code: int) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Return how many planes are raw and packed, and (plane, storage code) from the top,
    without zeros.
    """
    ways: list[tuple[int, int]] = []
    for k in range(packing.LANE_BYTES - 1, -1, -1):
        stored = code >> 2 * k & 3
        is_zero = stored == packing.PLANE_AS_ABOVE and (not ways or ways[-1][0] != k + 1)
        if stored != packing.PLANE_ZERO and not is_zero:
            ways.append((k, stored))
    codes = [stored for _, stored in ways]
    return codes.count(packing.PLANE_RAW), codes.count(packing.PLANE_PACKED), tuple(ways)


class Planes:
    """The raw and the packed planes of a frame, read once in the order of the blocks."""

    __slots__ = ("packed", "packed_at", "raw", "raw_at")

    def __init__(self, source: Frame, raw_bytes: int, unpacked_bytes: int) -> None:
        if raw_bytes > len(source.body):
            raise FrameError("the body is shorter than the header announces")
        packed: bytes = source.body[raw_bytes:]
        if source.codec == frame.CODEC_ZLIB:
            inflate = zlib.decompressobj(-15)
            packed = inflate.decompress(packed, unpacked_bytes + 1)
        elif source.codec != frame.CODEC_NONE:
            raise UnknownFrameError(f"codec {source.codec}")
        if len(packed) != unpacked_bytes:
            raise FrameError("the body's length does not match the header")
        self.raw = source.body[:raw_bytes]
        self.packed = packed
        self.rewind()

    def rewind(self) -> None:
        """Restart with the first block."""
        self.raw_at = self.packed_at = 0

    def read_lanes(self, lanes: int, code: int, which: range) -> list[int]:
        """Return the selected ones of the next lanes, and skip past all of them."""
        if not lanes or not which:
            self.skip_lanes(lanes, code)
            return [0] * len(which)
        out = bytearray(packing.LANE_BYTES * len(which))
        plane = b""
        for k, stored in _parse_plane_code(code)[2]:
            if stored == packing.PLANE_PACKED:
                offset = self.packed_at
                plane = self.packed[offset + which.start : offset + which.stop : which.step]
                self.packed_at = offset + lanes
            elif stored == packing.PLANE_RAW:
                offset = self.raw_at
                plane = self.raw[offset + which.start : offset + which.stop : which.step]
                self.raw_at = offset + lanes
            out[k :: packing.LANE_BYTES] = plane
        return memoryview(out).cast("Q").tolist()

    def skip_lanes(self, lanes: int, code: int) -> None:
        """Skip the next lanes."""
        raw, packed, _ = _parse_plane_code(code)
        self.raw_at += raw * lanes
        self.packed_at += packed * lanes


class Lanes:
    """Lanes of many frames in sequence, of which only the planes have been read.

    A frame is short: joining its lanes separately would spend more time on calls than on
    data.
    """

    __slots__ = ("_folded", "_parts", "_past", "size")

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[list[bytes]] = [[] for _ in range(packing.LANE_BYTES)]
        self._past = [0] * packing.LANE_BYTES  # how many lanes of each plane are filled
        self._folded: list[tuple[int, int]] = []

    def add(self, source: Planes, lanes: int, code: int, zigzag: int = 0) -> None:
        """Take the next planes of a frame."""
        if not lanes:
            return
        first = self.size
        self.size = stop = first + lanes
        past, packed_at, raw_at, plane = self._past, source.packed_at, source.raw_at, b""
        for k, stored in _parse_plane_code(code)[2]:
            if stored == packing.PLANE_PACKED:
                plane = source.packed[packed_at : packed_at + lanes]
                packed_at += lanes
            elif stored == packing.PLANE_RAW:
                plane = source.raw[raw_at : raw_at + lanes]
                raw_at += lanes
            parts = self._parts[k]  # else the plane equals the one above it
            if past[k] != first:
                parts.append(bytes(first - past[k]))
            parts.append(plane)
            past[k] = stop
        source.packed_at, source.raw_at = packed_at, raw_at
        if zigzag:
            folded = self._folded
            if folded and folded[-1][1] == first:
                folded[-1] = folded[-1][0], stop
            else:
                folded.append((first, stop))

    def skip(self, lanes: int) -> None:
        """Leave some lanes 0."""
        self.size += lanes

    def write_into(self, out: NDArray[np.uint64]) -> None:
        """Write the joined lanes into uint64[size], which must be contiguous in memory."""
        if min(self._past) < self.size:
            out[...] = 0
        lanes = out.view(np.uint8).reshape(-1, packing.LANE_BYTES)
        for k, parts in enumerate(self._parts):
            if parts:
                lanes[: self._past[k], k] = np.frombuffer(b"".join(parts), np.uint8)
        for first, stop in self._folded:
            decode_zigzag(out[first:stop])

    def concat(self) -> NDArray[np.uint64]:
        """Return the joined lanes, uint64[size]."""
        out = np.empty(self.size, "<u8")
        self.write_into(out)
        return out


def unpack_blocks(
    frames: Sequence[tuple[Planes, Sequence[frame.ColumnBlock]]],
) -> list[NDArray[Any]]:
    """Decode the blocks of frames of equal shape, each to int64 or float64[columns, frames,
    rows].

    Frames have equal shape when their blocks agree in kind, columns, rows and lag.
    """
    shapes = frames[0][1]
    lanes = [(Lanes(), Lanes()) for _ in shapes]
    for planes, blocks in frames:
        planes.rewind()
        for (firsts, changes), block in zip(lanes, blocks):
            columns, lag = block.columns, block.lag
            firsts.add(planes, columns * lag, block.firsts)
            changes.add(planes, columns * (block.rows - lag), block.planes, block.zigzag)
    return [
        _decode_block(block, len(frames), firsts.concat(), changes.concat())
        for block, (firsts, changes) in zip(shapes, lanes)
    ]


def read_column_ends(
    source: Planes, blocks: Sequence[frame.ColumnBlock], index: int, column: int
) -> tuple[int, int]:
    """Return the first and the last value of one int64 column, modulo 2**64.

    The rest of the block is not decoded: readers ask every frame for its time.
    """
    source.rewind()
    for block in blocks[:index]:
        source.skip_lanes(block.columns * block.lag, block.firsts)
        source.skip_lanes(block.columns * (block.rows - block.lag), block.planes)
    block = blocks[index]
    lag, later_rows = block.lag, block.rows - block.lag
    first = column * lag
    firsts = source.read_lanes(block.columns * lag, block.firsts, range(first, first + lag))
    last = (block.rows - 1) % lag if lag else 0  # first value that the last one builds on
    positions = range(column * later_rows + last, (column + 1) * later_rows, lag or 1)
    changes = source.read_lanes(block.columns * later_rows, block.planes, positions)
    if block.zigzag:
        changes = [value >> 1 ^ -(value & 1) for value in changes]
    return (firsts[0], firsts[last] + sum(changes)) if lag else (changes[0], changes[-1])


def _decode_block(
    shape: frame.ColumnBlock, frames: int, firsts: NDArray[np.uint64], changes: NDArray[np.uint64]
) -> NDArray[Any]:
    """Sum the differences of a block, in all frames at once."""
    dtype, columns, rows, lag = _DTYPES[shape.kind], shape.columns, shape.rows, shape.lag
    lanes = np.empty((columns, frames, rows), "<u8")
    lanes[:, :, :lag] = firsts.reshape(frames, columns, lag).transpose(1, 0, 2)
    lanes[:, :, lag:] = changes.reshape(frames, columns, rows - lag).transpose(1, 0, 2)
    if lag:
        _sum_differences(np.bitwise_xor if shape.kind == packing.FLOAT else np.add, lanes, lag)
    return lanes.view(dtype)


def _sum_differences(combine: np.ufunc, values: NDArray[np.uint64], lag: int) -> None:
    """Combine each value of the last axis with the one `lag` before it, in order and in place."""
    rows = values.shape[2]
    if rows > _MIN_BULK_ROWS * lag:  # no recorder writes such a frame
        for offset in range(lag):
            phase = values[:, :, offset::lag]
            combine.accumulate(phase, axis=2, out=phase)
        return
    for row in range(lag, rows, lag):
        stop = min(row + lag, rows)
        current = values[:, :, row:stop]
        combine(current, values[:, :, row - lag : stop - lag], out=current)


def decode_zigzag(lanes: NDArray[np.uint64]) -> None:
    """Decode zigzag values in place: 1, 2, 3, 4 … become -1, 1, -2, 2; lanes: uint64[n]."""
    sign = lanes & _ONE
    np.negative(sign, out=sign)
    lanes >>= _ONE
    lanes ^= sign


_ONE = np.uint64(1)


_MAX_PLANS = 256
Place = tuple[str, int, int]
"""Storage code of a column (STORED_TYPES), its block (-1: it has no rows) and its row
there.
"""


@dataclass(frozen=True, slots=True)
class FramePlan:
    """Location of all columns of a frame; one object for all frames of equal shape."""

    parts: Sequence[tuple[tuple[Place, ...], tuple[Place, ...]]]
    """Per record the locations of its times (one column; none for tables) and of its columns;
    equal tuples are shared between frames.
    """


class FramePlanCache:
    """Cache of the column locations in the frames of a recording, whose layouts never change."""

    def __init__(self) -> None:
        self._plans: dict[Any, FramePlan] = {}
        self._same: dict[tuple[Place, ...], tuple[Place, ...]] = {}

    def plan(self, kind: int, header: frame.ColumnsHeader, layouts: Sequence[Any]) -> FramePlan:
        """Return the plan of a frame.

        Raises: FrameError when the frame does not hold what its header announces.
        """
        key = (
            kind,
            tuple([(part.layout, part.rows) for part in header.parts]),
            tuple([(block.kind, block.columns, block.rows, block.lag) for block in header.blocks]),
        )
        plan = self._plans.get(key)
        if plan is None:
            places = _locate_table_columns if kind == frame.KIND_ROWS else _locate_sample_columns
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
                self._same.clear()
            parts = [((t_ns,), columns) for t_ns, columns in places(header, layouts)]
            plan = self._plans[key] = FramePlan(
                [(self._share(t), self._share(c)) for t, c in parts]
            )
        return plan

    def _share(self, places: tuple[Place, ...]) -> tuple[Place, ...]:
        return self._same.setdefault(places, places)


def _locate_sample_columns(
    header: frame.ColumnsHeader, layouts: Sequence[Any]
) -> list[tuple[Place, tuple[Place, ...]]]:
    queues = _ColumnQueues(list(enumerate(header.blocks)))
    t_ns = [queues.take("q", part.rows) for part in header.parts]
    taken = queues.take_all(header.parts, layouts)
    for layout, columns in zip(layouts, taken):
        if not isinstance(layout, frame.ColumnsLayout):
            raise FrameError("a columns frame refers to the layout of a table")
        if not len(columns) == len(layout.signals) == len(layout.devices):
            raise FrameError("the numbers of signals, devices and types differ")
    return list(zip(t_ns, taken))


def _locate_table_columns(
    header: frame.ColumnsHeader, layouts: Sequence[Any]
) -> list[tuple[Place, tuple[Place, ...]]]:
    """Locate the columns of tables, which do not share blocks: each has its own period."""
    parts = []
    pairs = iter(enumerate(header.blocks))
    for part, layout in zip(header.parts, layouts):
        if not isinstance(layout, frame.RowsLayout) or len(layout.names) != len(layout.types):
            raise FrameError("a rows frame refers to a layout that is not a table's")
        kinds = {code == "d" for code in layout.types}  # one block of each
        queues = _ColumnQueues(list(islice(pairs, len(kinds) if part.rows else 0)))
        (columns,) = queues.take_all([part], [layout])
        parts.append((("q", -1, 0), columns))
    return parts


class _ColumnQueues:
    """Takes the columns of blocks in the order in which they were stored."""

    def __init__(self, blocks: Sequence[tuple[int, frame.ColumnBlock]]) -> None:
        self._columns = {
            (block.kind, block.rows): iter([(index, row) for row in range(block.columns)])
            for index, block in blocks
        }

    def take(self, code: str, rows: int) -> Place:
        """Return the next column with this storage code."""
        if not rows:
            return code, -1, 0
        kind = packing.FLOAT if code == "d" else packing.INT
        place = next(self._columns[kind, rows], None)
        if place is None:
            raise FrameError("fewer columns than the header promises")
        return code, *place

    def take_all(
        self, parts: Sequence[frame.ColumnsPart], layouts: Sequence[Any]
    ) -> list[tuple[Place, ...]]:
        """Return the columns of each record in its own order."""
        taken: list[list[Any]] = []
        for layout in layouts:
            if sorted(layout.order) != list(range(len(layout.types))):
                raise FrameError("a column order that leaves out a column")
            if set(layout.types) - set(frame.STORED_TYPES):
                raise FrameError("columns of an unknown type")
            taken.append([None] * len(layout.types))
        for code in frame.STORED_TYPES:
            for part, layout, columns in zip(parts, layouts, taken):
                for index in layout.order if code in layout.types else ():
                    if layout.types[index] == code:
                        columns[index] = self.take(code, part.rows)
        return [tuple(columns) for columns in taken]


ColumnRun = tuple[str, int, int, Sequence[int]]
"""Adjacent columns: their storage code, block, first row in it, and their indices in
order.
"""


class EncodedFrame:
    """The encoded blocks of one frame, shared by its records."""

    __slots__ = ("_arrays", "_at", "blocks", "plan", "planes")

    def __init__(
        self, plan: FramePlan, planes: Planes, blocks: Sequence[frame.ColumnBlock]
    ) -> None:
        self.plan = plan
        self.blocks = blocks
        self.planes: Planes | None = planes
        """None once the frame has been decoded."""
        self._arrays: list[NDArray[Any]] = []
        self._at = 0

    def set_decoded(self, arrays: list[NDArray[Any]], position: int) -> None:
        """Store blocks decoded with those of other frames, (columns, frames, rows), and this
        frame's index.
        """
        self._arrays, self._at, self.planes = arrays, position, None

    def decode(self) -> tuple[list[NDArray[Any]], int]:
        """Return the decoded blocks as (columns, frames, rows), and this frame's index in them."""
        if self.planes is not None:
            decode_frames([self])
        return self._arrays, self._at

    def decode_column(self, place: Place) -> NDArray[Any]:
        """Decode one column as it was recorded, int64[rows] or float64[rows]."""
        code, block, row = place
        if block < 0:
            return np.empty(0, "<f8" if code in "md" else "<i8")
        arrays, position = self.decode()
        return restore_scale(code, arrays[block][row, position])

    def read_ends(self, place: Place) -> tuple[int, int]:
        """Return the first and the last value of an integer column."""
        code, index, row = place
        if self.planes is None or code in "md":
            column = self.decode_column(place)
            return int(column[0]), int(column[-1])
        factor = frame.INTEGER_FACTORS[code]
        first, last = read_column_ends(self.planes, self.blocks, index, row)
        return _wrap_int64(first * factor), _wrap_int64(last * factor)


def decode_frames(frames: Iterable[EncodedFrame]) -> None:
    """Decode the frames that are still encoded; frames of one plan with the same calls."""
    groups: dict[int, dict[int, EncodedFrame]] = {}
    for encoded in frames:
        if encoded.planes is not None:
            groups.setdefault(id(encoded.plan), {})[id(encoded)] = encoded
    for group in groups.values():
        members = list(group.values())
        arrays = unpack_blocks(
            [(member.planes, member.blocks) for member in members if member.planes]
        )
        for index, encoded in enumerate(members):
            encoded.set_decoded(arrays, index)


class BlockColumns(Sequence[NDArray[Any]]):
    """The columns of one record; each is decoded when it is requested."""

    __slots__ = ("_encoded", "frame", "places", "rows")

    def __init__(self, places: tuple[Place, ...], rows: int, encoded: EncodedFrame) -> None:
        self._encoded: dict[int, EncodedColumn] = {}
        self.places = places
        """One shared object for records of equal shape."""
        self.rows = rows
        self.frame = encoded

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[NDArray[Any]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[Any] | list[NDArray[Any]]:
        if isinstance(index, slice):
            return [self.frame.decode_column(place) for place in self.places[index]]
        return self.frame.decode_column(self.places[index])

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return iter([self.frame.decode_column(place) for place in self.places])

    def encoded_column(self, index: int) -> EncodedColumn:
        """Return an integer column that stays encoded, the same one each time."""
        if index not in self._encoded:
            column = BlockColumns(self.places[index : index + 1], self.rows, self.frame)
            self._encoded[index] = EncodedColumn(column)
        return self._encoded[index]


class EncodedColumn:
    """One integer column whose first and last value can be read without decoding it."""

    __slots__ = ("_ends", "columns")

    def __init__(self, columns: BlockColumns) -> None:
        self.columns = columns
        """Itself, as the only column."""
        self._ends: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self.columns.rows

    def __getitem__(self, index: int) -> int:
        if index not in (0, -1):
            return int(self.decode()[index])
        if self._ends is None:
            self._ends = self.columns.frame.read_ends(self.columns.places[0])
        return self._ends[index]

    def decode(self) -> NDArray[Any]:
        """Decode the whole column, int64[rows]."""
        return self.columns[0]


def concat_columns(records: Sequence[BlockColumns], dtype: type[np.generic]) -> list[NDArray[Any]]:
    """Concatenate each column over records with equal columns; a list of int64[rows] or
    float64[rows].

    rows: the sum over all records. dtype: of the result.
    """
    decode_frames([record.frame for record in records])
    place = [
        index for *_, columns in _group_adjacent_columns(records[0].places) for index in columns
    ]
    row_of = dict(zip(place, range(len(place))))
    out = np.empty((len(place), sum([record.rows for record in records])), dtype)
    end = 0
    for like, low, high in _iterate_contiguous_records(records):
        first, end = end, end + (high - low) * like.rows
        arrays, _ = like.frame.decode()
        for code, block, row, columns in _group_adjacent_columns(like.places):
            values = arrays[block][row : row + len(columns), low:high].reshape(len(columns), -1)
            rows = [row_of[index] for index in columns]
            together = rows[-1] - rows[0] == len(rows) - 1 and rows == sorted(rows)
            where: Any = slice(rows[0], rows[-1] + 1) if together else rows
            out[where, first:end] = restore_scale(code, values)
    return [out[row_of[index]] for index in range(len(place))]


@lru_cache(maxsize=256)
def _group_adjacent_columns(places: tuple[Place, ...]) -> tuple[ColumnRun, ...]:
    """Group columns that are adjacent in a block."""
    order = sorted(range(len(places)), key=places.__getitem__)
    runs: list[tuple[str, int, int, list[int]]] = []
    for index in order:
        code, block, row = places[index]
        last = runs[-1] if runs else None
        if last is not None and last[:2] == (code, block) and last[2] + len(last[3]) == row:
            last[3].append(index)
        else:
            runs.append((code, block, row, [index]))
    return tuple(runs)


def _iterate_contiguous_records(
    records: Sequence[BlockColumns],
) -> Iterator[tuple[BlockColumns, int, int]]:
    """Yield runs of records that were decoded contiguously: (first of them, from, to)."""
    like = records[0]
    among, low = like.frame.decode()
    high = low
    for record in records:
        arrays, at = record.frame.decode()
        if not (record.places is like.places and arrays is among and at == high):
            yield like, low, high
            like, among, low = record, arrays, at
        high = at + 1
    yield like, low, high


def restore_scale(code: str, stored: NDArray[Any]) -> NDArray[Any]:
    """Undo the scaling of columns with one storage code; int64[...] or float64[...] of the
    same shape.
    """
    if code == "m":
        return stored / 1000.0
    factor = frame.INTEGER_FACTORS.get(code, 1)
    return stored if factor == 1 else stored * np.int64(factor)


def _wrap_int64(value: int) -> int:
    """Wrap an integer to the range of int64."""
    return (value + (1 << 63) & (1 << 64) - 1) - (1 << 63)
