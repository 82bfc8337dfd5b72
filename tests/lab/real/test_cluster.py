"""Nodes and cables of the lab keep their promises, and a job over two of them is recorded whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.schema import Columns, Event, Header
from clusterprof_lab.real.accept.truth import compute_truth
from clusterprof_lab.real.cable import Cable, Link, build_cable
from clusterprof_lab.real.job import SCRIPT, NodeOutput, make_environment, run_job
from clusterprof_lab.real.node import Node, why_not_here
from tests.support.job_python import require_torch

_REASON = why_not_here()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=f"no nodes on this machine: {_REASON}")

NAMES = ("alpha", "beta")
MEGABIT = 1_000_000
STEPS = ("--steps=6", "--compute-ms=30", "--model-mb=1")

SINK = """
import socket
server = socket.create_server(("", 5000))
print("up", flush=True)
peer, _ = server.accept()
while peer.recv(1 << 20):
    pass
peer.sendall(b"all")
"""
# Sends as many bytes as asked and waits until the other end has them; prints bits per second.
SOURCE = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 5000))
began = time.monotonic()
peer.sendall(bytes(int(sys.argv[2])))
peer.shutdown(socket.SHUT_WR)
peer.recv(3)
print(8 * int(sys.argv[2]) / (time.monotonic() - began))
"""
# Answers datagrams; a sender that prints the shortest and the longest round trip in seconds.
MIRROR = """
import socket
mirror = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mirror.bind(("", 5001))
print("up", flush=True)
while True:
    data, peer = mirror.recvfrom(2048)
    mirror.sendto(data, peer)
"""
PING = """
import socket, sys, time
ping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ping.settimeout(5); trips = []
for _ in range(int(sys.argv[2])):
    began = time.monotonic()
    ping.sendto(b"x", (sys.argv[1], 5001))
    ping.recv(2048)
    trips.append(time.monotonic() - began)
print(min(trips), max(trips))
"""
BURST = """
import socket, sys
burst = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    burst.sendto(bytes(1000), (sys.argv[1], 5002))
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_cable(tmp_path_factory.mktemp("cable"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[Node]]:
    with Node(0, NAMES) as alpha, Node(1, NAMES) as beta:
        yield [alpha, beta]


@pytest.fixture(scope="module")
def wired(program: Path, nodes: list[Node]) -> Iterator[Cable]:
    with Cable(program, nodes) as cable:
        yield cable


@pytest.fixture
def cable(wired: Cable) -> Iterator[Cable]:
    yield wired
    for port in (0, 1):
        wired.set_link(port, Link())


def started(node: Node, code: str) -> subprocess.Popen[str]:
    process = node.start(sys.executable, "-I", "-c", code, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process


def sent(nodes: list[Node], count: int) -> float:
    """Send bytes from alpha to beta; return bits per second."""
    sink = started(nodes[1], SINK)
    rate = nodes[0].run(sys.executable, "-I", "-c", SOURCE, "beta", str(count))
    sink.wait(timeout=10)
    return float(rate)


def test_a_node_has_separate_name_address_boot_id_and_processes(nodes: list[Node]) -> None:
    for node, address in zip(nodes, ("10.77.0.1", "10.77.0.2")):
        assert node.run("uname", "-n") == f"{node.name}\n"
        assert node.run("cat", "/proc/sys/kernel/random/boot_id") == f"{node.boot_id}\n"
        assert node.run("cat", "/proc/1/comm").startswith("python")
        assert sorted(node.run("ls", "/dev/shm").split()) == ["tmp"]
        assert node.run("nproc") == "1\n"
        assert address in node.run("getent", "hosts", node.name)
    assert nodes[0].boot_id != nodes[1].boot_id
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() != nodes[0].boot_id


def test_each_node_runs_in_its_own_cpu_control_group(nodes: list[Node]) -> None:
    for node in nodes:
        if node.cpu_group is None:
            pytest.skip("no control group for the CPU may be made here")
        assert f"/{node.cpu_group.name}\n" in node.run("cat", "/proc/self/cgroup")
        assert node.cpu_group.name.endswith(f"-{node.name}")


@pytest.mark.accept
def test_the_cable_limits_its_rate_and_its_queue(nodes: list[Node], cable: Cable) -> None:
    before = cable.read_counts()["ports"][1]["down"]
    cable.set_link(1, Link(rate_bits_per_second=100 * MEGABIT, queue_bytes=60_000))
    rates = [sent(nodes, 4 << 20) for _ in range(3)]  # the machine's neighbours come and go
    port = cable.read_counts()["ports"][1]
    # TCP never beats the line, and reaches a good part of it.
    assert 25 * MEGABIT < max(rates) < 105 * MEGABIT
    assert port["down"]["overflowed"] > before["overflowed"]
    assert 50_000 < port["down"]["queued_bytes_at_most"] <= 60_000
    assert port["largest_frame_bytes"] <= 1514  # no super-frames


@pytest.mark.accept
def test_the_cable_delays_every_packet(nodes: list[Node], cable: Cable) -> None:
    mirror = started(nodes[1], MIRROR)
    ping = (sys.executable, "-I", "-c", PING, "beta", "20")
    near, _ = map(float, nodes[0].run(*ping).split())
    cable.set_link(1, Link(delay_s=0.012))
    far, _ = map(float, nodes[0].run(*ping).split())
    cable.set_link(1, Link(delay_s=0.012, jitter_s=0.01))
    shortest, longest = map(float, nodes[0].run(*ping).split())
    mirror.kill()
    assert near < 0.010
    assert 0.024 <= far < 0.034  # twice, and less than ten more
    assert shortest >= 0.024
    assert longest - shortest > 0.004  # of twenty draws of the sum of two from 0 to 10 ms


def test_the_cable_drops_and_counts_the_configured_share(nodes: list[Node], cable: Cable) -> None:
    before = cable.read_counts()["ports"][1]["down"]
    cable.set_link(1, Link(loss_ratio=0.05))
    nodes[0].run(sys.executable, "-I", "-c", BURST, "beta", "4000")

    def through() -> tuple[int, int]:
        now = cable.read_counts()["ports"][1]["down"]
        return now["frames"] - before["frames"], now["lost"] - before["lost"]

    end = time.monotonic() + 5
    while sum(through()) < 3000 and time.monotonic() < end:
        time.sleep(0.01)
    passed, lost = through()
    # 200 ± 14 of 4,000; the interface itself may have dropped some before the cable had them
    assert passed + lost >= 3000
    assert 0.03 < lost / (passed + lost) < 0.07


def test_node_and_cable_end_with_their_parent_process(program: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path\n"
        "from clusterprof_lab.real.cable import Cable\n"
        "from clusterprof_lab.real.node import Node\n"
        "node = Node(0, ['gone']); cable = Cable(Path(sys.argv[1]), [node])\n"
        "node.start('sleep', '1000')\n"
        "print(node.pid, cable._process.pid, node.cpu_group, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    lab = str(Path(__file__).resolve().parents[3] / "lab")
    done = subprocess.run(
        [sys.executable, "-c", code, str(program)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": lab},
    )
    *pids, group = done.stdout.split()
    assert len(pids) == 2, done.stderr
    end = time.monotonic() + 10
    while any(map(_lives, pids)) or Path(group).exists():
        assert time.monotonic() < end, "something was left behind"
        time.sleep(0.02)


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, nodes: list[Node], wired: Cable
) -> tuple[Path, list[NodeOutput]]:
    """A clean job: two nodes, two ranks each, a real rendezvous between them."""
    require_torch()
    out = tmp_path_factory.mktemp("cluster") / "recording"
    words = (*STEPS, "--linger-s=3")  # so that all that was sent is looked at
    return out, run_job(nodes, 2, [words, words], out, "lab-clean")


@pytest.mark.torch
def test_every_node_has_a_recording_with_its_ranks(run: tuple[Path, list[NodeOutput]]) -> None:
    out, printed = run
    collected = {}
    for folder in list_node_folders(out):
        records = list(NodeReader(folder))
        header = next(record for record in records if isinstance(record, Header))
        node = header.node
        assert header.launcher["job"] == "lab-clean"  # both nodes', though they began apart
        assert folder.name.startswith(f"{node['hostname']}-{node['boot_id'][:8]}-")
        ranks = [
            (record.attributes["rank"], record.attributes)
            for record in records
            if isinstance(record, Event)
            and record.kind == "process-registered"
            and record.attributes["rank"] is not None
        ]
        assert node["hostname"] not in collected
        collected[node["hostname"]] = (node["boot_id"], sorted(rank for rank, _ in ranks))
        for rank, attributes in ranks:
            place = ("world_size", "node_local_rank", "node_number", "restart")
            assert [attributes[name] for name in place] == [4, rank % 2, rank // 2, 0]
            assert attributes["variables"]["TORCHELASTIC_RUN_ID"] == "lab-clean"
    ranks = {item.node.name: [rank["rank"] for rank in item.ranks] for item in printed}
    assert collected == {
        item.node.name: (item.node.boot_id, ranks[item.node.name]) for item in printed
    }
    assert sorted(rank for _, ranks in collected.values() for rank in ranks) == [0, 1, 2, 3]


@pytest.mark.torch
def test_job_traffic_over_the_link_is_recorded(run: tuple[Path, list[NodeOutput]]) -> None:
    out, _ = run
    for folder in list_node_folders(out):
        last: dict[tuple[str, str], float] = {}
        for record in NodeReader(folder):
            if isinstance(record, Columns) and record.collector == "sockets":
                for signal, nic, values in zip(record.signals, record.devices, record.values):
                    last[signal.removeprefix("tcp.job_"), nic] = values[-1]
        # Four ranks in a ring, six steps: one of each node sends 3/2 of the gradients a step away.
        assert min(last[f"{way}_bytes_total", "eth0"] for way in ("acked", "received")) >= 6_000_000
        assert {nic for _, nic in last} == {"eth0"}  # nothing of what stays in the node


@pytest.mark.torch
def test_recording_does_not_change_the_output_of_the_script(
    run: tuple[Path, list[NodeOutput]],
) -> None:
    """A plain world of one: every rank reads the same items, so its losses are the same."""
    _, printed = run
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}
    plain = subprocess.run(
        [sys.executable, str(SCRIPT), *STEPS],
        env={**make_environment(), **alone},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    expected = json.loads(plain.stdout)
    for item in printed:
        assert len(item.stdout.splitlines()) == 2
        assert [rank["host"] for rank in item.ranks] == [item.node.name] * 2
        for rank in item.ranks:
            assert list(rank) == list(expected)
            assert (rank["world"], rank["steps"]) == (4, 6)
            assert rank["loss"] == expected["loss"]


@pytest.mark.torch
def test_stopwatch_totals_are_consistent(run: tuple[Path, list[NodeOutput]]) -> None:
    """The parts do not exceed the whole, and who waits is kept waiting by somebody."""
    _, printed = run
    result = compute_truth([rank for item in printed for rank in item.ranks])
    lost: dict[int, int] = {}
    for _, _, rank, ns in result["lost"]:
        lost[rank] = lost.get(rank, 0) + ns
    for row in result["ranks"]:
        assert 0 < row["compute_ns"] <= row["total_ns"]
        waits = row["data_wait_ns"] + row["reduce_wait_ns"]
        assert abs(waits - lost[row["rank"]]) <= 6 * 8  # each share of a step is rounded
        assert waits + row["send_recv_ns"] + row["compute_ns"] <= row["total_ns"]
    waited, caused = (
        sum(row[name] for row in result["ranks"])
        for name in ("waited_for_others_ns", "kept_others_waiting_ns")
    )
    assert waited == caused
    assert sum(row["last_times"] for row in result["ranks"]) == result["steps"] == 6
