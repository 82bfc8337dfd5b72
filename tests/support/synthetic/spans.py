"""The spans that the recorders of a synthetic job would have kept, numbered as they are."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.timeline.collectives.operations import RECV, SEND
from tests.support.synthetic.jobs import Job
from tests.support.synthetic.matching import CollectiveSpans


def make_spans(
    job: Job, arrive: np.ndarray, leave: np.ndarray, when: np.ndarray
) -> CollectiveSpans:
    """Make the spans of a job, in any order; `source` is the row of `job.ops`."""
    ops = job.ops
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    number, seen = np.empty(op.size, np.int64), {}
    for i, team in enumerate(ops.process_group.tolist()):
        seen[team] = seen.get(team, -1) + 1
        number[op == i] = seen[team]
    # The lower rank of a pair sends, the other receives.
    pair = ops.operation[op] == SEND
    kind = np.where(pair & (np.arange(op.size) != ops.first[op]), RECV, ops.operation[op])
    other = ops.rank[
        np.where(kind == RECV, np.arange(op.size) - 1, np.arange(op.size) + 1) % op.size
    ]
    flat = np.zeros(op.size, np.int64)
    rows = np.random.default_rng(1).permutation(op.size)
    return CollectiveSpans(
        ops.rank,
        ops.rank,
        flat,
        arrive,
        leave,
        leave - arrive,
        when,
        ops.process_group[op] + 1,
        number,
        flat - 1,
        kind,
        np.where(pair, other, -1),
        np.arange(op.size),
    ).take(rows)
