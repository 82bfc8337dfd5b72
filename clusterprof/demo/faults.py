"""Real faults for the demo: reads that miss every cache, and CPU time that is really burnt."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import time
from pathlib import Path

from clusterprof.errors import ClusterprofError

_READS_AT_ONCE = 8


def write_dataset(path: Path, size_bytes: int) -> None:
    """Write an incompressible file and push it to the device, so that reads can miss the cache."""
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for number in range(size_bytes >> 20):
            file.write(number.to_bytes(8, "little") + block[8:])
        file.flush()
        os.fsync(file.fileno())


class ColdFile:
    """A file whose every read goes to the device.

    It is read past the page cache; on a file system that cannot do so, its pages are dropped
    before each batch.
    """

    def __init__(self, path: Path, record_bytes: int, seed: int) -> None:
        self._fd = _opened(path)
        self._records = os.fstat(self._fd).st_size // record_bytes
        self._record_bytes = record_bytes
        self._buffers = [mmap.mmap(-1, record_bytes)]  # aligned, as such reads must be
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._random = random.Random(seed)
        os.posix_fadvise(
            self._fd, 0, 0, os.POSIX_FADV_RANDOM
        )  # no read-ahead: records are far apart

    def read_batch(self, reads: int, for_ns: int = 0) -> tuple[int, int]:
        """Read at least that many records at random places, until reading took `for_ns`.

        So a disk that is ten times as fast gives ten times as many, and is waited for as long.
        Returns the ns the reading took, and the ns in which the thread was ready to run and had
        no CPU, as the kernel counts it; the first is without the second.
        """
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        delayed_ns, began_ns = self._run_delay_ns(), time.monotonic_ns()
        done = took_ns = delay_ns = 0
        while done < reads or took_ns - delay_ns < for_ns:
            for _ in range(_READS_AT_ONCE):
                place = self._random.randrange(self._records)
                os.preadv(self._fd, self._buffers, place * self._record_bytes)
            done += _READS_AT_ONCE
            took_ns = time.monotonic_ns() - began_ns
            delay_ns = min(took_ns, self._run_delay_ns() - delayed_ns)
        return took_ns - delay_ns, delay_ns

    def _run_delay_ns(self) -> int:
        return int(os.pread(self._schedstat, 100, 0).split()[1])


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)


def burn_cpu(cpu_ns: int) -> int:
    """Use that much CPU time of this thread; return the wall ns it took.

    Nothing in it blocks: what it took beyond `cpu_ns` it was ready to run and got no CPU.
    """
    began_ns = time.monotonic_ns()
    until_ns = time.thread_time_ns() + cpu_ns
    digest = b"clusterprof"
    while time.thread_time_ns() < until_ns:
        for _ in range(50):
            digest = hashlib.sha256(digest).digest()
    return time.monotonic_ns() - began_ns


def require_real_disk(folder: Path, mounts: str) -> None:
    """Refuse a memory file system: nothing read from it ever waits for a device.

    `mounts` is the text of /proc/self/mounts. Raises ClusterprofError with the way out.
    """
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        inside = str(folder) == fields[1] or str(folder).startswith(fields[1].rstrip("/") + "/")
        if inside and len(fields[1]) >= len(best):
            best, kind = fields[1], fields[2]
    if kind in ("tmpfs", "ramfs"):
        raise ClusterprofError(
            f"{folder} lies in memory ({kind} on {best}): reads from it never wait for a disk",
            "set TMPDIR to a folder on a real disk, or give --keep DIR on one",
        )
