"""A trace of kernels beside our own recording of the same rank refines its device."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np

from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.inputs.foreign import import_inputs
from clusterprof.analysis.timeline.load.chunks import NodeLoader
from clusterprof.analysis.timeline.spans import StepSpans
from clusterprof.probe import layout
from clusterprof.trace.encoder import write_node
from clusterprof.trace.schema import Clock, Columns, Event, Header, Spans

MS = 1_000_000
BOOT_NS = 1_700_000_000_000 * MS  # wall clock when our node's own clock stood at 0


def recording(folder: Path, rank: int = 0) -> None:
    """A second of rank 0: at work from 0 to 250 ms and from 300 ms on, looked at every 100 ms."""
    node = {"key": "a", "hostname": "a", "display": "a", "boot_id": "b", "kernel": "6"}
    started = {"monotonic_ns": 0, "boottime_ns": 0, "realtime_ns": BOOT_NS}
    header = Header(node, started, {"mounts": []}, [{"id": "gpu0"}], {}, {}, {}, [])
    t = list(range(0, 1001, 100))
    busy = [min(at, 250) + max(0, at - 300) for at in t]
    reported = {
        "pid": 7,
        "started_ticks": 1,
        "role": "python",
        "device": "gpu0",
        "rank": rank,
        "world_size": 1,
        "node_local_rank": 0,
        "job": None,
        "variables": {},
    }
    samples = Columns(
        "gpu",
        ["gpu.busy_ns_total", "gpu.power_watts"],
        ["gpu0", "gpu0"],
        array("q", [at * MS for at in t]),
        [array("q", [at * MS for at in busy]), array("d", [300.0] * len(t))],
        [None, None],
    )
    step = Spans(
        7,
        1,
        1,
        0,
        {},
        {
            name: array("q", [value])
            for name, value in zip(
                ("start_ns", "end_ns", "kind", "a", "b", "c", "d"),
                (0, 1000 * MS, layout.STEP, 5, 2, -1, -1),
            )
        },
    )
    opening = [Clock(0, 0, BOOT_NS), Event(0, "process-registered", reported)]
    write_node(folder, header, [opening, [samples, step]])


def traced(rank: int = 0, from_ms: int = 200) -> NodeTables:
    """The same device from 200 to 400 ms on a clock of its own, 50 ms after the wall clock."""
    own_ms = from_ms + 50
    node = NodeTables("", "kineto", wall_minus_own_ns=BOOT_NS - 50 * MS)
    node.add_rank(99, rank=rank, world_size=1, device="gpu0")
    node.add_busy_time(
        "gpu0",
        np.array([own_ms, own_ms + 100]) * MS,
        np.array([own_ms + 50, own_ms + 200]) * MS,
        own_ms * MS,
        (own_ms + 200) * MS,
    )
    return node


def brought(tmp_path: Path, node: NodeTables) -> tuple[int, list[tuple[int, int]], tuple[str, ...]]:
    """How many nodes are analysed, the readings of gpu0 of the first in ms, and the notes."""
    from clusterprof.analysis.inputs.profiler_traces import merge_device_traces

    recording(tmp_path / "own")
    write_node(tmp_path / "trace", node.header(), node.records())
    (mine,), left, notes = merge_device_traces(
        [tmp_path / "own"], [tmp_path / "trace"], tmp_path / "place"
    )
    (chunk,) = NodeLoader(mine).chunks()
    series = chunk.series["gpu.busy_ns_total", "gpu0"]
    pairs = dict(zip((series.t_ns // MS).tolist(), (series.values // MS).astype(int).tolist()))
    assert chunk.series["gpu.power_watts", "gpu0"].values.tolist() == [300.0] * 11
    assert chunk.processes[7].get_spans(StepSpans).step.tolist() == [5]
    return 1 + len(left), sorted(pairs.items()), tuple(notes)


def test_device_readings_within_the_trace_come_from_the_trace(tmp_path: Path) -> None:
    nodes, readings, notes = brought(tmp_path, traced())
    assert nodes == 1
    assert readings == [
        (0, 0),
        (100, 100),
        (200, 200),
        (250, 250),
        (300, 250),
        (400, 350),
        (500, 450),
        (600, 550),
        (700, 650),
        (800, 750),
        (900, 850),
        (1000, 950),
    ]
    assert notes == (
        "rank 0: from 200.0 ms to 400.0 ms of the recording, device times are those of its imported"
        " trace",
    )


def test_trace_corrections_shift_all_later_device_readings(tmp_path: Path) -> None:
    """From 600 ms on the trace says: 50 at work, 50 idle, 100 at work; samples saw 200."""
    _, readings, _ = brought(tmp_path, traced(from_ms=600))
    assert readings[6:] == [(600, 550), (650, 600), (700, 600), (800, 700), (900, 800), (1000, 900)]


def test_a_trace_of_another_rank_or_time_refines_nothing(tmp_path: Path) -> None:
    for name, node in (("rank", traced(rank=3)), ("time", traced(from_ms=950))):
        nodes, readings, notes = brought(tmp_path / name, node)
        assert (nodes, len(readings), notes) == (2, 11, ())


def test_a_trace_given_beside_a_recording_refines_its_device(tmp_path: Path) -> None:
    recording(tmp_path / "own" / "a")
    path = tmp_path / "rank0.json"
    wall_us = BOOT_NS // 1000
    events = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": "ProfilerStep#5",
            "pid": 9,
            "tid": 9,
            "ts": wall_us + 200_000,
            "dur": 200_000,
        },
        *(
            {
                "ph": "X",
                "cat": "kernel",
                "name": "gemm",
                "pid": 0,
                "tid": 7,
                "ts": wall_us + at,
                "dur": dur,
                "args": {"device": 0, "stream": 7, "correlation": at},
            }
            for at, dur in ((200_000, 50_000), (300_000, 100_000))
        ),
    ]
    import json

    path.write_text(
        json.dumps(
            {
                "schemaVersion": 1,
                "distributedInfo": {"rank": 0, "world_size": 1},
                "traceEvents": events,
            }
        )
    )
    with import_inputs([tmp_path / "own", path]) as result:
        (folder,) = result.paths
        (chunk,) = NodeLoader(folder).chunks()
        assert 250 * MS in chunk.series["gpu.busy_ns_total", "gpu0"].t_ns.tolist()
        assert any("device times are those" in note for note in result.notes)
