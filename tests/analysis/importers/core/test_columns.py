"""Spans in narrow columns, and a device's busy time a slice at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from clusterprof.analysis.importers.core.columns import BusyCounter, ImportedSpans, pack_column
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.probe import layout
from clusterprof.trace.schema import Columns, Spans
from tests.support.import_results import read_span_table


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([-128, 127], np.int8),
        ([-129, 0], np.int16),
        ([0, 128], np.int16),
        ([0, 32768], np.int32),
        ([0, 1 << 31], np.int64),
        ([-(1 << 63), (1 << 63) - 1], np.int64),
    ],
)
def test_a_column_is_as_narrow_as_its_numbers(values: list[int], dtype: type) -> None:
    made = pack_column(values)
    assert not isinstance(made, int)
    assert made.dtype == dtype and made.tolist() == values


def test_a_constant_column_is_packed_as_a_number() -> None:
    assert pack_column([7, 7, 7]) == 7 and pack_column(9) == 9 and pack_column([]) == 0


def test_spans_are_returned_in_order_of_their_ends() -> None:
    spans = ImportedSpans()
    wide = 1 << 62
    assert spans.add([10, 0], [20, 5], layout.STEP, [1, 2], 2, wide, [-wide, wide]) == 0
    assert spans.add([], [], layout.GC) == 2
    assert spans.add([1, 2], 20, layout.COLLECTIVE, 8, [0, 1], -1, 0) == 2
    # The measures name rows 3 and 2; by their ends these are the 3rd and the 2nd.
    assert spans.add([2, 1], [20, 19], layout.EXPOSED_COLLECTIVE, [3, 2], 4, 0, 0) == 4
    assert read_span_table(spans).T.tolist()[0] == [10, 20, layout.STEP, 1, 2, wide, -wide]
    assert spans.bounds_ns() == [0, 20]
    ordered = spans.in_order()
    assert ordered.next_ns(6) == [19] and ordered.next_ns(21) == []
    place, table = ordered.between(5, 20)
    assert place == 0 and table[1].tolist() == [5, 19] and table[3, 1] == 4
    place, table = ordered.between(20, 21)
    assert place == 2
    assert table[2].tolist() == [
        layout.STEP,
        layout.COLLECTIVE,
        layout.COLLECTIVE,
        layout.EXPOSED_COLLECTIVE,
    ]
    assert table[3].tolist() == [1, 8, 8, 5]
    assert ordered.between(21, 99)[1].size == 0


def test_a_slice_of_rare_spans_is_longer_and_ends_before_the_next_value() -> None:
    second = 1_000_000_000
    node = NodeTables("n1", "test")
    end_ns = np.arange(1, 1001) * 2 * second
    node.add_spans(7, layout.STEP, end_ns - second, end_ns, np.arange(1000))
    node.add_series("gpu.busy_ratio", "gpu0", [100 * second + 5, 101 * second], [0.5, 0.25])
    slices = []
    for records in list(node.records())[1:-1]:  # without the first and the last events
        for record in records:
            assert isinstance(record, (Columns, Spans))
            times = record.columns["end_ns"] if isinstance(record, Spans) else record.t_ns
            slices.append((type(record).__name__, len(times), times[0] / second))
    # Spans of 2 s each: 50 end before the values, later records hold 256 at most.
    assert slices == [
        ("Spans", 50, 2),
        ("Columns", 2, 100.000000005),
        ("Spans", 256, 102),
        ("Spans", 256, 614),
        ("Spans", 256, 1126),
        ("Spans", 182, 1638),
    ]


def test_busy_time_edges_are_independent_of_the_slices() -> None:
    busy = BusyCounter("x", "gpu0", np.array([10, 15, 40]), np.array([5, 3, 2]), 0, 50)
    edges = [(0, 0), (10, 0), (15, 5), (18, 8), (40, 8), (42, 10), (50, 10)]
    assert busy.bounds_ns() == (0, 50)
    for cuts in ([0, 51], [0, 15, 51], [0, 12, 16, 41, 51], list(range(52))):
        collected = []
        for low, high in pairwise(cuts):
            t_ns, worked = busy.between(low, high)
            collected += list(zip(t_ns.tolist(), worked.tolist()))
        assert collected == edges
    assert [next(busy.next_ns(t), None) for t in (1, 16, 18, 19, 43, 51)] == [
        10,
        18,
        18,
        40,
        50,
        None,
    ]


def test_an_idle_device_has_two_readings() -> None:
    busy = BusyCounter("x", "gpu0", np.zeros(0, np.int64), 0, 5, 9)
    assert [array.tolist() for array in busy.between(0, 10)] == [[5, 9], [0, 0]]
