"""The second shape of a job: sharded, several epochs with new workers each, validation, a log."""

from __future__ import annotations

from collections import Counter

from clusterprof.probe import layout
from clusterprof_lab.scenario import Trial, load_corpus
from clusterprof_lab.score.plan import plan_runs
from clusterprof_lab.synth.simulate import simulate_trial
from clusterprof_lab.synth.simulate_sharded import METRICS_RATIO

SCENARIOS = {scenario.id: scenario for scenario in load_corpus()}


def test_a_healthy_sharded_job_has_epochs_validation_and_logs() -> None:
    story, truth = simulate_trial(
        Trial(SCENARIOS["null-clean"], "medium", 1, "dev"), ranks=4, shape="sharded"
    )
    plan = truth.parameters
    assert (plan["layout"], plan["epochs"]) == ("sharded", 3)
    for rank in story.ranks:
        kinds = Counter(mark.kind for mark in rank.main.marks)
        operations = Counter(
            mark.d & layout.OPERATION_MASK
            for mark in rank.main.marks
            if mark.kind == layout.COLLECTIVE
        )
        steps = plan["steps"]
        assert kinds[layout.STEP] == kinds[layout.DATA_WAIT] == steps
        # 4 units: each gathered forward and backward, its gradients reduced once
        assert operations == {layout.ALL_GATHER: 8 * steps, layout.REDUCE_SCATTER: 4 * steps}
        assert not kinds[layout.EVAL]  # a plain loop marks no validation
        loaders = [mark for mark in rank.main.marks if mark.kind == layout.LOADER_START]
        assert [loader.d for loader in loaders] == [0, 0, 0]  # persistent_workers=False
        count = plan["workers"]
        assert len({worker.pid for worker in rank.workers}) == 3 * count
        ends = [worker.exit_ns for worker in rank.workers]
        assert ends[2 * count :] == [None] * count
        for worker, successor in zip(rank.workers, rank.workers[count:]):
            assert worker.exit_ns is not None
            assert worker.acts[-1].end_ns <= worker.exit_ns
            assert worker.marks[0].start_ns < worker.exit_ns <= successor.acts[0].start_ns
    metrics_ns = 2 * round(plan["compute_ns"] * METRICS_RATIO)
    for place in truth.places:
        own = [
            line.ns
            for line in truth.lost
            if line.cause == "eval-host" and line.rank == line.culprit == place.rank
        ]
        assert sum(own) >= metrics_ns  # rank 0 writes the log as well


def test_a_fault_costs_the_share_aimed_at_by_its_scenario() -> None:
    for name in ("cpu-heavy-transform", "net-rate-cap", "h2d-item-sync"):
        scenario = SCENARIOS[name]
        _, truth = simulate_trial(Trial(scenario, "medium", 1, "dev"), ranks=4, shape="sharded")
        [injected] = truth.injected
        cost_ns = sum(line.ns for line in truth.lost if line.cause == injected.cause)
        low, high = scenario.lost["medium"]
        assert 0.9 * low <= cost_ns / truth.in_step_ns <= 1.1 * high


def test_scenarios_without_a_fixed_layout_have_a_sharded_shape() -> None:
    works = plan_runs(tuple(SCENARIOS.values()), "dev", "ci", ["sharded"])
    names = {work.trial.scenario.id for work in works if work.trial is not None}
    left_out = {name for name in SCENARIOS if name not in names}
    assert left_out == {
        "null-two-jobs",
        "phase-hang",
        "phase-restart",
        "phase-startup",
        "sync-chain",
        "sync-heavy-last-stage",
    }
