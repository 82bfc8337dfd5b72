"""Output of NCCL: its log (NCCL_DEBUG=INFO), and the tables of nccl-tests.

## How to make the file

    NCCL_DEBUG=INFO NCCL_DEBUG_FILE=nccl.%h.%p.log torchrun --nproc-per-node 8 train.py
    all_reduce_perf -b 8 -e 16G -f 2 > table.txt

## How to analyze it

Give it together with a recording or with traces of the same job:

    clusterprof analyze my-run/ nccl.gpu-a01.4711.log table.txt

## What is read

* From a log: the version, the chosen network, the RDMA devices found, the variables set, and the
  transport of every channel (`via P2P`, `SHM`, `NET/IB/0/GDRDMA`, `NET/Socket/0`). A log may cover
  several ranks and may be mixed with other output.
* From a table of nccl-tests: size, type, operation, time and bandwidths, out of place and in place.
  A prefix of the launcher such as `0: ` is skipped.

One file may contain both. A log has no times, so it shows no steps and no waits by itself.

## How the numbers are computed

The data take a slow path (`net-path`) in these cases: ranks communicate through `NET/Socket`, that
is TCP, whether NCCL found RDMA devices, was instructed not to use them (`NCCL_IB_DISABLE=1`,
`NCCL_NET=Socket`), or says nothing of them; RDMA runs without GPUDirect (`GDRDMA`); GPUs of one
node communicate through host memory (`SHM`) because `NCCL_P2P_DISABLE` is set.

A table shows how long an operation takes on an undisturbed network. At each size the shorter of the
two times counts; between sizes the time is interpolated. If the rate of the links is unknown,
transfers in the traces are expected to take that long. Three tables or more of one operation,
number of ranks and sizes are compared by their mean bus bandwidth: the slowest are the answer.

## What it cannot see

A log without `NCCL_DEBUG=INFO` names no channel. `No device found` does not prove that the host has
no RDMA device: run `ibv_devinfo` there. A table is valid for the ranks it was measured with.
Whether the job has as many ranks is unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import parse_number, read_lines
from clusterprof.probe import layout
from clusterprof.units import format_quantity


@dataclass(frozen=True, slots=True)
class TableRow:
    """One size of an nccl-tests table."""

    operation: int
    """`layout.ALL_REDUCE` or a similar constant; 15 if no program is named."""
    bytes: int
    element: str
    """Element type, like `float`."""
    reduction: str
    """Reduction, like `sum`; empty for operations without one."""
    time_us: float
    """Out of place."""
    algorithm_gbps: float
    """GB/s."""
    bus_gbps: float
    """GB/s."""
    in_place_us: float | None

    @property
    def expected_ns(self) -> int:
        """Shortest measured time in ns."""
        times = [time_us for time_us in (self.time_us, self.in_place_us) if time_us]
        return round(min(times, default=0.0) * 1000)


@dataclass(slots=True)
class NcclTable:
    """One table of nccl-tests; a file may hold several, of other operations."""

    rows: list[TableRow] = field(default_factory=list)
    average_gbps: float | None = None
    """Bus bandwidth that the table states as its average, GB/s."""


@dataclass(slots=True)
class NcclText:
    """Content of one file."""

    versions: Counter[str] = field(default_factory=Counter)
    networks: Counter[str] = field(default_factory=Counter)
    """Number of ranks by network: `IB`, `Socket`, `AWS Libfabric`."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables set in the environment, as logged by NCCL; without addresses."""
    rdma: set[str] = field(default_factory=set)
    no_rdma: set[str] = field(default_factory=set)
    """Hosts on which NCCL found no RDMA device."""
    hosts: set[str] = field(default_factory=set)
    interfaces: set[str] = field(default_factory=set)
    """Network interfaces that NCCL uses for TCP sockets."""
    cards: set[str] = field(default_factory=set)
    """Names of the GPUs, as nccl-tests writes them."""
    test_hosts: set[str] = field(default_factory=set)
    """Hosts of the ranks of nccl-tests."""
    socket_hosts: set[str] = field(default_factory=set)
    """Hosts with channels through TCP."""
    channels: Counter[str] = field(default_factory=Counter)
    """By transport: P2P, SHM, NET/IB, NET/Socket, …"""
    gpudirect_channels: int = 0
    """Channels between nodes that copy between NIC and GPU without host memory."""
    ranks: int = 0
    nodes: int = 0
    warnings: Counter[str] = field(default_factory=Counter)
    tables: list[NcclTable] = field(default_factory=list)
    test_ranks: int = 0
    """Ranks of the tables; 0 if unknown."""

    @property
    def rows(self) -> list[TableRow]:
        """Rows of all tables."""
        return [row for table in self.tables for row in table.rows]

    @property
    def network_channels(self) -> int:
        """Number of channels that go through a network."""
        return sum(n for name, n in self.channels.items() if name.startswith("NET/"))


def build_facts(content: NcclText) -> dict[str, Any]:
    """Build the facts for the analysis of other files: plain values for a recording's header."""
    facts: dict[str, Any] = {}
    if content.rows:
        facts["transfer_expected"] = [
            [row.operation, row.bytes, row.expected_ns] for row in content.rows if row.expected_ns
        ]
    slow = find_slow_paths(content)
    if slow:
        facts["slow_paths"] = [[name, count, problem] for name, count, problem, _ in slow]
    return facts


def find_slow_paths(content: NcclText) -> list[tuple[str, int, str, str]]:
    """Find slow data paths in a log: name, number of channels, problem, action."""
    slow = []
    sockets = content.channels["NET/Socket"]
    rdma = content.network_channels - sockets
    if sockets or (content.networks["Socket"] and content.nodes > 1):
        problem, action = _explain_sockets(content, sockets, rdma)
        if problem:
            where = _format_hosts(content.socket_hosts)
            problem = f"go through TCP sockets{problem}{where}"
            slow.append(("nccl.socket_channels_count", sockets, problem, action))
    if rdma and not content.gpudirect_channels and "GDRDMA" not in content.networks:
        slow.append(
            (
                "nccl.staged_channels_count",
                rdma,
                "use RDMA without GPUDirect: every byte passes through host memory",
                _advise_gpudirect(content),
            )
        )
    if content.channels["SHM"] and content.variables.get("NCCL_P2P_DISABLE") == "1":
        slow.append(
            (
                "nccl.host_memory_channels_count",
                content.channels["SHM"],
                "go through host memory because NCCL_P2P_DISABLE=1 is set",
                "remove NCCL_P2P_DISABLE",
            )
        )
    return slow


def _explain_sockets(content: NcclText, sockets: int, rdma: int) -> tuple[str, str]:
    """Explain why channels go through TCP sockets: reason and action; "" if no reason is known.

    sockets, rdma: number of such channels.
    """
    if content.variables.get("NCCL_IB_DISABLE") == "1":
        reason = " because NCCL_IB_DISABLE=1 is set"
        return reason, "remove NCCL_IB_DISABLE from the job's environment"
    if content.rdma:
        return (
            f" although NCCL saw {_format_names(content.rdma)}",
            "find out why NCCL ignores it: NCCL_NET, NCCL_IB_HCA, link state (ibv_devinfo)",
        )
    if content.variables.get("NCCL_NET", "").lower() == "socket":
        return " because NCCL_NET=Socket is set", "remove NCCL_NET from the job's environment"
    if content.no_rdma:
        return (
            " because NCCL found no RDMA device",
            "if the node has one (ibv_devinfo), give the container /dev/infiniband, rdma-core"
            " and an unlimited memlock; otherwise nothing is wrong",
        )
    if not sockets:
        return "", ""
    interfaces = f" on {_format_names(content.interfaces)}" if content.interfaces else ""
    rdma_part = f"and {rdma:,} others through RDMA" if rdma else "and no RDMA"
    return f"{interfaces}, {rdma_part}", _advise_fabric(content)


def _advise_fabric(content: NcclText) -> str:
    """Return how to leave TCP sockets, by the interfaces that carry them."""
    if any(name.startswith("hsn") for name in content.interfaces):
        return (
            "these are interfaces of Slingshot: give the job or container libfabric and the"
            ' aws-ofi-nccl plugin (NCCL_NET="AWS Libfabric")'
        )
    return (
        "if the nodes have InfiniBand, RoCE or EFA (ibv_devinfo, fi_info), find out why NCCL does"
        " not use it: NET/ lines of the log, NCCL_NET, the plugin of the fabric; otherwise nothing"
        " is wrong"
    )


def _advise_gpudirect(content: NcclText) -> str:
    """Return how to get GPUDirect with the cards of the log."""
    consumer = {name for name in content.cards if _WITHOUT_GPUDIRECT.search(name)}
    if consumer:
        return f"nothing: {_format_names(consumer)} has no GPUDirect RDMA"
    if content.rdma and all(name.startswith("hfi1") for name in content.rdma):
        return (
            "Omni-Path (hfi1) has GPUDirect only through PSM2: use the plugin psm2-nccl, or"
            " libfabric with aws-ofi-nccl"
        )
    return "load nvidia-peermem, or use a kernel with DMA-BUF; check NCCL_NET_GDR_LEVEL"


def build_notes(content: NcclText) -> list[str]:
    """Build the notes for the report."""
    notes = []
    if content.versions:
        versions = ", ".join(sorted(content.versions))
        size = f", {content.ranks} ranks on {content.nodes} nodes" if content.ranks else ""
        used = ", ".join(f"{n:,} {name}" for name, n in content.channels.most_common(8))
        notes.append(f"NCCL {versions}{size}" + (f"; channels: {used}" if used else ""))
        if len(content.versions) > 1:
            notes.append("ranks run different versions of NCCL: load the same version everywhere")
    for _, count, problem, action in find_slow_paths(content):
        counted = f"{count:,} channels" if count else "channels between nodes"
        notes.append(f"net-path: {counted} {problem}. To do: {action}")
    if content.network_channels and not find_slow_paths(content):
        direct = content.gpudirect_channels
        part = f", {direct:,} of them with GPUDirect" if direct else ""
        notes.append(f"between nodes: {content.network_channels:,} channels by RDMA{part}: normal")
    for text, times in content.warnings.most_common(3):
        notes.append(f"NCCL warned {times:,} times: {text}")
    tables = [table for table in content.tables if table.rows]
    notes += describe_tables(content)
    averages = sorted((table.average_gbps or 0.0, _name_operation(table)) for table in tables)
    if len(averages) >= _MIN_TABLES and averages[0][0]:
        listed = ", ".join(f"{name} {speed:.4g}" for speed, name in averages[:_MAX_TABLES_NAMED])
        notes.insert(0, f"mean bus bandwidth, GB/s: {listed}")
    if len(tables) > _MAX_TABLES_NAMED:
        notes.append(f"{len(tables) - _MAX_TABLES_NAMED:,} more tables of nccl-tests were read")
    return notes


def describe_tables(content: NcclText) -> dict[str, str]:
    """Describe the tables: by note, the part of it that answers how fast the links are."""
    tables = [table for table in content.tables if table.rows]
    shown, several = tables[:_MAX_TABLES_NAMED], len(tables) > 1
    answers = (_describe_table(table, content.test_ranks, several) for table in shown)
    return {f"{answer}; {_USE_OF_TABLES}": answer for answer in answers}


def _name_operation(table: NcclTable) -> str:
    operation = table.rows[0].operation
    return next((name for name, number in _PROGRAMS.items() if number == operation), "unknown")


def _describe_table(table: NcclTable, test_ranks: int, names_operation: bool) -> str:
    last = max(table.rows, key=lambda row: row.bytes)
    ranks = f" of {test_ranks} ranks" if test_ranks else ""
    average = f", {table.average_gbps} GB/s on average" if table.average_gbps else ""
    operation = next((name for name, number in _PROGRAMS.items() if number == last.operation), "")
    sizes = len({row.bytes for row in table.rows})
    return (
        f"nccl-tests{f' {operation}' * (names_operation and bool(operation))}{ranks},"
        f" {sizes} sizes up to {last.bytes:,} bytes:"
        f" {last.time_us:,.1f} us, {last.algorithm_gbps} GB/s, bus {last.bus_gbps}"
        f" GB/s{average}"
    )


_USE_OF_TABLES = "used as the expected transfer time where the link rate is unknown"
_MIN_TABLES = 3  # of one operation and size, from which a median says what is normal
_SLOWEST = 3


def compare_tables(files: Sequence[str], texts: Sequence[NcclText]) -> list[str]:
    """Compare tables of one operation, number of ranks and sizes: which are slower than the median.

    files, texts: name and content of each file. A table counts by its mean bus bandwidth.
    """
    groups: dict[tuple[int, int, tuple[int, ...]], list[tuple[float, str, frozenset[str]]]] = {}
    for file, text in zip(files, texts):
        where = " and ".join(sorted(text.test_hosts)) if len(text.test_hosts) <= 2 else ""
        for table in text.tables:
            speed = table.average_gbps or max((row.bus_gbps for row in table.rows), default=0.0)
            if speed > 0 and table.rows:
                sizes = tuple(sorted({row.bytes for row in table.rows}))
                key = table.rows[0].operation, text.test_ranks, sizes
                item = speed, where or file, frozenset(text.test_hosts)
                groups.setdefault(key, []).append(item)
    answers, slow_hosts, hosts = list[str](), Counter[str](), Counter[str]()
    compared = []
    for key, tables in groups.items():
        middle = median(speed for speed, _, _ in tables)
        if len(tables) >= _MIN_TABLES:
            compared.append((min(tables)[0] / middle, middle, key, tables))
    for _, middle, (operation, ranks, sizes), tables in sorted(compared, key=lambda item: item[0]):
        slowest = sorted(tables, key=lambda item: item[:2])[:_SLOWEST]
        named = ", ".join(
            f"{source} {speed:.4g} ({format_quantity(max(1 - speed / middle, 0), 'ratio')} below)"
            for speed, source, _ in slowest
        )
        name = next((text for text, number in _PROGRAMS.items() if number == operation), "")
        answers.append(
            f"{len(tables):,} nccl-tests {name} of {ranks} ranks up to {sizes[-1]:,} bytes:"
            f" median bus bandwidth {middle:.4g} GB/s, slowest {named}"
        )
        slow_hosts.update(host for _, _, table_hosts in slowest for host in table_hosts)
        hosts.update(host for _, _, table_hosts in tables for host in table_hosts)
    return [*_describe_slow_host(slow_hosts, hosts, len(answers)), *answers]


def _describe_slow_host(slow: Counter[str], hosts: Counter[str], groups: int) -> list[str]:
    """Describe the host that is among the slowest twice as often as its share of the tables."""
    if not slow or groups < 2 or len(hosts) < _MIN_TABLES:
        return []
    host, times = slow.most_common(1)[0]
    if times / slow.total() < 2 * hosts[host] / hosts.total() or times < _MIN_TABLES:
        return []
    of = groups * _SLOWEST
    return [f"of the {of:,} slowest tables of {groups:,} nccl-tests, {times:,} are of {host}"]


def _format_names(names: set[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:8]) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")


def _format_hosts(hosts: set[str]) -> str:
    names = {host for host in hosts if host}
    return f" (on {_format_names(names)})" if names else ""


# Lines may be anything: every pattern runs in linear time.
_INFO = re.compile(r"NCCL (INFO|WARN) ")
_HOST = re.compile(r"(?<![\w.-])([\w.-]{1,255}):\d{1,10}:\d{1,10} \[-?\d{1,6}\] (?:\S{1,128} )?$")
_HOST_CHARACTERS = 448  # characters before NCCL that can hold the host
_VERSION = re.compile(r"NCCL version (\d+\.\d+[\w.+-]*?)(?=NCCL version|[^\w.+-]|$)")
"""Ranks that share a terminal may write their versions on one line without a break."""
_VARIABLE = re.compile(
    r"(?<![A-Z0-9_])(NCCL_[A-Z0-9_]{1,64}) set (?:by environment )?to (\S+?)\.?\s*$"
)
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? ?: ?\d")
_VIA = re.compile(r"(P2P|SHM|NET|COLLNET|NVLS)(?:/(.+))?")
_USING = "Using network "
_NETWORK = re.compile(r"\w[\w .-]{0,63}")
_RDMA_DEVICE = re.compile(r"\[\d+\] ?([A-Za-z][\w.-]*):\d+/(?:IB|RoCE|IB/SHARP|uverbs)")
_INTERFACE = re.compile(r"\[\d+\] ?([A-Za-z][\w.-]{0,31}):")
_CARD = re.compile(r"\bdevice\s+\d+ \[[\w:.]+\] (\S.{0,79})$")
_TEST_HOST = re.compile(r"\bon\s+(\S{1,255})\s+device\b")
_WITHOUT_GPUDIRECT = re.compile(r"GeForce|TITAN", re.IGNORECASE)
"""Cards without GPUDirect RDMA. Source: docs.nvidia.com, "GPUDirect RDMA", supported systems."""
_SIZE = re.compile(r"\bn[rR]anks (\d+) n[nN]odes (\d+)")
_TABLE_HEAD = re.compile(r"#\s+size\s+count\s+type(?:\s+redop)?(?:\s+root)?\s+time\s+algbw\s+busbw")
_TABLE_ROW = re.compile(
    r"(?<!\d)(\d{1,18})\s+\d+\s+([a-z]\w*)(?:\s+([a-z]\w*|none))?(?:\s+-?\d+)?"
    r"\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(?:\S+)"
    r"(?:\s+([\d.]+|N/A)\s+([\d.]+|N/A)\s+([\d.]+|N/A)\s+\S+)?\s*$"
)
_ROW_BEGIN = re.compile(r"\d{1,18}\s+\d+\s+[a-z]\w*(?:\s+(?:[a-z]\w*|none))?\s+-?\d")
_ROW_TIMES = re.compile(r"\s*([\d.]+\s+[\d.]+\s+[\d.]+)\s+(?:\d|N/A)")
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*([\d.]+)")
_RANK = re.compile(r"#\s+Rank\s+(\d{1,9})\s")
_TEST_HEAD = re.compile(rb"(?m)^[ \t]*# nThread \d+ nGpus \d+ minBytes \d+ maxBytes \d+")
"""First line of nccl-tests: the list of a large job's ranks comes before the table."""
_LAUNCHER_TAG = re.compile(r"\[[\w.@-]{1,64},\d{1,9}\]<std(?:out|err)>:")
"""What `mpirun --tag-output` puts before each piece of output, also within a line."""
_PROGRAMS = {
    "all_reduce": layout.ALL_REDUCE,
    "all_gather": layout.ALL_GATHER,
    "reduce_scatter": layout.REDUCE_SCATTER,
    "broadcast": layout.BROADCAST,
    "reduce": layout.REDUCE,
    "alltoall": layout.ALL_TO_ALL,
    "gather": layout.GATHER,
    "scatter": layout.SCATTER,
    "sendrecv": layout.SEND,
}
_PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|broadcast|alltoall|gather|scatter|"
    r"sendrecv|reduce)_perf\b"
)
_MAX_ROWS = 4096
_MAX_TABLES_NAMED = 6
_MAX_HOSTS = 65_536
_MAX_NAMES = 32


def read_text(lines: Iterator[bytes]) -> NcclText:
    """Read the lines of a log or table; other lines are skipped."""
    text = NcclText()
    operation = layout.OTHER_OPERATION
    table = False
    row_parts: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8", "replace").strip()
        if "]<std" in line:
            line = _LAUNCHER_TAG.sub("", line).strip()
        if table:
            row, line = _cut_row_parts(row_parts, line)
            if row:
                _parse_table_line(text, row, operation)
        if "NCCL" in line:
            text.versions.update(_VERSION.findall(line))
            message = _INFO.search(line)
            if message:
                host = _HOST.search(
                    line[max(message.start() - _HOST_CHARACTERS, 0) : message.start()]
                )
                _parse_log_line(text, host[1] if host else "", message[1], line[message.end() :])
        elif program := _PROGRAM.search(line):
            operation = _PROGRAMS[program[1]]
        if table or "size" in line or "#" in line:
            table = _parse_table_line(text, line, operation) or table
    _infer_operation(text)
    return text


def _cut_row_parts(parts: list[str], line: str) -> tuple[str, str]:
    """Cut the parts of a row that messages have split off a line; return a complete row, the rest.

    nccl-tests writes a row in three parts: size and type, out-of-place times, in-place times.
    """
    row = ""
    if begin := _ROW_BEGIN.match(line) if "NCCL" in line else None:
        row = " ".join(parts)
        parts[:] = [begin[0]]
        line = line[begin.end() :]
    while parts and (times := _ROW_TIMES.match(line)):
        parts.append(f"{times[1]} 0")
        line = line[times.end() :]
        if len(parts) == 3:
            row = " ".join(parts)
            parts.clear()
    return row, line


def _infer_operation(text: NcclText) -> None:
    """Infer the operation of a table without a program name: only all_reduce moves data twice.

    Its bus bandwidth is 2 (n - 1) / n times its bandwidth for n ranks.
    """
    for table in text.tables:
        _infer_table_operation(text, table)


def _infer_table_operation(text: NcclText, table: NcclTable) -> None:
    last = max(table.rows, key=lambda row: row.algorithm_gbps, default=None)
    if last is None or last.algorithm_gbps < 1:
        return
    ratio = last.bus_gbps / last.algorithm_gbps
    if last.operation == layout.OTHER_OPERATION and last.reduction and 1.05 < ratio < 2:
        table.rows = [replace(row, operation=layout.ALL_REDUCE) for row in table.rows]
        last = replace(last, operation=layout.ALL_REDUCE)
    if last.operation == layout.ALL_REDUCE and not text.test_ranks and ratio < 2:
        ranks = 2 / (2 - ratio)
        # Two decimals of both bandwidths determine few ranks exactly, and many ranks not at all.
        text.test_ranks = round(ranks) if ranks <= 64 and abs(ranks - round(ranks)) < 0.1 else 0


def _parse_log_line(content: NcclText, host: str, level: str, text: str) -> None:
    if host and len(content.hosts) < _MAX_HOSTS:
        content.hosts.add(host)
    if level == "WARN":
        if len(content.warnings) < _MAX_NAMES:
            content.warnings[text[:120]] += 1
        return
    before, _, transport = text.rpartition(" via ")
    if (channel := _VIA.match(transport)) and _CHANNEL.search(before):
        kind, details = channel[1], channel[2] or ""
        content.channels[f"NET/{details.partition('/')[0]}" if kind == "NET" else kind] += 1
        content.gpudirect_channels += "GDRDMA" in details
        if kind == "NET" and details.startswith("Socket"):
            content.socket_hosts.add(host)
    elif network := _NETWORK.fullmatch(text.partition(_USING)[2].strip()):
        content.networks[network[0]] += 1
    elif text.startswith("NET/Socket") and "Using" in text:
        content.interfaces |= set(_INTERFACE.findall(text)[:_MAX_NAMES])
    elif text.startswith("NET/IB"):
        if "No device found" in text:
            content.no_rdma.add(host)
        elif "Using" in text:
            content.rdma |= set(_RDMA_DEVICE.findall(text)[:_MAX_NAMES])
    elif (
        (variable := _VARIABLE.search(text))
        and ":" not in variable[2]
        and (len(content.variables) < _MAX_NAMES or variable[1] in content.variables)
    ):
        content.variables[variable[1]] = variable[2]
    if size := _SIZE.search(text):
        content.ranks = max(content.ranks, int(size[1][:9]))
        content.nodes = max(content.nodes, int(size[2][:9]))


def _parse_table_line(content: NcclText, line: str, operation: int) -> bool:
    """Parse a line of a table; True from its head on."""
    if _TABLE_HEAD.search(line):
        if not content.tables or content.tables[-1].rows:
            content.tables.append(NcclTable())
        return True
    if average := _AVERAGE.search(line):
        if content.tables:
            content.tables[-1].average_gbps = parse_number(average[1])
    elif rank := _RANK.search(line):
        content.test_ranks = max(content.test_ranks, int(rank[1]) + 1)
        if (host := _TEST_HOST.search(line)) and len(content.test_hosts) < _MAX_HOSTS:
            content.test_hosts.add(host[1])
        if (card := _CARD.search(line)) and len(content.cards) < _MAX_NAMES:
            content.cards.add(card[1])
    row = _TABLE_ROW.search(line)
    if row is None or len(row[1]) > 18:
        return False
    if not content.tables:
        content.tables.append(NcclTable())
    if sum(len(table.rows) for table in content.tables) >= _MAX_ROWS:
        return False
    time_us, algorithm, bus = (parse_number(row[column]) for column in (4, 5, 6))
    in_place_us = parse_number(row[7] or "")
    if time_us is None or algorithm is None or bus is None:
        return False
    content.tables[-1].rows.append(
        TableRow(operation, int(row[1]), row[2], row[3] or "", time_us, algorithm, bus, in_place_us)
    )
    return True


_NOTHING = (
    "the file names no transport and has no table",
    "run the job with NCCL_DEBUG=INFO, or nccl-tests",
)


class NcclOutput:
    """Importer of NCCL logs and nccl-tests tables."""

    name: ClassVar[str] = "nccl-text"
    title: ClassVar[str] = "NCCL log or nccl-tests table"
    combines_files: ClassVar[bool] = True
    tells: ClassVar[bool] = True

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether NCCL or nccl-tests wrote lines of this text."""
        if head[:1] in (b"{", b"[", b"\x80") or b"\x00" in head[:64]:
            return False
        if b"NCCL INFO " in head or b"NCCL WARN " in head or _TEST_HEAD.search(head):
            return True
        text = head[:8192].decode("utf-8", "replace")
        return any(_TABLE_HEAD.search(line) for line in text.splitlines())

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield nothing; add notes and the expected transfer times (`Account.facts`).

        Raises: CannotImportError when the files hold nothing usable.
        """
        texts: list[NcclText] = []
        for source, account in zip(sources, accounts):
            text = read_text(read_lines(source, account))
            account.read["channels"] += sum(text.channels.values())
            account.read["rows of a table"] += len(text.rows)
            account.read["variables"] += len(text.variables)
            account.notes += build_notes(text)
            account.facts.update(build_facts(text))
            texts.append(text)
            if not account.notes:
                account.refuse(*_NOTHING)
        if not any(account.notes for account in accounts):
            raise CannotImportError(*_NOTHING)
        compared = compare_tables([account.path.name for account in accounts], texts)
        accounts[0].answers += compared
        for account, text in zip(accounts, texts):
            tables = describe_tables(text)
            replaced = tables if compared else {}
            account.answers += [tables.get(n, n) for n in account.notes if n not in replaced]
            account.answered_notes += [note for note in tables if note not in replaced]
        yield from ()
