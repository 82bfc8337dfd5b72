"""Operations that other threads of a rank call: hidden while the main thread is active."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from clusterprof.analysis.attribution.rank.host_phases import measure_end_delays, split_host_phases
from clusterprof.analysis.timeline.intervals import EMPTY
from clusterprof.analysis.timeline.model import (
    PHASE_COLLECTIVE,
    PHASE_COMPUTE,
    PHASE_DATA_WAIT,
    PHASE_HIDDEN_COLLECTIVE,
    PHASE_LOCK,
    PHASE_SYNC,
    Rank,
)
from clusterprof.analysis.timeline.spans import CollectiveSpans, SpanTable
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
from tests.support.lost_time import BUSY, settle_all

COMPUTE, HIDDEN, EXPOSED = PHASE_COMPUTE, PHASE_HIDDEN_COLLECTIVE, PHASE_COLLECTIVE
GROUP = 7
OTHER = layout.ALL_REDUCE | layout.OTHER_THREAD
Part = tuple[float, float, int]


def build(
    doing: str,
    *operations: Sequence[float],
    marks: Mapping[int, SpanTable] | None = None,
    end: float = 1,
    hz: float = 1,
    sampled_s: float | None = None,
    busy: Sequence[tuple[float, float]] = (),
    variables: Mapping[str, str] | None = None,
) -> Rank:
    """A rank with one step; its operations are (start, end, code). `doing`: its main thread."""
    table = {
        layout.STEP: make_spans((0, end, 0)),
        layout.COLLECTIVE: make_spans(
            *(
                (start, stop, GROUP, at, 0, code)
                for at, (start, stop, code) in enumerate(operations)
            )
        ),
        **(marks or {}),
    }
    samples = make_thread(parse_activity(doing), sampled_s or end, hz) if doing else None
    registration = {"variables": variables or {}}
    main = make_process(100, spans=table, thread=samples, registration=registration)
    series = {BUSY: make_busy_counter(busy, end)}
    return make_rank(end, main, series=series)


def split(given: Rank, end: float = 1) -> list[Part]:
    """The phases of a rank, in seconds; neighbors of one phase are joined."""
    phases = split_host_phases(given, 0, ns(end), EMPTY)
    parts: list[Part] = []
    for start_ns, end_ns, phase in zip(
        *(c.tolist() for c in (phases.start_ns, phases.end_ns)), phases.phase.tolist()
    ):
        if parts and parts[-1][2] == phase:
            parts[-1] = (parts[-1][0], end_ns / 1e9, phase)
        else:
            parts.append((start_ns / 1e9, end_ns / 1e9, phase))
    return parts


def test_possible_main_thread_wait_lies_at_the_operation_end() -> None:
    # samples at 0 and 1, active for 0.4 s between; the operation lasts for 0.8 s: of these the main
    # thread waited for 0.6 at most
    result = split(build("U0.1 I0.6 U0.3", (0.1, 0.9, OTHER)))
    assert result == [
        (0.0, 0.1, COMPUTE),
        (0.1, 0.3, HIDDEN),
        (0.3, 0.9, EXPOSED),
        (0.9, 1.0, COMPUTE),
    ]


@pytest.mark.parametrize("doing", ["U1", "K1", "R1", "U0.5 R0.5"])
def test_an_active_main_thread_hides_the_whole_operation(doing: str) -> None:
    result = split(build(doing, (0.1, 0.9, OTHER)))
    assert result == [(0.0, 0.1, COMPUTE), (0.1, 0.9, HIDDEN), (0.9, 1.0, COMPUTE)]


@pytest.mark.parametrize("doing", ["I1", "L1", ""])
def test_a_sleeping_or_unsampled_main_thread_exposes_the_whole_operation(doing: str) -> None:
    result = split(build(doing, (0.1, 0.9, OTHER)))
    assert result == [(0.0, 0.1, COMPUTE), (0.1, 0.9, EXPOSED), (0.9, 1.0, COMPUTE)]


def test_exposed_time_is_found_separately_between_each_two_samples() -> None:
    # active in the first half second, asleep in the other
    result = split(build("U0.5 I0.5", (0.1, 0.9, OTHER), hz=2))
    assert result == [
        (0.0, 0.1, COMPUTE),
        (0.1, 0.5, HIDDEN),
        (0.5, 0.9, EXPOSED),
        (0.9, 1.0, COMPUTE),
    ]


def test_operation_time_beyond_the_samples_is_fully_exposed() -> None:
    # sampled in [0, 1) only, where the main thread works
    given = build("U1", (0.1, 1.5, OTHER), end=2, sampled_s=1)
    result = split(given, 2)
    assert result[1:3] == [(0.1, 1.0, HIDDEN), (1.0, 1.5, EXPOSED)]


def test_a_wait_for_data_is_no_wait_for_the_operation() -> None:
    # asleep for 0.6 s, 0.2 of them in a wait for data: of the 0.6 s of the operation outside it,
    # the main thread waited for the last 0.4
    marks = {layout.DATA_WAIT: make_spans((0.5, 0.7, 0, 201, 1))}
    result = split(build("U0.3 I0.6 U0.1", (0.1, 0.9, OTHER), marks=marks))
    assert result == [
        (0.0, 0.1, COMPUTE),
        (0.1, 0.3, HIDDEN),
        (0.3, 0.5, EXPOSED),
        (0.5, 0.7, PHASE_DATA_WAIT),
        (0.7, 0.9, EXPOSED),
        (0.9, 1.0, COMPUTE),
    ]


def test_an_operation_of_the_main_thread_counts_in_full() -> None:
    # it spins in its own, [0.5, 0.8); another thread is in one for [0.2, 0.6)
    given = build("U1", (0.2, 0.6, OTHER), (0.5, 0.8, layout.ALL_REDUCE))
    assert split(given) == [
        (0.0, 0.2, COMPUTE),
        (0.2, 0.5, HIDDEN),
        (0.5, 0.8, EXPOSED),
        (0.8, 1.0, COMPUTE),
    ]


@pytest.mark.parametrize("code", [OTHER, layout.ALL_REDUCE])
def test_a_single_rank_job_exposes_no_operation(code: int) -> None:
    operation = (0.1, 0.9, code)
    assert split(build("I1", operation, variables={"WORLD_SIZE": "1"})) == [(0.0, 1.0, COMPUTE)]
    assert split(build("I1", operation, variables={"WORLD_SIZE": "2"}))[1] == (0.1, 0.9, EXPOSED)


def test_idle_time_in_a_hidden_operation_counts_as_compute_loss() -> None:
    # The device idles for [0.4, 0.6); the main thread works, so it has not launched anything.
    given = build("U1", (0.1, 0.9, OTHER), hz=10, busy=[(0, 0.4), (0.6, 1)])
    rows, _, _ = settle_all(given)
    assert [row[:4] for row in rows] == [(0.4, 0.5, 0.1, COMPUTE), (0.5, 0.6, 0.1, COMPUTE)]
    given = build("I1", (0.1, 0.9, OTHER), hz=10, busy=[(0, 0.4), (0.6, 1)])
    rows, _, _ = settle_all(given)
    assert [row[:4] for row in rows] == [(0.4, 0.5, 0.1, EXPOSED), (0.5, 0.6, 0.1, EXPOSED)]


# Another thread keeps the interpreter lock: the probe's thread wanted it at 0.3, having slept since
# 0.1, and got it at 0.7. It was taken at 0.2 on average.
KEPT = {layout.INTERPRETER_WAIT: make_spans((0.3, 0.7, 200_000_000))}


def test_a_sleeping_main_thread_waits_for_a_lock_held_elsewhere() -> None:
    parts = [(0.0, 0.2, COMPUTE), (0.2, 0.7, PHASE_LOCK), (0.7, 1.0, COMPUTE)]
    assert split(build("L1", marks=KEPT)) == parts
    assert split(build("U0.8 L0.2", marks=KEPT)) == [(0.0, 1.0, COMPUTE)]  # it kept it itself


def test_a_main_thread_in_a_page_fault_keeps_the_lock_itself() -> None:
    assert split(build("D1", hz=10, marks=KEPT)) == [(0.0, 1.0, COMPUTE)]


def test_a_main_thread_in_its_own_operation_needs_no_lock() -> None:
    own = (0.1, 0.9, layout.ALL_REDUCE)
    assert split(build("L1", own, marks=KEPT)) == [
        (0.0, 0.1, COMPUTE),
        (0.1, 0.9, EXPOSED),
        (0.9, 1.0, COMPUTE),
    ]
    # but the operation of another thread does, and a main thread that waits for that one
    for operations in ([(0.1, 0.9, OTHER)], [own, (0.1, 0.15, OTHER)]):
        assert split(build("L1", *operations, marks=KEPT)) == [
            (0.0, 0.1, COMPUTE),
            (0.1, 0.2, EXPOSED),
            (0.2, 0.7, PHASE_LOCK),
            (0.7, 0.9, EXPOSED),
            (0.9, 1.0, COMPUTE),
        ]


def test_a_held_lock_delays_operation_ends_in_other_threads() -> None:
    # Kept from 0.2 to 0.7. The operations end 15 ms and 25 ms after that, while it is kept (begun
    # before and after it was taken), and before; one is the main thread's own.
    operations = [
        (0.1, 0.715, OTHER),
        (0.1, 0.725, OTHER),
        (0.1, 0.5, OTHER),
        (0.1, 0.15, OTHER),
        (0.1, 0.7, layout.ALL_REDUCE),
        (0.3, 0.6, OTHER),
    ]
    given = build("L1", *operations, marks=KEPT)
    called = given.main.get_spans(CollectiveSpans)
    assert called is not None
    delays = measure_end_delays(given, called, 0) / 1e9
    # Of the last at least 2 ms are left: it had the lock when it began.
    assert delays.tolist() == pytest.approx([0.515, 0.0, 0.3, 0.0, 0.0, 0.298])
    # of an operation that began in an earlier segment only the part in this one
    assert measure_end_delays(given, called, ns(0.4))[0] == ns(0.313)
    # The main thread that waits for the gradients of these operations needs the lock, too.
    waits = (0.1, 0.71, layout.GRADIENTS)
    with_wait = build("L1", *operations, waits, marks=KEPT).main.get_spans(CollectiveSpans)
    alone = build("L1", waits, marks=KEPT).main.get_spans(CollectiveSpans)
    assert with_wait is not None and alone is not None
    is_wait = with_wait.code & layout.OPERATION_MASK == layout.GRADIENTS
    assert measure_end_delays(given, with_wait, 0)[is_wait].tolist() == [ns(0.51)]
    assert not measure_end_delays(given, alone, 0).any()  # then its phases name no lock either
    # a main thread that computes keeps the lock itself
    busy = build("U1", *operations, marks=KEPT)
    assert not measure_end_delays(busy, called, 0).any()


GRADIENTS = layout.GRADIENTS


def test_a_gradient_wait_is_a_device_wait_before_operations_begin() -> None:
    # The main thread sleeps in [0.1, 0.9) until its gradients are reduced. Another thread reduces
    # one bucket in [0.4, 0.5) and the other in [0.8, 0.9), as the device completes them.
    given = build("U0.1 I0.8 U0.1", (0.1, 0.9, GRADIENTS), (0.4, 0.5, OTHER), (0.8, 0.9, OTHER))
    assert split(given) == [
        (0.0, 0.1, COMPUTE),
        (0.1, 0.4, PHASE_SYNC),
        (0.4, 0.5, EXPOSED),
        (0.5, 0.8, PHASE_SYNC),
        (0.8, 0.9, EXPOSED),
        (0.9, 1.0, COMPUTE),
    ]


def test_a_gradient_wait_without_a_device_is_a_rank_wait() -> None:
    given = build("U0.1 I0.8 U0.1", (0.1, 0.9, GRADIENTS), (0.4, 0.5, OTHER), (0.8, 0.9, OTHER))
    assert split(replace(given, device="")) == [
        (0.0, 0.1, COMPUTE),
        (0.1, 0.9, EXPOSED),
        (0.9, 1.0, COMPUTE),
    ]


@pytest.mark.parametrize("other", [(0.1, 0.2, OTHER), (0.9, 1.0, OTHER)])
def test_a_gradient_wait_without_concurrent_operation_is_a_rank_wait(other: Part) -> None:
    # DDP reduces them itself; what another thread does before or after is not their reduction
    given = build("I1", other, (0.3, 0.8, GRADIENTS))
    assert (0.3, 0.8, EXPOSED) in split(given)


def test_rare_overlaps_of_gradient_waits_and_operations_are_ignored() -> None:
    # three waits, in one of which a thread that writes a checkpoint meets the others
    waits = [(0.1, 0.2, GRADIENTS), (0.4, 0.5, GRADIENTS), (0.7, 0.8, GRADIENTS)]
    given = build("I1", *waits, (0.45, 0.48, OTHER))
    exposed = [part for part in split(given) if part[2] == EXPOSED]
    assert exposed == [(0.1, 0.2, EXPOSED), (0.4, 0.5, EXPOSED), (0.7, 0.8, EXPOSED)]


def test_operations_of_other_threads_are_marked_during_any_host_wait() -> None:
    # a device busy-waits in it, also while its host waits for data in [0.2, 0.7)
    given = build(
        "I1", (0.4, 0.9, OTHER), marks={layout.DATA_WAIT: make_spans((0.2, 0.7, 0, 201, 1))}
    )
    phases = split_host_phases(given, 0, ns(1), EMPTY)
    inside = phases.in_operation
    assert int((phases.end_ns - phases.start_ns)[inside].sum()) == ns(0.5)
    assert set(phases.phase[inside].tolist()) == {PHASE_DATA_WAIT, EXPOSED}
