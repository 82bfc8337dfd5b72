"""Write one node of a simulated cluster as its recorder would have, by the real writer.

A minute of the run at a time: memory does not grow with its length. Every second come the spans of
all processes, ten samples of the metrics and ten of the threads. The clocks of nodes begin at
different times and run alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clusterprof.probe.hooks.process_groups import compute_group_number
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Event, Header, Record, Spans
from clusterprof.trace.writer import RecordingWriter
from clusterprof_lab.cluster.metrics import DISK, PORT, Metrics, cut_metrics
from clusterprof_lab.cluster.plan import SECOND_NS, ClusterPlan
from clusterprof_lab.cluster.schedule import Schedule
from clusterprof_lab.cluster.spans import build_rank_spans, build_worker_spans, number_groups
from clusterprof_lab.cluster.threads import Threads, cut_threads
from clusterprof_lab.cluster.window import NodeWindow, find_members, get_pid, get_worker_pid
from clusterprof_lab.synth.record import EPOCH_NS

Int = NDArray[np.int64]

WINDOW_S = 60
JOB = "cluster"
_CLOCK_S = 10
_TAIL_S = 1
"""From the end of the last step to the end of the recording, at least."""
_UPTIME_S = 100_000, 900_000
"""Least and most that a node has been up."""


def get_node_name(node: int) -> str:
    """Return the name of a node, which its recording has, too."""
    return f"node-{node:05d}"


def record_node(plan: ClusterPlan, schedule: Schedule, node: int, folder: Path) -> int:
    """Write a node's recording below a folder; return its size in bytes."""
    name = get_node_name(node)
    uptime = np.random.default_rng([plan.seed, node]).integers(*_UPTIME_S)
    clock_ns = int(uptime) * SECOND_NS
    now = [clock_ns]

    def read_clock() -> Clock:
        return Clock(now[0], now[0], EPOCH_NS + now[0] - clock_ns)

    path = folder / name
    writer = RecordingWriter(
        path, _make_header(plan, name, clock_ns), read_clock, keep_free_bytes=0
    )
    writer.append(*_list_events(plan, node, clock_ns))
    for batch, until_ns in _list_seconds(plan, schedule, node, clock_ns):
        now[0] = until_ns
        if (until_ns - clock_ns) // SECOND_NS % _CLOCK_S == 0:
            batch.append(read_clock())
        writer.append(*batch)
    stopped = Event(now[0], "recorder-stopped", {"reason": "no process is left", "pid": 99})
    writer.append(stopped, read_clock())
    writer.close()
    return sum(segment.stat().st_size for segment in path.iterdir())


def _list_seconds(
    plan: ClusterPlan, schedule: Schedule, node: int, clock_ns: int
) -> Iterator[tuple[list[Record], int]]:
    """List the records of each second, and when it ends on the node's clock, ns."""
    metrics, threads = Metrics(plan, node), Threads(plan)
    sequences: dict[int, int] = {}
    ranks = range(node * plan.per_node, (node + 1) * plan.per_node)
    groups = [number_groups(plan, rank) for rank in ranks]
    times = schedule.read_node(node)
    end_s = int(schedule.end_ns[-1]) // SECOND_NS + 1 + _TAIL_S
    for first_s in range(0, end_s, WINDOW_S):
        last_s = min(first_s + WINDOW_S, end_s)
        window = NodeWindow(plan, schedule, node, times, first_s * SECOND_NS, last_s * SECOND_NS)
        spans = [(get_pid(i), build_rank_spans(window, i, groups[i])) for i in range(plan.per_node)]
        spans += [(get_worker_pid(*key), build_worker_spans(window, *key)) for key in window.pieces]
        values = metrics.sample(window)
        rows = threads.sample(window, metrics.idle_ns) if plan.threads else None
        for second in range(last_s - first_s):
            until_ns = (first_s + second + 1) * SECOND_NS
            batch: list[Record] = [*_cut_spans(spans, until_ns, sequences, clock_ns)]
            batch.append(cut_metrics(values, window, second, clock_ns))
            if rows is not None:
                batch.append(cut_threads(rows, second, clock_ns))
            yield batch, clock_ns + until_ns


def _make_header(plan: ClusterPlan, name: str, clock_ns: int) -> Header:
    return Header(
        {"key": name, "hostname": name, "display": name, "boot_id": f"boot-{name}", "kernel": "6"},
        {"monotonic_ns": clock_ns, "boottime_ns": clock_ns, "realtime_ns": EPOCH_NS},
        {
            "hcas": [{"name": PORT.split("/")[0]}],
            "disks": [{"name": DISK, "size_bytes": 1 << 40, "rotational": False}],
        },
        [{"id": f"gpu-{i}", "vendor": "nvidia", "name": "synthetic"} for i in range(plan.per_node)],
        {"job": JOB, "named": True, "variables": {"TORCHELASTIC_RUN_ID": JOB}},
        {},
        {},
        [],
    )


def _list_events(plan: ClusterPlan, node: int, clock_ns: int) -> Iterator[Event]:
    """List registrations and, of every rank as the probe announces them, its process groups."""
    scopes = {op.scope for op in plan.operations}
    numbers: dict[tuple[int, ...], int] = {}
    for local in range(plan.per_node):
        rank = node * plan.per_node + local
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(plan.ranks),
            "LOCAL_WORLD_SIZE": str(plan.per_node),
            "GROUP_RANK": str(node),
            "TORCHELASTIC_RUN_ID": JOB,
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        who = {
            "pid": get_pid(local),
            "started_ticks": 1,
            "role": "python",
            "device": f"gpu-{local}",
        }
        yield Event(clock_ns, "process-registered", {**who, "variables": variables})
        for scope, members in find_members(plan, rank).items():
            if scope in scopes:
                if members not in numbers:
                    numbers[members] = compute_group_number(members)
                group = {"pid": get_pid(local), "group": numbers[members], "ranks": list(members)}
                yield Event(clock_ns, "group-announced", group)


def _cut_spans(
    spans: list[tuple[int, Int]], until_ns: int, sequences: dict[int, int], clock_ns: int
) -> Iterator[Spans]:
    """Cut off the spans that ended up to a time, and put them on the node's clock; all in ns."""
    for number, (pid, table) in enumerate(spans):
        count = int(np.searchsorted(table[1], until_ns))
        if count:
            first = sequences.get(pid, 1)
            sequences[pid] = first + count
            part = table[:, :count].copy()
            part[:2] += clock_ns
            columns = {name: array("q", part[i].tobytes()) for i, name in enumerate(SPAN_FIELDS)}
            yield Spans(pid, 1, first, 0, {}, columns)
            spans[number] = pid, table[:, count:]
