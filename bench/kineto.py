"""How fast is a trace of PyTorch's profiler read and analyzed, and in how much memory?

    python -m bench kineto                    53 and 500 MB, of a real trace beside the repository
    python bench/kineto.py TRACE.json.gz --megabytes 53 500 2000
    python bench/kineto.py --peers            HTA and TraceLens on the same files, in the same run
    python bench/kineto.py --ranks 64 --rank-megabytes 160 --megabytes    10 GB of a job of 64 ranks

A real trace is repeated, each time later, up to every size, in a temporary folder. Measured in the
same run: the whole `analyze` (start-up included), and reading alone by `json.loads` of the standard
library and by msgspec with the types that the importer uses, a block at a time (the lower bound:
nothing is kept). MB of plain JSON per CPU-second; peak memory of the process.

Peers run in the environments of `make peers` (`CLUSTERPROF_PEERS`, `CLUSTERPROF_TRACELENS`: see
`bench/peers/run.py`), from the file to their breakdown; the ratio is that of CPU time. With
`--ranks` the real traces of 8 ranks are repeated as traces of that many ranks, and analyzed on one
core and on all: wall time of both, and the peak memory of all processes together.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

DATA = FOLDER.parents[1] / "shared/data"
REAL = DATA / "kineto-hta/df_index_resolver_df_index_resolver.json.gz"
REAL_RANKS = DATA / "kineto-dlrm-8rank"
PEERS = Path(os.environ.get("CLUSTERPROF_PEERS", FOLDER.parent / ".peers"))
TURNS = 5  # of a small file: it is read faster than the machine's speed changes
JSON_AT_MOST_MB = 60  # json.loads takes ten times a file's size
PEERS_AT_MOST_MB = 700  # and so do they
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
} | {"MPLBACKEND": "agg"}  # what is installed has its byte code: ours is written by a first run
_RANK = re.compile(rb'("rank"\s*:\s*)(\d+)(\s*,\s*"world_size"\s*:\s*)(\d+)')
_LOADS = "import json, sys; json.load(open(sys.argv[1], 'rb'))"
_FLOOR = """
import sys
from pathlib import Path
from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.kineto.event_stream import CommonEventDecoder, EventStream
from clusterprof.analysis.importers.kineto.classify import Kinds
from clusterprof.analysis.importers.core.byte_sources import open_sources
(source,) = open_sources(Path(sys.argv[1]))
decoder = CommonEventDecoder(Kinds())
for events in EventStream(source, Account(source.path), decoder.events).events():
    pass
"""
_HTA = """
import sys
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_files={int(sys.argv[2]): sys.argv[1]})
table = trace.get_temporal_breakdown(visualize=False)
assert len(table)
"""
_TRACELENS = """
import sys
from TraceLens import TreePerfAnalyzer
assert len(TreePerfAnalyzer.from_file(sys.argv[1]).get_df_gpu_timeline())
"""


def measure_command(
    *command: str, python: str = sys.executable, path: str = ""
) -> tuple[float, float]:
    """Return CPU seconds and peak memory in MB of one command, those it starts included.

    The peak counts what this process had when it forked: so it must stay small itself.
    """
    environment = {**ENVIRONMENT, "PYTHONPATH": path or str(FOLDER.parent)}
    with subprocess.Popen(
        [python, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:3])} … failed: {process.returncode}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def _find_rank(path: Path) -> str:
    with open(path, "rb") as file:
        match = _RANK.search(file.read(1 << 16))
    return match[2].decode() if match else "0"


def iterate_peers(path: Path) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield what each tool that is installed takes from a file to its breakdown."""
    hta = PEERS / "HTA" / "bin" / "python"
    if hta.exists():
        yield (
            "HTA",
            measure_command("-c", _HTA, str(path), _find_rank(path), python=str(hta), path="-"),
        )
    lens = PEERS / "TraceLens" / "bin" / "python"
    sources = os.environ.get("CLUSTERPROF_TRACELENS", "")
    if lens.exists() and sources:
        yield (
            "TraceLens",
            measure_command("-c", _TRACELENS, str(path), python=str(lens), path=sources),
        )


def _print_cost(size_mb: float, name: str, cpu_s: float, peak_mb: float, more: str = "") -> None:
    print(
        f"{size_mb:6.0f} MB  {name:20} {size_mb / cpu_s:6.0f} MB/CPU-s"
        f"  {cpu_s:6.2f} CPU-s  peak {peak_mb:5.0f} MB{more}",
        flush=True,
    )


def _measure_in_turns(turns: int, *command: str) -> tuple[float, float]:
    """The median of CPU time, and the highest peak, of a command that was run so often."""
    runs = [measure_command(*command) for _ in range(turns)]
    return statistics.median(cpu_s for cpu_s, _ in runs), max(peak for _, peak in runs)


def measure_one_rank(real: Path, folder: Path, megabytes: int, with_peers: bool) -> None:
    """Measure one file of about this size."""
    path = folder / f"rank0-{megabytes}.json"
    maker = (str(FOLDER / "_kineto_traces.py"), str(real), str(path))
    measure_command(*maker, "--megabytes", str(megabytes))  # in a process of its own: see peak
    size = path.stat().st_size / 1e6
    turns = TURNS if size <= JSON_AT_MOST_MB * 1.5 else 1
    ours = _measure_in_turns(turns, "-m", "clusterprof", "analyze", str(path))
    _print_cost(size, "analyze", *ours)
    _print_cost(size, "typed, nothing kept", *measure_command("-c", _FLOOR, str(path)))
    if size <= JSON_AT_MOST_MB * 1.5:
        _print_cost(size, "json.loads", *measure_command("-c", _LOADS, str(path)))
    if with_peers and size <= PEERS_AT_MOST_MB:
        for name, theirs in iterate_peers(path):
            _print_cost(size, name, *theirs, more=f"  {theirs[0] / ours[0]:5.1f} × analyze")
    path.unlink()


def measure_many_ranks(folder: Path, ranks: int, megabytes: int) -> None:
    """Measure a job of many ranks, on one core and on all."""
    real = sorted(REAL_RANKS.glob("rank*.json.gz"))
    size = 0.0
    for number in range(ranks):
        path = folder / f"rank{number}.pt.trace.json"
        maker = (str(FOLDER / "_kineto_traces.py"), str(real[number % len(real)]), str(path))
        measure_command(*maker, "--megabytes", str(megabytes))
        renumber_trace(path, number, ranks)
        size += path.stat().st_size / 1e6
    cores = sorted(os.sched_getaffinity(0))
    walls = []
    for allowed in ({cores[0]}, set(cores)):
        wall_s, cpu_s, together_mb, largest_mb = _measure_analysis(folder, allowed)
        walls.append(wall_s)
        print(
            f"{size:6.0f} MB of {ranks} ranks on {len(allowed)} cores: {wall_s:6.1f} s"
            f"  {size / cpu_s:6.0f} MB/CPU-s  peak {together_mb:5.0f} MB together,"
            f" {largest_mb:4.0f} MB the largest process",
            flush=True,
        )
    print(f"{walls[0] / walls[1]:.2f} × as fast on {len(cores)} cores")


def renumber_trace(path: Path, rank: int, world: int) -> None:
    """Make a trace say that it is of another rank; spaces keep its length."""
    with open(path, "r+b") as file:
        head = file.read(1 << 16)
        match = _RANK.search(head)
        if not match:
            return  # then the name says it
        info = b'"rank":%d,"world_size":%d' % (rank, world)
        room = match.end() - match.start()
        assert len(info) <= room
        file.seek(match.start())
        file.write(info.ljust(room))


def _measure_analysis(folder: Path, cores: set[int]) -> tuple[float, float, float, float]:
    """Wall and CPU seconds of `analyze`, and the peak of all its processes, of the largest one."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(FOLDER.parent)}
    began = time.monotonic()
    together = 0
    with subprocess.Popen(
        [sys.executable, "-m", "clusterprof", "analyze", str(folder)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ) as process:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            together = max(
                together,
                sum(_read_proportional_bytes(pid) for pid in _list_descendants(process.pid)),
            )
            time.sleep(0.1)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"analyze … failed: {process.returncode}")
    wall_s = time.monotonic() - began
    return wall_s, usage.ru_utime + usage.ru_stime, together / 1e6, usage.ru_maxrss / 1024


def _list_descendants(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _list_descendants(int(child))


def _read_proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    fields: Mapping[str, str] = {line.split()[0]: line.split()[1] for line in lines[1:]}
    return int(fields.get("Pss:", 0)) * 1024


def main() -> int:
    """Measure, and print a line for each size and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?", default=REAL)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[53, 500])
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--rank-megabytes", type=int, default=160)
    parser.add_argument("--folder", type=Path, help="where the traces are made; default: temporary")
    args = parser.parse_args()
    if not args.trace.exists():
        print(f"no trace: {args.trace.name} is not beside the repository; name one")
        return 0
    measure_command("-m", "clusterprof", "analyze", str(args.trace))  # writes byte code
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure_one_rank(args.trace, Path(folder), megabytes, args.peers)
    if args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure_many_ranks(Path(folder), args.ranks, args.rank_megabytes)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
