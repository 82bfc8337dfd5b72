"""/proc/<pid>/mountstats: what every NFS mount asked of its server, and how long that took.

net/sunrpc/stats.c and fs/nfs/super.c of the kernel; nfs-utils' mountstats(8) explains the fields.

    device server:/export mounted on /data with fstype nfs4 statvers=1.1
            bytes:  1207640230 0 0 0 1210214218 0 295483 0
            xprt:   tcp 832 0 1 0 11 6428 6428 0 12154 0 24 26 5726
            per-op statistics
                READ: 1298 1298 0 207680 1210292152 6 79386 79407 0
                      ops sent major_timeouts bytes_sent bytes_received queue_ms rtt_ms execute_ms

Per operation, in ms summed over its requests: waiting for a slot, on the wire and at the server,
and all from request to result. The fifth and sixth of `bytes:` are what went over the wire; the
tenth number of `xprt: tcp` is the length of the backlog, added up at every send.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from clusterprof.linux.mountinfo import unescape

OPERATIONS = (
    "READ", "WRITE", "GETATTR", "LOOKUP", "OPEN", "OPEN_NOATTR", "CLOSE", "ACCESS", "READDIR",
    "READDIRPLUS", "CREATE", "COMMIT",
)  # fmt: skip

_BACKLOG_FIELD = {b"tcp": 11, b"rdma": 11, b"udp": 8, b"local": 10}
_MOUNT = re.compile(rb"^device (.*) mounted on (.*) with fstype (nfs4?)(?: |$)")


class NfsOperation(NamedTuple):
    """One kind of request since the mount."""

    operations: int
    retransmits: int
    queue_ms: int
    rtt_ms: int
    execute_ms: int


class NfsMount(NamedTuple):
    """One NFS mount."""

    point: str
    read_bytes: int | None
    """From the server; None when the kernel's line could not be understood."""
    write_bytes: int | None
    """To the server."""
    backlog: int | None
    """Requests that waited for a slot, added up at every send; sum over transports."""
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
    read_bytes = write_bytes = backlog = None
    for line in totals.split(b"\n"):
        fields = line.split()
        if not fields:
            continue
        if fields[0] == b"bytes:" and len(fields) > 6:
            read_bytes, write_bytes = int(fields[5]), int(fields[6])
        elif fields[0] == b"xprt:" and len(fields) > 1:
            at = _BACKLOG_FIELD.get(fields[1])
            if at is not None and len(fields) > at:
                backlog = (backlog or 0) + int(fields[at])
    operations = {}
    for line in table.split(b"\n"):
        name, _, numbers = line.partition(b":")
        word = name.strip().decode(errors="replace")
        if word in OPERATIONS:
            operations[word] = _parse_operation(numbers.split(None, 8))
    return NfsMount(point, read_bytes, write_bytes, backlog, operations)


def _parse_operation(row: list[bytes]) -> NfsOperation:
    done, sent = int(row[0]), int(row[1])
    # Both are counted when a request ends, but not together: for an instant `sent` can be behind.
    return NfsOperation(done, max(0, sent - done), int(row[5]), int(row[6]), int(row[7]))
