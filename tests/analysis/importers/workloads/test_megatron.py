"""A pipeline of two stages by hand: what each waited for, and for whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof.analysis.importers.workloads.megatron import MegatronPipeline
from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from clusterprof.report.model import Report
from tests.support.import_results import (
    decode_operation,
    import_folder,
    list_ranks,
    list_readings,
    list_spans,
)
from tests.support.report_laws import check_conservation

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


def test_a_pipeline_of_two_stages_is_imported(tmp_path: Path) -> None:
    (node,), (account,), why = import_folder(MegatronPipeline(), write(tmp_path / "a.json", EVENTS))
    assert why == ""
    assert list_ranks(node) == {1: (0, 2, "stage0"), 2: (1, 2, "stage1")}
    recorded_spans = list_spans(node)
    assert recorded_spans["1 step"] == [(0, 110 * US, 3, 2, -1, -1)]
    # Busy 0-20, 60-70, 90-100 of 110; and 12-85.
    assert list_readings(node)["gpu.busy_ns_total stage0"][-1] == (110 * US, 40 * US)
    assert list_readings(node)["gpu.busy_ns_total stage1"] == [
        (0, 0),
        (12 * US, 0),
        (85 * US, 73 * US),
        (110 * US, 73 * US),
    ]
    rows = [
        (a // US, b // US, number, *decode_operation(d))
        for a, b, _, number, _, d in recorded_spans["1 collective"]
    ]
    # Both begin at 0. Stage 0 waits for the backward of microbatch 0, done at 52, and, while stage
    # 1 works on, until it begins that pass at 60; for microbatch 1 until 85. Nobody works 85-90.
    # Both come to the reduce, the last at 100.
    assert sorted(rows) == [
        (0, 0, 0, layout.OTHER_OPERATION, -1),
        (10, 10, 0, layout.SEND, 1),
        (12, 12, 1, layout.SEND, 1),
        (20, 52, 0, layout.RECV, 1),
        (52, 60, 1, layout.RECV, 1),
        (70, 85, 2, layout.RECV, 1),
        (85, 90, 0, layout.OTHER_OPERATION, -1),
        (100, 100, 1, layout.OTHER_OPERATION, -1),
        (100, 100, 2, layout.SEND, 1),
    ]
    rows = [
        (a // US, b // US, number, *decode_operation(d))
        for a, b, _, number, _, d in recorded_spans["2 collective"]
    ]
    # Stage 1 waits for its first input, done at 10, and until stage 0 lets it begin at 12. After
    # its last pass it has nothing to do while stage 0 works, 90-100.
    assert sorted(rows) == [
        (0, 0, 0, layout.OTHER_OPERATION, -1),
        (0, 10, 0, layout.RECV, 0),
        (10, 12, 1, layout.RECV, 0),
        (52, 52, 0, layout.SEND, 0),
        (60, 60, 1, layout.SEND, 0),
        (85, 85, 2, layout.SEND, 0),
        (85, 90, 0, layout.OTHER_OPERATION, -1),
        (90, 100, 2, layout.RECV, 0),
        (100, 100, 1, layout.OTHER_OPERATION, -1),
    ]
    assert account.notes == [
        "stage 0: 63.6% bubble (neither forward nor backward), 0.0 ms of work an iteration",
        "stage 1: 33.6% bubble (neither forward nor backward), 0.1 ms of work an iteration",
        "stage 1 does 1.8 times the work of the median stage: give it fewer layers (the last one"
        " also has the output layer and the loss)",
    ]


def write_pipeline(path: Path, backward: int, exchange: int = 0) -> Path:
    """Write 30 iterations of two stages with two microbatches each.

    Passes of stage 0 take 10 us forward, 20 backward; of stage 1 10 and 10 times `backward`. After
    the first forward and after the last pass of stage 1 the stages exchange data and nobody works.
    stage 0   F0 F1 -- waits --        B1     -- waits -- B0
    stage 1   --    F0 F1 B1 B0
    """
    events = []
    for iteration in range(30):
        begin = iteration * (50 + 20 * backward + 2 * exchange)
        second = begin + 10 + exchange
        first_done, last_done = second + 20 + 10 * backward, second + 20 + 20 * backward
        ends = last_done + exchange + 20
        passes = [
            *work(0, "forward", begin, begin + 10, 0),
            *work(0, "forward", second, second + 10, 1),
            *work(1, "forward", second, second + 10, 0),
            *work(1, "forward", second + 10, second + 20, 1),
            *work(1, "backward", second + 20, first_done, 1),
            *work(1, "backward", first_done, last_done, 0),
            *work(0, "backward", first_done, first_done + 20, 1),
            *work(0, "backward", last_done + exchange, ends, 0),
            *(mark(stage, "iteration begin", begin) for stage in (0, 1)),
            *(mark(stage, "reduce", ends) for stage in (0, 1)),
            *(mark(stage, "iteration end", ends) for stage in (0, 1)),
        ]
        for event in passes:
            event["args"] = {**event["args"], "iteration": iteration}
        events += passes
    return write(path, events)


def lost_us(path: Path) -> tuple[dict[str, float], Report]:
    """Return the time lost per iteration and cause in us, and the report.

    Of the first iteration 20 us stay without a cause: there is nothing to compare with.
    """
    report = analyze(path)
    check_conservation(report)
    total = {finding.cause.id: finding.lost_ns / 30 / US for finding in report.findings}
    total["all"] = sum(rank.lost_ns for rank in report.ranks) / 30 / US
    return total, report


def test_equal_stages_lose_time_only_to_pipeline_bubbles(tmp_path: Path) -> None:
    # 90 us an iteration, each stage works 60: stage 0 waits 20-50, stage 1 0-10 and 70-90.
    lost, report = lost_us(write_pipeline(tmp_path / "a.json", 2))
    assert lost == pytest.approx({"sync-bubble": 60, "all": 60}, abs=0.7)
    assert report.findings[0].culprits == ()


def test_a_heavy_last_stage_is_blamed_for_its_extra_work(tmp_path: Path) -> None:
    # 130 us: stage 0 works 60 and waits 20-70, 90-110; stage 1 works 100 and waits 0-10, 110-130.
    # Of the 70 us of stage 0, 40 are what stage 1 works more; the rest is the schedule.
    lost, report = lost_us(write_pipeline(tmp_path / "a.json", 4))
    assert lost == pytest.approx({"sync-imbalance": 40, "sync-bubble": 60, "all": 100}, abs=0.7)
    imbalance = next(f for f in report.findings if f.cause.id == "sync-imbalance")
    assert [culprit.rank for culprit in imbalance.culprits] == [1]


def test_time_without_any_pass_counts_as_transfer(tmp_path: Path) -> None:
    # As above with equal work; twice 5 us of both stages in which nobody works.
    lost, _ = lost_us(write_pipeline(tmp_path / "a.json", 2, 5))
    assert lost == pytest.approx({"sync-bubble": 60, "net-transfer": 20, "all": 80}, abs=0.7)


def test_invalid_and_unfinished_events_are_counted(tmp_path: Path) -> None:
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
    (node,), (account,), _ = import_folder(MegatronPipeline(), path)
    assert dict(account.skipped) == {
        "events of another kind": 5,
        "ends without a begin": 1,
        "passes without an end": 1,
        "events with impossible times or numbers": 3,
    }
    assert account.read["forward and backward passes"] == 8
    assert len(list_spans(node)["1 step"]) == 1


def test_a_file_without_passes_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", EVENTS[:2])
    assert "forward or backward" in import_folder(MegatronPipeline(), path)[2]
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps(EVENTS)[:-30])
    assert import_folder(MegatronPipeline(), cut)[2].startswith("not readable JSON")
