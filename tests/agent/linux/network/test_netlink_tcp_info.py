"""struct tcp_info as kernels of different ages write it, packed by hand, and the kernel's own."""

from __future__ import annotations

import socket
import struct

import pytest

from clusterprof.agent.linux.network.netlink import UNKNOWN, TcpInfo, parse_tcp_info

# include/uapi/linux/tcp.h: where each field lies.
FIELDS = {
    "lost": (32, "I", 3),
    "rtt": (68, "I", 250),  # microseconds
    "total_retrans": (100, "I", 17),
    "bytes_acked": (120, "Q", 5_000_000_000),
    "bytes_received": (128, "Q", 6_000_000_000),
    "min_rtt": (148, "I", 90),
    "delivery_rate": (160, "Q", 1_250_000_000),
    "busy_time": (168, "Q", 9_000_000),
    "rwnd_limited": (176, "Q", 40),
    "sndbuf_limited": (184, "Q", 50),
    "delivered_ce": (196, "I", 8),
}
WHOLE = TcpInfo(
    3,
    250_000,
    17,
    5_000_000_000,
    6_000_000_000,
    90_000,
    1_250_000_000,
    9_000_000_000,
    40_000,
    50_000,
    8,
)
# Sizes of the structure, by the version of Linux that made it so long, and the fields it has.
LENGTHS = {
    104: "2.6",
    120: "3.15",
    136: "4.1",
    144: "4.2",
    160: "4.6",
    168: "4.9",
    192: "4.10",
    200: "4.18",
    232: "5.4",
    248: "6.7",
}
KNOWN = {104: 3, 120: 3, 136: 5, 144: 5, 160: 6, 168: 7, 192: 10, 200: 11, 232: 11, 248: 11}


def structure(length: int, **other: int) -> bytes:
    data = bytearray(b"\xee" * length)
    for name, (offset, form, value) in FIELDS.items():
        if offset + struct.calcsize(form) <= length:
            struct.pack_into("=" + form, data, offset, other.get(name, value))
    return bytes(data)


@pytest.mark.parametrize("length", LENGTHS, ids=lambda n: f"{n} bytes, Linux {LENGTHS[n]}")
def test_a_short_tcp_info_structure_has_only_leading_fields(length: int) -> None:
    expected = [*WHOLE[: KNOWN[length]], *[None] * (11 - KNOWN[length])]
    # Fields are in the order of their offsets, so a shorter structure is a shorter prefix.
    assert list(parse_tcp_info(structure(length))) == expected


def test_a_tcp_info_structure_ends_at_the_given_offset() -> None:
    data = b"before!!" + structure(248)
    assert parse_tcp_info(data, 8) == WHOLE
    assert parse_tcp_info(data, 8, 8 + 136) == parse_tcp_info(structure(136))
    assert parse_tcp_info(b"") == UNKNOWN


def test_round_trip_times_not_yet_measured_are_unknown() -> None:
    info = parse_tcp_info(structure(200, rtt=0, min_rtt=0xFFFFFFFF))
    assert (info.rtt_ns, info.min_rtt_ns) == (None, None)


def test_tcp_info_of_this_kernel_is_parsed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with client, accepted:
            client.sendall(b"x" * 1000)
            received = len(accepted.recv(1000, socket.MSG_WAITALL))
            data = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1024)
    info = parse_tcp_info(data)
    assert received == 1000
    assert (info.lost_segments, info.retransmits) == (0, 0)
    assert info.received_bytes in (1000, None)
    assert info.rtt_ns is None or 0 < info.rtt_ns < 1_000_000_000
