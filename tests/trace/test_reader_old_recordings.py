"""Recordings of every schema there ever was read the same for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterprof.trace.dump import export_records

RECORDINGS = Path(__file__).parents[1] / "recordings"
VERSIONS = sorted(path.name for path in RECORDINGS.glob("v*") if path.is_dir())


def test_every_schema_version_has_a_stored_recording() -> None:
    assert VERSIONS[:1] == ["v1"]


@pytest.mark.parametrize("version", VERSIONS)
def test_an_old_recording_gives_the_stored_dump(version: str) -> None:
    expected = (RECORDINGS / version / "expected.jsonl").read_text(encoding="ascii")
    assert "\n".join(export_records(RECORDINGS / version)) + "\n" == expected


def test_v1_gives_the_values_written_by_make_py() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in export_records(RECORDINGS / "v1")]
    columns = [line for line in lines if line.get("collector") == "everything"]
    # Second 2, after make.py: t = 7 s, and the values of its rows; a missing value is null.
    assert columns[2]["t_ns"] == [7_000_000_000, 7_100_000_123, 7_199_999_877]
    assert dict(zip(columns[2]["signals"], columns[2]["values"])) == {
        "whole": [2, -(2**63), 2**63 - 1],
        "micro": [2_000, 2_000, 5_000],
        "milli": [2_000_000, 7_000_000, 9_000_000],
        "ticks": [20_000_000, 10_000_000, 30_000_000],
        "kib": [6_144, 5_120, 3_072],
        "ratio": [0.07, 0.52, 1.0],
        "float": [None, -0.0, 1 / 3],
        "gone": [None, None, None],
        "sometimes": [1, None, 3],
    }
    spans = [line for line in lines if line["record"] == "spans" and line["pid"] == 70]
    assert spans[1]["first_sequence"] == 4
    assert spans[1]["columns"]["end_ns"] == [6_005_000_000, 6_009_000_000, 6_009_000_300]
    assert spans[1]["columns"]["start_ns"] == [6_000_000_000, 6_005_000_200, 6_000_000_000]
    threads = [line for line in lines if line.get("table") == "threads"]
    assert threads[0]["columns"][2:] == [[70, 71, 70, 71], [-1, 0, -1, 1]]
    assert threads[0]["strings"] == {"wchan": ["folio_wait_bit_common", "futex_wait_queue"]}
