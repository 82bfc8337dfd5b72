"""Turns frames back into records, with numpy arrays for columns.

Every number of a header is somebody's claim, and all that can be wrong with a frame ends in
`FrameError`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from clusterprof.trace import columns as packing
from clusterprof.trace import frame
from clusterprof.trace.blockcolumns import BlockColumns, FoldedColumn, FoldedFrame
from clusterprof.trace.blockplans import PlanBook
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
from clusterprof.trace.spanframes import PackedSpans, packed_spans
from clusterprof.trace.unpack import Planes, opened, unpack_blocks, values_of

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
        self._plans = PlanBook()

    def learn(self, got: Frame) -> None:
        """Take the layouts a frame defines and leave the rest alone; never raises."""
        try:
            if got.kind in (frame.KIND_COLUMNS, frame.KIND_ROWS) and got.schema <= frame.SCHEMA:
                self._define(got.kind, _read(_COLUMNS_HEADER, got.header).layouts)
        except FrameError:
            pass

    def records(self, got: Frame) -> list[Record]:
        """Return the records of a frame; raise FrameError when it makes no sense."""
        return self._decoded(got, packed=False)  # type: ignore[return-value]

    def packed(self, got: Frame) -> list[Record | PackedSpans]:
        """Do what `records` does, but leave for later what is done better for many frames."""
        return self._decoded(got, packed=True)

    def _decoded(self, got: Frame, packed: bool) -> list[Record | PackedSpans]:
        if got.kind not in frame.KINDS or got.schema > frame.SCHEMA:
            raise UnknownFrameError(f"kind {got.kind}, schema {got.schema}")
        simple = _SIMPLE.get(got.kind)
        if simple is not None:
            return [_read(simple, got.header)]
        try:
            if got.kind == frame.KIND_SPANS:
                return self._spans(got, packed)
            return self._columns(got, packed)
        except FrameError:
            raise
        except _NONSENSE as error:
            raise FrameError(str(error)) from error

    def _define(self, kind: int, definitions: Sequence[bytes]) -> None:
        reader: Any = _COLUMNS_LAYOUT if kind == frame.KIND_COLUMNS else _ROWS_LAYOUT
        for definition in definitions:
            key = frame.layout_key(definition)
            if key not in self._layouts and len(self._layouts) < _MAX_LAYOUTS:
                self._layouts[key] = _frozen(_read(reader, definition))

    def _spans(self, got: Frame, packed: bool) -> list[Record | PackedSpans]:
        header = _read(_SPANS_HEADER, got.header)
        planes = self._planes(got, header)
        folded = packed_spans(header, planes) if packed else None
        if folded is not None:
            return [folded]
        return _spans(header, [block[:, 0] for block in unpack_blocks([(planes, header.blocks)])])

    def _planes(self, got: Frame, header: frame.ColumnsHeader | frame.SpansHeader) -> Planes:
        """Open the body within what the frames so far may unfold to.

        A recording that was recorded unfolds to ten times its size; a thousand small frames of
        zeros that each unfold to the limit of a frame are somebody's joke.
        """
        self._room += _ROOM_FACTOR * (len(got.header) + len(got.body))
        wanted = packing.LANE_BYTES * values_of(header.blocks)
        if wanted > self._room:
            raise FrameError("the recording unfolds to more than any recording does")
        planes = opened(got, header.raw_bytes, header.unpacked_bytes, header.blocks)
        self._room -= wanted
        return planes

    def _columns(self, got: Frame, packed: bool) -> list[Record | PackedSpans]:
        header = _read(_COLUMNS_HEADER, got.header)
        self._define(got.kind, header.layouts)
        layouts: list[Any] = [self._layouts.get(part.layout) for part in header.parts]
        if None in layouts:
            raise UnknownLayoutError(
                "the names of the columns were defined in a frame that is lost"
            )
        planes = self._planes(got, header)
        plan = self._plans.plan(got.kind, header, layouts)
        folded = FoldedFrame(plan, planes, header.blocks)
        records: list[Record | PackedSpans] = []
        for part, layout, (t_ns, places) in zip(header.parts, layouts, plan.parts):
            columns = BlockColumns(places, part.rows, folded)
            values = columns if packed else tuple(columns)
            if got.kind == frame.KIND_ROWS:
                records.append(Rows(layout.table, layout.names, values, layout.strings))
            else:
                times = FoldedColumn(BlockColumns(t_ns, part.rows, folded))
                records.append(_samples(part, layout, times if packed else times.whole(), values))
        return records


def _samples(part: frame.ColumnsPart, layout: Any, t_ns: Any, values: Sequence[Any]) -> Columns:
    masks: tuple[bytes | None, ...] = (None,) * len(values)
    if part.masks:
        some = list(masks)
        for index, mask in part.masks.items():
            some[index] = _unpack_mask(mask, part.rows)
        masks = tuple(some)
    return Columns(layout.collector, layout.signals, layout.devices, t_ns, values, masks)


def _spans(header: frame.SpansHeader, arrays: Sequence[NDArray[Any]]) -> list[Record | PackedSpans]:
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
    records: list[Record | PackedSpans] = []
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


def _frozen(layout: _Layout) -> _Layout:
    """Lists as tuples: records of one layout share them."""
    replace = msgspec.structs.replace
    if isinstance(layout, frame.ColumnsLayout):
        signals, devices = tuple(layout.signals), tuple(layout.devices)
        return replace(layout, signals=signals, devices=devices)
    strings = {name: tuple(values) for name, values in layout.strings.items()}
    return replace(layout, names=tuple(layout.names), strings=strings)


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
