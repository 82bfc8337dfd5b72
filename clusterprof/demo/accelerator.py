"""Emulate an accelerator without hardware: it is busy for as long as work was submitted to
it.

The host submits work and continues, as with CUDA; the device executes it in order, so
it is idle exactly when the host is late. Nothing is computed. The recorder reads a page
of shared memory (docs/design/recording-format.md), which gives the busy time up to any
instant without a sampling error.

    device = EmulatedAccelerator.from_environment()
    end_ns = device.submit(10_000_000)     # 10 ms of work; returns at once
    device.synchronize()                   # sleeps until the device is done
    device.log                             # [(start_ns, end_ns)]: ground truth

A device belongs to the process that created it. A forked child inherits the object and
must not use it, since both would write to one page (CUDA contexts do not survive `fork`
either); `submit` refuses.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.processes import ProcessIdentity, read_identity
from clusterprof.errors import ClusterprofError
from clusterprof.units import SECOND_NS

DEVICE_PAGE_BYTES = 4096
MAGIC = b"CPEMU02\n"
QUEUE_DEPTH = 1024  # launches in flight before the host blocks, as many as CUDA allows
CLOCK_HERTZ = 1_980_000_000
PINNED_BYTES_PER_SECOND = 25_000_000_000
PAGEABLE_BYTES_PER_SECOND = 6_000_000_000

_VERSION_AT, _PID_AT, _BODY_AT = 8, 16, 32
_BODY = struct.Struct("<11q")  # the fields of section 6 from offset 32 on


class EmulatedAccelerator:
    """One device with one queue, published in `path` for the recorder, or nowhere if None."""

    def __init__(
        self, path: Path | None, *, queue_depth: int = QUEUE_DEPTH, keep_log: bool = True
    ) -> None:
        self.path = path
        self.log: list[tuple[int, int]] = []
        """(start_ns, end_ns) of all work submitted, in order, if `keep_log`."""
        self._keep_log = keep_log
        self._depth = queue_depth
        self._pending: deque[int] = deque()
        self._owner = os.getpid()
        self._first_ns = self._end_ns = self._copied_ns = time.monotonic_ns()
        self._scheduled_ns = self._launches = self._throttle_bits = self._memory_bytes = 0
        self._resident_ns = self._waiting_since_ns = self._copied_bytes = 0
        self._clock_hertz = CLOCK_HERTZ
        self._version = 0
        self._page = mmap.mmap(-1, DEVICE_PAGE_BYTES) if path is None else self._create(path)
        self._write()

    @classmethod
    def from_environment(cls, *, queue_depth: int = QUEUE_DEPTH) -> EmulatedAccelerator:
        """Create the next device of the run directory, or an unpublished one without a recorder.

        Its number is LOCAL_RANK, unless a live process already has that device (every worker of
        `torchrun --virtual-local-rank` is 0): then the first free number.

        Raises: ClusterprofError when no number is free.
        """
        run_dir = os.environ.get("CLUSTERPROF_RUN_DIR")
        if not run_dir:
            return cls(None, queue_depth=queue_depth)
        folder = Path(run_dir) / "devices"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted = os.environ.get("LOCAL_RANK", "")
        numbers = [int(wanted)] if wanted.isdigit() else []
        for number in (*numbers, *range(4096)):
            path = folder / f"{number}.emulated"
            if path.exists() and _is_owner_alive(path):
                continue
            try:
                return cls(path, queue_depth=queue_depth)
            except FileExistsError:
                continue  # another rank was quicker
        raise ClusterprofError(f"{folder}: no device number is free", "remove old *.emulated files")

    def submit(self, duration_ns: int, at_ns: int | None = None) -> int:
        """Queue work of `duration_ns` at full clock and return when it will end (monotonic ns).

        Returns at once unless the queue is full; then waits until the oldest work is done. With
        `at_ns` the work counts as queued at that time, as for a host that had continued.

        Raises: ClusterprofError in a forked child.
        """
        if os.getpid() != self._owner:
            raise ClusterprofError("an emulated accelerator cannot be used in a forked child")
        self._wait_for_room()
        start_ns = max(time.monotonic_ns() if at_ns is None else at_ns, self._end_ns)
        length_ns = duration_ns * CLOCK_HERTZ // self._clock_hertz
        self._end_ns = start_ns + length_ns
        self._scheduled_ns += length_ns
        self._launches += 1
        self._pending.append(self._end_ns)
        if self._keep_log:
            self.log.append((start_ns, self._end_ns))
        self._write()
        return self._end_ns

    def wait_on_device(self, wait: Callable[[], None], at_ns: int | None = None) -> tuple[int, int]:
        """Run `wait` with a kernel resident, like a collective; return its start and end
        (monotonic ns).

        The device reads as busy from the end of its queue until `wait` returns, and computes
        nothing. `wait` begins when the earlier work is done; nothing may be submitted
        meanwhile.
        """
        start_ns = max(time.monotonic_ns() if at_ns is None else at_ns, self._end_ns)
        self._waiting_since_ns = start_ns
        self._launches += 1
        self._write()
        _wait_until(start_ns)
        wait()
        end_ns = max(time.monotonic_ns(), start_ns)
        self._waiting_since_ns = 0
        self._scheduled_ns += end_ns - start_ns
        self._resident_ns += end_ns - start_ns
        self._end_ns = end_ns
        self._write()
        return start_ns, end_ns

    def synchronize(self) -> None:
        """Sleep until everything submitted so far is done."""
        _wait_until(max(self._end_ns, self._copied_ns))
        self._pending.clear()

    def copy(self, size_bytes: int, pinned: bool = False) -> int:
        """Copy from host to device and return when the copy ends (monotonic ns).

        Pageable memory: the copy waits for the queue and blocks the host until it is done,
        while the device idles. Pinned memory: returns at once and overlaps the work already
        queued; later work begins after it. A copy is not busy time, as in NVML.
        """
        if pinned:
            self._copied_bytes += size_bytes
            self._write()
            began_ns = max(time.monotonic_ns(), self._copied_ns)
            self._copied_ns = began_ns + size_bytes * SECOND_NS // PINNED_BYTES_PER_SECOND
            return self._copied_ns
        self.synchronize()
        self._copied_bytes += size_bytes
        self._write()
        self._copied_ns = time.monotonic_ns() + size_bytes * SECOND_NS // PAGEABLE_BYTES_PER_SECOND
        _wait_until(self._copied_ns)
        return self._copied_ns

    @property
    def end_ns(self) -> int:
        """End of the last submitted work, and of the copies that later work waits for."""
        return max(self._end_ns, self._copied_ns)

    def busy_ns(self, t_ns: int) -> int:
        """Return the exact busy time of the device from its creation to `t_ns`.

        Exact for any `t_ns` not before the last `submit`.
        """
        waiting_ns = max(0, t_ns - self._waiting_since_ns) if self._waiting_since_ns else 0
        return self._scheduled_ns - max(0, self._end_ns - t_ns) + waiting_ns

    def throttle(self, clock_ratio: float, bits: int) -> None:
        """Run at this share of the full clock from now on; `bits` as in `gpu.throttle_bits`."""
        self._clock_hertz = round(CLOCK_HERTZ * clock_ratio)
        self._throttle_bits = bits
        self._write()

    def use_memory(self, used_bytes: int) -> None:
        """Set how much device memory is in use."""
        self._memory_bytes = used_bytes
        self._write()

    def close(self) -> None:
        """Release the page; the file stays, as a device outlives the process that used it."""
        self._page.close()

    def _wait_for_room(self) -> None:
        now_ns = time.monotonic_ns()
        while self._pending and self._pending[0] <= now_ns:
            self._pending.popleft()
        if len(self._pending) >= self._depth:
            _wait_until(self._pending.popleft())
        # Wait here instead of queueing behind the copy: the page requires that scheduled work runs
        # without a gap until `end_ns`.
        if self._copied_ns > max(time.monotonic_ns(), self._end_ns):
            _wait_until(self._copied_ns)

    def _create(self, path: Path) -> mmap.mmap:
        """Map a new page and publish it under its name only when it is complete.

        The page of a process that has ended is replaced, not truncated: a recorder that still
        maps it would die of SIGBUS.
        """
        temporary = path.with_name(f".{path.name}.{self._owner}")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, DEVICE_PAGE_BYTES)
            page = mmap.mmap(fd, DEVICE_PAGE_BYTES)
            page[0:8] = MAGIC
            me = read_identity(Roots(), self._owner) or ProcessIdentity(self._owner, 0)
            struct.pack_into("<QQ", page, _PID_AT, me.pid, me.started_ticks)
            self._page = page
            self._write()
            if path.exists() and not _is_owner_alive(path):
                os.replace(temporary, path)
            else:
                os.link(temporary, path)
        finally:
            os.close(fd)
            try:
                os.unlink(temporary)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise
        return page

    def _write(self) -> None:
        # The version is odd while the body changes: readers retry on an odd or changed version.
        struct.pack_into("<Q", self._page, _VERSION_AT, self._version + 1)
        _BODY.pack_into(
            self._page,
            _BODY_AT,
            self._scheduled_ns,
            self._end_ns,
            self._clock_hertz,
            self._throttle_bits,
            self._memory_bytes,
            self._launches,
            self._first_ns,
            self._resident_ns,
            self._waiting_since_ns,
            CLOCK_HERTZ,
            self._copied_bytes,
        )
        self._version += 2
        struct.pack_into("<Q", self._page, _VERSION_AT, self._version)


def _is_owner_alive(path: Path) -> bool:
    try:
        page = path.read_bytes()
        pid, started_ticks = struct.unpack_from("<QQ", page, _PID_AT)
    except (OSError, struct.error):
        return False
    return read_identity(Roots(), pid) == ProcessIdentity(pid, started_ticks)


def _wait_until(t_ns: int) -> None:
    while (left_ns := t_ns - time.monotonic_ns()) > 0:
        time.sleep(left_ns / SECOND_NS)
