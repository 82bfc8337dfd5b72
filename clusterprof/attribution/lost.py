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

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from clusterprof.attribution.device import Windows, busy_windows, within
from clusterprof.attribution.draining import at_the_end, filled
from clusterprof.attribution.exposed import exposed, is_measured
from clusterprof.attribution.filling import Sums, filling
from clusterprof.attribution.painting import FILL_ORDER, Painted, fill, paint, steps_of
from clusterprof.attribution.regions import RankState, Region, regions
from clusterprof.attribution.spinning import NOTHING_SEEN, Activity, spinning
from clusterprof.attribution.window import WHOLE, Window, inside, noted
from clusterprof.probe import layout
from clusterprof.timeline.identity import place_of
from clusterprof.timeline.intervals import EMPTY
from clusterprof.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    PHASE_GC,
    PHASE_H2D,
    PHASE_NONE,
    PHASE_PERHAPS,
    PHASE_SPINNING,
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
# Where a device that was seen to spin is taken to have done so: the host has given it a collective.
_SPIN_ORDER = (
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_NONE,
    PHASE_H2D,
    PHASE_GC,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    PHASE_CHECKPOINT,
    PHASE_STARTUP,
)


NO_PIECES = Lost(*(np.zeros(0, np.int64) for _ in range(6)))

STRETCH_NS = 7_200_000_000_000
"""A longer stretch (a step of hours) is judged in parts: times 2**20 it would not be an int64."""


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
    fill: Sums = field(default_factory=dict)
    """How the device was filled while it was busy (`attribution.filling`)."""
    windows: tuple[Int, Int, Int] | None = None
    """Start, length and idle time of each window between two samples; None without a device."""
    not_asked_ns: int = 0
    """Time that was left out beside the region (`attribution.window`)."""


def lost_pieces(
    rank: Rank, state: RankState, last: bool = False, window: Window = WHOLE
) -> tuple[tuple[tuple[Region, Lost, Account], ...], RankState]:
    """Return the stretches that can be settled now, each with its pieces, and the next state.

    Time before `begun_ns` and after the last `ended_ns` is outside the steps and has no pieces.
    `last` settles everything up to the end of the last step or wait. Of what lies outside `window`
    there are no pieces either.
    """
    ready, after = regions(rank, state, last)
    after = noted(rank, after, window)
    found, activity = [], state.activity
    for whole in (part for region in ready for part in _parts(region)):
        region = inside(rank, whole, after, window)
        left_ns = whole.end_ns - whole.start_ns - (region.end_ns - region.start_ns)
        if region.end_ns == region.start_ns:
            found.append((region, NO_PIECES, Account(0, 0, 0, 0, not_asked_ns=left_ns)))
            continue
        lost, account, activity = pieces(rank, region, activity)
        found.append((region, lost, replace(account, not_asked_ns=left_ns)))
    return tuple(found), replace(after, activity=activity)


def _parts(region: Region) -> Iterator[Region]:
    """A stretch in parts whose time, in shares of ns, is well inside int64."""
    for start_ns in range(region.start_ns, max(region.end_ns, region.start_ns + 1), STRETCH_NS):
        yield replace(region, start_ns=start_ns, end_ns=min(start_ns + STRETCH_NS, region.end_ns))


def pieces(
    rank: Rank, region: Region, activity: Activity = NOTHING_SEEN
) -> tuple[Lost, Account, Activity]:
    """Cut a settled stretch into lost pieces, from the best source there is for it."""
    every = busy_windows(rank) if rank.device else None
    if every is None:
        unmeasured = region.end_ns - region.start_ns if rank.device or not rank.marked else 0
        painted = paint(rank, region.start_ns, region.end_ns, EMPTY)
        if unmeasured:
            return _lost(rank, painted, []), Account(unmeasured, 0, 0, 0), activity
        return *_from_host(rank, painted), activity
    windows = within(every, region.start_ns, region.end_ns)
    spun_ns, perhaps_ns = np.zeros((2, windows.start_ns.size), np.int64)
    if (place_of(rank.main.registration).world_size or 1) > 1:
        spun_ns, perhaps_ns, activity = spinning(rank, windows, activity)
        if layout.EXPOSED_COLLECTIVE in rank.main.spans:  # that says it better
            spun_ns[:] = 0
        if layout.COLLECTIVE in rank.main.spans:
            perhaps_ns[:] = 0
    not_idle = spun_ns, perhaps_ns
    return *_from_samples(rank, region, every, windows, not_idle), activity


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
    rank: Rank, region: Region, every: Windows, windows: Windows, not_idle: tuple[Int, Int]
) -> tuple[Lost, Account]:
    spun_ns, perhaps_ns = not_idle
    painted = paint(rank, region.start_ns, region.end_ns, (windows.start_ns, windows.end_ns))
    inside = painted.measured
    if not inside.all():
        painted = painted.rows(inside.nonzero()[0])
    window, phase, length = painted.window, painted.phase, painted.end_ns - painted.start_ns
    parts: list[tuple[Int, int]] = []
    rest, room, left = windows.idle_ns, length, length
    none = np.zeros(length.size, np.int64)
    stream_pieces, busy_lost, doubtful = 0, none, none  # of the time that samples see as busy
    if is_measured(rank):
        events = exposed(rank, painted)
        known = np.bincount(window, weights=events.idle_ns, minlength=windows.start_ns.size)
        rest = np.maximum(windows.idle_ns - known, 0).astype(np.int64)
        room, left = np.where(events.measured, 0, length), length - events.lost_ns
        stream_pieces = int(np.count_nonzero(events.measured))
        parts.append((events.lost_ns, SOURCE_STREAM_EVENTS))
        busy_lost = np.maximum(events.lost_ns - events.idle_ns, 0)
    idle = filled(rank, painted, every, windows, room, rest)
    lost = _lost(rank, painted, [*parts, (idle, SOURCE_DEVICE_SAMPLES)])
    tails = []
    if spun_ns.any():
        spun = fill(window, phase, left - idle, spun_ns, _SPIN_ORDER)
        left, busy_lost = left - spun, busy_lost + spun
        tails.append((spun, np.where(phase == PHASE_COLLECTIVE, phase, PHASE_SPINNING)))
    if perhaps_ns.any():
        spun = fill(window, phase, left - idle, perhaps_ns, _SPIN_ORDER)
        left, doubtful = left - spun, spun
        tails.append((spun, np.full(spun.size, PHASE_PERHAPS, np.int64)))
    if windows.slowed_ns.any():
        slow = fill(window, phase, left - idle, windows.slowed_ns, FILL_ORDER[::-1])
        busy_lost = busy_lost + slow
        tails.append((slow, np.full(slow.size, PHASE_THROTTLED, np.int64)))
    if tails:
        lost = _with_tails(rank, lost, painted, tails)
    lost = at_the_end(lost)
    measured_ns = int((windows.end_ns - windows.start_ns).sum())
    unmeasured = region.end_ns - region.start_ns - measured_ns
    not_work = (_by_window(windows, window, one) for one in (busy_lost, doubtful))
    fill_ = filling(rank, every, windows, *not_work)
    idle_ns = int(windows.idle_ns.sum())
    each = (windows.start_ns, windows.end_ns - windows.start_ns, windows.idle_ns)
    return lost, Account(unmeasured, measured_ns, idle_ns, stream_pieces, fill_, each)


def _by_window(windows: Windows, window: Int, ns: Int) -> Int:
    """Add amounts of rows up by the window in which each lies."""
    return np.bincount(window, ns, minlength=windows.start_ns.size).astype(np.int64)


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


def _with_tails(rank: Rank, lost: Lost, painted: Painted, tails: list[tuple[Int, Int]]) -> Lost:
    """Give time lost on a device at work the tail of its row, so that pieces stay disjoint.

    `tails`: ns and phase of each row, those of the first at the very end.
    """
    end = painted.end_ns
    parts = []
    for ns, phase in tails:
        some = np.flatnonzero(ns > 0)
        rows = painted.rows(some)
        cut = end[some] - ns[some]
        step = steps_of(rank, rows.start_ns, rows.begun)
        parts.append((cut, end[some], ns[some], phase[some], step))
        end = end - ns
    at = np.searchsorted(painted.start_ns, lost.start_ns)
    parts.append((lost.start_ns, end[at], lost.lost_ns, lost.phase, lost.step))
    start, end, ns, phase, step = (np.concatenate(columns) for columns in zip(*parts))
    source = np.full(start.size, SOURCE_DEVICE_SAMPLES, np.int64)
    source[start.size - lost.source.size :] = lost.source
    order = np.argsort(start, kind="stable")
    return Lost(*(column[order] for column in (start, end, ns, phase, source, step)))
