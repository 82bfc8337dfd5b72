"""Shared by the scripts: a model on an emulated accelerator, its training loop, stopwatches.

A script calls `train` with its data loader and hooks. At the end each rank writes its truth to
`TRUTH-<rank>.json` beside the recording: the idle time of its device inside the steps, the part of
it in which the guilty line ran in the training thread, or its part of the CPU time of a worker.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist

from clusterprof.demo.accelerator import EmulatedAccelerator

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
SLOW = RANK == WORLD_SIZE - 1
"""The last rank has the fault; a single one has it, too."""
STEPS = int(os.environ.get("STEPS", 300))
WARM_UP = 10  # steps; the analysis leaves them out, too
FEATURES = 64

stopwatch_ns: list[tuple[int, int]] = []
"""When the guilty line ran in the training thread."""
fetch_ns = [0, 0]
"""CPU time of the worker in the guilty line, and in all it did, of all batches handed over."""


@contextmanager
def measure_slow_line():
    """Measure the time of the slow line in the training thread."""
    begin_ns = time.monotonic_ns()
    yield
    stopwatch_ns.append((begin_ns, time.monotonic_ns()))


@contextmanager
def measure_slow_line_in_worker(spent_ns: list[int]):
    """Add the CPU time of the slow line to a list, in a thread that loads batches."""
    begin_ns = time.thread_time_ns()
    yield
    spent_ns.append(time.thread_time_ns() - begin_ns)


def open_emulated_device() -> EmulatedAccelerator:
    """Open the emulated device and patch torch.cuda's synchronization to wait for it."""
    device, owner, cuda = EmulatedAccelerator.from_environment(), os.getpid(), torch.cuda
    cuda.is_initialized = lambda: os.getpid() == owner
    cuda.current_device = lambda: 0
    cuda.is_current_stream_capturing = lambda: True  # so nobody asks for events
    cuda.get_device_properties = lambda _=None: SimpleNamespace(name="emulated")
    cuda.synchronize = lambda _=None: device.synchronize()
    return device


class OnDevice(torch.autograd.Function):
    """Launches the work of a layer; the identity otherwise."""

    @staticmethod
    def forward(ctx, x, device, work_ns):
        ctx.device, ctx.work_ns = device, work_ns
        device.submit(work_ns)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.submit(2 * ctx.work_ns)
        return gradient, None, None


class Model(torch.nn.Module):
    def __init__(self, device: EmulatedAccelerator, work_ns: int) -> None:
        super().__init__()
        self.device, self.work_ns = device, work_ns
        self.layers = torch.nn.ModuleList(torch.nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = OnDevice.apply(torch.tanh(layer(x)), self.device, self.work_ns)
        return x


def train(
    loader: Iterable,
    step_ms: float,
    prepare: Callable[[torch.nn.Module], None] = lambda model: None,
    after_step: Callable[[EmulatedAccelerator, torch.Tensor, int], None] = lambda *_: None,
) -> None:
    """Train for STEPS steps of `step_ms` on the device, and write the truth."""
    torch.set_num_threads(1)
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    device = open_emulated_device()
    model = Model(device, int(step_ms * 1e6 / 12))
    prepare(model)
    if WORLD_SIZE > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    begin_ns = first_worker_ns = 0
    for step, (batch, line_ns, worker_ns) in enumerate(loader):
        if step == WARM_UP:
            begin_ns, first_worker_ns = time.monotonic_ns(), worker_ns
        if step > WARM_UP:
            fetch_ns[0] += line_ns
            fetch_ns[1] = worker_ns - first_worker_ns
        loss = model(batch).square().mean()
        loss.backward()
        if WORLD_SIZE > 1:  # as gradients are exchanged: when the device has computed them
            torch.cuda.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        after_step(device, loss, step)
    end_ns = time.monotonic_ns()
    write_truth(device, begin_ns, end_ns)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def write_truth_at_end(device: EmulatedAccelerator) -> Callable[[int], None]:
    """Return a function to call in each step of a framework's loop, and with -1 at its end."""
    begin_ns = 0

    def watch(step: int) -> None:
        nonlocal begin_ns
        if step == WARM_UP:
            begin_ns = time.monotonic_ns()
        if step < 0:
            write_truth(device, begin_ns, time.monotonic_ns())

    return watch


def write_truth(device: EmulatedAccelerator, begin_ns: int, end_ns: int) -> None:
    """Write what this rank measured."""
    idle, last_ns = [], begin_ns
    for start_ns, stop_ns in device.log:
        if last_ns < start_ns and start_ns <= end_ns:
            idle.append((last_ns, start_ns))
        last_ns = max(last_ns, stop_ns)
    in_line_ns = sum(
        max(min(stop, line_stop) - max(start, line_start), 0)
        for start, stop in idle
        for line_start, line_stop in stopwatch_ns
        if line_start < stop and line_stop > start
    )
    truth = {
        "rank": RANK,
        "slow": SLOW,
        "idle_ns": sum(stop - start for start, stop in idle),
        "in_line_ns": in_line_ns,
        "fetch_ratio": fetch_ns[0] / fetch_ns[1] if fetch_ns[1] else None,
    }
    with open(os.path.join(os.environ["TRUTH"], f"truth-{RANK}.json"), "w") as file:
        json.dump(truth, file)
