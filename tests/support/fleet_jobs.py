"""Jobs of a cluster's ledger, made by hand with round numbers.

A job has two ranks on each node. Each rank is seen for 100 s: 10 outside steps, 90 inside. It loses
10 s to `storage-remote` and 5 without a cause, and 20 more to `sync-slow-compute` on nodes that are
culprits. So a node loses 30 s, and a culprit 70 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from clusterprof.fleet.job_entry import (
    FIRST,
    INNER,
    LAST,
    CauseTime,
    CulpritTime,
    JobEntry,
    NodeTime,
    PlaceTime,
)
from clusterprof.fleet.queries import FleetSummary, NodeSums

S = 1_000_000_000
WEEK_NS = 7 * 86_400 * S
MONDAY_NS = 1_767_571_200 * S
"""Monday, 5 January 2026, of the week 2026-W02."""
RANKS = 2
STORAGE_NS, UNKNOWN_NS, SLOW_NS = 10 * S, 5 * S, 20 * S


def make_entry(
    number: int, nodes: Sequence[str], culprits: Sequence[str] = (), **facts: Any
) -> JobEntry:
    """Make the entry of a job; facts replace its attributes."""
    ranks = RANKS * len(nodes)
    slow_ns = RANKS * SLOW_NS * len(culprits)
    lost_ns = ranks * (STORAGE_NS + UNKNOWN_NS) + slow_ns
    in_step_ns = ranks * 90 * S
    causes = [
        CauseTime("startup", "startup", "The job is starting up", 0, 0, ranks * 10 * S),
        CauseTime("storage-remote", "storage", "A network file system", 1, ranks * STORAGE_NS, 0),
        CauseTime(
            "sync-slow-compute", "synchronization", "One rank computes longer", 1, slow_ns, 0
        ),
        CauseTime("unattributed", "unattributed", "", 0, ranks * UNKNOWN_NS, 0),
    ]
    entry = JobEntry(
        key=f"key-{number}",
        recordings=(f"recording-{number}",),
        title=f"runs/{number}",
        name=str(number),
        user="ada",
        account="vision",
        started_ns=MONDAY_NS + number * S,
        nodes=len(nodes),
        gpus=ranks,
        ranks=ranks,
        steps=10 * ranks,
        window_ns=ranks * 100 * S,
        unmeasured_ns=0,
        outside_ns=ranks * 10 * S,
        in_step_ns=in_step_ns,
        productive_ns=in_step_ns - lost_ns,
        lost_ns=lost_ns,
        main_cause="storage-remote",
        is_upper_bound=False,
        is_emulated=False,
        too_little_seen="",
        causes=tuple(cause for cause in causes if cause.lost_ns or cause.outside_ns),
        node_times=tuple(_make_node(at, nodes, culprits) for at in range(len(nodes))),
        culprits=tuple(_list_culprits(nodes, culprits)),
        places=(PlaceTime("/data", "storage-remote", len(nodes), ranks * STORAGE_NS),),
    )
    return replace(entry, **facts)


def _make_node(at: int, nodes: Sequence[str], culprits: Sequence[str]) -> NodeTime:
    is_culprit = nodes[at] in culprits
    lost_ns = RANKS * (STORAGE_NS + UNKNOWN_NS + (SLOW_NS if is_culprit else 0))
    is_tested = 0 < len(culprits) < len(nodes)
    return NodeTime(
        node=nodes[at],
        switch=f"leaf-{nodes[at][-1]}",
        ranks=RANKS,
        window_ns=RANKS * 100 * S,
        lost_ns=lost_ns,
        caused_ns=lost_ns - RANKS * UNKNOWN_NS,
        is_tested=is_tested,
        is_culprit=is_culprit,
        position=FIRST if at == 0 else LAST if at == len(nodes) - 1 else INNER,
        chance_ratio=len(culprits) / len(nodes) if is_tested else 0.0,
    )


def _list_culprits(nodes: Sequence[str], culprits: Sequence[str]) -> list[CulpritTime]:
    storage = [
        CulpritTime("storage-remote", node, RANKS * at, "GPU-0", "/data", RANKS * STORAGE_NS)
        for at, node in enumerate(nodes)
    ]
    slow = [
        CulpritTime(
            "sync-slow-compute", node, RANKS * nodes.index(node), "GPU-1", "", RANKS * SLOW_NS
        )
        for node in culprits
    ]
    return storage + slow


def find_node(summary: FleetSummary, name: str) -> NodeSums:
    """Return the sums of the only node of this name."""
    (node,) = (node for node in summary.nodes if node.node == name)
    return node
