"""Who disturbed a job: neither itself, nor its fault, nor the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from clusterprof_lab.real.launch import MachineLoad, _is_ours, _read_cpu_s

BURN = "import time; end = time.process_time() + 0.6\nwhile time.process_time() < end: pass"


def test_children_and_kernel_threads_count_as_own_processes() -> None:
    me = os.getpid()
    parents = {1: 0, 2: 0, 40: 2, 50: 1, me: 50, me + 1: me, me + 2: me + 1, me + 3: 50}
    by_key = {pid: {"ppid": parent} for pid, parent in parents.items()}
    assert [pid for pid in by_key if _is_ours(pid, by_key)] == [2, 40, me, me + 1, me + 2]
    assert not _is_ours(me + 9, by_key)  # ended between two looks


@pytest.mark.accept
def test_cpu_time_of_live_and_ended_grandchildren_is_counted() -> None:
    before = _read_cpu_s()
    waits = f"{BURN}\nprint(1, flush=True)\ninput()"
    shell = ["sh", "-c", '"$0" -c "$1"; "$0" -c "$2"', sys.executable, BURN, waits]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout and child.stdout.readline() == b"1\n"
        busy, whole, own = (now - then for now, then in zip(_read_cpu_s(), before))
        child.stdin.write(b"\n")
    # The kernel cuts user and system time of each of the three down to hundredths, and those of the
    # machine it counts by what it finds running a hundred times a second.
    assert 1.2 - 3 * 0.02 - 0.01 <= own <= busy + 0.2 <= whole + 0.4


def test_a_short_interval_gives_a_valid_disturbed_ratio() -> None:
    machine = MachineLoad()
    time.sleep(0.05)
    assert 0.0 <= machine.disturbed_ratio() <= 1.0
