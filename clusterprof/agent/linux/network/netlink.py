"""Netlink: requests to the kernel as messages on a socket, answered by messages.

https://docs.kernel.org/userspace-api/netlink/intro.html, netlink(7)

    u32 length, u16 type, u16 flags, u32 sequence, u32 port · body · attributes
    attribute: u16 length, u16 type · content

The kernel answers within the system call that sends the request, so nothing here ever waits.

RTM_GETADDR: the interface of every address of this machine, from rtnetlink(7).

    struct ifaddrmsg { u8 family, prefixlen, flags, scope; u32 index; }, then attributes

IFA_LOCAL is the address itself; where it is missing (IPv6), IFA_ADDRESS is.

struct tcp_info: the kernel's statistics of one TCP connection.

include/uapi/linux/tcp.h; the times follow RFC 4898, the rate follows
https://datatracker.ietf.org/doc/draft-cheng-iccrg-delivery-rate-estimation/

The structure has only ever grown at its end, so its length shows what this kernel provides: bytes
acknowledged since 4.1, bytes not sent since 4.6, the rate since 4.9, times since 4.10, ECN marks
since 4.18. Fields beyond the end are unknown, not zero.

NETLINK_SOCK_DIAG: the TCP connections of our network namespace.

sock_diag(7), include/uapi/linux/inet_diag.h. `ss -ti` prints the same data.

    struct inet_diag_msg { u8 family, state, timer, retrans; struct inet_diag_sockid id (48 bytes:
        u16 sport, dport; u32 src[4], dst[4], if, cookie[2]); u32 expires, rqueue, wqueue, uid,
        inode; }, then attributes: INET_DIAG_INFO is a struct tcp_info

Listing walks the kernel's whole table: 0.2 ms for a table of 262,144 slots plus 0.7 µs for each
connection, so it is done rarely and in parts. A query for one known connection costs 3 µs and locks
no other. The kernel filters loopback connections out.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from clusterprof.errors import Unavailable

ROUTE, SOCK_DIAG = 0, 4
ERROR, DONE = 2, 3
REQUEST, DUMP = 0x001, 0x300
HEADER = struct.Struct("=IHHII")
# its first fields, as answers are parsed: length, type, flags, sequence
HEAD = struct.Struct("=IHHI")
_ATTRIBUTE = struct.Struct("=HH")
_ERRNO = struct.Struct("=i")
_RECEIVE_BYTES = 1 << 16  # more than the kernel puts into one answer of a dump
_TYPE_BITS = 0x3FFF
_NO_SUCH = {errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.ENOENT, errno.EOPNOTSUPP}


class Netlink:
    """One netlink socket.

    Raises: Unavailable where netlink is missing or forbidden.
    """

    def __init__(self, protocol: int, purpose: str) -> None:
        """Open a socket of this protocol.

        purpose: what it is used for, in words for error messages.
        """
        self._what = purpose
        try:
            kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            self._socket = socket.socket(socket.AF_NETLINK, kind, protocol)
            self._socket.bind((0, 0))  # from here on /proc/net/netlink lists its owner
        except OSError as error:
            raise self.reason(error) from None

    def send_request(self, kind: int, flags: int, body: bytes) -> None:
        """Send one request."""
        self.send(HEADER.pack(HEADER.size + len(body), kind, REQUEST | flags, 1, 0) + body)

    def send(self, messages: bytes) -> None:
        """Send requests that are already packed.

        Raises: Unavailable when the kernel refuses.
        """
        try:
            self._socket.send(messages)
        except OSError as error:
            raise self.reason(error) from None

    def receive(self) -> bytes:
        """Return the next answer of the kernel: one message, or several of a dump.

        Raises: Unavailable when there is none.
        """
        try:
            return self._socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise self.reason(error) from None

    def dump(self, kind: int, body: bytes) -> Iterator[bytes]:
        """Request a complete list and yield its messages, header included.

        Raises: Unavailable when the kernel refuses.
        """
        self.send_request(kind, DUMP, body)
        while True:
            data = self.receive()
            for start, length, answer in iterate_messages(data):
                if answer == DONE:
                    return
                if answer == ERROR:
                    raise self.explain_refusal(data, start)
                yield data[start : start + length]

    def explain_refusal(self, data: bytes, start: int) -> Unavailable:
        """Return the reason in the error message at `start`."""
        return self.reason(OSError(read_error_number(data, start), ""))

    def reason(self, error: OSError) -> Unavailable:
        """Return a readable reason why the kernel did not answer."""
        number = error.errno or 0
        words = os.strerror(number).lower()
        if number in _NO_SUCH:
            return Unavailable("absent", f"the kernel has no {self._what}: {words}", "")
        if number in (errno.EACCES, errno.EPERM):
            remedy = "allow netlink sockets in the container's seccomp profile"
            return Unavailable("denied", f"{self._what}: {words}", remedy)
        return Unavailable("failed", f"{self._what}: {words}", "")

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        self._socket.close()


def iterate_messages(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (start, length, type) of every complete message."""
    start, end = 0, len(data)
    while start + HEADER.size <= end:
        length, kind, _, _ = HEAD.unpack_from(data, start)
        if length < HEADER.size or start + length > end:
            return
        yield start, length, kind
        start += (length + 3) & ~3


def read_error_number(data: bytes, start: int) -> int:
    """Return the errno in the error message at `start`."""
    return -int(_ERRNO.unpack_from(data, start + HEADER.size)[0])


def iterate_attributes(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (type, start, end) of the content of every attribute between `start` and `end`."""
    while start + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, start)
        if length < _ATTRIBUTE.size or start + length > end:
            return
        yield kind & _TYPE_BITS, start + _ATTRIBUTE.size, start + length
        start += (length + 3) & ~3


def pack_attribute(kind: int, content: bytes) -> bytes:
    """Pack one attribute, padded to a multiple of 4 bytes as the next one requires."""
    length = _ATTRIBUTE.size + len(content)
    return _ATTRIBUTE.pack(length, kind) + content + bytes(-length % 4)


_GET_ADDRESS, _NEW_ADDRESS = 22, 20
_IFADDRMSG = struct.Struct("=BBBBI")
_ADDRESS, _LOCAL = 1, 2
_MAX_ADDRESSES = 65536
_MAPPED = bytes(10) + b"\xff\xff"  # ::ffff:a.b.c.d, an IPv4 address on an IPv6 socket


def map_addresses_to_interfaces() -> dict[bytes, str]:
    """Return the interface of every address of our network namespace.

    Raises: Unavailable when the kernel does not list them.
    """
    netlink = Netlink(ROUTE, "list of addresses (rtnetlink)")
    try:
        interfaces: dict[bytes, str] = {}
        for message in netlink.dump(_GET_ADDRESS, _IFADDRMSG.pack(0, 0, 0, 0, 0)):
            address, index = parse_address(message)
            if address and len(interfaces) < _MAX_ADDRESSES:
                try:
                    interfaces[address] = socket.if_indextoname(index)
                except OSError as error:
                    # if_indextoname() opens a socket
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        raise netlink.reason(error) from None
                    continue  # the interface disappeared meanwhile
        return interfaces
    finally:
        netlink.close()


def parse_address(message: bytes) -> tuple[bytes, int]:
    """Parse the address (4 or 16 bytes) and interface number of one answer; b"" = no address."""
    start = HEADER.size + _IFADDRMSG.size
    if len(message) < start or HEADER.unpack_from(message)[1] != _NEW_ADDRESS:
        return b"", 0
    index = _IFADDRMSG.unpack_from(message, HEADER.size)[4]
    named = {kind: message[a:b] for kind, a, b in iterate_attributes(message, start, len(message))}
    return named.get(_LOCAL) or named.get(_ADDRESS) or b"", index


def normalize_address(address: bytes) -> bytes:
    """Return the 4 bytes of an IPv4-mapped IPv6 address; any other address unchanged."""
    return address[12:] if address.startswith(_MAPPED) else address


_US = 1000
_NO_RTT = 0xFFFFFFFF  # of min_rtt, before the first measurement
# Offsets: lost 32, rtt 68, total_retrans 100, bytes_acked 120, bytes_received 128, min_rtt 148,
# delivery_rate 160, busy_time 168, rwnd_limited 176, sndbuf_limited 184, delivered_ce 196.
_COMPLETE_STRUCT = struct.Struct("=32xI32xI28xI16xQQ12xI8xQQQQ4xI")
_PARTS = (
    struct.Struct("=32xI"),
    struct.Struct("=68xI"),
    struct.Struct("=100xI"),
    struct.Struct("=120xQ"),
    struct.Struct("=128xQ"),
    struct.Struct("=148xI"),
    struct.Struct("=160xQ"),
    struct.Struct("=168xQ"),
    struct.Struct("=176xQ"),
    struct.Struct("=184xQ"),
    struct.Struct("=196xI"),
)


class TcpInfo(NamedTuple):
    """Statistics of one connection; None = not provided by this kernel, or not measured yet."""

    lost_segments: int | None
    """Segments currently considered lost."""
    rtt_ns: int | None
    """Smoothed round-trip time."""
    retransmits: int | None
    """Segments retransmitted so far; 32 bits, so it may wrap."""
    acked_bytes: int | None
    received_bytes: int | None
    min_rtt_ns: int | None
    """Shortest round-trip time of the last minutes."""
    delivery_bytes_per_second: int | None
    """Rate at which the peer received data when it last acknowledged some."""
    busy_ns: int | None
    """Time with data to send or to be acknowledged; the next two are part of it."""
    rwnd_limited_ns: int | None
    """Time the peer's receive window was full."""
    sndbuf_limited_ns: int | None
    """Time the send buffer was too small."""
    ecn_marked: int | None
    """Segments that reached the peer with an ECN congestion mark; 32 bits."""


UNKNOWN = TcpInfo(*[None] * 11)


def parse_tcp_info(data: bytes, start: int = 0, end: int | None = None) -> TcpInfo:
    """Parse all fields that the structure between `start` and `end` is long enough to contain."""
    length = (len(data) if end is None else end) - start
    values: list[int | None]
    if length >= _COMPLETE_STRUCT.size:
        values = list(_COMPLETE_STRUCT.unpack_from(data, start))
    else:
        values = [
            part.unpack_from(data, start)[0] if length >= part.size else None for part in _PARTS
        ]
    lost, rtt, again, acked, received, shortest, rate, busy, rwnd, sndbuf, marked = values
    return TcpInfo(
        lost,
        None if not rtt else rtt * _US,
        again,
        acked,
        received,
        None if shortest is None or shortest == _NO_RTT else shortest * _US,
        rate,
        None if busy is None else busy * _US,
        None if rwnd is None else rwnd * _US,
        None if sndbuf is None else sndbuf * _US,
        marked,
    )


ESTABLISHED = 1
_AF_INET, _AF_INET6 = 2, 10
_TCP = 6
_TCPDIAG_GETSOCK, _BY_FAMILY = 18, 20  # the first lists both families in one pass
_ESTABLISHED_ONLY = 1 << ESTABLISHED
_INFO = 2  # INET_DIAG_INFO; requests use the bit before its number
_LIST_REQUEST = struct.Struct("=BBBB48sII")  # struct inet_diag_req
_SINGLE_REQUEST = struct.Struct("=BBBBI48s")  # struct inet_diag_req_v2
_HEAD = struct.Struct("=IH")  # length and type
_ENTRY = struct.Struct("=16xB3x48s20x")  # family and identity, of header and inet_diag_msg
_INODE = struct.Struct("=84xI")
_MESSAGE = struct.Struct("=16xxB54xII")  # state and both queues, of header and inet_diag_msg
_MESSAGE_END = 88
_HEAD_OF_ATTRIBUTE = struct.Struct("=H2x")
_INFO_TYPE = struct.pack("=H", _INFO)
_BATCH_REQUESTS = 32  # requests per call: their answers fit the socket's buffer
_CLOSED = {errno.ENOENT, errno.ESTALE}
_BYTECODE = 1
_JUMP, _SOURCE_IS = 1, 7
_HOST = struct.Struct("=BBHi")


class ListedConnection:
    """One established connection of the list."""

    __slots__ = ("_question", "family", "id", "inode")

    def __init__(self, inode: int, family: int, identity: bytes) -> None:
        self.inode = inode
        self.family = family
        self.id = identity
        """struct inet_diag_sockid, cookie included: identifies this connection and no later one."""
        self._question = b""

    @property
    def request(self) -> bytes:
        """The constant message that queries the kernel for this connection."""
        if not self._question:
            body = _SINGLE_REQUEST.pack(
                self.family, _TCP, 1 << _INFO - 1, 0, _ESTABLISHED_ONLY, self.id
            )
            size = HEADER.size + len(body)
            self._question = HEADER.pack(size, _BY_FAMILY, REQUEST, 1, 0) + body
        return self._question

    @property
    def local(self) -> bytes:
        """Its local address, 4 or 16 bytes."""
        return self.id[4:8] if self.family == _AF_INET else self.id[4:20]

    @property
    def remote(self) -> bytes:
        """Address of the peer, 4 or 16 bytes."""
        return self.id[20:24] if self.family == _AF_INET else self.id[20:36]


class ConnectionState(NamedTuple):
    """Current state of one connection."""

    state: int
    unread_bytes: int
    unsent_bytes: int
    """Written and not yet acknowledged, whether sent or not."""
    info: TcpInfo


class Connections:
    """The kernel's list of connections, and queries for single connections."""

    def __init__(self) -> None:
        """Open two sockets: one for lists, which may be half read, and one for single queries.

        Raises: Unavailable when the kernel does not allow it.
        """
        self._list = Netlink(SOCK_DIAG, "list of TCP connections (tcp_diag)")
        try:
            self._single = Netlink(SOCK_DIAG, "list of TCP connections (tcp_diag)")
        except Unavailable:
            self._list.close()
            raise
        self._info_at = self._info_size = 0

    def start(self) -> None:
        """Request the list of established connections without loopback."""
        body = _LIST_REQUEST.pack(_AF_INET, 0, 0, 0, bytes(48), _ESTABLISHED_ONLY, 0)
        self._list.send_request(
            _TCPDIAG_GETSOCK, DUMP, body + pack_attribute(_BYTECODE, _NOT_LOOPBACK)
        )

    def receive_listed(
        self, excluded: Set[int], skipped_inodes: set[int]
    ) -> tuple[list[ListedConnection], bool]:
        """Return the next part of the list, some 260 connections, and whether it was the last.

        Connections whose inode is in `excluded` are skipped and added to `skipped_inodes`. Raises:
        Unavailable when the kernel refuses.
        """
        data = self._list.receive()
        connections: list[ListedConnection] = []
        start, end, size = 0, len(data), _ENTRY.size
        head, number, entry = _HEAD.unpack_from, _INODE.unpack_from, _ENTRY.unpack_from
        while start + HEADER.size <= end:
            length, kind = head(data, start)
            if kind == DONE:
                return connections, True
            if kind == ERROR:
                raise self._list.explain_refusal(data, start)
            if length < size or start + size > end:
                break
            (inode,) = number(data, start)
            if inode in excluded:
                skipped_inodes.add(inode)
            else:
                connections.append(ListedConnection(inode, *entry(data, start)))
            start += (length + 3) & ~3
        return connections, False

    def query(self, connections: Sequence[ListedConnection]) -> Iterator[ConnectionState | None]:
        """Yield the current state of each connection; None = it is closed."""
        for first in range(0, len(connections), _BATCH_REQUESTS):
            batch = connections[first : first + _BATCH_REQUESTS]
            self._single.send(b"".join([listed.request for listed in batch]))
            for _ in batch:
                yield self._receive_answer()

    def close(self) -> None:
        """Close both sockets."""
        self._list.close()
        self._single.close()

    def _receive_answer(self) -> ConnectionState | None:
        data = self._single.receive()
        if len(data) < HEADER.size:
            raise Unavailable(
                "failed", "list of TCP connections (tcp_diag): the answer is too short", ""
            )
        if HEADER.unpack_from(data)[1] == ERROR:
            if read_error_number(data, 0) in _CLOSED:
                return None
            raise self._single.explain_refusal(data, 0)
        # The kernel uses one layout for all answers, so the details are located once.
        offset, size = self._info_at, len(data)
        if size != self._info_size or not offset or data[offset - 2 : offset] != _INFO_TYPE:
            self._info_at = offset = find_info(data)
            self._info_size = size
        return parse_connection(data, offset)


def parse_connection(data: bytes, offset: int = 0) -> ConnectionState:
    """Parse one answer, header included.

    offset: of its struct tcp_info as `find_info` returns it; 0 = search for it.
    """
    state, unread, unsent = _MESSAGE.unpack_from(data)
    start = offset or find_info(data)
    if start:
        end = start + _HEAD_OF_ATTRIBUTE.unpack_from(data, start - 4)[0] - 4
        return ConnectionState(state, unread, unsent, parse_tcp_info(data, start, end))
    return ConnectionState(state, unread, unsent, UNKNOWN)


def find_info(data: bytes) -> int:
    """Return the offset of the struct tcp_info in an answer, 0 = it has none."""
    for kind, start, _ in iterate_attributes(data, _MESSAGE_END, len(data)):
        if kind == _INFO:
            return start
    return 0


def _build_exclusion(family: int, prefix_bits: int, address: bytes, following_bytes: int) -> bytes:
    """Build a kernel filter that excludes connections with this local address.

    Each step is u8 code, u8 bytes to skip when it matches, u16 bytes to skip when it does not; a
    jump beyond the end excludes the connection. `following_bytes`: size of the conditions that
    follow.
    """
    host = _HOST.pack(family, prefix_bits, 0, -1) + address
    size = 4 + len(host)
    holds = struct.pack("=BBH", _SOURCE_IS, size, size + 4)
    return holds + host + struct.pack("=BBH", _JUMP, 4, 4 + following_bytes + 4)


_NOT_IPV6_LOOPBACK = _build_exclusion(_AF_INET6, 128, bytes(15) + b"\x01", 0)
# 127/8 is also looked for within ::ffff:0:0/96.
_NOT_LOOPBACK = (
    _build_exclusion(_AF_INET, 8, b"\x7f\0\0\0", len(_NOT_IPV6_LOOPBACK)) + _NOT_IPV6_LOOPBACK
)
