"""/proc/fs/cifs: what every mounted share was asked, and what waits for its server.

fs/smb/client/cifs_debug.c and smb2ops.c of the kernel. `Stats` has a part per server and in it one
per share; `time` only where the kernel was built with CONFIG_CIFS_STATS2:

    Max requests in flight: 12
    Total time spent processing by command. Time units are jiffies (250 per second)
      SMB3 CMD      Number  Total Time      Fastest Slowest
      8             50      600             1       40
    1) \\\\server\\share
    SMBs: 180
    Bytes read: 1048576  Bytes written: 2048
    Creates: 60 total 2 failed            (before Linux 4.20: "60 sent 2 failed")
    Reads: 50 total 0 failed

    DebugData:  1) ConnectionId: 0x1 Hostname: server
                Number of credits: 8190,1,1 Dialect 0x311
                … Req On Wire: 3 In Send: 1 In MaxReq Wait: 7

SMB1 writes bytes behind its reads instead: "Reads:  50 Bytes: 1048576". Counts of requests have 32
bits, printed with a sign. Time is from when a request has got its credit to its end: how long it
waited for one is not counted, only how many wait now. Writing "0" to Stats clears it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from clusterprof.linux.mountinfo import parse_mountinfo

OPERATIONS = {
    "Creates": "CREATE",
    "Opens": "CREATE",
    "Closes": "CLOSE",
    "Flushes": "FLUSH",
    "Reads": "READ",
    "Writes": "WRITE",
    "QueryDirectories": "QUERY_DIRECTORY",
    "QueryInfos": "QUERY_INFO",
    "SetInfos": "SET_INFO",
}
"""Words of `Stats` and the operation of the protocol."""
_COMMANDS = {5: "CREATE", 6: "CLOSE", 7: "FLUSH", 8: "READ", 9: "WRITE", 14: "QUERY_DIRECTORY",
             16: "QUERY_INFO", 17: "SET_INFO"}  # fmt: skip
_SHARE = re.compile(r"\d+\) (\\\\[^\\\s]+\\.*)")
_JIFFIES = re.compile(r"jiffies \((\d+) per second\)")
_BYTES = re.compile(r"Bytes read: (\d+)\s+Bytes written: (\d+)")
_COUNT = re.compile(r"(\w+):\s+(-?\d+)(?: Bytes: (\d+))?")
_SERVER = re.compile(r"Hostname: (\S+)")
_CREDITS = re.compile(r"Number of credits: (\d+)")
_WIRE = re.compile(r"Req On Wire: (-?\d+)")
_WAITING = re.compile(r"In MaxReq Wait: (-?\d+)")
_SECOND_NS = 1_000_000_000
_32_BITS = (1 << 32) - 1


@dataclass(slots=True)
class Share:
    """What one mounted share was asked."""

    name: str
    """//server/share."""
    read_bytes: int | None = None
    write_bytes: int | None = None
    operations: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Server:
    """What one server was asked, all its shares together."""

    shares: list[Share] = field(default_factory=list)
    time_ns: dict[str, int] = field(default_factory=dict)
    """By operation; newer kernels name only those that happened."""
    keeps_time: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits for one server now; None where the kernel does not write it."""

    server: str
    credits: int | None
    in_flight: int | None
    waiting: int | None


def parse_stats(data: bytes) -> list[Server]:
    """Return the servers of `Stats`, in order; lines that are not understood are left out."""
    servers: list[Server] = []
    share: Share | None = None
    hertz = 0
    for line in data.decode(errors="replace").split("\n"):
        if line.startswith("Max requests in flight") or (not servers and _SHARE.match(line)):
            servers.append(Server())
            share, hertz = None, 0
        if not servers:
            continue
        if match := _SHARE.match(line):
            name = match[1].split("\t")[0].removesuffix(" DISCONNECTED").rstrip()
            share = Share(name.replace("\\", "/"))
            servers[-1].shares.append(share)
        elif match := _JIFFIES.search(line):
            hertz = int(match[1])
            servers[-1].keeps_time = hertz > 0
        elif share is not None:
            _count(share, line)
        elif hertz:
            words = line.split()
            if len(words) == 5 and words[0].isdigit() and int(words[0]) in _COMMANDS:
                operation = _COMMANDS[int(words[0])]
                servers[-1].time_ns[operation] = int(words[2]) * _SECOND_NS // hertz
    return servers


def _count(share: Share, line: str) -> None:
    if match := _BYTES.match(line):
        share.read_bytes, share.write_bytes = int(match[1]), int(match[2])
        return
    match = _COUNT.match(line)
    if match is None or match[1] not in OPERATIONS:
        return
    operation = OPERATIONS[match[1]]
    share.operations[operation] = share.operations.get(operation, 0) + (int(match[2]) & _32_BITS)
    if match[3] is not None:  # SMB1
        if operation == "READ":
            share.read_bytes = int(match[3])
        else:
            share.write_bytes = int(match[3])


def parse_debug(data: bytes) -> list[Queue]:
    """Return what waits for each server of `DebugData`; several connections are added up."""
    found: dict[str, Queue] = {}
    text = data.decode(errors="replace").partition("Servers:")[2]
    starts = [match.start() for match in _SERVER.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)]):
        part = text[start:end]
        name = part.removeprefix("Hostname: ").split(None, 1)[0]
        numbers = []
        for pattern in (_CREDITS, _WIRE, _WAITING):
            # The second and further connections of a session say the same of themselves.
            values = [int(value) for value in pattern.findall(part)]
            numbers.append(max(0, sum(values)) if values else None)
        before = found.get(name)
        if before is not None:
            pairs = zip((before.credits, before.in_flight, before.waiting), numbers)
            numbers = [None if a is None or b is None else a + b for a, b in pairs]
        found[name] = Queue(name, *numbers)
    return list(found.values())


def points(mountinfo: bytes) -> dict[str, list[str]]:
    """Return where each share is mounted, by its name in small letters."""
    found: dict[str, list[str]] = {}
    for mount in parse_mountinfo(mountinfo):
        if mount.type in ("cifs", "smb3"):
            name = mount.source.replace("\\", "/").rstrip("/").lower()
            found.setdefault(name, []).append(mount.point)
    return found
