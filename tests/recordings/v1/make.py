"""Made the recording beside it, once, on the day schema 1 was fixed; kept to say what is in it.

Never run it again for v1: the bytes in `node-1-0badcafe-5` must read the same for ever, whatever
becomes of the writer. A new schema gets a folder of its own.

    python tests/recordings/v1/make.py NEW_FOLDER
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

from clusterprof.trace.dump import export_records
from clusterprof.trace.schema import (SPAN_FIELDS, Clock, Columns, Event, Gap, Header, Record, Rows, Spans,)
from clusterprof.trace.writer import RecordingWriter

HEADER = Header(
    node={"key": "node-1-0badcafe-5", "hostname": "node-1", "boot_id": "0badcafe", "kernel": "6.1"},
    started={"monotonic_ns": 5_000_000_000, "boottime_ns": 5_000_000_001, "realtime_ns": 17},
    host={"cpus": 2, "memory_bytes": 1 << 34, "disks": [{"name": "vda"}], "nics": [], "mounts": []},
    devices=[{"id": "emulated-0", "vendor": "emulated", "emulated": True}],
    launcher={"job": "77", "variables": {"RANK": "0", "WORLD_SIZE": "1"}},
    versions={"clusterprof": "0.1.0", "schema": "1"},
    profile={"sampling": {"hz": 10}},
    collectors=[{"name": "everything", "interval_ns": 100_000_000, "status": "ok"}],
)


def everything(second: int) -> list[Record]:
    """One second with every way of storing: whole, µs, ms, ticks, KiB, thousandths, floats."""
    start = (5 + second) * 1_000_000_000
    values = {
        "whole": array("q", [second, -(2**63), 2**63 - 1]),
        "micro": array("q", [1_000 * second, 2_000, 5_000]),
        "milli": array("q", [1_000_000 * second, 7_000_000, 9_000_000]),
        "ticks": array("q", [10_000_000 * second, 10_000_000, 30_000_000]),
        "kib": array("q", [1024 * (4 + second), 5 * 1024, 3 * 1024]),
        "ratio": array("d", [0.07, 0.5 + second / 100, 1.0]),
        "float": array("d", [float("nan"), -0.0, 1 / 3]),
        "gone": array("q", [0, 0, 0]),
        "sometimes": array("q", [1, 0, 3]),
    }
    t_ns = array("q", [start, start + 100_000_123, start + 199_999_877])
    masks = [{"gone": b"\1\1\1", "sometimes": b"\0\1\0"}.get(name) for name in values]
    columns = Columns("everything", tuple(values), ("", "vda", "", "cpu0", "", "emulated-0", "",
                                                    "", ""), t_ns, tuple(values.values()), masks)
    slow = Columns("slow", ("one",), ("",), array("q", [start]), (array("q", [42]),), (None,))
    rows = Rows(
        "threads",
        ("t_ns", "pid", "tid", "wchan"),
        (array("q", [start] * 2 + [start + 100_000_000] * 2), array("q", [70] * 4),
         array("q", [70, 71, 70, 71]), array("q", [-1, 0, -1, 1])),
        {"wchan": ("folio_wait_bit_common", "futex_wait_queue")},
    )
    spans = {name: array("q") for name in SPAN_FIELDS}
    for row in ((start, start + 5_000_000, 1, second, 71, 2, 0),
                (start + 5_000_200, start + 9_000_000, 9, 0, 0, 0, 0),
                (start, start + 9_000_300, 3, second, 0, 0, 0)):
        for name, value in zip(SPAN_FIELDS, row):
            spans[name].append(value)
    return [columns, slow, rows, Spans(70, 123, 1 + 3 * second, second, {64: "tokenise"}, spans),
            Spans(71, 124, 1, 0, {}, {name: array("q") for name in SPAN_FIELDS})]


def main(folder: Path) -> None:
    """Write two segments of three seconds."""
    now = iter(range(5_000_000_000, 1 << 62, 1_000_000_000))

    def clock() -> Clock:
        monotonic = next(now)
        return Clock(monotonic, monotonic + 1, monotonic + 1_700_000_000_000_000_000)

    event = Event(5, "process-registered", {"pid": 70, "role": "python", "variables": {}})
    gap = Gap(6, "gpu_nvidia", "", "", "absent", "no NVIDIA driver", "nothing to do")
    for seconds in ([0, 1], [2]):
        writer = RecordingWriter(folder / HEADER.node["key"], HEADER, clock, keep_free_bytes=0)
        for second in seconds:
            writer.append(event, gap, *everything(second))
        writer.close()
    (folder / "expected.jsonl").write_text("\n".join(export_records(folder)) + "\n", encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
