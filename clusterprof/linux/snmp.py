"""/proc/net/snmp and /proc/net/netstat: what TCP did since boot.

https://docs.kernel.org/networking/snmp_counter.html

    Tcp: RtoAlgorithm … InSegs OutSegs RetransSegs InErrs OutRsts InCsumErrors
    Tcp: 1 … 57252008 54915039 227 5 1003 0

Linux counts in OutSegs what is sent for the first time (net/ipv4/tcp_output.c), as RFC 1213 says,
and in RetransSegs what is sent again: all segments are the sum.
"""

from __future__ import annotations

from typing import NamedTuple

from clusterprof.linux.fields import Columns


class TcpSegments(NamedTuple):
    """TCP segments of the network namespace; None where the kernel does not count them."""

    sent: int | None
    """Retransmissions included."""
    retransmitted: int | None


class SnmpParser:
    """Finds TCP's segments in successive readings of /proc/net/snmp."""

    def __init__(self) -> None:
        self._find = Columns(b"Tcp: ", b"OutSegs", b"RetransSegs")

    def __call__(self, data: bytes) -> TcpSegments:
        """Return the segments since boot."""
        first, again = self._find(data)
        return TcpSegments(None if first is None or again is None else first + again, again)


class NetstatParser:
    """Finds TCP's timeouts in successive readings of /proc/net/netstat."""

    def __init__(self) -> None:
        self._find = Columns(b"TcpExt: ", b"TCPTimeouts")

    def __call__(self, data: bytes) -> int | None:
        """Return how often a retransmission timer expired since boot."""
        return self._find(data)[0]
