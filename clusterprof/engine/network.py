"""Lay the time in transfers beside the network counters of the nodes, and say what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

import numpy as np

from clusterprof.attribution.blame import TRANSFER, Blamed, causes
from clusterprof.attribution.blame_transfer import Transfers
from clusterprof.attribution.net_links import LEAST_RTT, NodeLinks, links_of
from clusterprof.attribution.net_signs import (
    ASKED,
    Sign,
    receiver_limited,
    round_trip,
    signs_of,
)
from clusterprof.attribution.net_split import Share, Split, loosest, split, standing_out
from clusterprof.attribution.partial import Partial
from clusterprof.beside import Beside
from clusterprof.detectors.network import AT_PACE, AT_RATE, AT_SLOW_PACE, BEYOND, PATH
from clusterprof.engine.moved import FLOW, moved, slow_within
from clusterprof.engine.node import NodeResult
from clusterprof.findings import Cause, Culprit, Evidence, Finding
from clusterprof.timeline.operations import Operations
from clusterprof.units import human

_MOST_EVIDENCE = 3
_MUCH_RATIO = 0.5
"""Beyond this part of what could be judged the finding says that it takes too long."""


@dataclass(frozen=True, slots=True)
class NetworkTold:
    """What the network counters say of the time in transfers."""

    shares: Mapping[str, Share] = field(default_factory=dict)
    asked: Sequence[Partial] = ()
    """Per rank: which causes were looked for."""
    causes: Mapping[str, Cause] = field(default_factory=dict)
    """How a cause reads here, by id."""
    culprits: Mapping[str, tuple[Culprit, ...]] = field(default_factory=dict)
    evidence: Mapping[str, tuple[Evidence, ...]] = field(default_factory=dict)
    besides: Mapping[str, Beside | None] = field(default_factory=dict)

    def felt(self, at: int, felt_ns: Mapping[str, int]) -> dict[str, int]:
        """Return what a rank felt, with its transfers shared out; the sum is the same."""
        out = dict(felt_ns)
        for cause, share in self.shares.items():
            if ns := int(share.ns[at]):
                out[cause] = ns
                out[TRANSFER] -= ns
        return {cause: ns for cause, ns in out.items() if ns}

    def worded(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return findings with what the counters say of those about the network."""
        return [
            replace(
                one,
                cause=self.causes.get(one.cause.id, one.cause),
                culprits=self.culprits.get(one.cause.id, one.culprits),
                evidence=self.evidence.get(one.cause.id, one.evidence),
                compared=self.besides.get(one.cause.id, one.compared),
            )
            for one in findings
        ]


class NetworkTimes:
    """Adds up the transfers of all ranks, block after block."""

    def __init__(
        self, nodes: Sequence[NodeResult], categories: Sequence[str], limits: Mapping[str, Any]
    ) -> None:
        self._nodes, self._limits = nodes, limits
        of_rank = [number for number, node in enumerate(nodes) for _ in node.books]
        self._transfers = Transfers(np.array(of_rank, np.int64), causes(categories).index(TRANSFER))

    def add(self, ops: Operations, blamed: Blamed) -> None:
        """Add a block."""
        self._transfers.add(ops, blamed)

    def told(self) -> NetworkTold:
        """Return what all blocks and the counters of all nodes say."""
        sent = _sent(self._transfers)
        links = {
            number: links_of(
                number,
                node.facts.name,
                node.network,
                node.loaded.header.host,
                sent.get(number, (0.0, None)),
                self._limits,
            )
            for number, node in enumerate(self._nodes)
        }
        hosts = [node.loaded.header.host for node in self._nodes]
        tested = next((one["transfer_expected"] for one in hosts if "transfer_expected" in one), ())
        found = split(self._transfers, links, self._limits, tested)
        loose = {n: signs_of(one, loosest(self._limits)) for n, one in links.items()}
        in_step_ns = sum(one.ledger.in_step_ns for node in self._nodes for one in node.books)
        shares = list(found.shares.items())
        told, culprits = _transfer_evidence(found, links, in_step_ns), _far(links)
        flow = moved(self._transfers, links, steps=_steps(self._nodes))
        told = (*flow, *told)
        stand_out = {cause: _standing_out(share, links, loose) for cause, share in shares}
        crossed = moved(self._transfers, links, between_nodes=True)
        crossed = tuple(one for one in crossed if one.name in FLOW)
        return NetworkTold(
            found.shares,
            [_asked(links[number]) for number in self._transfers.node.tolist()],
            _worded(found, flow),
            {TRANSFER: culprits, **{cause: one[0] for cause, one in stand_out.items()}},
            {TRANSFER: told, **{c: _with_moved(_evidence(s.signs), crossed) for c, s in shares}},
            {cause: one[1] for cause, one in stand_out.items()},
        )


def _sent(transfers: Transfers) -> dict[int, tuple[float, float | None]]:
    """What the job sent from each node: at least (one ring over the nodes), and at most (each rank
    sends to another node); None when the size of some operations is not known."""
    least: dict[int, float] = {}
    unknown: set[int] = set()
    for cell in transfers.cells:
        if len(cell.nodes) < 2:
            continue
        size = cell.moved_bytes
        for node in cell.nodes:
            if size is None:
                unknown.add(node)
            least[node] = least.get(node, 0.0) + (size or 0.0) * cell.operations
    ranks = np.bincount(transfers.node)
    return {
        node: (sent, None if node in unknown else sent * int(ranks[node]))
        for node, sent in least.items()
    }


def _asked(links: NodeLinks) -> Partial:
    """Which causes the counters of a rank's node can tell."""
    asked, missing = {TRANSFER: 1}, {}
    for cause, names in ASKED.items():
        seen = bool(links.network.devices(*names))
        if cause == PATH.id:
            seen = links.bytes_per_second is not None
        if seen:
            asked[cause] = 1
        else:
            missing[cause, names[0]] = 1
    return Partial(asked=asked, missing=missing)


def _steps(nodes: Sequence[NodeResult]) -> float:
    """How many steps a rank took, in the mean."""
    steps = [one.ledger.steps for node in nodes for one in node.books]
    return sum(steps) / len(steps) if steps else 0.0


def _worded(found: Split, flow: Sequence[Evidence]) -> dict[str, Cause]:
    judged = found.expected_ns + found.beyond_ns
    if not judged:
        return {}
    if found.beyond_ns > _MUCH_RATIO * judged:
        return {TRANSFER: BEYOND}
    if found.by_rate:
        return {TRANSFER: AT_RATE}
    return {TRANSFER: AT_SLOW_PACE if slow_within(flow) else AT_PACE}


def _transfer_evidence(
    found: Split, links: Mapping[int, NodeLinks], in_step_ns: int
) -> tuple[Evidence, ...]:
    out = []
    if found.expected_ns + found.beyond_ns and in_step_ns:
        how = "at the rate of the links" if found.by_rate else "as fast as the fastest tenth"
        part = found.expected_ns / in_step_ns
        note = f"of the time in steps: what these transfers take {how}"
        out.append(Evidence("network.expected_ratio", part, "ratio", note))
        part = found.beyond_ns / in_step_ns
        note = "of the time in steps: beyond that, for a reason that no counter shows"
        out.append(Evidence("network.beyond_ratio", part, "ratio", note))
    for one in links.values():
        full = receiver_limited(one)
        if full is not None:
            note = (
                "of the sending time the receiver's window was full (its process is slow, or the"
                f" window small for the round trip): {one.name}"
            )
            out.append(Evidence("tcp.receiver_limited_ratio", full, "ratio", note))
            break
    trips = [(least, rtt, one.name) for one in links.values() for rtt, least, _ in [round_trip(one)]
             if least is not None and rtt is not None]  # fmt: skip
    if trips:
        least, rtt, name = max(trips)
        note = f"the shortest round trip from {name}, {human(rtt, 'ns')} in the middle"
        out.append(Evidence(LEAST_RTT, least, "ns", note))
    out += _evidence(found.left)[:1]
    return tuple(out)


def _far(links: Mapping[int, NodeLinks]) -> tuple[Culprit, ...]:
    """The nodes to which the way is longer than to the others."""
    trips = {number: round_trip(one)[1] for number, one in links.items()}
    known = {number: trip for number, trip in trips.items() if trip is not None}
    return tuple(_culprit(links[n], links[n].used[0]) for n in standing_out(known))


def _with_moved(signs: Sequence[Evidence], crossed: Sequence[Evidence]) -> tuple[Evidence, ...]:
    """The strongest sign, then what moved and how fast, then the other signs."""
    return (*signs[:1], *crossed, *signs[1:_MOST_EVIDENCE])


def _standing_out(
    share: Share, links: Mapping[int, NodeLinks], loose: Mapping[int, Sequence[Sign]]
) -> tuple[tuple[Culprit, ...], Beside | None]:
    """The nodes whose numbers stand out from the others' in what speaks for a cause, and the first
    such number beside that of the other nodes."""
    found: dict[int, str] = {}
    beside: Beside | None = None
    for kind, name in dict.fromkeys((sign.kind, sign.evidence.name) for sign in share.signs):
        of_node: dict[int, Sign] = {}
        seen = [*share.signs, *(sign for signs in loose.values() for sign in signs)]
        for sign in seen:
            if (sign.kind, sign.evidence.name) == (kind, name):
                best = of_node.get(sign.node)
                of_node[sign.node] = sign if best is None else max(best, sign, key=_strength)
        strengths = {n: of_node[n].strength if n in of_node else 0.0 for n in links}
        guilty = standing_out(strengths)
        for node in guilty:
            found.setdefault(node, of_node[node].device)
        beside = beside or _beside(name, guilty, of_node, links)
    return tuple(_culprit(links[node], device) for node, device in found.items()), beside


def _beside(
    name: str,
    guilty: Sequence[int],
    of_node: Mapping[int, Sign],
    links: Mapping[int, NodeLinks],
) -> Beside | None:
    """A number of the nodes that stand out, and of those others on which it was read."""
    healthy = [
        of_node[n].evidence.value if n in of_node else 0.0
        for n in links
        if n not in guilty and (n in of_node or links[n].network.devices(name))
    ]
    if not guilty or not healthy:
        return None
    values = [of_node[node].evidence.value for node in guilty]
    item = of_node[guilty[0]].evidence
    note = item.note.rpartition(": ")[0]
    return Beside(
        name, item.unit, median_low(values), median_low(healthy), len(healthy), "node", note
    )


def _strength(sign: Sign) -> float:
    return sign.strength


def _culprit(links: NodeLinks, device: str) -> Culprit:
    return Culprit(links.name, None, "", device)


def _evidence(signs: Sequence[Sign]) -> tuple[Evidence, ...]:
    """Of each number the strongest."""
    best: dict[str, Sign] = {}
    for sign in signs:
        name = sign.evidence.name
        best[name] = max(best.get(name, sign), sign, key=_strength)
    return tuple(sign.evidence for sign in best.values())
