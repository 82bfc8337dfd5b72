"""What takes longer: memory beside the length of a recording, and Perfetto's own definitions."""

from __future__ import annotations

import io
import tracemalloc
from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.output.exporters import tables
from clusterprof.output.exporters.base import Output, Run
from clusterprof.output.exporters.perfetto.trace import Perfetto, iterate_node_packets
from clusterprof.output.exporters.tables import TABLE_NAMES, iterate_batches
from clusterprof.probe import layout
from clusterprof.trace.schema import SPAN_FIELDS, Clock, Columns, Header, Spans
from clusterprof.trace.writer import RecordingWriter
from tests.support.small_run import PID, TICKS, S, make_report, make_run, write_recordings

pytestmark = pytest.mark.long


def long_run(folder: Path, seconds: int) -> Run:
    """One rank of 100 steps a second with a wait each, and 30 signals ten times a second."""
    now = [S]
    header = Header({"key": "k", "hostname": "h", "display": "h"}, {}, {}, [], {}, {}, {}, [])
    writer = RecordingWriter(
        folder / "k", header, lambda: Clock(now[0], now[0], now[0]), keep_free_bytes=0
    )
    for second in range(1, seconds + 1):
        now[0] = second * S
        rows = []
        for step in range(100):
            start = second * S + step * 10_000_000
            rows.append((start, start + 4_000_000, layout.DATA_WAIT, step, -1, -1, -1))
            rows.append((start, start + 9_000_000, layout.STEP, second * 100 + step, 0, -1, -1))
        spans = {name: array("q", column) for name, column in zip(SPAN_FIELDS, zip(*rows))}
        t_ns = array("q", range(second * S, (second + 1) * S, S // 10))
        disks = [f"sd{number}" for number in range(30)]
        values = [array("q", [t // 1000 * n for t in t_ns]) for n in range(30)]
        names = ["disk.read_bytes_total"] * 30
        columns = Columns("disk", names, disks, t_ns, values, [None] * 30)
        writer.append(columns, Spans(PID, TICKS, 1 + 200 * (second - 1), 0, {}, spans))
    writer.close()
    result = make_run(folder, replace(make_report(), history=None))
    return replace(result, nodes=(replace(result.nodes[0], folder=folder / "k"),))


def peak(run_: Run, what: str) -> int:
    tracemalloc.start()
    if what == "trace":
        for packets in iterate_node_packets(run_, run_.nodes[0]):
            b"".join(packets)
    else:
        for _ in iterate_batches(run_, TABLE_NAMES, ()):
            pass
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


@pytest.mark.parametrize("what", ["trace", "tables"])
def test_memory_does_not_grow_with_the_recording(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BATCH_ROWS", 5_000)  # what the short one fills several times
    short, long = (long_run(tmp_path / str(n), n) for n in (60, 300))
    assert peak(long, what) < 1.3 * peak(short, what)


def test_perfettos_own_definitions_read_every_field(tmp_path: Path) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    stdout = io.BytesIO()
    Perfetto().export(
        make_run(write_recordings(tmp_path / "run"), make_report()), Output(None, stdout)
    )
    trace = protos.Trace()
    trace.ParseFromString(stdout.getvalue())
    events = [packet.track_event for packet in trace.packet if packet.HasField("track_event")]
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet}
    assert all(event.track_uuid in tracks for event in events)
    kinds = protos.TrackEvent
    begun = sum(event.type == kinds.TYPE_SLICE_BEGIN for event in events)
    assert begun == sum(event.type == kinds.TYPE_SLICE_END for event in events) == 17
    assert sum(event.type == kinds.TYPE_COUNTER for event in events) == 5
    flows = [f for event in events for f in event.flow_ids]
    assert flows == [f for event in events for f in event.terminating_flow_ids] != []
    unknown = [packet for packet in trace.packet if packet.ByteSize() == 0]
    assert unknown == []
