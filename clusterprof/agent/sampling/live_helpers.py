"""Start the helpers that settle what this node records: for viewers, and for live metrics.

    recorder ──starts──> analysis.live.settler          while somebody watches the job
             ──starts──> output.exporters.live_metrics  with `record --metrics`

The recorder looks after them every CHECK_NS, next to the segment that it writes, and starts them in
processes of their own: only these load numpy. The helper for viewers is wanted while there is a
viewer's mark (one `stat`, two where there is a mark). A helper ends by itself when it is not wanted
any more, or when the recorder ends and so closes the pipe. It is never waited for. That it cannot
start, dies or is killed has no consequence but that viewers read the recording themselves, and that
live metrics are missing until the next start.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterprof.agent.options import RecordingRequest, parse_metrics_target
from clusterprof.errors import UsageError
from clusterprof.trace.live_files import (
    METRICS_LOG_NAME,
    METRICS_STATE_NAME,
    is_wanted,
    remove_live_files,
)
from clusterprof.trace.schema import Header

CHECK_NS = 5_000_000_000
"""Time between two looks for a mark, ns."""
HELPER_NAME = "live"
METRICS_HELPER_NAME = "metrics"
_REST_NS, _MAX_REST_NS = 60_000_000_000, 3_600_000_000_000
"""Pause after a helper has failed, ns; twice as long each time, up to an hour."""
_METRICS_REST_NS, _MAX_METRICS_REST_NS = 10_000_000_000, 600_000_000_000
"""The same for live metrics, which somebody waits for at any time, ns."""
_BOOT_CODE = """
import os, sys
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # loading numpy, too
except (AttributeError, OSError):
    os.nice(19)
sys.path += sys.argv.pop(1).split(":")
from {module} import main
sys.exit(main(sys.argv[1:]))
"""
_ENVIRONMENT = {
    "CLUSTERPROF_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class LiveHelper:
    """A helper of one recording: started when wanted, at most one at a time."""

    def __init__(
        self,
        folder: Path,
        boot_code: str,
        arguments: Sequence[str] = (),
        rest_ns: tuple[int, int] = (_REST_NS, _MAX_REST_NS),
        errors: str = os.devnull,
    ) -> None:
        """Take the node's folder; nothing is started.

        boot_code: what the helper runs, with the folder and `arguments`. rest_ns: the first and
        the longest pause after a failure, ns. errors: file for its errors, of its last start.
        """
        self.pid: int | None = None
        self.ended_cpu_ns = 0
        """CPU time of the helpers that have ended, ns."""
        self._folder = folder
        self._boot_code = boot_code
        self._arguments = tuple(arguments)
        self._rests_ns = rest_ns
        self._errors = errors
        self._pipe = -1
        self._checked_ns = 0
        self._rest_ns = 0
        self._rests_until_ns = 0

    def is_wanted(self, segment: str) -> bool:
        """Return whether the helper shall run. segment: the name of the segment being written."""
        return True

    def check(self, now_ns: int, segment: str) -> None:
        """Start the helper if it is wanted, or collect the status of one that has ended.

        Never waits, raises nothing. segment: name of the segment that is being written.
        """
        if now_ns - self._checked_ns < CHECK_NS:
            return
        self._checked_ns = now_ns
        if self.pid is not None:
            self._collect(now_ns)
        elif now_ns >= self._rests_until_ns and self.is_wanted(segment):
            try:
                self._start()
            except (OSError, ValueError):
                self._rest(now_ns)

    def close(self) -> None:
        """Let the helper end by closing its pipe."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1

    def _start(self) -> None:
        path = ":".join(entry for entry in sys.path if entry and ":" not in entry)
        code = [sys.executable, "-I", "-S", "-c", self._boot_code, path, str(self._folder)]
        ends = os.pipe()
        try:
            self.pid = _start_process([*code, *self._arguments], ends[0], self._errors)
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
        shortest_ns, longest_ns = self._rests_ns
        self._rest_ns = min(max(2 * self._rest_ns, shortest_ns), longest_ns)
        self._rests_until_ns = now_ns + self._rest_ns


class ViewerHelper(LiveHelper):
    """The helper for viewers: wanted while somebody watches the job."""

    def __init__(self, folder: Path, boot_code: str = "") -> None:
        """Take the node's folder; nothing is started. boot_code: what the helper runs."""
        module = "clusterprof.analysis.live.settler"
        super().__init__(folder, boot_code or _BOOT_CODE.format(module=module))

    def is_wanted(self, segment: str) -> bool:
        """Return whether a viewer has left its mark."""
        return is_wanted(self._folder, segment)

    def close(self) -> None:
        """Let the helper end by closing its pipe, and remove what it has written."""
        super().close()
        remove_live_files(self._folder)


class MetricsHelper(LiveHelper):
    """The helper for live metrics: wanted while the job runs."""

    def __init__(
        self, folder: Path, targets: Sequence[str], period_s: float = 15.0, boot_code: str = ""
    ) -> None:
        """Take the node's folder and where the metrics go; nothing is started.

        period_s: time between two values, seconds.
        """
        module = "clusterprof.output.exporters.live_metrics"
        super().__init__(
            folder,
            boot_code or _BOOT_CODE.format(module=module),
            (f"{period_s:g}", *targets),
            (_METRICS_REST_NS, _MAX_METRICS_REST_NS),
            str(folder / METRICS_LOG_NAME),
        )
        self._textfiles = [text for text in targets if text.endswith(".prom")]

    def close(self) -> None:
        """Let the helper end by closing its pipe; if there is none, remove what it has left."""
        had_helper = self.pid is not None
        super().close()
        if not had_helper:
            for path in (*self._textfiles, str(self._folder / METRICS_STATE_NAME)):
                with contextlib.suppress(OSError):
                    os.unlink(path)


def build_live_helpers(
    request: RecordingRequest, folder: Path, header: Header
) -> dict[str, LiveHelper]:
    """Build the helpers that settle what is recorded, by name; none is started."""
    helpers: dict[str, LiveHelper] = {}
    if request.plan.recording.get("live_helper", 1):
        helpers[HELPER_NAME] = ViewerHelper(folder)
    if request.plan.metrics:
        targets = name_textfiles(
            request.plan.metrics,
            {"job": request.job, "node": header.node.get("display") or header.node["hostname"]},
        )
        period_s = request.plan.recording.get("metrics_interval_s", 15)
        helpers[METRICS_HELPER_NAME] = MetricsHelper(folder, targets, period_s)
    return helpers


def name_textfiles(targets: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Return the targets with {job} and {node} in names of files replaced."""
    named = []
    for text in targets:
        for key, value in names.items() if text.endswith(".prom") else ():
            safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in value)
            text = text.replace(f"{{{key}}}", safe)
        named.append(text)
    return named


def describe_metrics_targets(targets: Sequence[str]) -> list[str]:
    """Describe where live metrics can be found, or why they cannot be offered there yet."""
    notes = []
    for text in targets:
        try:
            target = parse_metrics_target(text, os.environ)
        except UsageError as error:
            notes.append(f"no live metrics: {error.message}; {error.remedy}")
            continue
        if target.kind != "http":
            notes.append(f"live metrics to {text}")
            continue
        port = _find_free_port(target.destination, target.ports)
        host = f"[{target.destination}]" if ":" in target.destination else target.destination
        if port is not None:
            notes.append(f"live metrics at http://{host}:{port}/metrics")
            continue
        notes.append(
            f"no live metrics: port {text} of {host} is in use or not ours, which is tried again"
            " every 10 s; --metrics PORT-LAST takes the first free port"
        )
    return notes


def _find_free_port(address: str, ports: Sequence[int]) -> int | None:
    """Find the first port that can be listened on; None when there is none."""
    import socket  # only where live metrics are wanted

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in range(ports[0], ports[-1] + 1):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            probe.listen(1)  # with SO_REUSEADDR only this finds another listener
            return port
    return None


def _start_process(arguments: list[str], stdin: int, errors: str) -> int:
    """Start a process with `stdin`, without output, errors to a file; return its pid."""
    flags = os.O_WRONLY if errors == os.devnull else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    return os.posix_spawn(
        arguments[0],
        arguments,
        {**os.environ, **_ENVIRONMENT},
        file_actions=[
            (os.POSIX_SPAWN_DUP2, stdin, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, errors, flags | os.O_NOFOLLOW, 0o666),
        ],
        setpgroup=0,  # Ctrl-C is meant for the job
        setsigmask=(),  # the recorder may block signals to read them from a descriptor
    )
