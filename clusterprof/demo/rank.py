"""Run one rank of the demo: `python -m clusterprof.demo.rank SCENARIO STEPS DATASET
FOLDER`.

A usual training loop: wait for a batch, launch kernels, sometimes write a checkpoint, and reduce
the gradients of all ranks before the next step where the ranks train together. The device is
emulated: it executes what was queued, so it is idle only when the host is late.

Implement the demo's dataloader: one forked worker, with a bounded prefetch.

Worker and consumer keep their own timestamps in addition to their spans, so that the
ground truth does not come from the tool under demonstration.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import clusterprof
from clusterprof.demo.accelerator import EmulatedAccelerator
from clusterprof.demo.allreduce import Ring
from clusterprof.demo.scenarios import (
    CHECKPOINT_BYTES,
    READ_BYTES,
    ColdFile,
    Scenario,
    Work,
    find_scenario,
    run_busy_loop,
)
from clusterprof.demo.truth import Wait, attribute_idle_time


@dataclass(frozen=True, slots=True)
class Batch:
    """Work of the worker for one batch, by its own timestamps."""

    began_ns: int
    ended_ns: int
    read_ns: int
    burn_ns: int
    """CPU time of the decoding."""
    contended_ns: int
    """Time the worker was ready to run and had no CPU."""


class Loader:
    """Batches from one worker process, in order."""

    def __init__(self, work: Work, dataset: Path, steps: int, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self._batches, batches = context.Pipe(duplex=False)
        tokens, self._tokens = context.Pipe(duplex=False)
        arguments = (work, dataset, steps, seed, tokens, batches)
        self._worker = context.Process(target=_run_worker, args=arguments, daemon=True)
        self._worker.start()
        batches.close()  # our copy would keep the pipe open after the worker's death
        tokens.close()
        for _ in range(work.prefetch):
            self._tokens.send_bytes(b"t")

    def next(self) -> Batch:
        """Return the next batch, waiting for it; EOFError when the worker died."""
        batch: Batch = self._batches.recv()
        try:
            self._tokens.send_bytes(b"t")
        except BrokenPipeError:
            pass  # the worker has produced its last batch and exited
        return batch

    def close(self) -> None:
        """Wait for the worker, which exits after its last batch."""
        self._worker.join(timeout=10)


def _run_worker(
    work: Work, dataset: Path, steps: int, seed: int, tokens: Connection, batches: Connection
) -> None:
    file = ColdFile(dataset, READ_BYTES, seed)
    for _ in range(steps):
        try:
            tokens.recv_bytes()
        except EOFError:
            return  # the rank has exited
        began_ns = time.monotonic_ns()
        with clusterprof.span("fetch"):
            read_ns, contended_ns = file.read_batch(work.reads, work.read_ns)
            contended_ns += max(0, run_busy_loop(work.burn_ns) - work.burn_ns)
        ended_ns = time.monotonic_ns()
        batches.send(Batch(began_ns, ended_ns, read_ns, work.burn_ns, contended_ns))


KERNELS_PER_STEP = 6
QUEUED_STEPS = 2  # how far the host runs ahead, like a loop that reads its loss now and then


def run_rank(scenario_name: str, steps: str, dataset: str, truth_folder: str) -> None:
    """Train for so many steps and write the ground truth into the folder."""
    scenario = find_scenario(scenario_name, int(steps))
    rank = int(os.environ["RANK"])
    work = scenario.ranks[rank]
    device = EmulatedAccelerator.from_environment(queue_depth=QUEUED_STEPS * KERNELS_PER_STEP)
    loader = Loader(work, Path(dataset), scenario.steps, seed=rank)
    gradients = np.ones(scenario.gradient_bytes // 4, np.float32)
    ring = Ring.from_environment(scenario.link_bytes_per_second) if gradients.size else None
    waits = []
    began_ns = time.monotonic_ns()
    for step in range(scenario.steps):
        waits.append(_wait_for_batch(loader))
        for _ in range(KERNELS_PER_STEP):
            device.submit(work.device_ns_at(step) // KERNELS_PER_STEP)
        if work.checkpoint_every and step % work.checkpoint_every == work.checkpoint_every - 1:
            waits.append(_write_checkpoint(device, Path(truth_folder), rank))
        if ring is not None:
            device.synchronize()  # a host that sends gradients has waited for them
            gradients.fill(step)
            ring.all_reduce(gradients)
        clusterprof.step()
    ended_ns = time.monotonic_ns()
    device.synchronize()
    loader.close()
    if ring is not None:
        waits += _list_collective_waits(ring, scenario)
        ring.close()
    truth = attribute_idle_time(device.log, waits, began_ns, ended_ns)
    path = Path(truth_folder) / f"truth-{rank}.json"
    path.write_text(json.dumps({"rank": rank, "steps": scenario.steps, **truth}), encoding="utf-8")


def _wait_for_batch(loader: Loader) -> Wait:
    began_ns = time.monotonic_ns()
    with clusterprof.span("data_wait"):
        batch: Batch = loader.next()
    ended_ns = time.monotonic_ns()
    weights = {
        "storage-local": batch.read_ns,
        "cpu-preprocess": batch.burn_ns,
        "cpu-contention": batch.contended_ns,
    }
    return Wait(began_ns, ended_ns, weights)


def _write_checkpoint(device: EmulatedAccelerator, folder: Path, rank: int) -> Wait:
    device.synchronize()  # the weights must be final before they are written
    began_ns = time.monotonic_ns()
    with clusterprof.span("checkpoint"):
        path = folder / f"checkpoint-{rank}.bin"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            block = os.urandom(1 << 20)
            for _ in range(CHECKPOINT_BYTES >> 20):
                os.write(fd, block)
            os.fsync(fd)
        finally:
            os.close(fd)
    return Wait(began_ns, time.monotonic_ns(), {"checkpoint": 1})


def _list_collective_waits(ring: Ring, scenario: Scenario) -> list[Wait]:
    """Split each all-reduce at the arrival of the last rank: a wait for that rank, then the
    transfer.

    The injected part of a wait is the extra time of the late rank's kernels in that step.
    """
    waits = []
    last_arrivals = ring.find_last_arrivals()
    for step, ((arrived_ns, left_ns), (last_ns, late_rank)) in enumerate(
        zip(ring.operations, last_arrivals)
    ):
        late_work = scenario.ranks[late_rank]
        injected_ns = min(last_ns - arrived_ns, late_work.device_ns_at(step) - late_work.device_ns)
        weights = {scenario.cause: injected_ns, "other": last_ns - arrived_ns - injected_ns}
        waits.append(Wait(arrived_ns, last_ns, weights))
        waits.append(Wait(last_ns, left_ns, {"net-transfer": 1}))
    return waits


def bound_duration_ns(work: Work, scenario: Scenario) -> int:
    """Return a generous upper bound on a rank's duration, for timeouts."""
    per_batch_ns = work.device_ns + work.burn_ns + work.read_ns + work.reads * 2_000_000
    if scenario.gradient_bytes:
        slowest = max(rank_work.device_ns + rank_work.slower_ns for rank_work in scenario.ranks)
        rate = scenario.link_bytes_per_second or 100_000_000
        per_batch_ns += slowest + 2 * scenario.gradient_bytes * 1_000_000_000 // rate
    return scenario.steps * per_batch_ns * 2 + 30_000_000_000


if __name__ == "__main__":
    run_rank(*sys.argv[1:5])
