"""Compute the hidden cost of a cause: batch production that overlaps the step before.

A wait for data is the end of a production that began long before. Without a cause its
part of that production disappears, including the hidden part, and the wait is shorter
by as much:

    production of the batch    60 storage + 40 decoding = 100, of which 30 hidden
    wait 70                    42 storage + 28 decoding
    without storage            production 40, wait 10: saves 60 = 42 wait + 18 hidden

Lost time is split as observed (42 and 28); only the savings of a fix include the hidden
part.

It also attributes device synchronizations to the pause that requires them.

Without the pause they disappear: before saving or logging, the host waits until its
device has drained its queue. Then the device waits for the host twice: for the pause
and for the launches after it. The second part is `h2d-sync` and would not exist without
the pause.

It also sums what a rank without peers lost by cause, in time bins of its steps.

No loss of the rank is a wait of another rank. Without a cause it is therefore earlier by what it
lost to the cause and by what is hidden behind other work. The bins show how much that varies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.attribution.taxonomy import CAUSES, FAMILY_CLAIMS, PRECEDENCE
from clusterprof.analysis.detectors.base import select_phases
from clusterprof.analysis.timeline.data_wait.split import (
    find_data_waits,
    list_distinct,
    select_fetches,
)
from clusterprof.analysis.timeline.model import (
    PHASE_BUSY_WAIT,
    PHASE_COLLECTIVE,
    PHASE_DATA_WAIT,
    Float,
    Int,
    LostTime,
    Rank,
)
from clusterprof.analysis.timeline.spans import StepSpans, SyncSpans
from clusterprof.probe import layout

PAUSE_CAUSES = tuple(id_ for id_ in PRECEDENCE if CAUSES[id_].hidden_cost == "pause")
SYNC_CAUSE = "h2d-sync"
_MAX_SYNCS_PER_STEP = 1
"""Device waits of a step that only pauses; a step with more synchronizes for its own
reasons.
"""


def attribute_syncs_to_pauses(
    rank: Rank, lost: LostTime, shares: Mapping[str, Int]
) -> dict[str, Int]:
    """Attribute time lost to device synchronization to the pauses that required it.

    A step counts if it waited for its device once, and the pause lost more there than
    SYNC_CAUSE.
    shares: int64[n] per cause, in 1/SHARE_SCALE.
    Returns pause -> int64[n], ns.
    """
    table = rank.main.spans.get(layout.STEP)
    pauses = [name for name in PAUSE_CAUSES if name in shares and shares[name].any()]
    synced = shares.get(SYNC_CAUSE)
    if synced is None or not synced.any() or not pauses or table is None:
        return {}
    steps, step_of_row = np.unique(lost.step, return_inverse=True)
    synced_ns = np.rint(lost.lost_ns * (synced / SHARE_SCALE))
    paused = np.stack(
        [np.bincount(step_of_row, lost.lost_ns * (shares[name] / SHARE_SCALE)) for name in pauses]
    )
    is_single = (_count_device_waits(rank, steps) <= _MAX_SYNCS_PER_STEP) & (steps >= 0)
    main_pause = np.where(
        is_single & (paused.max(axis=0) > np.bincount(step_of_row, synced_ns)), paused.argmax(0), -1
    )
    out = {
        name: np.where(main_pause[step_of_row] == number, synced_ns, 0).astype(np.int64)
        for number, name in enumerate(pauses)
    }
    return {name: ns for name, ns in out.items() if ns.any()}


def _count_device_waits(rank: Rank, steps: Int) -> Int:
    """Count how often the host waited for its device in each step, outside saves."""
    marked, syncs = rank.main.get_spans(StepSpans), rank.main.get_spans(SyncSpans)
    if marked is None or syncs is None or not syncs.start_ns.size:
        return np.zeros(steps.size, np.int64)
    row = np.searchsorted(marked.start_ns, syncs.start_ns, side="right") - 1
    inside = (row >= 0) & (syncs.start_ns < marked.end_ns[np.maximum(row, 0)])
    save = rank.main.spans.get(layout.CHECKPOINT)
    if save is not None and save.start_ns.size:
        save_row = np.searchsorted(save.start_ns, syncs.start_ns, side="right") - 1
        inside &= (save_row < 0) | (syncs.start_ns >= save.end_ns[np.maximum(save_row, 0)])
    number, count = marked.step[row[inside]], np.maximum(syncs.times[inside], 1)
    order = np.searchsorted(steps, number)
    is_in_step = (order < steps.size) & (steps[np.minimum(order, steps.size - 1)] == number)
    return np.bincount(order[is_in_step], count[is_in_step], steps.size).astype(np.int64)


ALL_CAUSES = "every cause"
"""Name of the column for all causes at once."""
HIDDEN_COLUMNS = (
    *(id_ for id_ in (*PRECEDENCE, *FAMILY_CLAIMS) if CAUSES[id_].hidden_cost),
    ALL_CAUSES,
)
"""Columns of hidden cost: causes that can contribute to a production, and all of them at
once.
"""


BATCH_CAUSES = frozenset(id_ for id_ in HIDDEN_COLUMNS[:-1] if CAUSES[id_].hidden_cost == "batch")
"""The causes that make batches late."""
MAIN_CAUSE_RATIO = 0.5
"""Part of an interval that its main cause claims, or that all causes together claim."""


def compute_hidden_cost(rank: Rank, lost: LostTime, shares: Mapping[str, Int]) -> dict[int, Int]:
    """Compute how much earlier intervals would end without a cause, beyond their lost time.

    shares: int64[n] per cause, in 1/SHARE_SCALE.
    Returns index in HIDDEN_COLUMNS -> int64[n], ns; together with the shares
    no more than the interval.
    """
    candidates = [
        (number, shares[cause]) for number, cause in enumerate(HIDDEN_COLUMNS) if cause in shares
    ]
    candidates = [(number, share) for number, share in candidates if share.any()]
    if not candidates or not rank.marked:
        return {}
    production_ratio = _compute_production_ratio(rank, lost)
    if production_ratio is None:
        production_ratio = np.ones(lost.lost_ns.size)
    claimed = sum(shares.values(), start=np.zeros(lost.lost_ns.size, np.int64))
    claimed_part = claimed / SHARE_SCALE
    # Intervals that disappear with their causes: no waits for data or ranks.
    removable = ~select_phases(lost, PHASE_DATA_WAIT, PHASE_COLLECTIVE, PHASE_BUSY_WAIT)
    removable &= claimed >= MAIN_CAUSE_RATIO * SHARE_SCALE
    divisor = np.where(removable, claimed_part, 1.0)
    syncs = attribute_syncs_to_pauses(rank, lost, shares)
    out: dict[int, Int] = {}
    largest_ns: Float = np.zeros(lost.lost_ns.size)
    for number, share in candidates:
        part = share / SHARE_SCALE
        if HIDDEN_COLUMNS[number] in BATCH_CAUSES:
            removable_part = np.minimum(part * production_ratio, 1.0)
        else:  # the rest of an interval disappears with all its causes; all of it with the main one
            removable_part = np.where(removable & (part >= MAIN_CAUSE_RATIO), 1.0, part / divisor)
        hidden_ns = np.rint(lost.lost_ns * (removable_part - part))
        hidden_ns = np.minimum(
            hidden_ns + syncs.get(HIDDEN_COLUMNS[number], 0), np.rint(lost.lost_ns * (1 - part))
        )
        largest_ns = np.maximum(largest_ns, hidden_ns)
        if hidden_ns.any():
            out[number] = hidden_ns.astype(np.int64)
    # Together no more than the interval: other causes claim most of what one cause removes.
    unclaimed = lost.lost_ns - np.rint(lost.lost_ns * claimed_part)
    largest_ns = np.minimum(largest_ns, unclaimed)
    if largest_ns.any():
        out[HIDDEN_COLUMNS.index(ALL_CAUSES)] = largest_ns.astype(np.int64)
    return out


def _compute_production_ratio(rank: Rank, lost: LostTime) -> Float | None:
    """Return production time of a batch divided by the lost time of its wait: float64[n].

    1 where it is not known, and outside waits; None if it is known nowhere.
    """
    waits = find_data_waits(rank)
    rows = np.flatnonzero(lost.phase == PHASE_DATA_WAIT)
    if not rows.size or not waits.start_ns.size:
        return None
    made_ns = np.zeros(waits.start_ns.size, np.int64)
    for pid in list_distinct(waits.pid):
        process = rank.chunk.processes.get(pid)
        spans = select_fetches(process) if process is not None else None
        if spans is None:
            continue
        waits_of_process = np.flatnonzero(waits.pid == pid)
        row = np.searchsorted(spans.end_ns, waits.end_ns[waits_of_process], side="right") - 1
        clipped_row = np.maximum(row, 0)
        is_producer = (row >= 0) & (spans.end_ns[clipped_row] > waits.start_ns[waits_of_process])
        made_ns[waits_of_process] = np.where(
            is_producer, spans.end_ns[clipped_row] - spans.start_ns[clipped_row], 0
        )
    if not made_ns.any():
        return None
    wait = np.searchsorted(waits.start_ns, lost.start_ns[rows], side="right") - 1
    clipped_row = np.maximum(wait, 0)
    inside = (wait >= 0) & (lost.start_ns[rows] < waits.end_ns[clipped_row])
    lost_ns = np.bincount(clipped_row[inside], lost.lost_ns[rows[inside]], waits.start_ns.size)
    out = np.ones(lost.lost_ns.size)
    times = made_ns[clipped_row] / np.maximum(lost_ns[clipped_row], 1.0)
    out[rows] = np.where(inside, np.maximum(times, 1.0), 1.0)
    return out


class HiddenCostSums:
    """Running sums of hidden cost over segments, readable at given times."""

    def __init__(self) -> None:
        self._sums = np.zeros(len(HIDDEN_COLUMNS), np.int64)

    def add(self, lost: LostTime, amounts: Mapping[int, Int], t_ns: Int) -> tuple[Int, Int]:
        """Add a segment, and return the sums up to given times in it.

        t_ns: int64[m], ns. Returns the columns with any cost so far, int64[k], ascending, and
        their sums, int64[k, m], ns.
        """
        used = self._sums != 0
        used[list(amounts)] = True
        (columns,) = used.nonzero()
        out = np.zeros((columns.size, t_ns.size), np.int64)
        out += self._sums[columns, None]
        if amounts:
            start, length = lost.start_ns, np.maximum(lost.end_ns - lost.start_ns, 1)
            row = start.searchsorted(t_ns, "right") - 1
            clipped_row = np.maximum(row, 0)
            part = np.where(
                row < 0, 0.0, np.minimum((t_ns - start[clipped_row]) / length[clipped_row], 1.0)
            )
        for number, ns in amounts.items():
            sums = np.concatenate([[0], np.cumsum(ns)])
            row_of_column = np.searchsorted(columns, number)
            out[row_of_column] += sums[clipped_row] + np.floor(ns[clipped_row] * part).astype(
                np.int64
            )
            self._sums[number] += sums[-1]
        return columns, out


MAX_LOSS_BINS = 256
"""Number of bins above which adjacent ones are merged in pairs."""
BINS_PER_SEGMENT = 16
"""Most bins per settled segment."""


class LossTimeBins:
    """Sums per time bin; `causes` are the names of its columns."""

    def __init__(self, causes: Sequence[str]) -> None:
        self._causes = tuple(causes)
        self._bins: list[tuple[int, Int]] = []
        self._provisional: list[tuple[int, Int]] = []

    def add(
        self,
        rank: Rank,
        segment: Segment,
        lost: LostTime,
        shares: Mapping[str, Int],
        hidden: Mapping[int, Int],
    ) -> None:
        """Add a settled segment.

        shares: int64[n] of its lost intervals per cause, in 1/SHARE_SCALE.
        """
        edges = _find_bin_edges(rank, segment)
        row = np.searchsorted(edges, lost.end_ns, side="left") - 1
        row = np.clip(row, 0, edges.size - 2)
        sums = np.zeros((edges.size - 1, len(self._causes) + 1), np.int64)
        for column, cause in enumerate(self._causes):
            share = shares.get(cause)
            if share is not None and share.any():
                ns = lost.lost_ns * share // SHARE_SCALE
                sums[:, -1] += np.bincount(row, ns, edges.size - 1).astype(np.int64)
                if cause in HIDDEN_COLUMNS:
                    ns = ns + hidden.get(HIDDEN_COLUMNS.index(cause), 0)
                sums[:, column] = np.bincount(row, ns, edges.size - 1)
        sums[:, -1] = np.maximum(sums[:, -1], sums[:, :-1].max(axis=1))
        self._provisional += zip(np.diff(edges).tolist(), sums)
        if not segment.provisional:
            self.confirm()

    def confirm(self) -> None:
        """Take over provisional segments: another step has ended."""
        self._bins += self._provisional
        self._provisional = []
        while len(self._bins) > MAX_LOSS_BINS:
            even = len(self._bins) // 2 * 2
            pairs = zip(self._bins[:even:2], self._bins[1:even:2])
            merged = [(first[0] + second[0], first[1] + second[1]) for first, second in pairs]
            self._bins = [*merged, *self._bins[even:]]

    def build_table(self) -> tuple[Int, Int] | None:
        """Return int64[n] lengths and int64[n, causes + 1], ns; the last column is all causes."""
        if not self._bins:
            return None
        lengths, sums = zip(*self._bins)
        return np.array(lengths, np.int64), np.stack(sums)


def _find_bin_edges(rank: Rank, segment: Segment) -> Int:
    """Return the edges of bins: a few step ends, and the bounds of the segment."""
    steps = rank.main.spans.get(layout.STEP)
    inside = np.zeros(0, np.int64)
    if steps is not None:
        inside = steps.end_ns[(steps.end_ns > segment.start_ns) & (steps.end_ns < segment.end_ns)]
        if (inside[1:] <= inside[:-1]).any():
            inside = np.unique(inside)
        inside = inside[:: max(inside.size // BINS_PER_SEGMENT, 1)]
    return np.concatenate([[segment.start_ns], inside, [segment.end_ns]]).astype(np.int64)
