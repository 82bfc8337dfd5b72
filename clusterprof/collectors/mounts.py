"""What every NFS mount asked of its server, and where its requests waited.

Columns: per mount point bytes, and what its connections did (slots, queues, replies nobody waited
for), added up over them where a mount has several (nconnect); per "<mount point>:<OP>" the six
numbers of an operation. READ and WRITE are always there, other operations once they have happened.
A kind of transport that does not count something (RDMA has no queues of its own) says so in the
column. Seen from the job's first process, whose container may have mounts that ours has not.
Nothing here touches the server: a dead one costs nothing.

## Source

`/proc/<pid>/mountstats` of the job's first process (nfs-utils, mountstats(8)).

## Privilege

The job's user, or root, where the job has mounts of its own; else none.

## Cost

One read and parse of all NFS mounts, once a second; it grows with mounts and with the kinds of
requests they have made.

## Where it is blind

What the server's disks do, and what other clients ask of it, shows in its times alone. Reads out of
the page cache ask nothing of the server and are not counted. File systems in user space (s3fs,
goofys, gcsfuse) are no NFS and not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.linux.held import LONG_RECORDS, HeldFile
from clusterprof.linux.mountstats import NfsMount, NfsOperation, parse_mountstats
from clusterprof.signals import Signal

_MOUNT: tuple[Signal, ...] = (
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
_OPERATION: tuple[Signal, ...] = (
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
_NOT_WRITTEN = Unavailable("absent", "the kernel does not write it for this mount", "")


class MountsCollector:
    """Operations, bytes and waiting time of every NFS mount."""

    name: ClassVar[str] = "mounts"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context) -> None:
        self._context = context

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open mountstats of the job's first process, else our own, and find the NFS mounts."""
        pids = self._context.job_pids()
        self._pid = pids[0] if pids else None
        self._file = self._hold()
        mounts = parse_mountstats(self._file.read())
        if not mounts:
            self._file.close()
            raise Unavailable("absent", "no NFS file system is mounted", "")
        self._shape = _shape(mounts)
        columns: list[tuple[Signal, str]] = []
        for point, operations in self._shape:
            columns += [(signal, point) for signal in _MOUNT]
            columns += [(signal, f"{point}:{op}") for op in operations for signal in _OPERATION]
        return columns

    def sample(self) -> Sequence[Value]:
        """Return the numbers of every mount since it was mounted."""
        if self._pid is None and self._context.job_pids():
            raise DevicesChanged  # the job may see other mounts than we do
        mounts = parse_mountstats(self._file.read())
        if _shape(mounts) != self._shape:
            raise DevicesChanged
        values: list[Value] = []
        for mount, (_, operations) in zip(mounts, self._shape, strict=True):
            totals = (mount.read_bytes, mount.write_bytes, mount.connections, *mount.transport)
            values += [_NOT_WRITTEN if total is None else _checked(total) for total in totals]
            for op in operations:
                values += _operation_values(mount.operations[op])
        return values

    def close(self) -> None:
        """Close mountstats."""
        self._file.close()

    def _hold(self) -> HeldFile:
        proc = self._context.roots.proc
        if self._pid is not None:
            try:
                return HeldFile(proc / str(self._pid) / "mountstats", longest_record=LONG_RECORDS)
            except Unavailable:
                pass  # not ours to look into, or gone: our own view is the second best
        return HeldFile(proc / "self" / "mountstats", longest_record=LONG_RECORDS)


def _shape(mounts: list[NfsMount]) -> list[tuple[str, list[str]]]:
    """Return mount points and their operations: what decides which columns there are."""
    return [
        (
            mount.point,
            [op for op, done in mount.operations.items() if op in _ALWAYS or done.operations],
        )
        for mount in mounts
    ]


def _operation_values(done: NfsOperation) -> list[Value]:
    return [
        _checked(done.operations),
        _checked(done.retransmits),
        _checked(done.queue_ms * _MS),
        _checked(done.rtt_ms * _MS),
        _checked(done.execute_ms * _MS),
        _checked(done.timeouts),
    ]


def _checked(value: int) -> Value:
    # Seen in the wild: queue times of 2^64 less a little, the kernel having subtracted clocks.
    if value < _INT64:
        return value
    return Unavailable("failed", "the kernel's counter ran below zero", "")
