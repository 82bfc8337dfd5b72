"""Which stretches of a rank can be judged now, when its recording arrives in chunks.

Time can be judged only when every span and sample that covers it has ended. A stretch therefore
ends at a sample before the last step end, which is an edge of pieces anyway: reading in one chunk
or in many cuts the same pieces. What lies after the last step is tentative until another one ends.

    steps      |----|----|----|-- still running
    samples    .  .  .  .  .  .  .
    settled    ............|              the rest is judged with the next chunk
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from clusterprof.attribution.device import LATE_NS, busy_windows, sample_times
from clusterprof.attribution.spinning import NOTHING_SEEN, Activity
from clusterprof.probe import layout
from clusterprof.timeline.model import Rank, SpanTable

# A stretch that is open for longer is settled without the end of the span that holds it open.
OPEN_AT_MOST_NS = 300_000_000_000
# So far a wait is followed to see whether its device stood still to its end.
AHEAD_NS = 1_000_000_000
# By then a device has passed the events of a collective operation, or the job has come to a halt.
MEASURE_LATE_NS = 30_000_000_000


@dataclass(frozen=True, slots=True)
class RankState:
    """What is carried of a rank from chunk to chunk. All None before anything was seen."""

    settled_ns: int | None = None
    """Everything before is settled."""
    begun_ns: int | None = None
    """Start of the first wait or step (without spans: of the device's first work), as far as it
    could still be looked into: time that was settled without knowing of it lies before."""
    told_ns: int | None = None
    """The same start, however late it was told: a first step may last for longer than anything
    is kept open."""
    ended_ns: int | None = None
    """End of the last step or wait so far (without spans: of the device's last work)."""
    first_ns: int | None = None
    last_ns: int | None = None
    """First and last record of the rank."""
    activity: Activity = NOTHING_SEEN
    """Of its device, as far as it is settled."""
    since_ns: int | None = None
    until_ns: int | None = None
    """Bounds of what was asked for (`attribution.window`); None = none."""


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch that can be judged now."""

    start_ns: int
    end_ns: int
    tentative: bool
    """True when no step has ended after it yet: inside steps only if another one does."""


def regions(rank: Rank, state: RankState, last: bool) -> tuple[list[Region], RankState]:
    """Return which stretches are settled now; one that lies beyond the last step is tentative."""
    first_ns, last_ns = _seen(rank, state)
    begun_ns, ended_ns, closed_ns = (_steps if rank.marked else _work)(rank, last)
    told_ns = begun_ns
    if state.begun_ns is not None:
        begun_ns, told_ns = state.begun_ns, state.told_ns
    elif begun_ns is not None and state.settled_ns is not None:
        begun_ns = max(begun_ns, state.settled_ns)
    ended_ns = _later(ended_ns, state.ended_ns)
    until_ns = _settled_until(rank, closed_ns, ended_ns, last)
    if state.settled_ns is not None:
        until_ns = max(until_ns, state.settled_ns)
    next_state = replace(
        state,
        settled_ns=until_ns,
        begun_ns=begun_ns,
        told_ns=told_ns,
        ended_ns=ended_ns,
        first_ns=first_ns if told_ns is None else min(first_ns, told_ns),
        last_ns=last_ns if ended_ns is None else max(last_ns, ended_ns),
    )
    if begun_ns is None or ended_ns is None:
        return [], next_state
    begin = begun_ns if state.settled_ns is None else max(begun_ns, state.settled_ns)
    edge = until_ns if last else _sample_at_or_before(rank, min(ended_ns, until_ns))
    cuts = [begin, max(begin, min(edge, until_ns)), max(begin, until_ns)]
    found = [Region(cuts[0], cuts[1], False), Region(cuts[1], cuts[2], True)]
    return [region for region in found if region.end_ns > region.start_ns], next_state


def _settled_until(rank: Rank, closed_ns: int | None, ended_ns: int | None, last: bool) -> int:
    """The time up to which nothing can change any more."""
    end_ns = rank.chunk.end_ns
    if last:
        return ended_ns if ended_ns is not None else end_ns
    overdue_ns = _sample_at_or_before(rank, end_ns - OPEN_AT_MOST_NS)
    if closed_ns is None:
        return overdue_ns
    times = sample_times(rank)
    if times.size:
        closed_ns = min(closed_ns, int(times[-1]) - LATE_NS - AHEAD_NS)
    return max(_sample_at_or_before(rank, closed_ns), overdue_ns)


def _sample_at_or_before(rank: Rank, t_ns: int) -> int:
    times = sample_times(rank)
    row = int(times.searchsorted(t_ns, "right")) - 1
    return int(times[row]) if row >= 0 else t_ns


def _later(a: int | None, b: int | None) -> int | None:
    known = [t for t in (a, b) if t is not None]
    return max(known) if known else None


def _seen(rank: Rank, state: RankState) -> tuple[int, int]:
    """First and last record of the process itself."""
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


def _steps(rank: Rank, last: bool) -> tuple[int | None, int | None, int | None]:
    """Begin of the first wait or step, end of the last step (`last`: or wait), and up to where
    every span that touches the time before it has ended."""
    steps, waits = (table_of(rank, kind) for kind in (layout.STEP, layout.DATA_WAIT))
    begun = [int(t.start_ns[0]) for t in (steps, waits) if t is not None]
    ended = [int(t.end_ns.max()) for t in ((steps, waits) if last else (steps,)) if t is not None]
    closed_ns = ended[0] if steps is not None else None
    if closed_ns is not None and steps is not None:
        closed_ns = _measured_until(rank, steps, closed_ns)
    return min(begun, default=None), max(ended, default=None), closed_ns


def _measured_until(rank: Rank, steps: SpanTable, closed_ns: int) -> int | None:
    """The measure of a wait arrives some steps after it; until then the wait stays open.

    Measures arrive in the order of what they measure. Of operations with other ranks not every one
    is measured, so nobody waits for the next for longer than it can take.
    """
    waits, peers = (table_of(rank, k) for k in (layout.EXPOSED, layout.EXPOSED_COLLECTIVE))
    if waits is None and peers is None:
        return closed_ns
    until_ns = max(int(table.end_ns.max()) for table in (waits, peers) if table is not None)
    if waits is None:
        until_ns = max(until_ns, closed_ns - MEASURE_LATE_NS)
    measured = steps.end_ns[steps.end_ns <= until_ns]
    return int(measured.max()) if measured.size else None


def table_of(rank: Rank, kind: int) -> SpanTable | None:
    table = rank.main.spans.get(kind)
    return table if table is not None and table.start_ns.size else None


def _work(rank: Rank, last: bool) -> tuple[int | None, int | None, int | None]:
    """The same without spans: the device's first and last window with work.

    While the process was there: one that was begun anew has the device of the one before.
    """
    windows = busy_windows(rank)
    if windows is None:
        return None, None, None
    closed_ns = int(sample_times(rank)[-1])
    final = windows.end_ns <= (closed_ns if last else closed_ns - LATE_NS)
    thread = rank.main.threads.get(rank.pid)
    if thread is not None and thread.t_ns.size:
        final &= (windows.end_ns > thread.t_ns[0]) & (windows.start_ns < thread.t_ns[-1])
    busy = np.flatnonzero((windows.end_ns - windows.start_ns > windows.idle_ns) & final)
    if not busy.size:
        return None, None, closed_ns
    return int(windows.start_ns[busy[0]]), int(windows.end_ns[busy[-1]]), closed_ns
