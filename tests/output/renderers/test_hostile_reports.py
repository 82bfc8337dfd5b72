"""Hostile strings in every place of a report, through every output."""

from __future__ import annotations

import dataclasses
import json
import re
import unicodedata

import pytest

from clusterprof.output.renderers.base import Renderer
from clusterprof.output.renderers.json import Json
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.openmetrics import OpenMetrics
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text.safety import count_columns
from clusterprof.report.model import Report
from tests.support.cluster_report import make_cluster_report
from tests.support.code_profiles import add_code_profile
from tests.support.hostile_names import HOSTILE
from tests.support.hostile_reports import poison_strings
from tests.support.reports import make_storage_report, make_underused_report

OUTPUTS: list[Renderer] = [
    Terminal(80, False, 2.5, "USD"),
    Terminal(72, True),
    Plain(),
    Json(),
    Markdown(),
    OpenMetrics(),
]


def report_of(poison: str) -> Report:
    """A report of one node, with what only several nodes have."""
    batch, progress = make_cluster_report(2, 2), make_storage_report()
    both = dataclasses.replace(
        progress,
        job=batch.job,
        slow_step_summary=batch.slow_step_summary,
        nodes=(*progress.nodes, *batch.nodes),
        findings=(*progress.findings, *batch.findings),
        ranks=(*progress.ranks, *batch.ranks),
        device_utilization=make_underused_report().device_utilization,
    )
    report: Report = poison_strings(add_code_profile(both), poison)
    return report


def test_hostile_strings_reach_every_field() -> None:
    text = Json().render(report_of("POISON"))
    assert text.count('"POISON"') > 60
    assert "storage-local" not in text


@pytest.mark.long  # tests/scenarios/hostile asks the same of wide reports, many strings at a time
@pytest.mark.parametrize("output", OUTPUTS, ids=lambda o: f"{o.name}")
def test_no_output_contains_terminal_or_ci_control_sequences(output: Renderer) -> None:
    unsafe = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    for poison in HOSTILE:
        text = output.render(report_of(poison))
        bare = re.sub(r"\x1b\[(?:0|1|2|32|1;3[136])m", "", text)  # our own colours
        result = {c for c in bare if c != "\n" and unicodedata.category(c) in unsafe}
        assert result == set(), ascii(poison)
        assert [line for line in bare.splitlines() if line.lstrip().startswith("::")] == []
        assert "##[" not in bare


@pytest.mark.long
def test_the_terminal_report_keeps_its_width() -> None:
    for width in (72, 80, 120):
        for poison in HOSTILE:
            text = Terminal(width).render(report_of(poison))
            assert [line for line in text.splitlines() if count_columns(line) > width] == [], ascii(
                poison
            )


def test_hostile_strings_keep_json_valid() -> None:
    for poison in HOSTILE:
        assert json.loads(Json().render(report_of(poison)))["format"] == "clusterprof-report"


def test_hostile_strings_add_no_markdown_or_html_syntax() -> None:
    clean = Markdown().render(report_of("x"))
    for poison in HOSTILE:
        text = Markdown().render(report_of(poison))
        assert text.count("|") == clean.count("|"), ascii(poison)
        assert text.count("<") == clean.count("<")
        assert "](" not in text and "://" not in text and "@" not in text
