"""What the devices of one profile did: every kernel, copy, fill and graph, and who launched it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.importers.base import Account
from clusterprof.importers.device_gaps import Int
from clusterprof.importers.nsys.database import DamagedError, Database
from clusterprof.importers.nsys.names import COPY_CALL, Strings

ROWS_AT_MOST = 12_000_000
"""Of device activities in one file: about 1.5 GB of memory."""
TID_BITS, PID_MASK = 24, 0xFFFFFF
KERNEL, COPY, FILL, GRAPH = range(4)
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
_TABLES = (
    ("CUPTI_ACTIVITY_KIND_KERNEL", KERNEL, "kernels", "shortName"),
    ("CUPTI_ACTIVITY_KIND_MEMCPY", COPY, "copies", "copyKind"),
    ("CUPTI_ACTIVITY_KIND_MEMSET", FILL, "fills", "value"),
    ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", GRAPH, "graphs", "graphId"),
)
_CALLS = ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER")


@dataclass(slots=True)
class Activities:
    """All that ran on devices; arrays of one length."""

    start_ns: Int
    end_ns: Int
    process: Int
    """Serialised process (`globalPid`); -1 unknown."""
    device: Int
    stream: Int
    correlation: Int
    kind: Int
    """KERNEL, COPY, FILL or GRAPH."""
    what: Int
    """Of a kernel its collective operation, of a copy its kind, else 0."""
    bytes: Int

    def of(self, rows: Int) -> Activities:
        """Return some of them."""
        return Activities(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(slots=True)
class Calls:
    """CUDA calls of all hosts' threads; arrays of one length."""

    start_ns: Int
    end_ns: Int
    thread: Int
    """Serialised thread (`globalTid`)."""
    correlation: Int
    kind: Int
    """As `names.call_class` says."""

    def of(self, rows: Int) -> Calls:
        """Return some of them."""
        return Calls(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @property
    def process(self) -> Int:
        """The serialised process of each."""
        return self.thread >> TID_BITS << TID_BITS


def pid_of(process: int) -> int:
    """Return the pid in a serialised process or thread."""
    return process >> TID_BITS & PID_MASK


def activities_of(db: Database, strings: Strings, account: Account) -> Activities:
    """Read everything that ran on a device; what is damaged ends it, and the account says so."""
    parts: list[Int] = []
    kernels = _lookup(strings.kernels)
    left = ROWS_AT_MOST
    for table, kind, word, what in _TABLES:
        others = ("globalPid", "deviceId", "streamId", "correlationId", what, "bytes")
        total = 0
        try:
            total = db.count(table)
            for some in db.integers(table, ("start", "end"), others):
                some = some[:, :left]
                left -= some.shape[1]
                total -= some.shape[1]
                good = some[1] >= some[0]
                if not good.all():
                    account.skipped["that end before they begin"] += int((~good).sum())
                    some = some[:, good]
                account.read[word] += some.shape[1]
                some = np.insert(some, 6, kind, axis=0)
                some[7] = _mapped(some[7], kernels) if kind == KERNEL else some[7] * (kind == COPY)
                parts.append(some)
                if left <= 0:
                    break
        except DamagedError as error:
            account.cut = account.cut or f"{table}: {error}; what came before it was read"
            total = 0
        if total > 0 and left > 0:
            account.skipped[f"{word} without two times"] += total
    if left <= 0:
        account.cut = f"only the first {ROWS_AT_MOST:,} activities were read: export a shorter part"
    whole = np.concatenate(parts, axis=1) if parts else np.empty((9, 0), np.int64)
    start, end, process, device, stream, correlation, kinds, whats, size = whole
    return Activities(start, end, process, device, stream, correlation, kinds, whats, size)


def calls_of(db: Database, strings: Strings, account: Account) -> Calls:
    """Read all CUDA calls; what is damaged ends it, and the account says so."""
    parts: list[Int] = []
    kinds = _lookup(strings.calls)
    left = 3 * ROWS_AT_MOST
    for table in _CALLS:
        try:
            others = ("globalTid", "correlationId", "nameId")
            for some in db.integers(table, ("start", "end"), others):
                some = some[:, (some[1] >= some[0]) & (some[2] >= 0)][:, :left]
                left -= some.shape[1]
                some[4] = _mapped(some[4], kinds)
                account.read["CUDA calls"] += some.shape[1]
                parts.append(some)
                if left <= 0:
                    break
        except DamagedError as error:
            account.cut = account.cut or f"{table}: {error}; what came before it was read"
    whole = np.concatenate(parts, axis=1) if parts else np.empty((5, 0), np.int64)
    return Calls(*whole)


def launches(some: Activities, calls: Calls) -> Int:
    """Return for each activity the row of the call that launched it; -1 where none is known.

    Calls of both APIs may carry one correlation: the outermost, which began first, is taken.
    """
    if not calls.start_ns.size:
        return np.full(some.start_ns.size, -1, np.int64)
    order = np.lexsort((calls.start_ns, calls.correlation, calls.process))
    by_process, by_number = calls.process[order], calls.correlation[order]
    processes = np.unique(np.concatenate([by_process, some.process]))
    keys = processes.searchsorted(by_process) << 40 | by_number & (1 << 40) - 1
    asked = processes.searchsorted(some.process) << 40 | some.correlation & (1 << 40) - 1
    at = np.minimum(keys.searchsorted(asked), keys.size - 1)
    found = np.where(keys[at] == asked, order[at], -1)
    found[some.correlation <= 0] = -1
    return found


def with_processes(some: Activities, calls: Calls) -> Activities:
    """Fill in whose an activity was where the file does not say: older ones name no process."""
    rows = np.flatnonzero(some.process < 0)
    if not rows.size or not calls.start_ns.size:
        return some
    order = np.argsort(calls.correlation, kind="stable")
    by_number = calls.correlation[order]
    at = np.minimum(by_number.searchsorted(some.correlation[rows]), by_number.size - 1)
    known = by_number[at] == some.correlation[rows]
    some.process[rows[known]] = calls.process[order[at[known]]]
    return some


def copies_from_host(some: Activities, launched: Int, calls: Calls) -> tuple[Int, Int]:
    """Return rows of calls that copy to the device, and their bytes."""
    rows = np.flatnonzero((some.kind == COPY) & (some.what == HOST_TO_DEVICE) & (launched >= 0))
    rows = rows[calls.kind[launched[rows]] == COPY_CALL]
    return launched[rows], some.bytes[rows]


def _lookup(kinds: dict[int, int]) -> tuple[Int, Int]:
    ids = np.array(sorted(kinds), np.int64)
    return ids, np.array([kinds[int(one)] for one in ids], np.int64)


def _mapped(ids: Int, known: tuple[Int, Int]) -> Int:
    if not known[0].size:
        return np.zeros(ids.size, np.int64)
    at = np.minimum(known[0].searchsorted(ids), known[0].size - 1)
    return np.where(known[0][at] == ids, known[1][at], 0)
