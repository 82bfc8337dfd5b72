"""Simulated clusters: the truth of their schedule, and what the analysis makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Event, Spans
from clusterprof_lab import truth
from clusterprof_lab.cluster.__main__ import main
from clusterprof_lab.cluster.check import check_report
from clusterprof_lab.cluster.make import make_cluster, open_pool
from clusterprof_lab.cluster.plan import (
    MS,
    ClusterPlan,
    ClusterPlanError,
    Fault,
    make_plan,
    parse_fault,
)
from clusterprof_lab.cluster.schedule import FIRST_FAULT, OTHER, TRANSFER, run_schedule

STRAGGLER = Fault("straggler", 3, 0.2)


def test_without_jitter_all_ranks_wait_exactly_the_stragglers_excess(tmp_path: Path) -> None:
    plan = make_plan("data-parallel", 2, seconds=10, jitter=0.0, faults=(STRAGGLER,))
    schedule = run_schedule(plan, tmp_path / "times")
    # A fifth of 250 ms, 35 % of it before the operation within the node, 35 and twice 12.5 % before
    # the three of all ranks, and 5 % after the last, which the next step's first operation shows.
    node_ns = round(0.35 * 50 * MS)
    own = [round(share * 50 * MS) for share in (0.35, 0.125, 0.125)]
    tail_ns = round((1 - 0.95) * 50 * MS)
    steps = schedule.steps
    expected = [steps * (node_ns + sum(own)) + (steps - 1) * tail_ns] * 16
    expected[3] = 0
    assert schedule.lost[FIRST_FAULT].tolist() == pytest.approx(expected, abs=steps)
    assert schedule.lost[OTHER].tolist() == pytest.approx([steps * 200_000] * 16, abs=steps)
    # 0.4 % of a step in the node, 6 % between nodes
    assert schedule.lost[TRANSFER].tolist() == [steps * 16 * MS] * 16
    assert set(schedule.parts["compute"].tolist()[:3]) == {steps * plan.compute_ns}


def test_on_a_single_node_both_scopes_share_an_operation_sequence(tmp_path: Path) -> None:
    make_cluster(make_plan("data-parallel", 1, seconds=6), tmp_path / "run")
    (folder,) = (tmp_path / "run" / "recording").iterdir()
    numbers: dict[tuple[int, int], list[int]] = {}
    for record in NodeReader(folder):
        if isinstance(record, Spans):
            columns = record.columns
            for kind, group, number in zip(columns["kind"], columns["a"], columns["b"]):
                if kind == layout.COLLECTIVE:
                    numbers.setdefault((record.pid, int(group)), []).append(int(number))
    assert len(numbers) == 8  # ranks, each of one group
    for own in numbers.values():
        assert own == list(range(own[0], own[0] + len(own)))


@pytest.mark.parametrize(
    ("topology", "nodes", "groups"), [("data-parallel", 2, 2), ("3d", 8, 4), ("moe", 8, 3)]
)
def test_an_operation_has_the_same_number_in_all_members(
    tmp_path: Path, topology: str, nodes: int, groups: int
) -> None:
    plan = make_plan(topology, nodes, seconds=6)
    made = make_cluster(plan, tmp_path / "run")
    operations: dict[tuple[int, ...], list[int]] = {}
    announced: dict[int, tuple[int, ...]] = {}
    for folder in sorted((tmp_path / "run" / "recording").iterdir()):
        of_node = set()
        for record in NodeReader(folder):
            if isinstance(record, Event) and record.kind == "group-announced":
                attributes = record.attributes
                announced[attributes["group"]] = tuple(attributes["ranks"])
                of_node.add((attributes["pid"], attributes["group"]))
            if isinstance(record, Spans):
                _count_operations(record, operations)
        assert len(of_node) == 8 * groups
    for (group, code, number), releases in operations.items():
        if code & layout.OPERATION_MASK not in (layout.SEND, layout.RECV):
            assert len(releases) == len(announced[group]), (group, code, number)
    assert len(made.truth.places) == plan.ranks


def _count_operations(spans: Spans, operations: dict[tuple[int, ...], list[int]]) -> None:
    kind, group, number, code = (np.asarray(spans.columns[n]) for n in ("kind", "a", "b", "d"))
    for row in np.flatnonzero(kind == layout.COLLECTIVE):
        key = int(group[row]), int(code[row]), int(number[row])
        operations.setdefault(key, []).append(int(spans.columns["end_ns"][row]))


@pytest.mark.parametrize(
    ("topology", "nodes", "fault"),
    [
        ("data-parallel", 3, "straggler:11"),
        ("data-parallel", 3, "straggler:11,begin=0.4,end=0.7"),
        ("data-parallel", 3, "straggler:11,every=16,active=8"),
        ("data-parallel", 3, "slow-node:1"),
        ("data-parallel", 3, "slow-storage:2"),
        ("data-parallel", 3, "late-loader:4"),
        ("data-parallel", 3, "slow-link:1"),
        ("3d", 4, "straggler:9"),
        ("moe", 4, "slow-storage:1"),
    ],
)
def test_the_analysis_names_the_culprit_and_conserves_time(
    tmp_path: Path, topology: str, nodes: int, fault: str
) -> None:
    plan = make_plan(topology, nodes, seconds=30, faults=(parse_fault(fault),))
    made = make_cluster(plan, tmp_path)
    check = check_report(analyze(tmp_path / "recording"), made.truth, plan)
    assert check.ranks == plan.ranks
    assert (check.residual_ns, check.steps_residual_ns) == (0, 0)
    assert check.lost_ratio == pytest.approx(1.0, abs=0.01)
    assert check.right, check.faults


def test_generation_in_several_processes_gives_identical_bytes(tmp_path: Path) -> None:
    plan = make_plan("data-parallel", 3, seconds=5, faults=(STRAGGLER,))
    make_cluster(plan, tmp_path / "a")
    with open_pool(2) as run_map:
        make_cluster(plan, tmp_path / "b", run_map)
    segments = sorted((tmp_path / "a" / "recording").rglob("*.cpf"))
    assert len(segments) == 3
    for segment in segments:
        other = tmp_path / "b" / segment.relative_to(tmp_path / "a")
        assert segment.read_bytes() == other.read_bytes()
    assert truth.read_truth(tmp_path / "a") == truth.read_truth(tmp_path / "b")


def test_step_ledgers_sum_to_the_ledger_of_the_rank(tmp_path: Path) -> None:
    plan = make_plan("3d", 4, seconds=12, faults=(STRAGGLER,))
    made = make_cluster(plan, tmp_path, with_steps=True)
    for number, path in enumerate(sorted((tmp_path / "steps").iterdir())):
        steps = np.load(path)
        for local in range(8):
            rank = made.truth.places[8 * number + local]
            assert steps["in_step"][:, local].sum() == rank.in_step_ns
            idle = steps["data_wait"][:, local].sum() + steps["operations"][:, local].sum()
            assert idle == sum(row.ns for row in made.truth.lost if row.rank == rank.rank)
        assert (steps["leave"] >= steps["arrive"]).all()


@pytest.mark.parametrize(
    ("topology", "nodes", "fault"),
    [
        ("3d", 6, None),  # four stages
        ("data-parallel", 2, Fault("straggler", 16)),
        ("data-parallel", 2, Fault("slow-node", 2)),
        ("3d", 4, Fault("slow-storage", 1)),  # the second stage loads nothing
    ],
)
def test_an_impossible_cluster_plan_is_refused(
    topology: str, nodes: int, fault: Fault | None
) -> None:
    with pytest.raises(ClusterPlanError):
        make_plan(topology, nodes, faults=() if fault is None else (fault,))


def test_faults_are_active_in_their_configured_steps() -> None:
    fault = parse_fault("straggler:3,share=0.5,begin=0.5,every=4,active=2")
    assert fault == replace(STRAGGLER, share=0.5, begin=0.5, every=4, active=2)
    assert [step for step in range(16) if fault.is_active(step, 16)] == [8, 9, 12, 13]
    for wrong in ("straggler:x", "straggler:1,often=3"):
        with pytest.raises(ClusterPlanError):
            parse_fault(wrong)


def test_the_cluster_command_writes_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--out", str(tmp_path / "run"), "--ranks", "4", "--per-node", "2", "--seconds", "3"]
    assert main([*command, "--processes", "1"]) == 0
    assert "4 ranks on 2 nodes, 3 s" in capsys.readouterr().out
    assert main([*command, "--processes", "1"]) == 2  # is there already
    assert main(["--out", str(tmp_path / "x"), "--ranks", "3"]) == 2
    assert isinstance(make_plan("data-parallel", 2), ClusterPlan)
