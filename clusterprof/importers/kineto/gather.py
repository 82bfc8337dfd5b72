"""Keep of the events what an analysis needs, in columns of numbers, block after block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.importers.base import Account, CannotImportError
from clusterprof.importers.kineto import words
from clusterprof.importers.kineto.columns import Column, Int, Stretches
from clusterprof.importers.kineto.decode import NO_ARGS, Args, Event
from clusterprof.importers.kineto.said import Said

FARTHEST_US = 4e15
"""Times further from the first event than this are no times of the same trace (a century)."""
COMM_AT_MOST = 4 << 20
THREADS_AT_MOST = 1 << 14
_UNKNOWN_SHOWN = 12
_OPEN_AT_MOST = 4096
_COMPLETE, _HALVES = frozenset({"X"}), frozenset({"B", "E"})
_PHASE, _PID, _TID = attrgetter("ph"), attrgetter("pid"), attrgetter("tid")
_TS, _DUR = attrgetter("ts"), attrgetter("dur")
_KIND, _ARGS = attrgetter("name.kind"), attrgetter("args")
_LINK, _DEVICE = attrgetter("correlation"), attrgetter("device")


class _Numbers(dict[object, int]):
    """Numbers things in the order in which they are met."""

    def __missing__(self, key: object) -> int:
        if len(self) >= THREADS_AT_MOST:
            raise CannotImportError(f"more than {THREADS_AT_MOST:,} threads or devices")
        number = self[key] = len(self)
        return number


@dataclass(slots=True)
class Table:
    """Columns of events of one sort; times in ns after the first event of the file."""

    start: Column = field(default_factory=Column)
    took: Column = field(default_factory=Column)
    kind: Column = field(default_factory=Column)
    where: Column = field(default_factory=Column)
    """Number of the device, or of the thread."""
    link: Column = field(default_factory=Column)
    """The correlation id; of a step its number."""

    def add(self, start: Int, end: Int, kind: Int, where: Int, link: Int) -> None:
        """Add some rows."""
        for column, values in (
            (self.start, start), (self.took, end - start), (self.kind, kind), (self.where, where),
            (self.link, link),
        ):  # fmt: skip
            column.add(values)


class Gathered:
    """All that is kept of one file."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.kinds = words.Kinds()
        self.origin_us = math.nan
        """The instant at which the times of the tables are zero."""
        self.device = Table()
        self.calls = Table()
        self.marks = Table()
        self.busy_host: dict[int, Stretches] = {}
        """Thread -> when it was inside operators or calls of the runtime."""
        self.operators: dict[int, Stretches] = {}
        """Thread -> when it was inside operators alone."""
        self.devices: _Numbers = _Numbers()
        self.threads: _Numbers = _Numbers()
        self.copied: tuple[Column, Column] = (Column(), Column())
        """Rows of `device` that are copies, and how many bytes each copied."""
        self.comm_rows = self.comm_says = np.zeros(0, np.int64)
        """Rows of `device` that are operations between ranks, and which of `said` each says; known
        at the end."""
        self.said = Said()
        self._comms: tuple[Column, Column] = (Column(), Column())
        self._rows = self._comm_count = 0
        self._open: dict[tuple[object, object], list[Event]] = {}

    def take(self, events: Sequence[Event]) -> None:
        """Keep what matters of some events."""
        if events and not hasattr(events[0], "cat"):
            self._take_usual(events)
            return
        kinds = self.kinds
        kind = np.frombuffer(bytes([kinds[e.cat][e.name] for e in events]), np.uint8)
        on_device = (kind > 0) & (kind <= words.COPY_OUT)
        self._take_device(*self._whole(events, kind, on_device))
        self._take_host(*self._whole(events, kind, kind > words.COPY_OUT))
        self._count_unknown(events, kind)
        if not _HALVES.isdisjoint(map(_PHASE, events)):
            self.take(self._paired(events))

    def _take_usual(self, events: Sequence[Event]) -> None:
        """The same of events whose names are their kinds, all of them whole (`usual`)."""
        kind = bytes(map(_KIND, events))
        some, start, end, code = self._timed(list(compress(events, kind)), _codes(kind))
        here = code <= words.COPY_OUT
        if here.all():
            self._take_device(some, start, end, code)
            return
        if not here.any():
            self._take_host(some, start, end, code)
            return
        for which, take in ((here, self._take_device), (~here, self._take_host)):
            take(list(compress(some, which.tobytes())), start[which], end[which], code[which])

    def _whole(
        self, events: Sequence[Event], kind: NDArray[np.uint8], which: NDArray[np.bool_]
    ) -> tuple[Sequence[Event], Int, Int, Int]:
        """Choose complete events: themselves, when they began and ended, and what they are."""
        rows = np.flatnonzero(which)
        some = _chosen(events, rows)
        code = kind[rows].astype(np.int64)
        if set(map(_PHASE, some)) - _COMPLETE:
            keep = np.array([i for i, event in enumerate(some) if event.ph == "X"], np.int64)
            some, code = _chosen(some, keep), code[keep]
        return self._timed(some, code)

    def _timed(self, some: Sequence[Event], code: Int) -> tuple[Sequence[Event], Int, Int, Int]:
        """Choose events whose times can be used."""
        start_us = np.fromiter(map(_TS, some), np.float64, len(some))
        took_us = np.fromiter(map(_DUR, some), np.float64, len(some))
        if math.isnan(self.origin_us):
            usable = np.flatnonzero(np.abs(start_us) < 1e17)
            usable = usable[np.argsort(code[usable] > words.COPY_OUT, kind="stable")]
            if usable.size:
                self.origin_us = math.floor(start_us[usable[0]])
        after_us = start_us - self.origin_us
        good = (np.abs(after_us) < FARTHEST_US) & (took_us >= 0) & (took_us < FARTHEST_US)
        if not good.all():
            self._account_for(after_us, took_us)
            keep = np.flatnonzero(good)
            some, code = _chosen(some, keep), code[keep]
            after_us, took_us = after_us[keep], took_us[keep]
        start = np.rint(after_us * 1000).astype(np.int64)
        return some, start, start + np.rint(took_us * 1000).astype(np.int64), code

    def _account_for(self, after_us: NDArray[np.float64], took_us: NDArray[np.float64]) -> None:
        """Count events whose times cannot be used."""
        timeless = ~(np.abs(after_us) < FARTHEST_US)
        skipped = self.account.skipped
        for reason, which in (
            ("without a time that can be", timeless),
            ("without a duration", ~timeless & np.isnan(took_us)),
            ("with a negative duration", ~timeless & (took_us < 0)),
            ("with a duration that cannot be", ~timeless & (took_us >= FARTHEST_US)),
        ):
            if which.any():
                skipped[reason] += int(np.count_nonzero(which))

    def _paired(self, events: Sequence[Event]) -> list[Event]:
        """Make one event of every two halves: what a `B` opened last, the next `E` closes."""
        whole = []
        for event in events:
            if event.ph == "B":
                waiting = self._open.setdefault((event.pid, event.tid), [])
                if len(waiting) < _OPEN_AT_MOST and len(self._open) < THREADS_AT_MOST:
                    waiting.append(event)
                else:
                    self.account.skipped[f"opened within {_OPEN_AT_MOST:,} others (B)"] += 1
            elif event.ph == "E":
                begun = self._open.get((event.pid, event.tid))
                if begun:
                    one = begun.pop()
                    one.ph, one.dur = "X", event.ts - one.ts
                    whole.append(one)
                else:
                    self.account.skipped["ended without a beginning (E)"] += 1
        return whole

    def _count_unknown(self, events: Sequence[Event], kind: NDArray[np.uint8]) -> None:
        strange = [name for name, names in self.kinds.items() if not names.known]
        if not strange or not (kind == 0).any():
            return
        unknown = self.kinds.unknown
        for event in events:
            if event.cat in strange and event.ph == "X":
                unknown[event.cat] += 1

    def _take_device(self, some: Sequence[Event], start: Int, end: Int, kind: Int) -> None:
        if not some:
            return
        args = list(map(_ARGS, some))
        if None in args:
            args = [one or NO_ARGS for one in args]
        self.device.add(start, end, kind, self._device_of(some, args), _ints(map(_LINK, args)))
        copied = np.flatnonzero(kind > words.COPY)
        self.copied[0].add(self._rows + copied)
        self.copied[1].add(_ints(args[i].bytes for i in copied.tolist()))
        comms = np.flatnonzero(kind == words.COMM)
        if self._comm_count < COMM_AT_MOST:
            self._comm_count += comms.size
            self._comms[0].add(self._rows + comms)
            self._comms[1].add(
                _ints(self.said.place(_text(some[i]), args[i]) for i in comms.tolist())
            )
        self._rows += len(some)
        copies = int(np.count_nonzero(kind >= words.COPY))
        self.account.read["kernels"] += len(some) - copies
        self.account.read["copies"] += copies

    def _device_of(self, some: Sequence[Event], args: Sequence[Args]) -> Int:
        """Number of each event's device."""
        try:
            device = np.fromiter(map(_DEVICE, args), np.int64, len(some))
            if (device == -1).any():
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            devices = self.devices
            return _ints(devices[e.pid if a.device == -1 else a.device] for e, a in zip(some, args))
        if (device == device[0]).all():
            return np.full(len(some), self.devices[int(device[0])], np.int64)
        return _ints(map(self.devices.__getitem__, device.tolist()))

    def _threads(self, some: Sequence[Event]) -> Int:
        """Number of each event's thread; neighbours are mostly of one."""
        try:
            pid = np.fromiter(map(_PID, some), np.int64, len(some))
            tid = np.fromiter(map(_TID, some), np.int64, len(some))
        except (TypeError, ValueError, OverflowError):
            return _ints(self.threads[e.pid, e.tid] for e in some)
        change = np.concatenate([[True], (pid[1:] != pid[:-1]) | (tid[1:] != tid[:-1])])
        first = np.flatnonzero(change)
        pairs = zip(pid[first].tolist(), tid[first].tolist())
        number = _ints(self.threads[pair] for pair in pairs)
        return np.repeat(number, np.diff(np.append(first, len(some))))

    def _take_host(self, some: Sequence[Event], start: Int, end: Int, kind: Int) -> None:
        if not some:
            return
        thread = self._threads(some)
        work = kind <= words.OPERATOR  # calls of the runtime, and operators
        for number in np.unique(thread[work]).tolist():
            mine = work & (thread == number)
            self.busy_host.setdefault(number, Stretches()).add(start[mine], end[mine])
            mine &= kind == words.OPERATOR
            if mine.any():
                self.operators.setdefault(number, Stretches()).add(start[mine], end[mine])
        rows = np.flatnonzero(kind < words.CALL)
        if rows.size:
            args = list(map(_ARGS, _chosen(some, rows)))
            if None in args:
                args = [one or NO_ARGS for one in args]
            link = _ints(map(_LINK, args))
            self.calls.add(start[rows], end[rows], kind[rows], thread[rows], link)
        rows = np.flatnonzero(kind >= words.STEP)
        if rows.size:
            number = [words.step_number(_text(some[i])) for i in rows.tolist()]
            self.marks.add(start[rows], end[rows], kind[rows], thread[rows], _ints(number))
        self.account.read["operators"] += int(np.count_nonzero(kind == words.OPERATOR))
        self.account.read["runtime calls"] += int(np.count_nonzero(kind <= words.CALL))

    def finish(self) -> None:
        """Say what was left open, and what was of no known sort."""
        self.comm_rows, self.comm_says = (column.done() for column in self._comms)
        left = sum(len(waiting) for waiting in self._open.values())
        if left:
            self.account.skipped["begun and never ended (B)"] += left
        for name, count in self.kinds.unknown.most_common(_UNKNOWN_SHOWN):
            self.account.skipped[f"of category {name[:40]!r}"] += count


def _codes(kind: bytes) -> Int:
    """The kinds of what is something."""
    code = np.frombuffer(kind, np.uint8)
    return code[code > 0].astype(np.int64)


def _text(event: Event) -> str:
    """The name, of a usual event too."""
    name: Any = event.name
    return name if isinstance(name, str) else name.value  # type: ignore[no-any-return]


def _chosen(events: Sequence[Event], rows: Int) -> Sequence[Event]:
    if rows.size < 2:
        return [events[i] for i in rows.tolist()]
    return itemgetter(*rows.tolist())(events)  # type: ignore[no-any-return]


def _ints(values: Iterable[int]) -> Int:
    """Numbers of a file; those that 64 bits do not hold are -1."""
    listed = list(values)
    try:
        return np.array(listed, np.int64)
    except OverflowError:
        return np.array([v if abs(v) < 1 << 62 else -1 for v in listed], np.int64)
