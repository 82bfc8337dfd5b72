"""Refine our recording of a rank with the exact device times of a profiler's trace.

Samples show how long a device was idle between two readings; a trace of kernels shows
when. Where a trace lies within our recording of its rank, by their wall clocks, the
counter `gpu.busy_ns_total` of the rank's device follows the trace there and continues
as before:

    samples     0 ........ 40 ........ 90 ........ 130      ms of device work so far
    trace                    |=--==-=|                      activity of the device
    refined     0 ........ 40 41 41 43 44 .. 86 ... 126

Everything else in the trace is left out: the recording has it too, measured more
closely.

It also reads NCCL flight recorder dumps, `<node>/nccl/<prefix><rank>` in a recording.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.analysis.importers.nccl.flight_recorder import (
    Dump,
    describe_stuck_ranks,
    find_waiting_ranks,
    read_dump,
)
from clusterprof.analysis.timeline.load.chunks import NodeLoader
from clusterprof.analysis.timeline.load.ranks import find_ranks, parse_job_position
from clusterprof.analysis.timeline.model import Float, Int
from clusterprof.errors import Unavailable
from clusterprof.signals import GPU_BUSY_TIME
from clusterprof.trace.encoder import write_node
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Columns, Event, Header, Record, Rows, Spans
from clusterprof.units import format_quantity

_BUSY = GPU_BUSY_TIME.name


@dataclass(frozen=True, slots=True)
class DeviceTrace:
    """Device counter of one rank in an imported node."""

    folder: Path
    rank: int
    wall_ns: Int
    """Times of its readings, sorted; int64[n], ns by the wall clock."""
    busy_ns: Float


@dataclass(frozen=True, slots=True)
class RefinedCounter:
    """A device's busy counter with a trace inserted."""

    t_ns: Int
    """Times of the trace on the recording's clock; int64[n], ns."""
    busy_ns: Float
    """Value of the counter at these times; float64[n], ns."""
    shift_ns: float
    """Increase of all later readings, ns."""

    def interpolate(self, t_ns: Int, values: Float) -> Float:
        """Return the refined counter at the readings `t_ns` (int64[n]) of `values` (float64[n])."""
        within = np.interp(t_ns, self.t_ns, self.busy_ns)
        late = np.where(t_ns > self.t_ns[-1], values + self.shift_ns, within)
        return np.where(t_ns < self.t_ns[0], values, late)


def merge_device_traces(
    nodes: Sequence[Path], imported: Sequence[Path], folder_for_copies: Path
) -> tuple[list[Path], list[Path], list[str]]:
    """Refine the recordings of nodes with the traces of imported nodes.

    Returns the folders of the nodes, some of them copies below `folder_for_copies`; the imported
    folders that were not used up; and notes.

    Raises: OSError when a copy cannot be written.
    """
    traces = [trace for folder in imported for trace in _read_traces(folder)]
    out, used, notes = [], set(), []
    for number, folder in enumerate(nodes):
        counters: dict[str, RefinedCounter] = {}
        for device, (rank, start_ns) in _find_rank_devices(
            folder, {trace.rank for trace in traces}
        ).items():
            for trace in traces:
                counter = _fit_trace(trace, folder, device) if trace.rank == rank else None
                if counter is None or trace.folder in used:
                    continue
                counters[device] = counter
                used.add(trace.folder)
                begin, until = (
                    format_quantity(t - start_ns, "ns") for t in (counter.t_ns[0], counter.t_ns[-1])
                )
                notes.append(
                    f"rank {rank}: from {begin} to {until} of the recording, device times are"
                    " those of its imported trace"
                )
        if counters:
            copy = folder_for_copies / f"refined-{number:04d}"
            _write_refined_copy(folder, copy, counters)
        out.append(copy if counters else folder)
    return out, [folder for folder in imported if folder not in used], notes


def _read_traces(folder: Path) -> Iterator[DeviceTrace]:
    """Yield the ranks of an imported node that have a number, a wall clock and device times."""
    header, ranks = None, {}
    readings: dict[str, list[tuple[Int, Float]]] = {}
    for record in NodeReader(folder):
        if isinstance(record, Header):
            header = record
        elif isinstance(record, Event) and record.kind == "process-registered":
            number = parse_job_position(record.attributes).rank
            if number is not None:
                ranks[number] = str(record.attributes.get("device") or "")
        elif isinstance(record, Columns):
            for row, name in enumerate(record.signals):
                if name == _BUSY:
                    read = np.asarray(record.t_ns), np.asarray(record.values[row], np.float64)
                    readings.setdefault(record.devices[row], []).append(read)
    if header is None or "realtime_ns" not in header.started:
        return
    offset_ns = header.started["realtime_ns"] - header.started["monotonic_ns"]
    for rank, device in ranks.items():
        if device in readings:
            t_ns = np.concatenate([t for t, _ in readings[device]]) + offset_ns
            yield DeviceTrace(folder, rank, t_ns, np.concatenate([v for _, v in readings[device]]))


def _find_rank_devices(folder: Path, wanted: set[int]) -> dict[str, tuple[int, int]]:
    """Find the device of each wanted rank of a node, with its rank and start time."""
    if not wanted:
        return {}
    chunk = next(NodeLoader(folder).chunks(), None)
    if chunk is None:
        return {}
    ranks = [rank for rank in find_ranks(chunk) if rank.rank in wanted and rank.device]
    return {rank.device: (rank.rank or 0, chunk.start_ns) for rank in ranks}


def _fit_trace(trace: DeviceTrace, folder: Path, device: str) -> RefinedCounter | None:
    """Insert a trace into the counter of a device; None where it lies outside the recording."""
    t_parts, v_parts = [], []
    started: Mapping[str, Any] = {}
    for record in NodeReader(folder):
        if isinstance(record, Header):
            started = started or record.started
        elif isinstance(record, Columns):
            for row, name in enumerate(zip(record.signals, record.devices)):
                if name == (_BUSY, device):
                    t_parts.append(np.asarray(record.t_ns))
                    v_parts.append(np.asarray(record.values[row], np.float64))
    if not t_parts or "realtime_ns" not in started:
        return None
    t_ns, busy_values = np.concatenate(t_parts), np.concatenate(v_parts)
    edges = trace.wall_ns - (started["realtime_ns"] - started["monotonic_ns"])
    if edges[0] < t_ns[0] or edges[-1] > t_ns[-1]:
        return None
    before, after = np.interp(edges[[0, -1]], t_ns, busy_values)
    busy_ns = before + trace.busy_ns - trace.busy_ns[0]
    return RefinedCounter(edges, busy_ns, float(busy_ns[-1] - after))


def _write_refined_copy(folder: Path, copy: Path, counters: Mapping[str, RefinedCounter]) -> None:
    reader = NodeReader(folder)
    header = next((record for record in reader if isinstance(record, Header)), None)
    assert header is not None  # the header's clock was needed to insert the trace
    write_node(copy, header, _merge_readings(reader, counters))


def _merge_readings(
    reader: NodeReader, counters: Mapping[str, RefinedCounter]
) -> Iterator[list[Record]]:
    """Yield the records of a node, with the readings of the traces among its own."""
    written = dict.fromkeys(counters, 0)
    for records in reader.frames():
        until_ns = max((_get_last_ns(record) for record in records), default=0)
        out: list[Record] = []
        for device, counter in counters.items():
            row = int(counter.t_ns.searchsorted(until_ns, side="right"))
            if row > written[device]:
                rows = slice(written[device], row)
                times = array("q", counter.t_ns[rows].tobytes())
                values = array("d", counter.busy_ns[rows].tobytes())
                name = f"trace:{device}"
                out.append(Columns(name, [_BUSY], [device], times, [values], [None]))
                written[device] = row
        yield out + [_convert_record(record, counters) for record in records]


def _get_last_ns(record: Record) -> int:
    if isinstance(record, Columns):
        return int(record.t_ns[-1]) if len(record.t_ns) else 0
    return int(record.t_ns) if isinstance(record, Event) else 0


def _convert_record(record: Record, counters: Mapping[str, RefinedCounter]) -> Record:
    """Convert a record for the encoder; readings of a refined device follow its trace."""
    if isinstance(record, Columns):
        values = [np.asarray(column) for column in record.values]
        for row, (signal, device) in enumerate(zip(record.signals, record.devices)):
            if signal == _BUSY and device in counters:
                refined_ns = counters[device].interpolate(
                    record.t_ns, values[row].astype(np.float64)
                )
                values[row] = np.rint(refined_ns).astype(values[row].dtype)
        masks = [None if mask is None else bytes(mask) for mask in record.masks]
        return replace(
            record,
            t_ns=_convert_column(record.t_ns),
            values=[_convert_column(v) for v in values],
            masks=masks,
        )
    if isinstance(record, Rows):
        return replace(record, columns=[_convert_column(column) for column in record.columns])
    if isinstance(record, Spans):
        return replace(record, columns={k: _convert_column(v) for k, v in record.columns.items()})
    return record


def _convert_column(column: Any) -> array[Any]:
    column = np.ascontiguousarray(column)
    return array("d" if column.dtype.kind == "f" else "q", column.tobytes())


DUMP_FOLDER = "nccl"
_OTHER_SUFFIXES = (".log", ".jsonl", ".resumed")
"""Output of the Inspector, and dumps of ranks that stood still and went on."""
MAX_DUMP_FILES = 1024


def read_dumps(folders: Iterable[Path]) -> tuple[list[Dump], list[str]]:
    """Read the dumps in the folders of all nodes.

    Returns the latest dump of each rank by rank, first those of standstills, then those of ends,
    and why other dumps could not be read.
    """
    dumps: list[Dump] = []
    unread = []
    for folder in folders:
        for path in sorted((folder / DUMP_FOLDER).glob("*"))[:MAX_DUMP_FILES]:
            if path.suffix in _OTHER_SUFFIXES or not path.is_file():
                continue
            try:
                dumps.append(read_dump(path))
            except Unavailable as why:
                unread.append(why.message)
    return select_latest_dumps(dumps), unread


def select_latest_dumps(dumps: Iterable[Dump]) -> list[Dump]:
    """Select the latest dump of each rank from a standstill, and the latest from its end.

    The list is sorted by rank, dumps of standstills first.
    """
    latest: dict[tuple[bool, int], Dump] = {}
    for dump in dumps:
        key = dump.at_exit, dump.rank
        previous = latest.get(key)
        if previous is None or previous.at_ns < dump.at_ns:
            latest[key] = dump
    return [latest[key] for key in sorted(latest)]


def describe_dumps(dumps: Sequence[Dump], unread: Sequence[str]) -> tuple[str, ...]:
    """Describe the dumps of standstills in notes of the report."""
    notes = []
    dumps = [dump for dump in dumps if not dump.at_exit]
    if dumps:
        stuck = find_waiting_ranks(dumps)
        state = f"{_format_ranks(stuck)} waited in an operation" if stuck else "none was stuck"
        ranks = _format_ranks([dump.rank for dump in dumps])
        notes.append(f"flight recorder of {ranks}: {state} when it was written")
        notes += [f"flight recorder: {text}" for text in describe_stuck_ranks(dumps) if stuck]
    notes += [f"a flight recorder dump could not be read: {why}" for why in unread]
    return tuple(notes)


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format sorted ranks: `rank 5`, `ranks 0-3, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
