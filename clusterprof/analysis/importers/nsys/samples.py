"""CPU samples of a profile: in which function a thread was while its device had nothing to do.

    COMPOSITE_EVENTS       when a running thread was sampled, by the number of its CPU cycles
    SAMPLING_CALLCHAINS    the stack of each sample; depth 0 is the innermost function
    StringIds              names of functions and of the libraries they are in

A sample stands for the time since the one before it, at most two periods: a thread that sleeps is
not sampled. It has the name of the operation of MPI that it is in, else of the innermost function,
else of the library.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.device_timeline import Int
from clusterprof.analysis.importers.core.host_activity import NO_HOST_WORK, HostWork
from clusterprof.analysis.importers.nsys.database import DamagedError, Database, Strings
from clusterprof.analysis.importers.nsys.stacks import NO_FRAMES, PythonFrames, read_python_frames
from clusterprof.probe import layout

MAX_SAMPLES = 4_000_000
"""Largest number of samples read from one file: about 0.2 GB of memory."""
_MAX_PERIODS = 2
_MPI = re.compile(r"P?MPI_[A-Z]\w*")
_MAX_OPERATIONS = 512
_NO_TIMES: tuple[Int, Int, Int] = tuple(np.zeros((3, 0), np.int64))  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class HostSamples:
    """Samples of the threads of a profile."""

    threads: dict[int, HostWork]
    """Serialized thread -> what it was in; `name` is a row of `names`."""
    names: list[str]
    times: dict[int, tuple[Int, Int, Int]]
    """Serialized thread -> index, time (ns) and interval (ns) of each sample, int64[n] each."""
    frames: PythonFrames
    """Python frames of the samples, by their index."""

    def of_thread(self, thread: int | None) -> HostWork:
        """Return the work of a thread; empty if it was not sampled."""
        return NO_HOST_WORK if thread is None else self.threads.get(thread, NO_HOST_WORK)

    def times_of_thread(self, thread: int | None) -> tuple[Int, Int, Int]:
        """Return index, time (ns) and interval (ns) of the samples of a thread, int64[n] each."""
        return _NO_TIMES if thread is None else self.times.get(thread, _NO_TIMES)


def read_samples(db: Database, threads: Int, strings: Strings, account: Account) -> HostSamples:
    """Read the samples of some threads; damage ends the reading and is noted in the account.

    threads: int64[n], serialized.
    """
    try:
        start, sample, thread = _read_events(db, threads, account)
        if not start.size:
            return _NO_SAMPLES
        number, names = _name_samples(db, sample, strings)
        frames = read_python_frames(db, sample)
    except DamagedError as error:
        account.cut = account.cut or f"CPU samples: {error}"
        return _NO_SAMPLES
    account.read["CPU samples"] += start.size
    work, times = {}, {}
    for tid in np.unique(thread).tolist():
        on_thread = thread == tid
        work[tid] = _build_work(start[on_thread], number[on_thread])
        times[tid] = (
            np.flatnonzero(on_thread),
            start[on_thread],
            _measure_intervals(start[on_thread]),
        )
    return HostSamples(work, names, times, frames)


_NO_SAMPLES = HostSamples({}, [], {}, NO_FRAMES)


def _read_events(db: Database, threads: Int, account: Account) -> tuple[Int, Int, Int]:
    """Read time (ns), id and thread of the samples, int64[n] each, by id."""
    parts, remaining = [np.zeros((3, 0), np.int64)], MAX_SAMPLES
    for rows in db.integers("COMPOSITE_EVENTS", ("start", "id"), ("globalTid",)):
        wanted = rows[:, np.isin(rows[2], threads)]
        if wanted.shape[1] > remaining:
            account.skipped["CPU samples beyond the limit"] += wanted.shape[1] - remaining
        parts.append(wanted[:, :remaining])
        remaining -= parts[-1].shape[1]
    start, sample, thread = np.concatenate(parts, axis=1)
    order = np.argsort(sample, kind="stable")
    return start[order], sample[order], thread[order]


def _name_samples(db: Database, sample: Int, strings: Strings) -> tuple[Int, list[str]]:
    """Find the name of each sample: int64[n], a row of the names, -1 without a stack.

    sample: int64[n], ids, sorted.
    """
    operations = [id_ for id_, text in strings.texts.items() if _MPI.fullmatch(text)]
    operations = operations[:_MAX_OPERATIONS]
    listed = ", ".join(map(str, operations))
    symbol, module, operation = np.full((3, sample.size), -1, np.int64)
    for rows in db.integers(
        "SAMPLING_CALLCHAINS",
        ("id",),
        ("stackDepth", "symbol", "module", "unresolved"),
        where=f'"stackDepth" = 0 OR "symbol" IN ({listed})',
    ):
        row = np.minimum(np.searchsorted(sample, rows[0]), sample.size - 1)
        rows, row = rows[:, sample[row] == rows[0]], row[sample[row] == rows[0]]
        inner, is_resolved = rows[1] == 0, rows[4] != 1
        symbol[row[inner & is_resolved]] = rows[2, inner & is_resolved]
        module[row[inner & ~is_resolved]] = rows[3, inner & ~is_resolved]
        in_operation = np.isin(rows[2], operations)
        operation[row[in_operation]] = rows[2, in_operation]
    key = np.where(operation >= 0, operation, np.where(symbol >= 0, symbol, module))
    ids, number = np.unique(key, return_inverse=True)
    texts = {id_: "" for id_ in ids.tolist()}
    for values in db.rows("StringIds", ("id", "value")):
        texts.update((id_, value) for id_, value in values if id_ in texts and type(value) is str)
    names = [texts[id_].rpartition("/")[2] for id_ in ids.tolist()]
    is_named = np.array([bool(name) for name in names])
    return np.where(is_named[number], number, -1), names


def _measure_intervals(start: Int) -> Int:
    """Measure for which time before it each sample stands, int64[n], ns, in any order."""
    order = np.argsort(start, kind="stable")
    sorted_start = start[order]
    interval = np.zeros(sorted_start.size, np.int64)
    if sorted_start.size > 1:
        period_ns = max(int(np.median(np.diff(sorted_start))), 1)
        since = np.append(period_ns, np.diff(sorted_start))
        interval[order] = np.minimum(since, _MAX_PERIODS * period_ns)
    return interval


def _build_work(start: Int, name: Int) -> HostWork:
    """Build the work of one thread from its samples, int64[n] each, in any order."""
    order = np.argsort(start, kind="stable")
    sorted_start, name = start[order], name[order]
    if sorted_start.size < 2:
        return NO_HOST_WORK
    begin = sorted_start - _measure_intervals(sorted_start)
    opens = np.append(True, (begin[1:] > sorted_start[:-1]) | (name[1:] != name[:-1]))
    first = np.flatnonzero(opens)
    last = np.append(first[1:], sorted_start.size) - 1
    activity = np.full(first.size, layout.COMPUTING_ON_HOST)
    return HostWork(np.maximum(begin[first], 0), sorted_start[last], activity, name[first])
