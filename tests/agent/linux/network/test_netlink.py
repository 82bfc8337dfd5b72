"""The kernel's list of TCP connections: real sockets on real addresses, and answers by hand."""

from __future__ import annotations

import errno
import os
import resource
import socket
import struct
from collections.abc import Iterator

import pytest

from clusterprof.agent.linux.network.netlink import (
    ESTABLISHED,
    SOCK_DIAG,
    UNKNOWN,
    Connections,
    ListedConnection,
    Netlink,
    map_addresses_to_interfaces,
    normalize_address,
    pack_attribute,
    parse_address,
    parse_connection,
)
from clusterprof.errors import Unavailable


def why_not() -> str:
    try:
        Netlink(SOCK_DIAG, "").close()
        map_addresses_to_interfaces()
    except Unavailable as why:
        return why.message
    return ""


pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no netlink here: {why_not()}")


def own_address() -> str:
    for address, nic in map_addresses_to_interfaces().items():
        if nic != "lo" and len(address) == 4:
            return socket.inet_ntoa(address)
    pytest.skip("this machine has no IPv4 address besides loopback")


@pytest.fixture
def kernel() -> Iterator[Connections]:
    connections = Connections()
    yield connections
    connections.close()


def listed(kernel: Connections) -> dict[int, ListedConnection]:
    kernel.start()
    collected: dict[int, ListedConnection] = {}
    last = False
    while not last:
        piece, last = kernel.receive_listed(frozenset(), set())
        collected.update({entry.inode: entry for entry in piece})
    return collected


def inode(endpoint: socket.socket) -> int:
    return os.fstat(endpoint.fileno()).st_ino


def again(endpoint: socket.socket) -> int:
    """Retransmissions by the socket's own word: byte 100 of TCP_INFO."""
    info = endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    return int(struct.unpack_from("=I", info, 100)[0])


def pair(address: str, family: int = socket.AF_INET) -> tuple[socket.socket, socket.socket]:
    both = family == socket.AF_INET6
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        client = socket.create_connection((address, server.getsockname()[1]))
        accepted, _ = server.accept()
        return client, accepted


def test_ipv4_and_ipv6_connections_are_listed_without_loopback(kernel: Connections) -> None:
    address = own_address()
    out4 = pair(address)
    out6 = pair(address, socket.AF_INET6)  # an IPv4 client, an IPv6 socket that answers it
    inside = [*pair("127.0.0.1"), *pair("127.0.0.1", socket.AF_INET6)]
    try:
        inside += pair("::1", socket.AF_INET6)
    except OSError:
        pass  # a machine without IPv6 loopback
    result = listed(kernel)
    for endpoint in (*out4, *out6):
        entry = result[inode(endpoint)]
        assert socket.inet_ntoa(normalize_address(entry.local)) == address
        assert socket.inet_ntoa(normalize_address(entry.remote)) == address
        assert entry.family == endpoint.family
    assert not {inode(endpoint) for endpoint in inside} & set(result)
    for endpoint in (*out4, *out6, *inside):
        endpoint.close()


def test_connection_values_agree_with_the_sockets(kernel: Connections) -> None:
    client, accepted = pair(own_address())
    client.sendall(b"x" * 70_000)
    got = accepted.recv(20_000, socket.MSG_WAITALL)
    entries = listed(kernel)
    sent_again = [again(client)]
    sender, receiver = kernel.query([entries[inode(client)], entries[inode(accepted)]])
    sent_again.append(again(client))
    assert sender is not None and receiver is not None
    assert sender.state == receiver.state == ESTABLISHED
    assert len(got) == 20_000
    # Every byte is either acknowledged or still the sender's; what came and was not read, waits.
    assert (sender.info.acked_bytes or 0) + sender.unsent_bytes in (70_000, 70_001)  # or the SYN
    assert receiver.unread_bytes == (receiver.info.received_bytes or 0) - 20_000
    # None, but on a busy machine, where the one that reads is late.
    assert sent_again[0] <= (sender.info.retransmits or 0) <= sent_again[1]
    assert 0 < (sender.info.rtt_ns or 0) < 1_000_000_000
    client.close()
    accepted.close()


def test_closed_connections_are_distinguished_from_open_connections(kernel: Connections) -> None:
    pairs = [pair(own_address()) for _ in range(40)]  # more than are asked in one call
    entries = listed(kernel)
    known = [entries[inode(client)] for client, _ in pairs]
    for client, accepted in pairs[::2]:
        # A reset leaves nothing behind, not even the wait of a connection that was closed politely.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        accepted.close()
    connections = list(kernel.query(known))
    assert [answer is None for answer in connections] == [True, False] * 20
    for client, accepted in pairs[1::2]:
        client.close()
        accepted.close()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open more files than some machines usually allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (-1, resource.RLIM_INFINITY) and hard < 2048:
        pytest.skip(f"this process may not open more than {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_long_connection_list_is_received_in_pieces(
    kernel: Connections, many_files: None
) -> None:
    address = own_address()
    pairs = [pair(address) for _ in range(400)]
    kernel.start()
    sizes = []
    last = False
    while not last:
        piece, last = kernel.receive_listed(frozenset(), set())
        sizes.append(len(piece))
    assert sum(sizes) >= 800
    assert max(sizes) < 400
    kernel.start()
    own = sorted(inode(endpoint) for endpoints in pairs for endpoint in endpoints)
    strangers, seen, left = frozenset(own[:500]), set[int](), 0
    last = False
    while not last:
        piece, last = kernel.receive_listed(strangers, seen)
        left += len(piece)
    assert seen == strangers
    assert left >= 300
    for endpoints in pairs:
        for endpoint in endpoints:
            endpoint.close()


def test_without_a_free_descriptor_interface_addresses_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(index: int) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "if_indextoname", full)
    with pytest.raises(Unavailable, match="too many open files"):
        map_addresses_to_interfaces()


def test_loopback_addresses_map_to_the_lo_interface() -> None:
    addresses = map_addresses_to_interfaces()
    assert addresses[b"\x7f\0\0\1"] == "lo"
    assert set(addresses.values()) <= {name for _, name in socket.if_nameindex()}


def answer(*attributes: bytes, state: int = 1) -> bytes:
    identity = struct.pack("=HH16s16sIII", 1, 2, bytes(16), bytes(16), 0, 3, 4)
    fixed = struct.pack("=BBBB48sIIIII", 2, state, 0, 0, identity, 5, 600, 700, 1000, 4711)
    body = fixed + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), 20, 0, 1, 0) + body


def test_a_handmade_connection_message_is_parsed() -> None:
    info = bytearray(104)
    struct.pack_into("=I", info, 100, 12)
    connection = parse_connection(
        answer(pack_attribute(8, b"\1"), pack_attribute(2, bytes(info)), pack_attribute(99, b"?"))
    )
    assert (connection.state, connection.unread_bytes, connection.unsent_bytes) == (1, 600, 700)
    assert (connection.info.retransmits, connection.info.acked_bytes) == (12, None)
    without = parse_connection(answer(state=6))
    assert (without.state, without.info) == (6, UNKNOWN)


def test_truncated_attributes_are_ignored() -> None:
    whole = answer(pack_attribute(2, bytes(104)))
    assert parse_connection(whole[:-40]).info == UNKNOWN


def test_handmade_address_messages_are_parsed() -> None:
    def message(*attributes: bytes, kind: int = 20) -> bytes:
        body = struct.pack("=BBBBI", 2, 24, 0, 0, 7) + b"".join(attributes)
        return struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body

    local, peer = b"\x0a\0\0\1", b"\x0a\0\0\2"
    # Of a point-to-point link IFA_ADDRESS is the peer's.
    assert parse_address(message(pack_attribute(1, peer), pack_attribute(2, local))) == (local, 7)
    assert parse_address(message(pack_attribute(1, bytes(16)))) == (bytes(16), 7)
    assert parse_address(message(kind=16)) == (b"", 0)
    assert normalize_address(bytes(10) + b"\xff\xff" + local) == local
    assert normalize_address(bytes(16)) == bytes(16)
