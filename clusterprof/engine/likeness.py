"""What a run was: the facts by which it is told whether two may be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.step_blocks import COUNTED, SAMPLES, TOKENS
from clusterprof.engine.node import NodeResult
from clusterprof.findings import JobFacts
from clusterprof.likeness import Likeness


def likeness_of(nodes: Sequence[NodeResult], job: JobFacts) -> Likeness:
    """Return the facts of a run; what no recording says is left unknown."""
    books = [one for node in nodes for one in node.books]
    headers = [node.loaded.header for node in nodes]
    started = [int(one.started["realtime_ns"]) for one in headers if "realtime_ns" in one.started]
    frameworks = {
        (name, version)
        for node in nodes
        for event in node.loaded.events
        if event.kind == "process-registered"
        for name, _, version in _words(event.attributes.get("frameworks"))
    }
    return Likeness(
        started_at_ns=min((ns for ns in started if ns > 0), default=None),
        recordings=tuple(sorted(node.facts.key for node in nodes)),
        gpu_models=tuple(sorted(_models(nodes).items())),
        nodes=len({node.facts.boot_id or node.facts.key for node in nodes}) or None,
        world_size=job.world_size,
        batch_size=_per_step(books, SAMPLES),
        tokens=_per_step(books, TOKENS),
        measured_by=tuple(sorted({one.ledger.source for one in books})),
        frameworks=tuple(sorted(frameworks)),
        drivers=_known(
            str(device.get("driver") or "") for one in headers for device in one.devices
        ),
        recorder=_known(one.versions.get("clusterprof", "") for one in headers),
        restarts=len({(one.job, one.place.restart) for one in books}) - 1 if books else 0,
    )


def _words(told: object) -> list[tuple[str, str, str]]:
    """Return (name, " ", version) of what a process had imported: "torch 2.13.0, jax 0.10.2"."""
    words = told.split(", ") if isinstance(told, str) else []
    return [one for one in (word.partition(" ") for word in words) if one[2]]


def _models(nodes: Sequence[NodeResult]) -> Counter[str]:
    """How many devices of each model the ranks had."""
    out: Counter[str] = Counter()
    seen = set()
    for node in nodes:
        names = {
            str(one.get("id")): str(one.get("name") or "") for one in node.loaded.header.devices
        }
        for one in node.books:
            device = one.ledger.device
            place = (node.facts.boot_id or node.facts.key, device)
            if device and place not in seen:
                seen.add(place)
                out[names.get(device, "")] += 1
    return Counter({name: count for name, count in out.items() if name})


def _per_step(books: Sequence[RankBooks], row: int) -> float | None:
    """Median over ranks of what one took for a step that told it."""
    found = [
        int(one.blocks.sums[row].sum()) / int(counted)
        for one in books
        if one.blocks is not None and (counted := one.blocks.sums[COUNTED].sum())
    ]
    return float(median(found)) or None if found else None


def _known(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({word for word in words if word}))
