"""A Perfetto trace read back packet by packet, against numbers done by hand."""

from __future__ import annotations

import gzip
import io
import random
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clusterprof.errors import UsageError
from clusterprof.output.exporters.base import Output
from clusterprof.output.exporters.perfetto.counters import COUNTER_STYLES
from clusterprof.output.exporters.perfetto.packets import (
    encode_number,
    encode_text,
    encode_varint,
    encode_varints,
)
from clusterprof.output.exporters.perfetto.spans import Lanes
from clusterprof.output.exporters.perfetto.trace import NO_HISTORY_REMARK, Perfetto
from clusterprof.signals import BY_NAME
from tests.support import perfetto_packets as wire
from tests.support.small_run import S, make_report, make_run, make_time_ns, write_recordings

A, B = "rank 0 · node-a", "rank 1 · node-b"


def exported(folder: Path, path: Path | None = None, **changes: object) -> bytes:
    result = make_run(write_recordings(folder / "run"), replace(make_report(), **changes))  # type: ignore[arg-type]
    stdout = io.BytesIO()
    Perfetto().export(result, Output(path, stdout))
    return stdout.getvalue()


@pytest.fixture
def trace(tmp_path: Path) -> wire.Trace:
    return wire.read_trace(exported(tmp_path))


def test_spans_become_slices_nested_or_on_separate_lanes(trace: wire.Trace) -> None:
    of_spans = [s for s in trace.slices if not s[0].endswith(("lost time", "ranks", "others"))]
    assert sorted(of_spans) == sorted(
        [
            (
                f"{A} | main thread",
                "data_wait",
                make_time_ns(1),
                make_time_ns(1.4),
                {"batch": 3, "worker_pid": 201, "workers": 1},
            ),
            (f"{A} | main thread", "forward", make_time_ns(1.4), make_time_ns(1.6), {}),
            (f"{A} | main thread (2)", "tokenise", make_time_ns(1.5), make_time_ns(1.8), {}),
            (f"{A} | steps", "step 0", make_time_ns(1), make_time_ns(2), {"step": 0, "samples": 8}),
            (
                f"{A} | worker 0",
                "fetch",
                make_time_ns(1),
                make_time_ns(1.3),
                {"items": 8, "user_cpu_ns": 5, "system_cpu_ns": 6, "read_bytes": 4096},
            ),
            (
                f"{A} | not measured",
                "gpu.busy_ns_total",
                make_time_ns(1.1),
                make_time_ns(1.3),
                {"device": "GPU-a", "why": "failed: timed out"},
            ),
            (f"{B} | main thread", "checkpoint", make_time_ns(1), make_time_ns(2), {"bytes": 4096}),
            (f"{B} | steps", "step 0", make_time_ns(1), make_time_ns(2.1), {"step": 0}),
        ]
    )
    assert trace.threads == {
        f"{A} | main thread": 100,
        f"{A} | worker 0": 201,
        f"{B} | main thread": 100,
    }


def test_counters_show_rates_and_gaps_have_no_value(trace: wire.Trace) -> None:
    assert trace.values == [
        (f"{A} | GPU busy · GPU-a", make_time_ns(1), 50.0),
        (f"{A} | GPU power · GPU-a", make_time_ns(1), 300.0),
        ("host node-a | disk read · sdb", make_time_ns(1), 10_000.0),
        (f"{A} | GPU power · GPU-a", make_time_ns(1.2), 400.0),
        (f"{A} | GPU power · GPU-a", make_time_ns(1.3), 90.0),
    ]  # and nothing of sda, which was never anything but 0
    assert trace.units == {
        f"{A} | GPU busy · GPU-a": "%",
        f"{A} | GPU power · GPU-a": "W",
        "host node-a | disk read · sdb": "B/s",
    }


def test_events_and_gaps_become_instants_of_the_host(trace: wire.Trace) -> None:
    of_host = [event for event in trace.instants if event[0].startswith("host")]
    assert of_host == [
        ("host node-a | events", "gpu-xid", make_time_ns(1.05), {"xid": "79", "device": "GPU-a"}),
        (
            "host node-a | not seen",
            "gpu_nvidia gpu.busy_ns_total GPU-a",
            make_time_ns(1.15),
            {"why": "failed: timed out"},
        ),
    ]


def test_lost_time_blocks_are_laid_in_sequence_within_a_stretch(trace: wire.Trace) -> None:
    lost = [s[1:4] for s in trace.slices if s[0] == f"{A} | lost time"]
    assert lost == [
        ("storage-local", make_time_ns(1), make_time_ns(1.2)),
        ("storage-local", make_time_ns(1.5), make_time_ns(1.6)),
        ("unattributed", make_time_ns(1.6), make_time_ns(1.65)),
    ]


def test_an_arrow_goes_from_the_victim_to_the_culprit(trace: wire.Trace) -> None:
    assert trace.arrows == [
        (
            f"{A} | waits for ranks > waits for rank 1: storage-local",
            f"{B} | late for others > arrives last",
        )
    ]
    assert (
        f"{B} | late for others",
        "late: storage-local",
        make_time_ns(1.2),
        make_time_ns(1.7),
        {"ranks_that_waited": 1},
    ) in trace.slices
    assert (
        f"{A} | waits for ranks",
        "waits for rank 1: storage-local",
        make_time_ns(1.2),
        make_time_ns(1.7),
        {"step": 0, "culprit_node": "node-b"},
    ) in trace.slices
    assert (
        f"{B} | waits for ranks",
        "waits for an unknown rank",
        make_time_ns(1.9),
        make_time_ns(1.95),
        {},
    ) in trace.slices


def test_equal_pids_on_two_nodes_stay_separate_processes(trace: wire.Trace) -> None:
    assert len(set(trace.processes.values())) == len(trace.processes) == 3
    assert all(0 < pid < 1 << 31 for pid in trace.processes.values())
    assert len(trace.sequences) == 2
    assert {1: make_time_ns(1), 64: S} in trace.clocks
    assert {1: make_time_ns(1), 64: 6 * S} in trace.clocks
    assert {1: make_time_ns(2), 64: 2 * S} in trace.clocks


def test_concatenated_node_files_give_the_same_trace(tmp_path: Path, trace: wire.Trace) -> None:
    result = make_run(tmp_path / "run", make_report())
    Perfetto().export(result, Output(tmp_path / "out", io.BytesIO(), folder=True))
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == [
        "node-a-0badcafe-1.pftrace",
        "node-b-0badcafe-1.pftrace",
    ]
    turned = wire.read_trace(files[1].read_bytes() + files[0].read_bytes())
    assert turned.arrows == trace.arrows
    assert sorted(map(str, turned.slices)) == sorted(map(str, trace.slices))
    assert turned.processes == trace.processes


def test_without_a_history_the_export_reports_missing_lost_time(tmp_path: Path) -> None:
    result = make_run(write_recordings(tmp_path / "run"), replace(make_report(), history=None))
    printed = Perfetto().export(result, Output(None, io.BytesIO()))
    assert printed == (NO_HISTORY_REMARK,)


def test_hostile_names_are_escaped_in_the_trace(tmp_path: Path) -> None:
    names = {"a": "gpu\x1b[2J\u202ea", "b": "b\n\x9b31m"}
    result = make_run(
        write_recordings(tmp_path / "run", names, "x\x07\u200b"),
        make_report(names, "c\x1b]0;"),
        names,
    )
    stdout = io.BytesIO()
    Perfetto().export(result, Output(None, stdout))
    shown = wire.read_trace(stdout.getvalue())
    texts = [s[0] + s[1] + str(s[4]) for s in shown.slices] + [i[0] + i[1] for i in shown.instants]
    assert any("\\x1b[2J\\u202ea" in text for text in texts)
    assert any("x\\x07\\u200b" in text for text in texts)
    found_ = {c for text in texts for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs")}
    assert found_ == set()


def test_trace_output_to_a_terminal_is_refused() -> None:
    class Terminal(io.BytesIO):
        def isatty(self) -> bool:
            return True

    with pytest.raises(UsageError, match="is not text"):
        Perfetto().check(Output(None, Terminal()))


def test_drawn_counters_are_signals_with_unique_titles() -> None:
    assert all(BY_NAME[signal.name] is signal for signal in COUNTER_STYLES)
    assert len({shown.title for shown in COUNTER_STYLES.values()}) == len(COUNTER_STYLES)


def test_varints_follow_the_protobuf_encoding() -> None:
    assert [encode_varint(n) for n in (0, 1, 127, 128, 300)] == [
        b"\x00",
        b"\x01",
        b"\x7f",
        b"\x80\x01",
        b"\xac\x02",
    ]
    assert encode_varint(-1) == b"\xff" * 9 + b"\x01"
    assert encode_number(1, 150) == b"\x08\x96\x01"
    assert encode_text(2, "testing") == b"\x12\x07testing"
    for values in ([0, 5, 1 << 56], [1 << 56, (1 << 63) - 1, make_time_ns(3)]):
        assert encode_varints(np.array(values)) == [encode_varint(value) for value in values]


def test_spans_on_a_lane_never_cross() -> None:
    draw = random.Random(5)
    for _ in range(50):
        spans = []
        for _ in range(60):
            start = draw.randrange(100)
            spans.append((start, start + 1 + draw.randrange(30)))
        lanes, placed = Lanes(), {}
        for start, end in sorted(spans, key=lambda span: (span[1], -span[0])):
            placed.setdefault(lanes.assign_lane(start, end), []).append((start, end))
        for lane in placed.values():
            for i, (s, e) in enumerate(lane):
                for other_s, other_e in lane[i + 1 :]:
                    apart = other_s >= e or s >= other_e
                    inside = other_s < s and e <= other_e
                    assert apart or inside, (s, e, other_s, other_e)
    assert max(placed) > 0  # some had to move


def test_an_output_name_ending_in_gz_is_compressed(tmp_path: Path) -> None:
    target = tmp_path / "run.pftrace.gz"
    assert exported(tmp_path, target) == b""
    assert gzip.decompress(target.read_bytes()) == exported(tmp_path / "again")
