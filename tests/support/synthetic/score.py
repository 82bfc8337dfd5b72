"""Attribute the waits of synthetic jobs and check whether the culprit is named."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.attribution.wait_for.arrivals import is_point_to_point
from clusterprof.analysis.attribution.wait_for.blame import IMBALANCE, SLOW_COMPUTE, blame_waits
from clusterprof.analysis.attribution.wait_for.totals import WaitTotals
from clusterprof.analysis.timeline.collectives.operations import Operations
from tests.support.synthetic.jobs import CATEGORIES, Job
from tests.support.synthetic.scenarios import draw_fault


def blame_job(job: Job, cuts: tuple[int, ...] = ()) -> WaitTotals:
    """Attribute the waits of a job in blocks that begin at the given operations."""
    books, carry = WaitTotals(job.ranks, CATEGORIES), None
    edges = [0, *sorted(cuts), job.ops.process_group.size]
    for begin, end in itertools.pairwise(edges):
        ops = job.ops.take_range(begin, end)
        spent = job.spent[job.ops.first[begin] : job.ops.first[end]]
        blamed, carry = blame_waits(ops, spent, spent, job.ranks, carry)
        books.add(ops, blamed)
    return books


def rank_culprits(totals: WaitTotals, role: np.ndarray | None = None) -> list[tuple[int, int]]:
    """List (rank, ns caused) of all culprits, largest first, without waits that have no culprit.

    role: int64[ranks], peer group of each rank (find_peer_groups). If given, work counts only
    beyond the median of the peer group: the stages of a pipeline make the next stage wait by
    design.
    """
    total = totals.culprit_ns[:-1].sum(axis=1)
    if role is not None:
        columns = [totals.causes.index(IMBALANCE), totals.causes.index(SLOW_COMPUTE)]
        work = totals.culprit_ns[:-1, columns].sum(axis=1)
        for group in np.unique(role):
            peers = np.flatnonzero(role == group)
            median = int(np.sort(work[peers])[(peers.size - 1) // 2])
            total[peers] -= np.minimum(work[peers], median)
    order = np.argsort(-total, kind="stable")
    return [(int(rank), int(total[rank])) for rank in order if total[rank]]


def find_peer_groups(ops: Operations, ranks: int) -> np.ndarray:
    """Find the peers of each rank: the process group in which it met others most often.

    Members of one group do the same work.

    Point-to-point pairs are neighbors, not peers. Returns int64[ranks], a label per rank;
    -1 = the rank took part in point-to-point operations only.
    """
    size = np.diff(ops.first)
    labels, group = np.unique(ops.process_group, return_inverse=True)
    row_group = np.repeat(np.where(is_point_to_point(ops.operation), -1, group), size)
    met = row_group >= 0
    code, count = np.unique(ops.rank[met] * labels.size + row_group[met], return_counts=True)
    order = np.argsort(count, kind="stable")
    out = np.full(ranks, -1, np.int64)
    out[code[order] // labels.size] = code[order] % labels.size
    return out


@dataclass(frozen=True)
class Verdict:
    """How one job was judged."""

    right: bool
    """The rank at fault caused most."""
    leaf: bool
    """Its largest cause is the fault's; work may be called either way."""
    error: float
    """|caused - truth| of that rank, as a share of all waits."""


def judge_job(layout: str, ranks: int, seed: int, steps: int = 20) -> Verdict:
    """Judge one job with one fault, and a decoy in every other."""
    job = draw_fault(layout, ranks, seed, steps, decoy=seed % 2 == 1)
    books = blame_job(job)
    assert (
        int(books.victim_ns.sum()) == int(books.culprit_ns.sum()) == int(job.ops.blocked_ns.sum())
    )
    fault = job.faults[0]
    result = rank_culprits(books, find_peer_groups(job.ops, job.ranks))
    causes = books.culprit_ns[fault.rank]
    name = books.causes[int(np.argmax(causes))]
    wanted = CATEGORIES[fault.category]
    leaf = name == wanted or (wanted == "work" and name.startswith("sync-"))
    truth = job.culprits()[fault.rank]
    error = abs(int(causes.sum()) - truth) / max(job.truth.waited_ns, 1)
    return Verdict(bool(result) and result[0][0] == fault.rank, leaf, error)
