"""Turns records into frames: what was sampled together is stored together.

Consecutive records of one kind share a frame, because a frame costs as much as the spans of a
process in a second.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec

from clusterprof.trace import columns as packing
from clusterprof.trace import frame
from clusterprof.trace.layouts import LayoutTable
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
from clusterprof.trace.storage import Planner, Table

MAX_VALUES_PER_FRAME = 1 << 18  # records that share a frame; a larger one has a frame to itself


class Encoder:
    """Makes frames of records; knows which layouts the recording already holds."""

    def __init__(self) -> None:
        self._layouts = LayoutTable(_encode)
        self._columns_planner = Planner()
        self._rows_planner = Planner()

    def define_again(self) -> None:
        """Write every layout anew: at the start of a segment, and after frames were lost."""
        self._layouts.define_again()
        self._columns_planner.forget()
        self._rows_planner.forget()

    def frames(self, records: Iterable[Record]) -> list[bytes]:
        """Return the frames of these records: first those without columns, then kind by kind.

        Raises ValueError for columns that are not what the schema says.
        """
        made: list[bytes] = []
        for kind, group in groupby(sorted(records, key=_place), key=type):
            if kind is Columns:
                made += [self._columns(some) for some in _portions(group, _values_of_columns)]
            elif kind is Rows:
                made += [self._rows(some) for some in _portions(group, _values_of_rows)]
            elif kind is Spans:
                made += [_spans(some) for some in _portions(group, _values_of_spans)]
            else:
                made += [_simple(record) for record in group]
        return made

    def _columns(self, records: Sequence[Columns]) -> bytes:
        tables = []
        for record in records:
            rows, values = len(record.t_ns), record.values
            typecodes = _check(values, rows, record.collector)
            if {len(record.signals), len(record.devices), len(record.masks)} - {len(values)}:
                raise ValueError(f"{record.collector}: signals, devices, values and masks differ")
            tables.append(Table(record.collector, rows, typecodes, values, (record.t_ns,)))
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
        return _finish(frame.KIND_COLUMNS, sink, blocks, parts, layouts)

    def _rows(self, records: Sequence[Rows]) -> bytes:
        sink = packing.PlaneSink()
        blocks: list[frame.Block] = []
        parts: list[frame.ColumnsPart] = []
        layouts: list[bytes] = []
        for record in records:
            rows = len(record.columns[0]) if record.columns else 0
            typecodes = _check(record.columns, rows, record.table)
            if len(record.names) != len(record.columns):
                raise ValueError(f"{record.table}: names and columns differ in number")
            table = Table(record.table, rows, typecodes, record.columns)
            (plan,), its_blocks = self._rows_planner.pack(sink, [table], _period(record))
            blocks += its_blocks
            strings = {name: tuple(values) for name, values in record.strings.items()}
            layout = self._layouts.refer(
                frame.RowsLayout,
                (record.table, tuple(record.names), plan.stored, plan.flat_order, strings),
                layouts,
            )
            parts.append(frame.ColumnsPart(layout, rows, {}))
        return _finish(frame.KIND_ROWS, sink, blocks, parts, layouts)


def _spans(records: Sequence[Spans]) -> bytes:
    """Store end and start as duration and distance to the end before, the rest as it is.

    Spans are recorded as they end, so the distance is short (and negative for the outer one of
    two nested spans); processes follow each other in one long column per field.
    """
    sink = packing.PlaneSink()
    blocks: list[frame.Block] = []
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
            folded, zigzag = packing.fold(packing.difference(left, right, lanes), lanes)
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
    return frame.pack(frame.KIND_SPANS, _encode(header), body, codec)


def _finish(
    kind: int,
    sink: packing.PlaneSink,
    blocks: list[frame.Block],
    parts: list[frame.ColumnsPart],
    layouts: list[bytes],
) -> bytes:
    # Samples hold runs and little else; tables repeat themselves at a distance.
    strategy = zlib.Z_RLE if kind == frame.KIND_COLUMNS else zlib.Z_DEFAULT_STRATEGY
    raw, unpacked, codec, body = sink.body(strategy)
    header = frame.ColumnsHeader(raw, unpacked, blocks, parts, layouts)
    return frame.pack(kind, _encode(header), body, codec)


_SIMPLE_KINDS: dict[type, int] = {
    Header: frame.KIND_HEADER,
    Clock: frame.KIND_CLOCK,
    Event: frame.KIND_EVENT,
    Gap: frame.KIND_GAP,
}


def _place(record: Record) -> int:
    return _PLACES.get(type(record), 0)


_PLACES: dict[type, int] = {Columns: 1, Rows: 2, Spans: 3}


def _simple(record: Record) -> bytes:
    """Records without columns are a map of their fields."""
    return frame.pack(_SIMPLE_KINDS[type(record)], _encode(record))


_typecode = attrgetter("typecode")


def _check(columns: Sequence[array], rows: int, name: str) -> str:
    typecodes = "".join(map(_typecode, columns))
    if {*map(len, columns)} - {rows} or typecodes.strip("qd"):
        raise ValueError(f"{name}: every column must be an array of {rows} q or d")
    return typecodes


def _period(record: Rows) -> int:
    """Return after how many rows the same thread comes again: it resembles itself most."""
    for name in ("tid", "pid"):
        if name in record.names:
            column = record.columns[list(record.names).index(name)]
            if len(column) > 1:
                with suppress(ValueError):
                    return int(column.index(column[0], 1))
    return 1


def _portions(records: Iterable[Any], values_of: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Share records out among frames of a bounded size."""
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


def _values_of_columns(record: Columns) -> int:
    return len(record.t_ns) * (1 + len(record.values))


def _values_of_rows(record: Rows) -> int:
    return sum(map(len, record.columns))


def _values_of_spans(record: Spans) -> int:
    return sum(map(len, record.columns.values()))


_ENCODER = msgspec.msgpack.Encoder(enc_hook=str)


def _encode(value: Any) -> bytes:
    """Return msgpack; what it cannot hold (lone surrogates, huge integers) is written as text."""
    try:
        return _ENCODER.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return _ENCODER.encode(_speakable(msgspec.to_builtins(value, enc_hook=str, str_keys=False)))


def _speakable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return str(value)
    if isinstance(value, dict):
        return {_speakable(key): _speakable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_speakable(item) for item in value]
    return value
