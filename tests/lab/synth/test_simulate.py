"""The generator: truths that can be computed by hand, and stories that hold together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clusterprof.probe import layout
from clusterprof_lab import truth as truth_file
from clusterprof_lab.scenario import ExpectedVerdict, Scenario, Trial, load_corpus
from clusterprof_lab.synth import simulate_truth
from clusterprof_lab.synth.simulate import run_job, simulate_trial
from clusterprof_lab.synth.simulate_faults import Fault, Faults
from clusterprof_lab.synth.simulate_job import Job
from clusterprof_lab.synth.simulate_nodes import make_nodes
from clusterprof_lab.synth.simulate_plan import MS, Plan, PlanError, draw_plan
from clusterprof_lab.synth.story import Story, Thread
from clusterprof_lab.synth.wait_truth import explain_wait, split_by_weight

CORPUS = {scenario.id: scenario for scenario in load_corpus()}
PLAIN = Plan(
    layout="data-parallel",
    nodes=2,
    per_node=1,
    steps=4,
    compute_ns=90 * MS,
    chunks=1,
    launch_ns=0,
    depth=100,
    collectives="host",
    transfer_ns=5 * MS,
    link_bytes_per_second=1_000_000_000,
    copy_ns=0,
    workers=1,
    prefetch=2,
    read_ns=0,
    decode_ns=0,
    read={"doing": "block-io", "resource": "vdb"},
    jitter=0.0,
    startup_ns=MS,
)
READ = ({"doing": "block-io", "resource": "vdb", "mib_per_second": 100},)


def _rows(jobs: list[Job], faults: Faults) -> dict[tuple[str, int | None, int], int]:
    """Return what was lost in steps, by cause, culprit and who felt it; without the loop itself."""
    trial = Trial(CORPUS["null-clean"], "mild", 0, "dev")
    end = max(p.t for p in jobs[0].players) + MS
    truth = simulate_truth.build_truth(trial, jobs, faults, 0, end, 0.0, {})
    return {(r.cause, r.culprit, r.rank): r.ns for r in truth.lost if r.cause != truth_file.OTHER}


def _once(kind: str, cause: str, ns: int, rank: int = 1, **more: object) -> Faults:
    """Return a fault that strikes in the second of four steps."""
    fault = Fault(kind, cause, (rank,), (rank,), every=2, onset=1, noise=_ones(), **more)  # type: ignore[arg-type]
    faults = Faults((fault,))
    fault.noise[:, 2:] = 0.0
    faults.set_sizes([ns / 2])
    return faults


def _ones() -> np.ndarray:
    return np.ones((8, 64))


@pytest.mark.parametrize("collectives", ["host", "device"])
def test_a_slow_read_costs_both_ranks_its_exposed_part(collectives: str) -> None:
    """Batch 1 is asked for as step 0 begins, which takes 90 + 1.8 of optimizer + 5 ms."""
    plan = replace(PLAIN, collectives=collectives, depth=1)
    faults = _once("loader", "storage-local", 200 * MS, acts=READ)
    clean, bad = run_job(plan, Faults(())), run_job(plan, faults)
    rows = _rows(bad, faults)
    moving = 4 * 5 * MS
    late = rows[("storage-local", 1, 1)]
    assert rows == {
        ("net-transfer", None, 0): moving,
        ("net-transfer", None, 1): moving,
        ("storage-local", 1, 0): rows[("storage-local", 1, 0)],
        ("storage-local", 1, 1): late,
    }
    longer = simulate_truth.compute_step_ns(bad) * 4 - simulate_truth.compute_step_ns(clean) * 4
    assert 100 * MS < late < 110 * MS
    assert abs(longer - late) < MS
    assert abs(rows[("storage-local", 1, 0)] - late) < MS


def test_a_prefetched_slow_read_costs_nothing() -> None:
    faults = _once("loader", "storage-local", 60 * MS, acts=READ)
    assert {cause for cause, _, _ in _rows(run_job(PLAIN, faults), faults)} == {"net-transfer"}


def test_a_pause_of_50_ms_gives_exact_truth_rows() -> None:
    """The pause begins as the device runs the optimizer for 1.8 ms, 0.05 ms after the host came.

    Rank 0 waits as long; what rank 1 had more of is 50 ms of pause and 0.05 ms of the loop.
    """
    faults = _once("main", "cpu-gc", 50 * MS, where="forward", mark=layout.GC)
    jobs = run_job(PLAIN, faults)
    assert _rows(jobs, faults) == {
        ("net-transfer", None, 0): 20 * MS,
        ("net-transfer", None, 1): 20 * MS,
        ("cpu-gc", 1, 0): 48_250_000 * 50_000 // 50_050,
        ("cpu-gc", 1, 1): 48_250_000,
    }
    pauses = [m for m in jobs[0].players[1].rank.main.marks if m.kind == layout.GC]
    assert [m.end_ns - m.start_ns for m in pauses] == [50 * MS]


def test_extra_work_costs_waiting_ranks_and_slow_work_all_ranks() -> None:
    more = _once("compute", "sync-imbalance", 30 * MS)
    assert _rows(run_job(PLAIN, more), more) == {
        ("net-transfer", None, 0): 20 * MS,
        ("net-transfer", None, 1): 20 * MS,
        ("sync-imbalance", 1, 0): 30 * MS,
    }
    slow = _once("compute", "device-throttled", 30 * MS, throttle_bits=32)
    assert _rows(run_job(PLAIN, slow), slow) == {
        ("net-transfer", None, 0): 20 * MS,
        ("net-transfer", None, 1): 20 * MS,
        ("device-throttled", 1, 0): 30 * MS,
        ("device-throttled", 1, 1): 30 * MS,
    }


@pytest.mark.parametrize(
    ("cause", "size_mb"), [("net-transfer", [5, 35, 5, 5]), ("net-congestion", [5, 5, 5, 5])]
)
def test_only_a_large_model_increases_the_transferred_bytes(cause: str, size_mb: list[int]) -> None:
    # 5 ms of 1 GB/s in each step, and 30 ms more in the second: of data, or of a queue.
    jobs = run_job(PLAIN, _once("transfer", cause, 30 * MS))
    marks = [m for m in jobs[0].players[1].rank.main.marks if m.kind == layout.COLLECTIVE]
    assert [m.c for m in marks] == [1_000_000 * value for value in size_mb]
    for node in make_nodes(PLAIN, jobs, Faults(()), 2_000 * MS).values():
        busy = node.extra["tcp.job_busy_ns_total", "eth0"]
        assert sum(figure.value for figure in busy) == pytest.approx(50 * MS)


def test_a_wait_is_split_by_excess_of_the_last_rank() -> None:
    late = {("work", None): 100, ("storage-local", 3): 40, ("cpu-gc", 2): 10}
    waiting = {("work", None): 90, ("storage-local", 1): 10, ("cpu-gc", 2): 10}
    assert explain_wait(late, waiting, 40, 3, False) == {
        ("storage-local", 3): 30,
        (truth_file.OTHER, 3): 10,
    }
    assert explain_wait(late, waiting, 40, 3, True) == {
        ("storage-local", 3): 30,
        ("sync-bubble", None): 10,
    }
    assert split_by_weight(10, {("a", 0): 1, ("b", 0): 1, ("c", 0): 1}) == {
        ("a", 0): 4,
        ("b", 0): 3,
        ("c", 0): 3,
    }


WITNESSED = ("cpu-gc", "storage-nfs-latency", "h2d-item-sync", "phase-checkpoint")


@pytest.mark.parametrize("name", WITNESSED)
def test_the_truth_equals_the_step_time_added_by_the_fault(name: str) -> None:
    """No label is looked at: the same job without the fault is the witness."""
    trial = Trial(CORPUS[name], "medium", 1, "dev")
    _, truth = simulate_trial(trial)
    plan, faults = draw_plan(trial)
    clean = run_job(plan, faults.set_sizes(()))
    cause = truth.injected[0].cause
    trials = truth.in_step_ns / sum(place.steps for place in truth.places)
    assert truth.step_ns is not None
    assert truth.clean_step_ns == pytest.approx(simulate_truth.compute_step_ns(clean))
    lost = sum(row.ns for row in truth.lost if row.cause == cause)
    before = sum(row.ns for row in _truth(trial, clean, faults).lost if row.cause == cause)
    steps = sum(place.steps for place in truth.places)
    assert (lost - before) / steps == pytest.approx(trials - truth.clean_step_ns, rel=0.08)
    low, high = trial.scenario.lost["medium"]
    assert low * 0.9 < (lost - before) / truth.in_step_ns < high * 1.1


def _truth(trial: Trial, jobs: list[Job], faults: Faults) -> truth_file.Truth:
    end = max(p.t for job in jobs for p in job.players) + MS
    return simulate_truth.build_truth(trial, jobs, faults, 0, end, 0.0, {})


@pytest.mark.parametrize("name", sorted(CORPUS))
def test_simulated_stories_are_consistent(name: str) -> None:
    faults = len(draw_plan(Trial(CORPUS[name], "mild", 2, "dev"))[1].all)
    sizes = [2e8 * (CORPUS[name].group != "null")] * faults
    story, truth = simulate_trial(Trial(CORPUS[name], "mild", 2, "dev"), 8, sizes)
    for rank in story.ranks:
        for thread in (rank.main, *rank.workers, *rank.threads):
            _check_acts(thread)
        _check_marks(rank.main, story)
        work = [edge for value in rank.work for edge in value[:2]]
        assert work == sorted(work)
        assert rank.node in story.nodes
        assert all(
            rank.rank >= 0 and int(rank.variables["RANK"]) in team for team in rank.groups.values()
        )
    assert sum(row.ns for row in truth.lost) < truth.in_step_ns
    assert all(row.ns > 0 for row in truth.lost)
    wanted = CORPUS[name].wanted
    assert {fault.cause for fault in truth.injected} == {
        *wanted.leaves[:1],
        *(leaf for _, leaf in wanted.also),
    }
    nodes = {place.rank: place.node for place in truth.places}
    for fault in truth.injected:
        count = len(fault.culprits)
        assert (
            count
            == {
                "rank": 1,
                "nobody": 0,
                "everybody": len(nodes),
                "several": count,
                "node": list(nodes.values()).count(nodes[fault.culprits[0]])
                if fault.culprits
                else -1,
            }[wanted.culprit]
        )


def _check_acts(thread: Thread) -> None:
    edges = [edge for act in thread.acts for edge in act[:2]]
    assert edges == sorted(edges), thread.name
    assert all(act.end_ns > act.start_ns for act in thread.acts)
    assert all(0 <= act.queued_ns <= act.end_ns - act.start_ns for act in thread.acts)


def _check_marks(main: Thread, story: Story) -> None:
    """Spans nest, and stand in the order in which they end: that is their sequence."""
    ends = [mark.end_ns for mark in main.marks]
    assert ends == sorted(ends)
    open_from = None
    for mark in reversed(main.marks):  # a later one that begins earlier contains, or lies behind
        assert mark.start_ns <= mark.end_ns
        if mark.kind == layout.STEP:
            open_from = mark.start_ns
        elif open_from is not None and mark.end_ns > open_from and mark.kind != layout.ALLOCATOR:
            assert mark.start_ns >= open_from  # counters are read once a second
    for mark in main.marks:
        if mark.kind == layout.EXPOSED_COLLECTIVE:
            measured = main.marks[mark.a - 1]
            assert measured.kind == layout.COLLECTIVE
            assert measured[:2] == mark[:2]


def test_a_trial_is_deterministic_and_its_splits_differ() -> None:
    trial = Trial(CORPUS["cpu-gc"], "mild", 0, "dev")
    assert simulate_trial(trial) == simulate_trial(trial)
    assert draw_plan(trial)[0] != draw_plan(replace(trial, split="test"))[0]


def test_a_job_of_many_ranks_is_simulated() -> None:
    story, truth = simulate_trial(Trial(CORPUS["storage-io-cap"], "severe", 0, "dev"), 64, [9e8])
    assert (len(story.ranks), len(story.nodes)) == (64, 8)
    assert {place.rank for place in truth.places} == set(range(64))
    blamed = {row.culprit for row in truth.lost if row.cause == "storage-local" and row.rank == 63}
    assert set(truth.injected[0].culprits) & blamed


def test_unknown_scenario_keys_are_refused() -> None:
    scenario = replace(CORPUS["cpu-gc"], synth={"fault": "main", "wher": "forward"})
    with pytest.raises(PlanError, match="cpu-gc: synth: wher"):
        draw_plan(Trial(scenario, "mild", 0, "dev"))
    assert isinstance(scenario, Scenario) and isinstance(scenario.wanted, ExpectedVerdict)
