"""Lustre clients: calls of programs to a mount, and RPCs of the mount to its servers.

The Lustre Operations Manual, "Lustre Parameters"; lustre/obdclass/lprocfs_status.c,
lustre/ptlrpc/lproc_ptlrpc.c and lustre/osc/lproc_osc.c. Depending on the version a parameter is in
/proc/fs/lustre, /sys/fs/lustre or /sys/kernel/debug/lustre; only root can read the last one.

    llite/scratch-ffff88105db50000/stats                 calls of programs
    osc/scratch-OST0003-osc-ffff88105db50000/stats       RPCs to one object server
        read_bytes    120 samples [bytes] 4096 4194304 503316480 …   count … min max sum squares
        ost_read      120 samples [usec] 130 9000 60000 …
    osc/…/rpc_stats       queues of the target, and histograms
    osc/…/import          state of its connection
    mdc/scratch-MDT0000-mdc-ffff88105db50000/stats       RPCs to one metadata server

A line exists only once it has counted something, so a line missing from a readable file is zero.
`echo clear` resets a file to zero. Times run from sending an RPC to its reply: no counter covers
earlier waiting on this machine; only the current queue of pages ("pending read pages") shows it.

Files of one Lustre mount and its targets, summed by mount and by kind of RPC.

`agent.linux.storage.lustre` describes their content. A value with an unreadable part is unknown and
carries the reason of that part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from clusterprof.agent.linux.files import OpenFile, Roots, read_file_once
from clusterprof.agent.linux.storage.disks import parse_mountinfo
from clusterprof.errors import Unavailable, convert_os_error

LONGEST_RECORD = 512  # bytes of a line
BUCKETS = 32
"""Number of histogram buckets; the last one holds everything above."""
ROOT_ONLY = "run the recorder as root, or let it read /sys/kernel/debug"
_TARGET = re.compile(r"(.+)-(OST|MDT)([0-9a-f]{4})-(osc|mdc)-([0-9a-f]{8,16})")
_MOUNT = re.compile(r"(.+)-([0-9a-f]{8,16})")
_BACKGROUND_RPCS = ("obd_ping", "ldlm_cancel", "mds_connect", "mds_disconnect", "ost_connect")
_CONNECTED_STATES = (b"FULL", b"IDLE")


class LustreCounter(NamedTuple):
    """One line of a `stats` file."""

    samples: int
    unit: str
    """bytes, usec, usecs, regs, reqs, …"""
    total: int | None
    """Sum of the samples; None where only their number was counted."""


class ReadRpcStats(NamedTuple):
    """State of read RPCs from `rpc_stats`."""

    in_flight: int
    pending_pages: int
    sent: Mapping[int, int]
    """RPCs by the number of RPCs that were in flight with them."""


class Target(NamedTuple):
    """One target of a server as one mount sees it."""

    folder: str
    """Folder name below osc or mdc."""
    kind: str
    """osc or mdc."""
    name: str
    """scratch-OST0003."""


class LustreMount(NamedTuple):
    """One mounted Lustre file system."""

    folder: str
    """Folder name below llite."""
    point: str
    """The mount point, or else the folder's name."""
    targets: tuple[Target, ...]


def parse_stats(data: bytes) -> dict[str, LustreCounter]:
    """Parse the counters of a `stats` file by name; lines of another format are skipped."""
    counters: dict[str, LustreCounter] = {}
    for line in data.decode(errors="replace").split("\n"):
        words = line.split()
        if len(words) < 4 or words[2] != "samples" or not words[1].isdigit():
            continue  # snapshot_time, start_time, elapsed_time
        # The sum of squares, after the sum, overflows; it is not read.
        total = int(words[6]) if len(words) > 6 and words[6].isdigit() else None
        counters[words[0]] = LustreCounter(int(words[1]), words[3].strip("[]"), total)
    return counters


def parse_rpc_stats(data: bytes) -> ReadRpcStats:
    """Parse the queues and the histogram of reads.

    Raises: ValueError when the queues are missing.
    """
    totals: dict[bytes, int] = {}
    sent: dict[int, int] = {}
    inside = False
    for line in data.split(b"\n"):
        name, mark, remainder = line.partition(b":")
        words = remainder.split()
        if line.startswith(b"rpcs in flight"):
            inside = True
        elif not line.strip():
            inside = False
        elif inside and mark and name.strip().isdigit() and words:
            sent[int(name)] = int(words[0])
        elif name in (b"read RPCs in flight", b"pending read pages"):
            totals[name] = int(words[0]) if words else 0
    if len(totals) < 2:
        raise ValueError("rpc_stats has no queues")
    return ReadRpcStats(totals[b"read RPCs in flight"], totals[b"pending read pages"], sent)


def parse_import(data: bytes) -> tuple[bool, int]:
    """Parse whether the connection is up or idle, and its number of timeouts.

    Raises: ValueError when one of them is missing.
    """
    state = re.search(rb"^\s*state:\s*(\w+)", data, re.MULTILINE)
    timeouts = re.search(rb"^\s*timeouts:\s*(\d+)", data, re.MULTILINE)
    if state is None or timeouts is None:
        raise ValueError("import has no state or no timeouts")
    return state[1] in _CONNECTED_STATES, int(timeouts[1])


def count_rpcs_at_limit(sent: Mapping[int, int], limit: int) -> int | Unavailable:
    """Return how many RPCs were sent while at least `limit` were in flight, from the histogram.

    Unavailable when the histogram is too short for this limit.
    """
    if limit >= BUCKETS:
        message = (
            f"{limit} RPCs may be in flight; the histogram cannot distinguish more than"
            f" {BUCKETS - 2}"
        )
        return Unavailable("absent", message, "")
    return sum(count for under_way, count in sent.items() if under_way >= limit)


def get_time_ns(counter: LustreCounter | None) -> int | None:
    """Return the time of a counter in ns; 0 without a counter, None if it does not count time."""
    if counter is None:
        return 0
    if counter.unit not in ("usec", "usecs") or counter.total is None:
        return None
    return counter.total * 1000


def sum_waited_rpcs(stats: Mapping[str, LustreCounter], *without: str) -> tuple[int, int] | None:
    """Return count and time in ns of the RPCs that callers waited for, without the named ones.

    `req_waittime` covers every RPC, including those whose time is in no other line: locks, and
    lookups and opens that are part of getting them. Pings and other background RPCs are subtracted.
    None = the time is not counted.
    """
    all_rpcs = stats.get("req_waittime")
    if all_rpcs is None:
        return (0, 0)
    all_ns = get_time_ns(all_rpcs)
    if all_ns is None:
        return None
    excluded = [stats[name] for name in (*_BACKGROUND_RPCS, *without) if name in stats]
    count = all_rpcs.samples - sum(counter.samples for counter in excluded)
    return max(0, count), max(0, all_ns - sum(get_time_ns(counter) or 0 for counter in excluded))


def list_parameter_folders(roots: Roots) -> tuple[str, ...]:
    """Return the folders in which parameters may be."""
    return (
        str(roots.proc / "fs/lustre"),
        str(roots.sys / "kernel/debug/lustre"),
        str(roots.sys / "fs/lustre"),
    )


def find_lustre_mounts(roots: Roots, mountinfo: bytes) -> list[LustreMount]:
    """Find the mounted Lustre file systems and their targets.

    Raises: Unavailable when none is mounted or they may not be read.
    """
    folders = _list_folders(roots, "llite")
    targets: dict[str, list[Target]] = {}
    for kind in ("osc", "mdc"):
        for folder in _list_folders(roots, kind):
            match = _TARGET.fullmatch(folder)
            if match and match[4] == kind:  # not the targets that a metadata server itself has
                target = Target(folder, kind, f"{match[1]}-{match[2]}{match[3]}")
                targets.setdefault(match[5], []).append(target)
    mounts = []
    names = [match[1] if (match := _MOUNT.fullmatch(folder)) else "" for folder in folders]
    points = _find_mount_points(mountinfo)
    for folder, name in zip(folders, names):
        if not name:
            continue
        alone = names.count(name) == 1
        point = points.get(name, folder) if alone else folder
        mount_targets = tuple(targets.get(folder.rpartition("-")[2], ()))
        mounts.append(LustreMount(folder, point, mount_targets))
    if not mounts:
        raise Unavailable("absent", "no Lustre file system is mounted", "")
    return mounts


def _find_mount_points(mountinfo: bytes) -> dict[str, str]:
    """Return the first mount point of each file system, by its name."""
    points: dict[str, str] = {}
    for mount in parse_mountinfo(mountinfo):
        if mount.type == "lustre":
            name = mount.source.rpartition(":/")[2].partition("/")[0]
            points.setdefault(name, mount.point)
    return points


def _list_folders(roots: Roots, kind: str) -> list[str]:
    """Return the folders of a kind in all locations; raise Unavailable if access is denied."""
    names: set[str] = set()
    denied: Unavailable | None = None
    for folder in list_parameter_folders(roots):
        try:
            with os.scandir(f"{folder}/{kind}") as entries:
                names.update(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            why = convert_os_error(error, f"{folder}/{kind}")
            if why.kind == "denied":
                denied = Unavailable("denied", why.message, ROOT_ONLY)
    # /sys/kernel/debug is closed to users on every machine: denied only if Lustre is present.
    if not names and denied is not None and os.path.isdir(roots.sys / "fs/lustre"):
        raise denied
    return sorted(names)


Value = int | Unavailable
Meaning = TypeVar("Meaning")
KINDS = ("read", "write", "metadata")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_BACKWARD_STEP_RPCS = 8
_MAX_OPEN_FILES = 128
_INT64 = 1 << 63
_ALWAYS_LISTED_CALLS = ("open", "close", "getattr")
_KNOWN_CALLS = (
    "read",
    "write",
    "open",
    "close",
    "getattr",
    "readdir",
    "create",
    "mknod",
    "mkdir",
    "unlink",
    "rename",
    "setattr",
    "getxattr",
    "truncate",
    "fsync",
    "mmap",
    "page_fault",
)
_NO_TIME = Unavailable("absent", "this Lustre counts such calls and not their time", "")
_NO_TARGET = Unavailable("absent", "no target of this file system is known here", "")
_TOO_LARGE = Unavailable("failed", "the counter does not fit 63 bits", "")


class MountReading(NamedTuple):
    """Counters of one mount since it was mounted or its files were cleared."""

    mount: list[Value]
    """Bytes read, written, fetched and stored, RPCs at the limit, pending bytes, RPCs in flight,
    timeouts, targets without a connection."""
    calls: dict[str, tuple[Value, Value]]
    """Count and ns of each call."""
    kinds: dict[str, tuple[Value, Value]]
    """Count and ns of the RPCs of each kind."""
    targets: list[tuple[str, tuple[Value, Value]]]
    """Count and ns of the RPCs of each target."""


class ParameterFiles:
    """Finds parameters in their possible folders and keeps a limited number of files open."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self._held: dict[str, OpenFile] = {}
        self._where: dict[str, str] = {}

    def read(self, name: str) -> bytes:
        """Return the content of a parameter such as "osc/…/stats".

        Raises: Unavailable when it cannot be read; "denied" takes precedence over "absent".
        """
        open_parameter = self._held.get(name)
        if open_parameter is not None:
            try:
                return open_parameter.read()
            except Unavailable:
                open_parameter.close()  # the file may reappear in another location
                del self._held[name], self._where[name]
                raise
        if name in self._where:
            return read_file_once(self._where[name])
        why: Unavailable | None = None
        for folder in self._places:
            path = f"{folder}/{name}"
            try:
                file = OpenFile(path, longest_record=LONGEST_RECORD)
            except Unavailable as reason:
                if why is None or reason.kind == "denied":
                    why = reason
                continue
            self._where[name] = path
            if len(self._held) < _MAX_OPEN_FILES:
                self._held[name] = file
            return file.read()
        assert why is not None
        if why.kind == "denied":
            raise Unavailable("denied", why.message, ROOT_ONLY)
        raise why

    def parse(self, name: str, parse: Callable[[bytes], Meaning]) -> Meaning | Unavailable:
        """Return the parsed content of a parameter, or the reason why it is unknown."""
        try:
            return parse(self.read(name))
        except Unavailable as why:
            return why.with_traceback(None)
        except ValueError:
            return Unavailable("failed", f"{name}: not understood", "")

    def close(self) -> None:
        """Close all files."""
        for file in self._held.values():
            file.close()
        self._held.clear()
        self._where.clear()


class MountReader:
    """Repeatedly reads the parameters of one mount."""

    def __init__(self, files: ParameterFiles, mounted: LustreMount) -> None:
        self._files = files
        self._mounted = mounted
        self._most: dict[Target, int | Unavailable] = {}
        self._states: list[tuple[bool, int] | Unavailable] = []
        self._last: dict[str, tuple[int, int]] = {}

    def read(self, states: bool, calls: Iterable[str]) -> MountReading:
        """Return the current counters.

        states: also read the state of the connections; otherwise the previous state is used. calls:
        calls that are reported even where the mount cannot be read.
        """
        targets = self._mounted.targets
        if states or not self._states:
            self._states = [self._of(target, "import", parse_import) for target in targets]
        llite = self._files.parse(f"llite/{self._mounted.folder}/stats", parse_stats)
        target_stats = [(target, self._of(target, "stats", parse_stats)) for target in targets]
        read_bytes, write_bytes = (_get_sum(llite, name) for name in ("read_bytes", "write_bytes"))
        mount = [
            read_bytes,
            write_bytes,
            sum_values(
                [
                    _get_sum(stats, "read_bytes")
                    for target, stats in target_stats
                    if target.kind == "osc"
                ]
            ),
            sum_values(
                [
                    _get_sum(stats, "write_bytes")
                    for target, stats in target_stats
                    if target.kind == "osc"
                ]
            ),
            *self._queues(),
            sum_values([why if isinstance(why, Unavailable) else why[1] for why in self._states]),
            sum_values(
                [why if isinstance(why, Unavailable) else not why[0] for why in self._states]
            ),
        ]
        kinds = {
            "read": _sum_rpcs_of_kind(target_stats, "ost_read"),
            "write": _sum_rpcs_of_kind(target_stats, "ost_write"),
            "metadata": _sum_pairs(
                [self._rpcs(target, s) for target, s in target_stats if target.kind == "mdc"]
            ),
        }
        named = [
            (target.name, self._rpcs(target, stats, with_transfers=True))
            for target, stats in target_stats
        ]
        return MountReading(mount, _collect_calls(llite, calls), kinds, named)

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def _of(
        self, target: Target, name: str, parse: Callable[[bytes], Meaning]
    ) -> Meaning | Unavailable:
        return self._files.parse(f"{target.kind}/{target.folder}/{name}", parse)

    def _queues(self) -> list[Value]:
        """Return RPCs that used the last slot, bytes not yet requested, and RPCs in flight."""
        limit: list[Value] = []
        pending: list[Value] = []
        in_flight: list[Value] = []
        for target in self._mounted.targets:
            if target.kind != "osc":
                continue
            rpc_stats = self._of(target, "rpc_stats", parse_rpc_stats)
            max_rpcs = self._most.get(target)
            # read once: after a change of the limit other RPCs would count as at the limit
            if max_rpcs is None:
                max_rpcs = self._most[target] = self._of(target, "max_rpcs_in_flight", int)
            if isinstance(rpc_stats, Unavailable):
                limit, pending, in_flight = (
                    [*limit, rpc_stats],
                    [*pending, rpc_stats],
                    [*in_flight, rpc_stats],
                )
                continue
            limit.append(
                max_rpcs
                if isinstance(max_rpcs, Unavailable)
                else count_rpcs_at_limit(rpc_stats.sent, max_rpcs)
            )
            pending.append(rpc_stats.pending_pages * _PAGE_BYTES)
            in_flight.append(rpc_stats.in_flight)
        return [sum_values(limit), sum_values(pending), sum_values(in_flight)]

    def _rpcs(
        self,
        target: Target,
        stats: dict[str, LustreCounter] | Unavailable,
        with_transfers: bool = False,
    ) -> tuple[Value, Value]:
        """Return count and time of the RPCs to a target.

        with_transfers: count reads and writes too.
        """
        if isinstance(stats, Unavailable):
            return stats, stats
        rpcs = (
            sum_waited_rpcs(stats)
            if with_transfers
            else sum_waited_rpcs(stats, "ost_read", "ost_write")
        )
        if rpcs is None:
            return _NO_TIME, _NO_TIME
        # The file is not written atomically: a difference may decrease by RPCs ended in between.
        key = f"{target.folder} {with_transfers}"
        last = self._last.get(key, (0, 0))
        if rpcs[0] >= last[0] - _MAX_BACKWARD_STEP_RPCS:  # otherwise the file was cleared
            rpcs = max(rpcs[0], last[0]), max(rpcs[1], last[1])
        self._last[key] = rpcs
        return _check_int64(rpcs[0]), _check_int64(rpcs[1])


def sum_values(values: Sequence[Value]) -> Value:
    """Return the sum; unknown if one value is unknown or there are no values."""
    if not values:
        return _NO_TARGET
    for value in values:
        if isinstance(value, Unavailable):
            return value
    return _check_int64(sum(value for value in values if not isinstance(value, Unavailable)))


def _check_int64(value: int) -> Value:
    return value if value < _INT64 else _TOO_LARGE


def _sum_pairs(pairs: Sequence[tuple[Value, Value]]) -> tuple[Value, Value]:
    return sum_values([count for count, _ in pairs]), sum_values([ns for _, ns in pairs])


def _get_sum(stats: Mapping[str, LustreCounter] | Unavailable, name: str) -> Value:
    if isinstance(stats, Unavailable):
        return stats
    counter = stats.get(name)
    if counter is None:
        return 0
    return _NO_TIME if counter.total is None else _check_int64(counter.total)


def _sum_rpcs_of_kind(
    target_stats: Sequence[tuple[Target, dict[str, LustreCounter] | Unavailable]], name: str
) -> tuple[Value, Value]:
    """Return count and time of reads or writes, including small files on metadata servers."""
    pairs: list[tuple[Value, Value]] = []
    for _, stats in target_stats:
        pairs.append(
            (stats, stats) if isinstance(stats, Unavailable) else _get_count_and_time(stats, name)
        )
    return _sum_pairs(pairs)


def _get_count_and_time(stats: Mapping[str, LustreCounter], name: str) -> tuple[Value, Value]:
    counter = stats.get(name)
    ns = get_time_ns(counter)
    return 0 if counter is None else counter.samples, _NO_TIME if ns is None else _check_int64(ns)


def _collect_calls(
    llite: Mapping[str, LustreCounter] | Unavailable, call_names: Iterable[str]
) -> dict[str, tuple[Value, Value]]:
    if isinstance(llite, Unavailable):
        return {call: (llite, llite) for call in call_names}
    return {
        call: _get_count_and_time(llite, call)
        for call in _KNOWN_CALLS
        if call in _ALWAYS_LISTED_CALLS or call in llite
    }
