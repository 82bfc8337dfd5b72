"""Turns records into frames: what was sampled together is stored together.

Consecutive records of one kind share a frame, because a frame costs as much as the spans of a
process in a second. What hardly ever changes (the names of the columns) is written as a *layout*
in the first two frames that need it and then ever more rarely; the others refer to it by a key
that is made from its content, so a reader that lost one definition takes any other.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec

from clusterprof.trace import columns as packing
from clusterprof.trace import frame
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

MAX_VALUES_PER_FRAME = 1 << 18  # records that share a frame; a larger one has a frame to itself
_DEFINED_EVERY = 32  # uses of a layout between two definitions, once it is established
_TYPES = {"q": packing.INT, "d": packing.FLOAT}


@dataclass(slots=True)
class _Layout:
    identity: tuple[Any, ...]
    key: int
    definition: bytes
    uses: int = 0


@dataclass(slots=True)
class _Draft:
    """Blocks and planes of the frame that is being made."""

    sink: packing.PlaneSink = field(default_factory=packing.PlaneSink)
    blocks: list[frame.Block] = field(default_factory=list)


class Encoder:
    """Makes frames of records; knows which layouts the recording already holds."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[type, str], _Layout] = {}

    def define_again(self) -> None:
        """Write every layout anew: at the start of a segment, and after frames were lost."""
        for layout in self._layouts.values():
            layout.uses = 0

    def frames(self, records: Iterable[Record]) -> list[bytes]:
        """Return the frames of these records, in their order.

        Raises ValueError for columns that are not what the schema says.
        """
        made: list[bytes] = []
        for kind, group in groupby(records, key=type):
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
        draft, groups = _Draft(), _Groups()
        parts: list[frame.ColumnsPart] = []
        layouts: list[bytes] = []
        for record in records:
            types = _types(record.values, len(record.t_ns), record.collector)
            if not len(record.signals) == len(record.devices) == len(record.masks) == len(types):
                raise ValueError(f"{record.collector}: signals, devices, values and masks differ")
            identity = (tuple(record.signals), tuple(record.devices), types)
            layout = self._layout(frame.ColumnsLayout, (record.collector, *identity), layouts)
            masks = {
                index: packing.pack_mask(mask)
                for index, mask in enumerate(record.masks)
                if mask is not None
            }
            parts.append(frame.ColumnsPart(layout, len(record.t_ns), masks))
            groups.add("q", record.t_ns)
            for code, column in zip(types, record.values):
                groups.add(code, column)
        groups.pack(draft, 1)
        return _finish(frame.KIND_COLUMNS, draft, parts, layouts)

    def _rows(self, records: Sequence[Rows]) -> bytes:
        draft = _Draft()
        parts: list[frame.ColumnsPart] = []
        layouts: list[bytes] = []
        for record in records:
            rows = len(record.columns[0]) if record.columns else 0
            types = _types(record.columns, rows, record.table)
            if len(record.names) != len(types):
                raise ValueError(f"{record.table}: names and columns differ in number")
            strings = {name: tuple(values) for name, values in record.strings.items()}
            identity = (record.table, tuple(record.names), types, strings)
            layout = self._layout(frame.RowsLayout, identity, layouts)
            parts.append(frame.ColumnsPart(layout, rows, {}))
            groups = _Groups()
            for code, column in zip(types, record.columns):
                groups.add(code, column)
            groups.pack(draft, _period(record))
        return _finish(frame.KIND_ROWS, draft, parts, layouts)

    def _layout(self, kind: type, identity: tuple[Any, ...], layouts: list[bytes]) -> int:
        """Return the key of a layout; add its definition to `layouts` when it is due."""
        name = (kind, identity[0])
        known = self._layouts.get(name)
        if known is None or known.identity != identity:
            definition = _encode(kind(*identity))
            known = _Layout(identity, frame.layout_key(definition), definition)
            self._layouts[name] = known
        uses = known.uses
        # 0, 1, 3, 7, 15, 31, then every 32nd: one damaged place never takes the only copy.
        if uses & (uses + 1) == 0 if uses < _DEFINED_EVERY else uses % _DEFINED_EVERY == 31:
            layouts.append(known.definition)
        known.uses += 1
        return known.key


class _Groups:
    """Columns sorted by what can be packed together: type and length."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], list[array]] = {}

    def add(self, code: str, column: array) -> None:
        self._groups.setdefault((code, len(column)), []).append(column)

    def pack(self, draft: _Draft, lag: int) -> None:
        for (code, rows), columns in self._groups.items():
            if rows:
                draft.blocks.append(packing.pack_block(draft.sink, _TYPES[code], columns, lag))


def _spans(records: Sequence[Spans]) -> bytes:
    """Store end and start as duration and distance to the end before, the rest as it is.

    Spans are recorded as they end, so the distance is short (and negative for the outer one of
    two nested spans); processes follow each other in one long column per field.
    """
    draft = _Draft()
    parts = []
    for record in records:
        rows = len(record.columns["start_ns"])
        _types([record.columns[name] for name in SPAN_FIELDS], rows, f"spans of {record.pid}", "q")
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
        before = int.from_bytes(base + fields["end_ns"][: -packing.LANE_BYTES], "little")
        for left, right in ((starts, before), (ends, starts)):
            folded, zigzag = packing.fold(packing.difference(left, right, lanes), lanes)
            column = folded.to_bytes(lanes * packing.LANE_BYTES, "little")
            draft.blocks.append(packing.pack_plain(draft.sink, column, zigzag))
        for name in SPAN_FIELDS[2:]:
            column = fields[name]
            first = column[: packing.LANE_BYTES]
            if column == first * lanes:
                constants[name] = int.from_bytes(first, "little", signed=True)
            else:
                draft.blocks.append(packing.pack_plain(draft.sink, column))
    raw, unpacked, codec, body = draft.sink.body()
    base_ns = int.from_bytes(base, "little", signed=True)
    header = frame.SpansHeader(raw, unpacked, draft.blocks, parts, base_ns, constants)
    return frame.pack(frame.KIND_SPANS, _encode(header), body, codec)


def _finish(
    kind: int, draft: _Draft, parts: list[frame.ColumnsPart], layouts: list[bytes]
) -> bytes:
    raw, unpacked, codec, body = draft.sink.body()
    header = frame.ColumnsHeader(raw, unpacked, draft.blocks, parts, layouts)
    return frame.pack(kind, _encode(header), body, codec)


_SIMPLE_KINDS: dict[type, int] = {
    Header: frame.KIND_HEADER,
    Clock: frame.KIND_CLOCK,
    Event: frame.KIND_EVENT,
    Gap: frame.KIND_GAP,
}


def _simple(record: Record) -> bytes:
    """Records without columns are a map of their fields."""
    return frame.pack(_SIMPLE_KINDS[type(record)], _encode(record))


def _types(columns: Sequence[array], rows: int, name: str, allowed: str = "qd") -> str:
    types = "".join([column.typecode for column in columns])
    if set(map(len, columns)) - {rows} or set(types) - set(allowed):
        raise ValueError(f"{name}: every column must be an array of {rows} {' or '.join(allowed)}")
    return types


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
