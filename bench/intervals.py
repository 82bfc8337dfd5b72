"""How many intervals a second does one CPU attribute? Beside the same in plain Python, in one run.

Two million pieces of lost time against one million spans: the overlap of each piece with the spans
(`overlap_ns`), the span that contains it (`containing`), and the set operations. Then the split of
a rank's waits (`feed`) and the chunks of a recording in memory, per node-hour.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from clusterprof.analysis.timeline import intervals
from clusterprof.analysis.timeline.intervals import Intervals
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Header, Record, Rows, Spans
from tests.support.builders import build_chunks

PIECES = 2_000_000
PLAIN = 50_000
MINUTES = 6
SECOND = 1_000_000_000
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


def make_intervals(n: int, seed: int) -> Intervals:
    """n disjoint intervals with gaps."""
    edges = np.cumsum(np.random.default_rng(seed).integers(1, 1000, 2 * n))
    return Intervals(edges[0::2].copy(), edges[1::2].copy())


def compute_plain_overlap(pieces: Intervals, spans: Intervals) -> list[int]:
    """The same as `overlap_ns`, as one would write it without numpy: a merge of two lists."""
    spans_list = list(zip(spans.start_ns.tolist(), spans.end_ns.tolist()))
    first, overlaps = 0, []
    for low, high in zip(pieces.start_ns.tolist(), pieces.end_ns.tolist()):
        while first < len(spans_list) and spans_list[first][1] <= low:
            first += 1
        at, covered = first, 0
        while at < len(spans_list) and spans_list[at][0] < high:
            covered += min(high, spans_list[at][1]) - max(low, spans_list[at][0])
            at += 1
        overlaps.append(covered)
    return overlaps


def measure_cpu_s(do: Callable[[], object], rounds: int = 5) -> float:
    """Least CPU time of a few rounds: the machine is shared."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        do()
        best = min(best, time.process_time() - began)
    return best


def make_node(minutes: int) -> Iterator[Record]:
    """8 ranks with 200 spans a second, 160 metrics and 40 threads at 10 Hz."""
    yield Header({"key": "n"}, {"monotonic_ns": 0}, {"mounts": []}, [], {}, {}, {}, [])
    ticks = np.arange(10, dtype=np.int64) * (SECOND // 10)
    start = np.arange(200, dtype=np.int64) * 5_000_000
    names = tuple(f"s{i}_ns_total" for i in range(16))
    tids = np.tile(1000 + np.arange(40), 10)
    for second in range(minutes * 60):
        base = second * SECOND
        values = dict.fromkeys(SPAN_FIELDS, start)
        values.update(start_ns=base + start, end_ns=base + start + 4_000_000, kind=start % 4 + 1)
        for rank in range(8):
            yield Spans(100 + rank, 1, second * 200 + 1, 0, {}, values)
        for collector in range(10):
            none = (None,) * 16
            yield Columns(str(collector), names, ("",) * 16, base + ticks, (ticks,) * 16, none)
        rest = [tids] * (len(THREAD_NAMES) - 3)
        yield Rows("threads", THREAD_NAMES, [np.repeat(base + ticks, 40), tids % 8, tids, *rest])


def main() -> None:
    """Print one line per operation, then the load of a node-hour."""
    pieces, spans = make_intervals(PIECES, 1), make_intervals(PIECES // 2, 2)
    few = Intervals(*(column[:PLAIN] for column in pieces))
    fewer = Intervals(*(column[: PLAIN // 2] for column in spans))
    assert compute_plain_overlap(few, fewer) == intervals.measure_overlap(few, fewer).tolist()
    plain = 1.5 * PLAIN / measure_cpu_s(lambda: compute_plain_overlap(few, fewer), 3)
    print(f"plain Python overlap      {plain / 1e6:6.2f} M intervals per CPU-s")
    total = len(pieces.start_ns) + len(spans.start_ns)
    for name, do in (
        ("overlap_ns", lambda: intervals.measure_overlap(pieces, spans)),
        ("containing", lambda: intervals.find_containing(pieces.start_ns, spans)),
        ("intersect", lambda: intervals.find_intersection(pieces, spans)),
        ("subtract", lambda: intervals.subtract_intervals(pieces, spans)),
        ("union", lambda: intervals.merge_intervals(pieces, spans)),
    ):
        speed = total / measure_cpu_s(do)
        print(f"{name:<26}{speed / 1e6:6.2f} M intervals per CPU-s  {speed / plain:5.1f} × plain")
    records = list(make_node(MINUTES))
    began = time.process_time()
    for _chunk in build_chunks(records):
        pass
    hour = (time.process_time() - began) * 60 / MINUTES
    print(f"chunks of a node-hour     {hour:6.2f} CPU-s, without reading the file")


if __name__ == "__main__":
    main()
