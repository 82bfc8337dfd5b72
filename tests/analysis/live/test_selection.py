"""Windows that nodes have settled, merged; and each way in which one cannot be used."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live import settled_file
from clusterprof.analysis.live.job import LiveJob
from clusterprof.analysis.live.selection import MAX_LAG_S, choose_common_end, choose_own_end
from clusterprof.analysis.live.settler import WindowSettler
from clusterprof.report.live import LiveView
from clusterprof.trace.live_files import SETTLED_NAMES, TEMPORARY_NAME, VIEWER_FILE
from tests.support import waiting_jobs
from tests.support.growing_recording import STEPS, WINDOW_NS, GrowingRecording
from tests.support.recordings import SECOND, make_training

LIMITS = build_limits({})
NODES = ("node-a", "node-b", "node-c")
NOW_NS = 39 * SECOND


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three nodes of a job, 38 s long and settled up to 36 s."""
    run = tmp_path / "run"
    for name in NODES:
        GrowingRecording(make_training(STEPS), run / name).write_until(38)
        settle(run / name)
    return run


def settle(folder: Path, window_ns: int = WINDOW_NS) -> None:
    settler = WindowSettler(folder, LIMITS, window_ns)
    settler.poll()
    settler.settle()


def look(run: Path, min_settled_nodes: int = 1) -> LiveView:
    return LiveJob([run], LIMITS, WINDOW_NS, min_settled_nodes).update(NOW_NS)


def read_directly(run: Path, monkeypatch: pytest.MonkeyPatch) -> LiveView:
    """Look at the window that nodes have settled, but read all recordings."""
    job = LiveJob([run], LIMITS, WINDOW_NS, 1)
    job.update(NOW_NS)
    monkeypatch.setattr(job._selection, "update", dict.fromkeys)
    return job.update(NOW_NS)


def test_settled_windows_give_the_same_report_as_recordings(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = look(run)
    # 26 s to 36.9 s of three nodes with one rank each; see test_settler.
    assert live.report.in_step_ns == pytest.approx(3 * 10.9 * SECOND)
    assert live.report.lost_ns == pytest.approx(3 * 11 * 0.4 * SECOND, abs=0.03 * SECOND)
    assert live.reading == "" and live.trouble == ""
    # The newest record, of 37.9 s, was written when the windows were settled.
    assert [(node.name, node.state, node.age_ns) for node in live.nodes] == [
        (name, "recording", 1.1 * SECOND) for name in NODES
    ]
    direct = read_directly(run, monkeypatch)
    assert (live.report, live.ranks) == (direct.report, direct.ranks)


def test_a_small_job_is_read_directly_and_gets_no_mark(run: Path) -> None:
    live = look(run, min_settled_nodes=len(NODES) + 1)
    assert live.report.in_step_ns == 3 * 10 * SECOND, "the last 10 s, to 37.9 s"
    assert live.reading == "" and not list(run.glob(f"*/{VIEWER_FILE}"))


def test_a_mark_is_left_on_every_node(run: Path) -> None:
    look(run)
    assert len(list(run.glob(f"*/{VIEWER_FILE}"))) == len(NODES)


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change_format(path: Path) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, 4, settled_file.FORMAT + 1)
    path.write_bytes(data)


def change_limits(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[14] ^= 1
    path.write_bytes(data)


def make_old(path: Path) -> None:
    written_at = (path.parent / "000001.cpf").stat().st_mtime - MAX_LAG_S - 1
    os.utime(path, (written_at, written_at))


def replace_payload(path: Path) -> None:
    """Write a payload with a right checksum that has another type."""
    key = settled_file.make_settings_key(LIMITS)
    settled = settled_file.read_settled(settled_file.read_settled_head(path, WINDOW_NS, key))
    wrong = replace(settled, ranks={"text": 1})  # type: ignore[dict-item]
    settled_file.write_settled(path.parent, path.name, wrong, 36 * SECOND, WINDOW_NS, key)


def half_written(path: Path) -> None:
    path.rename(path.with_name(TEMPORARY_NAME))


def link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (flip_last_byte, "1 damaged"),
        (cut, "1 damaged"),
        (lambda path: path.write_bytes(b""), "1 damaged"),
        (lambda path: path.write_bytes(b"x" * 500), "1 damaged"),
        (replace_payload, "1 damaged"),
        (change_format, "1 of another version of clusterprof"),
        (change_limits, "1 with other limits or another window"),
        (make_old, "1 too old"),
        (os.unlink, "1 without a settled window"),
        (half_written, "1 without a settled window"),
        (link, "1 without a settled window"),
    ],
)
def test_a_node_without_a_usable_window_is_read_directly(
    spoil: Callable[[Path], object], reason: str, run: Path
) -> None:
    whole = look(run).report
    spoil(run / "node-b" / SETTLED_NAMES[0])
    live = look(run)
    assert live.reading == f"1 of 3 nodes are read directly: {reason}"
    assert live.report == whole, "its recording is read up to the common end"


def test_few_settled_nodes_cause_all_recordings_to_be_read(run: Path) -> None:
    for name in NODES[:2]:
        (run / name / SETTLED_NAMES[0]).unlink()
    live = look(run)
    assert live.reading == "all recordings are read: few nodes have settled their last minute"
    assert live.report.in_step_ns == 3 * 10 * SECOND


def test_an_unwritable_viewer_mark_is_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NODES:
        (run / name / SETTLED_NAMES[0]).unlink()
        (run / name / VIEWER_FILE).mkdir()  # cannot be opened for writing, by root either
    assert look(run).reading == (
        "all recordings are read: few nodes have settled their last minute; "
        "3 of 3 folders take no mark of this viewer"
    )


def test_the_latest_commonly_settled_end_is_chosen() -> None:
    assert choose_common_end([]) is None
    assert choose_common_end([[4, 8], [4, 8], [8, 4]]) == 8
    assert choose_common_end([[4, 8], [4, 8], [4]]) == 4, "one node is not ready"
    assert choose_common_end([[4, 8], [8, 12], [8, 16]]) == 8


def test_a_node_that_settles_less_often_is_not_read_directly(tmp_path: Path) -> None:
    run = tmp_path / "run"
    growing = {name: GrowingRecording(make_training(STEPS), run / name) for name in NODES}
    settlers = {name: WindowSettler(run / name, LIMITS, WINDOW_NS) for name in NODES}
    job = LiveJob([run], LIMITS, WINDOW_NS, 1)
    for second, settled_nodes in ((30, NODES), (34, NODES[:2]), (38, NODES[:2])):
        for name in NODES:
            growing[name].write_until(second)
            if name in settled_nodes:
                settlers[name].poll()
                settlers[name].settle()
        live = job.update(NOW_NS)
        assert live.reading == "" and job._selection.end_ns == 28 * SECOND
    settlers[NODES[2]].poll()
    settlers[NODES[2]].settle()
    assert job.update(NOW_NS).reading == "" and job._selection.end_ns == 36 * SECOND


def test_a_node_with_a_wrong_wall_clock_is_merged(run: Path) -> None:
    hour_ns = 3600 * SECOND
    GrowingRecording(make_training(STEPS), run / "node-d", hour_ns).write_until(38)
    settle(run / "node-d")
    live = look(run)
    # Its windows end at multiples of 4 s of its own clock, which is ahead by a multiple.
    assert live.report.in_step_ns == pytest.approx(4 * 10.9 * SECOND)
    assert live.reading == (
        "the wall clocks of 1 of 4 nodes are wrong: their windows end elsewhere"
    )
    assert choose_own_end([4, 8], 8) == 8
    assert choose_own_end([4, 8], 12) is None, "it is only late"
    assert choose_own_end([4, 8], None) is None


def test_a_window_replaced_during_reading_counts_as_old(run: Path) -> None:
    path, key = run / "node-a" / SETTLED_NAMES[0], settled_file.make_settings_key(LIMITS)
    head = settled_file.read_settled_head(path, WINDOW_NS, key)
    settled = settled_file.read_settled(head)
    changed = replace(settled, name="other")
    settled_file.write_settled(path.parent, path.name, changed, 40 * SECOND, WINDOW_NS, key)
    with pytest.raises(settled_file.UnusableWindowError, match="old"):
        settled_file.read_settled(head)


def test_a_vanished_window_makes_its_recording_be_read(run: Path) -> None:
    job = LiveJob([run], LIMITS, WINDOW_NS, 1)
    settled = job.update(NOW_NS)
    for name in NODES:
        (run / name / SETTLED_NAMES[0]).unlink()
    direct = job.update(NOW_NS)
    assert settled.report.in_step_ns == pytest.approx(3 * 10.9 * SECOND)
    assert direct.report.in_step_ns == 3 * 10 * SECOND


def test_waits_are_blamed_across_settled_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for number, script in enumerate(waiting_jobs.make_scripts((0.3, 0.5), (0.0, 0.5))):
        GrowingRecording(script, run / f"node-{number}").write_until(57)
        settle(run / f"node-{number}", 60 * SECOND)
    job = LiveJob([run], LIMITS, 60 * SECOND, 1)
    live = job.update(57 * SECOND)
    assert live.reading == ""
    late, waiting = live.report.ranks
    # All 60 steps of 0.9 s end before 56 s, the end of the window. In each rank 0 waits 0.3 s for
    # data, half of it for the disk, and rank 1 waits for rank 0.
    assert dict(waiting.buckets)["storage-local"] == pytest.approx(60 * 0.15 * SECOND, rel=0.05)
    assert dict(late.caused)["storage-local"] == pytest.approx(2 * 60 * 0.15 * SECOND, rel=0.05)
    monkeypatch.setattr(job._selection, "update", dict.fromkeys)
    direct = job.update(57 * SECOND)
    assert live.report == direct.report


def test_a_viewer_waits_for_nodes_of_large_jobs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterprof.analysis.live.selection.WAIT_NODES", len(NODES))
    for name in NODES:
        (run / name / SETTLED_NAMES[0]).unlink()
    waits: list[float] = []

    def settle_while_waiting(seconds: float) -> None:
        assert len(list(run.glob(f"*/{VIEWER_FILE}"))) == len(NODES), "the marks come first"
        settle(run / NODES[len(waits)])
        waits.append(seconds)

    monkeypatch.setattr("clusterprof.analysis.live.job.time.sleep", settle_while_waiting)
    job = LiveJob([run], LIMITS, WINDOW_NS, 1)
    job.wait_for_settled(patience_s=60.0)
    assert len(waits) == len(NODES)
    assert job.update(NOW_NS).reading == ""


def test_a_viewer_never_waits_for_finished_or_small_jobs(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(seconds: float) -> None:
        raise AssertionError("it waits")

    monkeypatch.setattr("clusterprof.analysis.live.job.time.sleep", fail)
    for name in NODES:
        (run / name / SETTLED_NAMES[0]).unlink()
    LiveJob([run], LIMITS, WINDOW_NS, 1).wait_for_settled()
    monkeypatch.setattr("clusterprof.analysis.live.selection.WAIT_NODES", len(NODES))
    for name in NODES:
        os.utime(run / name / "000001.cpf", (0, 0))
    job = LiveJob([run], LIMITS, WINDOW_NS, 1)
    job.wait_for_settled()
    assert job.update(NOW_NS).reading == "", "all recordings are read, as they have ended"
    assert not list(run.glob(f"*/{VIEWER_FILE}"))
