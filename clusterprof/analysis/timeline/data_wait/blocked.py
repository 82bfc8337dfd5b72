"""Activities of the critical thread, as the columns of a table of ns or shares.

table = make_empty_table(2)               two intervals, nothing known
add_to_column(table, rows, BLOCK_IO, ns)   rows may repeat; amounts add up
normalize_shares(table, lengths)         the rest of each length is unknown

Causes of blocked time of a thread, from samples of its state and from bytes read.

A fetch may be shorter than the time between two samples. Samples are therefore pooled
over the chunk in two groups: inside fetches that read from a device, and inside fetches
that did not. A sample counts if the thread was blocked (state D or S); the place where
it slept decides (`wchan`):

    rpc_*, nfs*, fuse*, request_wait_answer, cifs*, ceph*, p9_*, Lustre    network file system
    try_to_free_*, shrink_*, reclaim, swap                                 memory
    blk_*, bio, iomap, ext4, xfs, jbd2, …                     in state D   local block device
    folio_wait_*, wait_on_page_*, filemap_*, io_schedule      in state D   a page to be read
    sk_wait_data, wait_woken, tcp_*, inet_*, …                             a TCP connection
    do_poll, ep_poll, do_select, …            inside a fetch               a TCP connection, if the
                                                                           node received data and no
                                                                           child process is awaited
    anything else, or an unreadable name                      in state D   a page to be read if
                                                                           bytes were, else unknown

A page to be read is divided by bytes: local disks and network mounts report how much
they read, and swapped-in bytes belong to memory. NFS needs this: its buffered reads
wait for a page like those of a disk. A user-space file system counts no bytes, so time
decides: a disk explains waits only while it has requests, and no more of them than the
job's own bytes can be. Waits beyond that belong to the mount; without one they are
unknown. Sleeping elsewhere (a lock, a pipe, `sleep`) is unknown.

    10 s, 100 samples    63 wait for pages    disk busy 2 %, the job read 0 bytes from it
    explained            2 + 2 * sqrt(2) + 1 = 6, with the scatter of samples
    on the mount         63 - 6 = 57
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.analysis.timeline import series
from clusterprof.analysis.timeline.host_resources import (
    DISK_BIN_NS,
    find_bottom_disks,
    measure_disk_bins,
)
from clusterprof.analysis.timeline.model import Chunk, Float, Int, ThreadTable
from clusterprof.probe import layout

SHARE_NAMES = (
    "user_cpu",
    "reading_cpu",
    "runnable",
    "block_io",
    "remote_io",
    "socket",
    "memory",
    "no_work",
    "no_worker",
    "delivery",
    "unknown",
)
(
    USER_CPU,
    READING_CPU,
    RUNNABLE,
    BLOCK_IO,
    REMOTE_IO,
    SOCKET,
    MEMORY,
    NO_WORK,
    NO_WORKER,
    DELIVERY,
    UNKNOWN,
) = range(len(SHARE_NAMES))


def make_empty_table(rows: int) -> Float:
    """Make a table of zeros, float64[rows, 11]; columns, not rows, are contiguous in memory."""
    return np.zeros((len(SHARE_NAMES), rows)).T


def make_unknown_shares(rows: int) -> Float:
    """Make shares in which everything is unknown, float64[rows, 11]."""
    table = make_empty_table(rows)
    table[:, UNKNOWN] = 1.0
    return table


def add_to_column(table: Float, rows: Int, column: int, amount: Float | Int) -> None:
    """Add an amount to one column of each row; a row listed twice gets both amounts.

    table: float64[n, 11]. rows: int64[m]. amount: [m].
    """
    table[:, column] += np.bincount(rows, amount, minlength=len(table))[: len(table)]


def add_to_rows(table: Float, rows: Int, amounts: Float) -> None:
    """Add float64[m, 11] to the m listed rows of float64[n, 11].

    A row listed twice gets both amounts.
    """
    if len(rows) == len(table) and (rows == np.arange(len(rows))).all():
        table += amounts
        return
    for column in range(table.shape[1]):
        if amounts[:, column].any():
            add_to_column(table, rows, column, amounts[:, column])


def normalize_shares(table_ns: Float, length_ns: Int | Float) -> Float:
    """Convert ns, float64[n, 11], into shares of each length, [n].

    No share is negative, and every row sums to 1.
    """
    length = np.asarray(length_ns, np.float64)
    table = np.maximum(table_ns, 0.0)
    table[:, UNKNOWN] += np.maximum(length - _sum_columns(table), 0.0)
    total = _sum_columns(table)
    is_empty = total <= 0
    if is_empty.any():
        table[is_empty, UNKNOWN] = 1.0
        total = _sum_columns(table)
    result: Float = table / total[:, None]
    return result


def _sum_columns(table: Float) -> Float:
    """Sum each row pairwise, column by column."""
    c = table.T
    return ((c[0] + c[1]) + (c[2] + c[3])) + ((c[4] + c[5]) + (c[6] + c[7])) + c[8] + c[9] + c[10]


(
    BLOCKED_ASLEEP,
    BLOCKED_REMOTE,
    BLOCKED_MEMORY,
    BLOCKED_LOCAL,
    BLOCKED_PAGE,
    BLOCKED_OTHER,
    BLOCKED_SOCKET,
    BLOCKED_POLL,
    BLOCKED_UNREAD,
    BLOCKED_UNNAMED,
) = BLOCKED_KINDS = range(10)
NO_SAMPLES = np.zeros((2, len(BLOCKED_KINDS)), np.int64)
_REMOTE_PREFIXES = (
    "rpc_",
    "nfs",
    "fuse",
    "request_wait_answer",
    "cifs",
    "smb",
    "wait_for_response",
    "ceph",
    "cl_",
    "p9_",
    "v9fs",
    "lustre",
    "ll_",
    "ptlrpc",
    "osc_",
    "mdc_",
    "gpfs",
    "afs_",
    "netfs",
)
_MEMORY_WORDS = (
    "try_to_free",
    "shrink_",
    "reclaim",
    "swap",
    "mem_cgroup",
    "compact",
    "congestion_wait",
    "__alloc_pages",
    "handle_over_high",
)
_LOCAL_PREFIXES = (
    "blk",
    "__blk",
    "submit_bio",
    "bio_",
    "iomap",
    "__iomap",
    "dio_",
    "do_direct",
    "rq_qos",
    "wbt_",
    "ext4",
    "xfs",
    "btrfs",
    "f2fs",
    "jbd2",
    "wait_on_buffer",
    "__wait_on_buffer",
    "__bread",
)
_PAGE_PREFIXES = (
    "folio_",
    "wait_on_page",
    "__lock_page",
    "lock_page",
    "filemap",
    "bit_wait_io",
    "io_schedule",
    "page_cache",
    "mpage",
    "do_mpage",
    "read_pages",
)
# Receiving from, or connecting to, another host; not Unix sockets or pipes.
_SOCKET_PREFIXES = (
    "sk_wait_data",
    "wait_woken",
    "tcp_recvmsg",
    "inet_wait_for_connect",
    "inet_stream_connect",
    "__inet_stream_connect",
    "inet_recvmsg",
    "sock_recvmsg",
    "__skb_wait_for_more",
    "udp_recvmsg",
)
_POLL_PREFIXES = ("do_poll", "do_sys_poll", "poll_schedule", "ep_poll", "do_epoll", "do_select")
_LOCK_WORDS = ("rwsem", "mutex", "futex", "down_", "__down", "vfork", "freez")
_REMOTE_FILESYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "ceph",
    "9p",
    "lustre",
    "gpfs",
    "beegfs",
    "afs",
    "glusterfs",
)
_USER_SPACE = "fuse"
_NO_DATA_MOUNTS = ("fusectl", "fuse.lxcfs", "fuse.portal", "fuse.gvfsd-fuse")  # of the system
_REMOTE_BYTES = (signals.NFS_READ_BYTES, signals.LUSTRE_FETCHED_BYTES, signals.CIFS_READ_BYTES)
_READ_CONTEXT_KEY = "surroundings"
_MIN_RECEIVED_BYTES_PER_SECOND = 100_000  # less than this cannot feed a data loader
_SWAP_CLUSTER_BYTES = 32_768  # page-cluster 3: a swap fault reads up to 8 pages


@dataclass(frozen=True, slots=True)
class ReadContext:
    """Node-wide facts about the reads of this chunk."""

    wchan_kind: Int
    """int64[w + 1]: blocked kind of each wchan index; the last row is for the index -1."""
    remote_mounts: bool
    """True if a network or user-space file system was mounted."""
    network_mounts: bool
    """True if a network file system was mounted, whose bytes the kernel counts as read."""
    disk_bytes: float
    """Bytes read from local disks in this chunk; NaN if unknown."""
    remote_bytes: float
    """Bytes read from NFS, Lustre and CIFS mounts in this chunk; NaN if unknown."""
    swap_in_bytes: float
    """Bytes read back from swap in this chunk; 0 if unknown."""
    polls_sockets: bool
    """True if a loader that polls within a fetch can only be waiting for the network: the
    node received data, and no loader had a child process to wait for.
    """
    start_ns: int
    """Start of the first bin of the two arrays below."""
    disk_time_ratio: Float
    """float64[bins]: part of each 10 s in which a disk worked on reads that can be the job's.
    NaN if unknown.
    """
    disk_bytes_ratio: Float
    """float64[bins]: part of the bytes requested by the job that came from disks, 0 to 1."""


def get_read_context(chunk: Chunk) -> ReadContext:
    """Return what disks, mounts and swap read during the chunk.

    Computed once for all its ranks.
    """
    context = chunk.shared.get(_READ_CONTEXT_KEY)
    if context is None:
        context = chunk.shared[_READ_CONTEXT_KEY] = _measure_read_context(chunk)
    return context  # type: ignore[no-any-return]


def _measure_read_context(chunk: Chunk) -> ReadContext:
    kinds = [_find_blocked_kind(name) for name in chunk.wchan_names]
    mounts = chunk.header.host.get("mounts") or ()
    types = [get_remote_type(mount) for mount in mounts]
    swapped = _sum_counter_growth(chunk, signals.MEMORY_SWAP_IN.name)
    time_ratio, bytes_ratio = measure_disk_bins(chunk, any(types))
    return ReadContext(
        wchan_kind=np.array([*kinds, BLOCKED_UNNAMED], np.int64),
        remote_mounts=any(types),
        network_mounts=any(t and not t.startswith(_USER_SPACE) for t in types),
        disk_bytes=_sum_counter_growth(
            chunk, signals.DISK_READ_BYTES.name, find_bottom_disks(chunk)
        ),
        remote_bytes=_sum_remote_bytes(chunk, mounts),
        swap_in_bytes=0.0 if np.isnan(swapped) else swapped,
        polls_sockets=_has_received_data(chunk) and not _has_loader_children(chunk),
        start_ns=chunk.start_ns,
        disk_time_ratio=time_ratio,
        disk_bytes_ratio=bytes_ratio,
    )


def _sum_remote_bytes(chunk: Chunk, mounts: Sequence[object]) -> float:
    """Sum the bytes that file servers sent.

    NaN if unknown, or if Lustre is mounted but not recorded.
    """
    increases = [_sum_counter_growth(chunk, signal.name) for signal in _REMOTE_BYTES]
    measured = [increase for increase in increases if not np.isnan(increase)]
    lustre = any(isinstance(mount, dict) and mount.get("type") == "lustre" for mount in mounts)
    if not measured or (lustre and np.isnan(increases[1])):
        return np.nan
    return sum(measured)


def _has_received_data(chunk: Chunk) -> bool:
    """Return whether the job's connections, else the node, received enough to load from."""
    received = _sum_counter_growth(chunk, signals.TCP_JOB_RECEIVED.name)
    if np.isnan(received):
        received = _sum_counter_growth(chunk, signals.NET_RECEIVE.name)
    seconds = (chunk.end_ns - chunk.start_ns) / 1e9
    return bool(received >= _MIN_RECEIVED_BYTES_PER_SECOND * seconds > 0)


def _has_loader_children(chunk: Chunk) -> bool:
    """Return whether a loader has a child process.

    A decoder process is polled like a connection.
    """
    loaders = {p.pid for p in chunk.processes.values() if layout.FETCH in p.spans}
    return any(
        process.parent_pid in loaders
        and process.pid not in loaders
        and layout.WORKER_START not in process.spans
        for process in chunk.processes.values()
    )


def _find_blocked_kind(wchan: str) -> int:
    if wchan.startswith(_REMOTE_PREFIXES):
        return BLOCKED_REMOTE
    if any(word in wchan for word in _MEMORY_WORDS):
        return BLOCKED_MEMORY
    if wchan.startswith(_SOCKET_PREFIXES):
        return BLOCKED_SOCKET
    if wchan.startswith(_POLL_PREFIXES):
        return BLOCKED_POLL
    if any(word in wchan for word in _LOCK_WORDS):
        return BLOCKED_ASLEEP
    if wchan.startswith(_LOCAL_PREFIXES):
        return BLOCKED_LOCAL
    return BLOCKED_PAGE if wchan.startswith(_PAGE_PREFIXES) else BLOCKED_OTHER


def get_remote_type(mount: object) -> str:
    """Return the type of a network or user-space file system; "" for any other mount."""
    if not isinstance(mount, dict):
        return ""
    types = [str(mount.get(key, "")) for key in ("type", "fstype", "filesystem", "fs")]
    remote = [t for t in types if t.startswith(_REMOTE_FILESYSTEMS) and t not in _NO_DATA_MOUNTS]
    return remote[0] if remote else ""


def _sum_counter_growth(chunk: Chunk, name: str, among: frozenset[str] | None = None) -> float:
    """Sum the growth of a counter over the chunk for all its devices; NaN if unknown."""
    increases = []
    for (signal, device), readings in chunk.series.items():
        if among is not None and device not in among:
            continue
        if signal == name and len(readings.t_ns) > 1:
            growth, unusable = series.compute_differences(readings.values)
            inside = readings.t_ns[1:] > chunk.start_ns
            if not unusable.all():
                increases.append(float(growth[inside].sum()))
    return sum(increases) if increases else np.nan


@dataclass(frozen=True, slots=True)
class BlockedShares:
    """Shares of blocked time that sum to 1, and the number of samples they are based on."""

    block_io: float
    remote_io: float
    memory: float
    socket: float
    unknown: float
    samples: int


def count_blocked_samples(
    thread: ThreadTable, inside: NDArray[np.bool_], context: ReadContext
) -> Int:
    """Count the blocked samples of a thread by state (D, S) and kind: int64[2, 10].

    inside: bool[samples], the samples to count.
    """
    table = np.zeros_like(NO_SAMPLES)
    for row, letter in enumerate("DS"):
        wchan = thread.wchan[inside & (thread.state == ord(letter))]
        kind = context.wchan_kind[np.where(wchan < len(context.wchan_kind) - 1, wchan, -1)]
        if letter == "S":
            kind = np.where(
                (kind == BLOCKED_LOCAL) | (kind == BLOCKED_PAGE) | (kind == BLOCKED_OTHER),
                BLOCKED_ASLEEP,
                kind,
            )
        table[row] = np.bincount(kind, minlength=len(BLOCKED_KINDS))
    unread = count_unread_pages(thread, inside, context)
    table[0, BLOCKED_PAGE] -= unread
    table[0, BLOCKED_UNREAD] += unread
    return table


def find_page_waits(thread: ThreadTable, context: ReadContext) -> NDArray[np.bool_]:
    """Find the samples in which a thread waited for a page: bool[samples]."""
    has_kind = thread.wchan < len(context.wchan_kind) - 1
    kind = context.wchan_kind[np.where(has_kind, thread.wchan, -1)]
    return (thread.state == ord("D")) & (kind == BLOCKED_PAGE)


def count_unread_pages(thread: ThreadTable, inside: NDArray[np.bool_], context: ReadContext) -> int:
    """Count the samples that waited for pages which no disk can have been reading.

    In each bin a disk explains as many samples as its time is long, and twice their standard
    deviation (Poisson) and one more; it explains at least the part of the bytes that it gave.
    """
    pages = inside & find_page_waits(thread, context)
    bins = len(context.disk_time_ratio)
    if not pages.any() or not bins:
        return 0
    row = np.clip((thread.t_ns - context.start_ns) // DISK_BIN_NS, 0, bins - 1)
    waits = np.bincount(row[pages], minlength=bins)
    expected = np.bincount(row, minlength=bins) * context.disk_time_ratio
    by_time = expected + 2 * np.sqrt(expected) + (expected > 0)
    explained = np.fmax(by_time, waits * context.disk_bytes_ratio)
    explained = np.where(np.isnan(expected), waits, np.ceil(explained))
    return int(np.maximum(waits - explained, 0).sum())


def _assign_unnamed_samples(counts: Int) -> Float:
    """Distribute samples without a name over the named samples of the same state.

    The recorder reads the name of a short sleep only occasionally. If there is no name at
    all, state S counts as sleep and state D as other.
    """
    total = np.zeros(len(BLOCKED_KINDS))
    for row, otherwise in zip(counts, (BLOCKED_OTHER, BLOCKED_ASLEEP)):
        named = row[:BLOCKED_UNNAMED].astype(np.float64)
        if not named.any():
            named[otherwise] = 1.0
            total[:BLOCKED_UNNAMED] += row[BLOCKED_UNNAMED] * named
        else:
            total[:BLOCKED_UNNAMED] += named + row[BLOCKED_UNNAMED] * named / named.sum()
    return total


def estimate_blocked_shares(
    counts: Int,
    context: ReadContext,
    read_bytes: float,
    major_faults: float,
    in_fetches: bool = False,
) -> BlockedShares:
    """Estimate the causes of blocked time from pooled samples and bytes read.

    counts: int64[2, 10]. Without samples, blocked time in fetches that read from a device is
    I/O, and other blocked time is unknown. read_bytes: 0 for the group of fetches that read
    nothing from a device; a page that another process had to read is then local, unless
    network mounts are the only readers. in_fetches: the samples are from fetches; an idle
    loader also polls.
    """
    samples = int(counts.sum())
    swap = min(context.swap_in_bytes, major_faults * _SWAP_CLUSTER_BYTES)
    memory = min(1.0, swap / read_bytes) if read_bytes > 0 else 0.0
    remote = (1 - memory) * estimate_remote_ratio(context, read_bytes)
    page = np.array([1 - memory - remote, remote, memory])
    if not samples:
        explained = page if read_bytes > 0 else np.zeros(3)
        block_io, remote_io, in_memory = explained.tolist()
        return BlockedShares(block_io, remote_io, in_memory, 0.0, 1 - float(explained.sum()), 0)
    share = _assign_unnamed_samples(counts) / samples
    pages = share[BLOCKED_PAGE] + (share[BLOCKED_OTHER] if read_bytes > 0 else 0.0)
    explained = pages * page + np.array(
        [share[BLOCKED_LOCAL], share[BLOCKED_REMOTE], share[BLOCKED_MEMORY]]
    )
    explained[1] += share[BLOCKED_UNREAD] if context.remote_mounts else 0.0
    block_io, remote_io, in_memory = explained.tolist()
    socket = float(
        share[BLOCKED_SOCKET]
        + (share[BLOCKED_POLL] if in_fetches and context.polls_sockets else 0.0)
    )
    unknown = max(0.0, 1 - float(explained.sum()) - socket)
    return BlockedShares(block_io, remote_io, in_memory, socket, unknown, samples)


def ensure_min_io(blocked: BlockedShares, ratio: float, remote_share: float) -> BlockedShares:
    """Raise the share of I/O to the value that the kernel's delay accounting measured.

    Delay accounting counts waits for pages and blocks, not for replies over the network, so
    it may raise the share but never lower it. Without other evidence, the part `remote` is
    network I/O.
    """
    io = blocked.block_io + blocked.remote_io
    if not io < ratio <= 1 or blocked.memory >= 1:
        return blocked
    missing = ratio - io
    from_unknown = min(missing, blocked.unknown)
    local = blocked.block_io / io if io > 0 else 1.0 - remote_share
    return BlockedShares(
        blocked.block_io + local * from_unknown,
        blocked.remote_io + (1 - local) * from_unknown,
        blocked.memory,
        blocked.socket,
        blocked.unknown - from_unknown,
        blocked.samples,
    )


def estimate_remote_ratio(context: ReadContext, read_bytes: float) -> float:
    """Estimate the fraction of the pages read that came over the network, 0 to 1.

    At least what local disks cannot have read, at most what mounts did read; the middle of
    the two where both are possible. Example: 100 MB read, disks 10 MB, NFS 95 MB: between
    90 and 95.
    """
    if not context.remote_mounts and not context.remote_bytes > 0:
        return 0.0
    if read_bytes <= 0:  # FUSE and cached NFS: bytes that no device counted
        return 1.0 if not context.disk_bytes > 0 else 0.0
    low = 0.0 if np.isnan(context.disk_bytes) else max(0.0, read_bytes - context.disk_bytes)
    high = read_bytes if np.isnan(context.remote_bytes) else min(read_bytes, context.remote_bytes)
    if not context.network_mounts and np.isnan(context.remote_bytes):
        high = low  # bytes of a user-space file system are not among those read
    return float(np.clip((low + max(low, high)) / 2 / read_bytes, 0.0, 1.0))


def allocate_blocked_time(blocked_ns: Float, blocked: BlockedShares) -> Float:
    """Allocate blocked time, float64[n], to causes.

    Returns float64[n, 5]: block I/O, remote I/O, memory, socket, unknown.
    """
    share = np.array(
        [blocked.block_io, blocked.remote_io, blocked.memory, blocked.socket, blocked.unknown]
    )
    return np.outer(blocked_ns, share / share.sum())
