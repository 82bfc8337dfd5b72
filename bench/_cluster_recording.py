"""Recordings of a job of many nodes: the real writer writes one node, the others are copies of it.

8 ranks a node, 4 steps a second of 50 spans each: a data wait, a copy, forward and backward, an
all-reduce within the node, three over all ranks, the optimizer, and the fetch of a dataloader
worker. All ranks leave the operations over all ranks at the same time; the time each works before
them is drawn at random, and rank 3 of node 0 waits 20 ms more for data in every step. The copies
have their own ranks, group members, name and identity.
"""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from clusterprof.probe import layout
from clusterprof.signals import CATALOG
from clusterprof.trace.encoder import Encoder
from clusterprof.trace.frame import HEAD_BYTES, KIND_EVENT, KIND_HEADER, read_payload_length
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Columns, Event, Header, Record, Spans
from clusterprof.trace.writer import RecordingWriter

RANKS = 8
STEPS = 4  # a second
HZ = 10
MS = 1_000_000
SECOND = 1_000 * MS
STEP_NS = SECOND // STEPS
MODULES = 20  # spans of forward, and as many of backward
LATE_RANK, LATE_NS = 3, 20 * MS
WORLD_LEAVES = (180 * MS, 210 * MS, 240 * MS)
WORLD_GROUP, NODE_GROUP = 1001, 2001
SPANS = (layout.DATA_WAIT, layout.H2D, layout.OPTIMIZER, layout.STEP)
SPANS_A_STEP = 1 + len(SPANS) + 2 * MODULES + 1 + len(WORLD_LEAVES)
OPERATIONS_A_STEP = 1 + len(WORLD_LEAVES)


def write_node(path: Path, seconds: int, late: bool) -> None:
    """Write one node; `late` says whether its rank 3 is the late one."""
    now = [0]
    writer = RecordingWriter(
        path, make_header(0), lambda: Clock(now[0], now[0], now[0]), keep_free_bytes=0
    )
    writer.append(*make_registrations(0, RANKS))
    noise = np.random.default_rng(7 if late else 11)
    state = np.zeros(len(COLUMNS)), np.zeros(RANKS)
    for second in range(seconds):
        now[0] = (second + 1) * SECOND
        tables, idle_ns = _draw_second(second, noise, late)
        writer.append(*_make_samples(second, noise, idle_ns, *state), *_make_spans(second, tables))
    writer.close()


def copy_node(
    source: Path, target: Path, node: int, world: int, apart_ns: int = 3600 * SECOND
) -> None:
    """Copy a node's recording as that of another node: its header and events are that node's.

    apart_ns: how far the clock of a node is ahead of that of the node before.
    """
    target.mkdir(mode=0o700)
    encoder = Encoder()
    events = b"".join(encoder.frames(make_registrations(node * RANKS, world)))
    head = b"".join(encoder.frames([make_header(node, apart_ns)]))
    for segment in sorted(source.iterdir()):
        data, out, at, events_due = segment.read_bytes(), [], 0, segment.name == "000001.cpf"
        while at < len(data):
            size = read_payload_length(data, at)
            assert size is not None
            end = at + HEAD_BYTES + size
            kind = data[at + 12]
            if kind == KIND_HEADER:
                out.append(head)
            elif kind != KIND_EVENT:
                out.append(data[at:end])
            elif events_due:
                out.append(events)
                events_due = False
            at = end
        (target / segment.name).write_bytes(b"".join(out))


def write_job(
    folder: Path, nodes: int, plain: Path, late: Path, apart_ns: int = 3600 * SECOND
) -> int:
    """Put a job of nodes together; return its size in bytes."""
    world = nodes * RANKS
    for node in range(nodes):
        source = plain if node else late
        copy_node(source, folder / f"node-{node:03d}", node, world, apart_ns)
    return sum(path.stat().st_size for path in folder.rglob("*.cpf"))


def remove_job(folder: Path) -> None:
    """Remove a job."""
    shutil.rmtree(folder)


def make_header(node: int, apart_ns: int = 3600 * SECOND) -> Header:
    """Return the header of a node."""
    name = f"node-{node:03d}"
    return Header(
        {"key": name, "hostname": name, "display": name, "boot_id": f"b{node}", "kernel": "6"},
        {"monotonic_ns": 0, "boottime_ns": 0, "realtime_ns": node * apart_ns},
        {},
        [{"id": f"gpu-{rank}"} for rank in range(RANKS)],
        {"variables": {}},
        {},
        {},
        [],
    )


def make_registrations(first: int, world: int) -> list[Event]:
    """Return the events of a node whose ranks begin at `first`."""
    out = []
    for rank in range(RANKS):
        variables = {
            "RANK": str(first + rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "TORCHELASTIC_RUN_ID": "bench",
        }
        who = {"pid": 100 + rank, "started_ticks": 1, "role": "python", "device": f"gpu-{rank}"}
        out.append(Event(0, "process-registered", {**who, "variables": variables}))
    groups = ((WORLD_GROUP, range(world)), (NODE_GROUP, range(first, first + RANKS)))
    for group, ranks in groups:
        announcement = {"pid": 100, "group": group, "ranks": list(ranks)}
        out.append(Event(0, "group-announced", announcement))
    return out


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
_BUSY = [i for i, (name, _) in enumerate(COLUMNS) if name == "gpu.busy_ns_total"]


def _draw_second(
    second: int, noise: np.random.Generator, late: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return int64[ranks, fields, rows] of one second's spans, and the idle time of each tenth."""
    steps = second * STEPS + np.arange(STEPS)
    at = np.repeat(steps[None, :] * STEP_NS, RANKS, axis=0)
    wait = 5 * MS + noise.integers(0, 2 * MS, at.shape)
    if late:
        wait[LATE_RANK] += LATE_NS
    copy = wait + MS
    half = copy + 50 * MS + noise.integers(0, 2 * MS, at.shape)
    local = np.repeat(half.max(axis=0)[None, :] + MS, RANKS, axis=0)
    rows = [(layout.DATA_WAIT, 0 * wait, wait), (layout.H2D, wait, copy)]
    rows += _make_module_spans(layout.FORWARD, copy, half)
    rows.append((layout.COLLECTIVE, half, local))
    idle = wait + local - half
    come = np.minimum(half + 70 * MS + noise.integers(0, 2 * MS, at.shape), WORLD_LEAVES[0] - MS)
    rows += _make_module_spans(layout.BACKWARD, local, come)
    for leave in WORLD_LEAVES:
        rows.append((layout.COLLECTIVE, come, 0 * wait + leave))
        idle += leave - come
        come = leave + 15 * MS + noise.integers(0, 10 * MS, at.shape)
    rows += [
        (layout.OPTIMIZER, 0 * wait + 241 * MS, 0 * wait + 249 * MS),
        (layout.STEP, 0 * wait, 0 * wait + STEP_NS),
    ]
    fields = np.zeros((RANKS, len(SPAN_FIELDS), STEPS, len(rows)), np.int64)
    world = 0
    for column, (kind, begin, end) in enumerate(rows):
        fields[:, 0, :, column], fields[:, 1, :, column] = at + begin, at + end
        fields[:, 2, :, column], fields[:, 3, :, column] = kind, steps
        if kind == layout.DATA_WAIT:
            fields[:, 4, :, column] = 200 + np.arange(RANKS)[:, None]
            fields[:, 5, :, column] = 1
        if kind == layout.COLLECTIVE:
            own = end is local
            fields[:, 3, :, column] = NODE_GROUP if own else WORLD_GROUP
            fields[:, 4, :, column] = steps if own else steps * len(WORLD_LEAVES) + world
            fields[:, 5, :, column] = 25 << 20
            fields[:, 6, :, column] = layout.ALL_REDUCE
            world += not own
    share = np.repeat(idle.sum(axis=1)[:, None] / HZ, HZ, axis=1)
    return fields.reshape(RANKS, len(SPAN_FIELDS), -1), share


def _make_module_spans(kind: int, begin: np.ndarray, end: np.ndarray) -> list[tuple]:
    edges = [begin + (end - begin) * n // MODULES for n in range(MODULES + 1)]
    return [(kind, low, high) for low, high in pairwise(edges)]


def _make_samples(
    second: int,
    noise: np.random.Generator,
    idle_ns: np.ndarray,
    totals: np.ndarray,
    idle: np.ndarray,
) -> Iterator[Record]:
    t = second * SECOND + np.arange(HZ) * (SECOND // HZ)
    values = totals + np.cumsum(noise.integers(0, 1 << 20, (HZ, len(COLUMNS))), axis=0)
    totals[:] = values[-1]
    spent = idle[:, None] + np.cumsum(idle_ns, axis=1) - idle_ns
    idle += idle_ns.sum(axis=1)
    values[:, _BUSY] = (t[None, :] - spent).T
    columns = [array("q", values[:, i].astype(np.int64).tobytes()) for i in range(len(COLUMNS))]
    names, devices = [name for name, _ in COLUMNS], [device for _, device in COLUMNS]
    yield Columns("all", names, devices, array("q", t.tobytes()), columns, [None] * len(COLUMNS))


def _make_spans(second: int, tables: np.ndarray) -> Iterator[Record]:
    for rank, table in enumerate(tables):
        order = np.argsort(table[1], kind="stable")
        yield _make_record(100 + rank, second, table[:, order])
        waits = table[:, table[2] == layout.DATA_WAIT]
        fetch = np.zeros_like(waits)
        fetch[0], fetch[1] = np.maximum(waits[1] - 100 * MS, 0), waits[1] - 100_000
        fetch[2], fetch[3], fetch[4], fetch[6] = layout.FETCH, 8, 60 * MS, 1 << 20
        yield _make_record(200 + rank, second, fetch)


def _make_record(pid: int, second: int, table: np.ndarray) -> Spans:
    columns = {name: array("q", table[i].tobytes()) for i, name in enumerate(SPAN_FIELDS)}
    return Spans(pid, 1, 1 + second * table.shape[1], 0, {}, columns)
