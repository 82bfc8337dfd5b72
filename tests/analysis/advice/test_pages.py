"""Every cause has remedies and pages in full, and `explain` finds what is asked for."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

import clusterprof.analysis.advice
from clusterprof.analysis.advice.base import get_metric_name
from clusterprof.analysis.advice.pages import (
    CAUSES_WITH_PAGE,
    METRIC_DESCRIPTIONS,
    build_cause_page,
    build_family_page,
    build_metric_page,
    format_cause_list,
    list_metric_names,
)
from clusterprof.analysis.advice.registry import RECOMMENDATIONS, list_recommendations
from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.findings.metrics import build_metrics
from clusterprof.analysis.findings.utilization import build_device_utilization
from clusterprof.cli.explain import _find_page
from clusterprof.errors import UsageError
from tests.support.advice_contexts import make_context

IDS = [cause.id for cause in CAUSES_WITH_PAGE]


def test_every_cause_has_a_remedy_and_a_manual_check() -> None:
    """Causes of detectors, of ranks together, and hangs; and nothing else has."""
    with_remedy = {cause for recommendation in RECOMMENDATIONS for cause in recommendation.causes}
    assert with_remedy == set(IDS)
    assert [cause.id for cause in CAUSES_WITH_PAGE if not cause.manual_check] == []
    names = [recommendation.id for recommendation in RECOMMENDATIONS]
    assert len(names) == len(set(names))


def test_every_file_of_remedies_is_in_the_registry() -> None:
    written = []
    for module in pkgutil.iter_modules(clusterprof.analysis.advice.__path__):
        file = importlib.import_module(f"clusterprof.analysis.advice.{module.name}")
        if module.name != "registry":
            for name, items in vars(file).items():
                written += items if name.endswith("_RECOMMENDATIONS") else ()
    assert {item.id for item in written} == {item.id for item in RECOMMENDATIONS}


@pytest.mark.parametrize("cause_id", IDS)
def test_a_cause_page_has_all_sections_and_remedies(cause_id: str) -> None:
    text = build_cause_page(cause_id)
    assert re.findall(r"^## .*$", text, re.MULTILINE) == [
        "## What it sees",
        "## Why the GPU waits",
        "## How it decides",
        "## What to do",
        "## Where it is blind",
        "## Remedies, in the order to try them",
        "## How to verify it by hand",
    ]
    flat = " ".join(text.split())
    for recommendation in list_recommendations(cause_id):
        assert f"* **{recommendation.id}**: {recommendation.what}: " in flat
        assert not recommendation.what.endswith(".") and recommendation.expected_change
        for rule in recommendation.unless:
            assert f"not recommended if {rule.condition}" in flat
    assert text.index("## Remedies") < text.find("A profile changes limits") or (
        "A profile changes limits" not in text
    )
    own = text.partition("## Remedies")[2].partition("A profile changes limits")[0]
    assert max(map(len, own.splitlines())) <= 100


def test_causes_are_listed_by_family() -> None:
    lines = format_cause_list().splitlines()
    assert lines[:2] == ["storage:", "  storage-local         The data path waits for a local disk"]
    assert [line.split()[0] for line in lines if line.startswith("  ")] == sorted(
        IDS, key=lambda id_: [cause.family for cause in CAUSES_WITH_PAGE].index(CAUSES[id_].family)
    )


def test_a_family_page_recommends_recording_with_the_probe() -> None:
    text = build_family_page("network")
    assert "net-link" in text and "* **record-with-probe**: " in text


def test_every_metric_of_a_report_is_explained() -> None:
    metrics = build_metrics([], [], build_device_utilization([]))
    assert {metric.name for metric in metrics} <= set(list_metric_names())
    for metric in metrics:
        text = build_metric_page(metric.name)
        assert text is not None and f", in {metric.unit}\n" in text
        assert "## How to verify it by hand" in text


@pytest.mark.parametrize(
    ("asked", "title"),
    [
        ("storage-local", "# storage-local: "),
        ("storage", "# storage: a family of causes"),
        ("unattributed", "# unattributed: "),
        ("stall.storage-local_ratio", "# stall.storage-local_ratio: a metric of the report"),
        ("stall.storage <= 5%", "# stall.storage_ratio: a metric of the report, in ratio"),
        ("step.p95_ns < 250 ms", "# step.p95_ns: a metric of the report, in ns"),
        ("au_ratio", "# au_ratio: a metric of the report, in ratio"),
    ],
)
def test_explain_finds_causes_families_metrics_and_rules(asked: str, title: str) -> None:
    assert _find_page(asked).startswith(title)


@pytest.mark.parametrize("cause_id", IDS)
def test_the_gate_metric_of_a_cause_exists_in_the_report(cause_id: str) -> None:
    known = {metric.name for metric in build_metrics([], [], build_device_utilization([]))}
    metric = get_metric_name(make_context(cause_id))
    family = CAUSES[cause_id].family
    assert metric in known if family not in ("synchronization", "fail") else metric not in known


def test_explain_suggests_the_nearest_name() -> None:
    for wrong, near in (("storge-local", "storage-local"), ("gpu.bussy_ratio", "gpu.busy_ratio")):
        with pytest.raises(UsageError, match=re.escape(f"did you mean '{near}'?")):
            _find_page(wrong)


def test_explain_without_a_name_lists_all_causes() -> None:
    assert _find_page(None) == format_cause_list() + (
        "unattributed:\n  Lost time without sufficient evidence for any cause\n"
        "parts of a report:\n"
        "  where                 the line of code in which the time of a finding was lost\n"
        "  flame-graph           the chart of lost device time by stack in the HTML report\n"
        "  life                  the wall time of all devices, from submission to the last record,"
        " over all restarts\n"
    )
    assert METRIC_DESCRIPTIONS
