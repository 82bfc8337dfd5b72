"""Network counters of nodes, and jobs over them, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from clusterprof.analysis.attribution.network.counters import NodeLinks, find_node_links
from clusterprof.analysis.attribution.network.split import TransferSplit, split_transfer_time
from clusterprof.analysis.attribution.network.transfer_time import TransferTotals
from clusterprof.analysis.attribution.wait_for.blame import blame_waits, list_causes
from clusterprof.analysis.detectors.registry import build_limits
from clusterprof.analysis.timeline.network_counters import (
    CounterTotal,
    NodeNetworkTotals,
    ValueHistogram,
)
from clusterprof.probe.layout import ALL_REDUCE
from tests.support.synthetic.jobs import CATEGORIES, MS, World

SECOND = 1_000_000_000
LIMITS = build_limits({})
GB = 10**9
RDMA_UP = 4.0


def make_spread(*values: float) -> ValueHistogram:
    out = ValueHistogram()
    out.add(np.array(values, float))
    return out


def make_network(readings: Mapping[str, float], seconds: float = 60) -> NodeNetworkTotals:
    """Readings over a minute: "<signal> <device>" -> growth of a counter, or a constant gauge."""
    counts, levels = {}, {}
    for key, value in readings.items():
        name, _, device = key.partition(" ")
        if name.endswith("_total"):
            rate = make_spread(*[value / seconds] * 60)
            counts[name, device] = CounterTotal(value, round(seconds * SECOND), rate)
        else:
            levels[name, device] = make_spread(*[value] * 60)
    return NodeNetworkTotals(counts, levels)


def make_nic(name: str = "eth0", sent: float = 10 * GB, speed: float | None = 10 * GB) -> dict:
    """A NIC that sent so many bytes in a minute, at a rate per second that is known or not."""
    out = {
        f"network.transmit_bytes_total {name}": sent,
        f"network.receive_bytes_total {name}": sent / 2,
    }
    return out if speed is None else {**out, f"network.link_bytes_per_second {name}": speed}


def make_hca(name: str = "mlx5_0/1", sent: float = 10 * GB, speed: float = 25 * GB) -> dict:
    """An RDMA port that is up."""
    return {
        f"rdma.transmit_bytes_total {name}": sent,
        f"rdma.receive_bytes_total {name}": sent,
        f"rdma.link_bytes_per_second {name}": speed,
        f"rdma.state_count {name}": RDMA_UP,
    }


def make_links(
    number: int,
    readings: Mapping[str, float],
    job: tuple[float, float | None] = (10 * GB, 10 * GB),
    virtual: Sequence[str] = (),
    rails: Sequence[Mapping[str, Sequence[str]]] = (),
    lower: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> NodeLinks:
    """The links of node `number`, whose NICs are physical but for those named."""
    result = make_network(readings)
    names = result.devices("network.transmit_bytes_total")
    nics = [
        {"name": name, "physical": name not in virtual, "lower": lower.get(name, ())}
        for name in names
    ]
    host = {"nics": nics, "rails": rails}
    return find_node_links(number, f"node{number}", result, host, job, LIMITS)


def make_all_reduces(
    durations_ns: Sequence[int],
    nodes: Sequence[int] = (0, 1),
    size: int = 100_000_000,
    spare: Sequence[int] = (),
    kind: int = ALL_REDUCE,
) -> TransferTotals:
    """One rank on each of these nodes; each operation takes so long after the last has come.

    `spare`: nodes of further ranks, which take no part.
    """
    ranks = len(nodes)
    world = World(ranks)
    for ns in durations_ns:
        world.spend(MS)
        world.meet(np.arange(ranks)[None, :], np.array([1]), ns, kind)
    job = world.job()
    ops = replace(job.ops, bytes=np.full(len(durations_ns), size))
    totals = TransferTotals(
        np.array([*nodes, *spare]), list_causes(CATEGORIES).index("net-transfer")
    )
    totals.add(ops, blame_waits(ops, job.spent, job.spent, ranks)[0])
    return totals


TOOK = [30 * MS] * 40


def split_transfers(
    *of_nodes: dict, took: list[int] = TOOK, **more: object
) -> tuple[dict, TransferSplit]:
    """Milliseconds of the first rank by cause, and the split; all ranks have the same."""
    transfers = make_all_reduces(took, range(len(of_nodes)))
    known = {n: make_links(n, node, **more) for n, node in enumerate(of_nodes)}  # type: ignore[arg-type]
    return split_and_check_transfers(transfers, known)


def split_and_check_transfers(
    transfers: TransferTotals, known: dict[int, NodeLinks]
) -> tuple[dict, TransferSplit]:
    """Milliseconds of the first rank by cause; fails when a rank's parts do not add up."""
    transfer_time = split_transfer_time(transfers, known, LIMITS)
    given = {cause: share.ns for cause, share in transfer_time.shares.items()}
    for rank, felt in enumerate(transfers.victim_ns.tolist()):
        parts = [int(ns[rank]) for ns in given.values()]
        assert all(ns >= 0 for ns in parts) and sum(parts) <= felt
    left = int(transfers.victim_ns.sum()) - sum(int(ns.sum()) for ns in given.values())
    assert 0 <= transfer_time.expected_ns + transfer_time.excess_ns <= left
    return {cause: int(ns[0]) / MS for cause, ns in given.items()}, transfer_time
