"""Gives every finding its advice: the scene around the rank that caused most, and the remedies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterprof.attribution.families import FAMILIES
from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.local import evidence_of
from clusterprof.detectors.peers import PEER_CAUSES
from clusterprof.detectors.registry import DETECTORS
from clusterprof.engine.node import NodeResult
from clusterprof.engine.setups import NodeSetup, RankSetup, launcher_of
from clusterprof.engine.workers import with_workers
from clusterprof.findings import Evidence, Finding, Report
from clusterprof.remedies.registry import advise, withheld
from clusterprof.remedies.scene import Machine, Scene, Setup
from clusterprof.underfill import RankFill

_LEAVES = {one.cause.id for one in DETECTORS} | {cause.id for cause in PEER_CAUSES}
_SEEN_BY: dict[str, tuple[str, ...]] = {
    "storage": ("mounts", "nfs", "lustre", "cifs", "disk", "threads", "processes"),
    "cpu": ("threads", "processes", "pressure", "cgroup", "placement", "runqueue"),
    "network": ("network", "ethtool", "rdma", "tcp", "sockets"),
    "launch": ("threads", "processes"),
    "device": ("gpu_nvidia", "gpu_amd", "gpu_intel", "gpu"),
}
"""Family -> collectors, and first words of signals, that tell its causes apart."""
_Ranked = tuple[NodeResult, RankBooks]


def with_advice(report: Report, nodes: Sequence[NodeResult]) -> Report:
    """Return the report with the advice of each finding."""
    ranked = [(node, one) for node in nodes for one in node.books]
    found = []
    for one in with_workers(report.findings, nodes):
        scene = scene_of(one, report, nodes, ranked)
        found.append(replace(one, advice=advise(scene), withheld=withheld(scene)))
    return replace(report, findings=tuple(found))


def scene_of(
    finding: Finding, report: Report, nodes: Sequence[NodeResult], ranked: Sequence[_Ranked]
) -> Scene:
    """Return what remedies may look at for one finding."""
    cause = finding.cause
    chief = _chief(finding, ranked)
    node = chief[0] if chief is not None else _node(finding, nodes)
    is_family = cause.id in FAMILIES and cause.id not in _LEAVES
    told = finding.evidence if chief is None else _evidence(finding, chief[1])
    others = (one.cause.id for one in report.findings if one is not finding)
    return Scene(
        finding=finding,
        evidence=told,
        setup=Setup() if chief is None else _setup(finding, chief, report),
        machine=_machine(node, chief),
        ranks=max(1, len(ranked)),
        nodes=max(1, len(nodes)),
        marked=chief[1].marked if chief is not None else all(one.marked for _, one in ranked),
        is_family=is_family,
        beside=frozenset(others),
        missing=_missing(cause.family, chief) if is_family else (),
        holes=_holes(cause.family, report),
    )


def _chief(finding: Finding, ranked: Sequence[_Ranked]) -> _Ranked | None:
    """The rank that caused most; without a culprit nobody, but in a job of one rank."""
    if not finding.culprits:
        return ranked[0] if len(ranked) == 1 else None
    one = finding.culprits[0]
    if one.rank is None and not one.device and len(ranked) > 1:
        return None
    for node, books in ranked:
        ledger = books.ledger
        if (ledger.node, ledger.rank, ledger.device) == (one.node, one.rank, one.device):
            return node, books
    return None


def _node(finding: Finding, nodes: Sequence[NodeResult]) -> NodeResult | None:
    if not finding.culprits:
        return nodes[0] if nodes else None
    name = finding.culprits[0].node
    return next((node for node in nodes if node.facts.name == name), None)


def _evidence(finding: Finding, books: RankBooks) -> tuple[Evidence, ...]:
    """All numbers of that rank; where it has none of its own, those of the finding."""
    id_ = finding.cause.id
    leaves = next((one.leaves for one in books.buckets if one.id == id_), (id_,))
    found = [item for leaf in leaves or (id_,) for item in evidence_of(books.partial, leaf)]
    names = {item.name for item in found}
    return (*found, *(item for item in finding.evidence if item.name not in names))


def _setup(finding: Finding, chief: _Ranked, report: Report) -> Setup:
    node, books = chief
    ledger, own = books.ledger, finding.culprits[0].own_ns if finding.culprits else None
    known = _known(node, books)
    shares = [other for one in node.books if (other := _known(node, one)).cpus & known.cpus]
    lost = own if own is not None else dict(ledger.buckets).get(finding.cause.id)
    return Setup(
        loader=known.loader,
        cpus_allowed=len(known.cpus) or None,
        cores_allowed=known.cores,
        sharing=max(1, len(shares)),
        on_node=max(1, len(node.books)),
        gpu_memory_free_ratio=_memory_free(books, report),
        step_ns=ledger.in_step_ns // ledger.steps if ledger.steps else None,
        steps=ledger.steps,
        own_ratio=lost / ledger.in_step_ns if lost and ledger.in_step_ns else None,
    )


def _known(node: NodeResult, books: RankBooks) -> RankSetup:
    return node.setup.ranks.get((books.ledger.pid, books.started_ticks), RankSetup())


def _memory_free(books: RankBooks, report: Report) -> float | None:
    fills: tuple[RankFill, ...] = report.underfill.ranks if report.underfill is not None else ()
    ledger = books.ledger
    for one in fills:
        if (one.node, one.pid, one.device) == (ledger.node, ledger.pid, ledger.device):
            return one.levels.memory_free_ratio
    return None


def _machine(node: NodeResult | None, chief: _Ranked | None) -> Machine:
    setup = node.setup if node is not None else NodeSetup()
    launcher = setup.machine.launcher or (launcher_of(chief[1].identity) if chief else "")
    return replace(setup.machine, launcher=launcher)


def _missing(family: str, chief: _Ranked | None) -> tuple[str, ...]:
    """What the recording of the chief culprit lacks to tell causes of the family apart."""
    if chief is None or not chief[1].marked:
        return ()
    of_family = {one.cause.id for one in DETECTORS if one.cause.family == family}
    lacking = {need for cause, need in chief[1].partial.missing if cause in of_family and need}
    return tuple(sorted(lacking))


def _holes(family: str, report: Report) -> tuple[tuple[str, str], ...]:
    """Things unseen that matter to the family, and what would let us see them."""
    of_family = _SEEN_BY.get(family, ())
    return tuple(
        (blind.what, blind.remedy)
        for blind in report.blinds
        if blind.what.partition(".")[0].partition(":")[0] in of_family
        and blind.remedy
        and not blind.remedy.startswith("clusterprof explain")
    )
