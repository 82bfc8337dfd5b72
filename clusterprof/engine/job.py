"""What was recorded of the job: how many of its ranks, and on what."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.attribution.ledger import RankBooks
from clusterprof.engine.node import NodeResult
from clusterprof.findings import JobFacts

_NOT_ASKED = "durations alone were compared"


def job_facts(
    nodes: Sequence[NodeResult],
    clock_bound_ns: int | None = None,
    clock_why: str = "",
) -> JobFacts:
    """Return what stands in the header beside the sums."""
    books = [one for node in nodes for one in node.books]
    window_ns = sum(one.ledger.window_ns for one in books)
    seen_ns = window_ns - sum(one.ledger.unmeasured_ns for one in books)
    devices = {_device(node, one) for node in nodes for one in node.books if one.ledger.device}
    sizes: dict[int, int | None] = {}  # by job: the same on all its ranks
    for one in books:
        sizes[one.job] = sizes.get(one.job) or one.place.world_size
    known = [size for size in sizes.values() if size is not None]
    return JobFacts(
        world_size=sum(known) if known and len(known) == len(sizes) else None,
        gpus=len(devices),
        coverage_ratio=seen_ns / window_ns if window_ns > 0 else None,
        clock_bound_ns=clock_bound_ns,
        clock_why="" if len(nodes) < 2 or clock_bound_ns is not None else clock_why or _NOT_ASKED,
    )


def _device(node: NodeResult, one: RankBooks) -> tuple[str, str]:
    """Return what tells devices apart: a UUID anywhere, another id on its node."""
    device = one.ledger.device
    return ("" if device.startswith(("GPU-", "MIG-")) else node.facts.key), device
