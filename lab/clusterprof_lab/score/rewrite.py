"""Rewrite a recording with fewer signals, as a recorder without some of its sources would write it.

`RemovedSignals` lists what to leave out; `rewrite_recording` reads a recording and writes another,
node by node. The rest is unchanged. What is left out is replaced by a gap with a reason, as for an
absent source.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.probe import layout
from clusterprof.trace.reader import NodeReader, list_node_folders
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
from clusterprof.trace.writer import RecordingWriter

ALL_SPANS = frozenset({*layout.KIND_NAMES, -1})
"""-1: kinds of the user's own."""
OF_COLLECTIVES = frozenset({"group-announced", "operation-under-way"})
_AT_ONCE = 64
_SECOND = 1_000_000_000
_ROOM = 1 << 40


@dataclass(frozen=True, slots=True)
class RemovedSignals:
    """What is left out of a recording."""

    name: str
    what: str
    """In words."""
    spans: frozenset[int] = frozenset()
    """Kinds of spans."""
    sources: frozenset[str] = frozenset()
    """Collectors and tables."""
    only_sources: frozenset[str] | None = None
    """Collectors and tables that stay; None = all but `sources`."""
    signals: tuple[str, ...] = ()
    """Beginnings of names of signals."""
    events: frozenset[str] = frozenset()
    rank: int | None = None
    """The only rank that was recorded."""
    device_gaps_s: tuple[int, int] | None = None
    """(seconds without samples of devices, of how many)."""

    def is_removed(self, source: str) -> bool:
        """Return whether a collector or table is missing."""
        if self.only_sources is not None:
            return source not in self.only_sources
        return source in self.sources


Convert = Callable[[Record], Iterator[Record]]


def rewrite_recording(
    recording: Path,
    folder: Path,
    less: RemovedSignals,
    open_view: Callable[[Path], Convert] | None = None,
) -> Path:
    """Write what is left of a recording; return the folder, one sub-folder per node.

    open_view: returns for a node's folder the conversion that each record passes first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for node in list_node_folders(recording):
        convert = _keep_record if open_view is None else open_view(node)
        if less.rank is None:
            _rewrite_node(node, folder / node.name, less, None, convert)
            continue
        alone = _find_visible_rank(node, less.rank)
        if alone is not None:
            _rewrite_node(node, folder / node.name, less, alone, convert)
    return folder


def _keep_record(record: Record) -> Iterator[Record]:
    yield record


@dataclass(frozen=True, slots=True)
class _VisibleRank:
    """One rank of a node, and who else is there."""

    pids: frozenset[int]
    """Its own and its workers'."""
    others: frozenset[int]
    """Other ranks and theirs."""
    other_devices: frozenset[str]


def _find_visible_rank(node: Path, rank: int) -> _VisibleRank | None:
    """Return what belongs to a rank; None when it is not of this node."""
    rank_of: dict[int, int] = {}
    device_of: dict[int, str] = {}
    parent_of: dict[int, int] = {}
    for record in NodeReader(node):
        if isinstance(record, Event) and record.kind == "process-registered":
            process_rank = _find_rank(record.attributes)
            if process_rank is not None:
                rank_of[record.attributes["pid"]] = process_rank
                device_of[record.attributes["pid"]] = record.attributes.get("device", "")
        elif isinstance(record, Rows) and record.table == "processes":
            columns = dict(zip(record.names, record.columns))
            parent_of.update(zip(columns["pid"].tolist(), columns["parent_pid"].tolist()))
        elif isinstance(record, Spans):
            starts = record.columns["kind"] == layout.WORKER_START
            for parent in record.columns["c"][starts].tolist():
                parent_of.setdefault(record.pid, parent)
    if rank not in rank_of.values():
        return None
    mine = {pid for pid, process_rank in rank_of.items() if process_rank == rank}
    others = set(rank_of) - mine
    for pid in parent_of:
        at, seen = pid, set()
        while at in parent_of and at not in rank_of and at not in seen:
            seen.add(at)
            at = parent_of[at]
        if at in mine:
            mine.add(pid)
        elif at in others:
            others.add(pid)
    devices = {device_of.get(pid, "") for pid in others} - {device_of.get(pid) for pid in mine}
    return _VisibleRank(frozenset(mine), frozenset(others), frozenset(devices - {""}))


def _find_rank(attributes: Mapping[str, Any]) -> int | None:
    given = attributes.get("rank")
    if given is None:
        given = attributes.get("variables", {}).get("RANK")
    return None if given is None else int(given)


def _rewrite_node(
    node: Path, folder: Path, less: RemovedSignals, alone: _VisibleRank | None, convert: Convert
) -> None:
    writer: RecordingWriter | None = None
    early: list[Record] = []
    header: Header | None = None
    latest = Clock(0, 0, 0)

    def clock() -> Clock:
        return latest

    missing: set[str] = set()
    for record in chain.from_iterable(map(convert, NodeReader(node))):
        if isinstance(record, Header):
            header = header or _rewrite_header(record, less, alone)
            continue
        if isinstance(record, Clock):
            latest = record
            if writer is None and header is not None:
                writer = RecordingWriter(
                    folder,
                    header,
                    clock,
                    keep_free_bytes=0,
                    max_bytes=_ROOM,
                    segment_ns=1 << 62,
                    buffer_bytes=_ROOM,
                )
                continue
        for kept in _rewrite_record(record, less, alone, missing, latest.monotonic_ns):
            early.append(kept)
        if writer is not None and len(early) >= _AT_ONCE:
            _append_records(writer, early)
    if writer is None:
        raise ValueError(f"{node}: no header and clock to begin a recording with")
    _append_records(writer, early)
    writer.close()


def _append_records(writer: RecordingWriter, records: list[Record]) -> None:
    for record in records:  # one by one: frames keep the order of what stands in them
        writer.append(record)
    records.clear()


def _rewrite_header(header: Header, less: RemovedSignals, alone: _VisibleRank | None) -> Header:
    kept = [
        collector
        for collector in header.collectors
        if not less.is_removed(str(collector.get("name")))
    ]
    devices = header.devices
    if less.is_removed("gpu_emulated") or less.is_removed("gpu_nvidia"):
        devices = []
    elif alone is not None:
        devices = [device for device in devices if device.get("id") not in alone.other_devices]
    return replace(header, collectors=kept, devices=devices)


def _rewrite_record(
    record: Record, less: RemovedSignals, alone: _VisibleRank | None, missing: set[str], now_ns: int
) -> Iterator[Record]:
    """Yield what is left of a record; the first time a source is left out, a gap."""
    if isinstance(record, Columns):
        if less.is_removed(record.collector):
            yield from _make_gap(record.collector, missing, less, now_ns)
            return
        yield from _rewrite_columns(record, less, alone)
    elif isinstance(record, Rows):
        if less.is_removed(record.table):
            yield from _make_gap(record.table, missing, less, now_ns)
            return
        yield from _rewrite_rows(record, alone)
    elif isinstance(record, Spans):
        if alone is None or record.pid in alone.pids:
            yield from _rewrite_spans(record, less.spans)
    elif isinstance(record, Event):
        pid = record.attributes.get("pid")
        if record.kind not in less.events and not (alone is not None and pid in alone.others):
            yield record
    elif isinstance(record, Gap):
        if not less.is_removed(record.collector):
            yield record
    else:
        yield record


def _make_gap(
    source: str, missing: set[str], less: RemovedSignals, now_ns: int
) -> Iterator[Record]:
    if source not in missing:
        missing.add(source)
        yield Gap(now_ns, source, "", "", "absent", f"left out of the recording: {less.name}", "")


def _rewrite_columns(
    record: Columns, less: RemovedSignals, alone: _VisibleRank | None
) -> Iterator[Record]:
    gone: Collection[str] = alone.other_devices if alone is not None else ()
    kept = [
        n
        for n, (signal, device) in enumerate(zip(record.signals, record.devices))
        if not signal.startswith(less.signals or ("\0",)) and device not in gone
    ]
    t_ns = np.asarray(record.t_ns)
    rows = np.ones(t_ns.size, np.bool_)
    if less.device_gaps_s is not None and record.collector.startswith("gpu_"):
        without_s, of_s = less.device_gaps_s
        rows = t_ns // _SECOND % of_s >= without_s
    if kept and rows.any():
        yield Columns(
            record.collector,
            [record.signals[n] for n in kept],
            [record.devices[n] for n in kept],
            _to_array(t_ns[rows]),
            [_to_array(np.asarray(record.values[n])[rows]) for n in kept],
            [_mask_rows(record.masks[n], rows) for n in kept],
        )


def _rewrite_rows(record: Rows, alone: _VisibleRank | None) -> Iterator[Record]:
    columns = [np.asarray(column) for column in record.columns]
    if alone is not None and "pid" in record.names:
        pids = columns[list(record.names).index("pid")]
        mine = ~np.isin(pids, np.array(sorted(alone.others), np.int64))
        columns = [column[mine] for column in columns]
    if len(columns[0]):
        made = [_to_array(column) for column in columns]
        yield Rows(record.table, record.names, made, dict(record.strings))


def _rewrite_spans(record: Spans, kinds: frozenset[int]) -> Iterator[Record]:
    kind = np.asarray(record.columns["kind"])
    gone = np.isin(kind, np.array(sorted(kinds), np.int64))
    if -1 in kinds:
        gone |= kind >= layout.FIRST_USER_KIND
    if gone.all() and len(kind):
        return
    columns = {name: _to_array(np.asarray(record.columns[name])[~gone]) for name in SPAN_FIELDS}
    yield replace(record, columns=columns)


def _to_array(column: Any) -> array:
    values = np.ascontiguousarray(column)
    made = array("d" if values.dtype.kind == "f" else "q")
    made.frombytes(values.astype("f8" if made.typecode == "d" else "i8").tobytes())
    return made


def _mask_rows(mask: Any, rows: Any) -> bytes | None:
    return None if mask is None else np.frombuffer(bytes(mask), np.uint8)[rows].tobytes()
