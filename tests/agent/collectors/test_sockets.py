"""The job's own TCP connections: a kernel by hand, whose connections come, count and go."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.collectors.sockets import SocketsCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.network.netlink import (
    UNKNOWN,
    ConnectionState,
    ListedConnection,
    TcpInfo,
)
from clusterprof.errors import DevicesChanged, Unavailable

SECOND_NS = 1_000_000_000
MINE, OTHER, PEER = b"\x0a\0\0\1", b"\x0b\0\0\1", b"\x0a\0\0\2"
ADDRESSES = {MINE: "eth0", OTHER: "ib0", b"\x7f\0\0\1": "lo"}
ZERO = TcpInfo(0, 100_000, 0, 0, 0, 90_000, 0, 0, 0, 0, 0)
NOT_TOLD = Unavailable("absent", "this kernel does not report it for a connection", "")
NOT_MEASURED = Unavailable("absent", "no connection of the job has measured it", "")


def connection_state(
    state: int = 1, unread: int = 0, unsent: int = 0, **fields: Any
) -> ConnectionState:
    return ConnectionState(state, unread, unsent, ZERO._replace(**fields))


class Kernel:
    """Connections by inode, handed out in pieces of two."""

    def __init__(self) -> None:
        self.all: dict[int, tuple[ListedConnection, ConnectionState]] = {}
        self.queried: list[int] = []
        self.lists = 0
        self.fails: Unavailable | None = None
        self.pieces: Iterator[list[ListedConnection]] = iter(())
        self.opened = 0

    def be(
        self,
        inode: int,
        answer: ConnectionState,
        local: bytes = MINE,
        remote: bytes = PEER,
        cookie: int = 0,
    ) -> None:
        name = bytes(4) + local.ljust(16, b"\0") + remote.ljust(16, b"\0") + bytes([cookie] * 12)
        self.all[inode] = (ListedConnection(inode, socket.AF_INET, name), answer)

    def connect(self) -> Kernel:
        self.opened += 1
        return self

    def start(self) -> None:
        self.lists += 1
        entries = [listed for listed, answer in self.all.values() if answer.state == 1]
        self.pieces = iter([entries[n : n + 2] for n in range(0, len(entries), 2)])

    def receive_listed(
        self, excluded: Set[int], seen: set[int]
    ) -> tuple[list[ListedConnection], bool]:
        piece = next(self.pieces, None)
        kept = [listed for listed in piece or [] if listed.inode not in excluded]
        seen |= {listed.inode for listed in piece or []} & excluded
        return (kept, piece is None)

    def query(self, connections: Sequence[ListedConnection]) -> Iterator[ConnectionState | None]:
        for listed in connections:
            if self.fails is not None:
                raise self.fails
            self.queried.append(listed.inode)
            known, answer = self.all.get(listed.inode, (None, None))
            yield answer if known is not None and known.id == listed.id else None

    def close(self) -> None:
        self.opened -= 1


class Rig:
    def __init__(self, proc: Path, pids: Sequence[int] = (10,)) -> None:
        self.proc, self.pids, self.now_ns = proc, list(pids), 0
        self.kernel = Kernel()
        for pid in ("self", *pids):
            (proc / str(pid) / "fd").mkdir(parents=True)
            (proc / str(pid) / "ns").mkdir()
            (proc / str(pid) / "ns/net").symlink_to("net:[1]")
        self.context = Context(Roots(proc), None, lambda: self.pids)
        self.collector = SocketsCollector(
            self.context,
            lambda: self.now_ns,
            self.kernel.connect,
            lambda: ADDRESSES,  # type: ignore[arg-type]
        )
        self.columns = self.collector.open()

    def has(self, inode: int, pid: int = 10) -> None:
        (self.proc / str(pid) / f"fd/{inode}").symlink_to(f"socket:[{inode}]")

    def tick(self, times: int = 1) -> dict[tuple[str, str], Value]:
        """Return the last of some samples, a second apart, as the recorder takes them."""
        values: Sequence[Value] = ()
        for _ in range(times):
            self.now_ns += SECOND_NS
            try:
                values = self.collector.sample()
            except DevicesChanged:
                self.collector.close()
                self.columns = self.collector.open()
                values = self.collector.sample()
        keys = [(signal.name.removeprefix("tcp.job_"), nic) for signal, nic in self.columns]
        return dict(zip(keys, values, strict=True))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_connections_of_the_job_are_grouped_by_outgoing_interface(rig: Rig) -> None:
    rig.kernel.be(1, connection_state(unsent=500, rtt_ns=300, min_rtt_ns=200, lost_segments=1))
    rig.kernel.be(
        2, connection_state(unsent=70, unread=8, rtt_ns=500, min_rtt_ns=100, lost_segments=2)
    )
    rig.kernel.be(3, connection_state(unsent=1, rtt_ns=400, min_rtt_ns=300))
    rig.kernel.be(4, connection_state(rtt_ns=7, min_rtt_ns=6), local=OTHER)
    rig.kernel.be(5, connection_state(unsent=10**9))  # a stranger's
    rig.kernel.be(
        6, connection_state(unsent=10**9), remote=OTHER
    )  # to another address of this machine
    for inode in (1, 2, 3, 4, 6):
        rig.has(inode)
    counters = dict.fromkeys(
        (
            "retransmits_total",
            "ecn_marked_total",
            "busy_ns_total",
            "rwnd_limited_ns_total",
            "sndbuf_limited_ns_total",
            "acked_bytes_total",
            "received_bytes_total",
        ),
        0,
    )
    eth0 = {
        "connections_count": 3,
        "unsent_bytes": 571,
        "unread_bytes": 8,
        "lost_segments_count": 3,
        "rtt_ns": 400,
        "min_rtt_ns": 200,
        "delivery_bytes_per_second": 0,
        **counters,
    }
    ib0 = {
        "connections_count": 1,
        "unsent_bytes": 0,
        "unread_bytes": 0,
        "lost_segments_count": 0,
        "rtt_ns": 7,
        "min_rtt_ns": 6,
        "delivery_bytes_per_second": 0,
        **counters,
    }
    assert rig.tick(5) == {
        **{(name, "eth0"): value for name, value in eth0.items()},
        **{(name, "ib0"): value for name, value in ib0.items()},
    }
    assert set(rig.kernel.queried) == {1, 2, 3, 4}


def test_a_job_without_connections_has_no_columns(rig: Rig) -> None:
    rig.kernel.be(5, connection_state())
    assert rig.tick(10) == {}


def test_totals_start_at_zero_and_keep_closed_connections(rig: Rig) -> None:
    rig.kernel.be(1, connection_state(retransmits=1000, acked_bytes=10**9, busy_ns=5))
    rig.has(1)
    assert rig.tick(3)["retransmits_total", "eth0"] == 0
    rig.kernel.be(1, connection_state(retransmits=1003, acked_bytes=10**9 + 50, busy_ns=25))
    rig.kernel.be(
        2, connection_state(retransmits=4, acked_bytes=600, busy_ns=7)
    )  # opened while we look
    rig.has(2)
    later = rig.tick(5)
    totals = [
        ("retransmits_total", "eth0"),
        ("acked_bytes_total", "eth0"),
        ("busy_ns_total", "eth0"),
    ]
    assert [later[key] for key in totals] == [3 + 4, 50 + 600, 20 + 7]
    # One ends as TCP ends, with a last word; the other is gone at once.
    rig.kernel.be(
        1, connection_state(state=4, retransmits=1005, acked_bytes=10**9 + 60, busy_ns=30)
    )
    del rig.kernel.all[2]
    ended = rig.tick(1)
    assert [ended[key] for key in totals] == [5 + 4, 60 + 600, 25 + 7]
    assert ended["connections_count", "eth0"] == 0
    assert ended["rtt_ns", "eth0"] == NOT_MEASURED
    rig.kernel.be(4, connection_state(retransmits=1, acked_bytes=2, busy_ns=3))
    rig.has(4)
    rig.tick(4)
    rig.kernel.be(
        4, ConnectionState(6, 0, 0, UNKNOWN)
    )  # TIME_WAIT: it has forgotten what it counted
    waits = rig.tick()
    assert [waits[key] for key in totals] == [5 + 4 + 1, 662, 35]
    # A number that is used anew is another connection, whose counters begin at nothing.
    rig.kernel.be(1, connection_state(retransmits=2, acked_bytes=1), cookie=9)
    assert [rig.tick(8)[key] for key in totals] == [10 + 2, 663, 35]


def test_a_32_bit_counter_continues_after_wrapping(rig: Rig) -> None:
    rig.kernel.be(1, connection_state(retransmits=0xFFFFFFFE))
    rig.has(1)
    rig.tick(3)
    rig.kernel.be(1, connection_state(retransmits=3))
    assert rig.tick()["retransmits_total", "eth0"] == 5


def test_round_trip_times_come_from_connections_that_delivered_data(rig: Rig) -> None:
    for inode, rtt_ns in ((1, 10), (2, 20), (3, 900)):
        rig.kernel.be(inode, connection_state(rtt_ns=rtt_ns, delivery_bytes_per_second=inode))
        rig.has(inode)
    quiet = rig.tick(4)
    assert (quiet["rtt_ns", "eth0"], quiet["delivery_bytes_per_second", "eth0"]) == (20, 0)
    rig.kernel.be(3, connection_state(rtt_ns=900, acked_bytes=1, delivery_bytes_per_second=3))
    busy = rig.tick()
    assert (busy["rtt_ns", "eth0"], busy["delivery_bytes_per_second", "eth0"]) == (900, 3)
    assert rig.tick()["rtt_ns", "eth0"] == 20


def test_fields_missing_in_an_old_kernel_are_unknown_and_not_zero(rig: Rig) -> None:
    old = TcpInfo(2, 50, 7, *[None] * 8)
    rig.kernel.be(1, ConnectionState(1, 0, 30, old))
    rig.has(1)
    rig.tick(3)
    rig.kernel.be(1, ConnectionState(1, 0, 30, old._replace(retransmits=9)))
    values = rig.tick()
    known = {name: value for (name, _), value in values.items() if value != NOT_TOLD}
    assert known == {
        "connections_count": 1,
        "unsent_bytes": 30,
        "unread_bytes": 0,
        "lost_segments_count": 2,
        "rtt_ns": 50,
        "min_rtt_ns": NOT_MEASURED,
        "retransmits_total": 2,
    }
    assert values["busy_ns_total", "eth0"] == NOT_TOLD


def test_many_connections_are_read_in_rotation(rig: Rig) -> None:
    for inode in range(1, 301):
        rig.kernel.be(inode, connection_state(unsent=1))
        rig.has(inode)
    for _ in range(400):  # 300 connections in pieces of two, two pieces a tick
        values = rig.tick()
        if values.get(("connections_count", "eth0")) == 300:
            break
    assert values["unsent_bytes", "eth0"] == 300
    rig.kernel.queried.clear()
    rig.tick()
    assert len(rig.kernel.queried) == 128
    rig.tick(2)
    assert set(rig.kernel.queried) == set(range(1, 301))


def test_descriptors_are_searched_only_for_new_connections(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.kernel.be(1, connection_state())
    rig.kernel.be(5, connection_state())
    rig.has(1)
    rig.tick(4)
    looked: list[Any] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: looked.append(path) or listdir(path))
    rig.tick(20)
    assert looked == []
    assert rig.kernel.lists >= 4  # the list itself goes on
    rig.kernel.be(6, connection_state())
    rig.tick(5)
    assert looked == [f"{rig.proc}/10/fd"]


def test_processes_in_another_network_namespace_are_absent_and_reported_once(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, pids=(10, 11))
    rig.kernel.be(1, connection_state())
    rig.has(1, pid=11)
    for pid in (10, 11):
        (tmp_path / f"{pid}/ns/net").unlink()
        (tmp_path / f"{pid}/ns/net").symlink_to("net:[77]")
    with pytest.raises(Unavailable) as raised:
        rig.tick()
    assert raised.value.kind == "absent"
    assert "another network namespace" in raised.value.message
    assert rig.collector.events() == [
        ("connections-unseen", {"pid": 10, "why": raised.value.message})
    ]
    rig.pids = [12]
    (tmp_path / "12/ns").mkdir(parents=True)
    (tmp_path / "12/ns/net").symlink_to("net:[1]")
    (tmp_path / "12/fd").mkdir()
    rig.pids.append(10)
    rig.has(1, pid=12)
    assert rig.tick(4)["connections_count", "eth0"] == 1
    assert rig.collector.events() == []  # is said once


def test_forbidden_open_files_are_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    rig.kernel.be(1, connection_state())

    def denied(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(Unavailable) as raised:
        rig.tick(3)
    assert raised.value.kind == "denied"


def test_a_silent_netlink_socket_is_reopened(rig: Rig) -> None:
    rig.kernel.be(1, connection_state(retransmits=5))
    rig.has(1)
    rig.tick(3)
    rig.kernel.be(1, connection_state(retransmits=8))
    rig.kernel.fails = Unavailable("failed", "no buffer space available", "")
    with pytest.raises(Unavailable):
        rig.tick()
    assert rig.kernel.opened == 0  # nothing that was asked is left to be taken for an answer
    rig.kernel.fails = None
    assert rig.tick()["retransmits_total", "eth0"] == 3
    rig.collector.close()
    assert rig.kernel.opened == 0
