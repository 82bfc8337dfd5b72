"""Marks of viewers, by the modification times of one folder."""

from __future__ import annotations

import os
from pathlib import Path

from clusterprof.trace.live_files import (
    ENDED_S,
    SETTLED_NAMES,
    VIEWER_FILE,
    WANTED_FOR_S,
    is_wanted,
    remove_live_files,
    write_viewer_heartbeat,
)

SEGMENT = "000001.cpf"


def write_segment(folder: Path, after_mark_s: float = 0.0) -> float:
    """Write a segment this long after the mark, or now; return its modification time."""
    segment, mark = folder / SEGMENT, folder / VIEWER_FILE
    segment.touch()
    if mark.exists():
        written_at = mark.stat().st_mtime + after_mark_s
        os.utime(segment, (written_at, written_at))
    return segment.stat().st_mtime


def test_a_viewer_mark_expires_by_file_system_time(tmp_path: Path) -> None:
    assert not is_wanted(tmp_path, SEGMENT)
    assert write_viewer_heartbeat(tmp_path, write_segment(tmp_path)) == "left"
    assert is_wanted(tmp_path, SEGMENT)
    write_segment(tmp_path, WANTED_FOR_S - 1)
    assert is_wanted(tmp_path, SEGMENT)
    write_segment(tmp_path, WANTED_FOR_S + 1)
    assert not is_wanted(tmp_path, SEGMENT)
    for path in tmp_path.iterdir():  # all clocks an hour behind
        os.utime(path, (0, 0))
    assert is_wanted(tmp_path, SEGMENT)


def test_a_finished_recording_gets_no_viewer_mark(tmp_path: Path) -> None:
    written_at = write_segment(tmp_path)
    assert write_viewer_heartbeat(tmp_path, written_at - ENDED_S - 1) == "ended"
    assert os.listdir(tmp_path) == [SEGMENT]


def test_links_and_missing_folders_get_no_viewer_mark(tmp_path: Path) -> None:
    written_at = write_segment(tmp_path)
    target = tmp_path / "target"
    (tmp_path / VIEWER_FILE).symlink_to(target)
    assert write_viewer_heartbeat(tmp_path, written_at) == "denied"
    assert not target.exists() and not is_wanted(tmp_path, SEGMENT)
    assert write_viewer_heartbeat(tmp_path / "missing", written_at) == "denied"


def test_cleanup_removes_all_live_files_except_segments(tmp_path: Path) -> None:
    write_viewer_heartbeat(tmp_path, write_segment(tmp_path))
    for name in SETTLED_NAMES:
        (tmp_path / name).touch()
    remove_live_files(tmp_path)
    assert os.listdir(tmp_path) == [SEGMENT]
    remove_live_files(tmp_path)
