"""Made the recording beside it: eight ranks on two nodes, 40 steps as a recommendation model has.

Embeddings are exchanged (all_to_all, forward and backward), the layers' gradients reduced
(all_reduce). Microseconds of each step, all ranks alike but for three:

    0 work, exchange from 1,000 | leave 8,900     rank 7 collects garbage from 500 to 8,100: at 8,600
    work, exchange from 10,900 | leave 11,700     rank 5 copies from 9,000 to 9,500: at 11,400
    work, reduce from 12,700 | leave 13,000       rank 4 copies from 12,000 to 12,200: at 12,900
    work, reduce from 14,000 | leave 14,100       all come together: nothing but transfer
    work until 15,000

The nodes booted days apart, and the wall clock of the second is 2 s ahead.
tests/scenarios/test_dlrm.py says what an analysis must find, by hand.

    python tests/recordings/dlrm-8rank/make.py NEW_FOLDER
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Event, Header, Record, Spans
from clusterprof.trace.writer import RecordingWriter

STEPS, STEP_US = 40, 15_000
BEGIN_US = 1_000_000
GROUP, RANKS = 4711, range(8)
EXCHANGE, REDUCE = layout.ALL_TO_ALL, layout.ALL_REDUCE
# (what, bytes, the others arrive, leave), then (who is late, why, from, to, arrives)
OPERATIONS = (
    ((EXCHANGE, 2 << 20, 1_000, 8_900), (7, layout.GC, 500, 8_100, 8_600)),
    ((EXCHANGE, 2 << 20, 10_900, 11_700), (5, layout.H2D, 9_000, 9_500, 11_400)),
    ((REDUCE, 4 << 20, 12_700, 13_000), (4, layout.H2D, 12_000, 12_200, 12_900)),
    ((REDUCE, 1 << 20, 14_000, 14_100), None),
)
# Name, monotonic clock when the recording began, wall clock ahead of the true time.
NODES = (("gpu-a", 5_000_000_000_000, 0), ("gpu-b", 123_456_000_000_000, 2_000_000_000))
TRUE_NS = 1_767_225_600_000_000_000


def spans_of(rank: int) -> list[tuple[int, ...]]:
    """Return (start_us, end_us, kind, a, b, c, d) since the recording began."""
    rows = []
    for step in range(STEPS):
        at = BEGIN_US + step * STEP_US
        for number, ((what, size, come, leave), late) in enumerate(OPERATIONS):
            if late is not None and late[0] == rank:
                _, kind, low, high, come = late
                rows.append((at + low, at + high, kind, 0, 0, 0, 0))
            sequence = step * len(OPERATIONS) + number
            rows.append((at + come, at + leave, layout.COLLECTIVE, GROUP, sequence, size, what))
        rows.append((at, at + STEP_US, layout.STEP, step, 0, 0, 0))
    return rows


def records(node: int, started_ns: int) -> list[Record]:
    """Return what four ranks said."""
    out: list[Record] = []
    for rank in RANKS[4 * node : 4 * node + 4]:
        pid = 100 + rank
        variables = {"RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_RANK": str(rank % 4),
                     "TORCHELASTIC_RUN_ID": "dlrm"}
        identity = {"pid": pid, "started_ticks": pid, "role": "python", "rank": rank,
                    "world_size": 8, "node_local_rank": rank % 4, "variables": variables}
        out.append(Event(started_ns, "process-registered", identity))
        group = {"pid": pid, "group": GROUP, "ranks": list(RANKS)}
        out.append(Event(started_ns, "group-announced", group))
        rows = [(started_ns + 1000 * s, started_ns + 1000 * e, *rest)
                for s, e, *rest in spans_of(rank)]
        columns = {name: array("q", column) for name, column in zip(SPAN_FIELDS, zip(*rows))}
        out.append(Spans(pid, pid, 1, 0, {}, columns))
    return out


def main(folder: Path) -> None:
    """Write a folder per node."""
    for number, (name, started_ns, ahead_ns) in enumerate(NODES):
        key = f"{name}-{number}badcafe-5"
        header = Header(
            node={"key": key, "hostname": name, "boot_id": f"{number}badcafe", "kernel": "6.1"},
            started={"monotonic_ns": started_ns, "boottime_ns": started_ns,
                     "realtime_ns": TRUE_NS + ahead_ns},
            host={"cpus": 32, "memory_bytes": 1 << 38, "disks": [], "nics": [], "mounts": []},
            devices=[],
            launcher={"job": "dlrm", "variables": {}},
            versions={"clusterprof": "0.1.0", "schema": "1"},
            profile={},
            collectors=[],
        )
        now = iter((started_ns, started_ns + 2_000_000_000))

        def clock() -> Clock:
            at = next(now, started_ns + 2_000_000_000)
            return Clock(at, at, at - started_ns + TRUE_NS + ahead_ns)

        writer = RecordingWriter(folder / key, header, clock, keep_free_bytes=0)
        writer.append(*records(number, started_ns))
        writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
