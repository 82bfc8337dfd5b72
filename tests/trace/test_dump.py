"""A dump is strict JSON in plain ASCII, one line per record, and ends with what was lost."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from clusterprof.errors import NoRecording
from clusterprof.trace.dump import export_records
from clusterprof.trace.schema import SPAN_FIELDS, Columns, Event, Rows, Spans
from tests.support.trace_samples import make_simple_records, write_recording


def strict(line: str) -> dict[str, object]:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    return dict(json.loads(line, parse_constant=refuse))


def test_every_record_is_a_json_line_with_nan_as_null(tmp_path: Path) -> None:
    nan, infinity = float("nan"), float("inf")
    columns = Columns(
        "gpu",
        ("gpu.busy_ratio", "gpu.throttle_bits"),
        ("GPU-1", "GPU-1"),
        array("q", [7, 8]),
        (array("d", [nan, 0.25]), array("q", [3, 0])),
        (None, b"\x00\x01"),
    )
    rows = Rows("threads", ("tid", "x"), (array("q", [5]), array("d", [-infinity])), {"w": ("a",)})
    spans = Spans(9, 8, 1, 2, {64: "mine"}, {name: array("q", [4]) for name in SPAN_FIELDS})
    write_recording(tmp_path / "node", [[*make_simple_records(), columns, rows, spans]])
    lines = [strict(line) for line in export_records(tmp_path)]
    assert [line["record"] for line in lines] == [
        "header",
        "clock",
        "clock",
        "event",
        "gap",
        "columns",
        "rows",
        "spans",
        "summary",
    ]
    assert lines[4] == {
        "record": "gap",
        "folder": "node",
        "t_ns": 5,
        "collector": "gpu_nvidia",
        "signal": "gpu.power_watts",
        "device": "GPU-1",
        "kind": "denied",
        "message": "no permission",
        "remedy": "be root",
    }
    assert lines[5] == {
        "record": "columns",
        "folder": "node",
        "collector": "gpu",
        "signals": ["gpu.busy_ratio", "gpu.throttle_bits"],
        "devices": ["GPU-1", "GPU-1"],
        "t_ns": [7, 8],
        "values": [[None, 0.25], [3, None]],
    }
    assert lines[6] == {
        "record": "rows",
        "folder": "node",
        "table": "threads",
        "names": ["tid", "x"],
        "columns": [[5], [None]],
        "strings": {"w": ["a"]},
    }
    assert lines[7] == {
        "record": "spans",
        "folder": "node",
        "pid": 9,
        "started_ticks": 8,
        "first_sequence": 1,
        "dropped": 2,
        "names": {"64": "mine"},
        "columns": {name: [4] for name in SPAN_FIELDS},
    }
    assert lines[8] == {
        "record": "summary",
        "nodes": 1,
        "damaged_bytes": 0,
        "damaged_places": 0,
        "torn_tail_bytes": 0,
        "frames_read": 8,
        "unknown_frames": 0,
    }


HOSTILE = "\x1b]0;owned\x07 \x7f \x9b31m \u202e \u200b \n ::error::x </script>"


def test_hostile_names_are_escaped_in_the_dump(tmp_path: Path) -> None:
    write_recording(tmp_path / "node", [[Event(1, HOSTILE, {HOSTILE: [HOSTILE]})]])
    lines = list(export_records(tmp_path / "node"))
    assert all(0x20 <= ord(character) < 0x7F for line in lines for character in line)
    event = strict(lines[2])
    assert event["kind"] == HOSTILE
    assert event["attributes"] == {HOSTILE: [HOSTILE]}


def test_the_dump_summary_states_the_damage_of_all_nodes(tmp_path: Path) -> None:
    for node in ("a", "b"):
        write_recording(tmp_path / node, [make_simple_records()])
        segment = tmp_path / node / "000001.cpf"
        segment.write_bytes(b"foreign" + segment.read_bytes()[:-1])
    *_, summary = [strict(line) for line in export_records(tmp_path)]
    # The gap is the last frame; without its last byte it is a torn tail of its size less one.
    gap_bytes = summary["torn_tail_bytes"]
    assert isinstance(gap_bytes, int) and gap_bytes > 0
    assert summary == {
        "record": "summary",
        "nodes": 2,
        "damaged_bytes": 14,
        "damaged_places": 2,
        "torn_tail_bytes": gap_bytes,
        "frames_read": 8,
        "unknown_frames": 0,
        "altered_segments": 2,
    }


def test_a_missing_recording_is_reported_before_the_first_line(tmp_path: Path) -> None:
    with pytest.raises(NoRecording):
        export_records(tmp_path)
