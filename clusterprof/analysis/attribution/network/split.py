"""Share the time in transfers out: what they need, and what a fault of the network took beyond.

    |======== transfer 100 ========|
    expected 30 |==== beyond 70 ===|     at the rate of the links, or the fastest tenth
                 retransmits 0.4 %       net-link 70, net-transfer 30
                 no sign                 net-transfer 100, of which 70 beyond what it needs

Asked for the operations of each set of nodes: only what their own counters say speaks about them,
and what is beyond for no reason that shows stays where it was. Every rank's parts add up to the
nanosecond, and nothing of it is ever charged to a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

import numpy as np

from clusterprof.attribution.blame_transfer import ALL_GATHER, Cell, Transfers
from clusterprof.attribution.net_links import RTT, NodeLinks
from clusterprof.attribution.net_signs import (
    CAUSE_OF,
    FAULT,
    LOSS,
    QUEUE,
    Sign,
    limited_by_loss,
    round_trip,
    signs_of,
)
from clusterprof.detectors.network import LINK, PATH, TRANSFER
from clusterprof.findings import Evidence
from clusterprof.timeline.model import Int

Nodes = frozenset[int]
Tested = Sequence[Sequence[int]]
_SURE_RATIO = 1.05
"""Rates that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class Share:
    """What went to one cause, and what speaks for it."""

    ns: Int
    """int64[ranks]."""
    signs: tuple[Sign, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """The time in transfers of all ranks, shared out."""

    shares: Mapping[str, Share]
    """By cause; without what stays `net-transfer`."""
    expected_ns: int
    """Of what stays: as much as the transfers need."""
    beyond_ns: int
    """Of what stays: beyond that. What nothing could be expected of is in neither."""
    by_rate: bool
    """True when the rates of links said what most of it needs, False where its own record did."""
    left: tuple[Sign, ...]
    """Signs for which nothing was given, because little or nothing was beyond."""


def split(
    transfers: Transfers,
    links: Mapping[int, NodeLinks],
    limits: Mapping[str, Any],
    tested: Tested = (),
) -> Split:
    """Share out what `transfers` hold; `links` by node, those that are not known left out.

    `tested`: operation, bytes and ns of what a benchmark of the same network took; it says what is
    expected where no rate is known.
    """
    return _Splitter(transfers, links, limits, tested).split()


class _Splitter:
    def __init__(
        self,
        transfers: Transfers,
        links: Mapping[int, NodeLinks],
        limits: Mapping[str, Any],
        tested: Tested,
    ) -> None:
        self._transfers, self._links, self._limits = transfers, links, limits
        self._tested = tested
        self._signs = {node: signs_of(one, limits) for node, one in links.items()}
        self._best = transfers.best_ns()
        self._ranks = np.bincount(transfers.node)
        self._felt = transfers.beyond_ns(dict.fromkeys(range(len(transfers.cells)), 0.0))
        self._given: dict[str, Int] = {}
        self._said: dict[str, dict[Sign, None]] = {}

    def split(self) -> Split:
        """Go over all sets of nodes."""
        sets = sorted(self._felt, key=sorted)
        now = {nodes: self._rate(nodes) for nodes in sets}
        due = {nodes: self._due(nodes, now[nodes]) for nodes in sets}
        expected = self._expected(now)
        beyond = self._transfers.beyond_ns(expected)
        more = self._transfers.beyond_ns(self._expected(due))
        open_ns = sum(int(ns.sum()) for ns in beyond.values())
        for nodes in sets:
            self._slow_link(nodes, now[nodes], due[nodes], more[nodes] - beyond[nodes])
            open_ns -= self._faulty(nodes, now[nodes], beyond[nodes])
        known = self._transfers.beyond_ns(dict.fromkeys(expected, 0.0))
        whole = sum(int(ns.sum()) for ns in known.values())
        gone = sum(int(ns.sum()) for ns in self._given.values())
        rated = sum(int(known[nodes].sum()) for nodes in sets if now[nodes])
        left_ns = max(0, whole - gone)
        open_ns = max(0, min(open_ns, left_ns))
        used = {sign for signs in self._said.values() for sign in signs}
        left = [s for node in sorted(self._signs) for s in self._signs[node] if s not in used]
        return Split(
            {cause: Share(ns, tuple(self._said[cause])) for cause, ns in self._given.items()},
            left_ns - open_ns, open_ns, 2 * rated > whole,
            tuple(sorted(left, key=lambda sign: sign.kind)),
        )  # fmt: skip

    def _rate(self, nodes: Nodes) -> float | None:
        """The rate of the slowest node's links in use; None when one is not known."""
        found = [self._links[n].bytes_per_second if n in self._links else None for n in nodes]
        known = [one for one in found if one is not None]
        return min(known) if len(nodes) > 1 and len(known) == len(found) else None

    def _due(self, nodes: Nodes, now: float | None) -> float | None:
        """The rate there would be over idle faster links, and were all links like their peers."""
        if now is None:
            return None
        of_job = [one.bytes_per_second for one in self._links.values() if one.bytes_per_second]
        usual, limit = median_high(of_job), self._limits[LINK.id].rate_at_most_ratio
        rates = []
        for node in nodes:
            own = self._links[node].bytes_per_second or 0.0
            faster = self._links[node].faster
            rates.append(
                max(own, faster[1] if faster else 0.0, usual if own <= limit * usual else 0)
            )
        return min(rates)

    def _expected(self, rates: Mapping[Nodes, float | None]) -> dict[int, float]:
        found = {}
        for number, cell in enumerate(self._transfers.cells):
            ns = self._of_cell(number, cell, rates[cell.nodes])
            if ns is not None:
                found[number] = ns
        return found

    def _of_cell(self, number: int, cell: Cell, rate: float | None) -> float | None:
        best, size = self._best[number], cell.moved_bytes
        if rate is None or size is None:
            took = benchmark_ns(cell, self._tested)
            return best if took is None else took if best is None else min(took, best)
        # Teams with some of a node's ranks share its links with those of the others.
        on_node = max(int(self._ranks[node]) for node in cell.nodes)
        part = min(1.0, cell.members / len(cell.nodes) / on_node)
        ns = size / (rate * part) * 1e9
        if size > self._limits[TRANSFER.id].small_at_most_bytes:
            return ns
        return None if best is None else max(ns, best)

    def _slow_link(self, nodes: Nodes, now: float | None, due: float | None, ns: Int) -> None:
        """What a faster link would have saved: one that is idle, or one like those of the peers."""
        if now is None or due is None or due < _SURE_RATIO * now:
            return
        binding = [n for n in sorted(nodes) if self._links[n].bytes_per_second == now]
        wrong = [n for n in binding if self._links[n].faster is not None]
        cause = PATH.id if wrong else LINK.id
        signs = [_rate_sign(self._links[n], due) for n in wrong or binding]
        self._take(cause, ns, signs)

    def _faulty(self, nodes: Nodes, now: float | None, beyond: Int) -> int:
        """Give what is beyond to the first fault that shows; return how much that was."""
        signs = [sign for node in sorted(nodes) for sign in self._signs.get(node, ())]
        if len(nodes) < 2 or not signs:
            return 0
        kind = min(sign.kind for sign in signs)
        felt = self._felt[nodes]
        given = beyond
        signs = [sign for sign in signs if sign.kind == kind]
        if kind == LOSS and now is None and (slow := self._slow_by_loss(nodes)):
            given = np.maximum(beyond, self._beyond_round_trips(nodes))
            signs += slow
        limits = self._limits[TRANSFER.id]
        least = limits.beyond_at_least_ratio
        if now is None and given is beyond and self._unsure(kind, signs):
            least = limits.unsure_at_least_ratio
        if given.sum() < least * felt.sum():
            return 0
        self._take(CAUSE_OF[kind], given, signs)
        return int(beyond.sum())

    def _unsure(self, kind: int, signs: Sequence[Sign]) -> bool:
        """True for signs that a path which is full all the time shows too."""
        if kind == LOSS:
            return all(round_trip(self._links[sign.node])[0] is None for sign in signs)
        return kind == QUEUE and all(sign.evidence.name == RTT for sign in signs)

    def _take(self, cause: str, ns: Int, signs: Sequence[Sign]) -> None:
        if not ns.any():
            return
        self._given[cause] = self._given.get(cause, 0) + ns
        self._said.setdefault(cause, {}).update(dict.fromkeys(signs))

    def _slow_by_loss(self, nodes: Nodes) -> list[Sign]:
        """Signs that what these nodes send goes as fast as its loss permits."""
        mine = [c for c in self._transfers.cells if c.nodes == nodes and c.moved_bytes is not None]
        sent = sum((cell.moved_bytes or 0.0) * cell.operations * cell.members for cell in mine)
        took = int(self._felt[nodes].sum())
        if not sent or not took:
            return []
        links = (self._links[node] for node in sorted(nodes) if node in self._links)
        found = (limited_by_loss(one, sent / took * 1e9) for one in links)
        return [sign for sign in found if sign is not None]

    def _beyond_round_trips(self, nodes: Nodes) -> Int:
        """What is beyond the round trips of a ring, whatever the rate of its links."""
        found = [round_trip(self._links[node])[1] for node in nodes if node in self._links]
        rtt = max((one for one in found if one is not None), default=0.0)
        expected = {
            number: (cell.members - 1) * rtt
            for number, cell in enumerate(self._transfers.cells)
            if cell.nodes == nodes
        }
        return self._transfers.beyond_ns(expected)[nodes]


def benchmark_ns(cell: Cell, tested: Tested) -> float | None:
    """Return what operations like those of a cell took in a benchmark; None where it has none.

    Between two sizes in proportion, beyond the largest at its rate. Of operations that overlap with
    computation only a part is waited for, and a benchmark says nothing of that.
    """
    rows = sorted((size, ns) for kind, size, ns in tested if kind == cell.operation and size > 0)
    if not rows or cell.size_class < 0 or not cell.operations or cell.overlapped:
        return None
    size = cell.bytes / cell.operations
    if cell.operation == ALL_GATHER:
        size *= cell.members  # its tables count what comes out
    sizes, times = (np.array(column, np.float64) for column in zip(*rows))
    if size > sizes[-1]:
        return float(times[-1] * size / sizes[-1])
    return float(np.interp(size, sizes, times))


def _rate_sign(links: NodeLinks, due: float) -> Sign:
    own = links.bytes_per_second or 0.0
    device = ", ".join(links.used)
    if links.faster is not None:
        note = f"carried the traffic, {links.faster[0]} was idle and is faster"
    else:
        note = "is less than the same links of other nodes have"
    name = f"{'rdma' if links.kind == 'hca' else 'network'}.link_bytes_per_second"
    item = Evidence(name, own, "bytes/s", f"{note}: {device} of {links.name}")
    return Sign(FAULT, links.node, device, due / own, item)


def loosest(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return limits that every number above 0 exceeds, to compare nodes by what is below them."""
    out: dict[str, Any] = {}
    for id_ in CAUSE_OF.values():
        zero = {one.name: 0.0 for one in dataclasses.fields(limits[id_])}
        out[id_] = dataclasses.replace(limits[id_], **zero)
    return out


def standing_out(strengths: Mapping[int, float]) -> list[int]:
    """Return the nodes with at least twice the strength of the middle one, most first.

    Empty when all look alike. Of two nodes the middle one is the lesser.
    """
    ordered = sorted(strengths.values())
    if len(ordered) < 2:
        return []
    middle = ordered[(len(ordered) - 1) // 2]
    found = [n for n, value in strengths.items() if value > 0 and value >= 2 * middle]
    if len(found) == len(ordered):
        return []
    return sorted(found, key=lambda node: (-strengths[node], node))
