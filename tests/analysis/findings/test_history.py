"""What happened when: by hand, and that no nanosecond is lost or made in any stretch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.rank.history import (
    IN_STEP,
    MAX_TIME_BINS,
    MIN_BIN_NS,
    RankTimeHistory,
    TimeBinTable,
)
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.findings.history import align_to_bins, allocate_by_weight
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.analysis.pipeline import analyze
from clusterprof.analysis.timeline.collectives.int_table import unpack_table
from clusterprof.probe import layout
from clusterprof.report.history import WAITING_FOR_RANKS, SlowStep, Wait
from clusterprof.report.model import UNATTRIBUTED, Report
from tests.support.faulty_recordings import HOUR, Machine, write_on
from tests.support.random_jobs import draw_scripts
from tests.support.recordings import SECOND, Script, make_training, write_recording
from tests.support.reduced_recordings import Step, make_cluster, remove_signals
from tests.support.report_laws import check_history
from tests.support.waiting_jobs import make_scripts

SLOW = settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)


def two_ranks(folder: Path) -> Report:
    """Rank 0 loads for 0.4 s of every step of 1 s, rank 1 has its data at once and waits."""
    for number, script in enumerate(make_scripts((0.4, 0.5), (0.0, 0.5), steps=30)):
        write_recording(script, folder / f"node-{number}")
    return analyze(folder, history=True)


def test_the_history_of_two_ranks_matches_values_computed_by_hand(tmp_path: Path) -> None:
    report = two_ranks(tmp_path)
    check_history(report)
    history = report.history
    assert history is not None
    # 31 s: no more than 240 stretches, so 0.2 s each; steps from 1.0 s on.
    assert (history.bin_ns, history.bin_count) == (200_000_000, 155)
    assert (history.begin_ns, history.step_stride, history.why_missing) == (0, 1, "")
    first, second = history.ranks
    assert first.step_ends_ns == tuple(range(2 * SECOND, 32 * SECOND, SECOND))
    for item in (first, second):
        assert item.in_step_ns == (0,) * 5 + (200_000_000,) * 150
    # 0.4 s of one wait, half of it for a disk and half for decoding; 0.5 s work; 0.1 s transfer.
    step = {
        "storage-local": (100_000_000, 100_000_000, 0, 0, 0),
        "cpu-preprocess": (100_000_000, 100_000_000, 0, 0, 0),
        WAITING_FOR_RANKS: (0, 0, 0, 0, 100_000_000),
    }
    assert dict(first.lost) == {name: (0,) * 5 + 30 * ns for name, ns in step.items()}
    # 0.5 s work, then 0.4 s for rank 0 and 0.1 s transfer.
    waits = (0, 0, 100_000_000, 200_000_000, 200_000_000)
    assert second.lost == ((WAITING_FOR_RANKS, (0,) * 5 + 30 * waits),)


def test_the_longest_waits_and_the_slowest_steps_are_listed(tmp_path: Path) -> None:
    history = two_ranks(tmp_path).history
    assert history is not None
    # All alike, so the earliest twelve.
    assert [(w.victim, w.culprit, w.step) for w in history.waits] == [(1, 0, n) for n in range(12)]
    assert history.waits[3] == Wait(4_500_000_000, 400_000_000, 1, 0, history.waits[0].cause, 3)
    assert history.waits[0].cause in ("storage-local", "cpu-preprocess")
    assert len(history.slow_steps) == 20
    assert history.slow_steps[2] == SlowStep(
        number=2,
        start_ns=3 * SECOND,
        duration_ns=SECOND,
        rank=0,
        lost=(
            (WAITING_FOR_RANKS, 600_000_000),
            ("cpu-preprocess", 200_000_000),
            ("storage-local", 200_000_000),
        ),
    )


def test_nodes_with_different_clocks_are_placed_on_a_common_clock(tmp_path: Path) -> None:
    """Clocks 5 h and 77 s ahead, wall clocks 2 h apart: the operations say what they share."""
    machines = (
        Machine("node-0", ahead_ns=5 * HOUR, wall_ns=100 * HOUR),
        Machine("node-1", ahead_ns=77 * SECOND, wall_ns=102 * HOUR),
    )
    for machine, script in zip(machines, make_scripts((0.4, 0.5), (0.0, 0.5), steps=30)):
        write_on(machine, script, tmp_path / machine.name)
    report = analyze(tmp_path, history=True)
    check_history(report)
    history = report.history
    assert history is not None
    assert history.started_at_ns == 100 * HOUR  # of two clocks the lower middle
    first, second = history.ranks
    assert (
        first.step_ends_ns == second.step_ends_ns == tuple(range(2 * SECOND, 32 * SECOND, SECOND))
    )
    waits = (0, 0, 100_000_000, 200_000_000, 200_000_000)
    assert second.lost == ((WAITING_FOR_RANKS, (0,) * 5 + 30 * waits),)


@SLOW
@given(draw_scripts(), st.sampled_from([900, 7_000]))
def test_history_bins_add_up_for_any_job_and_chunk_size(
    tmp_path_factory: pytest.TempPathFactory, script: Script, chunk_ms: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    node = write_recording(script, folder / "node-1")
    check_history(analyze(folder, history=True))
    whole, cut = (
        analyze_node(node, build_limits({}), ns, history=True).ranks[0].history
        for ns in (10**15, chunk_ms * 1_000_000)
    )
    assert whole is not None and cut is not None
    assert (cut.first_bin, cut.bin_ns) == (whole.first_bin, whole.bin_ns)
    # Which cause a fetch goes to may differ a little with the cut, when it was lost may not.
    assert in_step_and_lost(cut) == in_step_and_lost(whole)


def in_step_and_lost(times: RankTimeHistory) -> tuple[list[int], list[int]]:
    assert isinstance(times.stored_block, bytes)
    table = unpack_table(times.stored_block).reshape(len(times.names), 2, -1)
    units = (table[:, 0].astype(object) * SHARE_SCALE + table[:, 1]).tolist()
    rows = dict(zip(times.names, units))
    in_step = [value // SHARE_SCALE for value in rows.pop(IN_STEP)]
    return in_step, [sum(column) for column in zip(*rows.values())] or [0] * len(in_step)


def test_a_report_without_history_is_otherwise_the_same(tmp_path: Path) -> None:
    with_it = two_ranks(tmp_path)
    without = analyze(tmp_path)
    assert without.history is None
    assert replace(with_it, history=None) == without


def test_unmeasured_time_is_in_no_history_bin(tmp_path: Path) -> None:
    """Samples 20 to 29 of the device failed: from 1.9 to 3.0 s nothing is known."""
    script = make_training([(0.0, 0.5)] * 8, begin=0.5)
    script.unread = range(20, 30)
    write_recording(script, tmp_path / "node-1")
    report = analyze(tmp_path, history=True)
    check_history(report)
    assert report.history is not None
    in_step = report.history.ranks[0].in_step_ns
    assert report.history.bin_ns == 100_000_000
    unmeasured = report.ranks[0].unmeasured_ns
    assert sum(ns == 0 for ns in in_step[5:45]) == unmeasured // 100_000_000


def test_a_run_without_steps_states_the_missing_history(tmp_path: Path) -> None:
    script = Script(end=2.0, main="I2.0")
    write_recording(script, tmp_path / "node-1")
    history = analyze(tmp_path, history=True).history
    assert history is not None
    assert (history.ranks, history.why_missing) == ((), "no time inside steps was recorded")


def test_the_bin_width_doubles_at_the_maximum_number_of_bins() -> None:
    table = TimeBinTable()
    time_bin_table = TimeBinTable()
    time_bin_table.extend(3, 5)  # 0.3 to 0.5 s
    time_bin_table.add_amounts("a", 3, np.array([SHARE_SCALE + 1, 2 * SHARE_SCALE]))
    table.add(time_bin_table)
    late = TimeBinTable()
    late.extend(MAX_TIME_BINS + 3, MAX_TIME_BINS + 4)
    late.add_amounts("a", MAX_TIME_BINS + 3, np.array([5 * SHARE_SCALE - 1]))
    table.add(late)
    # From 0.3 to 48.4 s there would be 481, so they double: [0.2, 0.4), [0.4, 0.6), …
    assert (table.bin_ns, table.first, table.size) == (2 * MIN_BIN_NS, 1, 241)
    assert table.rows["a"][:, [0, 1, 240]].tolist() == [[1, 2, 4], [1, 0, SHARE_SCALE - 1]]
    assert int(table.rows["a"][0].sum()) == 7


def test_bins_of_another_clock_are_split_evenly() -> None:
    edges = np.array([0, 100, 200])
    whole, rest = align_to_bins(
        edges, np.array([[40, 60]]), np.array([[0, 8]]), np.array([-50, 50, 150, 250])
    )
    assert whole.tolist() == [[20, 50, 30]]
    assert rest.tolist() == [[0, 4, 4]]


@given(st.lists(st.integers(0, 10 * SHARE_SCALE), min_size=1, max_size=8), st.integers(0, 100))
def test_allocated_shares_add_up_to_the_total(units: list[int], total: int) -> None:
    parts = np.array(units)
    out = allocate_by_weight(total, parts // SHARE_SCALE, parts % SHARE_SCALE)
    assert int(out.sum()) == total
    assert (out >= 0).all()
    weight = sum(units)
    if weight:
        assert (np.abs(out - np.array([total * unit / weight for unit in units])) < 2).all()


def test_whole_amounts_are_allocated_unchanged() -> None:
    assert allocate_by_weight(
        10, np.array([1, 1, 2]), np.array([SHARE_SCALE // 2] * 2 + [0])
    ).tolist() == [3, 3, 4]
    assert allocate_by_weight(5, np.array([2, 3]), np.array([0, 0])).tolist() == [2, 3]


def test_an_idle_device_without_a_cause_is_unattributed(tmp_path: Path) -> None:
    script = Script(end=4.0, main="U4.0", busy=[(0.5, 1.0), (1.5, 3.0)])
    script.main_spans = [(layout.STEP, 0.5 + i, 1.5 + i, i) for i in range(3)]
    write_recording(script, tmp_path / "node-1")
    report = analyze(tmp_path, history=True)
    check_history(report)
    assert report.history is not None
    assert UNATTRIBUTED in dict(report.history.ranks[0].lost) or not report.unattributed_ns


@pytest.mark.parametrize("missing", ["collectives", "spans", "busy+collectives"])
def test_history_bins_add_up_for_waits_inferred_without_marks(tmp_path: Path, missing: str) -> None:
    """Time in which ranks slept or span may be waiting, or nobody knows; perhaps it is no loss."""
    reads, plain = Step(read=0.2), Step()
    job = remove_signals(
        make_cluster([plain] * 30, [reads] * 30, [plain] * 30), missing.split("+")[-1]
    )
    if missing.startswith("busy"):  # the device spins while it waits
        job = [replace(item, busy=[(1.0, item.end - 1.0)]) for item in job]
    for number, script in enumerate(job):
        write_recording(script, tmp_path / f"node-{number}")
    report = analyze(tmp_path, history=True)
    check_history(report)
    assert report.history is not None
    if missing != "busy+collectives":
        assert dict(report.history.ranks[0].lost).keys() >= {WAITING_FOR_RANKS}
