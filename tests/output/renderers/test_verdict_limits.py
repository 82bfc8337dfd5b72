"""Verdicts on what was not seen, in every output: unknown causes, windows, small times, answers."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace

import pytest

from clusterprof.gate import Policy, judge_runs, parse_any_rule
from clusterprof.output.renderers.html.page import Html
from clusterprof.output.renderers.json import Json
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text import wording
from clusterprof.output.renderers.text.summary import build_summary, describe_scope
from clusterprof.output.renderers.verdicts.documents import (
    format_job_comment,
    render_verdict_markdown,
)
from clusterprof.report.model import UNATTRIBUTED, CoverageGap, JobFacts, Report
from tests.support.histories import make_one_hour_job
from tests.support.reports import S, make_storage_report

RENDERERS = (Terminal(width=100), Plain(), Markdown(), Html())
JOB = JobFacts(2, 2, 1.0)


def texts(report: Report) -> list[str]:
    """Every output as one line without markup."""
    plain = (html.unescape(re.sub(r"<[^>]*>", "", each.render(report))) for each in RENDERERS)
    return [" ".join(text.replace("\\", "").split()) for text in plain]


def mostly_unknown() -> Report:
    """The report of a storage fault, of which 6 of 226 s keep their cause; the rest has none."""
    report = make_storage_report()
    small = 3 * S
    ranks = tuple(
        replace(rank, buckets=(("storage-local", small), (UNATTRIBUTED, rank.lost_ns - small)))
        for rank in report.ranks
    )
    unknown_ns = report.lost_ns - 2 * small
    finding = replace(report.findings[0], lost_ns=2 * small, share_ratio=2 * small / (580 * S))
    return replace(
        report,
        ranks=ranks,
        findings=(finding,),
        unattributed_ns=unknown_ns,
        unattributed_reasons=(("asleep", unknown_ns),),
        coverage_gaps=(
            CoverageGap("threads", "denied", "no permission", "run it as the job's user"),
        ),
    )


def test_an_unknown_main_cause_precedes_remedy_and_largest_known_cause() -> None:
    report = mostly_unknown()
    assert [row.label for row in build_summary(report, None, "") if row.label] == [
        "Lost",
        "Main cause",
        "Try next",
        "Known cause",
        "Ranks",
        "Evidence",
    ]
    rows = {row.label: row.text for row in build_summary(report, None, "")}
    assert rows["Main cause"] == (
        "Not known: 97.3 % of the loss has no known cause (the main thread slept inside a step:"
        " waiting for ranks, or something unrecorded)."
    )
    assert rows["Try next"] == "To learn the cause: run it as the job's user"
    assert rows["Known cause"].startswith("The data path waits for a local disk: 6.00 s, 1.0 %")
    for text in texts(report):
        assert text.index("Not known: 97.3 %") < text.index("To learn the cause: run it as")


def test_without_any_cause_every_output_gives_a_diagnostic_remedy() -> None:
    report = replace(mostly_unknown(), findings=())
    for text in texts(report):
        assert text.index("Not known: 97.3 %") < text.index("To learn the cause: run it as")


def test_json_has_no_main_cause_if_unattributed_time_dominates() -> None:
    known, unknown = make_storage_report(), mostly_unknown()
    assert json.loads(Json().render(known))["main_cause"] == "storage-local"
    assert json.loads(Json().render(unknown))["main_cause"] is None
    # as much unattributed as the largest cause has is not more
    even = replace(unknown, unattributed_ns=unknown.findings[0].lost_ns)
    assert json.loads(Json().render(even))["main_cause"] == "storage-local"
    verdict = judge_runs(unknown, [parse_any_rule("gpu.busy_ratio >= 70%")], Policy())
    comment = format_job_comment(verdict, unknown)
    assert comment.endswith("; lost 39%, cause not known")
    lines = render_verdict_markdown(verdict, unknown).splitlines()
    assert (
        "**39.0 % of the time in steps was lost**, 97.3 % of it without a known cause. Known:"
        in lines
    )
    assert lines[-1 - 2 * len(verdict.notes)].startswith("- 1.0 % storage-local: ")


def test_a_partial_recording_predicts_no_earlier_job_end() -> None:
    report = make_one_hour_job(2, 2, 4, 4)
    assert any("sooner" in text for text in texts(report))
    window = replace(report, job=replace(report.job or JOB, is_window_only=True))
    for text in texts(window):
        assert "the job ends" not in text and "the job would end" not in text
        assert "sooner finished" not in text
    assert "of the recorded window" in texts(window)[0]


@pytest.mark.parametrize(
    "ns, text",
    [
        (20, "20 GPU-nanoseconds"),
        (1_800, "1.8 GPU-microseconds"),
        (9_300_000, "9.3 GPU-milliseconds"),
        (130_000_000, "0.13 GPU-seconds"),
        (3_000_000_000, "3.00 GPU-seconds"),
    ],
)
def test_small_times_are_not_rounded_to_zero(ns: int, text: str) -> None:
    assert wording.format_gpu_time(ns) == text


def test_durations_without_a_unit_are_left_out_of_the_verdict() -> None:
    report = make_storage_report()
    unitless = replace(report, job=replace(JOB, has_time_unit=False))
    assert wording.describe_total_loss(report) == (
        "39.0 % of GPU time inside steps was lost: 3.8 of 9.7 GPU-minutes."
    )
    assert wording.describe_total_loss(unitless) == "39.0 % of GPU time inside steps was lost."
    assert "recorded" not in describe_scope(unitless)
    for text in texts(unitless):
        assert "NO UNIT of time is stated: only shares hold" in text


def test_answers_of_imported_files_precede_the_verdict() -> None:
    answer = "Published accelerator utilization (AU): 97.99 % of whole epochs"
    report = replace(make_storage_report(), answers=(answer,))
    for text, renderer in zip(texts(report), RENDERERS):
        verdict = "Lost" if isinstance(renderer, Terminal) else wording.describe_verdict(report)
        assert text.index(answer) < text.index(verdict)
    assert json.loads(Json().render(report))["answers"] == [answer]
