"""What NCCL prints: its own log (NCCL_DEBUG=INFO), and the tables of nccl-tests.

## What is read

Logs of one or more ranks, alone or between other output: the version, the network it chose, the
RDMA devices it found, variables it was given, and the transport of every channel (`via P2P`, `SHM`,
`NET/IB/0/GDRDMA`, `NET/Socket/0`). Tables of nccl-tests (`all_reduce_perf -b 8 -e 16G -f 2`): size,
type, operation, time, bandwidths, out of place and in place; a prefix such as `0: ` of a launcher
is passed over. Both may be in one file. A log says nothing of when, so there are no spans in it: it
is given beside a recording or traces of the same job.

## How it is understood

Data take a slow path (`net-path`) when ranks on different nodes talk through `NET/Socket` although
NCCL saw RDMA devices, or was told not to look (`NCCL_IB_DISABLE=1`); when RDMA goes without
GPUDirect (`GDRDMA`); and when GPUs of one node talk through memory of the host (`SHM`) because
`NCCL_P2P_DISABLE` is set. A table says how long an operation takes on this network when nothing
disturbs it: the shorter time of out of place and in place at each size, between sizes in
proportion. That is what the transfers of traces given beside it are expected to take, where the
rate of the links is not known.

## Where it is blind

A log without `NCCL_DEBUG=INFO` names no channel. `No device found` does not say whether there is
one: look at `ibv_devinfo` on that host. A table is of the ranks it was made with; whether the job
has as many is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.nccl_said import NcclText, TableRow, facts_of, notes_of
from clusterprof.importers.tables import NodeTables
from clusterprof.importers.text_lines import lines_of, text_number
from clusterprof.probe import layout

# Lines may be anything: none of these takes longer than a line is long.
_INFO = re.compile(r"NCCL (INFO|WARN) ")
_HOST = re.compile(r"(?<![\w.-])([\w.-]{1,255}):\d{1,10}:\d{1,10} \[-?\d{1,6}\] (?:\S{1,128} )?$")
_BEFORE = 448  # characters, of the host and what else stands before NCCL
_VERSION = re.compile(r"NCCL version (\d+\.\d+[\w.+-]*)")
_VARIABLE = re.compile(
    r"(?<![A-Z0-9_])(NCCL_[A-Z0-9_]{1,64}) set (?:by environment )?to (\S+?)\.?\s*$"
)
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? ?: ?\d")
_VIA = re.compile(r"(P2P|SHM|NET|COLLNET|NVLS)(?:/(.+))?")
_USING = "Using network "
_NETWORK = re.compile(r"\w[\w .-]{0,63}")
_DEVICE = re.compile(r"\[\d+\] ?([A-Za-z][\w.-]*):\d+/(?:IB|RoCE|IB/SHARP|uverbs)")
_SIZE = re.compile(r"\bn[rR]anks (\d+) n[nN]odes (\d+)")
_HEAD = re.compile(r"#\s+size\s+count\s+type(?:\s+redop)?(?:\s+root)?\s+time\s+algbw\s+busbw")
_ROW = re.compile(
    r"(?<!\d)(\d{1,18})\s+\d+\s+([a-z]\w*)(?:\s+([a-z]\w*|none))?(?:\s+-?\d+)?"
    r"\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s+(?:\S+)"
    r"(?:\s+([\d.]+|N/A)\s+([\d.]+|N/A)\s+([\d.]+|N/A)\s+\S+)?\s*$"
)
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*([\d.]+)")
_RANK = re.compile(r"#\s+Rank\s+\d+\s")
_PROGRAMS = {
    "all_reduce": layout.ALL_REDUCE, "all_gather": layout.ALL_GATHER,
    "reduce_scatter": layout.REDUCE_SCATTER, "broadcast": layout.BROADCAST,
    "reduce": layout.REDUCE, "alltoall": layout.ALL_TO_ALL, "gather": layout.GATHER,
    "scatter": layout.SCATTER, "sendrecv": layout.SEND,
}  # fmt: skip
_PROGRAM = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|broadcast|alltoall|gather|scatter|"
                      r"sendrecv|reduce)_perf\b")  # fmt: skip
_ROWS_AT_MOST = 4096
_HOSTS_AT_MOST = 65_536
_NAMES_AT_MOST = 32


def read_text(lines: Iterator[bytes]) -> NcclText:
    """Read the lines of a log or a table; what is neither is passed over."""
    found = NcclText()
    operation = layout.OTHER_OPERATION
    table = False
    for raw in lines:
        line = raw.decode("utf-8", "replace").strip()
        if "NCCL" in line:
            version = _VERSION.search(line)
            if version:
                found.versions[version[1]] += 1
            said = _INFO.search(line)
            if said:
                host = _HOST.search(line[max(said.start() - _BEFORE, 0) : said.start()])
                _logged(found, host[1] if host else "", said[1], line[said.end() :])
        elif program := _PROGRAM.search(line):
            operation = _PROGRAMS[program[1]]
        if table or "size" in line or "#" in line:
            table = _tabled(found, line, operation) or table
    _infer(found)
    return found


def _infer(found: NcclText) -> None:
    """Say what a table without its program's name is of: only an all_reduce moves data twice.

    Its bus bandwidth is 2 (n - 1) / n of its bandwidth, n being the ranks.
    """
    last = max(found.rows, key=lambda row: row.algorithm_gbps, default=None)
    if last is None or last.algorithm_gbps < 1:
        return
    ratio = last.bus_gbps / last.algorithm_gbps
    if last.operation == layout.OTHER_OPERATION and last.reduction and 1.05 < ratio < 2:
        found.rows = [replace(row, operation=layout.ALL_REDUCE) for row in found.rows]
        last = replace(last, operation=layout.ALL_REDUCE)
    if last.operation == layout.ALL_REDUCE and not found.test_ranks and ratio < 2:
        ranks = 2 / (2 - ratio)
        # Two digits behind the point of both tell few ranks exactly, and many not at all.
        found.test_ranks = round(ranks) if ranks <= 64 and abs(ranks - round(ranks)) < 0.1 else 0


def _logged(found: NcclText, host: str, level: str, text: str) -> None:
    if host and len(found.hosts) < _HOSTS_AT_MOST:
        found.hosts.add(host)
    if level == "WARN":
        if len(found.warnings) < _NAMES_AT_MOST:
            found.warnings[text[:120]] += 1
        return
    before, _, behind = text.rpartition(" via ")
    if (channel := _VIA.match(behind)) and _CHANNEL.search(before):
        kind, more = channel[1], channel[2] or ""
        found.channels[f"NET/{more.partition('/')[0]}" if kind == "NET" else kind] += 1
        found.direct += "GDRDMA" in more
        if kind == "NET" and more.startswith("Socket"):
            found.socket_hosts.add(host)
    elif network := _NETWORK.fullmatch(text.partition(_USING)[2].strip()):
        found.networks[network[0]] += 1
    elif text.startswith("NET/IB"):
        if "No device found" in text:
            found.no_rdma.add(host)
        elif "Using" in text:
            found.rdma |= set(_DEVICE.findall(text)[:_NAMES_AT_MOST])
    elif (
        (variable := _VARIABLE.search(text))
        and ":" not in variable[2]
        and (len(found.variables) < _NAMES_AT_MOST or variable[1] in found.variables)
    ):
        found.variables[variable[1]] = variable[2]
    if size := _SIZE.search(text):
        found.ranks = max(found.ranks, int(size[1][:9]))
        found.nodes = max(found.nodes, int(size[2][:9]))


def _tabled(found: NcclText, line: str, operation: int) -> bool:
    """Take a line of a table; True from its head on."""
    if _HEAD.search(line):
        return True
    if average := _AVERAGE.search(line):
        found.average_gbps = text_number(average[1])
    elif _RANK.search(line):
        found.test_ranks += 1
    row = _ROW.search(line)
    if row is None or len(found.rows) >= _ROWS_AT_MOST or len(row[1]) > 18:
        return False
    time_us, algorithm, bus = (text_number(row[at]) for at in (4, 5, 6))
    again = text_number(row[7] or "")
    if time_us is None or algorithm is None or bus is None:
        return False
    found.rows.append(
        TableRow(operation, int(row[1]), row[2], row[3] or "", time_us, algorithm, bus, again)
    )
    return True


class NcclOutput:
    """Logs of NCCL and tables of nccl-tests."""

    name: ClassVar[str] = "nccl-text"
    title: ClassVar[str] = "NCCL log or nccl-tests table"
    together: ClassVar[bool] = False
    tells: ClassVar[bool] = True

    def recognises(self, head: bytes, path: Path) -> bool:
        """Say whether NCCL or nccl-tests wrote lines of this text."""
        if head[:1] in (b"{", b"[", b"\x80") or b"\x00" in head[:64]:
            return False
        if b"NCCL INFO " in head or b"NCCL WARN " in head:
            return True
        text = head[:8192].decode("utf-8", "replace")
        return any(_HEAD.search(line) for line in text.splitlines())

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield nothing: accounts get notes, and what a network should do (`Account.facts`).

        Raises CannotImportError when there is nothing in the files.
        """
        for source, account in zip(sources, accounts):
            found = read_text(lines_of(source, account))
            account.read["channels"] += sum(found.channels.values())
            account.read["rows of a table"] += len(found.rows)
            account.read["variables"] += len(found.variables)
            account.notes += notes_of(found)
            account.facts.update(facts_of(found))
            if not account.notes:
                raise CannotImportError(
                    "no transport is named in it, and there is no table",
                    "run the job with NCCL_DEBUG=INFO, or nccl-tests",
                )
        yield from ()
