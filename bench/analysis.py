"""What does it cost to load and attribute one node-hour? CPU seconds and peak memory, in one run.

The density is that of the targets: 8 ranks with 200 spans a second each (20 steps of ten spans,
one in ten from a dataloader worker) and 160 metrics at 10 Hz. A second recording also has the
threads of the job, 16 of them at 10 Hz, as a real one has. 60 of the spans a second are operations
of all ranks. Each is written by the real writer and analyzed in its own process; the figures
include the import of numpy and of clusterprof. The floor is what it takes to read the recording,
and then to decode and sort it into chunks, without imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from clusterprof.probe import layout
from clusterprof.signals import CATALOG
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Columns, Event, Header, Record, Rows, Spans
from clusterprof.trace.writer import RecordingWriter

SECONDS = int(sys.argv[1]) if len(sys.argv) > 1 else 3600
RANKS = 8
STEPS = 20  # a second
HZ = 10
GROUP = 7
SECOND = 1_000_000_000
STEP_NS = SECOND // STEPS
TARGET_CPU_S, TARGET_BYTES = 2.0, 120 << 20
# kind, begin and end within a step in ms; the worker's fetch goes to another process
STEP_SPANS = (
    (layout.DATA_WAIT, 0, 10),
    (layout.H2D, 10, 11),
    (layout.FORWARD, 11, 22),
    (layout.BACKWARD, 22, 45),
    (layout.COLLECTIVE, 25, 30),
    (layout.COLLECTIVE, 30, 36),
    (layout.COLLECTIVE, 36, 44),
    (layout.OPTIMIZER, 45, 49),
    (layout.STEP, 0, 50),
)
THREAD_NAMES = (
    "t_ns",
    "pid",
    "tid",
    "state",
    "on_cpu_ns_total",
    "run_delay_ns_total",
    "user_ns_total",
    "system_ns_total",
    "block_io_delay_ns_total",
    "major_faults_total",
    "wchan",
)
ANALYSE = """
import json, resource, sys
from pathlib import Path
from clusterprof.analysis.pipeline import analyze
report = analyze(Path(sys.argv[1]))
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "rss": used.ru_maxrss * 1024,
                  "steps": sum(r.steps for r in report.ranks), "lost": report.lost_ns,
                  "buckets": dict(report.ranks[0].buckets)}))
"""
FLOOR = """
import json, sys, time
from pathlib import Path
from clusterprof.analysis.timeline.load.chunks import NodeLoader
from clusterprof.trace.reader import NodeReader
began = time.process_time()
frames = sum(1 for _ in NodeReader(Path(sys.argv[1])).packed())
read_s = time.process_time() - began
chunks = sum(1 for _ in NodeLoader(Path(sys.argv[1])).chunks())
print(json.dumps({"read_s": read_s, "chunks_s": time.process_time() - began - read_s}))
"""


def main() -> None:
    """Print one line per recording."""
    for threads in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "node-1"
            written = write_recording(path, threads)
            # The least CPU time of three: the machine is shared.
            runs = [run_script(ANALYSE, Path(folder)) for _ in range(3)]
            best = min(runs, key=lambda run: run["cpu_s"])
            floor = run_script(FLOOR, path)
        assert best["steps"] == SECONDS * RANKS * STEPS
        print(
            f"one node-hour{', threads too' if threads else ''}: {written / 1e6:.0f} MB, "
            f"{best['cpu_s']:.2f} CPU-s (target {TARGET_CPU_S}), "
            f"{best['rss'] / (1 << 20):.0f} MiB at most (target {TARGET_BYTES >> 20}), "
            f"{SECONDS * RANKS * 200 / best['cpu_s'] / 1e6:.1f} M spans/s"
        )
        print(
            f"  floor: {floor['read_s']:.2f} CPU-s to read, "
            f"{floor['chunks_s']:.2f} to read, decode and sort"
        )
        print(f"  rank 0: {best['buckets']}")


def run_script(script: str, path: Path) -> dict:
    """Run a script on a recording in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def write_recording(path: Path, threads: bool) -> int:
    """Write the recording; return its size."""
    now = [0]
    devices = [{"id": f"gpu-{rank}"} for rank in range(RANKS)]
    header = Header(
        {"key": "node-1", "hostname": "node", "display": "node", "boot_id": "b", "kernel": "6"},
        {"monotonic_ns": 0, "boottime_ns": 0, "realtime_ns": 0},
        {},
        devices,
        {"variables": {}},
        {},
        {},
        [],
    )
    writer = RecordingWriter(path, header, lambda: Clock(now[0], now[0], now[0]), keep_free_bytes=0)
    writer.append(*(_make_registration(rank) for rank in range(RANKS)))
    noise = np.random.default_rng(7)
    totals = np.zeros(160)
    for second in range(SECONDS):
        now[0] = (second + 1) * SECOND
        writer.append(*_make_samples(second, noise, totals), *_make_spans(second))
        if threads:
            writer.append(_make_threads(second))
    writer.close()
    return sum(file.stat().st_size for file in path.iterdir())


def _make_registration(rank: int) -> Event:
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    who = {"pid": 100 + rank, "started_ticks": 1, "role": "python", "device": f"gpu-{rank}"}
    return Event(0, "process-registered", {**who, "variables": variables})


def _list_columns() -> list[tuple[str, str]]:
    """160 columns: 8 of each GPU, the first its busy time, and 96 of the host."""
    gpu = [s.name for s in CATALOG if s.name.startswith("gpu.") and s.is_counter]
    gpu = ["gpu.busy_ns_total", *(name for name in gpu if name != "gpu.busy_ns_total")][:6]
    gpu += ["gpu.power_watts", "gpu.memory_used_bytes"]
    host = [s.name for s in CATALOG if s.name.startswith(("disk.", "memory.", "network.", "cpu."))]
    device = [(name, f"gpu-{rank}") for rank in range(RANKS) for name in gpu]
    rest = [(name, f"d{i}") for i in range(8) for name in host]
    return (device + rest)[:160]


COLUMNS = _list_columns()


def _make_samples(second: int, noise: np.random.Generator, totals: np.ndarray) -> Iterator[Record]:
    t = second * SECOND + np.arange(HZ) * (SECOND // HZ)
    busy = t - t // STEP_NS * 5_000_000  # idle for the first 5 ms of each step
    values = totals + np.cumsum(noise.integers(0, 1 << 20, (HZ, 160)), axis=0)
    totals[:] = values[-1]
    columns = [
        array(
            "q", busy.tolist() if name == "gpu.busy_ns_total" else values[:, i].astype(int).tolist()
        )
        for i, (name, _) in enumerate(COLUMNS)
    ]
    names, devices = [name for name, _ in COLUMNS], [device for _, device in COLUMNS]
    yield Columns("all", names, devices, array("q", t.tolist()), columns, [None] * 160)


def _make_spans(second: int) -> Iterator[Record]:
    for rank in range(RANKS):
        for worker in (False, True):
            rows = _make_rows(second, rank, worker)
            columns = {n: array("q", column) for n, column in zip(SPAN_FIELDS, zip(*rows))}
            pid = 200 + rank if worker else 100 + rank
            yield Spans(pid, 1, 1 + second * len(rows), 0, {}, columns)


def _make_rows(second: int, rank: int, worker: bool) -> list[tuple[int, ...]]:
    rows = []
    for step in range(second * STEPS, (second + 1) * STEPS):
        at = step * STEP_NS
        if worker:
            # 45 ms of work for every batch: 15 reading, 28 decoding, 2 without a CPU
            start = at - 35_000_000 if step else at
            rows.append((start, at + 9_900_000, layout.FETCH, 8, 28_000_000, 1_000_000, 1 << 20))
            continue
        for kind, low, high in STEP_SPANS:
            ab = (step, 200 + rank, 1, step == 0) if kind == layout.DATA_WAIT else (step, 0, 0, 0)
            if kind == layout.COLLECTIVE:  # 60 a second, of one group
                ab = (GROUP, 3 * step + (low > 25) + (low > 30), 1 << 20, layout.ALL_REDUCE)
            rows.append((at + low * 1_000_000, at + high * 1_000_000 - 1, kind, *map(int, ab)))
    return rows


def _make_threads(second: int) -> Rows:
    table = []
    for tick in range(HZ):
        t = second * SECOND + tick * (SECOND // HZ)
        for pid in (*range(100, 100 + RANKS), *range(200, 200 + RANKS)):
            cpu, delay = int(t * 0.56), int(t * 0.04)
            state = ord("D") if (t // 7 + pid) % 3 == 0 else ord("R")
            table.append(
                (t, pid, pid, state, cpu, delay, cpu, 0, -1, 0, 1 if state == ord("D") else 0)
            )
    columns = [array("q", column) for column in zip(*table)]
    return Rows("threads", THREAD_NAMES, columns, {"wchan": ("0", "folio_wait_bit_common")})


if __name__ == "__main__":
    main()
