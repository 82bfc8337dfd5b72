"""Darshan logs with extended tracing (DXT): when each rank read, and how long it took.

## How to make the file

    export DXT_ENABLE_IO_TRACE=1 DARSHAN_LOGPATH=logs/
    LD_PRELOAD=libdarshan.so mpirun -n 8 python train.py

For programs without MPI add `DARSHAN_ENABLE_NONMPI=1`; then each process writes a log.

## How to analyze it

    pip install 'clusterprof[darshan]'
    clusterprof analyze logs/

## What is read

Logs of Darshan 3, with the package darshan (pydarshan). From DXT: every read of every rank with
its start, end and bytes (POSIX, else MPI-IO). Counters without DXT are totals over the run: they
have no times, so such a log is refused, with its totals in the message.

## How the numbers are computed

The run of a rank, from the start to the end of the job, is one step. Its data waits are the union
of its reads. A log does not show the accelerator, so no lost time is stated: the notes name the
time and the bytes of the reads, of all ranks and of the rank that read longest.

## What it cannot see

The accelerator; steps; processes that share a rank; reads by memory mapping. The file system is
guessed from the path, as in DFTracer traces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import MAX_RANKS, NodeTables
from clusterprof.analysis.importers.core.text import convert_number, guess_file_system
from clusterprof.analysis.timeline.intervals import merge_intervals
from clusterprof.probe import layout

_SUFFIX = ".darshan"
_INSTALL = "pip install 'clusterprof[darshan]'"
_TRACE_READS = "record with DXT_ENABLE_IO_TRACE=1 to get the time of every read"
_DXT_MODULES = ("DXT_POSIX", "DXT_MPIIO")
_SECOND_NS = 1_000_000_000
_MAX_SECONDS = 100 * 86_400


class Darshan:
    """Importer of Darshan logs."""

    name: ClassVar[str] = "darshan"
    title: ClassVar[str] = "Darshan log"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether the file begins with a version of Darshan's log format."""
        return head[:2] in (b"3.", b"2.") and path.name.endswith(_SUFFIX)

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the job of each log.

        Raises: CannotImportError when the package darshan is missing, the log cannot be read, or
        it has no traced reads.
        """
        for source, account in zip(sources, accounts):
            yield from _import_log(source, account)


@dataclass(slots=True)
class _Reads:
    """Reads of each rank, and the hosts of the ranks."""

    by_rank: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    """Start and end in ns of the run, bytes, kind of file system."""
    hosts: dict[int, str] = field(default_factory=dict)


def _import_log(source: Source, account: Account) -> Iterator[NodeTables]:
    report = _open_report(source)
    try:
        job = report.metadata["job"]
        begun_ns = int(job["start_time_sec"]) * _SECOND_NS + int(job.get("start_time_nsec", 0))
        ended_ns = begun_ns + round(float(job["run_time"]) * 1e9)
        rank_count = int(job["nprocs"])
        reads = _collect_reads(report, account)
        totals = "" if reads.by_rank else _describe_totals(report)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise CannotImportError(f"{source.path.name}: damaged log ({error!r:.200})") from error
    if not reads.by_rank and account.skipped["writes"]:
        raise CannotImportError(
            f"{source.path.name}: the log traces {account.skipped['writes']:,} writes and no read;"
            " only reads are analyzed"
        )
    if not reads.by_rank:
        raise CannotImportError(
            f"{source.path.name}: the log has totals only ({totals}); {_TRACE_READS}"
        )
    if not 0 < rank_count <= MAX_RANKS or not 0 < ended_ns - begun_ns < _MAX_SECONDS * _SECOND_NS:
        raise CannotImportError(f"{source.path.name}: impossible number of ranks or run time")
    hosts: dict[str, list[int]] = {}
    for rank, host in sorted(reads.hosts.items()):
        hosts.setdefault(host, []).append(rank)
    for host, ranks in hosts.items():
        key = source.path.name.partition(".")[0]
        node = NodeTables(host, Darshan.name, begun_ns, key=host or key)
        for rank in ranks:
            rows = np.array(reads.by_rank.get(rank, []), np.int64).reshape(-1, 4)
            _add_rank(node, rank, max(rank_count, rank + 1), ended_ns - begun_ns, rows)
        yield node
    account.read["ranks"] += len(reads.hosts)
    account.notes.append(_describe_reads(reads, ended_ns - begun_ns))
    account.answers.append(account.notes[-1])
    account.notes.append("whether an accelerator waited for its reads is not in the log")


def _open_report(source: Source) -> Any:
    try:
        import darshan  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise CannotImportError(
            f"{source.path.name}: a Darshan log, and the package darshan is not installed:"
            f" {_INSTALL}"
        ) from error
    if source.file != source.path or not source.file.is_file():
        raise CannotImportError(f"{source.path.name}: unpack the archive and give the log itself")
    try:
        report = darshan.DarshanReport(str(source.file), read_all=False)
        for module in (*_DXT_MODULES, "POSIX", "MPI-IO"):
            if module in report.modules:
                if module in _DXT_MODULES:
                    report.mod_read_all_dxt_records(module)
                else:
                    report.mod_read_all_records(module)
    except Exception as error:  # pydarshan raises whatever its C library and numpy raise
        raise CannotImportError(
            f"{source.path.name}: the package darshan cannot read it ({error!s:.200}); repair it"
            " with darshan-convert, or leave it out"
        ) from error
    return report


def _collect_reads(report: Any, account: Account) -> _Reads:
    """Collect the traced reads of all ranks."""
    reads = _Reads()
    module = next((name for name in _DXT_MODULES if name in report.records), None)
    for record in report.records[module].to_numpy() if module is not None else ():
        file_system = guess_file_system(str(report.name_records.get(record["id"], "")))
        rank = int(record["rank"])
        if not 0 <= rank < MAX_RANKS:
            account.skipped["records of no rank"] += 1
            continue
        reads.hosts.setdefault(rank, str(record.get("hostname", ""))[:253])
        for segment in record["read_segments"]:
            times = [convert_number(segment[key]) for key in ("start_time", "end_time", "length")]
            start, end, length = (-1.0 if value is None else value for value in times)
            if not 0 <= start <= end < _MAX_SECONDS:
                account.skipped["reads without a usable time"] += 1
                continue
            row = round(start * 1e9), round(end * 1e9), max(int(length), 0), file_system
            reads.by_rank.setdefault(rank, []).append(row)
            account.read["reads"] += 1
        account.skipped["writes"] += len(record["write_segments"])
    return reads


def _describe_reads(reads: _Reads, run_ns: int) -> str:
    """Describe how long the ranks read, overlapping reads of a rank once."""
    reading_ns, size = {}, 0
    for rank, rows in reads.by_rank.items():
        table = np.array(rows, np.int64)
        union = merge_intervals((table[:, 0], table[:, 1]))
        reading_ns[rank] = int((union.end_ns - union.start_ns).sum())
        size += int(table[:, 2].sum())
    longest = max(reading_ns, key=lambda rank: reading_ns[rank])
    sum_ns, total_ns = sum(reading_ns.values()), run_ns * len(reads.hosts)
    return (
        f"reads took {sum_ns / 1e9:,.3f} s of {total_ns / 1e9:,.3f} s of all ranks"
        f" ({sum_ns / total_ns:.1%}) for {size / 1e6:,.1f} MB; longest on rank {longest}:"
        f" {reading_ns[longest] / 1e9:,.3f} s"
    )


def _describe_totals(report: Any) -> str:
    """Describe the total time and bytes of the reads of a log without traced reads."""
    parts = []
    for module, prefix in (("POSIX", "POSIX"), ("MPI-IO", "MPIIO")):
        if module not in report.records or not len(report.records[module]):
            continue
        frames = report.records[module].to_df()
        seconds = float(frames["fcounters"][f"{prefix}_F_READ_TIME"].sum())
        size = float(frames["counters"][f"{prefix}_BYTES_READ"].sum())
        parts.append(f"{module}: {seconds:.3f} s in reads of {size / 1e6:.1f} MB, all ranks")
    return "; ".join(parts) or "no reads"


def _add_rank(
    node: NodeTables, rank: int, rank_count: int, run_ns: int, rows: np.ndarray[Any, Any]
) -> None:
    """Add a rank with its run and its reads. rows: int64[n, 4]."""
    pid, device = rank + 1, f"unseen-{rank}"
    node.add_rank(pid, rank, rank_count, device)
    node.add_unmeasured_device(device, 0, run_ns)
    rows = rows[rows[:, 0] < run_ns]
    reading = merge_intervals((rows[:, 0], np.minimum(rows[:, 1], run_ns)))
    node.add_spans(pid, layout.STEP, [0], [run_ns], 1, 2, -1, -1)
    node.add_spans(pid, layout.DATA_WAIT, *reading, -1, 0, -1, -1)
    if not reading.start_ns.size:
        return
    window = np.maximum(reading.start_ns.searchsorted(rows[:, 0], "right") - 1, 0)
    size = np.zeros(reading.start_ns.size, np.int64)
    np.add.at(size, window, rows[:, 2])
    by_kind = np.zeros((size.size, 4), np.int64)
    np.add.at(by_kind, (window, rows[:, 3]), rows[:, 1] - rows[:, 0] + 1)
    length = reading.end_ns - reading.start_ns
    node.add_spans(pid, layout.LOADING, *reading, length, 0, size, by_kind.argmax(axis=1))
