"""Without a device, a main thread that sleeps in a step launches nothing: by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from clusterprof.analysis.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    SOURCE_HOST_SPANS,
    SOURCE_STREAM_EVENTS,
)
from clusterprof.analysis.timeline.spans import SpanTable
from clusterprof.probe import layout
from tests.support.builders import (
    make_busy_counter,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)
from tests.support.lost_time import BUSY, WORKER, settle_all

HOST = SOURCE_HOST_SPANS
Row = tuple[float, float, float, int, int, int]


def settle(
    doing: str,
    marks: Mapping[int, SpanTable] | None = None,
    busy: Sequence[tuple[float, float]] | None = None,
    denied: Sequence[str] = (),
    sampled: bool = True,
) -> list[Row]:
    """The lost time of one step, [0, 4), in which the main thread does something."""
    samples = make_thread(parse_activity(doing), 4, denied=denied) if sampled else None
    main = make_process(
        100, spans={layout.STEP: make_spans((0, 4, 0)), **(marks or {})}, thread=samples
    )
    series = None if busy is None else {BUSY: make_busy_counter(busy, 4)}
    rows, _, _ = settle_all(
        make_rank(4, main, series=series, device="" if busy is None else BUSY[1])
    )
    return rows


@pytest.mark.parametrize("letter", ["S", "L", "I", "W", "D", "F"])
def test_sleep_of_any_kind_inside_a_step_is_lost(letter: str) -> None:
    assert settle(f"U1 {letter}1 U1 {letter}1") == [(0.0, 4.0, 2.0, PHASE_COMPUTE, HOST, 0)]


@pytest.mark.parametrize("doing", ["U4", "K4", " ".join(["U0.99 R0.01"] * 4)])
def test_a_working_main_thread_loses_no_time(doing: str) -> None:
    assert settle(doing) == []  # a hundredth is what every scheduler costs


def test_runnable_time_without_a_cpu_is_lost() -> None:
    assert settle("U2 R2") == [(0.0, 4.0, 2.0, PHASE_COMPUTE, HOST, 0)]


def test_a_wait_counts_in_full_and_sleep_only_outside_waits() -> None:
    # [1, 2) is a wait for data; of the two seconds after it one is asleep
    marks = {layout.DATA_WAIT: make_spans((1, 2, 0, WORKER, 1))}
    assert settle("U1 I1 U1 S1", marks) == [
        (1.0, 2.0, 1.0, PHASE_DATA_WAIT, HOST, 0),
        (2.0, 4.0, 1.0, PHASE_COMPUTE, HOST, 0),
    ]
    # awake in the wait, asleep before and after it
    assert settle("S1 U1 S2", marks) == [
        (0.0, 1.0, 1.0, PHASE_COMPUTE, HOST, 0),
        (1.0, 2.0, 1.0, PHASE_DATA_WAIT, HOST, 0),
        (2.0, 4.0, 2.0, PHASE_COMPUTE, HOST, 0),
    ]


def settle_rarely_read(doing: str, with_worker: bool, kind: int = layout.DATA_WAIT) -> list[Row]:
    """The lost time of a step in which the main thread waits for [1, 3), read at 0 and 4 only."""
    samples = make_thread(parse_activity(doing), 4.001, hz=0.25)
    wait = (1, 3, 0, WORKER, 1) if kind == layout.DATA_WAIT else (1, 3, 7, 0, 0, layout.ALL_REDUCE)
    marks = {layout.STEP: make_spans((0, 4, 0)), kind: make_spans(wait)}
    main = make_process(100, spans=marks, thread=samples)
    workers = [make_process(WORKER)] if with_worker else []
    rows, _, _ = settle_all(make_rank(4, main, workers, device=""))
    return rows


@pytest.mark.parametrize("kind", [layout.DATA_WAIT, layout.COLLECTIVE])
def test_cpu_time_between_two_readings_is_placed_outside_waits(kind: int) -> None:
    phase = PHASE_DATA_WAIT if kind == layout.DATA_WAIT else PHASE_COLLECTIVE
    wait = (1.0, 3.0, 2.0, phase, HOST, 0)
    # 2 s on a CPU fill the 2 s outside the wait
    assert settle_rarely_read("U1 I2 U1", True, kind) == [wait]
    # 1 s on a CPU does so by half, as far as is known
    assert settle_rarely_read("U1 I3", True, kind) == [
        (0.0, 1.0, 0.5, PHASE_COMPUTE, HOST, 0),
        wait,
        (3.0, 4.0, 0.5, PHASE_COMPUTE, HOST, 0),
    ]


def test_a_thread_without_workers_may_work_in_its_waits_for_data() -> None:
    # 3 s on a CPU of 4 s, three quarters of each part
    assert settle_rarely_read("U3 I1", False) == [
        (0.0, 1.0, 0.25, PHASE_COMPUTE, HOST, 0),
        (1.0, 3.0, 2.0, PHASE_DATA_WAIT, HOST, 0),
        (3.0, 4.0, 0.25, PHASE_COMPUTE, HOST, 0),
    ]


def test_a_device_wait_of_the_main_thread_is_not_lost() -> None:
    marks = {layout.SYNC: make_spans((1, 2, layout.WHOLE_NS, 1))}
    assert settle("U1 I1 U2", marks) == []
    assert settle("U1 I1 U1 S1", marks) == [(2.0, 4.0, 1.0, PHASE_COMPUTE, HOST, 0)]
    # of 1 s of many short waits 0.4 s were waited: the other 0.6 s asleep are its own
    marks = {layout.SYNC: make_spans((1, 2, ns(0.4), 50))}
    assert settle("U1 I1 U2", marks) == [(0.0, 4.0, 0.6, PHASE_COMPUTE, HOST, 0)]


def test_sleep_in_a_wait_measured_by_events_is_not_added() -> None:
    # asleep for 1 s in a wait, of which the device had no work for 0.2
    marks = {
        layout.DATA_WAIT: make_spans((1, 2, 0, WORKER, 1), first_sequence=2),
        layout.EXPOSED: make_spans((1, 2, 2, ns(0.2))),
    }
    assert settle("U1 I1 U2", marks) == [(1.8, 2.0, 0.2, PHASE_DATA_WAIT, SOURCE_STREAM_EVENTS, 0)]


def test_sleep_during_an_operation_of_another_thread_is_lost() -> None:
    # another thread is in an operation for [1, 3), the main thread works until 2 and sleeps to 3:
    # samples show that it can have waited there
    code = layout.ALL_REDUCE | layout.OTHER_THREAD
    marks = {layout.COLLECTIVE: make_spans((1, 3, 7, 0, 0, code))}
    rows = settle("U2 I1 U1", marks)
    assert sum(row[2] for row in rows) == pytest.approx(1.0)
    assert min(row[0] for row in rows) == 2.0


def test_unread_threads_have_no_sleep_loss() -> None:
    assert settle("S4", sampled=False) == []
    assert settle("S4", denied=["on_cpu_ns"]) == []
    # how long it wanted a CPU is unknown: the rest of 4 s is the bound
    assert settle("U1 S3", denied=["run_delay_ns"]) == [(0.0, 4.0, 3.0, PHASE_COMPUTE, HOST, 0)]


def test_device_samples_take_precedence_over_thread_sleep() -> None:
    assert settle("S4", busy=[(0, 4)]) == []
