"""The load that bench/write_path.py records: ranks with spans, a host with metrics.

Not a bench itself: files that begin with an underscore are not run.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate

from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Spans

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
        self._spans = self._iterate_spans()

    def second(self) -> Spans:
        """Return the next 200 spans."""
        rows = [next(self._spans) for _ in range(SPANS_PER_SECOND)]
        columns = {name: array("q", column) for name, column in zip(SPAN_FIELDS, zip(*rows))}
        first = self._sequence
        self._sequence += len(rows)
        return Spans(self._pid, 8_812_345 + self._pid, first, 0, {}, columns)

    def _iterate_spans(self) -> Iterator[tuple[int, ...]]:
        while True:
            step_start_ns = self._now_ns
            for kind, mean_ns in STEP_SPANS[:-2]:
                self._now_ns += 2_000 + int(self._random.expovariate(1 / 6_000))
                start_ns = self._now_ns
                self._now_ns += int(self._random.gauss(mean_ns, mean_ns / 8))
                yield start_ns, self._now_ns, kind, *self._draw_values(kind)
                if kind == layout.DATA_WAIT:
                    wait = (start_ns, self._now_ns)
            sequence = self._sequence + 6
            yield *wait, layout.EXPOSED, sequence, self._random.randrange(4_000_000), 0, 0
            self._now_ns += 3_000 + int(self._random.expovariate(1 / 3_000))
            yield step_start_ns, self._now_ns, layout.STEP, self._step, 0, 0, 0
            self._step += 1

    def _draw_values(self, kind: int) -> tuple[int, int, int, int]:
        if kind == layout.DATA_WAIT:
            return self._step, self._pid + 1 + self._step % 8, 8, 0
        if kind == layout.H2D:
            return 38_535_168, 1, 0, 0
        return 0, 0, 0, 0


# How values behave between two ticks, 100 ms apart. Counters: what is added; gauges: the value.
BEHAVIOR: dict[str, Callable[[random.Random], float]] = {
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
GAUGES = set(list(BEHAVIOR)[list(BEHAVIOR).index("KB/s") :])
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
        return [self._make_collector(ticks, *line) for line in self.PLAN]

    def _make_collector(
        self, ticks: list[int], name: str, devices: list[str], metrics: dict[str, str]
    ) -> Columns:
        t_ns = array("q", [tick + 50_000 + self._random.randrange(80_000) for tick in ticks])
        plan = [(device, metric) for device in devices for metric in metrics]
        values = [
            self._make_column(name, device, metric, metrics[metric]) for device, metric in plan
        ]
        signals = tuple(f"{name}.{metric}_total" for _, metric in plan)
        owners = tuple(device for device, _ in plan)
        return Columns(name, signals, owners, t_ns, values, [None] * len(values))

    def _make_column(self, name: str, device: str, metric: str, behavior: str) -> array:
        key = (name, device, metric)
        draw = BEHAVIOR[behavior]
        values = [draw(self._random) for _ in range(HERTZ)]
        if behavior not in GAUGES:
            if key not in self._totals:  # up for a week or so
                self._totals[key] = 100_000 * sum(draw(self._random) for _ in range(60))
            total = self._totals[key]
            values = [round(value, 3) for value in accumulate(values, initial=total)]
            self._totals[key] = values.pop()
        return array("d" if behavior in FLOATS else "q", values)
