"""Why a device stood idle: was the next work launched too late, or was it waiting already?

`device_gaps.late` decides; here stands which call launched what, and what the host did meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clusterprof.importers.columns import held_by
from clusterprof.importers.device_gaps import NEVER, late
from clusterprof.importers.kineto import words
from clusterprof.importers.kineto.columns import Cover, Int, all_of, joined, slices

_NOTHING = -2  # instead of a call: nothing was launched any more


@dataclass(frozen=True, slots=True)
class Work:
    """What one device did; n rows, sorted by start. Columns are no wider than their numbers."""

    start: Int
    took: Int
    kind: Int
    copied: Int
    """Rows of copies between host and device, in the order of the file, of all devices."""
    copied_bytes: Int
    row: Int
    """In the order of the file."""
    call: Int
    """Row of the call that launched it (`Calls`), -1 not known."""

    def bytes_of(self, at: Int) -> Int:
        """Return how many bytes copies had; -1 not known."""
        return self.copied_bytes[np.searchsorted(self.copied, self.row[at])]

    def ends(self, rows: Int) -> Int:
        """Return when some of it ended."""
        return self.start[rows] + self.took[rows]

    def last_end(self) -> int:
        """Return when the last of it ended."""
        return max(int(end.max()) for _, end in self.pieces())

    def pieces(self, kind: int | None = None) -> Iterator[tuple[Int, Int]]:
        """Yield starts and ends, of one kind or of all, some thousands at a time."""
        for some in slices(self.start.size):
            start, end = self.start[some], self.start[some] + self.took[some]
            which = slice(None) if kind is None else self.kind[some] == kind
            yield start[which], end[which]


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one process into the device's runtime, sorted by start."""

    start: Int
    took: Int
    kind: Int
    thread: Int
    link: Int

    def ends(self, rows: Int) -> Int:
        """Return when some of them ended."""
        return self.start[rows] + self.took[rows]

    def of(self, kind: int) -> tuple[Int, Int]:
        """Return when calls of one kind began and ended."""
        which = self.kind == kind
        return self.start[which], self.start[which] + self.took[which]


def launched_by(calls: Calls, link: Int, start: Int) -> Int:
    """Return for each piece of work the call that launched it, -1 where the file does not say.

    Of calls of one number (they come again in long traces) the last that began before the work;
    `start` is sorted.
    """
    found = np.full(link.size, -1, held_by(-1, calls.link.size))
    order, known = _by_number(calls, found.dtype)
    if not known.size:
        return found
    again = bool((known[1:] == known[:-1]).any())
    for some in slices(link.size):
        found[some] = _launched(calls.start, order, known, link[some], start[some], again)
    return found


def _by_number(calls: Calls, dtype: np.dtype[np.signedinteger]) -> tuple[Int, Int]:
    """Return the rows of calls that launch and say their number, by number; and the numbers."""
    which = (calls.link >= 0) & (calls.kind != words.CALL)
    if calls.link.itemsize > 4 or calls.link.size >> 32:
        order = np.flatnonzero(which)
        order = order[np.argsort(calls.link[order], kind="stable")]
        return order, calls.link[order]
    key = np.flatnonzero(which)  # number and row in one: sorted where they lie
    for some in slices(key.size):
        key[some] |= calls.link[key[some]].astype(np.int64) << 32
    key.sort()
    order, known = np.empty(key.size, dtype), np.empty(key.size, calls.link.dtype)
    for some in slices(key.size):
        order[some], known[some] = key[some] & 0xFFFFFFFF, key[some] >> 32
    return order, known


def _launched(begun: Int, order: Int, known: Int, link: Int, start: Int, again: bool) -> Int:
    """Do so for some; `known`: the numbers of calls, sorted, `order`: which calls these are."""
    fits = (link <= known[-1]) & (link >= 0)  # others are of no call, and may not fit the type
    link = np.where(fits, link, 0).astype(known.dtype)
    at = np.searchsorted(known, link, side="right") - 1
    found = fits & (at >= 0) & (known[np.maximum(at, 0)] == link)
    if not again:
        return np.where(found, order[np.maximum(at, 0)], -1)
    low, high = np.searchsorted(known, link, side="left"), at
    while True:  # the last one of its number that began before the work
        open_ = found & (low < high)
        if not open_.any():
            return np.where(found, order[np.clip(low, 0, known.size - 1)], -1)
        middle = (low + high + 1) // 2
        before = begun[order[np.clip(middle, 0, known.size - 1)]] <= start
        low = np.where(open_ & before, middle, low)
        high = np.where(open_ & ~before, middle - 1, high)


@dataclass(frozen=True, slots=True)
class Starved:
    """Stretches for which a device waited for its host; n rows, fields a to d of the span."""

    start: Int
    end: Int
    at_work: Int
    in_sync: Int
    in_alloc: Int
    in_copy: Int


@dataclass(frozen=True, slots=True)
class Host:
    """What the threads that launch work did, as time covered."""

    work: Cover
    """Inside operators or calls."""
    sync: Cover
    alloc: Cover
    copy: Cover
    """In copies from the host that hold it up."""

    @classmethod
    def of(
        cls, work: list[tuple[Int, Int]], calls: Calls, copy: tuple[Int, Int],
        more_sync: tuple[Int, Int],
    ) -> Host:  # fmt: skip
        """`work`: of each thread; `copy`: calls that held the host up; `more_sync`: that waited."""
        alloc = all_of([calls.of(words.ALLOC), calls.of(words.FREE)])
        sync = all_of([calls.of(words.SYNC), more_sync])
        return cls(Cover(*all_of(work)), Cover(*sync), Cover(*alloc), Cover(*joined(*copy)))


def starved(
    work: Work, calls: Calls, host: Host, from_ns: int, until_ns: int
) -> Iterator[Starved]:  # fmt: skip
    """Yield the gaps of a device within [from_ns, until_ns) in which its host was late."""
    reach = -NEVER  # the end of all work before
    for some, (start, end) in zip(slices(work.start.size), work.pieces()):
        upto = np.maximum.accumulate(np.append(reach, end))
        opens = np.flatnonzero(start > upto[:-1])
        since = upto[opens]
        since[since == -NEVER] = from_ns
        rows = opens + some.start
        gaps = _Gaps(since, start[opens], work.call[rows], work.kind[rows])
        yield _starved(gaps, calls, host, from_ns, until_ns)
        reach = int(upto[-1])
    # Nothing more was launched: late to the end.
    last = _Gaps(*(np.array([one]) for one in (reach, until_ns, _NOTHING, words.KERNEL)))
    yield _starved(last, calls, host, from_ns, until_ns)


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Stretches without work, the call that launched what ended each, and what that was."""

    start: Int
    end: Int
    call: Int
    kind: Int


def _starved(gaps: _Gaps, calls: Calls, host: Host, from_ns: int, until_ns: int) -> Starved:
    """Choose the gaps in which the host was late, and say what it did."""
    call = np.maximum(gaps.call, 0)
    if calls.start.size:
        begun, left = calls.start[call], calls.ends(call)
    else:
        begun = left = np.zeros_like(gaps.start)
    unknown = np.where(gaps.call == _NOTHING, NEVER, -1)
    begun, left = (np.where(gaps.call >= 0, one, unknown) for one in (begun, left))
    held = np.isin(gaps.kind, (words.COPY_IN, words.COPY_OUT))
    which, until = late(gaps.start, gaps.end, begun, left, held)
    start, end = np.maximum(gaps.start, from_ns), np.minimum(until, until_ns)
    keep = which & (end > start)
    start, end = start[keep], end[keep]
    sync = host.sync.within(start, end)
    alloc = np.minimum(host.alloc.within(start, end), end - start - sync)
    copy = np.minimum(host.copy.within(start, end), end - start - sync - alloc)
    busy = np.maximum(host.work.within(start, end) - sync - alloc - copy, 0)
    return Starved(start, end, busy, sync, alloc, copy)
