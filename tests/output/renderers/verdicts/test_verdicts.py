"""Every form of a verdict, whole; and no foreign name commands a runner or breaks a document."""

from __future__ import annotations

import dataclasses
import json
import re
from xml.etree import ElementTree as Tree

import pytest

from clusterprof.gate import Policy, RuleResult, Verdict, judge_runs, parse_any_rule
from clusterprof.output.renderers.verdicts.ci import (
    MAX_ANNOTATIONS,
    MAX_SUMMARY_BYTES,
    format_rounded,
    format_workflow_commands,
    render_gitlab_metrics,
    render_junit,
    trim_step_summary,
)
from clusterprof.output.renderers.verdicts.documents import (
    MAX_LINE_LENGTH,
    format_job_comment,
    render_verdict_json,
    render_verdict_markdown,
    render_verdict_text,
)
from clusterprof.report.model import Metric, Report
from tests.support.gate_runs import draw_step_lengths, make_run
from tests.support.hostile_names import HOSTILE
from tests.support.reports import make_storage_report

RULES = (
    "gpu.busy_ratio >= 70%",
    "stall.storage <= 36%",
    "gpu.sm_active >= 50%",
    "warn: step.p95_ns <= 1 ms",
)


def failed(report: Report | None = None, *rules: str, policy: Policy | None = None) -> Verdict:
    chosen = [parse_any_rule(rule) for rule in rules or RULES]
    return judge_runs(report or make_storage_report(), chosen, policy or Policy())


def changed() -> Verdict:
    now, before = (
        make_run("now", draw_step_lengths(seed=1, ms=110), started=2),
        make_run("before", draw_step_lengths(seed=2)),
    )
    return judge_runs(now, [parse_any_rule("step.p50_ns: +5%")], Policy(), (), [before])


def test_junit_has_a_test_for_every_rule() -> None:
    root = Tree.fromstring(render_junit(failed()))
    suite = root.find("testsuite")
    assert suite is not None
    counts = {"tests": "4", "failures": "2", "errors": "0", "skipped": "1", "time": "0"}
    assert dict(root.attrib) == {"name": "clusterprof gate", **counts}
    cases = suite.findall("testcase")
    assert [case.get("name") for case in cases] == list(RULES)
    assert {case.get("classname") for case in cases} == {"clusterprof.gate"}
    kinds = [[child.tag for child in case if child.tag != "properties"] for case in cases]
    assert kinds == [["failure"], [], ["failure"], ["skipped"]]
    types = [failure.get("type") for failure in suite.iter("failure")]
    assert types == ["failed", "cannot-tell"]
    values = {part.get("name"): part.get("value") for part in cases[1].iter("property")}
    assert values == {
        "metric": "stall.storage_ratio",
        "value": "0.344827586",
        "unit": "ratio",
        "limit": "0.36",
        "level": "error",
        "outcome": "pass",
    }


def test_an_accepted_undecided_rule_is_skipped_in_junit() -> None:
    lenient = Policy(on_inconclusive="warn")
    root = Tree.fromstring(render_junit(failed(None, "gpu.sm_active >= 50%", policy=lenient)))
    assert (root.get("failures"), root.get("skipped")) == ("0", "1")


def test_junit_properties_of_a_change_include_its_interval() -> None:
    (case,) = Tree.fromstring(render_junit(changed())).iter("testcase")
    values = {part.get("name"): part.get("value") for part in case.iter("property")}
    assert {"baseline", "change", "change_low", "change_high", "found_from", "steps"} <= set(values)
    assert float(values["change_low"] or 0) < float(values["change"] or 0)


def test_github_annotations_match_the_expected_text() -> None:
    assert format_workflow_commands(failed()).splitlines() == [
        "::error title=clusterprof gate%3A gpu.busy_ratio::gpu.busy_ratio >= 70.0 %25: fail:"
        " is 61.0 %25",
        "::error title=clusterprof gate%3A gpu.sm_active_ratio::gpu.sm_active_ratio >= 50.0 %25:"
        " cannot tell: the driver offers no GPM on this GPU",
        "::warning title=clusterprof gate%3A step.p95_ns::step.p95_ns <= 1.0 ms: fail: is 812.3 ms",
    ]
    assert format_workflow_commands(failed(None, "gpu.busy_ratio >= 1%")) == ""


@pytest.mark.parametrize(("count", "lines"), [(9, 9), (10, 10), (11, 10), (60, 10)])
def test_github_gets_ten_annotations_at_most(count: int, lines: int) -> None:
    rules = [f"gpu.busy_ratio >= 9{at / 100:.2f}%" for at in range(count)]
    stated = format_workflow_commands(failed(None, *rules)).splitlines()
    assert len(stated) == lines <= MAX_ANNOTATIONS
    assert (count > 10) == stated[-1].endswith(f"{count - 9} more rules: see the log")


def test_a_long_summary_is_truncated_with_a_notice() -> None:
    text = "a line of é\n" * 100_000
    cut = trim_step_summary(text)
    assert len(cut.encode()) <= MAX_SUMMARY_BYTES < len(text.encode())
    assert cut.endswith("truncated here; a step's summary is limited to 900 KiB*\n")
    assert set(cut.split("\n\n*")[0].splitlines()) == {"a line of é"}
    assert trim_step_summary("short\n", MAX_SUMMARY_BYTES - 6) == "short\n"
    assert trim_step_summary("short\n", MAX_SUMMARY_BYTES - 5) == ""


def test_gitlab_metrics_match_the_expected_text() -> None:
    report = make_storage_report()
    assert render_gitlab_metrics(report, failed()) == (
        "# TYPE clusterprof_gpu_busy_ratio gauge\nclusterprof_gpu_busy_ratio 0.6103\n"
        "# TYPE clusterprof_stall_storage_ratio gauge\nclusterprof_stall_storage_ratio 0.3448\n"
        "# TYPE clusterprof_step_p95_seconds gauge\nclusterprof_step_p95_seconds 0.8123\n"
        "# TYPE clusterprof_gate_rules gauge\n"
        'clusterprof_gate_rules{outcome="pass"} 1\n'
        'clusterprof_gate_rules{outcome="fail"} 2\n'
        'clusterprof_gate_rules{outcome="cannot tell"} 1\n'
        "# EOF\n"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.123456, "0.1235"),
        (0.12354, "0.1235"),
        (812345678.0, "812300000"),
        (100.0, "100"),
        (1e-7, "1e-07"),
        (1.23456e18, "1.235e+18"),
        (12.3456, "12.35"),
    ],
)
def test_numbers_are_rounded_to_a_fixed_format(value: float, text: str) -> None:
    assert format_rounded(value) == text


def test_the_pull_request_comment_matches_the_expected_text() -> None:
    text = render_verdict_markdown(failed(), make_storage_report())
    lines = text.splitlines()
    marker = "<!-- clusterprof:gate -->"
    assert lines[:2] == [marker, "### ❌ clusterprof gate failed: runs/slow-disk"]
    assert "| ❌ | gpu.busy&#95;ratio &#62;= 70.0 % | 61.0 % | is 61.0 % |" in lines
    assert "| ⚠️ | step.p95&#95;ns &#60;= 1.0 ms | 812.3 ms | is 812.3 ms |" in lines
    assert "| ✅ | stall.storage&#95;ratio &#60;= 36.0 % | 34.5 % | is 34.5 % |" in lines
    assert lines[-4] == "**39.0 % of the time in steps was lost**, most of it to:"


def test_the_job_comment_is_a_single_line() -> None:
    assert format_job_comment(failed(), make_storage_report()) == (
        "clusterprof: FAILED, 4 rules (gpu.busy_ratio, step.p95_ns); busy 61%; lost 39%,"
        " most storage-local 34% (node-a vda)"
    )


def test_the_json_verdict_is_a_single_document() -> None:
    document = json.loads(render_verdict_json(changed()))
    assert (document["format"], document["outcome"], document["exit_code"]) == (
        "clusterprof-gate",
        "fail",
        3,
    )
    (rule,) = document["rules"]
    assert (rule["kind"], rule["operator"], rule["limit"], rule["limit_unit"]) == (
        "change",
        "+",
        0.05,
        "%",
    )
    assert rule["change"]["low"] < rule["change"]["estimate"] < rule["change"]["high"]


def hostile(text: str) -> tuple[Verdict, Report]:
    """A verdict and a report in which every foreign string is this one."""
    report = make_storage_report()
    metric = Metric(text, 0.5, "ratio", text)
    culprits = tuple(
        dataclasses.replace(culprit, node=text, resource=text)
        for culprit in report.findings[0].culprits
    )
    finding = dataclasses.replace(report.findings[0], culprits=culprits)
    report = dataclasses.replace(report, title=text, metrics=(metric,), findings=(finding,))
    rule = dataclasses.replace(parse_any_rule("a >= 1"), text=text, metric=text)
    result = RuleResult(rule, text, "ratio", 0.5, 1.0, "fail", text)
    lines = ("gate FAILED", text)
    return Verdict(3, "fail", lines, (result,), (text,), (text,), text), report


METRIC_LINE = re.compile(
    r"# (TYPE \w+ gauge|EOF)|[a-zA-Z_]\w*(\{outcome=\"[a-z ]+\"\})? \S+", re.ASCII
)
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


@pytest.mark.parametrize("part", range(4))
def test_hostile_names_are_escaped_in_every_verdict_format(part: int) -> None:
    for text in HOSTILE[part::4]:
        verdict, report = hostile(text)
        outputs = {
            "plain": render_verdict_text(verdict),
            "junit": render_junit(verdict),
            "json": render_verdict_json(verdict),
            "markdown": render_verdict_markdown(verdict, report),
            "one line": format_job_comment(verdict, report) + "\n",
            "gitlab": render_gitlab_metrics(report, verdict),
            "github": format_workflow_commands(verdict),
        }
        for name, out in outputs.items():
            assert not RAW.search(out), (name, text)
            out.encode("utf-8")  # no lone surrogate
            if name != "github":
                assert not re.search(r"^\s*::|##\[", out, re.MULTILINE), (name, text)
        (command,) = outputs["github"].splitlines()
        assert re.fullmatch(r"::error title=[^:,\r\n]*::.*", command), text
        Tree.fromstring(outputs["junit"])
        json.loads(outputs["json"])
        assert len(outputs["one line"]) <= MAX_LINE_LENGTH + 1 and outputs["one line"].isascii()
        assert "<script" not in outputs["markdown"] and "](http" not in outputs["markdown"]
        for line in outputs["gitlab"].splitlines():
            assert re.fullmatch(
                r"# (TYPE \w+ gauge|EOF)|[a-zA-Z_]\w*(\{outcome=\"[a-z ]+\"\})? \S+", line
            )
