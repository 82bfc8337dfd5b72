"""A node of a simulated cluster during a window of the run: what its threads and devices did."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from clusterprof_lab.cluster.plan import SECOND_NS, ClusterPlan, Operation, Scope
from clusterprof_lab.cluster.schedule import (
    FETCH_BEGIN,
    FETCH_END,
    FIRST_OPERATION,
    START,
    WAIT_END,
    Schedule,
)

Int = NDArray[np.int64]
Float = NDArray[np.float64]

TICK_NS = 100_000_000
READ_BYTES_PER_SECOND = 800_000_000
"""Of a worker on a healthy disk."""
CYCLES = 4
"""Reads of a batch, each followed by decoding."""


def get_pid(local: int) -> int:
    """Return the process of a rank, by its number on the node."""
    return 1_000 + 100 * local


def get_worker_pid(local: int, worker: int) -> int:
    """Return the process of a loader's worker."""
    return get_pid(local) + 1 + worker


def find_members(plan: ClusterPlan, rank: int) -> dict[Scope, tuple[int, ...]]:
    """Find the process groups of a rank: scope -> global ranks.

    Messages are in the group of the pipeline, as Megatron-LM sends them.
    """
    stage, place = divmod(rank, plan.outer * plan.inner)
    outer, inner = divmod(place, plan.inner)
    base = stage * plan.outer * plan.inner
    return {
        "world": tuple(range(plan.ranks)),
        "inner": tuple(range(base + outer * plan.inner, base + (outer + 1) * plan.inner)),
        "outer": tuple(base + i * plan.inner + inner for i in range(plan.outer)),
        "pair": tuple(s * plan.outer * plan.inner + place for s in range(plan.stages)),
    }


def sum_disjoint(start_ns: Int, end_ns: Int, t_ns: Int) -> Float:
    """Return float64[n], ns: time covered up to each time by sorted, disjoint intervals.

    start_ns, end_ns: int64[m]; t_ns: int64[n].
    """
    if not len(start_ns):
        return np.zeros(len(t_ns))
    edges = np.stack([start_ns, end_ns], axis=1).reshape(-1)
    covered = np.repeat(np.concatenate([[0], np.cumsum(end_ns - start_ns)]), 2)[1:-1]
    return np.interp(t_ns, edges, covered.astype(np.float64))


@dataclass(frozen=True)
class NodeWindow:
    """One node from `begin_ns` to `end_ns`; steps that lie near them are in it, too."""

    plan: ClusterPlan
    schedule: Schedule
    node: int
    times: Int
    """Of the whole run, see `Schedule.read_node`."""
    begin_ns: int
    end_ns: int

    @cached_property
    def stage(self) -> int:
        """Pipeline stage of the node's ranks."""
        return self.node * self.plan.per_node // (self.plan.outer * self.plan.inner)

    @property
    def loads(self) -> bool:
        """True if its ranks load data."""
        return self.stage == 0

    @cached_property
    def operations(self) -> list[Operation]:
        """What its ranks take part in during a step."""
        return self.plan.list_stage_operations(self.stage)

    @cached_property
    def steps(self) -> Int:
        """int64[steps]: numbers of the steps in and near the window."""
        near = self.plan.workers * self.plan.prefetch + 2 + 2 * SECOND_NS // self.plan.step_ns
        first = int(np.searchsorted(self.schedule.end_ns, self.begin_ns)) - near
        last = int(np.searchsorted(self.schedule.start_ns, self.end_ns)) + near
        return np.arange(max(0, first), min(last, self.schedule.steps))

    @cached_property
    def rows(self) -> Int:
        """int64[steps, ranks, columns], ns: their times."""
        return np.array(self.times[self.steps[0] : self.steps[-1] + 1])

    @property
    def start(self) -> Int:
        """int64[steps, ranks], ns: begin of each step."""
        return self.rows[..., START]

    @property
    def wait_end(self) -> Int:
        """int64[steps, ranks], ns: when the batch was handed over."""
        return self.rows[..., WAIT_END]

    @property
    def arrive(self) -> Int:
        """int64[steps, ranks, operations], ns."""
        return self.rows[..., FIRST_OPERATION : FIRST_OPERATION + 2 * len(self.operations) : 2]

    @property
    def leave(self) -> Int:
        """int64[steps, ranks, operations], ns."""
        return self.rows[..., FIRST_OPERATION + 1 : FIRST_OPERATION + 2 * len(self.operations) : 2]

    @property
    def end(self) -> Int:
        """int64[steps, ranks], ns: end of each step."""
        return self.rows[..., FIRST_OPERATION + 2 * len(self.operations)]

    @cached_property
    def t_ns(self) -> Int:
        """int64[ticks], ns: when samples are taken."""
        return np.arange(self.begin_ns, self.end_ns, TICK_NS)

    def list_idle(self, local: int) -> tuple[Int, Int]:
        """Return when a rank's device stood still, int64[n] twice, by time."""
        start = np.concatenate([self.start[:, local, None], self.arrive[:, local]], axis=1)
        end = np.concatenate([self.wait_end[:, local, None], self.leave[:, local]], axis=1)
        if self.steps[0] == 0:
            start[0, 0] = 0  # start-up
        return start.reshape(-1), end.reshape(-1)

    def find_fetches(self, local: int, worker: int) -> tuple[Int, Int, Int, Int]:
        """Find a worker's fetches: number, begin, end and time spent reading, int64[n] each, ns."""
        mine = self.steps % self.plan.workers == worker
        rows = self.rows[mine, local]
        begin, end = rows[:, FETCH_BEGIN], rows[:, FETCH_END]
        length = end - begin
        rank = self.node * self.plan.per_node + local
        reading = length // 2
        for fault in self.plan.faults:
            if rank in self.plan.find_fault_ranks(fault):
                if fault.kind == "slow-storage":
                    reading = length - np.minimum(length // 2, self.plan.decode_ns)
                elif fault.kind == "late-loader":
                    reading = np.minimum(length // 2, self.plan.read_ns)
        return self.steps[mine], begin, end, reading

    @cached_property
    def pieces(self) -> dict[tuple[int, int], tuple[Int, Int, Int]]:
        """By rank and worker: number, reading ns, edges int64[n, 2 * CYCLES + 1] of the parts."""
        pieces = {}
        for local in range(self.plan.per_node if self.loads else 0):
            for worker in range(self.plan.workers):
                number, begin, end, reading = self.find_fetches(local, worker)
                part = np.arange(CYCLES + 1)
                edges = np.zeros((len(begin), 2 * CYCLES + 1), np.int64)
                decoding = end - begin - reading
                turn = (reading[:, None] * part + decoding[:, None] * part) // CYCLES
                edges[:, ::2] = begin[:, None] + turn
                edges[:, 1::2] = edges[:, :-1:2] + reading[:, None] // CYCLES
                pieces[local, worker] = number, reading, edges
        return pieces

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch on disk."""
        return self.plan.read_ns * READ_BYTES_PER_SECOND // SECOND_NS
