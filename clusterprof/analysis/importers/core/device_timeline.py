"""Interval arithmetic on a device timeline: busy, idle, exposed, starved.

    busy = merge_intervals(start_ns, end_ns)         # sorted, disjoint
    idle = find_gaps(busy, first_ns, last_ns)
    measure_overlap(start_ns, end_ns, busy)          # ns of each interval in the union

Intervals are two int64 arrays of equal length, starts and ends in ns; those of a
union are sorted and disjoint. Nothing here depends on a file format; the arithmetic itself is in
`analysis.timeline.intervals`.

It also matches collective operations seen on several ranks by their overlap in time.

    # one sequence per rank and stream
    sequences = [OperationSequence(key, start_ns, end_ns, operation), ...]
    for group in match_operations(sequences):
        group.members, group.first_numbers      # number of the row 0 of each

A device stays in an operation until all members have entered it, so the members' rows of one
operation overlap in time. Operations that one rank recorded before the others' profiles began or
after they ended overlap with no row. Times must be of one clock, or of clocks that agree to within
about one operation.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline import intervals

Int = NDArray[np.int64]
Intervals = tuple[Int, Int]
MIN_GAP_NS = 1_000
"""Shortest gap in ns that counts: shorter ones occur between any two kernels, however early they
were launched.
"""
NEVER = 1 << 62
NO_INTERVALS: Intervals = (np.empty(0, np.int64), np.empty(0, np.int64))


def merge_intervals(start_ns: Int, end_ns: Int) -> Intervals:
    """Merge intervals into the sorted, disjoint intervals that cover the same instants.

    start_ns, end_ns: int64[n], ns. Returns two int64[m], ns; empty intervals are dropped.
    """
    merged = intervals.merge_intervals((start_ns, end_ns))
    return merged.start_ns, merged.end_ns


def find_gaps(busy: Intervals, from_ns: int, until_ns: int) -> Intervals:
    """Find the gaps that a union leaves in [from_ns, until_ns]. Two int64[n], ns."""
    start, end = trim_intervals(busy, from_ns, until_ns)
    opens, closes = np.append(from_ns, end), np.append(start, until_ns)
    nonempty = closes > opens
    return opens[nonempty], closes[nonempty]


def trim_intervals(union: Intervals, from_ns: int, until_ns: int) -> Intervals:
    """Trim a union to [from_ns, until_ns]. Two int64[n], ns."""
    trimmed = intervals.trim_intervals(union, from_ns, until_ns)
    return trimmed.start_ns, trimmed.end_ns


def measure_overlap(start_ns: Int, end_ns: Int, cover: Intervals) -> Int:
    """Measure how many ns of each interval lie in a union.

    start_ns, end_ns: int64[n], ns. Returns int64[n], ns.
    """
    return intervals.measure_overlap((start_ns, end_ns), cover)


def subtract_intervals(union: Intervals, removed: Intervals) -> Intervals:
    """Subtract the second union from the first. Two int64[n], ns."""
    remaining = intervals.subtract_intervals(union, removed)
    return remaining.start_ns, remaining.end_ns


class CoverageIndex:
    """Index of disjoint intervals that answers how much of a time range they cover."""

    def __init__(self, start: Int, end: Int) -> None:
        self.start, self.end = start, end
        self._total = np.concatenate([[0], np.cumsum(end - start)]).astype(np.int64)

    def covered_before(self, t: Int) -> Int:
        """Return the covered ns before each instant. t: int64[n], ns; returns int64[n], ns."""
        row = self.start.searchsorted(t, side="right")
        if not self.start.size:
            return np.zeros(np.shape(t), np.int64)
        over = np.where(row > 0, self.end[np.maximum(row, 1) - 1] - t, 0)
        return (self._total[row] - np.maximum(over, 0)).astype(np.int64)

    def covered_within(self, start: Int, end: Int) -> Int:
        """Return the covered ns in each [start, end); 0 where end is before start. int64[n], ns."""
        return np.maximum(
            self.covered_before(np.maximum(start, end)) - self.covered_before(start), 0
        )

    def first_uncovered(self, t: Int) -> Int:
        """Return the first uncovered instant at or after each t. int64[n], ns."""
        if not self.start.size:
            return t
        row = self.start.searchsorted(t, side="right") - 1
        inside = (row >= 0) & (t < self.end[np.maximum(row, 0)])
        return np.where(inside, self.end[np.maximum(row, 0)], t)


def find_late_launches(
    start_ns: Int, end_ns: Int, call_start_ns: Int, call_end_ns: Int, blocking: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], Int]:
    """Find the device gaps whose following work was launched too late by the host.

        host      launch A |      | launch B |
        device             | A |.............| B |
                               ^ the call was not over yet: the queue was empty

    All arrays have length n, one row per gap, times int64 in ns:
    start_ns, end_ns: the gap.
    call_start_ns, call_end_ns: the call that launched the work after the gap; -1 if unknown (never
    late), `NEVER` if nothing was launched any more.
    blocking: bool[n], true for a call that returns only after its work, like a copy between host
    and device; it is late if it began after the gap did.
    Returns bool[n], whether the launch was late, and int64[n], until when in ns: the end of the
    call.
    """
    decisive_ns = np.where(blocking, call_start_ns, call_end_ns)
    is_late = (call_end_ns >= 0) & (decisive_ns > start_ns) & (end_ns - start_ns > MIN_GAP_NS)
    return is_late, np.minimum(call_end_ns, end_ns)


MIN_EXPOSED_COPY_NS = 5_000
"""Shortest time in ns that a device copies and does nothing else and that counts: shorter copies
are limited by their start, not by their bytes.
"""


def find_exposed_copies(
    start_ns: Int, end_ns: Int, size: Int, to_device: NDArray[np.bool_], hidden: Intervals
) -> tuple[Int, Int, Int, Int]:
    """Find the time in which a device copied from or to its host and did nothing else.

        copies     | 1 MB to the device 100 |        | 4 KB to the host 10 |
        kernels             |-- 60 --|
        exposed    |-- 40 --|        |-- 20 --|      |--------- 10 --------|

    start_ns, end_ns: int64[n], ns. size: int64[n], bytes, negative if unknown. to_device: bool[n].
    hidden: union of all other work. Returns starts and ends, ns, the bytes copied in that time, and
    the part of it in which a copy went to the device, ns; int64[m] each.
    """
    exposed = subtract_intervals(merge_intervals(start_ns, end_ns), hidden)
    long_enough = exposed[1] - exposed[0] >= MIN_EXPOSED_COPY_NS
    starts, ends = exposed[0][long_enough], exposed[1][long_enough]
    overlaps = intervals.find_overlaps((start_ns, end_ns), (starts, ends))
    share = (overlaps.end_ns - overlaps.start_ns) / (end_ns - start_ns)[overlaps.segment]
    moved = np.bincount(
        overlaps.interval, share * np.maximum(size, 0)[overlaps.segment], minlength=starts.size
    )
    incoming = merge_intervals(start_ns[to_device], end_ns[to_device])
    return (starts, ends, np.rint(moved).astype(np.int64), measure_overlap(starts, ends, incoming))


STAGING_BYTES_PER_SECOND = 2_000_000_000
"""Slowest rate at which a driver fills or empties its staging buffer for pageable memory, which one
CPU does (half of what one core of a server copies).
"""
MAX_CALL_OVERHEAD_NS = 100_000
"""Longest time in ns that a call needs around its copy, however few its bytes are."""


def trim_copy_calls(start_ns: Int, end_ns: Int, copying_ns: Int, size: Int) -> Int:
    """Trim blocking copy calls to what their copies cover: a call may wait for other things.

    start_ns, end_ns: int64[n], ns, the calls. copying_ns: int64[n], how long the device copied.
    size: int64[n], bytes, negative if unknown. Returns int64[n], ns: the start of the part of the
    call, which ends with it, that its own copy explains.
    """
    staging_ns = np.maximum(size, 0) * (1e9 / STAGING_BYTES_PER_SECOND)
    own_ns = copying_ns + staging_ns.astype(np.int64) + MAX_CALL_OVERHEAD_NS
    return np.maximum(start_ns, end_ns - own_ns)


MAX_START_NS = 20_000
"""Longest time in ns from the end of a launch to the start of its kernel on an idle device."""


def extend_waited_gaps(start_ns: Int, late_until: Int, end_ns: Int, sync: CoverageIndex) -> Int:
    """Extend gaps that begin while the host waits for the device to the start of the next work.

    Without the wait the work would have been queued. start_ns, end_ns: int64[n], ns, the gaps.
    late_until: int64[n], ns, until when the host was late. Returns int64[n], ns.
    """
    waited = sync.covered_within(start_ns, start_ns + 1) > 0
    return np.where(waited & (end_ns - late_until <= MAX_START_NS), end_ns, late_until)


LAUNCH_PAUSE_NS = 1_000_000
"""Longest time in ns between two launches of a host that is busy launching: Python needs 5 to 100
us from one operator to the next.
"""
LONG_LAUNCH_NS = 1_000_000
"""A launch that takes this long while its device has nothing to do loads its kernel first, ns."""
MIN_LOAD_NS = 10_000
"""Shortest call in ns that counts as loading: questions about a kernel that is loaded take 1 us."""


def find_launching(start_ns: Int, end_ns: Int) -> Intervals:
    """Find the times in which a host was launching: its launch calls and short pauses between.

    start_ns, end_ns: int64[n], ns, calls that launch work. Returns two int64[m], ns.
    """
    starts, ends = merge_intervals(start_ns, end_ns + LAUNCH_PAUSE_NS)
    return starts, ends - LAUNCH_PAUSE_NS


def compute_exposed_ns(start_ns: Int, end_ns: Int, other_work: Intervals) -> Int:
    """Compute for how many ns of each operation the device did nothing else.

    start_ns, end_ns: int64[n], ns. other_work: union of all other work. Returns int64[n], ns.
    """
    return (end_ns - start_ns) - measure_overlap(start_ns, end_ns, other_work)


MIN_MATCHED_SHARE = 0.8
_MAX_SHIFT = 32
_MAX_ROWS_COMPARED = 4096


@dataclass(frozen=True, slots=True)
class OperationSequence:
    """Operations of one rank on one stream, in order."""

    key: Hashable
    """Identity of the rank: no two sequences of one rank are in one group."""
    start_ns: Int
    end_ns: Int
    operation: Int


@dataclass(frozen=True, slots=True)
class MatchedGroup:
    """Sequences whose operations match."""

    members: tuple[int, ...]
    """Indices into the list of sequences."""
    first_numbers: tuple[int, ...]
    """For each member, the number within the group of its first row."""


def match_operations(sequences: Sequence[OperationSequence]) -> list[MatchedGroup]:
    """Match the sequences that overlap in time; one without a match is in no group."""
    unmatched = [number for number, sequence in enumerate(sequences) if sequence.start_ns.size]
    groups = []
    while unmatched:
        head, *others = unmatched
        shifts = {head: 0}
        for candidate in others:
            if sequences[candidate].key in {sequences[member].key for member in shifts}:
                continue
            shift = _find_row_shift(sequences[head], sequences[candidate])
            if shift is not None:
                shifts[candidate] = shift
        unmatched = [sequence_index for sequence_index in others if sequence_index not in shifts]
        if len(shifts) > 1:
            low = min(shifts.values())
            groups.append(
                MatchedGroup(tuple(shifts), tuple(shift - low for shift in shifts.values()))
            )
    return groups


def _find_row_shift(first: OperationSequence, second: OperationSequence) -> int | None:
    """Return by how many rows the first sequence begins earlier; None without a match."""
    best_shift, best_share = None, 0.0
    for shift in sorted(range(-_MAX_SHIFT, _MAX_SHIFT + 1), key=abs):
        a, b = max(shift, 0), max(-shift, 0)
        rows = min(first.start_ns.size - a, second.start_ns.size - b, _MAX_ROWS_COMPARED)
        # a shift that leaves less than half of the shorter sequence proves nothing
        if rows < max(1, min(first.start_ns.size, second.start_ns.size) // 2):
            continue
        first_rows, second_rows = slice(a, a + rows), slice(b, b + rows)
        matches = (first.start_ns[first_rows] < second.end_ns[second_rows]) & (
            second.start_ns[second_rows] < first.end_ns[first_rows]
        )
        matches &= first.operation[first_rows] == second.operation[second_rows]
        share = float(np.mean(matches))
        if share > best_share:
            best_shift, best_share = shift, share
    return best_shift if best_share >= MIN_MATCHED_SHARE else None
