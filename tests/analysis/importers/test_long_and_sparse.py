"""Records of what lies far apart, waits of many hours, jobs that do nothing but wait."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from clusterprof.analysis.importers.core.base import Account
from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.metrics.gpu_tables import GpuTables
from clusterprof.analysis.pipeline import analyze_with_details
from clusterprof.probe import layout
from clusterprof.trace.schema import Columns, Spans

S = 1_000_000_000
HOUR_S = 3600


def rows_by_segment(node: NodeTables) -> list[list[tuple[object, ...]]]:
    """What stands in each stretch of a node's records: series by time, spans by their end."""
    collected = []
    for batch in list(node.records())[1:-1]:
        here: list[tuple[object, ...]] = []
        for record in batch:
            if isinstance(record, Columns):
                here.append((record.devices, [t / S for t in record.t_ns]))
            elif isinstance(record, Spans):
                here.append((record.pid, [t / S for t in record.columns["end_ns"]]))
        collected.append(here)
    return collected


def test_silent_seconds_are_skipped_in_stream_order() -> None:
    node = NodeTables("a", "test")
    seconds = np.array([0.0, 0.5, 1.5, 9.25, 9.75])
    node.add_series("gpu.power_watts", "far", (np.array([9.5]) * S).astype(np.int64), [1.0])
    node.add_series("gpu.power_watts", "near", (seconds * S).astype(np.int64), seconds)
    node.add_spans(7, layout.STEP, [0, 1 * S], [1 * S, 3 * S])
    assert rows_by_segment(node) == [
        [(["near"], [0.0, 0.5])],
        [(["near"], [1.5]), (7, [1.0])],
        [(7, [3.0])],  # 2 s is silent and 3 s is not: the stretches go on second by second
        [(["far"], [9.5]), (["near"], [9.25, 9.75])],  # from 9.25 s, after more than a second
    ]


def test_a_wait_of_hours_is_attributed_completely(tmp_path: Path) -> None:
    """Two windows of six hours, in which data were ready half of the time, and for a quarter."""
    path = tmp_path / "data_readiness.json"
    times = [1_700_000_000, 1_700_000_000 + 6 * HOUR_S]
    path.write_text(json.dumps({"event_time": times, "0": [0.5, 0.25], "1": [1, 1]}))
    report = analyze_with_details([tmp_path]).report
    assert report.lost_ns == (3 * HOUR_S + 4.5 * HOUR_S) * S
    assert sum(ns for rank in report.ranks for _, ns in rank.buckets) == report.lost_ns
    assert report.in_step_ns == 2 * 12 * HOUR_S * S


def test_times_a_hundred_days_apart_are_not_analyzed(tmp_path: Path) -> None:
    path = tmp_path / "data_readiness.json"
    times = [1_000, 1_700_000_000]
    path.write_text(json.dumps({"event_time": times, "0": [0.5, 0.25], "1": [1, 1]}))
    report = analyze_with_details([tmp_path]).report
    # Two windows of 19,675 days: the values are an answer, but no time of a job.
    assert "the times of one process are 39,351 days apart" in report.notes[0]
    assert (report.lost_ns, report.in_step_ns, report.ranks) == (0, 0, ())
    assert report.too_little_seen


def test_a_job_of_collectives_alone_is_analysed(tmp_path: Path) -> None:
    lines = [
        {
            "header": {"id": "0xabc", "rank": rank, "n_ranks": 2},
            "metadata": {"dump_timestamp_us": 10_000, "hostname": f"n{rank}", "pid": 40 + rank},
            "coll_perf": {
                "coll": "AllReduce",
                "coll_sn": number,
                "coll_msg_size_bytes": 8,
                "coll_exec_time_us": took,
            },
        }
        for rank, number, took in ((0, 1, 300), (1, 2, 100))
    ]
    path = tmp_path / "inspector.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = analyze_with_details([path]).report
    assert report.lost_ns == 400_000  # all of both ranks' time


def test_each_table_in_a_file_uses_its_own_heads(tmp_path: Path) -> None:
    path = tmp_path / "gpus.csv"
    first = "timestamp,gpu,DCGM_FI_DEV_GPU_TEMP,DCGM_FI_DEV_POWER_USAGE\n1700000000,0,50,300\n"
    again = "timestamp,gpu,DCGM_FI_DEV_POWER_USAGE,DCGM_FI_DEV_GPU_TEMP\n1700000060,0,310,51\n"
    path.write_text((first + again) * 2)
    (source,) = open_sources(path)
    (node,) = GpuTables().nodes([source], [Account(path)])
    readings = {column.signal: column.values.tolist() for column in node._columns}
    assert readings == {"gpu.temperature_celsius": [50, 51], "gpu.power_watts": [300, 310]}
