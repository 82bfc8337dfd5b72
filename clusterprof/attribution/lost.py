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

from dataclasses import dataclass

import numpy as np

from clusterprof.attribution.device import Windows, busy_windows, within
from clusterprof.attribution.draining import at_the_end, filled
from clusterprof.attribution.exposed import exposed, is_measured
from clusterprof.attribution.painting import FILL_ORDER, Painted, fill, paint, steps_of
from clusterprof.attribution.regions import RankState, Region, regions
from clusterprof.timeline.intervals import EMPTY
from clusterprof.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COLLECTIVE,
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
)

# Without a device these waits of the host count in full, as an upper bound.
_HOST_PHASES = (
    PHASE_STARTUP,
    PHASE_CHECKPOINT,
    PHASE_H2D,
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_COLLECTIVE,
)


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


def pieces(rank: Rank, region: Region) -> tuple[Lost, Account]:
    """Cut a settled stretch into lost pieces, from the best source there is for it."""
    every = busy_windows(rank) if rank.device else None
    if every is None:
        unmeasured = region.end_ns - region.start_ns if rank.device or not rank.marked else 0
        painted = paint(rank, region.start_ns, region.end_ns, EMPTY)
        if unmeasured:
            return _lost(rank, painted, []), Account(unmeasured, 0, 0, 0)
        return _from_host(rank, painted)
    windows = within(every, region.start_ns, region.end_ns)
    return _from_samples(rank, region, every, windows)


def _from_host(rank: Rank, painted: Painted) -> tuple[Lost, Account]:
    """Stream events where a wait has them, else the wait in full."""
    events = exposed(rank, painted)
    in_full = np.isin(painted.phase, _HOST_PHASES) & ~events.measured
    length = painted.end_ns - painted.start_ns
    parts = [
        (events.lost_ns, SOURCE_STREAM_EVENTS),
        (np.where(in_full, length, 0), SOURCE_HOST_SPANS),
    ]
    lost = at_the_end(_lost(rank, painted, parts))
    return lost, Account(0, 0, 0, int(np.count_nonzero(events.measured)))


def _from_samples(
    rank: Rank, region: Region, every: Windows, windows: Windows
) -> tuple[Lost, Account]:
    painted = paint(rank, region.start_ns, region.end_ns, (windows.start_ns, windows.end_ns))
    inside = painted.measured
    if not inside.all():
        painted = painted.rows(inside.nonzero()[0])
    window, phase, length = painted.window, painted.phase, painted.end_ns - painted.start_ns
    parts: list[tuple[Int, int]] = []
    rest, room, left = windows.idle_ns, length, length
    stream_pieces = 0
    if is_measured(rank):
        events = exposed(rank, painted)
        known = np.bincount(window, weights=events.idle_ns, minlength=windows.start_ns.size)
        rest = np.maximum(windows.idle_ns - known, 0).astype(np.int64)
        room, left = np.where(events.measured, 0, length), length - events.lost_ns
        stream_pieces = int(np.count_nonzero(events.measured))
        parts.append((events.lost_ns, SOURCE_STREAM_EVENTS))
    idle = filled(rank, painted, every, windows, room, rest)
    lost = _lost(rank, painted, [*parts, (idle, SOURCE_DEVICE_SAMPLES)])
    if windows.slowed_ns.any():
        slow = fill(window, phase, left - idle, windows.slowed_ns, FILL_ORDER[::-1])
        lost = _with_slowed(rank, lost, painted, slow)
    lost = at_the_end(lost)
    measured_ns = int((windows.end_ns - windows.start_ns).sum())
    unmeasured = region.end_ns - region.start_ns - measured_ns
    return lost, Account(unmeasured, measured_ns, int(windows.idle_ns.sum()), stream_pieces)


def _lost(rank: Rank, painted: Painted, parts: list[tuple[Int, int]]) -> Lost:
    """Rows with a loss; of two parts of one row the first that is not zero counts."""
    amount = parts[0][0] if parts else np.zeros(painted.start_ns.size, np.int64)
    for part, _ in parts[1:]:
        amount = np.where(amount == 0, part, amount)
    (some,) = (amount > 0).nonzero()
    source = np.full(some.size, parts[0][1] if len(parts) == 1 else 0, np.int64)
    for part, code in reversed(parts) if len(parts) > 1 else ():
        source[part[some] > 0] = code
    kept = painted.rows(some)
    steps = steps_of(rank, kept.start_ns, kept.begun)
    return Lost(kept.start_ns, kept.end_ns, amount[some], kept.phase, source, steps)


def _with_slowed(rank: Rank, lost: Lost, painted: Painted, slow_ns: Int) -> Lost:
    """Give slowed time the tail of its row, so that pieces stay disjoint."""
    some = np.flatnonzero(slow_ns > 0)
    slowed = painted.rows(some)
    cut = slowed.end_ns - slow_ns[some]
    ends = dict(zip(slowed.start_ns.tolist(), cut.tolist()))
    end = np.array(
        [ends.get(s, e) for s, e in zip(lost.start_ns.tolist(), lost.end_ns.tolist())], np.int64
    )
    count = cut.size
    columns = (
        (lost.start_ns, cut),
        (end, slowed.end_ns),
        (lost.lost_ns, slow_ns[some]),
        (lost.phase, np.full(count, PHASE_THROTTLED, np.int64)),
        (lost.source, np.full(count, SOURCE_DEVICE_SAMPLES, np.int64)),
        (lost.step, steps_of(rank, slowed.start_ns, slowed.begun)),
    )
    joined = [np.concatenate(pair) for pair in columns]
    order = np.argsort(joined[0], kind="stable")
    return Lost(*(column[order] for column in joined))
