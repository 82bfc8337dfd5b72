"""Measure how long the main thread was blocked in files inside steps: in logs, saves and reads.

A write sleeps in kernel functions of its own (a journal, write-back, fsync, a full send
buffer) or waits for pages, where reads sleep too. Waiting for pages counts only while the
process writes to a device and reads from none.

    save span |====|                              torch.save, to the page cache
    blocked        |#### folio_wait_bit ####|     fsync of the same file: part of the save
    blocked                   |# jbd2 #|          a few kB: a log

A training loop that reads its data itself, without a loader, is blocked in reads.

A file system in user space answers all requests in one kernel function. Buffered reads also wait
for pages: a request far from any such wait, while the process wrote, is a write or its fsync.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clusterprof.analysis.detectors.base import (
    compute_sleep_ratios,
    limit_to_lost_time,
    measure_main_thread,
    measure_sleep,
    select_phases,
)
from clusterprof.analysis.timeline.data_wait.blocked import (
    BLOCKED_LOCAL,
    BLOCKED_PAGE,
    BLOCKED_REMOTE,
    ReadContext,
    count_blocked_samples,
    count_unread_pages,
    estimate_blocked_shares,
    find_page_waits,
    get_read_context,
)
from clusterprof.analysis.timeline.data_wait.samples import find_runs, find_sleep_samples
from clusterprof.analysis.timeline.model import (
    PHASE_COMPUTE,
    Float,
    Int,
    LostTime,
    Rank,
    ThreadTable,
)
from clusterprof.probe import layout

MIN_SAVE_BYTES = 16 << 20
"""Bytes written in one blocked run from which it is a save; a line of a log has kilobytes."""
MIN_SAVE_NS, MIN_LARGE_SAVE_NS = 300_000_000, 100_000_000
"""Length of a blocked run from which it can be a save without a span: a few samples."""
LARGE_SAVE_BYTES = 4 * MIN_SAVE_BYTES
"""Bytes written from which a run that is shorter than MIN_SAVE_NS can be one."""
MAX_SAVE_PAUSE_NS = 300_000_000
"""Time from the end of a save's span within which the next blocked write belongs to it."""
_WRITE_FUNCTIONS = (
    "jbd2",
    "fsync",
    "log_wait_commit",
    "log_force",
    "xlog",
    "writeback",
    "folio_wait_stable",
    "sync_dirty_buffer",
    "balance_dirty",
    "wait_for_stable",
    "flush",
    "sk_stream_wait_memory",
    "tcp_sendmsg",
    "nfs_file_fsync",
    "nfs_wb",
    "nfs_commit",
)
_PAGE_WAIT_PREFIXES = (
    "folio_wait",
    "wait_on_page",
    "io_schedule",
    "rpc_wait",
    "wbt_",
    "rq_qos",
    "submit_bio",
)
"""Prefixes of kernel functions in which reads sleep too: they count only while the process
writes and does not read.
"""

_REQUEST_PREFIXES = ("request_wait_answer", "fuse_")
"""Prefixes of kernel functions in which a thread waits for a file system in user space."""
_MIN_READ_SAMPLES = 3
_MIN_READ_CHARS = 65_536  # between two samples of the process
_SAME_READ_NS = 1_000_000_000  # opening a file and asking for its attributes belong to its reads
_MIN_READ_RATIO = 0.02  # of the time in steps
_SAMPLES = "write samples"  # name in `Chunk.shared`


def select_log_samples(rank: Rank) -> NDArray[np.bool_]:
    """Select the samples of the main thread that were blocked in writing, saves left out.

    bool[samples]. A long blocked run whose bytes are not known may be a save; it is left out
    too.
    """
    return _classify_samples(rank)[0]


def select_save_samples(rank: Rank) -> NDArray[np.bool_]:
    """Select the samples of the main thread that were blocked in writing a save: bool[samples]."""
    return _classify_samples(rank)[1]


def estimate_blocked_share(
    rank: Rank, lost: LostTime, samples: NDArray[np.bool_], min_ratio: float
) -> Float:
    """Estimate the share of each segment inside a step that blocked reads or writes explain.

    Returns float64[n]. samples: bool[samples] of the main thread, those in which it was blocked so.
    min_ratio: a smaller part of the segments together explains nothing.
    """
    out = np.zeros(lost.start_ns.size)
    inside = select_phases(lost, PHASE_COMPUTE)
    if not inside.any() or not samples.any():
        return out
    length = lost.end_ns - lost.start_ns
    # A read or a write works in the kernel before and after it sleeps there.
    system = np.nan_to_num(measure_main_thread(rank, "system_ns", lost, inside))
    unavailable_ns = measure_sleep(rank, lost, inside) + system * length
    blocked_ns = unavailable_ns * compute_sleep_ratios(rank, lost, inside, samples)
    if float(blocked_ns.sum()) < min_ratio * float(length[inside].sum()):
        return out
    # Nothing was launched while it was blocked: idle time of a segment belongs to it.
    claimed_ns = limit_to_lost_time(blocked_ns, lost, inside)
    return np.minimum(claimed_ns / np.maximum(lost.lost_ns, 1), 1.0)


def estimate_read_shares(rank: Rank, lost: LostTime) -> tuple[Float, Float] | None:
    """Estimate the share of each segment inside a step that blocked reads of files explain.

    Returns float64[n] for local disks and for network or user-space file systems; None if the main
    thread was hardly ever blocked in a read. It counts only where the process read more than it
    wrote meanwhile.
    """
    thread = rank.main.threads.get(rank.pid)
    if thread is None:
        return None
    context = get_read_context(rank.chunk)
    kind = context.wchan_kind[
        np.where(thread.wchan < len(context.wchan_kind) - 1, thread.wchan, -1)
    ]
    remote = kind == BLOCKED_REMOTE
    local = ((kind == BLOCKED_LOCAL) | (kind == BLOCKED_PAGE)) & (thread.state == ord("D"))
    samples = (local | remote) & _find_reading_samples(rank, thread, context)
    for written in _classify_samples(rank):
        samples &= ~written
    if np.count_nonzero(samples) < _MIN_READ_SAMPLES:
        return None
    share = estimate_blocked_share(rank, lost, samples, _MIN_READ_RATIO)
    if not share.any():
        return None
    counts = count_blocked_samples(thread, samples, context)
    shares = estimate_blocked_shares(counts, context, _sum_read_bytes(rank), 0.0)
    remote_ratio = shares.remote_io / max(shares.block_io + shares.remote_io, 1e-9)
    return share * (1.0 - remote_ratio), share * remote_ratio


def _find_reading_samples(
    rank: Rank, thread: ThreadTable, context: ReadContext
) -> NDArray[np.bool_]:
    """Find the samples around which the process read more than it wrote: bool[n]."""
    io, t_ns = rank.main.io, thread.t_ns
    if io is None or io.t_ns.size < 2:
        return np.zeros(t_ns.size, np.bool_)
    row = np.clip(np.searchsorted(io.t_ns, t_ns, side="right") - 1, 0, io.t_ns.size - 2)
    read, written = np.diff(io.read_bytes)[row], np.diff(io.write_bytes)[row]
    # Characters also count what mounts deliver. Those that are written go to sockets, too.
    chars = np.diff(io.read_chars)[row]
    is_reading = (read > np.maximum(written, 0)) | ((written <= 0) & (chars >= _MIN_READ_CHARS))
    is_reading |= (written <= 0) & (chars > 0) & _find_mount_reads(thread, context)
    return np.asarray(is_reading, np.bool_)


def _find_mount_reads(thread: ThreadTable, context: ReadContext) -> NDArray[np.bool_]:
    """Find the samples around a thread's waits for pages that only a mount can have delivered.

    bool[n]. A file may be small: a page of it is waited for all the same, and a thread that writes
    to a file system in user space waits for the answer to its request, never for a page.
    """
    pages = find_page_waits(thread, context)
    waits = np.count_nonzero(pages)
    if not context.remote_mounts or 2 * count_unread_pages(thread, pages, context) <= waits:
        return np.zeros(pages.size, np.bool_)
    t_ns = thread.t_ns[pages]
    nearest = np.clip(np.searchsorted(t_ns, thread.t_ns), 1, t_ns.size) - 1
    after = np.minimum(nearest + 1, t_ns.size - 1)
    distance = np.minimum(abs(thread.t_ns - t_ns[nearest]), abs(thread.t_ns - t_ns[after]))
    return np.asarray(distance <= _SAME_READ_NS, np.bool_)


def _sum_read_bytes(rank: Rank) -> float:
    io = rank.main.io
    return 0.0 if io is None else float(max(io.read_bytes[-1] - io.read_bytes[0], 0))


def _classify_samples(rank: Rank) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the samples blocked in logs and those blocked in saves, bool[samples] each."""
    samples = rank.chunk.shared.get((_SAMPLES, rank.pid))
    if samples is None:
        samples = rank.chunk.shared[_SAMPLES, rank.pid] = _find_write_samples(rank)
    return samples  # type: ignore[no-any-return]


def _find_write_samples(rank: Rank) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    thread = rank.main.threads.get(rank.pid)
    if thread is None:
        return np.zeros(0, np.bool_), np.zeros(0, np.bool_)
    names = rank.chunk.wchan_names
    writes = find_sleep_samples(
        thread, names, lambda name: any(word in name for word in _WRITE_FUNCTIONS)
    )
    pages = find_sleep_samples(thread, names, lambda name: name.startswith(_PAGE_WAIT_PREFIXES))
    write_only = _find_write_only_samples(rank, thread.t_ns)
    writes |= _find_mount_writes(rank, thread)
    saves, logs = np.zeros((2, writes.size), np.bool_)
    has_saves = layout.CHECKPOINT in rank.main.spans
    if not has_saves and not (writes | (pages & write_only)).any():
        return logs, saves
    for first, last in zip(*(side.tolist() for side in find_runs(thread.t_ns, writes | pages))):
        run = slice(first, last + 1)
        start_ns = int(thread.t_ns[first])
        end_ns = int(thread.t_ns[min(last + 1, thread.t_ns.size - 1)])
        is_save = _follows_save(rank, start_ns)
        # Bytes are counted when they enter the page cache, before the wait for the device.
        is_write = is_save or write_only[run].any()
        logs[run] = is_write | writes[run]
        if not is_write:
            continue
        if not is_save and end_ns - start_ns >= MIN_LARGE_SAVE_NS:
            written = _count_written_bytes(rank, start_ns, end_ns)
            is_long = end_ns - start_ns >= MIN_SAVE_NS
            least = MIN_SAVE_BYTES if is_long else LARGE_SAVE_BYTES
            is_save = written is not None and written >= least
            if written is None:
                logs[run] = False
        if is_save:
            saves[run] = True
            logs[run] = False
    return logs, saves


def _follows_save(rank: Rank, start_ns: int) -> bool:
    """Return whether the main thread was in the span of a save just before."""
    table = rank.main.spans.get(layout.CHECKPOINT)
    if table is None:
        return False
    return bool(
        ((table.start_ns <= start_ns) & (table.end_ns >= start_ns - MAX_SAVE_PAUSE_NS)).any()
    )


def _find_write_only_samples(rank: Rank, t_ns: Int) -> NDArray[np.bool_]:
    """Find the samples around which the process wrote to a device and read from none: bool[n]."""
    io = rank.main.io
    if io is None or io.t_ns.size < 2:
        return np.zeros(t_ns.size, np.bool_)
    row = np.clip(np.searchsorted(io.t_ns, t_ns, side="right") - 1, 0, io.t_ns.size - 2)
    bytes_written, bytes_read = np.diff(io.write_bytes), np.diff(io.read_bytes)
    return np.asarray((bytes_written[row] > 0) & (bytes_read[row] <= 0), np.bool_)


def _find_mount_writes(rank: Rank, thread: ThreadTable) -> NDArray[np.bool_]:
    """Find the samples that waited for a file system in user space to write: bool[n].

    The process wrote around them, read no file's worth more than that, and waited for no page of a
    mount. Characters count sockets, too, where as many are read as written.
    """
    requests = find_sleep_samples(
        thread, rank.chunk.wchan_names, lambda name: name.startswith(_REQUEST_PREFIXES)
    )
    io, context = rank.main.io, get_read_context(rank.chunk)
    if not requests.any() or io is None or io.t_ns.size < 2:
        return np.zeros(requests.size, np.bool_)
    row = np.clip(np.searchsorted(io.t_ns, thread.t_ns, side="right") - 1, 0, io.t_ns.size - 2)
    read, written = np.diff(io.read_chars)[row], np.diff(io.write_chars)[row]
    is_writing = (written > 0) & (read < written + _MIN_READ_CHARS)
    return np.asarray(requests & is_writing & ~_find_mount_reads(thread, context), np.bool_)


def _count_written_bytes(rank: Rank, start_ns: int, end_ns: int) -> int | None:
    """Count what the process wrote from a little before an interval to its end; None = unknown."""
    io = rank.main.io
    if io is None or io.t_ns.size < 2:
        return None
    low = max(int(np.searchsorted(io.t_ns, start_ns - MAX_SAVE_PAUSE_NS, side="right")) - 1, 0)
    high = min(int(np.searchsorted(io.t_ns, end_ns, side="left")), io.t_ns.size - 1)
    return int(io.write_chars[high] - io.write_chars[low])
