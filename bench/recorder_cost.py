"""What does a running recorder cost, and how much does it slow the job?

    python bench/recorder_cost.py [PAIRS]

CPU share of `clusterprof record` at 1, 10 and 100 Hz with 8 and with 32 processes that sleep most
of the time and work for a millisecond 20 times a second. Two instances of the C program (floor.c)
run at the same time: one reads the files of our collectors at the rates of these collectors, the
other all files of a full sample at every tick, as the target defines it (0.7 % and 1.4 % of a core
were to be 1.7 times its cost).
CPU time is that of the scheduler (schedstat), over a window that begins after the recorder has
registered all new processes. Then memory, and the slowdown of a job: pairs of the same work of a
tenth of a second with 200 spans a second, with and without the recorder, with the bootstrap
interval of the median.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from _paced_reader import (
    PROTOTYPE_HZ,
    PacedReader,
    Prototype,
    list_files_by_rate,
    list_sample_files,
)
from sample_cost import build_floor

SETTLE_S = 8
WINDOW_S = 20
RATES_HZ = (1, 10, 100)
PROCESSES = (8, 32)
PAIRS = 300
SLICE_NS = 100_000_000  # in each slice that it is not stopped, the recorder has one tick
DRAWS = 4000
HOUR_S = 3600
RECORD = [sys.executable, "-m", "clusterprof", "record"]

JOB = """
import os, sys, time
for _ in range(int(sys.argv[1]) - 1):
    if os.fork() == 0:
        break
while True:
    end = time.thread_time_ns() + 1_000_000
    while time.thread_time_ns() < end:
        pass
    time.sleep(0.049)
"""

# Works when it is asked to, a slice of 20 pieces of about 5 ms, as spans or not; says how long it
# took. One process does both: two would differ by the luck of their memory's layout, which is more.
WORK = """
import contextlib, sys, time, clusterprof
def work(units):
    total = 0
    for i in range(units):
        total += i * i
    return total
for line in sys.stdin:
    units, spans = map(int, line.split())
    mark = clusterprof.span if spans else contextlib.nullcontext
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    for _ in range(20):
        with mark("work"):
            work(units)
    print(time.perf_counter_ns() - wall, time.process_time_ns() - cpu, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """One window: shares of a core, and bytes written."""

    ours_percent: float
    floor_percent: float
    """The C program at the rates of our collectors."""
    full_percent: float
    """The C program with one full sample at every tick."""
    prototype_percent: float | None
    """The plan's prototype, which has one rate."""
    written: int


def main(arguments: list[str]) -> None:
    """Ask all questions and print the answers."""
    pairs = int(arguments[0]) if arguments else PAIRS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        floor = build_floor(folder)
        print("rate, processes: % of a core, x the C program at the pace of our collectors,")
        print("  x the C program with a full sample at every tick, x the prototype, per node-hour")
        for processes in PROCESSES:
            for hz in RATES_HZ:
                cost = measure_share(folder / f"{processes}-{hz}", floor, processes, hz)
                print(f"  {hz:3} Hz, {processes:2} processes  {format_cost(cost)}", flush=True)
        print_memory(folder)
        print_slowdown(folder, pairs)


def format_cost(cost: Cost) -> str:
    """Return a line of the table."""
    ours, other = cost.ours_percent, cost.prototype_percent
    floor, full = cost.floor_percent, cost.full_percent
    prototype = " " * 30 if other is None else f"   {ours / other:5.2f} x prototype ({other:.3f} %)"
    return (
        f"{ours:6.3f} %   {ours / floor:5.2f} x C ({floor:.3f} %)"
        f"   {ours / full:5.2f} x C, full ({full:.3f} %){prototype}"
        f"   {cost.written * HOUR_S / WINDOW_S / 1e6:6.1f} MB"
    )


@contextmanager
def record_command(out: Path, *command: str, hz: float = 10, **variables: str) -> Iterator[int]:
    """Record a command; yield the pid of the recorder; end both."""
    options = ["-o", str(out), "--hz", str(hz), "--inject", "off"]
    environment = {**os.environ, "SLURM_JOB_ID": f"bench-{os.getpid()}-{out.name}", **variables}
    job = subprocess.Popen(
        [*RECORD, *options, "--", *command],
        env=environment,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield find_recorder(out)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def find_recorder(out: Path) -> int:
    """Return the recorder that has this folder among its arguments, once it has begun."""
    wanted = f"--out={out}".encode()
    for _ in range(1000):
        for line in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if wanted in line.read_bytes() and next(out.glob("*/000001.cpf"), None):
                    return int(line.parent.name)
        time.sleep(0.02)
    raise SystemExit(f"no recorder came for {out}")


def measure_share(out: Path, program: Path, processes: int, hz: int) -> Cost:
    """Measure one window of one recorder, and of the C program beside it."""
    with record_command(out, sys.executable, "-c", JOB, str(processes), hz=hz) as agent:
        time.sleep(1)
        job = list_tree(int(find_job(agent)))
        floors = [
            PacedReader(program, paths, interval_ns)
            for interval_ns, paths in list_files_by_rate(job, hz)
        ]
        full = PacedReader(program, list_sample_files(job), 1_000_000_000 // hz)
        others = [
            full,
            *([Prototype(out.parent, list_sample_files(job))] if hz == PROTOTYPE_HZ else []),
        ]
        everybody = [agent, *(other.pid for other in (*others, *floors))]
        time.sleep(SETTLE_S)
        began, written = time.monotonic_ns(), measure_bytes(out)
        before = [read_cpu_ns(pid) for pid in everybody]
        time.sleep(WINDOW_S)
        wall = time.monotonic_ns() - began
        used = [100 * (read_cpu_ns(pid) - then) / wall for pid, then in zip(everybody, before)]
        written = measure_bytes(out) - written
        for other in (*floors, *others):
            other.close()
    prototype = used[2] if len(others) == 2 else None
    return Cost(used[0], sum(used[1 + len(others) :]), used[1], prototype, written)


def find_job(agent: int) -> str:
    """Return the pid of the command that a recorder follows."""
    arguments = Path(f"/proc/{agent}/cmdline").read_text().split("\0")
    run_dir = next(word.partition("=")[2] for word in arguments if word.startswith("--run-dir="))
    return next(Path(run_dir).glob("register/*.json")).stem


def list_tree(pid: int) -> list[int]:
    """Return a process and its children."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def read_cpu_ns(pid: int) -> int:
    """Return the time on a CPU of all threads of a process, as the scheduler counts it."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files)


def measure_bytes(out: Path) -> int:
    """Return the bytes of a recording so far."""
    return sum(file.stat().st_size for file in out.rglob("*.cpf"))


def print_memory(folder: Path) -> None:
    """Print what the recorder and the helper of the simulated NVML hold in memory."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.support.nvml.simulated import Scenario, build_library, make_environment

    variables = make_environment(build_library(folder / "nvml"), Scenario(folder / "scenario"))
    out = folder / "memory"
    with record_command(out, sys.executable, "-c", JOB, "8", **variables) as agent:
        time.sleep(SETTLE_S)
        print(f"resident: recorder {read_resident_mb(agent)}")
        for helper in list_tree(agent)[1:]:
            print(f"resident: helper of NVML (simulated) {read_resident_mb(helper)}")


def read_resident_mb(pid: int) -> str:
    """Return resident memory, and how much of it is unshared."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kb = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    own = kb["Private_Clean"] + kb["Private_Dirty"]
    return f"{kb['Rss'] / 1024:.1f} MB, {own / 1024:.1f} MB of it its own"


def print_slowdown(folder: Path, pairs: int) -> None:
    """Print how much longer the same work takes with spans and a running recorder.

    For the other half of each pair the recorder is stopped and the job marks no spans.
    """
    out = folder / "slowdown"
    variables = {**os.environ, "SLURM_JOB_ID": f"bench-{os.getpid()}-pairs"}
    job = subprocess.Popen(
        [*RECORD, "-o", str(out), "--", sys.executable, "-c", WORK],
        env=variables,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    walls, cpus = [], []
    try:
        units = 20_000
        units = int(units * SLICE_NS / min(run_turn(job, units, spans)[0] for spans in (1, 0, 1)))
        agent = find_recorder(out)
        for number in range(pairs):
            took = {}
            for recorded in (number % 2 == 0, number % 2 == 1):
                os.kill(agent, signal.SIGCONT if recorded else signal.SIGSTOP)
                took[recorded] = run_turn(job, units, recorded)
            walls.append(100 * (took[True][0] / took[False][0] - 1))
            cpus.append(100 * (took[True][1] / took[False][1] - 1))
        os.kill(agent, signal.SIGCONT)
    finally:
        job.communicate()
    for name, values in (("wall time", walls), ("CPU time of the job", cpus)):
        low, high = bootstrap_median(values)
        print(
            f"slowdown of the job, {name}: {statistics.median(values):+.2f} %"
            f" ({low:+.2f} to {high:+.2f}; 95 % interval of the median of {pairs} pairs)"
        )


def run_turn(process: subprocess.Popen[str], units: int, spans: int) -> tuple[int, int]:
    """Let it work once; return wall and CPU nanoseconds."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{units} {int(spans)}\n")
    process.stdin.flush()
    wall, cpu = process.stdout.readline().split()
    return int(wall), int(cpu)


def bootstrap_median(values: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return medians[DRAWS // 40], medians[-DRAWS // 40]


if __name__ == "__main__":
    main(sys.argv[1:])
