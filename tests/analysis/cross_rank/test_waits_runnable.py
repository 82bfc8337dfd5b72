"""A rank that comes late because its main thread had no CPU keeps others waiting for a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clusterprof.analysis.attribution.rank.time_spent import WORK
from clusterprof.analysis.cross_rank.waits import CATEGORIES
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.node.analyze import analyze_node
from clusterprof.analysis.timeline.collectives.rows import HEAD_ROWS, read_block
from tests.support.recordings import SECOND, Script, write_recording
from tests.support.waiting_jobs import STEPS, make_scripts, record_and_analyze, sum_rank_seconds


def starved(runnable: str) -> list[Script]:
    """Two ranks; the second works 0.5 s instead of 0.3, and part of that it only wants to."""
    first, second = make_scripts((0.0, 0.3), (0.0, 0.5))
    second.main = second.main.replace("U0.5", runnable)
    return [first, second]


def test_work_without_a_cpu_is_contention_of_the_late_rank(tmp_path: Path) -> None:
    report = record_and_analyze(starved("U0.3 R0.2"), tmp_path)
    assert sum_rank_seconds(report, 0) == {"net-transfer": 6.0, "cpu-contention": 12.0}
    # Without a device the time in which its own loop did not run is lost, too.
    assert sum_rank_seconds(report, 1) == {"net-transfer": 6.0, "cpu-contention": 12.0}
    [finding] = [finding for finding in report.findings if finding.cause.id == "cpu-contention"]
    assert [culprit.rank for culprit in finding.culprits] == [1]


def test_only_time_without_a_cpu_is_contention(tmp_path: Path) -> None:
    # 0.1 of the 0.2 that rank 1 had more of; in the first step nobody knows who began to work first
    seconds = sum_rank_seconds(record_and_analyze(starved("U0.4 R0.1"), tmp_path), 0)
    assert seconds["cpu-contention"] == 6.0
    # Samples do not fall on the edges of work: what they are off by varies, and is jitter.
    work = seconds["sync-imbalance"] + seconds["sync-slow-compute"]
    assert work + seconds["unattributed"] - 0.1 == pytest.approx(5.9, abs=0.001)
    assert work == pytest.approx(5.9, abs=0.06)


def test_usual_scheduler_delay_is_no_contention(tmp_path: Path) -> None:
    # 1 ms of every 100
    seconds = sum_rank_seconds(
        record_and_analyze(starved(" ".join(["U0.099 R0.001"] * 5)), tmp_path), 0
    )
    assert "cpu-contention" not in seconds


def spent_on_coming(folder: Path, chunk_ns: int | None = None) -> np.ndarray:
    """What the rank had spent when it came to each operation: int64[categories, operations]."""
    operations = analyze_node(folder, build_limits({}), chunk_ns).ranks[0].operations
    assert operations is not None
    middle = HEAD_ROWS + len(CATEGORIES)
    parts = []
    for block in operations.blocks:
        table = np.empty((HEAD_ROWS + 2 * len(CATEGORIES), block.rows), np.int64)
        assert isinstance(block.location, bytes)
        read_block(block.location, block, np.arange(len(CATEGORIES)), table)
        parts.append(table[HEAD_ROWS:middle])
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("chunk_s", [3, 7, 20])
def test_cutting_into_chunks_does_not_change_spent_time(tmp_path: Path, chunk_s: int) -> None:
    folder = write_recording(starved("U0.3 R0.2")[1], tmp_path / "node-1")
    whole, cut = spent_on_coming(folder), spent_on_coming(folder, chunk_s * SECOND)
    assert np.abs(cut - whole).max() <= 2  # ns, of rounding stretch by stretch
    spent = dict(zip(CATEGORIES, (whole[:, -1] / SECOND).round(3).tolist()))
    assert (spent["cpu-contention"], spent[WORK]) == (round(0.2 * STEPS, 3), round(0.3 * STEPS, 3))
