"""Where live metrics go, with real sockets, files and a real receiver."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.options import TOKEN_VARIABLE
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.output.exporters import metrics
from clusterprof.output.exporters.live_metrics import ScrapeTarget, open_target
from clusterprof.output.exporters.metrics import OtlpTarget
from clusterprof.output.renderers.openmetrics import Family, FamilyDescription, Point
from tests.support.recording_runs import wait_until

ATTRIBUTES = {"service.instance.id": "job/node"}
COUNTER = FamilyDescription("clusterprof_live_lost_gpu_seconds", "counter", "seconds", "Lost.")
START_NS = 1_700_000_000_000_000_000


def families(value: float) -> tuple[Family, ...]:
    return (Family(COUNTER, (Point((("cause", "cpu-gc"),), value),)),)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def scrape(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def target() -> Iterator[ScrapeTarget]:
    opened = open_target(str(free_port()), {}, ATTRIBUTES, print)
    assert isinstance(opened, ScrapeTarget)
    yield opened
    opened.close()


def test_a_scrape_gets_the_latest_values_in_the_requested_format(target: ScrapeTarget) -> None:
    target.publish(families(1.5), START_NS)
    target.publish(families(2.5), START_NS)
    status, kind, text = scrape(target.port)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'clusterprof_live_lost_gpu_seconds_total{cause="cpu-gc"} 2.5\n' in text
    _, kind, text = scrape(target.port, Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    assert scrape(target.port, "/")[0] == 404


def test_a_silent_client_does_not_block_scrapes(target: ScrapeTarget) -> None:
    target.publish(families(1.5), START_NS)
    with socket.create_connection(("127.0.0.1", target.port)):
        assert scrape(target.port)[0] == 200


def test_a_configured_token_is_required() -> None:
    port = free_port()
    opened = open_target(f"0.0.0.0:{port}", {TOKEN_VARIABLE: "secret"}, ATTRIBUTES, print)
    try:
        assert scrape(port)[0] == 401
        assert scrape(port, Authorization="Bearer wrong")[0] == 401
        assert scrape(port, Authorization="Bearer secret")[0] == 200
    finally:
        opened.close()


def test_a_port_in_use_is_an_error_and_a_range_takes_the_next(target: ScrapeTarget) -> None:
    with pytest.raises(ClusterprofError, match="cannot be listened on") as error:
        open_target(str(target.port), {}, ATTRIBUTES, print)
    assert "PORT-LAST" in error.value.remedy
    second = open_target(f"{target.port}-{target.port + 20}", {}, ATTRIBUTES, print)
    assert isinstance(second, ScrapeTarget)
    assert target.port < second.port <= target.port + 20
    second.close()


def test_closing_the_target_closes_its_port(target: ScrapeTarget) -> None:
    other = open_target(str(free_port()), {}, ATTRIBUTES, print)
    assert isinstance(other, ScrapeTarget)
    other.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", other.port), 1)


def test_a_textfile_is_replaced_readable_and_finally_removed(tmp_path: Path) -> None:
    path = tmp_path / "clusterprof.prom"
    opened = open_target(str(path), {}, ATTRIBUTES, print)
    opened.publish(families(1.5), START_NS)
    opened.publish(families(2.5), START_NS)
    lines = path.read_text().splitlines()
    assert lines[0] == "# clusterprof job/node"
    assert lines[-1] == 'clusterprof_live_lost_gpu_seconds_total{cause="cpu-gc"} 2.5'
    assert path.stat().st_mode & 0o777 == 0o644
    opened.close()
    assert list(tmp_path.iterdir()) == []


def test_a_textfile_of_another_job_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "clusterprof.prom"
    first = open_target(str(path), {}, ATTRIBUTES, print)
    first.publish(families(1.5), START_NS)
    other = {"service.instance.id": "other/node"}
    with pytest.raises(ClusterprofError, match="another job") as error:
        open_target(str(path), {}, other, print)
    assert "{job}" in error.value.remedy
    os.utime(path, (0, 0))  # its writer was killed long ago
    second = open_target(str(path), {}, other, print)
    second.publish(families(3.0), START_NS)
    first.close()
    assert path.exists(), "it is the second's now"
    second.close()


class Receiver:
    """An OTLP receiver that can be away or refuse."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.status == 200:
                    receiver.got.append(json.loads(body))
                self.send_response(receiver.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *words: object) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def values(self) -> list[float]:
        points = [
            document["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["sum"]["dataPoints"][0]
            for document in self.got
        ]
        return [point["asDouble"] for point in points]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    result = Receiver()
    thread = threading.Thread(target=result.server.serve_forever, args=(0.01,))
    thread.start()
    yield result
    result.server.shutdown()
    thread.join()
    result.server.server_close()


def open_otlp(url: str, notes: list[str]) -> OtlpTarget:
    opened = open_target(f"otlp:{url}", {}, ATTRIBUTES, notes.append)
    assert isinstance(opened, OtlpTarget)
    return opened


def test_otlp_gets_cumulative_sums_with_their_start(receiver: Receiver) -> None:
    opened = open_otlp(receiver.url, [])
    opened.publish(families(1.5), START_NS)
    wait_until(lambda: receiver.got)
    opened.close()
    (resource,) = receiver.got[0]["resourceMetrics"]
    attributes = {
        item["key"]: item["value"]["stringValue"] for item in resource["resource"]["attributes"]
    }
    assert attributes["service.name"] == "clusterprof"
    assert attributes["service.instance.id"] == "job/node"
    (metric,) = resource["scopeMetrics"][0]["metrics"]
    assert metric["sum"]["isMonotonic"] and metric["sum"]["aggregationTemporality"] == 2
    (point,) = metric["sum"]["dataPoints"]
    assert point["startTimeUnixNano"] == str(START_NS)
    assert int(point["timeUnixNano"]) == pytest.approx(time.time_ns(), abs=60e9)


def test_unsent_points_are_queued_in_order_and_bounded(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_QUEUED", 3)
    monkeypatch.setattr(metrics, "_FIRST_REST_S", 0.05)
    notes: list[str] = []
    receiver.status = 503
    opened = open_otlp(receiver.url, notes)
    for value in range(10):
        opened.publish(families(float(value)), START_NS)
    assert opened.dropped == 7
    receiver.status = 200
    wait_until(lambda: len(receiver.got) == 3)
    assert receiver.values() == [7.0, 8.0, 9.0]
    assert len(notes) <= 1, "an absence is reported once"
    opened.close()


def test_permanently_refused_points_are_dropped_and_counted(receiver: Receiver) -> None:
    notes: list[str] = []
    receiver.status = 400
    opened = open_otlp(receiver.url, notes)
    opened.publish(families(1.0), START_NS)
    wait_until(lambda: opened.dropped == 1)
    receiver.status = 200
    opened.publish(families(2.0), START_NS)
    wait_until(lambda: receiver.got)
    assert receiver.values() == [2.0]
    assert "answered 400" in notes[0]
    opened.close()


def test_an_unreachable_receiver_does_not_delay_closing() -> None:
    opened = open_otlp(f"http://127.0.0.1:{free_port()}", [])
    opened.publish(families(1.0), START_NS)
    opened.close(patience_s=0.1)


@pytest.mark.parametrize("text", ["otlp:ftp://x", "otlp:http://u:p@x", "otlp:http://x:99999"])
def test_an_invalid_receiver_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--metrics otlp:"):
        open_target(text, {}, ATTRIBUTES, print)
