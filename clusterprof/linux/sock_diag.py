"""NETLINK_SOCK_DIAG: the TCP connections of our network namespace, and one of them in full.

sock_diag(7), include/uapi/linux/inet_diag.h. What `ss -ti` prints.

    struct inet_diag_msg { u8 family, state, timer, retrans; struct inet_diag_sockid id (48 bytes:
        u16 sport, dport; u32 src[4], dst[4], if, cookie[2]); u32 expires, rqueue, wqueue, uid,
        inode; }, then attributes: INET_DIAG_INFO is a struct tcp_info

Listing walks the kernel's whole table, 0.2 ms for a table of 262,144 slots and 0.7 µs for each
connection, so it is done rarely and piece by piece; one connection that is known costs 3 µs and
locks no other. The kernel leaves loopback out before it answers.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

from clusterprof.errors import Unavailable
from clusterprof.linux.netlink import (
    DONE,
    DUMP,
    ERROR,
    HEADER,
    REQUEST,
    SOCK_DIAG,
    Netlink,
    attribute,
    attributes,
    error_number,
)
from clusterprof.linux.tcp_info import UNKNOWN, TcpInfo, parse_tcp_info

ESTABLISHED = 1
_AF_INET, _AF_INET6 = 2, 10
_TCP = 6
_TCPDIAG_GETSOCK, _BY_FAMILY = 18, 20  # the first one lists both families in one walk
_ESTABLISHED_ONLY = 1 << ESTABLISHED
_INFO = 2  # INET_DIAG_INFO; in a request the bit before its number
_LIST = struct.Struct("=BBBB48sII")  # struct inet_diag_req
_ONE = struct.Struct("=BBBBI48s")  # struct inet_diag_req_v2
_HEAD = struct.Struct("=IH")  # length and type
_ENTRY = struct.Struct("=16xB3x48s20x")  # family and identity, of header and inet_diag_msg
_INODE = struct.Struct("=84xI")
_MESSAGE = struct.Struct("=16xxB54xII")  # state and both queues, of header and inet_diag_msg
_MESSAGE_END = 88
_HEAD_OF_ATTRIBUTE = struct.Struct("=H2x")
_INFO_TYPE = struct.pack("=H", _INFO)
_AT_A_TIME = 32  # questions in one call: their answers fit the socket's buffer
_CLOSED = {errno.ENOENT, errno.ESTALE}
_BYTECODE = 1
_JUMP, _SOURCE_IS = 1, 7
_HOST = struct.Struct("=BBHi")


class Listed:
    """One established connection of the list."""

    __slots__ = ("_question", "family", "id", "inode")

    def __init__(self, inode: int, family: int, identity: bytes) -> None:
        self.inode = inode
        self.family = family
        self.id = identity
        """struct inet_diag_sockid, cookie included: names this connection and no later one."""
        self._question = b""

    @property
    def question(self) -> bytes:
        """The message that asks the kernel for it, the same each time."""
        if not self._question:
            body = _ONE.pack(self.family, _TCP, 1 << _INFO - 1, 0, _ESTABLISHED_ONLY, self.id)
            size = HEADER.size + len(body)
            self._question = HEADER.pack(size, _BY_FAMILY, REQUEST, 1, 0) + body
        return self._question

    @property
    def local(self) -> bytes:
        """Its local address, 4 or 16 bytes."""
        return self.id[4:8] if self.family == _AF_INET else self.id[4:20]

    @property
    def remote(self) -> bytes:
        """The address of its peer."""
        return self.id[20:24] if self.family == _AF_INET else self.id[20:36]


class Told(NamedTuple):
    """One connection now."""

    state: int
    unread_bytes: int
    unsent_bytes: int
    """Written and not yet acknowledged, sent or not."""
    info: TcpInfo


class Connections:
    """The kernel's list of connections, and each of them for the asking."""

    def __init__(self) -> None:
        """Open two sockets: one for lists, which may be half read, and one for single questions."""
        self._list = Netlink(SOCK_DIAG, "list of TCP connections (tcp_diag)")
        try:
            self._one = Netlink(SOCK_DIAG, "list of TCP connections (tcp_diag)")
        except Unavailable:
            self._list.close()
            raise
        self._info_at = self._info_size = 0

    def start(self) -> None:
        """Ask for the list of established connections, loopback left out."""
        body = _LIST.pack(_AF_INET, 0, 0, 0, bytes(48), _ESTABLISHED_ONLY, 0)
        self._list.ask(_TCPDIAG_GETSOCK, DUMP, body + attribute(_BYTECODE, _NOT_LOOPBACK))

    def more(self, strangers: Set[int], seen: set[int]) -> tuple[list[Listed], bool]:
        """Return the next piece of the list, some 260 connections, and whether it was the last.

        `strangers`, by inode, are left out and added to `seen`.
        """
        data = self._list.receive()
        found: list[Listed] = []
        start, end, size = 0, len(data), _ENTRY.size
        head, number, entry = _HEAD.unpack_from, _INODE.unpack_from, _ENTRY.unpack_from
        while start + HEADER.size <= end:
            length, kind = head(data, start)
            if kind == DONE:
                return found, True
            if kind == ERROR:
                raise self._list.refused(data, start)
            if length < size or start + size > end:
                break
            (inode,) = number(data, start)
            if inode in strangers:
                seen.add(inode)
            else:
                found.append(Listed(inode, *entry(data, start)))
            start += (length + 3) & ~3
        return found, False

    def ask(self, connections: Sequence[Listed]) -> Iterator[Told | None]:
        """Yield what there is to say of each connection now; None = it is closed."""
        for first in range(0, len(connections), _AT_A_TIME):
            batch = connections[first : first + _AT_A_TIME]
            self._one.send(b"".join([known.question for known in batch]))
            for _ in batch:
                yield self._answer()

    def close(self) -> None:
        """Close both sockets."""
        self._list.close()
        self._one.close()

    def _answer(self) -> Told | None:
        data = self._one.receive()
        if len(data) < HEADER.size:
            raise Unavailable("failed", "list of TCP connections (tcp_diag): a short answer", "")
        if HEADER.unpack_from(data)[1] == ERROR:
            if error_number(data, 0) in _CLOSED:
                return None
            raise self._one.refused(data, 0)
        # The kernel lays all answers out alike, so it is looked for once.
        at, size = self._info_at, len(data)
        if size != self._info_size or not at or data[at - 2 : at] != _INFO_TYPE:
            self._info_at = at = find_info(data)
            self._info_size = size
        return parse_told(data, at)


def parse_told(data: bytes, at: int = 0) -> Told:
    """Return what one answer says, header included; `at`: where `find_info` finds its details."""
    state, unread, unsent = _MESSAGE.unpack_from(data)
    start = at or find_info(data)
    if start:
        end = start + _HEAD_OF_ATTRIBUTE.unpack_from(data, start - 4)[0] - 4
        return Told(state, unread, unsent, parse_tcp_info(data, start, end))
    return Told(state, unread, unsent, UNKNOWN)


def find_info(data: bytes) -> int:
    """Return where the struct tcp_info of an answer begins, 0 = it has none."""
    for kind, start, _ in attributes(data, _MESSAGE_END, len(data)):
        if kind == _INFO:
            return start
    return 0


def _none_from(family: int, prefix_bits: int, address: bytes, behind: int) -> bytes:
    """Return a condition for the kernel: refuse what has this local address.

    Each step is u8 code, u8 bytes to go on when it holds, u16 when it does not; whoever steps
    over the end is refused. `behind`: bytes of the conditions that follow.
    """
    host = _HOST.pack(family, prefix_bits, 0, -1) + address
    size = 4 + len(host)
    holds = struct.pack("=BBH", _SOURCE_IS, size, size + 4)
    return holds + host + struct.pack("=BBH", _JUMP, 4, 4 + behind + 4)


_NOT_V6 = _none_from(_AF_INET6, 128, bytes(15) + b"\x01", 0)
# 127/8 is also looked for within ::ffff:0:0/96.
_NOT_LOOPBACK = _none_from(_AF_INET, 8, b"\x7f\0\0\0", len(_NOT_V6)) + _NOT_V6
