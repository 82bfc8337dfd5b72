"""Why a device stood idle: was the next work launched too late, or was it waiting already?

host      launch A |      | launch B |
device             | A |.............| B |
                       ^ A's end      B's call began after it: the host was late
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterprof.importers.kineto import words
from clusterprof.importers.kineto.columns import Cover, Int, all_of, joined

GAP_NS = 1_000
"""Shorter gaps are what one kernel after another costs, whoever launched them when."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one device did; n rows, sorted by start."""

    start: Int
    end: Int
    kind: Int
    copied: Int
    """Rows of copies, in the order of the file, of all devices."""
    copied_bytes: Int
    row: Int
    """In the order of the file."""
    call: Int
    """Row of the call that launched it (`Calls`), -1 not known."""

    def bytes_of(self, at: Int) -> Int:
        """Return how many bytes copies had; -1 not known."""
        return self.copied_bytes[np.searchsorted(self.copied, self.row[at])]


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of one process into the device's runtime, sorted by start."""

    start: Int
    end: Int
    kind: Int
    thread: Int
    link: Int

    def of(self, kind: int) -> tuple[Int, Int]:
        """Return when calls of one kind began and ended."""
        which = self.kind == kind
        return self.start[which], self.end[which]


def launched_by(calls: Calls, link: Int, start: Int) -> Int:
    """Return for each piece of work the call that launched it, -1 where the file does not say.

    Of calls of one number (they come again in long traces) the last that began before the work;
    `start` is sorted.
    """
    none = np.full(link.size, -1, np.int64)
    if not calls.link.size or not link.size:
        return none
    some = np.flatnonzero((calls.link >= 0) & (calls.kind != words.CALL))
    order = some[np.argsort(calls.link[some], kind="stable")]
    known = calls.link[order]
    if not known.size:
        return none
    at = np.minimum(np.searchsorted(known, link, side="right") - 1, known.size - 1)
    found = (at >= 0) & (known[np.maximum(at, 0)] == link)
    if not (known[1:] == known[:-1]).any():
        return np.where(found, order[np.maximum(at, 0)], -1)
    first = np.searchsorted(known, link, side="left")
    begun = calls.start[order]
    low, high = first, at  # the last one of its number that began before the work
    while True:
        open_ = found & (low < high)
        if not open_.any():
            return np.where(found, order[np.clip(low, 0, known.size - 1)], -1)
        middle = (low + high + 1) // 2
        before = begun[np.clip(middle, 0, known.size - 1)] <= start
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
) -> Starved:  # fmt: skip
    """Find the gaps of a device within [from_ns, until_ns) in which its host was late."""
    order = work.start
    reach = np.maximum.accumulate(work.end) if order.size else order
    opens = np.flatnonzero(np.concatenate([[True], order[1:] > reach[:-1]]))
    gap_end = np.append(order[opens], until_ns)
    gap_start = np.concatenate([[from_ns], reach[np.append(opens[1:], order.size) - 1]])
    call = np.append(work.call[opens], -1)
    late = np.append(call[:-1] >= 0, True)  # nothing more was launched: late to the end
    at = np.maximum(call, 0)
    begun = np.append(calls.start, 0)[at]
    left = np.append(calls.end, 0)[at]
    copies = np.append(np.isin(work.kind[opens], (words.COPY_IN, words.COPY_OUT)), False)
    late &= np.where(call >= 0, np.where(copies, begun, left) > gap_start, True)
    until = np.where(call >= 0, np.minimum(left, gap_end), gap_end)
    start, end = np.maximum(gap_start, from_ns), np.minimum(until, until_ns)
    keep = late & (gap_end - gap_start > GAP_NS) & (end > start)
    start, end = start[keep], end[keep]
    sync = host.sync.within(start, end)
    alloc = np.minimum(host.alloc.within(start, end), end - start - sync)
    copy = np.minimum(host.copy.within(start, end), end - start - sync - alloc)
    busy = np.maximum(host.work.within(start, end) - sync - alloc - copy, 0)
    return Starved(start, end, busy, sync, alloc, copy)
