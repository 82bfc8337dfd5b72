"""The ledger sent by OTLP/HTTP with JSON (OpenTelemetry 1.x), once, when somebody asks for it.

One POST to `<endpoint>/v1/metrics`, no retry: what went wrong is one line, and the command can be
given again. Headers, such as a token, come from OTEL_EXPORTER_OTLP_HEADERS, never from the command
line, where every user of the machine would read them.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import SplitResult, unquote, urlsplit

from clusterprof import __version__
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.exporters.base import Run
from clusterprof.exporters.output import Output
from clusterprof.renderers.metric_families import families
from clusterprof.renderers.metric_names import Described, Family
from clusterprof.renderers.text_safety import safe_text

HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
_PATH = "/v1/metrics"
_CUMULATIVE = 2  # AggregationTemporality: sums since `startTimeUnixNano`
_ANSWER_BYTES = 64 << 10
_UNITS = {"seconds": "s", "ratio": "1", "bytes": "By", "": "1"}  # UCUM, as OTLP wants them


class Otlp:
    """The ledger to an OTLP receiver."""

    name: ClassVar[str] = "otlp"
    suffix: ClassVar[str] = ""

    def __init__(self, endpoint: str, timeout_s: float, environ: Mapping[str, str]) -> None:
        """Take where to send it; raises UsageError for what is no http(s) address."""
        self._to = _address(endpoint)
        self._timeout_s = timeout_s
        self._headers = headers_of(environ.get(HEADERS_VARIABLE, ""))

    def check(self, output: Output) -> None:
        """Where it goes was checked when it was said."""

    def export(self, run: Run, output: Output) -> Sequence[str]:
        """Send one request; raises ClusterprofError when it was not taken."""
        document = metrics_document(run)
        refused = self._send(json.dumps(document, allow_nan=False).encode("ascii"))
        return (refused,) if refused else ()

    def _send(self, body: bytes) -> str:
        to = self._to
        path = to.path.rstrip("/")
        path = (path if path.endswith(_PATH) else path + _PATH) + (
            f"?{to.query}" if to.query else ""
        )
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"clusterprof/{__version__}",
            **self._headers,
        }
        kind: Any = (
            http.client.HTTPSConnection if to.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(to.hostname, to.port, timeout=self._timeout_s)
        where = f"{to.scheme}://{to.hostname}{f':{to.port}' if to.port else ''}{path.split('?')[0]}"
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            said = answer.read(_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            raise ClusterprofError(
                f"nothing was sent to {where}: {safe_text(str(error) or type(error).__name__)}",
                "see that a receiver for OTLP over HTTP listens there (port 4318 by convention)",
            ) from None
        finally:
            connection.close()
        if not 200 <= answer.status < 300:
            raise ClusterprofError(
                f"{where} answered {answer.status} {safe_text(answer.reason)}:"
                f" {safe_text(said.decode('utf-8', 'replace').strip(), 300)}",
                "see what the receiver wants; it was asked once",
            )
        return _refused(said)


def _refused(answer: bytes) -> str:
    """Return what the receiver says it did not take (`partial_success`), "" when it took all."""
    try:
        partial = json.loads(answer or b"{}").get("partialSuccess") or {}
        count = int(partial.get("rejectedDataPoints", 0))
        said = str(partial.get("errorMessage", ""))
    except (ValueError, TypeError, AttributeError):
        return ""
    return f"the receiver refused {count} points: {safe_text(said)}" if count else ""


def _address(endpoint: str) -> SplitResult:
    try:
        found = urlsplit(endpoint)
        port = found.port
    except ValueError as error:
        raise UsageError(f"--endpoint {endpoint!r}: {error}") from None
    if found.scheme not in ("http", "https") or not found.hostname or port == 0:
        raise UsageError(
            f"--endpoint {endpoint!r} is no address", "write http://HOST:4318 or https://HOST"
        )
    if found.username or found.password:
        raise UsageError(
            "--endpoint carries a user or password, which every user of this machine can read",
            f"set {HEADERS_VARIABLE}='Authorization=…'",
        )
    return found


def headers_of(said: str) -> dict[str, str]:
    """Return headers as OpenTelemetry's variable lists them: `key1=value1,key2=value2`."""
    found = {}
    for item in said.split(","):
        key, equals, value = item.partition("=")
        if equals and key.strip():
            found[key.strip()] = unquote(value.strip())
    if any(c in text for pair in found.items() for text in pair for c in "\r\n"):
        raise UsageError(f"{HEADERS_VARIABLE} has a line break in it")
    return found


def metrics_document(run: Run) -> dict[str, Any]:
    """Return an `ExportMetricsServiceRequest` as JSON has it; 64-bit integers are strings."""
    start_ns = run.start_ns()
    end_ns = start_ns + max((node.duration_ns for node in run.report.nodes), default=0)
    times = {"startTimeUnixNano": str(start_ns), "timeUnixNano": str(end_ns)}
    metrics = [_metric(family, times) for family in families(run.report)]
    resource = [_attribute("service.name", "clusterprof")]
    return {
        "resourceMetrics": [
            {
                "resource": {"attributes": resource},
                "scopeMetrics": [
                    {"scope": {"name": "clusterprof", "version": __version__}, "metrics": metrics}
                ],
            }
        ]
    }


def _metric(family: Family, times: Mapping[str, str]) -> dict[str, Any]:
    described = family.described
    points = [
        {
            "attributes": [_attribute(key, text) for key, text in point.labels],
            **times,
            "asDouble": float(point.value),
        }
        for point in family.points
    ]
    return {
        "name": _name(described),
        "description": described.help,
        "unit": _UNITS[described.unit],
        **_data(described, points),
    }


def _name(described: Described) -> str:
    """Receivers for Prometheus add `_total` to counters themselves."""
    return described.sample if described.kind == "info" else described.name


def _data(described: Described, points: list[dict[str, Any]]) -> dict[str, Any]:
    if described.kind != "counter":
        return {"gauge": {"dataPoints": points}}
    sums = {"dataPoints": points, "aggregationTemporality": _CUMULATIVE, "isMonotonic": True}
    return {"sum": sums}


def _attribute(key: str, text: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": text}}
