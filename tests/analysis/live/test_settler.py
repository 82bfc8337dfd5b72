"""What a node settles of its last minute, against numbers made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.settled_file import (
    SettledNode,
    make_settings_key,
    read_settled,
    read_settled_head,
)
from clusterprof.analysis.live.settler import MAX_CPU_RATIO, MAX_PERIOD_NS, PERIOD_NS, WindowSettler
from clusterprof.trace.live_files import SETTLED_NAMES
from tests.support.growing_recording import STEPS, WINDOW_NS, GrowingRecording
from tests.support.recordings import SECOND, make_training

LIMITS = build_limits({})


@pytest.fixture
def growing(tmp_path: Path) -> GrowingRecording:
    return GrowingRecording(make_training(STEPS), tmp_path / "node-a")


@pytest.fixture
def settler(tmp_path: Path, growing: GrowingRecording) -> WindowSettler:
    return WindowSettler(tmp_path / "node-a", LIMITS, WINDOW_NS)


def read_windows(folder: Path) -> dict[int, SettledNode]:
    """Return the windows of a node by their end in seconds."""
    key = make_settings_key(LIMITS)
    paths = [folder / name for name in SETTLED_NAMES if (folder / name).exists()]
    heads = [read_settled_head(path, WINDOW_NS, key) for path in paths]
    return {head.end_ns // SECOND: read_settled(head) for head in heads}


def test_the_window_ends_at_a_multiple_of_the_period(
    growing: GrowingRecording, settler: WindowSettler, tmp_path: Path
) -> None:
    growing.write_until(38)
    settler.poll()
    assert settler.is_due()
    settler.settle()
    assert not settler.is_due()
    ((end, settled),) = read_windows(tmp_path / "node-a").items()
    # The newest record is of 37.9 s. The batch in which 36 s lie ends with 36.9 s.
    assert end == 36 and settled.latest_ns == 37.9 * SECOND
    (rank,) = settled.result.ranks
    # From 26 s to 36.9 s; of the 11 steps that begin there each waits for 0.4 s, 0.2 for the disk.
    assert rank.ledger.in_step_ns == 10.9 * SECOND
    assert rank.ledger.lost_ns == pytest.approx(11 * 0.4 * SECOND, abs=0.01 * SECOND)
    buckets = dict(rank.ledger.buckets)
    assert buckets["storage-local"] == pytest.approx(11 * 0.2 * SECOND, abs=0.1 * SECOND)
    assert settled.ranks[rank.ledger.pid].step_ns == SECOND


def test_the_newest_two_windows_are_kept(
    growing: GrowingRecording, settler: WindowSettler, tmp_path: Path
) -> None:
    for second, ends in ((13, {12}), (18, {12, 16}), (22, {16, 20})):
        growing.write_until(second)
        settler.poll()
        assert settler.is_due()
        settler.settle()
        assert read_windows(tmp_path / "node-a").keys() == ends
    assert len(list((tmp_path / "node-a").glob("live*"))) == 2, "no temporary file is left"


def test_costly_settling_lengthens_the_period() -> None:
    settler = WindowSettler(Path("unused"), LIMITS)
    allowed_ns = int(MAX_CPU_RATIO * PERIOD_NS)  # 80 ms in 4 s
    assert settler.adjust_period(allowed_ns) and settler.period_ns == PERIOD_NS
    assert settler.adjust_period(allowed_ns + 1) and settler.period_ns == 2 * PERIOD_NS
    assert settler.adjust_period(4 * allowed_ns) and settler.period_ns == 4 * PERIOD_NS
    assert settler.adjust_period(allowed_ns) and settler.period_ns == 4 * PERIOD_NS
    assert settler.adjust_period(allowed_ns - 1) and settler.period_ns == 2 * PERIOD_NS
    assert not settler.adjust_period(int(MAX_CPU_RATIO * MAX_PERIOD_NS) + 1)


def test_nothing_is_written_to_a_full_disk(
    growing: GrowingRecording, settler: WindowSettler, tmp_path: Path
) -> None:
    growing.write_until(38)
    growing.report_full_disk()
    settler.poll()
    settler.settle()
    assert read_windows(tmp_path / "node-a") == {}


def test_nothing_is_due_before_the_first_record(settler: WindowSettler) -> None:
    settler.poll()
    assert not settler.is_due()
