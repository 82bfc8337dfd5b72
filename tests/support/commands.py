"""The real command in a real process; the analysis can be replaced by a report made by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from clusterprof.agent.launch.identity import LAUNCHER_VARIABLES

TESTS = Path(__file__).parents[1]
# The door is under test, not the analysis: one function below it is replaced.
_WITH_REPORT = """
import sys
sys.path.insert(0, {root!r})
from tests.support import reports
import clusterprof.analysis.pipeline as local
local.analyze_with_request = lambda paths, request: reports.ALL[paths[0].name]()
from clusterprof.cli.app import main
sys.exit(main())
"""


def make_environment(**changes: str) -> dict[str, str]:
    """Return the environment without what would change an output."""
    leave_out = ("CLUSTERPROF", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONIO", "PYTHONUNBUF")
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(leave_out) and key not in LAUNCHER_VARIABLES
    }
    return kept | {"PYTHONUTF8": "1"} | changes


def run_command(
    *arguments: str, cwd: Path | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run `clusterprof ARGUMENTS`."""
    run = [sys.executable, "-m", "clusterprof", *arguments]
    return _run(run, cwd, changes)


def run_with_report(
    *arguments: str, cwd: Path | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run a command whose RUN is the name of a report made by hand."""
    run = [sys.executable, "-c", _WITH_REPORT.format(root=str(TESTS.parent)), *arguments]
    return _run(run, cwd, changes)


def _run(
    run: list[str], cwd: Path | None, changes: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        run,
        cwd=cwd or TESTS.parent,
        env=make_environment(**changes),
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
