"""deploy/gitlab/gate.yml and the pre-commit hook: their scripts are run."""

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
_INPUT = re.compile(r"\$\[\[ inputs\.([\w-]+) \]\]")


def load_template(**inputs: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of the job and the job, with the inputs put in as GitLab does."""
    text = (ROOT / "deploy/gitlab/gate.yml").read_text(encoding="utf-8")
    header, jobs = yaml.safe_load_all(text)
    described = header["spec"]["inputs"]
    assert set(inputs) <= set(described)
    values = {name: facts.get("default") for name, facts in described.items()} | inputs
    assert None not in values.values(), "an input without a default is missing"

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {fill(key): fill(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fill(item) for item in value]
        if not isinstance(value, str):
            return value
        whole = _INPUT.fullmatch(value)
        return values[whole[1]] if whole else _INPUT.sub(lambda match: values[match[1]], value)

    ((name, job),) = fill(jobs).items()
    return name, job


def make_tools(folder: Path) -> str:
    """Make a folder with `clusterprof`; returns a search path that begins with it."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    program = tools / "clusterprof"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m clusterprof "$@"\n')
    program.chmod(0o755)
    return f"{tools}:{os.environ['PATH']}"


def run_job(folder: Path, **inputs: Any) -> subprocess.CompletedProcess[str]:
    _, job = load_template(**inputs)
    variables = {name: entry["value"] for name, entry in job["variables"].items()}
    assert not any(entry["expand"] for entry in job["variables"].values())
    (script,) = job["script"]
    return subprocess.run(
        ["sh", "-c", script],
        cwd=folder,
        env=make_environment(PATH=make_tools(folder), PYTHONPATH=str(ROOT), **variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_reports(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("rules", "code"),
    [
        ("gpu.busy_ratio >= 50%\n\nstall.storage_ratio <= 5%\n", 0),
        ("stall.storage_ratio <= 1%", 3),
        ("gpu.sm_active_ratio >= 1%", 4),
        ("step.p50_ns: +50%", 0),
    ],
)
def test_the_ci_job_exits_with_the_gate_exit_code(folder: Path, rules: str, code: int) -> None:
    baselines = "base1.json\nbase2.json\nbase3.json\ngone.json\n" if ": +" in rules else ""
    done = run_job(folder, run="report.json", rules=rules, baselines=baselines, profile="")
    assert done.returncode == code, done.stderr
    _, job = load_template(run="report.json")
    for kind in ("junit", "metrics"):
        assert (folder / job["artifacts"]["reports"][kind]).exists()


def test_a_recording_is_analyzed_into_report_and_page(folder: Path) -> None:
    done = run_job(folder, run=str(RECORDING), rules="lost.ratio <= 99%", profile="")
    assert done.returncode in (0, 3, 4), done.stderr
    names = {path.name for path in (folder / "clusterprof-gate").iterdir()}
    assert names == {"report.json", "report.html", "gate.xml", "gate.md", "metrics.txt"}


def test_shell_syntax_in_an_input_is_not_executed(folder: Path) -> None:
    trap = "$(touch ran) `touch ran` '; touch ran; '\nEOF\ntouch ran"
    for name in ("run", "rules", "baselines", "profile"):
        run_job(folder, **({"run": "report.json"} | {name: trap}))
    assert not (folder / "ran").exists()


def test_every_input_is_described_and_used() -> None:
    text = (ROOT / "deploy/gitlab/gate.yml").read_text(encoding="utf-8")
    header, _ = yaml.safe_load_all(text)
    described = header["spec"]["inputs"]
    assert set(_INPUT.findall(text)) == set(described)
    name, job = load_template(run="run", job="gate", needs=["train"])
    assert (name, job["needs"], job["stage"]) == ("gate", ["train"], "test")


def test_the_template_matches_the_gitlab_schema(tmp_path: Path) -> None:
    """The schema is that of the package check-jsonschema, which validates without a network."""
    pytest.importorskip("check_jsonschema")
    name, job = load_template(run="run", needs=["train"])
    (tmp_path / "job.json").write_text(json.dumps({name: job}))
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.gitlab-ci"]
    done = subprocess.run(
        [*check, str(tmp_path / "job.json")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def run_hook(folder: Path, *files: str) -> subprocess.CompletedProcess[str]:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    return subprocess.run(
        [*shlex.split(hook["entry"]), *files],
        cwd=folder,
        env=make_environment(PATH=make_tools(folder), PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_hook_checks_every_profile_and_names_the_mistake(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text("extends: default\nsampling: {hz: 5}\n")
    (tmp_path / "wrong.yaml").write_text("extends: default\nsampling: {herz: 5}\n")
    (tmp_path / "broken.yaml").write_text("extends: [\n")
    done = run_hook(tmp_path, "good.yaml", "good.yaml")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = run_hook(tmp_path, "wrong.yaml", "good.yaml", "broken.yaml")
    assert done.returncode == 1 and done.stdout == ""
    assert "herz" in done.stderr and "broken.yaml" in done.stderr


def test_the_hook_selects_profiles_by_file_name() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    names = ["clusterprof.yaml", "ops/clusterprof.yml", "clusterprof.site-a.yaml", "values.yaml"]
    assert [bool(re.search(hook["files"], name)) for name in names] == [True, True, True, False]
