"""The agent's address space is bounded: a thread for every GPU must not use it up."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from clusterprof.agent.launch import launcher
from clusterprof.agent.launch.launcher import build_agent_environment
from clusterprof.agent.sampling.service import ADDRESS_SPACE_BYTES

HOSTS = Path(__file__).parents[2] / "hosts"

ROOT = Path(__file__).resolve().parents[3]
READ_ALL_CARDS = """
import re, sys
from pathlib import Path
from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.gpu.amd import GpuAmdCollector
from clusterprof.agent.linux.files import Roots
host = Path(sys.argv[1])
collector = GpuAmdCollector(Context(Roots(host / "proc", host / "sys"), None, list),
                            first_wait_seconds=20.0)
collector.open()
collector.sample()
print(re.search(r"VmSize:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_the_recorder_environment_keeps_settings_and_disables_the_probe() -> None:
    assert build_agent_environment({"A": "b"}) == {
        "A": "b",
        "MALLOC_ARENA_MAX": "2",
        "CLUSTERPROF_DISABLE": "1",
    }
    assert build_agent_environment({"MALLOC_ARENA_MAX": "7"})["MALLOC_ARENA_MAX"] == "7"


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="a free-threaded Python reserves a gigabyte before, which the limit does not count",
)
def test_threads_for_six_gpus_use_under_half_the_address_space() -> None:
    given = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", READ_ALL_CARDS, str(HOSTS / "mi300x-node")]
    environment = {**build_agent_environment(given), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) * 1024 < ADDRESS_SPACE_BYTES / 2


def test_truncated_bytecode_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("NAMES = ['first', 'second']\n")
    compiled = Path(py_compile.compile(str(source), doraise=True) or "")
    launcher._require_whole_bytecode(str(compiled))
    whole = compiled.read_bytes()
    for size in (0, 15, 16, 40, len(whole) - 1):
        compiled.write_bytes(whole[:size])
        with pytest.raises(OSError, match="cut short"):
            launcher._require_whole_bytecode(str(compiled))


def test_the_error_message_of_a_failed_recorder_is_extracted(tmp_path: Path) -> None:
    traced = "Traceback (most recent call last):\n  File 'a.py', line 1\nOSError: no descriptor\n"
    for left, named in (
        (traced, "OSError: no descriptor"),
        (traced + "a library must be installed for pthread_exit\n", "OSError: no descriptor"),
        ("killed\n", "killed"),
        ("", "it left no message"),
    ):
        (tmp_path / launcher.ERROR_LOG_NAME).write_text(left)
        assert launcher._read_last_error(tmp_path) == named
