"""The dashboard asks for nothing that is not exported, by labels that are there."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterprof.output.renderers import openmetrics
from clusterprof.output.renderers.openmetrics import build_families
from clusterprof.report.model import Metric
from tests.support.reports import ALL

DASHBOARD = Path(__file__).parents[3] / "docs/grafana/clusterprof.json"
EXPORTED = {described.sample for described in openmetrics.ALL_FAMILIES}
ADDED = {"job", "instance"}  # by the scraper


def dashboard() -> dict[str, Any]:
    return dict(json.loads(DASHBOARD.read_text(encoding="utf-8")))


def expressions() -> list[str]:
    panels = [target["expr"] for p in dashboard()["panels"] for target in p.get("targets", [])]
    return panels + [v["query"] for v in dashboard()["templating"]["list"] if v["type"] == "query"]


def test_every_query_names_metrics_that_are_exported() -> None:
    names = [name for text in expressions() for name in re.findall(r"\bclusterprof_\w+", text)]
    assert len(names) > 15
    assert set(names) - EXPORTED == set()


def test_every_label_in_a_query_is_one_of_its_metric() -> None:
    labels: dict[str, set[str]] = {}
    whole = (*openmetrics.FAMILY_BY_METRIC, "step.p50_ns")
    known = replace(ALL["clean"](), metrics=tuple(Metric(name, 0.5, "ratio") for name in whole))
    for report in (known, *(make() for make in ALL.values())):
        for family in build_families(report):
            names = labels.setdefault(family.description.sample, set())
            names.update(key for point in family.points for key, _ in point.labels)
    for text in expressions():
        for metric, selector in re.findall(r"(\bclusterprof_\w+)\{([^}]*)\}", text):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert used - labels[metric] - ADDED == set(), text
        used_by = {
            name.strip() for by in re.findall(r"by \(([^)]*)\)", text) for name in by.split(",")
        }
        there = set().union(*(labels[m] for m in re.findall(r"\bclusterprof_\w+", text)))
        assert used_by - there == set(), text


def test_variables_exist_and_panels_stand_apart() -> None:
    board = dashboard()
    variables = {variable["name"] for variable in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board))) - {"__all"}
    assert used == variables
    taken: dict[tuple[int, int], str] = {}
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} over {taken.get((x, y))}"
                taken[x, y] = panel["title"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
