"""/proc/<pid>/mountstats: what every NFS mount asked of its server, and how long that took.

net/sunrpc/stats.c and fs/nfs/super.c of the kernel; nfs-utils' mountstats(8) explains the fields.

    device server:/export mounted on /data with fstype nfs4 statvers=1.1
            bytes:  1207640230 0 0 0 1210214218 0 295483 0
            xprt:   tcp 832 0 1 0 11 6428 6428 0 12154 0 24 26 5726
            per-op statistics
                READ: 1298 1298 0 207680 1210292152 6 79386 79407 0
                      ops sent major_timeouts bytes_sent bytes_received queue_ms rtt_ms execute_ms

Per operation, in ms summed over its requests: waiting for a slot, on the wire and at the server,
and all from request to result. The fifth and sixth of `bytes:` are what went over the wire.

A mount has one `xprt:` line per connection (nconnect, or a trunk of sessions); mounts of one server
may share them. Numbers behind the kind of transport (net/sunrpc/xprtsock.c, xprtrdma/transport.c):

    kind   port bind connect conn_ms idle sends replies bad_xids slots backlog most sending pending
    tcp     1    2      3       4     5     6      7       8       9     10     11    12      13
    rdma    1    2      3       4     5     6      7       8       9     10      -     -       -
    local   -    1      2       3     4     5      6       7       8      9     10    11      12
    udp     1    2      -       -     -     3      4       5       6      7      8     9      10

Slots, backlog, sending and pending are lengths of queues, added up at every send: divided by the
sends they are the mean length. `most` is the most slots there have been. A kernel before 3.4
("statvers=1.0") writes nothing behind the backlog.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from clusterprof.linux.mountinfo import unescape

OPERATIONS = (
    "READ", "WRITE", "GETATTR", "LOOKUP", "OPEN", "OPEN_NOATTR", "CLOSE", "ACCESS", "READDIR",
    "READDIRPLUS", "CREATE", "COMMIT",
)  # fmt: skip

# Which word of an `xprt:` line is what: connect, sends, bad XIDs, slots, backlog, most, sending,
# pending. The first two words are "xprt:" and the kind.
_WORDS: dict[bytes, tuple[int | None, ...]] = {
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
    """Major timeouts: all retries of a request went unanswered, and it began anew."""


class NfsTransport(NamedTuple):
    """What the connections of a mount did, added up; None where a kind does not count it."""

    connects: int | None
    sends: int | None
    bad_xids: int | None
    slots_used: int | None
    """Slots in use, added up at every send."""
    backlog: int | None
    """Requests that waited for a slot, added up at every send."""
    slots_most: int | None
    """The most slots one connection has had; the largest, not the sum."""
    sending: int | None
    pending: int | None


class NfsMount(NamedTuple):
    """One NFS mount."""

    point: str
    read_bytes: int | None
    """From the server; None when the kernel's line could not be understood."""
    write_bytes: int | None
    """To the server."""
    connections: int
    """How many there are, of kinds that are understood."""
    transport: NfsTransport
    operations: dict[str, NfsOperation]
    """By name, those of OPERATIONS the protocol version has."""


def parse_mountstats(data: bytes) -> list[NfsMount]:
    """Return the NFS mounts; of mounts that hide each other only the last, visible one."""
    found: dict[str, NfsMount] = {}
    for part in data.split(b"\ndevice "):
        if b" with fstype nfs" not in part[:9000]:
            continue
        head, _, body = part.removeprefix(b"device ").partition(b"\n")
        match = _MOUNT.match(b"device " + head)
        if match:
            point = unescape(match[2].decode(errors="surrogateescape"))
            found[point] = _parse_mount(point, body)
    return list(found.values())


def _parse_mount(point: str, body: bytes) -> NfsMount:
    totals, _, table = body.partition(b"per-op statistics\n")
    read_bytes = write_bytes = None
    transports = []
    for line in totals.split(b"\n"):
        fields = line.split()
        if not fields:
            continue
        if fields[0] == b"bytes:" and len(fields) > 6:
            read_bytes, write_bytes = _number(fields[5]), _number(fields[6])
        elif fields[0] == b"xprt:" and len(fields) > 1 and fields[1] in _WORDS:
            transports.append(_parse_transport(fields))
    operations = {}
    for line in table.split(b"\n"):
        name, _, numbers = line.partition(b":")
        word = name.strip().decode(errors="replace")
        row = numbers.split(None, 8)[:8]
        if word in OPERATIONS and len(row) == 8 and all(number.isdigit() for number in row):
            operations[word] = _parse_operation(row)
    whole = _together(transports)
    return NfsMount(point, read_bytes, write_bytes, len(transports), whole, operations)


def _parse_transport(fields: list[bytes]) -> NfsTransport:
    words = _WORDS[fields[1]]
    return NfsTransport._make(
        _number(fields[at]) if at is not None and at < len(fields) else None for at in words
    )


def _number(word: bytes) -> int | None:
    """What is no number is not known; it must not cost the rest of the mount."""
    return int(word) if word.isdigit() else None


def _together(transports: list[NfsTransport]) -> NfsTransport:
    """Add connections up; unknown of one is unknown of all."""
    sums: list[int | None] = []
    for name, values in zip(NfsTransport._fields, zip(*transports)):
        known = [value for value in values if value is not None]
        whole = max(known, default=0) if name == "slots_most" else sum(known)
        sums.append(whole if len(known) == len(values) else None)
    return NfsTransport._make(sums or [None] * len(NfsTransport._fields))


def _parse_operation(row: list[bytes]) -> NfsOperation:
    done, sent = int(row[0]), int(row[1])
    # Both are counted when a request ends, but not together: for an instant `sent` can be behind.
    again = max(0, sent - done)
    return NfsOperation(done, again, int(row[5]), int(row[6]), int(row[7]), int(row[2]))
