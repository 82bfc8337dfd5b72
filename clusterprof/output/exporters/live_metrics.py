"""Publish live metrics of a growing recording: settle a part, count, publish, and repeat.

    recorder ──starts──> this process ──reads──> the node's recording
                         every 15 s   ──────────> scrapes, textfile, OTLP

`main` is the process that the recorder of a node starts: it settles this node alone, so waits
between ranks stay waits. `clusterprof collect` uses the same class for all nodes of a job.

Counters never go back. They are written next to the recording before they are published; a process
that is started again continues them, and what it missed counts as unmeasured. If they cannot be
written, they begin again at zero, with a new start.

Where they go: scraped over HTTP, a textfile of node_exporter, pushed by OTLP. A target takes the
latest values and never makes its caller wait. One that cannot be opened is an error that says what
to do; one that fails later is tried again.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Protocol

import msgspec

from clusterprof import __version__
from clusterprof.agent.options import TOKEN_VARIABLE, MetricsTarget, parse_metrics_target
from clusterprof.agent.sampling.live_helpers import name_textfiles
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.live.incremental import Cursor, JobSettler
from clusterprof.analysis.live.settler import is_pipe_closed, limit_process
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.output.exporters.metrics import OtlpReceiver, OtlpTarget
from clusterprof.output.renderers.live_counters import LiveSeries, Scope, decode_series
from clusterprof.output.renderers.openmetrics import Family, render_families
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.trace.live_files import METRICS_LOG_NAME, METRICS_STATE_NAME
from clusterprof.util.atomic_file import write_file

PERIOD_S = 15.0
"""Time between two parts, seconds: the usual interval of scrapes."""
MAX_PERIOD_S = 60.0
MAX_CPU_RATIO = 0.005
"""Share of one core above which parts are settled half as often, down to MAX_PERIOD_S."""
_FIRST_PERIOD_S = 3.0
_MAX_LOG_LINES = 200
_MAX_STATE_BYTES = 16 << 20
_FORMAT = 1

Log = Callable[[str], None]
PATH = "/metrics"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_SCRAPES = 8
"""Scrapes that are answered at the same time; further connections are closed."""
_SCRAPE_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 10.0
_OTHER_WRITER_S = 120.0
"""Age up to which a textfile of another job is taken to be in use, seconds."""


class Target(Protocol):
    """A place where live metrics go."""

    name: str
    dropped: int
    """Number of requests that were lost."""

    def publish(self, families: Sequence[Family], start_ns: int) -> None:
        """Take the latest values. start_ns: since when counters count, ns since 1970."""

    def close(self) -> None:
        """End: nothing of the job is offered any more."""


class ScrapeTarget:
    """An HTTP server for scrapes, in threads of its own."""

    def __init__(self, target: MetricsTarget, token: str) -> None:
        """Listen on the first free port.

        Raises: ClusterprofError when no port can be listened on.
        """
        self.name = "http"
        self.dropped = 0
        self._server = _listen(target, token)
        self.port = int(self._server.server_address[1])
        thread = threading.Thread(target=self._server.serve_forever, args=(0.5,), daemon=True)
        thread.start()

    def publish(self, families: Sequence[Family], start_ns: int) -> None:
        """Offer these values from now on."""
        self._server.bodies = (
            render_families(families).encode("utf-8", "backslashreplace"),
            render_families(families, prometheus=True).encode("utf-8", "backslashreplace"),
        )

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.token = token
        self.bodies = (b"# EOF\n", b"")
        self._slots = threading.Semaphore(_MAX_SCRAPES)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client has gone, or sent no HTTP."""

    def server_bind(self) -> None:
        """Bind without asking a name server for the name of this host."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SCRAPE_TIMEOUT_S
    server_version, sys_version = "clusterprof", ""

    def do_GET(self) -> None:
        """Answer a scrape."""
        token = self.server.token
        authorization = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if token and not hmac.compare_digest(authorization, f"Bearer {token}".encode()):
            self._answer(HTTPStatus.UNAUTHORIZED, b"a bearer token is required\n", TEXT_TYPE)
        elif self.path.partition("?")[0] != PATH:
            self._answer(HTTPStatus.NOT_FOUND, f"see {PATH}\n".encode(), TEXT_TYPE)
        elif "application/openmetrics-text" in self.headers.get("Accept", ""):
            self._answer(HTTPStatus.OK, self.server.bodies[0], OPENMETRICS_TYPE)
        else:
            self._answer(HTTPStatus.OK, self.server.bodies[1], TEXT_TYPE)

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.do_GET()

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Say nothing: a scrape comes every few seconds."""


def _listen(target: MetricsTarget, token: str) -> _Server:
    error: OSError | None = None
    for port in range(target.ports[0], target.ports[-1] + 1):
        try:
            return _Server((target.destination, port), token)
        except OSError as refused:
            error = refused
    ports = "-".join(str(port) for port in dict.fromkeys(target.ports))
    assert error is not None
    raise ClusterprofError(
        f"port {ports} of {target.destination} cannot be listened on:"
        f" {(error.strerror or '').lower()}",
        "another recorder may use it: --metrics PORT-LAST takes the first free port of several",
    )


class TextfileTarget:
    """A file for the textfile collector of node_exporter, replaced at once, removed at the end."""

    def __init__(self, path: Path, owner: str, log: Log) -> None:
        """Take a path. owner: name of the job and node, which the file begins with.

        Raises: ClusterprofError while another job writes this file.
        """
        self.name = "textfile"
        self.dropped = 0
        self._path = path
        self._head = f"# clusterprof {owner}\n"
        self._log = log
        if self._is_taken():
            raise ClusterprofError(
                f"{path}: another job writes this file",
                "use the placeholders {job} and {node} in the file name",
            )

    def publish(self, families: Sequence[Family], start_ns: int) -> None:
        """Replace the file."""
        text = self._head + render_families(families, prometheus=True)
        try:
            write_file(self._path, text.encode("utf-8", "backslashreplace"))
            os.chmod(self._path, 0o644)  # node_exporter is another user
        except (ClusterprofError, OSError) as error:
            self.dropped += 1
            self._log(f"{error}; the next try comes with the next values")

    def close(self) -> None:
        """Remove the file, unless another job has taken it."""
        with contextlib.suppress(OSError):
            if self._read_head() == self._head.encode("utf-8", "backslashreplace"):
                os.unlink(self._path)

    def _read_head(self) -> bytes:
        with open(self._path, "rb") as file:
            return file.readline(4096)

    def _is_taken(self) -> bool:
        try:
            age_s = time.time() - os.stat(self._path).st_mtime
            head = self._read_head()
        except OSError:
            return False
        own_head = self._head.encode("utf-8", "backslashreplace")
        return head != own_head and abs(age_s) < _OTHER_WRITER_S


def open_target(
    text: str, environ: Mapping[str, str], attributes: Mapping[str, str], log: Log
) -> Target:
    """Open one target of `--metrics`.

    attributes: of the OTLP resource; `service.instance.id` names the owner of a textfile.
    Raises: UsageError for a target that is none; ClusterprofError when it cannot be opened.
    """
    target = parse_metrics_target(text, environ)
    if target.kind == "http":
        return ScrapeTarget(target, environ.get(TOKEN_VARIABLE, ""))
    if target.kind == "textfile":
        return TextfileTarget(Path(target.destination), attributes["service.instance.id"], log)
    try:
        receiver = OtlpReceiver(target.destination, _SEND_TIMEOUT_S, environ)
    except UsageError as error:
        raise UsageError(error.message.replace("--endpoint", "--metrics otlp:")) from None
    return OtlpTarget(receiver, attributes, log)


class LiveExporter:
    """Settles parts of a recording and publishes the counters."""

    def __init__(
        self,
        parts: JobSettler,
        scope: Scope,
        targets: Sequence[str],
        environ: Mapping[str, str],
        log: Log,
        state: SavedState | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        """Take the recording and where the metrics go; nothing is read or opened."""
        self.period_s = period_s
        self._period_s = period_s
        # Values that are asked for more often than usual may cost more.
        self._max_cpu_ratio = MAX_CPU_RATIO * max(PERIOD_S / period_s, 1.0)
        self._parts = parts
        self._scope: Scope = scope
        self._texts = tuple(targets)
        self._environ = environ
        self._log = log
        self._state = state
        self._series = None if state is None else state.series
        self._targets: dict[str, Target] = {}
        self._errors: dict[str, str] = {}
        self._spent_ns = time.process_time_ns()

    @property
    def series(self) -> LiveSeries | None:
        """The series; None before the first record."""
        return self._series

    def open_targets(self) -> list[ClusterprofError]:
        """Open the targets that are not open; return why some cannot be."""
        node = next((node.name for node in self._parts.nodes), "")
        attributes = {
            "service.version": __version__,
            "service.instance.id": f"{self._parts.job}/{node if self._scope == 'node' else 'job'}",
        }
        if self._scope == "node":
            attributes["host.name"] = node
        errors = []
        for text in self._texts:
            if text in self._targets:
                continue
            (named,) = name_textfiles([text], {"job": self._parts.job, "node": node})
            try:
                self._targets[text] = open_target(named, self._environ, attributes, self._log)
                self._errors.pop(text, None)
            except ClusterprofError as error:
                errors.append(error)
                if self._errors.get(text) != error.message:  # once, not every few seconds
                    self._log(f"{error.message} ({error.remedy})")
                self._errors[text] = error.message
        return errors

    def export_part(self) -> None:
        """Read what is new, settle it, and publish the counters.

        Raises: NoRecording when there has never been anything to read.
        """
        self._parts.poll()
        settled_at_ns = self._parts.settled_at_ns
        if settled_at_ns is None:
            return  # nothing is recorded yet
        if self._series is None:
            self._series = LiveSeries(self._scope, settled_at_ns)
        part = self._parts.settle()
        self._series.add(part)
        dropped = {
            target.name: target.dropped
            for target in self._targets.values()
            if target.name != "http"  # it drops nothing
        }
        self._series.set_own_cost(time.process_time_ns(), dropped)
        if self._state is not None and not self._state.save(self._series):
            self._log("the counters cannot be saved: after a restart they begin at zero")
        self.open_targets()
        families = self._series.build_families()
        for target in self._targets.values():
            target.publish(families, self._series.started_at_ns)

    def adjust_period(self) -> None:
        """Choose the time until the next part, so that parts cost at most the share allowed."""
        now_ns = time.process_time_ns()
        cpu_s = (now_ns - self._spent_ns) / 1e9
        self._spent_ns = now_ns
        while cpu_s > self._max_cpu_ratio * self.period_s and self.period_s < MAX_PERIOD_S:
            self.period_s *= 2
        if self.period_s > self._period_s and cpu_s < self._max_cpu_ratio * self.period_s / 4:
            self.period_s /= 2

    def close(self) -> None:
        """End all targets, which takes a few seconds at most."""
        for target in self._targets.values():
            target.close()
        if self._state is not None:
            self._state.remove()


class SavedState:
    """The counters of a node and up to where they count, next to its recording."""

    def __init__(self, folder: Path) -> None:
        """Load what an earlier process has saved; a damaged file counts as none."""
        self._path = folder / METRICS_STATE_NAME
        self.cursor = Cursor()
        self.series: LiveSeries | None = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, msgspec.DecodeError):
            if self._path.stat().st_size <= _MAX_STATE_BYTES:
                self._decode(msgspec.json.decode(self._path.read_bytes()))

    def _decode(self, values: Any) -> None:
        if values["format"] != _FORMAT:
            return
        cursor = values["cursor"]
        ranks = {(int(pid), int(ticks)): int(end) for pid, ticks, end in cursor["ranks"]}
        decoded = Cursor(int(cursor["settled_ns"]), ranks, int(cursor["skipped_ns"]))
        self.series = decode_series(values["series"])
        self.cursor = decoded

    def save(self, series: LiveSeries) -> bool:
        """Save the counters; False: they cannot be, and an older state is gone, too."""
        cursor = self.cursor
        if cursor.settled_ns is None:
            return True
        values = {
            "format": _FORMAT,
            "cursor": {
                "settled_ns": cursor.settled_ns,
                "ranks": [[*key, end_ns] for key, end_ns in cursor.ranks.items()],
                "skipped_ns": cursor.skipped_ns,
            },
            "series": series.encode(),
        }
        try:
            write_file(self._path, msgspec.json.encode(values))
        except ClusterprofError:
            self.remove()
            return False
        return True

    def remove(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def main(arguments: Sequence[str]) -> int:
    """Offer the metrics of the node FOLDER at the targets until the recorder ends.

    arguments: FOLDER, the period in seconds, and the targets. Returns the exit status: 1 when the
    recording cannot be read. The token of scrapes comes from the environment.
    """
    folder, period_s, targets = Path(arguments[0]), float(arguments[1]), arguments[2:]
    limit_process()
    log = _BoundedLog()
    state = SavedState(folder)
    parts = JobSettler([folder], build_limits({}), False, {folder.name: state.cursor})
    exporter = LiveExporter(parts, "node", targets, os.environ, log.write, state, period_s)
    exit_code = 0
    try:
        _run_exporter(exporter, parts)
    except (ClusterprofError, OSError, MemoryError) as error:
        log.write(f"{type(error).__name__}: {error}")
        exit_code = 1
    if exit_code == 0:  # else the next process continues the counters
        exporter.close()
        with contextlib.suppress(OSError):
            if not os.path.getsize(folder / METRICS_LOG_NAME):
                os.unlink(folder / METRICS_LOG_NAME)
    return exit_code


def _run_exporter(exporter: LiveExporter, parts: JobSettler) -> None:
    """Export a part every period until the pipe is closed or the recording has ended."""
    rest_s = min(_FIRST_PERIOD_S, exporter.period_s)
    while not is_pipe_closed(rest_s):
        began_s = time.monotonic()
        exporter.export_part()
        exporter.adjust_period()
        if parts.has_ended:
            return
        rest_s = max(exporter.period_s - (time.monotonic() - began_s), 0.1)
    exporter.export_part()  # the last seconds, for receivers of OTLP


class _BoundedLog:
    """Errors of this process, on stderr, which the recorder has made a file."""

    def __init__(self) -> None:
        self._lines = 0

    def write(self, text: str) -> None:
        """Write a line; after _MAX_LOG_LINES nothing is written."""
        self._lines += 1
        if self._lines <= _MAX_LOG_LINES:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"{stamp} {escape_text(text, 1000)}\n")
                sys.stderr.flush()
