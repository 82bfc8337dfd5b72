"""TCP of a job over a real, bad link between two namespaces: recorded as the job itself sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import clusterprof
from clusterprof_lab.real.cable import Cable, Link, build_cable
from clusterprof_lab.real.node import Node, get_address, why_not_here

_REASON = why_not_here()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=f"no nodes on this machine: {_REASON}")

NAMES = ("alpha", "beta")
MEGABYTE = 1 << 20
SINK = """
import socket, threading
server = socket.create_server(("", 5000))
print("up", flush=True)
def drain(peer):
    while peer.recv(1 << 20):
        pass
while True:
    threading.Thread(target=drain, args=(server.accept()[0],), daemon=True).start()
"""
# Sends as much as asked for over some connections, waits until all of it is acknowledged, and says
# what the kernel reported of them: retransmissions at byte 100, the smoothed round trip at 68.
SOURCE = """
import fcntl, json, os, socket, struct, sys, termios, time
address, count, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
server = socket.create_server(("127.0.0.1", 0))
inside = socket.create_connection(server.getsockname())
ends = [socket.create_connection((address, 5000)) for _ in range(count)]
print(os.getpid(), flush=True)
for line in sys.stdin:
    for end in ends:
        end.sendall(bytes(size))
    while any(struct.unpack("i", fcntl.ioctl(end, termios.TIOCOUTQ, bytes(4)))[0] for end in ends):
        time.sleep(0.001)
    infos = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for end in ends]
    print(json.dumps({
        "again": sum(struct.unpack_from("=I", info, 100)[0] for info in infos),
        "rtt_us": sorted(struct.unpack_from("=I", info, 68)[0] for info in infos),
    }), flush=True)
"""
# The collector, as the recorder has it, on one process; a sample for every line it is given.
WATCH = """
import json, sys
from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.sockets import SocketsCollector
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.agent.linux.files import Roots
now = [0]
collector = SocketsCollector(Context(Roots(), None, lambda: [int(sys.argv[1])]), lambda: now[0])
columns = collector.open()
for line in sys.stdin:
    now[0] += 10**9
    try:
        values = collector.sample()
    except DevicesChanged:
        collector.close()
        columns = collector.open()
        values = collector.sample()
    except Unavailable as why:
        print(json.dumps({"why": why.message}), flush=True)
        continue
    said = [v.message if isinstance(v, Unavailable) else v for v in values]
    keys = [f"{signal.name} {device}" for signal, device in columns]
    print(json.dumps(dict(zip(keys, said))), flush=True)
"""


class Talk:
    """A process of a node with which the test speaks line by line."""

    def __init__(self, node: Node, code: str, *arguments: str) -> None:
        where = {**os.environ, "PYTHONPATH": str(Path(clusterprof.__file__).parents[1])}
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", code, *arguments]
        self.process = node.start(*command, env=where, stdin=pipe, stdout=pipe, text=True)

    def hear(self) -> str:
        return self.process.stdout.readline()  # type: ignore[union-attr, no-any-return]

    def ask(self) -> dict[str, float]:
        self.process.stdin.write("go\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return json.loads(self.hear())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cable(tmp_path_factory.mktemp("cable"))


@pytest.fixture
def nodes(program: Path) -> Iterator[tuple[Node, Node, Cable]]:
    with Node(0, NAMES) as alpha, Node(1, NAMES) as beta, Cable(program, [alpha, beta]) as cable:
        sink = Talk(beta, SINK)
        assert sink.hear() == "up\n"
        yield alpha, beta, cable


def nic_of(node: Node) -> str:
    links = json.loads(node.run("ip", "-json", "link"))
    return next(link["ifname"] for link in links if link["ifname"] != "lo")


def test_a_lossy_link_shows_retransmits_of_the_jobs_connections(
    nodes: tuple[Node, Node, Cable],
) -> None:
    alpha, _, cable = nodes
    source = Talk(alpha, SOURCE, get_address(1), "4", str(MEGABYTE))
    watch = Talk(alpha, WATCH, source.hear().strip())
    nic = nic_of(alpha)
    for _ in range(4):
        before = watch.ask()
    # Four connections over the link; the one within the machine is none of them.
    assert before[f"tcp.job_connections_count {nic}"] == 4
    assert {key.split()[1] for key in before} == {nic}
    cable.set_link(0, Link(delay_s=0.005, loss_ratio=0.02))
    first = source.ask()
    after = watch.ask()
    assert first["again"] > 0
    assert after[f"tcp.job_retransmits_total {nic}"] == first["again"]
    assert after[f"tcp.job_acked_bytes_total {nic}"] == 4 * MEGABYTE
    assert after[f"tcp.job_unsent_bytes {nic}"] == 0
    assert after[f"tcp.job_rtt_ns {nic}"] == first["rtt_us"][2] * 1000  # type: ignore[index]
    assert after[f"tcp.job_rtt_ns {nic}"] > 5_000_000
    assert after[f"tcp.job_busy_ns_total {nic}"] > before[f"tcp.job_busy_ns_total {nic}"]
    cable.set_link(0, Link())
    second = source.ask()
    # What was sent again stays counted, and what is sent again from now on is added.
    assert watch.ask()[f"tcp.job_retransmits_total {nic}"] == second["again"]
    source.process.stdin.close()
    source.process.wait()
    gone = watch.ask()
    assert gone[f"tcp.job_connections_count {nic}"] == 0
    assert gone[f"tcp.job_retransmits_total {nic}"] == second["again"]


def test_another_network_namespace_is_a_reason_for_missing_tcp_signals(
    nodes: tuple[Node, Node, Cable],
) -> None:
    alpha, _, _ = nodes
    source = Talk(alpha, SOURCE, get_address(1), "1", "1")
    assert source.hear()
    pid = alpha.pid  # its first process, seen from here: another namespace than ours
    where = {**os.environ, "PYTHONPATH": str(Path(clusterprof.__file__).parents[1])}
    command = [sys.executable, "-c", WATCH, str(pid)]
    done = subprocess.run(command, input="go\n", capture_output=True, text=True, env=where)
    assert "in another network namespace" in json.loads(done.stdout)["why"]
