"""Put jobs through blame and see whether it names who was at fault."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from clusterprof.analysis.attribution.wait_for.blame import blame_waits
from clusterprof.analysis.attribution.wait_for.totals import WaitTotals, find_peer_groups
from tests.support.synthetic.jobs import CATEGORIES, Job
from tests.support.synthetic.scenarios import any_fault


def booked(job: Job, cuts: tuple[int, ...] = ()) -> WaitTotals:
    """Blame a job in blocks that begin at the given operations."""
    books, carry = WaitTotals(job.ranks, CATEGORIES), None
    edges = [0, *sorted(cuts), job.ops.process_group.size]
    for begin, end in itertools.pairwise(edges):
        ops = job.ops.take_range(begin, end)
        spent = job.spent[job.ops.first[begin] : job.ops.first[end]]
        blamed, carry = blame_waits(ops, spent, spent, job.ranks, carry)
        books.add(ops, blamed)
    return books


@dataclass(frozen=True)
class Verdict:
    """How one job was judged."""

    right: bool
    """The rank at fault caused most."""
    leaf: bool
    """Its largest cause is the fault's; work may be called either way."""
    error: float
    """|caused - truth| of that rank, as a share of all waits."""


def judged(layout: str, ranks: int, seed: int, steps: int = 20) -> Verdict:
    """Judge one job with one fault, and a decoy in every other."""
    job = any_fault(layout, ranks, seed, steps, decoy=seed % 2 == 1)
    books = booked(job)
    assert (
        int(books.victim_ns.sum()) == int(books.culprit_ns.sum()) == int(job.ops.blocked_ns.sum())
    )
    fault = job.faults[0]
    result = books.culprits(find_peer_groups(job.ops, job.ranks))
    causes = books.culprit_ns[fault.rank]
    name = books.causes[int(np.argmax(causes))]
    wanted = CATEGORIES[fault.category]
    leaf = name == wanted or (wanted == "work" and name.startswith("sync-"))
    truth = job.culprits()[fault.rank]
    error = abs(int(causes.sum()) - truth) / max(job.truth.waited_ns, 1)
    return Verdict(bool(result) and result[0][0] == fault.rank, leaf, error)
