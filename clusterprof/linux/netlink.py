"""Netlink: questions to the kernel as messages on a socket, answered by messages.

https://docs.kernel.org/userspace-api/netlink/intro.html, netlink(7)

    u32 length, u16 type, u16 flags, u32 sequence, u32 port · body · attributes
    attribute: u16 length, u16 type · content

The kernel answers within the call that asks, so nothing here ever waits.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

from clusterprof.errors import Unavailable

ROUTE, SOCK_DIAG = 0, 4
ERROR, DONE = 2, 3
REQUEST, DUMP = 0x001, 0x300
HEADER = struct.Struct("=IHHII")
HEAD = struct.Struct("=IHHI")  # of it what an answer is read by: length, type, flags, sequence
_ATTRIBUTE = struct.Struct("=HH")
_ERRNO = struct.Struct("=i")
_RECEIVE_BYTES = 1 << 16  # more than the kernel puts into one answer of a dump
_TYPE_BITS = 0x3FFF
_NO_SUCH = {errno.EPROTONOSUPPORT, errno.EAFNOSUPPORT, errno.ENOENT, errno.EOPNOTSUPP}


class Netlink:
    """One netlink socket; raises `Unavailable` where there is no such thing or it is forbidden."""

    def __init__(self, protocol: int, what: str) -> None:
        """`what`: what it is asked for, in words for the reason when it cannot be had."""
        self._what = what
        try:
            kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            self._socket = socket.socket(socket.AF_NETLINK, kind, protocol)
            self._socket.bind((0, 0))  # from here on /proc/net/netlink tells whose it is
        except OSError as error:
            raise self.reason(error) from None

    def ask(self, kind: int, flags: int, body: bytes, sequence: int = 1) -> None:
        """Send one question."""
        self.send(HEADER.pack(HEADER.size + len(body), kind, REQUEST | flags, sequence, 0) + body)

    def send(self, messages: bytes) -> None:
        """Send questions that are laid out already."""
        try:
            self._socket.send(messages)
        except OSError as error:
            raise self.reason(error) from None

    def receive(self) -> bytes:
        """Return what the kernel has to say next: one message, or several of a dump."""
        try:
            return self._socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            raise self.reason(error) from None

    def dump(self, kind: int, body: bytes) -> Iterator[bytes]:
        """Ask for all there is and yield message after message, header included."""
        self.ask(kind, DUMP, body)
        while True:
            data = self.receive()
            for start, length, answer in messages_in(data):
                if answer == DONE:
                    return
                if answer == ERROR:
                    raise self.refused(data, start)
                yield data[start : start + length]

    def refused(self, data: bytes, start: int) -> Unavailable:
        """Return the reason that the error message at `start` gives."""
        return self.reason(OSError(error_number(data, start), ""))

    def reason(self, error: OSError) -> Unavailable:
        """Say in our words why the kernel did not answer."""
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


def messages_in(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (start, length, type) of every whole message."""
    start, end = 0, len(data)
    while start + HEADER.size <= end:
        length, kind, _, _ = HEAD.unpack_from(data, start)
        if length < HEADER.size or start + length > end:
            return
        yield start, length, kind
        start += (length + 3) & ~3


def error_number(data: bytes, start: int) -> int:
    """Return the errno of the error message at `start`."""
    return -int(_ERRNO.unpack_from(data, start + HEADER.size)[0])


def attributes(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (type, start, end) of the content of every attribute between `start` and `end`."""
    while start + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, start)
        if length < _ATTRIBUTE.size or start + length > end:
            return
        yield kind & _TYPE_BITS, start + _ATTRIBUTE.size, start + length
        start += (length + 3) & ~3


def attribute(kind: int, content: bytes) -> bytes:
    """Return one attribute, its length a multiple of 4 as the next one needs it."""
    length = _ATTRIBUTE.size + len(content)
    return _ATTRIBUTE.pack(length, kind) + content + bytes(-length % 4)
