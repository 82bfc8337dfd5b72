"""A batch that is ready and not handed over: what the worker's interpreter was busy with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.analysis.timeline.data_wait.split import split_data_wait
from clusterprof.analysis.timeline.model import DataWaitBreakdown
from clusterprof.analysis.timeline.spans import StackSamples
from clusterprof.probe.layout import DATA_WAIT, FETCH, GC, STEP, WORKER_START
from tests.support.builders import (
    make_fetches,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    parse_activity,
    to_ns_array,
)

MAIN, WORKER, MIB = 100, 201, 1 << 20


def test_a_busy_worker_interpreter_delays_batch_delivery() -> None:
    # The wait is from 1 to 7: until 2 for the batch, then 5 s until it is handed over. From 3 on
    # the worker makes the next one: 2 of 5 s its own code, 1 s page faults, 2 s reads, in which the
    # interpreter is free. Of those 4 s in the wait, 1.6, 0.8 and 1.6.
    rows = parse_activity("U3 U2 M1 D2")
    marks = {
        FETCH: make_fetches(rows, (0, 2, 0), (3, 8, MIB)),
        WORKER_START: make_spans((-1, -1, 0, 1)),
    }
    worker = make_process(WORKER, MAIN, marks, make_thread(rows, end=12))
    main = make_process(
        MAIN, spans={DATA_WAIT: make_spans((1, 7, 0, WORKER, 1)), STEP: make_spans((0, 20))}
    )
    breakdown = split_data_wait(make_rank(30, main, [worker]), to_ns_array([1]), to_ns_array([7]))
    assert breakdown.user_cpu[0] == pytest.approx((1 + 1.6) / 6, abs=1e-3)
    assert breakdown.memory[0] == pytest.approx(0.8 / 6, abs=1e-3)
    assert breakdown.delivery[0] == pytest.approx((1 + 1.6) / 6, abs=1e-3)
    assert breakdown.block_io[0] == 0


def split_wait_with_own_work(main: str) -> DataWaitBreakdown:
    """The batch is ready a second after the wait has begun; until the first fetch there is none."""
    rows = parse_activity("S1 U1 S8")
    marks = {
        FETCH: make_fetches(rows, (1, 2, 0), (8, 9, 0)),
        WORKER_START: make_spans((-1, -1, 0, 1)),
    }
    worker = make_process(WORKER, MAIN, marks, make_thread(rows, end=10))
    waits = {DATA_WAIT: make_spans((0, 8, 0, WORKER, 1)), STEP: make_spans((0, 20))}
    trains = make_process(MAIN, spans=waits, thread=make_thread(parse_activity(main), end=10))
    return split_data_wait(make_rank(30, trains, [worker]), to_ns_array([0]), to_ns_array([8]))


def test_index_drawing_by_the_training_thread_is_not_delivery() -> None:
    # It computes for 5 of the 8 s, and for one of them has no CPU. The worker had no task for one
    # second, and was done after another one. Of its 7 idle seconds 5 are the training thread's.
    breakdown = split_wait_with_own_work("S1 S1 U3 R1 U1 S3")
    assert breakdown.user_cpu[0] == pytest.approx((1 + 4) / 8, abs=0.02)
    assert breakdown.runnable[0] == pytest.approx(1 / 8, abs=0.02)
    assert breakdown.delivery[0] == pytest.approx(6 / 8 * 2 / 7, abs=0.02)
    assert breakdown.no_work[0] == pytest.approx(1 / 8 * 2 / 7, abs=0.02)
    assert breakdown.worker_pid[0] == MAIN


def test_a_sleeping_training_thread_adds_no_own_work() -> None:
    breakdown = split_wait_with_own_work("S10")
    assert breakdown.delivery[0] == pytest.approx(6 / 8)
    assert breakdown.user_cpu[0] == pytest.approx(1 / 8)
    assert breakdown.worker_pid[0] == WORKER


@pytest.mark.parametrize(("is_recorded", "delivery"), [(True, 1.0), (False, 0.0)])
def test_stack_samples_between_fetches_do_not_count_as_missing(
    is_recorded: bool, delivery: float
) -> None:
    # The batch is ready at 2, a second before the wait. The record after its fetch has number 2: a
    # sample of the stack, or one that was lost and may have been the fetch that was waited for.
    rows = parse_activity("U2 S8")
    made = replace(make_fetches(rows, (0, 2, 0), (6, 7, 0)), sequence=np.array([1, 3]))
    sample = replace(make_spans((5, 5, 1, 50_000_000)), sequence=np.array([2]))
    worker = make_process(WORKER, MAIN, {FETCH: made}, make_thread(rows, end=12))
    stacks = StackSamples.from_table(sample) if is_recorded else None
    main = make_process(
        MAIN, spans={DATA_WAIT: make_spans((3, 4, 0, WORKER, 1)), STEP: make_spans((0, 20))}
    )
    timeline = make_rank(30, main, [replace(worker, stacks=stacks)])
    breakdown = split_data_wait(timeline, to_ns_array([3]), to_ns_array([4]))
    assert (breakdown.delivery[0], breakdown.unknown[0]) == (delivery, 1.0 - delivery)


def test_other_records_before_the_first_fetch_are_skipped() -> None:
    # worker_init_fn runs from 0 to 4; garbage is collected meanwhile.
    rows = parse_activity("U4 U2 S4")
    marks = {
        WORKER_START: replace(make_spans((0, 0, 0, 1, MAIN)), sequence=np.array([7])),
        GC: replace(make_spans((1, 2)), sequence=np.array([8])),
        FETCH: replace(make_fetches(rows, (4, 6, 0)), sequence=np.array([9])),
    }
    worker = make_process(WORKER, MAIN, marks, make_thread(rows, end=12))
    main = make_process(
        MAIN, spans={DATA_WAIT: make_spans((0, 6, 0, WORKER, 1)), STEP: make_spans((0, 20))}
    )
    breakdown = split_data_wait(make_rank(30, main, [worker]), to_ns_array([0]), to_ns_array([6]))
    assert breakdown.no_worker[0] == pytest.approx(4 / 6)
    assert breakdown.user_cpu[0] == pytest.approx(2 / 6)
