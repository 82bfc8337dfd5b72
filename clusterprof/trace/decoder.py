"""Decode frames to records, with numpy arrays for columns.

No number in a header is trusted; everything that can be wrong with a frame raises
`FrameError`.

It also keeps frames of spans encoded, and decodes many of them at a time.

A frame holds one second of all processes, a chunk of the analysis a minute of frames:
decoding frame by frame would spend more on calls than on spans. Frames are validated
when they are read; nothing here can fail.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from clusterprof.trace import column_codec as packing
from clusterprof.trace import frame
from clusterprof.trace.column_decoder import (
    BlockColumns,
    EncodedColumn,
    EncodedFrame,
    FramePlanCache,
    Lanes,
    Planes,
    count_values,
    open_planes,
    unpack_blocks,
)
from clusterprof.trace.frame import Frame, FrameError, UnknownFrameError
from clusterprof.trace.plausibility import check_record, check_span_parts
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


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """All spans of one frame, still encoded."""

    parts: Sequence[frame.SpansPart]
    """The processes of the spans: `rows` of each part, one part after the other."""
    rows: int
    base_ns: int
    constants: Sequence[tuple[int, int]]
    """(row of SPAN_FIELDS, its constant value)."""
    blocks: Sequence[tuple[int, frame.ColumnBlock]]
    """(row of SPAN_FIELDS, block); rows 0 and 1 hold gap and duration."""
    planes: Planes


def pack_span_frame(header: frame.SpansHeader, planes: Planes) -> PackedSpans | None:
    """Return a frame of spans still encoded; None when it has not the form that our writer
    produces.
    """
    rows = 0
    for part in header.parts:
        if part.rows < 0:
            return None
        rows += part.rows
    varying, constants = _split_varying_fields(
        tuple([name in header.constants for name in SPAN_FIELDS])
    )
    is_regular = (
        rows > 0
        and len(header.blocks) == len(varying)
        and varying[:2] == (0, 1)  # neither the start nor the end is constant
        and all([b.columns == 1 and b.rows == rows and not b.lag for b in header.blocks])
    )
    if not is_regular:
        return None
    values = [(row, header.constants[SPAN_FIELDS[row]]) for row in constants]
    if not all([-(1 << 63) <= value < 1 << 63 for _, value in values]):
        return None
    blocks = list(zip(varying, header.blocks))
    return PackedSpans(header.parts, rows, header.base_ns, values, blocks, planes)


@lru_cache(maxsize=128)  # each of the 7 fields may be constant or not
def _split_varying_fields(constant: tuple[bool, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rows of SPAN_FIELDS that vary in a frame and those that do not."""
    rows = range(len(SPAN_FIELDS))
    return tuple(r for r in rows if not constant[r]), tuple(r for r in rows if constant[r])


class SpanColumns:
    """The fields of the spans of many frames, each decoded when it is requested.

    Only their planes have been read: a caller that needs some of the fields first holds only these.
    """

    def __init__(self, frames: Sequence[PackedSpans]) -> None:
        self._frames = [(encoded.rows, encoded.base_ns) for encoded in frames]
        self._lanes = [Lanes() for _ in SPAN_FIELDS]
        self._constants: list[tuple[int, int, int, int]] = []
        end = 0
        for encoded in frames:
            first, end = end, end + encoded.rows
            encoded.planes.rewind()
            for row, value in encoded.constants:
                self._lanes[row].skip(encoded.rows)
                if value:
                    self._constants.append((row, first, end, value))
            for row, block in encoded.blocks:
                self._lanes[row].add(encoded.planes, encoded.rows, block.planes, block.zigzag)

    def write_edges(self, start_ns: NDArray[np.int64], end_ns: NDArray[np.int64]) -> None:
        """Write the starts and ends of all spans into int64[n] each, contiguous in memory; ns."""
        gap, duration = start_ns.view(np.uint64), end_ns.view(np.uint64)
        self._lanes[0].write_into(gap)
        self._lanes[1].write_into(duration)
        _compute_span_edges(self._frames, gap, duration)

    def write_field(self, row: int, out: NDArray[np.int64]) -> None:
        """Write the field in this row of SPAN_FIELDS, not a time, into contiguous int64[n]."""
        self._lanes[row].write_into(out.view(np.uint64))
        for number, first, end, value in self._constants:
            if number == row:
                out[first:end] = value


def decode_span_frames(frames: Sequence[PackedSpans], table: NDArray[np.int64]) -> None:
    """Decode the fields of all spans, frame after frame, into the table int64[7, spans].

    Each row of the table must be contiguous in memory.
    """
    columns = SpanColumns(frames)
    columns.write_edges(table[0], table[1])
    for row in range(2, len(table)):
        columns.write_field(row, table[row])


def _compute_span_edges(
    frames: Sequence[tuple[int, int]], gap: NDArray[Any], duration: NDArray[Any]
) -> None:
    """Compute starts and ends from gaps and durations: running sums modulo 2**64, restarted
    per frame.

    frames: rows and base of each, ns.
    """
    if not frames:
        return
    sizes = [rows for rows, _ in frames]
    bases = np.array([base_ns & (1 << 64) - 1 for _, base_ns in frames], np.uint64)
    end = np.cumsum(gap + duration, dtype=np.uint64)
    before = np.zeros(len(frames), np.uint64)
    before[1:] = end[np.cumsum(sizes, dtype=np.int64)[:-1] - 1]
    end += np.repeat(bases - before, sizes)
    np.subtract(end, duration, out=gap)
    duration[:] = end


_MAX_LAYOUTS = 4096
_MAX_PROBLEMS = 1000  # limits the memory of a caller that never empties them
_BUDGET_BYTES = 512 << 20
_BUDGET_FACTOR = 1024
_Layout = frame.ColumnsLayout | frame.RowsLayout
_T = TypeVar("_T")
_DECODE_ERRORS = (ValueError, IndexError, KeyError, OverflowError, StopIteration, zlib.error)


class UnknownLayoutError(FrameError):
    """The frame refers to a layout whose definition has not been read."""


class Decoder:
    """Decodes frames to records and keeps the layouts they define."""

    def __init__(self) -> None:
        self._layouts: dict[int, _Layout] = {}
        self._budget = _BUDGET_BYTES
        self._plans = FramePlanCache()
        self.problems: list[str] = []
        """What was wrong with attributes that were left out; the caller counts and empties it."""

    def add_layouts(self, source: Frame) -> None:
        """Add the layouts a frame defines, without decoding the rest; never raises."""
        try:
            if (
                source.kind in (frame.KIND_COLUMNS, frame.KIND_ROWS)
                and source.schema <= frame.FRAME_SCHEMA
            ):
                self._define(source.kind, _decode_header(_COLUMNS_HEADER, source.header).layouts)
        except FrameError:
            pass

    def records(self, source: Frame) -> list[Record]:
        """Return the records of a frame.

        Raises: FrameError when the frame is invalid.
        """
        return self._decode(source, packed=False)  # type: ignore[return-value]

    def packed(self, source: Frame) -> list[Record | PackedSpans]:
        """Return the records of a frame, leaving columns encoded that are cheaper to decode in
        bulk.
        """
        return self._decode(source, packed=True)

    def _decode(self, source: Frame, packed: bool) -> list[Record | PackedSpans]:
        if source.kind not in frame.KINDS or source.schema > frame.FRAME_SCHEMA:
            raise UnknownFrameError(f"kind {source.kind}, schema {source.schema}")
        simple = _SIMPLE.get(source.kind)
        if simple is not None:
            record = _decode_header(simple, source.header)
            record, problems = check_record(record)
            self.problems += problems[: _MAX_PROBLEMS - len(self.problems)]
            return [record]
        try:
            if source.kind == frame.KIND_SPANS:
                return self._spans(source, packed)
            return self._columns(source, packed)
        except FrameError:
            raise
        except _DECODE_ERRORS as error:
            raise FrameError(str(error)) from error

    def _define(self, kind: int, definitions: Sequence[bytes]) -> None:
        reader: Any = _COLUMNS_LAYOUT if kind == frame.KIND_COLUMNS else _ROWS_LAYOUT
        for definition in definitions:
            key = frame.compute_layout_key(definition)
            if key not in self._layouts and len(self._layouts) < _MAX_LAYOUTS:
                self._layouts[key] = _convert_lists(_decode_header(reader, definition))

    def _spans(self, source: Frame, packed: bool) -> list[Record | PackedSpans]:
        header = _decode_header(_SPANS_HEADER, source.header)
        check_span_parts(header.parts)
        planes = self._planes(source, header)
        folded = pack_span_frame(header, planes) if packed else None
        if folded is not None:
            return [folded]
        return _build_spans_records(
            header, [block[:, 0] for block in unpack_blocks([(planes, header.blocks)])]
        )

    def _planes(self, source: Frame, header: frame.ColumnsHeader | frame.SpansHeader) -> Planes:
        """Open the body within the decoding budget of the frames read so far.

        A genuine recording decodes to ten times its size; a thousand small frames of zeros that
        each decode to the limit of a frame are hostile.
        """
        self._budget += _BUDGET_FACTOR * (len(source.header) + len(source.body))
        wanted = packing.LANE_BYTES * count_values(header.blocks)
        if wanted > self._budget:
            raise FrameError("the recording would decode to more bytes than any genuine one")
        planes = open_planes(source, header.raw_bytes, header.unpacked_bytes, header.blocks)
        self._budget -= wanted
        return planes

    def _columns(self, source: Frame, packed: bool) -> list[Record | PackedSpans]:
        header = _decode_header(_COLUMNS_HEADER, source.header)
        self._define(source.kind, header.layouts)
        layouts: list[Any] = [self._layouts.get(part.layout) for part in header.parts]
        if None in layouts:
            raise UnknownLayoutError("the frame that defined the column names is lost")
        planes = self._planes(source, header)
        plan = self._plans.plan(source.kind, header, layouts)
        folded = EncodedFrame(plan, planes, header.blocks)
        records: list[Record | PackedSpans] = []
        for part, layout, (t_ns, places) in zip(header.parts, layouts, plan.parts):
            columns = BlockColumns(places, part.rows, folded)
            values = columns if packed else tuple(columns)
            if source.kind == frame.KIND_ROWS:
                records.append(Rows(layout.table, layout.names, values, layout.strings))
            else:
                times = EncodedColumn(BlockColumns(t_ns, part.rows, folded))
                records.append(
                    _build_columns_record(part, layout, times if packed else times.decode(), values)
                )
        return records


def _build_columns_record(
    part: frame.ColumnsPart, layout: Any, t_ns: Any, values: Sequence[Any]
) -> Columns:
    masks: tuple[bytes | None, ...] = (None,) * len(values)
    if part.masks:
        unpacked = list(masks)
        for index, mask in part.masks.items():
            unpacked[index] = _unpack_mask(mask, part.rows)
        masks = tuple(unpacked)
    return Columns(layout.collector, layout.signals, layout.devices, t_ns, values, masks)


def _build_spans_records(
    header: frame.SpansHeader, arrays: Sequence[NDArray[Any]]
) -> list[Record | PackedSpans]:
    lanes = sum(part.rows for part in header.parts)
    if any(part.rows < 0 for part in header.parts) or lanes > frame.MAX_UNPACKED_BYTES // 56:
        raise FrameError("an impossible number of spans")
    if any(array.shape != (1, lanes) for array in arrays):
        raise FrameError("span columns differ in length")
    queue = iter([array[0] for array in arrays])
    fields: dict[str, NDArray[Any]] = {}
    if lanes:
        gap, duration = next(queue).view("<u8"), next(queue).view("<u8")
        end = np.cumsum(gap + duration, dtype="<u8")  # modulo 2**64, as it was written
        end += np.uint64(header.base_ns & (1 << 64) - 1)
        fields = {"start_ns": (end - duration).view("<i8"), "end_ns": end.view("<i8")}
    for name in SPAN_FIELDS:
        if name in header.constants:
            fields[name] = np.full(lanes, header.constants[name], "<i8")
        elif name not in fields:
            fields[name] = next(queue) if lanes else np.empty(0, "<i8")
    records: list[Record | PackedSpans] = []
    first = 0
    for part in header.parts:
        stop = first + part.rows
        records.append(
            Spans(
                part.pid,
                part.started_ticks,
                part.first_sequence,
                part.dropped,
                part.names,
                {name: fields[name][first:stop] for name in SPAN_FIELDS},
            )
        )
        first = stop
    return records


def _convert_lists(layout: _Layout) -> _Layout:
    """Convert lists to tuples, which the records of one layout share."""
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


def _decode_header(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
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
