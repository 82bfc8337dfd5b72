"""action.yml, the GitHub Action of the gate: its scripts are run, as a runner runs them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import make_environment
from tests.support.gate_runs import write_reports

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests/recordings/h200/sleep"
SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
"""How GitHub runs `shell: bash`."""
_GH = """#!/bin/sh
printf '%s|' "$@" >> {calls}
case "$*" in *--jq*) printf '%s' "$EARLIER" ;; *@*) cp "${{BODY_FILE}}" {body} ;; esac
"""


def load_action() -> dict[str, Any]:
    action: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    return action


def get_step(name: str) -> dict[str, Any]:
    (step,) = (step for step in load_action()["runs"]["steps"] if step["name"] == name)
    return step


def run_step(name: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script of a step with its variables; every one that it names must be given."""
    step = get_step(name)
    assert set(step.get("env", {})) == set(variables), name
    output = folder / "output"
    output.touch()
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    program = tools / "clusterprof"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m clusterprof "$@"\n')
    program.chmod(0o755)
    return subprocess.run(
        [*SHELL, step["run"]],
        cwd=folder,
        env=make_environment(
            PATH=f"{tools}:{os.environ['PATH']}",
            PYTHONPATH=str(ROOT),
            RUNNER_TEMP=str(folder / "temp"),
            GITHUB_OUTPUT=str(output),
            GITHUB_STEP_SUMMARY=str(folder / "summary.md"),
            GITHUB_REPOSITORY="lab/training",
            BODY_FILE=str(folder / "temp/clusterprof-gate/comment.md"),
            **variables,
        ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_gate(
    folder: Path, **changes: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    variables = {
        "RUN": "report.json",
        "RULES": "",
        "BASELINES": "",
        "PROFILE": "",
        "ON_INCONCLUSIVE": "fail",
    }
    (folder / "output").unlink(missing_ok=True)
    done = run_step("Gate", folder, **(variables | changes))
    lines = (folder / "output").read_text().splitlines()
    return done, dict(line.split("=", 1) for line in lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_reports(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("rules", "outcome", "code"),
    [
        ("gpu.busy_ratio >= 50%\n\nstall.storage_ratio <= 5%\n", "passed", "0"),
        ("stall.storage_ratio <= 1%", "failed", "3"),
        ("gpu.sm_active_ratio >= 1%", "cannot-tell", "4"),
        ("step.p50_ns: +50%", "passed", "0"),
    ],
)
def test_outcome_and_exit_code_follow_the_gate(
    folder: Path, rules: str, outcome: str, code: str
) -> None:
    is_change = rules.startswith("step")
    baselines = "base1.json\nbase2.json\nbase3.json\ngone.json\n" if is_change else ""
    done, outputs = run_gate(folder, RULES=rules, BASELINES=baselines)
    assert done.returncode == 0, done.stderr
    assert (outputs["outcome"], outputs["code"]) == (outcome, code)
    assert run_step("Result", folder, CODE=code).returncode == int(code)
    written = Path(outputs["folder"])
    assert (written / "gate.md").read_text().startswith("<!-- clusterprof:gate -->")
    assert "<testsuite" in (written / "gate.xml").read_text()
    assert (folder / "summary.md").exists()


def test_a_recording_is_analyzed_into_report_and_page(folder: Path) -> None:
    done, outputs = run_gate(folder, RUN=str(RECORDING), RULES="lost.ratio <= 90%")
    assert outputs["outcome"] == "passed", done.stderr
    written = Path(outputs["folder"])
    assert json.loads((written / "report.json").read_text())["format"] == "clusterprof-report"
    assert (written / "report.html").read_text().startswith("<!doctype html>")


def test_input_errors_fail_the_step_with_a_message(folder: Path) -> None:
    for changes, message in (
        ({"RULES": "no rule at all"}, "no rule at all"),
        ({"RUN": "gone", "RULES": "lost.ratio <= 90%"}, "gone"),
    ):
        done, outputs = run_gate(folder, **changes)
        assert done.returncode in (2, 5) and message in done.stderr
        assert "outcome" not in outputs


def test_shell_syntax_in_an_input_is_not_executed(folder: Path) -> None:
    poison = "$(touch hacked); `touch hacked`; 'touch hacked'"
    run_gate(folder, RULES=poison, BASELINES=poison, RUN=poison, PROFILE=poison)
    assert not (folder / "hacked").exists()
    scripts = [step.get("run", "") for step in load_action()["runs"]["steps"]]
    assert not any("${{" in script for script in scripts)


@pytest.mark.parametrize("earlier", ["", "4711"])
def test_the_comment_is_created_once_and_then_updated(folder: Path, earlier: str) -> None:
    _, outputs = run_gate(folder, RULES="stall.storage_ratio <= 1%")
    calls, body = folder / "calls", folder / "body"
    gh = folder / "bin/gh"
    gh.write_text(_GH.format(calls=shlex.quote(str(calls)), body=shlex.quote(str(body))))
    gh.chmod(0o755)
    os.environ["EARLIER"] = earlier
    try:
        done = run_step(
            "Comment",
            folder,
            GH_TOKEN="secret",
            FOLDER=outputs["folder"],
            NUMBER="12",
            LINK="https://example.org/artifact",
        )
    finally:
        del os.environ["EARLIER"]
    assert done.returncode == 0, done.stderr
    asked = calls.read_text()
    place = "repos/lab/training/issues/comments/4711" if earlier else "issues/12/comments|-F"
    assert place in asked and ("-X|PATCH" in asked) == bool(earlier)
    text = body.read_text()
    assert text.startswith("<!-- clusterprof:gate -->") and "storage" in text
    assert "[The whole report](https://example.org/artifact)" in text


def test_the_action_matches_the_github_schema() -> None:
    """The schema is that of the package check-jsonschema, which validates without a network."""
    pytest.importorskip("check_jsonschema")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema", "--builtin-schema"),
            *("vendor.github-actions", str(ROOT / "action.yml")),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_expressions_name_existing_inputs_and_steps() -> None:
    action = load_action()
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    inputs = set(re.findall(r"inputs\.([a-z-]+)", text))
    assert inputs == set(action["inputs"])
    ids = {step.get("id") for step in action["runs"]["steps"]}
    assert set(re.findall(r"steps\.([a-z-]+)\.", text)) <= ids
    page = (ROOT / "docs/gate.md").read_text(encoding="utf-8")
    assert "action.yml" in page and all(f"`{name}`" in page for name in inputs)
