"""How many dataloader workers the culprits have, beside the others: said with the number.

loader.workers_count 1 (of the rank; the other rank has 4)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from clusterprof.engine.besides import CHIEF_RATIO
from clusterprof.engine.node import NodeResult
from clusterprof.engine.setups import RankSetup
from clusterprof.findings import Culprit, Evidence, Finding

COUNT = "loader.workers_count"


def with_workers(found: Iterable[Finding], nodes: Sequence[NodeResult]) -> Iterator[Finding]:
    """Yield findings whose evidence counts workers with the others' count beside it."""
    for one in found:
        if any(item.name == COUNT for item in one.evidence):
            told = others_told(one.culprits, nodes)
            one = replace(one, evidence=tuple(_noted(item, told) for item in one.evidence))
        yield one


def others_told(culprits: Sequence[Culprit], nodes: Sequence[NodeResult]) -> str:
    """Say how many workers ranks have that are no chief culprits; "" where none is known."""
    most = max((_caused(one) for one in culprits), default=0)
    chiefs = {(c.node, c.rank) for c in culprits if _caused(c) >= CHIEF_RATIO * most}
    counts = []
    for node in nodes:
        for books in node.books:
            ledger = books.ledger
            known = node.setup.ranks.get((ledger.pid, books.started_ticks), RankSetup())
            if (ledger.node, ledger.rank) not in chiefs and known.workers is not None:
                counts.append(known.workers)
    if not counts or not chiefs:
        return ""
    low, high = min(counts), max(counts)
    amount = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    whose = "the other rank" if len(counts) == 1 else f"each of the other {len(counts):,} ranks"
    return f"{whose} has {amount}"


def _caused(one: Culprit) -> int:
    return (one.own_ns or 0) + (one.others_ns or 0)


def _noted(item: Evidence, told: str) -> Evidence:
    if item.name != COUNT or not told:
        return item
    return replace(item, note=f"{item.note}; {told}" if item.note else told)
