"""Rules of thumb, and of other tools, that name the rank at fault: blame is measured against them.

Each takes a job (`tests/support/synthetic/jobs.py`) as a perfect recorder would have seen it,
common clock included, and returns one rank. All their inputs are exact; none of them knows the
truth.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clusterprof.analysis.attribution.wait_for.arrivals import is_point_to_point
from tests.support.synthetic.jobs import WORK, Job


def find_slowest_compute(job: Job) -> int:
    """The rank whose compute time, added up over the whole job, is the longest."""
    return int(np.argmax(_sum_spent(job)[:, WORK]))


def find_last_arriver(job: Job) -> int:
    """The rank that most often came last to an operation, by a common clock."""
    ops = job.ops
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    order = np.lexsort((-ops.arrive_ns, op))
    return int(np.argmax(np.bincount(ops.rank[order[ops.first[:-1]]], minlength=job.ranks)))


def find_longest_waiter(job: Job) -> int:
    """The rank that was longest in operations, as if it were slow in them."""
    return int(np.argmax(np.bincount(job.ops.rank, weights=job.ops.blocked_ns)))


def find_above_stage_mean(job: Job) -> int:
    """Means of each stage per rank; the rank furthest above the mean of all, over all stages."""
    mean = split_stages(job).mean(axis=0)
    above = mean - mean.mean(axis=0)
    return int(np.unravel_index(np.argmax(above), above.shape)[0])


def find_above_step_mean(job: Job) -> int:
    """In each step and stage the slowest rank is charged what it is above the mean; the sum."""
    table = split_stages(job)
    above = table - table.mean(axis=1, keepdims=True)
    who = np.argmax(table, axis=1)
    amount = np.take_along_axis(above, who[:, None, :], axis=1)[:, 0, :]
    return int(np.argmax(np.bincount(who.ravel(), weights=amount.ravel(), minlength=job.ranks)))


def find_cumulative_stage_max(job: Job) -> int:
    """StageFrontier's increments, with one barrier per step, charged to who attains them.

    Only as far as they exceed the median rank's stage: a stage that takes all ranks the same time
    has no culprit.
    """
    table = split_stages(job)
    late = np.maximum(compute_increments(table) - np.median(table, axis=1), 0)
    who = np.argmax(np.cumsum(table, axis=2), axis=1)
    return int(np.argmax(np.bincount(who.ravel(), weights=late.ravel(), minlength=job.ranks)))


def compute_increments(table: np.ndarray) -> np.ndarray:
    """Return StageFrontier's increments [steps, stages], as its abstract defines them.

    d[r, k] is how long rank r was in stage k of a step, in order; F_k = max over r of the sum of
    d[r, j] for j <= k. The increments F_k - F_(k-1) add up to the step.
    """
    latest = np.cumsum(table, axis=2).max(axis=1)
    return np.diff(latest, axis=1, prepend=0)


RULES: dict[str, Callable[[Job], int]] = {
    "slowest total compute": find_slowest_compute,
    "last arriver": find_last_arriver,
    "longest waiter": find_longest_waiter,
    "per-stage mean": find_above_stage_mean,
    "per-stage max": find_above_step_mean,
    "stage frontier": find_cumulative_stage_max,
}


def split_stages(job: Job) -> np.ndarray:
    """Return [steps, ranks, stages] in ns: each category, then waiting in operations of the step.

    A step ends with an operation of the widest team of a rank; that operation itself is left out.
    """
    ops = job.ops
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    size = np.where(is_point_to_point(ops.operation), 0, np.diff(ops.first))
    team = np.unique(ops.process_group, return_inverse=True)[1]
    wide = np.zeros(team.max() + 1, np.int64)
    np.maximum.at(wide, team, size)
    widest = np.zeros(job.ranks, np.int64)
    np.maximum.at(widest, ops.rank, wide[team[op]])
    ends = wide[team[op]] == widest[ops.rank]
    order = np.lexsort((ops.leave_ns, ops.rank))
    spent, blocked, ends = job.spent[order], ops.blocked_ns[order], ends[order]
    per_rank = int(ends.sum()) // job.ranks
    waited = np.cumsum(blocked) - blocked
    sums = np.concatenate([spent, waited[:, None]], axis=1)[ends]
    sums = sums.reshape(job.ranks, per_rank, -1).astype(np.float64)
    # The waits of the operation that ends a step belong to no stage of the next one.
    own = blocked[ends].reshape(job.ranks, per_rank)
    table = np.diff(sums, axis=1)
    table[:, :, -1] -= own[:, :-1]
    return np.ascontiguousarray(table.transpose(1, 0, 2))


def _sum_spent(job: Job) -> np.ndarray:
    """What each rank had spent in all when it came to its last operation."""
    out = np.zeros((job.ranks, job.spent.shape[1]), np.int64)
    np.maximum.at(out, job.ops.rank, job.spent)
    return out
