"""What a report predicts of a fault, and how it is counted; the pairs themselves are the lab's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.report.impact import CauseImpact, Impact
from clusterprof_lab.scenario import ExpectedVerdict, Scenario
from clusterprof_lab.score.clean_runs import REMOVED, NoPairError, Pair, make_pairs
from clusterprof_lab.score.whatif import (
    FORMAT,
    IN_TURNS,
    ComparedFault,
    find_predicted_gain,
    make_document,
)
from clusterprof_lab.score.whatif_page import make_pages, store_results
from clusterprof_lab.truth import Injected, Lost, Place, Truth
from tests.support.reports import make_clean_report

S = 10**9
DISK = Pair(("storage-local", "storage-contention"), "storage", 75.0, REMOVED)
TRUTH = Truth(
    "disk",
    "real",
    "dev",
    "medium",
    0,
    {},
    (Place(0, "n", 100 * S, 10),),
    (Lost("storage-local", 0, 0, 30 * S),),
    (Injected("storage-local", (0,)),),
    step_ns=100.0,
    clean_step_ns=75.0,
)


def job_impact(*causes: tuple[str, int | None], all_saved_ns: int | None = None) -> Impact:
    rows = tuple(CauseImpact(id_, None, ns, ns, ns) for id_, ns in causes)
    return Impact(None, "USD", None, 100 * S, rows, saved_ns=all_saved_ns)


def prediction(result: Impact, pair: Pair = DISK) -> tuple[tuple[str, ...], float]:
    named, points, _, _ = find_predicted_gain(replace(make_clean_report(), impact=result), pair)
    return named, points


def test_a_prediction_uses_the_findings_that_name_the_fault() -> None:
    assert prediction(job_impact(("storage-local", 20 * S), ("cpu-gc", 9 * S))) == (
        ("storage-local",),
        20.0,
    )
    both = job_impact(
        ("storage-local", 20 * S), ("storage-contention", 15 * S), all_saved_ns=25 * S
    )
    assert prediction(both) == (
        ("storage-local", "storage-contention"),
        25.0,
    )  # no more than all fixed
    assert prediction(job_impact(("storage-remote", 7 * S))) == (
        ("storage-remote",),
        7.0,
    )  # its family
    assert prediction(job_impact(("cpu-gc", 9 * S))) == ((), 0.0)
    assert prediction(job_impact(("storage-local", None))) == ((), 0.0)
    net = Pair(("net-congestion", "net-transfer"), "network", 1.0, REMOVED)
    assert prediction(job_impact(("net-congestion", 5 * S), ("net-transfer", 3 * S)), net)[1] == 5.0
    assert prediction(job_impact(("net-transfer", 3 * S)), net)[1] == 3.0


def test_a_real_run_gives_at_most_a_single_pair() -> None:
    wanted = ExpectedVerdict("storage", ("storage-local",), "rank", also=(("cpu", "cpu-gc"),))
    scenario = Scenario("disk", "storage", "", "", wanted, {}, None, {})
    [pair] = make_pairs(TRUTH, scenario)
    assert pair == Pair(("storage-local", "cpu-gc"), "storage", 75.0, REMOVED)
    assert pair.gain_points(TRUTH) == 25.0
    for broken in (
        (replace(TRUTH, clean_step_ns=None), scenario),
        (TRUTH, replace(scenario, wanted=ExpectedVerdict("", (), "nobody"))),
        (TRUTH, replace(scenario, wanted=replace(wanted, outside_steps=True))),
    ):
        with pytest.raises(NoPairError):
            list(make_pairs(*broken))


def test_the_page_counts_predictions_within_three_points(tmp_path: Path) -> None:
    held = [
        ComparedFault(
            "a", "disk", "synth", "mild", REMOVED, 10.0, 13.0, None, None, ("storage",), 10.0
        ),
        ComparedFault("b", "disk", "synth", "mild", REMOVED, 10.0, 6.9, None, None, (), 20.0),
    ]
    (tmp_path / "x.json").write_text(json.dumps(make_document(held, "dev")), encoding="utf-8")
    assert store_results(tmp_path / "x.json", tmp_path / "kept").name == "dev-synth.json"
    [page] = make_pages(tmp_path / "kept").values()
    # (3.0 + 3.1) / 2 off; of the truth's own books one is within
    assert "| synth, dev | 2 | 0 | ✗ 50 % (9–91; 1 of 2) | 3.0 | 3.1 | 50 % (9–91;" in page
    assert "| disk | 2 | 1 | 10.0, 10.0 | 13.0, 6.9 | -3.1 |" in page
    assert make_pages(tmp_path / "none") == {}


def test_an_uncertain_truth_is_not_counted(tmp_path: Path) -> None:
    sure = ComparedFault(
        "a", "disk", IN_TURNS, "mild", REMOVED, 10.0, 12.0, None, None, (), None, 2.9
    )
    unsure = replace(sure, run="b", said=40.0, error=3.1)
    assert (sure.is_conclusive, unsure.is_conclusive) == (True, False)
    (tmp_path / "x.json").write_text(
        json.dumps(make_document([sure, unsure], "dev")), encoding="utf-8"
    )
    assert store_results(tmp_path / "x.json", tmp_path / "kept").name == "dev-real-in-turns.json"
    [page] = make_pages(tmp_path / "kept").values()
    assert "| real in turns, dev | 2 | 1 | ✓ 100 % (21–100; 1 of 1) | 2.0 | 2.0 | - |" in page
    assert "| disk | 2 | 1 | 10.0 ± 2.9, 10.0 ± 3.1 | 12.0, 40.0 | +30.0 |" in page


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"format": FORMAT, "schema": 0}), encoding="utf-8")
    with pytest.raises(ValueError, match="not predictions of schema"):
        store_results(tmp_path / "x.json", tmp_path / "kept")
