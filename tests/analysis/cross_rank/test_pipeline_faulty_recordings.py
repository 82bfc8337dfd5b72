"""Recordings that are not what one hopes for: always a report, which says what it cannot say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.analysis.cross_rank.pipeline import analyze_across_ranks
from clusterprof.probe import layout
from tests.support.faulty_recordings import (
    BLAMED,
    Machine,
    add_launcher_variables,
    analyze_nodes,
    analyze_recordings,
    list_lost_by_rank,
    make_group_event,
    make_two_ranks,
    remove_launcher_variables,
    truncate_in_a_frame,
    write_on,
)
from tests.support.recordings import SECOND
from tests.support.waiting_jobs import GROUP, STEPS, make_scripts, sum_rank_seconds


def test_ranks_without_a_recording_are_named(tmp_path: Path) -> None:
    for number, script in enumerate(make_two_ranks()):
        add_launcher_variables(script, WORLD_SIZE="5")
        event = make_group_event(GROUP, [0, 1, 2, 3, 4])
        write_on(Machine(f"node-{number}"), script, tmp_path / f"n{number}", [event])
    report = analyze_recordings(tmp_path)
    # It waited 0.2 s for rank 1 at least; for whom in the 0.1 s after that is unknown.
    assert sum_rank_seconds(report, 0) == {
        "storage-local": 6.0,
        "cpu-preprocess": 6.0,
        "sync-unknown-peer": 6.0,
    }
    [blind] = [blind_spot for blind_spot in report.coverage_gaps if blind_spot.what == "ranks"]
    assert (blind.kind, blind.message) == (
        "absent",
        "3 of 5 ranks of job a job have no recording: 2-4; the cause of waits for"
        " them is not known (sync-unknown-peer)",
    )


def test_a_truncated_recording_counts_up_to_its_end(tmp_path: Path) -> None:
    for number, script in enumerate(make_two_ranks()):
        write_on(
            Machine(f"node-{number}"),
            script,
            tmp_path / f"n{number}",
            [make_group_event(GROUP, [0, 1])],
        )
    truncate_in_a_frame(tmp_path / "n1", 0.5)
    report = analyze_recordings(tmp_path)
    assert any(
        blind_spot.kind == "lost" and blind_spot.what == "recording of node-1"
        for blind_spot in report.coverage_gaps
    )
    steps = report.ranks[1].steps
    assert 10 < steps < 50
    assert report.ranks[0].steps == STEPS
    seconds = sum_rank_seconds(report, 0)
    # Each step of which rank 1 is seen: 0.1 of transfer and 0.2 of its cause; else 0.3 unknown.
    seen = round(seconds["net-transfer"] / 0.1)
    assert steps <= seen <= steps + 1
    # Every rank was recorded: no unknown peer is to blame for what is not known of rank 1.
    assert "sync-unknown-peer" not in seconds
    assert seconds["unattributed"] == pytest.approx(0.3 * (STEPS - seen))
    assert seconds["storage-local"] == pytest.approx(0.1 * seen)


def test_two_jobs_on_the_same_nodes_are_distinguished(tmp_path: Path) -> None:
    for name, scripts in (
        ("first", make_two_ranks()),
        ("second", make_scripts((0.2, 0.3), (0.0, 0.3))),
    ):
        for number, script in enumerate(scripts):
            add_launcher_variables(script, TORCHELASTIC_RUN_ID=name)
            ticks = 1 if name == "first" else 2  # the same pid in another container
            machine = Machine(f"node-{number}", f"boot-{number}", started_ticks=ticks)
            write_on(machine, script, tmp_path / f"n{number}-{name}")
    report = analyze_recordings(tmp_path)
    loading = {"net-transfer": 6.0, "storage-local": 6.0, "cpu-preprocess": 6.0}
    assert list_lost_by_rank(report, 0) == [BLAMED, loading]
    assert list_lost_by_rank(report, 1) == [loading, BLAMED]
    assert (
        "recordings of 2 jobs were given: first (ranks 0-1); second (ranks 0-1); ranks of different"
        " jobs are never compared"
    ) in report.notes


def test_unnamed_jobs_are_distinguished_by_their_master_address(tmp_path: Path) -> None:
    for number, script in enumerate(make_two_ranks()):
        remove_launcher_variables(script, "TORCHELASTIC_RUN_ID")
        add_launcher_variables(script, MASTER_ADDR="node-0", MASTER_PORT="29500")
        write_on(Machine(f"node-{number}"), script, tmp_path / f"n{number}")
    for script in make_two_ranks()[1:]:  # another job's rank 1, in the folder by mistake
        remove_launcher_variables(script, "TORCHELASTIC_RUN_ID")
        add_launcher_variables(script, MASTER_ADDR="node-9", MASTER_PORT="29500")
        write_on(Machine("node-9"), script, tmp_path / "n9")
    report = analyze_recordings(tmp_path)
    assert list_lost_by_rank(report, 0) == [BLAMED]
    assert "node-0:29500 (ranks 0-1); node-9:29500 (ranks 1)" in "".join(report.notes)
    [blind] = [blind_spot for blind_spot in report.coverage_gaps if blind_spot.what == "ranks"]
    assert blind.message.startswith("1 of 2 ranks of job node-9:29500 have no recording: 0;")


def test_a_rank_held_by_several_processes_is_not_matched(tmp_path: Path) -> None:
    scripts = [*make_two_ranks(), make_two_ranks()[1]]
    for number, script in enumerate(scripts):
        write_on(Machine(f"node-{number}"), script, tmp_path / f"n{number}")
    report = analyze_recordings(tmp_path)
    for rank in range(3):
        assert "net-transfer" not in sum_rank_seconds(report, rank)
    # 0.3 s of each step of rank 0, and 0.1 of both that call themselves rank 1
    assert report.unattributed_reasons == (("peers", round(60 * 0.5 * SECOND)),)
    [note] = [note for note in report.notes if "at once" in note]
    assert note.startswith("rank 1 of job a job was held by several processes at once (node-1 pid")


def test_a_rank_that_ends_earlier_is_matched_until_its_end(tmp_path: Path) -> None:
    whole, short = make_two_ranks()[0], make_two_ranks(steps=40)[1]
    for number, script in enumerate((whole, short)):
        write_on(
            Machine(f"node-{number}"),
            script,
            tmp_path / f"n{number}",
            [make_group_event(GROUP, [0, 1])],
        )
    report = analyze_recordings(tmp_path)
    assert [rank.steps for rank in report.ranks] == [60, 40]
    assert sum_rank_seconds(report, 0) == {
        "net-transfer": 4.0,
        "storage-local": 4.0,
        "cpu-preprocess": 4.0,
        "unattributed": 6.0,
    }
    assert dict(report.unattributed_reasons)["peers-unknown"] == 6 * SECOND


def test_a_restarted_rank_has_two_incarnations(tmp_path: Path) -> None:
    for life in (0, 1):
        for number, script in enumerate(make_two_ranks()):
            add_launcher_variables(script, TORCHELASTIC_RESTART_COUNT=str(life))
            machine = Machine(
                f"node-{number}",
                f"boot-{number}",
                life * 50 * SECOND,
                life * 50 * SECOND,
                started_ticks=1 + life * 5000,
            )
            write_on(machine, script, tmp_path / f"n{number}-{life}")
    report = analyze_recordings(tmp_path)
    assert list_lost_by_rank(report, 0) == [BLAMED, BLAMED]
    assert (
        "the ranks of job a job were restarted once; each incarnation has lines of its"
        " own" in report.notes
    )


def test_uncounted_incarnations_are_paired_in_order(tmp_path: Path) -> None:
    # Node 1's wall clock is 60 s ahead: by it the first life there would meet the second of node 0.
    for life in (0, 1):
        for number, script in enumerate(make_two_ranks()):
            machine = Machine(
                f"node-{number}",
                f"boot-{number}",
                life * 50 * SECOND,
                (life * 50 + number * 60) * SECOND,
                started_ticks=1 + life * 5000,
            )
            write_on(machine, script, tmp_path / f"n{number}-{life}")
    report = analyze_recordings(tmp_path)
    assert list_lost_by_rank(report, 0) == [BLAMED, BLAMED]


def test_a_late_joiner_is_matched_from_its_first_step(tmp_path: Path) -> None:
    scripts = make_two_ranks()
    late_s = 13.0  # when its 20th step ends
    for spans in (scripts[1].main_spans, scripts[1].worker_spans):
        spans[:] = [row for row in spans if row[1] >= late_s or row[0] == layout.WORKER_START]
    for number, script in enumerate(scripts):
        write_on(
            Machine(f"node-{number}"),
            script,
            tmp_path / f"n{number}",
            [make_group_event(GROUP, [0, 1])],
        )
    report = analyze_recordings(tmp_path)
    seconds = sum_rank_seconds(report, 0)
    assert "sync-unknown-peer" not in seconds
    # 0.3 of each, and 0.2 of the first step that it saw in part
    assert dict(report.unattributed_reasons)["peers-unknown"] == pytest.approx(6.2 * SECOND)
    assert seconds["net-transfer"] == pytest.approx(4.0)
    assert seconds["storage-local"] == pytest.approx(3.9)


def test_machines_with_the_same_name_are_distinguished(tmp_path: Path) -> None:
    for number, script in enumerate(make_two_ranks()):
        write_on(Machine("localhost", f"{number}abcdef01-9"), script, tmp_path / f"n{number}")
    report = analyze_recordings(tmp_path)
    assert [node.name for node in report.nodes] == ["localhost-0abcdef0", "localhost-1abcdef0"]
    assert [rank.node for rank in report.ranks] == ["localhost-0abcdef0", "localhost-1abcdef0"]
    assert list_lost_by_rank(report, 0) == [BLAMED]


def test_a_process_recorded_twice_counts_once(tmp_path: Path) -> None:
    for number, script in enumerate(make_two_ranks()):
        machine = Machine(f"node-{number}", f"boot-{number}")
        write_on(machine, script, tmp_path / f"n{number}")
        again = make_two_ranks(steps=30)[number]
        write_on(machine, again, tmp_path / f"n{number}-again")
    report = analyze_recordings(tmp_path)
    assert [(rank.rank, rank.steps) for rank in report.ranks] == [(0, 60), (1, 60)]
    assert list_lost_by_rank(report, 0) == [BLAMED]
    assert "rank 1 on node-1 was recorded twice; it counts once" in report.notes


def test_a_rank_recorded_in_container_and_machine_counts_once(tmp_path: Path) -> None:
    scripts = make_two_ranks()
    for number, script in enumerate(scripts):
        write_on(Machine(f"node-{number}", f"boot-{number}"), script, tmp_path / f"n{number}")
    write_on(Machine("pod", "boot-1"), replace(scripts[1]), tmp_path / "pod")
    report = analyze_recordings(tmp_path)
    assert sorted(rank.rank for rank in report.ranks) == [0, 1]


def test_a_device_that_two_ranks_share_is_reported(tmp_path: Path) -> None:
    nodes = []
    for number, script in enumerate(make_two_ranks()):
        write_on(Machine(f"pod-{number}", "one machine"), script, tmp_path / f"n{number}")
    for node in analyze_nodes(tmp_path):
        [books] = node.ranks
        shared = replace(books, ledger=replace(books.ledger, device="GPU-1f2e"))
        nodes.append(replace(node, ranks=(shared,)))
    assert analyze_across_ranks(nodes).notes == (
        "GPU-1f2e was used by several processes at once (pod-0 pid 100, pod-1 pid 100): its time"
        " counts for each of them",
    )
