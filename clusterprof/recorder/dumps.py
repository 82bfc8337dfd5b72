"""Flight recorder dumps of the job's ranks: copied into the recording when the job is over.

A rank of PyTorch dumps what it knows of its collective operations to the file that its environment
names, followed by its rank. Only the name is kept of the environment, and in memory only; a dump is
taken when it is a plain file of ours, of bounded size, and written since the rank announced itself.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from clusterprof.recorder.announcements import Announcements
from clusterprof.recorder.rundir import write_private
from clusterprof.trace.schema import Record

VARIABLES = (b"TORCH_FR_DUMP_TEMP_FILE", b"TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
BYTES_AT_MOST = 16 << 20  # of one dump
KEEP_FREE_BYTES = 1 << 30  # on the recording's file system
RANKS_AT_MOST = 128
_ENVIRON_BYTES_AT_MOST = 1 << 20


class Dumps:
    """A source without records: it notes where ranks will dump, and copies at the end."""

    def __init__(self, run_dir: Path, folder: Path, proc: str) -> None:
        self._register = str(run_dir / "register")
        self._announcements = Announcements(self._register, 4 * RANKS_AT_MOST)
        self._folder = folder
        self._proc = proc
        self._expected: dict[str, int] = {}  # path -> when its rank announced itself

    def take(self, now_ns: int) -> list[Record]:
        """Note where processes that came since the last call will dump."""
        for name in self._announcements.fresh() or ():
            pid = name.removesuffix(".json")
            if not pid.isdigit() or len(self._expected) >= RANKS_AT_MOST:
                continue
            try:
                came_ns = os.stat(f"{self._register}/{name}").st_mtime_ns
                with open(f"{self._proc}/{pid}/environ", "rb") as environ:
                    path = dump_path(environ.read(_ENVIRON_BYTES_AT_MOST))
            except OSError:
                continue
            if path:
                self._expected.setdefault(path, came_ns)
        return []

    def finish(self, now_ns: int) -> list[Record]:
        """Copy the dumps there are; one that cannot be had is left."""
        for path, came_ns in self._expected.items():
            try:
                content = _content(path, came_ns)
                if content and _free_bytes(self._folder) - len(content) > KEEP_FREE_BYTES:
                    (self._folder / "nccl").mkdir(mode=0o700, exist_ok=True)
                    write_private(self._folder / "nccl" / os.path.basename(path), content)
            except OSError:
                continue
        return []


def dump_path(environ: bytes) -> str:
    """Return where a process with this environment (`/proc/<pid>/environ`) dumps; "" for nowhere.

    >>> dump_path(b"RANK=3\\0TORCH_FR_DUMP_TEMP_FILE=/scratch/trace_\\0")
    '/scratch/trace_3'
    """
    found = dict(one.partition(b"=")[::2] for one in environ.split(b"\0"))
    prefix = next((found[name] for name in VARIABLES if found.get(name)), b"")
    rank = found.get(b"RANK", b"")
    if not prefix.startswith(b"/") or not rank.isdigit():
        return ""
    return os.fsdecode(prefix + rank)


def _content(path: str, since_ns: int) -> bytes:
    """Return the bytes of a dump; none of what is no plain file of ours, old or too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        plain = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not plain or status.st_mtime_ns < since_ns or status.st_size > BYTES_AT_MOST:
            return b""
        content = file.read(BYTES_AT_MOST + 1)
    return content if len(content) <= BYTES_AT_MOST else b""


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
