"""What does writing cost? CPU, bytes and bytes per number, beside JSON lines in the same run.

    python bench/write_path.py [seconds]

The load (`_write_load.py`): per second 8 ranks x 200 spans and 160 metrics at 10 Hz of 8
accelerators and one host, made before the clock starts. All writers get the same records and
write to the same file system; CPU is user + system time of this process. JSON lines are written
once by the standard library and once by msgspec, the fastest available.
"""

from __future__ import annotations

import json
import platform
import resource
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

import msgspec
from _write_load import HERTZ, RANKS, SECOND_NS, SPANS_PER_SECOND, Host, Rank

from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Columns, Header, Record, Spans
from clusterprof.trace.segments import is_segment
from clusterprof.trace.writer import RecordingWriter

STRETCH = 10  # seconds that one contender writes before the next one's turn


class JsonLines:
    """The same records the way most tools write them: a line per tick and per span."""

    def __init__(self, path: Path, encode: Callable[[object], bytes]) -> None:
        self._file = path.open("wb")
        self._encode = encode

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
        self._file.write(self._encode(value) + b"\n")


def read_cpu_s() -> float:
    """CPU time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class WriteMethod:
    """One way of writing, measured stretch by stretch so that noise meets all alike."""

    def __init__(self, append: Callable[..., None], close: Callable[[], None], path: Path) -> None:
        self._append = append
        self.close = close
        self._path = path
        self._costs: list[float] = []

    def write(self, stretch: list[list[Record]]) -> None:
        """Write a stretch of seconds and remember what a second cost."""
        before = read_cpu_s()
        for second in stretch:
            self._append(*second)
        self._costs.append((read_cpu_s() - before) / len(stretch))

    @property
    def ms_per_second(self) -> float:
        """CPU milliseconds per recorded second: the median stretch."""
        return 1e3 * statistics.median(self._costs)

    @property
    def bytes_written(self) -> int:
        """Bytes on disk."""
        if self._path.is_file():
            return self._path.stat().st_size
        return sum(path.stat().st_size for path in self._path.iterdir() if is_segment(path.name))


def make_recorder(folder: Path, wanted: tuple[type, ...], one_by_one: bool = False) -> WriteMethod:
    """Return our writer, fed with records of some kinds."""
    ticks = iter(range(1 << 62))
    header = Header({"key": "bench"}, {}, {}, [], {}, {}, {}, [])
    writer = RecordingWriter(
        folder, header, lambda: Clock(next(ticks) * 1_000_000, 0, 0), keep_free_bytes=0
    )

    def append(*records: Record) -> None:
        chosen = [record for record in records if isinstance(record, wanted)]
        if one_by_one:
            for record in chosen:
                writer.append(record)
        else:
            writer.append(*chosen)

    return WriteMethod(append, writer.close, folder)


def make_json_writer(path: Path, encode: Callable[[object], bytes]) -> WriteMethod:
    """Return a writer of JSON lines."""
    lines = JsonLines(path, encode)
    return WriteMethod(lines.append, lines.close, path)


def list_methods(folder: Path) -> dict[str, WriteMethod]:
    """Return everything that is compared."""
    plain = json.JSONEncoder(separators=(",", ":")).encode
    return {
        "all": make_recorder(folder / "all", (Columns, Spans)),
        "columns": make_recorder(folder / "columns", (Columns,)),
        "spans": make_recorder(folder / "spans", (Spans,)),
        "single": make_recorder(folder / "single", (Columns, Spans), one_by_one=True),
        "json": make_json_writer(folder / "plain.jsonl", lambda value: plain(value).encode()),
        "msgspec": make_json_writer(folder / "quick.jsonl", msgspec.json.Encoder().encode),
    }


def main(seconds: int = 120) -> None:
    """Measure and print."""
    ranks = [Rank(number, 5_000 * SECOND_NS) for number in range(RANKS)]
    host = Host(5_000 * SECOND_NS)
    load: list[list[Record]] = [
        [*host.second(), *(rank.second() for rank in ranks)] for _ in range(seconds)
    ]
    metrics = sum(len(record.values) for record in load[0] if isinstance(record, Columns))
    folder = Path(tempfile.mkdtemp(prefix="clusterprof-bench-"))
    try:
        ways = list_methods(folder)
        for first in range(0, seconds, STRETCH):
            for way in ways.values():
                way.write(load[first : first + STRETCH])
        for way in ways.values():
            way.close()
        before = read_cpu_s()
        records = sum(1 for _ in NodeReader(folder / "all"))
        reading = 1e3 * (read_cpu_s() - before) / seconds
        print(
            f"{date.today()}  Python {platform.python_version()}  {platform.machine()}  "
            f"{seconds} s, {metrics} metrics at {HERTZ} Hz, {RANKS} x {SPANS_PER_SECOND} spans/s"
        )
        print_results(ways, seconds, metrics)
        print(f"reading           {reading:7.3f} CPU ms/s  {records} records")
    finally:
        shutil.rmtree(folder)


def print_results(ways: dict[str, WriteMethod], seconds: int, metrics: int) -> None:
    """Print what each way cost, and each of them beside ours."""
    ours = ways["all"]
    titles = {
        "all": "write path",
        "single": "one record a call",
        "json": "JSON lines, json",
        "msgspec": "JSON lines, msgspec",
    }
    for name, title in titles.items():
        way = ways[name]
        print(
            f"{title:<19} {way.ms_per_second:6.3f} CPU ms/s "
            f"{way.bytes_written / seconds / 1e3:7.2f}"
            f" kB/s   {way.ms_per_second / ours.ms_per_second:5.2f} x CPU, "
            f"{way.bytes_written / ours.bytes_written:5.2f} x bytes"
        )
    per_value = ways["columns"].bytes_written / (metrics * HERTZ * seconds)
    per_span = ways["spans"].bytes_written / (RANKS * SPANS_PER_SECOND * seconds)
    print(f"columns           {per_value:7.2f} B/value   {ways['columns'].ms_per_second:.3f} ms/s")
    print(f"spans             {per_span:7.2f} B/span    {ways['spans'].ms_per_second:.3f} ms/s")
    print("targets             0.600 CPU ms/s   20.50 kB/s (aim 17.40), 2 B/value, 10 B/span")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
