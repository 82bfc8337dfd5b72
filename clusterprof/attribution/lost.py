"""Where device time was lost: per rank and stretch, pieces that are disjoint and never too long.

A recording arrives in chunks, and time can be judged only when every span and sample that covers
it has ended. So each rank carries a state, `regions` says which stretches are settled now, and
`pieces` cuts a settled stretch into lost pieces. Stretches end at sample times and step ends,
which are edges anyway: reading in one chunk or in many gives the same pieces.

    device samples   |----------|----------|     idle 30 and 0 of 100
    host             wait 40 | step 60 ...
    pieces           [0, 40) wait, 30 lost       never longer than the span, none for hidden waits
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from clusterprof.attribution.device import LATE_NS, Windows, busy_windows, sample_times, within
from clusterprof.attribution.painting import FILL_ORDER, Painted, fill, paint
from clusterprof.probe import layout
from clusterprof.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_H2D,
    PHASE_STARTUP,
    PHASE_THROTTLED,
    SOURCE_DEVICE_SAMPLES,
    SOURCE_HOST_SPANS,
    SOURCE_STREAM_EVENTS,
    Int,
    Lost,
    Rank,
    SpanTable,
)

# A stretch that is open for longer is settled without the end of the span that holds it open.
OPEN_AT_MOST_NS = 300_000_000_000
# Without a device these waits of the host count in full, as an upper bound.
_HOST_PHASES = (PHASE_STARTUP, PHASE_CHECKPOINT, PHASE_H2D, PHASE_DATA_WAIT, PHASE_GC)


@dataclass(frozen=True, slots=True)
class RankState:
    """What is carried of a rank from chunk to chunk. All None before anything was seen."""

    settled_ns: int | None = None
    """Everything before is settled."""
    begun_ns: int | None = None
    """Start of the first wait or step (without spans: of the device's first work)."""
    ended_ns: int | None = None
    """End of the last step or wait so far (without spans: of the device's last work)."""
    first_ns: int | None = None
    last_ns: int | None = None
    """First and last record of the rank."""


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch that can be judged now."""

    start_ns: int
    end_ns: int
    tentative: bool
    """True when no step has ended after it yet: inside steps only if another one does."""


@dataclass(frozen=True, slots=True)
class Account:
    """Totals of one region: in_step_ns = its length - unmeasured_ns."""

    unmeasured_ns: int
    measured_ns: int
    """Time with device samples."""
    idle_ns: int
    """Of that, time without work on the device."""
    stream_pieces: int
    """Pieces whose loss was measured by stream events."""


def lost_pieces(
    rank: Rank, state: RankState, last: bool = False
) -> tuple[tuple[tuple[Region, Lost, Account], ...], RankState]:
    """Return the stretches that can be settled now, each with its pieces, and the next state.

    Time before `begun_ns` and after the last `ended_ns` is outside the steps and has no pieces.
    `last` settles everything up to the end of the last step or wait.
    """
    ready, after = regions(rank, state, last)
    return tuple((region, *pieces(rank, region)) for region in ready), after


def regions(rank: Rank, state: RankState, last: bool) -> tuple[list[Region], RankState]:
    """Return which stretches are settled now; one that lies beyond the last step is tentative."""
    first_ns, last_ns = _seen(rank, state)
    begun_ns, ended_ns, closed_ns = (_steps if rank.marked else _work)(rank, last)
    if state.begun_ns is not None:
        begun_ns = state.begun_ns
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
        ended_ns=ended_ns,
        first_ns=first_ns if begun_ns is None else min(first_ns, begun_ns),
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
        closed_ns = min(closed_ns, int(times[-1]) - LATE_NS)
    return max(_sample_at_or_before(rank, closed_ns), overdue_ns)


def _sample_at_or_before(rank: Rank, t_ns: int) -> int:
    times = sample_times(rank)
    row = int(np.searchsorted(times, t_ns, side="right")) - 1
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
            times += [int(table.start_ns.min()), int(table.end_ns.max())]
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
    steps, waits = (_table(rank, kind) for kind in (layout.STEP, layout.DATA_WAIT))
    begun = [int(t.start_ns.min()) for t in (steps, waits) if t is not None]
    ended = [int(t.end_ns.max()) for t in ((steps, waits) if last else (steps,)) if t is not None]
    closed_ns = ended[0] if steps is not None else None
    exposed = _table(rank, layout.EXPOSED)
    if closed_ns is not None and exposed is not None and steps is not None:
        # The measure of a wait arrives some steps after it; until then the wait stays open.
        measured = steps.end_ns[steps.end_ns <= int(exposed.end_ns.max())]
        closed_ns = int(measured.max()) if measured.size else None
    return min(begun, default=None), max(ended, default=None), closed_ns


def _table(rank: Rank, kind: int) -> SpanTable | None:
    table = rank.main.spans.get(kind)
    return table if table is not None and table.start_ns.size else None


def _work(rank: Rank, last: bool) -> tuple[int | None, int | None, int | None]:
    """The same without spans: the device's first and last window with work."""
    windows = busy_windows(rank)
    if windows is None:
        return None, None, None
    closed_ns = int(sample_times(rank)[-1])
    final = windows.end_ns <= (closed_ns if last else closed_ns - LATE_NS)
    busy = np.flatnonzero((windows.end_ns - windows.start_ns > windows.idle_ns) & final)
    if not busy.size:
        return None, None, closed_ns
    return int(windows.start_ns[busy[0]]), int(windows.end_ns[busy[-1]]), closed_ns


def pieces(rank: Rank, region: Region) -> tuple[Lost, Account]:
    """Cut a settled stretch into lost pieces, from the best source there is for it."""
    every = busy_windows(rank) if rank.device else None
    if every is None:
        unmeasured = region.end_ns - region.start_ns if rank.device or not rank.marked else 0
        painted = paint(rank, region.start_ns, region.end_ns, np.zeros(0, np.int64))
        if unmeasured:
            return _lost(painted, []), Account(unmeasured, 0, 0, 0)
        return _from_host(rank, painted)
    windows = within(every, region.start_ns, region.end_ns)
    return _from_samples(rank, region, windows)


def _from_host(rank: Rank, painted: Painted) -> tuple[Lost, Account]:
    """Stream events where a wait has them, else the wait in full."""
    exposed_ns, measured = _exposed(rank, painted)
    in_full = np.isin(painted.phase, _HOST_PHASES) & ~measured
    length = painted.end_ns - painted.start_ns
    parts = [
        (exposed_ns, SOURCE_STREAM_EVENTS),
        (np.where(in_full, length, 0), SOURCE_HOST_SPANS),
    ]
    return _lost(painted, parts), Account(0, 0, 0, int(np.count_nonzero(measured)))


def _from_samples(rank: Rank, region: Region, windows: Windows) -> tuple[Lost, Account]:
    cuts = np.concatenate([windows.start_ns, windows.end_ns])
    painted = paint(rank, region.start_ns, region.end_ns, cuts)
    window = np.searchsorted(windows.start_ns, painted.start_ns, side="right") - 1
    some = windows.start_ns.size > 0
    held = (window >= 0) & (painted.start_ns < windows.end_ns[np.maximum(window, 0)]) & some
    if not held.all():
        painted, window = _rows(painted, held), window[held]
    length = painted.end_ns - painted.start_ns
    exposed_ns, measured = _exposed(rank, painted)
    known = np.bincount(window, weights=exposed_ns, minlength=windows.start_ns.size)
    rest = np.maximum(windows.idle_ns - known, 0).astype(np.int64)
    room = np.where(measured, 0, length)
    idle = fill(window, painted.phase, room, rest, FILL_ORDER)
    lost = _lost(painted, [(exposed_ns, SOURCE_STREAM_EVENTS), (idle, SOURCE_DEVICE_SAMPLES)])
    if np.any(windows.slowed_ns):
        left = length - exposed_ns - idle
        slow = fill(window, painted.phase, left, windows.slowed_ns, FILL_ORDER[::-1])
        lost = _with_slowed(lost, painted, slow)
    measured_ns = int(np.sum(windows.end_ns - windows.start_ns))
    unmeasured = region.end_ns - region.start_ns - measured_ns
    account = Account(
        unmeasured, measured_ns, int(windows.idle_ns.sum()), int(np.count_nonzero(measured))
    )
    return lost, account


def _exposed(rank: Rank, painted: Painted) -> tuple[Int, np.ndarray]:
    """Exposed device time of each row, and whether the row lies in a wait that was measured.

    A measured amount is spread evenly over its own wait, by rounded running sums, so that a row's
    part does not depend on which other rows are looked at.
    """
    none = np.zeros(painted.start_ns.size, np.int64)
    table = _table(rank, layout.EXPOSED)
    if table is None:
        return none, none.astype(bool)
    order = np.argsort(table.start_ns, kind="stable")
    start, end, amount = table.start_ns[order], table.end_ns[order], table.b[order]
    row = np.maximum(np.searchsorted(start, painted.start_ns, side="right") - 1, 0)
    held = (painted.start_ns >= start[row]) & (painted.end_ns <= end[row])
    length = np.maximum(end - start, 1)[row]
    ratio = np.clip(amount[row], 0, length) / length
    until = np.rint((painted.end_ns - start[row]) * ratio)
    part = until - np.rint((painted.start_ns - start[row]) * ratio)
    part = np.clip(part, 0, painted.end_ns - painted.start_ns)
    return np.where(held, part, 0).astype(np.int64), held


def _rows(painted: Painted, keep: np.ndarray) -> Painted:
    return Painted(
        painted.start_ns[keep], painted.end_ns[keep], painted.phase[keep], painted.step[keep]
    )


def _lost(painted: Painted, parts: list[tuple[Int, int]]) -> Lost:
    """Rows with a loss; of two parts of one row the first that is not zero counts."""
    amount = np.zeros(painted.start_ns.size, np.int64)
    source = np.zeros(painted.start_ns.size, np.int64)
    for part, code in parts:
        source = np.where((amount == 0) & (part > 0), code, source)
        amount = np.where(amount == 0, part, amount)
    some = amount > 0
    kept = _rows(painted, some)
    return Lost(
        kept.start_ns,
        kept.end_ns,
        amount[some].astype(np.int64),
        kept.phase,
        source[some],
        kept.step,
    )


def _with_slowed(lost: Lost, painted: Painted, slow_ns: Int) -> Lost:
    """Give slowed time the tail of its row, so that pieces stay disjoint."""
    some = slow_ns > 0
    cut = painted.end_ns[some] - slow_ns[some]
    ends = dict(zip(painted.start_ns[some].tolist(), cut.tolist()))
    end = np.array(
        [ends.get(s, e) for s, e in zip(lost.start_ns.tolist(), lost.end_ns.tolist())], np.int64
    )
    count = cut.size
    columns = (
        (lost.start_ns, cut),
        (end, painted.end_ns[some]),
        (lost.lost_ns, slow_ns[some]),
        (lost.phase, np.full(count, PHASE_THROTTLED, np.int64)),
        (lost.source, np.full(count, SOURCE_DEVICE_SAMPLES, np.int64)),
        (lost.step, painted.step[some]),
    )
    joined = [np.concatenate(pair) for pair in columns]
    order = np.argsort(joined[0], kind="stable")
    return Lost(*(column[order] for column in joined))
