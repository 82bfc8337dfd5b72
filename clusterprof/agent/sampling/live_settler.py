"""Start the helper that settles this node's last minute while somebody watches the job.

The recorder looks for a viewer's mark every CHECK_NS, next to the segment that it writes
(one `stat`, two where there is a mark), and starts `clusterprof.analysis.live.settler` in a
process of its own: only that process loads numpy. It ends by itself when the mark expires,
or when the recorder ends and so closes the pipe. It is never waited for. That it cannot
start, dies or is killed has no consequence but that viewers read the recording themselves.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from clusterprof.trace.live_files import is_wanted, remove_live_files

CHECK_NS = 5_000_000_000
"""Time between two looks for a mark, ns."""
HELPER_NAME = "live"
_REST_NS, _MAX_REST_NS = 60_000_000_000, 3_600_000_000_000
"""Pause after a helper has failed, ns; twice as long each time, up to an hour."""
_BOOT_CODE = """
import os, sys
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # loading numpy, too
except (AttributeError, OSError):
    os.nice(19)
sys.path += sys.argv.pop(1).split(":")
from clusterprof.analysis.live.settler import main
sys.exit(main(sys.argv[1:]))
"""
_ENVIRONMENT = {
    "CLUSTERPROF_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class LiveSettler:
    """The helper of one recording: started when wanted, at most one at a time."""

    def __init__(self, folder: Path, boot_code: str = _BOOT_CODE) -> None:
        """Take the node's folder; nothing is started. boot_code: what the helper runs."""
        self.pid: int | None = None
        self.ended_cpu_ns = 0
        """CPU time of the helpers that have ended, ns."""
        self._folder = folder
        self._boot_code = boot_code
        self._pipe = -1
        self._checked_ns = 0
        self._rest_ns = 0
        self._rests_until_ns = 0

    def check(self, now_ns: int, segment: str) -> None:
        """Start the helper if it is wanted, or collect the status of one that has ended.

        Never waits, raises nothing. segment: name of the segment that is being written.
        """
        if now_ns - self._checked_ns < CHECK_NS:
            return
        self._checked_ns = now_ns
        if self.pid is not None:
            self._collect(now_ns)
        elif now_ns >= self._rests_until_ns and is_wanted(self._folder, segment):
            try:
                self._start()
            except (OSError, ValueError):
                self._rest(now_ns)

    def close(self) -> None:
        """Let the helper end by closing its pipe, and remove what it has written."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
        remove_live_files(self._folder)

    def _start(self) -> None:
        path = ":".join(entry for entry in sys.path if entry and ":" not in entry)
        code = [sys.executable, "-I", "-S", "-c", self._boot_code, path, str(self._folder)]
        ends = os.pipe()
        try:
            self.pid = _start_process(code, ends[0])
        except (OSError, ValueError):
            os.close(ends[1])
            raise
        finally:
            os.close(ends[0])
        self._pipe = ends[1]

    def _collect(self, now_ns: int) -> None:
        """Collect the exit status of the helper if it has ended."""
        assert self.pid is not None
        status = -1
        with contextlib.suppress(ChildProcessError):  # collected elsewhere: it has ended
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if not pid:
                return
            self.ended_cpu_ns += round((usage.ru_utime + usage.ru_stime) * 1e9)
        self.pid = None
        os.close(self._pipe)
        self._pipe = -1
        if status:
            self._rest(now_ns)
        else:
            self._rest_ns = 0

    def _rest(self, now_ns: int) -> None:
        self._rest_ns = min(max(2 * self._rest_ns, _REST_NS), _MAX_REST_NS)
        self._rests_until_ns = now_ns + self._rest_ns


def _start_process(arguments: list[str], stdin: int) -> int:
    """Start a process with `stdin`, without output; return its pid."""
    return os.posix_spawn(
        arguments[0],
        arguments,
        {**os.environ, **_ENVIRONMENT},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, stdin, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
        setpgroup=0,  # Ctrl-C is meant for the job
        setsigmask=(),  # the recorder may block signals to read them from a descriptor
    )
