"""Read items as a dataset does from what `--data` names; standard library only.

A file is read past the page cache (O_DIRECT), or through it with `buffered`. In a folder each item
is one file: open, stat, read, close. At an http address each item is one GET of a range. As a
program (`python reader.py --help`) it reads batch after batch and prints how long each took: it
measures a fault where no training is needed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import mmap
import os
import random
import time
import urllib.parse
from collections.abc import Callable

Read = Callable[[random.Random], int]
"""Reads one random record; returns the bytes it got."""


def open_source(data: str, read_bytes: int, buffered: bool = False) -> Read:
    """Return a function that reads a record of `data`; call it in the process that reads."""
    if data.startswith("http://"):
        return _open_object(data, read_bytes)
    return _open_folder(data) if os.path.isdir(data) else _open_file(data, read_bytes, buffered)


def _open_file(path: str, read_bytes: int, buffered: bool) -> Read:
    descriptor = os.open(path, os.O_RDONLY | (0 if buffered else os.O_DIRECT))
    records = os.lseek(descriptor, 0, os.SEEK_END) // read_bytes
    if buffered:  # the kernel is not to read ahead what nobody asked for
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    buffers = [mmap.mmap(-1, read_bytes)]

    def read(choose: random.Random) -> int:
        return os.preadv(descriptor, buffers, choose.randrange(records) * read_bytes)

    return read


def _open_folder(path: str) -> Read:
    names = sorted(os.listdir(path))

    def read(choose: random.Random) -> int:
        with open(os.path.join(path, choose.choice(names)), "rb", buffering=0) as file:
            return len(file.read(os.fstat(file.fileno()).st_size))

    return read


def _open_object(address: str, read_bytes: int) -> Read:
    parts = urllib.parse.urlsplit(address)
    server = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    server.request("HEAD", parts.path)
    answer = server.getresponse()
    answer.read()
    records = int(answer.headers["Content-Length"]) // read_bytes

    def read(choose: random.Random) -> int:
        first = choose.randrange(records) * read_bytes
        wanted = {"Range": f"bytes={first}-{first + read_bytes - 1}"}
        server.request("GET", parts.path, headers=wanted)
        return len(server.getresponse().read())

    return read


def allocate_memory(megabytes: int) -> mmap.mmap:
    """Allocate and fill memory, as a data set that is kept there."""
    held = mmap.mmap(-1, megabytes << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, len(held), 1 << 20):
        held[start : start + (1 << 20)] = os.urandom(1 << 20)
    return held


def read_held_memory(held: mmap.mmap, batch: int, size: int) -> None:
    """Read the batch's part of the held memory: part by part, and again from the start."""
    for start in range(batch * size, (batch + 1) * size, 1 << 20):
        start %= len(held)
        bytes(held[start : start + (1 << 20)])


def append_synced(path: str, size: int) -> None:
    """Write to the end of a file and wait until the disk has it."""
    with open(path, "ab", buffering=0) as file:
        file.write(b"x" * size)
        os.fsync(file.fileno())


def main() -> None:
    """Read batches; print a JSON line of their times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="")
    parser.add_argument("--reads", type=int, default=1, help="per item")
    parser.add_argument("--read-bytes", type=int, default=327680)
    parser.add_argument("--buffered", action="store_true", help="through the page cache")
    parser.add_argument("--decode-ms", type=float, default=0.0, help="of a CPU, per batch")
    parser.add_argument("--hold-mb", type=int, default=0, help="kept in memory")
    parser.add_argument("--touch-mb", type=int, default=0, help="of that, per batch, in turn")
    parser.add_argument("--log", default="", help="written and synced per batch, with .SEED added")
    parser.add_argument("--log-bytes", type=int, default=4096)
    parser.add_argument("--idle-ms", type=float, default=0.0, help="between batches")
    parser.add_argument("--items", type=int, default=8, help="of a batch")
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choose = random.Random(options.seed)
    read = open_source(options.data, options.read_bytes, options.buffered) if options.data else None
    held = allocate_memory(options.hold_mb) if options.hold_mb else None
    took_ns, got_bytes = [], 0
    for batch in range(options.batches):
        began_ns = time.monotonic_ns()
        for _ in range(options.items * options.reads):
            got_bytes += read(choose) if read is not None else 0
        end_ns = time.thread_time_ns() + round(options.decode_ms * 1e6)
        while time.thread_time_ns() < end_ns:
            sum(i * i % 7 for i in range(200))
        if held is not None:
            read_held_memory(held, batch, options.touch_mb << 20)
        if options.log:
            append_synced(f"{options.log}.{options.seed}", options.log_bytes)
        took_ns.append(time.monotonic_ns() - began_ns)
        time.sleep(options.idle_ms / 1e3)
    print(json.dumps({"took_ns": took_ns, "bytes": got_bytes}))


if __name__ == "__main__":
    main()
