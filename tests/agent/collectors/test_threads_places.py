"""Where threads sleep: how often the kernel is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.agent.linux.files import Roots
from tests.support.fake_threads import FakeThread, ThreadRig


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    delays = tmp_path / "sys/kernel/task_delayacct"
    delays.parent.mkdir(parents=True)
    delays.write_text("1\n")
    return tmp_path


def places_of(thread: FakeThread, rig: ThreadRig) -> list[str]:
    collected = []
    for times, wchan in (
        ("1 0 1", "first"),  # the first look reads it
        ("2 0 2", "second"),  # slept anew within 500 ms
        ("2 0 2", "second"),  # and still there
        ("2 0 2", "not read again"),
        ("3 0 3", "third"),
    ):
        thread.set_state("S", times, wchan)
        row = next(item for item in rig.tick() if item.tid == thread.tid)
        collected.append("" if row.wchan < 0 else rig.list_wait_places()[row.wchan])
    return collected


def test_the_wait_place_is_read_once_per_sleep(proc: Path) -> None:
    FakeThread(proc, 10, 10).set_state("R", "1 1 1")
    thread = FakeThread(proc, 10, 11)
    thread.set_state("R", "0 0 1")
    rig = ThreadRig(Roots(proc), [10])
    assert places_of(thread, rig) == ["first", "", "second", "second", ""]
    thread.set_state("D", "4 0 4", "blocked")  # a blocked thread is always asked
    assert rig.list_wait_places()[rig.tick()[1].wchan] == "blocked"


def test_the_main_threads_wait_place_is_read_in_every_tick(proc: Path) -> None:
    rig = ThreadRig(Roots(proc), [10])
    places = places_of(FakeThread(proc, 10, 10), rig)
    assert places == ["first", "second", "second", "second", "third"]


@pytest.mark.parametrize("tid", [10, 11])
def test_a_place_that_was_not_shown_yet_is_read_once_more(proc: Path, tid: int) -> None:
    """Since Linux 6.12 a thread that fell asleep can stay queued, and `wchan` is "0" until then."""
    if tid == 11:
        FakeThread(proc, 10, 10).set_state("R", "1 1 1")
    thread = FakeThread(proc, 10, tid)
    thread.set_state("R", "0 0 1")
    rig = ThreadRig(Roots(proc), [10])
    rig.tick()

    def read_place(wchan: str, times: str = "") -> str:
        thread.set_state("S", times, wchan)
        row = next(item for item in rig.tick() if item.tid == tid)
        return "" if row.wchan < 0 else rig.list_wait_places()[row.wchan]

    assert [read_place("0", "9 0 2"), read_place("0"), read_place("late")] == ["", "", ""]
    assert [read_place("0", "9 0 3"), read_place("nap"), read_place("0")] == ["", "nap", "nap"]
    # Another thread that slept anew within 500 ms is first read when it still sleeps.
    late = "nap" if tid == 11 else ""
    assert [read_place("0", "9 0 4"), read_place("0"), read_place("nap")] == ["", "", late]
