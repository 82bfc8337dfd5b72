"""torchrun starts failed workers anew: one recording that separates the incarnations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from tests.support.job_python import require_torch
from tests.support.recording_runs import list_events, make_environment, record

pytestmark = pytest.mark.torch

SCRIPT = """
import os, sys, time
import clusterprof
for part in range(2):
    with clusterprof.span("try"):
        time.sleep(1)
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "0")
"""


def test_attempts_of_a_restarted_rank_are_distinguished(tmp_path: Path) -> None:
    require_torch()
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--max-restarts=1")
    root = str(Path(__file__).parents[3])  # the script finds the package as an installed one
    done = record(
        tmp_path / "run",
        sys.executable,
        *torchrun,
        "--nproc-per-node=1",
        str(script),
        env=make_environment(PYTHONPATH=root),
    )
    assert done.returncode == 0, done.stderr
    tries = {
        event.attributes["pid"]: (event.attributes["rank"], event.attributes["restart"])
        for event in list_events(tmp_path / "run", "process-registered")
        if event.attributes["rank"] is not None
    }
    assert sorted(tries.values()) == [(0, 0), (0, 1)]
    report = analyze(tmp_path / "run")
    assert [rank.rank for rank in report.ranks] == [0, 0]  # each life has a line of its own
    [note] = [note for note in report.notes if "restarted" in note]
    assert note.startswith("the ranks of job ")
    assert note.endswith(" were restarted once; each incarnation has lines of its own")
