"""A slow step that was lost waiting says for whom, and what that one was late for."""

from __future__ import annotations

from dataclasses import replace

from clusterprof.output.renderers.text.tables import build_tables
from clusterprof.report.history import WAITING_FOR_RANKS, History, SlowStep, Wait
from clusterprof.report.model import UNATTRIBUTED
from tests.support.reports import make_storage_report

S = 10**9


def chiefly(*lost: tuple[str, int], rank: int | None = 0, waits: tuple[Wait, ...] = ()) -> str:
    report = make_storage_report()
    caused = replace(report.ranks[0], caused=(("cpu-gc", 0), ("storage-object", 5 * S)))
    step = SlowStep(17, 205 * S, 3 * S, rank, lost)
    history = History(0, 100 * S, 4, (), waits=waits, slow_steps=(step,))
    made = replace(report, ranks=(caused, *report.ranks[1:]), history=history)
    [table] = build_tables(made, ("step",))
    return table.rows[0][-1]


def test_a_slow_step_names_its_cause_and_the_awaited_rank() -> None:
    lost = (WAITING_FOR_RANKS, 6 * S), (UNATTRIBUTED, 2 * S), ("storage-local", 2 * S)
    assert chiefly(*lost) == "storage-local: waiting for rank 0"
    assert chiefly(*lost, rank=None) == "waiting for other ranks, mainly late for storage-local"
    assert chiefly(("storage-local", 3 * S), (WAITING_FOR_RANKS, S)) == "storage-local"


def test_a_recorded_wait_of_the_step_sets_its_cause() -> None:
    waits = (
        Wait(205 * S, 2 * S, 1, 0, "cpu-throttled", 17),
        Wait(205 * S, 1 * S, 1, 0, "launch-bound", 17),
        Wait(205 * S, 9 * S, 1, 0, "cpu-gc", 16),  # of another step
        Wait(205 * S, 9 * S, 0, 1, "cpu-gil", 17),  # for another rank
    )
    lost = (WAITING_FOR_RANKS, 6 * S), ("storage-local", 4 * S)
    assert chiefly(*lost, waits=waits) == "cpu-throttled: waiting for rank 0"


def test_without_a_recorded_wait_the_last_rank_is_named() -> None:
    assert (
        chiefly((WAITING_FOR_RANKS, 9 * S), ("cpu-gc", S // 2))
        == "storage-object: waiting for rank 0"
    )
    assert chiefly((WAITING_FOR_RANKS, 9 * S), rank=1) == "waiting for rank 1"
    assert chiefly((WAITING_FOR_RANKS, 9 * S), rank=None) == "waiting for other ranks"
