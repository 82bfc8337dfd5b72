"""Transfers whose communication threads had no CPU: by hand; times in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE
from clusterprof.analysis.attribution.ledger import RankResult, with_attributed_waits
from clusterprof.analysis.attribution.network.comm_threads import (
    COMM_THREAD_NAMES,
    sum_comm_thread_time,
)
from clusterprof.analysis.attribution.rank.chunk_boundary import Segment
from clusterprof.analysis.attribution.rank.claims import EVIDENCE_SCALE
from clusterprof.analysis.attribution.rank.time_spent import CONTENTION
from clusterprof.analysis.attribution.wait_for.blame import TRANSFER
from clusterprof.analysis.cross_rank.state import JobState
from clusterprof.analysis.cross_rank.waits import blame_starved_transfers
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.analysis.timeline.model import SOURCE_DEVICE_SAMPLES, SOURCE_HOST_SPANS
from clusterprof.probe import layout
from tests.support.builders import (
    make_process,
    make_rank,
    make_spans,
    make_thread,
    ns,
    parse_activity,
)
from tests.support.rank_results import STORAGE, make_rank_result
from tests.support.recordings import make_training, write_recording

DEVICE, HOST = SOURCE_DEVICE_SAMPLES, SOURCE_HOST_SPANS
Claimed = dict[tuple[str, str, int], float]


def measure_threads(doing: str) -> dict[str, int]:
    """Totals of a rank in operations for [2, 4) and [6, 8) of 10 s, and a thread of gloo."""
    main = make_process(
        100,
        spans={layout.COLLECTIVE: make_spans((2, 4, 7), (6, 8, 7, 1))},
        thread=make_thread(parse_activity("I10"), 10),
    )
    mover = replace(make_thread(parse_activity(doing), 10), name=COMM_THREAD_NAMES[0])
    timeline = make_rank(10, replace(main, threads={**main.threads, 101: mover}), device="")
    return sum_comm_thread_time(timeline, Segment(0, ns(10), False))


def waited(doing: str, claimed: Claimed, victim_s: dict[str, float]) -> RankResult:
    """A rank with claims; `victim_s`: the part of them in which it waited in operations."""
    lost_ns = sum(map(ns, claimed.values()))
    plain = make_rank_result(lost=lost_ns, **measure_threads(doing))
    units = {key: ns(seconds) * SHARE_SCALE for key, seconds in claimed.items()}
    accumulator = replace(plain.accumulator, claimed=units)
    victim_ns = {cause: ns(seconds) for cause, seconds in victim_s.items()}
    return with_attributed_waits(plain, accumulator, victim_ns, {STORAGE: ns(5)})


def blame(result: RankResult, folder: Path) -> RankResult:
    node = analyze_node(
        write_recording(make_training([(0.1, 0.1)]), folder / "node"), build_limits({})
    )
    state = blame_starved_transfers(JobState((replace(node, ranks=(result,)),)))
    (changed,) = state.nodes[0].ranks
    return changed


def check_sums(before: RankResult, after: RankResult) -> None:
    """What moved is in the sums of both ledgers once."""
    assert after.ledger.lost_ns == before.ledger.lost_ns
    assert sum(ns_ for _, ns_ in after.ledger.buckets) == after.ledger.lost_ns
    assert sum(after.victim_ns.values()) == sum(before.victim_ns.values())
    assert sum(after.accumulator.claimed.values()) == sum(before.accumulator.claimed.values())


def test_transfer_time_without_a_cpu_is_contention(tmp_path: Path) -> None:
    # The thread wanted a CPU for 1 s of each operation and slept otherwise: 2 s of a transfer of 3.
    before = waited(
        "I2 R1 I3 R1 I3",
        {(TRANSFER, "B", DEVICE): 3, (STORAGE, "A", DEVICE): 4, (CONTENTION, "A", DEVICE): 1},
        {TRANSFER: 3, CONTENTION: 1},
    )
    after = blame(before, tmp_path)
    check_sums(before, after)
    assert dict(after.ledger.buckets) == {
        STORAGE: ns(4),
        CONTENTION: ns(3),
        TRANSFER: ns(1),
        "unattributed": 0,
    }
    assert after.victim_ns == {TRANSFER: ns(1), CONTENTION: ns(3)}
    assert after.culprit_ns == {STORAGE: ns(5), CONTENTION: ns(2)}  # its own CPUs are too few
    [key] = [key for key in after.accumulator.evidence if key[0] == CONTENTION]
    assert key[1:3] == ("comm_thread.runnable_ratio", "ratio")
    mean = after.accumulator.evidence[key] / after.accumulator.weights[key] / EVIDENCE_SCALE
    assert mean == pytest.approx(2 / 3, abs=1e-3)


def test_all_grades_and_sources_of_the_transfer_are_moved(tmp_path: Path) -> None:
    # 2 s: all of the first claim, half of the second
    before = waited(
        "I2 R1 I3 R1 I3", {(TRANSFER, "B", DEVICE): 1, (TRANSFER, "B", HOST): 2}, {TRANSFER: 3}
    )
    after = blame(before, tmp_path)
    check_sums(before, after)
    moved = {key: round(units / SHARE_SCALE) for key, units in after.accumulator.claimed.items()}
    assert {key: moved_ns for key, moved_ns in moved.items() if moved_ns} == {
        (CONTENTION, "B", DEVICE): ns(1),
        (CONTENTION, "B", HOST): ns(1),
        (TRANSFER, "B", HOST): ns(1),
    }


def test_cpu_delay_of_comm_threads_is_limited_to_the_transfer(tmp_path: Path) -> None:
    before = waited("I2 R2 I2 R2 I2", {(TRANSFER, "B", DEVICE): 3}, {TRANSFER: 3})
    after = blame(before, tmp_path)
    check_sums(before, after)
    assert dict(after.ledger.buckets) == {CONTENTION: ns(3), "unattributed": 0}
    assert after.victim_ns == {TRANSFER: 0, CONTENTION: ns(3)}


@pytest.mark.parametrize(
    "doing",
    [
        "I10",
        "I2 U1 I3 U1 I3",  # on a CPU: that is not waiting for one
        "I2 R0.03 I3.97 R0.03 I3.97",  # 0.06 s of 3, what every scheduler costs
    ],
)
def test_a_comm_thread_with_little_delay_moves_no_time(tmp_path: Path, doing: str) -> None:
    before = waited(doing, {(TRANSFER, "B", DEVICE): 3}, {TRANSFER: 3})
    assert blame(before, tmp_path) == before


def test_a_rank_without_transfers_moves_no_time(tmp_path: Path) -> None:
    before = waited("I2 R1 I3 R1 I3", {(STORAGE, "B", DEVICE): 3}, {STORAGE: 3})
    assert blame(before, tmp_path) == before
