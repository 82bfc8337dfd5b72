"""`gate` and `compare` as commands: stored reports, files for CI, exit codes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as Tree

import pytest

from clusterprof.cli.app import main
from clusterprof.cli.gate import format_next_step
from clusterprof.output.renderers.json import Json
from clusterprof.output.renderers.verdicts.documents import render_verdict_text
from tests.support.gate_runs import draw_step_lengths, make_run


@functools.cache
def made() -> dict[str, str]:
    """Three baselines, a good run and a slow one, as JSON."""
    runs = {
        f"base{i}": make_run(f"base{i}", draw_step_lengths(seed=i), started=i) for i in range(1, 4)
    }
    runs["good"] = make_run("good", draw_step_lengths(seed=8), started=8)
    runs["slow"] = make_run("slow", draw_step_lengths(ms=112, seed=9), storage=0.1, started=9)
    return {name: Json().render(report) for name, report in runs.items()}


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, stored in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("CLUSTERPROF_PROFILE", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    for name, report in made().items():
        (tmp_path / f"{name}.json").write_text(report)
    return tmp_path


REPEAT = ("--repeat", "slow.json", "--max-stall", "storage=5%")
BASELINES = [word for i in range(1, 4) for word in ("--baseline", f"base{i}.json")]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["good.json", "--min-util", "70%", "--max-stall", "storage=5%"], 0),
        (["slow.json", "--min-util", "70%", "--max-stall", "storage=5%"], 3),
        (["slow.json", "--max-stall", "storage=5%", "--level", "stall.storage=warn"], 0),
        (["good.json", "--profile", "ci", "--level", "stall.checkpoint=off"], 0),
        (["good.json", "--assert", "step.p50_ns: +5%", *BASELINES], 0),
        (["slow.json", "--assert", "step.p50_ns: +5%", *BASELINES], 3),
        (["base1.json", "--assert", "step.p50_ns: +5%", "--baseline", "good.json"], 4),
        (["good.json", "--assert", "step.p50_ns: +5%", "--baseline", "good.json"], 4),
        (["good.json", *REPEAT, "--aggregate", "pessimistic"], 3),
        (["good.json", *REPEAT, "--aggregate", "optimistic"], 0),
        (["good.json", "--assert", "step.p50_ns: +5%"], 2),
        (["good.json", "--assert", "lost.ratio <= 5%", "--aggregate", "best"], 2),
        (["good.json", "--assert", "lost.ratio <= 5%", "--allow-unlike", "colour"], 2),
        (["good.json", "slow.json", "--assert", "lost.ratio <= 5%"], 2),
        (["none.json", "--assert", "lost.ratio <= 5%"], 5),
    ],
)
def test_gate_exit_codes_follow_the_verdict(reports: Path, words: list[str], code: int) -> None:
    assert main(["gate", *words]) == code


def test_every_file_for_ci_is_written(
    reports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    (reports / "summary.md").write_text("before\n")
    words = ["gate", "slow.json", "--min-util", "95%", "--github", "--json"]
    words += ["--junit", "j.xml", "--markdown", "m.md", "--gitlab-metrics", "g.txt"]
    assert main(words) == 3
    out, err = capsys.readouterr()
    assert json.loads(out)["outcome"] == "fail"
    assert err == (
        "::error title=clusterprof gate%3A gpu.busy_ratio::gpu.busy_ratio >= 95.0 %25: fail:"
        " is 90.0 %25\n"
    )
    assert Tree.parse(reports / "j.xml").getroot().get("failures") == "1"
    comment = (reports / "m.md").read_text(encoding="utf-8")
    assert comment.startswith("<!-- clusterprof:gate -->\n### ❌")
    assert (reports / "summary.md").read_text(encoding="utf-8") == "before\n" + comment
    assert "clusterprof_gpu_busy_ratio 0.9\n" in (reports / "g.txt").read_text()


def test_a_failed_gate_prints_the_analyze_command(tmp_path: Path) -> None:
    failed = SimpleNamespace(outcome="fail")
    next_step = format_next_step("plain", failed, [tmp_path])  # type: ignore[arg-type]
    assert next_step == f"Why, and what to do: clusterprof analyze {tmp_path}\n"
    stored = tmp_path / "report.json"
    stored.write_text("{}")
    passed = SimpleNamespace(outcome="pass")
    for form, verdict, path in (
        ("plain", failed, stored),
        ("json", failed, tmp_path),
        ("plain", passed, tmp_path),
    ):
        assert format_next_step(form, verdict, [path]) == ""  # type: ignore[arg-type]


def test_long_lines_are_wrapped_only_on_a_terminal() -> None:
    lines = ("gate FAILED: 1 of 2 rules", "  FAIL  a <= 1 %  is 2 %", f"  ????  {'word ' * 20}")
    verdict = SimpleNamespace(lines=lines)
    assert render_verdict_text(verdict) == "\n".join(lines) + "\n"  # type: ignore[arg-type]
    assert (
        render_verdict_text(verdict, 40).splitlines()
        == [  # type: ignore[arg-type]
            *lines[:2],
            "  ???? word word word word word",
            *["        word word word word word word"] * 2,
            "        word word word",
        ]
    )


def test_gate_prints_a_summary_line_and_every_format(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", "good.json", "--min-util", "70%", "--one-line"]) == 0
    assert capsys.readouterr().out == "clusterprof: PASSED, 1 rule; busy 100%; lost 0%\n"
    for format_, begin in (("junit", "<?xml"), ("markdown", "<!--"), ("json", "{")):
        assert main(["gate", "good.json", "--min-util", "70%", "--format", format_]) == 0
        assert capsys.readouterr().out.startswith(begin)


def test_change_rules_of_a_profile_need_a_baseline(reports: Path) -> None:
    (reports / "own.yaml").write_text(
        "extends: default\ngate:\n  assertions: ['gpu.busy_ratio >= 70%']\n"
        "  regressions: ['step.p50_ns: +5%', 'warn: lost.ratio: +3pt']\n"
    )
    assert main(["gate", "slow.json", "--profile", "own.yaml"]) == 0
    assert main(["gate", "slow.json", "--profile", "own.yaml", *BASELINES]) == 3
    assert main(["gate", "good.json", "--profile", "own.yaml", *BASELINES]) == 0


def test_a_baseline_without_rules_applies_default_change_rules(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gate", "slow.json", *BASELINES, "--json"]) == 3
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert [(rule["rule"], rule["level"]) for rule in rules] == [
        ("step.p50_ns: +5%", "error"),
        ("lost.ratio: +3pt", "error"),
    ]
    assert main(["gate", "good.json", *BASELINES]) == 0


def test_compare_names_the_changed_cause_and_applies_fail_on(
    reports: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "base1.json", "slow.json"]) == 0
    assert "What changed: storage-local +1" in capsys.readouterr().out
    assert main(["compare", "base1.json", "slow.json", "--fail-on", "step.p50_ns: +5%"]) == 3
    assert main(["compare", "base1.json", "good.json", "--fail-on", "step.p50_ns: +5%"]) == 0
    assert main(["compare", "slow.json", "base1.json", "--fail-on", "step.p50_ns: +5%"]) == 4
    capsys.readouterr()
    for format_, begin in (("markdown", "<!--"), ("json", "{"), ("plain", "A step is")):
        assert main(["compare", "base1.json", "slow.json", "--format", format_]) == 0
        assert capsys.readouterr().out.startswith(begin)
    assert main(["compare", "base1.json", "slow.json", "--format", "html"]) == 2
