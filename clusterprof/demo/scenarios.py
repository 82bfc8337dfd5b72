"""Define the demo's scenarios: the fault, its rank, and the cause a report should name.

Inject real faults for the demo: reads that miss every cache, and real CPU load.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path

from clusterprof.errors import ClusterprofError


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one rank per step."""

    device_ns: int
    """Device time of the step's kernels."""
    reads: int
    """Minimum number of uncached reads of `READ_BYTES` per batch."""
    burn_ns: int
    """CPU time of Python decoding per batch."""
    read_ns: int = 0
    """Minimum reading time per batch: a fast disk reads more records in it."""
    checkpoint_every: int = 0
    """Steps between blocking checkpoints; 0 = never."""
    prefetch: int = 2
    """Batches the loader may prepare in advance."""
    slower_ns: int = 0
    """Extra time of the same kernels from step `slower_from` on."""
    slower_from: int = 0

    def device_ns_at(self, step: int) -> int:
        """Return the device time of one step's kernels."""
        return self.device_ns + (self.slower_ns if step >= self.slower_from else 0)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A small job with a known fault."""

    name: str
    what: str
    """One line: what is wrong with the job."""
    ranks: tuple[Work, ...]
    steps: int = 120
    cause: str = ""
    """Cause the fault should be reported as; "" = no fault."""
    gradient_bytes: int = 0
    """Bytes the ranks reduce together in each step; 0 = independent ranks."""
    link_bytes_per_second: int = 0
    """Capacity of each rank's link; 0 = unlimited."""


READ_BYTES = 64 * 1024  # one sample of a dataset of small records
CHECKPOINT_BYTES = 24 << 20

_MS = 1_000_000
_HEALTHY = Work(device_ns=60 * _MS, reads=8, burn_ns=4 * _MS)

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "storage",
        "rank 1 reads its samples from a cold disk, one small record at a time",
        (_HEALTHY, Work(device_ns=60 * _MS, reads=8, burn_ns=3 * _MS, read_ns=100 * _MS)),
        cause="storage-local",
    ),
    Scenario(
        "cpu",
        "rank 1 decodes every batch in Python, on a single worker",
        (_HEALTHY, Work(device_ns=60 * _MS, reads=8, burn_ns=100 * _MS)),
        cause="cpu-preprocess",
    ),
    Scenario(
        "mixed",
        "rank 0 reads from a cold disk, rank 1 decodes in Python",
        (
            Work(device_ns=60 * _MS, reads=8, burn_ns=2 * _MS, read_ns=80 * _MS),
            Work(device_ns=60 * _MS, reads=8, burn_ns=110 * _MS),
        ),
    ),
    Scenario(
        "checkpoint",
        "both ranks write a blocking checkpoint every 15 steps",
        (
            Work(device_ns=60 * _MS, reads=8, burn_ns=4 * _MS, checkpoint_every=15),
            Work(device_ns=60 * _MS, reads=8, burn_ns=4 * _MS, checkpoint_every=15),
        ),
        cause="checkpoint",
    ),
    Scenario(
        "network",
        "the gradients of 4 ranks go over links of 45 MB/s",
        (_HEALTHY,) * 4,
        steps=100,
        cause="net-transfer",
        gradient_bytes=2 << 20,
        link_bytes_per_second=45_000_000,
    ),
    Scenario(
        "straggler",
        "from step 40 of 120 on rank 2's device takes 50 ms longer for the same kernels",
        (
            _HEALTHY,
            _HEALTHY,
            Work(device_ns=60 * _MS, reads=8, burn_ns=4 * _MS, slower_ns=50 * _MS, slower_from=40),
            _HEALTHY,
        ),
        cause="sync-slow-compute",
        gradient_bytes=256 << 10,
    ),
    Scenario("clean", "nothing: loading is hidden behind the device", (_HEALTHY, _HEALTHY)),
)


def find_scenario(name: str, steps: int = 0) -> Scenario:
    """Return the scenario with this name, with another number of steps if given.

    Raises: KeyError with the known names for an unknown scenario.
    """
    for scenario in SCENARIOS:
        if scenario.name == name:
            return replace(scenario, steps=steps) if steps else scenario
    raise KeyError(f"unknown scenario {name!r}; choose from {', '.join(s.name for s in SCENARIOS)}")


_READS_AT_ONCE = 8


def write_dataset(path: Path, size_bytes: int) -> None:
    """Write an incompressible file and flush it to the device, so that reads can miss the
    cache.
    """
    block = os.urandom(1 << 20)
    with path.open("wb") as file:
        for number in range(size_bytes >> 20):
            file.write(number.to_bytes(8, "little") + block[8:])
        file.flush()
        os.fsync(file.fileno())


class ColdFile:
    """A file whose every read goes to the device.

    It is read past the page cache; on a file system without direct I/O its pages are
    dropped before each batch.
    """

    def __init__(self, path: Path, record_bytes: int, seed: int) -> None:
        self._fd = _open_direct(path)
        self._records = os.fstat(self._fd).st_size // record_bytes
        self._record_bytes = record_bytes
        self._buffers = [mmap.mmap(-1, record_bytes)]  # aligned, as direct reads require
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._random = random.Random(seed)
        os.posix_fadvise(
            self._fd, 0, 0, os.POSIX_FADV_RANDOM
        )  # no read-ahead: records are far apart

    def read_batch(self, reads: int, for_ns: int = 0) -> tuple[int, int]:
        """Read at least this many random records, until reading took at least `for_ns`.

        A disk ten times as fast therefore reads ten times as many records in the same time.
        Returns the ns that reading took without scheduling delay, and the ns in which the
        thread was ready to run without a CPU, as the kernel counts it.
        """
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        delayed_ns, began_ns = self._run_delay_ns(), time.monotonic_ns()
        read_count = took_ns = delay_ns = 0
        while read_count < reads or took_ns - delay_ns < for_ns:
            for _ in range(_READS_AT_ONCE):
                record = self._random.randrange(self._records)
                os.preadv(self._fd, self._buffers, record * self._record_bytes)
            read_count += _READS_AT_ONCE
            took_ns = time.monotonic_ns() - began_ns
            delay_ns = min(took_ns, self._run_delay_ns() - delayed_ns)
        return took_ns - delay_ns, delay_ns

    def _run_delay_ns(self) -> int:
        return int(os.pread(self._schedstat, 100, 0).split()[1])


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)


def run_busy_loop(cpu_ns: int) -> int:
    """Use this much CPU time of the current thread, and return the wall ns it took.

    The loop never blocks: the time beyond `cpu_ns` is scheduling delay.
    """
    began_ns = time.monotonic_ns()
    until_ns = time.thread_time_ns() + cpu_ns
    digest = b"clusterprof"
    while time.thread_time_ns() < until_ns:
        for _ in range(50):
            digest = hashlib.sha256(digest).digest()
    return time.monotonic_ns() - began_ns


def require_real_disk(folder: Path, mounts: str) -> None:
    """Reject a file system in memory: reads from it never wait for a device.

    mounts: the text of /proc/self/mounts.
    Raises: ClusterprofError with the remedy.
    """
    mount, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        inside = str(folder) == fields[1] or str(folder).startswith(fields[1].rstrip("/") + "/")
        if inside and len(fields[1]) >= len(mount):
            mount, kind = fields[1], fields[2]
    if kind in ("tmpfs", "ramfs"):
        raise ClusterprofError(
            f"{folder} is in memory ({kind} on {mount}): reads from it never wait for a disk",
            "set TMPDIR to a folder on a real disk, or give --keep DIR on one",
        )
