"""Match the operations between ranks of a recording, and build the job that `rules.RULES` expect.

Without recorded operations, the end of a step stands for the operation in which all ranks meet: the
authors of such rules assume this of a synchronous job.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from baselines.recorded import LOADING
from baselines.tables import END, START, A, B, D, Rank, RecordingTables
from clusterprof.analysis.attribution.wait_for.arrivals import is_point_to_point
from clusterprof.analysis.timeline.collectives.operations import Operations
from clusterprof.probe import layout
from tests.support.synthetic.jobs import CATEGORIES, WORK, Job, Truth

_PAIRS = (layout.SEND, layout.RECV)
WORLD = -1
"""Group of the operations that stand for the ends of steps."""


@dataclass(frozen=True)
class Stay:
    """One rank in one operation, on true time."""

    rank: int
    arrive_ns: int
    leave_ns: int
    blocked_ns: int
    """How long its host was in it."""
    kind: int


Met = dict[tuple[int, ...], dict[int, Stay]]
"""(group, number, and the way of a message) -> member -> its stay."""


def find_training_start(rank: Rank) -> int:
    """Find when a rank's training began: with its first wait for data, else with its first step."""
    waits = rank.of(layout.DATA_WAIT)
    return int(waits[0, START] if len(waits) else rank.steps[0, 0])


@lru_cache(maxsize=1)
def match_operations(seen: RecordingTables) -> Met:
    """Match the operations after training began in which all members were recorded."""
    met: Met = defaultdict(dict)
    for number, rank in seen.ranks.items():
        table = rank.of(layout.COLLECTIVE)
        for row in table[table[:, START] >= find_training_start(rank)]:
            start, end, how = int(row[START]), int(row[END]), int(row[D])
            kind, form = how & layout.OPERATION_MASK, how >> layout.FORM_SHIFT & layout.FORM_MASK
            peer = (how >> layout.PEER_SHIFT & layout.PEER_MASK) - 1
            way = (number, peer) if kind == layout.SEND else (peer, number)
            key = (int(row[A]), int(row[B]), *(way if kind in _PAIRS else ()))
            stood = 0 if form == layout.ISSUE else end - start
            old = met[key].get(number)
            if old is not None:
                start, end = min(start, old.arrive_ns), max(end, old.leave_ns)
                stood += old.blocked_ns
            met[key][number] = Stay(number, start, end, stood, kind)
    members: dict[int, set[int]] = defaultdict(set)
    for key, stays in met.items():
        members[key[0]] |= stays.keys()
    for group, ranks in seen.groups.items():
        members[group] |= ranks & seen.ranks.keys()
    return {
        key: stays
        for key, stays in met.items()
        if key[1] >= 0 and stays.keys() == ({*key[2:]} if len(key) > 2 else members[key[0]])
    }


def make_step_barriers(seen: RecordingTables) -> Met:
    """Make an operation of all ranks for each step: arrive at its end, stay for the slowest."""
    count = min((len(rank.steps) for rank in seen.ranks.values()), default=0)
    met: Met = {}
    for step in range(count):
        ends = {number: int(rank.steps[step, 1]) for number, rank in seen.ranks.items()}
        met[(WORLD, step)] = {
            number: Stay(number, end, end, 0, layout.BARRIER) for number, end in ends.items()
        }
    return met


@lru_cache(maxsize=1)
def make_job(seen: RecordingTables) -> Job | None:
    """Convert the recording to the form of the rules; None when there is no rank or no step."""
    matched = match_operations(seen)
    pairs = {key: stays for key, stays in matched.items() if len(key) > 2}
    for met in (matched, {**pairs, **make_step_barriers(seen)}):
        if met:
            job = _make_job(seen, met)
            if _has_equal_counts(job):
                return job
    return None


def _has_equal_counts(job: Job) -> bool:
    """True when all ranks have as many operations of their widest team: those end their steps."""
    ops = job.ops
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    size = np.where(is_point_to_point(ops.operation), 0, np.diff(ops.first))[op]
    widest = np.zeros(job.ranks, np.int64)
    np.maximum.at(widest, ops.rank, size)
    ends = np.bincount(ops.rank[(size == widest[ops.rank]) & (size > 0)], minlength=job.ranks)
    return bool(len(set(ends.tolist())) == 1 and ends[0] > 1)


def _make_job(seen: RecordingTables, met: Met) -> Job:
    number_of = {rank: at for at, rank in enumerate(sorted(seen.ranks))}
    order = sorted(met, key=lambda key: (max(stay.leave_ns for stay in met[key].values()), key))
    stays = [stay for key in order for _, stay in sorted(met[key].items())]
    row = np.array([(number_of[s.rank], s.arrive_ns, s.leave_ns, s.blocked_ns) for s in stays])
    teams: dict[tuple[int, ...], int] = {}
    label = [teams.setdefault((key[0], *sorted(key[2:])), len(teams)) for key in order]
    kinds = np.array([next(iter(met[key].values())).kind for key in order], np.int64)
    size = [len(met[key]) for key in order]
    ops = Operations(
        np.concatenate([[0], np.cumsum(size)]),
        np.array(label),
        kinds,
        np.full(len(order), -1),
        np.ones(len(order), np.bool_),
        row[:, 0],
        row[:, 1],
        row[:, 2],
        row[:, 3],
        np.arange(len(row)),
    )
    spent = np.zeros((len(row), len(CATEGORIES)), np.int64)
    for rank, at in number_of.items():
        rows = np.flatnonzero(row[:, 0] == at)
        spent[np.ix_(rows, [LOADING, WORK])] = _sum_spent(seen.ranks[rank], row[rows])
    truth = Truth(np.zeros((len(number_of), 1), np.int64))
    return Job(ops, spent, truth, (), len(number_of), row[:, 2])


def _sum_spent(rank: Rank, row: np.ndarray) -> np.ndarray:
    """What it had spent on loading, and on all else but operations, when it arrived at each."""
    wait = rank.of(layout.DATA_WAIT)
    upto = np.concatenate([[0], np.cumsum(wait[:, END] - wait[:, START])])
    loading = upto[np.searchsorted(wait[:, END], row[:, 1], "right")]
    order = np.argsort(row[:, 2], kind="stable")
    blocked = np.zeros(len(row), np.int64)
    blocked[order] = np.cumsum(row[order, 3]) - row[order, 3]
    return np.stack([loading, row[:, 1] - find_training_start(rank) - blocked - loading], axis=1)
