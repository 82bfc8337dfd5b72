"""An ordinary training script that has never heard of a profiler.

It keeps a stopwatch of its own (as many do) and prints it as one JSON line at the end:
how long the loop ran, how long it waited for batches, which part of the waited-for work was
reading (less the time in which a neighbour had the CPU that the reader was ready to use, as the
kernel counts it), and which was on a CPU. `--fault reads` reads large records past the page cache,
`burn` decodes in Python, `hidden` reads and decodes a little behind a longer compute.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import time

import torch
from torch.utils.data import DataLoader, Dataset

ITEMS_PER_BATCH = 16
FEATURES = 64


class Records(Dataset):
    def __init__(self, path: str, reads: int, read_bytes: int, loops: int, items: int) -> None:
        self.path, self.reads, self.loops, self.items = path, reads, loops, items
        self.read_bytes = read_bytes
        self.records = os.path.getsize(path) // read_bytes
        self.fd = -1
        self.buffers: list = []

    def __len__(self) -> int:
        return self.items

    def run_delay_ns(self) -> int:
        return int(os.pread(self.schedstat, 100, 0).split()[1])

    def __getitem__(self, index: int):
        began, cpu_began = time.perf_counter_ns(), time.thread_time_ns()
        if self.fd < 0:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
            self.buffers = [buffer_of(self.read_bytes)]
            self.schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        choose = random.Random(index)
        places = [choose.randrange(self.records) * self.read_bytes for _ in range(self.reads)]
        reading, delayed = time.perf_counter_ns(), self.run_delay_ns()
        for place in places:
            os.preadv(self.fd, self.buffers, place)
        read_ns = time.perf_counter_ns() - reading - (self.run_delay_ns() - delayed)
        total = 0
        for i in range(self.loops):
            total += i * i % 7
        delay_ns = self.run_delay_ns() - delayed
        return float(total % 5), index % 10, read_ns, delay_ns, began, cpu_began


def buffer_of(read_bytes: int) -> memoryview:
    """Memory to read into past the page cache: huge pages, which cost the kernel little to pin."""
    buffer = mmap.mmap(-1, read_bytes + (4 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)[:read_bytes]


def collate(items: list):
    """Make a batch; its last tensor says how it was made: reading, CPU, delay, all, when."""
    values, labels, read_ns, delay_ns, began, cpu_began = zip(*items)
    x = torch.tensor(values).unsqueeze(1).expand(-1, FEATURES).contiguous()
    made = [sum(read_ns), time.thread_time_ns() - cpu_began[0], sum(delay_ns)]
    ready = time.perf_counter_ns()
    made += [ready - began[0], ready]
    return x, torch.tensor(labels), torch.tensor(made)


def run_delay_ns() -> int:
    """How long this thread was ready so far, and had no CPU."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--fault", choices=["reads", "burn", "hidden"], required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args()
    reads, read_bytes, loops, compute_s = {
        "reads": (3, 8 << 20, 0, 0.02),
        "burn": (0, 4 << 20, 160_000, 0.02),
        "hidden": (1, 256 << 10, 500, 0.08),
    }[options.fault]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Records(options.data, reads, read_bytes, loops, options.steps * ITEMS_PER_BATCH)
    loader = DataLoader(data, ITEMS_PER_BATCH, num_workers=options.workers, collate_fn=collate)
    wait_ns = read_wait_ns = cpu_wait_ns = delay_wait_ns = late_wait_ns = 0
    losses = []
    batches = iter(loader)
    began, delayed = time.perf_counter_ns(), run_delay_ns()
    for _ in range(options.steps):
        asked = time.perf_counter_ns()
        x, y, made = next(batches)
        waited = time.perf_counter_ns() - asked
        wait_ns += waited
        read_ns, cpu_ns, delay_ns, all_ns, ready = made.tolist()
        for_making = min(waited, max(0, ready - asked))  # the rest: it was on its way here
        read_wait_ns += for_making * read_ns / all_ns
        cpu_wait_ns += waited * cpu_ns / all_ns  # a busy interpreter holds up the way, too
        delay_wait_ns += for_making * delay_ns / all_ns
        late_wait_ns += for_making if losses else 0  # the first batch is late by nature
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        time.sleep(compute_s)  # the rest of a real model's step
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    total_ns, run_delay = time.perf_counter_ns() - began, run_delay_ns() - delayed
    print(
        json.dumps(
            {
                "total_ns": total_ns,
                "wait_ns": wait_ns,
                "read_wait_ns": round(read_wait_ns),
                "cpu_wait_ns": round(cpu_wait_ns),
                "delay_wait_ns": round(delay_wait_ns),
                "late_wait_ns": round(late_wait_ns),
                "run_delay_ns": run_delay,
                "losses": losses,
            }
        )
    )


if __name__ == "__main__":
    main()
