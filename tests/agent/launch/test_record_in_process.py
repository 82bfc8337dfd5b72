"""A process records itself: what is recorded, and what is left afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from clusterprof.analysis.pipeline import analyze

SCRIPT = """
import json, os, sys, time, warnings
import clusterprof

before = dict(os.environ)
with clusterprof.record(sys.argv[1]) as folder:
    recorded = os.environ.get("CLUSTERPROF_RUN_DIR")
    for _ in range(30):
        with clusterprof.span("data_wait"):
            time.sleep(0.05)
        clusterprof.step()
clusterprof.step()  # no longer recorded
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with clusterprof.record(sys.argv[1] + "2") as second:
        assert second is None
    refused = str(caught[0].message)
print(json.dumps({
    "folder": str(folder),
    "run_dir": recorded,
    "restored": dict(os.environ) == before,
    "refused": refused,
}))
"""


def run(out: Path) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out)],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    result: dict[str, str] = json.loads(done.stdout)
    return result


def test_recording_in_process_restores_the_process_and_removes_files(tmp_path: Path) -> None:
    result = run(tmp_path / "run")
    assert result["folder"] == str(tmp_path / "run")
    assert result["restored"] is True
    assert result["refused"] == (
        "clusterprof: not recording: this process is or was recorded already: once per process"
    )
    assert not Path(result["run_dir"]).exists()
    report = analyze(tmp_path / "run")
    [rank] = report.ranks
    assert 28 <= rank.steps <= 30
    assert report.lost_ns > 0.9 * report.in_step_ns  # it waited for data nearly all the time


def test_a_job_runs_even_if_recording_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    script = (
        "import sys, clusterprof\n"
        "with clusterprof.record(sys.argv[1]) as folder:\n"
        "    print('trained', folder)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "file" / "run")],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "trained None\n")
    assert "clusterprof: not recording: " in done.stderr
