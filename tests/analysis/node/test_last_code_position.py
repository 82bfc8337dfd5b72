"""Where a process was last, by its samples; how many steps a rank marked since an operation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterprof.analysis.node.last_code_position import LastCodePosition, StepsBetweenOperations
from clusterprof.analysis.timeline.model import Process
from clusterprof.analysis.timeline.spans import SpanTable, StackSamples
from clusterprof.probe import layout

Spans = dict[int, list[tuple[int, int, int]]]
"""By kind: (start, end, a)."""


def table(rows: Sequence[tuple[int, int, int]]) -> SpanTable:
    columns = np.array(rows, np.int64).reshape(-1, 3).T
    zeros = np.zeros(columns.shape[1], np.int64)
    return SpanTable(columns[0], columns[1], zeros, columns[2], zeros, zeros, zeros)


def process(spans: Spans, samples: Sequence[tuple[int, int]] = (), thread: int = 0) -> Process:
    """A process with spans, and samples of (time, stack)."""
    times = np.array([time for time, _ in samples], np.int64)
    stacks = np.array([stack for _, stack in samples], np.int64)
    same = np.full(times.size, thread, np.int64)
    state = np.full(times.size, ord("S"), np.int64)
    sampled = StackSamples(times, times, times, stacks, same + 50, same, state)
    by_kind = {kind: table(rows) for kind, rows in spans.items()}
    return Process(1, 1, 0, "python", {}, by_kind, {}, None, None, sampled)


def test_the_most_sampled_stack_since_the_last_span_counts() -> None:
    line = LastCodePosition(1)
    samples = [(10, 3), (90, 3), (95, 3), (110, 7), (120, 7), (130, 8)]
    line.update(process({layout.STEP: [(0, 100, 0)]}, samples))
    assert (line.stack, line.samples, line.last_span_ns) == (7, 2, 100)


def test_a_later_span_restarts_the_sample_count() -> None:
    line = LastCodePosition(1)
    line.update(process({layout.STEP: [(0, 100, 0)]}, [(110, 7), (120, 7)]))
    # Samples and spans of the chunk before are repeated.
    line.update(
        process({layout.STEP: [(0, 100, 0), (100, 150, 1)]}, [(110, 7), (120, 7), (160, 9)])
    )
    assert (line.stack, line.samples) == (9, 1)
    line.update(process({layout.STEP: [(100, 150, 1)]}, [(160, 9), (170, 9)]))
    assert (line.stack, line.samples) == (9, 2)


def test_a_stopped_process_keeps_its_last_sampled_stack() -> None:
    line = LastCodePosition(1)
    line.update(process({layout.STEP: [(0, 100, 0)]}, [(80, 5), (95, 6)]))
    assert (line.stack, line.samples) == (6, 0)  # before the span ended: less certain


def test_garbage_collection_does_not_count_as_a_span() -> None:
    line = LastCodePosition(1)
    line.update(
        process({layout.STEP: [(0, 100, 0)], layout.GC: [(140, 141, 2)]}, [(110, 7), (150, 8)])
    )
    assert line.last_span_ns == 100
    assert line.since_span == {7: 1, 8: 1}


def test_samples_of_other_threads_do_not_count() -> None:
    line = LastCodePosition(1)
    line.update(process({layout.STEP: [(0, 100, 0)]}, [(110, 7)], thread=1))
    assert (line.stack, line.samples) == (0, 0)


def test_steps_between_and_after_operations_are_counted() -> None:
    steps = StepsBetweenOperations()
    # Steps 0 to 5 end at 10 to 60; operations begin at 15, 45 and 65: in steps 1, 4 and 6.
    rows = [(10 * n, 10 * n + 10, n) for n in range(6)]
    operations = [(15, 16, 1), (45, 46, 1), (65, 66, 1)]
    steps.update(process({layout.STEP: rows, layout.COLLECTIVE: operations}))
    assert (steps.most, steps.after_last) == (3, 0)
    # The next chunk repeats step 5 and the last operation, and has steps 6 to 20.
    more = [(10 * n, 10 * n + 10, n) for n in range(5, 21)]
    steps.update(process({layout.STEP: more, layout.COLLECTIVE: operations[2:]}))
    assert (steps.most, steps.after_last) == (3, 14)  # 7 to 20


def test_a_rank_without_operations_has_not_diverged() -> None:
    steps = StepsBetweenOperations()
    steps.update(process({layout.STEP: [(10 * n, 10 * n + 10, n) for n in range(50)]}))
    assert steps.after_last == 0
