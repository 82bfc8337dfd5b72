"""A recorder in the foreground releases its GPUs on SIGUSR2, and opens them on the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from clusterprof.analysis.pipeline import analyze
from clusterprof.trace.schema import Columns, Event
from tests.support.nvml.simulated import Scenario, build_library
from tests.support.nvml.simulated import make_environment as nvml_environment
from tests.support.recording_runs import (
    PYTHON,
    get_run_dir,
    list_events,
    make_environment,
    make_job_id,
    read_records,
    wait_until,
)

RELEASED_S = 1.0


def list_gpu_times(out: Path) -> list[int]:
    """Return when a value of a GPU was read, ns."""
    return [
        int(t)
        for record in read_records(out)
        if isinstance(record, Columns) and record.collector == "gpu_nvidia"
        for row, t in enumerate(record.t_ns)
        if any(mask is None or not mask[row] for mask in record.masks)
    ]


def has_library_open(pid: int) -> bool:
    """Return whether a process, or one that it started, has the driver's library loaded."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    maps = [Path(f"/proc/{member}/maps") for member in (str(pid), *children)]
    return any("libnvidia-ml" in file.read_text() for file in maps if file.exists())


def test_gpus_are_let_go_of_and_taken_up_again(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "scenario", devices=2)
    nvml = nvml_environment(build_library(tmp_path / "lib"), scenario)
    own = {name: nvml[name] for name in ("LD_LIBRARY_PATH", "FAKENVML_CTL")}
    job, out = make_job_id("released"), tmp_path / "out"
    process = subprocess.Popen(
        [PYTHON, "-m", "clusterprof.agent", "--out", str(out)], env=make_environment(job, **own)
    )
    wait_until(lambda: list_gpu_times(out))
    assert (get_run_dir(job) / "agent.pid").read_text().split()[0] == str(process.pid)
    assert has_library_open(process.pid)
    process.send_signal(signal.SIGUSR2)
    wait_until(lambda: not has_library_open(process.pid))
    wait_until(lambda: list_events(out, "devices-closed"))
    time.sleep(RELEASED_S)
    assert not has_library_open(process.pid)
    process.send_signal(signal.SIGUSR2)
    (resumed,) = wait_until(lambda: list_events(out, "devices-resumed"))
    wait_until(lambda: max(list_gpu_times(out)) > resumed.t_ns)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT

    records = read_records(out)
    (released,) = list_events(out, "devices-released")
    assert released.attributes == resumed.attributes == {"collectors": ["gpu_nvidia"]}
    assert not [t for t in list_gpu_times(out) if released.t_ns < t < resumed.t_ns]
    cpu = [
        int(t)
        for record in records
        if isinstance(record, Columns) and record.collector == "cpu"
        for t in record.t_ns
    ]
    assert [t for t in cpu if released.t_ns < t < resumed.t_ns]
    assert [event.kind for event in records if isinstance(event, Event)].count("helper-died") == 0
    messages = [gap.message for gap in analyze(out).coverage_gaps if gap.what == "gpu_nvidia"]
    assert [message.partition(" from ")[0] for message in messages] == ["released on SIGUSR2"]
