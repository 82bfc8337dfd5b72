"""Threads of a job: real processes that sleep, spin and end, and hand-made /proc folders."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterprof.agent.linux.files import Roots
from clusterprof.errors import Unavailable
from tests.support.fake_threads import FakeThread, Row, ThreadRig

SLEEP = "import time; print(flush=True); time.sleep(60)"
SPIN_BESIDE = """
import os, threading, time
def spin():
    while True:
        sum(range(1000))
spinner = threading.Thread(target=spin, daemon=True)
spinner.start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(spinner.native_id, flush=True)
time.sleep(60)
"""
FORK = """
import os, sys, time
sys.stdin.readline()
pid = os.fork()
if pid:
    print(pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def run() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-c", code]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    delays = tmp_path / "sys/kernel/task_delayacct"
    delays.parent.mkdir(parents=True)
    delays.write_text("1\n")
    return tmp_path


@pytest.fixture
def rig() -> Iterator[ThreadRig]:
    made = ThreadRig(Roots())
    yield made
    made.collector.close()


def test_a_sleeping_process_has_its_wait_place_in_every_tick(
    rig: ThreadRig, run: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = run(SLEEP)
    assert process.stdout is not None
    process.stdout.readline()
    rig.pids = [process.pid]
    end, file = time.monotonic() + 2, Path(f"/proc/{process.pid}/wchan")
    while file.read_text() == "0" and time.monotonic() < end:
        time.sleep(0.01)  # it is on its way to sleep, or this kernel shows no place
    latest: list[Row] = []

    def is_unchanged(rows: list[Row]) -> bool:
        # Not on a CPU for three ticks: everything but the time and the place is as it was.
        latest[:] = [*latest[-3:], *rows]
        return len(latest) == 4 and len({row[1:-1] for row in latest}) == 1

    (row,) = rig.tick_until(is_unchanged)
    assert row.state == ord("S")
    assert row.pid == row.tid == process.pid
    assert row.on_cpu > 0
    assert row.run_delay >= 0
    place = file.read_text()
    if place == "0":
        assert row.wchan == -1  # this kernel shows no wait place
    else:
        assert rig.list_wait_places()[row.wchan] == place.split(".")[0]


def test_spinning_threads_are_followed_and_idle_threads_are_not(
    rig: ThreadRig, run: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = run(SPIN_BESIDE)
    assert process.stdout is not None
    spins = int(process.stdout.readline())
    rig.pids = [process.pid]
    rig.tick_until(lambda rows: len({row.tid for row in rows}) == 3)  # each is introduced once
    # The idle one is followed for a second more when it went to sleep only now.
    first = rig.tick_until(lambda rows: {row.tid for row in rows} == {process.pid, spins})
    spinner = next(row for row in first if row.tid == spins)
    later = rig.tick_until(
        lambda rows: [r for r in rows if r.tid == spinner.tid and r.on_cpu > spinner.on_cpu]
    )
    assert {row.tid for row in later} == {process.pid, spinner.tid}
    running = next(row for row in later if row.tid == spinner.tid)
    assert running.user + running.system >= spinner.user + spinner.system


def test_a_forked_worker_is_found_and_a_dead_worker_dropped(
    rig: ThreadRig, run: Callable[[str], subprocess.Popen[str]]
) -> None:
    parent = run(FORK)
    rig.pids = [parent.pid]
    assert {row.pid for row in rig.tick()} == {parent.pid}
    assert parent.stdin is not None and parent.stdout is not None
    parent.stdin.write("\n")
    parent.stdin.flush()
    child = int(parent.stdout.readline())
    rig.tick_until(lambda rows: {row.pid for row in rows} == {parent.pid, child})
    parent.kill()
    parent.wait()
    rig.pids = []
    rig.tick_until(lambda rows: {row.pid for row in rows} == {child})
    subprocess.run(["kill", "-9", str(child)], check=True)
    rig.tick_until(lambda rows: not rows or rows[0].state == ord("Z"))


def test_all_descriptors_are_released_on_close(
    run: Callable[[str], subprocess.Popen[str]], open_files: Callable[[], int]
) -> None:
    process = run(SPIN_BESIDE)
    assert process.stdout is not None
    process.stdout.readline()
    before = open_files()
    rig = ThreadRig(Roots(), [process.pid])
    rig.tick_until(lambda rows: len({row.tid for row in rows}) == 3)
    rig.tick()
    rig.collector.close()
    assert open_files() == before


def test_a_thread_row_has_all_values(proc: Path) -> None:
    thread = FakeThread(proc, 10, 10)
    rig = ThreadRig(Roots(proc), [10])
    numbers = {"faults": 7, "user": 3, "system": 2, "block": 5}
    thread.set_state("D", "1000 200 4", "folio_wait_bit_common.isra.0", **numbers)
    # Ticks of 10 ms; the state is a letter's number; the place an index into the strings.
    expected = (0, 10, 10, ord("D"), 1000, 200, 30_000_000, 20_000_000, 50_000_000, 7, 0, -1)
    assert rig.tick() == [expected]
    assert rig.list_wait_places() == ["folio_wait_bit_common"]


@pytest.mark.parametrize(
    ("setting", "block", "seen"),
    [("0\n", 0, -1), ("1\n", 0, 0), ("1\n", 5, 50_000_000), (None, 0, -1), (None, 5, 50_000_000)],
)
def test_block_io_delay_is_unknown_without_kernel_accounting(
    proc: Path, setting: str | None, block: int, seen: int
) -> None:
    delays = proc / "sys/kernel/task_delayacct"
    delays.unlink() if setting is None else delays.write_text(setting)
    FakeThread(proc, 10, 10).set_state("S", "1 1 1", block=block)
    assert ThreadRig(Roots(proc), [10]).tick()[0].block_io == seen


@pytest.mark.parametrize("times", ["", "0 0 0"])
def test_without_schedstat_cpu_and_run_delay_are_unknown(proc: Path, times: str) -> None:
    thread = FakeThread(proc, 10, 10)
    thread.set_state("S", times, user=4)
    rig = ThreadRig(Roots(proc), [10])
    assert (rig.tick()[0].on_cpu, rig.tick()[0].run_delay) == (-1, -1)
    thread.set_state("R", times, user=5)
    (row,) = rig.tick()  # and nothing is taken to stand still
    assert (row.state, row.user) == (ord("R"), 50_000_000)


def test_a_blocked_thread_is_read_even_without_cpu_time(proc: Path) -> None:
    thread = FakeThread(proc, 10, 10)
    rig = ThreadRig(Roots(proc), [10])
    seen = []
    for state in "DDRS":  # the same times all along: woken, it still waits for a CPU
        thread.set_state(state, "4 0 4")
        seen.append(chr(rig.tick()[0].state))
    assert seen == ["D", "D", "R", "S"]


def test_other_threads_are_followed_only_while_they_run(proc: Path) -> None:
    FakeThread(proc, 10, 10).set_state("S", "1 0 1")
    other = FakeThread(proc, 10, 11)
    other.set_state("S", "5 0 1")
    rig = ThreadRig(Roots(proc), [10])
    seen = []
    for tick in range(40):
        if tick == 15:
            other.set_state("S", "9 0 2")
        seen.append(11 in [row.tid for row in rig.tick()])
    # Introduced at tick 0; its turn comes at every tick, as it is the only one that rests: found
    # at tick 15, and followed until it has not run for more than a second, tick 26.
    assert [tick for tick, there in enumerate(seen) if there] == [0, *range(15, 27)]


def test_a_hidden_process_is_denied(tmp_path: Path) -> None:
    mounts = tmp_path / "self" / "mounts"
    mounts.parent.mkdir()
    mounts.write_text("proc /proc proc rw,hidepid=2 0 0\n")
    rig = ThreadRig(Roots(tmp_path), [10])
    with pytest.raises(Unavailable) as raised:
        rig.tick()
    assert raised.value.kind == "denied"
    assert "hidepid" in raised.value.remedy


def test_a_missing_process_has_no_row(tmp_path: Path) -> None:
    assert ThreadRig(Roots(tmp_path), []).tick() == []
    assert ThreadRig(Roots(tmp_path), [10]).tick() == []  # has ended
