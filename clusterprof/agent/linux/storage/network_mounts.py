"""/proc/<pid>/mountstats: requests of every NFS mount to its server and their times.

net/sunrpc/stats.c and fs/nfs/super.c of the kernel; nfs-utils' mountstats(8) explains the fields.

    device server:/export mounted on /data with fstype nfs4 statvers=1.1
            bytes:  1207640230 0 0 0 1210214218 0 295483 0
            xprt:   tcp 832 0 1 0 11 6428 6428 0 12154 0 24 26 5726
            per-op statistics
                READ: 1298 1298 0 207680 1210292152 6 79386 79407 0
                      ops sent major_timeouts bytes_sent bytes_received queue_ms rtt_ms execute_ms

The three times per operation, in ms summed over its requests, are: waiting for a slot, network and
server, and the whole request. The fifth and sixth number of `bytes:` are the bytes transferred over
the network.

A mount has one `xprt:` line per connection (nconnect, or a trunk of sessions); mounts of one server
may share them. Numbers after the kind of transport (net/sunrpc/xprtsock.c, xprtrdma/transport.c):

    kind   port bind connect conn_ms idle sends replies bad_xids slots backlog most sending pending
    tcp     1    2      3       4     5     6      7       8       9     10     11    12      13
    rdma    1    2      3       4     5     6      7       8       9     10      -     -       -
    local   -    1      2       3     4     5      6       7       8      9     10    11      12
    udp     1    2      -       -     -     3      4       5       6      7      8     9      10

Slots, backlog, sending and pending are queue lengths summed over all sends: divided by the sends
they give the mean length. `most` is the largest number of slots so far. A kernel before 3.4
("statvers=1.0") writes nothing after the backlog.

/proc/fs/cifs: requests to every mounted share, and requests that wait for its server.

fs/smb/client/cifs_debug.c and smb2ops.c of the kernel. `Stats` has a section per server and in it
one per share; `time` exists only where the kernel was built with CONFIG_CIFS_STATS2:

    Max requests in flight: 12
    Total time spent processing by command. Time units are jiffies (250 per second)
      SMB3 CMD      Number  Total Time      Fastest Slowest
      8             50      600             1       40
    1) //server/share                     (written with backslashes)
    SMBs: 180
    Bytes read: 1048576  Bytes written: 2048
    Creates: 60 total 2 failed            (before Linux 4.20: "60 sent 2 failed")
    Reads: 50 total 0 failed

    DebugData:  1) ConnectionId: 0x1 Hostname: server
                Number of credits: 8190,1,1 Dialect 0x311
                … Req On Wire: 3 In Send: 1 In MaxReq Wait: 7

SMB1 writes bytes after its reads instead: "Reads:  50 Bytes: 1048576". Counts of
requests have 32 bits, printed as signed numbers. Time runs from when a request got its
credit to its end: the wait for a credit is not counted, only how many requests wait
now. Writing "0" to Stats clears it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from clusterprof.agent.linux.storage.disks import decode_octal_escapes, parse_mountinfo
from clusterprof.units import SECOND_NS

NFS_OPERATIONS = (
    "READ",
    "WRITE",
    "GETATTR",
    "LOOKUP",
    "OPEN",
    "OPEN_NOATTR",
    "CLOSE",
    "ACCESS",
    "READDIR",
    "READDIRPLUS",
    "CREATE",
    "COMMIT",
)

# Index in an `xprt:` line of: connect, sends, bad XIDs, slots, backlog, most, sending, pending.
# The first two words are "xprt:" and the kind.
_TRANSPORT_WORDS: dict[bytes, tuple[int | None, ...]] = {
    b"tcp": (4, 7, 9, 10, 11, 12, 13, 14),
    b"rdma": (4, 7, 9, 10, 11, None, None, None),
    b"local": (3, 6, 8, 9, 10, 11, 12, 13),
    b"udp": (None, 4, 6, 7, 8, 9, 10, 11),
}
_MOUNT = re.compile(rb"^device (.*) mounted on (.*) with fstype (nfs4?)(?: |$)")


class NfsOperation(NamedTuple):
    """One kind of request since the mount."""

    operations: int
    retransmits: int
    queue_ms: int
    rtt_ms: int
    execute_ms: int
    timeouts: int
    """Major timeouts: all retries of a request went unanswered, and it was started again."""


class NfsTransport(NamedTuple):
    """Counters summed over the connections of a mount; None = not counted."""

    connects: int | None
    sends: int | None
    bad_xids: int | None
    slots_used: int | None
    """Slots in use, summed over all sends."""
    backlog: int | None
    """Requests that waited for a slot, summed over all sends."""
    slots_most: int | None
    """The largest number of slots of any connection; a maximum, not a sum."""
    sending: int | None
    pending: int | None


class NfsMount(NamedTuple):
    """One NFS mount."""

    point: str
    read_bytes: int | None
    """From the server; None when the kernel's line could not be parsed."""
    write_bytes: int | None
    """To the server."""
    connections: int
    """Number of connections of known transports."""
    transport: NfsTransport
    operations: dict[str, NfsOperation]
    """By name; those of `NFS_OPERATIONS` that the protocol version has."""


def parse_mountstats(data: bytes) -> list[NfsMount]:
    """Parse the NFS mounts; of mounts that hide each other only the last, visible one."""
    mounts: dict[str, NfsMount] = {}
    for part in data.split(b"\ndevice "):
        if b" with fstype nfs" not in part[:9000]:
            continue
        head, _, body = part.removeprefix(b"device ").partition(b"\n")
        match = _MOUNT.match(b"device " + head)
        if match:
            point = decode_octal_escapes(match[2].decode(errors="surrogateescape"))
            mounts[point] = _parse_mount(point, body)
    return list(mounts.values())


def _parse_mount(point: str, body: bytes) -> NfsMount:
    totals, _, table = body.partition(b"per-op statistics\n")
    read_bytes = write_bytes = None
    transports = []
    for line in totals.split(b"\n"):
        fields = line.split()
        if not fields:
            continue
        if fields[0] == b"bytes:" and len(fields) > 6:
            read_bytes, write_bytes = _parse_number(fields[5]), _parse_number(fields[6])
        elif fields[0] == b"xprt:" and len(fields) > 1 and fields[1] in _TRANSPORT_WORDS:
            transports.append(_parse_transport(fields))
    operations = {}
    for line in table.split(b"\n"):
        name, _, numbers = line.partition(b":")
        word = name.strip().decode(errors="replace")
        row = numbers.split(None, 8)[:8]
        if word in NFS_OPERATIONS and len(row) == 8 and all(number.isdigit() for number in row):
            operations[word] = _parse_operation(row)
    transport_sum = _sum_transports(transports)
    return NfsMount(point, read_bytes, write_bytes, len(transports), transport_sum, operations)


def _parse_transport(fields: list[bytes]) -> NfsTransport:
    words = _TRANSPORT_WORDS[fields[1]]
    return NfsTransport._make(
        _parse_number(fields[index]) if index is not None and index < len(fields) else None
        for index in words
    )


def _parse_number(word: bytes) -> int | None:
    """Parse a number; other text is None and must not invalidate the rest of the mount."""
    return int(word) if word.isdigit() else None


def _sum_transports(transports: list[NfsTransport]) -> NfsTransport:
    """Sum the counters of connections; one unknown value makes the sum unknown."""
    sums: list[int | None] = []
    for name, values in zip(NfsTransport._fields, zip(*transports)):
        known_values = [value for value in values if value is not None]
        total = max(known_values, default=0) if name == "slots_most" else sum(known_values)
        sums.append(total if len(known_values) == len(values) else None)
    return NfsTransport._make(sums or [None] * len(NfsTransport._fields))


def _parse_operation(row: list[bytes]) -> NfsOperation:
    completed, sent = int(row[0]), int(row[1])
    # Both are counted when a request ends, but not atomically: `sent` can briefly lag behind.
    again = max(0, sent - completed)
    return NfsOperation(completed, again, int(row[5]), int(row[6]), int(row[7]), int(row[2]))


CIFS_OPERATIONS = {
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
"""Words of `Stats` and the protocol operation that each of them counts."""
_COMMANDS = {
    5: "CREATE",
    6: "CLOSE",
    7: "FLUSH",
    8: "READ",
    9: "WRITE",
    14: "QUERY_DIRECTORY",
    16: "QUERY_INFO",
    17: "SET_INFO",
}
_SHARE = re.compile(r"\d+\) (\\\\[^\\\s]+\\.*)")
_JIFFIES = re.compile(r"jiffies \((\d+) per second\)")
_SHARE_BYTES = re.compile(r"Bytes read: (\d+)\s+Bytes written: (\d+)")
_COUNT = re.compile(r"(\w+):\s+(-?\d+)(?: Bytes: (\d+))?")
_SERVER = re.compile(r"Hostname: (\S+)")
_CREDITS = re.compile(r"Number of credits: (\d+)")
_WIRE = re.compile(r"Req On Wire: (-?\d+)")
_WAITING = re.compile(r"In MaxReq Wait: (-?\d+)")
_32_BITS = (1 << 32) - 1


@dataclass(slots=True)
class CifsShare:
    """Request counters of one mounted share."""

    name: str
    """//server/share."""
    read_bytes: int | None = None
    write_bytes: int | None = None
    operations: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class CifsServer:
    """Request times of one server, all its shares together."""

    shares: list[CifsShare] = field(default_factory=list)
    time_ns: dict[str, int] = field(default_factory=dict)
    """By operation; newer kernels list only operations that occurred."""
    keeps_time: bool = False


@dataclass(frozen=True, slots=True)
class CifsQueue:
    """Requests that wait for one server now; None where the kernel does not report it."""

    server: str
    credits: int | None
    in_flight: int | None
    waiting: int | None


def parse_stats(data: bytes) -> list[CifsServer]:
    """Parse the servers of `Stats`, in order; unknown lines are skipped."""
    servers: list[CifsServer] = []
    share: CifsShare | None = None
    hertz = 0
    for line in data.decode(errors="replace").split("\n"):
        if line.startswith("Max requests in flight") or (not servers and _SHARE.match(line)):
            servers.append(CifsServer())
            share, hertz = None, 0
        if not servers:
            continue
        if match := _SHARE.match(line):
            name = match[1].split("\t")[0].removesuffix(" DISCONNECTED").rstrip()
            share = CifsShare(name.replace("\\", "/"))
            servers[-1].shares.append(share)
        elif match := _JIFFIES.search(line):
            hertz = int(match[1])
            servers[-1].keeps_time = hertz > 0
        elif share is not None:
            _add_counts(share, line)
        elif hertz:
            words = line.split()
            if len(words) == 5 and words[0].isdigit() and int(words[0]) in _COMMANDS:
                operation = _COMMANDS[int(words[0])]
                servers[-1].time_ns[operation] = int(words[2]) * SECOND_NS // hertz
    return servers


def _add_counts(share: CifsShare, line: str) -> None:
    if match := _SHARE_BYTES.match(line):
        share.read_bytes, share.write_bytes = int(match[1]), int(match[2])
        return
    match = _COUNT.match(line)
    if match is None or match[1] not in CIFS_OPERATIONS:
        return
    operation = CIFS_OPERATIONS[match[1]]
    share.operations[operation] = share.operations.get(operation, 0) + (int(match[2]) & _32_BITS)
    if match[3] is not None:  # SMB1
        if operation == "READ":
            share.read_bytes = int(match[3])
        else:
            share.write_bytes = int(match[3])


def parse_debug(data: bytes) -> list[CifsQueue]:
    """Parse the queues of each server from `DebugData`; several connections are summed."""
    queues: dict[str, CifsQueue] = {}
    text = data.decode(errors="replace").partition("Servers:")[2]
    starts = [match.start() for match in _SERVER.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)]):
        part = text[start:end]
        name = part.removeprefix("Hostname: ").split(None, 1)[0]
        numbers = []
        for pattern in (_CREDITS, _WIRE, _WAITING):
            # Further connections of a session repeat these lines for themselves.
            values = [int(value) for value in pattern.findall(part)]
            numbers.append(max(0, sum(values)) if values else None)
        before = queues.get(name)
        if before is not None:
            pairs = zip((before.credits, before.in_flight, before.waiting), numbers)
            numbers = [None if a is None or b is None else a + b for a, b in pairs]
        queues[name] = CifsQueue(name, *numbers)
    return list(queues.values())


def find_share_mount_points(mountinfo: bytes) -> dict[str, list[str]]:
    """Find where each share is mounted, by its name in lower case."""
    mount_points: dict[str, list[str]] = {}
    for mount in parse_mountinfo(mountinfo):
        if mount.type in ("cifs", "smb3"):
            name = mount.source.replace("\\", "/").rstrip("/").lower()
            mount_points.setdefault(name, []).append(mount.point)
    return mount_points
