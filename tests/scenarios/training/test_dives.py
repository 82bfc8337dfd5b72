"""A real job of two ranks, one of which runs an operator more: its profiler window names it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.trace.schema import Event
from tests.support.job_python import require_torch
from tests.support.recording_runs import (
    RECORD,
    list_events,
    make_environment,
    make_job_id,
    wait_for_end,
    wait_until,
)

require_torch()
pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "scripts" / "extra_operator.py"
PATIENCE_S = 60.0


def run_job(tmp_path: Path, fault: str = "", until: str = "dive-finished") -> tuple[Path, str, int]:
    """Record a job until there is an event; return the recording, its output and exit status."""
    out, stop, die = tmp_path / "run", tmp_path / "stop", tmp_path / "die"
    env = make_environment(
        make_job_id("dive"),
        PYTHONPATH=str(Path(__file__).parents[3]),
        OMP_NUM_THREADS="1",
        JOB_SECONDS="60",
        JOB_STOP=str(stop),
        JOB_DIE=str(die),
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(SCRIPT), fault]
    with (tmp_path / "job.log").open("w") as log:
        job = subprocess.Popen(
            [*RECORD, "-o", str(out), "--dive", "4s", "--", *command],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_until(lambda: list_events(out, until), PATIENCE_S)
            if fault == "dies":
                die.touch()
            stop.touch()
            status = job.wait(PATIENCE_S)
        finally:
            job.kill()
            job.wait()
    wait_for_end(out)
    return out, (tmp_path / "job.log").read_text(), status


def finished_dive(out: Path) -> Event:
    [dive] = list_events(out, "dive-finished")
    return dive


def find_note(out: Path) -> str:
    [note] = [note for note in analyze(out).notes if note.startswith("profiler window")]
    return note


def test_an_operator_run_by_a_single_rank_is_named(tmp_path: Path) -> None:
    out, log, status = run_job(tmp_path)
    assert status == 0, log
    assert "rank 0: " in log and "rank 1: " in log
    assert "USDT" not in log and "profil" not in log.lower()  # nothing of ours in the job's output
    dive = finished_dive(out)
    late, healthy = dive.attributes["windows"]
    assert (late["rank"], healthy["rank"]) == (1, 0)
    assert late["reason"] == healthy["reason"] == ""
    assert 1 <= late["steps"] <= 10 and 0 < late["events"] <= 40_000
    assert sorted(path.name for path in out.glob("*/dives/*")) == sorted(
        (late["file"], healthy["file"])
    )
    note = find_note(out)
    # 20 calls in each step of rank 1, none in rank 0; it may wait for a CPU even longer
    assert "of rank 1 " in note and "it spent more than rank 0 in " in note, note
    assert re.search(r"aten::cumsum [\d.]+ ms in 20 calls \(there: not called\)", note), note


@pytest.mark.long  # its halves: tests/probe/test_dive.py, tests/agent/processes/test_dives.py
def test_a_window_is_refused_while_the_job_profiles_itself(tmp_path: Path) -> None:
    out, log, status = run_job(tmp_path, "profiled")
    assert status == 0, log
    reasons = {window["reason"] for window in finished_dive(out).attributes["windows"]}
    assert reasons == {"another profiler was active"}
    assert not list(out.glob("*/dives"))
    assert "none of rank 1: another profiler was active" in find_note(out)


def test_a_rank_killed_during_its_profiler_window_is_reported(tmp_path: Path) -> None:
    out, _, status = run_job(tmp_path, "dies", until="dive-begun")
    assert status != 0  # torchrun ends the others
    late, _ = finished_dive(out).attributes["windows"]
    note = find_note(out)
    if not late["file"]:  # else its window was over before
        assert "the process ended before its window did" in late["reason"]
        assert "none of rank 1: the process ended before its window did" in note


def test_the_probe_requests_no_profiler_window_without_the_option(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, torch\nprint(any(name.endswith('.dive') for name in sys.modules))\n"
    )
    env = make_environment(make_job_id("dive"), PYTHONPATH=str(Path(__file__).parents[3]))
    for options, expected in (((), "False\n"), (("--dive", "auto"), "True\n")):
        command = [
            *RECORD,
            "-o",
            str(tmp_path / "out"),
            *options,
            "--",
            sys.executable,
            str(script),
        ]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout == expected, (options, done.stderr)
        time.sleep(0.1)
    assert os.path.exists(tmp_path / "out")
