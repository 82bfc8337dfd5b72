"""RTM_GETADDR: which interface an address of this machine belongs to, as rtnetlink(7) tells it.

    struct ifaddrmsg { u8 family, prefixlen, flags, scope; u32 index; }, then attributes

IFA_LOCAL is the address itself; where it is missing (IPv6), IFA_ADDRESS is.
"""

from __future__ import annotations

import errno
import socket
import struct

from clusterprof.linux.netlink import HEADER, ROUTE, Netlink, attributes

_GET_ADDRESS, _NEW_ADDRESS = 22, 20
_IFADDRMSG = struct.Struct("=BBBBI")
_ADDRESS, _LOCAL = 1, 2
_MOST = 65536
_MAPPED = bytes(10) + b"\xff\xff"  # ::ffff:a.b.c.d, an IPv4 address on an IPv6 socket


def local_addresses() -> dict[bytes, str]:
    """Return the interface of every address of our network namespace; raises Unavailable."""
    netlink = Netlink(ROUTE, "list of addresses (rtnetlink)")
    try:
        found: dict[bytes, str] = {}
        for message in netlink.dump(_GET_ADDRESS, _IFADDRMSG.pack(0, 0, 0, 0, 0)):
            address, index = parse_address(message)
            if address and len(found) < _MOST:
                try:
                    found[address] = socket.if_indextoname(index)
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):  # it opens a socket to ask
                        raise netlink.reason(error) from None
                    continue  # gone since the kernel wrote it
        return found
    finally:
        netlink.close()


def parse_address(message: bytes) -> tuple[bytes, int]:
    """Return the address of one answer, 4 or 16 bytes, and its interface's number; b"" = none."""
    start = HEADER.size + _IFADDRMSG.size
    if len(message) < start or HEADER.unpack_from(message)[1] != _NEW_ADDRESS:
        return b"", 0
    index = _IFADDRMSG.unpack_from(message, HEADER.size)[4]
    named = {kind: message[a:b] for kind, a, b in attributes(message, start, len(message))}
    return named.get(_LOCAL) or named.get(_ADDRESS) or b"", index


def plain(address: bytes) -> bytes:
    """Return an IPv4 address that an IPv6 socket wraps as the 4 bytes it is."""
    return address[12:] if address.startswith(_MAPPED) else address
