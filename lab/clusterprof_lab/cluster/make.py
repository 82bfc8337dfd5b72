"""Simulate a cluster and write `recording/`, a folder per node, and `truth.json`.

The schedule is simulated first, in one process; then an ordered map of picklable tasks writes the
nodes, one at a time in each process.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from clusterprof_lab import truth
from clusterprof_lab.cluster.plan import CAUSES, ClusterPlan, Fault
from clusterprof_lab.cluster.record import get_node_name, record_node
from clusterprof_lab.cluster.schedule import (
    FIRST_FAULT,
    FIRST_OPERATION,
    OTHER,
    START,
    TRANSFER,
    WAIT_END,
    Schedule,
    run_schedule,
)
from clusterprof_lab.truth import Injected, Lost, Place, Truth

RunMap = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""An ordered map of a module-level function over picklable items."""
STEPS_FOLDER = "steps"


@dataclass(frozen=True)
class NodeTask:
    """One node to write."""

    plan: ClusterPlan
    schedule: Schedule
    node: int
    folder: Path
    with_steps: bool


@dataclass(frozen=True)
class WrittenCluster:
    """What was written."""

    truth: Truth
    bytes: int
    """Of all recordings."""
    steps: int


def make_cluster(
    plan: ClusterPlan, folder: Path, run_map: RunMap = map, with_steps: bool = False
) -> WrittenCluster:
    """Write the recordings and the truth of a cluster into a folder.

    with_steps: write also the ledger of every rank and step, `steps/NODE.npz`. The nodes' tasks
    read the schedule from a file below the folder, so workers elsewhere need to share it.

    Raises: FileExistsError when the folder holds a recording.
    """
    (folder / "recording").mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".schedule-") as scratch:
        schedule = run_schedule(plan, Path(scratch) / "times.bin")
        tasks = [NodeTask(plan, schedule, node, folder, with_steps) for node in range(plan.nodes)]
        size = sum(run_map(write_node, tasks))
        made = build_truth(plan, schedule)
    truth.write_truth(made, folder)
    return WrittenCluster(made, size, schedule.steps)


def write_node(task: NodeTask) -> int:
    """Write a node's recording, and its ledger by step if asked for; return the bytes."""
    if task.with_steps:
        name = f"{get_node_name(task.node)}.npz"
        (task.folder / STEPS_FOLDER).mkdir(exist_ok=True)
        np.savez(task.folder / STEPS_FOLDER / name, **build_step_ledger(task))
    return record_node(task.plan, task.schedule, task.node, task.folder / "recording")


def build_step_ledger(task: NodeTask) -> dict[str, np.ndarray[Any, Any]]:
    """Build the ledger of a node by step, int64[steps, ranks] each, ns of true time.

    `in_step` is the sum of `compute`, `data_wait` and `operations`; arrive and leave are
    int64[steps, ranks, operations].
    """
    times = task.schedule.read_node(task.node)
    stage = task.node * task.plan.per_node // (task.plan.outer * task.plan.inner)
    last = FIRST_OPERATION + 2 * len(task.plan.list_stage_operations(stage))
    arrive, leave = times[..., FIRST_OPERATION:last:2], times[..., FIRST_OPERATION + 1 : last : 2]
    in_step = times[..., last] - times[..., START]
    data_wait, operations = times[..., WAIT_END] - times[..., START], (leave - arrive).sum(axis=2)
    return {
        "start": times[..., START],
        "in_step": in_step,
        "data_wait": data_wait,
        "operations": operations,
        "compute": in_step - data_wait - operations,
        "arrive": arrive,
        "leave": leave,
    }


def build_truth(plan: ClusterPlan, schedule: Schedule) -> Truth:
    """Build the truth: the idle device time of every rank by reason, and the faults by cost.

    A fault of a node is booked with its first rank as culprit, a fault of the network with none;
    jitter, bubbles and hand-overs are `truth.OTHER`.
    """
    in_step = sum(schedule.parts.values())
    places = tuple(
        Place(rank, get_node_name(rank // plan.per_node), int(ns), schedule.steps)
        for rank, ns in enumerate(in_step.tolist())  # type: ignore[union-attr]
    )
    labels: list[tuple[str, int | None]] = [(truth.OTHER, None), ("net-transfer", None)]
    assert (0, 1, len(labels)) == (OTHER, TRANSFER, FIRST_FAULT)
    labels += [(CAUSES[fault.kind][0], find_culprit(plan, fault)) for fault in plan.faults]
    lost = tuple(
        Lost(cause, culprit, rank, ns)
        for (cause, culprit), amounts in zip(labels, schedule.lost.tolist())
        for rank, ns in enumerate(amounts)
        if ns
    )
    costs = schedule.lost[FIRST_FAULT:].sum(axis=1).tolist()
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    injected = tuple(
        Injected(
            CAUSES[plan.faults[i].kind][0],
            ()
            if plan.faults[i].kind == "slow-link"
            else tuple(plan.find_fault_ranks(plan.faults[i])),
        )
        for i in order
    )
    parameters = {k: v for k, v in asdict(plan).items() if k != "operations"}
    step_ns = float(schedule.end_ns[-1] - schedule.start_ns[0]) / schedule.steps
    name = f"cluster-{plan.topology}"
    clean = float(plan.step_ns)
    clocks = {place.node: (0, 0.0) for place in places}
    return Truth(
        name,
        "cluster",
        "dev",
        "medium",
        plan.seed,
        parameters,
        places,
        lost,
        injected,
        step_ns=step_ns,
        clean_step_ns=clean,
        clocks=clocks,
    )


def find_culprit(plan: ClusterPlan, fault: Fault) -> int | None:
    """Find the rank that the truth books a fault with; None for one of the network."""
    return None if fault.kind == "slow-link" else plan.find_fault_ranks(fault)[0]


@contextmanager
def open_pool(processes: int) -> Iterator[RunMap]:
    """Open an ordered map over processes of this machine; of one process it is `map`."""
    if processes <= 1:
        yield map
        return
    with ProcessPoolExecutor(processes) as pool:
        yield partial(pool.map, chunksize=1)


@contextmanager
def open_dask(address: str) -> Iterator[RunMap]:
    """Open an ordered map over the workers of a Dask scheduler; they must share the folder."""
    from distributed import Client

    with Client(address) as client:  # type: ignore[no-untyped-call]

        def run_map(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
            futures = client.map(function, items, pure=False)
            return (future.result() for future in futures)

        yield run_map


def count_cpus() -> int:
    """Return on how many CPUs this process may run."""
    return len(os.sched_getaffinity(0))
