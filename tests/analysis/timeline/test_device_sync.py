"""What a training thread did outside its marked waits for the device: by hand."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.timeline.device_sync import (
    find_drained_rows,
    find_samples_in_waits,
    measure_device_sync,
    measure_increase_outside_waits,
    select_device_waits,
)
from clusterprof.analysis.timeline.model import Rank
from clusterprof.probe import layout
from tests.support.builders import (
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
    to_ns_array,
)

WHOLE = layout.WHOLE_NS
SECOND = 1_000_000_000


def build_rank(doing: str, *syncs: tuple[float, float, int, int], hz: float = 1) -> Rank:
    samples = make_thread(parse_activity(doing), 10, hz=hz)
    return make_rank(10, make_process(100, spans={layout.SYNC: make_spans(*syncs)}, thread=samples))


def measure(timeline: Rank, column: str, *intervals: tuple[float, float]) -> list[float]:
    start, end = (to_ns_array(edges) for edges in zip(*intervals))
    grown = measure_increase_outside_waits(timeline, column, start, end)
    assert grown is not None
    return [round(value / 1e9, 6) for value in grown.tolist()]


def test_a_half_waited_span_counts_as_a_device_wait() -> None:
    syncs = make_spans((4, 6, ns(0.9), 9), (1, 2, WHOLE, 1), (7, 9, ns(1), 3))
    main = make_process(100, spans={layout.SYNC: syncs})
    assert [column.tolist() for column in select_device_waits(main)] == [
        [ns(1), ns(7)],
        [ns(2), ns(9)],
    ]
    assert find_samples_in_waits(main, to_ns_array([0.5, 1, 1.9, 2, 5, 8, 9])).tolist() == [
        *(False, True, True, False),
        *(False, True, False),
    ]
    assert not find_samples_in_waits(make_process(100), to_ns_array([1, 2])).any()


def test_device_wait_time_is_counted_in_proportion() -> None:
    timeline = build_rank("I10", (1, 2, WHOLE, 1), (4, 8, ns(1), 9))
    got = measure_device_sync(timeline, to_ns_array([0, 1.5, 4, 8]), to_ns_array([10, 6, 5, 9]))
    np.testing.assert_allclose(got / 1e9, [2.0, 1.0, 0.25, 0.0])
    unmarked = make_rank(10, make_process(100))
    assert measure_device_sync(unmarked, to_ns_array([0]), to_ns_array([10])).tolist() == [0.0]


def test_cpu_time_of_a_sleeping_thread_is_outside_waits() -> None:
    # one reading in 10 s: it ran for 3 of them; 5 were a wait
    timeline = build_rank("U1 I5 U2 I2", (1, 6, WHOLE, 1), hz=0.1)
    assert measure(timeline, "on_cpu_ns", (0, 10), (1, 6), (0, 1), (6, 10)) == [3.0, 0.0, 0.6, 2.4]


def test_excess_cpu_time_in_waits_counts_as_polling() -> None:
    # it ran for 9 of 10 s, of which 5 were outside the wait
    timeline = build_rank("U9 I1", (1, 6, WHOLE, 1), hz=0.1)
    assert measure(timeline, "on_cpu_ns", (0, 10), (1, 6), (6, 10)) == [5.0, 0.0, 4.0]


@pytest.mark.parametrize(("column", "ran"), [("on_cpu_ns", 1.0), ("user_ns", 1.0)])
def test_cpu_time_of_a_polling_thread_is_partly_waiting(column: str, ran: float) -> None:
    # Each second: 0.5 s in a wait, on a CPU, then 0.1 s at work and 0.4 s asleep. A reading each
    # second, and samples of its state in the waits: it runs in all of them.
    waits = [(at, at + 0.5, WHOLE, 1) for at in range(10)]
    timeline = build_rank("U0.6 I0.4 " * 10, *waits)
    assert measure(timeline, column, (0, 10), (0.5, 1), (0, 0.5)) == [ran, 0.1, 0.0]


def test_waiting_for_a_cpu_does_not_count_as_polling() -> None:
    waits = [(at, at + 0.5, WHOLE, 1) for at in range(10)]
    timeline = build_rank("U0.5 R0.2 I0.3 " * 10, *waits)
    assert measure(timeline, "run_delay_ns", (0, 10), (0.5, 1)) == [2.0, 0.2]


def test_missing_waits_or_samples_give_no_measurement() -> None:
    assert measure_increase_outside_waits(build_rank("U10"), "on_cpu_ns", *EDGES) is None
    main = make_process(100, spans={layout.SYNC: make_spans((1, 2, WHOLE, 1))})
    assert measure_increase_outside_waits(make_rank(10, main), "on_cpu_ns", *EDGES) is None


EDGES = to_ns_array([0]), to_ns_array([10])


def test_rows_after_a_device_wait_start_with_a_drained_queue() -> None:
    # A wait in [2, 3); one that waited for a tenth of [7, 8) only, which does not count.
    syncs = make_spans((2, 3, SECOND, 1), (7, 8, SECOND // 10, 4))
    main = make_process(100, spans={layout.SYNC: syncs})
    start_s = np.array([0, 2, 3, 4, 5, 6, 8])
    end_s = np.array([2, 3, 4, 5, 6, 7, 9])
    chosen = np.array([True, True, True, True, False, True, True])
    drained = find_drained_rows(main, start_s * SECOND, end_s * SECOND, chosen)
    # [3, 4) begins with an empty queue and [4, 5) continues it; after [5, 6) nothing is known.
    np.testing.assert_array_equal(drained, [False, False, True, True, False, False, False])


def test_without_marked_waits_no_row_is_drained() -> None:
    t = np.array([0, SECOND])
    assert not find_drained_rows(make_process(100), t, t + SECOND, np.array([True, True])).any()
