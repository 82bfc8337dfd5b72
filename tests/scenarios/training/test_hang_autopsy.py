"""Real jobs of three ranks that stand still: the report names the rank, the operation and the line.

Every job runs under torchrun. What is true stands in scripts/hang.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from clusterprof.analysis.cross_rank.hangs import HANG_NS
from clusterprof.analysis.pipeline import analyze
from clusterprof.output.renderers.text.wording import list_warnings
from clusterprof.report.model import Report
from tests.support.job_python import require_torch
from tests.support.ras_server import RasServer
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

SCRIPT = Path(__file__).parent / "scripts" / "hang.py"
RANKS = 3
PATIENCE_S = 60.0


@dataclass
class Job:
    out: Path
    launcher: subprocess.Popen[str]
    pids: dict[int, int] = field(default_factory=dict)


def wait_for_fault(job: Job, fault: str) -> None:
    """Read what the ranks say, until the fault has begun; a loader that is stuck says nothing."""
    assert job.launcher.stdout is not None
    for line in job.launcher.stdout:
        values = json.loads(line) if line.startswith("{") else {}
        if "pid" in values:
            job.pids[values["rank"]] = values["pid"]
        if "begun" in values or (fault == "loader" and len(job.pids) == RANKS):
            break


@contextmanager
def running(folder: Path, fault: str, *options: str, **variables: str) -> Iterator[Job]:
    """Record a job until its fault has begun; end it with the context."""
    out = folder / fault
    root = str(Path(__file__).parents[3])
    env = make_environment(make_job_id(fault), PYTHONPATH=root, OMP_NUM_THREADS="1", **variables)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(RANKS), str(SCRIPT), fault]
    launcher = subprocess.Popen(
        [*RECORD, "-o", str(out), "--hang-after", "8s", *options, "--", *command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    job = Job(out, launcher)
    try:
        wait_for_fault(job, fault)
        yield job
    finally:
        for pid in job.pids.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # with the workers of its data loader
        launcher.kill()
        launcher.wait()


def wait_for_autopsy(job: Job) -> None:
    """Wait until the evidence is there, and the ranks have stood still for long enough."""
    wait_until(lambda: list_events(job.out, "autopsy-finished"), PATIENCE_S)
    [stopped] = list_events(job.out, "progress-stopped")
    since_ns = max(stopped.attributes["since_ns"], stopped.t_ns - 8_000_000_000)
    time.sleep(max(0.0, (since_ns + HANG_NS - time.monotonic_ns()) / 1e9 + 3))


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Record the jobs that stand still, by fault: together, as each is one wait of 20 s."""
    folder = tmp_path_factory.mktemp("hung")
    hook = 'echo "$CLUSTERPROF_HANG_SILENT_PIDS" "$CLUSTERPROF_HANG_PIDS"'
    counts = [{"rank": rank, "collective_counts": {"AllReduce": 21}} for rank in (0, 2)]
    missing = [{"rank": 1, "host": "10.0.0.1", "pid": 4711, "status": {"unresponsive": True}}]
    communicator = {"hash": "0x5f", "size": 3, "ranks": counts, "missing_ranks": missing}
    ras = RasServer(status={"communicators": [communicator]})
    with ExitStack() as stack:
        stopped = running(folder, "stopped", "--on-hang", hook, NCCL_RAS_ADDR=ras.address)
        jobs = {"stopped": stack.enter_context(stopped)}
        time.sleep(1.0)
        os.kill(jobs["stopped"].pids[1], signal.SIGSTOP)
        for fault in ("loader", "other-collective", "diverged"):
            jobs[fault] = stack.enter_context(running(folder, fault))
        for job in jobs.values():
            wait_for_autopsy(job)
    return jobs


def report_on(job: Job) -> Report:
    wait_for_end(job.out)
    return analyze(job.out)


def first_screen(report: Report) -> str:
    """Return the first warning, which every renderer puts on the first screen."""
    return list_warnings(report)[0]


def test_a_stopped_rank_is_named_in_the_hang_report(hung: dict[str, Job]) -> None:
    job = hung["stopped"]
    report = report_on(job)
    text = first_screen(report)
    assert text.startswith("Progress stopped: ranks 0, 2 waited for "), text
    assert " in all_reduce 20 for rank 1 on " in text
    assert "stopped by a signal" in text
    assert "hang.py:" in text and " in compute_for_long" in text
    [note] = [note for note in report.notes if note.startswith("NCCL RAS")]
    assert "rank 1 (process 4711 on 10.0.0.1) does not answer" in note
    [log] = job.out.glob("*/on-hang.log")
    silent, *pids = log.read_text().split()
    assert int(silent) == job.pids[1]  # once, and it names the rank that waits for nobody
    assert sorted(map(int, pids)) == sorted(job.pids.values())


def test_a_rank_stuck_in_its_loader_is_named_with_function(hung: dict[str, Job]) -> None:
    report = report_on(hung["loader"])
    text = first_screen(report)
    assert " in all_reduce 20 for rank 1 on " in text, text
    assert " in read_forever" in text
    [hang] = [finding for finding in report.findings if finding.cause.id == "fail-hang"]
    assert [culprit.rank for culprit in hang.culprits] == [1]
    assert [line.place.function for line in hang.lines] == ["read_forever"]
    [flight] = [note for note in report.notes if "had not reached it" in note]
    assert "ranks 0, 2 waited in gloo:all_reduce" in flight
    assert "rank 1 had not reached it" in flight


def test_a_rank_in_another_operation_is_named(hung: dict[str, Job]) -> None:
    report = report_on(hung["other-collective"])
    text = first_screen(report)
    assert "wait for each other in a circle" in text, text
    assert "rank 1 in broadcast 20 at hang.py:" in text
    assert "ranks 0, 2 in all_reduce 20 at hang.py:" in text
    [hang] = [finding for finding in report.findings if finding.cause.id == "fail-hang"]
    assert [culprit.rank for culprit in hang.culprits] == [1]


def test_a_diverged_rank_is_named_in_the_hang_report(hung: dict[str, Job]) -> None:
    report = report_on(hung["diverged"])
    text = first_screen(report)
    assert " in all_reduce 20 for rank 1 on " in text, text
    assert "which went on without it for" in text
    assert " at hang.py:" in text


def test_a_killed_rank_is_named_in_the_hang_report(tmp_path: Path) -> None:
    with running(tmp_path, "killed") as job:
        time.sleep(1.0)
        os.kill(job.pids[1], signal.SIGKILL)
        job.launcher.wait(PATIENCE_S)
    text = first_screen(report_on(job))
    assert text.startswith("The job failed: rank 1 on "), text
    assert " was killed by SIGKILL" in text
    assert " in compute_for_long" in text
    assert "ranks 0, 2 were in all_reduce 20, where it had not arrived" in text
