"""What fixing a cause wins: one answer, the replay's, in every output of one report."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.analysis.findings.savings import with_savings
from clusterprof.output.renderers.html.page import Html
from clusterprof.output.renderers.json import Json
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.openmetrics import OpenMetrics
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.report.impact import CauseImpact, Impact
from clusterprof.report.model import Culprit, Finding, Report
from clusterprof.units import format_quantity
from tests.support.recordings import SECOND
from tests.support.waiting_jobs import make_scripts_with_devices, record_and_analyze

GPUS = 4
AMOUNT = r"([\d.,]+ (?:ms|s|min|h))"


def finding(gain: int | None, *culprits: int, lost: int = 100) -> Finding:
    whose = tuple(Culprit("n", at, "", recoverable_ns=ns) for at, ns in enumerate(culprits))
    return Finding(CAUSES["storage-local"], lost, 0.1, gain, 0.9, "A", False, False, whose)


def wins(
    item: Finding, saved_ns: int | None, is_unknowable: bool = False
) -> tuple[int | None, list[int | None]]:
    line = CauseImpact("storage-local", None, saved_ns, None, None, "", is_unknowable=is_unknowable)
    [savings] = with_savings([item], Impact(None, "", None, 100, (line,), gpus=GPUS))
    return savings.recoverable_ns, [culprit.recoverable_ns for culprit in savings.culprits]


def test_replayed_culprit_savings_never_exceed_the_cause_savings() -> None:
    assert wins(finding(10, 7), 5) == (20, [20])  # of four devices; the only culprit wins all of it
    assert wins(finding(90, 70, 6), 5) == (20, [20, 6])
    assert wins(finding(None), 0) == (0, [])
    # more than was lost: what is known of one of several is the waiting alone, of the only one all
    assert wins(finding(90, 70, 6, lost=19), 5) == (20, [None, None])
    assert wins(finding(90, 70, lost=19), 5) == (20, [20])


def test_savings_without_a_replay_come_from_attribution() -> None:
    assert wins(finding(10, 7), None) == (10, [7])
    assert wins(finding(10, 7), None, is_unknowable=True) == (None, [7])


def why(cause: str, saved_ns: int, *caused_ns: int, gpus: int = GPUS) -> str:
    """Of 10 ns lost; culprits of ranks 2, 3, … with what others waited for them."""
    whose = tuple(
        Culprit("n", 2 + at, "", own_ns=0, others_ns=ns) for at, ns in enumerate(caused_ns)
    )
    item = Finding(CAUSES[cause], 10, 0.1, None, 0.9, "B", False, False, whose)
    line = CauseImpact(cause, None, saved_ns, None, None, "")
    return with_savings([item], Impact(None, "", None, 100, (line,), gpus=gpus))[
        0
    ].why_savings_exceed_loss


def test_savings_above_the_lost_time_have_an_explanation() -> None:
    slow = "sync-slow-compute"
    assert why(slow, 4, 9, 0) == "rank 2 also finishes sooner"  # 16 of 10; the other: 0 of 9
    assert why(slow, 4, 9, 1) == "the late ranks also finish sooner"
    assert why("storage-local", 3, 9) == (
        "all 4 devices finish sooner, including those that lost nothing"
    )
    assert why("storage-local", 11, 9, gpus=1) == ""
    assert why(slow, 2, 9) == ""  # 8 of 10
    assert why(slow, 10, 9, gpus=1) == ""  # as much


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Two ranks whose work is unlike: parts of time differ by what they are parts of."""
    folder: Path = tmp_path_factory.mktemp("wins")
    return record_and_analyze(make_scripts_with_devices((0.0, 0.3), (0.2, 0.25), steps=30), folder)


def document(report: Report) -> list[tuple[str, int, int]]:
    """(cause, what fixing wins of device time, and of the job) as JSON says them."""
    printed = json.loads(Json().render(report))
    saved = {cause["cause"]: cause["saved_ns"] for cause in printed["worth"]["causes"]}
    return [
        (entry["cause"], entry["recoverable_ns"], saved[entry["cause"]])
        for entry in printed["findings"]
        if saved[entry["cause"]] is not None
    ]


def test_json_and_openmetrics_state_the_same_savings(report: Report) -> None:
    parsed = document(report)
    assert {"storage-local", "cpu-preprocess"} <= {cause for cause, _, _ in parsed}
    assert report.impact is not None and report.impact.gpus == 2
    for cause, device_ns, job_ns in parsed:
        assert device_ns == 2 * job_ns, cause
    text = OpenMetrics().render(report)
    for cause, device_ns, job_ns in parsed:
        for name, ns in (("recoverable_gpu", device_ns), ("saved_job", job_ns)):
            pattern = rf'^clusterprof_{name}_seconds{{[^}}]*cause="{cause}"[^}}]*}} (\S+)'
            [value] = re.findall(pattern, text, re.MULTILINE)
            assert float(value) == pytest.approx(ns / SECOND), (cause, name)


@pytest.mark.parametrize("renderer", [Terminal, Plain, Markdown, Html])
def test_readable_outputs_state_the_same_savings_as_json(report: Report, renderer: type) -> None:
    text = renderer().render(report)
    if renderer is Html:
        text = html.unescape(
            re.sub(r"<[^>]*>", " ", re.sub(r"<script.*?</script>", "", text, flags=re.S))
        )
    text = " ".join(text.split())
    # The first screen names the time of the job there, not of the devices.
    first_screen = rf"Expected gain (?:About|At most) {AMOUNT}, [\d.]+ % of the time in steps\."
    ends_sooner = re.findall(first_screen, text)
    text = re.sub(first_screen, "", text)
    first = report.findings[0]
    [(device_ns, job_ns)] = [row[1:] for row in document(report) if row[0] == first.cause.id]
    device = re.findall(
        rf"(?:[Ff]ixing only this saves:?|(?:Expected gain|saves:) (?:[Aa]bout|[Aa]t most))"
        rf" {AMOUNT}",
        text,
    )
    job = re.findall(rf"job (?:ends|would end) {AMOUNT} sooner", text)
    assert (device and job) or renderer is Markdown
    assert device[:1] in ([], [format_quantity(device_ns, "ns")]) and job[:1] in (
        [],
        [format_quantity(job_ns, "ns")],
    )
    assert set(ends_sooner) <= {format_quantity(job_ns, "ns")}
    assert format_quantity(device_ns, "ns") in text
    culprits = re.findall(rf"fixing it alone saves (?:about )?{AMOUNT}", text)
    assert set(culprits) <= {
        format_quantity(item.recoverable_ns, "ns")
        for item in report.findings
        if item.recoverable_ns is not None
    }


def test_a_finding_with_different_savings_fails_the_comparison(report: Report) -> None:
    other = replace(report.findings[0], recoverable_ns=(report.findings[0].recoverable_ns or 0) + 7)
    broken = replace(report, findings=(other, *report.findings[1:]))
    assert any(device_ns != 2 * job_ns for _, device_ns, job_ns in document(broken))
