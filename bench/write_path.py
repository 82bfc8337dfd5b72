"""What writing costs: CPU, bytes and bytes per number, beside JSON lines in the same run.

    python bench/write_path.py [seconds]

The load of PERFORMANCE.md section 2: per second 8 ranks x 200 spans and 160 metrics at 10 Hz of
8 accelerators and one host, made before the clock starts. Both writers get the same records and
write to the same file system; CPU is user + system time of this process.
"""

from __future__ import annotations

import json
import platform
import random
import resource
import shutil
import statistics
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from datetime import date
from itertools import accumulate
from pathlib import Path

from clusterprof.probe import layout
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Columns, Header, Record, Spans
from clusterprof.trace.segments import is_segment
from clusterprof.trace.writer import RecordingWriter

RANKS = 8
SPANS_PER_SECOND = 200
HERTZ = 10
SECOND_NS = 1_000_000_000

# kind, mean length in ns: a step of 8 spans takes about 40 ms, so 25 steps and 200 spans a second.
STEP_SPANS = (
    (layout.DATA_WAIT, 5_000_000),
    (layout.H2D, 1_500_000),
    (layout.FORWARD, 9_000_000),
    (layout.BACKWARD, 15_000_000),
    (layout.COLLECTIVE, 4_000_000),
    (layout.OPTIMIZER, 4_500_000),
    (layout.EXPOSED, 0),
    (layout.STEP, 0),
)


class Rank:
    """A training process whose spans follow each other with a few µs of Python in between."""

    def __init__(self, number: int, start_ns: int) -> None:
        self._random = random.Random(number)
        self._pid = 41_000 + 11 * number
        self._now_ns = start_ns
        self._sequence = 1
        self._step = 0
        self._spans = self._forever()

    def second(self) -> Spans:
        """Return the next 200 spans."""
        rows = [next(self._spans) for _ in range(SPANS_PER_SECOND)]
        columns = {name: array("q", column) for name, column in zip(SPAN_FIELDS, zip(*rows))}
        first = self._sequence
        self._sequence += len(rows)
        return Spans(self._pid, 8_812_345 + self._pid, first, 0, {}, columns)

    def _forever(self) -> Iterator[tuple[int, ...]]:
        while True:
            step_start_ns = self._now_ns
            for kind, mean_ns in STEP_SPANS[:-2]:
                self._now_ns += 2_000 + int(self._random.expovariate(1 / 6_000))
                start_ns = self._now_ns
                self._now_ns += int(self._random.gauss(mean_ns, mean_ns / 8))
                yield start_ns, self._now_ns, kind, *self._values(kind)
                if kind == layout.DATA_WAIT:
                    wait = (start_ns, self._now_ns)
            sequence = self._sequence + 6
            yield *wait, layout.EXPOSED, sequence, self._random.randrange(4_000_000), 0, 0
            self._now_ns += 3_000 + int(self._random.expovariate(1 / 3_000))
            yield step_start_ns, self._now_ns, layout.STEP, self._step, 0, 0, 0
            self._step += 1

    def _values(self, kind: int) -> tuple[int, int, int, int]:
        if kind == layout.DATA_WAIT:
            return self._step, self._pid + 1 + self._step % 8, 8, 0
        if kind == layout.H2D:
            return 38_535_168, 1, 0, 0
        return 0, 0, 0, 0


# How values behave between two ticks, 100 ms apart. Counters: what is added; gauges: the value.
BEHAVIOUR: dict[str, Callable[[random.Random], float]] = {
    "cpu ticks": lambda r: 10_000_000 * r.randrange(11),
    "stalls": lambda r: 1_000 * r.randrange(30_000) if r.random() < 0.3 else 0,
    "requests": lambda r: r.randrange(40),
    "milliseconds": lambda r: 1_000_000 * r.randrange(90),
    "pages": lambda r: 4_096 * r.randrange(6_000) if r.random() < 0.7 else 0,
    "traffic": lambda r: r.randrange(12_000_000),
    "nothing": lambda r: 0,
    "kernel time": lambda r: r.randrange(60_000_000, 100_000_000),
    "millijoules": lambda r: r.randrange(39_000, 42_000) / 1000,
    "KB/s": lambda r: 1_000 * r.randrange(2_000_000, 2_400_000),
    "available": lambda r: 4_096 * r.randrange(100_000_000, 100_050_000),
    "few": lambda r: r.randrange(6),
    "fixed": lambda r: 80 << 30,
    "percent": lambda r: r.randrange(60, 100) / 100,
    "milliwatts": lambda r: r.randrange(390_000, 420_000) / 1000,
    "degrees": lambda r: float(r.randrange(61, 63)),
    "steps of 15 MHz": lambda r: 1e6 * (1_755 + 15 * r.randrange(6)),
    "one clock": lambda r: 2.619e9,
}
GAUGES = set(list(BEHAVIOUR)[list(BEHAVIOUR).index("KB/s") :])
FLOATS = {"millijoules", "percent", "milliwatts", "degrees", "steps of 15 MHz", "one clock"}

CPU = {name: "cpu ticks" for name in ("user", "system", "idle", "iowait")} | {"steal": "nothing"}
PRESSURE = {
    name: "stalls" for name in ("cpu_some", "io_some", "io_full", "memory_some", "memory_full")
}
MEMORY = {
    "available": "available",
    "cached": "available",
    "dirty": "available",
    "writeback": "few",
    "swap_free": "fixed",
    "major_faults": "few",
    "swap_in": "nothing",
    "swap_out": "nothing",
    "direct_reclaim": "nothing",
    "refaults": "nothing",
    "oom_kills": "nothing",
    "numa_misses": "requests",
}
DISK = {
    "read_bytes": "pages",
    "reads": "requests",
    "read_ns": "milliseconds",
    "write_bytes": "pages",
    "writes": "requests",
    "write_ns": "milliseconds",
    "busy_ns": "milliseconds",
    "queue_ns": "milliseconds",
}
NETWORK = {
    "receive_bytes": "traffic",
    "transmit_bytes": "traffic",
    "receive_drops": "nothing",
    "transmit_drops": "nothing",
    "errors": "nothing",
    "link": "fixed",
}
GPU = {
    "busy": "percent",
    "busy_ns": "kernel time",
    "memory_busy": "percent",
    "memory_used": "fixed",
    "power": "milliwatts",
    "energy": "millijoules",
    "temperature": "degrees",
    "sm_clock": "steps of 15 MHz",
    "memory_clock": "one clock",
    "throttle": "nothing",
    "thermal_violation": "nothing",
    "pcie_receive": "KB/s",
}


class Host:
    """160 metrics of one host and 8 accelerators, as they behave in a busy job."""

    PLAN = (
        ("cpu", [f"cpu{n}" for n in range(4)], CPU),
        ("pressure", ["", "cgroup"], PRESSURE),
        ("memory", [""], MEMORY),
        ("disk", ["nvme0n1", "nvme1n1"], DISK),
        ("network", ["eth0"], NETWORK),
        ("gpu_nvidia", [f"GPU-{n:08x}-5f3a" for n in range(8)], GPU),
    )

    def __init__(self, start_ns: int) -> None:
        self._random = random.Random(160)
        self._now_ns = start_ns
        self._totals: dict[tuple[str, str, str], float] = {}

    def second(self) -> list[Columns]:
        """Return ten rows of each collector."""
        ticks = [self._now_ns + tick * SECOND_NS // HERTZ for tick in range(HERTZ)]
        self._now_ns += SECOND_NS
        return [self._collector(ticks, *line) for line in self.PLAN]

    def _collector(
        self, ticks: list[int], name: str, devices: list[str], metrics: dict[str, str]
    ) -> Columns:
        t_ns = array("q", [tick + 50_000 + self._random.randrange(80_000) for tick in ticks])
        plan = [(device, metric) for device in devices for metric in metrics]
        values = [self._column(name, device, metric, metrics[metric]) for device, metric in plan]
        signals = tuple(f"{name}.{metric}_total" for _, metric in plan)
        owners = tuple(device for device, _ in plan)
        return Columns(name, signals, owners, t_ns, values, [None] * len(values))

    def _column(self, name: str, device: str, metric: str, behaviour: str) -> array:
        key = (name, device, metric)
        draw = BEHAVIOUR[behaviour]
        values = [draw(self._random) for _ in range(HERTZ)]
        if behaviour not in GAUGES:
            if key not in self._totals:  # up for a week or so
                self._totals[key] = 100_000 * sum(draw(self._random) for _ in range(60))
            total = self._totals[key]
            values = [round(value, 3) for value in accumulate(values, initial=total)]
            self._totals[key] = values.pop()
        return array("d" if behaviour in FLOATS else "q", values)


class JsonLines:
    """The same records the way most tools write them: a line per tick and per span."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._encode = json.JSONEncoder(separators=(",", ":")).encode

    def append(self, *records: Record) -> None:
        """Write and flush the records of one second."""
        for record in records:
            if isinstance(record, Columns):
                names = [
                    f"{signal}:{device}" for signal, device in zip(record.signals, record.devices)
                ]
                for t_ns, row in zip(record.t_ns, zip(*record.values)):
                    self._line(
                        {"t_ns": t_ns, "collector": record.collector, **dict(zip(names, row))}
                    )
            elif isinstance(record, Spans):
                for row in zip(*(record.columns[name] for name in SPAN_FIELDS)):
                    self._line({"pid": record.pid, **dict(zip(SPAN_FIELDS, row))})
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, value: dict[str, object]) -> None:
        self._file.write(self._encode(value) + "\n")


def cpu_seconds() -> float:
    """CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cost(append: Callable[..., None], load: list[list[Record]]) -> float:
    """CPU milliseconds per recorded second: the median of ten stretches, to leave noise out."""
    part = max(1, len(load) // 10)
    costs = []
    for first in range(0, len(load) - part + 1, part):
        before = cpu_seconds()
        for second in load[first : first + part]:
            append(*second)
        costs.append((cpu_seconds() - before) / part)
    return 1e3 * statistics.median(costs)


def folder_bytes(folder: Path) -> int:
    """Size of all segments."""
    return sum(path.stat().st_size for path in folder.iterdir() if is_segment(path.name))


def recording(folder: Path, load: list[list[Record]], one_by_one: bool) -> tuple[float, int]:
    """Return CPU ms/s and bytes of recording the load."""
    header = Header({"key": "bench"}, {}, {}, [], {}, {}, {}, [])
    ticks = iter(range(1 << 62))
    clock = lambda: Clock(next(ticks) * 1_000_000, 0, 0)  # noqa: E731
    writer = RecordingWriter(folder, header, clock, keep_free_bytes=0)

    def append(*records: Record) -> None:
        if one_by_one:
            for record in records:
                writer.append(record)
        else:
            writer.append(*records)

    spent = cost(append, load)
    writer.close()
    return spent, folder_bytes(folder)


def main(seconds: int = 120) -> None:
    """Measure and print."""
    ranks = [Rank(number, 5_000 * SECOND_NS) for number in range(RANKS)]
    host = Host(5_000 * SECOND_NS)
    columns: list[list[Record]] = [list(host.second()) for _ in range(seconds)]
    spans: list[list[Record]] = [[rank.second() for rank in ranks] for _ in range(seconds)]
    load = [c + s for c, s in zip(columns, spans)]
    values = sum(
        HERTZ * len(record.values)
        for second in columns
        for record in second
        if isinstance(record, Columns)
    )
    folder = Path(tempfile.mkdtemp(prefix="clusterprof-bench-"))
    try:
        ours, our_bytes = recording(folder / "all", load, one_by_one=False)
        single, single_bytes = recording(folder / "single", load, one_by_one=True)
        columns_ms, column_bytes = recording(folder / "columns", columns, one_by_one=False)
        spans_ms, span_bytes = recording(folder / "spans", spans, one_by_one=False)
        lines = JsonLines(folder / "lines.jsonl")
        theirs = cost(lines.append, load)
        lines.close()
        their_bytes = (folder / "lines.jsonl").stat().st_size
        before = cpu_seconds()
        frames = sum(1 for _ in NodeReader(folder / "all"))
        reading = 1e3 * (cpu_seconds() - before) / seconds
    finally:
        shutil.rmtree(folder)
    number = RANKS * SPANS_PER_SECOND * seconds
    print(
        f"{date.today()}  Python {platform.python_version()}  {platform.machine()}  "
        f"{seconds} s, {values // seconds // HERTZ} metrics at {HERTZ} Hz, "
        f"{RANKS} x {SPANS_PER_SECOND} spans/s"
    )
    print(
        f"write path          {ours:6.3f} CPU ms/s   (target 0.6; columns {columns_ms:.3f}, "
        f"spans {spans_ms:.3f}; one record per call {single:.3f})"
    )
    print(
        f"size                {our_bytes / seconds / 1e3:6.2f} kB/s       (target 20.5, aim 17.4; "
        f"one record per call {single_bytes / seconds / 1e3:.2f})"
    )
    print(f"columns             {column_bytes / values:6.2f} B/value    (target 2)")
    print(f"spans               {span_bytes / number:6.2f} B/span     (target 10)")
    print(f"reading             {reading:6.3f} CPU ms/s   ({frames} records)")
    print(
        f"JSON lines          {theirs:6.3f} CPU ms/s   {their_bytes / seconds / 1e3:.2f} kB/s: "
        f"{theirs / ours:.1f} x our CPU, {their_bytes / our_bytes:.1f} x our bytes"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
