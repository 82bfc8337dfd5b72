"""Training loops with one known fault each, on a real GPU: `_gpu_jobs.py LOOP SECONDS TRUTH`.

At its end a loop is traced by CUPTI (torch.profiler). What the trace and the loop's own clock say
of that window is the truth, written to the file TRUTH. `rank` is one of two ranks under torchrun;
`events` measures what the probe costs, in rounds with the probe and without it.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

WINDOW_S = {"cuda-graph": 0.3, "tiny-kernels": 1.0, "item": 1.0}
"""Loops with so many kernels that two seconds of them take CUPTI a minute to hand over."""
ROUND_S = 0.3
WARM_UP_STEPS = 5

Step = Callable[[Any], None]


class CpuBoundDataset(Dataset):  # type: ignore[type-arg]
    """Samples that take a given CPU time each."""

    def __init__(self, cpu_ms: float) -> None:
        self.cpu_ms = cpu_ms

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        end = time.perf_counter() + self.cpu_ms / 1000
        while time.perf_counter() < end:
            pass
        return torch.full((256,), float(index % 7))


def load(cpu_ms: float, workers: int) -> Iterator[Any]:
    """Iterate over batches of 16 samples."""
    return iter(DataLoader(CpuBoundDataset(cpu_ms), batch_size=16, num_workers=workers))


def make_trainer(matmuls: int, size: int = 4096) -> Step:
    """Return a step of large matrix products and a small optimizer."""
    w = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    net = torch.nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step(batch: Any) -> None:
        loss = net(batch.to("cuda", non_blocking=True)[:16, :256]).square().mean()
        for _ in range(matmuls):
            torch.mm(w, w)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def build_healthy() -> tuple[Iterator[Any], Step]:
    """The device is always busy; batches are ready ahead of time."""
    return load(0.05, 2), make_trainer(60)


def build_slow_dataset() -> tuple[Iterator[Any], Step]:
    """Two workers prepare a batch in 12 ms; the device needs half of that."""
    return load(1.5, 2), make_trainer(25)


def build_pageable() -> tuple[Iterator[Any], Step]:
    """Batches of 128 MB are copied from pageable memory."""
    tensors = [torch.randn(131_072, 256) for _ in range(4)]
    return (tensors[number % 4] for number in range(10**9)), make_trainer(25)


def build_sleep() -> tuple[Iterator[Any], Step]:
    """A hook reads the loss and sleeps for 6 ms in each step."""
    train, x = make_trainer(25), torch.zeros(1, device="cuda")

    def step(batch: Any) -> None:
        train(batch)
        x.item()
        time.sleep(0.006)

    return load(0.05, 2), step


def make_small_ops() -> tuple[Callable[[], None], torch.optim.Optimizer]:
    """Return 400 operations of some microseconds each, and an optimizer."""
    x = torch.ones(64, 64, device="cuda")
    net = torch.nn.Linear(64, 64).cuda()

    def work() -> None:
        for _ in range(200):
            x.mul_(1.0001)
            x.clamp_(max=2.0)

    return work, torch.optim.SGD(net.parameters(), lr=1e-4)


def repeat_none() -> Iterator[Any]:
    """Iterate over batches that are not used."""
    return (None for _ in range(10**9))


def build_tiny_kernels() -> tuple[Iterator[Any], Step]:
    """The host launches 400 tiny kernels in each step."""
    work, optimizer = make_small_ops()

    def step(batch: Any) -> None:
        work()
        optimizer.step()

    return repeat_none(), step


def build_cuda_graph() -> tuple[Iterator[Any], Step]:
    """The same kernels, replayed ten times in each step by one launch each."""
    work, optimizer = make_small_ops()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def step(batch: Any) -> None:
        for _ in range(10):
            graph.replay()
        optimizer.step()

    return repeat_none(), step


def build_item() -> tuple[Iterator[Any], Step]:
    """A value is read back after every small matrix product, 100 times in a step."""
    w = torch.randn(512, 512, device="cuda")
    _, optimizer = make_small_ops()

    def step(batch: Any) -> None:
        total = 0.0
        for _ in range(100):
            total += torch.mm(w, w)[0, 0].item()
        optimizer.step()

    return repeat_none(), step


def build_compile() -> tuple[Iterator[Any], Step]:
    """Many small layers, compiled with CUDA graphs."""
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(100)]
    net = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(net, mode="reduce-overhead")
    x = torch.randn(8192, 256, device="cuda")

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        compiled(x).square().mean().backward()
        optimizer.step()

    return repeat_none(), step


LOOPS = {
    "healthy": build_healthy,
    "slow-dataset": build_slow_dataset,
    "pageable": build_pageable,
    "sleep": build_sleep,
    "tiny-kernels": build_tiny_kernels,
    "cuda-graph": build_cuda_graph,
    "item": build_item,
    "compile": build_compile,
}


def merge(events: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Merge overlapping intervals; returns starts and ends, ns, each of shape (n,)."""
    merged: list[list[int]] = []
    for start, end in sorted(events):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    pairs = np.array(merged, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def measure_busy_ns(busy: tuple[np.ndarray, np.ndarray], start_ns: int, end_ns: int) -> int:
    """Measure the part of one interval that the merged intervals cover, ns."""
    covered = np.minimum(busy[1], end_ns) - np.maximum(busy[0], start_ns)
    return int(covered[covered > 0].sum())


def list_device_events(trace: Any, copies: bool) -> list[tuple[int, int]]:
    """List start and end, ns since the epoch, of what ran on the device."""
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in trace.profiler.kineto_results.events()
        if event.device_type().name == "CUDA"
        and event.duration_ns() > 0
        and (copies or not event.name().startswith(("Memcpy", "Memset")))
    ]


def run_loop(name: str, seconds: float) -> dict[str, Any]:
    """Run one loop; returns the truth of a window at its end."""
    with profile(activities=[ProfilerActivity.CUDA]):  # CUPTI starts slowly: before the first step
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()
    window_s = WINDOW_S.get(name, 2.0)
    batches, step = LOOPS[name]()
    for _ in range(WARM_UP_STEPS):  # compiles, and captures graphs
        step(next(batches))
    steps_before, _ = run_until(batches, step, time.monotonic() + seconds)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        began_ns, epoch_ns = time.monotonic_ns(), time.time_ns()
        steps, waits = run_until(batches, step, time.monotonic() + window_s)
        torch.cuda.synchronize()
        ended_ns = time.monotonic_ns()
    run_until(batches, step, time.monotonic() + 1.0)  # late readings of the window arrive
    busy = merge(list_device_events(trace, copies=True))
    kernels = merge(list_device_events(trace, copies=False))
    window = epoch_ns, epoch_ns + ended_ns - began_ns
    return {
        "began_ns": began_ns,
        "ended_ns": ended_ns,
        "steps_before": WARM_UP_STEPS + steps_before,
        "steps": steps,
        "busy_ns": measure_busy_ns(busy, *window),
        "kernel_ns": measure_busy_ns(kernels, *window),
        "idle_in_waits_ns": sum(
            end - start - measure_busy_ns(busy, start, end) for start, end in waits
        ),
        "waits_ns": sum(end - start for start, end in waits),
    }


def run_until(batches: Any, step: Step, end_s: float) -> tuple[int, list[tuple[int, int]]]:
    """Train until a time; returns the steps and the waits for batches, ns since the epoch."""
    waits, steps = [], 0
    while time.monotonic() < end_s:
        began_ns = time.time_ns()
        batch = next(batches)
        waits.append((began_ns, time.time_ns()))
        step(batch)
        steps += 1
    return steps, waits


def run_rank(seconds: float) -> dict[str, Any]:
    """Run one of two ranks on one GPU; rank 1 prepares its batches slowly."""
    import torch.distributed as dist

    backend = os.environ.get("GPU_CHECK_BACKEND", "nccl")
    dist.init_process_group(backend)
    rank = dist.get_rank()
    batches, train = load(1.5 if rank else 0.05, 2), make_trainer(15)
    gradient = torch.ones(1_000_000, device="cuda")

    def step(batch: Any) -> None:
        dist.all_reduce(gradient)
        train(batch)

    for _ in range(round(seconds / 0.015)):
        step(next(batches))
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return {"backend": backend}


def run_events(seconds: float, matmuls: int) -> dict[str, Any]:
    """Measure time per step without the probe, with its hooks, and with its events as well."""
    probe: Any = sys.modules["_clusterprof_probe"]
    batches, step = load(0.0, 0), make_trainer(matmuls)
    run_until(batches, step, time.monotonic() + 2)
    arms = {"off": (False, False), "hooks": (True, False), "events": (True, True)}
    step_ns: dict[str, list[float]] = {name: [] for name in arms}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for name, (on, events) in arms.items():
            probe.on, probe.config["gpu_events"] = on, events
            torch.cuda.synchronize()
            began_ns = time.perf_counter_ns()
            steps, _ = run_until(batches, step, time.monotonic() + ROUND_S)
            torch.cuda.synchronize()
            step_ns[name].append((time.perf_counter_ns() - began_ns) / steps)
    result: dict[str, Any] = {"step_ns": statistics.median(step_ns["off"])}
    for name in ("hooks", "events"):
        ratios = [a / b - 1 for a, b in zip(step_ns[name], step_ns["off"])]
        error = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
        result[name] = [statistics.mean(ratios), error, len(ratios)]
    return result


def main() -> None:
    """Run one loop and write its truth."""
    name, seconds, path = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    if name == "rank":
        truth = run_rank(seconds)
        path += os.environ["RANK"]
    elif name.startswith("events-"):
        truth = run_events(seconds, int(name[7:]))
    else:
        truth = run_loop(name, seconds)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(truth, file)


if __name__ == "__main__":
    main()
