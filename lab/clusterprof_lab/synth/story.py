"""The events of a job before any recorder saw them: the interface of `simulate` and `record`.

`simulate` moves ranks through true time and writes a `Story` and its `Truth`. `record` looks at a
story as the recorder would (sampling, clocks, losses) and writes a recording. The two are
independent: a story holds facts, no evidence and no verdict.

All times are integer nanoseconds of true time, from 0 at the start of the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Doing = Literal[
    "user",  # on a CPU, in its own code
    "system",  # on a CPU, in the kernel
    "runnable",  # ready to run, others have its CPU
    "throttled",  # ready to run, the cgroup's quota is used up
    "block-io",  # uninterruptible, for a block device
    "nfs",  # uninterruptible, for an NFS server's reply or a free slot
    "fuse",  # waiting for a FUSE daemon
    "socket",  # asleep in recv on a TCP connection to a host that is no peer
    "memory",  # direct reclaim, swap, major faults
    "lock",  # asleep on a futex (a lock, the GIL)
    "device",  # asleep in the driver: a copy or a synchronisation
    "peer",  # asleep in a collective or message
    "idle",  # asleep, with nothing to do (an empty queue)
]


class Act(NamedTuple):
    """A stretch of time a thread spent doing one thing. A thread's acts never overlap."""

    start_ns: int
    end_ns: int
    doing: Doing
    resource: str = ""
    """Disk ("vdb"), mount ("/data") or host it waited for."""
    bytes: int = 0
    """Read in that time."""
    operations: int = 0
    """Requests in that time (reads of a disk, RPCs)."""
    queued_ns: int = 0
    """Part of an NFS wait that was for a free slot."""
    what: str = ""
    """Kind of request ("READ", "GETATTR", "OPEN"), "write", "fsync"; "again": what the page cache
    had held and evicted."""


class Mark(NamedTuple):
    """A span as the probe writes it: `kind` and a, b, c, d as in `clusterprof.probe.layout`.

    A thread's marks stand in the order in which they were written: the n-th has sequence number n
    in its ring (which EXPOSED and EXPOSED_COLLECTIVE refer to). A collective that ends after the
    story does was under way when recording ended: its span was never written.
    """

    start_ns: int
    end_ns: int
    kind: int
    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0


@dataclass
class Thread:
    """A thread of the job; a process when `pid == tid`."""

    pid: int
    tid: int
    parent_pid: int
    name: str
    acts: list[Act] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    exit_ns: int | None = None
    """When it ended before its rank did, as a worker does at the end of an epoch."""


class Work(NamedTuple):
    """A stretch of time in which a device had something resident, or was copying."""

    start_ns: int
    end_ns: int
    what: Literal["compute", "collective", "copy"]
    """A collective on the device is resident while it waits for peers: busy to NVML, all but idle
    to its multiprocessors. A copy is no kernel."""
    sm_ratio: float = 0.9
    clock_ratio: float = 1.0
    throttle_bits: int = 0


@dataclass
class Rank:
    """One training process with its workers and its device."""

    rank: int
    node: str
    main: Thread
    workers: list[Thread]
    device: str
    """"emulated-0", …; "" without."""
    work: list[Work]
    variables: dict[str, str] = field(default_factory=dict)
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Process group -> its ranks, as the probe announces them."""
    gc_pauses: int = 0
    exit_ns: int | None = None
    """When it ended; None = after the recording."""
    exit_code: int = 0
    """How it ended; -9 = by signal 9."""
    threads: list[Thread] = field(default_factory=list)
    """Further threads of the training process, beside the main one."""


class Rate(NamedTuple):
    """What a counter of the node grew by, evenly, or what a gauge was, from start to end."""

    start_ns: int
    end_ns: int
    value: float


@dataclass
class Node:
    """One machine."""

    name: str
    cpus: int = 64
    extra: dict[tuple[str, str], list[Rate]] = field(default_factory=dict)
    """(signal of `clusterprof.signals`, device) -> what no thread of the job tells: other
    tenants' use of CPUs and disks, NIC, TCP, pressure and throttling beyond the job's own."""
    disks: tuple[str, ...] = ("vda", "vdb")
    mounts: tuple[tuple[str, str, str], ...] = ()
    """(mount point, source, file-system type)."""
    others: list[Thread] = field(default_factory=list)
    """Processes of the job's tree that are no rank and no worker; of other jobs: not here."""


@dataclass
class Story:
    """A job."""

    ranks: list[Rank]
    nodes: Mapping[str, Node]
    start_ns: int
    """When recording began, and ended, in true time."""
    end_ns: int
    job: str = "synth"
    world_size: int = 0
