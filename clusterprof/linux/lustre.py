"""Lustre clients: what programs asked of a mount, and what its servers were asked.

The Lustre Operations Manual, "Lustre Parameters"; lustre/obdclass/lprocfs_status.c,
lustre/ptlrpc/lproc_ptlrpc.c and lustre/osc/lproc_osc.c. A parameter lies, by version, in
/proc/fs/lustre, /sys/fs/lustre or /sys/kernel/debug/lustre, the last readable by root only.

    llite/scratch-ffff88105db50000/stats                 what programs called
    osc/scratch-OST0003-osc-ffff88105db50000/stats       RPCs to one object server
        read_bytes    120 samples [bytes] 4096 4194304 503316480 …   count … min max sum squares
        ost_read      120 samples [usec] 130 9000 60000 …
    osc/…/rpc_stats       queues of the target, and histograms
    osc/…/import          state of its connection
    mdc/scratch-MDT0000-mdc-ffff88105db50000/stats       RPCs to one metadata server

A line is only there once it counted something, so what is missing in a file that was read is zero.
`echo clear` sets a file back to zero. Times are from sending an RPC to its reply: what it waited on
this machine before is in no counter, only in the queue of pages ("pending read pages") of now.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from clusterprof.errors import Unavailable, unavailable_from_os_error
from clusterprof.linux.mountinfo import parse_mountinfo
from clusterprof.linux.roots import Roots

LONGEST_RECORD = 512  # bytes of a line
BUCKETS = 32
"""Of a histogram; the last holds everything above."""
ROOT_ONLY = "run the recorder as root, or let it read /sys/kernel/debug"
_TARGET = re.compile(r"(.+)-(OST|MDT)([0-9a-f]{4})-(osc|mdc)-([0-9a-f]{8,16})")
_MOUNT = re.compile(r"(.+)-([0-9a-f]{8,16})")
_NOT_ASKED_FOR = ("obd_ping", "ldlm_cancel", "mds_connect", "mds_disconnect", "ost_connect")
_AT_REST = (b"FULL", b"IDLE")


class Counted(NamedTuple):
    """One line of a `stats` file."""

    samples: int
    unit: str
    """bytes, usec, usecs, regs, reqs, …"""
    total: int | None
    """Sum of the samples; None where only they were counted."""


class Histogram(NamedTuple):
    """What `rpc_stats` says of reads."""

    in_flight: int
    pending_pages: int
    sent: Mapping[int, int]
    """RPCs by how many were under way with them."""


class Target(NamedTuple):
    """One server's target as one mount sees it."""

    folder: str
    """Below osc or mdc."""
    kind: str
    """osc or mdc."""
    name: str
    """scratch-OST0003."""


class Mounted(NamedTuple):
    """One mounted file system."""

    folder: str
    """Below llite."""
    point: str
    """Where it is mounted, else the folder's name."""
    targets: tuple[Target, ...]


def parse_stats(data: bytes) -> dict[str, Counted]:
    """Return the counters of a `stats` file by name; lines of another form are left out."""
    found: dict[str, Counted] = {}
    for line in data.decode(errors="replace").split("\n"):
        words = line.split()
        if len(words) < 4 or words[2] != "samples" or not words[1].isdigit():
            continue  # snapshot_time, start_time, elapsed_time
        # The sum of squares, behind the sum, overflows; it is not read.
        total = int(words[6]) if len(words) > 6 and words[6].isdigit() else None
        found[words[0]] = Counted(int(words[1]), words[3].strip("[]"), total)
    return found


def parse_rpc_stats(data: bytes) -> Histogram:
    """Return queues and the histogram of reads; raise ValueError when they are not there."""
    now: dict[bytes, int] = {}
    sent: dict[int, int] = {}
    inside = False
    for line in data.split(b"\n"):
        name, mark, rest = line.partition(b":")
        words = rest.split()
        if line.startswith(b"rpcs in flight"):
            inside = True
        elif not line.strip():
            inside = False
        elif inside and mark and name.strip().isdigit() and words:
            sent[int(name)] = int(words[0])
        elif name in (b"read RPCs in flight", b"pending read pages"):
            now[name] = int(words[0]) if words else 0
    if len(now) < 2:
        raise ValueError("rpc_stats has no queues")
    return Histogram(now[b"read RPCs in flight"], now[b"pending read pages"], sent)


def parse_import(data: bytes) -> tuple[bool, int]:
    """Return whether the connection is up or at rest, and its timeouts; raise ValueError."""
    state = re.search(rb"^\s*state:\s*(\w+)", data, re.MULTILINE)
    timeouts = re.search(rb"^\s*timeouts:\s*(\d+)", data, re.MULTILINE)
    if state is None or timeouts is None:
        raise ValueError("import has no state or no timeouts")
    return state[1] in _AT_REST, int(timeouts[1])


def at_limit(sent: Mapping[int, int], most: int) -> int | Unavailable:
    """Return how many RPCs took the last place of `most`, from the histogram."""
    if most >= BUCKETS:
        message = f"{most} RPCs may be in flight; more than {BUCKETS - 2} are not told apart"
        return Unavailable("absent", message, "")
    return sum(count for under_way, count in sent.items() if under_way >= most)


def time_ns(one: Counted | None) -> int | None:
    """Return the time a counter holds; 0 for one that counted nothing, None for one of no time."""
    if one is None:
        return 0
    if one.unit not in ("usec", "usecs") or one.total is None:
        return None
    return one.total * 1000


def asked(stats: Mapping[str, Counted], *without: str) -> tuple[int, int] | None:
    """Return count and time of the RPCs somebody waited for, but those named; None = not counted.

    `req_waittime` has every RPC, also those that no other line has the time of: locks and what is
    done on the way of getting them, which is how a client opens and looks up. Pings and the like
    are taken off again.
    """
    whole = stats.get("req_waittime")
    if whole is None:
        return (0, 0)
    all_ns = time_ns(whole)
    if all_ns is None:
        return None
    off = [stats[name] for name in (*_NOT_ASKED_FOR, *without) if name in stats]
    count = whole.samples - sum(one.samples for one in off)
    return max(0, count), max(0, all_ns - sum(time_ns(one) or 0 for one in off))


def places(roots: Roots) -> tuple[str, ...]:
    """Return the folders in which parameters may lie."""
    return (
        str(roots.proc / "fs/lustre"),
        str(roots.sys / "kernel/debug/lustre"),
        str(roots.sys / "fs/lustre"),
    )


def mounts(roots: Roots, mountinfo: bytes) -> list[Mounted]:
    """Return the mounted file systems and their targets; raises `Unavailable` without any."""
    folders = _listed(roots, "llite")
    targets: dict[str, list[Target]] = {}
    for kind in ("osc", "mdc"):
        for folder in _listed(roots, kind):
            match = _TARGET.fullmatch(folder)
            if match and match[4] == kind:  # not those a metadata server itself has
                one = Target(folder, kind, f"{match[1]}-{match[2]}{match[3]}")
                targets.setdefault(match[5], []).append(one)
    found = []
    names = [match[1] if (match := _MOUNT.fullmatch(folder)) else "" for folder in folders]
    points = _points(mountinfo)
    for folder, name in zip(folders, names):
        if not name:
            continue
        alone = names.count(name) == 1
        point = points.get(name, folder) if alone else folder
        mine = tuple(targets.get(folder.rpartition("-")[2], ()))
        found.append(Mounted(folder, point, mine))
    if not found:
        raise Unavailable("absent", "no Lustre file system is mounted", "")
    return found


def _points(mountinfo: bytes) -> dict[str, str]:
    """Return where each file system is mounted first, by its name."""
    points: dict[str, str] = {}
    for mount in parse_mountinfo(mountinfo):
        if mount.type == "lustre":
            name = mount.source.rpartition(":/")[2].partition("/")[0]
            points.setdefault(name, mount.point)
    return points


def _listed(roots: Roots, kind: str) -> list[str]:
    """Return the folders of a kind in all places; raises `Unavailable` when all are forbidden."""
    found: set[str] = set()
    denied: Unavailable | None = None
    for place in places(roots):
        try:
            with os.scandir(f"{place}/{kind}") as entries:
                found.update(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            why = unavailable_from_os_error(error, f"{place}/{kind}")
            if why.kind == "denied":
                denied = Unavailable("denied", why.message, ROOT_ONLY)
    # /sys/kernel/debug is closed to users on every machine: only a hint of Lustre makes it denied.
    if not found and denied is not None and os.path.isdir(roots.sys / "fs/lustre"):
        raise denied
    return sorted(found)
