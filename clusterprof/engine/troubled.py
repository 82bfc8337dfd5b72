"""Jobs whose network shows a fault, where nobody marked the operations between ranks.

What all ranks of such a job wait alike is laid at the network; elsewhere nothing tells it from
other sleep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof.attribution.net_links import links_of
from clusterprof.attribution.net_signs import WRONG, queued, round_trip, signs_of
from clusterprof.engine.jobs import UNCLEAR
from clusterprof.engine.node import NodeResult

FAR_NS = 2_000_000
"""A shortest round trip that is longer is no cluster's: machines of one hall are 0.2 ms apart."""

BUSY = "tcp.job_busy_ns_total"
QUEUED_RATIO = 3.0
"""Middle round trip over the shortest."""


def troubled(nodes: Sequence[NodeResult], limits: Mapping[str, Any]) -> frozenset[int]:
    """Return the jobs of which a node shows loss, queues, errors, or round trips of `FAR_NS`."""
    out: set[int] = set()
    for number, node in enumerate(nodes):
        jobs = {one.job for one in node.books if one.job != UNCLEAR}
        if jobs - out and _shows(number, node, limits):
            out |= jobs
    return frozenset(out)


def sending_ns(nodes: Sequence[NodeResult]) -> dict[int, int]:
    """Return by job for how long its connections had data on their way at most: of the node on
    which it was longest, all connections together. Without jobs of which nobody knows.
    """
    out: dict[int, int] = {}
    for node in nodes:
        network = node.network_throughout
        busy = sum(int(network.total(BUSY, d) or 0) for d in network.devices(BUSY))
        for job in {one.job for one in node.books if one.job != UNCLEAR} if busy else ():
            out[job] = max(busy, out.get(job, 0))
    return out


def _shows(number: int, node: NodeResult, limits: Mapping[str, Any]) -> bool:
    host = node.loaded.header.host
    links = links_of(number, node.facts.name, node.network_throughout, host, (0.0, None), limits)
    if not links.used:
        return False
    rtt_ns, least_ns, _ = round_trip(links)
    if least_ns is not None and least_ns >= FAR_NS:
        return True
    # Whoever's packets stand in the queue: those of the job wait in it.
    if rtt_ns is not None and least_ns and queued(rtt_ns, least_ns, QUEUED_RATIO):
        return True
    return any(sign.kind != WRONG for sign in signs_of(links, limits))
