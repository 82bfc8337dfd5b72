"""What does one full sample cost? Beside a C program with the same reads, and beside psutil.

    python bench/sample_cost.py [PROCESSES]

One full sample: every collector of the host and of the job's processes once, here with 32 sleeping
processes. The C program (floor.c, compiled now) reads the same files: those our collectors hold,
each once, and of every process stat, io, schedstat and wchan. psutil reads the same facts as far as
it can (no pressure, run delay, reclaim, cgroup or TCP counters).

Every collector counts in full, even one that normally runs only every 500 ms or every second.

CPU time (user + system) back to back, the programs in turn; medians over the turns. A sleeping
thread costs us less than the C program: a file that cannot have changed is not read twice, and
unchanged text is not parsed. "all had run" is the most expensive case: every thread was on a CPU
since the last sample, 100 ms ago, and both files of its process have new values.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.registry import select_collectors
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import Unavailable

TURNS = 15
SAMPLES = 50
SETTLE_S = 6
# No kernel files (docs/gpu-notes.md has their cost), what a thread reads now and then, and what is
# opened anew every few seconds, so that C would not read it too.
LEFT_OUT = {"gpu_nvidia", "gpu_amd", "gpu_intel", "gpu_emulated", "ethtool", "rdma"}
LEFT_OUT |= {"cpu_clock", "kernel_threads", "placement", "shm"}
PER_PROCESS = ("stat", "io", "schedstat", "wchan")
KERNEL_FILES = ("/proc/", "/sys/")


def main(arguments: list[str]) -> None:
    """Start the processes, take turns, print the ratios."""
    count = int(arguments[0]) if arguments else 32
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]
    pids = [child.pid for child in children]
    try:
        with tempfile.TemporaryDirectory() as folder:
            compare(build_floor(Path(folder)), pids)
    finally:
        for child in children:
            child.kill()
            child.wait()


def build_floor(folder: Path) -> Path:
    """Compile the C program."""
    program = folder / "floor"
    source = Path(__file__).with_name("floor.c")
    subprocess.run(["cc", "-O2", "-Wall", "-o", str(program), str(source)], check=True)
    return program


def compare(program: Path, pids: list[int]) -> None:
    """Measure everything in turn and print it."""
    collectors = open_collectors(pids)
    paths = sorted(
        {path for path in list_open_files() if not path.startswith(tuple(list_task_folders(pids)))}
    )
    paths += [f"/proc/{pid}/{name}" for pid in pids for name in PER_PROCESS]
    processes = [psutil.Process(pid) for pid in pids]
    floors = [CReader(program, mode, paths) for mode in ("raw", "parse")]
    threads = next(c for c in collectors if c.name == "threads")
    jobs = next(c for c in collectors if c.name == "processes")

    def ours() -> None:
        for collector in collectors:
            collector.sample()

    def ours_all_had_run() -> None:
        for thread in threads._main.values():  # what was read last is unlike any reading
            thread._times = b""
        for process in jobs._open.values():
            process._stat_data = process._io_data = b"\n"
        ours()

    programs: dict[str, Callable[[], float]] = {
        "C, bytes": floors[0].sample_us,
        "C, numbers": floors[1].sample_us,
        "ours, all asleep": lambda: measure_cpu_us(ours),
        "ours, all had run": lambda: measure_cpu_us(ours_all_had_run),
        "psutil": lambda: measure_cpu_us(lambda: sample_with_psutil(processes), SAMPLES // 5),
    }
    wait_for_steady_state(collectors)
    turns: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(TURNS):
        for name, measure in programs.items():
            turns[name].append(measure())
    print(
        f"{len(paths)} files, {len(pids)} processes; µs of CPU per sample, median of {TURNS} turns"
    )
    for name, values in turns.items():
        print(
            f"  {name:<18} {statistics.median(values):8.1f}"
            f"   {compute_ratio(values, turns['C, bytes']):6.2f} x C bytes"
            f"   {compute_ratio(values, turns['C, numbers']):6.2f} x C numbers"
            f"   {compute_ratio(values, turns['psutil']):6.3f} x psutil"
        )
    for floor in floors:
        floor.close()
    print("by collector, all asleep:")
    for collector in collectors:
        cost = statistics.median(measure_cpu_us(collector.sample) for _ in range(5))
        print(f"  {collector.name:<18} {cost:8.1f}   every {collector.interval_ns // 1_000_000} ms")
        collector.close()


def open_collectors(pids: list[int]) -> list[Any]:
    """Open and sample once every collector that this machine has something for."""
    context = Context(Roots(), None, lambda: pids)
    collectors = []
    for kind in select_collectors(Roots(), use_portable=False):
        collector: Any = kind(context)
        if collector.name in LEFT_OUT:
            continue
        try:
            collector.open()
        except Unavailable:
            continue
        collector.sample()
        collectors.append(collector)
    return collectors


def wait_for_steady_state(collectors: list[Any]) -> None:
    """Sample until nobody looks for new processes any more: a birth keeps them at it for 5 s."""
    ends = time.monotonic() + SETTLE_S
    while time.monotonic() < ends:
        for collector in collectors:
            collector.sample()
        time.sleep(0.1)


def list_open_files() -> list[str]:
    """Return the kernel files this process holds open."""
    paths = []
    for number in os.listdir("/proc/self/fd"):
        try:
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue  # the descriptor of the listing itself
    return [path for path in paths if path.startswith(KERNEL_FILES) and not path.endswith("/fd")]


def list_task_folders(pids: list[int]) -> list[str]:
    """Return the folders of the processes."""
    return [f"/proc/{pid}/" for pid in pids]


class CReader:
    """The C program, running and waiting for its turns."""

    def __init__(self, program: Path, mode: str, paths: list[str]) -> None:
        self._process = subprocess.Popen(
            [str(program), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._say("".join(path + "\n" for path in paths) + "\n")

    def sample_us(self) -> float:
        """Return µs of CPU per sample."""
        self._say(f"{SAMPLES}\n")
        assert self._process.stdout is not None
        return int(self._process.stdout.readline()) / 1e3

    def close(self) -> None:
        """End the program."""
        self._process.communicate()

    def _say(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()


def measure_cpu_us(sample: Callable[[], Any], samples: int = SAMPLES) -> float:
    """Return µs of CPU per call."""
    sample()
    began = time.process_time_ns()
    for _ in range(samples):
        sample()
    return (time.process_time_ns() - began) / samples / 1e3


def sample_with_psutil(processes: list[psutil.Process]) -> None:
    """Read with psutil what it knows of the same facts."""
    psutil.cpu_times()
    psutil.cpu_times(percpu=True)
    psutil.virtual_memory()
    psutil.swap_memory()
    psutil.disk_io_counters(perdisk=True, nowrap=False)
    psutil.net_io_counters(pernic=True, nowrap=False)
    for process in processes:
        with process.oneshot():
            process.status()
            process.cpu_times()
            process.io_counters()
            process.memory_info()
            process.num_threads()
            process.ppid()


def compute_ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median over the turns of one program's cost over the other's."""
    return statistics.median(a / b for a, b in zip(ours, theirs))


if __name__ == "__main__":
    main(sys.argv[1:])
