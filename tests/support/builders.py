"""Timelines built by hand, in seconds, so that the arithmetic of a test fits on one line.

    worker = process(201, parent=100, thread=activity("D4 U1", start=0), spans={
        FETCH: fetches(activity("D4 U1"), (0, 5, 1 << 20))})

An activity is a row of letters with seconds: U user code, K kernel, R runnable without a CPU,
D blocked on a local disk, N on a network file system, M on memory, W on a TCP connection, L on a
lock, F on a file being written, S asleep for a reason unseen, I waiting for work (in a poll).
Counters and samples made from it are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof.analysis.timeline.load.chunks import CHUNK_NS, NodeLoader
from clusterprof.analysis.timeline.model import (
    Chunk,
    Int,
    LostTime,
    Process,
    ProcessIo,
    Rank,
    Series,
    ThreadTable,
)
from clusterprof.analysis.timeline.spans import SpanTable
from clusterprof.trace.decoder import PackedSpans
from clusterprof.trace.reader import Damage
from clusterprof.trace.schema import Event, Gap, Header, Record

SECOND = 1_000_000_000
WCHAN_NAMES = (
    "0",
    "folio_wait_bit_common",
    "rpc_wait_bit_killable",
    "try_to_free_pages",
    "hrtimer_nanosleep",
    "do_poll.constprop.0",
    "sk_wait_data",
    "futex_wait_queue",
    "jbd2_log_wait_commit",
)
_STATE_AND_WCHAN = {
    "U": ("R", 0),
    "K": ("R", 0),
    "R": ("R", 0),
    "D": ("D", 1),
    "N": ("D", 2),
    "M": ("D", 3),
    "S": ("S", 4),
    "I": ("S", 5),
    "W": ("S", 6),
    "L": ("S", 7),
    "F": ("D", 8),
}


def ns(seconds: float) -> int:
    """Seconds as integer nanoseconds."""
    return round(seconds * SECOND)


def to_ns_array(seconds: Sequence[float]) -> Int:
    """Seconds as an int64 array of nanoseconds."""
    return np.array([ns(s) for s in seconds], np.int64)


def make_header(**host: Any) -> Header:
    """The header of a node called `node`, with parts of its inventory."""
    node = {"key": "node-1", "hostname": "node", "display": "node", "boot_id": "b", "kernel": "6"}
    started = {"monotonic_ns": 0, "boottime_ns": 0, "realtime_ns": 0}
    return Header(node, started, {"mounts": [], **host}, [], {"variables": {}}, {}, {}, [])


def make_counter(t_s: Sequence[float], values: Sequence[float]) -> Series:
    """Readings of a counter; NaN = not available."""
    return Series(to_ns_array(t_s), np.array(values, np.float64), True)


def make_gauge(t_s: Sequence[float], values: Sequence[float]) -> Series:
    """Readings of a gauge; NaN = not available."""
    return Series(to_ns_array(t_s), np.array(values, np.float64), False)


def make_busy_counter(
    busy: Sequence[tuple[float, float]], end: float, hz: float = 10, start: float = 0
) -> Series:
    """`gpu.busy_ns_total` of a device that is busy in the given intervals, exact at each tick."""
    t_ns = _list_ticks(start, end, hz)
    total = np.zeros(t_ns.size)
    for low, high in busy:
        total += np.clip(t_ns, ns(low), ns(high)) - ns(low)
    return Series(t_ns, total, True)


def _list_ticks(start: float, end: float, hz: float) -> Int:
    return ns(start) + np.arange(round((end - start) * hz) + 1, dtype=np.int64) * ns(1 / hz)


def make_spans(*rows: Sequence[float], first_sequence: int = 1) -> SpanTable:
    """Spans from (start_s, end_s, a, b, c, d); what is left out of a row is 0."""
    start_end = [(ns(row[0]), ns(row[1])) for row in rows]
    values = [[*(int(v) for v in row[2:]), 0, 0, 0, 0][:4] for row in rows]
    table = np.array([[*se, *v] for se, v in zip(start_end, values)], np.int64).reshape(-1, 6)
    order = np.argsort(table[:, 0], kind="stable")
    columns = [np.ascontiguousarray(column) for column in table[order].T]
    sequence = first_sequence + order.astype(np.int64)
    return SpanTable(*columns[:2], sequence, *columns[2:])


def parse_activity(text: str, start: float = 0.0) -> list[tuple[int, int, str]]:
    """Parse "D4 U1" into (start_ns, end_ns, letter) rows that follow each other."""
    rows = []
    at = ns(start)
    for word in text.split():
        length = ns(float(word[1:]))
        rows.append((at, at + length, word[0]))
        at += length
    return rows


def measure_activity_ns(rows: list[tuple[int, int, str]], letters: str, low: int, high: int) -> int:
    """Measure how long an activity was in any of the letters within [low, high)."""
    return sum(max(0, min(e, high) - max(s, low)) for s, e, k in rows if k in letters)


def make_fetches(rows: list[tuple[int, int, str]], *calls: tuple[float, float, int]) -> SpanTable:
    """Fetch spans from (start_s, end_s, bytes read), with the CPU times the activity implies."""
    table = []
    for start, end, read in calls:
        low, high = ns(start), ns(end)
        cpu = [measure_activity_ns(rows, letter, low, high) for letter in "UK"]
        table.append((start, end, 1, *cpu, read))
    return make_spans(*table)


def make_thread(
    rows: list[tuple[int, int, str]], end: float, hz: float = 10, denied: Sequence[str] = ()
) -> ThreadTable:
    """Make samples of a thread doing an activity from 0 to `end`; `denied` columns are all -1."""
    t_ns = _list_ticks(0, end, hz)
    letters = [next((k for s, e, k in rows if s <= t < e), "I") for t in t_ns]
    states = [_STATE_AND_WCHAN[letter] for letter in letters]
    low = min((s for s, _, _ in rows), default=0)

    def total(kinds: str) -> Int:
        return np.array([measure_activity_ns(rows, kinds, low, int(t)) for t in t_ns], np.int64)

    columns = {
        "state": np.array([ord(state) for state, _ in states], np.int64),
        "on_cpu_ns": total("UK"),
        "run_delay_ns": total("R"),
        "user_ns": total("U"),
        "system_ns": total("K"),
        "block_io_delay_ns": np.full(t_ns.size, -1, np.int64),
        "major_faults": np.zeros(t_ns.size, np.int64),
        "wchan": np.array([wchan for _, wchan in states], np.int64),
    }
    for name in denied:
        columns[name] = np.full(t_ns.size, -1, np.int64)
    return ThreadTable(t_ns, **columns)


def make_io_samples(t_s: Sequence[float], **columns: Sequence[int]) -> ProcessIo:
    """Samples of /proc/<pid>/io; what is left out is not available."""
    names = ("rss_bytes", "read_chars", "write_chars", "read_bytes", "write_bytes")
    missing = [-1] * len(t_s)
    values = [np.array(columns.get(name, missing), np.int64) for name in names]
    return ProcessIo(to_ns_array(t_s), *values)


def make_process(
    pid: int,
    parent: int = -1,
    spans: Mapping[int, SpanTable] | None = None,
    thread: ThreadTable | None = None,
    registration: Mapping[str, Any] | None = None,
    io: ProcessIo | None = None,
    name: str = "python",
) -> Process:
    """Make a process of which at most the main thread is sampled."""
    threads = {} if thread is None else {pid: thread}
    return Process(pid, 1, parent, name, registration or {}, spans or {}, threads, io)


def is_whole(damage: Damage) -> bool:
    """Whether a reader skipped nothing."""
    lost = damage.unknown_frames + damage.implausible_records
    return not (damage.damaged_places or damage.torn_tail_bytes or lost)


class _RecordsInMemory:
    """A source of records that are in memory already."""

    damage = Damage()

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = records

    def packed(self) -> Iterator[list[Record | PackedSpans]]:
        return ([record] for record in self._records)


def build_chunks(records: Iterable[Record], chunk_ns: int = CHUNK_NS) -> Iterator[Chunk]:
    """Build the chunks of records that are in memory."""
    return NodeLoader(Path(), chunk_ns, _RecordsInMemory(records)).chunks()


def make_chunk(
    end: float,
    processes: Sequence[Process] = (),
    series: Mapping[tuple[str, str], Series] | None = None,
    events: Sequence[Event] = (),
    gaps: Sequence[Gap] = (),
    node: Header | None = None,
    start: float = 0,
) -> Chunk:
    """Make a chunk that is the whole recording."""
    return Chunk(
        header=node or make_header(),
        start_ns=ns(start),
        end_ns=ns(end),
        first=True,
        last=True,
        series=series or {},
        processes={p.pid: p for p in processes},
        wchan_names=WCHAN_NAMES,
        events=tuple(events),
        gaps=tuple(gaps),
    )


def make_rank(
    end: float,
    main: Process,
    workers: Sequence[Process] = (),
    device: str = "emulated-0",
    series: Mapping[tuple[str, str], Series] | None = None,
    marked: bool = True,
    number: int | None = 0,
    node: Header | None = None,
) -> Rank:
    """Make rank 0 with its workers, in a chunk of its own."""
    whole = make_chunk(end, [main, *workers], series, node=node)
    emulated = device.startswith("emulated")
    return Rank(whole, number, main.pid, device, emulated, main, tuple(workers), marked)


def make_lost_segments(
    *rows: tuple[float, float, float, int], source: int = 1, step: int = 0
) -> LostTime:
    """Make segments of lost time from (start_s, end_s, lost_s, phase)."""
    start, end, idle = (to_ns_array([row[i] for row in rows]) for i in range(3))
    phase = np.array([row[3] for row in rows], np.int64)
    same = np.full(len(rows), source, np.int64), np.full(len(rows), step, np.int64)
    return LostTime(start, end, idle, phase, *same)
