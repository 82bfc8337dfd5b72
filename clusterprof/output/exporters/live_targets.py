"""Where live metrics go: scraped over HTTP, a textfile of node_exporter, pushed by OTLP.

Each target takes the latest families and never makes its caller wait. A target that cannot be
opened is an error that says what to do; one that fails later is tried again.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any, Protocol

from clusterprof.agent.options import TOKEN_VARIABLE, MetricsTarget, parse_metrics_target
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.output.exporters.metrics import (
    NotAcceptedError,
    OtlpReceiver,
    build_metrics_request,
)
from clusterprof.output.renderers.openmetrics import Family, render_families
from clusterprof.util.atomic_file import write_file

PATH = "/metrics"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_SCRAPES = 8
"""Scrapes that are answered at the same time; further connections are closed."""
_SCRAPE_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 10.0
MAX_QUEUED = 240
"""Requests that wait for a receiver that is away: one hour, with one every 15 s …"""
MAX_QUEUED_BYTES = 8 << 20
"""… and at most these bytes; the oldest are dropped and counted."""
_FIRST_REST_S, _MAX_REST_S = 1.0, 60.0
"""Pause after a failed request, doubled each time."""
_OTHER_WRITER_S = 120.0
"""Age up to which a textfile of another job is taken to be in use, seconds."""

Log = Callable[[str], None]


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
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
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
            return _Server((target.place, port), token)
        except OSError as refused:
            error = refused
    ports = "-".join(str(port) for port in dict.fromkeys(target.ports))
    assert error is not None
    raise ClusterprofError(
        f"port {ports} of {target.place} cannot be listened on: {(error.strerror or '').lower()}",
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
                "put {job} and {node} into its name, which become those of the recording",
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
        own = self._head.encode("utf-8", "backslashreplace")
        return head != own and abs(age_s) < _OTHER_WRITER_S


class OtlpTarget:
    """Pushes to a receiver of OTLP over HTTP from a thread of its own; keeps what it cannot send.

    Values are cumulative, so a dropped request loses the course of an hour, not its sum.
    """

    def __init__(
        self, receiver: OtlpReceiver, attributes: Mapping[str, str], place: str, log: Log
    ) -> None:
        """Take a receiver. attributes: those of the resource. place: its address, for messages."""
        self.name = "otlp"
        self.dropped = 0
        self._receiver = receiver
        self._attributes = attributes
        self._place = place
        self._log = log
        self._queue: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_away = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def publish(self, families: Sequence[Family], start_ns: int) -> None:
        """Queue these values."""
        now_ns = time.time_ns()
        # A clock that was set back must not make the start later than the value.
        body = build_metrics_request(families, min(start_ns, now_ns), now_ns, self._attributes)
        with self._changed:
            self._queue.append(body)
            while len(self._queue) > 1 and (
                len(self._queue) > MAX_QUEUED or sum(map(len, self._queue)) > MAX_QUEUED_BYTES
            ):
                self._queue.popleft()
                self.dropped += 1
            self._changed.notify()

    def close(self, patience_s: float = 5.0) -> None:
        """Send what is queued, for at most `patience_s` seconds."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(patience_s)

    def _run(self) -> None:
        rest_s = _FIRST_REST_S
        while True:
            with self._changed:
                while not self._queue and not self._is_closing:
                    self._changed.wait()
                if not self._queue:
                    return
                body = self._queue[0]
            if self._send(body):
                rest_s = _FIRST_REST_S
                continue
            with self._changed:
                if self._is_closing:
                    return
                self._changed.wait(rest_s)
            rest_s = min(2 * rest_s, _MAX_REST_S)

    def _send(self, body: bytes) -> bool:
        """Send a request; return False if it must be sent again."""
        try:
            remark = self._receiver.send(body)
            if remark:
                self._log(remark)
            self._is_away = False
        except NotAcceptedError as error:
            if not self._is_away:
                self._log(f"{error.message} ({error.remedy})")
            self._is_away = True
            if error.may_repeat:
                return False
            self.dropped += 1
        with self._changed:
            if self._queue and self._queue[0] is body:  # else it was dropped meanwhile
                self._queue.popleft()
        return True


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
        return TextfileTarget(Path(target.place), attributes["service.instance.id"], log)
    try:
        receiver = OtlpReceiver(target.place, _SEND_TIMEOUT_S, environ)
    except UsageError as error:
        raise UsageError(error.message.replace("--endpoint", "--metrics otlp:")) from None
    return OtlpTarget(receiver, attributes, target.place, log)
