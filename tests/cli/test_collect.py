"""`clusterprof collect`: what it prints, offers and refuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clusterprof.cli.app import main
from tests.support.growing_recording import GrowingRecording
from tests.support.recording_runs import make_environment, wait_until
from tests.support.waiting_jobs import make_scripts_with_devices


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished recording of two nodes; the second waits for its data in each step."""
    for number, script in enumerate(make_scripts_with_devices((0.0, 0.3), (0.4, 0.3))):
        growing = GrowingRecording(script, tmp_path / f"run/node-{number}")
        growing.write_until(1000)
        growing.stop()
    return tmp_path / "run"


def test_once_prints_the_metrics_of_the_last_minute(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", str(run), "--once", "--job", "mine"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "# EOF"
    (caused,) = [
        line
        for line in lines
        if line.startswith("clusterprof_job_caused_gpu_seconds_total{")
        and 'cause="storage-local"' in line
    ]
    assert 'job_name="mine",node="node-1",gpu="emulated-0",rank="1"' in caused
    # 60 steps of 0.8 s; in each, two ranks lose 0.2 s to the disk of rank 1.
    assert float(caused.rpartition(" ")[2]) == pytest.approx(60 * 2 * 0.2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no target"),
        (["--metrics", "nowhere"], "is no target"),
        (["--metrics", "9641", "--interval", "1ms"], "--interval '1ms' is less than 1 s"),
        (["--metrics", "9641", "--linger", "soon"], "not a duration"),
        (["--metrics", "0.0.0.0:9641"], "without a token"),
    ],
)
def test_invalid_options_exit_with_2_and_a_message(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["collect", str(run), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_recording_and_a_used_port_are_errors(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", str(tmp_path / "nothing"), "--once"]) == 5
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["collect", str(run), "--metrics", str(port)]) == 1
    assert f"port {port} of 127.0.0.1 cannot be listened on" in capsys.readouterr().err


def test_job_end_or_a_signal_ends_collect_without_leftovers(run: Path, tmp_path: Path) -> None:
    file, pattern = tmp_path / "mine.prom", tmp_path / "{job}.prom"
    command = [sys.executable, "-m", "clusterprof", "collect", str(run), "--job", "mine"]
    command += ["--metrics", str(pattern)]
    done = subprocess.run(
        [*command, "--linger", "0s"], env=make_environment(), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert not file.exists()
    lingering = subprocess.Popen([*command, "--linger", "1h"], env=make_environment())
    wait_until(file.exists, 30)
    os.kill(lingering.pid, signal.SIGTERM)
    assert lingering.wait(30) == 130
    assert not file.exists()
