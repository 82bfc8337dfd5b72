"""Files next to a recording's segments that exist only while somebody watches the job.

    live.wanted        the mark of a viewer; its age decides, it is empty
    live-0.settled     the last minute of this node, settled: the newest two, in turn
    live-1.settled

With `record --metrics` there are two more, which stay until the recording ends:

    metrics.json       counters of the live metrics, for the process that continues them
    metrics.log        errors of the process that offers them

A viewer leaves the mark, the node's helper process writes the settled windows
(docs/design/recorder.md). All of them may be missing, old or damaged without harm.

Ages are differences between modification times of files in one folder, so the clocks of
the viewer's machine and of the node need not agree.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Literal

VIEWER_FILE = "live.wanted"
SETTLED_NAMES = ("live-0.settled", "live-1.settled")
TEMPORARY_NAME = "live.settled.tmp"
METRICS_STATE_NAME = "metrics.json"
METRICS_LOG_NAME = "metrics.log"
WANTED_FOR_S = 120.0
"""Age at which a mark expires, seconds: longer than the minute for which a shared file system may
keep an old modification time in its cache."""
ENDED_S = 30.0
"""Time without a write after which a recording is taken to have ended, seconds."""
REFRESH_MARK_S = 20.0
"""Interval at which a viewer leaves its mark again, seconds."""


def write_viewer_heartbeat(folder: Path, written_at: float) -> Literal["left", "denied", "ended"]:
    """Leave the mark of a viewer in a node's folder, if that is permitted.

    Where nothing has been written for ENDED_S, no recorder is left to see it: it is removed again.
    written_at: modification time of the newest segment, seconds since 1970.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    path = folder / VIEWER_FILE
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            os.utime(descriptor)  # without times: the clock of the file system
            marked_at = os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
        if marked_at - written_at > ENDED_S:
            os.unlink(path)
            return "ended"
    except OSError:
        return "denied"
    return "left"


def is_wanted(folder: Path, segment: str) -> bool:
    """Return whether a viewer's mark in a node's folder is at most WANTED_FOR_S old.

    segment: name of the segment that is being written; its modification time is the present.
    """
    marked_at = _read_write_time(folder / VIEWER_FILE)
    if marked_at is None:
        return False
    written_at = _read_write_time(folder / segment)
    return written_at is None or written_at - marked_at <= WANTED_FOR_S


def remove_live_files(folder: Path) -> None:
    """Remove the mark and the settled windows from a node's folder, as far as there are any."""
    for name in (VIEWER_FILE, *SETTLED_NAMES, TEMPORARY_NAME):
        with contextlib.suppress(OSError):
            os.unlink(folder / name)


def _read_write_time(path: Path) -> float | None:
    """Return the modification time of a regular file, seconds since 1970; None without one."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return status.st_mtime if stat.S_ISREG(status.st_mode) else None
