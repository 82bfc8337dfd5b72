"""A pipeline of two stages by hand: what each waited for, and for whom."""

from __future__ import annotations

import json
from pathlib import Path

from clusterprof.analysis.importers.workloads.megatron import MegatronPipeline
from clusterprof.probe import layout
from tests.support.importing import operation, ranks, read, series, spans

US = 1000


def mark(stage: int, name: str, ts: int) -> dict:
    return {"name": name, "ph": "i", "ts": ts, "pid": stage, "tid": 0, "args": {"iteration": 3}}


def work(stage: int, name: str, start: int, end: int, microbatch: int) -> list[dict]:
    both = {"name": name, "pid": stage, "tid": 0}
    return [
        {**both, "ph": "B", "ts": start, "args": {"iteration": 3}},
        {
            **both,
            "ph": "E",
            "ts": end,
            "args": {"iteration": 3, "microbatch": microbatch, "model_chunk": 0, "pp_rank": stage},
        },
    ]


# stage 0   F0 0-10   F1 10-20              B0 60-70            B1 90-100
# stage 1   F0 12-22    B0 22-52    F1 52-62    B1 62-85
EVENTS = [
    mark(0, "iteration begin", 0),
    mark(1, "iteration begin", 0),
    *work(0, "forward", 0, 10, 0),
    *work(0, "forward", 10, 20, 1),
    *work(1, "forward", 12, 22, 0),
    *work(1, "backward", 22, 52, 0),
    *work(1, "forward", 52, 62, 1),
    *work(0, "backward", 60, 70, 0),
    *work(1, "backward", 62, 85, 1),
    *work(0, "backward", 90, 100, 1),
    mark(1, "reduce", 85),
    mark(0, "reduce", 100),
    mark(0, "iteration end", 110),
    mark(1, "iteration end", 110),
]


def write(path: Path, events: object) -> Path:
    path.write_text(json.dumps(events))
    return path


def test_two_stages_whole(tmp_path: Path) -> None:
    (node,), (account,), why = read(MegatronPipeline(), write(tmp_path / "a.json", EVENTS))
    assert why == ""
    assert ranks(node) == {1: (0, 2, "stage0"), 2: (1, 2, "stage1")}
    recorded_spans = spans(node)
    assert recorded_spans["1 step"] == [(0, 110 * US, 3, 2, -1, -1)]
    # Busy 0-20, 60-70, 90-100 of 110; and 12-85.
    assert series(node)["gpu.busy_ns_total stage0"][-1] == (110 * US, 40 * US)
    assert series(node)["gpu.busy_ns_total stage1"] == [
        (0, 0),
        (12 * US, 0),
        (85 * US, 73 * US),
        (110 * US, 73 * US),
    ]
    rows = [
        (a // US, b // US, number, *operation(d))
        for a, b, _, number, _, d in recorded_spans["1 collective"]
    ]
    # Stage 0 waited for the backward of microbatch 0, done at 52, and of 1, done at 85; then both
    # came to the reduce, the last at 100.
    assert rows == [
        (20, 52, 0, layout.RECV, 1),
        (70, 85, 1, layout.RECV, 1),
        (100, 100, 0, layout.OTHER_OPERATION, -1),
    ]
    rows = [
        (a // US, b // US, number, *operation(d))
        for a, b, _, number, _, d in recorded_spans["2 collective"]
    ]
    assert rows == [
        (52, 52, 0, layout.SEND, 0),
        (85, 85, 1, layout.SEND, 0),
        (85, 100, 0, layout.OTHER_OPERATION, -1),
    ]
    assert account.notes == [
        "stage 0: 63.6% bubble (neither forward nor backward), 0.0 ms of work an iteration",
        "stage 1: 33.6% bubble (neither forward nor backward), 0.1 ms of work an iteration",
        "stage 1 does 1.8 times the work of the median stage: give it fewer layers (the last one"
        " also has the output layer and the loss)",
    ]


def test_bad_events_are_counted_and_what_never_ends_too(tmp_path: Path) -> None:
    more = [
        {"name": "forward", "ph": "B", "ts": 120, "pid": 0},
        {"name": "forward", "ph": "E", "pid": 0},
        {"name": "backward", "ph": "E", "ts": 130, "pid": 5},
        7,
        None,
        {"ph": "X"},
        {"name": "forward", "ph": "B", "ts": -4, "pid": 0},
        {"name": "forward", "ph": "B", "ts": 1e300, "pid": 0},
        {"name": "other", "ph": "B", "ts": 1, "pid": 0},
        {"name": "forward", "ph": "B", "ts": 1, "pid": 0, "args": {"iteration": 1 << 70}},
    ]
    path = write(tmp_path / "a.json", {"traceEvents": EVENTS + more})
    (node,), (account,), _ = read(MegatronPipeline(), path)
    assert dict(account.skipped) == {
        "events of another kind": 5,
        "ends without a begin": 1,
        "passes without an end": 1,
        "events with impossible times or numbers": 3,
    }
    assert account.read["forward and backward passes"] == 8
    assert len(spans(node)["1 step"]) == 1


def test_what_holds_nothing_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", EVENTS[:2])
    assert "forward or backward" in read(MegatronPipeline(), path)[2]
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps(EVENTS)[:-30])
    assert read(MegatronPipeline(), cut)[2].startswith("not readable JSON")
