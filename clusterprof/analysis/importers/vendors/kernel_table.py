"""Tables of the work of an accelerator: one row per kernel or copy.

## How to make the file

    nsys stats -r cuda_gpu_trace --format csv report.nsys-rep > kernels.csv
    nvprof --print-gpu-trace --csv --log-file kernels.csv python train.py

Profiles of Ascend NPUs have such a table beside the trace: `kernel_details.csv`.

## How to analyze it

    clusterprof analyze kernels.csv

Where the database of Nsight Systems (`nsys export --type sqlite`) or the trace of the NPU
(`trace_view.json`) is still there, give that: it shows what the host did, too.

## What is read

Start, duration, name, device and stream of every row, in the units that the header or the row below
it states. The text that nvprof prints without `--csv` is read as well. Lines before the header are
skipped.

Header lines:

    Start (ns),Duration (ns),CorrId,…,Device,Ctx,Strm,Name           nsys stats
    "Start","Duration","Grid X",…,"Device","Context","Stream","Name" nvprof --csv
       Start  Duration            Grid Size … Stream  Name           nvprof
    Step Id,…,Stream ID,Name,Type,Accelerator Core,Start Time(us),…  Ascend

## How the numbers are computed

A device is busy while a kernel or a copy runs on any stream. Steps are those of the column
`Step Id`, each until the next begins; without it everything from the first to the last row is one
step.

## What it cannot see

The host: idle time of the device has no known cause. Times of nvprof and Nsight Systems count from
the start of the profile, so they are not aligned with other files. Tables that only sum kernels by
name (`cuda_gpu_kern_sum`) have no times and are refused.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import read_lines
from clusterprof.analysis.importers.kineto.event_columns import GatheredEvents
from clusterprof.analysis.importers.kineto.event_stream import Document
from clusterprof.analysis.importers.kineto.importer import build_node
from clusterprof.analysis.importers.kineto.tracks import (
    DEVICE,
    STEPS,
    Track,
    TrackEvents,
    convert_time,
)

STEP_MARKS = (
    "steps",
    "the table has no steps: profile with marks, and export the database instead",
)
_UNIT_NS = {
    **dict.fromkeys(("ns", "nsec"), 1),
    **dict.fromkeys(("us", "usec", "µs", "μs"), 1_000),
    **dict.fromkeys(("ms", "msec"), 1_000_000),
    **dict.fromkeys(("s", "sec"), 1_000_000_000),
}
_TIME_COLUMN = re.compile(r"(start|duration)(?: time)? ?(?:\((\w{1,5})\))?")
_COLUMNS = {
    "name": ("name",),
    "device": ("device", "device_id", "device id"),
    "stream": ("strm", "stream", "stream id"),
    "core": ("accelerator core",),
    "step": ("step id",),
}
_TEXT_HEAD = re.compile(r"\s*Start\s+Duration\s+Grid Size\s.*\sStream\s+Name\s*$")
_TEXT_TIMES = re.compile(r"\s*([\d.]{1,24})(ns|us|ms|s)\s+([\d.]{1,24})(ns|us|ms|s)\s")
_TEXT_STREAM = re.compile(r"(?:\((\d{1,4})\))?\s+\S+\s+(\S+)\s*$")
_NUMBERED = re.compile(r"\((\d{1,4})\)\s*$")
_MAX_LINES_BEFORE = 200
_MAX_HEAD_LINE_BYTES = 1 << 14
_MIN_EPOCH_NS = 10**18
_MAX_NS = 1 << 62


@dataclass(slots=True)
class _Layout:
    """Where a table has what."""

    columns: dict[str, int] = field(default_factory=dict)
    units_ns: dict[str, int] = field(default_factory=dict)
    """ns in a unit of `start` and `duration`; empty where the next row states the units."""
    name_offset: int = -1
    """Characters before the name in a table of text; -1 for CSV."""


def _parse_head(line: str) -> _Layout | None:
    """Parse the header of a table; None if the line is none."""
    if _TEXT_HEAD.match(line):
        return _Layout(name_offset=line.rstrip().rindex("Name"))
    if line.count(",") < 3 or len(line) > _MAX_HEAD_LINE_BYTES:
        return None
    layout = _Layout()
    for index, cell in enumerate(line.split(",")):
        name = cell.strip('" \t\r\ufeff').lower()
        if time := _TIME_COLUMN.fullmatch(name):
            layout.columns[time[1]] = index
            if unit_ns := _UNIT_NS.get(time[2] or ""):
                layout.units_ns[time[1]] = unit_ns
        for use, names in _COLUMNS.items():
            if name in names:
                layout.columns.setdefault(use, index)
    has_work = {"start", "duration", "name", "stream"} <= layout.columns.keys()
    if not has_work or not {"device", "core"} & layout.columns.keys():
        return None
    return layout if len(layout.units_ns) in (0, 2) else None


def _find_head(lines: Iterator[str]) -> _Layout | None:
    """Find the header among the first lines, and consume the lines up to it."""
    heads = (_parse_head(line) for line in islice(lines, _MAX_LINES_BEFORE))
    return next((layout for layout in heads if layout is not None), None)


class KernelTable:
    """Importer of tables with a row per kernel or copy."""

    name: ClassVar[str] = "kernel-table"
    title: ClassVar[str] = "table of kernels (nsys stats, nvprof, Ascend)"
    combines_files: ClassVar[bool] = False
    reads_windows: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether one of the first lines is the header of such a table."""
        if head.lstrip()[:1] in (b"{", b"[") or b"\0" in head[:4096]:
            return False
        if b"tart" not in head or b"uration" not in head:
            return False
        return _find_head(iter(head.decode("utf-8", "replace").splitlines())) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per file.

        Raises: CannotImportError when a file has no row with a time.
        """
        for source, account in zip(sources, accounts):
            yield _import_table(source, account)


def _import_table(source: Source, account: Account) -> NodeTables:
    gathered = GatheredEvents(account)
    work = _Work(TrackEvents(gathered))
    lines = (
        line.decode("utf-8", "replace").replace("\0", "") for line in read_lines(source, account)
    )
    layout = _find_head(lines)
    if layout is not None and layout.name_offset >= 0:
        for line in lines:
            _add_text_row(line, layout.name_offset, work)
    elif layout is not None:
        _add_csv_rows(lines, layout, work)
    work.finish()
    gathered.finish()
    if not gathered.devices:
        raise CannotImportError(
            f"{source.path.name}: no row has the time of a kernel",
            "export a table with a row per kernel: nsys stats -r cuda_gpu_trace --format csv",
        )
    base_ns = work.tracks.base_ns or 0
    names = [{"id": number, "name": name} for name, number in work.devices.items()]
    document = Document(
        base_ns=base_ns if base_ns > _MIN_EPOCH_NS else None, device_properties=names
    )
    return build_node(gathered, document, source, KernelTable.name, STEP_MARKS)


class _Work:
    """Rows of a table, on their way into the tables of a node."""

    def __init__(self, tracks: TrackEvents) -> None:
        self.tracks = tracks
        self.devices: dict[str, int] = {}
        """Number of a device by its name in the table."""
        self._steps: dict[int, tuple[int, int]] = {}

    def add(
        self, name: str, device: str, stream: str, start_ns: int, length_ns: int, step: int = -1
    ) -> None:
        """Add a kernel or copy. step: number of its step, -1 if unknown."""
        numbered = _NUMBERED.search(device)
        if device not in self.devices:
            number = int(numbered[1]) if numbered else len(self.devices)
            self.devices[device] = number
        number = self.devices[device]
        if length_ns < 0 or not 0 <= start_ns < _MAX_NS - length_ns:
            self.tracks.skip("without a usable time")
            return
        track = Track(f"gpu{number}", stream, f"GPU {number}", f"stream {stream}")
        self.tracks.add(DEVICE, track, name.replace("-to-", "to"), start_ns, length_ns)
        if step >= 0:
            first, last = self._steps.get(step, (start_ns, 0))
            self._steps[step] = min(first, start_ns), max(last, start_ns + length_ns)

    def finish(self) -> None:
        """Add the steps, and hand on what waits for the end."""
        track = Track("steps", "steps", "steps", "")
        if len(self._steps) > 1:
            for number, (start_ns, end_ns) in self._steps.items():
                self.tracks.add(STEPS, track, str(number), start_ns, end_ns - start_ns)
        self.tracks.finish()


def _add_csv_rows(lines: Iterator[str], layout: _Layout, work: _Work) -> None:
    """Add the rows below the header of a CSV table."""
    columns, units_ns = layout.columns, dict(layout.units_ns)
    needed = max(columns[use] for use in ("start", "duration", "name", "stream"))
    for row in csv.reader(lines):
        if len(row) <= needed:
            if row:
                work.tracks.skip("rows with columns missing")
            continue
        cells = {use: row[index].strip() for use, index in columns.items() if index < len(row)}
        if not units_ns:  # nvprof: the units are below the header
            units = {use: _UNIT_NS.get(cells[use], 0) for use in ("start", "duration")}
            if not all(units.values()):
                raise CannotImportError(
                    "the table does not state the units of its times",
                    "export it again, with the row of units below the header",
                )
            units_ns = units
            continue
        start_ns = convert_time(cells["start"], units_ns["start"])
        length_ns = convert_time(cells["duration"], units_ns["duration"])
        if start_ns is None or length_ns is None:
            work.tracks.skip("without a usable time")
            continue
        step = cells.get("step", "")
        number = int(step) if step.isdecimal() and len(step) < 10 else -1
        work.add(
            cells["name"], cells.get("device", ""), cells["stream"], start_ns, length_ns, number
        )


def _add_text_row(line: str, name_offset: int, work: _Work) -> None:
    """Add a row of nvprof's text; other lines are skipped."""
    times, stream = _TEXT_TIMES.match(line), _TEXT_STREAM.search(line[:name_offset])
    name = line[name_offset:].strip()
    if times is None or stream is None or not name:
        return
    start_ns = convert_time(times[1], _UNIT_NS[times[2]])
    length_ns = convert_time(times[3], _UNIT_NS[times[4]])
    if start_ns is not None and length_ns is not None:
        device = f"({stream[1]})" if stream[1] else ""
        work.add(name, device, stream[2], start_ns, length_ns)
