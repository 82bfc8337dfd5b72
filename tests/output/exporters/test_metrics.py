"""What a real HTTP server on loopback got; one request, whatever it answers."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.output.exporters.base import Output
from clusterprof.output.exporters.metrics import HEADERS_VARIABLE, Otlp, parse_headers
from tests.support.small_run import S, make_report, make_run, make_time_ns


class Receiver:
    """A server that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], Any]] = []
        self.answer = (200, b"{}")
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append((self.path, dict(self.headers), json.loads(body)))
                status, answer = receiver.answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *words: object) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    result = Receiver()
    thread = threading.Thread(target=result.server.serve_forever, args=(0.01,))
    thread.start()
    yield result
    result.server.shutdown()
    thread.join()
    result.server.server_close()


def send(endpoint: str, **environ: str) -> Any:
    result = make_run(Path("nowhere"), make_report())  # the ledger alone: no recording is read
    return Otlp(endpoint, 5, environ).export(result, Output(None, io.BytesIO()))


def test_otlp_receives_the_ledger_as_sums_and_gauges(receiver: Receiver) -> None:
    assert send(receiver.endpoint, **{HEADERS_VARIABLE: "Authorization=Bearer%20x, a=b"}) == ()
    ((path, headers, document),) = receiver.got
    assert path == "/v1/metrics"
    assert headers["Content-Type"] == "application/json"
    assert (headers["Authorization"], headers["a"]) == ("Bearer x", "b")
    (resource,) = document["resourceMetrics"]
    assert resource["resource"]["attributes"] == [
        {"key": "service.name", "value": {"stringValue": "clusterprof"}}
    ]
    metrics = {metric["name"]: metric for metric in resource["scopeMetrics"][0]["metrics"]}
    lost = metrics["clusterprof_lost_gpu_seconds"]
    assert lost["unit"] == "s"
    assert lost["sum"]["isMonotonic"] is True
    assert lost["sum"]["aggregationTemporality"] == 2
    assert lost["sum"]["dataPoints"][0] == {
        "attributes": [
            {"key": "cause", "value": {"stringValue": "storage-local"}},
            {"key": "node", "value": {"stringValue": "node-a"}},
            {"key": "rank", "value": {"stringValue": "0"}},
            {"key": "device", "value": {"stringValue": "GPU-a"}},
        ],
        "startTimeUnixNano": str(make_time_ns(1)),
        "timeUnixNano": str(make_time_ns(1) + 310 * S),
        "asDouble": 0.3,
    }
    busy = metrics["clusterprof_gpu_busy_ratio"]["gauge"]["dataPoints"]
    assert [point["asDouble"] for point in busy] == [0.998]


@pytest.mark.parametrize("path", ["/", "/v1/metrics", "/otlp", "/otlp/"])
def test_the_endpoint_path_is_completed(receiver: Receiver, path: str) -> None:
    send(receiver.endpoint + path)
    want = "/otlp/v1/metrics" if "otlp" in path else "/v1/metrics"
    assert [got[0] for got in receiver.got] == [want]


def test_a_receiver_error_is_a_single_line_without_retry(receiver: Receiver) -> None:
    receiver.answer = (503, b"over\x1b[2Jloaded\nsecond line")
    with pytest.raises(ClusterprofError, match="answered 503") as error:
        send(receiver.endpoint)
    assert len(receiver.got) == 1
    assert "over\\x1b[2Jloaded\\x0asecond line" in error.value.message
    assert "\n" not in error.value.message


def test_rejected_points_are_reported(receiver: Receiver) -> None:
    receiver.answer = (200, b'{"partialSuccess":{"rejectedDataPoints":"3","errorMessage":"old"}}')
    assert send(receiver.endpoint) == ("the receiver refused 3 points: old",)


def test_a_refused_connection_is_a_single_line_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ClusterprofError, match=r"nothing was sent to http://127\.0\.0\.1:"):
        send(f"http://127.0.0.1:{port}")


def test_a_silent_receiver_times_out() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = make_run(Path("nowhere"), make_report())
        with pytest.raises(ClusterprofError, match="timed out"):
            Otlp(endpoint, 0.1, {}).export(result, Output(None, io.BytesIO()))


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "ftp://x", "http://", "http://x:99999", "http://u:p@x"]
)
def test_an_invalid_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UsageError, match="endpoint"):
        Otlp(endpoint, 5, {})


def test_headers_are_parsed_in_opentelemetry_syntax() -> None:
    assert parse_headers("a=1,b = x%3Dy ,c") == {"a": "1", "b": "x=y"}
    with pytest.raises(UsageError, match="line break"):
        parse_headers("a=x%0d%0aHost: evil")
