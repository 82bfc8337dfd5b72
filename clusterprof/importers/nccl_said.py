"""What NCCL's log and the tables of nccl-tests mean for a job: facts and notes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TableRow:
    """One size of an nccl-tests table."""

    operation: int
    """`layout.ALL_REDUCE` and its like; 15 when no program is named."""
    bytes: int
    element: str
    """`float`."""
    reduction: str
    """`sum`; "" of operations without one."""
    time_us: float
    """Out of place."""
    algorithm_gbps: float
    """GB/s."""
    bus_gbps: float
    """GB/s."""
    in_place_us: float | None

    @property
    def expected_ns(self) -> int:
        """How long it takes at best."""
        times = [one for one in (self.time_us, self.in_place_us) if one]
        return round(min(times, default=0.0) * 1000)


@dataclass(slots=True)
class NcclText:
    """What one file says."""

    versions: Counter[str] = field(default_factory=Counter)
    networks: Counter[str] = field(default_factory=Counter)
    """`IB`, `Socket`, `AWS Libfabric`: how many ranks said so."""
    variables: dict[str, str] = field(default_factory=dict)
    """Set in the environment, as NCCL repeats them; no addresses."""
    rdma: set[str] = field(default_factory=set)
    no_rdma: set[str] = field(default_factory=set)
    """Hosts on which it found no RDMA device."""
    hosts: set[str] = field(default_factory=set)
    socket_hosts: set[str] = field(default_factory=set)
    """Hosts with channels through TCP."""
    channels: Counter[str] = field(default_factory=Counter)
    """By transport: P2P, SHM, NET/IB, NET/Socket, …"""
    direct: int = 0
    """Channels between nodes that copy between NIC and GPU without the host's memory."""
    ranks: int = 0
    nodes: int = 0
    warnings: Counter[str] = field(default_factory=Counter)
    rows: list[TableRow] = field(default_factory=list)
    test_ranks: int = 0
    """Of the tables; 0 unknown."""
    average_gbps: float | None = None

    @property
    def between_nodes(self) -> int:
        """How many channels go through a network."""
        return sum(n for name, n in self.channels.items() if name.startswith("NET/"))


def facts_of(found: NcclText) -> dict[str, Any]:
    """Return what the analysis of other files can use: plain values, for a recording's header."""
    facts: dict[str, Any] = {}
    if found.rows:
        facts["transfer_expected"] = [
            [row.operation, row.bytes, row.expected_ns] for row in found.rows if row.expected_ns
        ]
    wrong = slow_paths(found)
    if wrong:
        facts["slow_paths"] = [[name, count, said] for name, count, said, _ in wrong]
    return facts


def slow_paths(found: NcclText) -> list[tuple[str, int, str, str]]:
    """Return what a log says against the way the data take: name, channels, what, what to do."""
    wrong = []
    sockets, disabled = found.channels["NET/Socket"], found.variables.get("NCCL_IB_DISABLE")
    socket = sockets or (found.networks["Socket"] and found.nodes > 1)
    where = _some(found.socket_hosts)
    if socket and disabled == "1":
        wrong.append((
            "nccl.socket_channels_count", sockets,
            f"go through TCP sockets, for NCCL_IB_DISABLE=1 is set{where}",
            "remove NCCL_IB_DISABLE from the job's environment",
        ))  # fmt: skip
    elif socket and found.rdma:
        wrong.append((
            "nccl.socket_channels_count", sockets,
            f"go through TCP sockets although NCCL saw {_named(found.rdma)}{where}",
            "see why NCCL passed it over: NCCL_NET, NCCL_IB_HCA, link state (ibv_devinfo)",
        ))  # fmt: skip
    elif socket and found.no_rdma:
        wrong.append((
            "nccl.socket_channels_count", sockets,
            f"go through TCP sockets, for NCCL found no RDMA device{where}",
            "if the node has one (ibv_devinfo), give the container /dev/infiniband, rdma-core and"
            " an unlimited memlock; else nothing is wrong",
        ))  # fmt: skip
    rdma = found.between_nodes - sockets
    if rdma and not found.direct and "GDRDMA" not in found.networks:
        wrong.append((
            "nccl.staged_channels_count", rdma,
            "use RDMA without GPUDirect: every byte passes through the host's memory",
            "load nvidia-peermem, or use a kernel with DMA-BUF; check NCCL_NET_GDR_LEVEL",
        ))  # fmt: skip
    if found.channels["SHM"] and found.variables.get("NCCL_P2P_DISABLE") == "1":
        wrong.append((
            "nccl.host_memory_channels_count", found.channels["SHM"],
            "go through memory of the host, for NCCL_P2P_DISABLE=1 is set",
            "remove NCCL_P2P_DISABLE",
        ))  # fmt: skip
    return wrong


def notes_of(found: NcclText) -> list[str]:
    """Return what a reader of the report should know."""
    notes = []
    if found.versions:
        versions = ", ".join(sorted(found.versions))
        size = f", {found.ranks} ranks on {found.nodes} nodes" if found.ranks else ""
        used = ", ".join(f"{n:,} {name}" for name, n in found.channels.most_common(8))
        notes.append(f"NCCL {versions}{size}" + (f"; channels: {used}" if used else ""))
        if len(found.versions) > 1:
            notes.append("ranks run different versions of NCCL: load one and the same everywhere")
    for _, count, said, cure in slow_paths(found):
        counted = f"{count:,} channels" if count else "channels between nodes"
        notes.append(f"net-path: {counted} {said}. To do: {cure}")
    rdma = {name: n for name, n in found.channels.items() if name.startswith("NET/")}
    if rdma and not slow_paths(found):
        direct = f", {found.direct:,} of them with GPUDirect" if found.direct else ""
        notes.append(f"between nodes: {found.between_nodes:,} channels by RDMA{direct}: no fault")
    for text, times in found.warnings.most_common(3):
        notes.append(f"NCCL warned {times:,} times: {text}")
    if found.rows:
        notes.append(_table_said(found))
    return notes


def _table_said(found: NcclText) -> str:
    last = max(found.rows, key=lambda row: row.bytes)
    of = f" of {found.test_ranks} ranks" if found.test_ranks else ""
    average = f", {found.average_gbps} GB/s on average" if found.average_gbps else ""
    return (
        f"nccl-tests{of}, {len(found.rows)} sizes up to {last.bytes:,} bytes:"
        f" {last.time_us:,.1f} us, {last.algorithm_gbps} GB/s, bus {last.bus_gbps}"
        f" GB/s{average}; what transfers are expected to take where no rate of links is known"
    )


def _named(names: set[str]) -> str:
    some = sorted(names)
    return ", ".join(some[:8]) + (f" and {len(some) - 8} more" if len(some) > 8 else "")


def _some(hosts: set[str]) -> str:
    known = {one for one in hosts if one}
    return f" (on {_named(known)})" if known else ""
