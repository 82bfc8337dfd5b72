"""/proc/net/snmp and /proc/net/netstat: what TCP did since boot.

https://docs.kernel.org/networking/snmp_counter.html

    Tcp: RtoAlgorithm … InSegs OutSegs RetransSegs InErrs OutRsts InCsumErrors
    Tcp: 1 … 57252008 54915039 227 5 1003 0

Linux counts in OutSegs what is sent for the first time (net/ipv4/tcp_output.c), as RFC 1213 says,
and in RetransSegs what is sent again: all segments are the sum.
"""

from __future__ import annotations

from typing import NamedTuple

from clusterprof.linux.fields import column


class TcpSegments(NamedTuple):
    """TCP segments of the network namespace; None where the kernel does not count them."""

    sent: int | None
    """Retransmissions included."""
    retransmitted: int | None


def parse_snmp(data: bytes) -> TcpSegments:
    """Return the segments sent and sent again from /proc/net/snmp."""
    first = column(data, b"Tcp: ", b"OutSegs")
    again = column(data, b"Tcp: ", b"RetransSegs")
    return TcpSegments(None if first is None or again is None else first + again, again)


def parse_tcp_timeouts(data: bytes) -> int | None:
    """Return from /proc/net/netstat how often a retransmission timer expired."""
    return column(data, b"TcpExt: ", b"TCPTimeouts")
