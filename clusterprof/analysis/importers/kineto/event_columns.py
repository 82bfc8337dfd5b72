"""Gather from the events, block by block, the columns of numbers that the analysis needs.

Columns that grow, and interval sets that are merged while they grow.

Descriptions of communication operations in a trace; each distinct one is kept once.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account, CannotImportError
from clusterprof.analysis.importers.core.columns import Narrow, pack_column, select_dtype
from clusterprof.analysis.importers.kineto import classify
from clusterprof.analysis.importers.kineto.begin_end_pairs import EventPairs
from clusterprof.analysis.importers.kineto.event_stream import NO_ARGS, Args, CommArgs, Event
from clusterprof.analysis.importers.kineto.host_functions import MIN_FUNCTION_NS, number_names
from clusterprof.analysis.timeline.intervals import merge_intervals

Int = NDArray[np.int64]
_MERGE_AFTER_ROWS = 1 << 14
_PACK_AFTER_ROWS = 1 << 14
_BEFORE_ALL = -(1 << 62)
ROWS_PER_SLICE = 1 << 14
"""Rows of a long table that are processed at a time, which keeps temporary arrays small."""


class PackedColumn:
    """Integer column that grows in chunks, each stored in its narrowest dtype."""

    def __init__(self) -> None:
        self._new: list[Int] = []
        self._unpacked = 0
        self._packed: list[tuple[int, int, Narrow]] = []
        """For each chunk: its minimum, its size, and the offsets from the minimum."""

    def add(self, values: Int) -> None:
        """Append values, int64[n]."""
        self._new.append(values)
        self._unpacked += values.size
        if self._unpacked >= _PACK_AFTER_ROWS:
            self._pack()

    def _pack(self) -> None:
        if self._unpacked:
            values = np.concatenate(self._new)
            low = int(values.min())
            self._packed.append((low, values.size, pack_column(values - low)))
        self._new, self._unpacked = [], 0

    def minimum(self) -> int | None:
        """Return the smallest value; None if the column is empty."""
        self._pack()
        return min((low for low, _, _ in self._packed), default=None)

    def result(self) -> Int:
        """Return all values in the narrowest sufficient dtype, intN[n], and empty the column."""
        self._pack()
        packed, self._packed = self._packed[::-1], []
        low = min((low for low, _, _ in packed), default=0)
        high = max((low + int(np.max(offsets)) for low, _, offsets in packed), default=0)
        values = np.empty(sum(size for _, size, _ in packed), select_dtype(low, high))
        row = 0
        while packed:
            low, size, offsets = packed.pop()
            np.add(offsets, low, out=values[row : row + size], dtype=np.int64, casting="same_kind")
            row += size
        return values


class IntervalUnion:
    """Union of intervals that grows."""

    def __init__(self) -> None:
        self._new: list[tuple[Int, Int]] = []
        self._unmerged = 0
        self._merged: list[tuple[Int, Int]] = []
        """Interval sets, each sorted and disjoint; traces are mostly in order, so they overlap
        little.
        """
        self._size = self._merged_size = 0

    def add(self, start: Int, end: Int) -> None:
        """Add intervals in any order, int64[n] each, ns."""
        self._new.append((start, end))
        self._unmerged += start.size
        if self._unmerged > _MERGE_AFTER_ROWS:
            self._merge_new()
            if self._size > 2 * self._merged_size + _MERGE_AFTER_ROWS:
                self.result()

    def _merge_new(self) -> None:
        merged = join_interval_sets(self._new)
        self._new, self._unmerged = [], 0
        self._merged.append(merged)
        self._size += merged[0].size

    def result(self) -> tuple[Int, Int]:
        """Return the union, sorted and disjoint: starts and ends, int64[n] each, ns."""
        if self._new:
            self._merge_new()
        if len(self._merged) != 1:
            self._merged = [join_interval_sets(self._merged)]
            self._size = self._merged_size = self._merged[0][0].size
        return self._merged[0]

    def shift(self, offset_ns: int) -> None:
        """Shift all intervals in time, in place."""
        for column in self.result():
            column += offset_ns


def join_intervals(start: Int, end: Int) -> tuple[Int, Int]:
    """Join overlapping intervals into a sorted, disjoint union; empty intervals are dropped.

    start, end: int64[n], ns. Returns two int64[m], ns.
    """
    merged = merge_intervals((start, end))
    return merged.start_ns, merged.end_ns


def join_sorted_chunks(pieces: Iterable[tuple[Int, Int]]) -> tuple[Int, Int]:
    """Join the intervals of a long table, sorted by start and given in chunks.

    chunks of int64[n] starts and ends, ns. Returns two int64[m], ns.
    """
    starts, ends = array("q"), array("q")  # arrays grow in place
    reach = _BEFORE_ALL
    for start, end in pieces:
        nonempty = end > start
        start, end = start[nonempty], end[nonempty]
        reach_before = np.maximum.accumulate(np.append(reach, end))
        opens = np.flatnonzero(start > reach_before[:-1])
        starts.frombytes(start[opens].tobytes())
        ends.frombytes(reach_before[opens].tobytes())
        reach = int(reach_before[-1])
    ends.append(reach)
    return np.frombuffer(starts, np.int64), np.frombuffer(ends, np.int64)[1 : len(starts) + 1]


def join_interval_sets(parts: Sequence[tuple[Int, Int]]) -> tuple[Int, Int]:
    """Join several interval sets into one union. Two int64[n], ns."""
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return join_intervals(*(np.concatenate(column) for column in zip(*parts)))


def iterate_slices(size: int) -> Iterator[slice]:
    """Iterate over the rows of a long table, `ROWS_PER_SLICE` at a time."""
    return (slice(low, min(low + ROWS_PER_SLICE, size)) for low in range(0, size, ROWS_PER_SLICE))


def count_values(numbers: Int, min_size: int = 0) -> Int:
    """Count how often each value from 0 on occurs.

    numbers: int64[n], not negative. Returns int64[m], m at least `min_size`.
    """
    counts = np.zeros(max(min_size, int(numbers.max(initial=-1)) + 1), np.int64)
    for rows in iterate_slices(numbers.size):
        counts += np.bincount(numbers[rows], minlength=counts.size)
    return counts


_MAX_KEYS = 1 << 16
_ITEM_BYTES = {
    "float": 4,
    "float32": 4,
    "double": 8,
    "half": 2,
    "bfloat16": 2,
    "int": 4,
    "long": 8,
    "short": 2,
    "char": 1,
    "byte": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "complexfloat": 8,
    "complexdouble": 16,
}


@dataclass(frozen=True, slots=True)
class CommDescription:
    """Description of one communication operation in the trace."""

    operation: int
    group: str | None
    ranks: str | None
    bytes: int
    sequence: int
    source: int
    target: int


class CommTable:
    """All distinct descriptions so far."""

    def __init__(self) -> None:
        self.all: list[CommDescription] = []
        self._index_by_key: dict[tuple[object, ...], int] = {}

    def add(self, name: str, args: object) -> int:
        """Add the description of an operation and return its index in `all`."""
        if not isinstance(args, CommArgs) or args.collective is None:
            key: tuple[object, ...] = (name,)
            index = self._index_by_key.get(key)
            if index is None:
                index = self._append(
                    key, CommDescription(classify.find_operation(name), None, None, -1, -1, -1, -1)
                )
            return index
        key = (
            args.collective,
            args.group,
            args.ranks,
            args.elements,
            args.dtype,
            args.sequence,
            args.source,
            args.target,
        )
        index = self._index_by_key.get(key)
        if index is None:
            item = _ITEM_BYTES.get((args.dtype or "").lower())
            size = -1 if item is None or args.elements < 0 else args.elements * item
            index = self._append(
                key,
                CommDescription(
                    classify.find_operation(args.collective),
                    args.group,
                    args.ranks,
                    size,
                    args.sequence,
                    args.source,
                    args.target,
                ),
            )
        return index

    def _append(self, key: tuple[object, ...], description: CommDescription) -> int:
        if len(self._index_by_key) < _MAX_KEYS:
            self._index_by_key[key] = len(self.all)
        self.all.append(description)
        return len(self.all) - 1


MAX_OFFSET_US = 4e15
"""Largest plausible distance from the first event in microseconds, about a century."""
MAX_COMM_ROWS = 4 << 20
MAX_THREADS = 1 << 14
_MAX_UNKNOWN_SHOWN = 12
_COMPLETE, _PAIRED = frozenset({"X"}), frozenset({"B", "E"})
_PHASE, _PID, _TID = attrgetter("ph"), attrgetter("pid"), attrgetter("tid")
_TS, _DUR = attrgetter("ts"), attrgetter("dur")
_KIND, _ARGS = attrgetter("name.kind"), attrgetter("args")
_CORRELATION, _DEVICE = attrgetter("correlation"), attrgetter("device")


class _Numbering(dict[object, int]):
    """Numbers keys in the order of their first use."""

    def __missing__(self, key: object) -> int:
        if len(self) >= MAX_THREADS:
            raise CannotImportError(f"more than {MAX_THREADS:,} threads or devices")
        number = self[key] = len(self)
        return number


@dataclass(slots=True)
class EventTable:
    """Columns of events of one sort; times in ns since the first event of the file."""

    start: PackedColumn = field(default_factory=PackedColumn)
    duration: PackedColumn = field(default_factory=PackedColumn)
    kind: PackedColumn = field(default_factory=PackedColumn)
    location: PackedColumn = field(default_factory=PackedColumn)
    """Number of the device or thread."""
    link: PackedColumn = field(default_factory=PackedColumn)
    """Correlation id; for a step its number."""

    def add(self, start: Int, end: Int, kind: Int, location: Int, link: Int) -> None:
        """Append rows, int64[n] each."""
        for column, values in (
            (self.start, start),
            (self.duration, end - start),
            (self.kind, kind),
            (self.location, location),
            (self.link, link),
        ):
            column.add(values)


class GatheredEvents:
    """All columns gathered from one file."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.kinds = classify.Kinds()
        self.origin_us = math.nan
        """Zero of the tables' times in the trace's microseconds; NaN until the first event."""
        self.device = EventTable()
        self.calls = EventTable()
        self.marks = EventTable()
        self.functions = EventTable()
        """Long Python functions and operators; their link is the row in `function_names`, in which
        names have no addresses.
        """
        self.function_names: dict[str, int] = {}
        self.busy_host: dict[int, IntervalUnion] = {}
        """Thread -> times inside operators or runtime calls."""
        self.operators: dict[int, IntervalUnion] = {}
        """Thread -> times inside operators only."""
        self.devices: _Numbering = _Numbering()
        self.threads: _Numbering = _Numbering()
        self.copy_sizes: tuple[PackedColumn, PackedColumn] = (PackedColumn(), PackedColumn())
        """Rows of `device` that are copies, and how many bytes each copied."""
        self.comm_rows = self.comm_index = np.zeros(0, np.int64)
        """Rows of `device` that are communication kernels, and for each the index of its
        description in `comm_table`; complete after `finish`.
        """
        self.comm_table = CommTable()
        self._comms: tuple[PackedColumn, PackedColumn] = (PackedColumn(), PackedColumn())
        self._rows = self._comm_count = 0
        self.step_threads: dict[int, int] = {}
        """Number of a device -> the thread that its own steps are on; empty if all share steps."""
        self.launches = 0
        """Number of calls that launched work."""
        self._pairs = EventPairs(account)

    def take(self, events: Sequence[Event]) -> None:
        """Gather what the analysis needs from a block of events."""
        if events and not hasattr(events[0], "cat"):
            self._take_common(events)
            return
        kinds = self.kinds
        kind = np.frombuffer(bytes([kinds[e.cat][e.name] for e in events]), np.uint8)
        on_device = (kind > 0) & (kind <= classify.COPY_OUT)
        self._take_device(*self._select_complete(events, kind, on_device))
        self._take_host(*self._select_complete(events, kind, kind > classify.COPY_OUT))
        self._count_unknown(events, kind)
        if not _PAIRED.isdisjoint(map(_PHASE, events)):
            self.take(self._pairs.join(events))

    def _take_common(self, events: Sequence[Event]) -> None:
        """Gather from a block of common events: all complete, with names that carry their kinds."""
        kind = _drop_short_built_ins(events, bytes(map(_KIND, events)))
        selected, start, end, code = self._select_timed(
            list(compress(events, kind)), _decode_kinds(kind)
        )
        on_device = code <= classify.COPY_OUT
        if on_device.all():
            self._take_device(selected, start, end, code)
            return
        if not on_device.any():
            self._take_host(selected, start, end, code)
            return
        for which, take in ((on_device, self._take_device), (~on_device, self._take_host)):
            take(list(compress(selected, which.tobytes())), start[which], end[which], code[which])

    def _select_complete(
        self, events: Sequence[Event], kind: NDArray[np.uint8], which: NDArray[np.bool_]
    ) -> tuple[Sequence[Event], Int, Int, Int]:
        """Select complete events and return them with start, end (ns) and kind, int64[n] each."""
        rows = np.flatnonzero(which)
        selected = _select_rows(events, rows)
        code = kind[rows].astype(np.int64)
        if set(map(_PHASE, selected)) - _COMPLETE:
            keep = np.array([i for i, event in enumerate(selected) if event.ph == "X"], np.int64)
            selected, code = _select_rows(selected, keep), code[keep]
        return self._select_timed(selected, code)

    def _select_timed(
        self, events: Sequence[Event], code: Int
    ) -> tuple[Sequence[Event], Int, Int, Int]:
        """Select the events with usable times and return them with start, end (ns) and kind."""
        start_us = np.fromiter(map(_TS, events), np.float64, len(events))
        duration_us = np.fromiter(map(_DUR, events), np.float64, len(events))
        if math.isnan(self.origin_us):
            usable = np.flatnonzero(np.abs(start_us) < 1e17)
            usable = usable[np.argsort(code[usable] > classify.COPY_OUT, kind="stable")]
            if usable.size:
                self.origin_us = math.floor(start_us[usable[0]])
        after_us = start_us - self.origin_us
        has_usable_time = (
            (np.abs(after_us) < MAX_OFFSET_US) & (duration_us >= 0) & (duration_us < MAX_OFFSET_US)
        )
        if not has_usable_time.all():
            self._count_untimed(after_us, duration_us)
            keep = np.flatnonzero(has_usable_time)
            events, code = _select_rows(events, keep), code[keep]
            after_us, duration_us = after_us[keep], duration_us[keep]
        start = np.rint(after_us * 1000).astype(np.int64)
        return events, start, start + np.rint(duration_us * 1000).astype(np.int64), code

    def _count_untimed(
        self, after_us: NDArray[np.float64], duration_us: NDArray[np.float64]
    ) -> None:
        """Count the events whose times cannot be used."""
        no_time = ~(np.abs(after_us) < MAX_OFFSET_US)
        skipped = self.account.skipped
        for reason, which in (
            ("without a usable time", no_time),
            ("without a duration", ~no_time & np.isnan(duration_us)),
            ("with a negative duration", ~no_time & (duration_us < 0)),
            ("with an impossible duration", ~no_time & (duration_us >= MAX_OFFSET_US)),
        ):
            if which.any():
                skipped[reason] += int(np.count_nonzero(which))

    def _count_unknown(self, events: Sequence[Event], kind: NDArray[np.uint8]) -> None:
        unknown_categories = [name for name, names in self.kinds.items() if not names.known]
        if not unknown_categories or not (kind == 0).any():
            return
        unknown = self.kinds.unknown
        for event in events:
            if event.cat in unknown_categories and event.ph == "X":
                unknown[event.cat] += 1

    def _take_device(self, events: Sequence[Event], start: Int, end: Int, kind: Int) -> None:
        if not events:
            return
        args = list(map(_ARGS, events))
        if None in args:
            args = [event_args or NO_ARGS for event_args in args]
        self.device.add(
            start,
            end,
            kind,
            self._number_devices(events, args),
            _convert_to_int64(map(_CORRELATION, args)),
        )
        copies_rows = np.flatnonzero(kind > classify.COPY)
        self.copy_sizes[0].add(self._rows + copies_rows)
        self.copy_sizes[1].add(_convert_to_int64(args[i].bytes for i in copies_rows.tolist()))
        comms = np.flatnonzero(kind == classify.COMM)
        if self._comm_count < MAX_COMM_ROWS:
            self._comm_count += comms.size
            self._comms[0].add(self._rows + comms)
            self._comms[1].add(
                _convert_to_int64(
                    self.comm_table.add(_get_event_name(events[i]), args[i]) for i in comms.tolist()
                )
            )
        self._rows += len(events)
        copies = int(np.count_nonzero(kind >= classify.COPY))
        self.account.read["kernels"] += len(events) - copies
        self.account.read["copies"] += copies

    def _number_devices(self, events: Sequence[Event], args: Sequence[Args]) -> Int:
        """Return the number of each event's device."""
        try:
            device = np.fromiter(map(_DEVICE, args), np.int64, len(events))
            if (device == -1).any():
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            devices = self.devices
            return _convert_to_int64(
                devices[e.pid if a.device == -1 else a.device] for e, a in zip(events, args)
            )
        if (device == device[0]).all():
            return np.full(len(events), self.devices[int(device[0])], np.int64)
        return _convert_to_int64(map(self.devices.__getitem__, device.tolist()))

    def _number_threads(self, events: Sequence[Event]) -> Int:
        """Return the number of each event's thread; consecutive events are mostly of one thread."""
        try:
            pid = np.fromiter(map(_PID, events), np.int64, len(events))
            tid = np.fromiter(map(_TID, events), np.int64, len(events))
        except (TypeError, ValueError, OverflowError):
            return _convert_to_int64(self.threads[e.pid, e.tid] for e in events)
        change = np.concatenate([[True], (pid[1:] != pid[:-1]) | (tid[1:] != tid[:-1])])
        first = np.flatnonzero(change)
        pairs = zip(pid[first].tolist(), tid[first].tolist())
        number = _convert_to_int64(self.threads[pair] for pair in pairs)
        return np.repeat(number, np.diff(np.append(first, len(events))))

    def _take_host(self, events: Sequence[Event], start: Int, end: Int, kind: Int) -> None:
        if not events:
            return
        thread = self._number_threads(events)
        work = kind <= classify.OPERATOR  # runtime calls and operators
        for number in np.unique(thread[work]).tolist():
            of_thread = work & (thread == number)
            self.busy_host.setdefault(number, IntervalUnion()).add(start[of_thread], end[of_thread])
            of_thread &= kind == classify.OPERATOR
            if of_thread.any():
                self.operators.setdefault(number, IntervalUnion()).add(
                    start[of_thread], end[of_thread]
                )
        named = (kind >= classify.TORCH_FUNCTION) | (kind == classify.OPERATOR)
        rows = np.flatnonzero(named & (end - start >= MIN_FUNCTION_NS))
        if rows.size:
            names = map(_get_event_name, _select_rows(events, rows))
            number = _convert_to_int64(number_names(self.function_names, names))
            self.functions.add(start[rows], end[rows], kind[rows], thread[rows], number)
        rows = np.flatnonzero(kind < classify.CALL)
        if rows.size:
            args = list(map(_ARGS, _select_rows(events, rows)))
            if None in args:
                args = [event_args or NO_ARGS for event_args in args]
            link = _convert_to_int64(map(_CORRELATION, args))
            self.calls.add(start[rows], end[rows], kind[rows], thread[rows], link)
            self.launches += int(np.count_nonzero(kind[rows] == classify.LAUNCH))
        rows = np.flatnonzero((kind >= classify.STEP) & (kind < classify.TORCH_FUNCTION))
        if rows.size:
            number = [classify.parse_step_number(_get_event_name(events[i])) for i in rows.tolist()]
            self.marks.add(
                start[rows], end[rows], kind[rows], thread[rows], _convert_to_int64(number)
            )
        self.account.read["operators"] += int(np.count_nonzero(kind == classify.OPERATOR))
        self.account.read["runtime calls"] += int(np.count_nonzero(kind <= classify.CALL))

    def finish(self) -> None:
        """Count the events left open and those of unknown categories."""
        self.comm_rows, self.comm_index = (column.result() for column in self._comms)
        self._pairs.finish()
        for name, count in self.kinds.unknown.most_common(_MAX_UNKNOWN_SHOWN):
            self.account.skipped[f"of category {name[:40]!r}"] += count


def _drop_short_built_ins(events: Sequence[Event], kind: bytes) -> bytes:
    """Ignore short built-in functions, which can be half of all events. kind: one byte each."""
    if classify.BUILT_IN_FUNCTION not in kind:
        return kind
    code = np.frombuffer(kind, np.uint8).copy()
    is_built_in = code == classify.BUILT_IN_FUNCTION
    durations_us = map(_DUR, compress(events, is_built_in.tobytes()))
    is_long = np.fromiter(durations_us, np.float64) * 1000 >= MIN_FUNCTION_NS
    code[is_built_in] = np.where(is_long, classify.BUILT_IN_FUNCTION, classify.IGNORED)
    return code.tobytes()


def _decode_kinds(kind: bytes) -> Int:
    """Return the kinds of the events that are not ignored, int64[n]."""
    code = np.frombuffer(kind, np.uint8)
    return code[code > 0].astype(np.int64)


def _get_event_name(event: Event) -> str:
    """Return the name of an event, also of a common one."""
    name: Any = event.name
    return name if isinstance(name, str) else name.value  # type: ignore[no-any-return]


def _select_rows(events: Sequence[Event], rows: Int) -> Sequence[Event]:
    if rows.size < 2:
        return [events[i] for i in rows.tolist()]
    return itemgetter(*rows.tolist())(events)  # type: ignore[no-any-return]


def _convert_to_int64(values: Iterable[int]) -> Int:
    """Convert numbers of a file to int64[n]; those that do not fit into 64 bits become -1."""
    listed = list(values)
    try:
        return np.array(listed, np.int64)
    except OverflowError:
        return np.array([v if abs(v) < 1 << 62 else -1 for v in listed], np.int64)
