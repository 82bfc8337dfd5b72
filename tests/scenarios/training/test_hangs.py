"""A rank of a real job stops before an operation; the report names it and who waited for it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterprof.analysis.cross_rank.hangs import HANG_NS
from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Report
from tests.support.job_python import require_torch
from tests.support.recording_runs import (
    RECORD,
    make_environment,
    make_job_id,
    wait_for_end,
    wait_until,
)

pytestmark = pytest.mark.torch

SCRIPT = """
import os, signal
import torch, torch.distributed as dist
import clusterprof
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(25):
    with clusterprof.span("data_wait"):
        pass
    if step == 20 and rank == 1:
        print("here", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(10))
    clusterprof.step()
"""


def stopped_job(tmp_path: Path) -> Report:
    require_torch()
    script, out, name = tmp_path / "train.py", tmp_path / "run", make_job_id("hang")
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": port}
        root = str(Path(__file__).parents[3])  # the script finds the package as an installed one
        env = make_environment(
            name, **place, MASTER_ADDR="127.0.0.1", PYTHONPATH=root, OMP_NUM_THREADS="1"
        )
        command = [*RECORD, "-o", str(out), "--", sys.executable, str(script)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE))
    try:
        assert ranks[1].stdout is not None
        assert ranks[1].stdout.readline() == b"here\n"
        time.sleep(HANG_NS / 1e9 + 2)
    finally:
        for item in ranks:
            item.kill()
            item.wait()
    wait_until(out.exists)
    wait_for_end(out)
    return analyze(out)


def test_a_stopped_rank_is_named_as_cause_of_the_hang(tmp_path: Path) -> None:
    report = stopped_job(tmp_path)
    [hang] = [finding for finding in report.findings if finding.cause.id == "fail-hang"]
    assert [culprit.rank for culprit in hang.culprits] == [1]
    # both stood still, from the 20th step on
    standing = [dict(rank.outside_buckets)["fail-hang"] for rank in report.ranks]
    assert all(HANG_NS < ns < 3 * HANG_NS for ns in standing)
    assert hang.lost_ns == sum(standing)
    assert [rank.steps for rank in report.ranks] == [20, 20]
    [note] = [note for note in report.notes if note.startswith("progress stopped")]
    assert note.startswith("progress stopped: rank 0 waited for 1")
    assert " s in all_reduce 20 for rank 1 on " in note
    assert ": stopped by a signal" in note
