"""Find from counters which links of a node transferred the traffic, and their rates.

    eth0   1.25 GB/s    40 GB     in use
    eth1  12.5  GB/s     0 GB     up, idle, ten times as fast

Rates are those of physical links only. The speed that a virtual device reports is
arbitrary, and a speed that was exceeded is wrong; both count as unknown.

It also finds symptoms of network problems in a node's counters during its operations.

A symptom is a number above its limit. A number that was not read is no symptom, and no
proof of health.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterprof.analysis.detectors.cross_rank import CONGESTION, LINK, PATH
from clusterprof.analysis.timeline.network_counters import NodeNetworkTotals
from clusterprof.report.model import Evidence

NIC, HCA = "nic", "hca"
SPEED, HCA_SPEED = "network.link_bytes_per_second", "rdma.link_bytes_per_second"
NIC_BYTES = ("network.receive_bytes_total", "network.transmit_bytes_total")
HCA_BYTES = ("rdma.receive_bytes_total", "rdma.transmit_bytes_total")
STATE, CONNECTIONS = "rdma.state_count", "tcp.job_connections_count"
RTT, MIN_RTT, UNSENT = "tcp.job_rtt_ns", "tcp.job_min_rtt_ns", "tcp.job_unsent_bytes"
_ACTIVE = 4  # of `rdma.state_count`, as sysfs numbers it
_IN_USE_RATIO = 0.1
_SPEED_TOLERANCE = 1.05
_MIN_CARRIED_RATIO = 0.5


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """The links of one node during its operations."""

    node: int
    name: str
    """Display name of the node."""
    network: NodeNetworkTotals
    kind: str
    """What transferred the traffic: NIC or HCA; "" if unknown."""
    used: tuple[str, ...]
    """The devices in use, busiest first."""
    bytes_per_second: float | None
    """Sum of their rates; None if unknown."""
    faster: tuple[str, float] | None
    """An idle device that is faster, and its rate."""
    unused: tuple[str, ...]
    """RDMA ports that are up and idle while a NIC was in use."""
    quiet_rails: tuple[str, ...]
    """RDMA ports with hardly any traffic while most of their rail were in use."""
    by_sockets: bool
    """True if the job's own connections determined the devices in use."""
    job_min_bytes: float
    """Lower bound of what the job sent from this node, as far as known."""
    job_max_bytes: float | None
    """Upper bound of what it sent; None if sizes are unknown."""
    slow_paths: tuple[tuple[str, int, str], ...] = ()
    """Reports of NCCL's own log on slow paths: name, channels, reason."""

    def level(self, name: str, quantile: float = 0.5) -> float | None:
        """Return a quantile of a gauge, of the device in use for which it is largest; None if
        unknown.
        """
        readings = [self.network.levels.get((name, device)) for device in self.used]
        levels = [
            reading.quantile(quantile)
            for reading in readings
            if reading is not None and reading.count
        ]
        return max(levels, default=None)

    def get_bytes(self, device: str) -> float:
        """Return the bytes a device transferred, in its busier direction."""
        return get_transferred_bytes(self.network, self.kind, device)


def get_transferred_bytes(network: NodeNetworkTotals, kind: str, device: str) -> float:
    """Return the bytes a device transferred, in its busier direction; 0 if unknown."""
    names = HCA_BYTES if kind == HCA else NIC_BYTES
    return max(network.total(name, device) or 0.0 for name in names)


def find_node_links(
    node: int,
    name: str,
    network: NodeNetworkTotals,
    host: Mapping[str, Any],
    job_bytes: tuple[float, float | None],
    limits: Mapping[str, Any],
) -> NodeLinks:
    """Find which links of a node transferred the traffic of its operations.

    host: the inventory. job_bytes: lower and upper bound of what the job sent from this
    node.
    """
    nics: Sequence[Mapping[str, Any]] = host.get("nics", ())
    physical = {str(nic.get("name")) for nic in nics if nic.get("physical")}
    hca = {d: get_transferred_bytes(network, HCA, d) for d in network.devices(*HCA_BYTES)}
    nic = {d: get_transferred_bytes(network, NIC, d) for d in network.devices(*NIC_BYTES)}
    sockets = [d for d in network.devices(CONNECTIONS) if _has_connections(network, d)]
    by_sockets = False
    if sum(hca.values()) > 0 and sum(hca.values()) >= max(nic.values(), default=0.0):
        kind, used = HCA, _select_busiest(hca)
    else:
        kind = NIC
        of_job = _select_busiest({d: nic[d] for d in sockets if nic.get(d)})
        by_sockets = bool(of_job)
        # Without its sockets the job's NIC is the busiest: layers (bond, VLAN) count bytes twice.
        used = of_job or _select_busiest(nic)[:1]
    speeds = [_estimate_speed(network, kind, device, physical) for device in used]
    total_rate = None if not speeds or None in speeds else sum(s for s in speeds if s is not None)
    below = _find_lower_devices(nic, nics)
    whole_bytes = sum(amount for device, amount in nic.items() if device not in below)
    reliable = by_sockets or whole_bytes >= _MIN_CARRIED_RATIO * job_bytes[0] > 0
    idle: tuple[tuple[str, float], ...] = ()
    if kind == NIC and used and reliable:
        separate = {
            d: amount for d, amount in nic.items() if d not in _find_lower_devices(used, nics)
        }
        idle = _find_idle_links(
            network, separate, hca, used, physical, limits[PATH.id].idle_at_most_ratio
        )
    faster = _select_faster(idle, total_rate, limits[PATH.id].faster_at_least_ratio)
    return NodeLinks(
        node,
        name,
        network,
        kind if used else "",
        used,
        total_rate,
        faster,
        tuple(device for device, _ in idle if device in hca),
        _find_quiet_rails(hca, used, host.get("rails", ())) if kind == HCA else (),
        by_sockets,
        *job_bytes,
        tuple(
            (str(path_name), int(channels), str(reason))
            for path_name, channels, reason in host.get("slow_paths", ())
        ),
    )


def _select_faster(
    idle: Sequence[tuple[str, float]], speed: float | None, min_ratio: float
) -> tuple[str, float] | None:
    """Select the fastest idle link; None unless its speed is this multiple of the speed in use."""
    fastest = max(idle, key=lambda link: link[1], default=None)
    if fastest is None or speed is None or fastest[1] < min_ratio * speed:
        return None
    return fastest


def _find_lower_devices(devices: Iterable[str], nics: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the devices below the given ones: members of a bond count what the bond counts."""
    lower = {str(nic.get("name")): nic.get("lower", ()) for nic in nics}
    lower_devices: set[str] = set()
    pending = [lower_device for device in devices for lower_device in lower.get(device, ())]
    while pending:
        device = pending.pop()
        if device not in lower_devices:
            lower_devices.add(device)
            pending += lower.get(device, ())
    return lower_devices


def _find_quiet_rails(
    amounts: Mapping[str, float], used: Sequence[str], rails: Iterable[Mapping[str, Any]]
) -> tuple[str, ...]:
    """Return quiet RDMA ports, least busy first.

    A job may use few rails; of a rail with most ports in use all ports should be in use.
    """
    quiet_ports: list[str] = []
    for rail in rails:
        ports = [port for port in rail.get("ports", ()) if port in amounts]
        quiet = [port for port in ports if port not in used]
        if 2 * len(quiet) < len(ports):
            quiet_ports += quiet
    return tuple(sorted(quiet_ports, key=lambda port: (amounts[port], port)))


def _select_busiest(amounts: Mapping[str, float]) -> tuple[str, ...]:
    """Return the devices with a good part of the busiest device's traffic."""
    largest = max(amounts.values(), default=0.0)
    busy = [d for d, amount in amounts.items() if amount > 0 and amount >= _IN_USE_RATIO * largest]
    return tuple(sorted(busy, key=lambda device: (-amounts[device], device)))


def _has_connections(network: NodeNetworkTotals, device: str) -> bool:
    reading = network.levels.get((CONNECTIONS, device))
    return reading is not None and reading.highest > 0


def _estimate_speed(
    network: NodeNetworkTotals, kind: str, device: str, physical: Iterable[str]
) -> float | None:
    reading = network.levels.get((HCA_SPEED if kind == HCA else SPEED, device))
    if reading is None or not reading.count or (kind == NIC and device not in physical):
        return None
    speed = reading.quantile(0.5)
    names = HCA_BYTES if kind == HCA else NIC_BYTES
    peaks = [
        network.counts[name, device].rate_histogram.highest
        for name in names
        if (name, device) in network.counts
    ]
    return None if speed <= 0 or max(peaks, default=0.0) > _SPEED_TOLERANCE * speed else speed


def _find_idle_links(
    network: NodeNetworkTotals,
    nic: Mapping[str, float],
    hca: Mapping[str, float],
    used: tuple[str, ...],
    physical: Iterable[str],
    at_most_ratio: float,
) -> tuple[tuple[str, float], ...]:
    """Return devices that are up and idle, with their rates."""
    quiet = at_most_ratio * nic[used[0]]
    idle_links = []
    for kind, amounts in ((NIC, nic), (HCA, hca)):
        for device in sorted(set(amounts) - (set(used) if kind == NIC else set())):
            speed = _estimate_speed(network, kind, device, physical)
            if amounts[device] <= quiet and speed is not None and _is_up(network, kind, device):
                idle_links.append((device, speed))
    return tuple(idle_links)


def _is_up(network: NodeNetworkTotals, kind: str, device: str) -> bool:
    """Return whether a link is up; a NIC that is down has no speed, a port reports its state."""
    if kind == NIC:
        return True
    state = network.levels.get((STATE, device))
    return state is not None and state.count > 0 and state.highest == state.lowest == _ACTIVE


def is_down(network: NodeNetworkTotals, port: str) -> bool:
    """Return whether an RDMA port reported that its link was not up, all the time."""
    state = network.levels.get((STATE, port))
    return state is not None and state.count > 0 and state.highest < _ACTIVE


FAULT, QUEUE, LOSS, WRONG_PATH = range(4)
"""Kinds of symptoms, in descending order of precedence."""
CAUSE_BY_KIND = {FAULT: LINK.id, QUEUE: CONGESTION.id, LOSS: LINK.id, WRONG_PATH: PATH.id}
_MINUTE = 60.0
_MIN_RETRANSMITS = 20
_MS = 1e6
_BYTES_PER_WORD = 4  # of InfiniBand's data counters
_RECEIVER_RATIO = 0.5
_MIN_RAIL_RATIO = 0.001
_OTHERS_FACTOR = 2.0
_MSS, _MATHIS, _MODEL_TOLERANCE = 1448, 1.22, 3.0
_DOWN = {
    NIC: (("network.carrier_changes_total", "times the link went down or came back"),),
    HCA: (("rdma.link_downed_total", "times the link went down"),),
}
_ERRORS = {
    NIC: (("network.errors_total", "packets with errors"),),
    HCA: (
        ("rdma.symbol_errors_total", "symbol errors"),
        ("rdma.receive_errors_total", "packets received with errors"),
        ("rdma.link_recoveries_total", "times the link failed and recovered"),
        ("rdma.retransmits_total", "packets retransmitted"),
        ("rdma.out_of_sequence_total", "packets out of sequence"),
    ),
}
_MARKS = {
    NIC: (
        ("network.ecn_marked_total", "packets marked by a switch"),
        ("network.cnp_total", "congestion notifications"),
        ("network.pause_frames_total", "pause frames"),
    ),
    HCA: (
        ("rdma.ecn_marked_total", "packets marked by a switch"),
        ("rdma.cnp_total", "congestion notifications"),
    ),
}
_DROPS = {
    NIC: (
        ("network.discards_phy_total", "packets dropped by the port for lack of buffer space"),
        ("network.transmit_drops_total", "packets dropped before sending"),
    ),
    HCA: (("rdma.discards_total", "packets the port could not send"),),
}
REQUIRED_SIGNALS = {
    LINK.id: ("tcp.retransmits_total", "rdma.symbol_errors_total"),
    CONGESTION.id: (RTT, "network.pause_frames_total", "rdma.transmit_wait_total"),
    PATH.id: ("network.link_bytes_per_second", "rdma.link_bytes_per_second"),
}
"""By cause: signals of which at least one must have been recorded to look for the cause."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One number above its limit, for one device of one node."""

    kind: int
    node: int
    device: str
    """"" for the whole node."""
    strength: float
    """To compare nodes by: a rate or a ratio."""
    evidence: Evidence
    note: str
    """The note of the evidence, without the device and the node."""


def find_symptoms(links: NodeLinks, limits: Mapping[str, Any]) -> tuple[Symptom, ...]:
    """Find all symptoms of the links in use of one node."""
    symptoms: list[Symptom] = []
    for device in links.used:
        symptoms += _find_device_symptoms(links, device, limits)
    if links.kind == NIC and not compute_receiver_limit_ratio(links):
        symptoms += _find_tcp_symptoms(links, limits)
    symptoms += _find_path_symptoms(links, limits[PATH.id])
    return tuple(symptoms)


def compute_receiver_limit_ratio(links: NodeLinks) -> float | None:
    """Compute the part of sending time with a full receiver window; None if small.

    Then the process at the other end was slow, or its window was small for the round-trip
    time: neither loss nor queues delayed the data.
    """
    busy = sum(links.network.total("tcp.job_busy_ns_total", d) or 0.0 for d in links.used)
    limited_ns = sum(
        links.network.total("tcp.job_rwnd_limited_ns_total", d) or 0.0 for d in links.used
    )
    return limited_ns / busy if busy > 0 and limited_ns >= _RECEIVER_RATIO * busy else None


def _find_device_symptoms(
    links: NodeLinks, device: str, limits: Mapping[str, Any]
) -> Iterator[Symptom]:
    link, congestion = limits[LINK.id], limits[CONGESTION.id]
    for name, description in _DOWN[links.kind]:
        yield from _check_counter(links, FAULT, name, device, description, 0.0)
    for name, description in _ERRORS[links.kind]:
        min_rate = link.errors_per_minute_at_least_count / _MINUTE
        yield from _check_counter(links, FAULT, name, device, description, min_rate)
    for name, description in _MARKS[links.kind]:
        min_rate = congestion.marks_per_second_at_least_count
        for direction in ("", " rx", " tx"):
            yield from _check_counter(
                links, QUEUE, name, device, description + direction, min_rate, direction
            )
    for name, description in _DROPS[links.kind]:
        min_rate = congestion.drops_per_minute_at_least_count / _MINUTE
        yield from _check_counter(links, QUEUE, name, device, description, min_rate)
    waits = links.network.total("rdma.transmit_wait_total", device)
    words = (links.network.total(HCA_BYTES[1], device) or 0.0) / _BYTES_PER_WORD
    if links.kind == HCA and waits and waits >= congestion.wait_at_least_ratio * (waits + words):
        note = "of its ticks with data to send, the port had to wait"
        ratio = waits / (waits + words)
        yield _make_symptom(
            links, QUEUE, device, ratio, "rdma.transmit_wait_ratio", ratio, "ratio", note
        )
    yield from _check_other_traffic(links, device, congestion)


def _check_counter(
    links: NodeLinks,
    kind: int,
    name: str,
    device: str,
    description: str,
    min_rate: float,
    direction: str = "",
) -> Iterator[Symptom]:
    """Yield a symptom if a counter grew by at least `min_rate` per second, and at all."""
    rate = links.network.per_second(name, device + direction)
    total = links.network.total(name, device + direction)
    if rate and total and rate >= min_rate:
        yield _make_symptom(links, kind, device, rate, name, total, "count", description)


def _check_other_traffic(links: NodeLinks, device: str, limits: Any) -> Iterator[Symptom]:
    """Yield a symptom for a busy link with at least half of its traffic from outside the job."""
    job_bytes, rate = links.job_max_bytes, links.bytes_per_second
    if job_bytes is None or rate is None or len(links.used) > 1:
        return
    counted_bytes = links.get_bytes(device)
    names = HCA_BYTES if links.kind == HCA else NIC_BYTES
    counts = [links.network.counts.get((name, device)) for name in names]
    busy = max(
        (c.rate_histogram.quantile(0.95) for c in counts if c and c.rate_histogram.count), default=0
    )
    if busy >= limits.busy_at_least_ratio * rate and counted_bytes >= _OTHERS_FACTOR * job_bytes:
        note = "of the traffic was not the job's, and the link was busy"
        ratio = 1 - job_bytes / counted_bytes
        name = "rdma.others_ratio" if links.kind == HCA else "network.others_ratio"
        yield _make_symptom(links, QUEUE, device, ratio, name, ratio, "ratio", note)


def _find_tcp_symptoms(links: NodeLinks, limits: Mapping[str, Any]) -> Iterator[Symptom]:
    rtt, least, unsent = get_round_trip(links)
    congestion = limits[CONGESTION.id]
    if rtt is not None and least and unsent is not None and not _is_link_full(links, congestion):
        is_queue = is_queued(rtt, least, congestion.round_trip_at_least_ratio)
        if is_queue and unsent >= congestion.queue_at_least_bytes:
            note = f"round-trip time (minimum {least / _MS:.1f} ms)"
            yield _make_symptom(links, QUEUE, links.used[0], rtt, RTT, rtt, "ns", note)
    ratio = compute_retransmit_ratio(links)
    if ratio is not None and ratio >= limits[LINK.id].retransmits_at_least_ratio:
        note = "of the segments were retransmitted"
        yield _make_symptom(
            links, LOSS, links.used[0], ratio, "tcp.retransmit_ratio", ratio, "ratio", note
        )


def is_queued(rtt: float, least: float, at_least_ratio: float) -> bool:
    """Return whether round trips are so much longer than the shortest that packets queue.

    A busy host answers some 0.1 ms later; that is no queue.
    """
    return rtt >= at_least_ratio * least and rtt - least >= _MS


def get_round_trip(links: NodeLinks) -> tuple[float | None, float | None, float | None]:
    """Return median and shortest round-trip time, ns, and unsent bytes of the job."""
    readings = [links.network.levels.get((MIN_RTT, device)) for device in links.used]
    least = [reading.lowest for reading in readings if reading is not None and reading.count]
    return links.level(RTT), max(least, default=None), links.level(UNSENT)


def _is_link_full(links: NodeLinks, limits: Any) -> bool:
    """Return whether the job's own traffic fills the link: then the queue is its own."""
    rate = links.bytes_per_second
    if rate is None:
        return False
    counts = [links.network.counts.get((name, d)) for d in links.used for name in NIC_BYTES]
    busy = [
        c.rate_histogram.quantile(0.5) for c in counts if c is not None and c.rate_histogram.count
    ]
    return max(busy, default=0.0) >= limits.busy_at_least_ratio * rate


def compute_retransmit_ratio(links: NodeLinks) -> float | None:
    """Compute retransmitted over sent segments, the job's own if known; None = unknown."""
    counts = [links.network.total("tcp.job_retransmits_total", d) for d in links.used]
    known_counts = [count for count in counts if count is not None]
    retransmitted = (
        sum(known_counts) if known_counts else links.network.total("tcp.retransmits_total", "")
    )
    sent = links.network.total("tcp.segments_sent_total", "")
    if retransmitted is None or not sent or retransmitted < _MIN_RETRANSMITS:
        return None
    return retransmitted / sent


def check_loss_limit(links: NodeLinks, bytes_per_second: float) -> Symptom | None:
    """Return a symptom if packet loss limited transfers and no queue was on the path.

    A connection with loss p and round-trip time T carries about 1.22 segments / (T *
    sqrt(p)), whatever the links could carry.
    Source: Mathis et al., 1997.
    """
    ratio = compute_retransmit_ratio(links)
    rtt, least, _ = get_round_trip(links)
    if not ratio or not rtt or not least or is_queued(rtt, least, _MODEL_TOLERANCE):
        return None
    permitted = _MATHIS * _MSS / (rtt / 1e9 * ratio**0.5)
    connections = links.level("tcp.job_connections_count") or 1.0
    if (
        not permitted / _MODEL_TOLERANCE
        <= bytes_per_second
        <= _MODEL_TOLERANCE * connections * permitted
    ):
        return None
    name, note = "tcp.loss_limit_bytes_per_second", "is the limit of one connection at this loss"
    # No strength: it measures how fast, not which node is worse.
    return _make_symptom(links, LOSS, links.used[0], 0.0, name, permitted, "bytes/s", note)


def _find_path_symptoms(links: NodeLinks, limits: Any) -> Iterator[Symptom]:
    """Yield symptoms from NCCL's log, of unused RDMA ports, and of rails with unequal traffic."""
    for name, count, reason in links.slow_paths:
        yield _make_symptom(
            links, WRONG_PATH, "", float(count), name, count, "count", f"channels {reason}"
        )
    if links.unused:
        rate = links.network.levels["rdma.link_bytes_per_second", links.unused[0]].quantile(0.5)
        name, port = "rdma.link_bytes_per_second", links.unused[0]
        note = "RDMA port without traffic while the job used TCP"
        symptom = _make_symptom(links, WRONG_PATH, port, rate, name, rate, "bytes/s", note)
        item = dataclasses.replace(symptom.evidence, sign="port-unused", device=port)
        yield dataclasses.replace(symptom, evidence=item)
    if len(links.used) > 1 and (links.kind == HCA or links.by_sockets):
        least = links.quiet_rails[0] if links.quiet_rails else links.used[-1]
        ratio = links.get_bytes(least) / links.get_bytes(links.used[0])
        if limits.uneven_at_least_ratio * ratio <= 1:
            name = "rdma.rail_ratio" if links.kind == HCA else "network.rail_ratio"
            strength = 1 / max(ratio, _MIN_RAIL_RATIO)
            note = f"of the traffic of {links.used[0]} went over this rail"
            if is_down(links.network, least):
                note += ", whose link is down"
            yield _make_symptom(links, WRONG_PATH, least, strength, name, ratio, "ratio", note)


def _make_symptom(
    links: NodeLinks,
    kind: int,
    device: str,
    strength: float,
    name: str,
    value: float,
    unit: str,
    note: str,
) -> Symptom:
    where = f"{note}: {device} of {links.name}" if device else f"{note}: {links.name}"
    return Symptom(kind, links.node, device, strength, Evidence(name, value, unit, where), note)
