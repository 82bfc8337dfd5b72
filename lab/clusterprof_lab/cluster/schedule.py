"""The schedule of a simulated cluster: when every rank works, waits and leaves an operation.

All ranks move through a step together, as arrays [stage, outer, inner]. The times of all operations
go to a file, node by node, for the recordings: memory does not grow with the hours.

Every moment of a rank has a history, as in `synth.wait_truth`: ns by label whose sum is the
moment. The members of an operation take over the history of the last to arrive; the reason of a
wait is what that rank had spent more of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clusterprof_lab.cluster.plan import (
    HAND_OVER_NS,
    OF_LOADERS,
    ClusterPlan,
    ClusterPlanError,
    Fault,
    Operation,
    Scope,
)

Int = NDArray[np.int64]
OTHER, TRANSFER, FIRST_FAULT = 0, 1, 2
"""Labels: work with its jitter and bubbles, transfers, then one for each fault."""
START, WAIT_END, FETCH_BEGIN, FETCH_END, FIRST_OPERATION = range(5)
"""Columns of the file: the step's start, the batch's hand-over, its fetch; then arrive and leave of
every operation, then the step's end."""
_BUFFER_BYTES = 64 << 20
_LEAST_WORK = 0.5


@dataclass(frozen=True)
class Schedule:
    """Times of all steps, in a file."""

    path: Path
    """int64[nodes, steps, ranks of a node, columns], ns."""
    shape: tuple[int, int, int, int]
    """Of the file; its last steps may be unused."""
    start_ns: Int
    """int64[steps], ns: when the first rank began each step."""
    end_ns: Int
    """int64[steps], ns: when the last rank ended it."""
    parts: dict[str, Int]
    """int64[ranks], ns: compute, data_wait, wait and transfer, which sum to the time in steps."""
    lost: Int
    """int64[labels, ranks], ns: idle device time by reason."""

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.start_ns)

    def read_node(self, node: int) -> NDArray[np.int64]:
        """Return the times of a node, int64[steps, ranks of the node, columns], from the file."""
        nodes = np.memmap(self.path, np.int64, "r", shape=self.shape)
        return nodes[node, : self.steps]


def count_columns(plan: ClusterPlan) -> int:
    """Return the columns of the file: those of the stage with the most operations."""
    most = max(len(plan.list_stage_operations(stage)) for stage in range(plan.stages))
    return FIRST_OPERATION + 2 * most + 1


def run_schedule(plan: ClusterPlan, path: Path) -> Schedule:
    """Simulate all steps that begin within the plan's seconds, and write their times to a file."""
    most_steps = plan.seconds * 1_000_000_000 * 5 // (plan.step_ns * 4) + 2
    columns = count_columns(plan)
    shape = (plan.nodes, most_steps, plan.per_node, columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = np.memmap(path, np.int64, "w+", shape=shape)
    row_bytes = plan.ranks * columns * 8
    block = max(1, _BUFFER_BYTES // row_bytes)
    simulation = _Simulation(plan)
    starts: list[int] = []
    ends: list[int] = []
    while len(starts) < most_steps and simulation.t.min() < plan.seconds * 1_000_000_000:
        first = len(starts)
        rows = np.zeros((min(block, most_steps - first), *simulation.t.shape, columns), np.int64)
        for times in rows:
            if simulation.t.min() >= plan.seconds * 1_000_000_000:
                break
            starts.append(int(simulation.t.min()))
            simulation.run_step(len(starts) - 1, times)
            ends.append(int(simulation.t.max()))
        count = len(starts) - first
        nodes = rows[:count].reshape(count, plan.nodes, plan.per_node, columns)
        file[:, first : first + count] = nodes.swapaxes(0, 1)
    file.flush()
    lost = simulation.lost.reshape(len(simulation.lost), -1)
    parts = {name: ns.reshape(-1) for name, ns in simulation.parts.items()}
    schedule = Schedule(path, shape, np.array(starts), np.array(ends), parts, lost)
    _check_sums(schedule, plan.startup_ns, simulation.t.reshape(-1))
    return schedule


def _check_sums(schedule: Schedule, startup_ns: int, end_ns: Int) -> None:
    """Raise ClusterPlanError unless every rank's time is the sum of its parts, int64[ranks], ns."""
    idle = schedule.parts["data_wait"] + schedule.parts["wait"] + schedule.parts["transfer"]
    if (idle != schedule.lost.sum(axis=0)).any() or (
        schedule.parts["compute"] + idle != end_ns - startup_ns
    ).any():
        raise ClusterPlanError("the truth does not add up: an error of the simulator")


class _Simulation:
    """The ranks of a job in the middle of it; arrays are [stage, outer, inner]."""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        shape = (plan.stages, plan.outer, plan.inner)
        labels = FIRST_FAULT + len(plan.faults)
        self.t = np.full(shape, plan.startup_ns)
        self.lost = np.zeros((labels, *shape), np.int64)
        self.parts = {
            name: np.zeros(shape, np.int64) for name in ("compute", "data_wait", "wait", "transfer")
        }
        self._history = np.zeros((labels, *shape), np.int64)
        self._random = np.random.default_rng([plan.seed, 18])
        self._node = (np.arange(plan.ranks) // plan.per_node).reshape(shape)
        self._struck = [self._mark_ranks(fault) for fault in plan.faults]
        self._crossed: dict[tuple[int, Scope, tuple[int, ...]], NDArray[np.bool_]] = {}
        self._crossings = self._count_crossings()
        loaders = (plan.outer, plan.inner)
        self._free = np.zeros((plan.workers, *loaders), np.int64)
        self._taken = np.zeros((plan.workers * plan.prefetch, *loaders), np.int64)
        self._tail = [
            1.0 - sum(op.work for op in plan.list_stage_operations(s)) for s in range(plan.stages)
        ]

    def run_step(self, step: int, times: Int) -> None:
        """Move all ranks through a step; fill in its times, int64[stage, outer, inner, columns]."""
        plan = self.plan
        steps = round(plan.seconds * 1e9 / plan.step_ns)
        active = [fault.is_active(step, steps) for fault in plan.faults]
        times[..., START] = self.t
        self._load_batches(step, active, times)
        column = [FIRST_OPERATION] * plan.stages
        most = (times.shape[-1] - FIRST_OPERATION) // 2
        noise = self._random.standard_normal((most + 1, *self.t.shape), np.float32)
        for op in plan.operations:
            for stage in op.stages:
                if op.work:
                    draw = noise[(column[stage] - FIRST_OPERATION) // 2, stage]
                    self._compute_work(stage, op.work, draw, active)
            arrive = self.t.copy() if len(op.stages) > 1 else self.t[op.stages[0]].copy()
            self._synchronize_group(op, active)
            for stage in op.stages:
                times[stage, ..., column[stage]] = arrive[stage] if len(op.stages) > 1 else arrive
                times[stage, ..., column[stage] + 1] = self.t[stage]
                column[stage] += 2
        for stage in range(plan.stages):
            self._compute_work(stage, self._tail[stage], noise[most, stage], active)
            times[stage, ..., column[stage]] = self.t[stage]

    def _mark_ranks(self, fault: Fault) -> NDArray[np.bool_]:
        struck = np.zeros(self.plan.ranks, np.bool_)
        struck[list(self.plan.find_fault_ranks(fault))] = True
        return struck.reshape(self.t.shape)

    def _load_batches(self, step: int, active: Sequence[bool], times: Int) -> None:
        """Let the first stage wait for its batch; worker step mod n fetches it."""
        plan, worker, slot = self.plan, step % len(self._free), step % len(self._taken)
        noise = self._random.standard_normal(self.t.shape[1:], np.float32)
        base = plan.read_ns + plan.decode_ns
        length = np.rint(base * np.maximum(1 + 2 * plan.jitter * noise, _LEAST_WORK))
        for fault, struck, strikes in zip(plan.faults, self._struck, active):
            if strikes and fault.kind in OF_LOADERS:
                whole = plan.step_ns * (1 + fault.share) * plan.workers
                length = length + struck[0] * max(0.0, whole - base)
        begin = np.maximum(self._free[worker], self._taken[slot])
        end = begin + length.astype(np.int64)
        late = np.maximum(end - self.t[0], 0)
        waited = late + HAND_OVER_NS
        mine = np.full(late.shape, OTHER)
        for number, (fault, struck) in enumerate(zip(plan.faults, self._struck)):
            if fault.kind in OF_LOADERS:
                mine[struck[0]] = FIRST_FAULT + number
        for label in range(len(self.lost)):
            ns = np.where(mine == label, late, 0) + (HAND_OVER_NS if label == OTHER else 0)
            self.lost[label, 0] += ns
            self._history[label, 0] += ns
        self.parts["data_wait"][0] += waited
        self.t[0] += waited
        self._free[worker], self._taken[slot] = end, self.t[0]
        times[0, ..., FETCH_BEGIN], times[0, ..., FETCH_END] = begin, end
        times[..., WAIT_END] = self.t

    def _compute_work(
        self, stage: int, share: float, draw: NDArray[np.float32], active: Sequence[bool]
    ) -> None:
        plan = self.plan
        due = plan.compute_ns * share
        ns = np.rint(due * np.maximum(1 + plan.jitter * draw.astype(np.float64), _LEAST_WORK))
        work = ns.astype(np.int64)
        self._history[OTHER, stage] += work
        for number, fault in enumerate(plan.faults):
            if active[number] and fault.kind in ("straggler", "slow-node"):
                more = round(plan.step_ns * fault.share * share) * self._struck[number][stage]
                self._history[FIRST_FAULT + number, stage] += more
                work = work + more
        self.parts["compute"][stage] += work
        self.t[stage] += work

    def _synchronize_group(self, op: Operation, active: Sequence[bool]) -> None:
        """Let the members of each group leave together, after the last arrival and the transfer."""
        t, history = _gather(self.t, op), _gather(self._history, op)
        last = t.argmax(axis=1)
        release = t.max(axis=1, keepdims=True)
        wait = release - t
        before = np.take_along_axis(history, last[None, :, None], axis=2)
        more = np.maximum(before - history, 0).astype(np.float64)
        whole = more.sum(axis=0)
        shares = np.floor(wait * (more / np.where(whole > 0, whole, 1.0))).astype(np.int64)
        shares[OTHER] = wait - shares[FIRST_FAULT - 1 :].sum(axis=0)
        after = before.copy()
        moved = np.full((len(t), 1), op.due_ns)
        after[TRANSFER] += op.due_ns
        shares[TRANSFER] += op.due_ns
        for number, fault in enumerate(self.plan.faults):
            if active[number] and fault.kind == "slow-link":
                extra = round(fault.share * self.plan.step_ns / max(1, self._crossings))
                slowed = extra * self._find_crossed(number, op)[:, None]
                after[FIRST_FAULT + number] += slowed
                shares[FIRST_FAULT + number] += slowed
                moved = moved + slowed
        _scatter(self.t, op, np.broadcast_to(release + moved, t.shape))
        _scatter(self._history, op, np.broadcast_to(after, history.shape))
        _scatter(self.lost, op, _gather(self.lost, op) + shares)
        for name, ns in (("wait", wait), ("transfer", np.broadcast_to(moved, t.shape))):
            _scatter(self.parts[name], op, _gather(self.parts[name], op) + ns)

    def _count_crossings(self) -> int:
        """Return how many operations of a step leave the node, of the stage with most of them."""
        return max(
            sum(
                op.scope != "inner" or self.plan.inner > self.plan.per_node
                for op in self.plan.list_stage_operations(stage)
            )
            for stage in range(self.plan.stages)
        )

    def _find_crossed(self, number: int, op: Operation) -> NDArray[np.bool_]:
        """Find the groups with members both on a fault's node and on others, bool[groups]."""
        key = (number, op.scope, op.stages)
        if key not in self._crossed:
            here = _gather(self._node, op) == self.plan.faults[number].place
            self._crossed[key] = here.any(axis=1) & ~here.all(axis=1)
        return self._crossed[key]


def _gather(values: NDArray[np.int64], op: Operation) -> NDArray[np.int64]:
    """Return int64[..., groups, members] of int64[..., stage, outer, inner], for an operation."""
    chosen = values[..., list(op.stages), :, :]
    lead = values.shape[:-3]
    if op.scope == "world":
        return chosen.reshape(*lead, 1, -1)
    if op.scope == "inner":
        return chosen.reshape(*lead, -1, chosen.shape[-1])
    if op.scope == "outer":
        return chosen.swapaxes(-1, -2).reshape(*lead, -1, chosen.shape[-2])
    return np.moveaxis(chosen, -3, -1).reshape(*lead, -1, 2)


def _scatter(values: NDArray[np.int64], op: Operation, grouped: NDArray[np.int64]) -> None:
    """Store int64[..., groups, members] into int64[..., stage, outer, inner]."""
    lead, (outer, inner), count = values.shape[:-3], values.shape[-2:], len(op.stages)
    if op.scope == "outer":
        chosen = grouped.reshape(*lead, count, inner, outer).swapaxes(-1, -2)
    elif op.scope == "pair":
        chosen = np.moveaxis(grouped.reshape(*lead, outer, inner, 2), -1, -3)
    else:
        chosen = grouped.reshape(*lead, count, outer, inner)
    values[..., list(op.stages), :, :] = chosen
