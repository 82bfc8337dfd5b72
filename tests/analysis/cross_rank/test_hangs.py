"""Ranks that had not left an operation when the recordings ended: who waited for whom."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterprof.analysis.cross_rank import hang_findings
from clusterprof.analysis.cross_rank.hangs import RecordedRank
from clusterprof.output.renderers.text.wording import list_warnings
from clusterprof.probe import layout
from clusterprof.report.model import Culprit, Report
from tests.support.faulty_recordings import (
    Machine,
    analyze_recordings,
    make_exit_event,
    make_group_event,
    make_two_ranks,
    make_unfinished_operation,
    write_on,
)
from tests.support.recordings import SECOND, Script
from tests.support.waiting_jobs import GROUP


def hanging(tmp_path: Path, *events: list, scripts: list[Script] | None = None) -> Report:
    """Both ranks step 20 times (until 13 s); the recordings end at 40 s."""
    for number, script in enumerate(scripts or make_two_ranks(steps=20)):
        script.end = 40.0
        script.main += " I26.0"
        script.worker += " I26.0"
        write_on(
            Machine(f"node-{number}"),
            script,
            tmp_path / f"n{number}",
            [make_group_event(GROUP, [0, 1]), *events[number]],
        )
    return analyze_recordings(tmp_path)


def standing(report: Report) -> list[float]:
    return [dict(rank.outside_buckets).get("fail-hang", 0) / SECOND for rank in report.ranks]


def test_a_rank_missing_from_an_operation_is_named_with_waiters(tmp_path: Path) -> None:
    word = make_unfinished_operation(
        18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE
    )
    report = hanging(tmp_path, [word], [])
    [hang] = [finding for finding in report.findings if finding.cause.id == "fail-hang"]
    assert [(culprit.node, culprit.rank) for culprit in hang.culprits] == [("node-1", 1)]
    assert standing(report) == [pytest.approx(26.7, abs=0.2), pytest.approx(27.0, abs=0.2)]
    [note] = [note for note in report.notes if note.startswith("progress stopped")]
    assert note.startswith(
        "progress stopped: rank 0 waited for 27 s in all_reduce 20 for rank 1 on"
    )
    assert note.endswith("asleep in do_poll.constprop.0")
    assert report.failures == (note,)
    assert list_warnings(report)[0] == f"{note[0].upper()}{note[1:]}."  # on the first screen


def test_a_crashed_rank_is_named_with_its_exit_code(tmp_path: Path) -> None:
    word = make_unfinished_operation(
        18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE
    )
    report = hanging(tmp_path, [word], [make_exit_event(14 * SECOND, 1, None)])
    [note] = [note for note in report.notes if note.startswith("progress stopped")]
    assert note.endswith("for rank 1 on node-1, which had ended with exit code 1")


def test_a_root_without_a_recording_is_reported_as_unseen(tmp_path: Path) -> None:
    scripts = make_two_ranks(steps=20)[:1]
    word = make_unfinished_operation(
        18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE
    )
    report = hanging(tmp_path, [word], scripts=scripts)
    [hang] = [finding for finding in report.findings if finding.cause.id == "fail-hang"]
    assert (hang.culprits, hang.grade) == ((), "B")
    [note] = [note for note in report.notes if note.startswith("progress stopped")]
    assert note.endswith("for rank 1, which has no recording: its state is not known")


def test_a_host_past_an_issued_operation_waits_for_missing_ranks(tmp_path: Path) -> None:
    # As on CUDA: rank 0 issued operation 20, left it at once and stands still somewhere else.
    scripts = make_two_ranks(steps=20)
    issued = (layout.COLLECTIVE, 13.3, 13.301, GROUP, 20, 10, layout.ALL_REDUCE)
    scripts[0].main_spans.append(issued)
    report = hanging(tmp_path, [], [], scripts=scripts)
    [hang] = [finding for finding in report.findings if finding.cause.id == "fail-hang"]
    assert [(culprit.node, culprit.rank) for culprit in hang.culprits] == [("node-1", 1)]
    [note] = [note for note in report.notes if note.startswith("progress stopped")]
    assert note.startswith(
        "progress stopped: rank 0 waited for 27 s in all_reduce 20 for rank 1 on"
    )


def test_ranks_idle_after_the_last_step_do_not_hang(tmp_path: Path) -> None:
    # Both saved something for a long time after the last step.
    report = hanging(tmp_path, [], [])
    assert [finding for finding in report.findings if finding.cause.id == "fail-hang"] == []


def test_a_hang_in_a_complete_operation_blames_no_rank(tmp_path: Path) -> None:
    word = make_unfinished_operation(18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.BARRIER)
    report = hanging(tmp_path, [word], [word])
    [hang] = [finding for finding in report.findings if finding.cause.id == "fail-hang"]
    assert hang.culprits == ()
    [note] = [note for note in report.notes if note.startswith("progress stopped")]
    assert note == (
        "progress stopped: ranks 0-1, the whole group, arrived at barrier 20 and none completed it"
        " for 27 s. Suspect the network or a device"
    )


def test_mutually_waiting_ranks_are_reported_as_a_circle(tmp_path: Path) -> None:
    first = make_unfinished_operation(
        18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE
    )
    second = make_unfinished_operation(18 * SECOND, round(13.3 * SECOND), 9, 0, layout.BARRIER)
    report = hanging(tmp_path, [first], [second, make_group_event(9, [0, 1])])
    [note] = [note for note in report.notes if note.startswith("progress stopped")]
    assert "ranks 0-1 wait for each other in a circle" in note
    assert "(rank 0 in all_reduce 20; rank 1 in barrier 0)" in note


def test_waiting_for_a_rank_still_working_is_no_hang(tmp_path: Path) -> None:
    scripts = make_two_ranks(steps=20)
    scripts[1].main_spans.append((layout.CHECKPOINT, 20.0, 35.0, 0))
    word = make_unfinished_operation(18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.BARRIER)
    report = hanging(tmp_path, [word], [], scripts=scripts)
    assert [finding for finding in report.findings if finding.cause.id == "fail-hang"] == []
    assert standing(report) == [0, 0]
    assert (
        "rank 0 had waited 27 s for rank 1 when the recording ended; rank 1 was still working"
    ) in report.notes
    assert report.failures == ()


def test_an_operation_that_completes_late_is_no_hang(tmp_path: Path) -> None:
    # The word was left after five seconds; the span came later.
    scripts = make_two_ranks(steps=20)
    for script in scripts:
        script.main_spans.append((layout.COLLECTIVE, 13.3, 20.0, GROUP, 20, 10, layout.BARRIER))
    word = make_unfinished_operation(19 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.BARRIER)
    report = hanging(tmp_path, [word], [word], scripts=scripts)
    assert [note for note in report.notes if "progress" in note or "at work" in note] == []


def test_operations_of_different_kind_are_not_matched_by_sequence_number(tmp_path: Path) -> None:
    first = make_unfinished_operation(
        18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE
    )
    second = make_unfinished_operation(
        18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.BROADCAST
    )
    report = hanging(tmp_path, [first], [second])
    [note] = [note for note in report.notes if note.startswith("progress stopped")]
    assert "ranks 0-1 wait for each other in a circle" in note
    assert "(rank 0 in all_reduce 20; rank 1 in broadcast 20)" in note
    # With one rank on each side nobody can say which of them is wrong.
    [hang] = [finding for finding in report.findings if finding.cause.id == "fail-hang"]
    assert [culprit.rank for culprit in hang.culprits] == [0, 1]


def steps_after(scripts: list[Script], count: int) -> list[Script]:
    """Let rank 1 go on alone: this many steps from 14 s on, each of half a second."""
    scripts[1].main_spans += [
        (layout.STEP, 14 + number / 2, 14.5 + number / 2, 20 + number, 1, -1, -1)
        for number in range(count)
    ]
    return scripts


def test_a_rank_that_steps_on_without_the_others_is_named(tmp_path: Path) -> None:
    word = make_unfinished_operation(
        18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE
    )
    report = hanging(tmp_path, [word], [], scripts=steps_after(make_two_ranks(steps=20), 50))
    [hang] = [finding for finding in report.findings if finding.cause.id == "fail-hang"]
    assert [(culprit.node, culprit.rank) for culprit in hang.culprits] == [("node-1", 1)]
    [note] = [note for note in report.notes if note.startswith("progress stopped")]
    assert "for rank 1 on node-1, which went on without it for 50 steps" in note


def test_a_few_steps_without_an_operation_are_no_divergence(tmp_path: Path) -> None:
    word = make_unfinished_operation(
        18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE
    )
    scripts = steps_after(make_two_ranks(steps=20), 5)
    scripts[1].main_spans.append((layout.CHECKPOINT, 20.0, 35.0, 0))
    report = hanging(tmp_path, [word], [], scripts=scripts)
    assert [finding for finding in report.findings if finding.cause.id == "fail-hang"] == []


def test_a_reused_pid_does_not_change_the_culprit_device() -> None:
    ranks = [
        SimpleNamespace(ledger=SimpleNamespace(pid=7, device=device), started_ticks=ticks)
        for device, ticks in (("gpu-0", 10), ("gpu-1", 20))
    ]
    node: Any = SimpleNamespace(ranks=ranks, facts=SimpleNamespace(name="node-a"))
    ending: Any = SimpleNamespace(pid=7, started_ticks=20, job_position=SimpleNamespace(rank=1))
    culprit = hang_findings._build_hang_culprit(RecordedRank(node, ending))
    assert culprit == Culprit("node-a", 1, "gpu-1")
