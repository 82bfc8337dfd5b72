"""An ordinary DistributedDataParallel script over gloo that has never heard of a profiler.

It keeps stopwatches of its own and prints one JSON line per rank: sums of the loop's time, of the
wait for batches, of the work up to the last gradient of its own, of the wait in backward() after
it, and of sending and receiving; how long it was ready to run while others had its CPU, as the
kernel counts it; and when, step by step, it had its last gradient and could go on
(CLOCK_MONOTONIC). The accelerator's work is emulated by sleep, so that it stays exact on a busy
machine. With `--chain` each rank needs what the rank before it has read (a pipeline's first half).
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import socket
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

BLOCKS = 4
ITEMS_PER_BATCH = 8
now_ns = time.monotonic_ns


class Records(Dataset):
    """Reads past the page cache and decodes in Python, as much of both as asked."""

    def __init__(self, options: argparse.Namespace, features: int) -> None:
        self.options, self.features, self.fd = options, features, -1

    def __len__(self) -> int:
        return self.options.steps * ITEMS_PER_BATCH

    def __getitem__(self, index: int):
        options = self.options
        if options.data and self.fd < 0:
            self.fd = os.open(options.data, os.O_RDONLY | os.O_DIRECT)
            self.records = os.lseek(self.fd, 0, os.SEEK_END) // options.read_bytes
            self.buffers = [mmap.mmap(-1, options.read_bytes)]
        choose = random.Random(index)
        for _ in range(options.reads if options.data else 0):
            os.preadv(self.fd, self.buffers, choose.randrange(self.records) * options.read_bytes)
        total = 0
        for i in range(options.decode_loops):
            total += i * i % 7
        return torch.full((self.features,), 0.01 * (index % 7 + total % 5))


class Device(torch.autograd.Function):
    """What an accelerator would need: one third of it forward, two thirds backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds * 2 / 3)
        return gradient, None


class Model(torch.nn.Module):
    def __init__(self, features: int, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds / BLOCKS
        layers = (torch.nn.Linear(features, features) for _ in range(BLOCKS))
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = Device.apply(torch.tanh(layer(x)), self.seconds)
        return x


def run_delay_ns() -> int:
    with open("/proc/self/schedstat") as file:
        return int(file.read().split()[1])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--data", default="", help="a file to read from")
    parser.add_argument("--reads", type=int, default=2, help="reads per item")
    parser.add_argument("--read-bytes", type=int, default=1 << 20)
    parser.add_argument("--decode-loops", type=int, default=1000)
    parser.add_argument("--compute-ms", type=float, default=60)
    parser.add_argument("--model-mb", type=float, default=4)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--chain", action="store_true")
    return parser.parse_args()


def train(options: argparse.Namespace, rank: int, world: int) -> dict:
    features = round((options.model_mb * (1 << 20) / 4 / BLOCKS) ** 0.5)
    model = Model(features, options.compute_ms / 1000)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    last_gradient_ns = 0

    def mark(_) -> None:
        nonlocal last_gradient_ns
        last_gradient_ns = now_ns()

    for parameter in model.parameters():
        parameter.register_hook(mark)
    loader = DataLoader(Records(options, features), ITEMS_PER_BATCH, num_workers=options.workers)
    sums = dict.fromkeys(("data_wait_ns", "send_recv_ns", "compute_ns", "reduce_wait_ns"), 0)
    stamps: dict = {"arrived_us": [], "left_us": [], "data_wait_us": []}
    batches = iter(loader)
    dist.barrier()
    began_ns, delay_ns = now_ns(), run_delay_ns()
    for _ in range(options.steps):
        asked_ns = now_ns()
        x = next(batches)
        got_ns = now_ns()
        if options.chain and rank > 0:
            dist.recv(x, rank - 1)
        if options.chain and rank + 1 < world:
            dist.send(x, rank + 1)
        passed_ns = now_ns()
        loss = ddp(x).square().mean()
        loss.backward()
        left_ns = now_ns()
        optimizer.step()
        optimizer.zero_grad()
        marks = (asked_ns, got_ns, passed_ns, last_gradient_ns, left_ns)
        for name, start_ns, end_ns in zip(sums, marks, marks[1:]):
            sums[name] += end_ns - start_ns
        stamps["arrived_us"].append(last_gradient_ns // 1000)
        stamps["left_us"].append(left_ns // 1000)
        stamps["data_wait_us"].append((got_ns - asked_ns) // 1000)
    total_ns, delay_ns = now_ns() - began_ns, run_delay_ns() - delay_ns
    return {
        "loss": float(loss.detach()),
        "total_ns": total_ns,
        "delayed_ns": delay_ns,
        **sums,
        **stamps,
    }


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    said = {"rank": rank, "world": world, "host": socket.gethostname(), "steps": options.steps}
    print(json.dumps({**said, **train(options, rank, world)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
