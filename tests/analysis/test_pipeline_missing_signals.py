"""What is said when signals are missing: no marked operations, no marks at all, a device alone.

The job: 30 steps of which each ends with a collective of 0.1 s that all leave together. Rank 1
waits 0.2 s for data before its 0.3 s of work, so the others wait 0.2 s for it: 0.6 s a step.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.cross_rank.waits import CATEGORIES
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.analysis.timeline.collectives.rows import HEAD_ROWS, RankOperations, read_block
from clusterprof.report.model import Report
from tests.support.recordings import SECOND, write_recording
from tests.support.reduced_recordings import (
    POWER,
    SM,
    Step,
    make_cluster,
    record_and_analyze,
    remove_signals,
)

N = 30
PLAIN, READS, DECODES, SLOW = Step(), Step(read=0.2), Step(decode=0.2), Step(compute=0.5)


def seconds_of(report: Report, rank: int) -> dict[str, float]:
    return {id_: round(ns / SECOND, 3) for id_, ns in report.ranks[rank].buckets if ns}


def blamed(report: Report) -> dict[str, list[int | None]]:
    """Ranks by cause, most first."""
    return {
        finding.cause.id: [culprit.rank for culprit in finding.culprits]
        for finding in report.findings
        if not finding.outside_steps
    }


# --- M1: steps and waits for data are marked, operations are not ---------------------------------


def test_the_longest_data_wait_of_a_rank_explains_peer_sleep(tmp_path: Path) -> None:
    job = make_cluster([PLAIN] * N, [READS] * N, [PLAIN] * N)
    report = record_and_analyze(remove_signals(job, "collectives"), tmp_path)
    # 0.2 s of 30 steps, and the 0.1 s in which all sleep: what moves then was not seen.
    for rank in (0, 1, 2):
        assert seconds_of(report, rank) == {"storage-local": 6.0, "unattributed": 3.0}
    assert blamed(report)["storage-local"] == [1]
    assert dict(report.unattributed_reasons) == {"asleep": round(9.0 * SECOND)}
    [storage] = [finding for finding in report.findings if finding.cause.id == "storage-local"]
    assert (storage.culprits[0].own_ns, storage.culprits[0].others_ns) == (6 * SECOND, 12 * SECOND)
    assert any("inferred from their steps" in note for note in report.notes)


def test_extra_work_of_a_late_rank_counts_as_synchronization(tmp_path: Path) -> None:
    report = record_and_analyze(
        remove_signals(make_cluster([PLAIN] * N, [SLOW] * N), "collectives"), tmp_path
    )
    seconds = seconds_of(report, 0)
    # 6 s, but of the first step nobody knows who began it first: 5.8, of which one step's wait of
    # 0.2 s may be taken for work that only varies.
    assert seconds["synchronization"] == pytest.approx(5.8, abs=0.2)
    assert seconds["synchronization"] + seconds["unattributed"] == pytest.approx(9.0)
    assert seconds_of(report, 1) == {"unattributed": 3.0}
    assert blamed(report)["synchronization"] == [1]


def test_two_alternately_late_ranks_are_each_blamed_for_their_steps(tmp_path: Path) -> None:
    # Rank 0 reads in odd steps, rank 1 decodes in even ones.
    first = [READS if k % 2 else PLAIN for k in range(N)]
    second = [PLAIN if k % 2 else DECODES for k in range(N)]
    job = make_cluster(first, second, [PLAIN] * N)
    report = record_and_analyze(remove_signals(job, "collectives"), tmp_path)
    result = blamed(report)
    assert (result["storage-local"], result["cpu-preprocess"]) == ([0], [1])
    assert seconds_of(report, 2)["storage-local"] == pytest.approx(3.0, abs=0.15)
    assert seconds_of(report, 2)["cpu-preprocess"] == pytest.approx(3.0, abs=0.15)


def test_ranks_that_are_not_synchronous_are_not_blamed(tmp_path: Path) -> None:
    # Each rank alone: its steps are 0.4 s, and 0.6 s. Nobody waits for anybody.
    [first], [second] = make_cluster([PLAIN] * N), make_cluster([READS] * N)
    second.variables = {**first.variables, "RANK": "1"}
    for script in (first, second):
        script.variables["WORLD_SIZE"] = "2"
    report = record_and_analyze(remove_signals([first, second], "collectives"), tmp_path)
    assert seconds_of(report, 1) == {"storage-local": 6.0, "unattributed": 3.0}
    assert dict(report.unattributed_reasons) == {"asleep": 6 * SECOND}
    assert any("do not end together" in note for note in report.notes)


def test_sleep_of_a_rank_recorded_alone_is_unattributed(tmp_path: Path) -> None:
    job = remove_signals(make_cluster([PLAIN] * N, [READS] * N), "collectives")[:1]
    report = record_and_analyze(job, tmp_path)
    # The first step too: who sleeps there may wait for another that starts.
    assert seconds_of(report, 0) == {"unattributed": 9.0}
    assert dict(report.unattributed_reasons) == {"asleep": 9 * SECOND}


def test_spinning_of_a_rank_recorded_alone_is_synchronization(tmp_path: Path) -> None:
    job = remove_signals(make_cluster([PLAIN] * N, [READS] * N, on_device=True), "collectives")[:1]
    report = record_and_analyze(job, tmp_path)
    assert seconds_of(report, 0)["synchronization"] == pytest.approx(9.0, abs=0.5)
    assert blamed(report) == {"synchronization": []}


def test_sleep_without_thread_samples_is_not_recognized(tmp_path: Path) -> None:
    job = make_cluster([PLAIN] * N, [READS] * N)
    report = record_and_analyze(remove_signals(job, "collectives", "threads"), tmp_path)
    assert seconds_of(report, 0) == {"startup": 0.3, "unattributed": 8.7}
    assert "asleep" not in dict(report.unattributed_reasons)


# --- collectives on the device: busy to every sampler --------------------------------------------


@pytest.mark.parametrize("gauge", [SM, POWER])
def test_a_spinning_device_counts_as_waiting(tmp_path: Path, gauge: str) -> None:
    job = make_cluster([PLAIN] * N, [READS] * N, [PLAIN] * N, on_device=True)
    other = POWER if gauge == SM else SM
    report = record_and_analyze(remove_signals(job, "collectives", other), tmp_path)
    # of 0.3 and 0.1 s in each of 30 steps
    for rank in (0, 2):
        assert seconds_of(report, rank)["storage-local"] == pytest.approx(6.0, abs=0.1)
        assert seconds_of(report, rank)["network"] == pytest.approx(3.0, abs=0.5)
        assert report.ranks[rank].lost_ns / SECOND == pytest.approx(9.0, abs=0.5)
    assert seconds_of(report, 1)["storage-local"] == 6.0
    assert blamed(report)["storage-local"] == [1]


def test_a_busy_device_without_activity_and_power_counts_as_working(tmp_path: Path) -> None:
    job = make_cluster([PLAIN] * N, [READS] * N, on_device=True)
    report = record_and_analyze(remove_signals(job, "collectives", SM, POWER), tmp_path)
    assert report.ranks[0].lost_ns == 0
    assert seconds_of(report, 1) == {"storage-local": 6.0}


def test_a_constantly_half_filled_device_does_not_count_as_spinning(tmp_path: Path) -> None:
    job = remove_signals(
        make_cluster([PLAIN] * N, [PLAIN] * N, on_device=True), "collectives", POWER
    )
    for script in job:  # forward at 0.9, the rest of the step at 0.45: kernels, only smaller ones
        script.gauges[SM] = [
            (start, end, 0.45 if value < 0.1 else value) for start, end, value in script.gauges[SM]
        ]
    report = record_and_analyze(job, tmp_path)
    assert report.lost_ns == 0


def test_device_spinning_in_marked_collectives_gets_their_cause(tmp_path: Path) -> None:
    # The host marked its collectives and no event measured them: what it was in is known.
    job = make_cluster([PLAIN] * N, [READS] * N, on_device=True)
    report = record_and_analyze(remove_signals(job, POWER), tmp_path)
    assert seconds_of(report, 0)["storage-local"] == pytest.approx(6.0, abs=0.1)
    assert seconds_of(report, 0)["net-transfer"] == pytest.approx(3.0, abs=0.5)
    assert blamed(report)["storage-local"] == [1]


@pytest.mark.parametrize("missing", [(), ("collectives",), ("spans",), ("spans", "threads")])
def test_reading_hidden_by_device_work_is_not_lost_time(
    tmp_path: Path, missing: tuple[str, ...]
) -> None:
    # The worker reads all the time and the device computes all the time: nothing waits.
    job = make_cluster([PLAIN] * N, [PLAIN] * N, on_device=True)
    for script in job:
        end = script.end - 1.0
        script.worker = f"I1.0 D{end - 1.0}"
        script.busy = [(1.0, end)]
        script.gauges = {SM: [(1.0, end, 0.9)]}
    report = record_and_analyze(remove_signals(job, *missing), tmp_path)
    assert report.lost_ns == 0
    assert blamed(report) == {}


# --- M2: no marks --------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "family"), [(READS, "storage"), (DECODES, "cpu")])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_job_without_marks_gets_a_family_and_a_culprit(
    tmp_path: Path, step: Step, family: str, on_device: bool
) -> None:
    job = make_cluster([PLAIN] * N, [step] * N, [PLAIN] * N, on_device=on_device)
    report = record_and_analyze(remove_signals(job, "spans"), tmp_path)
    # 0.2 s a step, of which the first lies before the device's first work; the others learn of it
    # stretch by stretch of 2 s
    assert seconds_of(report, 1)[family] == pytest.approx(5.7, abs=0.2)
    for rank in (0, 2):
        assert 4.0 < seconds_of(report, rank)[family] <= 6.0
    assert blamed(report)[family] == [1]
    assert {finding.grade for finding in report.findings} == {"C"}
    assert all(
        finding.confidence_ratio < 0.9 for finding in report.findings if not finding.outside_steps
    )


def test_a_longer_computing_rank_is_named_without_marks(tmp_path: Path) -> None:
    report = record_and_analyze(
        remove_signals(make_cluster([PLAIN] * N, [SLOW] * N), "spans"), tmp_path
    )
    assert any("steps seem to take 0.6 s (autocorrelation 1.00)" in note for note in report.notes)
    assert 4.5 < seconds_of(report, 0)["synchronization"] <= 6.0
    assert blamed(report) == {"synchronization": [1]}


def test_ranks_with_different_step_periods_are_not_blamed(tmp_path: Path) -> None:
    # 0.5 s and 0.7 s a step, each rank alone
    [first], [second] = make_cluster([Step(compute=0.4)] * N), make_cluster([Step(compute=0.6)] * N)
    second.variables = {**first.variables, "RANK": "1"}
    for script in (first, second):
        script.variables["WORLD_SIZE"] = "2"
    report = record_and_analyze(remove_signals([first, second], "spans"), tmp_path)
    assert any("repeat every 0.5 and 0.7 s" in note for note in report.notes)
    assert blamed(report) == {}


def test_shared_sleep_counts_as_network_only_while_nodes_send(tmp_path: Path) -> None:
    quiet = record_and_analyze(
        remove_signals(make_cluster([PLAIN] * N, [PLAIN] * N), "spans"), tmp_path / "quiet"
    )
    assert [seconds_of(quiet, rank).keys() for rank in (0, 1)] == [{"unattributed"}] * 2
    job = remove_signals(make_cluster([PLAIN] * N, [PLAIN] * N), "spans")
    for script in job:
        for way in ("transmit", "receive"):
            script.network[f"network.{way}_bytes_total", "eth0"] = 500e6
    loud = record_and_analyze(job, tmp_path / "loud")
    assert [seconds_of(loud, rank)["network"] > 2.0 for rank in (0, 1)] == [True, True]


@pytest.mark.parametrize("missing", ["collectives", "spans"])
def test_chunk_size_leaves_the_sums_unchanged(tmp_path: Path, missing: str) -> None:
    job = remove_signals(make_cluster([PLAIN] * N, [READS] * N, on_device=True), missing)
    folder = write_recording(job[1], tmp_path / "node-1")
    whole, cut = (
        analyze_node(folder, build_limits({}), chunk_ns=ns) for ns in (10**12, 7 * SECOND)
    )
    [rank_result], [other] = whole.ranks, cut.ranks
    assert replace(rank_result.ledger, buckets=()) == replace(other.ledger, buckets=())
    # What a loader rather does is asked of a chunk, so families may differ a bit.
    slack = 0.02 * rank_result.ledger.lost_ns if missing == "spans" else 0
    mine, theirs = dict(rank_result.ledger.buckets), dict(other.ledger.buckets)
    assert mine.keys() == theirs.keys()
    assert max(abs(mine[id_] - theirs[id_]) for id_ in mine) <= slack
    tables = [_rows_of(books.implicit_steps) for books in (rank_result, other)]
    assert tables[0].shape == tables[1].shape
    assert np.abs(tables[0] - tables[1]).max() <= 4 + slack  # ns


def _rows_of(steps: RankOperations | None) -> np.ndarray:
    assert steps is not None
    [block] = steps.blocks
    assert isinstance(block.location, bytes)
    table = np.zeros((HEAD_ROWS + 2 * len(CATEGORIES), block.rows), np.int64)
    read_block(block.location, block, np.arange(len(CATEGORIES)), table)
    return table


# --- M3: the device alone ------------------------------------------------------------------------


def test_device_samples_alone_separate_idle_from_spinning(tmp_path: Path) -> None:
    job = make_cluster([PLAIN] * N, [READS] * N, [PLAIN] * N, on_device=True)
    report = record_and_analyze(remove_signals(job, "spans", "threads"), tmp_path)
    assert {id_ for rank in report.ranks for id_, ns in rank.buckets if ns} <= {
        "network",
        "synchronization",
        "unattributed",
    }
    # Rank 1 idled, for whatever reason, and the others busy-waited meanwhile.
    assert seconds_of(report, 1)["unattributed"] == pytest.approx(6.0, abs=0.5)
    assert blamed(report).get("network", []) == []
    caused = {rank.rank: dict(rank.caused).get("unattributed", 0) for rank in report.ranks}
    assert max(caused, key=lambda rank: caused[rank]) == 1


def test_a_throttled_device_is_found_without_marks(tmp_path: Path) -> None:
    [script] = remove_signals(make_cluster([PLAIN] * N), "spans", "threads")
    whole = [(0.0, script.end)]
    script.gauges = {
        "gpu.throttle_bits": [(s, e, float(0x8)) for s, e in whole],
        "gpu.sm_clock_hertz": [(s, e, 0.75e9) for s, e in whole],
        "gpu.sm_clock_max_hertz": [(s, e, 1e9) for s, e in whole],
    }
    report = record_and_analyze([script], tmp_path)
    # a quarter of 0.3 s busy in each of 30 steps
    assert seconds_of(report, 0)["device-throttled"] == pytest.approx(2.25, abs=0.05)
    assert seconds_of(report, 0).keys() == {"device-throttled", "unattributed"}


def test_a_loader_that_works_ahead_causes_no_waiting(tmp_path: Path) -> None:
    # It reads while the device computes, and rests in the 0.1 s in which that waits for others.
    job = make_cluster([PLAIN] * N, [PLAIN] * N)
    for script in job:
        script.worker = "I1.0" + " D0.3 I0.1" * N
    report = record_and_analyze(remove_signals(job, "spans"), tmp_path)
    assert {id_ for rank in report.ranks for id_, ns in rank.buckets if ns} == {"unattributed"}
