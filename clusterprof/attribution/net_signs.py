"""What counters of a node in the time of its operations say against its network.

A sign is a number above its limit. A number that was not read is no sign, and no proof of health.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clusterprof.attribution.net_links import (
    HCA,
    HCA_BYTES,
    LEAST_RTT,
    NIC,
    NIC_BYTES,
    RTT,
    UNSENT,
    NodeLinks,
    is_down,
)
from clusterprof.detectors.network import CONGESTION, LINK, PATH
from clusterprof.findings import Evidence

FAULT, QUEUE, LOSS, WRONG = range(4)
"""What a sign speaks of, in the order in which they are believed."""
CAUSE_OF = {FAULT: LINK.id, QUEUE: CONGESTION.id, LOSS: LINK.id, WRONG: PATH.id}
_MINUTE = 60.0
_FEWEST_RETRANSMITS = 20
_MS = 1e6
_BYTES_PER_WORD = 4  # of InfiniBand's data counters
_RECEIVER_RATIO = 0.5
_LEAST_RATIO = 0.001
_DOUBLE = 2.0
_MSS, _MATHIS, _WITHIN = 1448, 1.22, 3.0
_DOWN = {
    NIC: (("network.carrier_changes_total", "times the link went down or came back"),),
    HCA: (("rdma.link_downed_total", "times the link went down"),),
}
_ERRORS = {
    NIC: (("network.errors_total", "packets with errors"),),
    HCA: (
        ("rdma.symbol_errors_total", "symbol errors"),
        ("rdma.receive_errors_total", "packets that came with errors"),
        ("rdma.link_recoveries_total", "times the link failed and recovered"),
        ("rdma.retransmits_total", "packets sent again"),
        ("rdma.out_of_sequence_total", "packets out of sequence"),
    ),
}
_MARKS = {
    NIC: (
        ("network.ecn_marked_total", "packets that a switch had marked"),
        ("network.cnp_total", "notifications of congestion"),
        ("network.pause_frames_total", "pause frames"),
    ),
    HCA: (
        ("rdma.ecn_marked_total", "packets that a switch had marked"),
        ("rdma.cnp_total", "notifications of congestion"),
    ),
}
_DROPS = {
    NIC: (
        ("network.discards_phy_total", "packets dropped by the port for want of room"),
        ("network.transmit_drops_total", "packets dropped before sending"),
    ),
    HCA: (("rdma.discards_total", "packets the port could not send"),),
}
ASKED = {
    LINK.id: ("tcp.retransmits_total", "rdma.symbol_errors_total"),
    CONGESTION.id: (RTT, "network.pause_frames_total", "rdma.transmit_wait_total"),
    PATH.id: ("network.link_bytes_per_second", "rdma.link_bytes_per_second"),
}
"""By cause: signals of which one at least must have been recorded to look for it."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One number against one device of one node."""

    kind: int
    node: int
    device: str
    """"" when it is the whole node's."""
    strength: float
    """To compare nodes by: how often, or which part."""
    evidence: Evidence


def signs_of(links: NodeLinks, limits: Mapping[str, Any]) -> tuple[Sign, ...]:
    """Return what speaks against the links in use of one node."""
    found: list[Sign] = []
    for device in links.used:
        found += _of_device(links, device, limits)
    if links.kind == NIC and not receiver_limited(links):
        found += _of_tcp(links, limits)
    found += _of_paths(links, limits[PATH.id])
    return tuple(found)


def receiver_limited(links: NodeLinks) -> float | None:
    """Return the part of sending time in which the receiver took no more; None when it is small.

    Then the process at the other end was slow, or its window small for the round trip: neither
    loss nor queues held the data up.
    """
    busy = sum(links.network.total("tcp.job_busy_ns_total", d) or 0.0 for d in links.used)
    full = sum(links.network.total("tcp.job_rwnd_limited_ns_total", d) or 0.0 for d in links.used)
    return full / busy if busy > 0 and full >= _RECEIVER_RATIO * busy else None


def _of_device(links: NodeLinks, device: str, limits: Mapping[str, Any]) -> Iterator[Sign]:
    link, congestion = limits[LINK.id], limits[CONGESTION.id]
    for name, what in _DOWN[links.kind]:
        yield from _counted(links, FAULT, name, device, what, 0.0)
    for name, what in _ERRORS[links.kind]:
        often = link.errors_per_minute_at_least_count / _MINUTE
        yield from _counted(links, FAULT, name, device, what, often)
    for name, what in _MARKS[links.kind]:
        often = congestion.marks_per_second_at_least_count
        for way in ("", " rx", " tx"):
            yield from _counted(links, QUEUE, name, device, what + way, often, way)
    for name, what in _DROPS[links.kind]:
        often = congestion.drops_per_minute_at_least_count / _MINUTE
        yield from _counted(links, QUEUE, name, device, what, often)
    waits = links.network.total("rdma.transmit_wait_total", device)
    words = (links.network.total(HCA_BYTES[1], device) or 0.0) / _BYTES_PER_WORD
    if links.kind == HCA and waits and waits >= congestion.wait_at_least_ratio * (waits + words):
        note = "of its ticks with data to send the port could not send"
        ratio = waits / (waits + words)
        yield _sign(links, QUEUE, device, ratio, "rdma.transmit_wait_ratio", ratio, "ratio", note)
    yield from _others(links, device, congestion)


def _counted(
    links: NodeLinks,
    kind: int,
    name: str,
    device: str,
    what: str,
    at_least: float,
    way: str = "",
) -> Iterator[Sign]:
    """A counter that grew by `at_least` per second, and at all."""
    often = links.network.per_second(name, device + way)
    total = links.network.total(name, device + way)
    if often and total and often >= at_least:
        yield _sign(links, kind, device, often, name, total, "count", what)


def _others(links: NodeLinks, device: str, limits: Any) -> Iterator[Sign]:
    """A busy link of which half is not the job's."""
    most, rate = links.job_most_bytes, links.bytes_per_second
    if most is None or rate is None or len(links.used) > 1:
        return
    seen = links.bytes_of(device)
    names = HCA_BYTES if links.kind == HCA else NIC_BYTES
    counts = [links.network.counts.get((name, device)) for name in names]
    busy = max((c.per_second.quantile(0.95) for c in counts if c and c.per_second.count), default=0)
    if busy >= limits.busy_at_least_ratio * rate and seen >= _DOUBLE * most:
        note = "of the traffic is not the job's, and the link was busy"
        ratio = 1 - most / seen
        name = "rdma.others_ratio" if links.kind == HCA else "network.others_ratio"
        yield _sign(links, QUEUE, device, ratio, name, ratio, "ratio", note)


def _of_tcp(links: NodeLinks, limits: Mapping[str, Any]) -> Iterator[Sign]:
    rtt, least, unsent = round_trip(links)
    congestion = limits[CONGESTION.id]
    if rtt is not None and least and unsent is not None and not _fills_its_link(links, congestion):
        far = queued(rtt, least, congestion.round_trip_at_least_ratio)
        if far and unsent >= congestion.queue_at_least_bytes:
            note = f"a round trip took, and {least / _MS:.1f} ms at the least"
            yield _sign(links, QUEUE, links.used[0], rtt, RTT, rtt, "ns", note)
    ratio = retransmit_ratio(links)
    if ratio is not None and ratio >= limits[LINK.id].retransmits_at_least_ratio:
        note = "of the segments were sent again"
        yield _sign(links, LOSS, links.used[0], ratio, "tcp.retransmit_ratio", ratio, "ratio", note)


def queued(rtt: float, least: float, at_least_ratio: float) -> bool:
    """True when round trips take so much longer than the shortest that packets stand in a queue.

    A busy host answers some 0.1 ms later; that is no queue.
    """
    return rtt >= at_least_ratio * least and rtt - least >= _MS


def round_trip(links: NodeLinks) -> tuple[float | None, float | None, float | None]:
    """Return round trip, shortest round trip and unsent bytes of the job's connections."""
    found = [links.network.levels.get((LEAST_RTT, device)) for device in links.used]
    least = [one.least for one in found if one is not None and one.count]
    return links.level(RTT), max(least, default=None), links.level(UNSENT)


def _fills_its_link(links: NodeLinks, limits: Any) -> bool:
    """True when the job's own traffic fills the link: then the queue is its own."""
    rate = links.bytes_per_second
    if rate is None:
        return False
    counts = [links.network.counts.get((name, d)) for d in links.used for name in NIC_BYTES]
    busy = [c.per_second.quantile(0.5) for c in counts if c is not None and c.per_second.count]
    return max(busy, default=0.0) >= limits.busy_at_least_ratio * rate


def retransmit_ratio(links: NodeLinks) -> float | None:
    """Return segments sent again over segments sent: the job's own where they are known."""
    own = [links.network.total("tcp.job_retransmits_total", d) for d in links.used]
    known = [one for one in own if one is not None]
    again = sum(known) if known else links.network.total("tcp.retransmits_total", "")
    sent = links.network.total("tcp.segments_sent_total", "")
    if again is None or not sent or again < _FEWEST_RETRANSMITS:
        return None
    return again / sent


def limited_by_loss(links: NodeLinks, bytes_per_second: float) -> Sign | None:
    """Return a sign when transfers went as fast as the loss permits, and no queue stood on the way.

    A connection with a loss of p and a round trip of T carries about 1.22 segments / (T * sqrt(p)),
    whatever the links could carry (Mathis et al., 1997).
    """
    ratio = retransmit_ratio(links)
    rtt, least, _ = round_trip(links)
    if not ratio or not rtt or not least or queued(rtt, least, _WITHIN):
        return None
    permitted = _MATHIS * _MSS / (rtt / 1e9 * ratio**0.5)
    connections = links.level("tcp.job_connections_count") or 1.0
    if not permitted / _WITHIN <= bytes_per_second <= _WITHIN * connections * permitted:
        return None
    name, note = "tcp.loss_limit_bytes_per_second", "is what a connection carries at such a loss"
    # Of no strength: it says how fast, not which node is worse.
    return _sign(links, LOSS, links.used[0], 0.0, name, permitted, "bytes/s", note)


def _of_paths(links: NodeLinks, limits: Any) -> Iterator[Sign]:
    """What NCCL's log says, RDMA that is there and unused, and rails with unequal traffic."""
    for name, count, said in links.slow_paths:
        yield _sign(links, WRONG, "", float(count), name, count, "count", f"channels {said}")
    if links.unused:
        rate = links.network.levels["rdma.link_bytes_per_second", links.unused[0]].quantile(0.5)
        name = "rdma.link_bytes_per_second"
        note = "RDMA port without traffic, while TCP carried the job's"
        yield _sign(links, WRONG, links.unused[0], rate, name, rate, "bytes/s", note)
    if len(links.used) > 1 and (links.kind == HCA or links.by_sockets):
        least = links.quiet_rails[0] if links.quiet_rails else links.used[-1]
        ratio = links.bytes_of(least) / links.bytes_of(links.used[0])
        if limits.uneven_at_least_ratio * ratio <= 1:
            name = "rdma.rail_ratio" if links.kind == HCA else "network.rail_ratio"
            strength = 1 / max(ratio, _LEAST_RATIO)
            note = f"of the traffic of {links.used[0]} went over this rail"
            if is_down(links.network, least):
                note += ", whose link is down"
            yield _sign(links, WRONG, least, strength, name, ratio, "ratio", note)


def _sign(
    links: NodeLinks,
    kind: int,
    device: str,
    strength: float,
    name: str,
    value: float,
    unit: str,
    note: str,
) -> Sign:
    where = f"{note}: {device} of {links.name}" if device else f"{note}: {links.name}"
    return Sign(kind, links.node, device, strength, Evidence(name, value, unit, where))
