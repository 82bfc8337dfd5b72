"""Measured waits of a device, placed on the clock of its host."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.timeline.collectives.operations import (
    apply_device_times,
    assign_wait_times,
    find_device_waits,
    select_unfinished,
)
from clusterprof.analysis.timeline.spans import CollectiveSpans, ExposedCollectiveSpans
from clusterprof.probe import layout
from tests.support.builders import make_process, make_spans, ns


def measured(*rows: tuple[float, float, int, int]) -> ExposedCollectiveSpans:
    return ExposedCollectiveSpans.from_table(make_spans(*rows))


def placed(*rows: tuple[float, float, int, float]) -> list[tuple[float, float, int, float]]:
    """(came, went on, sequence, stood still) in seconds -> (start, end, sequence, run ends)."""
    waits = assign_wait_times(measured(*[(s, e, n, ns(length)) for s, e, n, length in rows]))
    columns = waits.start_ns / 1e9, waits.end_ns / 1e9, waits.sequence, waits.run_end_ns / 1e9
    return [tuple(row) for row in zip(*(column.tolist() for column in columns))]


def test_a_device_wait_starts_after_its_host_and_predecessor() -> None:
    # 0.4 from 1.0; the host comes again at 1.1 and 1.2: 0.3 and 0.2 follow each other to 1.9.
    # Nothing is under way at 2.5.
    three = (1.0, 1.01, 5, 0.4), (1.1, 1.11, 7, 0.3), (1.2, 1.21, 9, 0.2)
    assert placed(*three, (2.5, 2.6, 11, 0.1)) == [
        (1.0, 1.4, 5, 1.9),
        (1.4, 1.7, 7, 1.9),
        (1.7, 1.9, 9, 1.9),
        (2.5, 2.6, 11, 2.6),
    ]


def test_hidden_and_negative_waits_have_zero_length() -> None:
    assert placed((1.0, 1.1, 1, 0.0), (1.0, 1.1, 2, -3.0), (1.05, 1.1, 3, 0.2)) == [
        (1.0, 1.0, 1, 1.0),
        (1.0, 1.0, 2, 1.0),
        (1.05, 1.25, 3, 1.25),
    ]


def test_waits_are_counted_partially_up_to_an_instant() -> None:
    waits = assign_wait_times(measured((1, 1, 1, ns(0.5)), (3, 3, 2, ns(1))))
    times = np.array([ns(t) for t in (0, 1, 1.25, 1.5, 2, 3.5, 9)])
    assert (waits.measure_before(times) / 1e9).tolist() == [0, 0, 0.25, 0.5, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("from_s", [1.2, 1.5, 1.8])
def test_unfinished_waits_keep_their_times(from_s: float) -> None:
    rows = (0.2, 0.3, 1, ns(0.5)), (1.0, 1.01, 3, ns(0.4)), (1.1, 1.11, 5, ns(0.5))
    table = measured(*rows)
    keep = select_unfinished(table, ns(from_s))
    # The first has ended at 0.7; the run of the other two ends at 1.9, though their host went on.
    assert keep.tolist() == [False, True, True]
    again = assign_wait_times(measured(*rows[1:]))
    assert again.start_ns.tolist() == assign_wait_times(table).start_ns[1:].tolist()


def test_measured_operations_get_device_times() -> None:
    # sequence numbers 1, 2, 3; the second and the third were measured
    table = make_spans((1.0, 1.5, 7, 0), (2.0, 2.01, 7, 1), (2.1, 2.11, 7, 2))
    host = CollectiveSpans.from_table(table)
    exposed = make_spans((2.0, 2.01, 2, ns(0.3)), (2.1, 2.11, 3, ns(0.2)), first_sequence=4)
    waits = find_device_waits(make_process(100, spans={layout.EXPOSED_COLLECTIVE: exposed}))
    there = apply_device_times(host, waits)
    assert (there.start_ns / 1e9).tolist() == [1.0, 2.0, 2.3]
    assert (there.end_ns / 1e9).tolist() == [1.5, 2.3, 2.5]
    assert there.number.tolist() == [0, 1, 2]
    assert apply_device_times(host, find_device_waits(make_process(100))) is host
