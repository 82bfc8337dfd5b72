"""Spans that no cause reads: of a training process only when it was seen is kept."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.probe.layout import FETCH, FIRST_USER_KIND, FORWARD, STEP, WORKER_START
from clusterprof.trace.schema import SPAN_FIELDS, Spans
from tests.support.builders import build_chunks, make_header, ns

# The second starts first and ends first; the third ends last; the fifth arrives last.
UNREAD = ((2, 4), (1, 3), (5, 9), (4, 6), (6, 8))


def loaded(kind: int, *more: tuple[float, float, int]) -> list[tuple[int, ...]]:
    """(start, end, sequence) of one kind of a process that has other spans before it."""
    rows = [*more, *((start, end, kind) for start, end in UNREAD)]
    table = np.array([[ns(s), ns(e), k, 0, 0, 0, 0] for s, e, k in rows], np.int64)
    columns = {name: table[:, i].copy() for i, name in enumerate(SPAN_FIELDS)}
    (chunk,) = build_chunks([make_header(), Spans(100, 7, 10, 0, {}, columns)], ns(60))
    span = chunk.processes[100].spans[kind]
    seconds = [(column // ns(1)).tolist() for column in (span.start_ns, span.end_ns)]
    return list(zip(*seconds, span.sequence.tolist()))


@pytest.mark.parametrize("kind", [FORWARD, FIRST_USER_KIND])
def test_a_training_process_keeps_few_unread_spans(kind: int) -> None:
    # The step has number 10, so the five have 11 to 15.
    assert loaded(kind, (0, 9, STEP)) == [(1, 3, 12), (5, 9, 13), (6, 8, 15)]


@pytest.mark.parametrize(
    "more", [(), ((0, 9, FETCH),), ((0, 9, STEP), (0, 0, WORKER_START))], ids=str
)
def test_a_non_training_process_keeps_all_unread_spans(
    more: tuple[tuple[float, float, int], ...],
) -> None:
    # Whether it trains may only turn out later, and then its first span counts.
    assert len(loaded(FORWARD, *more)) == len(UNREAD)


def test_spans_read_by_a_cause_are_kept() -> None:
    assert len(loaded(FETCH, (0, 9, STEP))) == len(UNREAD)
