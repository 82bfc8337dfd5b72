"""Find which segments of a rank can be settled now, while its recording arrives in chunks.

Time can be settled only after every span and sample that covers it has ended. A segment
therefore ends at a sample before the last step end, which is an edge of intervals
anyway: one chunk or many give the same intervals. Time after the last step is
provisional until another step ends.

    steps      |----|----|----|-- still running
    samples    .  .  .  .  .  .  .
    settled    ............|              the rest is settled with the next chunk

Restrict a recording to the analyzed part; time outside of it counts as outside the steps.

    recording |--------------------------------------|
    part                |-----------|                  by time: between device samples
    steps     |---|---|---|---|---|---|---|            by number: between step ends

Carry the unsettled end of one chunk over to the next chunk.

    chunk k        ......|--- step still running
    chunk k + 1          |--- ... step ends ......
    concatenated |- kept -|----- chunk k + 1 -----|

Records present in both (the timeline reaches back where intervals need it) are taken
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.attribution.rank.device_activity import (
    MAX_LATENESS_NS,
    NO_ACTIVITY,
    DeviceActivity,
    build_device_windows,
    get_sample_times,
)
from clusterprof.analysis.timeline.collectives.operations import select_unfinished
from clusterprof.analysis.timeline.model import (
    Chunk,
    Int,
    Process,
    ProcessIo,
    Rank,
    Series,
    ThreadTable,
)
from clusterprof.analysis.timeline.spans import (
    ExposedCollectiveSpans,
    SpanTable,
    SpanTimes,
    StepSpans,
)
from clusterprof.probe import layout

# A segment that is open for longer is settled without waiting for the end of the open span.
MAX_OPEN_NS = 300_000_000_000
# … unless fewer rows than this were recorded since: imported logs have a few rows per epoch.
MAX_OPEN_ROWS = 4096
# How far a wait is followed to see whether its device was idle to its end.
LOOKAHEAD_NS = 1_000_000_000
# The first steps are settled only when this much is recorded: the usual activity of the device is
# learned from it.
LEARNED_NS = 60_000_000_000
# A device passes the events of a collective operation within this time unless the job hangs.
MAX_MEASURE_DELAY_NS = 30_000_000_000


@dataclass(frozen=True, slots=True)
class RankState:
    """State of a rank carried over from chunk to chunk; all None before its first record."""

    settled_ns: int | None = None
    """Everything before this time is settled."""
    step_begin_ns: int | None = None
    """Start of the first wait or step (without spans: of the device's first work), as far as
    it was not settled yet: time settled before it was known is excluded.
    """
    reported_begin_ns: int | None = None
    """The same start, however late it was reported: a first step may last longer than any
    segment is kept open.
    """
    step_end_ns: int | None = None
    """End of the last step or wait so far (without spans: of the device's last work)."""
    first_ns: int | None = None
    """Time of the rank's first record."""
    last_ns: int | None = None
    """Time of its last record."""
    activity: DeviceActivity = NO_ACTIVITY
    """Activity of its device, as far as it is settled."""
    since_ns: int | None = None
    """Begin of the selected part of the run; None = no bound."""
    until_ns: int | None = None
    """End of the selected part; None = no bound."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment that can be settled now."""

    start_ns: int
    end_ns: int
    provisional: bool
    """True if no step has ended after it yet: it is inside the steps only if another one does."""


def find_settled_segments(
    rank: Rank, state: RankState, last: bool
) -> tuple[list[Segment], RankState]:
    """Find the segments that can be settled now; one after the last step is provisional."""
    first_ns, last_ns = _find_record_bounds(rank, state)
    step_begin_ns, step_end_ns, closed_ns = (
        _find_step_bounds if rank.marked else _find_work_bounds
    )(rank, last)
    reported_begin_ns = step_begin_ns
    if state.step_begin_ns is not None:
        step_begin_ns, reported_begin_ns = state.step_begin_ns, state.reported_begin_ns
    elif step_begin_ns is not None and state.settled_ns is not None:
        step_begin_ns = max(step_begin_ns, state.settled_ns)
    step_end_ns = _choose_later(step_end_ns, state.step_end_ns)
    until_ns = _find_settled_end(rank, closed_ns, step_end_ns, last)
    is_learning = rank.device and state.activity is NO_ACTIVITY and not last
    if is_learning and step_begin_ns is not None and until_ns < step_begin_ns + LEARNED_NS:
        until_ns = min(until_ns, step_begin_ns)
    if state.settled_ns is not None:
        until_ns = max(until_ns, state.settled_ns)
    next_state = replace(
        state,
        settled_ns=until_ns,
        step_begin_ns=step_begin_ns,
        reported_begin_ns=reported_begin_ns,
        step_end_ns=step_end_ns,
        first_ns=first_ns if reported_begin_ns is None else min(first_ns, reported_begin_ns),
        last_ns=last_ns if step_end_ns is None else max(last_ns, step_end_ns),
    )
    if step_begin_ns is None or step_end_ns is None:
        return [], next_state
    begin = step_begin_ns if state.settled_ns is None else max(step_begin_ns, state.settled_ns)
    edge = until_ns if last else find_sample_before(rank, min(step_end_ns, until_ns))
    cuts = [begin, max(begin, min(edge, until_ns)), max(begin, until_ns)]
    segments = [Segment(cuts[0], cuts[1], False), Segment(cuts[1], cuts[2], True)]
    return [segment for segment in segments if segment.end_ns > segment.start_ns], next_state


def _find_settled_end(
    rank: Rank, closed_ns: int | None, step_end_ns: int | None, last: bool
) -> int:
    """Return the time up to which nothing can change any more."""
    end_ns = rank.chunk.end_ns
    if last:
        return step_end_ns if step_end_ns is not None else end_ns
    overdue_ns = find_sample_before(rank, find_overdue_end_ns(rank.chunk))
    if closed_ns is None:
        return overdue_ns
    times = get_sample_times(rank)
    if times.size:
        closed_ns = min(closed_ns, int(times[-1]) - MAX_LATENESS_NS - LOOKAHEAD_NS)
    return max(find_sample_before(rank, closed_ns), overdue_ns)


def find_closed_end(rank: Rank) -> int | None:
    """Find the time up to which no later record changes what a rank did, ns.

    A segment that is open for longer than MAX_OPEN_NS counts as closed. None: the rank has begun
    neither a wait nor a step.
    """
    find_bounds = _find_step_bounds if rank.marked else _find_work_bounds
    step_begin_ns, step_end_ns, closed_ns = find_bounds(rank, False)
    if step_begin_ns is None:
        return None
    if step_end_ns is None:  # the first step is open
        closed_ns = step_begin_ns
    return _find_settled_end(rank, closed_ns, step_end_ns, last=False)


def find_overdue_end_ns(chunk: Chunk) -> int:
    """Return the time up to which a chunk is settled even if a span is open, ns."""
    overdue_end_ns = chunk.end_ns - MAX_OPEN_NS
    rows = 0
    for process in chunk.processes.values():
        rows += sum(table.start_ns.size for table in process.spans.values())
        rows += sum(thread.t_ns.size for thread in process.threads.values())
        if rows > MAX_OPEN_ROWS:
            return overdue_end_ns
    rows += sum(series.t_ns.size for series in chunk.series.values())
    return overdue_end_ns if rows > MAX_OPEN_ROWS else min(chunk.start_ns, overdue_end_ns)


def find_sample_before(rank: Rank, t_ns: int) -> int:
    """Return the time of the last sample up to an instant; without one the instant.

    A sample of the device, or of the main thread of a rank without a device.
    """
    times = _get_edge_times(rank)
    row = int(times.searchsorted(t_ns, "right")) - 1
    return int(times[row]) if row >= 0 else t_ns


def find_sample_from(rank: Rank, t_ns: int) -> int:
    """Return the time of the first sample from an instant on; without one the instant."""
    times = _get_edge_times(rank)
    row = int(times.searchsorted(t_ns, "left"))
    return int(times[row]) if row < times.size else t_ns


def _get_edge_times(rank: Rank) -> Int:
    """Return the times at which segments may end: int64[n], ns, sorted."""
    thread = rank.main.threads.get(rank.pid)
    return get_sample_times(rank) if rank.device or thread is None else thread.t_ns


def _choose_later(first: int | None, second: int | None) -> int | None:
    known_times = [t for t in (first, second) if t is not None]
    return max(known_times) if known_times else None


def _find_record_bounds(rank: Rank, state: RankState) -> tuple[int, int]:
    """Return the times of the first and the last record of the process itself."""
    times = [t for t in (state.first_ns, state.last_ns) if t is not None]
    for thread in rank.main.threads.values():
        if thread.t_ns.size:
            times += [int(thread.t_ns[0]), int(thread.t_ns[-1])]
    for table in rank.main.spans.values():
        if table.start_ns.size:
            times += [int(table.start_ns[0]), int(table.end_ns.max())]
    times += [
        event.t_ns
        for event in rank.chunk.events
        if event.kind in ("process-registered", "process-exited")
        and event.attributes.get("pid") == rank.pid
    ]
    if not times:
        times = [rank.chunk.start_ns, rank.chunk.end_ns]
    return min(times), max(times)


def _find_step_bounds(rank: Rank, last: bool) -> tuple[int | None, int | None, int | None]:
    """Return the begin of the first wait or step, the last step end, and the closed end.

    With `last` the end of the last wait counts too. All spans that touch the time before
    the closed end have ended.
    """
    steps, waits = (get_spans(rank, kind) for kind in (layout.STEP, layout.DATA_WAIT))
    starts = [int(t.start_ns[0]) for t in (steps, waits) if t is not None]
    ends = [int(t.end_ns.max()) for t in ((steps, waits) if last else (steps,)) if t is not None]
    closed_ns = ends[0] if steps is not None else None
    if closed_ns is not None and steps is not None:
        closed_ns = _find_measured_end(rank, steps, closed_ns)
    return min(starts, default=None), max(ends, default=None), closed_ns


def _find_measured_end(rank: Rank, steps: SpanTimes, closed_ns: int) -> int | None:
    """Return the time up to which the device measurements of waits have arrived.

    Measurements arrive some steps later, in the order of the waits. Not every collective
    operation is measured, so the next measurement is awaited for no longer than it can
    take.
    """
    waits, collectives = (get_spans(rank, k) for k in (layout.EXPOSED, layout.EXPOSED_COLLECTIVE))
    if waits is None and collectives is None:
        return closed_ns
    until_ns = max(int(table.end_ns.max()) for table in (waits, collectives) if table is not None)
    if waits is None:
        until_ns = max(until_ns, closed_ns - MAX_MEASURE_DELAY_NS)
    measured = steps.end_ns[steps.end_ns <= until_ns]
    return int(measured.max()) if measured.size else None


def get_spans(rank: Rank, kind: int) -> SpanTable | None:
    table = rank.main.spans.get(kind)
    return table if table is not None and table.start_ns.size else None


def _find_work_bounds(rank: Rank, last: bool) -> tuple[int | None, int | None, int | None]:
    """Return the bounds of the device's work, for a rank without spans.

    Only while the process existed: a restarted process has the device of its predecessor.
    """
    windows = build_device_windows(rank)
    if windows is None:
        return None, None, None
    closed_ns = int(get_sample_times(rank)[-1])
    final = windows.end_ns <= (closed_ns if last else closed_ns - MAX_LATENESS_NS)
    thread = rank.main.threads.get(rank.pid)
    if thread is not None and thread.t_ns.size:
        final &= (windows.end_ns > thread.t_ns[0]) & (windows.start_ns < thread.t_ns[-1])
    busy = np.flatnonzero((windows.end_ns - windows.start_ns > windows.idle_ns) & final)
    if not busy.size:
        return None, None, closed_ns
    return int(windows.start_ns[busy[0]]), int(windows.end_ns[busy[-1]]), closed_ns


OUTSIDE_PART = "not-asked"
_BEFORE_ALL_NS = -(1 << 62)


@dataclass(frozen=True, slots=True)
class PartOfRecording:
    """Analyzed part of one node's recording; None = no bound.

    The bounds are on the node's clock, or step numbers.
    """

    since_ns: int | None = None
    until_ns: int | None = None
    first_step: int | None = None
    end_step: int | None = None
    """The first step after the part."""
    is_adjoining: bool = False
    """True: both bounds move to the first device sample from them on, so that parts of a run whose
    bounds meet add up to the whole. False: a part ends with the last sample in it."""

    @property
    def by_steps(self) -> bool:
        """Return whether the bounds are step numbers."""
        return self.first_step is not None or self.end_step is not None


WHOLE_RECORDING = PartOfRecording()


def with_part_bounds(rank: Rank, state: RankState, part: PartOfRecording) -> RankState:
    """Return the state with the bounds of the part on the rank's clock, as far as known."""
    if not part.by_steps:
        return replace(state, since_ns=part.since_ns, until_ns=part.until_ns)
    steps = rank.main.get_spans(StepSpans)
    since_ns, until_ns = state.since_ns, state.until_ns
    if part.end_step is not None and until_ns is None:
        until_ns = _BEFORE_ALL_NS
    if steps is not None and steps.end_ns.size:
        if part.first_step is not None:
            ends = steps.end_ns[steps.step < part.first_step]
            since_ns = max(
                int(ends.max(initial=_BEFORE_ALL_NS)),
                _BEFORE_ALL_NS if since_ns is None else since_ns,
            )
        if part.end_step is not None and until_ns is not None:
            ends = steps.end_ns[steps.step < part.end_step]
            until_ns = max(int(ends.max(initial=_BEFORE_ALL_NS)), until_ns)
    return replace(state, since_ns=since_ns, until_ns=until_ns)


def trim_to_part(rank: Rank, segment: Segment, state: RankState, part: PartOfRecording) -> Segment:
    """Trim a segment to the analyzed part; its length is 0 if it lies outside."""
    begin_ns, end_ns = segment.start_ns, segment.end_ns
    if state.since_ns is not None and state.since_ns > begin_ns:
        begin_ns = min(
            find_sample_from(rank, state.since_ns) if _is_by_time(part) else state.since_ns, end_ns
        )
    if state.until_ns is not None and state.until_ns < end_ns:
        find_sample = find_sample_from if part.is_adjoining else find_sample_before
        end_ns = (
            min(find_sample(rank, state.until_ns), end_ns) if _is_by_time(part) else state.until_ns
        )
    return replace(segment, start_ns=begin_ns, end_ns=max(begin_ns, end_ns))


def _is_by_time(part: PartOfRecording) -> bool:
    return not part.by_steps


# Marks of an instant that apply to all the time after it.
_PERSISTENT_KINDS = (layout.LOADER_START, layout.WORKER_START, layout.HOOK_NOTE)


def select_carry_over(chunk: Chunk, from_ns: int) -> Chunk:
    """Return the part of a chunk from this instant on, including the last reading before it."""
    return replace(
        chunk,
        series=_trim_all_series(chunk.series, from_ns),
        processes={
            pid: _trim_process(process, from_ns)
            for pid, process in chunk.processes.items()
            if _is_active_after(process, from_ns)
        },
        events=tuple(event for event in chunk.events if event.t_ns >= from_ns),
    )


Spans = TypeVar("Spans", bound=SpanTimes)
Samples = TypeVar("Samples", ThreadTable, ProcessIo)
Table = TypeVar("Table", bound=Any)
SeriesByKey = Mapping[tuple[str, str], Series]


def concat_chunks(carry_over: Chunk | None, chunk: Chunk) -> Chunk:
    """Return the chunk preceded by the part of the previous one that is carried over."""
    if carry_over is None:
        return chunk
    processes = dict(carry_over.processes)
    for pid, process in chunk.processes.items():
        before = carry_over.processes.get(pid)
        is_same = before is not None and before.started_ticks == process.started_ticks
        processes[pid] = (
            _concat_processes(before, process) if is_same and before is not None else process
        )
    events = [event for event in carry_over.events if event not in chunk.events]
    return replace(
        chunk,
        start_ns=min(carry_over.start_ns, chunk.start_ns),
        first=carry_over.first,
        series=_concat_all_series(carry_over.series, chunk.series),
        processes=processes,
        events=(*events, *chunk.events),
    )


def _concat_processes(before: Process, process: Process) -> Process:
    spans: dict[int, SpanTable] = dict(before.spans)
    for kind, table in process.spans.items():
        spans[kind] = _concat_spans(spans[kind], table) if kind in spans else table
    threads: dict[int, ThreadTable] = dict(before.threads)
    for tid, thread in process.threads.items():
        threads[tid] = _concat_samples(threads[tid], thread) if tid in threads else thread
    io = process.io if before.io is None else before.io
    if before.io is not None and process.io is not None:
        io = _concat_samples(before.io, process.io)
    registration = process.registration or before.registration
    stacks = process.stacks if before.stacks is None else before.stacks
    if before.stacks is not None and process.stacks is not None:
        stacks = _concat_spans(before.stacks, process.stacks)
    return replace(
        process, registration=registration, spans=spans, threads=threads, io=io, stacks=stacks
    )


def _concat_all_series(before: SeriesByKey, after: SeriesByKey) -> SeriesByKey:
    """Concatenate each series; times that several series share are concatenated once."""
    joined: dict[tuple[int, int], tuple[int, Int]] = {}
    out = dict(before)
    for key, later in after.items():
        earlier = before.get(key)
        if earlier is None or not later.t_ns.size:
            out[key] = later if earlier is None else earlier
            continue
        times = id(earlier.t_ns), id(later.t_ns)
        if times not in joined:
            end = int(earlier.t_ns.searchsorted(later.t_ns[0]))
            t_ns = np.concatenate([earlier.t_ns[:end], later.t_ns]) if end else later.t_ns
            joined[times] = end, t_ns
        end, t_ns = joined[times]
        values = np.concatenate([earlier.values[:end], later.values]) if end else later.values
        out[key] = Series(t_ns, values, later.is_counter)
    return out


def _trim_all_series(series_by_key: SeriesByKey, from_ns: int) -> SeriesByKey:
    """Trim each series; times that several series share are trimmed once."""
    trimmed: dict[int, tuple[int, Int]] = {}
    out = {}
    for key, series in series_by_key.items():
        times = id(series.t_ns)
        if times not in trimmed:
            first = _find_reading_before(series.t_ns, from_ns)
            trimmed[times] = first, series.t_ns[first:]
        first, t_ns = trimmed[times]
        out[key] = Series(t_ns, series.values[first:], series.is_counter)
    return out


def _concat_samples(before: Samples, after: Samples) -> Samples:
    """Concatenate two tables with a `t_ns`; where they overlap the later one is taken."""
    if not after.t_ns.size:
        return before
    end = int(before.t_ns.searchsorted(after.t_ns[0]))
    if end == 0:
        return after
    return _map_columns(lambda a, b: np.concatenate([a[:end], b]), after, before)


def _concat_spans(before: Spans, after: Spans) -> Spans:
    shared = after.sequence[after.start_ns <= before.start_ns[-1]]  # later spans cannot be in both
    if shared.size:
        shared = np.sort(shared)
        row = np.minimum(shared.searchsorted(before.sequence), shared.size - 1)
        is_missing = shared[row] != before.sequence
        if not is_missing.any():
            return after
        before = _select_spans(before, is_missing)
    start = np.concatenate([before.start_ns, after.start_ns])
    if (start[1:] >= start[:-1]).all():
        return _map_columns(lambda a, b: np.concatenate([a, b]), after, before)
    order = np.argsort(start, kind="stable")
    return _map_columns(lambda a, b: np.concatenate([a, b])[order], after, before)


def _is_active_after(process: Process, from_ns: int) -> bool:
    """Return False for a process that had ended by then, so that it is not kept forever."""
    ends = [int(t.end_ns.max()) for t in process.spans.values() if t.start_ns.size]
    ends += [int(thread.t_ns[-1]) for thread in process.threads.values() if thread.t_ns.size]
    return max(ends, default=from_ns) >= from_ns


def _trim_process(process: Process, from_ns: int) -> Process:
    spans = {
        kind: table if kind in _PERSISTENT_KINDS else _trim_spans(table, from_ns)
        for kind, table in process.spans.items()
    }
    spans |= _trim_device_waits(process, from_ns)
    saves = process.spans.get(layout.CHECKPOINT)
    if saves is not None:  # the time from one save to the next may belong to a checkpoint
        spans[layout.CHECKPOINT] = _trim_spans_to_previous(saves, from_ns)
    threads = {tid: _trim_samples(thread, from_ns) for tid, thread in process.threads.items()}
    io = None if process.io is None else _trim_samples(process.io, from_ns)
    stacks = (
        None
        if process.stacks is None
        else _select_spans(process.stacks, process.stacks.end_ns > from_ns)
    )
    if stacks is not None and not stacks.start_ns.size:
        stacks = None
    return replace(process, spans=_drop_empty(spans), threads=threads, io=io, stacks=stacks)


def _drop_empty(spans: Mapping[int, SpanTable]) -> dict[int, SpanTable]:
    return {kind: table for kind, table in spans.items() if table.start_ns.size}


def _trim_spans(table: SpanTable, from_ns: int) -> SpanTable:
    return _select_spans(table, table.end_ns > from_ns)


def _trim_spans_to_previous(table: SpanTable, from_ns: int) -> SpanTable:
    keep = table.end_ns > from_ns
    before = np.flatnonzero(~keep)
    if before.size:
        keep[before[-1]] = True
    return _select_spans(table, keep)


def _trim_device_waits(process: Process, from_ns: int) -> dict[int, SpanTable]:
    """Keep measured waits, and operations whose device may wait longer than their host."""
    measured = process.get_spans(ExposedCollectiveSpans)
    if measured is None:
        return {}
    kind = layout.EXPOSED_COLLECTIVE
    unfinished = select_unfinished(measured, from_ns)
    spans = {kind: _select_spans(process.spans[kind], unfinished)}
    operations = process.spans.get(layout.COLLECTIVE)
    if operations is not None:
        pending = measured.measured_sequence[unfinished]
        keep = (operations.end_ns > from_ns) | np.isin(operations.sequence, pending)
        spans[layout.COLLECTIVE] = _select_spans(operations, keep)
    return spans


def _select_spans(table: Spans, keep: NDArray[np.bool_]) -> Spans:
    return table if keep.all() else table.select(keep)


def _trim_samples(table: Samples, from_ns: int) -> Samples:
    first = _find_reading_before(table.t_ns, from_ns)
    return table if first == 0 else _map_columns(lambda column, _: column[first:], table, table)


def _find_reading_before(t_ns: Int, from_ns: int) -> int:
    """Find the row of the last reading up to an instant; 0 if there is none."""
    return max(0, int(t_ns.searchsorted(from_ns, "right")) - 1)


def _map_columns(function: Callable[[Int, Int], Int], table: Table, before: Table) -> Table:
    """Return a table of the same kind, its array columns replaced by `function(before, table)`."""
    columns = [
        function(getattr(before, name), column) if isinstance(column, np.ndarray) else column
        for name in type(table).__match_args__
        for column in (getattr(table, name),)
    ]
    return type(table)(*columns)
