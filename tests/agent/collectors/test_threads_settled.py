"""First threads whose files are all held: a tick reads them in one loop, whatever happens in it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from clusterprof.agent.linux import threads as module
from clusterprof.agent.linux.files import Roots, parse_integers
from clusterprof.agent.linux.threads import SharedThreadState, Thread, build_rows
from tests.support.fake_threads import FakeThread, ThreadRig


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    delays = tmp_path / "sys/kernel/task_delayacct"
    delays.parent.mkdir(parents=True)
    delays.write_text("0\n")
    return tmp_path


def settled(proc: Path, *pids: int) -> tuple[ThreadRig, list[FakeThread]]:
    """Two ticks in which every thread ran and slept again."""
    threads = [FakeThread(proc, pid, pid) for pid in pids]
    for thread in threads:
        thread.set_state("S", "1 0 1", "first")
    rig = ThreadRig(Roots(proc), list(pids))
    rig.tick()
    return rig, threads


def test_a_sleeping_threads_activity_is_seen_in_the_same_tick(proc: Path) -> None:
    rig, (thread,) = settled(proc, 10)
    seen = []
    for state, times, wchan, user in (
        ("S", "1 0 1", "ignored", 0),  # it stood still: nothing else is read
        ("S", "2 0 2", "second", 1),
        ("R", "3 0 3", "0", 1),
        ("R", "3 0 3", "0", 2),  # runs for long without being counted: read anew
        ("S", "3 0 3", "third", 2),  # went to sleep, and the kernel has not counted it yet
        ("S", "3 0 3", "ignored", 9),
        ("D", "4 0 4", "blocked", 2),
        ("D", "4 0 4", "elsewhere", 2),  # a blocked one is looked at in every tick
    ):
        thread.set_state(state, times, wchan, user=user)
        (row,) = rig.tick()
        place = rig.list_wait_places()[row.wchan] if row.wchan >= 0 else ""
        seen.append((chr(row.state), row.on_cpu, row.user // 10_000_000, place))
    assert seen == [
        ("S", 1, 0, "first"),
        ("S", 2, 1, "second"),
        ("R", 3, 1, ""),
        ("R", 3, 2, ""),
        ("S", 3, 2, "third"),
        ("S", 3, 2, "third"),
        ("D", 4, 2, "blocked"),
        ("D", 4, 2, "elsewhere"),
    ]


def test_a_running_thread_has_no_wait_place(proc: Path) -> None:
    rig, (thread,) = settled(proc, 10)
    thread.set_state("R", "2 0 2", "left_behind")  # it woke between the two readings
    assert rig.tick()[0].wchan == -1


@pytest.mark.parametrize("which", ["stat", "schedstat", "wchan"])
@pytest.mark.parametrize(
    ("error", "ticks"),
    [(errno.ESRCH, [2, 1, 1]), (errno.EACCES, [2, 1, 2]), (errno.EPERM, [2, 1, 2])],
)
def test_a_vanishing_thread_leaves_the_others_in_the_tick(
    proc: Path, monkeypatch: pytest.MonkeyPatch, which: str, error: int, ticks: list[int]
) -> None:
    rig, threads = settled(proc, 10, 11)
    first: Thread = rig.collector._main[10]
    descriptor = {"stat": first._stat_fd, "schedstat": first._times_fd, "wchan": first._wchan_fd}
    refused = {"now": False}

    def pread(fd: int, size: int, offset: int) -> bytes:
        if refused["now"] and fd == descriptor[which]:
            raise OSError(error, os.strerror(error))
        return os.pread(fd, size, offset)

    monkeypatch.setattr(module, "pread", pread)
    collected = []
    for tick, now in enumerate((False, True, False), 2):
        for thread in threads:
            thread.set_state("S", f"{tick} 0 {tick}", "place")
        refused["now"] = now
        if error == errno.ESRCH and now:
            rig.pids = [11]  # the registry has heard of it as well
        collected.append(len(rig.tick()))
    assert collected == ticks
    assert sorted(rig.collector._main) == ([11] if error == errno.ESRCH else [10, 11])
    assert rig.collector._context.readings.pids() == sorted(rig.collector._main)


def test_a_stat_line_beyond_the_read_buffer_is_read_completely(proc: Path) -> None:
    (proc / "sys/kernel/task_delayacct").write_text("1\n")
    rig, (thread,) = settled(proc, 10)
    thread.set_state("S", "2 0 2", "second", block=5)
    stat = thread.folder / "stat"
    name, words = stat.read_text().split(") ")
    fields = words.split(" ")
    for index in (7, 8, 10, 13, 14, *range(20, 39)):  # before the delay
        fields[index] = "18446744073709551615"
    stat.write_text(f"{name}) {' '.join(fields)}")
    assert len(stat.read_text()) > 479
    assert rig.tick()[0].block_io == 50_000_000


def test_a_closed_collector_no_longer_searches_processes(proc: Path) -> None:
    rig, _ = settled(proc, 10)
    assert rig.collector._context.readings.pids() == [10]
    rig.collector.close()
    assert rig.collector._context.readings.pids() == []


def test_an_unusual_schedstat_format_is_parsed_for_each_thread() -> None:
    thread = Thread("/proc", os.getpid(), os.getpid(), module.DescriptorBudget(8))
    stat = Path("/proc/self/stat").read_bytes()
    looks = [(thread, b"5  7 9\n", stat, b""), (thread, None, b"", b"")]
    with pytest.raises(ValueError, match="expected integers"):
        parse_integers(b"5  7 9\n")
    rows = build_rows(3, looks, SharedThreadState(False))
    assert [row[4:6] for row in rows] == [(5, 7), (-1, -1)]
    thread.close()
