"""Device activities of a profile, and the calls that launched them.

Host activity of a profile: NVTX ranges that mark steps and waits, and system calls.

There may be many millions of ranges: of operator ranges only the covered time is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.device_timeline import (
    NO_INTERVALS,
    Int,
    Intervals,
    measure_overlap,
    merge_intervals,
)
from clusterprof.analysis.importers.core.host_activity import COPY_CALL
from clusterprof.analysis.importers.nsys.database import (
    NUMBERED_STEP,
    OPERATOR_NAME,
    OPTIMIZER,
    OTHER_RANGE,
    STEP,
    WAIT,
    DamagedError,
    Database,
    Strings,
    label_range,
)

MAX_ROWS = 12_000_000
"""Largest number of device activities read from one file: about 1.5 GB of memory."""
TID_BITS, PID_MASK = 24, 0xFFFFFF
KERNEL, COPY, FILL, GRAPH = range(4)
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
_ACTIVITY_TABLES = (
    ("CUPTI_ACTIVITY_KIND_KERNEL", KERNEL, "kernels", "shortName"),
    ("CUPTI_ACTIVITY_KIND_MEMCPY", COPY, "copies", "copyKind"),
    ("CUPTI_ACTIVITY_KIND_MEMSET", FILL, "fills", "value"),
    ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", GRAPH, "graphs", "graphId"),
)
_CALL_TABLES = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")


@dataclass(slots=True)
class Activities:
    """All device activities; int64 arrays of one length, times in ns."""

    start_ns: Int
    end_ns: Int
    process: Int
    """Serialized process (`globalPid`); -1 if unknown."""
    device: Int
    stream: Int
    correlation: Int
    kind: Int
    """KERNEL, COPY, FILL or GRAPH."""
    detail: Int
    """Collective operation of a kernel, direction of a copy, else 0."""
    bytes: Int

    def of(self, rows: Int) -> Activities:
        """Return the activities of the selected rows."""
        return Activities(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(slots=True)
class CudaCalls:
    """CUDA calls of all host threads; int64 arrays of one length, times in ns."""

    start_ns: Int
    end_ns: Int
    thread: Int
    """Serialized thread (`globalTid`)."""
    correlation: Int
    kind: Int
    """Class as returned by `label_call`."""

    def of(self, rows: Int) -> CudaCalls:
        """Return the calls of the selected rows."""
        return CudaCalls(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @property
    def process(self) -> Int:
        """Serialized process of each call."""
        return self.thread >> TID_BITS << TID_BITS


def decode_pid(process: int) -> int:
    """Decode the pid in a serialized process or thread."""
    return process >> TID_BITS & PID_MASK


def read_activities(db: Database, strings: Strings, account: Account) -> Activities:
    """Read all device activities; damage ends the reading and is noted in the account."""
    parts: list[Int] = []
    operations = _build_lookup(strings.kernels)
    remaining = MAX_ROWS
    for table, kind, word, detail in _ACTIVITY_TABLES:
        columns = ("globalPid", "deviceId", "streamId", "correlationId", detail, "bytes")
        total = 0
        try:
            total = db.count(table)
            for rows in db.integers(table, ("start", "end"), columns):
                rows = rows[:, :remaining]
                remaining -= rows.shape[1]
                total -= rows.shape[1]
                is_ordered = rows[1] >= rows[0]
                if not is_ordered.all():
                    account.skipped["activities that end before they begin"] += int(
                        (~is_ordered).sum()
                    )
                    rows = rows[:, is_ordered]
                account.read[word] += rows.shape[1]
                rows = np.insert(rows, 6, kind, axis=0)
                rows[7] = (
                    _map_ids(rows[7], operations) if kind == KERNEL else rows[7] * (kind == COPY)
                )
                parts.append(rows)
                if remaining <= 0:
                    break
        except DamagedError as error:
            account.cut = account.cut or f"{table}: {error}; what came before it was read"
            total = 0
        if total > 0 and remaining > 0:
            account.skipped[f"{word} without start and end"] += total
    if remaining <= 0:
        account.cut = f"only the first {MAX_ROWS:,} activities were read: export fewer"
    table_rows = np.concatenate(parts, axis=1) if parts else np.empty((9, 0), np.int64)
    start, end, process, device, stream, correlation, kinds, details, size = table_rows
    return Activities(start, end, process, device, stream, correlation, kinds, details, size)


def read_calls(db: Database, strings: Strings, account: Account) -> CudaCalls:
    """Read all CUDA calls; damage ends the reading and is noted in the account."""
    parts: list[Int] = []
    kinds = _build_lookup(strings.calls)
    remaining = 3 * MAX_ROWS
    for table in _CALL_TABLES:
        try:
            columns = ("globalTid", "correlationId", "nameId")
            for rows in db.integers(table, ("start", "end"), columns):
                rows = rows[:, (rows[1] >= rows[0]) & (rows[2] >= 0)][:, :remaining]
                remaining -= rows.shape[1]
                rows[4] = _map_ids(rows[4], kinds)
                account.read["CUDA calls"] += rows.shape[1]
                parts.append(rows)
                if remaining <= 0:
                    break
        except DamagedError as error:
            account.cut = account.cut or f"{table}: {error}; what came before it was read"
    table_rows = np.concatenate(parts, axis=1) if parts else np.empty((5, 0), np.int64)
    return CudaCalls(*table_rows)


def find_launches(activities: Activities, calls: CudaCalls) -> Int:
    """Find the row of the call that launched each activity, int64[n]; -1 if unknown.

    Calls of both APIs may carry one correlation id: the outermost, which began first, is taken.
    """
    if not calls.start_ns.size:
        return np.full(activities.start_ns.size, -1, np.int64)
    order = np.lexsort((calls.start_ns, calls.correlation, calls.process))
    call_process, call_correlation = calls.process[order], calls.correlation[order]
    processes = np.unique(np.concatenate([call_process, activities.process]))
    keys = processes.searchsorted(call_process) << 40 | call_correlation & (1 << 40) - 1
    wanted = (
        processes.searchsorted(activities.process) << 40 | activities.correlation & (1 << 40) - 1
    )
    row = np.minimum(keys.searchsorted(wanted), keys.size - 1)
    launched = np.where(keys[row] == wanted, order[row], -1)
    launched[activities.correlation <= 0] = -1
    return launched


def fill_processes(activities: Activities, calls: CudaCalls) -> Activities:
    """Fill in the process of activities in files of old versions, which do not record it."""
    rows = np.flatnonzero(activities.process < 0)
    if not rows.size or not calls.start_ns.size:
        return activities
    order = np.argsort(calls.correlation, kind="stable")
    call_correlation = calls.correlation[order]
    call_row = np.minimum(
        call_correlation.searchsorted(activities.correlation[rows]), call_correlation.size - 1
    )
    has_call = call_correlation[call_row] == activities.correlation[rows]
    activities.process[rows[has_call]] = calls.process[order[call_row[has_call]]]
    return activities


def select_host_copies(
    activities: Activities, launched: Int, calls: CudaCalls, direction: int = HOST_TO_DEVICE
) -> Int:
    """Select the copies in one direction that a copy call made: their rows, int64[n].

    launched: int64[n], the row of the launching call, -1 if unknown.
    """
    rows = np.flatnonzero(
        (activities.kind == COPY) & (activities.detail == direction) & (launched >= 0)
    )
    return rows[calls.kind[launched[rows]] == COPY_CALL]


def _build_lookup(kind_by_id: dict[int, int]) -> tuple[Int, Int]:
    ids = np.array(sorted(kind_by_id), np.int64)
    return ids, np.array([kind_by_id[int(id_)] for id_ in ids], np.int64)


def _map_ids(ids: Int, lookup: tuple[Int, Int]) -> Int:
    if not lookup[0].size:
        return np.zeros(ids.size, np.int64)
    row = np.minimum(lookup[0].searchsorted(ids), lookup[0].size - 1)
    return np.where(lookup[0][row] == ids, lookup[1][row], 0)


_RANGE_TYPES = frozenset(
    (59, 60, 70, 71)
)  # push and pop, start and end; of NVTX and of its text files
_RANGE_COLUMNS = ("start", "end", "eventType", "globalTid", "text", "textId")
_MAX_RANGES = 2_000_000
_MAX_TEXTS = 512
_COMPACT_ROWS = 1 << 18
_MIN_REPEATS, _MIN_COVERAGE = 3, 0.5
_DIGITS = re.compile(r"\d+")
_READ_CALL = re.compile(r"p?read(v?2?|64)?|fread|readahead|__read")
_MAX_TIME_NS = 1 << 62


@dataclass(slots=True)
class _RangeCover:
    """Time covered by many ranges, in little memory."""

    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    merged: Intervals = NO_INTERVALS

    def add(self, start: int, end: int) -> None:
        self.start.append(start)
        self.end.append(end)
        if len(self.start) >= _COMPACT_ROWS:
            self.all()

    def all(self) -> Intervals:
        start = np.concatenate([self.merged[0], np.array(self.start, np.int64)])
        end = np.concatenate([self.merged[1], np.array(self.end, np.int64)])
        self.start, self.end, self.merged = [], [], merge_intervals(start, end)
        return self.merged


@dataclass(slots=True)
class ThreadRanges:
    """NVTX ranges of one thread."""

    kept: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Start, end (ns) and number of each range, by class (`WAIT`, …)."""
    others: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Ranges of unknown meaning, by their text without digits."""
    labeled: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Waits for data and optimizer steps, by their text without digits."""
    operators: _RangeCover = field(default_factory=_RangeCover)

    def waits(self) -> Intervals:
        """Return the waits for data as sorted, disjoint intervals."""
        return _merge_ranges(self.kept.get(WAIT, []))


@dataclass(frozen=True, slots=True)
class NvtxSteps:
    """Steps of one process; int64[n] each, times in ns."""

    start_ns: Int
    end_ns: Int
    number: Int
    source: str
    """Kind of range that marked the steps, for the report."""


def read_threads(db: Database, strings: Strings, account: Account) -> dict[int, ThreadRanges]:
    """Read all NVTX ranges by serialized thread; damage ends the reading."""
    threads: dict[int, ThreadRanges] = {}
    count = 0
    is_operator = OPERATOR_NAME.search
    try:
        for rows in db.rows("NVTX_EVENTS", _RANGE_COLUMNS):
            read = 0
            for start, end, type_, tid, text, text_id in rows:
                if type_ not in _RANGE_TYPES:
                    continue
                if not (type(start) is type(end) is type(tid) is int and 0 <= start <= end):
                    account.skipped["NVTX ranges without start and end"] += 1
                    continue
                name = text if isinstance(text, str) else strings.texts.get(text_id)
                if name is None or end >= _MAX_TIME_NS:
                    continue
                read += 1
                thread = threads.get(tid)
                if thread is None:
                    thread = threads[tid] = ThreadRanges()
                if is_operator(name):  # most ranges are operators
                    thread.operators.add(start, end)
                else:
                    count += _record_range(thread, start, end, name)
            account.read["NVTX ranges"] += read
            if count > _MAX_RANGES:
                account.cut = account.cut or f"only {_MAX_RANGES:,} ranges were read"
                break
    except DamagedError as error:
        account.cut = account.cut or f"NVTX_EVENTS: {error}; what came before it was read"
    return threads


def _record_range(thread: ThreadRanges, start: int, end: int, text: str) -> int:
    kind, number = label_range(text)
    key = _DIGITS.sub("#", text)
    if kind != OTHER_RANGE:
        thread.kept.setdefault(kind, []).append((start, end, number))
        has_room = key in thread.labeled or len(thread.labeled) < _MAX_TEXTS
        if kind in (WAIT, OPTIMIZER) and has_room:
            thread.labeled.setdefault(key, []).append((start, end, number))
        return 1
    if key in thread.others or len(thread.others) < _MAX_TEXTS:
        thread.others.setdefault(key, []).append((start, end, -1))
        return 1
    return 0


def find_steps(threads: list[ThreadRanges], launches_ns: Int) -> NvtxSteps | None:
    """Find the steps of a process by the names of its ranges; None if no range marks them.

    Best first: ranges named step or iteration with a number, without a number, from the end of one
    optimizer step to the next, and a range of any name that repeats, covers half the time and
    launches half of the work: moving a model to its device takes long, too, but is no step.

    launches_ns: int64[n], ns, when the work of the device was launched.
    """
    for kind, source in ((NUMBERED_STEP, "numbered step ranges"), (STEP, "step ranges")):
        longest = max((thread.kept.get(kind, []) for thread in threads), key=len, default=[])
        steps = _select_disjoint(longest)
        if steps and (kind == NUMBERED_STEP or len(steps) > 1):
            return _build_steps(steps, source, inferred=False)
    ends = max((thread.kept.get(OPTIMIZER, []) for thread in threads), key=len, default=[])
    ends = _select_disjoint(ends)
    if len(ends) >= _MIN_REPEATS:
        steps = [(a[1], b[1], -1) for a, b in pairwise(ends)]
        return _build_steps(steps, "the ends of optimizer steps", inferred=True)
    candidates = [
        (key, _select_disjoint(ranges))
        for thread in threads
        for key, ranges in thread.others.items()
    ]
    extent = _measure_extent([range_ for _, ranges in candidates for range_ in ranges])
    for key, ranges in sorted(
        candidates, key=lambda candidate: (-_sum_lengths(candidate[1]), candidate[0])
    ):
        is_long = _sum_lengths(ranges) >= _MIN_COVERAGE * extent > 0
        if len(ranges) >= _MIN_REPEATS and is_long and _launches_most(ranges, launches_ns):
            return _build_steps(ranges, f'the repeated ranges "{key[:60]}"', inferred=True)
    return None


def _launches_most(ranges: list[tuple[int, int, int]], launches_ns: Int) -> bool:
    """Return whether half of the launches lie in ranges, which are sorted and disjoint."""
    if not launches_ns.size:
        return True
    start, end, _ = np.array(ranges, np.int64).T
    row = np.searchsorted(start, launches_ns, side="right") - 1
    inside = (row >= 0) & (launches_ns < end[row])
    return bool(inside.sum() >= _MIN_COVERAGE * launches_ns.size)


def _select_disjoint(ranges: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the ranges in order of time, without those inside another."""
    out: list[tuple[int, int, int]] = []
    for range_ in sorted(ranges, key=lambda item: (item[0], -item[1])):
        if range_[1] > range_[0] and (not out or range_[0] >= out[-1][1]):
            out.append(range_)
    return out


def _build_steps(steps: list[tuple[int, int, int]], source: str, inferred: bool) -> NvtxSteps:
    start, end, number = np.array(steps, np.int64).T
    if (number < 0).any() or (np.diff(number) <= 0).any():
        number = np.arange(start.size, dtype=np.int64) + 1
    elif inferred:
        number = number - number[0] + 1
    return NvtxSteps(start, end, number, source)


def _sum_lengths(ranges: list[tuple[int, int, int]]) -> int:
    return sum(end - start for start, end, _ in ranges)


def _measure_extent(ranges: list[tuple[int, int, int]]) -> int:
    return max((range_[1] for range_ in ranges), default=0) - min(
        (range_[0] for range_ in ranges), default=0
    )


def _merge_ranges(ranges: list[tuple[int, int, int]]) -> Intervals:
    if not ranges:
        return NO_INTERVALS
    start, end, _ = np.array(ranges, np.int64).T
    return merge_intervals(start, end)


@dataclass(frozen=True, slots=True)
class LoadingTime:
    """Activity of a thread during its waits for data; int64[n] each, ns."""

    start_ns: Int
    end_ns: Int
    reading_ns: Int
    outside_ns: Int
    """Outside system calls: running, or ready to run."""


def measure_loading(
    db: Database, threads: dict[int, ThreadRanges], account: Account
) -> dict[int, LoadingTime]:
    """Measure how much of each wait for data went into file reads, by serialized thread."""
    waits = {tid: thread.waits() for tid, thread in threads.items()}
    waits = {tid: wait for tid, wait in waits.items() if wait[0].size}
    if not waits or not db.has("OSRT_API", "start", "end", "globalTid", "nameId"):
        return {}
    parts: dict[tuple[int, bool], list[Int]] = {}
    try:
        reads = _list_read_calls(db)
        for rows in db.integers("OSRT_API", ("start", "end"), ("globalTid", "nameId")):
            account.read["system calls"] += rows.shape[1]
            for tid, wait in waits.items():
                thread_rows = rows[:, (rows[2] == tid) & (rows[1] > rows[0])]
                thread_rows = thread_rows[
                    :, measure_overlap(thread_rows[0], thread_rows[1], wait) > 0
                ]
                parts.setdefault((tid, False), []).append(thread_rows[:2])
                parts.setdefault((tid, True), []).append(
                    thread_rows[:2, np.isin(thread_rows[3], reads)]
                )
    except DamagedError as error:
        account.cut = account.cut or f"OSRT_API: {error}; what came before it was read"
    loading = {}
    for tid, (start, end) in waits.items():
        calls, reading = (_merge_parts(parts.get((tid, read), [])) for read in (False, True))
        if calls[0].size:
            outside = end - start - measure_overlap(start, end, calls)
            loading[tid] = LoadingTime(start, end, measure_overlap(start, end, reading), outside)
    return loading


def _merge_parts(parts: list[Int]) -> Intervals:
    if not parts:
        return NO_INTERVALS
    start, end = np.concatenate(parts, axis=1)
    return merge_intervals(start, end)


def _list_read_calls(db: Database) -> Int:
    ids = [
        id_
        for rows in db.rows("StringIds", ("id", "value"))
        for id_, value in rows
        if isinstance(id_, int) and isinstance(value, str) and _READ_CALL.fullmatch(value)
    ]
    return np.array(ids, np.int64)


def decode_process(tid: int) -> int:
    """Decode the serialized process of a serialized thread."""
    return tid >> TID_BITS << TID_BITS
