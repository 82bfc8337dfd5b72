"""What a thread was blocked on, told from the samples of its state and from bytes.

A fetch may be shorter than the time between two samples, so samples are pooled over the chunk, in
two groups: those inside fetches that read from a device, and those inside fetches that did not.
A sample counts when the thread was blocked (state D or S); where it slept decides (`wchan`):

    rpc_*, nfs*, fuse*, request_wait_answer, cifs*, ceph*, p9_*, Lustre    network file system
    try_to_free_*, shrink_*, reclaim, swap                                 memory
    blk_*, bio, iomap, ext4, xfs, jbd2, …                     in state D   local block device
    folio_wait_*, wait_on_page_*, filemap_*, io_schedule      in state D   a page to be read
    sk_wait_data, wait_woken, tcp_*, inet_*, …                             a TCP connection
    do_poll, ep_poll, do_select, …            inside a fetch               the same, if the node
                                                                           received and no child
                                                                           process is waited for
    anything else, or a name we may not read                  in state D   a page to be read if
                                                                           bytes were, else unknown

A page to be read is shared out by bytes: local disks and network mounts say how much they read,
and swapped-in bytes belong to memory. NFS hides here: its buffered reads wait for a page like a
disk's. Asleep elsewhere - a lock, a pipe, `sleep` - is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.probe import layout
from clusterprof.timeline import series
from clusterprof.timeline.disks import undermost
from clusterprof.timeline.model import Chunk, Float, Int, ThreadTable

ASLEEP, REMOTE, MEMORY, LOCAL, PAGE, OTHER, SOCKET, POLL, NAMELESS = KINDS = range(9)
NO_SAMPLES = np.zeros((2, len(KINDS)), np.int64)
_REMOTE_WORDS = (
    "rpc_", "nfs", "fuse", "request_wait_answer", "cifs", "smb", "wait_for_response", "ceph",
    "cl_", "p9_", "v9fs", "lustre", "ll_", "ptlrpc", "osc_", "mdc_", "gpfs", "afs_", "netfs",
)  # fmt: skip
_MEMORY_WORDS = (
    "try_to_free", "shrink_", "reclaim", "swap", "mem_cgroup", "compact", "congestion_wait",
    "__alloc_pages", "handle_over_high",
)  # fmt: skip
_LOCAL_WORDS = (
    "blk", "__blk", "submit_bio", "bio_", "iomap", "__iomap", "dio_", "do_direct", "rq_qos",
    "wbt_", "ext4", "xfs", "btrfs", "f2fs", "jbd2", "wait_on_buffer", "__wait_on_buffer",
    "__bread",
)  # fmt: skip
_PAGE_WORDS = (
    "folio_", "wait_on_page", "__lock_page", "lock_page", "filemap", "bit_wait_io", "io_schedule",
    "page_cache", "mpage", "do_mpage", "read_pages",
)  # fmt: skip
# In a receive from, or a connect to, another host; not those of Unix sockets and pipes.
_SOCKET_WORDS = (
    "sk_wait_data", "wait_woken", "tcp_recvmsg", "inet_wait_for_connect", "inet_stream_connect",
    "__inet_stream_connect", "inet_recvmsg", "sock_recvmsg", "__skb_wait_for_more", "udp_recvmsg",
)  # fmt: skip
_POLL_WORDS = (
    "do_poll", "do_sys_poll", "poll_schedule", "ep_poll", "do_epoll", "do_select",
)  # fmt: skip
_LOCK_WORDS = ("rwsem", "mutex", "futex", "down_", "__down", "vfork", "freez")
_REMOTE_TYPES = (
    "nfs", "cifs", "smb", "fuse", "ceph", "9p", "lustre", "gpfs", "beegfs", "afs", "glusterfs",
)  # fmt: skip
_REMOTE_BYTES = (signals.NFS_READ_BYTES, signals.LUSTRE_FETCHED_BYTES, signals.CIFS_READ_BYTES)
_SURROUNDINGS = "surroundings"
_RECEIVED_BYTES_PER_SECOND = 100_000  # less than this feeds nobody
_SWAP_CLUSTER_BYTES = 32_768  # page-cluster 3: a swap fault reads up to 8 pages


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the node as a whole says about the reads of this chunk."""

    wchan_kind: Int
    """Per wchan index one of the kinds above; the last row is for the index -1."""
    remote_mounts: bool
    """A network or user-space file system was mounted."""
    disk_bytes: float
    """Read from local disks in this chunk; NaN when unknown."""
    remote_bytes: float
    """Read from NFS, Lustre and CIFS mounts in this chunk; NaN when unknown."""
    swap_in_bytes: float
    """Read back from swap in this chunk; 0 when unknown."""
    polls_sockets: bool
    """A loader that polls within a fetch can only be waiting for the network: the node received,
    and no loader had a process of its own to wait for."""


def surroundings(chunk: Chunk) -> Surroundings:
    """Sum up what disks, mounts and swap read during the chunk; once for all its ranks."""
    known = chunk.shared.get(_SURROUNDINGS)
    if known is None:
        known = chunk.shared[_SURROUNDINGS] = _surroundings(chunk)
    return known  # type: ignore[no-any-return]


def _surroundings(chunk: Chunk) -> Surroundings:
    kinds = [_kind(name) for name in chunk.wchan_names]
    mounts = chunk.header.host.get("mounts") or ()
    swapped = _node_rise(chunk, signals.MEMORY_SWAP_IN.name)
    return Surroundings(
        wchan_kind=np.array([*kinds, NAMELESS], np.int64),
        remote_mounts=any(_is_remote(mount) for mount in mounts),
        disk_bytes=_node_rise(chunk, signals.DISK_READ_BYTES.name, undermost(chunk)),
        remote_bytes=_remote_bytes(chunk, mounts),
        swap_in_bytes=0.0 if np.isnan(swapped) else swapped,
        polls_sockets=_received(chunk) and not _loaders_have_children(chunk),
    )


def _remote_bytes(chunk: Chunk, mounts: Sequence[object]) -> float:
    """What file servers sent; NaN when unknown, of Lustre too when it is mounted and not read."""
    parts = [_node_rise(chunk, signal.name) for signal in _REMOTE_BYTES]
    known = [part for part in parts if not np.isnan(part)]
    lustre = any(isinstance(one, dict) and one.get("type") == "lustre" for one in mounts)
    if not known or (lustre and np.isnan(parts[1])):
        return np.nan
    return sum(known)


def _received(chunk: Chunk) -> bool:
    """True when the job's connections, else the node's interfaces, brought enough to load from."""
    received = _node_rise(chunk, signals.TCP_JOB_RECEIVED.name)
    if np.isnan(received):
        received = _node_rise(chunk, signals.NET_RECEIVE.name)
    seconds = (chunk.end_ns - chunk.start_ns) / 1e9
    return bool(received >= _RECEIVED_BYTES_PER_SECOND * seconds > 0)


def _loaders_have_children(chunk: Chunk) -> bool:
    """A decoder in a process of its own is polled like a connection."""
    loaders = {p.pid for p in chunk.processes.values() if layout.FETCH in p.spans}
    return any(
        one.parent_pid in loaders
        and one.pid not in loaders
        and layout.WORKER_START not in one.spans
        for one in chunk.processes.values()
    )


def _kind(wchan: str) -> int:
    if wchan.startswith(_REMOTE_WORDS):
        return REMOTE
    if any(word in wchan for word in _MEMORY_WORDS):
        return MEMORY
    if wchan.startswith(_SOCKET_WORDS):
        return SOCKET
    if wchan.startswith(_POLL_WORDS):
        return POLL
    if any(word in wchan for word in _LOCK_WORDS):
        return ASLEEP
    if wchan.startswith(_LOCAL_WORDS):
        return LOCAL
    return PAGE if wchan.startswith(_PAGE_WORDS) else OTHER


def _is_remote(mount: object) -> bool:
    if not isinstance(mount, dict):
        return False
    words = [str(mount.get(key, "")) for key in ("type", "fstype", "filesystem", "fs")]
    return any(word.startswith(_REMOTE_TYPES) for word in words if word)


def _node_rise(chunk: Chunk, name: str, among: frozenset[str] | None = None) -> float:
    """The growth of a counter over the chunk, all its devices together; NaN when unknown."""
    known = []
    for (signal, device), readings in chunk.series.items():
        if among is not None and device not in among:
            continue
        if signal == name and len(readings.t_ns) > 1:
            growth, bad = series.differences(readings.values)
            inside = readings.t_ns[1:] > chunk.start_ns
            if not bad.all():
                known.append(float(growth[inside].sum()))
    return sum(known) if known else np.nan


@dataclass(frozen=True, slots=True)
class BlockedOn:
    """Shares of blocked time that sum to 1, and the number of samples behind them."""

    block_io: float
    remote_io: float
    memory: float
    socket: float
    unknown: float
    samples: int


def count(thread: ThreadTable, inside: NDArray[np.bool_], around: Surroundings) -> Int:
    """Return int64[2, 9]: the blocked samples of a thread in state D and S, by kind.

    `inside` says which samples to take.
    """
    table = np.zeros_like(NO_SAMPLES)
    for row, letter in enumerate("DS"):
        wchan = thread.wchan[inside & (thread.state == ord(letter))]
        kind = around.wchan_kind[np.where(wchan < len(around.wchan_kind) - 1, wchan, -1)]
        if letter == "S":
            kind = np.where((kind == LOCAL) | (kind == PAGE) | (kind == OTHER), ASLEEP, kind)
        table[row] = np.bincount(kind, minlength=len(KINDS))
    return table


def _named(counts: Int) -> Float:
    """Spread samples without a name over those of the same state that have one.

    The recorder asks for the name of a short sleep only now and then. With no name at all state S
    is a sleep, and state D is something.
    """
    total = np.zeros(len(KINDS))
    for row, otherwise in zip(counts, (OTHER, ASLEEP)):
        named = row[:NAMELESS].astype(np.float64)
        if not named.any():
            named[otherwise] = 1.0
            total[:NAMELESS] += row[NAMELESS] * named
        else:
            total[:NAMELESS] += named + row[NAMELESS] * named / named.sum()
    return total


def blocked_on(
    counts: Int,
    around: Surroundings,
    read_bytes: float,
    major_faults: float,
    fetching: bool = False,
) -> BlockedOn:
    """Name what blocked time was, from pooled samples and the bytes the same fetches read.

    Without any sample, time in fetches that read from a device is I/O and other time unknown.
    `read_bytes` is 0 for the group of fetches that read nothing from a device: a page that
    somebody else had to read is then local, unless network mounts are the only readers.
    `fetching`: the samples are of fetches; a loader that rests polls too.
    """
    samples = int(counts.sum())
    swap = min(around.swap_in_bytes, major_faults * _SWAP_CLUSTER_BYTES)
    memory = min(1.0, swap / read_bytes) if read_bytes > 0 else 0.0
    remote = (1 - memory) * remote_ratio(around, read_bytes)
    page = np.array([1 - memory - remote, remote, memory])
    if not samples:
        known = page if read_bytes > 0 else np.zeros(3)
        block_io, remote_io, in_memory = known.tolist()
        return BlockedOn(block_io, remote_io, in_memory, 0.0, 1 - float(known.sum()), 0)
    part = _named(counts) / samples
    pages = part[PAGE] + (part[OTHER] if read_bytes > 0 else 0.0)
    known = pages * page + np.array([part[LOCAL], part[REMOTE], part[MEMORY]])
    block_io, remote_io, in_memory = known.tolist()
    socket = float(part[SOCKET] + (part[POLL] if fetching and around.polls_sockets else 0.0))
    unknown = max(0.0, 1 - float(known.sum()) - socket)
    return BlockedOn(block_io, remote_io, in_memory, socket, unknown, samples)


def at_least_io(on: BlockedOn, ratio: float, remote: float) -> BlockedOn:
    """Raise the share of I/O to what the kernel's delay accounting measured.

    It counts waits for pages and blocks, not those for a reply over the network, so it may raise
    the share and never lower it. Where nothing else was seen, `remote` of it came over the network.
    """
    now = on.block_io + on.remote_io
    if not now < ratio <= 1 or on.memory >= 1:
        return on
    grown = ratio - now
    from_unknown = min(grown, on.unknown)
    local = on.block_io / now if now > 0 else 1.0 - remote
    return BlockedOn(
        on.block_io + local * from_unknown,
        on.remote_io + (1 - local) * from_unknown,
        on.memory,
        on.socket,
        on.unknown - from_unknown,
        on.samples,
    )


def remote_ratio(around: Surroundings, read_bytes: float) -> float:
    """Return which part of the pages read came over the network, from 0 to 1.

    At least what local disks cannot have read, at most what mounts did read; the middle of the
    two where both are possible. Example: 100 MB read, disks 10 MB, NFS 95 MB: between 90 and 95.
    """
    if not around.remote_mounts and not around.remote_bytes > 0:
        return 0.0
    if read_bytes <= 0:  # FUSE and cached NFS: bytes that no device counted
        return 1.0 if not around.disk_bytes > 0 else 0.0
    least = 0.0 if np.isnan(around.disk_bytes) else max(0.0, read_bytes - around.disk_bytes)
    most = read_bytes if np.isnan(around.remote_bytes) else min(read_bytes, around.remote_bytes)
    return float(np.clip((least + max(least, most)) / 2 / read_bytes, 0.0, 1.0))


def spread(blocked_ns: Float, on: BlockedOn) -> Float:
    """Return float64[n, 5]: blocked time as block I/O, remote I/O, memory, socket, unknown."""
    part = np.array([on.block_io, on.remote_io, on.memory, on.socket, on.unknown])
    return np.outer(blocked_ns, part / part.sum())
