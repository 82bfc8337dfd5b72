"""Logs of the NCCL Inspector plugin: the duration of each collective operation.

## How to make the file

    export NCCL_PROFILER_PLUGIN=/path/to/libnccl-profiler-inspector.so
    export NCCL_INSPECTOR_ENABLE=1 NCCL_INSPECTOR_DUMP_DIR=inspector/
    torchrun --nproc-per-node 8 train.py

## How to analyze it

    clusterprof analyze inspector/

## What is read

JSON lines of formats 4 and 5, a file per process. Newer versions write rank and communicator once,
before the operations. One line:

    {"header": {"id": "0x7f8c496ae9f661", "rank": 2, "n_ranks": 8, "nnodes": 1},
     "metadata": {"inspector_output_format_version": "v4.0",
                  "dump_timestamp_us": …, "pid": …},
     "coll_perf": {"coll": "AllReduce", "coll_sn": 1407,
                   "coll_msg_size_bytes": 17179869184, "coll_exec_time_us": 61974,
                   "coll_timing_source": "kernel_gpu"}}

`rank` is the rank in the communicator, which need not be the whole job. Other lines (messages,
statistics) and a truncated last line are left out.

## How the numbers are computed

The communicator with the most ranks is taken as the job, and the rank of a process in it is its
rank. An operation has the same number (`coll_sn`) on all its ranks, and the ranks leave it
together. Each rank therefore arrived earlier by the time that it spent in the operation. The rank
with the shortest time arrived last. That time is the transfer; the excess of the other ranks is
waiting. The log does not record when an operation ran, only that it ran before `dump_timestamp_us`.
Operations are spread over the time between two of these times, in their order, and never overlap on
a rank.

## In a recording

`record` lets the plugin write into the recording, where it is installed (docs/hangs.md). A note of
the report then sums the newest lines of all ranks up: the shortest time of an operation is its
transfer, the excess of its other members is waiting for a peer. Operations of which a member is
missing are left out. What the recorder gave back to the file system reads as zeros.

## What it cannot see

The log does not show other work of the devices, so the time in operations is an upper bound of the
time lost. Operations that the plugin overwrote before writing them are missing. The
algorithm is not in the lines of any version up to 2.29.
"""

from __future__ import annotations

import errno
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import (
    NodeTables,
    compute_group_number,
    number_groups,
)
from clusterprof.analysis.importers.core.text import read_lines
from clusterprof.probe import layout
from clusterprof.units import format_quantity


@dataclass(frozen=True, slots=True)
class Operation:
    """One collective operation of one rank."""

    communicator: str
    rank: int
    """Rank in the communicator."""
    ranks: int
    """Size of the communicator."""
    pid: int | None
    number: int
    """Sequence number in its communicator."""
    name: str
    """NCCL's name, like `AllReduce`."""
    bytes: int
    duration_ns: int
    on_device: bool
    """True if the duration was measured on the device, else on the host."""


def parse_operation(record: Mapping[str, Any]) -> Operation:
    """Parse the operation of one decoded line.

    Raises: ValueError, KeyError, TypeError, AttributeError or OverflowError when a field is missing
    or wrong.
    """
    header, performance = record["header"], record["coll_perf"]
    pid = (record.get("metadata") or {}).get("pid")
    return Operation(
        str(header["id"]),
        int(header["rank"]),
        int(header["n_ranks"]),
        None if pid is None else int(pid),
        int(performance["coll_sn"]),
        str(performance["coll"]),
        int(performance["coll_msg_size_bytes"]),
        round(float(performance["coll_exec_time_us"]) * 1000),
        performance.get("coll_timing_source", "kernel_gpu") == "kernel_gpu",
    )


Int = NDArray[np.int64]
_OPERATION_CODES = {
    "allreduce": layout.ALL_REDUCE,
    "allgather": layout.ALL_GATHER,
    "reducescatter": layout.REDUCE_SCATTER,
    "broadcast": layout.BROADCAST,
    "reduce": layout.REDUCE,
    "alltoall": layout.ALL_TO_ALL,
    "gather": layout.GATHER,
    "scatter": layout.SCATTER,
}
_MAX_OPERATIONS = 20_000_000
_MAX_PROCESSES = 65_536
_MAX_DURATION_NS = 1 << 50


@dataclass(slots=True)
class _Process:
    """Operations logged by one process."""

    host: str
    pid: int
    ranks: dict[str, int] = field(default_factory=dict)
    """Rank of the process, by communicator."""
    rows: dict[str, array[int]] = field(default_factory=dict)
    """By communicator, five values each: number, duration, bytes, operation, time written."""

    def table(self, communicator: str) -> Int:
        """Return the operations in a communicator, int64[n, 5]."""
        return np.frombuffer(self.rows[communicator], np.int64).reshape(-1, 5)


class NcclInspector:
    """Importer of the NCCL Inspector logs of one job."""

    name: ClassVar[str] = "nccl-inspector"
    title: ClassVar[str] = "NCCL Inspector log"
    combines_files: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether the lines were written by the plugin."""
        return head.lstrip()[:1] == b"{" and (
            b'"coll_perf"' in head or b'"inspector_output_format_version"' in head
        )

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per host.

        Raises: CannotImportError when no file holds an operation.
        """
        processes: dict[tuple[str, int], _Process] = {}
        sizes: dict[str, int] = {}
        remaining = _MAX_OPERATIONS
        for number, (source, account) in enumerate(zip(sources, accounts)):
            remaining -= _read_log(source, account, number, processes, sizes, remaining)
        if not any(process_.rows for process_ in processes.values()):
            raise CannotImportError("no collective operation in it", "set NCCL_INSPECTOR_ENABLE=1")
        job = _map_job_ranks(processes.values(), sizes, accounts[0])
        leave_times = {comm: _estimate_leave_times(comm, processes.values()) for comm in sizes}
        members = _list_members(sizes, processes.values(), job)
        by_host: dict[str, list[_Process]] = {}
        for process in processes.values():
            by_host.setdefault(process.host, []).append(process)
        for host, host_processes in by_host.items():
            node = NodeTables(host, self.name, wall_minus_own_ns=0)
            for process in host_processes:
                _add_process(node, process, job, leave_times, members)
            yield node


def _read_log(
    source: Source,
    account: Account,
    number: int,
    processes: dict[tuple[str, int], _Process],
    sizes: dict[str, int],
    max_operations: int,
) -> int:
    """Read one file and return the number of its operations."""
    header: Mapping[str, Any] = {}
    metadata: Mapping[str, Any] = {}
    count = 0
    for line in read_lines(source, account):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError
            header = record.setdefault("header", header)
            metadata = record.setdefault("metadata", metadata)
            if not isinstance(record.get("coll_perf"), dict):
                account.skipped["lines of another kind"] += 1
                continue
            operation = parse_operation(record)
            written_ns = int(metadata.get("dump_timestamp_us", 0)) * 1000
            host = str(metadata.get("hostname") or "")[:255]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            account.skipped["lines that could not be read"] += 1
            continue
        if not _is_plausible(operation, written_ns):
            account.skipped["operations with impossible values"] += 1
            continue
        pid = (
            operation.pid
            if operation.pid is not None and 0 < operation.pid < 1 << 31
            else number + 1
        )
        too_many = (host, pid) not in processes and len(processes) >= _MAX_PROCESSES
        if too_many or (operation.communicator not in sizes and len(sizes) >= _MAX_PROCESSES):
            raise CannotImportError(f"more than {_MAX_PROCESSES:,} processes or communicators")
        process = processes.setdefault((host, pid), _Process(host, pid))
        process.ranks[operation.communicator] = operation.rank
        sizes[operation.communicator] = max(sizes.get(operation.communicator, 0), operation.ranks)
        kind = _OPERATION_CODES.get(operation.name.lower(), layout.OTHER_OPERATION)
        row = (operation.number, operation.duration_ns, operation.bytes, kind, written_ns)
        process.rows.setdefault(operation.communicator, array("q")).extend(row)
        account.read["operations"] += 1
        count += 1
        if count >= max_operations:
            account.cut = f"only {_MAX_OPERATIONS:,} operations were read"
            break
    return count


def _is_plausible(operation: Operation, written_ns: int) -> bool:
    return (
        0 <= operation.rank < operation.ranks <= 1 << 24
        and 0 <= operation.number < 1 << 62
        and 0 < operation.duration_ns < _MAX_DURATION_NS
        and 0 <= operation.bytes < 1 << 62
        and 0 < written_ns < 1 << 62
    )


def _map_job_ranks(
    processes: Any, sizes: Mapping[str, int], account: Account
) -> dict[tuple[str, int], int] | None:
    """Map each process to its rank in the job; None if no communicator contains all processes."""
    comm = max(sizes, key=lambda communicator: (sizes[communicator], communicator))
    ranks = {(p.host, p.pid): p.ranks[comm] for p in processes if comm in p.ranks}
    is_complete = len(set(ranks.values())) == len(ranks) == len(list(processes))
    if not is_complete:
        account.notes.append("no communicator has all processes: ranks of the job are unknown")
        return None
    account.notes.append(
        f"ranks are those of communicator {comm}, of {sizes[comm]} ranks; logs do not tell when"
        " an operation ran, only when it was written: operations are spread over the time between"
    )
    return ranks


def _estimate_leave_times(comm: str, processes: Any) -> tuple[Int, Int]:
    """Estimate when all ranks left each operation: numbers and times, int64[n] each."""
    tables = [p.table(comm) for p in processes if comm in p.rows]
    rows = np.concatenate(tables) if tables else np.empty((0, 5), np.int64)
    order = np.lexsort((rows[:, 4], rows[:, 0]))
    rows = rows[order]
    numbers, first = np.unique(rows[:, 0], return_index=True)
    if not numbers.size:
        return numbers, numbers
    longest = np.maximum.reduceat(rows[:, 1], first)
    written = np.minimum.reduceat(rows[:, 4], first)  # over when first written
    written = np.minimum.accumulate(written[::-1])[::-1]
    ends = np.empty(numbers.size, np.int64)
    edges = np.flatnonzero(np.append(True, np.diff(written) > 0))
    before = int(written[0]) - int(longest[: edges[1] if edges.size > 1 else None].sum())
    for low, high in zip(edges.tolist(), [*edges[1:].tolist(), numbers.size]):
        written_ns, busy = int(written[low]), np.cumsum(longest[low:high])
        # The remaining time is spread evenly before each operation.
        idle_ns = max(0, written_ns - before - int(busy[-1]))
        ends[low:high] = before + busy + idle_ns * np.arange(1, high - low + 1) // (high - low)
        before = int(ends[high - 1])
    return numbers, ends


def _list_members(
    comms: Iterable[str], processes: Any, job: Mapping[tuple[str, int], int] | None
) -> dict[str, list[int]]:
    """List the ranks of each communicator, empty if ranks of the job are unknown."""
    return {
        comm: [job[p.host, p.pid] for p in processes if comm in p.rows] if job else []
        for comm in sorted(comms)
    }


def _add_process(
    node: NodeTables,
    process: _Process,
    job: Mapping[tuple[str, int], int] | None,
    leave_times: Mapping[str, tuple[Int, Int]],
    members: Mapping[str, Sequence[int]],
) -> None:
    numbers_of = number_groups(members)
    process_key = (process.host, process.pid)
    node.add_rank(
        process.pid, None if job is None else job[process_key], None if job is None else len(job)
    )
    low, high = 1 << 62, 0
    for comm in process.rows:
        table = process.table(comm)
        table = table[np.argsort(table[:, 0], kind="stable")]
        table = table[np.append(True, np.diff(table[:, 0]) > 0)]  # one operation per number
        numbers, ends = leave_times[comm]
        end = ends[numbers.searchsorted(table[:, 0])]
        start = np.maximum(end - table[:, 1], 0)
        group = numbers_of[comm] if job else compute_group_number(comm)
        node.add_group(process.pid, group, members[comm])
        node.add_collectives(process.pid, start, end, group, table[:, 0], table[:, 2], table[:, 3])
        low, high = min(low, int(start.min())), max(high, int(end.max()))
    node.add_spans(process.pid, layout.STEP, [low], [high], 1, 2, -1, -1)


LOG_FOLDER = "nccl"
LOG_SUFFIX = ".log"
MAX_LOG_FILES = 1024
MAX_LOG_BYTES = 32 << 20
MAX_LOG_LINES = 200_000
"""Lines that are read of all files together, the newest of each."""
_LARGE_RATIO = 0.5
"""The bandwidth is that of operations of at least this part of the largest size."""
_LINE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class LoggedOperation:
    """An operation of one rank, and the bus bandwidth that the plugin computed."""

    operation: Operation
    bandwidth_gbs: float | None
    """GB/s; None where the line has none."""


@dataclass(frozen=True, slots=True)
class InspectorSummary:
    """What the logs of all ranks show together."""

    operations: int
    """Operations of which all members were logged."""
    ranks: int
    waiting_ns: int
    """Sum over operations and ranks."""
    transfer_ns: int
    largest_bytes: int
    bandwidth_gbs: float | None
    """Median bus bandwidth of the large operations, GB/s; None = not logged."""
    unread_lines: int


def describe_inspector_logs(folders: Iterable[Path]) -> tuple[str, ...]:
    """Describe the logs in the folders of all nodes in a note; () if there are none."""
    files = _list_files(folders)
    if not files:
        return ()
    summary = summarize_operations(files)
    if not summary.operations:
        return ("NCCL Inspector: no operation of which all members were logged",)
    time_ns = summary.waiting_ns + summary.transfer_ns
    waiting = summary.waiting_ns / time_ns if time_ns else 0.0
    text = (
        f"NCCL Inspector, {summary.operations:,} operations of {summary.ranks} ranks:"
        f" {format_quantity(waiting, 'ratio')} of the time in them was waiting for a peer,"
        f" {format_quantity(1 - waiting, 'ratio')} was transfer"
    )
    if summary.bandwidth_gbs is not None:
        size = format_quantity(summary.largest_bytes, "bytes")
        text += f"; bus bandwidth up to {size}: {summary.bandwidth_gbs:.0f} GB/s"
    if summary.unread_lines:
        text += f"; {summary.unread_lines:,} lines could not be read"
    return (text,)


def _list_files(folders: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for folder in folders:
        logs = [path for path in (folder / LOG_FOLDER).glob("*") if path.suffix == LOG_SUFFIX]
        files += sorted(logs)[:MAX_LOG_FILES]
    return files[:MAX_LOG_FILES]


def summarize_operations(files: Sequence[Path]) -> InspectorSummary:
    """Summarize the operations in some files; unreadable files and lines are left out."""
    members: dict[tuple[str, int], dict[int, LoggedOperation]] = {}
    unread = 0
    for path in files:
        lines = _read_last_lines(path, max(1, MAX_LOG_LINES // len(files)))
        for logged in map(_parse_line, lines):
            if logged is None:
                unread += 1
            elif logged.operation.rank >= 0:
                key = logged.operation.communicator, logged.operation.number
                members.setdefault(key, {})[logged.operation.rank] = logged
    complete = [
        list(ranks.values())
        for ranks in members.values()
        if len(ranks) == next(iter(ranks.values())).operation.ranks
    ]
    waiting_ns = transfer_ns = 0
    for ranks in complete:
        durations = [logged.operation.duration_ns for logged in ranks]
        transfer_ns += min(durations) * len(durations)
        waiting_ns += sum(durations) - min(durations) * len(durations)
    flat = [logged for ranks in complete for logged in ranks]
    largest = max((logged.operation.bytes for logged in flat), default=0)
    rates = [
        logged.bandwidth_gbs
        for logged in flat
        if logged.bandwidth_gbs is not None and logged.operation.bytes >= _LARGE_RATIO * largest
    ]
    return InspectorSummary(
        len(complete),
        max((len(ranks) for ranks in complete), default=0),
        waiting_ns,
        transfer_ns,
        largest,
        median(rates) if rates else None,
        unread,
    )


def _parse_line(line: bytes) -> LoggedOperation | None:
    """Parse one line; None if it is torn or of another form. Lines of messages have rank -1."""
    try:
        record: Any = json.loads(line)
        if not isinstance(record, dict):
            return None
        if "coll_perf" not in record:
            return LoggedOperation(Operation("", -1, 0, None, 0, "", 0, 0, False), None)
        operation = parse_operation(record)
        rate = record["coll_perf"].get("coll_busbw_gbs")
        if operation.duration_ns <= 0 or not 0 <= operation.rank < operation.ranks:
            return None
        return LoggedOperation(operation, None if rate is None else float(rate))
    except _LINE_ERRORS:
        return None


def _read_last_lines(path: Path, max_lines: int) -> Iterator[bytes]:
    """Yield the last lines of a file without zeros and without a torn first line."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            begin = max(_find_data(file.fileno()), size - MAX_LOG_BYTES, 0)
            file.seek(begin)
            data = file.read(MAX_LOG_BYTES)
    except OSError:
        return
    text = data.lstrip(b"\0")
    lines = text.split(b"\n")
    if begin or len(text) < len(data):
        del lines[0]
    for line in lines[-max_lines - 1 :]:
        if line.strip(b"\0 \r"):
            yield line


def _find_data(fd: int) -> int:
    """Find where a file's first data begin, after the hole that was given back."""
    try:
        return os.lseek(fd, 0, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(fd).st_size if error.errno == errno.ENXIO else 0
