"""What the counters of one node say about its links: which carried the traffic, how fast they are.

    eth0   1.25 GB/s    40 GB     in use
    eth1  12.5  GB/s     0 GB     up, idle, ten times as fast

Rates are those of physical links only. What a virtual device says of its speed is made up, and so
is a speed that was exceeded; both are unknown here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterprof.detectors.network import PATH
from clusterprof.timeline.network import NodeNetwork

NIC, HCA = "nic", "hca"
SPEED, HCA_SPEED = "network.link_bytes_per_second", "rdma.link_bytes_per_second"
NIC_BYTES = ("network.receive_bytes_total", "network.transmit_bytes_total")
HCA_BYTES = ("rdma.receive_bytes_total", "rdma.transmit_bytes_total")
STATE, CONNECTIONS = "rdma.state_count", "tcp.job_connections_count"
RTT, LEAST_RTT, UNSENT = "tcp.job_rtt_ns", "tcp.job_min_rtt_ns", "tcp.job_unsent_bytes"
_ACTIVE = 4  # of `rdma.state_count`, as sysfs numbers it
_IN_USE_RATIO = 0.1
_EXCEEDED = 1.05
_CARRIED_RATIO = 0.5


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """The links of one node in the time of its operations."""

    node: int
    name: str
    """Display name of the node."""
    network: NodeNetwork
    kind: str
    """What carried the traffic: NIC or HCA; "" when that is not known."""
    used: tuple[str, ...]
    """The devices that did, busiest first."""
    bytes_per_second: float | None
    """Rate of all of them together; None when it is not known."""
    faster: tuple[str, float] | None
    """An idle device that is faster, and its rate."""
    unused: tuple[str, ...]
    """RDMA ports that are up and were not used while a NIC was."""
    quiet_rails: tuple[str, ...]
    """RDMA ports that carried next to nothing while most of those like them were in use."""
    by_sockets: bool
    """True when the job's own connections told which devices carried its traffic."""
    job_bytes: float
    """What the job sent from this node at least, as far as it is known."""
    job_most_bytes: float | None
    """What it sent at most; None when sizes are not known."""
    slow_paths: tuple[tuple[str, int, str], ...] = ()
    """What NCCL's own log says against the way the data take: name, channels, half a sentence."""

    def level(self, name: str, part: float = 0.5) -> float | None:
        """Return the middle reading of a gauge, of the device in use for which it is largest."""
        found = [self.network.levels.get((name, device)) for device in self.used]
        known = [one.quantile(part) for one in found if one is not None and one.count]
        return max(known, default=None)

    def bytes_of(self, device: str) -> float:
        """Return what a device carried, in the direction in which it was more."""
        return carried(self.network, self.kind, device)


def carried(network: NodeNetwork, kind: str, device: str) -> float:
    """Return the bytes a device carried, in the direction in which it was more; 0 unknown."""
    names = HCA_BYTES if kind == HCA else NIC_BYTES
    return max(network.total(name, device) or 0.0 for name in names)


def links_of(
    node: int,
    name: str,
    network: NodeNetwork,
    host: Mapping[str, Any],
    job_bytes: tuple[float, float | None],
    limits: Mapping[str, Any],
) -> NodeLinks:
    """Say which links of a node carried the traffic of its operations.

    `host`: the inventory. `job_bytes`: what the job sent from this node, at least and at most.
    """
    nics: Sequence[Mapping[str, Any]] = host.get("nics", ())
    physical = {str(one.get("name")) for one in nics if one.get("physical")}
    hca = {d: carried(network, HCA, d) for d in network.devices(*HCA_BYTES)}
    nic = {d: carried(network, NIC, d) for d in network.devices(*NIC_BYTES)}
    sockets = [d for d in network.devices(CONNECTIONS) if _connections(network, d)]
    by_sockets = False
    if sum(hca.values()) > 0 and sum(hca.values()) >= max(nic.values(), default=0.0):
        kind, used = HCA, _busiest(hca)
    else:
        kind = NIC
        of_job = _busiest({d: nic[d] for d in sockets if nic.get(d)})
        by_sockets = bool(of_job)
        # Without its sockets the job's NIC is the busiest: layers (bond, VLAN) count bytes again.
        used = of_job or _busiest(nic)[:1]
    speeds = [_speed(network, kind, device, physical) for device in used]
    whole = None if not speeds or None in speeds else sum(s for s in speeds if s is not None)
    below = _below(nic, nics)
    whole_bytes = sum(amount for device, amount in nic.items() if device not in below)
    sure = by_sockets or whole_bytes >= _CARRIED_RATIO * job_bytes[0] > 0
    idle: tuple[tuple[str, float], ...] = ()
    if kind == NIC and used and sure:
        apart = {d: amount for d, amount in nic.items() if d not in _below(used, nics)}
        idle = _idle(network, apart, hca, used, physical, limits[PATH.id].idle_at_most_ratio)
    best = max(idle, key=lambda one: one[1], default=None)
    if best is not None and not (
        whole is not None and best[1] >= limits[PATH.id].faster_at_least_ratio * whole
    ):
        best = None
    return NodeLinks(
        node, name, network, kind if used else "", used, whole, best,
        tuple(device for device, _ in idle if device in hca),
        _quiet_rails(hca, used, host.get("rails", ())) if kind == HCA else (),
        by_sockets, *job_bytes,
        tuple((str(a), int(b), str(c)) for a, b, c in host.get("slow_paths", ())),
    )  # fmt: skip


def _below(devices: Iterable[str], nics: Iterable[Mapping[str, Any]]) -> set[str]:
    """What these stand on: the members of a bond count what the bond counts."""
    lower = {str(nic.get("name")): nic.get("lower", ()) for nic in nics}
    found: set[str] = set()
    more = [one for device in devices for one in lower.get(device, ())]
    while more:
        device = more.pop()
        if device not in found:
            found.add(device)
            more += lower.get(device, ())
    return found


def _quiet_rails(
    amounts: Mapping[str, float], used: Sequence[str], rails: Iterable[Mapping[str, Any]]
) -> tuple[str, ...]:
    """The least busy first. A job may use few rails; one that uses most of them uses all."""
    found: list[str] = []
    for rail in rails:
        ports = [port for port in rail.get("ports", ()) if port in amounts]
        quiet = [port for port in ports if port not in used]
        if 2 * len(quiet) < len(ports):
            found += quiet
    return tuple(sorted(found, key=lambda port: (amounts[port], port)))


def _busiest(amounts: Mapping[str, float]) -> tuple[str, ...]:
    """The devices that carried a good part of what the busiest did."""
    most = max(amounts.values(), default=0.0)
    some = [d for d, amount in amounts.items() if amount > 0 and amount >= _IN_USE_RATIO * most]
    return tuple(sorted(some, key=lambda device: (-amounts[device], device)))


def _connections(network: NodeNetwork, device: str) -> bool:
    found = network.levels.get((CONNECTIONS, device))
    return found is not None and found.most > 0


def _speed(network: NodeNetwork, kind: str, device: str, physical: Iterable[str]) -> float | None:
    found = network.levels.get((HCA_SPEED if kind == HCA else SPEED, device))
    if found is None or not found.count or (kind == NIC and device not in physical):
        return None
    speed = found.quantile(0.5)
    names = HCA_BYTES if kind == HCA else NIC_BYTES
    seen = [network.counts[name, device].per_second.most for name in names
            if (name, device) in network.counts]  # fmt: skip
    return None if speed <= 0 or max(seen, default=0.0) > _EXCEEDED * speed else speed


def _idle(
    network: NodeNetwork,
    nic: Mapping[str, float],
    hca: Mapping[str, float],
    used: tuple[str, ...],
    physical: Iterable[str],
    at_most_ratio: float,
) -> tuple[tuple[str, float], ...]:
    """Devices that are up and did nothing, with their rates."""
    quiet = at_most_ratio * nic[used[0]]
    found = []
    for kind, amounts in ((NIC, nic), (HCA, hca)):
        for device in sorted(set(amounts) - (set(used) if kind == NIC else set())):
            speed = _speed(network, kind, device, physical)
            if amounts[device] <= quiet and speed is not None and _up(network, kind, device):
                found.append((device, speed))
    return tuple(found)


def _up(network: NodeNetwork, kind: str, device: str) -> bool:
    """A link that is down has no speed; a port says what it is."""
    if kind == NIC:
        return True
    state = network.levels.get((STATE, device))
    return state is not None and state.count > 0 and state.most == state.least == _ACTIVE


def is_down(network: NodeNetwork, port: str) -> bool:
    """True when an RDMA port said that its link was not up, all the time."""
    state = network.levels.get((STATE, port))
    return state is not None and state.count > 0 and state.most < _ACTIVE
