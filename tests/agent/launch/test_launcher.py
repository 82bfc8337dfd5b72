"""The agent's address space is bounded: a thread for every GPU must not use it up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_what_is_set_already_stays_and_recorders_do_not_record_themselves() -> None:
    assert build_agent_environment({"A": "b"}) == {
        "A": "b",
        "MALLOC_ARENA_MAX": "2",
        "CLUSTERPROF_DISABLE": "1",
    }
    assert build_agent_environment({"MALLOC_ARENA_MAX": "7"})["MALLOC_ARENA_MAX"] == "7"


def test_threads_for_six_cards_leave_most_of_the_address_space() -> None:
    given = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    command = [sys.executable, "-c", READ_ALL_CARDS, str(HOSTS / "mi300x-node")]
    environment = {**build_agent_environment(given), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(done.stdout) * 1024 < ADDRESS_SPACE_BYTES / 2
