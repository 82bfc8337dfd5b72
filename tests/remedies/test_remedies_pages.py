"""Every cause has remedies and pages in full, and `explain` finds what is asked for."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest
from scenes import scene

import clusterprof.remedies
from clusterprof.attribution.families import CAUSES
from clusterprof.cli.explain import _page
from clusterprof.engine.metrics import metrics_of
from clusterprof.engine.underfill import underfill_of
from clusterprof.errors import UsageError
from clusterprof.remedies.base import metric_of
from clusterprof.remedies.by_hand import BY_HAND
from clusterprof.remedies.metrics import METRICS, metric_names, metric_page
from clusterprof.remedies.pages import LEAVES, family_page, listing, page
from clusterprof.remedies.registry import REMEDIES, WITHOUT, remedies_of

IDS = [cause.id for cause in LEAVES]


def test_every_cause_has_a_remedy_or_a_reason_why_there_is_none() -> None:
    """Causes of detectors, of ranks together, and hangs; and nothing else has."""
    with_remedy = {cause for one in REMEDIES for cause in one.causes}
    assert with_remedy | set(WITHOUT) == set(IDS)
    assert not with_remedy & set(WITHOUT)
    assert set(BY_HAND) == set(IDS)
    names = [one.id for one in REMEDIES]
    assert len(names) == len(set(names))


def test_every_file_of_remedies_is_in_the_registry() -> None:
    found = []
    for module in pkgutil.iter_modules(clusterprof.remedies.__path__):
        file = importlib.import_module(f"clusterprof.remedies.{module.name}")
        if module.name != "registry":
            found += [*getattr(file, "REMEDIES", ()), *getattr(file, "LAST", ())]
    assert {one.id for one in found} == {one.id for one in REMEDIES}


@pytest.mark.parametrize("cause_id", IDS)
def test_the_page_in_full(cause_id: str) -> None:
    text = page(cause_id)
    assert re.findall(r"^## .*$", text, re.MULTILINE) == [
        "## What it sees", "## Why the GPU waits", "## How it decides", "## What to do",
        "## Where it is blind", "## Remedies, the first to try first",
        "## How to verify it by hand",
    ]  # fmt: skip
    flat = " ".join(text.split())
    for one in remedies_of(cause_id):
        assert f"* **{one.id}**: {one.what}: " in flat
        assert not one.what.endswith(".") and one.moves
        for rule in one.unless:
            assert f"left out when {rule.words}" in flat
    assert text.index("## Remedies") < text.find("A profile changes limits") or (
        "A profile changes limits" not in text
    )
    own = text.partition("## Remedies")[2].partition("A profile changes limits")[0]
    assert max(map(len, own.splitlines())) <= 100


def test_causes_are_listed_by_family() -> None:
    lines = listing().splitlines()
    assert lines[:2] == ["storage:", "  storage-local         The data path waits for a local disk"]
    assert [line.split()[0] for line in lines if line.startswith("  ")] == sorted(
        IDS, key=lambda id_: [one.family for one in LEAVES].index(CAUSES[id_].family)
    )


def test_a_family_says_what_to_record() -> None:
    text = family_page("network")
    assert "net-link" in text and "* **record-with-probe**: " in text


def test_every_metric_of_a_report_is_explained() -> None:
    metrics = metrics_of([], [], underfill_of([]))
    assert {metric.name for metric in metrics} <= set(metric_names())
    for metric in metrics:
        text = metric_page(metric.name)
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
    assert _page(asked).startswith(title)


@pytest.mark.parametrize("cause_id", IDS)
def test_what_a_gate_is_to_check_is_a_metric_of_the_report(cause_id: str) -> None:
    known = {metric.name for metric in metrics_of([], [], underfill_of([]))}
    metric = metric_of(scene(cause_id))
    family = CAUSES[cause_id].family
    assert metric in known if family not in ("synchronization", "fail") else metric not in known


def test_explain_names_the_nearest() -> None:
    for wrong, near in (("storge-local", "storage-local"), ("gpu.bussy_ratio", "gpu.busy_ratio")):
        with pytest.raises(UsageError, match=re.escape(f"did you mean '{near}'?")):
            _page(wrong)


def test_without_a_name_all_are_listed() -> None:
    assert _page(None) == listing() + (
        "unattributed:\n  Lost time without sufficient evidence for any cause\n"
    )
    assert METRICS
