"""Attribute the time in transfers to causes that the network counters show.

It also describes the traffic between ranks: bytes and operations per rank, rate, and transport.

    10 all-reduces of 4 MiB, 4 ranks    each rank sends 2 * 3/4 * 4 MiB = 6 MiB in one
    80 ms each                          75 MiB/s: 63 % of a link of 1 Gb/s
    the fastest tenth took 60 ms        100 MiB/s where the rate of the link is unknown

Within a node the rate of no link is known; the rate of operations of a mebibyte and
more is compared with the least that sockets of one machine reach, as every other path
there (shared memory, PCIe, NVLink) is faster. A link of unknown rate is reported as
unknown.

No rate is given for operations that overlap with computation: a rank waits for a part
of them only. Nor for messages between two ranks, because one of the two waits.

It also finds jobs whose network shows a fault, for jobs whose operations were not marked.

What all ranks of these jobs wait equally long is attributed to the network; in other
jobs nothing distinguishes it from other sleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

import numpy as np

from clusterprof.analysis.attribution.accumulator import Accumulator
from clusterprof.analysis.attribution.network.counters import (
    HCA,
    MIN_RTT,
    NIC,
    REQUIRED_SIGNALS,
    NodeLinks,
    Symptom,
    compute_receiver_limit_ratio,
    find_node_links,
    find_symptoms,
    get_round_trip,
)
from clusterprof.analysis.attribution.network.split import (
    CauseShare,
    TransferSplit,
    find_outlier_nodes,
    make_zero_limits,
    split_transfer_time,
)
from clusterprof.analysis.attribution.network.transfer_time import TransferCell, TransferTotals
from clusterprof.analysis.attribution.wait_for.arrivals import is_point_to_point
from clusterprof.analysis.attribution.wait_for.blame import TRANSFER, list_causes
from clusterprof.analysis.detectors.cross_rank import (
    PATH,
    TRANSFER_AT_LINK_RATE,
    TRANSFER_EXCESS,
    TRANSFER_STEADY,
    TRANSFER_STEADY_SLOW,
)
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.timeline.model import Int
from clusterprof.report.model import Cause, Culprit, Evidence, Finding, PeerComparison
from clusterprof.units import format_quantity

BYTES_METRIC, RATE_METRIC, COUNT_METRIC = (
    "network.moved_bytes",
    "network.bytes_per_second",
    "network.operations_count",
)
FLOW_METRICS = BYTES_METRIC, RATE_METRIC, COUNT_METRIC
"""Metrics shown for every network cause; the others serve the advice about transfers."""
SIZE_METRIC, PER_STEP_METRIC, PATH_RATIO_METRIC = (
    "network.operation_bytes",
    "network.operations_per_step_count",
    "network.path_ratio",
)
WITHIN_NODE_BYTES_PER_SECOND = 1 << 30
"""Lowest rate between two processes of one machine: through sockets, the slowest path.

Several streams at a time, on machines of 2016 and later.
"""
LARGE_BYTES = 1 << 20
"""Smallest mean size (bytes) of operations whose rate says something about the path.

Smaller operations take round trips rather than a rate.
"""
SLOW_RATIO = 0.25
"""Part of the path's lowest rate below which a rate is slow, however steady."""
_MIN_CONFIRMED_RATIO = 0.5  # of the bytes the job sent: least that confirms
_HARDLY_FASTER_FACTOR = 1.1  # durations are counted in classes that are 9 % wide
_Cells = Sequence[tuple[int, TransferCell]]


def build_flow_evidence(
    transfers: TransferTotals,
    links: Mapping[int, NodeLinks],
    between_nodes: bool = False,
    steps: float = 0.0,
) -> tuple[Evidence, ...]:
    """Return evidence of how many bytes each rank sent, and at which rate.

    links: links by number of the node. between_nodes: of operations between nodes only.
    steps: mean steps of a rank; 0 = unknown. Empty where there was no operation.
    """
    cells = [
        (number, cell)
        for number, cell in enumerate(transfers.cells)
        if cell.operations and (len(cell.nodes) > 1 or not between_nodes)
    ]
    if not cells:
        return ()
    over = describe_transport(cells, links)
    cells_with_bytes = [
        (number, cell) for number, cell in cells if cell.transferred_bytes is not None
    ]
    nodes = {node for _, cell in cells for node in cell.nodes}
    ranks = sum(int(np.count_nonzero(transfers.node == node)) for node in nodes)
    count = sum(
        cell.operations * _count_senders(cell) for _, cell in cells_with_bytes or cells
    ) / max(ranks, 1)
    if not cells_with_bytes:
        note = f"operations of each rank, of unknown size{over}"
        return (Evidence(COUNT_METRIC, count, "count", note),)
    sent_bytes = sum(_sum_sent_bytes(cell) for _, cell in cells_with_bytes) / max(ranks, 1)
    mean = format_quantity(sent_bytes / count, "bytes") if count else "nothing"
    note = f"sent by each rank in {count:,.0f} operations of {mean}{over}"
    rate = _build_rate_evidence(transfers, cells_with_bytes, links)
    return (
        Evidence(BYTES_METRIC, sent_bytes, "bytes", note),
        *rate[:1],
        *_build_size_evidence(sent_bytes, count, steps),
        *rate[1:],
    )


def _build_size_evidence(sent: float, count: float, steps: float) -> tuple[Evidence, ...]:
    """Return evidence of the mean size of operations and their number per step."""
    if not count:
        return ()
    size = Evidence(
        SIZE_METRIC, sent / count, "bytes", "sent by a rank in one operation, on average"
    )
    if not steps:
        return (size,)
    return size, Evidence(PER_STEP_METRIC, count / steps, "count", "operations of a rank in a step")


def _count_senders(cell: TransferCell) -> int:
    """Count the sending ranks of an operation: one for a message, else all members."""
    return 1 if _is_point_to_point(cell) else cell.members


def _is_point_to_point(cell: TransferCell) -> bool:
    return bool(is_point_to_point(np.array([cell.operation]))[0])


def _sum_sent_bytes(cell: TransferCell) -> float:
    return (cell.transferred_bytes or 0.0) * cell.operations * _count_senders(cell)


def _build_rate_evidence(
    transfers: TransferTotals, cells_with_bytes: _Cells, links: Mapping[int, NodeLinks]
) -> tuple[Evidence, ...]:
    cell_ns, expected_ns = transfers.sum_cell_ns(), transfers.find_expected_ns()
    timed = [
        (number, cell)
        for number, cell in cells_with_bytes
        if not cell.overlapped and not _is_point_to_point(cell)
    ]
    timed = [(number, cell) for number, cell in timed if cell_ns[number] > 0 and cell.bytes > 0]
    if not timed:
        return ()
    ns = sum(int(cell_ns[number]) for number, _ in timed)
    rate = sum(_sum_sent_bytes(cell) for _, cell in timed) / ns * 1e9
    due = [_estimate_link_time_ns(transfers, cell, links) for _, cell in timed]
    if None not in due:
        slowest = min((links[n] for _, cell in timed for n in cell.nodes), key=_get_link_rate)
        part = sum(due_ns or 0.0 for due_ns in due) / ns
        share = (
            f"{format_quantity(part, 'ratio')} of the {format_gigabits(_get_link_rate(slowest))} of"
        )
        note = f"in transfer: {share} {', '.join(slowest.used)}"
        return (
            Evidence(RATE_METRIC, rate, "bytes/s", note),
            Evidence(PATH_RATIO_METRIC, part, "ratio", "achieved rate as a share of the link rate"),
        )
    fastest = _describe_fastest_tenth(rate, [(cell, expected_ns[number]) for number, cell in timed])
    if any(len(cell.nodes) > 1 for _, cell in timed):
        note = f"in transfer{fastest}; the rate of the links is not known"
        return (Evidence(RATE_METRIC, rate, "bytes/s", note),)
    count = sum(cell.operations * _count_senders(cell) for _, cell in timed)
    if sum(_sum_sent_bytes(cell) for _, cell in timed) < LARGE_BYTES * count:
        note = f"in transfer{fastest}; operations this small say little about the path"
        return (Evidence(RATE_METRIC, rate, "bytes/s", note),)
    part = rate / WITHIN_NODE_BYTES_PER_SECOND
    least = (
        f"the {format_quantity(WITHIN_NODE_BYTES_PER_SECOND, 'bytes/s')} that sockets"
        f" within a node reach"
    )
    note = f"in transfer{fastest}"
    if part < SLOW_RATIO:
        note = f"{format_quantity(part, 'ratio')} of {least} at least"
    path_note = f"of {least} at least; shared memory, PCIe and NVLink reach more"
    return Evidence(RATE_METRIC, rate, "bytes/s", note), Evidence(
        PATH_RATIO_METRIC, part, "ratio", path_note
    )


def _describe_fastest_tenth(rate: float, timed: Sequence[tuple[TransferCell, float | None]]) -> str:
    """Describe the rate of the fastest tenth of some operations."""
    fast = [(cell, best_ns) for cell, best_ns in timed if best_ns]
    if not fast:
        return ""
    span_ns = sum((best_ns or 0.0) * cell.operations * cell.members for cell, best_ns in fast)
    rate_of_fastest = sum(_sum_sent_bytes(cell) for cell, _ in fast) / span_ns * 1e9
    hardly = rate_of_fastest <= _HARDLY_FASTER_FACTOR * rate
    return (
        f"; the fastest tenth of them"
        f" {'hardly faster' if hardly else format_quantity(rate_of_fastest, 'bytes/s')}"
    )


def has_slow_path(evidence: Sequence[Evidence]) -> bool:
    """Return whether the reached rate is far below the path's lowest rate."""
    return any(item.name == PATH_RATIO_METRIC and item.value < SLOW_RATIO for item in evidence)


def _estimate_link_time_ns(
    transfers: TransferTotals, cell: TransferCell, links: Mapping[int, NodeLinks]
) -> float | None:
    """Estimate the time all ranks of a cell need at the rate of the slowest links.

    In ns; None where the rate of a link is not known, or all ranks are on one node.
    """
    speeds = [links[node].bytes_per_second if node in links else None for node in cell.nodes]
    if len(cell.nodes) < 2 or None in speeds:
        return None
    # Groups with some of a node's ranks share its links with those of the others.
    on_node = max(int(np.count_nonzero(transfers.node == node)) for node in cell.nodes)
    part = min(1.0, cell.members / len(cell.nodes) / on_node)
    return (
        _sum_sent_bytes(cell) / (min(speed for speed in speeds if speed is not None) * part) * 1e9
    )


def _get_link_rate(links: NodeLinks) -> float:
    return links.bytes_per_second or 0.0


def describe_transport(cells: _Cells, links: Mapping[int, NodeLinks]) -> str:
    """Describe which devices carried the operations, as far as counters show it; else "".

    Connections within one machine are not counted.
    """
    crossing = {node for _, cell in cells for node in cell.nodes if len(cell.nodes) > 1}
    if not crossing:
        return " within one node"
    confirmed = [
        links[n] for n in sorted(crossing) if n in links and _is_traffic_confirmed(links[n])
    ]
    carriers = []
    for kind, words in ((HCA, "RDMA by"), (NIC, "sockets of")):
        used = dict.fromkeys(
            device
            for node_links in confirmed
            if node_links.kind == kind
            for device in node_links.used
        )
        if used:
            carriers.append(f"{words} {', '.join(used)}")
    return f", over {' and '.join(carriers)}" if carriers else ""


def _is_traffic_confirmed(links: NodeLinks) -> bool:
    """Return whether the devices in use are known to have carried the job's traffic."""
    if links.by_sockets:
        return True
    counted_bytes = sum(links.get_bytes(device) for device in links.used)
    return links.job_min_bytes > 0 and counted_bytes >= _MIN_CONFIRMED_RATIO * links.job_min_bytes


def format_gigabits(bytes_per_second: float) -> str:
    """Format the rate of a link like its vendor: 1 Gb/s, 400 Gb/s."""
    return f"{bytes_per_second * 8 / 1e9:.3g} Gb/s"


_MAX_NETWORK_EVIDENCE = 3
_MIN_BEYOND_RATIO = 0.5
"""Part of the judged transfer time above which transfers take too long."""


@dataclass(frozen=True, slots=True)
class NetworkResult:
    """What the network counters show about the time in transfers."""

    shares: Mapping[str, CauseShare] = field(default_factory=dict)
    """Cause id -> its share of the transfer time, ns by rank."""
    checked: Sequence[Accumulator] = ()
    """Per rank: the causes that the counters of its node could have shown."""
    causes: Mapping[str, Cause] = field(default_factory=dict)
    """Wording of a cause in this recording, by id."""
    culprits: Mapping[str, tuple[Culprit, ...]] = field(default_factory=dict)
    evidence: Mapping[str, tuple[Evidence, ...]] = field(default_factory=dict)
    comparisons: Mapping[str, PeerComparison | None] = field(default_factory=dict)
    message_excess_ns: Int | None = None
    """int64[ranks]: transfer time in small messages for no known reason, ns; None = none."""

    def get_message_excess_ns(self, rank_index: int) -> int:
        """Return how much of a rank's transfer time in small messages has no known reason, ns."""
        return 0 if self.message_excess_ns is None else int(self.message_excess_ns[rank_index])

    def with_transfer_causes(self, rank_index: int, victim_ns: Mapping[str, int]) -> dict[str, int]:
        """Return a rank's waits (ns by cause) with its transfers split; the sum stays."""
        out = dict(victim_ns)
        for cause, share in self.shares.items():
            if ns := int(share.ns[rank_index]):
                out[cause] = ns
                out[TRANSFER] -= ns
        return {cause: ns for cause, ns in out.items() if ns}

    def with_network_evidence(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings, those about the network with wording and evidence of the
        counters."""
        return [
            replace(
                finding,
                cause=self.causes.get(finding.cause.id, finding.cause),
                culprits=self.culprits.get(finding.cause.id, finding.culprits),
                evidence=self.evidence.get(finding.cause.id, finding.evidence),
                peer_comparison=self.comparisons.get(finding.cause.id, finding.peer_comparison),
            )
            for finding in findings
        ]


def make_transfer_totals(nodes: Sequence[NodeResult], categories: Sequence[str]) -> TransferTotals:
    """Make the totals of the transfers between all ranks, without operations."""
    node_numbers = [number for number, node in enumerate(nodes) for _ in node.ranks]
    return TransferTotals(np.array(node_numbers, np.int64), list_causes(categories).index(TRANSFER))


class TransferObserver:
    """Attributes the time in the transfers of all ranks."""

    def __init__(
        self, nodes: Sequence[NodeResult], limits: Mapping[str, Any], transfers: TransferTotals
    ) -> None:
        """transfers: those of all operations, see make_transfer_totals."""
        self._nodes, self._limits = nodes, limits
        self._transfers = transfers

    def result(self) -> NetworkResult:
        """Return the causes of the transfer time, from all blocks and the counters of all nodes."""
        sent_bytes = _estimate_sent_bytes(self._transfers)
        links = {
            number: find_node_links(
                number,
                node.facts.name,
                node.network,
                node.loaded.header.host,
                sent_bytes.get(number, (0.0, None)),
                self._limits,
            )
            for number, node in enumerate(self._nodes)
        }
        hosts = [node.loaded.header.host for node in self._nodes]
        tested = next(
            (host["transfer_expected"] for host in hosts if "transfer_expected" in host), ()
        )
        transfer_split = split_transfer_time(self._transfers, links, self._limits, tested)
        loose_signs = {
            number: find_symptoms(node_links, make_zero_limits(self._limits))
            for number, node_links in links.items()
        }
        in_step_ns = sum(rank.ledger.in_step_ns for node in self._nodes for rank in node.ranks)
        shares = list(transfer_split.shares.items())
        transfer_evidence, culprits = (
            _build_transfer_evidence(transfer_split, links, in_step_ns),
            _find_distant_nodes(links),
        )
        flow_evidence = build_flow_evidence(
            self._transfers, links, steps=_compute_mean_steps(self._nodes)
        )
        transfer_evidence = (*flow_evidence, *transfer_evidence)
        outliers = {
            cause: _find_outlier_nodes(share, links, loose_signs) for cause, share in shares
        }
        crossed = build_flow_evidence(self._transfers, links, between_nodes=True)
        crossed = tuple(item for item in crossed if item.name in FLOW_METRICS)
        return NetworkResult(
            transfer_split.shares,
            [_build_checked_causes(links[number]) for number in self._transfers.node.tolist()],
            _choose_transfer_wording(transfer_split, flow_evidence),
            {TRANSFER: culprits, **{cause: outlier[0] for cause, outlier in outliers.items()}},
            {
                TRANSFER: transfer_evidence,
                **{
                    c: _join_evidence(_select_strongest_evidence(s.symptoms), crossed)
                    for c, s in shares
                },
            },
            {cause: outlier[1] for cause, outlier in outliers.items()},
            transfer_split.message_excess_ns,
        )


def _estimate_sent_bytes(transfers: TransferTotals) -> dict[int, tuple[float, float | None]]:
    """Estimate the bytes that the job sent from each node: at least, and at most.

    At least: one ring over the nodes. At most: each rank sends to another node; None when
    the size of some operations is not known.
    """
    least: dict[int, float] = {}
    unknown: set[int] = set()
    for cell in transfers.cells:
        if len(cell.nodes) < 2:
            continue
        size = cell.transferred_bytes
        for node in cell.nodes:
            if size is None:
                unknown.add(node)
            least[node] = least.get(node, 0.0) + (size or 0.0) * cell.operations
    ranks = np.bincount(transfers.node)
    return {
        node: (sent, None if node in unknown else sent * int(ranks[node]))
        for node, sent in least.items()
    }


def _build_checked_causes(links: NodeLinks) -> Accumulator:
    """Return which causes the counters of a rank's node can show."""
    evaluated, missing = {TRANSFER: 1}, {}
    for cause, names in REQUIRED_SIGNALS.items():
        has_counters = bool(links.network.devices(*names))
        if cause == PATH.id:
            has_counters = links.bytes_per_second is not None
        if has_counters:
            evaluated[cause] = 1
        else:
            missing[cause, names[0]] = 1
    return Accumulator(evaluated=evaluated, missing=missing)


def _compute_mean_steps(nodes: Sequence[NodeResult]) -> float:
    """Compute the mean number of steps of a rank."""
    steps = [rank.ledger.steps for node in nodes for rank in node.ranks]
    return sum(steps) / len(steps) if steps else 0.0


def _choose_transfer_wording(
    transfer_split: TransferSplit, flow: Sequence[Evidence]
) -> dict[str, Cause]:
    judged = transfer_split.expected_ns + transfer_split.excess_ns
    if not judged:
        return {}
    if transfer_split.excess_ns > _MIN_BEYOND_RATIO * judged:
        return {TRANSFER: TRANSFER_EXCESS}
    if transfer_split.by_rate:
        return {TRANSFER: TRANSFER_AT_LINK_RATE}
    return {TRANSFER: TRANSFER_STEADY_SLOW if has_slow_path(flow) else TRANSFER_STEADY}


def _build_transfer_evidence(
    transfer_split: TransferSplit, links: Mapping[int, NodeLinks], in_step_ns: int
) -> tuple[Evidence, ...]:
    out = []
    if transfer_split.expected_ns + transfer_split.excess_ns and in_step_ns:
        how = (
            "at the rate of the links" if transfer_split.by_rate else "as fast as the fastest tenth"
        )
        part = transfer_split.expected_ns / in_step_ns
        note = f"of the time in steps: what these transfers need {how}"
        out.append(Evidence("network.expected_ratio", part, "ratio", note))
        part = transfer_split.excess_ns / in_step_ns
        note = "of the time in steps: beyond that, for no reason that a counter shows"
        out.append(Evidence("network.beyond_ratio", part, "ratio", note))
    for node_links in links.values():
        limited_ratio = compute_receiver_limit_ratio(node_links)
        if limited_ratio is not None:
            note = (
                "of the sending time the receiver's window was full (its process is slow, or the"
                f" window small for the round trip): {node_links.name}"
            )
            out.append(Evidence("tcp.receiver_limited_ratio", limited_ratio, "ratio", note))
            break
    trips = [
        (least, rtt, node_links.name)
        for node_links in links.values()
        for rtt, least, _ in [get_round_trip(node_links)]
        if least is not None and rtt is not None
    ]
    if trips:
        least, rtt, name = max(trips)
        note = f"the shortest round trip from {name}, median {format_quantity(rtt, 'ns')}"
        out.append(Evidence(MIN_RTT, least, "ns", note))
    out += _select_strongest_evidence(transfer_split.unused_symptoms)[:1]
    return tuple(out)


def _find_distant_nodes(links: Mapping[int, NodeLinks]) -> tuple[Culprit, ...]:
    """Find the nodes whose round-trip times are longer than those of other nodes."""
    trips = {number: get_round_trip(node_links)[1] for number, node_links in links.items()}
    measured_trips = {number: trip for number, trip in trips.items() if trip is not None}
    return tuple(
        _build_link_culprit(links[n], links[n].used[0]) for n in find_outlier_nodes(measured_trips)
    )


def _join_evidence(signs: Sequence[Evidence], crossed: Sequence[Evidence]) -> tuple[Evidence, ...]:
    """Join the strongest sign, the evidence of size and rate of transfers, and further signs."""
    return (*signs[:1], *crossed, *signs[1:_MAX_NETWORK_EVIDENCE])


def _find_outlier_nodes(
    share: CauseShare, links: Mapping[int, NodeLinks], loose_signs: Mapping[int, Sequence[Symptom]]
) -> tuple[tuple[Culprit, ...], PeerComparison | None]:
    """Find the nodes whose counters are outliers for a cause, and the first comparison.

    The comparison shows the first counter that stands out next to its value on the other
    nodes.
    """
    culprit_devices: dict[int, str] = {}
    comparison: PeerComparison | None = None
    for kind, name in dict.fromkeys((sign.kind, sign.evidence.name) for sign in share.symptoms):
        by_node: dict[int, Symptom] = {}
        symptoms = [*share.symptoms, *(sign for signs in loose_signs.values() for sign in signs)]
        for sign in symptoms:
            if (sign.kind, sign.evidence.name) == (kind, name):
                strongest = by_node.get(sign.node)
                by_node[sign.node] = (
                    sign if strongest is None else max(strongest, sign, key=_get_strength)
                )
        strengths = {n: by_node[n].strength if n in by_node else 0.0 for n in links}
        outliers = find_outlier_nodes(strengths)
        for node in outliers:
            culprit_devices.setdefault(node, by_node[node].device)
        comparison = comparison or _compare_outliers(name, outliers, by_node, links)
    return tuple(
        _build_link_culprit(links[node], device) for node, device in culprit_devices.items()
    ), comparison


def _compare_outliers(
    name: str,
    outliers: Sequence[int],
    by_node: Mapping[int, Symptom],
    links: Mapping[int, NodeLinks],
) -> PeerComparison | None:
    """Compare a counter of the outlier nodes with the other nodes on which it was read."""
    other_values = [
        by_node[n].evidence.value if n in by_node else 0.0
        for n in links
        if n not in outliers and (n in by_node or links[n].network.devices(name))
    ]
    if not outliers or not other_values:
        return None
    values = [by_node[node].evidence.value for node in outliers]
    first = by_node[outliers[0]]
    return PeerComparison(
        name,
        first.evidence.unit,
        median_low(values),
        median_low(other_values),
        len(other_values),
        "node",
        first.note,
    )


def _get_strength(sign: Symptom) -> float:
    return sign.strength


def _build_link_culprit(links: NodeLinks, device: str) -> Culprit:
    return Culprit(links.name, None, "", device)


def _select_strongest_evidence(signs: Sequence[Symptom]) -> tuple[Evidence, ...]:
    """Select the strongest sign of each metric."""
    strongest: dict[str, Symptom] = {}
    for sign in signs:
        name = sign.evidence.name
        strongest[name] = max(strongest.get(name, sign), sign, key=_get_strength)
    return tuple(sign.evidence for sign in strongest.values())
