"""Time a device stood still in operations with other ranks, by stream events."""

from __future__ import annotations

from clusterprof.analysis.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    SOURCE_DEVICE_SAMPLES,
    SOURCE_HOST_SPANS,
    SOURCE_STREAM_EVENTS,
)
from clusterprof.probe import layout
from tests.support.builders import make_busy_counter, make_spans, ns
from tests.support.lost_time import BUSY, WORKER, mark_steps, settle_all

EVENTS, SAMPLES = SOURCE_STREAM_EVENTS, SOURCE_DEVICE_SAMPLES
GROUP = 7


def test_device_time_in_a_collective_is_lost_despite_busy_samples() -> None:
    # The host issues an operation at 1.5 and goes on; the device stands in it for 0.3 s, and runs
    # the operation all the while: no sample sees it idle. Idle was [1.0, 1.05), in a wait for data.
    table = {
        layout.STEP: make_spans((1, 2, 0)),
        layout.DATA_WAIT: make_spans((1, 1.05, 0, WORKER, 2)),
        layout.COLLECTIVE: make_spans((1.5, 1.501, GROUP, 0), first_sequence=3),
        layout.EXPOSED_COLLECTIVE: make_spans((1.5, 1.501, 3, ns(0.3))),
    }
    series = {BUSY: make_busy_counter([(0, 1), (1.05, 3)], 3)}
    rows, account, _ = settle_all(mark_steps(3, table, series))
    assert rows[0] == (1.0, 1.05, 0.05, PHASE_DATA_WAIT, SAMPLES, 0)
    # Cut at sample times: [1.5, 1.8) in three.
    assert [row[:2] for row in rows[1:]] == [(1.5, 1.6), (1.6, 1.7), (1.7, 1.8)]
    assert [row[3:] for row in rows[1:]] == 3 * [(PHASE_COLLECTIVE, EVENTS, 0)]
    assert round(sum(row[2] for row in rows[1:]), 9) == 0.3
    assert (account.idle_ns, account.stream_intervals) == (ns(0.05), 3)


def test_idle_device_time_in_a_blocking_collective_counts_once() -> None:
    # The host itself waits [1.5, 1.8) (gloo); the device runs dry for 0.2 of it, and so say the
    # samples: 0.2 is lost, not 0.4.
    table = {
        layout.STEP: make_spans((1, 2, 0)),
        layout.COLLECTIVE: make_spans((1.5, 1.8, GROUP, 0), first_sequence=3),
        layout.EXPOSED_COLLECTIVE: make_spans((1.5, 1.8, 3, ns(0.2))),
    }
    series = {BUSY: make_busy_counter([(0, 1.5), (1.7, 3)], 3)}
    rows, account, _ = settle_all(mark_steps(3, table, series))
    assert rows == [
        (1.5, 1.6, 0.1, PHASE_COLLECTIVE, EVENTS, 0),
        (1.6, 1.7, 0.1, PHASE_COLLECTIVE, EVENTS, 0),
    ]
    assert account.idle_ns == ns(0.2)


def test_idle_time_outside_a_measured_operation_remains_lost() -> None:
    # idle [1.55, 1.6): not while the device ran the operation [1.5, 1.54)
    table = {
        layout.STEP: make_spans((1, 2, 0)),
        layout.COLLECTIVE: make_spans((1.5, 1.5001, GROUP, 0), first_sequence=3),
        layout.EXPOSED_COLLECTIVE: make_spans((1.5, 1.5001, 3, ns(0.04))),
    }
    rows, _, _ = settle_all(
        mark_steps(3, table, {BUSY: make_busy_counter([(0, 1.55), (1.6, 3)], 3)})
    )
    assert rows == [
        (1.5, 1.54, 0.04, PHASE_COLLECTIVE, EVENTS, 0),
        # 0.05 less the 0.0001 in which the host was held up
        (1.54, 1.6, 0.0499, PHASE_COMPUTE, SAMPLES, 0),
    ]


def test_hidden_operations_are_free_and_unmeasured_waits_are_lost() -> None:
    table = {
        layout.STEP: make_spans((1, 3, 0)),
        layout.COLLECTIVE: make_spans((1.5, 1.6, GROUP, 0), (2, 2.1, GROUP, 1), first_sequence=3),
        layout.EXPOSED_COLLECTIVE: make_spans((1.5, 1.6, 3, 0)),
    }
    rows, _, _ = settle_all(mark_steps(4, table, device=""))
    assert rows == [(2.0, 2.1, 0.1, PHASE_COLLECTIVE, SOURCE_HOST_SPANS, 0)]


def test_a_data_wait_keeps_its_own_loss_after_an_operation() -> None:
    # The host issues at 1.0, then waits for data [1.1, 1.5). The device stands in the operation
    # until 1.3, and then for 0.1 s because there is no data: the end of the wait.
    table = {
        layout.STEP: make_spans((1, 2, 0)),
        layout.DATA_WAIT: make_spans((1.1, 1.5, 0, WORKER, 2)),
        layout.EXPOSED: make_spans((1.1, 1.5, 9, ns(0.1))),
        layout.COLLECTIVE: make_spans((1.0, 1.001, GROUP, 0), first_sequence=3),
        layout.EXPOSED_COLLECTIVE: make_spans((1.0, 1.001, 3, ns(0.3))),
    }
    rows, _, _ = settle_all(mark_steps(3, table, device=""))
    assert rows == [
        (1.0, 1.1, 0.1, PHASE_COLLECTIVE, EVENTS, 0),
        (1.1, 1.3, 0.2, PHASE_COLLECTIVE, EVENTS, 0),
        (1.4, 1.5, 0.1, PHASE_DATA_WAIT, EVENTS, 0),
    ]


def test_adjacent_operations_in_a_sample_window_are_lost_in_full() -> None:
    # The host issues at 1.02 and 1.12 and runs on; the device spins until 1.15 in one and, right
    # behind it, until 1.28 in the other. The window [1.1, 1.2) lies in both together.
    table = {
        layout.STEP: make_spans((1, 2, 0)),
        layout.COLLECTIVE: make_spans(
            (1.02, 1.021, GROUP, 0), (1.12, 1.121, GROUP, 1), first_sequence=3
        ),
        layout.EXPOSED_COLLECTIVE: make_spans(
            (1.02, 1.021, 3, ns(0.13)), (1.12, 1.121, 4, ns(0.13))
        ),
    }
    rows, _, _ = settle_all(mark_steps(3, table, {BUSY: make_busy_counter([(0, 3)], 3)}))
    assert [(start, end, round(n, 9)) for start, end, n, *_ in rows] == [
        (1.02, 1.1, 0.08),
        (1.1, 1.15, 0.05),
        (1.15, 1.2, 0.05),
        (1.2, 1.28, 0.08),
    ]
