"""An ordinary training script whose launcher has bound it to too few CPUs, as Slurm can.

Eight workers read records, most of them cached, and decode them. The script keeps stopwatches and
prints them as one JSON line: how long a worker's reads took, and which part of that the kernel says
it was ready to run and had no CPU; the same for all the work of a batch; how long the loop waited.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

import clusterprof
from clusterprof.demo.accelerator import EmulatedAccelerator

ITEMS_PER_BATCH = 4
READ_BYTES = 1 << 20
DIRECT_BYTES = 1 << 16
DECODE_NS = 10_000_000  # of CPU time, on a fast machine too
DEVICE_NS = 15_000_000


class Records(Dataset):
    def __init__(self, path: str, items: int) -> None:
        self.path, self.items = path, items
        self.fd = -1

    def __len__(self) -> int:
        return self.items

    def run_delay_ns(self) -> int:
        return int(os.pread(self.schedstat, 100, 0).split()[1])

    def __getitem__(self, index: int):
        if self.fd < 0:
            self.fd = os.open(self.path, os.O_RDONLY)
            self.uncached = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            self.page = mmap.mmap(-1, DIRECT_BYTES)
            self.schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            self.size = os.fstat(self.fd).st_size
        began, delayed = time.perf_counter_ns(), self.run_delay_ns()
        place = index * DIRECT_BYTES % (self.size - READ_BYTES)
        # A piece past the cache, so that there is a disk that could be blamed.
        os.preadv(self.uncached, [self.page], place)
        for at in range(place, place + READ_BYTES, DIRECT_BYTES):
            os.pread(self.fd, DIRECT_BYTES, at)
        read_ns, read_delay_ns = time.perf_counter_ns() - began, self.run_delay_ns() - delayed
        total, until = 0, time.thread_time_ns() + DECODE_NS
        while time.thread_time_ns() < until:
            total += 1
        all_ns, delay_ns = time.perf_counter_ns() - began, self.run_delay_ns() - delayed
        return float(total % 5), torch.tensor([read_ns, read_delay_ns, all_ns, delay_ns])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weight = torch.ones(1, requires_grad=True)
    device = EmulatedAccelerator.from_environment(queue_depth=2)
    data = Records(options.data, options.steps * ITEMS_PER_BATCH)
    loader = DataLoader(data, ITEMS_PER_BATCH, num_workers=options.workers)
    spent = torch.zeros(4, dtype=torch.int64)
    wait_ns = 0
    batches = iter(loader)
    for _ in range(options.steps):
        asked = time.perf_counter_ns()
        values, times = next(batches)
        wait_ns += time.perf_counter_ns() - asked
        spent += times.sum(0)
        device.submit(DEVICE_NS)
        (weight * values).square().mean().backward()
        with torch.no_grad():  # by hand: torch's optimizers import its compiler
            weight -= 0.01 * weight.grad
            weight.grad = None
        clusterprof.step()
    names = ("read_ns", "read_delay_ns", "work_ns", "delay_ns")
    print(json.dumps({**dict(zip(names, spent.tolist())), "wait_ns": wait_ns}))


if __name__ == "__main__":
    main()
