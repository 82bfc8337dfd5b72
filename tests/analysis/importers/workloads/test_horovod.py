"""Timelines of Horovod: every number by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clusterprof.analysis.importers.core.byte_sources import open_sources
from clusterprof.analysis.importers.registry import find_importer
from clusterprof.analysis.importers.workloads.horovod import HorovodTimeline
from clusterprof.analysis.pipeline import analyze
from tests.support.import_results import import_folder


def operation(tensor: int, ready_us: list[int], end_us: int) -> list[dict[str, Any]]:
    """One reduction of a tensor, which begins when the last rank is ready."""
    pid, begin_us = {"pid": tensor}, max(ready_us)
    return [
        {"ph": "B", "name": "NEGOTIATE_ALLREDUCE", "ts": min(ready_us), **pid},
        *(
            {"ph": "X", "name": str(rank), "ts": time_us, "dur": 0, **pid}
            for rank, time_us in enumerate(ready_us)
        ),
        {"ph": "E", "ts": begin_us, **pid},
        {"ph": "B", "name": "ALLREDUCE", "ts": begin_us, **pid},
        {"ph": "B", "name": "NCCL_ALLREDUCE", "ts": begin_us + 1, **pid},
        {"ph": "E", "ts": end_us - 1, **pid},
        {"ph": "E", "ts": end_us, **pid},
    ]


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    """Write the file as Horovod does: a line per event, and a list that is never closed."""
    cycles = [{"ph": "i", "name": "CYCLE_START", "ts": at, "s": "g"} for at in (0, 1000)]
    path = folder / "timeline.json"
    path.write_text("[\n" + "".join(json.dumps(event) + ",\n" for event in (*cycles, *events)))
    return path


def test_the_last_rank_is_named_and_overlapping_waits_merged(tmp_path: Path) -> None:
    # Waits for rank 2 alone: 20..100 and, of another tensor, 50..300: 280 us together.
    # For rank 0 alone: 500..520. Operations: 100..200, 300..400, 520..600: 280 of 600 us.
    events = [
        *operation(1, [10, 20, 100], 200),
        *operation(2, [50, 40, 300], 400),
        *operation(1, [520, 500, 490], 600),
    ]
    path = write(tmp_path, events)
    (source,) = open_sources(path)
    importer = find_importer(source.head, path)
    assert importer is not None and importer.name == "horovod"
    # From the first operation at 10 us to 600 us: 590 us.
    assert analyze(path).answers == (
        "Horovod timeline of 3 ranks: 3 operations in 590.0 µs, under way for 47.5 % of it; rank 2"
        " came last in 2: the others waited 47.5 % for it",
    )


def test_alternating_last_ranks_name_no_rank(tmp_path: Path) -> None:
    events = [*operation(1, [0, 100], 200), *operation(1, [400, 300], 500)]
    (answer,) = analyze(write(tmp_path, events)).answers
    assert answer.endswith("; the last rank changes, none caused most of the waits")


def test_an_operation_of_a_single_rank_is_refused(tmp_path: Path) -> None:
    _, _, why = import_folder(HorovodTimeline(), write(tmp_path, operation(1, [5], 50)))
    assert "no operation for which two ranks were ready" in why


def test_damaged_events_are_left_out_and_counted(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [
        {"ph": "E", "ts": 3, "pid": 9},
        {"ph": "B", "name": "ALLREDUCE", "ts": "x", "pid": 1},
        *operation(1, [10, 20], 30),
    ]
    path = write(tmp_path, events)
    path.write_text(path.read_text() + '{"ph": "B", "na')
    _, (account,), why = import_folder(HorovodTimeline(), path)
    assert why == ""
    assert account.skipped == {
        "events that are not of an operation": 2,
        "lines that are not JSON": 1,
    }
