"""The history in the JSON report: sums that are the ledger's, and a size no job makes larger."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources

from clusterprof.output.renderers.json import Json
from clusterprof.report.history import History, RankHistory, SlowStep, Wait
from clusterprof.report.model import Report
from tests.support.cluster_report import make_cluster_report
from tests.support.histories import add_history
from tests.support.reports import make_clean_report
from tests.support.schema_check import list_errors

SCHEMA = json.loads(
    resources.files("clusterprof.output.renderers")
    .joinpath("schema/report.schema.json")
    .read_text()
)


def render_document(report: Report) -> dict:  # type: ignore[type-arg]
    document = json.loads(Json().render(report))
    assert list(list_errors(document, SCHEMA)) == []
    return document


def test_stretch_sums_match_the_ledger_to_the_nanosecond() -> None:
    report = add_history(make_cluster_report(4, 8))
    result = render_document(report)["history"]
    assert sum(result["in_step_ns"]) == report.in_step_ns
    assert sum(ns for row in result["lost"] for ns in row["ns"]) == report.lost_ns
    totals = [sum(row["ns"]) for row in result["lost"]]
    assert totals == sorted(totals, reverse=True) and len(result["in_step_ns"]) == 60
    # the longest of 45 waits, and ranks by name: what a program finds among `ranks`
    lengths = sorted((wait.duration_ns for wait in report.history.waits), reverse=True)[:20]  # type: ignore[union-attr]
    assert sorted((wait["duration_ns"] for wait in result["waits"]), reverse=True) == lengths
    names = {(rank.node, rank.rank, rank.pid) for rank in report.ranks}
    assert {tuple(wait["victim"].values()) for wait in result["waits"]} <= names
    assert [step["number"] for step in result["slow_steps"]] == [400, 391, 382, 373, 364, 355]


def test_a_small_history_matches_the_expected_document() -> None:
    base = make_clean_report()
    rank = RankHistory(0, (60, 40), (("storage", (5, 0)), ("cpu-gc", (1, 6))), (50, 100))
    other = RankHistory(1, (50, 50), (("cpu-gc", (0, 9)),), ())
    wait = Wait(3, 7, 99, None, "", None)
    slow = SlowStep(4, 10, 20, None, (("cpu-gc", 6),))
    made = History(
        None, 50, 2, (rank, other), (wait,), (slow,), 1, "a part is missing", -5, ((0, 30),)
    )
    assert render_document(replace(base, history=made))["history"] == {
        "started_at_ns": None,
        "begin_ns": -5,
        "ended": [{"rank": {"node": "node-a", "rank": None, "pid": 812}, "run_ns": 30}],
        "stretch_ns": 50,
        "in_step_ns": [110, 90],
        "lost": [{"cause": "cpu-gc", "ns": [1, 15]}, {"cause": "storage", "ns": [5, 0]}],
        "slow_steps": [
            {
                "number": 4,
                "start_ns": 10,
                "duration_ns": 20,
                "last_to_come": None,
                "lost": [{"cause": "cpu-gc", "ns": 6}],
            }
        ],
        "waits": [
            {
                "start_ns": 3,
                "duration_ns": 7,
                "victim": None,
                "culprit": None,
                "cause": "",
                "step": None,
            }
        ],
        "course": None,
        "why_missing": "a part is missing",
    }
    assert render_document(base)["history"] is None


def test_history_size_does_not_grow_with_the_job() -> None:
    many = tuple((f"cause-{at:02}", (at,)) for at in range(40))
    sizes = []
    for ranks in (1, 1000):
        rows = tuple(RankHistory(at, (1000,), many, ()) for at in range(ranks))
        result = render_document(replace(make_clean_report(), history=History(0, 1, 1, rows)))[
            "history"
        ]
        assert len(result["lost"]) == 16 and result["lost"][0]["cause"] == "cause-39"
        # 0 + 1 + … + 24: what the 15 largest leave
        assert result["lost"][-1] == {"cause": "others", "ns": [300 * ranks]}
        sizes.append(len(json.dumps(result)))
    assert sizes[1] < 1.2 * sizes[0]
