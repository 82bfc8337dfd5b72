"""Encode records to frames; records sampled together are stored together.

Consecutive records of one kind share a frame, because a frame costs as much as one
process's spans of a second.

It also writes the recording of a node whose records are all known: the result of an import.

    write_node(folder, node.header(), node.records())

The recorder's writer (trace.writer) drops what the disk does not accept, because a
job must not wait; here nothing waits, and every error is raised.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from clusterprof.trace import column_codec as packing
from clusterprof.trace import frame
from clusterprof.trace.column_codec import RecordColumns, StrategyPlanner
from clusterprof.trace.frame import LayoutTable
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
from clusterprof.trace.segments import format_segment_name

MAX_VALUES_PER_FRAME = 1 << 18  # for records that share a frame; a larger one has its own


class Encoder:
    """Encodes records to frames and tracks which layouts the recording already holds."""

    def __init__(self) -> None:
        self._layouts = LayoutTable(_encode_msgpack)
        self._columns_planner = StrategyPlanner()
        self._rows_planner = StrategyPlanner()

    def reset_layouts(self) -> None:
        """Write every layout again: at the start of a segment, and after frames were lost."""
        self._layouts.reset()
        self._columns_planner.reset()
        self._rows_planner.reset()

    def frames(self, records: Iterable[Record]) -> list[bytes]:
        """Return the frames of these records: first those without columns, then kind by kind.

        Raises: ValueError for columns that do not match the schema.
        """
        frames: list[bytes] = []
        for kind, group in groupby(sorted(records, key=_rank_kind), key=type):
            if kind is Columns:
                frames += [
                    self._columns(portion)
                    for portion in _split_by_size(group, _count_columns_values)
                ]
            elif kind is Rows:
                frames += [
                    self._rows(portion) for portion in _split_by_size(group, _count_rows_values)
                ]
            elif kind is Spans:
                frames += [
                    _encode_spans(portion) for portion in _split_by_size(group, _count_spans_values)
                ]
            else:
                frames += [_encode_simple(record) for record in group]
        return frames

    def _columns(self, records: Sequence[Columns]) -> bytes:
        tables = []
        for record in records:
            rows, values = len(record.t_ns), record.values
            typecodes = _check_columns(values, rows, record.collector)
            if {len(record.signals), len(record.devices), len(record.masks)} - {len(values)}:
                raise ValueError(f"{record.collector}: signals, devices, values and masks differ")
            tables.append(RecordColumns(record.collector, rows, typecodes, values, (record.t_ns,)))
        sink = packing.PlaneSink()
        plans, blocks = self._columns_planner.pack(sink, tables, 1)
        parts: list[frame.ColumnsPart] = []
        layouts: list[bytes] = []
        for record, plan in zip(records, plans):
            names = tuple(record.signals), tuple(record.devices)
            layout = self._layouts.refer(
                frame.ColumnsLayout,
                (record.collector, *names, plan.stored, plan.flat_order),
                layouts,
            )
            masks = {}
            if any(record.masks):
                masks = {n: packing.pack_mask(mask) for n, mask in enumerate(record.masks) if mask}
            parts.append(frame.ColumnsPart(layout, len(record.t_ns), masks))
        return _finish_columns_frame(frame.KIND_COLUMNS, sink, blocks, parts, layouts)

    def _rows(self, records: Sequence[Rows]) -> bytes:
        sink = packing.PlaneSink()
        blocks: list[frame.ColumnBlock] = []
        parts: list[frame.ColumnsPart] = []
        layouts: list[bytes] = []
        for record in records:
            rows = len(record.columns[0]) if record.columns else 0
            typecodes = _check_columns(record.columns, rows, record.table)
            if len(record.names) != len(record.columns):
                raise ValueError(f"{record.table}: names and columns differ in number")
            table = RecordColumns(record.table, rows, typecodes, record.columns)
            (plan,), its_blocks = self._rows_planner.pack(sink, [table], _estimate_period(record))
            blocks += its_blocks
            strings = {name: tuple(values) for name, values in record.strings.items()}
            layout = self._layouts.refer(
                frame.RowsLayout,
                (record.table, tuple(record.names), plan.stored, plan.flat_order, strings),
                layouts,
            )
            parts.append(frame.ColumnsPart(layout, rows, {}))
        return _finish_columns_frame(frame.KIND_ROWS, sink, blocks, parts, layouts)


def _encode_spans(records: Sequence[Spans]) -> bytes:
    """Store end and start as duration and distance to the previous end, other fields
    unchanged.

    Spans are recorded as they end, so the distance is short (and negative for the outer one
    of two nested spans). Processes follow each other in one long column per field.
    """
    sink = packing.PlaneSink()
    blocks: list[frame.ColumnBlock] = []
    parts = []
    for record in records:
        columns = [record.columns[name] for name in SPAN_FIELDS]
        rows = len(columns[0])
        if any([len(column) != rows or column.typecode != "q" for column in columns]):
            raise ValueError(f"spans of {record.pid}: every column must be an array of {rows} q")
        parts.append(
            frame.SpansPart(
                record.pid,
                record.started_ticks,
                record.first_sequence,
                record.dropped,
                record.names,
                rows,
            )
        )
    fields = {name: b"".join([record.columns[name] for record in records]) for name in SPAN_FIELDS}
    base = fields["start_ns"][: packing.LANE_BYTES]
    lanes = len(fields["start_ns"]) // packing.LANE_BYTES
    constants = {}
    if lanes:
        starts = int.from_bytes(fields["start_ns"], "little")
        ends = int.from_bytes(fields["end_ns"], "little")
        before = (ends << 64 | int.from_bytes(base, "little")) & (1 << 64 * lanes) - 1
        for left, right in ((starts, before), (ends, starts)):
            folded, zigzag = packing.encode_zigzag(
                packing.subtract_lanes(left, right, lanes), lanes
            )
            column = folded.to_bytes(lanes * packing.LANE_BYTES, "little")
            blocks.append(packing.pack_plain(sink, column, zigzag))
        for name in SPAN_FIELDS[2:]:
            column = fields[name]
            first = column[: packing.LANE_BYTES]
            if column == first * lanes:
                constants[name] = int.from_bytes(first, "little", signed=True)
            else:
                blocks.append(packing.pack_plain(sink, column))
    raw, unpacked, codec, body = sink.body()
    base_ns = int.from_bytes(base, "little", signed=True)
    header = frame.SpansHeader(raw, unpacked, blocks, parts, base_ns, constants)
    return frame.pack_frame(frame.KIND_SPANS, _encode_msgpack(header), body, codec)


def _finish_columns_frame(
    kind: int,
    sink: packing.PlaneSink,
    blocks: list[frame.ColumnBlock],
    parts: list[frame.ColumnsPart],
    layouts: list[bytes],
) -> bytes:
    # Samples consist mostly of runs; tables repeat at a distance.
    strategy = zlib.Z_RLE if kind == frame.KIND_COLUMNS else zlib.Z_DEFAULT_STRATEGY
    raw, unpacked, codec, body = sink.body(strategy)
    header = frame.ColumnsHeader(raw, unpacked, blocks, parts, layouts)
    return frame.pack_frame(kind, _encode_msgpack(header), body, codec)


_SIMPLE_KINDS: dict[type, int] = {
    Header: frame.KIND_HEADER,
    Clock: frame.KIND_CLOCK,
    Event: frame.KIND_EVENT,
    Gap: frame.KIND_GAP,
}


def _rank_kind(record: Record) -> int:
    return _KIND_ORDER.get(type(record), 0)


_KIND_ORDER: dict[type, int] = {Columns: 1, Rows: 2, Spans: 3}


def _encode_simple(record: Record) -> bytes:
    """Encode a record without columns as a map of its fields."""
    return frame.pack_frame(_SIMPLE_KINDS[type(record)], _encode_msgpack(record))


_get_typecode = attrgetter("typecode")


def _check_columns(columns: Sequence[array], rows: int, name: str) -> str:
    typecodes = "".join(map(_get_typecode, columns))
    if {*map(len, columns)} - {rows} or typecodes.strip("qd"):
        raise ValueError(f"{name}: every column must be an array of {rows} q or d")
    return typecodes


def _estimate_period(record: Rows) -> int:
    """Return after how many rows the same thread appears again; rows of one thread are most
    similar.
    """
    for name in ("tid", "pid"):
        if name in record.names:
            column = record.columns[list(record.names).index(name)]
            if len(column) > 1:
                with suppress(ValueError):
                    return int(column.index(column[0], 1))
    return 1


def _split_by_size(records: Iterable[Any], values_of: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Split records into portions for frames of bounded size."""
    portion: list[Any] = []
    values = 0
    for record in records:
        size = values_of(record)
        if portion and values + size > MAX_VALUES_PER_FRAME:
            yield portion
            portion, values = [], 0
        portion.append(record)
        values += size
    if portion:
        yield portion


def _count_columns_values(record: Columns) -> int:
    return len(record.t_ns) * (1 + len(record.values))


def _count_rows_values(record: Rows) -> int:
    return sum(map(len, record.columns))


def _count_spans_values(record: Spans) -> int:
    return sum(map(len, record.columns.values()))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=str)


def _encode_msgpack(value: Any) -> bytes:
    """Return msgpack; values it cannot represent (lone surrogates, huge integers) are written
    as text.
    """
    try:
        return _ENCODER.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return _ENCODER.encode(
            _convert_unencodable(msgspec.to_builtins(value, enc_hook=str, str_keys=False))
        )


def _convert_unencodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return str(value)
    if isinstance(value, dict):
        return {
            _convert_unencodable(key): _convert_unencodable(item) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_convert_unencodable(item) for item in value]
    return value


def write_node(folder: Path, header: Header, records: Iterable[Sequence[Record]]) -> None:
    """Write one segment: the header, then the records; each given group shares frames.

    The folder is created (mode 0700) when it does not exist.
    Raises: OSError when the segment exists or cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    encoder = Encoder()
    with open(folder / format_segment_name(1), "xb") as file:
        file.write(b"".join(encoder.frames([header])))
        for group in records:
            file.write(b"".join(encoder.frames(group)))
