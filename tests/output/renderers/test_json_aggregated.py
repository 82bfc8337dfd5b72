"""The JSON report of many ranks: bounded, exact, and read back by the gate."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from clusterprof.errors import NoRecording
from clusterprof.gate import Policy, judge_runs, parse_any_rule
from clusterprof.gate.compare import compare_runs
from clusterprof.gate.stored_report import find_imbalance, load_report
from clusterprof.output.renderers.json import Json
from clusterprof.report.code import CodeProfile, Place, StackTime
from clusterprof.report.impact import DeviceUtilization, RankUtilization, UtilizationLevels
from clusterprof.report.model import Metric, Report
from tests.support import gate_runs
from tests.support.cluster_report import S, make_cluster_report
from tests.support.schema_check import list_errors


@cache
def large(nodes: int = 72) -> Report:
    return make_cluster_report(nodes, 8)


def schema() -> Any:
    file = resources.files("clusterprof.output.renderers") / "schema" / "report.schema.json"
    return json.loads(file.read_text(encoding="utf-8"))


def parsed(report: Report, full: bool = False) -> Any:
    return json.loads(Json(full).render(report))


def test_up_to_512_ranks_are_all_listed() -> None:
    document = parsed(make_cluster_report(64, 8))
    assert len(document["ranks"]) == 512
    assert document["unlisted"] == document["groups"] == []
    assert document["findings"][2]["culprits_left_out"] is None


def test_the_aggregated_report_matches_the_schema() -> None:
    assert list(list_errors(parsed(large()), schema())) == []


def test_report_size_grows_with_nodes_and_not_with_ranks() -> None:
    few, many = (len(Json().render(make_cluster_report(72, per_node))) for per_node in (8, 32))
    assert many < 1.25 * few  # four times the ranks; longer numbers
    assert len(Json(True).render(large())) > 3 * len(Json().render(large()))


def test_the_full_option_lists_every_rank() -> None:
    document = parsed(large(), full=True)
    assert [rank["rank"] for rank in document["ranks"]] == list(range(576))
    assert document["unlisted"] == []
    assert len(document["findings"][2]["culprits"]) == 576


def test_unlisted_culprits_are_summed() -> None:
    imbalance = parsed(large())["findings"][2]
    assert [culprit["rank"] for culprit in imbalance["culprits"]] == list(range(64))
    assert imbalance["culprits_left_out"] == {
        "culprits": 512,
        "own_ns": 0,
        "others_ns": 512 * 4 * S,
    }


def test_listed_ranks_and_sums_add_up_to_the_ledger() -> None:
    document = parsed(large())
    parts = [*document["ranks"], *document["unlisted"]]
    for name in ("window_ns", "in_step_ns", "productive_ns", "lost_ns", "outside_ns"):
        assert sum(part[name] for part in parts) == document["ledger"][name]
    nobody = sum(bucket["ns"] for bucket in document["ledger"]["caused_by_nobody"])
    caused = sum(bucket["ns"] for part in parts for bucket in part["caused"])
    expected = sum(ns for rank in large().ranks for _, ns in rank.caused)
    assert caused == expected and nobody == 12 * S * 576


def used(rank: int) -> RankUtilization:
    ledger, levels = large().ranks[rank], UtilizationLevels(*[None] * 9)
    parts = (10 + rank, 1, 2, 3, 4 + rank)
    return RankUtilization(
        ledger.node, rank, ledger.pid, "", *parts, (("no-counter", 4 + rank),), levels
    )


def test_utilization_of_unlisted_ranks_is_summed() -> None:
    ranks = tuple(used(rank) for rank in (63, 64, 65))  # of which 63 is listed
    whole = DeviceUtilization(222, 3, 6, 9, 204, (("no-counter", 204),), ranks, ())
    fill = parsed(replace(large(), device_utilization=whole))["underfill"]
    assert [rank["rank"] for rank in fill["ranks"]] == [63]
    assert fill["unlisted"] == {
        "ranks": 2,
        "busy_ns": 74 + 75,
        "lost_ns": 2,
        "filled_ns": 4,
        "underfilled_ns": 6,
        "unmeasured_ns": 68 + 69,
        "unmeasured_reasons": [{"reason": "no-counter", "ns": 137}],
    }


def test_stacks_refer_to_the_listed_ranks() -> None:
    # The 64 largest stacks are of rank 100, which so is listed; then 100 of each of 300 and 301.
    largest = [StackTime("storage-remote", 100, (0,), 1000 - k, 1) for k in range(64)]
    others = [StackTime("storage-remote", rank, (0,), 1, 2) for rank in (300, 301)] * 100
    code = CodeProfile((Place("a.py", 1, "f"),), (False,), (*largest, *others), 264)
    document = parsed(replace(large(), code=code))
    stacks = document["code"]["stacks"]
    assert len(stacks) == 64
    assert {document["ranks"][stack["rank"]]["rank"] for stack in stacks} == {100}
    assert document["code"]["unlisted_stacks"] == [
        {"cause": "storage-remote", "lost_ns": 200, "samples": 400}
    ]


def stored(path: Path, report: Report, full: bool = False) -> Path:
    path.write_text(Json(full).render(report))
    return path


def test_the_aggregated_report_is_loaded(tmp_path: Path) -> None:
    back = load_report(stored(tmp_path / "report.json", large()))
    assert back.rank_count == 576 and len(back.ranks) == 64 + 31
    assert back.fewest_steps == 406
    assert find_imbalance(back) == ""
    assert back.unlisted[0].lost_ns == 8 * 50 * S + sum(range(64, 72))


def test_a_report_with_a_changed_sum_is_refused(tmp_path: Path) -> None:
    path = stored(tmp_path / "report.json", large())
    document = json.loads(path.read_text())
    document["unlisted"][3]["lost_ns"] += 1
    path.write_text(json.dumps(document))
    with pytest.raises(NoRecording, match="does not add up: the time in steps of the other ranks"):
        load_report(path)
    del document["unlisted"]
    path.write_text(json.dumps(document))
    with pytest.raises(NoRecording, match="does not add up"):
        load_report(path)


def test_the_gate_judges_aggregated_and_full_reports_alike(tmp_path: Path) -> None:
    few = load_report(stored(tmp_path / "few.json", large()))
    full = load_report(stored(tmp_path / "every.json", large(), full=True))
    rules = [parse_any_rule("gpu.busy_ratio >= 70%")]
    verdicts = [judge_runs(report, rules, Policy()) for report in (few, full)]
    assert verdicts[0].exit_code == verdicts[1].exit_code
    assert verdicts[0].results == verdicts[1].results


def test_a_rule_over_all_ranks_needs_the_full_report(tmp_path: Path) -> None:
    lost = Metric("lost.ratio", large().lost_ns / large().in_step_ns, "ratio")
    back = load_report(stored(tmp_path / "report.json", replace(large(), metrics=(lost,))))
    rule = parse_any_rule("lost.ratio.rank_max <= 20%")
    verdict = judge_runs(back, [rule], Policy())
    assert "lists 95 of 576 ranks: write it with --full" in repr(verdict)


def test_comparisons_of_aggregated_and_full_reports_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate_runs, "RANKS", 600)
    runs = [gate_runs.make_run("a", started=1), gate_runs.make_run("b", storage=0.1, started=2)]
    few, full_reports = (
        [load_report(stored(tmp_path / f"{full}-{r.title}.json", r, full)) for r in runs]
        for full in (False, True)
    )
    assert len(few[0].ranks) < 100 and few[0].rank_count == len(full_reports[0].ranks) == 600
    rules = [parse_any_rule("step.p50_ns: +2%"), parse_any_rule("stall.storage_ratio: +2pt")]
    results = [compare_runs(*pair, rules, Policy()) for pair in (few, full_reports)]
    rows = [
        [(row.name, row.a_ns, row.b_ns, row.significance) for row in result.rows]
        for result in results
    ]
    assert rows[0] == rows[1] and len(rows[0]) >= 3
