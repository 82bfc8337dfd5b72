"""What the hosts of one profile did: NVTX ranges that say steps and waits, and calls of the system.

Ranges may be many millions: those of operators are only kept as the time they cover.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from clusterprof.importers.base import Account
from clusterprof.importers.device_gaps import NONE, Int, Intervals, inside, union
from clusterprof.importers.nsys.database import DamagedError, Database
from clusterprof.importers.nsys.device import TID_BITS
from clusterprof.importers.nsys.names import (
    NOTHING,
    NUMBERED_STEP,
    OPERATORS,
    OPTIMIZER,
    STEP,
    WAIT,
    Strings,
    range_class,
)

_RANGES = frozenset((59, 60, 70, 71))  # push and pop, start and end; of NVTX and of its text files
_COLUMNS = ("start", "end", "eventType", "globalTid", "text", "textId")
_KEPT_AT_MOST = 2_000_000
_TEXTS_AT_MOST = 512
_COMPACT_ROWS = 1 << 18
_REPEATED, _COVERED = 3, 0.5
_DIGITS = re.compile(r"\d+")
_READS = re.compile(r"p?read(v?2?|64)?|fread|readahead|__read")
_LAST_NS = 1 << 62


@dataclass(slots=True)
class _Cover:
    """The time that many ranges cover, in little memory."""

    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    so_far: Intervals = NONE

    def add(self, start: int, end: int) -> None:
        self.start.append(start)
        self.end.append(end)
        if len(self.start) >= _COMPACT_ROWS:
            self.all()

    def all(self) -> Intervals:
        start = np.concatenate([self.so_far[0], np.array(self.start, np.int64)])
        end = np.concatenate([self.so_far[1], np.array(self.end, np.int64)])
        self.start, self.end, self.so_far = [], [], union(start, end)
        return self.so_far


@dataclass(slots=True)
class Thread:
    """What one thread's ranges say."""

    kept: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """By class (`names.WAIT` and its like): start, end and number of each."""
    others: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Ranges of no known meaning, by their text without digits."""
    operators: _Cover = field(default_factory=_Cover)

    def waits(self) -> Intervals:
        """Return when it waited for data."""
        return _intervals(self.kept.get(WAIT, []))


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one process."""

    start_ns: Int
    end_ns: Int
    number: Int
    how: str
    """By which names of ranges they were told, for people."""


def threads_of(db: Database, strings: Strings, account: Account) -> dict[int, Thread]:
    """Read all NVTX ranges, by serialised thread; what is damaged ends it."""
    found: dict[int, Thread] = {}
    kept = 0
    is_operator = OPERATORS.search
    try:
        for rows in db.rows("NVTX_EVENTS", _COLUMNS):
            read = 0
            for start, end, type_, tid, text, text_id in rows:
                if type_ not in _RANGES:
                    continue
                if not (type(start) is type(end) is type(tid) is int and 0 <= start <= end):
                    account.skipped["NVTX ranges without two times"] += 1
                    continue
                said = text if isinstance(text, str) else strings.texts.get(text_id)
                if said is None or end >= _LAST_NS:
                    continue
                read += 1
                thread = found.get(tid)
                if thread is None:
                    thread = found[tid] = Thread()
                if is_operator(said):  # most of them
                    thread.operators.add(start, end)
                else:
                    kept += _take(thread, start, end, said)
            account.read["NVTX ranges"] += read
            if kept > _KEPT_AT_MOST:
                account.cut = account.cut or f"only {_KEPT_AT_MOST:,} ranges were looked at"
                break
    except DamagedError as error:
        account.cut = account.cut or f"NVTX_EVENTS: {error}; what came before it was read"
    return found


def _take(thread: Thread, start: int, end: int, text: str) -> int:
    kind, number = range_class(text)
    if kind != NOTHING:
        thread.kept.setdefault(kind, []).append((start, end, number))
        return 1
    key = _DIGITS.sub("#", text)
    if key in thread.others or len(thread.others) < _TEXTS_AT_MOST:
        thread.others.setdefault(key, []).append((start, end, -1))
        return 1
    return 0


def steps_of(threads: list[Thread]) -> Steps | None:
    """Say when the steps of a process were, by the names of its ranges; None when nothing tells.

    Best first: ranges called step or iteration with a number, the same without one, from the end of
    one optimizer step to the next, and a range of any name that repeats and covers half the time.
    """
    for kind, how in ((NUMBERED_STEP, "numbered step ranges"), (STEP, "step ranges")):
        best = max((one.kept.get(kind, []) for one in threads), key=len, default=[])
        steps = _apart(best)
        if steps and (kind == NUMBERED_STEP or len(steps) > 1):
            return _numbered(steps, how, inferred=False)
    ends = max((one.kept.get(OPTIMIZER, []) for one in threads), key=len, default=[])
    ends = _apart(ends)
    if len(ends) >= _REPEATED:
        steps = [(a[1], b[1], -1) for a, b in pairwise(ends)]
        return _numbered(steps, "the ends of optimizer steps", inferred=True)
    found = [(key, _apart(some)) for one in threads for key, some in one.others.items()]
    span = _span([each for _, some in found for each in some])
    for key, some in sorted(found, key=lambda one: (-_length(one[1]), one[0])):
        if len(some) >= _REPEATED and _length(some) >= _COVERED * span > 0:
            return _numbered(some, f'the repeated ranges "{key[:60]}"', inferred=True)
    return None


def _apart(some: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """In order of time, without those that lie in another."""
    out: list[tuple[int, int, int]] = []
    for one in sorted(some, key=lambda each: (each[0], -each[1])):
        if one[1] > one[0] and (not out or one[0] >= out[-1][1]):
            out.append(one)
    return out


def _numbered(steps: list[tuple[int, int, int]], how: str, inferred: bool) -> Steps:
    start, end, number = np.array(steps, np.int64).T
    if (number < 0).any() or (np.diff(number) <= 0).any():
        number = np.arange(start.size, dtype=np.int64) + 1
    elif inferred:
        number = number - number[0] + 1
    return Steps(start, end, number, how)


def _length(some: list[tuple[int, int, int]]) -> int:
    return sum(end - start for start, end, _ in some)


def _span(some: list[tuple[int, int, int]]) -> int:
    return max((one[1] for one in some), default=0) - min((one[0] for one in some), default=0)


def _intervals(some: list[tuple[int, int, int]]) -> Intervals:
    if not some:
        return NONE
    start, end, _ = np.array(some, np.int64).T
    return union(start, end)


@dataclass(frozen=True, slots=True)
class Loading:
    """What a thread was seen to do in its waits for data; arrays of one length."""

    start_ns: Int
    end_ns: Int
    reading_ns: Int
    outside_ns: Int
    """In no call of the system: at work, or ready to be."""


def loading_of(db: Database, threads: dict[int, Thread], account: Account) -> dict[int, Loading]:
    """Say of the waits for data how much of each went into reads of files, by serialised thread."""
    waits = {tid: one.waits() for tid, one in threads.items()}
    waits = {tid: some for tid, some in waits.items() if some[0].size}
    if not waits or not db.has("OSRT_API", "start", "end", "globalTid", "nameId"):
        return {}
    parts: dict[tuple[int, bool], list[Int]] = {}
    try:
        reads = _read_calls(db)
        for some in db.integers("OSRT_API", ("start", "end"), ("globalTid", "nameId")):
            account.read["calls of the system"] += some.shape[1]
            for tid, wait in waits.items():
                mine = some[:, (some[2] == tid) & (some[1] > some[0])]
                mine = mine[:, inside(mine[0], mine[1], wait) > 0]
                parts.setdefault((tid, False), []).append(mine[:2])
                parts.setdefault((tid, True), []).append(mine[:2, np.isin(mine[3], reads)])
    except DamagedError as error:
        account.cut = account.cut or f"OSRT_API: {error}; what came before it was read"
    found = {}
    for tid, (start, end) in waits.items():
        calls, reading = (_joined(parts.get((tid, read), [])) for read in (False, True))
        if calls[0].size:
            outside = end - start - inside(start, end, calls)
            found[tid] = Loading(start, end, inside(start, end, reading), outside)
    return found


def _joined(parts: list[Int]) -> Intervals:
    if not parts:
        return NONE
    start, end = np.concatenate(parts, axis=1)
    return union(start, end)


def _read_calls(db: Database) -> Int:
    ids = [
        id_ for rows in db.rows("StringIds", ("id", "value")) for id_, value in rows
        if isinstance(id_, int) and isinstance(value, str) and _READS.fullmatch(value)
    ]  # fmt: skip
    return np.array(ids, np.int64)


def process_of(tid: int) -> int:
    """Return the serialised process of a serialised thread."""
    return tid >> TID_BITS << TID_BITS
