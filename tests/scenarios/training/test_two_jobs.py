"""Two jobs at once on one machine, recorded with one `-o`: the report keeps them apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from clusterprof_lab.real.launch import count_stopped_recorders
from tests.support.recording_runs import PYTHON, RECORD, make_environment, make_job_id, wait_until

SCRIPT = """
import time
import clusterprof
for number in range(10):
    with clusterprof.span("data_wait"):
        time.sleep(0.1)
    clusterprof.step()
"""
ROOT = str(Path(__file__).parents[3])  # the script finds the package as an installed one


def test_two_jobs_in_the_same_folder_are_kept_apart(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    names = sorted(make_job_id(name) for name in ("first", "second"))
    jobs = []
    for name in names:
        env = make_environment(name, RANK="0", WORLD_SIZE="2", PYTHONPATH=ROOT)
        command = [*RECORD, "-o", str(out), "--", sys.executable, str(script)]
        jobs.append(subprocess.Popen(command, env=env))
    assert [job.wait(timeout=60) for job in jobs] == [0, 0]
    # The job that came second has a folder of its own, named after it.
    (second,) = wait_until(lambda: [out / name for name in names if (out / name).is_dir()])
    wait_until(lambda: count_stopped_recorders(out) == count_stopped_recorders(second) == 1)
    done = subprocess.run(
        [PYTHON, "-m", "clusterprof", "analyze", str(out), str(second), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=make_environment(PYTHONPATH=ROOT),
    )
    report = json.loads(done.stdout)
    assert [(rank["rank"], rank["steps"]) for rank in report["ranks"]] == [(0, 10), (0, 10)]
    missing = [entry["message"] for entry in report["not_seen"] if entry["what"] == "ranks"]
    assert missing == [
        f"1 of 2 ranks of job {name} have no recording: 1; the cause of waits for"
        " them is not known (sync-unknown-peer)"
        for name in names
    ]
    assert (
        f"recordings of 2 jobs were given: {names[0]} (ranks 0); {names[1]} (ranks 0); ranks of"
        " different jobs are never compared"
    ) in report["notes"]
