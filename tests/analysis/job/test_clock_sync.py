"""Nodes with unrelated clocks: aligned, with a bound of the error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.cross_rank.pipeline import analyze_across_ranks
from clusterprof.analysis.job.clock_sync import align_node_clocks
from clusterprof.probe import layout
from tests.support.faulty_recordings import (
    BLAMED,
    HOUR,
    Machine,
    analyze_nodes,
    analyze_recordings,
    analyze_together,
    list_lost_by_rank,
    make_two_ranks,
    write_on,
)
from tests.support.recordings import SECOND, make_training
from tests.support.waiting_jobs import make_scripts


def test_clocks_hours_apart_leave_the_result_unchanged(tmp_path: Path) -> None:
    machines = (
        Machine("node-0", ahead_ns=5 * HOUR, wall_ns=100 * HOUR),
        Machine("node-1", ahead_ns=77 * SECOND, wall_ns=102 * HOUR),
    )
    for number, (machine, script) in enumerate(zip(machines, make_two_ranks())):
        write_on(machine, script, tmp_path / f"n{number}")
    report = analyze_recordings(tmp_path)
    assert list_lost_by_rank(report, 0) == [BLAMED]
    across = analyze_together(tmp_path)
    assert across.clock_reason == ""
    # Rank 1 cannot leave before rank 0 comes: clocks aligned by leaves may be off by 0.3 s.
    assert across.clock_bound_ns == pytest.approx(0.3 * SECOND, rel=1e-6)
    assert any(
        note.startswith("the wall clock of node-1 is 7,200 s ahead of that of node-0; ")
        for note in report.notes
    )


def test_node_times_are_aligned_despite_wrong_wall_clocks(tmp_path: Path) -> None:
    machines = (
        Machine("node-0", ahead_ns=5 * HOUR, wall_ns=100 * HOUR),
        Machine("node-1", ahead_ns=77 * SECOND, wall_ns=102 * HOUR),
    )
    for number, (machine, script) in enumerate(zip(machines, make_two_ranks())):
        write_on(machine, script, tmp_path / f"n{number}")
    nodes = analyze_nodes(tmp_path)
    node_clocks = align_node_clocks(nodes)
    # 20 s after the beginning of the script, on either clock
    first, second = (
        node_clocks.to_common_ns(number, np.array([machine.ahead_ns + 20 * SECOND]))
        for number, machine in enumerate(machines)
    )
    assert abs(int(first[0] - second[0])) <= 2
    assert 100 * HOUR <= int(first[0]) <= 103 * HOUR


def test_too_few_common_operations_leave_clocks_unaligned(tmp_path: Path) -> None:
    for number, script in enumerate(make_two_ranks(steps=5)):
        write_on(Machine(f"node-{number}", ahead_ns=number * HOUR), script, tmp_path / f"n{number}")
    across = analyze_together(tmp_path)
    assert across.clock_bound_ns is None
    few = "too few operations in which their hosts wait for each other: node-0, node-1"
    assert across.clock_reason == few


def test_hosts_with_device_waits_have_no_common_clock(tmp_path: Path) -> None:
    for number, script in enumerate(make_two_ranks()):
        write_on(Machine(f"node-{number}", ahead_ns=number * HOUR), script, tmp_path / f"n{number}")
    nodes = analyze_nodes(tmp_path)
    [books] = nodes[1].ranks
    on_device = replace(books, ledger=replace(books.ledger, device="GPU-1"))
    across = analyze_across_ranks([nodes[0], replace(nodes[1], ranks=(on_device,))])
    assert across.clock_bound_ns is None
    assert across.clock_reason.startswith(
        "too few operations in which their hosts wait for each other"
    )


def test_containers_of_a_machine_share_its_clock(tmp_path: Path) -> None:
    # The same pid and start in both: each has process ids of its own.
    for number, script in enumerate(make_two_ranks()):
        write_on(Machine(f"pod-{number}", "one machine"), script, tmp_path / f"n{number}")
    report = analyze_recordings(tmp_path)
    assert len(report.ranks) == 2
    assert list_lost_by_rank(report, 0) == [BLAMED]
    across = analyze_together(tmp_path)
    assert (across.clock_bound_ns, across.clock_reason) == (0, "")


@pytest.mark.parametrize("late_ms", [12, 60])
def test_the_clock_bound_covers_a_constantly_late_leaver(late_ms: int, tmp_path: Path) -> None:
    # Rank 1 leaves later than rank 0, always: its clock seems to be ahead by as much.
    scripts = make_scripts((0.0, 0.3), (0.0, 0.3))
    late = late_ms / 1000
    for row, span in enumerate(scripts[1].main_spans):
        if span[0] == layout.COLLECTIVE:
            scripts[1].main_spans[row] = (*span[:2], round(span[2] + late, 6), *span[3:])
    for number, script in enumerate(scripts):
        write_on(Machine(f"node-{number}", ahead_ns=number * HOUR), script, tmp_path / f"n{number}")
    across = analyze_together(tmp_path)
    # Aligned by who left when, the clocks are off by `late`; both stay 0.1 s.
    assert across.clock_bound_ns is not None
    assert late * SECOND <= across.clock_bound_ns <= 0.2 * SECOND


def test_a_missing_clock_bound_has_a_reason(tmp_path: Path) -> None:
    write_on(Machine("node-0"), make_two_ranks()[0], tmp_path / "one" / "n0")
    across = analyze_together(tmp_path / "one")
    assert (across.clock_bound_ns, across.clock_reason) == (None, "one node: one clock")
    script = make_training([(0.1, 0.3)] * 20)
    write_on(Machine("node-0"), script, tmp_path / "none" / "n0")
    across = analyze_together(tmp_path / "none")
    why = "no operations of different ranks were matched"
    assert (across.clock_bound_ns, across.clock_reason) == (None, why)
