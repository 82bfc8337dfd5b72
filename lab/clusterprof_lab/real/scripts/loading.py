"""The dataset of the training script: reads and decodes as much as asked, and logs its times."""

from __future__ import annotations

import mmap
import os
import random
import resource
import time
import urllib.request

import torch
from torch.utils.data import Dataset
from turns import Turns

ITEMS_PER_BATCH = 8
ITEM = (
    "begun_ns",
    "read_ns",
    "made_ns",
    "read_delay_ns",
    "decode_delay_ns",
    "decode_cpu_ns",
    "read_user_ns",
)
now_ns = time.monotonic_ns


def read_run_delay_ns() -> int:
    """Time this thread was ready to run while others had its CPU, as the kernel counts it."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1])


def read_user_cpu_ns() -> int:
    """Time this thread spent in its own code."""
    return round(resource.getrusage(resource.RUSAGE_THREAD).ru_utime * 1e9)


class Records(Dataset):
    """Items by number; batch k of the run has items k * ITEMS_PER_BATCH and on."""

    def __init__(self, turns: Turns, rank: int, world: int) -> None:
        self.turns, self.options = turns, turns.faulty
        self.rank, self.world, self.fd = rank, world, -1
        memory = mmap.mmap(-1, len(self) * len(ITEM) * 8)  # shared with the workers
        self.watch = torch.frombuffer(memory, dtype=torch.int64).view(-1, len(ITEM))
        self.held: mmap.mmap | None = None

    def __len__(self) -> int:
        return self.options.steps * ITEMS_PER_BATCH

    def __getitem__(self, index: int):
        options = self.turns.get_options(index // ITEMS_PER_BATCH)
        if options.data != self.options.data and self.fd >= 0:
            if not os.path.isdir(self.options.data):
                os.close(self.fd)
            self.fd = -1
        self.options = options
        begun_ns, delay_ns, user_ns = now_ns(), read_run_delay_ns(), read_user_cpu_ns()
        self._read(index)
        read_ns, read_delay_ns, cpu_ns = now_ns(), read_run_delay_ns(), time.thread_time_ns()
        read_user_ns = read_user_cpu_ns() - user_ns
        self._decode(index)
        made_ns, made_delay_ns = now_ns(), read_run_delay_ns()
        row = (begun_ns, read_ns, made_ns, read_delay_ns - delay_ns, made_delay_ns - read_delay_ns)
        cpu_ns = time.thread_time_ns() - cpu_ns
        self.watch[index] = torch.tensor((*row, cpu_ns, read_user_ns))
        return torch.full((self.options.features,), 0.01 * (index % 7))

    def _read(self, index: int) -> None:
        options, choose = self.options, random.Random(index * self.world + self.rank)
        if options.turn_read_ms and self._is_slow_batch(index // ITEMS_PER_BATCH):
            end_ns = now_ns() + round(options.turn_read_ms * 1e6 / ITEMS_PER_BATCH)
            while now_ns() < end_ns:
                self._read_file(1, choose)
            return
        reads = options.reads
        if not options.data or not reads:
            return
        if options.data.startswith("http://"):
            for _ in range(reads):
                begin = choose.randrange(64) * options.read_bytes
                last = begin + options.read_bytes - 1
                ask = urllib.request.Request(
                    options.data, headers={"Range": f"bytes={begin}-{last}"}
                )
                urllib.request.urlopen(ask).read()
        elif os.path.isdir(options.data):
            names = sorted(os.listdir(options.data)) if self.fd < 0 else self.names
            self.fd, self.names = 0, names
            for _ in range(reads):
                with open(os.path.join(options.data, choose.choice(names)), "rb") as file:
                    file.read()
        else:
            self._read_file(reads, choose)

    def _is_slow_batch(self, batch: int) -> bool:
        options = self.options
        turn = self.rank if options.start_chunk < 0 else options.start_chunk
        return bool(options.turns) and batch // options.turn_every % options.turns == turn

    def _read_file(self, reads: int, choose: random.Random) -> None:
        options = self.options
        if self.fd < 0:
            try:
                self.fd = os.open(
                    options.data, os.O_RDONLY | (0 if options.buffered else os.O_DIRECT)
                )
            except OSError:  # a file system without it
                self.fd = os.open(options.data, os.O_RDONLY)
            self.records = os.lseek(self.fd, 0, os.SEEK_END) // options.read_bytes
            self.buffers = [mmap.mmap(-1, options.read_bytes)]
        for _ in range(reads):
            os.preadv(self.fd, self.buffers, choose.randrange(self.records) * options.read_bytes)

    def _decode(self, index: int) -> None:
        options, batch = self.options, index // ITEMS_PER_BATCH
        decode_ms = options.decode_ms
        if options.turn_ms and self._is_slow_batch(batch):
            decode_ms = options.turn_ms
        if options.uneven_every and batch % options.uneven_every == options.uneven_every - 1:
            decode_ms = options.uneven_ms
        end_ns = time.thread_time_ns() + round(decode_ms * 1e6 / ITEMS_PER_BATCH)
        if options.hold_mb and index % ITEMS_PER_BATCH == 0:
            self._read_held_memory(batch)
        while time.thread_time_ns() < end_ns:  # of a CPU of its own, however busy the machine is
            sum(i * i % 7 for i in range(200))

    def allocate_memory(self, worker: int = 0) -> None:
        """Fill the memory of this worker, which the kernel is to take away."""
        size = self.options.hold_mb << 20
        if size:
            self.held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            for start in range(0, size, 1 << 20):
                self.held[start : start + (1 << 20)] = os.urandom(1 << 20)

    def _read_held_memory(self, batch: int) -> None:
        """Go through a part of what is held, which the kernel may have taken away meanwhile."""
        size, part = self.options.hold_mb << 20, self.options.touch_mb << 20
        if self.held is None:
            self.allocate_memory()
        for page in range(batch * part, (batch + 1) * part, mmap.PAGESIZE):
            self.held[page % size]
