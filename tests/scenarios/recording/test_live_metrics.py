"""`record --metrics` of a real job: the process may die, counts on, and ends with the job."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterprof.signals import SELF_CPU
from clusterprof.trace.live_files import METRICS_STATE_NAME
from clusterprof.trace.schema import Columns
from tests.support.recording_runs import (
    PYTHON,
    RECORD,
    is_alive,
    make_environment,
    make_job_id,
    read_records,
    wait_for_end,
    wait_for_recording,
    wait_until,
)

TRAINING = """
import sys, time
from pathlib import Path
import clusterprof
while not Path(sys.argv[1]).exists():
    clusterprof.step()
    time.sleep(0.05)
"""
PATIENCE_S = 60.0


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> dict[str, float]:
    """Return the samples that a scrape gets; none while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return {}
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def sum_of(values: dict[str, float], name: str) -> float:
    return sum(value for key, value in values.items() if key.startswith(name))


def find_helpers(folder: Path) -> list[int]:
    """Find the processes that offer the metrics of a node's folder."""
    out = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(folder) in words and any(
            b"exporters.live_metrics" in word for word in words
        ):
            out.append(int(path.parent.name))
    return out


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start a recorded job that ends when `done` appears."""
    profile = tmp_path / "fast.yaml"
    profile.write_text("extends: default\nmetrics: {interval_s: 2}\n")

    def start_job(name: str, *targets: str) -> subprocess.Popen[str]:
        options = [word for target in targets for word in ("--metrics", target)]
        out, done = tmp_path / name, tmp_path / f"{name}.done"
        return subprocess.Popen(
            [
                *(*RECORD, "-o", str(out), "--profile", str(profile), *options, "--"),
                *(PYTHON, "-c", TRAINING, str(done)),
            ],
            env=make_environment(make_job_id(name)),
            stderr=subprocess.PIPE,
            text=True,
        )

    return start_job


def test_metrics_last_until_the_job_ends_and_survive_a_restart(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    port, file = find_port(), tmp_path / "{job}-{node}.prom"
    job = start("job", str(port), str(file))
    try:
        assert job.stderr is not None
        line = job.stderr.readline()
        assert f"live metrics at http://127.0.0.1:{port}/metrics" in line
        folder = wait_for_recording(tmp_path / "job")
        steps = "clusterprof_live_steps_total"
        first = wait_until(lambda: (v := scrape(port)) and sum_of(v, steps) > 0 and v, PATIENCE_S)
        (textfile,) = wait_until(lambda: list(tmp_path.glob("*.prom")))
        assert "clusterprof_live_steps_total{" in textfile.read_text()
        (helper,) = find_helpers(folder)
        assert os.sched_getscheduler(helper) == os.SCHED_IDLE
        os.kill(helper, signal.SIGKILL)
        again = wait_until(
            lambda: (v := scrape(port)) and sum_of(v, steps) > sum_of(first, steps) and v,
            PATIENCE_S,
        )
        start_time = "clusterprof_live_start_timestamp_seconds"
        assert sum_of(first, start_time) == sum_of(again, start_time) > 0
        for name, value in first.items():
            if re.search(r"_total\{", name):
                assert again[name] >= value, name
        assert 0 < sum_of(again, "clusterprof_live_step_seconds") < 1
    finally:
        (tmp_path / "job.done").touch()
        job.wait()
    wait_for_end(tmp_path / "job")
    wait_until(lambda: not find_helpers(folder))
    assert scrape(port) == {} and list(tmp_path.glob("*.prom")) == []
    assert not (folder / METRICS_STATE_NAME).exists()
    cpu_devices = {
        device
        for record in read_records(tmp_path / "job")
        if isinstance(record, Columns)
        for name, device in zip(record.signals, record.devices)
        if name == SELF_CPU.name
    }
    assert "helper:metrics" in cpu_devices, "its CPU time is part of the cost of recording"


def test_two_jobs_share_a_port_range_and_report_used_ports(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        jobs = [start("first", f"{port}-{port + 30}"), start("second", str(port))]
        try:
            lines = [job.stderr.readline() for job in jobs if job.stderr is not None]
            assert re.search(r"live metrics at http://127\.0\.0\.1:\d+/metrics", lines[0])
            assert f"no live metrics: port {port} of 127.0.0.1 is in use" in lines[1]
            assert "PORT-LAST takes the first free port" in lines[1]
            folder = wait_for_recording(tmp_path / "second")
            log = folder / "metrics.log"
            wait_until(lambda: log.exists() and "cannot be listened on" in log.read_text(), 30)
            taken.close()
            steps = "clusterprof_live_steps_total"
            wait_until(lambda: sum_of(scrape(port), steps) > 0, PATIENCE_S)
        finally:
            for name, job in zip(("first", "second"), jobs):
                (tmp_path / f"{name}.done").touch()
                assert job.wait() == 0
    for name in ("first", "second"):
        wait_for_end(tmp_path / name)


def test_a_killed_recorder_ends_its_metrics_process(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    port = find_port()
    job = start("job", str(port))
    try:
        folder = wait_for_recording(tmp_path / "job")
        (helper,) = wait_until(lambda: find_helpers(folder), 30)
        recorder = int(Path(f"/proc/{helper}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(recorder, signal.SIGKILL)
        wait_until(lambda: not is_alive(helper), 30)
        time.sleep(0.2)
        assert job.poll() is None, "the job goes on"
    finally:
        (tmp_path / "job.done").touch()
        assert job.wait() == 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "is no target"),
        ("0.0.0.0:9640", "without a token"),
        ("0", "ports are 1 to 65535"),
        ("9650-9640", "ports are 1 to 65535"),
        ("otlp:collector:4317", "is not an address"),
        ("otlp:http://user:word@x", "carries a user or password"),
    ],
)
def test_an_invalid_metrics_target_fails_before_the_job_starts(
    tmp_path: Path, target: str, message: str
) -> None:
    done = subprocess.run(
        [*RECORD, "-o", str(tmp_path / "run"), "--metrics", target, "--", "touch", "started"],
        cwd=tmp_path,
        env=make_environment(make_job_id("wrong"), PYTHONPATH=str(Path(__file__).parents[3])),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
