"""Requests of every NFS mount to its server, and where they waited.

Requests to every mounted CIFS share, its server's response times, and queues.

Calls of programs to every Lustre mount, and its RPCs to the servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux.files import LONG_RECORDS, OpenFile, open_file, read_file_once
from clusterprof.agent.linux.reader_threads import BackgroundReader
from clusterprof.agent.linux.storage import lustre, network_mounts
from clusterprof.agent.linux.storage.lustre import KINDS, MountReader, ParameterFiles, sum_values
from clusterprof.agent.linux.storage.network_mounts import NfsMount, NfsOperation, parse_mountstats
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import Signal

_NFS_MOUNT: tuple[Signal, ...] = (
    signals.NFS_READ_BYTES,
    signals.NFS_WRITE_BYTES,
    signals.NFS_CONNECTIONS,
    signals.NFS_CONNECTS,
    signals.NFS_SENDS,
    signals.NFS_BAD_XIDS,
    signals.NFS_SLOTS_USED,
    signals.NFS_BACKLOG,
    signals.NFS_SLOTS_MOST,
    signals.NFS_SENDING,
    signals.NFS_PENDING,
)
_NFS_OPERATION: tuple[Signal, ...] = (
    signals.NFS_OPS,
    signals.NFS_RETRANSMITS,
    signals.NFS_QUEUE,
    signals.NFS_RTT,
    signals.NFS_EXECUTE,
    signals.NFS_TIMEOUTS,
)
_ALWAYS = ("READ", "WRITE")
_MS = 1_000_000
_INT64 = 1 << 63
_NFS_NOT_REPORTED = Unavailable("absent", "the kernel does not report it for this mount", "")


class MountsCollector:
    """Requests of every NFS mount to its server, and where they waited.

    Columns: per mount point bytes, and the counters of its connections (slots, queues,
    unmatched replies), summed over them where a mount has several (nconnect); per "<mount
    point>:<OP>" the six numbers of an operation. READ and WRITE are always included, other
    operations once they have occurred. A counter that a transport does not have (RDMA has
    no queues of its own) is a reason in its column. The mounts are those of the job's first
    process, whose container may have mounts that ours lacks. Sampling never contacts the
    server: an unreachable server causes no delay.

    ## Source

    `/proc/<pid>/mountstats` of the job's first process (nfs-utils, mountstats(8)).

    ## Privilege

    The job's user, or root, where the job has mounts of its own; else none.

    ## Cost

    One read and parse of all NFS mounts, once a second; it grows with the mounts and with
    the kinds of requests they have made.

    ## Where it is blind

    The load of the server's disks and of other clients shows only in the response times.
    Reads from the page cache send no request to the server and are not counted. File
    systems in user space (s3fs, goofys, gcsfuse) are not NFS and not included.
    """

    name: ClassVar[str] = "mounts"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context) -> None:
        self._context = context

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open mountstats of the job's first process, or else our own, and find the NFS mounts.

        Raises: Unavailable when no NFS file system is mounted.
        """
        pids = self._context.job_pids()
        self._pid = pids[0] if pids else None
        self._file = self._open_mountstats()
        mounts = parse_mountstats(self._file.read())
        if not mounts:
            self._file.close()
            raise Unavailable("absent", "no NFS file system is mounted", "")
        self._shape = _list_mount_operations(mounts)
        columns: list[tuple[Signal, str]] = []
        for point, operations in self._shape:
            columns += [(signal, point) for signal in _NFS_MOUNT]
            columns += [(signal, f"{point}:{op}") for op in operations for signal in _NFS_OPERATION]
        return columns

    def sample(self) -> Sequence[Value]:
        """Return the counters of every mount since it was mounted.

        Raises: DevicesChanged when the mounts or their operations changed.
        """
        if self._pid is None and self._context.job_pids():
            raise DevicesChanged  # the job may see other mounts than this process
        mounts = parse_mountstats(self._file.read())
        if _list_mount_operations(mounts) != self._shape:
            raise DevicesChanged
        values: list[Value] = []
        for mount, (_, operations) in zip(mounts, self._shape, strict=True):
            totals = (mount.read_bytes, mount.write_bytes, mount.connections, *mount.transport)
            values += [
                _NFS_NOT_REPORTED if total is None else _check_int64(total) for total in totals
            ]
            for op in operations:
                values += _convert_operation(mount.operations[op])
        return values

    def close(self) -> None:
        """Close mountstats."""
        self._file.close()

    def _open_mountstats(self) -> OpenFile:
        proc = self._context.roots.proc
        if self._pid is not None:
            try:
                return OpenFile(proc / str(self._pid) / "mountstats", longest_record=LONG_RECORDS)
            except Unavailable:
                pass  # access is denied or the process is gone: fall back to our own view
        return OpenFile(proc / "self" / "mountstats", longest_record=LONG_RECORDS)


def _list_mount_operations(mounts: list[NfsMount]) -> list[tuple[str, list[str]]]:
    """Return the mount points and their operations, which determine the columns."""
    return [
        (
            mount.point,
            [op for op, counts in mount.operations.items() if op in _ALWAYS or counts.operations],
        )
        for mount in mounts
    ]


def _convert_operation(counts: NfsOperation) -> list[Value]:
    return [
        _check_int64(counts.operations),
        _check_int64(counts.retransmits),
        _check_int64(counts.queue_ms * _MS),
        _check_int64(counts.rtt_ms * _MS),
        _check_int64(counts.execute_ms * _MS),
        _check_int64(counts.timeouts),
    ]


def _check_int64(value: int) -> Value:
    # Observed in practice: queue times slightly below 2^64, because the kernel subtracted clocks.
    if value < _INT64:
        return value
    return Unavailable("failed", "the kernel's counter ran below zero", "")


_CIFS_BYTES: tuple[Signal, ...] = (signals.CIFS_READ_BYTES, signals.CIFS_WRITE_BYTES)
_CIFS_QUEUE: tuple[Signal, ...] = (
    signals.CIFS_CREDITS,
    signals.CIFS_IN_FLIGHT,
    signals.CIFS_WAITING,
)

_WRAP = 1 << 32

_NO_CIFS_TIME = Unavailable("absent", "the kernel was built without CONFIG_CIFS_STATS2", "")
_CIFS_NOT_REPORTED = Unavailable("absent", "the kernel does not report it for this share", "")


class CifsCollector:
    """Requests to every mounted CIFS share, its server's response times, and queues.

    Columns: per share its bytes, and per "<share>:<OP>" its requests (READ and WRITE
    always, others once they have occurred). A share is named by its mount point where it is
    mounted once, otherwise "//server/share". Per server: the unanswered requests, the
    requests that wait for a credit, and the remaining credits; per "<server>:<OP>" the time
    of its requests, in steps of a jiffy, where the kernel was built to count it
    (CONFIG_CIFS_STATS2). Sampling never contacts the server.

    ## Source

    `/proc/fs/cifs/{Stats,DebugData}` (docs.kernel.org/admin-guide/cifs/usage).

    ## Privilege

    None; times need a kernel built with CONFIG_CIFS_STATS2.

    ## Cost

    Two reads once a second, which grow with the number of shares, sessions and open files.

    ## Where it is blind

    Which of several shares of a server waited: queues and times are per server. Times have
    steps of a jiffy (1 to 10 ms).
    """

    name: ClassVar[str] = "cifs"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context) -> None:
        self._context = context

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open Stats and DebugData, and find the shares and their mount points.

        Raises: Unavailable when no CIFS file system is mounted.
        """
        folder = self._context.roots.proc / "fs/cifs"
        pids = self._context.job_pids()
        self._pid = pids[0] if pids else None
        try:
            self._stats = OpenFile(folder / "Stats", longest_record=LONG_RECORDS)
        except Unavailable as why:
            if why.kind == "absent":
                raise Unavailable("absent", "no CIFS file system is mounted", "") from None
            raise
        self._debug = open_file(folder / "DebugData", longest_record=LONG_RECORDS)
        self._points = network_mounts.find_share_mount_points(self._mountinfo())
        self._turns: dict[str, tuple[int, int]] = {}
        values = self._now()
        if not values:
            self.close()
            raise Unavailable("absent", "no CIFS file system is mounted", "")
        self._columns = list(values)
        return self._columns

    def sample(self) -> Sequence[Value]:
        """Return bytes and requests since each share was mounted, and the current queues.

        Raises: DevicesChanged when the columns changed.
        """
        if self._pid is None and self._context.job_pids():
            # the job may have the shares mounted at other places than this process
            raise DevicesChanged
        values = self._now()
        if list(values) != self._columns:
            raise DevicesChanged
        return list(values.values())

    def close(self) -> None:
        """Close both files."""
        self._stats.close()
        self._debug.close()

    def _now(self) -> dict[tuple[Signal, str], Value]:
        values: dict[tuple[Signal, str], Value] = {}
        names: list[str] = []
        for number, server in enumerate(network_mounts.parse_stats(self._stats.read())):
            shares = [share for share in server.shares if not share.name.endswith("/IPC$")]
            for share in shares:
                self._share(values, share, number)
            if shares:
                names.append(shares[0].name.split("/")[2])
                self._time(values, names[-1], server)
        if values:
            self._queues(values, names)
        return values

    def _share(
        self, values: dict[tuple[Signal, str], Value], share: network_mounts.CifsShare, number: int
    ) -> None:
        points = self._points.get(share.name.lower(), [])
        device = points[0] if len(points) == 1 else share.name
        for signal, total in zip(_CIFS_BYTES, (share.read_bytes, share.write_bytes)):
            _add_value(values, signal, device, total)
        for operation in sorted({*_ALWAYS, *(o for o, n in share.operations.items() if n)}):
            key = f"{number} {share.name}:{operation}"
            count = self._extend_count(key, share.operations.get(operation, 0))
            _add_value(values, signals.CIFS_OPS, f"{device}:{operation}", count)

    def _extend_count(self, key: str, value: int) -> int:
        """Extend a 32-bit count beyond its wraps; a count that was cleared restarts at zero."""
        last, turned = self._turns.get(key, (0, 0))
        if value < last:
            turned = turned + _WRAP if last - value > _WRAP // 2 else 0
        self._turns[key] = value, turned
        return value + turned

    def _time(
        self, values: dict[tuple[Signal, str], Value], name: str, server: network_mounts.CifsServer
    ) -> None:
        for operation in sorted({*_ALWAYS, *(o for o, ns in server.time_ns.items() if ns)}):
            ns = server.time_ns.get(operation, 0) if server.keeps_time else None
            _add_value(values, signals.CIFS_OP_TIME, f"{name}:{operation}", ns, _NO_CIFS_TIME)

    def _queues(self, values: dict[tuple[Signal, str], Value], names: Sequence[str]) -> None:
        try:
            queues = network_mounts.parse_debug(self._debug.read())
        except Unavailable as why:
            values.update({(signal, name): why for name in names for signal in _CIFS_QUEUE})
            return
        for queue in queues:
            numbers = (queue.credits, queue.in_flight, queue.waiting)
            for signal, number in zip(_CIFS_QUEUE, numbers):
                _add_value(values, signal, queue.server, number)

    def _mountinfo(self) -> bytes:
        for pid in (self._pid, "self"):
            try:
                return read_file_once(self._context.roots.proc / str(pid) / "mountinfo")
            except Unavailable:
                continue  # access is denied or the process is gone: fall back to our own view
        return b""


def _add_value(
    values: dict[tuple[Signal, str], Value],
    signal: Signal,
    device: str,
    number: int | None,
    why: Unavailable = _CIFS_NOT_REPORTED,
) -> None:
    """Store a number; a share or server that appears twice is summed."""
    before = values.get((signal, device), 0)
    if number is None or isinstance(before, Unavailable):
        values[signal, device] = why if number is None else before
        return
    value = before + number
    too_large = Unavailable("failed", "the kernel's counter does not fit 63 bits", "")
    values[signal, device] = value if value < _INT64 else too_large


_LUSTRE_MOUNT: tuple[Signal, ...] = (
    signals.LUSTRE_READ_BYTES,
    signals.LUSTRE_WRITE_BYTES,
    signals.LUSTRE_FETCHED_BYTES,
    signals.LUSTRE_STORED_BYTES,
    signals.LUSTRE_AT_LIMIT,
    signals.LUSTRE_PENDING,
    signals.LUSTRE_IN_FLIGHT,
    signals.LUSTRE_TIMEOUTS,
    signals.LUSTRE_UNCONNECTED,
)
_LUSTRE_CALL: tuple[Signal, ...] = (signals.LUSTRE_OPS, signals.LUSTRE_OP_TIME)
_LUSTRE_KIND: tuple[Signal, ...] = (signals.LUSTRE_RPCS, signals.LUSTRE_RPC_TIME)
_LUSTRE_TARGET: tuple[Signal, ...] = (signals.LUSTRE_TARGET_RPCS, signals.LUSTRE_TARGET_TIME)
_MAX_TARGETS = 128
_FULL_READ_NS = 10_000_000_000


class LustreCollector:
    """Calls of programs to every Lustre mount, and its RPCs to the servers.

    Columns: per mount point bytes, reads that found all but one of the `max_rpcs_in_flight`
    slots taken, pages not yet requested, timeouts and targets without a connection. Per
    "<mount point>:<call>": calls of programs and, since Lustre 2.13, their time. Per
    "<mount point>:<kind>": RPCs and the time from sending to the reply, kind being read,
    write or metadata. The RPC columns exist also per target ("scratch-OST0003", at most 128
    of them). A file system that is mounted twice is named by its folder.

    No counter covers the time that a request waits on this machine before it is sent; only
    the current queue shows the remaining requests. Metadata RPCs are all RPCs to metadata
    servers except pings, cancelled locks, connections, and reads and writes of data that
    these servers store themselves. Attributes that also need the object servers (sizes) are
    among the RPCs of those servers and belong to no kind.

    Since Lustre 2.12 most files are in debugfs and readable by root only. Reading the state
    of a connection takes a lock that an unreachable server may hold, so a thread reads,
    connections every 10 s. It reads at most a 200th of the time: 200 targets take 22 ms and
    are therefore read every 4.5 s.

    ## Source

    `llite`, `osc`, `mdc` below `/proc/fs/lustre`, `/sys/fs/lustre` and
    `/sys/kernel/debug/lustre` (Lustre Operations Manual, "Lustre Parameters";
    lustre/osc/lproc_osc.c, lustre/ptlrpc/lproc_ptlrpc.c).

    ## Privilege

    Root since Lustre 2.12, for files in debugfs; without it only the bytes, queues and
    connections that sysfs shows.

    ## Cost

    A thread reads for at most a 200th of the time: with 200 targets 22 ms every 4.5 s.

    ## Where it is blind

    How long a request waited on this machine, and the load of the servers' disks by other
    clients. Targets beyond the first 128 of a node are only in the sums.
    """

    name: ClassVar[str] = "lustre"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(
        self, context: Context, clock: Callable[[], int] = time.monotonic_ns, **waits: Any
    ) -> None:
        self._context = context
        self._clock = clock
        self.sampled_ns = 0
        """When the values that `sample()` returned were read."""
        self._reader = BackgroundReader(self._read, clock, **waits)
        self._mounts: list[lustre.LustreMount] = []
        self._mount_readers: list[MountReader] = []
        self._calls: list[tuple[str, ...]] = []
        self._full_read_ns: int | None = None
        self._first: tuple[int, list[Value]] | None = None

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the mounts and their targets, and read them once.

        Raises: Unavailable when nothing is mounted or readable.
        """
        pids = self._context.job_pids()
        self._pid = pids[0] if pids else None
        self._mounts = self._find_mounts()
        files = ParameterFiles(lustre.list_parameter_folders(self._context.roots))
        self._mount_readers = [MountReader(files, mount) for mount in self._mounts]
        self._calls = []
        self._full_read_ns = None
        try:
            self._first = self._reader.first()
            if all(isinstance(value, Unavailable) for value in self._first[1]):
                raise self._first[1][0]  # type: ignore[misc]  # nothing is readable: report it once
        except BaseException:
            self.close()
            raise
        columns: list[tuple[Signal, str]] = []
        for mount, calls in zip(self._mounts, self._calls):
            point = mount.point
            columns += [(signal, point) for signal in _LUSTRE_MOUNT]
            columns += [(signal, f"{point}:{call}") for call in calls for signal in _LUSTRE_CALL]
            columns += [(signal, f"{point}:{kind}") for kind in KINDS for signal in _LUSTRE_KIND]
        return columns + [(s, name) for name in self._names() for s in _LUSTRE_TARGET]

    def sample(self) -> Sequence[Value]:
        """Return the values read since the last call.

        Raises: NothingNew when there are none, DevicesChanged when the job has started.
        """
        if self._pid is None and self._context.job_pids():
            # the job may have the file systems mounted at other places than this process
            raise DevicesChanged
        reading = self._first or self._reader.take()
        self._first = None
        if reading is None:
            raise NothingNew
        self.sampled_ns, values = reading
        return values

    def close(self) -> None:
        """Close all files once no reading is in progress."""
        readers, self._mount_readers = self._mount_readers, []

        def release() -> None:
            for reader in readers:
                reader.close()

        self._reader.close(release)

    def _find_mounts(self) -> list[lustre.LustreMount]:
        return lustre.find_lustre_mounts(self._context.roots, self._mountinfo())

    def _mountinfo(self) -> bytes:
        for pid in (self._pid, "self"):
            try:
                return read_file_once(self._context.roots.proc / str(pid) / "mountinfo")
            except Unavailable:
                continue  # access is denied or the process is gone: fall back to our own view
        return b""

    def _names(self) -> list[str]:
        names = {target.name for mount in self._mounts for target in mount.targets}
        return sorted(names)[:_MAX_TARGETS]

    def _read(self) -> list[Value]:
        """Read every mount, in the thread; every 10 s also the set of mounts and the
        connections."""
        now_ns = self._clock()
        is_full_read = self._full_read_ns is None or now_ns - self._full_read_ns >= _FULL_READ_NS
        if is_full_read:
            if self._find_mounts() != self._mounts:
                raise DevicesChanged
            self._full_read_ns = now_ns
        calls_of_mount = self._calls or [() for _ in self._mount_readers]
        readings = [
            reader.read(is_full_read, calls)
            for reader, calls in zip(self._mount_readers, calls_of_mount)
        ]
        calls = [tuple(reading.calls) for reading in readings]
        if self._calls and calls != self._calls:
            raise DevicesChanged  # a kind of call occurred for the first time
        self._calls = calls
        values: list[Value] = []
        targets: dict[str, list[tuple[Value, Value]]] = {}
        for reading in readings:
            values += reading.mount
            for pair in (*reading.calls.values(), *(reading.kinds[kind] for kind in KINDS)):
                values += pair
            for name, pair in reading.targets:
                targets.setdefault(name, []).append(pair)
        for name in self._names():
            values += [sum_values(column) for column in zip(*targets[name])]
        return values
