"""Where device time was lost, on timelines whose arithmetic fits in a comment."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.attribution.rank.chunk_boundary import RankState
from clusterprof.analysis.attribution.rank.lost_time import find_lost_intervals
from clusterprof.analysis.timeline.model import (
    PHASE_CHECKPOINT,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_GC,
    PHASE_H2D,
    PHASE_NONE,
    PHASE_THROTTLED,
    SOURCE_DEVICE_SAMPLES,
    SOURCE_HOST_SPANS,
    SOURCE_STREAM_EVENTS,
)
from clusterprof.probe import layout
from tests.support.builders import (
    make_busy_counter,
    make_chunk,
    make_counter,
    make_gauge,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)
from tests.support.lost_time import BUSY, WORKER, mark_steps, settle_all


def test_idle_time_of_a_window_fills_its_wait_first() -> None:
    # steps [1, 2) [2, 3); waits of 0.03 s at 1.00 and of 0.02 s at 2.05
    table = {
        layout.STEP: make_spans((1, 2, 0), (2, 3, 1)),
        layout.DATA_WAIT: make_spans((1, 1.03, 0, WORKER, 2), (2.05, 2.07, 1, WORKER, 2)),
    }
    # idle [1.00, 1.05) and [2.06, 2.07): the sample windows are [1.0, 1.1) and [2.0, 2.1)
    series = {BUSY: make_busy_counter([(0, 1), (1.05, 2.06), (2.07, 4)], 4)}
    rows, account, state = settle_all(mark_steps(4, table, series))
    samples = SOURCE_DEVICE_SAMPLES
    assert rows == [
        (1.0, 1.03, 0.03, PHASE_DATA_WAIT, samples, 0),  # full: 0.03 of the window's 0.05
        (1.03, 1.1, 0.02, PHASE_COMPUTE, samples, 0),  # the other 0.02
        (2.06, 2.07, 0.01, PHASE_DATA_WAIT, samples, 1),  # the end of it: the queue drains first
    ]
    assert (account.unmeasured_ns, account.measured_ns, account.idle_ns) == (0, ns(2), ns(0.06))
    assert (state.step_begin_ns, state.step_end_ns) == (ns(1), ns(3))


def test_a_wait_that_the_queue_hides_costs_nothing() -> None:
    table = {
        layout.STEP: make_spans((0, 1, 0), (1, 2, 1)),
        layout.DATA_WAIT: make_spans((0, 0.5, 0, WORKER, 2), (1, 1.5, 1, WORKER, 2)),
    }
    rows, account, _ = settle_all(mark_steps(3, table, {BUSY: make_busy_counter([(0, 3)], 3)}))
    assert rows == []
    assert account.idle_ns == 0


def test_without_a_device_waits_count_in_full_as_an_upper_bound() -> None:
    table = {
        layout.STEP: make_spans((1, 3, 0)),
        layout.DATA_WAIT: make_spans((1, 1.5, 0, WORKER, 2)),
        layout.H2D: make_spans((1.5, 1.6, -1, 0)),
        layout.CHECKPOINT: make_spans((2, 2.5)),
    }
    rows, account, _ = settle_all(mark_steps(4, table, device=""))
    host = SOURCE_HOST_SPANS
    assert rows == [
        (1.0, 1.5, 0.5, PHASE_DATA_WAIT, host, 0),
        (1.5, 1.6, 0.1, PHASE_H2D, host, 0),
        (2.0, 2.5, 0.5, PHASE_CHECKPOINT, host, 0),
    ]
    assert account.unmeasured_ns == 0


def test_a_rank_without_device_and_spans_is_unmeasured() -> None:
    main = make_process(100, thread=make_thread(parse_activity("U4"), 4))
    lost_intervals, state = find_lost_intervals(
        make_rank(4, main, device="", marked=False), RankState(), last=True
    )
    assert lost_intervals == ()
    assert (state.first_ns, state.last_ns, state.step_begin_ns) == (0, ns(4), None)


def test_phases_are_disjoint_and_follow_the_precedence() -> None:
    # one wait for a worker [0, 1) with gc inside, a save over its end, a wait of its own with gc
    table = {
        layout.STEP: make_spans((0, 4, 0)),
        layout.DATA_WAIT: make_spans((0, 1, 0, WORKER, 2), (2, 3, 1, 0, 0)),
        layout.GC: make_spans((0.2, 0.4), (2.2, 2.4), (3.5, 3.6)),
        layout.CHECKPOINT: make_spans((0.8, 1.2)),
    }
    rows, _, _ = settle_all(mark_steps(4, table, device=""))
    assert [(start, end, phase) for start, end, _, phase, _, _ in rows] == [
        (0.0, 0.2, PHASE_DATA_WAIT),
        (0.2, 0.4, PHASE_DATA_WAIT),  # gc beside a wait for a worker costs nothing by itself
        (0.4, 0.8, PHASE_DATA_WAIT),
        (0.8, 1.0, PHASE_CHECKPOINT),
        (1.0, 1.2, PHASE_CHECKPOINT),
        (2.0, 2.2, PHASE_DATA_WAIT),
        (2.2, 2.4, PHASE_GC),  # here the process loads itself: gc is what it waits for
        (2.4, 3.0, PHASE_DATA_WAIT),
        (3.5, 3.6, PHASE_GC),
    ]


def test_stream_events_are_exact_and_samples_give_the_rest() -> None:
    # wait [1.0, 1.04) measured as 0.01 exposed; the window [1.0, 1.1) was idle for 0.03 in all
    table = {
        layout.STEP: make_spans((1, 2, 0)),
        layout.DATA_WAIT: make_spans((1, 1.04, 0, WORKER, 2)),
        layout.EXPOSED: make_spans((1, 1.04, 1, ns(0.01))),
    }
    series = {BUSY: make_busy_counter([(0, 1), (1.03, 3)], 3)}
    rows, account, _ = settle_all(mark_steps(3, table, series))
    assert rows == [
        (1.03, 1.04, 0.01, PHASE_DATA_WAIT, SOURCE_STREAM_EVENTS, 0),
        (1.04, 1.1, 0.02, PHASE_COMPUTE, SOURCE_DEVICE_SAMPLES, 0),
    ]
    assert account.stream_intervals == 1


def test_stream_events_without_a_device_replace_the_upper_bound() -> None:
    table = {
        layout.STEP: make_spans((0, 1, 0), (1, 2, 1)),
        layout.DATA_WAIT: make_spans((0, 0.5, 0, WORKER, 2), (1, 1.5, 1, WORKER, 2)),
        layout.EXPOSED: make_spans((0, 0.5, 1, 0), (1, 1.5, 2, ns(0.2))),  # the first was hidden
    }
    rows, _, _ = settle_all(mark_steps(3, table, device=""))
    assert rows == [(1.3, 1.5, 0.2, PHASE_DATA_WAIT, SOURCE_STREAM_EVENTS, 1)]


def test_time_without_samples_is_neither_busy_nor_idle() -> None:
    table = {layout.STEP: make_spans((1, 6, 0)), layout.DATA_WAIT: make_spans((1, 6, 0, WORKER, 2))}
    # samples 0..3 s; the counter is exact over the missing reading at 2; it restarts at 4
    series = {BUSY: make_counter([0, 1, 2, 3, 4, 5], [0, 0, np.nan, 1.5e9, 0, 0.25e9])}
    rows, account, _ = settle_all(mark_steps(7, table, series))
    # [1, 3): 2 - 1.5 idle; [3, 4): went back, unmeasured; [4, 5): 0.75 idle; [5, 6): no sample
    assert [(start, end, idle) for start, end, idle, *_ in rows] == [
        (2.5, 3.0, 0.5),
        (4.25, 5.0, 0.75),
    ]
    assert (account.measured_ns, account.unmeasured_ns) == (ns(3), ns(2))


def test_late_busy_readings_are_assigned_to_earlier_windows() -> None:
    table = {
        layout.STEP: make_spans((0, 0.5, 0)),
        layout.DATA_WAIT: make_spans((0, 0.5, 0, WORKER, 2)),
    }
    # the driver hands its buffer over at 0.3 and 0.5: 0.25 s and 0.15 s at once
    busy = [0, 0, 0, 0.25e9, 0.25e9, 0.4e9]
    series = {BUSY: make_counter([0, 0.1, 0.2, 0.3, 0.4, 0.5], busy)}
    rows, account, _ = settle_all(mark_steps(0.6, table, series))
    # idle so far: 0 .1 .2 .05 .15 .1 -> least of what follows: 0 .05 .05 .05 .1 .1
    assert [(s, e, round(idle, 9)) for s, e, idle, *_ in rows] == [
        (0.05, 0.1, 0.05),
        (0.35, 0.4, 0.05),
    ]
    assert account.idle_ns == ns(0.1)


def test_busy_ratio_snapshots_replace_a_missing_busy_counter() -> None:
    table = {layout.STEP: make_spans((0, 6, 0)), layout.DATA_WAIT: make_spans((0, 6, 0, WORKER, 2))}
    ratio = make_gauge([0, 1, 2, 3, 6], [0.5, 1.0, 0.25, np.nan, 1.0])
    timeline = mark_steps(6, table, {("gpu.busy_ratio", "emulated-0"): ratio})
    rows, account, _ = settle_all(timeline)
    # each holds for the time before it: [1, 2) 0.75 idle; not known at 3; 3 s are too long a hold
    assert [(start, end, idle) for start, end, idle, *_ in rows] == [(1.25, 2.0, 0.75)]
    assert (account.measured_ns, account.unmeasured_ns) == (ns(2), ns(4))


def test_a_slowed_device_loses_the_missing_part_of_its_clock() -> None:
    table = {
        layout.STEP: make_spans((0, 2, 0)),
        layout.DATA_WAIT: make_spans((0, 0.4, 0, WORKER, 2)),
    }
    series = {
        BUSY: make_counter([0, 1, 2], [0, 0.8e9, 1.8e9]),
        ("gpu.throttle_bits", "emulated-0"): make_gauge([0, 1, 2], [0x40, 0x4, 0]),
        ("gpu.sm_clock_hertz", "emulated-0"): make_gauge([0, 1, 2], [1.5e9, 1.0e9, 2e9]),
        ("gpu.sm_clock_max_hertz", "emulated-0"): make_gauge([0, 1, 2], [2e9, 2e9, 2e9]),
    }
    rows, _, _ = settle_all(mark_steps(2, table, series))
    # [0, 1): 0.2 idle in the wait, 0.8 busy at 3/4 of the clock: 0.2 excess, at the piece's tail.
    # [1, 2): the power cap alone (0x4) is no fault.
    assert rows == [
        (0.2, 0.4, 0.2, PHASE_DATA_WAIT, SOURCE_DEVICE_SAMPLES, 0),
        (0.8, 1.0, 0.2, PHASE_THROTTLED, SOURCE_DEVICE_SAMPLES, 0),
    ]


def test_device_activity_bounds_the_working_time_without_spans() -> None:
    main = make_process(100, thread=make_thread(parse_activity("U10"), 10))
    series = {BUSY: make_busy_counter([(2, 3), (4, 5)], 10, hz=1)}
    timeline = make_rank(10, main, series=series, marked=False)
    rows, account, state = settle_all(timeline)
    # work from 2 to 5, idle in [3, 4); before is start-up, after is not in steps
    assert rows == [(3.0, 4.0, 1.0, PHASE_NONE, SOURCE_DEVICE_SAMPLES, -1)]
    assert (state.step_begin_ns, state.step_end_ns) == (ns(2), ns(5))
    assert account.measured_ns == ns(3)


def test_a_chunk_is_settled_up_to_the_sample_before_its_last_step_end() -> None:
    table = {layout.STEP: make_spans((1, 2, 0), (2, 66.55, 1))}
    series = {BUSY: make_busy_counter([(0, 70)], 70)}
    timeline = mark_steps(70, table, series)
    assert not make_chunk(
        70
    ).series  # the builder's chunk is the whole recording unless said otherwise
    lost_intervals, state = find_lost_intervals(timeline, RankState())
    assert state.settled_ns == ns(66.5)
    assert [
        (region.start_ns, region.end_ns, region.provisional) for region, _, _ in lost_intervals
    ] == [(ns(1), ns(66.5), False)]


def test_time_is_settled_after_a_minute_or_at_recording_end() -> None:
    table = {layout.STEP: make_spans((1, 2, 0), (2, 50.55, 1))}
    timeline = mark_steps(60, table, {BUSY: make_busy_counter([(0, 60)], 60)})
    lost_intervals, state = find_lost_intervals(timeline, RankState())
    assert (lost_intervals, state.settled_ns) == ((), ns(1))
    lost_intervals, state = find_lost_intervals(timeline, state, last=True)
    assert [(region.start_ns, region.end_ns) for region, _, _ in lost_intervals] == [
        (ns(1), ns(50.55))
    ]


def test_idle_shares_of_the_first_minute_use_the_whole_minute() -> None:
    # 20 steps of 1 s: a wait of 0.2 s through which the queue lasts, then computing, half of it
    # idle. By a fixed order of phases the waits would be idle for 3 of the 8 s.
    waits = [(at, at + 0.2, at, WORKER, 2) for at in range(20)]
    table = {
        layout.STEP: make_spans(*((at, at + 1, at) for at in range(20))),
        layout.DATA_WAIT: make_spans(*waits),
    }
    busy = [(at, at + 0.2) for at in range(20)]
    busy += [(at + 0.2 + n / 10, at + 0.25 + n / 10) for at in range(20) for n in range(8)]
    rows, _, _ = settle_all(
        mark_steps(20, table, {BUSY: make_busy_counter(sorted(busy), 20, hz=2)})
    )
    in_waits = sum(row[2] for row in rows if row[3] == PHASE_DATA_WAIT)
    assert in_waits < 0.001
    assert round(sum(row[2] for row in rows), 6) == 8.0
