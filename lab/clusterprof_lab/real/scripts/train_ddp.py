"""An ordinary DistributedDataParallel script over gloo, unaware of any profiler.

It keeps its own stopwatches and prints one JSON line per rank: sums, and for each step when it
asked for a batch, had it, had received and sent (`--chain`), had its last gradient and could go on
(CLOCK_MONOTONIC, in ns); by the kernel's count how long it was ready to run without a CPU; and the
same for each item of its loading. Work of the accelerator is emulated by sleep, so that it stays
exact on a busy machine. With `--chain` each rank needs the data of the rank before it (the first
half of a pipeline). `--own RANK NAME=VALUE` is an option of one rank.
"""

from __future__ import annotations

import argparse
import fcntl
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
ITEM = ("begun_ns", "read_ns", "made_ns", "read_delay_ns", "decode_delay_ns")
STAMPS = ("asked_ns", "got_ns", "received_ns", "passed_ns", "arrived_ns", "left_ns")
DELAYS = ("asked_delay_ns", "got_delay_ns", "arrived_delay_ns", "left_delay_ns")
now_ns = time.monotonic_ns


class Records(Dataset):
    """Reads past the page cache and decodes in Python, as much of both as asked."""

    def __init__(self, options: argparse.Namespace, features: int) -> None:
        self.options, self.features, self.fd = options, features, -1
        memory = mmap.mmap(-1, len(self) * len(ITEM) * 8)  # shared with the workers
        self.watch = torch.frombuffer(memory, dtype=torch.int64).view(-1, len(ITEM))

    def __len__(self) -> int:
        return self.options.steps * ITEMS_PER_BATCH

    def __getitem__(self, index: int):
        options = self.options
        if options.data and self.fd < 0:
            self.fd = os.open(options.data, os.O_RDONLY | os.O_DIRECT)
            self.records = os.lseek(self.fd, 0, os.SEEK_END) // options.read_bytes
            self.buffers = [mmap.mmap(-1, options.read_bytes)]
        choose = random.Random(index)
        begun_ns, delay_ns = now_ns(), read_run_delay_ns()
        for _ in range(options.reads if options.data else 0):
            os.preadv(self.fd, self.buffers, choose.randrange(self.records) * options.read_bytes)
        read_ns, read_delay_ns = now_ns(), read_run_delay_ns()
        end_ns = time.thread_time_ns() + round(options.decode_ms * 1e6 / ITEMS_PER_BATCH)
        while time.thread_time_ns() < end_ns:  # of a CPU of its own, however busy the machine is
            sum(i * i % 7 for i in range(200))
        made_ns, made_delay_ns = now_ns(), read_run_delay_ns()
        delays_ns = (read_delay_ns - delay_ns, made_delay_ns - read_delay_ns)
        self.watch[index] = torch.tensor((begun_ns, read_ns, made_ns, *delays_ns))
        return torch.full((self.features,), 0.01 * (index % 7))


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


def read_run_delay_ns() -> int:
    with open("/proc/self/schedstat") as file:
        return int(file.read().split()[1])


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--data", default="", help="a file to read from")
    parser.add_argument("--reads", type=int, default=2, help="reads per item")
    parser.add_argument("--read-bytes", type=int, default=1 << 20)
    parser.add_argument("--decode-ms", type=float, default=1.0, help="of a CPU, per batch")
    parser.add_argument("--compute-ms", type=float, default=60.0)
    parser.add_argument("--model-mb", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--chain", action="store_true")
    parser.add_argument(
        "--linger-s", type=float, default=0.0, help="connected, after the last step"
    )
    parser.add_argument("--own", nargs=2, action="append", default=[], help="RANK NAME=VALUE")
    return parser.parse_args()


def apply_rank_options(options: argparse.Namespace, rank: int) -> argparse.Namespace:
    for owner, word in options.own:
        if int(owner) == rank:
            name, value = word.split("=")
            setattr(options, name, type(getattr(options, name))(value))
    return options


def train(options: argparse.Namespace, rank: int, world: int) -> dict:
    features = round((options.model_mb * (1 << 20) / 4 / BLOCKS) ** 0.5)
    model = Model(features, options.compute_ms / 1000)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    arrived = (0, 0)

    def mark(_) -> None:
        nonlocal arrived
        arrived = now_ns(), read_run_delay_ns()

    for parameter in model.parameters():
        parameter.register_hook(mark)
    records = Records(options, features)
    loader = DataLoader(records, ITEMS_PER_BATCH, num_workers=options.workers)
    stamps: dict = {name: [] for name in (*STAMPS, *DELAYS)}
    batches = iter(loader)
    dist.barrier()
    began_ns = now_ns()
    for _ in range(options.steps):
        asked_ns, asked_delay_ns = now_ns(), read_run_delay_ns()
        x = next(batches)
        got_ns, got_delay_ns = now_ns(), read_run_delay_ns()
        if options.chain and rank > 0:
            dist.recv(x, rank - 1)
        received_ns = now_ns()
        if options.chain and rank + 1 < world:
            dist.send(x, rank + 1)
        passed_ns = now_ns()
        loss = ddp(x).square().mean()
        loss.backward()
        left_ns, left_delay_ns = now_ns(), read_run_delay_ns()
        optimizer.step()
        optimizer.zero_grad()
        times = (asked_ns, got_ns, received_ns, passed_ns, arrived[0], left_ns)
        delays = (asked_delay_ns, got_delay_ns, arrived[1], left_delay_ns)
        for name, value in zip(stamps, (*times, *delays)):
            stamps[name].append(value)
    total_ns = now_ns() - began_ns
    items = dict(zip(ITEM, records.watch.T.tolist()))
    return {
        "loss": float(loss.detach()),
        "began_ns": began_ns,
        "total_ns": total_ns,
        "stamps": stamps,
        "items": items,
    }


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    header = {
        "rank": rank,
        "world": world,
        "host": socket.gethostname(),
        "steps": options.steps,
        "chain": options.chain,
    }
    line = json.dumps({**header, **train(apply_rank_options(options, rank), rank, world)})
    with open(__file__) as turn:  # a pipe keeps only short lines of several writers apart
        fcntl.flock(turn, fcntl.LOCK_EX)
        print(line, flush=True)
    time.sleep(options.linger_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
