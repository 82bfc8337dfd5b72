"""A real gloo job beside the dumps that PyTorch's flight recorder leaves of it.

What is tested is the structure: the dumps, and that all operations are joined. How well the times
agree is measured by bench/flight_recorder.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from tests.support.job_python import require_torch
from tests.support.recording_runs import RECORD, make_environment, make_job_id, wait_for_end

require_torch()
pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parent / "scripts" / "slow_rank.py"
STEPS = 12


def run_job(out: Path, *options: str, steps: int = STEPS) -> None:
    root = str(Path(__file__).parents[3])
    env = make_environment(make_job_id("flight"), PYTHONPATH=root, OMP_NUM_THREADS="1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", str(SCRIPT), str(steps), "0.15"]
    command = [*RECORD, "-o", str(out), *options, "--", *command]
    subprocess.run(command, env=env, timeout=120, check=True, capture_output=True)
    wait_for_end(out)


def test_every_operation_is_matched_with_its_flight_recorder_entry(tmp_path: Path) -> None:
    run_job(tmp_path / "run")
    dumps = sorted((tmp_path / "run").glob("*/nccl/exit_rank_*.json"))
    assert [path.name for path in dumps] == ["exit_rank_0.json", "exit_rank_1.json"]
    for path in dumps:
        entries = json.loads(path.read_text())["entries"]
        # What gloo leaves in PyTorch 2.13: when an operation was issued, and nothing of its end.
        assert all(entry["time_created_ns"] > 0 for entry in entries)
        names = [entry["profiling_name"] for entry in entries]
        assert names.count("gloo:barrier") == 1
        assert names.count("gloo:all_reduce") > 2 * STEPS  # gradients have several buckets
    report = analyze(tmp_path / "run")
    [note] = [note for note in report.notes if note.startswith("PyTorch's flight recorder")]
    # The time of the steps is compared: from the end of the first to the end of the last. In each
    # there are the sum of the step before and the gradients.
    compared = re.search(r", in (\d+) operations of 2 ranks \(100 %", note)
    assert compared is not None and int(compared[1]) == 2 * (STEPS - 1), note


def test_nccl_off_writes_no_flight_recorder_dump(tmp_path: Path) -> None:
    run_job(tmp_path / "run", "--nccl", "off", steps=3)
    assert not list((tmp_path / "run").glob("*/nccl"))
    report = analyze(tmp_path / "run")
    assert not [note for note in report.notes if "flight recorder" in note]
