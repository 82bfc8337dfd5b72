"""Determine the host phase at every instant of a segment, and allocate amounts by phase.

Each elementary interval (nothing begins or ends inside it) gets exactly one phase, the
first that matches in the precedence of the taxonomy. A wait for data takes precedence
over garbage collection unless the main process loads its data itself; then collection
is what it waits for:

    device in a collective > start-up > checkpoint > evaluation > copy >
    wait for a worker > gc > own loading > collective > lock > wait for the device > step > none

The first is not a host activity but what its device did at that time
(analysis.timeline.collectives.operations).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.timeline.collectives.operations import find_device_waits
from clusterprof.analysis.timeline.device_sync import select_device_waits
from clusterprof.analysis.timeline.intervals import (
    EMPTY,
    Intervals,
    Pair,
    find_containing,
    find_intersection,
    measure_overlap,
    merge_intervals,
    subtract_intervals,
)
from clusterprof.analysis.timeline.load.ranks import parse_job_position
from clusterprof.analysis.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_COPY,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    PHASE_GC,
    PHASE_H2D,
    PHASE_HIDDEN_COLLECTIVE,
    PHASE_LOCK,
    PHASE_NONE,
    PHASE_STARTUP,
    PHASE_SYNC,
    Float,
    Int,
    Rank,
    ThreadTable,
)
from clusterprof.analysis.timeline.series import compute_differences
from clusterprof.analysis.timeline.spans import (
    CollectiveSpans,
    DataWaitSpans,
    ExposedCollectiveSpans,
    InterpreterWaitSpans,
    SpanTable,
    SpanTimes,
    StepSpans,
)
from clusterprof.probe import layout

# In ascending precedence: later layers cover earlier ones.
_LAYERS: tuple[tuple[int, int], ...] = (
    (layout.STEP, PHASE_COMPUTE),
    (layout.SYNC, PHASE_SYNC),
    (-layout.COLLECTIVE, PHASE_HIDDEN_COLLECTIVE),  # of other threads, whatever the main one did
    (layout.INTERPRETER_WAIT, PHASE_LOCK),
    (layout.COLLECTIVE, PHASE_COLLECTIVE),
    (-layout.INTERPRETER_WAIT, PHASE_LOCK),  # operations of another thread need the lock to go on
    (layout.DATA_WAIT, PHASE_DATA_WAIT),
    (layout.GC, PHASE_GC),
    (-layout.DATA_WAIT, PHASE_DATA_WAIT),  # waits for a worker take precedence over gc
    (layout.H2D, PHASE_H2D),
    (layout.EXPOSED_COPY, PHASE_COPY),
    (layout.EVAL, PHASE_EVAL),
    (layout.CHECKPOINT, PHASE_CHECKPOINT),
    (layout.COMPILE, PHASE_STARTUP),
    (layout.EXPOSED_COLLECTIVE, PHASE_COLLECTIVE),
)
_OWN_WAITS = (
    layout.DATA_WAIT,
    layout.H2D,
    layout.GC,
    layout.EVAL,
    layout.CHECKPOINT,
    layout.COMPILE,
    layout.SYNC,
)
"""Kinds of spans in which the main thread waits, or does something outside training."""
# The order in which idle device time of a sample window is allocated to host phases.
FILL_ORDER = (
    PHASE_STARTUP,
    PHASE_CHECKPOINT,
    PHASE_EVAL,
    PHASE_H2D,
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_LOCK,
    PHASE_COLLECTIVE,
    PHASE_HIDDEN_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_NONE,
    PHASE_SYNC,  # not idle: the host waits for work that the device does
    PHASE_COPY,  # never idle: a copy occupies the device
)


# A sweep along the edges sums what begins and ends at each: one bit per open layer, one for a
# device window, and above them how many steps and how many windows have begun so far.
_PHASES = np.full(1 << len(_LAYERS), PHASE_NONE, np.int64)
for _bit, (_, _phase) in enumerate(_LAYERS):
    _PHASES[1 << _bit : 2 << _bit] = _phase  # the uppermost open layer determines the phase
_OTHER_OPERATION = 1 << [kind for kind, _ in _LAYERS].index(-layout.COLLECTIVE)
_IN_WINDOW = 1 << len(_LAYERS)
_COUNT_BITS = 26
_STEP_SHIFT = len(_LAYERS) + 1
_WINDOW_SHIFT = _STEP_SHIFT + _COUNT_BITS
_NAME_BITS = 6  # bits of the edge number: at most two edges per layer, for windows and for steps


@dataclass(frozen=True, slots=True)
class HostPhases:
    """A segment divided into elementary intervals; n rows, contiguous and sorted."""

    start_ns: Int
    end_ns: Int
    state: Int
    """Spans and windows open in each interval, and how many have begun by then."""

    @property
    def phase(self) -> Int:
        """Return the host phase of each row, int64[n]."""
        return _PHASES[self.state & _IN_WINDOW - 1]

    @property
    def in_operation(self) -> NDArray[np.bool_]:
        """Return whether another thread was in a collective operation in each row, bool[n]."""
        return (self.state & _OTHER_OPERATION) != 0

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Return whether each row lies in a device window, bool[n]."""
        return (self.state & _IN_WINDOW) != 0

    @property
    def window(self) -> Int:
        """Return the row of the last device window that has begun, int64[n], -1 before the
        first."""
        return (self.state >> _WINDOW_SHIFT) - 1

    @property
    def steps_begun(self) -> Int:
        """Return how many steps have begun, int64[n]."""
        return self.state >> _STEP_SHIFT & (1 << _COUNT_BITS) - 1

    def rows(self, numbers: Int) -> HostPhases:
        """Return the rows with these numbers."""
        return HostPhases(self.start_ns[numbers], self.end_ns[numbers], self.state[numbers])


def split_host_phases(rank: Rank, start_ns: int, end_ns: int, windows: Pair) -> HostPhases:
    """Divide `[start_ns, end_ns)` at every edge of spans and windows into host phases.

    windows: disjoint and sorted, int64[n] start and end, ns.
    """
    sets = [(*_build_layer(rank, bit), 1 << bit, -(1 << bit)) for bit in range(len(_LAYERS))]
    sets.append((*windows, _IN_WINDOW + (1 << _WINDOW_SHIFT), -_IN_WINDOW))
    steps = rank.main.spans.get(layout.STEP)
    if steps is not None and steps.start_ns.size == sets[0][0].size:  # they are their own union
        sets[0] = steps.start_ns, steps.end_ns, 1 + (1 << _STEP_SHIFT), -1
    elif steps is not None:
        sets.append((steps.start_ns, steps.end_ns, 1 << _STEP_SHIFT, 0))
    bounds, state = _scan_edges(
        start_ns, end_ns, [interval_set for interval_set in sets if interval_set[0].size]
    )
    return HostPhases(bounds[:-1], bounds[1:], state)


def _scan_edges(
    start_ns: int, end_ns: int, sets: list[tuple[Int, Int, int, int]]
) -> tuple[Int, Int]:
    """Return all edges of the sets inside a segment, and the state after each.

    Returns int64[n + 1] and int64[n]. The state is the sum of what every set adds at its
    starts and ends so far. An edge is sorted together with the number of its set and side;
    spans that began before the segment are open at its start.
    """
    sides = [side for start, end, _, _ in sets for side in (start, end)]
    edges = np.concatenate([[start_ns], *sides, [end_ns]])
    np.maximum(edges, start_ns, out=edges)
    np.minimum(edges, end_ns, out=edges)
    edges -= start_ns
    edges <<= _NAME_BITS
    past = 1
    for name, side in enumerate(sides, 1):
        first, past = past, past + side.size
        edges[first:past] += name
    edges.sort(kind="stable")  # each side is sorted: merging runs takes a tenth of the time
    adds = np.array([0, *(amount for *_, begin, end in sets for amount in (begin, end))], np.int64)
    state = adds[edges & (1 << _NAME_BITS) - 1].cumsum()
    edges >>= _NAME_BITS
    (last_edge,) = (edges[1:] != edges[:-1]).nonzero()  # the last edge of each instant
    bounds = np.empty(last_edge.size + 1, np.int64)
    np.add(edges[last_edge], start_ns, out=bounds[:-1])
    bounds[-1] = end_ns
    return bounds, state[last_edge]


def _build_layer(rank: Rank, bit: int) -> Intervals:
    """Return the union of a layer's spans.

    Negative kinds: data waits for a worker, operations of other threads, and waits for the
    interpreter lock of a process that has such operations.
    """
    kind = _LAYERS[bit][0]
    table = rank.main.spans.get(abs(kind))
    if kind == layout.SYNC:
        return merge_intervals(select_device_waits(rank.main), _find_waits_for_gradients(rank))
    if table is None:
        return EMPTY
    if abs(kind) == layout.COLLECTIVE and _is_alone(rank):
        return EMPTY  # an operation of one rank waits for no other rank
    if kind == -layout.COLLECTIVE:
        operations = CollectiveSpans.from_table(table)
        by_other_thread = operations.by_other_thread & (operations.group != 0)
        return merge_intervals((table.start_ns[by_other_thread], table.end_ns[by_other_thread]))
    if kind == layout.EXPOSED_COLLECTIVE:
        waits = find_device_waits(rank.main)
        if waits is None:
            return EMPTY
        nonempty = waits.end_ns > waits.start_ns
        # Disjoint already; where two touch there is an edge, so each row is part of one.
        return Intervals(waits.start_ns[nonempty], waits.end_ns[nonempty])
    if kind == layout.COLLECTIVE:
        return _find_waits_for_ranks(rank, table)
    if kind == layout.INTERPRETER_WAIT:
        return find_lock_waits(rank)
    if kind == -layout.INTERPRETER_WAIT:
        called = rank.main.get_spans(CollectiveSpans)
        needed = called is not None and called.by_other_thread.any()
        return find_lock_waits(rank) if needed else EMPTY
    if kind == layout.CHECKPOINT:
        return merge_intervals(
            (table.start_ns, table.end_ns), _find_gaps_between_saves(rank, table)
        )
    if kind > 0:
        return merge_intervals((table.start_ns, table.end_ns))
    waited = DataWaitSpans.from_table(table).worker_pid != 0
    if waited.all():
        # All waits waited for a worker: only garbage collection could cover them in between.
        collects = rank.main.spans.get(layout.GC) is not None
        return merge_intervals((table.start_ns, table.end_ns)) if collects else EMPTY
    return merge_intervals((table.start_ns[waited], table.end_ns[waited]))


def _find_waits_for_ranks(rank: Rank, table: SpanTable) -> Intervals:
    """Find the time in which the main thread may have waited for other ranks.

    table: the collective operations of the rank.
    """
    operations = CollectiveSpans.from_table(table)
    # A host that issues one continues; one of an unknown group cannot be matched.
    counts = (operations.form != layout.ISSUE) & (operations.group != 0)
    measured = rank.main.get_spans(ExposedCollectiveSpans)
    if measured is not None:
        counts &= ~np.isin(table.sequence, measured.measured_sequence)
    by_other_thread = counts & operations.by_other_thread
    if by_other_thread.any():
        gradients = counts & _find_hooked_waits(rank, operations)
        by_main_thread = counts & ~by_other_thread & ~gradients
        other_operations = merge_intervals(
            (table.start_ns[by_other_thread], table.end_ns[by_other_thread])
        )
        return merge_intervals(
            (table.start_ns[by_main_thread], table.end_ns[by_main_thread]),
            find_intersection(
                merge_intervals((table.start_ns[gradients], table.end_ns[gradients])),
                other_operations,
            ),
            _find_exposed_part(rank, other_operations),
        )
    if counts.all():
        return merge_intervals((table.start_ns, table.end_ns))
    return merge_intervals((table.start_ns[counts], table.end_ns[counts]))


def _is_alone(rank: Rank) -> bool:
    return parse_job_position(rank.main.registration).world_size == 1


def _find_waits_for_gradients(rank: Rank) -> Intervals:
    """Find the time in which the host waited until its device had computed the next gradients.

    A hook of DDP that reduces gradients in a thread of its own begins an operation when a bucket is
    complete. While the main thread waits for the last one and no operation is under way, it waits
    for its device, not for other ranks:

        main thread   |------------ waits for gradients ------------|
        operations          |--- 1 ---|         |--- 2 ---|
        device wait   |----|           |-------|           |-------|
    """
    operations = rank.main.get_spans(CollectiveSpans)
    if operations is None or _is_alone(rank):
        return EMPTY
    waits = _find_hooked_waits(rank, operations)
    if not waits.any():
        return EMPTY
    start_ns, end_ns, by_other_thread = (
        operations.start_ns,
        operations.end_ns,
        operations.by_other_thread,
    )
    return subtract_intervals(
        merge_intervals((start_ns[waits], end_ns[waits])),
        merge_intervals((start_ns[by_other_thread], end_ns[by_other_thread])),
    )


def _find_hooked_waits(rank: Rank, operations: CollectiveSpans) -> NDArray[np.bool_]:
    """Find the waits for gradients in which other threads began operations: bool[n].

    None without a device, or unless at least half of the waits for gradients are such waits.
    """
    by_other_thread = operations.by_other_thread & (operations.group != 0)
    kind = operations.code & layout.OPERATION_MASK
    gradients = ~operations.by_other_thread & (kind == layout.GRADIENTS)
    if not rank.device or not by_other_thread.any():
        return np.zeros(gradients.size, np.bool_)
    begins = np.sort(operations.start_ns[by_other_thread])
    first = np.searchsorted(begins, operations.start_ns)
    hooked = gradients & (np.searchsorted(begins, operations.end_ns) > first)
    return hooked & (2 * np.count_nonzero(hooked) >= np.count_nonzero(gradients))


def _find_exposed_part(rank: Rank, operations: Intervals) -> Intervals:
    """Return the part of other threads' operations in which the main thread can have waited.

    Between two samples the main thread waited for at most the time in which it was neither on
    a CPU nor ready to run, and waits of its own do not count; what it waited lies at the end,
    because it starts an operation before it waits for it:

        samples       |----------- 100 -----------|    active for 40 of 100
        operations       |------- 80 --------|
        exposed             |------ 60 ------|
    """
    thread = rank.main.threads.get(rank.pid)
    if thread is None or len(thread.t_ns) < 2:
        return operations
    own_waits = find_own_waits(rank)
    operations = subtract_intervals(operations, own_waits)
    if not operations.start_ns.size:
        return operations
    start, end = thread.t_ns[:-1], thread.t_ns[1:]
    inside_ns = measure_overlap((start, end), operations)
    hidden_ns = inside_ns - np.clip(measure_free_sleep(thread, own_waits), 0, inside_ns)
    # Time inside operations so far, and the instants at which a part of it has passed.
    edges = np.stack(operations, axis=1).ravel()
    passed = np.repeat(np.cumsum(operations.end_ns - operations.start_ns), 2)
    passed[::2] -= operations.end_ns - operations.start_ns
    before = np.interp(start, edges, passed)
    exposed_from = np.ceil(np.interp(before + hidden_ns, passed, edges)).astype(np.int64)
    exposed_from = np.where(hidden_ns > 0, np.clip(exposed_from, start, end), start)
    samples = Intervals(exposed_from, end)
    nonempty = samples.end_ns > samples.start_ns
    sampled = merge_intervals((samples.start_ns[nonempty], samples.end_ns[nonempty]))
    unsampled = subtract_intervals(operations, Intervals(start[:1], end[-1:]))
    return merge_intervals(find_intersection(operations, sampled), unsampled)


def find_own_waits(rank: Rank) -> Intervals:
    """Return the time in which the main thread was in a marked wait or phase outside training.

    int64[n] starts and ends, ns, disjoint and sorted.
    """
    sets = [
        (table.start_ns, table.end_ns)
        for kind in _OWN_WAITS
        if (table := rank.main.spans.get(kind)) is not None
    ]
    sets.append(find_lock_waits(rank))
    table = rank.main.spans.get(layout.COLLECTIVE)
    if table is not None:
        operations = CollectiveSpans.from_table(table)
        by_main_thread = (operations.form != layout.ISSUE) & ~operations.by_other_thread
        sets.append((table.start_ns[by_main_thread], table.end_ns[by_main_thread]))
    return merge_intervals(*sets)


_MIN_ASLEEP_RATIO = 0.5


def find_lock_waits(rank: Rank) -> Intervals:
    """Find the time in which another thread held the interpreter lock and the main thread slept.

    Disjoint and sorted, ns. A main thread that was active for most of it, from sample to sample,
    kept the lock itself; so did one that waited for a disk: a page fault keeps the lock.
    """
    waits, thread = rank.main.get_spans(InterpreterWaitSpans), rank.main.threads.get(rank.pid)
    if waits is None or thread is None or len(thread.t_ns) < 2:
        return EMPTY
    lock_holds = Intervals(*waits.find_lock_hold_intervals())
    inside = find_containing(thread.t_ns, lock_holds) >= 0
    in_disk_wait, asleep = (thread.state[inside] == ord(letter) for letter in "DS")
    if np.count_nonzero(in_disk_wait) > np.count_nonzero(asleep):
        return EMPTY
    samples = thread.t_ns[:-1], thread.t_ns[1:]
    asleep_ns = measure_free_sleep(thread, EMPTY)
    (rows,) = (asleep_ns >= _MIN_ASLEEP_RATIO * measure_overlap(samples, lock_holds)).nonzero()
    return find_intersection(lock_holds, merge_intervals((samples[0][rows], samples[1][rows])))


MAX_HAND_OVER_NS = 20_000_000
"""Time from the end of a kept lock within which the thread of an operation gets it: four switch
intervals of Python, as other threads wait for it too."""
MIN_UNDELAYED_NS = 2_000_000
"""Least time from the start of an operation to its delay: its thread had the lock at the start.
When another thread took it is known to a few milliseconds only."""


def measure_end_delays(rank: Rank, spans: CollectiveSpans, earliest_ns: int) -> Int:
    """Measure how long operations of other threads waited for the interpreter lock at their end.

    Returns int64[n], ns, counted from `earliest_ns` on. Such a thread continues when it has the
    lock, perhaps long after the last rank arrived and the data moved: the delay is neither a wait
    for other ranks nor a transfer. The same holds for the main thread's wait for gradients that
    these operations reduce.

        operation    |== wait ==|= transfer =|~~~ needs the lock ~~~|
        lock kept                      |------------------------|
        delay                          |~~~~~~~~~~~~~~~~~~~~~~~~~~~~|
    """
    delay_ns = np.zeros(spans.end_ns.size, np.int64)
    waits = find_lock_waits(rank) if spans.by_other_thread.any() else EMPTY
    if not waits.start_ns.size:
        return delay_ns
    row = np.searchsorted(waits.start_ns, spans.end_ns) - 1
    clipped_row = np.maximum(row, 0)
    is_gradients = (spans.code & layout.OPERATION_MASK) == layout.GRADIENTS
    delayed = (spans.by_other_thread | is_gradients) & (row >= 0)
    delayed &= spans.end_ns - waits.end_ns[clipped_row] <= MAX_HAND_OVER_NS
    begun_ns = np.maximum(spans.start_ns, earliest_ns) + MIN_UNDELAYED_NS
    begin_ns = np.maximum(waits.start_ns[clipped_row], begun_ns)
    return np.where(delayed, np.maximum(spans.end_ns - begin_ns, 0), delay_ns)


def measure_free_sleep(thread: ThreadTable, own_waits: Intervals) -> Float:
    """Measure how long a thread slept between each two samples, outside its own waits.

    own_waits: as `find_own_waits` returns them. Returns float64[samples - 1], ns, at least 0:
    neither on a CPU nor ready to run, less the waits, in which it sleeps too.
    """
    start, end = thread.t_ns[:-1], thread.t_ns[1:]
    active_ns = compute_differences(thread.on_cpu_ns)[0] + np.maximum(
        compute_differences(thread.run_delay_ns)[0], 0.0
    )
    free_ns: Float = end - start - active_ns - measure_overlap((start, end), own_waits)
    return np.maximum(free_ns, 0.0)


def _find_gaps_between_saves(rank: Rank, saves: SpanTimes) -> Pair:
    """Return the time from one save to the next of the same step: no training happens there.

    Shards of one checkpoint are synced, renamed and gathered meanwhile.
    """
    steps = rank.main.spans.get(layout.STEP)
    if steps is None or saves.start_ns.size < 2:
        return EMPTY
    start, end = saves.end_ns[:-1], saves.start_ns[1:]
    row = np.searchsorted(steps.start_ns, start, side="right") - 1
    in_same_step = (row >= 0) & (end <= steps.end_ns[np.maximum(row, 0)]) & (end > start)
    return start[in_same_step], end[in_same_step]


def find_step_numbers(rank: Rank, start_ns: Int, steps_begun: Int) -> Int:
    """Return the step number of each instant, int64[n], -1 outside steps.

    steps_begun: int64[n], from split_host_phases.
    """
    steps = rank.main.get_spans(StepSpans)
    if steps is None or not steps.start_ns.size:
        return np.full(start_ns.size, -1, np.int64)
    row = np.maximum(steps_begun - 1, 0)
    in_step = (steps_begun > 0) & (start_ns < steps.end_ns[row])
    return np.where(in_step, steps.step[row], -1)


def allocate_by_phase(
    window: Int, phase: Int, capacity_ns: Int, amount_ns: Int, order: tuple[int, ...]
) -> Int:
    """Allocate `amount_ns[w]` to the rows of each window, phase by phase, up to capacity.

    window, phase, capacity_ns: int64[n]. amount_ns: int64[windows]. Returns int64[n], ns.
    Within a phase and window the amount is split by length. Rows of one window are
    contiguous. With 40 ns for a wait of 30 and a step of 70 (wait first): 30 and 10.
    """
    out = np.zeros(window.size, np.int64)
    remaining_ns = amount_ns.astype(np.float64)
    present = np.bincount(phase, minlength=max(order) + 1).tolist()
    has_room = capacity_ns > 0
    for code in (code for code in order if present[code]):
        if not remaining_ns.any():
            break
        (rows,) = ((phase == code) & has_room).nonzero()
        if not rows.size:
            continue
        group, room = window[rows], capacity_ns[rows].astype(np.float64)
        room_of = np.bincount(group, weights=room, minlength=remaining_ns.size)
        allocated_ns = np.minimum(remaining_ns, room_of)
        remaining_ns -= allocated_ns
        ratio = allocated_ns[group] / room_of[group]
        until = room.cumsum()
        before = until - room
        base = np.zeros(rows.size)
        base[1:] = np.where(group[1:] != group[:-1], before[1:], 0.0)
        base = np.maximum.accumulate(base)
        # Differences of rounded running sums are integers that add up to the rounded whole.
        part = np.rint((until - base) * ratio) - np.rint((before - base) * ratio)
        out[rows] = np.minimum(part, room)
    return out
