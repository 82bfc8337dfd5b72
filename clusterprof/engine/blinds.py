"""What was not seen: lost records, sources that failed, causes that could not be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.partial import merge
from clusterprof.attribution.traced_asked import SIGNS
from clusterprof.detectors.registry import DETECTORS
from clusterprof.engine.node import NodeResult
from clusterprof.findings import Blind
from clusterprof.hostlists import fold
from clusterprof.signals.elsewhere import is_elsewhere
from clusterprof.trace.schema import Gap
from clusterprof.trace.sources import LeftOut

_OPERATIONS = "operations between ranks"
_NEWER = "if it happens often, please report it with `clusterprof dump`"
_UNMATCHED = {
    "group-unknown": ("name no group of ranks", "use process groups of torch.distributed"),
    "peer-unknown": ("do not say with whom they were", "name the peer in send and recv"),
    "issue-not-seen": ("end an operation whose begin was not seen", ""),
    "wait-not-seen": ("begin an operation that nobody was seen to wait for", ""),
    "backwards": ("end before they begin", _NEWER),
    "seen-twice": ("are of a rank that was in that operation already", _NEWER),
    "another-operation": (
        "are of another kind than what the others did under that number",
        "check that all ranks call the same operations in the same order",
    ),
    "number-unknown": ("carry no number", _NEWER),
    "too-late": (
        "came so long after those of the other ranks that these were no longer kept",
        "record all nodes of the job in one go",
    ),
    "restart-unclear": (
        "lie about a restart that not all ranks of the group made",
        "restart all ranks of a job together",
    ),
    "sequence-skew": (
        "carry numbers that are off from those of the other ranks",
        "record from the start of the job on",
    ),
}


def blinds_of(
    nodes: Sequence[NodeResult],
    books: Sequence[RankBooks],
    unmatched: Mapping[str, int],
    left_out: Sequence[LeftOut],
) -> tuple[Blind, ...]:
    """Return everything that was not seen, what was lost first."""
    found: dict[tuple[str, str], Blind] = {}
    where: dict[tuple[str, str], list[str]] = {}
    lacking = _lacking(nodes)
    everywhere = {node.facts.name for node in nodes}
    for node in nodes:
        for blind in _lost_records(node):
            found[(blind.what, blind.message)] = blind
        for gap in node.loaded.gaps:
            if _is_elsewhere(node, gap) and (
                gap.collector.startswith("gpu_") or lacking[gap.collector] == everywhere
            ):
                continue  # but what some nodes have and others lack is told, accelerators aside
            what = gap.signal or gap.collector
            found.setdefault((what, gap.message), Blind(what, gap.kind, gap.message, gap.remedy))
            where.setdefault((what, gap.message), []).append(node.facts.name)
    for key, names in where.items():
        if set(names) < everywhere:  # not on all of them
            one = found[key]
            found[key] = replace(one, message=f"{one.message.rstrip('.')} (on {fold(names)})")
    lost = [
        Blind(str(one.path), "lost", f"left out: {one.why}", one.remedy)
        for one in left_out
        if not one.copy
    ]
    blinds = sorted(found.values(), key=lambda b: (b.kind != "lost", b.what, b.message))
    return (*lost, *blinds, *_unmatched(unmatched), *_abstained(books))


def _lacking(nodes: Sequence[NodeResult]) -> dict[str, set[str]]:
    """Return by collector the nodes that have nothing of the kind it reads."""
    found: dict[str, set[str]] = {}
    for node in nodes:
        for gap in node.loaded.gaps:
            if _is_elsewhere(node, gap):
                found.setdefault(gap.collector, set()).add(node.facts.name)
    return found


def _is_elsewhere(node: NodeResult, gap: Gap) -> bool:
    """True for what a node simply does not have, such as GPUs of another maker than its own."""
    real = any(not device.get("emulated") for device in node.loaded.header.devices)
    return not gap.signal and is_elsewhere(gap.collector, gap.kind, gap.remedy, real)


def _unmatched(counts: Mapping[str, int]) -> list[Blind]:
    """Spans of operations that could not be laid beside those of other ranks."""
    out = []
    for reason, spans in sorted(counts.items(), key=lambda one: (-one[1], one[0])):
        if spans:
            why, remedy = _UNMATCHED.get(reason, (f"do not fit ({reason})", ""))
            message = f"{spans:,} of their spans {why}; what was waited in them has no cause"
            out.append(Blind(_OPERATIONS, "failed", message, remedy))
    return out


def _lost_records(node: NodeResult) -> list[Blind]:
    """What was recorded and cannot be read, and what was produced and not recorded."""
    damage, name = node.loaded.damage, node.facts.name
    what = f"recording of {name}"
    out = []
    if damage.damaged_places:
        message = f"{damage.damaged_bytes:,} bytes in {damage.damaged_places} places are damaged"
        out.append(Blind(what, "lost", message, "check the file system it was kept on"))
    if damage.torn_tail_bytes:
        message = f"the last {damage.torn_tail_bytes:,} bytes are of a frame that was cut off"
        out.append(Blind(what, "lost", message, ""))
    if damage.unknown_frames:
        message = f"{damage.unknown_frames:,} frames are not understood"
        out.append(Blind(what, "lost", message, "analyse with a newer clusterprof"))
    if node.loaded.dropped_spans:
        message = f"{node.loaded.dropped_spans:,} spans were dropped before they could be stored"
        out.append(Blind("spans", "lost", message, "give the recorder more CPU time"))
    return out


_RECORD = "record the same job with clusterprof record"


def _abstained(books: Sequence[RankBooks]) -> list[Blind]:
    """Causes that no rank's recording could speak about."""
    whole = merge(*(one.partial for one in books))
    out = []
    unmarked = [one for one in books if not one.marked]
    if unmarked:
        message = f"{len(unmarked)} of {len(books)} training processes carried no probe"
        remedy = "record with --inject auto; `clusterprof doctor` says whether it can be loaded"
        out.append(Blind("causes below family level", "absent", message, remedy))
    for detector in DETECTORS:
        id_ = detector.cause.id
        needs = sorted(need for cause, need in whole.missing if cause == id_)
        if id_ not in whole.asked and needs:
            lacking = ", ".join(need for need in needs if need) or "a measure of it"
            if needs == [SIGNS]:  # of an imported trace: many causes, one reason
                message = f"cannot be told: the trace has no {SIGNS}"
                out.append(Blind(id_, "absent", message, _RECORD))
                continue
            message = f"cannot tell {id_}: the recording has no {lacking}"
            out.append(Blind(id_, "absent", message, f"clusterprof explain {id_}"))
    return out
