"""Logs of the NCCL Inspector plugin, all ranks of a job.

## What is read

JSON lines, a file per process (`NCCL_INSPECTOR_ENABLE=1`, `NCCL_INSPECTOR_DUMP_DIR`), formats 4
and 5; newer ones name rank and communicator once before their operations. The fields used are
`importers/nccl_inspector.py`'s.

## How it is understood

The communicator with most ranks is the job; the rank of a process in it is its rank. An operation
has the same number (`coll_sn`) on all its ranks, and they leave it together; so each came to it
as much before that as it was in it, and whoever was in it for the shortest time came last: that
time is the transfer, what the others were in it for longer is waiting. A log does not say when an
operation was: it was before it was written (`dump_timestamp_us`). Operations are spread over the
time from one such moment to the next, in their order, and never overlap on a rank.

## Where it is blind

What the devices did besides is not known: time in operations is an upper bound of what was lost,
and computing in between is not in the log. Operations that the plugin overwrote before it wrote
them are missing.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.nccl_inspector import Operation, operation_of_line
from clusterprof.importers.tables import NodeTables, group_number
from clusterprof.importers.text_lines import lines_of
from clusterprof.probe import layout

Int = NDArray[np.int64]
_KINDS = {
    "allreduce": layout.ALL_REDUCE, "allgather": layout.ALL_GATHER,
    "reducescatter": layout.REDUCE_SCATTER, "broadcast": layout.BROADCAST,
    "reduce": layout.REDUCE, "alltoall": layout.ALL_TO_ALL, "gather": layout.GATHER,
    "scatter": layout.SCATTER,
}  # fmt: skip
_OPERATIONS_AT_MOST = 20_000_000
_PROCESSES_AT_MOST = 65_536
_MOST_NS = 1 << 50


@dataclass(slots=True)
class _Process:
    """What one process wrote."""

    host: str
    pid: int
    ranks: dict[str, int] = field(default_factory=dict)
    """Its rank, by communicator."""
    rows: dict[str, array[int]] = field(default_factory=dict)
    """By communicator, five each: number, duration, bytes, operation, when written."""

    def table(self, communicator: str) -> Int:
        """Return the operations in a communicator, a row each."""
        return np.frombuffer(self.rows[communicator], np.int64).reshape(-1, 5)


class NcclInspector:
    """Logs of the NCCL Inspector of one job."""

    name: ClassVar[str] = "nccl-inspector"
    title: ClassVar[str] = "NCCL Inspector log"
    together: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """Say whether these are lines of the plugin."""
        return head.lstrip()[:1] == b"{" and (
            b'"coll_perf"' in head or b'"inspector_output_format_version"' in head
        )

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield a node per host. Raises CannotImportError when there is no operation in any."""
        processes: dict[tuple[str, int], _Process] = {}
        sizes: dict[str, int] = {}
        left = _OPERATIONS_AT_MOST
        for number, (source, account) in enumerate(zip(sources, accounts)):
            left -= _read(source, account, number, processes, sizes, left)
        if not any(one.rows for one in processes.values()):
            raise CannotImportError("no collective operation in it", "NCCL_INSPECTOR_ENABLE=1")
        job = _job(processes.values(), sizes, accounts[0])
        leaves = {comm: _leaves(comm, processes.values()) for comm in sizes}
        by_host: dict[str, list[_Process]] = {}
        for process in processes.values():
            by_host.setdefault(process.host, []).append(process)
        for host, some in by_host.items():
            node = NodeTables(host, self.name, wall_minus_own_ns=0)
            for process in some:
                _add(node, process, job, leaves, processes.values())
            yield node


def _read(
    source: Source,
    account: Account,
    number: int,
    processes: dict[tuple[str, int], _Process],
    sizes: dict[str, int],
    most: int,
) -> int:
    """Read one file; returns how many operations it had."""
    header: Mapping[str, Any] = {}
    metadata: Mapping[str, Any] = {}
    count = 0
    for line in lines_of(source, account):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            if not isinstance(found, dict):
                raise TypeError
            header = found.setdefault("header", header)
            metadata = found.setdefault("metadata", metadata)
            if not isinstance(found.get("coll_perf"), dict):
                account.skipped["lines of another kind"] += 1
                continue
            one = operation_of_line(found)
            written = int(metadata.get("dump_timestamp_us", 0)) * 1000
            host = str(metadata.get("hostname") or "")[:255]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            account.skipped["lines that could not be read"] += 1
            continue
        if not _sound(one, written):
            account.skipped["operations with values that cannot be"] += 1
            continue
        pid = one.pid if one.pid is not None and 0 < one.pid < 1 << 31 else number + 1
        beyond = (host, pid) not in processes and len(processes) >= _PROCESSES_AT_MOST
        if beyond or (one.communicator not in sizes and len(sizes) >= _PROCESSES_AT_MOST):
            raise CannotImportError(f"more than {_PROCESSES_AT_MOST:,} processes or communicators")
        process = processes.setdefault((host, pid), _Process(host, pid))
        process.ranks[one.communicator] = one.rank
        sizes[one.communicator] = max(sizes.get(one.communicator, 0), one.ranks)
        kind = _KINDS.get(one.name.lower(), layout.OTHER_OPERATION)
        row = (one.number, one.duration_ns, one.bytes, kind, written)
        process.rows.setdefault(one.communicator, array("q")).extend(row)
        account.read["operations"] += 1
        count += 1
        if count >= most:
            account.cut = f"only {_OPERATIONS_AT_MOST:,} operations were read"
            break
    return count


def _sound(one: Operation, written: int) -> bool:
    return (
        0 <= one.rank < one.ranks <= 1 << 24
        and 0 <= one.number < 1 << 62
        and 0 < one.duration_ns < _MOST_NS
        and 0 <= one.bytes < 1 << 62
        and 0 < written < 1 << 62
    )


def _job(
    processes: Any, sizes: Mapping[str, int], account: Account
) -> dict[tuple[str, int], int] | None:
    """The rank of each process in the job; None when no communicator has them all."""
    comm = max(sizes, key=lambda one: (sizes[one], one))
    ranks = {(p.host, p.pid): p.ranks[comm] for p in processes if comm in p.ranks}
    whole = len(set(ranks.values())) == len(ranks) == len(list(processes))
    if not whole:
        account.notes.append("no communicator holds all processes: ranks of the job are not known")
        return None
    account.notes.append(
        f"ranks are those of communicator {comm}, of {sizes[comm]} ranks; a log does not say when"
        " an operation was, only when it had been: operations are spread over the time in between"
    )
    return ranks


def _leaves(comm: str, processes: Any) -> tuple[Int, Int]:
    """Numbers of a communicator's operations, and when all left each."""
    tables = [p.table(comm) for p in processes if comm in p.rows]
    rows = np.concatenate(tables) if tables else np.empty((0, 5), np.int64)
    order = np.lexsort((rows[:, 4], rows[:, 0]))
    rows = rows[order]
    numbers, first = np.unique(rows[:, 0], return_index=True)
    if not numbers.size:
        return numbers, numbers
    longest = np.maximum.reduceat(rows[:, 1], first)
    written = np.minimum.reduceat(rows[:, 4], first)  # it was over when the first wrote it
    written = np.minimum.accumulate(written[::-1])[::-1]
    ends = np.empty(numbers.size, np.int64)
    edges = np.flatnonzero(np.append(True, np.diff(written) > 0))
    before = int(written[0]) - int(longest[: edges[1] if edges.size > 1 else None].sum())
    for low, high in zip(edges.tolist(), [*edges[1:].tolist(), numbers.size]):
        until, busy = int(written[low]), np.cumsum(longest[low:high])
        # What is left of the time between is spread evenly before each of them.
        spare = max(0, until - before - int(busy[-1]))
        ends[low:high] = before + busy + spare * np.arange(1, high - low + 1) // (high - low)
        before = int(ends[high - 1])
    return numbers, ends


def _add(
    node: NodeTables,
    process: _Process,
    job: Mapping[tuple[str, int], int] | None,
    leaves: Mapping[str, tuple[Int, Int]],
    processes: Any,
) -> None:
    me = (process.host, process.pid)
    node.rank(process.pid, None if job is None else job[me], None if job is None else len(job))
    low, high = 1 << 62, 0
    for comm in process.rows:
        table = process.table(comm)
        table = table[np.argsort(table[:, 0], kind="stable")]
        table = table[np.append(True, np.diff(table[:, 0]) > 0)]  # one number, one operation
        numbers, ends = leaves[comm]
        end = ends[numbers.searchsorted(table[:, 0])]
        start = np.maximum(end - table[:, 1], 0)
        members = [job[p.host, p.pid] for p in processes if comm in p.rows] if job else []
        group = group_number(members if members else comm)
        node.group(process.pid, group, members)
        node.collectives(
            process.pid, start, end, group, table[:, 0], table[:, 2], table[:, 3]
        )  # fmt: skip
        low, high = min(low, int(start.min())), max(high, int(end.max()))
    node.spans(process.pid, layout.STEP, [low], [high], 1, 2, -1, -1)
