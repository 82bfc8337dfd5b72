"""Recorder and analyzer of different versions: an upgrade or a downgrade between them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from tests.scenarios.faults.model import Fault, NotPossible, Trial
from tests.scenarios.faults.rig import PATIENCE_S
from tests.support.recording_runs import PYTHON, list_files, make_environment, make_job_id

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = 12
"""Commits, evenly spaced in the history, whose recorder and analyzer are tried."""
COMMANDS = (("analyze",), ("analyze", "--json"), ("dump",), ("top", "--once"))
JOB = """
import time, clusterprof
for _ in range(150):
    with clusterprof.span("work"):
        time.sleep(0.01)
    clusterprof.step()
"""


@cache
def list_commits() -> tuple[str, ...]:
    """Return commits of the history, evenly spaced, that have a recorder, the oldest first.

    Raises: NotPossible without a history.
    """
    command = ["git", "log", "--first-parent", "--reverse", "--format=%H", "--", "clusterprof"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    commits = done.stdout.split()
    if done.returncode or len(commits) < 2 * VERSIONS:
        raise NotPossible("there is no history of the project here")
    later = commits[len(commits) // 3 :]  # before, there was no recorder yet
    return tuple(later[at * (len(later) - 1) // (VERSIONS - 1)] for at in range(VERSIONS))


def export_version(commit: str, folder: Path) -> Path:
    """Write the package of a commit into a folder; return the folder."""
    archive = subprocess.run(
        ["git", "archive", commit, "clusterprof", "profiles"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "--extract", "--directory", folder], input=archive.stdout, check=True)
    return folder


def upgrade(folder: Path, number: int) -> Trial:
    """Record with an older version, read with this one."""
    commit = list_commits()[number % VERSIONS]
    old = export_version(commit, folder / "old")
    out = record_with(old, folder)
    for words in COMMANDS:
        done = run_version(ROOT, (words[0], str(out), *words[1:]))
        assert done.returncode == 0, f"{commit[:8]}: {' '.join(words)}: {done.stderr[-300:]}"
    return Trial(injected=len(COMMANDS))


def downgrade(folder: Path, number: int) -> Trial:
    """Record with this version, read with an older one: it reads, or says why it cannot."""
    commit = list_commits()[number % VERSIONS]
    old = export_version(commit, folder / "old")
    out = record_with(ROOT, folder)
    refused = 0
    for words in COMMANDS:
        done = run_version(old, (words[0], str(out), *words[1:]))
        assert "Traceback" not in done.stderr, f"{commit[:8]}: {done.stderr[-300:]}"
        refused += done.returncode != 0
    return Trial(injected=len(COMMANDS), facts={"commands refused": refused})


def record_with(tree: Path, folder: Path) -> Path:
    """Record a job with the package in a folder; return the recording."""
    out = folder / "out"
    job = make_job_id("version")
    done = run_version(tree, ("record", "-o", str(out), "--", PYTHON, "-c", JOB), job)
    assert done.returncode == 0, done.stderr[-300:]
    end = time.monotonic() + PATIENCE_S
    while not list_files(out, ".cpf"):
        if time.monotonic() > end:
            raise NotPossible(f"this version recorded nothing: {done.stderr[-200:]}")
        time.sleep(0.1)
    time.sleep(2.0)
    return out


def run_version(
    tree: Path, words: tuple[str, ...], job: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command with the package in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "clusterprof", *words],
        cwd=tree,
        env={**make_environment(job), "PYTHONPATH": str(tree), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_S,
        check=False,
    )


assert os.sep == "/"

FAULTS = (
    Fault(
        "upgrade",
        "an older version recorded, this one reads",
        f"{VERSIONS} commits of the history record a job; analyze, dump, top",
        upgrade,
        VERSIONS,
        VERSIONS,
        counted="commands",
    ),
    Fault(
        "downgrade",
        "this version recorded, an older one reads",
        f"{VERSIONS} commits of the history; analyze, dump, top",
        downgrade,
        VERSIONS,
        VERSIONS,
        counted="commands",
    ),
)
