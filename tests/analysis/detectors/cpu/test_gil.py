"""A thread that holds the interpreter: derived from the main thread's sleep and its CPU time."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from clusterprof.analysis.detectors.base import Claims
from clusterprof.analysis.detectors.cpu.gil import CpuGil
from clusterprof.analysis.timeline.model import PHASE_COMPUTE, PHASE_DATA_WAIT, Process
from clusterprof.analysis.timeline.spans import StackSamples
from clusterprof.probe import layout
from tests.support.builders import (
    make_lost_segments,
    make_process,
    make_rank,
    make_spans,
    make_thread,
    parse_activity,
)
from tests.support.data_waits import make_breakdown

PIECES = ((0, 1, 0.5, PHASE_COMPUTE), (1, 2, 0.8, PHASE_COMPUTE), (2, 3, 1.0, PHASE_DATA_WAIT))


def training(main: str, **others: str) -> Process:
    """A process whose main thread and other threads, by name, did this for 3 s."""
    tables = {100: make_thread(parse_activity(main), 3)}
    for tid, (name, doing) in enumerate(others.items(), 101):
        tables[tid] = replace(make_thread(parse_activity(doing), 3), name=name)
    return replace(make_process(100), threads=tables)


def claim(main: Process) -> Claims | None:
    fed = make_breakdown(*({} for _ in PIECES))
    return CpuGil().claim(
        make_rank(3, main), make_lost_segments(*PIECES, step=3), fed, CpuGil.Limits()
    )


def test_lock_time_while_another_thread_computes_is_claimed() -> None:
    # [0, 1): 0.6 s on the lock, 0.5 lost: all. [1, 2): 0.4 s of 0.8 lost. A data wait is no step.
    got = claim(training("U0.4 L0.6 U0.6 L0.4 L1", python="U3", pt_nccl_watchdg="S3"))
    assert got is not None
    np.testing.assert_allclose(got.share, [1.0, 0.5, 0.0])
    assert (got.grade, got.resource) == ("B", "thread python 101")
    # weighted by what is claimed of 0.5 and 0.8 s: (0.6 + 0.4) * … / …; the other: always
    values = {item.name: item.value for item in got.evidence}
    assert values["other_thread.on_cpu_ratio"] == pytest.approx(1.0)
    assert values["thread.on_lock_ratio"] == pytest.approx((0.5 * 0.6 + 0.8 * 0.4) / 1.3)


def test_the_claim_is_limited_to_compute_of_the_other_thread() -> None:
    # the other computes 0.55 s of the first second and 0.2 s of the second: of 0.8 lost, 0.25
    got = claim(training("L0.55 S0.45 L0.2 S1.8", python="U0.55 S0.45 U0.2 S0.8 S1"))
    np.testing.assert_allclose(got.share, [1.0, 0.25, 0.0])
    got = claim(training("S1 L0.6 S1.4", python="S1 U0.6 S0.4 S1"))
    np.testing.assert_allclose(got.share, [0.0, 0.75, 0.0])


def test_usual_lock_sleep_is_not_an_interpreter_wait() -> None:
    # samples every 0.1 s: of 10 while the other ran 8 on a lock, of 10 while it rested 3: 5 / 7 of
    # the 1 s in which it ran and the main thread slept, of which 0.5 s are lost
    main = "L0.8 S0.2 L0.3 S0.7 S1"
    got = claim(training(main, python="U1 S2"))
    np.testing.assert_allclose(got.share, [5 / 7, 0.0, 0.0])
    # as often in either
    got = claim(training("L0.5 S0.5 L0.5 S0.5 S1", python="U1 S2"))
    np.testing.assert_array_equal(got.share, [0.0, 0.0, 0.0])
    # the main thread waits for the device there, and says so
    marked = training("L3", python="U1 S2")
    marked = replace(marked, spans={layout.SYNC: make_spans((0, 2, layout.WHOLE_NS, 9))})
    np.testing.assert_array_equal(claim(marked).share, [0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("main", "others"),
    [
        ("L3", {"pt_autograd_0": "U3"}),  # the backward pass: it launches for the main thread
        ("L3", {"python": "S3"}),  # on a lock, and nobody computes
        ("S3", {"python": "U3"}),  # asleep elsewhere
        ("U3", {"python": "U3"}),  # at work
        ("U2 L1", {"python": "U3"}),  # on a lock in no step
        ("L3", {"python": "S0.01 U0.08 S2.91"}),  # hardly while the other ran
        ("L3", {}),
    ],
)
def test_uncontested_interpreter_time_is_not_claimed(main, others) -> None:
    np.testing.assert_array_equal(claim(training(main, **others)).share, [0, 0, 0])


def test_unnamed_threads_give_no_claim() -> None:
    unnamed = training("L3", python="U3")
    unnamed = replace(
        unnamed, threads={tid: replace(value, name="") for tid, value in unnamed.threads.items()}
    )
    assert claim(unnamed) is None


def keeping(*waits: tuple[float, float, int]) -> dict:
    return {layout.INTERPRETER_WAIT: make_spans(*waits)}


def test_lock_time_while_c_code_holds_the_interpreter_is_claimed() -> None:
    # Waits from 0.2 to 0.6 s and from 1.1 to 1.5 s, after pauses of 0.1 s: kept from 0.15 and 1.05
    # on. Nobody was on a CPU. [0, 1): 0.45 kept of 0.5 lost; [1, 2): 0.45 of 0.8.
    waits = keeping((0.2, 0.6, 100_000_000), (1.1, 1.5, 100_000_000))
    got = claim(replace(training("L3"), spans=waits))
    assert got is not None
    np.testing.assert_allclose(got.share, [0.45 / 0.5, 0.45 / 0.8, 0.0])
    assert (got.grade, got.resource) == ("A", "")
    values = {item.name: item.value for item in got.evidence}
    assert values["interpreter.kept_ratio"] == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("main", "others"),
    [
        ("U3", {}),  # it keeps the lock itself
        ("S3", {}),  # it sleeps elsewhere
        ("L3", {"pt_autograd_0": "U3"}),  # the backward pass keeps the lock for it
    ],
)
def test_a_held_lock_without_contention_is_not_claimed(main, others) -> None:
    waits = keeping((0.2, 0.6, 100_000_000), (1.1, 1.5, 100_000_000))
    got = claim(replace(training(main, **others), spans=waits))
    np.testing.assert_array_equal(got.share, [0, 0, 0])


def test_held_and_contested_lock_time_is_claimed_together() -> None:
    # Kept from 0 to 1 s by C code, of 0.5 s lost. From 1 to 2 s another thread computes. That the
    # main thread also slept on a lock while that one rested says nothing: it was kept then.
    waits = keeping((0.1, 1.0, 200_000_000))
    got = claim(replace(training("L2 S1", python="S1 U1 S1"), spans=waits))
    assert got is not None
    np.testing.assert_allclose(got.share, [1.0, 1.0, 0.0])
    assert (got.grade, got.resource) == ("B", "thread python 101")  # of the larger part


@pytest.mark.parametrize(("late", "claimed"), [(20, 1.0), (5, 0.25), (0, 0.0)])
def test_the_claim_is_limited_by_late_probe_samples(late: int, claimed: float) -> None:
    # 20 samples in 2 s, of which these came 5 ms late. All of 1.3 s lost would be claimed: 2 s
    # on a lock beside a thread that computes, perhaps in C code that released the lock.
    start_ns = np.arange(20) * 100_000_000
    zero = np.zeros(20, np.int64)
    end_ns = start_ns + np.where(np.arange(20) < late, 5_000_000, 100_000)
    stacks = StackSamples(start_ns, end_ns, np.arange(20), zero + 1, zero, zero, zero)
    main = replace(training("L2 S1", python="U3"), stacks=stacks)
    got = claim(main)
    assert got is not None
    np.testing.assert_allclose(got.share, [claimed, claimed, 0.0])


def test_threads_computing_in_turn_count_together() -> None:
    # Each computes for one of two seconds in which the main thread is on a lock.
    got = claim(training("L2 U1", first="U1 S2", second="S1 U1 S1"))
    assert got is not None
    np.testing.assert_allclose(got.share, [1.0, 1.0, 0.0])


def sampled(main: Process, late_running: int, late_resting: int) -> Process:
    """Add ten stacks in each of two seconds, of which some came 5 ms late."""
    late = np.arange(20) % 10 < np.repeat((late_running, late_resting), 10)
    start_ns, zero = np.arange(20) * 100_000_000, np.zeros(20, np.int64)
    end_ns = start_ns + np.where(late, 5_000_000, 100_000)
    stacks = StackSamples(start_ns, end_ns, np.arange(20), zero + 1, zero, zero, zero)
    return replace(main, stacks=stacks)


@pytest.mark.parametrize(
    ("late_running", "late_resting", "share"),
    [
        (9, 3, 2 / 3),  # 0.6 of the 0.7 more
        (10, 2, 7 / 9),  # the 0.7 more of 0.9
        (3, 3, 0.0),  # the other computes in C code for the main thread, and the lock is free
    ],
)
def test_extra_sleep_while_another_thread_runs_is_claimed(
    late_running: int, late_resting: int, share: float
) -> None:
    # On a lock in 9 of 10 samples while the other runs, in 2 of 10 while it rests; never elsewhere.
    main = training("L0.9 U0.1 L0.2 U1.8", python="U1 S2")
    got = claim(sampled(main, late_running, late_resting))
    np.testing.assert_allclose(got.share, [share, 0.0, 0.0])


def test_sleep_outside_locks_is_no_wait_for_the_lock() -> None:
    # While the other runs: on a lock in 6 of 10 samples, in a timer in 3. Of the 0.9 s asleep two
    # thirds are on a lock, and 0.4 of these 0.6 are more than while it rests.
    main = training("L0.6 S0.3 U0.1 L0.2 U1.8", python="U1 S2")
    got = claim(sampled(main, 9, 3))
    np.testing.assert_allclose(got.share, [4 / 9, 0.0, 0.0])


def test_a_thread_is_not_resting_before_it_is_observed() -> None:
    # The other thread is seen from 1 s on. What the main thread did before says nothing of rest.
    main = training("L0.2 U0.8 L0.9 U1.1", python="S1 U1 S1")
    seen = main.threads[101]
    columns = {item.name: getattr(seen, item.name) for item in fields(seen)}
    later = {
        name: value[seen.t_ns >= 1_000_000_000]
        for name, value in columns.items()
        if isinstance(value, np.ndarray) and value.shape == seen.t_ns.shape
    }
    unseen = replace(main, threads={**main.threads, 101: replace(seen, **later)})
    got = claim(sampled(main, 3, 9))
    np.testing.assert_allclose(got.share, [0.0, 2 / 3, 0.0])
    got = claim(sampled(unseen, 3, 9))
    np.testing.assert_array_equal(got.share, [0.0, 0.0, 0.0])
