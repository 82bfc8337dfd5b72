"""What every Lustre mount was asked by programs, and what its servers were asked by it.

Columns: per mount point bytes, reads that found all places of `max_rpcs_in_flight` but one taken,
pages not yet sent for, timeouts and targets without a connection; per "<mount point>:<call>" calls
of programs and, from Lustre 2.13 on, their time; per "<mount point>:<kind>" RPCs and the time from
sending to the reply, kind being read, write or metadata; the same per target ("scratch-OST0003",
at most 128 of them). A file system that is mounted twice goes by the name of its folder.

Time that a request waits on this machine before it is sent is counted nowhere: what is left of it
is the queue of now. What metadata servers answer is all RPCs to them but pings, cancelled locks,
connections, and reads and writes of data they hold themselves. Attributes that need the object
servers too (sizes) are among those servers' RPCs and of no kind.

From Lustre 2.12 on most of it lies in debugfs, for root only. Reading the state of a connection
takes a lock that a server which is gone may hold, so a thread reads, connections every 10 s. It
reads at most a 200th of the time: 200 targets take 22 ms, and so are read every 4.5 s.

## Source

`llite`, `osc`, `mdc` below `/proc/fs/lustre`, `/sys/fs/lustre` and `/sys/kernel/debug/lustre`
(Lustre Operations Manual, "Lustre Parameters"; lustre/osc/lproc_osc.c,
lustre/ptlrpc/lproc_ptlrpc.c).

## Privilege

Root from Lustre 2.12 on, for what lies in debugfs; without it bytes, queues and connections that
sysfs shows.

## Cost

A thread reads for at most a 200th of the time: with 200 targets 22 ms every 4.5 s.

## Where it is blind

How long a request waited on this machine, and what the servers' disks and other clients do. Targets
beyond the first 128 of a node are only in the sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.linux import lustre
from clusterprof.linux.aside import Aside
from clusterprof.linux.held import read_once
from clusterprof.linux.lustre_files import KINDS, Files, MountFiles, total
from clusterprof.signals import Signal

_MOUNT: tuple[Signal, ...] = (
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
_CALL: tuple[Signal, ...] = (signals.LUSTRE_OPS, signals.LUSTRE_OP_TIME)
_KIND: tuple[Signal, ...] = (signals.LUSTRE_RPCS, signals.LUSTRE_RPC_TIME)
_TARGET: tuple[Signal, ...] = (signals.LUSTRE_TARGET_RPCS, signals.LUSTRE_TARGET_TIME)
_TARGETS_AT_MOST = 128
_WHOLE_NS = 10_000_000_000


class LustreCollector:
    """Calls, RPCs and queues of every Lustre mount, and how fast each of its targets answered."""

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
        self._aside = Aside(self._read, clock, **waits)
        self._mounts: list[lustre.Mounted] = []
        self._held: list[MountFiles] = []
        self._calls: list[tuple[str, ...]] = []
        self._whole_ns: int | None = None
        self._first: tuple[int, list[Value]] | None = None

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the mounts and their targets, and read them once."""
        pids = self._context.job_pids()
        self._pid = pids[0] if pids else None
        self._mounts = self._found()
        files = Files(lustre.places(self._context.roots))
        self._held = [MountFiles(files, mount) for mount in self._mounts]
        self._calls = []
        self._whole_ns = None
        try:
            self._first = self._aside.first()
            if all(isinstance(value, Unavailable) for value in self._first[1]):
                raise self._first[1][0]  # type: ignore[misc] # nothing at all: say it once
        except BaseException:
            self.close()
            raise
        columns: list[tuple[Signal, str]] = []
        for mount, calls in zip(self._mounts, self._calls):
            point = mount.point
            columns += [(signal, point) for signal in _MOUNT]
            columns += [(signal, f"{point}:{call}") for call in calls for signal in _CALL]
            columns += [(signal, f"{point}:{kind}") for kind in KINDS for signal in _KIND]
        return columns + [(s, name) for name in self._names() for s in _TARGET]

    def sample(self) -> Sequence[Value]:
        """Return what has been read since the last call; raises NothingNew when nothing has."""
        if self._pid is None and self._context.job_pids():
            raise DevicesChanged  # the job may have it mounted elsewhere than we
        taken = self._first or self._aside.take()
        self._first = None
        if taken is None:
            raise NothingNew
        self.sampled_ns, values = taken
        return values

    def close(self) -> None:
        """Close all files, once no reading is under way."""
        held, self._held = self._held, []

        def let_go() -> None:
            for one in held:
                one.close()

        self._aside.close(let_go)

    def _found(self) -> list[lustre.Mounted]:
        return lustre.mounts(self._context.roots, self._mountinfo())

    def _mountinfo(self) -> bytes:
        for pid in (self._pid, "self"):
            try:
                return read_once(self._context.roots.proc / str(pid) / "mountinfo")
            except Unavailable:
                continue  # not ours to look into, or gone: our own view is the second best
        return b""

    def _names(self) -> list[str]:
        names = {target.name for mount in self._mounts for target in mount.targets}
        return sorted(names)[:_TARGETS_AT_MOST]

    def _read(self) -> list[Value]:
        """Read every mount, in the thread; every 10 s also which there are, and connections."""
        now_ns = self._clock()
        whole = self._whole_ns is None or now_ns - self._whole_ns >= _WHOLE_NS
        if whole:
            if self._found() != self._mounts:
                raise DevicesChanged
            self._whole_ns = now_ns
        known = self._calls or [() for _ in self._held]
        readings = [one.read(whole, calls) for one, calls in zip(self._held, known)]
        calls = [tuple(reading.calls) for reading in readings]
        if self._calls and calls != self._calls:
            raise DevicesChanged  # a call of a kind that had not been made before
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
            values += [total(column) for column in zip(*targets[name])]
        return values
