"""NCCL's RAS service is asked on this machine alone, and never waited for.

The server here answers as src/ras/client_support.cc of NCCL does: every line gets an answer in
order, and the connection is closed after the status.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from clusterprof.agent.launch.nccl import (
    MAX_REPLY_BYTES,
    PATIENCE_NS,
    RasQuery,
    has_own_listener,
    parse_loopback_address,
)
from tests.support.ras_server import STATUS, RasServer


def ask(query: RasQuery, patience_s: float = 5.0) -> RasQuery:
    """Poll as the recorder does, until the query is over."""
    end = time.monotonic() + patience_s
    while not query.poll(time.monotonic_ns()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return query


def test_the_status_of_a_ras_service_is_read_completely() -> None:
    server = RasServer()
    query = ask(RasQuery(server.address, time.monotonic_ns()))
    assert query.reason == ""
    greeting, _, document = query.reply.partition(b"{")
    assert greeting == b"SERVER PROTOCOL 2\nOK\nOK\n"
    assert json.loads(b"{" + document) == STATUS
    assert server.lines == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "VERBOSE STATUS"]


def test_an_older_ras_service_answers_in_text() -> None:
    query = ask(RasQuery(RasServer(has_json=False).address, time.monotonic_ns()))
    assert query.reason == ""
    assert b"ERROR: Unknown command SET FORMAT json\nNCCL version 2.27.3\n" in query.reply


def test_a_hanging_ras_service_times_out() -> None:
    hold = threading.Event()
    server = RasServer(answer=lambda: b"x" * hold.wait(30))
    began_ns = time.monotonic_ns()
    query = RasQuery(server.address, began_ns)
    end = time.monotonic() + 5
    while len(server.lines) < 4 and time.monotonic() < end:
        assert not query.poll(began_ns)
        time.sleep(0.01)
    assert not query.poll(began_ns + PATIENCE_NS - 1)
    assert query.poll(began_ns + PATIENCE_NS)
    assert query.reason == "the RAS service did not answer within 15 s"
    hold.set()


def test_an_excessive_ras_answer_is_cut() -> None:
    server = RasServer(answer=lambda: b"x" * (3 * MAX_REPLY_BYTES))
    query = ask(RasQuery(server.address, time.monotonic_ns()))
    assert query.reason.startswith("the answer was cut")
    assert MAX_REPLY_BYTES <= len(query.reply) < 2 * MAX_REPLY_BYTES


def test_a_missing_ras_service_is_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    query = RasQuery(f"localhost:{port}", time.monotonic_ns())
    assert query.poll(time.monotonic_ns())
    assert query.reason == f"no RAS service of this job listens on port {port}"


def test_the_ras_socket_of_another_user_is_not_queried(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
    row = "   0: 0100007F:6D7C 00000000:0000 0A 00000000:00000000 00:00000000 00000000 {} 0 1\n"
    table = tmp_path / "net" / "tcp"
    table.write_text(head + row.format(4_000_000_000))
    assert not has_own_listener(28028, str(tmp_path))  # 0x6D7C
    table.write_text(head + row.format(os.geteuid()))
    assert has_own_listener(28028, str(tmp_path))
    assert not has_own_listener(28029, str(tmp_path))


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("localhost:28028", ("127.0.0.1", 28028)),
        ("127.0.0.2:5", ("127.0.0.2", 5)),
        ("[::1]:28028", ("::1", 28028)),
        ("10.0.0.1:28028", None),
        ("127.evil.example:28028", None),
        ("gpu-01:28028", None),
        ("localhost", None),
        ("localhost:0", None),
        ("localhost:99999", None),
        ("", None),
    ],
)
def test_only_the_local_ras_service_is_queried(
    address: str, endpoint: tuple[str, int] | None
) -> None:
    assert parse_loopback_address(address) == endpoint
