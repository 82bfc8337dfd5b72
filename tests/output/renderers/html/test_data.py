"""The data block of the page: rounded as it says, small for any job, sums as in the report."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from clusterprof.output.renderers.html import data
from clusterprof.output.renderers.html.data import ChartRows, build_chart_rows
from clusterprof.output.renderers.html.page import Html
from clusterprof.report import aggregate
from clusterprof.report.history import WAITING_FOR_RANKS, History, RankHistory, SlowStep, Wait
from clusterprof.report.model import Report
from tests.support.cluster_report import make_cluster_report
from tests.support.histories import add_history, make_one_hour_job
from tests.support.reports import make_clean_report, make_empty_report, make_storage_report

S = 1_000_000_000


def document(report: Report) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(data.build_script_json(report), parse_constant=refuse)


def unpacked(text: str, kind: str) -> list[float]:
    return np.frombuffer(base64.b64decode(text), dtype=kind).tolist()


def by_hand() -> Report:
    """Two ranks of 300 s (see `make_storage_report`) in four stretches of 75 s."""
    report = make_storage_report()
    ranks = (
        RankHistory(
            0,
            (65 * S, 75 * S, 75 * S, 75 * S),
            (
                ("storage-local", (60 * S, 20 * S + 3, 0, 0)),
                ("cpu-preprocess", (0, 0, 7 * S, 0)),
                ("unattributed", (0, 0, 0, 3 * S + 4)),
            ),
            (75 * S, 150 * S, 300 * S),
        ),
        RankHistory(
            1,
            (65 * S, 75 * S, 75 * S, 75 * S),
            (
                ("storage-local", (0, 45 * S, 75 * S, 0)),
                (WAITING_FOR_RANKS, (0, 0, 0, 14 * S)),
                ("unattributed", (0, 0, 0, 2 * S)),
            ),
            (),
        ),
    )
    history = History(
        1_790_000_000 * S,
        75 * S,
        4,
        ranks,
        (Wait(80 * S, 2 * S, 0, 1, "storage-local", 7), Wait(90 * S, S, 1, None, "", None)),
        (SlowStep(9, 70 * S, 8 * S, 1, (("storage-local", 5 * S), (WAITING_FOR_RANKS, S))),),
    )
    return dataclasses.replace(report, history=history)


def test_planes_hold_shares_of_each_stretch() -> None:
    made = document(by_hand())
    ids = [cause["id"] for cause in made["causes"]]
    assert ids == ["storage-local", "cpu-preprocess", "startup", WAITING_FOR_RANKS, "unattributed"]
    history = made["history"]
    assert (history["stretch_s"], history["stretches"], history["span_s"]) == (75.0, 4, 300.0)
    assert history["started_at_ms"] == 1_790_000_000_000
    assert unpacked(history["in_step"], "u1") == [221, 255, 255, 255] * 2  # 65 of 75 s
    lost = {
        ids[bucket["cause"]]: (bucket["rows"], unpacked(bucket["bytes"], "u1"))
        for bucket in history["lost"]
    }
    assert lost == {
        # 60/75, 20/75, 45/75 and 75/75 of 255
        "storage-local": ([0, 1], [204, 68, 0, 0, 0, 153, 255, 0]),
        "cpu-preprocess": ([0], [0, 0, 24, 0]),
        WAITING_FOR_RANKS: ([1], [0, 0, 0, 48]),
        "unattributed": ([0, 1], [0, 0, 0, 10, 0, 0, 0, 7]),
    }
    total = history["total"]
    assert [ids[cause] for cause in total["causes"]] == [
        "storage-local",
        "cpu-preprocess",
        WAITING_FOR_RANKS,
        "unattributed",
    ]
    first = unpacked(total["bytes"], "<u2")[:4]  # 60, 65 and 3 ns, 75 and 0 of 150 s
    assert first == [26214, 28399, 32768, 0]


def test_steps_waits_and_slow_steps_are_embedded() -> None:
    history = document(by_hand())["history"]
    (marks,) = history["steps"]
    assert marks["row"] == 0
    assert unpacked(marks["bytes"], "<u4") == [2**30 - 0, 2**31, 2**32 - 1]
    assert history["waits"] == [[80.0, 2.0, 0, 1, 0, 7], [90.0, 1.0, 1, -1, -1, None]]
    assert history["slow_steps"] == [
        {"step": 9, "start_s": 70.0, "length_s": 8.0, "rank": 1, "lost": [[0, 5 * S], [3, S]]}
    ]


def test_lost_time_is_embedded_by_rank_and_cause() -> None:
    made = document(by_hand())
    assert made["nodes"] == ["node-a"] and made["compared"] is False
    assert made["ranks"]["node"] == [0, 0] and made["ranks"]["rank"] == [0, 1]
    assert unpacked(made["ranks"]["lost_ns"], "<f8") == [90 * S + 7, 136 * S]
    lost = made["lost_by_cause"]
    assert lost["full_ns"] == 120 * S
    assert {cause["cause"]: unpacked(cause["bytes"], "<u2") for cause in lost["causes"]} == {
        0: [43690, 65535],
        1: [3823, 7646],
        4: [1638, 1092],
    }
    assert made["caused"] == {"full_ns": 0, "causes": []}
    assert made["findings"][0] == {
        "cause": 0,
        "outside": False,
        "culprits": [1, 0],
        "culprit_count": 2,
    }


def test_causes_of_few_ranks_are_stored_sparsely() -> None:
    caused = document(make_cluster_report(4, 4))["caused"]["causes"]
    storage = caused[0]
    assert storage["ranks"] == [15] and unpacked(storage["bytes"], "<u2") == [65535]


@pytest.mark.parametrize(
    ("history", "why"),
    [
        (None, "the history was not requested in this analysis"),
        (History(None, S, 4, (), why_missing="no clock"), "no clock"),
        (History(None, S, 0, (RankHistory(0, (), (), ()),)), "no rank had steps"),
    ],
)
def test_a_missing_history_states_a_reason(history: History | None, why: str) -> None:
    report = dataclasses.replace(make_storage_report(), history=history)
    assert document(report)["history"] == {"why": why}


def test_a_history_with_mismatched_ranks_is_tolerated() -> None:
    report = by_hand()
    history = report.history
    assert history is not None
    short = dataclasses.replace(
        history,
        ranks=history.ranks[:1],
        waits=(Wait(0, S, 5, 0, "", None), Wait(0, S, 0, 7, "never-heard", 1)),
    )
    made = document(dataclasses.replace(report, history=short))["history"]
    assert unpacked(made["in_step"], "u1")[4:] == [0, 0, 0, 0]
    cause = [c["id"] for c in document(dataclasses.replace(report, history=short))["causes"]]
    assert made["waits"] == [[0.0, 1.0, 0, -1, cause.index("never-heard"), 1]]


def test_reports_without_ranks_have_a_data_block() -> None:
    assert document(make_empty_report())["ranks"]["rank"] == []
    assert document(make_clean_report())["ranks"]["pid"] == [812]  # it has no rank to be known by


def test_many_ranks_share_the_rows_of_their_nodes() -> None:
    nodes = [at // 2 for at in range(1200)]
    rows = build_chart_rows(nodes, 600, [7, 1199])
    assert rows.by == "node" and len(rows.rank) == 602
    assert (rows.first[3], rows.last[3], rows.rank[3], rows.members[3]) == (3, 3, -1, [6, 7])
    assert (rows.first[601], rows.rank[601], rows.members[601]) == (599, 1199, [1199])
    few = build_chart_rows([0, 0, 1], 2, [])
    assert (few.by, few.rank, few.first) == ("rank", [0, 1, 2], [0, 0, 1])


def test_neighbouring_nodes_share_a_row_above_the_row_limit() -> None:
    rows = build_chart_rows(list(range(2500)), 2500, [])
    assert len(rows.rank) == 834 <= ChartRows.MAX_ROWS  # three to a row
    assert (rows.first[833], rows.last[833], rows.members[833]) == (2499, 2499, [2499])
    assert sum(map(len, rows.members)) == 2500


def test_stretches_are_merged_to_fit_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_MIN_BINS", 1)
    monkeypatch.setattr(data, "MAX_PLANE_BYTES", 2 * 9)  # seven planes of loss and two of steps
    history = document(by_hand())["history"]
    assert (history["stretches"], history["stretch_s"]) == (2, 150.0)
    assert unpacked(history["lost"][0]["bytes"], "u1") == [136, 0, 76, 128]  # 80, 45, 75 of 150


def test_tiny_losses_are_not_rounded_to_zero() -> None:
    report = by_hand()
    history = report.history
    assert history is not None
    little = dataclasses.replace(history.ranks[0], lost=(("storage-local", (1, 0, 0, 0)),))
    made = document(
        dataclasses.replace(report, history=dataclasses.replace(history, ranks=(little,)))
    )
    assert unpacked(made["history"]["lost"][0]["bytes"], "u1") == [1, 0, 0, 0]


def test_sums_over_the_run_match_the_report() -> None:
    report = add_history(make_cluster_report(4, 4), 50)
    made = document(report)["history"]
    unit = made["stretch_s"] / 255
    sums = sum(sum(unpacked(bucket["bytes"], "u1")) for bucket in made["lost"]) * unit
    cells = sum(len(bucket["rows"]) for bucket in made["lost"]) * 50
    assert abs(sums - report.lost_ns / 1e9) <= cells * unit  # a rounding each, at most
    total = sum(unpacked(made["total"]["bytes"], "<u2")) / 65535 * made["stretch_s"] * 16
    assert total == pytest.approx(report.lost_ns / 1e9, rel=0.001)


def test_the_page_of_many_nodes_stays_small() -> None:
    report = add_history(make_cluster_report(1000, 2), 145, 100)
    html = Html().render(report)
    assert 1_000_000 < len(html) < 2_000_000


@pytest.mark.long
def test_a_thousand_nodes_of_eight_stay_below_two_megabytes() -> None:
    assert len(Html().render(make_one_hour_job(1000, 8, 360, 200))) < 2_000_000


def test_ranks_that_are_not_embedded_are_summed_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 ranks 0 caused most, 4 is the first of its finding, 6 and 7 lost most; 4 are summed."""
    monkeypatch.setattr(data, "MAX_EMBEDDED_RANKS", 7)
    limits = {"MAX_LISTED_RANKS": 7, "MAX_LISTED_CULPRITS": 1, "MAX_OUTLIERS": 2}
    for name, limit in {**limits, "_MAX_WAITS": 0, "_MAX_SLOW_STEPS": 0}.items():
        monkeypatch.setattr(aggregate, name, limit)
    report = add_history(make_cluster_report(2, 4), 10, 20)
    few, whole = (data.build_chart_document(report, full) for full in (False, True))
    # A node's sum stands at the place of its first rank that is not listed.
    assert few["ranks"]["rank"] == [0, None, 4, None, 6, 7]
    assert few["ranks"]["counts"] == [1, 3, 1, 1, 1, 1]
    assert few["ranks"]["node"] == [0, 0, 1, 1, 1, 1]
    assert whole["ranks"]["rank"] == list(range(8)) and whole["ranks"]["counts"] == []
    lost = [unpacked(made["ranks"]["lost_ns"], "<f8") for made in (few, whole)]
    assert lost[0] == [lost[1][0], sum(lost[1][1:4]), *lost[1][4:]]
    victims = [[wait[2] for wait in made["history"]["waits"]] for made in (few, whole)]
    assert victims[0] == [[0, 1, 1, 1, 2, 3, 4, 5][victim] for victim in victims[1]]


def test_folded_histories_keep_their_sums() -> None:
    report = add_history(make_cluster_report(2, 4), 10, 20)
    merged, counts = aggregate.merge_unlisted_ranks(report, [0, 4])
    assert counts == (1, 3, 1, 3)
    before, after = report.history, merged.history
    assert before is not None and after is not None
    assert after.ranks[2] == dataclasses.replace(before.ranks[4], rank=2)
    others = before.ranks[1:4]
    assert after.ranks[1].in_step_ns == tuple(map(sum, zip(*(r.in_step_ns for r in others))))
    for cause, ns in after.ranks[1].lost:
        assert ns == tuple(map(sum, zip(*(dict(rank.lost)[cause] for rank in others))))
    assert {cause for cause, _ in after.ranks[1].lost} == {c for r in others for c, _ in r.lost}
