"""Send the ledger by OTLP/HTTP with JSON (OpenTelemetry 1.x), once, on request.

One POST to `<endpoint>/v1/metrics`, no retry: a failure is reported in one line, and
the command can be repeated. Headers, such as a token, come from
OTEL_EXPORTER_OTLP_HEADERS, never from the command line, where every user of the machine
could read them.

Live metrics (output.exporters.live_metrics) are sent again and again, from a thread that
keeps what it cannot send.

Export the ledger as OpenMetrics, and into a file `*.prom` in Prometheus' text format.

The textfile collector of node_exporter reads `*.prom` but not OpenMetrics. The file is
replaced atomically (output.exporters.base), so that no scrape sees half of it.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar
from urllib.parse import SplitResult, unquote, urlsplit

from clusterprof import __version__
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.output.exporters.base import Output, Run
from clusterprof.output.renderers.openmetrics import Family, FamilyDescription, build_families
from clusterprof.output.renderers.openmetrics import OpenMetrics as Renderer
from clusterprof.output.renderers.text.safety import escape_text

HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
_PATH = "/v1/metrics"
_CUMULATIVE = 2  # AggregationTemporality: sums since `startTimeUnixNano`
_MAX_ANSWER_BYTES = 64 << 10
_REPEATABLE = frozenset((429, 502, 503, 504))
"""Statuses after which OTLP permits to send a request again.

Source: https://opentelemetry.io/docs/specs/otlp/#otlphttp-response
"""
MAX_QUEUED = 240
"""Requests that wait for a receiver that is away: one hour, with one every 15 s …"""
MAX_QUEUED_BYTES = 8 << 20
"""… and at most these bytes; the oldest are dropped and counted."""
_FIRST_REST_S, _MAX_REST_S = 1.0, 60.0
"""Pause after a failed request, doubled each time."""
_NO_ATTRIBUTES: Mapping[str, str] = MappingProxyType({})
_UNITS = {"seconds": "s", "ratio": "1", "bytes": "By", "": "1"}  # UCUM, as OTLP requires


class Otlp:
    """Sends the ledger to an OTLP receiver."""

    name: ClassVar[str] = "otlp"
    suffix: ClassVar[str] = ""

    def __init__(self, endpoint: str, timeout_s: float, environ: Mapping[str, str]) -> None:
        """Parse the endpoint.

        Raises: UsageError when it is not an http(s) address.
        """
        self._receiver = OtlpReceiver(endpoint, timeout_s, environ)

    def check(self, output: Output) -> None:
        """Accept every output: the endpoint was checked by the constructor."""

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Send one request.

        Raises: ClusterprofError when it was not accepted.
        """
        start_ns = run.start_ns()
        end_ns = start_ns + max((node.duration_ns for node in run.report.nodes), default=0)
        remark = self._receiver.send(
            build_metrics_request(build_families(run.report), start_ns, end_ns)
        )
        return (remark,) if remark else ()


class NotAcceptedError(ClusterprofError):
    """A receiver did not accept a request."""

    def __init__(self, message: str, remedy: str, may_repeat: bool) -> None:
        """may_repeat: the request itself is valid, so that it can be sent again later."""
        super().__init__(message, remedy)
        self.may_repeat = may_repeat


class OtlpReceiver:
    """A receiver of OTLP over HTTP."""

    def __init__(self, endpoint: str, timeout_s: float, environ: Mapping[str, str]) -> None:
        """Parse the endpoint.

        Raises: UsageError when it is not an http(s) address.
        """
        self._endpoint = _parse_endpoint(endpoint)
        self._timeout_s = timeout_s
        self._headers = parse_headers(environ.get(HEADERS_VARIABLE, ""))

    def send(self, body: bytes) -> str:
        """Send one request; return what the receiver refused of it, "" = nothing.

        Raises: NotAcceptedError when it was not accepted.
        """
        endpoint = self._endpoint
        path = endpoint.path.rstrip("/")
        path = (path if path.endswith(_PATH) else path + _PATH) + (
            f"?{endpoint.query}" if endpoint.query else ""
        )
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"clusterprof/{__version__}",
            **self._headers,
        }
        kind: Any = (
            http.client.HTTPSConnection
            if endpoint.scheme == "https"
            else http.client.HTTPConnection
        )
        connection = kind(endpoint.hostname, endpoint.port, timeout=self._timeout_s)
        port = f":{endpoint.port}" if endpoint.port else ""
        where = f"{endpoint.scheme}://{endpoint.hostname}{port}{path.split('?')[0]}"
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            answer_body = answer.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            raise NotAcceptedError(
                f"nothing was sent to {where}: {escape_text(str(error) or type(error).__name__)}",
                "check that a receiver for OTLP over HTTP listens there (port 4318 by convention)",
                may_repeat=True,
            ) from None
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            raise NotAcceptedError(
                f"{where} answered {answer.status} {escape_text(answer.reason)}:"
                f" {escape_text(answer_body.decode('utf-8', 'replace').strip(), 300)}",
                "check the receiver's requirements; the request was sent once",
                may_repeat=answer.status in _REPEATABLE,
            )
        return _format_rejected_points(answer_body)


class OtlpTarget:
    """Pushes to a receiver of OTLP over HTTP from a thread of its own; keeps what it cannot send.

    Values are cumulative, so a dropped request loses the course of an hour, not its sum.
    """

    def __init__(
        self, receiver: OtlpReceiver, attributes: Mapping[str, str], log: Callable[[str], None]
    ) -> None:
        """Take a receiver. attributes: those of the resource. log: takes one line."""
        self.name = "otlp"
        self.dropped = 0
        self._receiver = receiver
        self._attributes = attributes
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


def _format_rejected_points(answer: bytes) -> str:
    """Describe the points the receiver rejected (`partial_success`); "" when it accepted all."""
    try:
        partial = json.loads(answer or b"{}").get("partialSuccess") or {}
        count = int(partial.get("rejectedDataPoints", 0))
        message = str(partial.get("errorMessage", ""))
    except (ValueError, TypeError, AttributeError):
        return ""
    return f"the receiver refused {count} points: {escape_text(message)}" if count else ""


def _parse_endpoint(endpoint: str) -> SplitResult:
    try:
        address = urlsplit(endpoint)
        port = address.port
    except ValueError as error:
        raise UsageError(f"--endpoint {endpoint!r}: {error}") from None
    if address.scheme not in ("http", "https") or not address.hostname or port == 0:
        raise UsageError(
            f"--endpoint {endpoint!r} is not an address", "write http://HOST:4318 or https://HOST"
        )
    if address.username or address.password:
        raise UsageError(
            "--endpoint carries a user or password, which every user of this machine can read",
            f"set {HEADERS_VARIABLE}='Authorization=…'",
        )
    return address


def parse_headers(variable: str) -> dict[str, str]:
    """Parse headers from OpenTelemetry's variable: `key1=value1,key2=value2`.

    Raises: UsageError for a line break in a header.
    """
    headers = {}
    for item in variable.split(","):
        key, equals, value = item.partition("=")
        if equals and key.strip():
            headers[key.strip()] = unquote(value.strip())
    if any(c in text for pair in headers.items() for text in pair for c in "\r\n"):
        raise UsageError(f"{HEADERS_VARIABLE} contains a line break")
    return headers


def build_metrics_request(
    families: Iterable[Family],
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, str] = _NO_ATTRIBUTES,
) -> bytes:
    """Build an `ExportMetricsServiceRequest` in its JSON form; 64-bit integers are strings.

    start_ns: since when counters count, end_ns: time of the values, ns since 1970. attributes:
    more attributes of the resource.
    """
    times = {"startTimeUnixNano": str(start_ns), "timeUnixNano": str(end_ns)}
    metrics = [_build_metric(family, times) for family in families]
    named = {"service.name": "clusterprof", **attributes}
    resource = [_build_attribute(key, text) for key, text in named.items()]
    document = {
        "resourceMetrics": [
            {
                "resource": {"attributes": resource},
                "scopeMetrics": [
                    {"scope": {"name": "clusterprof", "version": __version__}, "metrics": metrics}
                ],
            }
        ]
    }
    return json.dumps(document, allow_nan=False).encode("ascii")


def _build_metric(family: Family, times: Mapping[str, str]) -> dict[str, Any]:
    described = family.description
    points = [
        {
            "attributes": [_build_attribute(key, text) for key, text in point.labels],
            **times,
            "asDouble": float(point.value),
        }
        for point in family.points
    ]
    return {
        "name": _choose_name(described),
        "description": described.help,
        "unit": _UNITS[described.unit],
        **_build_data(described, points),
    }


def _choose_name(described: FamilyDescription) -> str:
    """Choose the metric's name; receivers for Prometheus append `_total` to counters
    themselves.
    """
    return described.sample if described.kind == "info" else described.name


def _build_data(described: FamilyDescription, points: list[dict[str, Any]]) -> dict[str, Any]:
    if described.kind != "counter":
        return {"gauge": {"dataPoints": points}}
    sums = {"dataPoints": points, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True}
    return {"sum": sums}


def _build_attribute(key: str, text: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": text}}


_TEXTFILE_SUFFIX = ".prom"


class OpenMetrics:
    """Exports the ledger as metrics."""

    name: ClassVar[str] = "openmetrics"
    suffix: ClassVar[str] = Renderer.suffix

    def check(self, output: Output) -> None:
        """Accept every output: the format is text."""

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Write one exposition."""
        textfile = output.path is not None and output.path.suffix == _TEXTFILE_SUFFIX
        text = Renderer(prometheus=textfile).render(run.report)
        output_file = (
            output.open_part("clusterprof", self.suffix)
            if output.is_folder
            else output.open_whole()
        )
        with output_file as file:
            file.write(text.encode("utf-8", "backslashreplace"))
        return ()
