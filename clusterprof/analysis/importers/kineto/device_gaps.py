"""Explain why a device was idle: was the next work launched too late, or queued already?

`find_late_launches` decides; this module finds the call that launched
each piece of work, and what the host did in the meantime.

Communication kernels on a device timeline, and how much of them is exposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.columns import select_dtype
from clusterprof.analysis.importers.core.device_timeline import (
    LONG_LAUNCH_NS,
    NEVER,
    CoverageIndex,
    extend_waited_gaps,
    find_exposed_copies,
    find_late_launches,
)
from clusterprof.analysis.importers.core.host_activity import LaunchActivity
from clusterprof.analysis.importers.core.node_tables import NodeTables, compute_group_number
from clusterprof.analysis.importers.kineto import classify
from clusterprof.analysis.importers.kineto.event_columns import (
    CommDescription,
    Int,
    iterate_slices,
    join_interval_sets,
    join_intervals,
    join_sorted_chunks,
)
from clusterprof.probe import layout

_WAITED_RATIO = 0.9  # of a long gap: host and device both wait, for what the trace does not show
_MIN_UNKNOWN_NS = 10_000  # shortest gap whose launch is not known and that the host explains
_NEVER_LAUNCHED = -2  # in place of a call: nothing was launched any more


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """Work of one device, n rows sorted by start; times in ns, narrowest dtypes."""

    start: Int
    duration: Int
    kind: Int
    copy_rows: Int
    """Rows, in the order of the file and over all devices, of copies between host and device."""
    copy_bytes: Int
    row: Int
    """Row in the order of the file."""
    call: Int
    """Row of the call in `RuntimeCalls` that launched the work, -1 if
    unknown.
    """

    def bytes_of(self, rows: Int) -> Int:
        """Return the bytes of the copies in these rows, int64[n]; -1 if unknown."""
        return self.copy_bytes[np.searchsorted(self.copy_rows, self.row[rows])]

    def ends(self, rows: Int) -> Int:
        """Return the end of the work in these rows, int64[n], ns."""
        return self.start[rows] + self.duration[rows]

    def last_end(self) -> int:
        """Return the end of the last work in ns."""
        return max(int(end.max()) for _, end in self.chunks())

    def chunks(self, *kinds: int) -> Iterator[tuple[Int, Int]]:
        """Yield starts and ends (int64[n], ns) of some kinds or of all work, in chunks."""
        for rows in iterate_slices(self.start.size):
            start, end = self.start[rows], self.start[rows] + self.duration[rows]
            which = np.isin(self.kind[rows], kinds) if kinds else slice(None)
            yield start[which], end[which]


@dataclass(frozen=True, slots=True)
class RuntimeCalls:
    """Calls of one process into the device runtime, sorted by start. Times in ns."""

    start: Int
    duration: Int
    kind: Int
    thread: Int
    link: Int

    def ends(self, rows: Int) -> Int:
        """Return the end of the calls in these rows, int64[n], ns."""
        return self.start[rows] + self.duration[rows]

    def of(self, kind: int) -> tuple[Int, Int]:
        """Return starts and ends of the calls of one kind, int64[n], ns."""
        which = self.kind == kind
        return self.start[which], self.start[which] + self.duration[which]


def find_launch_calls(calls: RuntimeCalls, link: Int, start: Int) -> Int:
    """Find the call that launched each piece of work by its correlation id.

    Ids repeat in long traces: of the calls with one id the last that began before the work is
    taken.
    link, start: int64[n], correlation id and start in ns, sorted by start. Returns rows of `calls`,
    intN[n], -1 where the file does not tell.
    """
    call_rows = np.full(link.size, -1, select_dtype(-1, calls.link.size))
    order, correlations = _sort_launch_calls(calls, call_rows.dtype)
    if not correlations.size:
        return call_rows
    has_duplicates = bool((correlations[1:] == correlations[:-1]).any())
    for rows in iterate_slices(link.size):
        call_rows[rows] = _match_launch_calls(
            calls.start, order, correlations, link[rows], start[rows], has_duplicates
        )
    return call_rows


def _sort_launch_calls(calls: RuntimeCalls, dtype: np.dtype[np.signedinteger]) -> tuple[Int, Int]:
    """Return the rows of launching calls sorted by correlation id, and these ids."""
    which = (calls.link >= 0) & (calls.kind < classify.LOAD)
    if calls.link.itemsize > 4 or calls.link.size >> 32:
        order = np.flatnonzero(which)
        order = order[np.argsort(calls.link[order], kind="stable")]
        return order, calls.link[order]
    key = np.flatnonzero(which)  # id and row in one integer, to sort in place
    for rows in iterate_slices(key.size):
        key[rows] |= calls.link[key[rows]].astype(np.int64) << 32
    key.sort()
    order, correlations = np.empty(key.size, dtype), np.empty(key.size, calls.link.dtype)
    for rows in iterate_slices(key.size):
        order[rows], correlations[rows] = key[rows] & 0xFFFFFFFF, key[rows] >> 32
    return order, correlations


def _match_launch_calls(
    call_start: Int, order: Int, correlations: Int, link: Int, start: Int, has_duplicates: bool
) -> Int:
    """Match some rows of work to calls.

    correlations: sorted ids of the calls. order: the row of the call for each of them.
    """
    is_valid = (link <= correlations[-1]) & (
        link >= 0
    )  # other ids have no call and may not fit the dtype
    link = np.where(is_valid, link, 0).astype(correlations.dtype)
    row = np.searchsorted(correlations, link, side="right") - 1
    is_known = is_valid & (row >= 0) & (correlations[np.maximum(row, 0)] == link)
    if not has_duplicates:
        return np.where(is_known, order[np.maximum(row, 0)], -1)
    low, high = np.searchsorted(correlations, link, side="left"), row
    while True:  # binary search for the last call with this id that began before the work
        searching = is_known & (low < high)
        if not searching.any():
            return np.where(is_known, order[np.clip(low, 0, correlations.size - 1)], -1)
        middle = (low + high + 1) // 2
        before = call_start[order[np.clip(middle, 0, correlations.size - 1)]] <= start
        low = np.where(searching & before, middle, low)
        high = np.where(searching & ~before, middle - 1, high)


@dataclass(frozen=True, slots=True)
class StarvedGaps:
    """Times in which a device waited for its host; n rows, fields a to d of the span, ns."""

    start: Int
    end: Int
    launching: Int
    in_sync: Int
    in_memory: Int
    in_copy: Int


def find_starved_gaps(
    work: DeviceWork, calls: RuntimeCalls, host: LaunchActivity, from_ns: int, until_ns: int
) -> Iterator[StarvedGaps]:
    """Yield the idle gaps of a device within [from_ns, until_ns] in which its host was late.

    Arrays of the result: int64[n], ns.
    """
    reach = -NEVER  # the end of all work before
    for selection, (start, end) in zip(iterate_slices(work.start.size), work.chunks()):
        reach_before = np.maximum.accumulate(np.append(reach, end))
        opens = np.flatnonzero(start > reach_before[:-1])
        idle_since = reach_before[opens]
        idle_since[idle_since == -NEVER] = from_ns
        rows = opens + selection.start
        gaps = _IdleGaps(idle_since, start[opens], work.call[rows], work.kind[rows])
        yield _select_starved_gaps(gaps, calls, host, from_ns, until_ns)
        reach = int(reach_before[-1])
    # Nothing was launched after the last work: late to the end.
    last = _IdleGaps(
        *(np.array([value]) for value in (reach, until_ns, _NEVER_LAUNCHED, classify.KERNEL))
    )
    yield _select_starved_gaps(last, calls, host, from_ns, until_ns)


@dataclass(frozen=True, slots=True)
class _IdleGaps:
    """Idle gaps, the call that launched the work after each, and the kind of that work."""

    start: Int
    end: Int
    call: Int
    kind: Int


def _select_starved_gaps(
    gaps: _IdleGaps, calls: RuntimeCalls, host: LaunchActivity, from_ns: int, until_ns: int
) -> StarvedGaps:
    """Select the gaps in which the host was late and split them by host activity."""
    call = np.maximum(gaps.call, 0)
    if calls.start.size:
        call_start, call_end = calls.start[call], calls.ends(call)
    else:
        call_start = call_end = np.zeros_like(gaps.start)
    unknown = np.where(gaps.call == _NEVER_LAUNCHED, NEVER, -1)
    call_start, call_end = (
        np.where(gaps.call >= 0, times, unknown) for times in (call_start, call_end)
    )
    blocking = np.isin(gaps.kind, (classify.COPY_IN, classify.COPY_OUT))
    is_late, late_until = find_late_launches(gaps.start, gaps.end, call_start, call_end, blocking)
    most_ns = _WAITED_RATIO * (gaps.end - gaps.start)
    waited = host.sync.covered_within(gaps.start, gaps.end) >= most_ns
    waited &= gaps.end - gaps.start >= LONG_LAUNCH_NS
    launching_ns = host.launching.covered_within(gaps.start, gaps.end)
    launching_ns += host.loading.covered_within(gaps.start, gaps.end)
    launching = launching_ns >= most_ns
    waited |= launching & (gaps.call == -1) & (gaps.end - gaps.start >= _MIN_UNKNOWN_NS)
    late_until = extend_waited_gaps(gaps.start, late_until, gaps.end, host.sync)
    is_late, late_until = is_late | waited, np.where(waited, gaps.end, late_until)
    start, end = np.maximum(gaps.start, from_ns), np.minimum(late_until, until_ns)
    keep = is_late & (end > start)
    start, end = start[keep], end[keep]
    amounts = (
        cover.covered_within(start, end)
        for cover in (host.launching, host.sync, host.memory, host.copy)
    )
    return StarvedGaps(start, end, *amounts)


_MAX_EARLY = 1 << 20
"""Numbers of operations that were launched before the trace end here: they are counted backwards.
"""
_COMPLETE_LIST = re.compile(r"\[?\s*\d{1,9}(?:\s*,\s*\d{1,9})*\s*\]?$")
_MAX_MEMBERS = 1 << 17


@dataclass(frozen=True, slots=True)
class ExposedCollectives:
    """Communication kernels, sorted by start; n rows, times in ns."""

    row: Int
    """Row of `DeviceWork`."""
    start: Int
    end: Int
    first_uncovered: Int
    """First instant at which the device did not compute; `exposed_until` if there is none."""
    exposed_until: Int
    """End of the part that counts."""
    exposed: Int
    """Time in which the device computed nothing; of two concurrent operations it counts once."""


def measure_exposed_collectives(
    work: DeviceWork, window: tuple[int, int] | None = None
) -> ExposedCollectives:
    """Measure how much of each communication kernel no compute kernel hides; int64[n], ns.

    window: from the first to the last step, ns. Of a kernel that crosses one of its edges only the
    part inside counts.
    """
    collective_rows = np.flatnonzero(work.kind == classify.COMM)
    start, end = work.start[collective_rows], work.ends(collective_rows)
    if not collective_rows.size:
        return ExposedCollectives(collective_rows, start, end, end, end, start)
    kernels = _select_overlapping_work(work, join_intervals(start, end), classify.KERNEL)
    compute = CoverageIndex(*join_sorted_chunks(kernels))
    before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])
    own_start = np.minimum(np.maximum(start, before), end)
    low, high = (int(start[0]), int(end.max())) if window is None else window
    own_start = np.where((start < low) & (low < end), np.maximum(own_start, low), own_start)
    own_end = np.where((start < high) & (high < end), np.maximum(own_start, high), end)
    exposed_ns = own_end - own_start - compute.covered_within(own_start, own_end)
    first = np.minimum(compute.first_uncovered(own_start), own_end)
    return ExposedCollectives(collective_rows, start, end, first, own_end, exposed_ns)


def _select_overlapping_work(
    work: DeviceWork, hidden: tuple[Int, Int], *kinds: int
) -> Iterator[tuple[Int, Int]]:
    """Yield the work that ran during these times: only this can hide anything."""
    for start, end in work.chunks(*kinds):
        row = np.searchsorted(hidden[1], start, side="right")
        overlaps = np.append(hidden[0], end.max(initial=0))[row] < end
        yield start[overlaps], end[overlaps]


def add_exposed_copies(
    node: NodeTables, pid: int, work: DeviceWork, waits: tuple[Int, Int]
) -> None:
    """Add the time in which a device copied from or to its host and did nothing else.

    waits: starts and ends of waits for data, int64[n], ns: copies in them delay nothing.
    """
    rows = np.flatnonzero(np.isin(work.kind, (classify.COPY_IN, classify.COPY_OUT)))
    if not rows.size:
        return
    start, end = work.start[rows], work.ends(rows)
    other_work = _select_overlapping_work(
        work, join_intervals(start, end), classify.KERNEL, classify.COMM, classify.COPY
    )
    hidden = join_interval_sets([join_sorted_chunks(other_work), waits])
    copies = find_exposed_copies(
        start, end, work.bytes_of(rows), work.kind[rows] == classify.COPY_IN, hidden
    )
    node.add_spans(pid, layout.EXPOSED_COPY, *copies)


class ProcessGroups:
    """Process groups of one rank as the trace describes them."""

    def __init__(self, distributed: Mapping[str, Any], rank: int | None, world: int | None) -> None:
        self.rank, self.world = rank, world
        self._ranks_by_name: dict[str, list[int]] = {}
        config = distributed.get("pg_config")
        for group in config if isinstance(config, list) else ():
            if isinstance(group, dict) and isinstance(ranks := group.get("ranks"), list):
                listed = [r for r in ranks if isinstance(r, int) and not isinstance(r, bool)]
                if len(listed) == group.get("pg_size", len(listed)):
                    self._ranks_by_name[str(group.get("pg_name", ""))] = listed
        self.members: dict[int, list[int]] = {}
        self._known: dict[tuple[str | None, str | None, int], int] = {}

    def number(self, comm: CommDescription) -> int:
        """Return the number of the group of an operation."""
        key = (comm.group, comm.ranks, comm.operation if comm.group is None else 0)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = self._find(comm)
        return number

    def split_early(self, group: Int, is_early: NDArray[np.bool_]) -> Int:
        """Return the groups with numbers of their own for the early operations, int64[n]."""
        group = group.copy()
        for label in np.unique(group[is_early]).tolist():
            number = compute_group_number(f"{label}:launched before the trace")
            group[is_early & (group == label)] = number
            if label in self.members:
                self.members[number] = self.members[label]
        return group

    def _find(self, comm: CommDescription) -> int:
        ranks = self._ranks_by_name.get(comm.group or "", [])
        if comm.ranks and _COMPLETE_LIST.match(comm.ranks.strip()):
            ranks = [int(digits) for digits in re.findall(r"\d+", comm.ranks)][:_MAX_MEMBERS]
        if comm.group is None:  # unknown: all ranks, one group per operation
            number = compute_group_number(f"{self.world}:{comm.operation}")
            ranks = list(range(min(self.world or 0, _MAX_MEMBERS)))
        elif ranks:
            number = compute_group_number(ranks)
        else:
            number = compute_group_number(f"{self.world}:{comm.group}:{comm.ranks or ''}")
        if ranks:
            self.members[number] = ranks
        return number


def add_collectives(
    node: NodeTables,
    pid: int,
    collectives: ExposedCollectives,
    descriptions: list[CommDescription],
    groups: ProcessGroups,
    account: Account,
    is_launched: NDArray[np.bool_],
) -> None:
    """Add the communication operations of one process to the node.

    descriptions: one for each row of `collectives`. is_launched: bool[n], the call that launched
    the kernel is in the trace.
    """
    if not collectives.row.size:
        return
    group = np.array([groups.number(description) for description in descriptions], np.int64)
    operation = np.array([description.operation for description in descriptions], np.int64)
    size = np.array([description.bytes for description in descriptions], np.int64)
    sequence = np.array([description.sequence for description in descriptions], np.int64)
    peer = np.array([_get_peer(description, groups.rank) for description in descriptions], np.int64)
    message = (operation == layout.SEND) | (operation == layout.RECV)
    is_early = (sequence < 0) & ~message & _find_early_operations(group, is_launched)
    group = groups.split_early(group, is_early)
    number = _compute_numbers(group, sequence, operation, peer, message)
    number = _count_back_early(group, number, is_early)
    row = node.add_spans(
        pid,
        layout.COLLECTIVE,
        collectives.start,
        collectives.end,
        group,
        number,
        size,
        operation | (peer + 1) << layout.PEER_SHIFT,
    )
    rows = row + np.arange(collectives.row.size)
    node.add_spans(
        pid,
        layout.EXPOSED_COLLECTIVE,
        collectives.first_uncovered,
        collectives.exposed_until,
        rows,
        collectives.exposed,
    )
    for group_id, members in groups.members.items():
        node.add_group(pid, group_id, members)
    account.read["communication operations"] += collectives.row.size
    if any(description.group is None for description in descriptions):
        account.notes.append(
            "the trace does not number communication operations: those of one kind are matched"
            " across ranks by their order"
        )


def _find_early_operations(group: Int, is_launched: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Find the operations that were launched before the profiler began to record calls: bool[n].

    All ranks start it at the same place of the program, so they agree on the first operation whose
    launch is recorded. Which earlier kernels still run is different on each rank:

        rank 0     | a===| b==| c=|        a was launched before the trace
        rank 2           |    | b=| c=|    a had ended

    In each group it is the kernels before the first one with a recorded launch. group: int64[n], in
    order of time.
    """
    is_early = np.zeros(group.size, np.bool_)
    for label in np.unique(group).tolist():
        rows = np.flatnonzero(group == label)
        launched = np.flatnonzero(is_launched[rows])
        is_early[rows[: launched[0] if launched.size else 0]] = True
    return is_early


def _count_back_early(group: Int, number: Int, is_early: NDArray[np.bool_]) -> Int:
    """Number the early operations of each group backwards from the last of them, int64[n]."""
    number = number.copy()
    for label in np.unique(group[is_early]).tolist():
        rows = np.flatnonzero(group == label)
        number[rows] += _MAX_EARLY - rows.size
    return np.maximum(number, -1)


def _get_peer(description: CommDescription, rank: int | None) -> int:
    """Return the other rank of a message; -1 if unknown."""
    if description.operation == layout.SEND:
        return description.target if 0 <= description.target != rank else -1
    if description.operation == layout.RECV:
        return description.source if 0 <= description.source != rank else -1
    return -1


def _compute_numbers(group: Int, sequence: Int, operation: Int, peer: Int, message: Int) -> Int:
    """Number the operations of each group by their sequence numbers, else by their order.

    -1 for messages whose peer is unknown.
    """
    has_sequence = (sequence >= 0) & ~message
    sequence_group = np.unique(group, return_inverse=True)[1].reshape(-1)
    if message.any():
        key = np.stack(
            [sequence_group, np.where(message, operation, 0), np.where(message, peer, -1)]
        )
        sequence_group = np.unique(key, axis=1, return_inverse=True)[1].reshape(-1)
    number = np.empty(group.size, np.int64)
    order = np.argsort(sequence_group, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(sequence_group[order])) + 1):
        if has_sequence[rows].all() and np.unique(sequence[rows]).size == rows.size:
            number[rows] = sequence[rows]
        else:
            number[rows] = np.arange(rows.size)
    return np.where(message & (peer < 0), -1, number)
