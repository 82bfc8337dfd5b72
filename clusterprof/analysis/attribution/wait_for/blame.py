"""Attribute the waits of all ranks in operations to culprits and causes.

    durations since each rank's last operation ─┐
    arrival and leave times, on its own clock  ─┴─>  wait ─> excess ─> entries ─> totals
                                                     transfer ────────────────>

A wait is blamed on the rank that arrived last, and there on the categories it had spent more time
in since both ranks last left an operation together
(analysis.attribution.wait_for.late_rank_excess). If the excess is itself waiting in other
operations, the blame is propagated along the wait-for chain (analysis.attribution.wait_for.chains).
The rest of the time in an operation is transfer. Blocks of operations are processed one after the
other, each with the carry-over of the earlier blocks; where the run is cut into blocks changes no
nanosecond.

All times are relative to each rank's own clock. No common clock is needed, and none is
used.

It also detects waits that exist only because ranks left the last operation at different times.

    rank 0   leave |== work 100 ==| arrive |-- 12 --|
    rank 1         leave |== work 100 ==| arrive | leave

Here rank 0 "waits" 12 for rank 1, which did nothing for longer than rank 0.

Over a long network path, or where packets are lost, a rank may leave later than the
others. All time between leaving and arriving is on the rank's own clock: what the late
rank did not take longer there is due to the network, and no rank arrived last. (A delay
of a rank inside an operation, after all have arrived, looks the same.)

It also estimates how much earlier operations would end without the last arrival or a cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.wait_for import chains, late_rank_excess
from clusterprof.analysis.attribution.wait_for.arrivals import (
    MAX_LOOK_BACK_OPERATIONS,
    ArrivalIndex,
    ArrivalRows,
    append_block_rows,
    build_arrival_index,
    find_last_arrivals,
    find_shortest_durations,
    has_full_history,
    has_unrecorded_member,
    is_point_to_point,
    make_empty_rows,
    select_kept_rows,
    take_rows,
)
from clusterprof.analysis.attribution.wait_for.chains import BlameEntries
from clusterprof.analysis.attribution.wait_for.late_rank_excess import (
    WaitPairs,
    find_last_common_leave,
)
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.analysis.timeline.model import Int


def compute_leave_skew(rows: ArrivalRows, pairs: WaitPairs, wait_ns: Int) -> Int:
    """Compute the part of each wait that is due to leaving the previous operation late.

    This part is not due to longer work of the late rank:

        waiting   leave |== 100 ==| arrive                wait 30, and both took 100 since:
        late              30 leave |== 100 ==| arrive     30 due to the network

    wait_ns: int64[n]. Returns int64[n], ns; 0 if the two left no operation together, or if
    a device was measured (compute_device_delay).
    """
    on_host = pairs.waiting_since >= 0
    if rows.on_device.any():
        on_host &= (rows.on_device[pairs.waiting] | rows.on_device[pairs.late] == 0) != 0
    extra = np.maximum(_compute_extra_time(rows, pairs), 0)
    return np.where(on_host, np.maximum(wait_ns - extra, 0), 0)


def compute_device_delay(rows: ArrivalRows, pairs: WaitPairs, wait_ns: Int) -> Int:
    """Compute how much longer the device of the late rank took than its host shows.

    Devices leave an operation together and arrive at a time that is not measured: the
    recorded arrival depends on how far the host was ahead. So the late rank took longer by
    the wait.

        waiting   leave |== 90 ==| arrive                 wait 30, and hosts show 10 more:
        late      leave |== 100 ==| arrive                20 more on the device

    wait_ns: int64[n]. Returns int64[n], ns; 0 if no device was measured, or if the two left
    no operation together.
    """
    if not rows.on_device.any():
        return np.zeros(wait_ns.size, np.int64)
    on_device = (rows.on_device[pairs.waiting] | rows.on_device[pairs.late]) != 0
    return np.where(
        on_device & (pairs.waiting_since >= 0), wait_ns - _compute_extra_time(rows, pairs), 0
    )


def _compute_extra_time(rows: ArrivalRows, pairs: WaitPairs) -> Int:
    waiting, late, waiting_since, late_since = pairs
    extra: Int = rows.arrive_ns[late] - rows.leave_ns[late_since]
    extra -= rows.arrive_ns[waiting] - rows.leave_ns[waiting_since]
    return extra


def has_no_last_arrival(op: Int, wait_ns: Int, skew_ns: Int, operations: int) -> NDArray[np.bool_]:
    """Return per operation whether leave skew explains more than half of its waits.

    Returns bool[operations].

    op: int64[n], operation of each wait. wait_ns, skew_ns: int64[n].
    """
    waits = np.zeros(operations, np.int64)
    skew = np.zeros(operations, np.int64)
    np.add.at(waits, op, wait_ns)
    np.add.at(skew, op, skew_ns)
    result: NDArray[np.bool_] = 2 * skew > waits
    return result


def estimate_savings_by_category(ops: Operations, index: ArrivalIndex) -> Int:
    """Estimate how much earlier each operation would end if no member lost time to a category.

    Time lost counts since the previous operation of the process group; in a rank's first
    operation, since its steps began.

        storage 50 |== work ==|                 arrives at 150
        storage 40 |== work ==|                 arrives at 140
                   |== work ==|-- waits --|     arrives at 100   50 earlier without storage

    Returns int64[K - 1, operations], ns.
    """
    rows = index.rows
    new_rows = slice(index.first_new, None)
    previous = index.previous[new_rows]
    arrival_order = ops.arrive_ns - ops.leave_ns  # largest for the last arrival
    latest = np.maximum.reduceat(arrival_order, ops.first[:-1])
    incomparable = (previous < 0) & (index.left_before[new_rows] >= 0)
    out = np.zeros((len(rows.at_arrive) - 1, ops.process_group.size), np.int64)
    for column, ns in enumerate(out):
        spent = rows.at_arrive[column, new_rows] - np.where(
            previous >= 0, rows.at_leave[column, previous], 0
        )
        spent[incomparable] = 0
        if (spent > 0).any():
            counterfactual = arrival_order - np.maximum(spent, 0)
            ns[:] = latest - np.maximum.reduceat(counterfactual, ops.first[:-1])
    return out


def measure_last_arrivals(ops: Operations, shortest: Int, last: Int) -> tuple[Int, Int]:
    """Measure how much the last arrival alone delayed each operation; count late peers.

    shortest: int64[operations], shortest stay, ns. last: int64[operations], row of the last
    arrival.
    Returns ns and counts, int64[operations] each.
    """
    stay = ops.leave_ns - ops.arrive_ns
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    longest = np.maximum.reduceat(stay, ops.first[:-1])
    stay_of_peers = stay.copy()
    stay_of_peers[last] = np.iinfo(np.int64).max
    second = np.minimum.reduceat(stay_of_peers, ops.first[:-1])
    single = np.diff(ops.first) < 2
    late = 2 * (stay - shortest[op]) < (longest - shortest)[op]
    late[last] = False
    count = np.bincount(op[late], minlength=ops.process_group.size)
    return np.where(single, 0, second - shortest), count


UNKNOWN_WORK_DEFICIT = int(np.iinfo(np.int64).min)
NO_CULPRIT = -1
"""Culprit index of transfers, and of waits that an unrecorded rank may have caused."""
WORK = "work"
IMBALANCE, SLOW_COMPUTE = "sync-imbalance", "sync-slow-compute"
TRANSFER, UNKNOWN_PEER, UNKNOWN = "net-transfer", "sync-unknown-peer", "unattributed"
BLAME_CAUSES = (IMBALANCE, SLOW_COMPUTE, TRANSFER, UNKNOWN_PEER, UNKNOWN)
"""Causes that the blame adds to the categories, in this order; the first two replace work."""


@dataclass(frozen=True, slots=True)
class BlameCarryOver:
    """What the next block needs of the blocks before it."""

    rows: ArrivalRows
    entries: BlameEntries
    operations: int
    """Number of operations in all blocks so far."""
    first_ordinal: int = 0
    """Rows of ranks with lower ordinals are context: nothing is known of what was between them."""
    has_wait_before_context: bool = False
    """True if a wait goes back to an operation before that: its blame is not known."""
    unresolved: bool = False
    """True if no common leave was found for ranks of which that operation could have been it."""


@dataclass(frozen=True, slots=True)
class BlockBlame:
    """The blame of one block: culprit and cause of each wait, and the transfers."""

    row: Int
    """Row of the block's `Operations`, ascending."""
    culprit: Int
    cause: Int
    """Index into `list_causes(categories)`."""
    ns: Int
    transfer_ns: Int
    """int64[rows]: time blocked that was no wait, ns. No rank is blamed for it."""
    last_arrival: Int
    """Per operation: the rank that arrived last. NO_CULPRIT if only one
    member was recorded, or if ranks waited only because they left the previous operation at
    different times.
    """
    recoverable_ns: Int
    """Per operation: how much earlier it would have ended had the last rank arrived with the
    second last, ns.
    """
    late_peers: Int
    """Per operation: number of other ranks that arrived in the later half of the time between
    the first and the last arrival.
    """
    work_deficit_ns: Int
    """Per row of the block: how much less the rank had worked than the last arrival since both
    left an operation together, ns; UNKNOWN_WORK_DEFICIT where they left none.
    """
    savings_ns: Int
    """int64[K - 1, operations]: how much earlier each operation would have ended if no member
    had lost time to the category since the previous operation of the process group, ns
    (estimate_savings_by_category).
    """

    def split(self, parts: Sequence[Operations]) -> Iterator[BlockBlame]:
        """Yield the blame of each part of the block; parts follow each other."""
        row, op, entry = 0, 0, 0
        for part in parts:
            row_end, op_end = row + part.rank.size, op + part.process_group.size
            entry_end = int(np.searchsorted(self.row, row_end))
            rows, ops, entries = slice(row, row_end), slice(op, op_end), slice(entry, entry_end)
            yield BlockBlame(
                self.row[entries] - row,
                self.culprit[entries],
                self.cause[entries],
                self.ns[entries],
                self.transfer_ns[rows],
                self.last_arrival[ops],
                self.recoverable_ns[ops],
                self.late_peers[ops],
                self.work_deficit_ns[rows],
                self.savings_ns[:, ops],
            )
            row, op, entry = row_end, op_end, entry_end


def list_causes(categories: Sequence[str]) -> tuple[str, ...]:
    """Return the cause names by index; the last category, work, is split into two causes.

    Raises: ValueError when the last category is not work.
    """
    if not categories or categories[-1] != WORK:
        raise ValueError(f"the last category must be {WORK!r}, not {list(categories)[-1:]}")
    return (*categories[:-1], *BLAME_CAUSES)


def blame_waits(
    ops: Operations,
    at_arrive: Int,
    at_leave: Int,
    ranks: int,
    carry_over: BlameCarryOver | None = None,
) -> tuple[BlockBlame, BlameCarryOver]:
    """Attribute every wait of one block of operations to a culprit and a cause.

    at_arrive, at_leave: int64[rows, K], ns: time each rank had spent by category since a
    fixed instant of its own, at arrival and at leave; the last column is work.
    ranks: number over all jobs. carry_over: second result of the previous block, if any.
    """
    if carry_over is None:
        carry_over = _make_first_carry_over(at_arrive.shape[1])
    if not ops.process_group.size:
        return _make_empty_block(), carry_over
    shortest = find_shortest_durations(ops)
    fresh, first_number = carry_over.rows.op.size, carry_over.operations
    rows = append_block_rows(carry_over.rows, ops, first_number, at_arrive, at_leave, shortest)
    carry_over = replace(carry_over, rows=make_empty_rows(0))  # no row is kept twice
    index, usual_work = late_rank_excess.with_usual_work(build_arrival_index(rows, fresh, ranks))
    del rows
    last = find_last_arrivals(ops, shortest, index)
    members = np.diff(ops.first)
    wait = ops.blocked_ns - np.repeat(shortest, members)
    waiting = np.flatnonzero(wait > 0)
    late = fresh + np.repeat(last, members)[waiting]
    blame_table, no_last, work_deficit, context = _attribute_waits(
        index, usual_work, ops, (fresh + waiting, late, wait[waiting]), carry_over
    )
    block_deficit = np.where(wait < 0, UNKNOWN_WORK_DEFICIT, 0)
    block_deficit[waiting], block_deficit[last] = work_deficit, 0  # 0 also if it worked on inside
    entries = blame_table.concat_entries()
    recoverable_ns, late_peers = measure_last_arrivals(ops, shortest, last)
    block_entries = slice(int(np.searchsorted(entries.row, fresh)), None)
    width = at_arrive.shape[1] - 1 + len(BLAME_CAUSES)
    culprit = entries.key[block_entries] // width
    blamed = BlockBlame(
        entries.row[block_entries] - fresh,
        culprit - 1,
        entries.key[block_entries] - culprit * width,
        entries.ns[block_entries],
        index.rows.transfer_ns[fresh:].copy(),
        np.where((np.diff(ops.first) > 1) & ~no_last, ops.rank[last], NO_CULPRIT),
        np.where(no_last, 0, recoverable_ns),
        np.where(no_last, 0, late_peers),
        block_deficit,
        estimate_savings_by_category(ops, index),
    )
    kept_rows = select_kept_rows(index)
    kept_entries = _select_kept_entries(kept_rows, index.rows.op.size, entries)
    columns = index.rows.list_columns()
    del index, usual_work, blame_table, entries
    return blamed, BlameCarryOver(
        take_rows(columns, kept_rows),
        kept_entries,
        first_number + ops.process_group.size,
        *_join_checks(carry_over, context),
    )


def _make_first_carry_over(columns: int) -> BlameCarryOver:
    empty = np.zeros(0, np.int64)
    return BlameCarryOver(make_empty_rows(columns), BlameEntries(empty, empty, empty), 0)


def _get_cause_index(width: int, name: str) -> int:
    return width - len(BLAME_CAUSES) + BLAME_CAUSES.index(name)


def _attribute_waits(
    index: ArrivalIndex,
    usual_work: late_rank_excess.UsualWork,
    ops: Operations,
    waits: tuple[Int, Int, Int],
    carry_over: BlameCarryOver,
) -> tuple[chains.BlameTable, NDArray[np.bool_], Int, tuple[bool, bool]]:
    """Attribute every wait of the block; the table holds the entries of earlier blocks too.

    waits: rows that waited, rows they waited for, and the waits in ns. Also returns which
    operations have no last arrival (has_no_last_arrival), the work deficit of each row, and
    what _check_context returns.
    """
    waiting, late, wait = waits
    rows = index.rows
    width = len(rows.at_arrive) - 1 + len(BLAME_CAUSES)
    leaves = find_last_common_leave(index, waiting, late)
    wait_pairs = late_rank_excess.WaitPairs(waiting, late, *leaves)
    point_to_point = is_point_to_point(ops.operation)[rows.op[waiting] - carry_over.operations]
    propagated_ns, skew_ns, shares = _split_waits_by_excess(
        index, usual_work, wait_pairs, wait, point_to_point
    )
    row, cause, ns = _group_shares_by_row(shares, wait.size)
    # A sender does not wait for its receiver: the unexplained part was transfer.
    if point_to_point.any():
        unexplained = np.flatnonzero(cause == _get_cause_index(width, UNKNOWN))
        from_sender = point_to_point[row[unexplained]] & (
            wait_pairs.waiting_since[row[unexplained]] >= 0
        )
        cause[unexplained[from_sender]] = _get_cause_index(width, TRANSFER)
    culprit = rows.rank[late]
    # Without a common leave, the late rank may itself have waited elsewhere: no culprit.
    waited_elsewhere = (wait_pairs.waiting_since < 0) & (index.left_before[late] >= 0)
    culprit[waited_elsewhere & ~has_full_history(index, waiting, late)] = NO_CULPRIT
    key = ((culprit + 1) * width)[row]
    key[cause == _get_cause_index(width, TRANSFER)] = 0  # no culprit
    key[(cause == _get_cause_index(width, UNKNOWN)) & waited_elsewhere[row]] = 0
    entries = BlameEntries(waiting[row], key + cause, ns)
    parts = [carry_over.entries, entries]
    if has_unrecorded_member(ops).any():
        parts.append(_blame_unrecorded_members(index, waiting, wait, width))
    entries = _concat_entries(*parts)
    blame_table = chains.BlameTable(entries, rows.op.size)
    propagating = np.flatnonzero(propagated_ns)
    columns = waiting, propagated_ns, late, wait_pairs.late_since
    chains.propagate_blame(
        index,
        chains.PropagatedShares(*(column[propagating] for column in columns)),
        blame_table,
        _get_cause_index(width, UNKNOWN),
        (index.ranks + 1) * width,
    )
    op = rows.op[waiting] - carry_over.operations
    return (
        blame_table,
        has_no_last_arrival(op, wait, skew_ns, ops.process_group.size),
        _compute_work_deficit(rows, wait_pairs, wait),
        _check_context(rows, wait_pairs, carry_over.first_ordinal),
    )


def _join_checks(carry_over: BlameCarryOver, context: tuple[bool, bool]) -> tuple[int, bool, bool]:
    """Return what the carry-over of a block keeps of the checks of all blocks so far."""
    return (
        carry_over.first_ordinal,
        carry_over.has_wait_before_context or context[0],
        carry_over.unresolved or context[1],
    )


def _check_context(rows: ArrivalRows, pairs: WaitPairs, first_ordinal: int) -> tuple[bool, bool]:
    """Return whether two ranks were compared since an operation before those fully known, and
    whether none was found although the first of these is not too far back.
    """
    if not first_ordinal:
        return False, False
    has_common_leave = pairs.waiting_since >= 0
    has_wait_before_context = any(
        bool((rows.ordinal[since[has_common_leave]] < first_ordinal).any())
        for since in (pairs.waiting_since, pairs.late_since)
    )
    waiting, late = (rows.ordinal[side[~has_common_leave]] for side in (pairs.waiting, pairs.late))
    near = np.maximum(waiting, late) - first_ordinal <= MAX_LOOK_BACK_OPERATIONS
    return has_wait_before_context, bool(near.any())


def _blame_unrecorded_members(
    index: ArrivalIndex, waiting: Int, wait: Int, width: int
) -> BlameEntries:
    """Blame the part of the waits of a block that is not the wait for a recorded member.

    waiting: rows that waited for a recorded member, and wait: how long, ns; int64[n] each.
    """
    unseen_ns = index.rows.wait_ns[index.first_new :].copy()
    unseen_ns[waiting - index.first_new] -= wait
    row = np.flatnonzero(unseen_ns)
    peer = np.full(row.size, _get_cause_index(width, UNKNOWN_PEER))
    return BlameEntries(index.first_new + row, peer, unseen_ns[row])


def _compute_work_deficit(rows: ArrivalRows, pairs: late_rank_excess.WaitPairs, wait: Int) -> Int:
    waiting, late, waiting_since, late_since = pairs
    deficit = rows.at_arrive[-1, late] - rows.at_leave[-1, late_since]
    deficit -= rows.at_arrive[-1, waiting] - rows.at_leave[-1, waiting_since]
    deficit += compute_device_delay(rows, pairs, wait)
    return np.where(waiting_since >= 0, deficit, UNKNOWN_WORK_DEFICIT)


def _split_waits_by_excess(
    index: ArrivalIndex,
    usual_work: late_rank_excess.UsualWork,
    pairs: late_rank_excess.WaitPairs,
    wait: Int,
    point_to_point: NDArray[np.bool_],
) -> tuple[Int, Int, list[tuple[int, Int]]]:
    """Split waits among the categories on which the late rank spent more time.

    Returns the part to propagate, the part that comes only from leaving at different times,
    and (cause, ns) of each share.
    """
    which, excess_ns = late_rank_excess.compute_excess(
        index, pairs, compute_device_delay(index.rows, pairs, wait)
    )
    shares = late_rank_excess.split_waits(wait, excess_ns)
    work = len(index.rows.at_arrive) - 1
    width = work + len(BLAME_CAUSES)
    unexplained_ns = wait - shares.sum(axis=0)  # what nothing explains
    propagated_ns = np.zeros(wait.size, np.int64)
    out: list[tuple[int, Int]] = []
    for column, share, extra in zip(which.tolist(), shares, excess_ns):
        if column < work:
            out.append((column, share))
        elif column == work:
            share_rows = np.flatnonzero(share)
            extra = extra[share_rows]
            due = late_rank_excess.estimate_expected_work(
                index, usual_work, pairs.take(share_rows), point_to_point[share_rows], extra
            )
            usual = np.zeros(wait.size, np.int64)
            usual[share_rows] = np.rint(share[share_rows] * (due / extra))
            out += [
                (_get_cause_index(width, SLOW_COMPUTE), share - usual),
                (_get_cause_index(width, IMBALANCE), usual),
            ]
        elif column == work + 1:
            out.append((_get_cause_index(width, TRANSFER), share))
        else:
            propagated_ns = share
    skew_ns = np.minimum(unexplained_ns, compute_leave_skew(index.rows, pairs, wait))
    out += [
        (_get_cause_index(width, UNKNOWN), unexplained_ns - skew_ns),
        (_get_cause_index(width, TRANSFER), skew_ns),
    ]
    return propagated_ns, skew_ns, out


def _group_shares_by_row(shares: list[tuple[int, Int]], rows: int) -> tuple[Int, Int, Int]:
    """Return (row, cause, ns) of all shares that are not 0, sorted by row."""
    nonzero = [np.flatnonzero(ns) for _, ns in shares]
    size = np.zeros(rows, np.int64)
    for share_rows in nonzero:
        size[share_rows] += 1
    next_slot = size.cumsum() - size
    names, amounts = np.empty((2, int(size.sum())), np.int64)
    for (name, ns), share_rows in zip(shares, nonzero):
        slot = next_slot[share_rows]
        names[slot], amounts[slot] = name, ns[share_rows]
        next_slot[share_rows] += 1
    return np.repeat(np.arange(rows), size), names, amounts


def _concat_entries(*parts: BlameEntries) -> BlameEntries:
    row, key, ns = (np.concatenate(columns) for columns in zip(*parts))
    if np.all(row[1:] >= row[:-1]):
        return BlameEntries(row, key, ns)
    order = np.argsort(row, kind="stable")
    return BlameEntries(row[order], key[order], ns[order])


def _select_kept_entries(keep: Int, rows: int, entries: BlameEntries) -> BlameEntries:
    """Select the entries of the kept rows, and renumber them by the new row numbers."""
    number = np.full(rows, -1, np.int64)
    number[keep] = np.arange(keep.size)
    row = number[entries.row]
    kept_entries = np.flatnonzero(row >= 0)
    return BlameEntries(row[kept_entries], entries.key[kept_entries], entries.ns[kept_entries])


def _make_empty_block() -> BlockBlame:
    empty = np.zeros(0, np.int64)
    return BlockBlame(
        empty, empty, empty, empty, empty, empty, empty, empty, empty, np.zeros((0, 0), np.int64)
    )
