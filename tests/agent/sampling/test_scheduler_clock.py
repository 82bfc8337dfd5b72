"""The clock waits for a time, or for what is watched, and hears of every announcement once."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.launch.election import write_private_file
from clusterprof.agent.linux.files import FolderWatch
from clusterprof.agent.processes import registry
from clusterprof.agent.sampling.scheduler import SystemClock
from clusterprof.errors import Unavailable

LONG_NS = 30_000_000_000  # nothing here waits so long unless something is broken
SHORT_NS = 50_000_000


@pytest.fixture
def news(tmp_path: Path) -> Iterator[FolderWatch]:
    folder_watch = FolderWatch([str(tmp_path)])
    yield folder_watch
    folder_watch.close()


def in_long() -> int:
    return time.monotonic_ns() + LONG_NS


def in_short() -> int:
    return time.monotonic_ns() + SHORT_NS


def test_a_wait_without_events_ends_at_its_deadline(news: FolderWatch) -> None:
    clock = SystemClock([], news)
    until_ns = in_short()
    assert clock.wait_until(until_ns) is False
    assert time.monotonic_ns() >= until_ns
    assert clock.wakes_on_files
    assert not SystemClock([]).wakes_on_files


def test_a_new_file_ends_the_wait(news: FolderWatch, tmp_path: Path) -> None:
    clock = SystemClock([], news)
    until_ns = in_long()
    late = threading.Timer(0.05, write_private_file, (tmp_path / "1.json", b"{}"))
    late.start()
    assert clock.wait_until(until_ns) is True
    assert time.monotonic_ns() < until_ns
    late.join()


def test_repeated_new_files_end_a_single_wait_per_tick(news: FolderWatch, tmp_path: Path) -> None:
    clock = SystemClock([], news)
    write_private_file(tmp_path / "1.json", b"{}")
    assert clock.wait_until(in_long()) is True
    write_private_file(tmp_path / "2.json", b"{}")
    until_ns = in_short()
    assert clock.wait_until(until_ns) is True  # it is notified now, before its time
    assert time.monotonic_ns() >= until_ns
    assert clock.wait_until(in_short()) is False  # notified once
    write_private_file(tmp_path / "3.json", b"{}")
    assert clock.wait_until(in_long()) is True  # it listens again


def test_a_readable_descriptor_always_ends_a_wait(news: FolderWatch, tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        for clock in (SystemClock([read], news), SystemClock([read])):
            write_private_file(tmp_path / "1.json", b"{}")
            os.write(write, b"x")
            assert clock.wait_until(in_long()) is True
            assert clock.wait_until(in_long()) is True
            os.read(read, 1)
    finally:
        os.close(read)
        os.close(write)


def test_a_wait_past_its_deadline_reports_possible_files(news: FolderWatch) -> None:
    assert SystemClock([], news).wait_until(time.monotonic_ns() - 1) is True


def test_a_temporary_file_does_not_end_the_wait(news: FolderWatch, tmp_path: Path) -> None:
    clock = SystemClock([], news)
    (tmp_path / ".1.json.7.tmp").write_bytes(b"{")
    assert clock.wait_until(in_short()) is False


def test_missing_inotify_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="No such file"):
        FolderWatch([str(tmp_path), str(tmp_path / "missing")])
    before = len(os.listdir("/proc/self/fd"))

    class Full:
        inotify_add_watch: Any = None

        @staticmethod
        def inotify_init1(flags: int) -> int:
            ctypes.set_errno(24)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Full())
    with pytest.raises(Unavailable, match="Too many open files"):
        FolderWatch([str(tmp_path)])
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(Unavailable, match="has no inotify"):
        FolderWatch([str(tmp_path)])
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_of_the_same_timer_tick_are_all_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_ns = time.time_ns()
    monkeypatch.setattr(registry.time, "time_ns", lambda: came_ns + 1_000_000)
    folder = registry.AnnouncementFolder(str(tmp_path), 100)
    collected: list[str] = []
    for number in range(4):
        write_private_file(tmp_path / f"{number}.json", b"{}")
        os.utime(tmp_path, ns=(came_ns, came_ns))  # the folder's time has the grain of the tick
        collected += folder.fresh() or ()
    assert collected == [f"{number}.json" for number in range(4)]
    monkeypatch.setattr(registry.time, "time_ns", lambda: came_ns + 60_000_000)
    assert folder.fresh() == []  # once more, and no more from then on
    assert folder.fresh() is None
