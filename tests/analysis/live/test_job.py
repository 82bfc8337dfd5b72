"""The window of a recording that grows, against numbers made by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.job import SILENT_NS, LiveJob
from clusterprof.errors import NoRecording
from tests.support.growing_recording import STEPS, WINDOW_NS, GrowingRecording
from tests.support.recordings import SECOND, make_training


@pytest.fixture
def growing(tmp_path: Path) -> GrowingRecording:
    return GrowingRecording(make_training(STEPS), tmp_path / "run" / "node-a")


@pytest.fixture
def job(tmp_path: Path, growing: GrowingRecording) -> LiveJob:
    return LiveJob([tmp_path / "run"], build_limits({}), WINDOW_NS)


def test_only_the_time_within_the_window_is_reported(
    growing: GrowingRecording, job: LiveJob
) -> None:
    growing.write_until(15)
    report = job.update(0).report
    assert (report.in_step_ns, report.lost_ns) == (10 * SECOND, 0)
    growing.write_until(38)
    live = job.update(0)
    (rank,) = live.report.ranks
    # From 27.9 s to the last record at 37.9 s; the waits at 28, 29 … 37 s are all inside.
    assert rank.in_step_ns == 10 * SECOND
    assert rank.lost_ns == pytest.approx(10 * 0.4 * SECOND, abs=0.01 * SECOND)
    storage = dict(rank.buckets)["storage-local"]
    assert storage == pytest.approx(10 * 0.2 * SECOND, abs=0.1 * SECOND)
    assert rank.in_step_ns == rank.productive_ns + rank.lost_ns
    assert rank.lost_ns == sum(ns for _, ns in rank.buckets)
    item = live.ranks["node-a", rank.pid]
    assert (item.step_ns, item.sm_active_ratio) == (SECOND, None)
    assert item.busy_ratio == pytest.approx(0.6, abs=0.03)
    assert item.since_step_ns == 0, "these scripts hand over a span when it begins"


def test_a_window_of_many_chunks_gives_the_same_report(
    growing: GrowingRecording, job: LiveJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.write_until(25)
    monkeypatch.setattr("clusterprof.analysis.timeline.load.chunks.MAX_CHUNK_ROWS", (50, 50))
    whole = job.update(0)  # what makes a chunk of a recording does not cut a window
    monkeypatch.setattr("clusterprof.analysis.live.window.MAX_ROWS", 50)
    cut = LiveJob([tmp_path / "run"], build_limits({}), WINDOW_NS).update(0)
    (item,), (other,) = whole.ranks.values(), cut.ranks.values()
    # Of 10 s the last four steps wait for 0.4 s each.
    assert item.busy_ratio == pytest.approx(0.84, abs=0.001)
    assert other.busy_ratio == pytest.approx(item.busy_ratio, abs=0.001)
    assert (item.step_ns, item.since_step_ns) == (other.step_ns, other.since_step_ns)


def test_update_frequency_leaves_the_live_report_unchanged(
    growing: GrowingRecording, job: LiveJob, tmp_path: Path
) -> None:
    for second in range(8, 38, 10):
        growing.write_until(second)
        job.update(0)
    growing.write_until(38)
    once = LiveJob([tmp_path / "run"], build_limits({}), WINDOW_NS).update(0)
    assert job.update(0).report == once.report


def test_device_busy_time_is_shown_without_an_ended_step(tmp_path: Path) -> None:
    script = make_training([(0.2, 30.0)])
    script.main_spans = script.main_spans[:1]  # the wait; the step has not ended
    GrowingRecording(script, tmp_path / "run" / "node-a").write_until(28)
    live = LiveJob([tmp_path / "run"], build_limits({}), WINDOW_NS).update(0)
    (rank,) = live.report.ranks
    item = live.ranks["node-a", rank.pid]
    assert (rank.in_step_ns, item.step_ns, item.since_step_ns) == (0, None, None)
    assert item.busy_ratio == 1.0


def test_the_state_of_each_recorder_is_reported(
    growing: GrowingRecording, job: LiveJob, tmp_path: Path
) -> None:
    growing.write_until(20)  # the last clock is of 19 s, the last sample of 19.9 s
    at = 20 * SECOND

    def states(now_ns: int) -> list[tuple[str, str]]:
        return [(node.state, node.why) for node in job.update(now_ns).nodes]

    assert states(at) == [("recording", "")]
    assert states(at + 2 * SILENT_NS) == [("silent", "")]
    assert not job.update(at).ended
    growing.write_until(24)
    assert states(at + 2 * SILENT_NS) == [("recording", "")], "it grew: its clock is behind ours"
    growing.stop()
    assert states(at) == [("ended", "the duration is over")]
    assert job.update(at).ended
    shutil.rmtree(tmp_path / "run")
    assert states(at) == [("gone", "its files are gone")]
    assert len(job.update(at).report.ranks) == 1, "its last minute stays on the screen"


def test_a_node_silent_beyond_the_window_is_not_reported(
    growing: GrowingRecording, job: LiveJob, tmp_path: Path
) -> None:
    growing.write_until(8)
    other = GrowingRecording(make_training(STEPS), tmp_path / "run" / "node-b")
    other.write_until(38)
    live = job.update(38 * SECOND)
    assert [(node.name, node.state) for node in live.nodes] == [
        ("node-a", "silent"),
        ("node-b", "recording"),
    ]
    assert [rank.node for rank in live.report.ranks] == ["node-b"]


def test_late_nodes_are_added_and_an_empty_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    job = LiveJob([tmp_path / "run"], build_limits({}), WINDOW_NS)
    with pytest.raises(NoRecording, match=r"no \.cpf files"):
        job.update(0)
    for name in ("node-a", "node-b"):
        GrowingRecording(make_training(STEPS), tmp_path / "run" / name).write_until(12)
        names = [node.name for node in job.update(0).nodes]
    assert names == ["node-a", "node-b"]


@pytest.mark.parametrize("damage", ["garbage", "empty", "folder"])
def test_a_damaged_segment_never_breaks_an_update(
    growing: GrowingRecording, job: LiveJob, tmp_path: Path, damage: str
) -> None:
    growing.write_until(12)
    job.update(0)
    segment = tmp_path / "run" / "node-a" / "000001.cpf"
    if damage == "garbage":
        segment.write_bytes(bytes(range(256)) * 400)
    elif damage == "empty":
        segment.write_bytes(b"")
    else:
        segment.unlink()
        segment.mkdir()
    live = job.update(0)
    assert len(live.nodes) == 1 and live.trouble == ""
