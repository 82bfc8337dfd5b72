"""Turns frames back into records, with numpy arrays for columns.

Every number of a header is somebody's claim, and all that can be wrong with a frame ends in
`FrameError`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from clusterprof.trace import columns as packing
from clusterprof.trace import frame
from clusterprof.trace.frame import Frame, FrameError, UnknownFrameError
from clusterprof.trace.schema import (
    SPAN_FIELDS,
    Clock,
    Columns,
    Event,
    Gap,
    Header,
    Record,
    Rows,
    Spans,
)
from clusterprof.trace.unpack import unpack_blocks, values_of

_MAX_LAYOUTS = 4096
_ROOM_BYTES = 512 << 20
_ROOM_FACTOR = 1024
_Layout = frame.ColumnsLayout | frame.RowsLayout
_T = TypeVar("_T")
_NONSENSE = (ValueError, IndexError, KeyError, OverflowError, StopIteration, zlib.error)


class UnknownLayoutError(FrameError):
    """The frame refers to names whose definition has not been seen."""


class Decoder:
    """Makes records of frames; remembers the layouts it met."""

    def __init__(self) -> None:
        self._layouts: dict[int, _Layout] = {}
        self._room = _ROOM_BYTES

    def learn(self, got: Frame) -> None:
        """Take the layouts a frame defines and leave the rest alone; never raises."""
        try:
            if got.kind in (frame.KIND_COLUMNS, frame.KIND_ROWS) and got.schema <= frame.SCHEMA:
                self._define(got.kind, _read(_COLUMNS_HEADER, got.header).layouts)
        except FrameError:
            pass

    def records(self, got: Frame) -> list[Record]:
        """Return the records of a frame; raise FrameError when it makes no sense."""
        if got.kind not in frame.KINDS or got.schema > frame.SCHEMA:
            raise UnknownFrameError(f"kind {got.kind}, schema {got.schema}")
        simple = _SIMPLE.get(got.kind)
        if simple is not None:
            return [_read(simple, got.header)]
        try:
            if got.kind == frame.KIND_SPANS:
                header = _read(_SPANS_HEADER, got.header)
                return _spans(header, self._unpack(got, header))
            return self._columns(got)
        except FrameError:
            raise
        except _NONSENSE as error:
            raise FrameError(str(error)) from error

    def _define(self, kind: int, definitions: Sequence[bytes]) -> None:
        reader: Any = _COLUMNS_LAYOUT if kind == frame.KIND_COLUMNS else _ROWS_LAYOUT
        for definition in definitions:
            key = frame.layout_key(definition)
            if key not in self._layouts and len(self._layouts) < _MAX_LAYOUTS:
                self._layouts[key] = _read(reader, definition)

    def _unpack(
        self, got: Frame, header: frame.ColumnsHeader | frame.SpansHeader
    ) -> list[NDArray[Any]]:
        """Unpack blocks within what the frames so far may unfold to.

        A recording that was recorded unfolds to ten times its size; a thousand small frames of
        zeros that each unfold to the limit of a frame are somebody's joke.
        """
        self._room += _ROOM_FACTOR * (len(got.header) + len(got.body))
        wanted = packing.LANE_BYTES * values_of(header.blocks)
        if wanted > self._room:
            raise FrameError("the recording unfolds to more than any recording does")
        arrays = unpack_blocks(got, header.raw_bytes, header.unpacked_bytes, header.blocks)
        self._room -= wanted
        return arrays

    def _columns(self, got: Frame) -> list[Record]:
        header = _read(_COLUMNS_HEADER, got.header)
        self._define(got.kind, header.layouts)
        layouts = [self._layouts.get(part.layout) for part in header.parts]
        if None in layouts:
            raise UnknownLayoutError(
                "the names of the columns were defined in a frame that is lost"
            )
        blocks = self._unpack(got, header)
        if got.kind == frame.KIND_ROWS:
            return _rows(header, layouts, blocks)
        queues = _Queues(header.blocks, blocks)
        t_ns = [queues.take("q", part.rows) for part in header.parts]
        taken = queues.take_all(header.parts, layouts)
        records: list[Record] = []
        for part, layout, times, values in zip(header.parts, layouts, t_ns, taken):
            if not isinstance(layout, frame.ColumnsLayout):
                raise FrameError("a columns frame refers to the layout of a table")
            if not len(values) == len(layout.signals) == len(layout.devices):
                raise FrameError("signals, devices and types differ in number")
            masks: list[bytes | None] = [None] * len(values)
            for index, mask in part.masks.items():
                masks[index] = _unpack_mask(mask, part.rows)
            signals, devices = tuple(layout.signals), tuple(layout.devices)
            records.append(Columns(layout.collector, signals, devices, times, values, tuple(masks)))
        return records


class _Queues:
    """Hands out the columns of blocks in the order in which they were stored."""

    def __init__(self, blocks: Sequence[frame.Block], arrays: Sequence[NDArray[Any]]) -> None:
        self._columns = {
            (block.kind, block.rows): iter(columns) for block, columns in zip(blocks, arrays)
        }

    def take(self, code: str, rows: int) -> NDArray[Any]:
        """Return the next column that was stored in this way."""
        if not rows:
            return np.empty(0, "<f8" if code in "md" else "<i8")
        kind = packing.FLOAT if code == "d" else packing.INT
        column = next(self._columns[kind, rows], None)
        if column is None:
            raise FrameError("fewer columns than the header promises")
        if code == "m":
            return column / 1000.0
        factor = frame.FACTORS.get(code, 1)
        return column if factor == 1 else column * np.int64(factor)

    def take_all(
        self, parts: Sequence[frame.ColumnsPart], layouts: Sequence[Any]
    ) -> list[tuple[NDArray[Any], ...]]:
        """Return the columns of each record in its own order."""
        taken: list[list[Any]] = []
        for layout in layouts:
            if sorted(layout.order) != list(range(len(layout.types))):
                raise FrameError("an order that leaves out a column")
            if set(layout.types) - set(frame.STORED_TYPES):
                raise FrameError("columns of an unknown type")
            taken.append([None] * len(layout.types))
        for code in frame.STORED_TYPES:
            for part, layout, columns in zip(parts, layouts, taken):
                for index in layout.order if code in layout.types else ():
                    if layout.types[index] == code:
                        columns[index] = self.take(code, part.rows)
        return [tuple(columns) for columns in taken]


def _rows(
    header: frame.ColumnsHeader, layouts: Sequence[Any], arrays: Sequence[NDArray[Any]]
) -> list[Record]:
    """Tables do not share blocks: each has its own period."""
    records: list[Record] = []
    pairs = iter(zip(header.blocks, arrays))
    for part, layout in zip(header.parts, layouts):
        if not isinstance(layout, frame.RowsLayout) or len(layout.names) != len(layout.types):
            raise FrameError("a rows frame refers to a layout that is not a table's")
        kinds = {code == "d" for code in layout.types}  # one block of each
        own = list(islice(pairs, len(kinds) if part.rows else 0))
        queues = _Queues([block for block, _ in own], [columns for _, columns in own])
        (columns,) = queues.take_all([part], [layout])
        strings: dict[str, Sequence[str]] = {
            name: tuple(values) for name, values in layout.strings.items()
        }
        records.append(Rows(layout.table, tuple(layout.names), columns, strings))
    return records


def _spans(header: frame.SpansHeader, arrays: Sequence[NDArray[Any]]) -> list[Record]:
    lanes = sum(part.rows for part in header.parts)
    if any(part.rows < 0 for part in header.parts) or lanes > frame.MAX_UNPACKED_BYTES // 56:
        raise FrameError("a number of spans that cannot be")
    if any(array.shape != (1, lanes) for array in arrays):
        raise FrameError("columns of spans differ in length")
    queue = iter([array[0] for array in arrays])
    columns: dict[str, NDArray[Any]] = {}
    if lanes:
        gap, duration = next(queue).view("<u8"), next(queue).view("<u8")
        end = np.cumsum(gap + duration, dtype="<u8")  # modulo 2**64, as it was written
        end += np.uint64(header.base_ns & (1 << 64) - 1)
        columns = {"start_ns": (end - duration).view("<i8"), "end_ns": end.view("<i8")}
    for name in SPAN_FIELDS:
        if name in header.constants:
            columns[name] = np.full(lanes, header.constants[name], "<i8")
        elif name not in columns:
            columns[name] = next(queue) if lanes else np.empty(0, "<i8")
    records: list[Record] = []
    first = 0
    for part in header.parts:
        past = first + part.rows
        records.append(
            Spans(
                part.pid,
                part.started_ticks,
                part.first_sequence,
                part.dropped,
                part.names,
                {name: columns[name][first:past] for name in SPAN_FIELDS},
            )
        )
        first = past
    return records


def _unpack_mask(mask: bytes, rows: int) -> bytes:
    if not mask:
        return b"\x01" * rows
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=rows).tobytes()


def _read(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise FrameError(str(error)) from error


_COLUMNS_HEADER = msgspec.msgpack.Decoder(frame.ColumnsHeader)
_SPANS_HEADER = msgspec.msgpack.Decoder(frame.SpansHeader)
_COLUMNS_LAYOUT = msgspec.msgpack.Decoder(frame.ColumnsLayout)
_ROWS_LAYOUT = msgspec.msgpack.Decoder(frame.RowsLayout)
_SIMPLE: dict[int, msgspec.msgpack.Decoder[Any]] = {
    frame.KIND_HEADER: msgspec.msgpack.Decoder(Header),
    frame.KIND_CLOCK: msgspec.msgpack.Decoder(Clock),
    frame.KIND_EVENT: msgspec.msgpack.Decoder(Event),
    frame.KIND_GAP: msgspec.msgpack.Decoder(Gap),
}
