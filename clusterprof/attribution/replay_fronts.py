"""What the replay asks of a block: its fronts, where stretches end, whose work is uneven."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from clusterprof.attribution.blame_rows import is_pair
from clusterprof.timeline.model import Float, Int
from clusterprof.timeline.operations import Operations, mixed

CLOSE_FRONTS = 4
BINS_PER_BLOCK = 16


def by_rank(ranks: int, rank: Int, wait: Int, own: Int) -> tuple[Int, Int]:
    """Sum up what each rank waited, int64[ranks], and what it lost, int64[ranks, columns]."""
    waited = np.bincount(rank, wait, ranks).astype(np.int64)
    lost = np.stack([np.bincount(rank, column, ranks) for column in own.T], axis=1)
    return waited, lost.astype(np.int64)


def only(ops: Operations, which: NDArray[np.bool_], rows: Int) -> Operations:
    """Return some of the operations; `rows` are theirs."""
    size = np.diff(ops.first)[which]
    return replace(
        ops,
        first=np.append(0, np.cumsum(size)),
        team=ops.team[which], operation=ops.operation[which], bytes=ops.bytes[which],
        complete=ops.complete[which],
        **{
            name: getattr(ops, name)[rows]
            for name in ("rank", "arrive_ns", "leave_ns", "blocked_ns", "source")
        },
        on_device=ops.on_device[rows] if ops.on_device.size else ops.on_device,
    )  # fmt: skip


def uneven(less: Int, ops: Operations, job: Int) -> Int:
    """Return by how much each row's work is off what it would be were it even.

    `less`: how much less than the last to come each had worked. What varies from operation to
    operation is shared evenly; a rank that has more all the time has as much as the lower middle
    one. Negative where a rank would get more to do.
    """
    size = np.diff(ops.first)
    op = np.repeat(np.arange(size.size), size)
    off = np.add.reduceat(less, ops.first[:-1])[op] / size[op] - less
    rows = np.bincount(ops.rank, minlength=job.size)
    level = np.bincount(ops.rank, off, job.size) / np.maximum(rows, 1)
    usual = np.zeros(job.size)
    for number in np.unique(job[ops.rank]).tolist():
        mine = np.flatnonzero((job == number) & (rows > 0))
        usual[mine] = np.sort(level[mine])[(mine.size - 1) // 2]
    return np.rint(off - usual[ops.rank]).astype(np.int64)


def usual_work(ops: Operations, work: Int) -> Float:
    """Return float64[n]: the mean work of a row's rank before an operation of this team and kind
    that comes after one of the same team and kind as here."""
    op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))
    here = mixed(ops.team[op], ops.operation[op])
    order = np.argsort(ops.rank, kind="stable")
    before = np.zeros_like(here)
    before[order[1:]] = np.where(ops.rank[order[1:]] == ops.rank[order[:-1]], here[order[:-1]], 0)
    _, which = np.unique(mixed(ops.rank, before, here), return_inverse=True)
    mean: Float = np.bincount(which, work) / np.bincount(which)
    return mean[which]


def slow_transfers(ops: Operations, moved: Int) -> Int:
    """Return int64[m]: how much longer than the middle one of its kind each transfer took."""
    took = np.minimum.reduceat(moved, ops.first[:-1])
    _, which = np.unique(mixed(ops.operation, np.diff(ops.first), ops.bytes), return_inverse=True)
    order = np.lexsort((took, which))
    count = np.bincount(which)
    middle = took[order[np.cumsum(count) - count + (count - 1) // 2]]
    return np.asarray(took - middle[which], np.int64)


def ends(ops: Operations, front: Int) -> frozenset[int]:
    """Return the fronts after which a stretch ends: where ranks have just met in teams, if they do
    and do not only send to each other; and the last."""
    last = int(front.max())
    met = np.unique(front[~is_pair(ops.operation)])
    # Of several that are close together the last: teams side by side.
    met = met[np.append(np.diff(met) > CLOSE_FRONTS, True)] if met.size else np.arange(last + 1)
    some = met[np.unique(np.linspace(0, met.size, BINS_PER_BLOCK + 1)[1:].astype(np.int64) - 1)]
    return frozenset([*some.tolist(), last])


def fronts_of(ops: Operations, ranks: int) -> Int:
    """Return for each operation in which front it can be played: after all that it waits for."""
    last = [-1] * ranks
    out = []
    rank, first = ops.rank.tolist(), ops.first.tolist()
    for begin, end in pairwise(first):
        members = rank[begin:end]
        front = 1 + max(map(last.__getitem__, members))
        for one in members:
            last[one] = front
        out.append(front)
    return np.array(out, np.int64)
