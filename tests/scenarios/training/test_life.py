"""Jobs that are killed and go on from their checkpoint: the life of the job, by its own log."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.report.life import Attempt, Life
from tests.support.job_python import require_torch
from tests.support.recording_runs import make_environment, record

pytestmark = pytest.mark.torch

SCRIPT = """
import json, os, signal, sys, time
import torch
folder, die_after, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
first_try = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
saved = os.path.join(folder, f"checkpoint-{rank}.pt")
done = 0
if os.path.exists(saved):
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["done"]
log = open(os.path.join(folder, f"log-{rank}.jsonl"), "a")
while done < last:
    begun = time.time()
    time.sleep(0.05)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    done += 1
    print(json.dumps({"pid": os.getpid(), "step": done, "begun": begun, "ended": time.time()}),
          file=log, flush=True)
    if done % 10 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done},
                   saved)
        time.sleep(0.2)
    if first_try and done == die_after:
        logs = [os.path.join(folder, f"log-{number}.jsonl") for number in range(world)]
        while rank == 0 and not all(os.path.exists(log) and os.path.getsize(log) for log in logs):
            time.sleep(0.01)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # until the launcher kills it: no rank is done before
"""
ROOT = str(Path(__file__).parents[3])  # the script finds the package as an installed one


@pytest.fixture
def script(tmp_path: Path) -> Path:
    require_torch()
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


Steps = list[dict[str, float]]


def read_logs(folder: Path, ranks: int) -> list[list[Steps]]:
    """Return the steps that the job itself logged: by rank, and by process as they ran."""
    logs = []
    for rank in range(ranks):
        by_process: dict[int, Steps] = {}
        for line in (folder / f"log-{rank}.jsonl").read_text().splitlines():
            step = json.loads(line)
            by_process.setdefault(step["pid"], []).append(step)
        logs.append(list(by_process.values()))
    return logs


def check_life(life: Life | None, logs: list[list[Steps]]) -> Life:
    """Check that the parts add up, and that attempts and repeated steps are those of the logs."""
    assert life is not None and not life.why_missing
    assert (life.devices, life.total_ns) == (len(logs), life.wall_ns * len(logs))
    assert sum(part.ns or 0 for part in life.parts) == life.total_ns
    begin_s, wall_s = life.begin_at_ns / 1e9, life.wall_ns / 1e9
    assert begin_s <= min(log[0][0]["begun"] for log in logs)
    assert begin_s + wall_s >= max(log[-1][-1]["ended"] for log in logs) - 0.05
    assert [attempt.steps for attempt in life.attempts] == [
        max(len(log[number]) for log in logs) for number in range(2)
    ]
    assert [attempt.first_job_step for attempt in life.attempts] == [
        min(log[number][0]["step"] for log in logs) for number in range(2)
    ]
    again = max(log[0][-1]["step"] - log[1][0]["step"] + 1 for log in logs)
    assert find_repeated(life.attempts) == [again, 0]
    assert life.attempts[0].ended == "signal 9"
    return life


def find_repeated(attempts: tuple[Attempt, ...]) -> list[int | None]:
    return [attempt.repeated_steps for attempt in attempts]


def seconds_of(life: Life, name: str) -> float:
    return next((part.ns or 0) / 1e9 for part in life.parts if part.name == name)


def test_ranks_restarted_by_torchrun_repeat_steps_since_the_checkpoint(
    tmp_path: Path, script: Path
) -> None:
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1")
    arguments = ("--nproc-per-node=2", str(script), str(tmp_path), "36", "50")
    run = tmp_path / "run"
    done = record(
        run, *command, *arguments, env=make_environment(PYTHONPATH=ROOT, OMP_NUM_THREADS="1")
    )
    assert done.returncode == 0, done.stderr
    logs = read_logs(tmp_path, 2)
    assert logs[0][0][-1]["step"] - logs[0][1][0]["step"] == 5  # killed after 36, on with 31
    life = check_life(analyze(run).life, logs)
    away = sum(log[1][0]["begun"] - log[0][-1]["ended"] for log in logs)
    gone = seconds_of(life, "down") + seconds_of(life, "restart") + seconds_of(life, "after")
    assert gone >= 0.9 * away
    assert seconds_of(life, "repeated") > 0


def test_a_manually_restarted_job_joins_two_recordings_into_a_life(
    tmp_path: Path, script: Path
) -> None:
    queued_at = time.time()
    settings = make_environment(
        PYTHONPATH=ROOT, OMP_NUM_THREADS="1", CLUSTERPROF_QUEUED_AT=str(queued_at)
    )
    arguments = (sys.executable, str(script), str(tmp_path), "23", "40")
    killed = record(tmp_path / "first", *arguments, env=settings)
    assert killed.returncode in (-9, 137), killed.stderr
    time.sleep(2)
    settings = make_environment(PYTHONPATH=ROOT, OMP_NUM_THREADS="1")
    done = record(tmp_path / "second", *arguments[:-2], "0", "40", env=settings)
    assert done.returncode == 0, done.stderr
    logs = read_logs(tmp_path, 1)
    life = check_life(analyze([tmp_path / "first", tmp_path / "second"]).life, logs)
    assert find_repeated(life.attempts) == [3, 0]  # saved at 20, killed after 23
    assert life.begin_at_ns == pytest.approx(queued_at * 1e9, abs=1000)
    assert seconds_of(life, "down") >= 1.5
