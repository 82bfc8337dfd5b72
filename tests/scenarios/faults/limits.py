"""Storms of processes, threads and launches; few descriptors, little memory, small files."""

from __future__ import annotations

import compileall
import os
import subprocess
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import BinaryIO

from clusterprof.probe import layout
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Event, Spans
from tests.scenarios.faults.kills import WORK
from tests.scenarios.faults.model import Fault, Trial
from tests.scenarios.faults.rig import (
    PATIENCE_S,
    RecordedJob,
    count_spans,
    find_largest_gap_s,
    list_times,
    read_cpu_s,
    read_recording,
    wait_until_gone,
)
from tests.support.recording_runs import (
    PYTHON,
    RECORD,
    get_run_dir,
    is_alive,
    make_environment,
    make_job_id,
    wait_until,
)

ROOT = Path(__file__).resolve().parents[3]
assert layout.FIRST_USER_KIND == WORK

# Forks so many children, ten at a time, each of which marks one span and ends; then says so.
STORM = """
import os, sys, time
import _clusterprof_probe as probe
probe.prepare()
forks, stop, answer, page = int(sys.argv[1]), *sys.argv[2:5]
with probe.span("work"):
    pass
for batch in range(forks // 10):
    children = []
    for _ in range(10):
        child = os.fork()
        if child == 0:
            with probe.span("work"):
                pass
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
with open(page, "r+b") as file:
    file.write((1).to_bytes(8, "little"))
while not os.path.exists(stop):
    time.sleep(0.01)
with open(answer, "w") as file:
    file.write("0 1")
sys.exit(7)
"""

# Holds so many threads and children that sleep.
CROWD = """
import os, subprocess, sys, threading, time
threads, children, stop, answer, page = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
threading.stack_size(65536)
held = threading.Event()
for _ in range(threads):
    threading.Thread(target=held.wait, daemon=True).start()
kids = []
for _ in range(children):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    kids.append(child)
with open(page, "r+b") as file:
    file.write((1).to_bytes(8, "little"))
while not os.path.exists(stop):
    time.sleep(0.01)
for child in kids:
    os.kill(child, 9)
with open(answer, "w") as file:
    file.write("0 1")
os._exit(7)
"""
RUN_S = 6.0
GONE_AT_MOST_S = 3.0
MAX_CPU_PERCENT = 15.0
"""Of one core, before the budget is checked after 30 s: twice what was measured."""


def fork_storm(folder: Path, number: int) -> Trial:
    """Fork 400 children that mark a span and end at once; every span is recorded or counted."""
    forks = 400
    program = STORM.replace("int(sys.argv[1]), *sys.argv[2:5]", f"{forks}, *sys.argv[1:4]")
    with RecordedJob(folder, number, program=program) as job:
        job.wait_for_steps(1)
        agent = job.find_recorder()
        job.end()
        wait_until_gone(agent)
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    kept, _ = count_spans(records, WORK)
    of_process = Counter(
        record.pid
        for record in records
        if isinstance(record, Spans)
        for kind in record.columns["kind"]
        if kind == WORK
    )
    assert max(of_process.values(), default=0) <= 1, "spans of a child were taken for another's"
    assert of_process[job.process.pid] == 1
    return Trial(float(forks + 1 - kept), forks)


def crowd_node(folder: Path, number: int) -> Trial:
    """Give the job 2,000 threads and 300 processes; the recorder keeps to its budget."""
    threads, children = 2000, 300
    program = CROWD.replace(
        "int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]",
        f"{threads}, {children}, *sys.argv[1:4]",
    )
    with RecordedJob(folder, number, ("--inject", "off"), program=program) as job:
        job.wait_for_steps(1)
        agent = job.find_recorder()
        time.sleep(2)
        cpu_s, began = read_cpu_s(agent), time.monotonic()
        time.sleep(RUN_S)
        used_percent = 100 * (read_cpu_s(agent) - cpu_s) / (time.monotonic() - began)
        assert is_alive(agent)
        job.end()
        wait_until_gone(agent)
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    assert used_percent <= MAX_CPU_PERCENT, f"{used_percent:.0f} % of a core"
    gap_s = find_largest_gap_s(list_times(records))
    facts = {"recorder, % of a core": round(used_percent, 1)}
    return Trial(gap_s, threads + children, facts)


def limit_descriptors(folder: Path, number: int) -> Trial:
    """Allow 12 to 256 open files: the job runs, and is recorded or the reason is given."""
    return _limit(folder, number, f"ulimit -n {(12, 32, 64, 96, 128, 256)[number % 6]}")


def limit_files(folder: Path, number: int) -> Trial:
    """Allow files of 1 to 64 KiB: the recording has more of them, or stops and says so."""
    compile_package()
    blocks = 2 * (1, 8, 16, 64)[number % 4]  # of 512 bytes, as POSIX has it
    return _limit(folder, number, f"ulimit -f {blocks}")


@cache
def compile_package() -> None:
    """Compile the package: under a limit, Python before 3.12.8 would write torn bytecode of it."""
    compileall.compile_dir(ROOT / "clusterprof", quiet=2)


def lose_stderr(folder: Path, number: int) -> Trial:
    """Record a job whose stderr is a full disk, a closed pipe or not open: it runs all the same."""
    command = [*RECORD, "-o", str(folder / "out"), "--", PYTHON, "-c", "print('trained'); exit(7)"]
    (words, target) = (
        ('exec "$@"', "/dev/full"),
        ('exec "$@" 2>&-', os.devnull),
        ('exec "$@"', "pipe"),
        ('ulimit -f 2; exec "$@"', "file"),
    )[number % 4]
    compile_package()
    job = make_job_id(f"fault{number}")
    with _open_lost(target, folder) as stderr:
        done = subprocess.run(
            ["/bin/sh", "-c", words, "sh", *command],
            env=make_environment(job),
            stdout=subprocess.PIPE,
            stderr=stderr,
            timeout=PATIENCE_S,
            check=False,
        )
    assert (done.returncode, done.stdout) == (7, b"trained\n"), f"{target}: {done}"
    wait_until(lambda: not get_run_dir(job).exists(), PATIENCE_S)
    return Trial()


def _open_lost(target: str, folder: Path) -> BinaryIO:
    """Open a file to which nothing can be written."""
    if target == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        return os.fdopen(writer, "wb", buffering=0)
    if target == "file":
        (folder / "stderr").write_bytes(bytes(1024))
        return (folder / "stderr").open("ab", buffering=0)
    return open(target, "wb", buffering=0)


def limit_memory(folder: Path, number: int) -> Trial:
    """Allow 24 to 200 MB of address space: the job runs, and is recorded or the reason is given."""
    return _limit(folder, number, f"ulimit -v {(24, 40, 60, 200)[number % 4] * 1000}")


def _limit(folder: Path, number: int, words: str) -> Trial:
    prefix = ("/bin/sh", "-c", f'{words} && exec "$@"', "sh")
    with RecordedJob(folder, number, ("--keep-free", "0 B"), prefix=prefix) as job:
        job.wait_for_steps(200)
        job.end()
        end = time.monotonic() + GONE_AT_MOST_S
        has_ended = False
        while not has_ended and time.monotonic() < end:
            time.sleep(0.05)
            segments = sum(1 for _ in job.out.glob("*/*.cpf"))
            readers = list(map(NodeReader, list_node_folders(job.out) if segments else ()))
            has_ended = any(
                isinstance(record, Event) and record.kind == "recorder-stopped"
                for reader in readers
                for record in reader
            )
    assert has_ended or not segments, f"{words}: its end was not recorded"
    assert not any(reader.damage.damaged_places for reader in readers), words
    reported = ("not recording" in job.messages, "nothing can be written" in job.messages)
    assert segments or any(reported), f"{words}: {job.messages!r}"
    return Trial(facts={"not recorded": int(not segments), "segments": segments})


FAULTS = (
    Fault(
        "fork-storm",
        "the job forks 400 processes that mark a span and end at once",
        "os.fork(), ten at a time",
        fork_storm,
        4,
        60,
        "spans of ended children",
        "forks",
    ),
    Fault(
        "crowd",
        "the job has 2,000 threads and 300 processes",
        "threads and forks that sleep",
        crowd_node,
        2,
        20,
        "s without a sample",
        "threads and processes",
    ),
    Fault(
        "few-descriptors",
        "12 to 256 open files are allowed",
        "ulimit -n before `clusterprof record`",
        limit_descriptors,
        12,
        60,
        at_once=3,
    ),
    Fault(
        "small-files",
        "files of 1 to 64 KiB are allowed",
        "ulimit -f before `clusterprof record`",
        limit_files,
        12,
        60,
        at_once=3,
    ),
    Fault(
        "stderr-lost",
        "stderr is a full disk, a broken pipe, a file at its limit, or closed",
        "redirections before `clusterprof record`",
        lose_stderr,
        8,
        60,
        at_once=2,
    ),
    Fault(
        "little-memory",
        "24 to 200 MB of address space are allowed",
        "ulimit -v before `clusterprof record`",
        limit_memory,
        8,
        60,
        at_once=3,
    ),
)
