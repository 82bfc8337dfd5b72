"""Collective operations with their members: output of matching and input of blame.

Names of operations between ranks, as in torch.distributed.

Spans of one rank with what it had spent at their start and end, for the categories in which it
had spent any time: most of some fifty have none.

Times at which a device was idle in collective operations that its host only issued.

The probe measures for how long the default stream was idle (`exposed_collective`), but
not when: the host runs ahead of its device. Each wait is assigned the earliest possible
time: not before the host arrived at the operation, and after the previous wait, because
a stream runs in order.

    host      |i|  |i|          |i|            arrived at three operations, and went on
    measured   40   30           20
    assigned  |----40----|--30--||-20-|        the second waits for the first, the third does not

A *run* is a chain of waits in which each starts where the previous one ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.load.ranks import parse_job_position
from clusterprof.analysis.timeline.model import Int, Process
from clusterprof.analysis.timeline.spans import CollectiveSpans, ExposedCollectiveSpans
from clusterprof.probe import layout

SEND, RECV = 10, 11
_HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def combine_labels(*columns: Int) -> Int:
    """Combine int64[n] columns into one label per combination of values: int64[n].

    The label is a 64-bit hash.
    """
    out = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        out = (out ^ column.astype(np.uint64)) * _HASH_MULTIPLIER
        out ^= out >> np.uint64(32)
    return (out >> np.uint64(1)).astype(np.int64)


class SpentRows(NamedTuple):
    """Spans, and what had been spent at their start and end."""

    spans: Int
    at_arrive: Int
    at_leave: Int
    """int64[k, n], ns, by category."""
    categories: Int
    """int64[k], ascending; in no other category had any time been spent."""

    def select(self, rows: Int | NDArray[np.bool_] | slice) -> SpentRows:
        """Return some of the spans."""
        return SpentRows(
            self.spans[:, rows], self.at_arrive[:, rows], self.at_leave[:, rows], self.categories
        )


def concat_spent(parts: Sequence[SpentRows]) -> SpentRows:
    """Concatenate spans; a category that some parts lack is 0 there."""
    if len(parts) == 1:
        return parts[0]
    categories = parts[0].categories
    if not all(np.array_equal(part.categories, categories) for part in parts[1:]):
        categories = np.unique(np.concatenate([part.categories for part in parts]))
        parts = [_spread_categories(part, categories) for part in parts]
    spans, at_arrive, at_leave, _ = zip(*parts)
    return SpentRows(
        np.concatenate(spans, axis=1),
        np.concatenate(at_arrive, axis=1),
        np.concatenate(at_leave, axis=1),
        categories,
    )


def _spread_categories(part: SpentRows, categories: Int) -> SpentRows:
    """Add rows of zeros for the categories that a part lacks."""
    spent = np.zeros((2, categories.size, part.spans.shape[1]), np.int64)
    spent[:, np.searchsorted(categories, part.categories)] = part.at_arrive, part.at_leave
    return SpentRows(part.spans, spent[0], spent[1], categories)


@dataclass(frozen=True, slots=True)
class Operations:
    """m operations in an order in which every member left them, with n member rows in all.

    Rows of operation i are `first[i]:first[i + 1]`, sorted by rank. Times are on each
    rank's clock.
    """

    first: Int
    """int64[m + 1]: first row of each operation."""
    process_group: Int
    """int64[m]: label of the members, equal in every block: (job, process group), or a
    send/recv pair.
    """
    operation: Int
    """Kind of the operation (docs/design/waits-between-ranks.md)."""
    bytes: Int
    """int64[m]: the largest message size of any member; -1 unknown."""
    complete: NDArray[np.bool_]
    """bool[m]: True if every member of the group was recorded."""
    rank: Int
    """int64[n]: process of each row, 0 … ranks - 1 over all jobs and restarts."""
    arrive_ns: Int
    leave_ns: Int
    blocked_ns: Int
    """int64[n]: time the rank was blocked: leave - arrive, less for asynchronous operations."""
    source: Int
    """int64[n]: row in the table that was matched."""
    on_device: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """bool[n]: True for rows with device times. The device arrived later than `arrive_ns`,
    by an unknown amount. An empty array means none.
    """
    row_bytes: Int = field(default_factory=lambda: np.zeros(0, np.int64))
    """int64[n]: message size of each row; -1 unknown. Empty where no operation is an all-to-all, of
    which members may bring different sizes.
    """

    def take_range(self, begin: int, end: int) -> Operations:
        """Return operations `begin` to `end`."""
        low, high = int(self.first[begin]), int(self.first[end])
        rows = slice(low, high)
        return Operations(
            self.first[begin : end + 1] - low,
            self.process_group[begin:end],
            self.operation[begin:end],
            self.bytes[begin:end],
            self.complete[begin:end],
            self.rank[rows],
            self.arrive_ns[rows],
            self.leave_ns[rows],
            self.blocked_ns[rows],
            self.source[rows],
            self.on_device[rows],
            self.row_bytes[rows],
        )


OPERATION_NAMES = {
    layout.ALL_REDUCE: "all_reduce",
    layout.ALL_GATHER: "all_gather",
    layout.REDUCE_SCATTER: "reduce_scatter",
    layout.BROADCAST: "broadcast",
    layout.REDUCE: "reduce",
    layout.GATHER: "gather",
    layout.SCATTER: "scatter",
    layout.ALL_TO_ALL: "all_to_all",
    layout.BARRIER: "barrier",
    layout.SEND: "send",
    layout.RECV: "recv",
    layout.GRADIENTS: "gradients",
    layout.OTHER_OPERATION: "collective",
}
"""By the number that spans carry (`layout.OPERATION_MASK`)."""


ON_DEVICE = 1 << layout.FORM_SHIFT + 4
"""Bit of an operation's code, never recorded: its times are the device's, at their earliest."""


@dataclass(frozen=True, slots=True)
class DeviceWaits:
    """Measured waits of one process, sorted and disjoint.

    int64[n] columns, some waits of no length.
    """

    start_ns: Int
    end_ns: Int
    blocked_until_ns: Int
    """When the host went on; until then the device may have had no work at all."""
    sequence: Int
    """Sequence number of the collective span that was measured."""
    run_end_ns: Int
    """End of the last wait of the same run."""

    def measure_before(self, t_ns: Int) -> Int:
        """Measure how much of the time before each t lies in waits: int64[m], ns."""
        total = np.concatenate([[0], np.cumsum(self.end_ns - self.start_ns)])
        row = np.searchsorted(self.start_ns, t_ns, side="right")
        excess = np.where(row > 0, self.end_ns[np.maximum(row, 1) - 1] - t_ns, 0)
        return (total[row] - np.maximum(excess, 0)).astype(np.int64)

    def find_rows(self, start_ns: Int, end_ns: Int) -> Int:
        """Find the wait in which each interval starts.

        Returns int64[m], -1 if it is not wholly in one run.
        """
        row = np.searchsorted(self.start_ns, start_ns, side="right") - 1
        within_run = (row >= 0) & (end_ns <= self.run_end_ns[row])
        return np.where(within_run, row, -1)


def find_device_waits(process: Process) -> DeviceWaits | None:
    """Find the measured waits of a process; None if there are none, or no rank to wait for."""
    spans = process.get_spans(ExposedCollectiveSpans)
    if spans is None or not spans.start_ns.size:
        return None
    is_alone = parse_job_position(process.registration).world_size == 1
    return None if is_alone else assign_wait_times(spans)


def assign_wait_times(spans: ExposedCollectiveSpans) -> DeviceWaits:
    """Assign times to the measured waits, one after the other."""
    order = np.lexsort((spans.measured_sequence, spans.start_ns))
    issued, until = spans.start_ns[order], spans.end_ns[order]
    length = np.maximum(spans.device_ns[order], 0)
    ends = np.cumsum(length)
    # A wait starts when its host arrived or when the previous wait ended, whichever is later.
    start = np.maximum.accumulate(issued - (ends - length)) + ends - length
    end = start + length
    opens = np.ones(start.size, np.bool_)
    opens[1:] = start[1:] > end[:-1]
    last = np.append(np.flatnonzero(opens)[1:] - 1, start.size - 1)
    measured = spans.measured_sequence[order]
    return DeviceWaits(start, end, until, measured, end[last][np.cumsum(opens) - 1])


def select_unfinished(spans: ExposedCollectiveSpans, from_ns: int) -> NDArray[np.bool_]:
    """Select the measured waits whose run has not ended at `from_ns`: bool[n].

    A run starts when its first host arrived, whatever was before: kept waits get the same
    times again.
    """
    waits = assign_wait_times(spans)
    keep = np.empty(spans.start_ns.size, np.bool_)
    keep[np.lexsort((spans.measured_sequence, spans.start_ns))] = waits.run_end_ns > from_ns
    return keep | (spans.end_ns > from_ns)


def apply_device_times(spans: CollectiveSpans, waits: DeviceWaits | None) -> CollectiveSpans:
    """Return collective spans with device times where they were measured, sorted by start.

    Blocking operations among them are marked `ON_DEVICE`: both
    arrival and leave are the device's.
    """
    if waits is None:
        return spans
    order = np.argsort(waits.sequence, kind="stable")
    wait_sequence = waits.sequence[order]
    row = np.minimum(np.searchsorted(wait_sequence, spans.sequence), wait_sequence.size - 1)
    has_wait = wait_sequence[row] == spans.sequence
    wait = order[row]
    start = np.where(has_wait, waits.start_ns[wait], spans.start_ns)
    end = np.where(has_wait, waits.end_ns[wait], spans.end_ns)
    blocking = has_wait & (spans.form == layout.BLOCKING)
    code = np.where(blocking, spans.code | ON_DEVICE, spans.code)
    timed = replace(spans, start_ns=start, end_ns=end, code=code)
    return timed.select(np.argsort(start, kind="stable"))
