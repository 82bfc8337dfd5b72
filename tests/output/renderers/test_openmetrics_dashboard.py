"""The dashboard asks for nothing that is not exported, by labels that are there."""

from __future__ import annotations

import re
from dataclasses import replace

from clusterprof.output.renderers import openmetrics
from clusterprof.output.renderers.openmetrics import build_families
from clusterprof.report.model import Metric
from tests.support.dashboards import ADDED, check_layout, list_expressions, load_dashboard
from tests.support.reports import ALL

EXPORTED = {described.sample for described in openmetrics.ALL_FAMILIES}


def expressions() -> list[str]:
    return list_expressions(load_dashboard("clusterprof.json"))


def test_every_query_uses_exported_metrics() -> None:
    names = [name for text in expressions() for name in re.findall(r"\bclusterprof_\w+", text)]
    assert len(names) > 15
    assert set(names) - EXPORTED == set()


def test_query_labels_belong_to_their_metrics() -> None:
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


def test_variables_exist_and_panels_do_not_overlap() -> None:
    check_layout(load_dashboard("clusterprof.json"))
