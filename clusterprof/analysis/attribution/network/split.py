"""Split transfer time into what transfers need and what a network fault took beyond that.

    |======== transfer 100 ========|
    expected 30 |==== excess 70 ===|     at the rate of the links, or the fastest tenth
                 retransmits 0.4 %       net-link 70, net-transfer 30
                 no symptom              net-transfer 100, 70 of it beyond what it needs

Evaluated for the operations of each set of nodes: only the counters of these nodes are
evidence, and an excess without a visible reason stays `net-transfer`. The parts of each
rank add up exactly, and none of it is ever blamed on a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

import numpy as np

from clusterprof.analysis.attribution.network.counters import (
    CAUSE_BY_KIND,
    FAULT,
    LOSS,
    QUEUE,
    RTT,
    NodeLinks,
    Symptom,
    check_loss_limit,
    find_symptoms,
    get_round_trip,
)
from clusterprof.analysis.attribution.network.transfer_time import (
    ALL_GATHER,
    TransferCell,
    TransferTotals,
)
from clusterprof.analysis.attribution.wait_for.arrivals import is_point_to_point
from clusterprof.analysis.detectors.cross_rank import LINK, PATH, TRANSFER
from clusterprof.analysis.timeline.model import Int
from clusterprof.report.model import Evidence, EvidenceSign

NodeSet = frozenset[int]
BenchmarkRows = Sequence[Sequence[int]]
_MIN_RATE_RATIO = 1.05
"""Rates whose ratio is smaller count as equal."""


@dataclass(frozen=True, slots=True)
class CauseShare:
    """Time allocated to one cause, and the symptoms that support it."""

    ns: Int
    """int64[ranks], ns."""
    symptoms: tuple[Symptom, ...]


@dataclass(frozen=True, slots=True)
class TransferSplit:
    """The transfer time of all ranks, split by cause."""

    shares: Mapping[str, CauseShare]
    """By cause; without what stays `net-transfer`."""
    expected_ns: int
    """Part of what stays that the transfers need."""
    excess_ns: int
    """Part of what stays beyond that. Transfers without an expected duration are in neither."""
    by_rate: bool
    """True if the rates of links determined most of the expected time, False if the run's own
    fastest transfers did.
    """
    message_excess_ns: Int
    """int64[ranks]: excess of small messages between two ranks, ns, in none of these. No counter
    shows that data were on their way: the receiver may have waited for its peer.
    """
    unused_symptoms: tuple[Symptom, ...]
    """Symptoms to which no time was allocated, because there was little or no excess."""


def split_transfer_time(
    transfers: TransferTotals,
    links: Mapping[int, NodeLinks],
    limits: Mapping[str, Any],
    benchmark: BenchmarkRows = (),
) -> TransferSplit:
    """Split the time of `transfers` by cause; `links` by node, unknown nodes left out.

    benchmark: operation, bytes and ns measured by a benchmark of the same network;
    determines the expected time where no rate is known.
    """
    return _Splitter(transfers, links, limits, benchmark).split()


def _sum_per_set(ns_of_ranks: Mapping[NodeSet, Int]) -> dict[NodeSet, int]:
    """Sum over ranks: ns by set of nodes; ns_of_ranks: int64[ranks] for each set."""
    return {nodes: int(ns.sum()) for nodes, ns in ns_of_ranks.items()}


class _Splitter:
    def __init__(
        self,
        transfers: TransferTotals,
        links: Mapping[int, NodeLinks],
        limits: Mapping[str, Any],
        benchmark: BenchmarkRows,
    ) -> None:
        self._transfers, self._links, self._limits = transfers, links, limits
        self._tested = benchmark
        self._symptoms = {
            node: find_symptoms(node_links, limits) for node, node_links in links.items()
        }
        self._best = transfers.find_expected_ns()
        self._ranks = np.bincount(transfers.node)
        # Sums, as each set of nodes has a row of all ranks: 0.1 GB for 1,250 nodes.
        self._transfer_ns = _sum_per_set(
            transfers.compute_excess_ns(dict.fromkeys(range(len(transfers.cells)), 0.0))
        )
        self._allocated: dict[str, Int] = {}
        self._used_symptoms: dict[str, dict[Symptom, None]] = {}

    def split(self) -> TransferSplit:
        """Process all sets of nodes."""
        sets = sorted(self._transfer_ns, key=sorted)
        rates = {nodes: self._find_rate(nodes) for nodes in sets}
        possible = {nodes: self._find_possible_rate(nodes, rates[nodes]) for nodes in sets}
        expected = self._compute_expected(rates)
        excess = self._transfers.compute_excess_ns(expected)
        possible_excess = self._transfers.compute_excess_ns(self._compute_expected(possible))
        unexplained_ns = sum(int(ns.sum()) for ns in excess.values())
        messages = self._compute_message_excess(expected)
        message_ns = np.zeros(self._transfers.node.size, np.int64)
        for nodes in sets:
            self._allocate_slow_link(
                nodes, rates[nodes], possible[nodes], possible_excess[nodes] - excess[nodes]
            )
            explained_ns = self._allocate_fault(nodes, rates[nodes], excess[nodes])
            unexplained_ns -= explained_ns
            if not explained_ns and rates[nodes] == possible[nodes]:
                message_ns += messages[nodes]
        del excess, possible_excess
        excess_ns = _sum_per_set(self._transfers.compute_excess_ns(dict.fromkeys(expected, 0.0)))
        total_ns = sum(excess_ns.values())
        allocated_ns = sum(int(ns.sum()) for ns in self._allocated.values())
        rated = sum(excess_ns[nodes] for nodes in sets if rates[nodes])
        left_ns = max(0, total_ns - allocated_ns)
        unexplained_ns = max(0, min(unexplained_ns, left_ns))
        used_symptoms = {sign for signs in self._used_symptoms.values() for sign in signs}
        unused = [
            s
            for node in sorted(self._symptoms)
            for s in self._symptoms[node]
            if s not in used_symptoms
        ]
        return TransferSplit(
            {
                cause: CauseShare(ns, tuple(self._used_symptoms[cause]))
                for cause, ns in self._allocated.items()
            },
            left_ns - unexplained_ns,
            max(0, unexplained_ns - int(message_ns.sum())),
            2 * rated > total_ns,
            message_ns,
            tuple(sorted(unused, key=lambda sign: sign.kind)),
        )

    def _find_rate(self, nodes: NodeSet) -> float | None:
        """Return the rate of the slowest node's links in use, bytes per second; None if one is
        unknown.
        """
        rates = [self._links[n].bytes_per_second if n in self._links else None for n in nodes]
        known_rates = [rate for rate in rates if rate is not None]
        return min(known_rates) if len(nodes) > 1 and len(known_rates) == len(rates) else None

    def _find_possible_rate(self, nodes: NodeSet, rate: float | None) -> float | None:
        """Return the rate with idle faster links in use, and with all links as fast as their
        peers.
        """
        if rate is None:
            return None
        of_job = [
            links.bytes_per_second for links in self._links.values() if links.bytes_per_second
        ]
        usual, limit = median_high(of_job), self._limits[LINK.id].rate_at_most_ratio
        rates = []
        for node in nodes:
            own_rate = self._links[node].bytes_per_second or 0.0
            faster = self._links[node].faster
            rates.append(
                max(
                    own_rate,
                    faster[1] if faster else 0.0,
                    usual if own_rate <= limit * usual else 0,
                )
            )
        return min(rates)

    def _compute_expected(self, rates: Mapping[NodeSet, float | None]) -> dict[int, float]:
        expected = {}
        for number, cell in enumerate(self._transfers.cells):
            ns = self._compute_expected_of_cell(number, cell, rates[cell.nodes])
            if ns is not None:
                expected[number] = ns
        return expected

    def _compute_message_excess(self, expected: Mapping[int, float]) -> dict[NodeSet, Int]:
        """Compute the excess of small messages between two ranks, int64[ranks], ns."""
        limit = self._limits[TRANSFER.id].small_at_most_bytes
        cells = self._transfers.cells
        small = {
            number: ns
            for number, ns in expected.items()
            if is_point_to_point(np.array([cells[number].operation]))[0]
            and (size := cells[number].transferred_bytes) is not None
            and size <= limit
        }
        return self._transfers.compute_excess_ns(small)

    def _compute_expected_of_cell(
        self, number: int, cell: TransferCell, rate: float | None
    ) -> float | None:
        best_ns, size = self._best[number], cell.transferred_bytes
        if rate is None or size is None:
            benchmark_ns = estimate_benchmark_ns(cell, self._tested)
            return min((ns for ns in (benchmark_ns, best_ns) if ns is not None), default=None)
        # Process groups with only some of a node's ranks share its links with the others.
        on_node = max(int(self._ranks[node]) for node in cell.nodes)
        part = min(1.0, cell.members / len(cell.nodes) / on_node)
        ns = size / (rate * part) * 1e9
        if size > self._limits[TRANSFER.id].small_at_most_bytes:
            return ns
        return None if best_ns is None else max(ns, best_ns)

    def _allocate_slow_link(
        self, nodes: NodeSet, rate: float | None, possible_rate: float | None, ns: Int
    ) -> None:
        """Allocate what a faster link would have saved: an idle one, or one like those of the
        peers.
        """
        if rate is None or possible_rate is None or possible_rate < _MIN_RATE_RATIO * rate:
            return
        limiting = [n for n in sorted(nodes) if self._links[n].bytes_per_second == rate]
        wrong = [n for n in limiting if self._links[n].faster is not None]
        cause = PATH.id if wrong else LINK.id
        symptoms = [_make_rate_symptom(self._links[n], possible_rate) for n in wrong or limiting]
        self._allocate(cause, ns, symptoms)

    def _allocate_fault(self, nodes: NodeSet, rate: float | None, excess_ns: Int) -> int:
        """Allocate the excess to the first fault with a symptom; return how much was allocated."""
        symptoms = [sign for node in sorted(nodes) for sign in self._symptoms.get(node, ())]
        if len(nodes) < 2 or not symptoms:
            return 0
        kind = min(sign.kind for sign in symptoms)
        transfer_ns = self._transfer_ns[nodes]
        allocated_ns = excess_ns
        symptoms = [sign for sign in symptoms if sign.kind == kind]
        if kind == LOSS and rate is None and (slow := self._find_loss_limits(nodes)):
            allocated_ns = np.maximum(excess_ns, self._compute_excess_of_round_trips(nodes))
            symptoms += slow
        limits = self._limits[TRANSFER.id]
        least = limits.beyond_at_least_ratio
        if rate is None and allocated_ns is excess_ns and self._is_ambiguous(kind, symptoms):
            least = limits.unsure_at_least_ratio
        if allocated_ns.sum() < least * transfer_ns:
            return 0
        self._allocate(CAUSE_BY_KIND[kind], allocated_ns, symptoms)
        return int(excess_ns.sum())

    def _is_ambiguous(self, kind: int, signs: Sequence[Symptom]) -> bool:
        """Return whether a path that is merely full all the time would show these symptoms too."""
        if kind == LOSS:
            return all(get_round_trip(self._links[sign.node])[0] is None for sign in signs)
        return kind == QUEUE and all(sign.evidence.name == RTT for sign in signs)

    def _allocate(self, cause: str, ns: Int, symptoms: Sequence[Symptom]) -> None:
        if not ns.any():
            return
        self._allocated[cause] = self._allocated.get(cause, 0) + ns
        self._used_symptoms.setdefault(cause, {}).update(dict.fromkeys(symptoms))

    def _find_loss_limits(self, nodes: NodeSet) -> list[Symptom]:
        """Return symptoms that the transfers of these nodes are as fast as their packet loss
        permits.
        """
        cells_of_nodes = [
            c for c in self._transfers.cells if c.nodes == nodes and c.transferred_bytes is not None
        ]
        sent = sum(
            (cell.transferred_bytes or 0.0) * cell.operations * cell.members
            for cell in cells_of_nodes
        )
        transfer_ns = self._transfer_ns[nodes]
        if not sent or not transfer_ns:
            return []
        links = (self._links[node] for node in sorted(nodes) if node in self._links)
        symptoms = (check_loss_limit(node_links, sent / transfer_ns * 1e9) for node_links in links)
        return [sign for sign in symptoms if sign is not None]

    def _compute_excess_of_round_trips(self, nodes: NodeSet) -> Int:
        """Return the excess over the round trips of a ring, for links of any rate."""
        round_trips = [
            get_round_trip(self._links[node])[1] for node in nodes if node in self._links
        ]
        rtt = max((rtt_ns for rtt_ns in round_trips if rtt_ns is not None), default=0.0)
        expected = {
            number: (cell.members - 1) * rtt
            for number, cell in enumerate(self._transfers.cells)
            if cell.nodes == nodes
        }
        return self._transfers.compute_excess_ns(expected)[nodes]


def estimate_benchmark_ns(cell: TransferCell, benchmark: BenchmarkRows) -> float | None:
    """Estimate from a benchmark how long operations of a cell take, ns; None = unknown.

    Linear between two sizes; beyond the largest at its rate. Of operations that overlap
    with computation only a part is waited for, which a benchmark does not measure.
    """
    rows = sorted((size, ns) for kind, size, ns in benchmark if kind == cell.operation and size > 0)
    if not rows or cell.size_class < 0 or not cell.operations or cell.overlapped:
        return None
    size = cell.bytes / cell.operations
    if cell.operation == ALL_GATHER:
        size *= cell.members  # benchmark tables count output bytes
    sizes, times = (np.array(column, np.float64) for column in zip(*rows))
    if size > sizes[-1]:
        return float(times[-1] * size / sizes[-1])
    return float(np.interp(size, sizes, times))


def _make_rate_symptom(links: NodeLinks, possible_rate: float) -> Symptom:
    rate = links.bytes_per_second or 0.0
    device = ", ".join(links.used)
    sign: EvidenceSign = ""
    idle = ""
    if links.faster is not None:
        sign, idle = "faster-device-idle", links.faster[0]
        note = f"carried the traffic while {idle} was idle and is faster"
    else:
        note = "is less than the rate of the same links of other nodes"
    name = f"{'rdma' if links.kind == 'hca' else 'network'}.link_bytes_per_second"
    where = f"{note}: {device} of {links.name}"
    item = Evidence(name, rate, "bytes/s", where, sign=sign, device=idle)
    return Symptom(FAULT, links.node, device, possible_rate / rate, item, note)


def make_zero_limits(limits: Mapping[str, Any]) -> dict[str, Any]:
    """Return limits that every number above 0 exceeds.

    They serve to compare nodes by numbers below their limits.
    """
    out: dict[str, Any] = {}
    for id_ in CAUSE_BY_KIND.values():
        zero = {field.name: 0.0 for field in dataclasses.fields(limits[id_])}
        out[id_] = dataclasses.replace(limits[id_], **zero)
    return out


def find_outlier_nodes(strengths: Mapping[int, float]) -> list[int]:
    """Find the nodes with at least twice the strength of the median node, strongest first.

    Empty if all are similar. Of two nodes the median is the smaller.
    """
    ordered = sorted(strengths.values())
    if len(ordered) < 2:
        return []
    middle = ordered[(len(ordered) - 1) // 2]
    outliers = [n for n, value in strengths.items() if value > 0 and value >= 2 * middle]
    if len(outliers) == len(ordered):
        return []
    return sorted(outliers, key=lambda node: (-strengths[node], node))
