"""Traces of AMD's profilers: rocprofv3 (SQLite, JSON, CSV), and the CSV of rocprof and rocprofv2.

## How to make the file

    rocprofv3 --kernel-trace --memory-copy-trace --hip-trace --marker-trace -- python train.py

The default output is SQLite (rocpd, `*_results.db`); `--output-format json` or `csv` are read too.
With one process per GPU put the rank into the name: `-o rank%rank%`.

## How to analyze it

    clusterprof analyze HOSTNAME/

## What is read

* **SQLite** (rocpd): kernel dispatches, memory copies, regions of the HIP API and of markers
  (roctx).
* **JSON** (`rocprofiler-sdk-tool`): the same records.
* **CSV**: the kernel, memory copy, HIP and marker tables of one process belong together by the
  beginning of their names (`4711_kernel_trace.csv`, `4711_hip_api_trace.csv`). Also `results.csv`
  of rocprof (`--timestamp on`) and of rocprofv2.

The first rocprof (`--hip-trace`) writes `results.db` and `results.json` of the same work: give one
of them. The JSON is read as a trace with named tracks.
Perfetto output (`.pftrace`) is refused with the way to convert it.

## How the numbers are computed

Like those of a Kineto trace: a device is busy while a kernel or a copy runs on any queue.
Communication is what kernels named rccl or nccl do. Kernels are matched to HIP calls by correlation
id. Steps are markers named step or iteration, with or without a number; without any, everything
from the first to the last work on the device is one step.

## What it cannot see

Times count from the start of the machine, so several hosts are aligned only by their collective
operations. Without `--hip-trace` no cause of idle time is known, and without markers no step.
Without `--kernel-trace` nothing is known and the files are refused.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import read_lines
from clusterprof.analysis.importers.kineto.event_columns import GatheredEvents
from clusterprof.analysis.importers.kineto.event_stream import Document
from clusterprof.analysis.importers.kineto.importer import build_node
from clusterprof.analysis.importers.kineto.tracks import (
    CALLS,
    DEVICE,
    MARKERS,
    Track,
    TrackEvents,
    convert_time,
)
from clusterprof.analysis.importers.nsys.database import (
    MAGIC,
    NUMBERED_STEP,
    STEP,
    DamagedError,
    Database,
    label_range,
)
from clusterprof.errors import UsageError

STEP_MARKS = (
    "markers of steps",
    "name roctx ranges 'step 1', 'step 2', … and add --marker-trace to see steps",
)
_NO_KERNELS = "no kernel is in the trace: add --kernel-trace, rocprofv3 --kernel-trace -- CMD"
MAX_JSON_BYTES, MAX_JSON_OBJECTS = 128 << 20, 2_000_000
"""Largest JSON that is decoded: some 200,000 kernels, in about 300 MB of memory."""
_JSON_KEY = b'"rocprofiler-sdk-tool"'
_TABLE_SUFFIX = re.compile(
    r"[_-]?(?:(?:kernel|memory_copy|hip(?:_api|_runtime)?|marker(?:_api)?)_trace|results)\.csv$"
)
_MAX_HEAD_LINE_BYTES = 1 << 14
_DIGITS = re.compile(r"(\d{1,9})\s*$")
_TO_DEVICE = re.compile(r"HOST_TO_DEVICE|CopyHostToDevice|\bH2D", re.IGNORECASE)
_TO_HOST = re.compile(r"DEVICE_TO_HOST|CopyDeviceToHost|\bD2H", re.IGNORECASE)
_COLUMNS = {
    "start": ("start_timestamp", "beginns", "start_time"),
    "end": ("end_timestamp", "endns", "end_time"),
    "kernel": ("kernel_name", "kernelname"),
    "call": ("function", "name"),
    "direction": ("direction",),
    "agent": ("agent_id", "gpu_id", "gpu-id"),
    "source": ("source_agent_id",),
    "target": ("destination_agent_id",),
    "queue": ("queue_id", "queue-id"),
    "domain": ("domain", "kind"),
    "link": ("correlation_id",),
    "thread": ("thread_id", "tid"),
}


class Recording:
    """Events of one process, on their way into the tables of a node."""

    def __init__(self, account: Account) -> None:
        self.gathered = GatheredEvents(account)
        self.tracks = TrackEvents(self.gathered)
        self.devices: dict[int, str] = {}
        """Product name by number of the device."""
        self.hostname = ""
        self._steps = 0

    def add_kernel(
        self, device: int, queue: object, name: str, times: tuple[int, int], link: int
    ) -> None:
        """Add a kernel. times: start and end, ns. link: correlation id, -1 if unknown."""
        self.devices.setdefault(device, "")
        self._add(DEVICE, self._queue(device, queue), name, times, link)

    def add_copy(
        self, device: int, direction: str, times: tuple[int, int], link: int, size: int
    ) -> None:
        """Add a memory copy. times: ns. size: bytes, -1 if unknown."""
        if device < 0:
            self.tracks.skip("copies between hosts")
            return
        self.devices.setdefault(device, "")
        name = "Memcpy"
        if _TO_DEVICE.search(direction):
            name = "Memcpy HtoD"
        elif _TO_HOST.search(direction):
            name = "Memcpy DtoH"
        self._add(DEVICE, self._queue(device, "copies"), name, times, link, size)

    def add_call(self, thread: object, name: str, times: tuple[int, int], link: int) -> None:
        """Add a call of the HIP API."""
        self._add(CALLS, Track(0, str(thread), "HIP API", ""), name, times, link)

    def add_marker(self, thread: object, name: str, times: tuple[int, int]) -> None:
        """Add a range that the program marked; it is a step if it is named like one."""
        kind, number = label_range(name[:200])
        if kind == STEP:
            self._steps += 1
            number = self._steps
        step = number if kind in (STEP, NUMBERED_STEP) else -1
        self._add(MARKERS, Track(0, str(thread), "Markers", ""), name, times, -1, step=step)

    def _queue(self, device: int, queue: object) -> Track:
        return Track(f"gpu{device}", str(queue), f"GPU {device}", f"queue {queue}")

    def _add(
        self,
        role: int,
        track: Track,
        name: str,
        times: tuple[int, int],
        link: int,
        size: int = -1,
        step: int = -1,
    ) -> None:
        start_ns, end_ns = times
        if not 0 < start_ns <= end_ns < 1 << 62:
            self.tracks.skip("without a usable time")
            return
        self.tracks.add(role, track, name, start_ns, end_ns - start_ns, link, size, step=step)

    def build(self, source: Source) -> NodeTables:
        """Build the node of this process.

        Raises: CannotImportError when no kernel or copy was added.
        """
        self.tracks.finish()
        self.gathered.finish()
        if not self.gathered.devices:
            raise CannotImportError(f"{source.path.name}: {_NO_KERNELS}")
        properties = [{"id": number, "name": name} for number, name in self.devices.items()]
        document = Document(device_properties=properties, runtime="hip")
        node = build_node(self.gathered, document, source, Rocprof.name, STEP_MARKS)
        node.name = self.hostname
        return node


class Rocprof:
    """Importer of rocprof traces; the tables of one process are read together."""

    name: ClassVar[str] = "rocprof"
    title: ClassVar[str] = "rocprof trace (AMD)"
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether this is a rocpd database, rocprofv3's JSON, or a table of a trace."""
        if head.startswith(MAGIC):
            return (
                b"rocpd_kernel_dispatch" in head or b"rocpd_info_agent" in head or _is_first(head)
            )
        if head.lstrip()[:1] == b"{":
            return _JSON_KEY in head[:4096]
        return _match_columns(head.split(b"\n", 1)[0]) is not None

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per process.

        Raises: CannotImportError when no file has work of a device.
        """
        groups: dict[Path, list[tuple[Source, Account]]] = {}
        for source, account in zip(sources, accounts):
            is_table = (
                not source.head.startswith((MAGIC, b"{")) and source.head.lstrip()[:1] != b"{"
            )
            name = _TABLE_SUFFIX.sub("", source.path.name) if is_table else source.path.name
            groups.setdefault(source.path.with_name(name or "-"), []).append((source, account))
        refusals, count = [], 0
        for members in groups.values():
            try:
                for recording in _read_group(members):
                    yield recording.build(members[0][0])
                    count += 1
            except (CannotImportError, UsageError, DamagedError) as error:
                refusals.append(getattr(error, "message", str(error)))
                for _, account in members:
                    account.refuse(refusals[-1])
        if not count:
            raise CannotImportError("; ".join(dict.fromkeys(refusals)) or _NO_KERNELS)


def _read_group(members: list[tuple[Source, Account]]) -> Iterator[Recording]:
    """Yield the processes of the files that belong together."""
    source, account = members[0]
    if source.head.startswith(MAGIC):
        with Database(source) as db:
            if db.has("OPS", "BeginNs", "EndNs"):
                yield _read_first_database(db, account)
            else:
                yield from _read_database(db, account)
    elif source.head.lstrip()[:1] == b"{":
        yield from _read_json(source, account)
    else:
        recording = Recording(account)
        for member, member_account in members:
            _read_table(member, member_account, recording)
        yield recording


def _is_first(head: bytes) -> bool:
    """Return whether this is the database of the first rocprof (`results.db`)."""
    return b"CREATE TABLE OPS" in head and b'"BeginNs"' in head


def _read_first_database(db: Database, account: Account) -> Recording:
    """Read kernels, copies and calls of the first rocprof; `Index` joins work and its call."""
    recording = Recording(account)
    work = ("BeginNs", "EndNs", "dev-id", "queue-id", "Name", "Index")
    for table in ("OPS", "COPY"):
        for rows in db.rows(table, work):
            for start, end, device, queue, name, link in rows:
                number, times = _parse_count(device), (_parse_count(start), _parse_count(end))
                if table == "OPS":
                    label = str(name or "")
                    recording.add_kernel(max(number, 0), queue, label, times, _parse_count(link))
                else:
                    recording.add_copy(number, str(name or ""), times, _parse_count(link), -1)
    for rows in db.rows("HIP", ("BeginNs", "EndNs", "tid", "Name", "Index")):
        for start, end, thread, name, link in rows:
            times = _parse_count(start), _parse_count(end)
            recording.add_call(thread, str(name or ""), times, _parse_count(link))
    return recording


def _match_columns(line: bytes) -> dict[str, int] | None:
    """Match the columns of a table by their names; None if it is not one of rocprof."""
    if len(line) > _MAX_HEAD_LINE_BYTES or b"," not in line or b"\0" in line:
        return None
    names = line.decode("utf-8", "replace").split(",")
    heads = [name.strip('" \r\ufeff').lower() for name in names]
    columns = {
        use: next(heads.index(name) for name in known if name in heads)
        for use, known in _COLUMNS.items()
        if any(name in heads for name in known)
    }
    has_times = "start" in columns and "end" in columns
    has_subject = "kernel" in columns or (
        "domain" in columns and {"call", "direction"} & {*columns}
    )
    return columns if has_times and has_subject else None


def _read_table(source: Source, account: Account, recording: Recording) -> None:
    lines = (
        line.decode("utf-8", "replace").replace("\0", "") for line in read_lines(source, account)
    )
    columns = _match_columns(next(lines, "").encode("utf-8", "replace")) or {}
    rows = csv.reader(lines)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            break
        except csv.Error:
            account.skipped["rows that are not CSV"] += 1
            continue
        if len(row) <= max(columns.values(), default=0):
            account.skipped["rows with columns missing"] += 1
            continue
        _add_row({use: row[index] for use, index in columns.items()}, recording)
        if account is not recording.gathered.account:
            account.read["rows"] += 1


def _add_row(row: dict[str, str], recording: Recording) -> None:
    times = _parse_count(row["start"]), _parse_count(row["end"])
    link = _parse_count(row.get("link"))
    if "kernel" in row:
        device = _parse_count(row.get("agent", "0"))
        recording.add_kernel(max(device, 0), row.get("queue", ""), row["kernel"], times, link)
    elif "direction" in row:
        to_host = _TO_HOST.search(row["direction"]) is not None
        device = _parse_count(row.get("source" if to_host else "target"))
        recording.add_copy(device, row["direction"], times, link, -1)
    elif "MARKER" in row["domain"]:
        recording.add_marker(row.get("thread", ""), row["call"], times)
    elif "HIP" in row["domain"]:
        recording.add_call(row.get("thread", ""), row["call"], times, link)
    else:
        recording.tracks.skip("calls of other interfaces")


def _parse_count(value: Any) -> int:
    """Parse a number, also of "Agent 4"; -1 if there is none."""
    if isinstance(value, str):
        number = convert_time(value, 1)
        match = None if number is not None else _DIGITS.search(value)
        return int(match[1]) if match else -1 if number is None else number
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and 0 <= value < 1 << 62 else -1


class _Handle(msgspec.Struct, gc=False):
    handle: int = -1


class _Link(msgspec.Struct, gc=False):
    internal: int = -1


class _Dispatch(msgspec.Struct, gc=False):
    agent_id: _Handle
    queue_id: _Handle
    kernel_id: int


class _Record(msgspec.Struct, gc=False):
    """One record; each needs its times, so that a file cannot hold many more than it has bytes."""

    start_timestamp: int
    end_timestamp: int
    kind: int = -1
    operation: int = -1
    thread_id: int = -1
    bytes: int = -1
    correlation_id: _Link = msgspec.field(default_factory=_Link)
    dispatch_info: _Dispatch | None = None
    src_agent_id: _Handle | None = None
    dst_agent_id: _Handle | None = None


class _Records(msgspec.Struct):
    kernel_dispatch: list[_Record] = []
    memory_copy: list[_Record] = []
    hip_api: list[_Record] = []
    marker_api: list[_Record] = []


class _Kind(msgspec.Struct):
    kind: str
    operations: list[str] = []


class _Message(msgspec.Struct):
    key: int
    value: str


class _Strings(msgspec.Struct):
    buffer_records: list[_Kind] = []
    marker_api: list[_Message] = []


class _Agent(msgspec.Struct):
    id: _Handle
    type: int = 0
    product_name: str = ""
    name: str = ""


class _Symbol(msgspec.Struct):
    kernel_id: int
    kernel_name: str = ""
    formatted_kernel_name: str = ""


class _Host(msgspec.Struct):
    hostname: str = ""


class _Metadata(msgspec.Struct):
    node: _Host = msgspec.field(default_factory=_Host)


class _Process(msgspec.Struct):
    buffer_records: _Records
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    agents: list[_Agent] = []
    strings: _Strings = msgspec.field(default_factory=_Strings)
    kernel_symbols: list[_Symbol] = []


class _Output(msgspec.Struct):
    processes: list[_Process] = msgspec.field(name="rocprofiler-sdk-tool")


_GPU_AGENT = 2


def _read_json(source: Source, account: Account) -> Iterator[Recording]:
    """Yield the processes of a JSON file.

    Raises: CannotImportError when it is too large, cut off or not of this form.
    """
    data = bytearray()
    for block in source.blocks(1 << 20):
        data += block
        if len(data) > MAX_JSON_BYTES:
            break
    if len(data) > MAX_JSON_BYTES or data.count(b"{") > MAX_JSON_OBJECTS:
        raise CannotImportError(
            f"{source.path.name}: more than {MAX_JSON_BYTES >> 20} MiB or {MAX_JSON_OBJECTS:,}"
            " objects of JSON; write SQLite instead: rocprofv3 --output-format rocpd"
        )
    try:
        output = msgspec.json.decode(data, type=_Output)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise CannotImportError(
            f"{source.path.name}: not readable as rocprofv3's JSON ({error}); profile again, or"
            " copy it again"
        ) from error
    del data
    for process in output.processes:
        yield _read_process(process, account)


def _read_process(process: _Process, account: Account) -> Recording:
    recording = Recording(account)
    recording.hostname = process.metadata.node.hostname[:253]
    gpus = [agent for agent in process.agents if agent.type == _GPU_AGENT]
    numbers = {agent.id.handle: number for number, agent in enumerate(gpus)}
    recording.devices = {
        numbers[agent.id.handle]: (agent.product_name or agent.name)[:100] for agent in gpus
    }
    kernels = {
        symbol.kernel_id: symbol.formatted_kernel_name or symbol.kernel_name
        for symbol in process.kernel_symbols
    }
    records, kinds = process.buffer_records, process.strings.buffer_records
    for record in records.kernel_dispatch:
        info, times, link = record.dispatch_info, *_read_record(record)
        if info is None:
            recording.tracks.skip("dispatches without a kernel")
            continue
        device = numbers.setdefault(info.agent_id.handle, len(numbers))
        recording.add_kernel(
            device, info.queue_id.handle, kernels.get(info.kernel_id, ""), times, link
        )
    for record in records.memory_copy:
        direction, (times, link) = _find_operation(record, kinds), _read_record(record)
        agent = record.src_agent_id if _TO_HOST.search(direction) else record.dst_agent_id
        device = numbers.get(agent.handle, -1) if agent is not None else -1
        recording.add_copy(device, direction, times, link, record.bytes)
    for record in records.hip_api:
        times, link = _read_record(record)
        recording.add_call(record.thread_id, _find_operation(record, kinds), times, link)
    messages = {message.key: message.value for message in process.strings.marker_api}
    for record in records.marker_api:
        times, link = _read_record(record)
        recording.add_marker(record.thread_id, messages.get(link, ""), times)
    return recording


def _read_record(record: _Record) -> tuple[tuple[int, int], int]:
    link = record.correlation_id.internal
    return (record.start_timestamp, record.end_timestamp), link if 0 <= link < 1 << 62 else -1


def _find_operation(record: _Record, kinds: list[_Kind]) -> str:
    """Return the name of a record's operation; empty if the file does not have it."""
    operations = kinds[record.kind].operations if 0 <= record.kind < len(kinds) else []
    return operations[record.operation] if 0 <= record.operation < len(operations) else ""


@dataclass(slots=True)
class _Tables:
    """Tables of one process in a database: their names end in the same identifier."""

    suffix: str
    strings: dict[int, str] = field(default_factory=dict)
    stack_ids: dict[int, int] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)


def _read_database(db: Database, account: Account) -> Iterator[Recording]:
    prefix = "rocpd_kernel_dispatch"
    suffixes = [name[len(prefix) :] for name in db.tables if name.startswith(prefix)]
    for suffix in suffixes[:4096]:
        tables, recording = _Tables(suffix), Recording(account)
        for id_, text in _rows(db, tables, "string", "id", "string"):
            tables.strings[id_] = str(text)
        for id_, category, stack in _rows(db, tables, "event", "id", "category_id", "stack_id"):
            tables.stack_ids[id_] = stack if isinstance(stack, int) else -1
            tables.categories[id_] = tables.strings.get(category, "")
        for _, name in _rows(db, tables, "info_node", "id", "hostname"):
            recording.hostname = str(name or "")[:253]
        _read_database_work(db, tables, recording)
        _read_regions(db, tables, recording)
        if recording.devices:
            yield recording
    if not suffixes:
        raise CannotImportError(_NO_KERNELS)


def _rows(db: Database, tables: _Tables, table: str, *columns: str) -> Iterable[tuple[Any, ...]]:
    """Yield rows of a table whose first value is an integer."""
    for rows in db.rows(f"rocpd_{table}{tables.suffix}", columns):
        for row in rows:
            if isinstance(row[0], int):
                yield row


def _read_database_work(db: Database, tables: _Tables, recording: Recording) -> None:
    """Read agents, kernels and copies."""
    kernels = {
        id_: str(display or name or "")
        for id_, display, name in _rows(
            db, tables, "info_kernel_symbol", "id", "display_name", "kernel_name"
        )
    }
    numbers: dict[Any, int] = {}
    for id_, kind, product, name in sorted(
        _rows(db, tables, "info_agent", "id", "type", "product_name", "name"),
        key=lambda row: row[0],
    ):
        if "GPU" in str(kind).upper():
            recording.devices[len(numbers)] = str(product or name or "")[:100]
            numbers[id_] = len(numbers)
    columns = ("start", "end", "agent_id", "queue_id", "kernel_id", "event_id")
    for start, end, agent, queue, kernel, event in _rows(db, tables, "kernel_dispatch", *columns):
        device = numbers.setdefault(agent, len(numbers))
        times, link = (start, _parse_count(end)), tables.stack_ids.get(event, -1)
        recording.add_kernel(device, queue, kernels.get(kernel, ""), times, link)
    copy_columns = ("start", "end", "src_agent_id", "dst_agent_id", "name_id", "event_id", "size")
    for start, end, source, target, name, event, size in _rows(
        db, tables, "memory_copy", *copy_columns
    ):
        direction = tables.strings.get(name, "")
        device = numbers.get(source if _TO_HOST.search(direction) else target, -1)
        times, link = (start, _parse_count(end)), tables.stack_ids.get(event, -1)
        recording.add_copy(device, direction, times, link, _parse_count(size))


def _read_regions(db: Database, tables: _Tables, recording: Recording) -> None:
    """Read calls of the HIP API and markers."""
    columns = ("start", "end", "tid", "name_id", "event_id", "extdata")
    for start, end, thread, name_id, event, extra in _rows(db, tables, "region", *columns):
        category, name = tables.categories.get(event, ""), tables.strings.get(name_id, "")
        times = start, _parse_count(end)
        if category.startswith("HIP"):
            recording.add_call(thread, name, times, tables.stack_ids.get(event, -1))
        elif category.startswith("MARKER"):
            recording.add_marker(thread, _read_message(extra) or name, times)
        else:
            recording.tracks.skip("calls of other interfaces")


def _read_message(extra: Any) -> str:
    try:
        value = msgspec.json.decode(str(extra))
    except (msgspec.DecodeError, RecursionError):
        return ""
    message = value.get("message") if isinstance(value, dict) else None
    return message if isinstance(message, str) else ""
