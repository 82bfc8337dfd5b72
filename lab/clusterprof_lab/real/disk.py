"""A file of records on a real disk, and how long one read of it takes past the page cache."""

from __future__ import annotations

import mmap
import os
import random
import time
from pathlib import Path

RECORDS_BYTES = 64 << 20
READ_BYTES = 65_536
_TRIES = 200


def make_records(path: Path) -> Path:
    """Write the file if it is not there; return its path."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            for _ in range(RECORDS_BYTES >> 20):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
        partial.rename(path)
    return path


def read_ms(path: Path) -> float:
    """Return the mean time of a read of `READ_BYTES` at a random place, in milliseconds."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers, choose = [mmap.mmap(-1, READ_BYTES)], random.Random(0)
    began_ns = time.monotonic_ns()
    for _ in range(_TRIES):
        os.preadv(fd, buffers, choose.randrange(RECORDS_BYTES // READ_BYTES) * READ_BYTES)
    os.close(fd)
    return (time.monotonic_ns() - began_ns) / _TRIES / 1e6
