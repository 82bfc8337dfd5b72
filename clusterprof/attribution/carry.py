"""The end of one chunk, kept for the next: what has not been settled yet is put in front of it.

    chunk k        ......|--- step still running
    chunk k + 1          |--- ... step ends ......
    glued        |- kept -|----- chunk k + 1 -----|

What stands in both (the timeline reaches back where intervals need it) is taken once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from clusterprof.probe import layout
from clusterprof.timeline.device_waits import still_needed
from clusterprof.timeline.model import Chunk, Process, Series, SpanTable, ThreadTable

# Marks of an instant that say something about all the time after it.
_LASTING = (layout.LOADER_START, layout.WORKER_START, layout.HOOK_NOTE)


def tail(chunk: Chunk, from_ns: int) -> Chunk:
    """Return what of a chunk touches the time from `from_ns` on, the reading before it included."""
    return replace(
        chunk,
        series={key: _series_from(one, from_ns) for key, one in chunk.series.items()},
        processes={
            pid: _process_from(one, from_ns)
            for pid, one in chunk.processes.items()
            if _touches(one, from_ns)
        },
        events=tuple(event for event in chunk.events if event.t_ns >= from_ns),
    )


def glue(kept: Chunk | None, chunk: Chunk) -> Chunk:
    """Return the chunk with what was kept of the one before in front of it."""
    if kept is None:
        return chunk
    series = dict(kept.series)
    for key, one in chunk.series.items():
        series[key] = _joined(kept.series[key], one) if key in kept.series else one
    processes = dict(kept.processes)
    for pid, process in chunk.processes.items():
        before = kept.processes.get(pid)
        same = before is not None and before.started_ticks == process.started_ticks
        processes[pid] = _glued(before, process) if same and before is not None else process
    old = [event for event in kept.events if event not in chunk.events]
    return replace(
        chunk,
        start_ns=min(kept.start_ns, chunk.start_ns),
        first=kept.first,
        series=series,
        processes=processes,
        events=(*old, *chunk.events),
    )


def _glued(before: Process, process: Process) -> Process:
    spans: dict[int, SpanTable] = dict(before.spans)
    for kind, table in process.spans.items():
        spans[kind] = _joined_spans(spans[kind], table) if kind in spans else table
    threads: dict[int, ThreadTable] = dict(before.threads)
    for tid, thread in process.threads.items():
        threads[tid] = _joined(threads[tid], thread) if tid in threads else thread
    io = process.io if before.io is None else before.io
    if before.io is not None and process.io is not None:
        io = _joined(before.io, process.io)
    registration = process.registration or before.registration
    return replace(process, registration=registration, spans=spans, threads=threads, io=io)


def _joined(before: Any, after: Any) -> Any:
    """Two tables of samples with a `t_ns`; where they overlap the later table is taken."""
    if not after.t_ns.size:
        return before
    end = int(np.searchsorted(before.t_ns, after.t_ns[0], side="left"))
    if end == 0:
        return after
    return _columns(
        after, lambda name: np.concatenate([getattr(before, name)[:end], getattr(after, name)])
    )


def _joined_spans(before: SpanTable, after: SpanTable) -> SpanTable:
    both = after.sequence[after.start_ns <= before.start_ns[-1]]  # the rest cannot be the same
    new = ~np.isin(before.sequence, both)
    if not new.any():
        return after
    start = np.concatenate([before.start_ns[new], after.start_ns])
    order = np.argsort(start, kind="stable")
    return _columns(
        after,
        lambda name: np.concatenate([getattr(before, name)[new], getattr(after, name)])[order],
    )


def _series_from(series: Series, from_ns: int) -> Series:
    return _from_row(series, from_ns)  # type: ignore[no-any-return]


def _touches(process: Process, from_ns: int) -> bool:
    """False for a process that had ended by then, so that the dead are not carried for ever."""
    ends = [int(t.end_ns.max()) for t in process.spans.values() if t.start_ns.size]
    ends += [int(thread.t_ns[-1]) for thread in process.threads.values() if thread.t_ns.size]
    return max(ends, default=from_ns) >= from_ns


def _process_from(process: Process, from_ns: int) -> Process:
    spans = {
        kind: table if kind in _LASTING else _spans_from(table, from_ns)
        for kind, table in process.spans.items()
    }
    spans |= _waits_from(process, from_ns)
    saves = process.spans.get(layout.CHECKPOINT)
    if saves is not None:  # the time from one save to the next may be a checkpoint's too
        spans[layout.CHECKPOINT] = _with_the_last_before(saves, from_ns)
    threads = {tid: _from_row(one, from_ns) for tid, one in process.threads.items()}
    io = None if process.io is None else _from_row(process.io, from_ns)
    return replace(process, spans=_some(spans), threads=threads, io=io)


def _some(spans: Mapping[int, SpanTable]) -> dict[int, SpanTable]:
    return {kind: table for kind, table in spans.items() if table.start_ns.size}


def _spans_from(table: SpanTable, from_ns: int) -> SpanTable:
    return _rows(table, table.end_ns > from_ns)


def _with_the_last_before(table: SpanTable, from_ns: int) -> SpanTable:
    keep = table.end_ns > from_ns
    before = np.flatnonzero(~keep)
    if before.size:
        keep[before[-1]] = True
    return _rows(table, keep)


def _waits_from(process: Process, from_ns: int) -> dict[int, SpanTable]:
    """Operations whose device may stand still for longer than their host, and how long it does."""
    measured = process.spans.get(layout.EXPOSED_COLLECTIVE)
    if measured is None:
        return {}
    measured = _rows(measured, still_needed(measured, from_ns))
    spans = {layout.EXPOSED_COLLECTIVE: measured}
    operations = process.spans.get(layout.COLLECTIVE)
    if operations is not None:
        keep = (operations.end_ns > from_ns) | np.isin(operations.sequence, measured.a)
        spans[layout.COLLECTIVE] = _rows(operations, keep)
    return spans


def _rows(table: SpanTable, keep: Any) -> SpanTable:
    return table if keep.all() else _columns(table, lambda name: getattr(table, name)[keep])  # type: ignore[no-any-return]


def _from_row(table: Any, from_ns: int) -> Any:
    first = max(0, int(np.searchsorted(table.t_ns, from_ns, side="right")) - 1)
    return table if first == 0 else _columns(table, lambda name: getattr(table, name)[first:])


def _columns(like: Any, column: Any) -> Any:
    """A table of the same kind with every array column made anew."""
    changed = {
        one.name: column(one.name)
        for one in fields(like)
        if isinstance(getattr(like, one.name), np.ndarray)
    }
    return replace(like, **changed)
