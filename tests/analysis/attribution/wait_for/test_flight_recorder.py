"""Dumps of PyTorch's flight recorder beside a recording: do both name the same waits?

The job of `waiting_jobs`: 60 steps of 0.6 s. Rank 0 arrives at the all-reduce after 0.3 s, rank 1
after 0.5 s; both leave at 0.6 s. So rank 0 waits 0.2 s a step and transfers 0.1 s, and rank 1
transfers 0.1 s: 12 s of waits and 12 s of transfers, seen from 1.3 s to 37 s by rank 0 (35.7 s) and
from 1.5 s by rank 1 (35.5 s).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.pipeline import analyze
from clusterprof.probe import layout
from clusterprof.report.model import Report
from tests.support.recordings import SECOND, Script, write_recording
from tests.support.report_laws import check_conservation
from tests.support.waiting_jobs import STEPS, make_scripts

FIRST_ARRIVAL_S, STEP_S = (1.3, 1.5), 0.6


def write_dump(
    folder: Path,
    rank: int,
    created_s: Callable[[int, int], list[float]],
    name: str = "exit_rank_{}.json",
    operation: str = "gloo:all_reduce",
) -> None:
    """Write what gloo leaves: when each operation was issued, no start, no end."""
    times = [t_s for step in range(STEPS) for t_s in created_s(rank, step)]
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": number,
            "profiling_name": operation,
            "is_p2p": False,
            "time_created_ns": round(t_s * SECOND),
            "time_discovered_started_ns": 0,
            "time_discovered_completed_ns": 0,
            "state": "scheduled",
            "retired": True,
        }
        for number, t_s in enumerate(times, 1)
    ]
    (folder / "nccl").mkdir()
    content = {"version": "2.10", "pg_config": {}, "pg_status": {}, "entries": entries}
    (folder / "nccl" / name.format(rank)).write_text(json.dumps(content))


def as_recorded(rank: int, step: int) -> list[float]:
    """0.1 ms after the call began."""
    return [FIRST_ARRIVAL_S[rank] + STEP_S * step + 0.0001]


def record_with_dumps(
    tmp_path: Path,
    created_s: Callable[[int, int], list[float]] = as_recorded,
    scripts: list[Script] | None = None,
    ranks: Sequence[int] = (0, 1),
    **options: str,
) -> Report:
    for rank, script in enumerate(scripts or make_scripts((0.0, 0.3), (0.2, 0.3))):
        write_recording(script, tmp_path / f"node-{rank}")
        if rank in ranks:
            write_dump(tmp_path / f"node-{rank}", rank, created_s, **options)
    report = analyze(tmp_path)
    check_conservation(report)
    return report


def notes_of(report: Report) -> list[str]:
    return [note for note in report.notes if note.startswith("PyTorch's flight recorder")]


def compare(tmp_path: Path, *arguments: Any, **options: str) -> list[str]:
    return notes_of(record_with_dumps(tmp_path, *arguments, **options))


def test_flight_recorder_and_recording_agree_on_waits_and_transfers(tmp_path: Path) -> None:
    # Rank 1 issues 0.1 ms after its call began: 60 * 0.1 ms = 6 ms on each rank are waits by the
    # dump and transfers here. 6 ms of 35.7 s are 0.0 points.
    [note] = compare(tmp_path)
    assert note == (
        "PyTorch's flight recorder agrees: waited for a rank 12.01 s (12.00 s here), transferred"
        " 11.99 s (12.00 s here), in 60 operations of 2 ranks (100 % of the time in operations);"
        " largest difference 0.0 % of a rank's time; the same last rank in 100 % of the wait"
        " (rank 0 waited 12.01 s (12.00 s here); rank 1 waited 6.0 ms (0 ns here))"
    )


def test_flight_recorder_disagreement_is_reported(tmp_path: Path) -> None:
    # By the dumps the last rank issued 50 ms after it had arrived: 0.25 s of waits of rank 0 and
    # 0.05 s of rank 1, 15 s and 3 s. That is 3 s more for each: 8.4 points of 35.7 s, 8.5 of 35.5.
    def later(rank: int, step: int) -> list[float]:
        return [FIRST_ARRIVAL_S[rank] + STEP_S * step + 0.05 * rank]

    [note] = compare(tmp_path, later)
    assert "waited for a rank 18.00 s (12.00 s here), transferred 6.00 s (12.00 s here)" in note
    assert "largest difference 8.5 % of a rank's time" in note
    assert "does not agree:" in note


def test_a_different_last_rank_is_a_disagreement_despite_equal_sums(tmp_path: Path) -> None:
    # The dumps say that rank 0 issued last, 0.2 s after it had arrived: so it did not wait at all.
    def swapped(rank: int, step: int) -> list[float]:
        return [(1.5001, 1.5)[rank] + STEP_S * step]

    [note] = compare(tmp_path, swapped)
    assert "does not agree:" in note and "the same last rank in 0 % of the wait (" in note


def test_gradients_end_with_their_last_bucket(tmp_path: Path) -> None:
    # One span of gradients, three buckets. The last is issued 0.1 s before the backward pass ends
    # and the rank waits. So rank 0 waits for 0.1 s a step until rank 1 has issued, and for 0.1 s
    # while it works on: the time of the spans, 12 s.
    def buckets(rank: int, step: int) -> list[float]:
        arrival_s = FIRST_ARRIVAL_S[rank] + STEP_S * step
        return [arrival_s - 0.2, arrival_s - 0.15, arrival_s - 0.1]

    scripts = make_scripts((0.0, 0.3), (0.2, 0.3))
    for script in scripts:
        script.main_spans = [
            (*span[:6], layout.GRADIENTS) if span[0] == layout.COLLECTIVE else span
            for span in script.main_spans
        ]
    [note] = compare(tmp_path, buckets, scripts)
    assert "60 operations" in note
    assert "12.00 s (12.00 s here), of it 6.00 s while that rank worked on, transferred" in note


def test_dump_entries_after_a_clock_change_are_not_joined(tmp_path: Path) -> None:
    def hours_later(rank: int, step: int) -> list[float]:
        return [7200.0 + STEP_S * step]

    [note] = compare(tmp_path, hours_later)
    assert "its entries could not be joined" in note and "clock may have been set" in note


def test_an_operation_of_another_kind_is_not_joined(tmp_path: Path) -> None:
    [note] = compare(tmp_path, operation="gloo:broadcast")
    assert "its entries could not be joined" in note


@pytest.mark.parametrize("ranks", [(), (0,)])
def test_missing_or_single_dumps_give_no_comparison(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    assert notes_of(record_with_dumps(tmp_path, ranks=ranks)) == []


def test_a_dump_covering_half_the_run_compares_that_half(tmp_path: Path) -> None:
    def second_half(rank: int, step: int) -> list[float]:
        return as_recorded(rank, step) if step >= STEPS // 2 else []

    # 30 * 0.1 ms more by the dumps, on each rank.
    [note] = compare(tmp_path, second_half)
    assert "in 30 operations of 2 ranks (100 %" in note
    assert "waited for a rank 6.01 s (6.00 s here)" in note


def test_dumps_of_a_normal_end_give_no_hang_note(tmp_path: Path) -> None:
    report = record_with_dumps(tmp_path)
    assert not [note for note in report.notes if note.startswith("flight recorder of")]


def test_dumps_of_a_hang_are_compared(tmp_path: Path) -> None:
    notes = compare(tmp_path, name="flight_rank_{}.json")
    assert "in 60 operations of 2 ranks (100 %" in notes[0]
