"""What the host was doing at every instant, beside the same found one instant at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clusterprof.analysis.attribution.rank.host_phases import find_step_numbers, split_host_phases
from clusterprof.analysis.timeline import intervals
from clusterprof.analysis.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_EVAL,
    PHASE_GC,
    PHASE_H2D,
    PHASE_NONE,
    PHASE_STARTUP,
    Rank,
)
from clusterprof.analysis.timeline.spans import SpanTable
from clusterprof.probe import layout
from tests.support.builders import make_process, make_rank

START, END = 5, 45
BETWEEN_SAVES = -1
KINDS = (
    layout.STEP,
    layout.DATA_WAIT,
    layout.GC,
    layout.H2D,
    layout.EVAL,
    layout.CHECKPOINT,
    layout.COMPILE,
)
Row = tuple[int, int, int, int]  # kind, start, end, worker (of a wait)
rows_ = st.tuples(
    st.sampled_from(KINDS), st.integers(0, 50), st.integers(0, 12), st.sampled_from([0, 201])
).map(lambda row: (row[0], row[1], row[1] + row[2], row[3]))


def table(rows: list[Row]) -> SpanTable:
    """Spans of one kind; a step's number is its place among the steps."""
    start, end, owner = (np.array(column, np.int64) for column in list(zip(*rows))[1:])
    number = np.arange(len(rows), dtype=np.int64)
    return SpanTable(start, end, number, a=number, b=owner, c=number, d=number)


def painted_rank(rows: list[Row]) -> Rank:
    """A rank with these spans, each kind sorted by start as the timeline gives them."""
    by_kind: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row[1]):
        by_kind.setdefault(row[0], []).append(row)
    main = make_process(100, spans={kind: table(batch) for kind, batch in by_kind.items()})
    return make_rank(1, main)


def phase_at(rows: list[Row], t: int) -> int:
    """The precedence of the taxonomy, written down."""
    here = {(kind, kind == layout.DATA_WAIT and b != 0) for kind, s, e, b in rows if s <= t < e}
    if between_saves(rows, t):
        here.add((BETWEEN_SAVES, False))
    for kind, waits, phase in (
        (layout.COMPILE, False, PHASE_STARTUP),
        (layout.CHECKPOINT, False, PHASE_CHECKPOINT),
        (BETWEEN_SAVES, False, PHASE_CHECKPOINT),
        (layout.EVAL, False, PHASE_EVAL),
        (layout.H2D, False, PHASE_H2D),
        (layout.DATA_WAIT, True, PHASE_DATA_WAIT),
        (layout.GC, False, PHASE_GC),
        (layout.DATA_WAIT, False, PHASE_DATA_WAIT),
        (layout.STEP, False, PHASE_COMPUTE),
    ):
        if (kind, waits) in here:
            return phase
    return PHASE_NONE


def between_saves(rows: list[Row], t: int) -> bool:
    """From a save to the next, when both are in the step that began last before the first ended."""
    saves = sorted((row for row in rows if row[0] == layout.CHECKPOINT), key=lambda row: row[1])
    steps = sorted((row for row in rows if row[0] == layout.STEP), key=lambda row: row[1])
    for (_, _, ended, _), (_, again, _, _) in pairwise(saves):
        begun = [end for _, start, end, _ in steps if start <= ended]
        if ended <= t < again and begun and again <= begun[-1]:
            return True
    return False


def step_at(rows: list[Row], t: int) -> int:
    """The step that began last, when it has not ended."""
    steps = [row for row in sorted(rows, key=lambda row: row[1]) if row[0] == layout.STEP]
    begun = [(number, end) for number, (_, start, end, _) in enumerate(steps) if start <= t]
    return begun[-1][0] if begun and t < begun[-1][1] else -1


@given(
    st.lists(rows_, max_size=14),
    st.lists(st.tuples(st.integers(5, 44), st.integers(1, 9)), max_size=6),
)
def test_every_instant_has_its_phase_step_and_window(
    rows: list[Row], batch: list[tuple[int, int]]
) -> None:
    set_ = intervals.merge_intervals(
        (np.array([s for s, _ in batch], np.int64), np.array([s + n for s, n in batch], np.int64))
    )
    windows = intervals.trim_intervals(set_, START, END)
    timeline = painted_rank(rows)
    painted = split_host_phases(timeline, START, END, windows)
    assert painted.start_ns[0] == START
    assert painted.end_ns[-1] == END
    assert painted.start_ns[1:].tolist() == painted.end_ns[:-1].tolist()
    step = find_step_numbers(timeline, painted.start_ns, painted.steps_begun)
    window = np.where(painted.measured, painted.window, -1)
    for row, (low, high) in enumerate(zip(painted.start_ns.tolist(), painted.end_ns.tolist())):
        assert low < high
        for t in range(low, high):
            assert painted.phase[row] == phase_at(rows, t)
            assert step[row] == step_at(rows, t)
            assert window[row] == intervals.find_containing(np.array([t]), windows)[0]


def test_phases_are_cut_at_every_span_and_window_edge() -> None:
    timeline = painted_rank(
        [(layout.STEP, 6, 20, 0), (layout.STEP, 20, 30, 0), (layout.GC, 8, 9, 0)]
    )
    windows = (np.array([5, 15]), np.array([15, 25]))
    painted = split_host_phases(timeline, START, END, windows)
    assert painted.start_ns.tolist() == [5, 6, 8, 9, 15, 20, 25, 30]
    assert painted.measured.tolist() == [True] * 6 + [False] * 2


def test_consecutive_shard_saves_within_a_step_form_a_single_checkpoint() -> None:
    # step 0-20 with saves 2-5 and 9-12, step 20-40 with one at 30-33: 5-9 is the checkpoint's too
    rows = [
        (layout.STEP, 0, 20, 0),
        (layout.STEP, 20, 40, 0),
        (layout.CHECKPOINT, 2, 5, 0),
        (layout.CHECKPOINT, 9, 12, 0),
        (layout.CHECKPOINT, 30, 33, 0),
    ]
    painted = split_host_phases(painted_rank(rows), 0, 40, intervals.EMPTY)
    saving = painted.phase == PHASE_CHECKPOINT
    listed = list(zip(painted.start_ns[saving].tolist(), painted.end_ns[saving].tolist()))
    assert listed[0][0] == 2 and listed[-1] == (30, 33)
    assert sum(end - start for start, end in listed) == 10 + 3
