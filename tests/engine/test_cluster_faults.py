"""Recordings that are not what one hopes for: always a report, which says what it cannot say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faulty import (
    HOUR,
    Machine,
    announced,
    cut_in_the_middle_of_a_frame,
    exited,
    under_way,
    write_on,
)
from recordings import SECOND, Script
from test_analysis import check_books
from test_peers import GROUP, STEPS, job, seconds_of

from clusterprof.engine.aligned import aligned
from clusterprof.engine.limits import bound
from clusterprof.engine.local import analyze
from clusterprof.engine.node import analyse_node
from clusterprof.engine.peers import Across, across_ranks
from clusterprof.findings import Report
from clusterprof.probe import layout
from clusterprof.trace.reader import node_folders

STEP_S = 0.6
# What `job((0.0, 0.3), (0.2, 0.3))` says of rank 0 when both are recorded (test_peers).
BLAMED = {"net-transfer": 6.0, "storage-local": 5.9, "cpu-preprocess": 5.9, "unattributed": 0.2}


def pair(steps: int = STEPS) -> list[Script]:
    return job((0.0, 0.3), (0.2, 0.3), steps=steps)


def with_variables(script: Script, **variables: str) -> Script:
    script.variables = {**script.variables, **variables}
    return script


def without(script: Script, *names: str) -> Script:
    script.variables = {k: v for k, v in script.variables.items() if k not in names}
    return script


def analysed(folder: Path) -> Report:
    report = analyze(folder)
    check_books(report)
    return report


def laid_beside(folder: Path) -> Across:
    return across_ranks([analyse_node(one, bound({})) for one in node_folders(folder)])


def by_rank(report: Report, rank: int) -> list[dict[str, float]]:
    """What each process that was this rank lost, in the order of the recordings."""
    rows = [row for row, one in enumerate(report.ranks) if one.rank == rank]
    return [seconds_of(report, row) for row in rows]


def test_ranks_without_a_recording_are_named(tmp_path: Path) -> None:
    for number, script in enumerate(pair()):
        with_variables(script, WORLD_SIZE="5")
        event = announced(GROUP, [0, 1, 2, 3, 4])
        write_on(Machine(f"node-{number}"), script, tmp_path / f"n{number}", [event])
    report = analysed(tmp_path)
    # It waited 0.2 s for rank 1 at least; for whom in the 0.1 s after that cannot be told.
    assert seconds_of(report, 0) == {
        "storage-local": 5.9, "cpu-preprocess": 5.9, "sync-unknown-peer": 6.0, "unattributed": 0.2,
    }  # fmt: skip
    [blind] = [one for one in report.blinds if one.what == "ranks"]
    assert (blind.kind, blind.message) == (
        "absent",
        "3 of 5 ranks of job a job have no recording: 2-4; waits for them are sync-unknown-peer",
    )


def test_a_recording_that_was_cut_off_counts_as_far_as_it_goes(tmp_path: Path) -> None:
    for number, script in enumerate(pair()):
        write_on(
            Machine(f"node-{number}"), script, tmp_path / f"n{number}", [announced(GROUP, [0, 1])]
        )
    cut_in_the_middle_of_a_frame(tmp_path / "n1", 0.5)
    report = analysed(tmp_path)
    assert any(one.kind == "lost" and one.what == "recording of node-1" for one in report.blinds)
    steps = report.ranks[1].steps
    assert 10 < steps < 50
    assert report.ranks[0].steps == STEPS
    found = seconds_of(report, 0)
    # Each step of which rank 1 is seen: 0.1 of transfer and 0.2 of its cause; else 0.3 unknown.
    seen = round(found["net-transfer"] / 0.1)
    assert steps <= seen <= steps + 1
    assert found["sync-unknown-peer"] == pytest.approx(0.3 * (STEPS - seen))
    assert found["storage-local"] == pytest.approx(0.1 * (seen - 1))


def test_two_jobs_on_the_same_nodes_are_told_apart(tmp_path: Path) -> None:
    for name, scripts in (("first", pair()), ("second", job((0.2, 0.3), (0.0, 0.3)))):
        for number, script in enumerate(scripts):
            with_variables(script, TORCHELASTIC_RUN_ID=name)
            ticks = 1 if name == "first" else 2  # the same pid in another container
            machine = Machine(f"node-{number}", f"boot-{number}", started_ticks=ticks)
            write_on(machine, script, tmp_path / f"n{number}-{name}")
    report = analysed(tmp_path)
    loading = {"net-transfer": 6.0, "storage-local": 6.0, "cpu-preprocess": 6.0}
    assert by_rank(report, 0) == [BLAMED, loading]
    assert by_rank(report, 1) == [loading, BLAMED]
    assert (
        "recordings of 2 jobs lie here: first (ranks 0-1); second (ranks 0-1); ranks of different"
        " jobs are never laid side by side"
    ) in report.notes


def test_jobs_without_a_name_are_told_apart_by_where_their_ranks_met(tmp_path: Path) -> None:
    for number, script in enumerate(pair()):
        without(script, "TORCHELASTIC_RUN_ID")
        with_variables(script, MASTER_ADDR="node-0", MASTER_PORT="29500")
        write_on(Machine(f"node-{number}"), script, tmp_path / f"n{number}")
    for script in pair()[1:]:  # another job's rank 1, in the folder by mistake
        without(script, "TORCHELASTIC_RUN_ID")
        with_variables(script, MASTER_ADDR="node-9", MASTER_PORT="29500")
        write_on(Machine("node-9"), script, tmp_path / "n9")
    report = analysed(tmp_path)
    assert by_rank(report, 0) == [BLAMED]
    assert "node-0:29500 (ranks 0-1); node-9:29500 (ranks 1)" in "".join(report.notes)
    [blind] = [one for one in report.blinds if one.what == "ranks"]
    assert blind.message.startswith("1 of 2 ranks of job node-9:29500 have no recording: 0;")


def test_one_rank_twice_at_the_same_time_is_not_guessed_about(tmp_path: Path) -> None:
    scripts = [*pair(), pair()[1]]
    for number, script in enumerate(scripts):
        write_on(Machine(f"node-{number}"), script, tmp_path / f"n{number}")
    report = analysed(tmp_path)
    for rank in range(3):
        assert "net-transfer" not in seconds_of(report, rank)
    # 0.3 s of each step of rank 0, and 0.1 of both that call themselves rank 1
    assert report.unattributed_reasons == (("peers", round(60 * 0.5 * SECOND)),)
    [note] = [one for one in report.notes if "at the same time" in one]
    assert note.startswith("rank 1 of job a job was several processes at the same time (node-1 pid")


def test_a_rank_that_ends_earlier_is_matched_as_far_as_it_went(tmp_path: Path) -> None:
    whole, short = pair()[0], pair(steps=40)[1]
    for number, script in enumerate((whole, short)):
        write_on(
            Machine(f"node-{number}"), script, tmp_path / f"n{number}", [announced(GROUP, [0, 1])]
        )
    report = analysed(tmp_path)
    assert [one.steps for one in report.ranks] == [60, 40]
    assert seconds_of(report, 0) == {
        "net-transfer": 4.0, "storage-local": 3.9, "cpu-preprocess": 3.9, "unattributed": 0.2,
        "sync-unknown-peer": 6.0,
    }  # fmt: skip


def test_clocks_that_are_hours_apart_change_nothing_but_a_note(tmp_path: Path) -> None:
    machines = (
        Machine("node-0", ahead_ns=5 * HOUR, wall_ns=100 * HOUR),
        Machine("node-1", ahead_ns=77 * SECOND, wall_ns=102 * HOUR),
    )
    for number, (machine, script) in enumerate(zip(machines, pair())):
        write_on(machine, script, tmp_path / f"n{number}")
    report = analysed(tmp_path)
    assert by_rank(report, 0) == [BLAMED]
    across = laid_beside(tmp_path)
    assert across.clock_reason == ""
    # Rank 1 cannot leave before rank 0 comes: 0.3 s is all that clocks laid by leaves may be off.
    assert across.clock_bound_ns == pytest.approx(0.3 * SECOND, rel=1e-6)
    assert any(
        note.startswith("the wall clock of node-1 is 7,200 s ahead of that of node-0; ")
        for note in report.notes
    )


def test_times_of_both_nodes_are_put_on_one_clock_whatever_their_walls_say(tmp_path: Path) -> None:
    machines = (
        Machine("node-0", ahead_ns=5 * HOUR, wall_ns=100 * HOUR),
        Machine("node-1", ahead_ns=77 * SECOND, wall_ns=102 * HOUR),
    )
    for number, (machine, script) in enumerate(zip(machines, pair())):
        write_on(machine, script, tmp_path / f"n{number}")
    nodes = [analyse_node(one, bound({})) for one in node_folders(tmp_path)]
    found = aligned(nodes)
    # 20 s after the beginning of the script, on either clock
    first, second = (
        found.when_ns(number, np.array([machine.ahead_ns + 20 * SECOND]))
        for number, machine in enumerate(machines)
    )
    assert abs(int(first[0] - second[0])) <= 2
    assert 100 * HOUR <= int(first[0]) <= 103 * HOUR


def test_few_operations_in_common_leave_the_clocks_alone(tmp_path: Path) -> None:
    for number, script in enumerate(pair(steps=5)):
        write_on(Machine(f"node-{number}", ahead_ns=number * HOUR), script, tmp_path / f"n{number}")
    across = laid_beside(tmp_path)
    assert across.clock_bound_ns is None
    few = "too few operations in which hosts wait together: node-0, node-1"
    assert across.clock_reason == few


def test_hosts_that_leave_the_waiting_to_a_device_have_no_common_clock(tmp_path: Path) -> None:
    for number, script in enumerate(pair()):
        write_on(Machine(f"node-{number}", ahead_ns=number * HOUR), script, tmp_path / f"n{number}")
    nodes = [analyse_node(one, bound({})) for one in node_folders(tmp_path)]
    [books] = nodes[1].books
    on_device = replace(books, ledger=replace(books.ledger, device="GPU-1"))
    across = across_ranks([nodes[0], replace(nodes[1], books=(on_device,))])
    assert across.clock_bound_ns is None
    assert across.clock_reason.startswith("too few operations in which hosts wait together")


def test_a_rank_that_began_anew_is_two_lives(tmp_path: Path) -> None:
    for life in (0, 1):
        for number, script in enumerate(pair()):
            with_variables(script, TORCHELASTIC_RESTART_COUNT=str(life))
            machine = Machine(
                f"node-{number}", f"boot-{number}", life * 50 * SECOND, life * 50 * SECOND,
                started_ticks=1 + life * 5000,
            )  # fmt: skip
            write_on(machine, script, tmp_path / f"n{number}-{life}")
    report = analysed(tmp_path)
    assert by_rank(report, 0) == [BLAMED, BLAMED]
    assert "the ranks of job a job began anew once; each life has lines of its own" in report.notes


def test_lives_that_no_launcher_counted_are_paired_in_order(tmp_path: Path) -> None:
    # Node 1's wall clock is 60 s ahead: by it the first life there would meet the second of node 0.
    for life in (0, 1):
        for number, script in enumerate(pair()):
            machine = Machine(
                f"node-{number}", f"boot-{number}", life * 50 * SECOND,
                (life * 50 + number * 60) * SECOND, started_ticks=1 + life * 5000,
            )  # fmt: skip
            write_on(machine, script, tmp_path / f"n{number}-{life}")
    report = analysed(tmp_path)
    assert by_rank(report, 0) == [BLAMED, BLAMED]


def test_a_late_joiner_is_matched_from_when_it_is_seen(tmp_path: Path) -> None:
    scripts = pair()
    late_s = round(1.0 + 20 * STEP_S, 6)
    for spans in (scripts[1].main_spans, scripts[1].worker_spans):
        spans[:] = [row for row in spans if row[1] >= late_s or row[0] == layout.WORKER_START]
    for number, script in enumerate(scripts):
        write_on(
            Machine(f"node-{number}"), script, tmp_path / f"n{number}", [announced(GROUP, [0, 1])]
        )
    report = analysed(tmp_path)
    found = seconds_of(report, 0)
    assert found["sync-unknown-peer"] == pytest.approx(20 * 0.3)
    assert found["net-transfer"] == pytest.approx(4.0)
    assert found["storage-local"] == pytest.approx(3.9)


def hanging(tmp_path: Path, *events: list, scripts: list[Script] | None = None) -> Report:
    """Both ranks step 20 times (until 13 s); the recordings end at 40 s."""
    for number, script in enumerate(scripts or pair(steps=20)):
        script.end = 40.0
        script.main += " I26.0"
        script.worker += " I26.0"
        write_on(
            Machine(f"node-{number}"), script, tmp_path / f"n{number}",
            [announced(GROUP, [0, 1]), *events[number]],
        )  # fmt: skip
    return analysed(tmp_path)


def standing(report: Report) -> list[float]:
    return [dict(one.outside_buckets).get("fail-hang", 0) / SECOND for one in report.ranks]


def test_a_rank_that_never_came_is_named_with_who_waited(tmp_path: Path) -> None:
    word = under_way(18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE)
    report = hanging(tmp_path, [word], [])
    [hang] = [one for one in report.findings if one.cause.id == "fail-hang"]
    assert [(one.node, one.rank) for one in hang.culprits] == [("node-1", 1)]
    assert standing(report) == [pytest.approx(26.7, abs=0.2), pytest.approx(27.0, abs=0.2)]
    [note] = [one for one in report.notes if one.startswith("progress stopped")]
    assert note.startswith(
        "progress stopped: rank 0 waited for 27 s in all_reduce 20 for rank 1 on"
    )
    assert note.endswith("asleep in do_poll.constprop.0")


def test_a_rank_that_crashed_is_named_with_how_it_ended(tmp_path: Path) -> None:
    word = under_way(18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE)
    report = hanging(tmp_path, [word], [exited(14 * SECOND, 1, None)])
    [note] = [one for one in report.notes if one.startswith("progress stopped")]
    assert note.endswith("for rank 1 on node-1, which had ended with exit code 1")


def test_a_root_without_a_recording_is_said_to_be_unseen(tmp_path: Path) -> None:
    scripts = pair(steps=20)[:1]
    word = under_way(18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE)
    report = hanging(tmp_path, [word], scripts=scripts)
    [hang] = [one for one in report.findings if one.cause.id == "fail-hang"]
    assert (hang.culprits, hang.grade) == ((), "B")
    [note] = [one for one in report.notes if one.startswith("progress stopped")]
    assert note.endswith("for rank 1, which has no recording: what it did is not known")


def test_an_operation_that_all_had_come_to_hangs_itself(tmp_path: Path) -> None:
    word = under_way(18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.BARRIER)
    report = hanging(tmp_path, [word], [word])
    [hang] = [one for one in report.findings if one.cause.id == "fail-hang"]
    assert hang.culprits == ()
    [note] = [one for one in report.notes if one.startswith("progress stopped")]
    assert note == (
        "progress stopped: ranks 0-1 had come to barrier 20, all of its members, and none left it"
        " for 27 s: the network, or a device"
    )


def test_ranks_that_wait_for_each_other_are_a_circle(tmp_path: Path) -> None:
    first = under_way(18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.ALL_REDUCE)
    second = under_way(18 * SECOND, round(13.3 * SECOND), 9, 0, layout.BARRIER)
    report = hanging(tmp_path, [first], [second, announced(9, [0, 1])])
    [note] = [one for one in report.notes if one.startswith("progress stopped")]
    assert "ranks 0-1 wait for each other in a circle" in note
    assert "(rank 0 in all_reduce 20; rank 1 in barrier 0)" in note


def test_who_is_at_work_is_no_hang(tmp_path: Path) -> None:
    scripts = pair(steps=20)
    scripts[1].main_spans.append((layout.CHECKPOINT, 20.0, 35.0, 0))
    word = under_way(18 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.BARRIER)
    report = hanging(tmp_path, [word], [], scripts=scripts)
    assert [one for one in report.findings if one.cause.id == "fail-hang"] == []
    assert standing(report) == [0, 0]
    assert (
        "when the recording ended rank 0 had been waiting for 27 s for rank 1, which was still at"
        " work"
    ) in report.notes


def test_an_operation_that_ended_after_all_is_no_hang(tmp_path: Path) -> None:
    # The word was left after five seconds; the span came later.
    scripts = pair(steps=20)
    for script in scripts:
        script.main_spans.append((layout.COLLECTIVE, 13.3, 20.0, GROUP, 20, 10, layout.BARRIER))
    word = under_way(19 * SECOND, round(13.3 * SECOND), GROUP, 20, layout.BARRIER)
    report = hanging(tmp_path, [word], [word], scripts=scripts)
    assert [one for one in report.notes if "progress" in one or "at work" in one] == []


def test_machines_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for number, script in enumerate(pair()):
        write_on(Machine("localhost", f"{number}abcdef01-9"), script, tmp_path / f"n{number}")
    report = analysed(tmp_path)
    assert [one.name for one in report.nodes] == ["localhost-0abcdef0", "localhost-1abcdef0"]
    assert [one.node for one in report.ranks] == ["localhost-0abcdef0", "localhost-1abcdef0"]
    assert by_rank(report, 0) == [BLAMED]


def test_containers_of_one_machine_share_its_clock_and_stay_two(tmp_path: Path) -> None:
    # The same pid and start in both: each has process ids of its own.
    for number, script in enumerate(pair()):
        write_on(Machine(f"pod-{number}", "one machine"), script, tmp_path / f"n{number}")
    report = analysed(tmp_path)
    assert len(report.ranks) == 2
    assert by_rank(report, 0) == [BLAMED]
    across = laid_beside(tmp_path)
    assert (across.clock_bound_ns, across.clock_reason) == (0, "")


def test_a_process_that_two_recorders_saw_counts_once(tmp_path: Path) -> None:
    for number, script in enumerate(pair()):
        machine = Machine(f"node-{number}", f"boot-{number}")
        write_on(machine, script, tmp_path / f"n{number}")
        again = pair(steps=30)[number]
        write_on(machine, again, tmp_path / f"n{number}-again")
    report = analysed(tmp_path)
    assert [(one.rank, one.steps) for one in report.ranks] == [(0, 60), (1, 60)]
    assert by_rank(report, 0) == [BLAMED]
    assert "rank 1 on node-1 was recorded twice; it counts once" in report.notes


def test_a_container_and_its_machine_see_the_same_rank_once(tmp_path: Path) -> None:
    scripts = pair()
    for number, script in enumerate(scripts):
        write_on(Machine(f"node-{number}", f"boot-{number}"), script, tmp_path / f"n{number}")
    write_on(Machine("pod", "boot-1"), replace(scripts[1]), tmp_path / "pod")
    report = analysed(tmp_path)
    assert sorted(one.rank for one in report.ranks) == [0, 1]


@pytest.mark.parametrize("late_ms", [12, 60])
def test_a_rank_that_always_leaves_late_is_within_the_bound(late_ms: int, tmp_path: Path) -> None:
    # Rank 1 leaves later than rank 0, always: its clock seems to be ahead by as much.
    scripts = job((0.0, 0.3), (0.0, 0.3))
    late = late_ms / 1000
    for row, span in enumerate(scripts[1].main_spans):
        if span[0] == layout.COLLECTIVE:
            scripts[1].main_spans[row] = (*span[:2], round(span[2] + late, 6), *span[3:])
    for number, script in enumerate(scripts):
        write_on(Machine(f"node-{number}", ahead_ns=number * HOUR), script, tmp_path / f"n{number}")
    across = laid_beside(tmp_path)
    # Laid over each other by who left when, the clocks are off by `late`; both stay 0.1 s.
    assert across.clock_bound_ns is not None
    assert late * SECOND <= across.clock_bound_ns <= 0.2 * SECOND
