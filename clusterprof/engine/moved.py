"""What moved between ranks: how much in how many operations, how fast, and over what.

    10 all-reduces of 4 MiB among 4 ranks     each sends 2 * 3/4 * 4 MiB = 6 MiB in one
    80 ms each                                75 MiB/s: 63 % of a link of 1 Gb/s
    the fastest tenth took 60 ms              100 MiB/s where the rate of the link is not known

Within a node no link's rate is known; what operations of a mebibyte and more reach is laid beside
what sockets of one machine reach at the least, as everything else there (shared memory, PCIe,
NVLink) is faster. Of a link whose rate is unknown it is said that it is.

Nothing is said of how fast operations were that overlap with computation: a rank is held up by a
part of them only. Of messages between two ranks it is not said either, for one of the two waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clusterprof.attribution.blame_rows import is_pair
from clusterprof.attribution.blame_transfer import Cell, Transfers
from clusterprof.attribution.net_links import HCA, NIC, NodeLinks
from clusterprof.findings import Evidence
from clusterprof.units import human

MOVED, RATE, COUNT = (
    "network.moved_bytes", "network.bytes_per_second", "network.operations_count",
)  # fmt: skip
FLOW = MOVED, RATE, COUNT
"""What is said of any cause in the network; the rest is for what is advised about transfers."""
SIZE, PER_STEP, OF_PATH = (
    "network.operation_bytes", "network.operations_per_step_count", "network.path_ratio",
)  # fmt: skip
WITHIN_NODE_BYTES_PER_SECOND = 1 << 30
"""What one process sends another of the same machine at the least, through sockets: the slowest
way there is. Several at a time, on machines of 2016 and later."""
LARGE_BYTES = 1 << 20
"""Smaller operations take round trips rather than a rate: it says nothing of the path."""
SLOW_RATIO = 0.25
"""Of what the path gives at the least: a rate below it is slow, however steady."""
_CARRIED_RATIO = 0.5  # of what the job sent: a device that carried less is not known to have
_HARDLY_TIMES = 1.1  # as fast: durations are counted in classes that are 9 % wide
_Cells = Sequence[tuple[int, Cell]]


def moved(
    transfers: Transfers,
    links: Mapping[int, NodeLinks],
    between_nodes: bool = False,
    steps: float = 0.0,
) -> tuple[Evidence, ...]:
    """Return how much each rank sent, and how fast it was on its way.

    `between_nodes`: of operations between nodes alone. `steps`: of a rank; 0 = unknown. Empty where
    there was no operation.
    """
    cells = [
        (number, cell)
        for number, cell in enumerate(transfers.cells)
        if cell.operations and (len(cell.nodes) > 1 or not between_nodes)
    ]
    if not cells:
        return ()
    over = transport(cells, links)
    known = [(number, cell) for number, cell in cells if cell.moved_bytes is not None]
    nodes = {node for _, cell in cells for node in cell.nodes}
    ranks = sum(int(np.count_nonzero(transfers.node == node)) for node in nodes)
    count = sum(cell.operations * _senders(cell) for _, cell in known or cells) / max(ranks, 1)
    if not known:
        note = f"operations of each rank, of unknown size{over}"
        return (Evidence(COUNT, count, "count", note),)
    sent = sum(_sent(cell) for _, cell in known) / max(ranks, 1)
    mean = human(sent / count, "bytes") if count else "nothing"
    note = f"sent by each rank in {count:,.0f} operations of {mean}{over}"
    rate = _rate(transfers, known, links)
    return (
        Evidence(MOVED, sent, "bytes", note),
        *rate[:1],
        *_shape(sent, count, steps),
        *rate[1:],
    )


def _shape(sent: float, count: float, steps: float) -> tuple[Evidence, ...]:
    """How large operations are, and how many a step has: what can be done depends on both."""
    if not count:
        return ()
    size = Evidence(SIZE, sent / count, "bytes", "sent by a rank in one operation, on average")
    if not steps:
        return (size,)
    return size, Evidence(PER_STEP, count / steps, "count", "operations of a rank in a step")


def _senders(cell: Cell) -> int:
    """Of a message one member sends, of everything else all do."""
    return 1 if _pair(cell) else cell.members


def _pair(cell: Cell) -> bool:
    return bool(is_pair(np.array([cell.operation]))[0])


def _sent(cell: Cell) -> float:
    return (cell.moved_bytes or 0.0) * cell.operations * _senders(cell)


def _rate(
    transfers: Transfers, known: _Cells, links: Mapping[int, NodeLinks]
) -> tuple[Evidence, ...]:
    taken, best = transfers.taken_ns(), transfers.best_ns()
    timed = [(at, cell) for at, cell in known if not cell.overlapped and not _pair(cell)]
    timed = [(at, cell) for at, cell in timed if taken[at] > 0]
    if not timed:
        return ()
    ns = sum(int(taken[at]) for at, _ in timed)
    rate = sum(_sent(cell) for _, cell in timed) / ns * 1e9
    due = [_due_ns(transfers, cell, links) for _, cell in timed]
    if None not in due:
        slowest = min((links[n] for _, cell in timed for n in cell.nodes), key=_speed)
        part = sum(one or 0.0 for one in due) / ns
        of = f"{human(part, 'ratio')} of the {gigabits(_speed(slowest))} of"
        note = f"while on their way: {of} {', '.join(slowest.used)}"
        return (
            Evidence(RATE, rate, "bytes/s", note),
            Evidence(OF_PATH, part, "ratio", "of the rate of the links: what was reached"),
        )
    fastest = _fastest(rate, [(cell, best[at]) for at, cell in timed])
    if any(len(cell.nodes) > 1 for _, cell in timed):
        note = f"while on their way{fastest}; what the links could give is not known"
        return (Evidence(RATE, rate, "bytes/s", note),)
    count = sum(cell.operations * _senders(cell) for _, cell in timed)
    if sum(_sent(cell) for _, cell in timed) < LARGE_BYTES * count:
        note = f"while on their way{fastest}; such small operations say little of the path"
        return (Evidence(RATE, rate, "bytes/s", note),)
    part = rate / WITHIN_NODE_BYTES_PER_SECOND
    least = f"the {human(WITHIN_NODE_BYTES_PER_SECOND, 'bytes/s')} that sockets within a node give"
    note = f"while on their way{fastest}"
    if part < SLOW_RATIO:
        note = f"{human(part, 'ratio')} of {least} at the least"
    said = f"of {least} at the least, and shared memory, PCIe and NVLink more"
    return Evidence(RATE, rate, "bytes/s", note), Evidence(OF_PATH, part, "ratio", said)


def _fastest(rate: float, timed: Sequence[tuple[Cell, float | None]]) -> str:
    """Say how fast the fastest tenth of some operations was."""
    fast = [(cell, one) for cell, one in timed if one]
    if not fast:
        return ""
    span = sum((one or 0.0) * cell.operations * cell.members for cell, one in fast)
    most = sum(_sent(cell) for cell, _ in fast) / span * 1e9
    hardly = most <= _HARDLY_TIMES * rate
    return f"; the fastest tenth of them {'hardly faster' if hardly else human(most, 'bytes/s')}"


def slow_within(told: Sequence[Evidence]) -> bool:
    """True where what was reached is far below what the path gives at the least."""
    return any(one.name == OF_PATH and one.value < SLOW_RATIO for one in told)


def _due_ns(transfers: Transfers, cell: Cell, links: Mapping[int, NodeLinks]) -> float | None:
    """What all ranks of a cell would have taken at the rate of the slowest node's links."""
    speeds = [links[node].bytes_per_second if node in links else None for node in cell.nodes]
    if len(cell.nodes) < 2 or None in speeds:
        return None
    # Teams with some of a node's ranks share its links with those of the others.
    on_node = max(int(np.count_nonzero(transfers.node == node)) for node in cell.nodes)
    part = min(1.0, cell.members / len(cell.nodes) / on_node)
    return _sent(cell) / (min(one for one in speeds if one is not None) * part) * 1e9


def _speed(links: NodeLinks) -> float:
    return links.bytes_per_second or 0.0


def transport(cells: _Cells, links: Mapping[int, NodeLinks]) -> str:
    """Say what carried the operations where counters or the job's own connections tell; else "".

    Of connections within a machine nothing is counted.
    """
    crossing = {node for _, cell in cells for node in cell.nodes if len(cell.nodes) > 1}
    if not crossing:
        return " within one node"
    some = [links[n] for n in sorted(crossing) if n in links and _carried(links[n])]
    said = []
    for kind, words in ((HCA, "RDMA by"), (NIC, "sockets of")):
        used = dict.fromkeys(device for one in some if one.kind == kind for device in one.used)
        if used:
            said.append(f"{words} {', '.join(used)}")
    return f", over {' and '.join(said)}" if said else ""


def _carried(links: NodeLinks) -> bool:
    """True where it is known that the devices in use carried the job's traffic."""
    if links.by_sockets:
        return True
    seen = sum(links.bytes_of(device) for device in links.used)
    return links.job_bytes > 0 and seen >= _CARRIED_RATIO * links.job_bytes


def gigabits(bytes_per_second: float) -> str:
    """Write the rate of a link as its maker does: 1 Gb/s, 400 Gb/s."""
    return f"{bytes_per_second * 8 / 1e9:.3g} Gb/s"
