"""One rank of the demo: `python -m clusterprof.demo.rank SCENARIO STEPS DATASET FOLDER`.

A training loop as everybody writes it: wait for a batch, launch kernels, sometimes checkpoint; and
reduce the gradients of all ranks before the next step, where they train together.
The device is emulated: it executes what was queued, so only what the host does late leaves it idle.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import clusterprof
from clusterprof.demo.accelerator import EmulatedAccelerator
from clusterprof.demo.allreduce import Ring
from clusterprof.demo.loader import Batch, Loader
from clusterprof.demo.scenarios import CHECKPOINT_BYTES, Scenario, Work, scenario_named
from clusterprof.demo.truth import Wait, account

KERNELS_PER_STEP = 6
QUEUED_STEPS = 2  # how far the host runs ahead: a loop that looks at its loss now and then


def main(scenario_name: str, steps: str, dataset: str, truth_folder: str) -> None:
    """Train for so many steps and write down in the folder what was true."""
    scenario = scenario_named(scenario_name, int(steps))
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
            device.submit(work.device_ns_of(step) // KERNELS_PER_STEP)
        if work.checkpoint_every and step % work.checkpoint_every == work.checkpoint_every - 1:
            waits.append(_checkpoint(device, Path(truth_folder), rank))
        if ring is not None:
            device.synchronize()  # a host that sends gradients has waited for them
            gradients.fill(step)
            ring.all_reduce(gradients)
        clusterprof.step()
    ended_ns = time.monotonic_ns()
    device.synchronize()
    loader.close()
    if ring is not None:
        waits += _waits_for_others(ring, scenario)
        ring.close()
    truth = account(device.log, waits, began_ns, ended_ns)
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


def _checkpoint(device: EmulatedAccelerator, folder: Path, rank: int) -> Wait:
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


def _waits_for_others(ring: Ring, scenario: Scenario) -> list[Wait]:
    """Split each all-reduce where the last rank came to it: a wait for that one, then the data.

    What was injected of a wait is what the late rank's kernels took longer in that step.
    """
    waits = []
    last = ring.last_to_come()
    for step, ((came_ns, left_ns), (last_ns, whose)) in enumerate(zip(ring.operations, last)):
        late = scenario.ranks[whose]
        injected_ns = min(last_ns - came_ns, late.device_ns_of(step) - late.device_ns)
        weights = {scenario.cause: injected_ns, "other": last_ns - came_ns - injected_ns}
        waits.append(Wait(came_ns, last_ns, weights))
        waits.append(Wait(last_ns, left_ns, {"net-transfer": 1}))
    return waits


def worst_case_ns(work: Work, scenario: Scenario) -> int:
    """Return a generous bound on how long a rank can take, for time-outs."""
    per_batch_ns = work.device_ns + work.burn_ns + work.read_ns + work.reads * 2_000_000
    if scenario.gradient_bytes:
        slowest = max(one.device_ns + one.slower_ns for one in scenario.ranks)
        rate = scenario.link_bytes_per_second or 100_000_000
        per_batch_ns += slowest + 2 * scenario.gradient_bytes * 1_000_000_000 // rate
    return scenario.steps * per_batch_ns * 2 + 30_000_000_000


if __name__ == "__main__":
    main(*sys.argv[1:5])
