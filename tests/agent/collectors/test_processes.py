"""Processes of a job: a real one that reads and grows, and hand-made /proc folders."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.processes import PROCESS_COLUMNS, ProcessesCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.threads import TaskIo, parse_io, parse_process_stat
from clusterprof.errors import Unavailable

LIVENESS_SECONDS = 20.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
READER = """
import os, sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
fd = os.open(sys.argv[1], os.O_RDWR)
print(flush=True)
sys.stdin.readline()
os.pread(fd, 1 << 20, 0)
held = bytearray(64 << 20)
os.write(fd, b"x" * 5000)
print(flush=True)
sys.stdin.readline()
"""


class Row(NamedTuple):
    t_ns: int
    pid: int
    parent_pid: int
    started_ticks: int
    rss: int
    read_chars: int
    write_chars: int
    read_bytes: int
    write_bytes: int
    threads: int
    name: int


def opened(roots: Roots, pids: Sequence[int], t_ns: int = 5) -> ProcessesCollector:
    collector = ProcessesCollector(Context(roots, None, lambda: pids), clock=lambda: t_ns)
    assert tuple(collector.open()) == PROCESS_COLUMNS
    return collector


def test_reads_writes_and_memory_of_a_process_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(1 << 20))
    command = [sys.executable, "-S", "-c", READER, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        collector = opened(Roots(), [process.pid])
        (before,) = (Row(*row) for row in collector.sample())
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        (after,) = (Row(*row) for row in collector.sample())
    finally:
        process.kill()
        process.communicate()
    # 1 MiB of the file, and the one byte of the line it waited for
    assert after.read_chars - before.read_chars == (1 << 20) + 1
    assert after.write_chars - before.write_chars == 5000 + 1
    assert after.rss - before.rss >= 60 << 20
    assert (before.threads, after.threads) == (2, 2)
    assert (before.pid, before.parent_pid) == (process.pid, os.getpid())
    assert before.started_ticks == after.started_ticks > 0
    assert collector.strings()["name"][before.name].startswith("python")
    assert list(collector.sample()) == []  # it has ended
    collector.close()


def test_a_new_child_is_found_and_descriptors_are_closed(open_files: Callable[[], int]) -> None:
    before = open_files()
    shell = subprocess.Popen(["sh", "-c", "sleep 60; true"])
    collector = opened(Roots(), [shell.pid])
    rows: list[Row] = []
    end = time.monotonic() + LIVENESS_SECONDS
    while len(rows) < 2 and time.monotonic() < end:
        rows = [Row(*row) for row in collector.sample()]
    names = collector.strings()["name"]
    child = next(row for row in rows if row.parent_pid == shell.pid)
    assert names[child.name] in ("sleep", "sh")  # "sh" until it has become sleep
    os.kill(child.pid, 9)
    shell.wait()
    collector.close()
    assert open_files() == before


def write_process(proc: Path, pid: int, name: str, io: str | None, rss: int = 3) -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True, exist_ok=True)
    (task / "children").write_text("")
    stat = f"{pid} ({name}) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 9 0 777 0 {rss}" + " 0" * 30
    for folder in (proc / str(pid), task):
        (folder / "stat").write_text(stat)
    if io is not None:
        (proc / str(pid) / "io").write_text(io)


def test_unreadable_io_is_unknown_and_not_zero(tmp_path: Path) -> None:
    words = ("rchar", "wchar", "syscr", "syscw", "read_bytes", "write_bytes")
    io = "".join(f"{word}: {number}\n" for number, word in enumerate(words, 1))
    write_process(tmp_path, 10, "python", io)
    write_process(tmp_path, 11, "pt (w)", None)
    write_process(tmp_path, 12, "python", io)
    collector = opened(Roots(tmp_path), [10, 11, 12])
    # t, pid, parent, started, resident pages × size, rchar, wchar, read, write, threads, name
    assert list(collector.sample()) == [
        (5, 10, 1, 777, 3 * PAGE_BYTES, 1, 2, 5, 6, 9, 0),
        (5, 11, 1, 777, 3 * PAGE_BYTES, -1, -1, -1, -1, 9, 1),
        (5, 12, 1, 777, 3 * PAGE_BYTES, 1, 2, 5, 6, 9, 0),
    ]
    assert collector.strings() == {"name": ["python", "pt (w)"]}
    collector.close()


def test_a_row_updates_only_the_fields_that_changed(tmp_path: Path) -> None:
    def io(read: int) -> str:
        return f"rchar: {read}\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 5\nwrite_bytes: 6\n"

    seen = []
    write_process(tmp_path, 10, "python", io(1))
    collector = opened(Roots(tmp_path), [10])
    for change in (
        {"name": "python", "io": io(1)},  # as it was
        {"name": "python", "io": io(8)},
        {"name": "python", "io": io(8), "rss": 4},
        {"name": "worker", "io": io(8), "rss": 4},  # it has become another program
        {"name": "python", "io": io(9), "rss": 5},
        {"name": "python", "io": "", "rss": 5},  # no longer to be seen: not what it was
        {"name": "python", "io": io(9), "rss": 5},
    ):
        write_process(tmp_path, 10, **change)  # type: ignore[arg-type]
        (row,) = (Row(*row) for row in collector.sample())
        assert row[:4] == (5, 10, 1, 777)
        seen.append((row.rss // PAGE_BYTES, row.read_chars, row.write_bytes, row.name))
    assert seen == [
        (3, 1, 6, 0),
        (3, 8, 6, 0),
        (4, 8, 6, 0),
        (4, 8, 6, 1),
        (5, 9, 6, 0),
        (5, -1, -1, 0),
        (5, 9, 6, 0),
    ]
    assert collector.strings() == {"name": ["python", "worker"]}
    collector.close()


def test_a_new_process_starts_two_searches_before_a_thorough_search(tmp_path: Path) -> None:
    for pid in (10, 12, 13, 14):
        write_process(tmp_path, pid, "python", None)
    children = tmp_path / "10/task/10/children"
    of_a_thread = tmp_path / "10/task/11/children"
    of_a_thread.parent.mkdir()
    of_a_thread.write_text("")
    (tmp_path / "loadavg").write_text("0.1 0.1 0.1 1/9 11\n")
    now_ns = 0
    context = Context(Roots(tmp_path), None, lambda: [10])
    collector = ProcessesCollector(context, clock=lambda: now_ns)
    collector.open()

    def tick(newest: int) -> set[int]:
        nonlocal now_ns
        now_ns += 500_000_000
        (tmp_path / "loadavg").write_text(f"0.1 0.1 0.1 1/9 {newest}\n")
        return {Row(*row).pid for row in collector.sample()}

    assert tick(11) == {10}  # everything is new: a thorough search, at 0.5 s
    assert tick(11) == {10}
    of_a_thread.write_text("14")
    assert tick(12) == {10}  # born, but not yet among its parent's children
    children.write_text("12")
    assert tick(12) == {10, 12}
    children.write_text("12 13")  # as the kernel never does without telling: nobody looks
    # 2.5 s … 5.0 s: nothing; then the next thorough search is due, 5 s after the first
    assert [tick(12) for _ in range(6)] == 6 * [{10, 12}]
    assert tick(12) == {10, 12, 13, 14}
    collector.close()


def test_hidden_processes_are_denied(tmp_path: Path) -> None:
    mounts = tmp_path / "self" / "mounts"
    mounts.parent.mkdir()
    mounts.write_text("proc /proc proc rw,hidepid=invisible 0 0\n")
    with pytest.raises(Unavailable) as raised:
        opened(Roots(tmp_path), [10]).sample()
    assert raised.value.kind == "denied"


def test_a_stat_line_shared_in_this_tick_is_not_reread(tmp_path: Path) -> None:
    write_process(tmp_path, 10, "python", None)
    context = Context(Roots(tmp_path), None, lambda: [10])
    now_ns = 1_000_000_000
    collector = ProcessesCollector(context, clock=lambda: now_ns)
    collector.open()
    stated = b"10 (gone) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 4 0 777 0 8" + b" 0" * 30
    context.readings.share(10, SimpleNamespace(line=stated, line_ns=now_ns - 1_000_000))
    ((_, _, *facts),) = collector.sample()
    assert facts == [1, 777, 8 * PAGE_BYTES, -1, -1, -1, -1, 4, 0]
    now_ns += 500_000_000  # the line is of an earlier tick: the file says 3 pages and 9 threads
    ((_, _, *facts),) = collector.sample()
    assert facts == [1, 777, 3 * PAGE_BYTES, -1, -1, -1, -1, 9, 1]


def test_the_main_threads_row_agrees_with_the_process() -> None:
    fields = []
    for path in ("/proc/self/stat", f"/proc/self/task/{os.getpid()}/stat"):
        fields.append(parse_process_stat(Path(path).read_bytes())[:4])
    assert fields[0] == fields[1]  # all but memory, which moves between two readings


def test_processes_found_by_the_threads_collector_are_not_searched_again(tmp_path: Path) -> None:
    for pid in (10, 11, 12):
        write_process(tmp_path, pid, "python", None)
    pids = [10]
    context = Context(Roots(tmp_path), None, lambda: pids)
    collector = ProcessesCollector(context, clock=lambda: 5)
    collector.open()
    assert [row[1] for row in collector.sample()] == [10]  # nobody else searches
    for pid in (10, 11):
        context.readings.share(pid, SimpleNamespace(line=b"", line_ns=-(10**12)))
    pids.append(12)
    assert [row[1] for row in collector.sample()] == [10, 11]  # who is known there, and no other
    for pid in (10, 11):  # `threads` was closed: the search is ours again
        context.readings.forget(pid)
    assert [row[1] for row in collector.sample()] == [10, 11, 12]


def test_negative_numbers_in_io_files_are_parsed() -> None:
    text = b"rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 5\nwrite_bytes: 6\n"
    assert parse_io(text + b"cancelled_write_bytes: -7\n") == TaskIo(1, 2, 5, 6)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/bin/python3 -u -X dev /job/tokenize.py --fast", "python tokenize.py"),
        ("python -m torch.distributed.run train.py", "python -m torch.distributed.run"),
        ("python -c from|multiprocessing.spawn|import|spawn_main", "python multiprocessing"),
        ("python -c print(1)", "python"),
        ("python", "python"),
        (f"python /job/{'x' * 50}.py", f"python {'x' * 40}"),
        ("python - secret.py", "python"),  # arguments of what it reads from its input
        ("python /job/secret", "python"),  # may be anything
        ("python -m se-cret", "python"),
        ("", "python"),
    ],
)
def test_a_python_process_is_named_with_its_script(command: str, name: str, tmp_path: Path) -> None:
    write_process(tmp_path, 10, "python", None)
    words = [word.replace("|", " ") for word in command.split()]
    (tmp_path / "10" / "cmdline").write_text("".join(f"{word}\0" for word in words))
    collector = opened(Roots(tmp_path), [10])
    (row,) = (Row(*row) for row in collector.sample())
    assert collector.strings()["name"][row.name] == name
    collector.close()
