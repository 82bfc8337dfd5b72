"""Synchronous jobs whose truth is known to the nanosecond, because they are built from it.

A `World` moves ranks through true time: they spend time on something, and they meet. Every
nanosecond of a fault is remembered as a delay of that fault, and a rank that waits takes over the
delays of those it waited for. The truth of a wait is then the difference between the delays of the
last to arrive and those of the one who waited: no comparison of durations, no looking back.

    t of a rank = t without any fault + sum of its delays        (always, to the nanosecond)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from clusterprof.analysis.timeline.collectives.operations import SEND, Operations

MS = 1_000_000
CATEGORIES = ("storage-local", "cpu-preprocess", "cpu-gc", "h2d-copy", "work")
WORK = CATEGORIES.index("work")
ALL_REDUCE = 1


@dataclass(frozen=True)
class Fault:
    """Something that happens to one rank."""

    rank: int
    category: int


@dataclass
class Truth:
    """What every rank waited because of each fault, and for reasons without a fault."""

    felt_ns: np.ndarray
    """[ranks, faults + 1]; the last column is jitter."""
    waited_ns: int = 0
    transferred_ns: int = 0


@dataclass
class Job:
    """What a perfect recorder would have seen, and the truth."""

    ops: Operations
    spent: np.ndarray
    """Sums by category at arrival (and leave), row by row of `ops`."""
    truth: Truth
    faults: tuple[Fault, ...]
    ranks: int
    true_leave_ns: np.ndarray

    def culprits(self) -> dict[int, int]:
        """Return what each faulty rank caused, from the truth."""
        out: dict[int, int] = {}
        for fault, ns in zip(self.faults, self.truth.felt_ns.sum(axis=0).tolist()):
            out[fault.rank] = out.get(fault.rank, 0) + ns
        return out


@dataclass
class _Meeting:
    team: list = field(default_factory=list)
    kind: list = field(default_factory=list)
    rank: list = field(default_factory=list)
    arrive: list = field(default_factory=list)
    leave: list = field(default_factory=list)
    true_leave: list = field(default_factory=list)
    spent: list = field(default_factory=list)
    size: list = field(default_factory=list)


class World:
    """Ranks in true time."""

    def __init__(
        self, ranks: int, faults: tuple[Fault, ...] = (), seed: int = 0, late_ns: int = 0
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.ranks, self.faults, self.late_ns = ranks, faults, late_ns
        self.decoy = -1
        self.t = np.zeros(ranks, np.int64)
        self.delay = np.zeros((ranks, len(faults)), np.int64)
        self.spent = np.zeros((ranks, len(CATEGORIES)), np.int64)
        self.truth = Truth(np.zeros((ranks, len(faults) + 1), np.int64))
        self._met = _Meeting()

    def spend(self, ns: np.ndarray | int, category: int = WORK, who: object = slice(None)) -> None:
        """Let ranks do what they would do without any fault, all alike or with jitter."""
        self.t[who] += ns
        self.spent[who, category] += ns

    def strike(self, fault: int, ns: int) -> None:
        """Let a fault cost its rank some time."""
        item = self.faults[fault]
        self.t[item.rank] += ns
        self.delay[item.rank, fault] += ns
        self.spent[item.rank, item.category] += ns

    def meet(
        self, groups: np.ndarray, teams: np.ndarray, transfer_ns: int, kind: int = ALL_REDUCE
    ) -> None:
        """Let the ranks of each row of `groups` leave an operation together."""
        arrive = self.t[groups]
        last = np.argmax(arrive, axis=1)
        who = groups[np.arange(len(groups)), last]
        done = arrive.max(axis=1) + transfer_ns
        wait = arrive.max(axis=1)[:, None] - arrive
        self._note(groups, who, wait)
        self.truth.transferred_ns += transfer_ns * groups.size
        late = np.zeros(groups.shape, np.int64)
        if self.late_ns:
            late = self.random.integers(0, self.late_ns, groups.shape)
        leave = done[:, None] + late
        met = self._met
        met.team.append(teams)
        met.kind.append(np.full(len(groups), kind))
        met.size.append(np.full(len(groups), groups.shape[1]))
        met.rank.append(groups.ravel())
        met.arrive.append(arrive.ravel())
        met.leave.append(leave.ravel())
        met.true_leave.append(np.repeat(done, groups.shape[1]))
        met.spent.append(self.spent[groups].reshape(-1, len(CATEGORIES)))
        self.delay[groups] = self.delay[who][:, None, :]
        self.t[groups] = leave

    def _note(self, groups: np.ndarray, who: np.ndarray, wait: np.ndarray) -> None:
        """Record why each member waited."""
        more = self.delay[who][:, None, :] - self.delay[groups]
        plain = wait - more.sum(axis=2)
        more = np.concatenate([np.maximum(more, 0), np.maximum(plain, 0)[:, :, None]], axis=2)
        total = np.maximum(more.sum(axis=2), 1)
        share = np.rint(more * (wait / total)[:, :, None]).astype(np.int64)
        share[:, :, -1] += wait - share.sum(axis=2)
        np.add.at(self.truth.felt_ns, groups, share)
        self.truth.waited_ns += int(wait.sum())

    def job(self) -> Job:
        """Return all operations in the order in which they ended, with the truth."""
        met = self._met
        team, kind, size = (np.concatenate(c) for c in (met.team, met.kind, met.size))
        rank, arrive, leave, true_leave = (
            np.concatenate(c) for c in (met.rank, met.arrive, met.leave, met.true_leave)
        )
        spent = np.concatenate(met.spent)
        op = np.repeat(np.arange(team.size), size)
        first = np.cumsum(size) - size
        order_of_ops = np.argsort(true_leave[first], kind="stable")
        number = np.empty_like(order_of_ops)
        number[order_of_ops] = np.arange(team.size)
        order = np.lexsort((rank, number[op]))
        size = size[order_of_ops]
        ops = Operations(
            np.concatenate([[0], np.cumsum(size)]),
            team[order_of_ops],
            kind[order_of_ops],
            np.full(team.size, -1),
            np.ones(team.size, np.bool_),
            rank[order],
            arrive[order],
            leave[order],
            leave[order] - arrive[order],
            np.arange(rank.size),
        )
        return Job(ops, spent[order], self.truth, self.faults, self.ranks, true_leave[order])


def make_pipeline_groups(ranks: int, stages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ranks as [replica, stage], the data parallel groups and their team numbers."""
    grid = np.arange(ranks).reshape(-1, stages)
    return grid, grid.T.copy(), np.arange(stages)


def send_to_stage(world: World, grid: np.ndarray, stage: int, to: int, transfer_ns: int) -> None:
    """Send from one stage to its neighbour in every replica."""
    pair = np.sort(grid[:, [stage, to]], axis=1)
    teams = 1_000_000 + pair[:, 0] * 10_000 + pair[:, 1]
    world.meet(pair, teams, transfer_ns, SEND)
