"""A process records itself: what is recorded, and what is left afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from clusterprof.analysis.pipeline import analyze

SCRIPT = """
import json, os, sys, time
import clusterprof

before = dict(os.environ)
with clusterprof.record(sys.argv[1]) as folder:
    recorded = os.environ.get("CLUSTERPROF_RUN_DIR")
    for _ in range(30):
        with clusterprof.span("data_wait"):
            time.sleep(0.05)
        clusterprof.step()
clusterprof.step()  # no longer recorded
try:
    with clusterprof.record(sys.argv[1] + "2"):
        pass
    refused = ""
except clusterprof.errors.UsageError as error:
    refused = error.message
print(json.dumps({
    "folder": str(folder),
    "run_dir": recorded,
    "restored": dict(os.environ) == before,
    "refused": refused,
}))
"""


def run(out: Path) -> dict[str, str]:
    script = "import clusterprof.errors\n" + SCRIPT
    done = subprocess.run(
        [sys.executable, "-c", script, str(out)],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    result: dict[str, str] = json.loads(done.stdout)
    return result


def test_a_process_records_itself_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    assert result["folder"] == str(tmp_path / "run")
    assert result["restored"] is True
    assert result["refused"] == "this process is or was recorded already"
    assert not Path(result["run_dir"]).exists()
    report = analyze(tmp_path / "run")
    [rank] = report.ranks
    assert 28 <= rank.steps <= 30
    assert report.lost_ns > 0.9 * report.in_step_ns  # it waited for data nearly all the time
