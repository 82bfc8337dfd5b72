"""struct tcp_info: what the kernel tells of one TCP connection.

include/uapi/linux/tcp.h; the times are RFC 4898's in spirit, the rate is that of
https://datatracker.ietf.org/doc/draft-cheng-iccrg-delivery-rate-estimation/

The structure only ever grew at its end, so its length says what this kernel knows: bytes
acknowledged since 4.1, bytes not sent since 4.6, the rate since 4.9, times since 4.10, ECN marks
since 4.18. What lies behind the end is unknown, not zero.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_US = 1000
_NO_RTT = 0xFFFFFFFF  # of min_rtt, before the first measurement
# Offsets: lost 32, rtt 68, total_retrans 100, bytes_acked 120, bytes_received 128, min_rtt 148,
# delivery_rate 160, busy_time 168, rwnd_limited 176, sndbuf_limited 184, delivered_ce 196.
_WHOLE = struct.Struct("=32xI32xI28xI16xQQ12xI8xQQQQ4xI")
_PARTS = (
    ("=32xI", 36),
    ("=68xI", 72),
    ("=100xI", 104),
    ("=120xQ", 128),
    ("=128xQ", 136),
    ("=148xI", 152),
    ("=160xQ", 168),
    ("=168xQ", 176),
    ("=176xQ", 184),
    ("=184xQ", 192),
    ("=196xI", 200),
)


class TcpInfo(NamedTuple):
    """One connection; None = this kernel does not tell, or has not measured it yet."""

    lost_segments: int | None
    """Segments taken to be lost now."""
    rtt_ns: int | None
    """Smoothed round-trip time."""
    retransmits: int | None
    """Segments sent again so far; 32 bits, so it may wrap."""
    acked_bytes: int | None
    received_bytes: int | None
    min_rtt_ns: int | None
    """Shortest round-trip time of the last minutes."""
    delivery_bytes_per_second: int | None
    """Rate at which the peer got data when it last acknowledged some."""
    busy_ns: int | None
    """Time with data to send or to be acknowledged; the next two are part of it."""
    rwnd_limited_ns: int | None
    """Time the peer's receive window was full."""
    sndbuf_limited_ns: int | None
    """Time the send buffer was too small."""
    ecn_marked: int | None
    """Segments that reached the peer with a mark of congestion; 32 bits."""


UNKNOWN = TcpInfo(*[None] * 11)


def parse_tcp_info(data: bytes, start: int = 0, end: int | None = None) -> TcpInfo:
    """Return what the structure between `start` and `end` is long enough to say."""
    length = (len(data) if end is None else end) - start
    values: list[int | None]
    if length >= _WHOLE.size:
        values = list(_WHOLE.unpack_from(data, start))
    else:
        values = [
            struct.unpack_from(form, data, start)[0] if length >= needed else None
            for form, needed in _PARTS
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
