"""docs/gate.md and its recipes: every gate and compare in them is run, and the files are read."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from clusterprof.cli.app import main
from clusterprof.output.renderers.json import Json
from tests.support.gate_runs import draw_step_lengths, make_run

DOCS = Path(__file__).parents[2] / "docs"
RECIPES = DOCS / "recipes"


def commands() -> Iterator[tuple[str, str]]:
    """(where, command line) of every gate and compare."""
    page = (DOCS / "gate.md").read_text(encoding="utf-8")
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        yield from (("gate.md", line) for line in _own(block))
    for path in sorted(RECIPES.iterdir()):
        yield from ((path.name, line) for line in _own(path.read_text(encoding="utf-8")))


def _own(text: str) -> Iterator[str]:
    for match in re.finditer(r"clusterprof ((?:gate|compare) [^\n]*)", text):
        line = re.split(r"\s2>|\)\"|'\)$|\)$", match[1])[0].rstrip("'\")")
        yield line + ("'" if line.count("'") % 2 else "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stored reports under every name that the page uses for a run."""
    monkeypatch.chdir(tmp_path)
    for name in ("CLUSTERPROF_PROFILE", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "baselines").mkdir()
    for i, name in enumerate(("base1", "base2", "base3", "again", "third", "report")):
        report = Json().render(make_run(name, draw_step_lengths(seed=i), started=i + 1))
        (tmp_path / f"{name}.json").write_text(report)
        if name.startswith("base"):
            (tmp_path / "baselines" / f"{name}.json").write_text(report)
    (tmp_path / "run").write_text(report)
    return tmp_path


def test_every_documented_gate_command_runs(folder: Path) -> None:
    tried: dict[str, int] = {}
    for where, line in commands():
        words = [word.replace("$run", "run") for word in shlex.split(line)]
        code = main(words)  # 2: an option that is not; 5: nothing to read
        assert code in (0, 3, 4), (where, line, code)
        tried[where] = tried.get(where, 0) + 1
    assert tried == {
        "gate.md": 10,
        "github-actions.yml": 2,
        "gitlab-ci.yml": 1,
        "Jenkinsfile": 1,
        "slurm-epilog.sh": 1,
    }


def test_recipes_are_linked_and_valid_ci_files() -> None:
    page = (DOCS / "gate.md").read_text(encoding="utf-8")
    for path in RECIPES.iterdir():
        assert f"(recipes/{path.name})" in page, path.name
    github = yaml.safe_load((RECIPES / "github-actions.yml").read_text(encoding="utf-8"))
    steps = github["jobs"]["gate"]["steps"]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    gitlab = yaml.safe_load((RECIPES / "gitlab-ci.yml").read_text(encoding="utf-8"))
    job = gitlab["training-performance"]
    assert job["artifacts"]["reports"] == {"junit": "gate.xml", "metrics": "metrics.txt"}
    for name in job["artifacts"]["reports"].values():
        assert any(name in line for line in job["script"])


def test_the_slurm_epilog_writes_a_job_comment_and_never_fails(folder: Path) -> None:
    tools = folder / "bin"
    tools.mkdir()
    clusterprof = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m clusterprof "$@"\n'
    sacctmgr = f'#!/bin/sh\nprintf "%s|" "$@" > {shlex.quote(str(folder / "arguments"))}\n'
    for name, text in (("clusterprof", clusterprof), ("sacctmgr", sacctmgr)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "runs").mkdir()
    (folder / "run").rename(folder / "runs" / "4711")
    path = f"{tools}:/usr/bin:/bin"
    changed = {"CLUSTERPROF_RUNS": str(folder / "runs"), "CLUSTERPROF_PATH": path}
    for job, stated in (("4711", True), ("4712", False)):
        (folder / "arguments").unlink(missing_ok=True)
        done = subprocess.run(
            [str(RECIPES / "slurm-epilog.sh")],
            env={**os.environ, **changed, "SLURM_JOB_ID": job},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert (folder / "arguments").exists() == stated
        if stated:
            words = (folder / "arguments").read_text().split("|")
            assert words[:6] == ["-i", "modify", "job", "where", "jobid=4711", "set"]
            assert words[6].startswith("Comment=clusterprof: ")
