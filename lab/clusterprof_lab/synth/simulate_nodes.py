"""Signals of the nodes beyond the job's own threads: links, connections, other tenants."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof_lab.synth.simulate_faults import Faults
from clusterprof_lab.synth.simulate_job import Job
from clusterprof_lab.synth.simulate_plan import MS, Plan
from clusterprof_lab.synth.story import Node, Rate

NIC = "eth0"
RTT_NS = 200_000
MOUNTS = (
    ("/", "/dev/vda1", "ext4"),
    ("/local", "/dev/vdb", "ext4"),
    ("/data", "storage:/data", "nfs4"),
)
_SEGMENT = 1448
_SLOT_NS = 100 * MS
Signals = dict[tuple[str, str], list[Rate]]


def make_nodes(plan: Plan, jobs: Sequence[Job], faults: Faults, end_ns: int) -> dict[str, Node]:
    """Return all nodes of a job with what happens on them."""
    out = {}
    struck = {plan.node_of(rank) for fault in faults.all if fault.size > 0 for rank in fault.ranks}
    extras = [fault.extra for fault in faults.all if fault.extra]
    moved = _sum_transfers(jobs, end_ns)
    for index in range(plan.nodes):
        node = Node(f"node{index}", mounts=MOUNTS)
        first = extras and next(f for f in faults.all if f.extra).ranks[0]
        network = [extra for extra in extras if extra in _LINKS]
        here = plan.node_of(first) == index if extras else False
        _add_links(node.extra, plan, moved.get(index, {}), end_ns, network if network else [], here)
        for name in extras:
            if name in _TENANTS and (index in struck or not struck):
                _add_tenant(node.extra, name, end_ns)
        out[node.name] = node
    return out


def _sum_transfers(jobs: Sequence[Job], end_ns: int) -> dict[int, dict[int, tuple[float, int]]]:
    """Return bytes, and for how long they moved, by node and slot of 0.1 s."""
    out: dict[int, dict[int, tuple[float, int]]] = {}
    for job in jobs:
        for start, end, node, size in job.moved:
            slots = out.setdefault(node, {})
            length = max(1, end - start)
            for slot in range(start // _SLOT_NS, (end - 1) // _SLOT_NS + 1):
                low, high = max(start, slot * _SLOT_NS), min(end, (slot + 1) * _SLOT_NS)
                before, ns = slots.get(slot, (0.0, 0))
                slots[slot] = before + 2.0 * size * (high - low) / length, ns + high - low
    return out


# What a bad link shows: round trips (and shortest) as multiples, segments sent again per segment,
# bytes of others per byte per second of the link, on all nodes or on one.
_LINKS = {
    "rate-cap": {"rtt": 12.0, "least": 1.0, "again": 0.002, "others": 0.0},
    "latency": {"rtt": 60.0, "least": 55.0, "again": 0.0, "others": 0.0},
    "loss": {"rtt": 1.3, "least": 1.0, "again": 0.02, "others": 0.0},
    "background": {"rtt": 10.0, "least": 1.0, "again": 0.003, "others": 0.7},
    "asymmetric": {"rtt": 9.0, "least": 1.0, "again": 0.001, "others": 0.0},
}
_EVERYWHERE = ("latency",)


def _add_links(
    extra: Signals,
    plan: Plan,
    slots: dict[int, tuple[float, int]],
    end_ns: int,
    names: list[str],
    here: bool,
) -> None:
    name = names[0] if names and (here or names[0] in _EVERYWHERE) else ""
    bad = _LINKS.get(name, {"rtt": 1.1, "least": 1.0, "again": 0.0, "others": 0.0})
    link = plan.link_bytes_per_second
    whole = [Rate(0, end_ns, float(link))]
    extra["network.link_bytes_per_second", NIC] = whole
    if plan.nodes == 1:
        return
    for slot in range(end_ns // _SLOT_NS + 1):
        start, end = slot * _SLOT_NS, min((slot + 1) * _SLOT_NS, end_ns)
        if end <= start:
            continue
        size, moving_ns = slots.get(slot, (0.0, 0))
        others = bad["others"] * link * (end - start) * 1e-9

        def grow(signal: str, device: str, value: float, a: int = start, b: int = end) -> None:
            extra.setdefault((signal, device), []).append(Rate(a, b, value))

        for way in ("receive", "transmit"):
            grow(f"network.{way}_bytes_total", NIC, size * 1.03 + others)
        grow("tcp.job_acked_bytes_total", NIC, size)
        grow("tcp.job_received_bytes_total", NIC, size)
        grow("tcp.segments_sent_total", "", size / _SEGMENT)
        grow("tcp.retransmits_total", "", bad["again"] * size / _SEGMENT)
        grow("tcp.job_retransmits_total", NIC, bad["again"] * size / _SEGMENT)
        # The kernel counts while data are on their way, however fast they are.
        grow("tcp.job_busy_ns_total", NIC, float(min(moving_ns, end - start)))
        moving = size > 0
        grow("tcp.job_rtt_ns", NIC, RTT_NS * (bad["rtt"] if moving else bad["least"]))
        grow("tcp.job_min_rtt_ns", NIC, RTT_NS * bad["least"])
        grow("tcp.job_unsent_bytes", NIC, 4e6 if moving else 0.0)
        grow("tcp.job_unread_bytes", NIC, 0.0)
        grow("tcp.job_connections_count", NIC, 2.0 * plan.per_node)


# What other tenants use: (signal, device, growth per second, or what a gauge is).
_TENANTS: dict[str, tuple[tuple[str, str, float], ...]] = {
    "disk-neighbour": (
        ("disk.read_bytes_total", "vdb", 180e6),
        ("disk.reads_total", "vdb", 1400.0),
        ("disk.read_ns_total", "vdb", 24e9),
        ("disk.busy_ns_total", "vdb", 0.97e9),
        ("disk.queue_ns_total", "vdb", 24e9),
    ),
    "cpu-neighbour": (
        ("cpu.user_ns_total", "", 40e9),
        ("cpu.runnable_count", "", 96.0),
        ("pressure.cpu_some_ns_total", "", 0.8e9),
    ),
    "free-neighbour": (
        ("cpu.user_ns_total", "", 12e9),
        ("cpu.runnable_count", "", 14.0),
        ("disk.read_bytes_total", "vda", 60e6),
        ("disk.reads_total", "vda", 500.0),
        ("disk.read_ns_total", "vda", 2e9),
        ("disk.busy_ns_total", "vda", 0.5e9),
    ),
    "cache-evicted": (
        ("memory.cached_bytes", "", 2e8),
        ("cgroup.memory_high_events_total", "", 0.0),
    ),
    "memory-high": (
        ("cgroup.memory_high_events_total", "", 300.0),
        ("memory.direct_reclaim_pages_total", "", 40000.0),
        ("pressure.memory_some_ns_total", "cgroup", 0.5e9),
        ("pressure.memory_full_ns_total", "cgroup", 0.2e9),
    ),
    "cpu-quota": (("cgroup.cpu_quota_ratio", "", 2.0),),
}


def _add_tenant(extra: Signals, name: str, end_ns: int) -> None:
    for signal, device, value in _TENANTS[name]:
        total = value * end_ns * 1e-9 if signal.endswith("_total") else value
        extra.setdefault((signal, device), []).append(Rate(0, end_ns, total))
