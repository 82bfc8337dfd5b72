"""Operators and kernels of two profiler windows, compared."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.job.dives import OUTSIDE, Activity, compare_profiles, read_profile
from clusterprof.errors import Unavailable

MS = 1_000_000


def make_event(name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    """Return an operator; times in us."""
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "dur": dur,
    } | more


EVENTS = [
    make_event("aten::linear", 1000, 500),  # 500 us, of which 300 in addmm
    make_event("aten::addmm", 1100, 300),
    make_event("aten::linear", 2000, 500),
    make_event("aten::addmm", 2100, 300),
    make_event("aten::mul", 1200, 600, tid=2),  # another thread, beyond the first linear
    make_event("gemm", 1300, 700, cat="kernel", tid=7),
    {"ph": "M", "name": "process_name", "ts": 1.0, "pid": 1, "args": {"name": "python"}},
]


def write_trace(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_a_profile_holds_self_times_calls_and_uncovered_time(tmp_path: Path) -> None:
    profile = read_profile(write_trace(tmp_path / "t.json.gz", EVENTS), 2, 4 * MS)
    # per step of two: (500 - 300) us twice, 300 us twice, 600 us once, 700 us once
    assert profile["operator", "aten::linear"] == Activity(200_000, 1)
    assert profile["operator", "aten::addmm"] == Activity(300_000, 1)
    assert profile["operator", "aten::mul"] == Activity(300_000, 0.5)
    assert profile["kernel", "gemm"] == Activity(350_000, 0.5)
    # covered: 1000 to 1800 and 2000 to 2500 of 4000 us; kernels cover nothing of the host
    assert profile["operator", OUTSIDE] == Activity((4000 - 1300) * 1000 / 2, 0)


def test_only_clear_differences_except_collectives_are_listed() -> None:
    late = {
        ("operator", "aten::cumsum"): Activity(10 * MS, 4),
        ("operator", "aten::mm"): Activity(50 * MS, 1),  # 1.04 times
        ("operator", "aten::add"): Activity(1 * MS, 1),  # 1 % of a step
        ("operator", "gloo:all_reduce"): Activity(30 * MS, 1),  # a wait
        ("kernel", "ncclDevKernel_AllReduce"): Activity(30 * MS, 1),
        ("kernel", "gemm"): Activity(20 * MS, 2),
    }
    healthy = {
        ("operator", "aten::mm"): Activity(48 * MS, 1),
        ("kernel", "gemm"): Activity(5 * MS, 2),
        ("operator", "aten::sub"): Activity(40 * MS, 1),  # the healthy one's own
    }
    names = [(item.kind, item.name) for item in compare_profiles(late, healthy, 100 * MS)]
    assert names == [("kernel", "gemm"), ("operator", "aten::cumsum")]


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b'{"traceEvents": [')[:-9],  # cut off
        gzip.compress(b'{"traceEvents": 7}'),
        gzip.compress(b"[" * 100_000),
        b"",
    ],
)
def test_a_damaged_trace_has_a_reason(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(content)
    with pytest.raises(Unavailable, match=r"t\.json\.gz: "):
        read_profile(path, 1, MS)


def test_impossible_times_are_left_out(tmp_path: Path) -> None:
    events = [make_event("aten::mm", 1, -5), make_event("aten::mm", 1, 1e15), EVENTS[1]]
    profile = read_profile(write_trace(tmp_path / "t.json.gz", events), 1, MS)
    assert set(profile) == {("operator", "aten::addmm"), ("operator", OUTSIDE)}
