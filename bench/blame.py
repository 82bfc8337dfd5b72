"""How many spans a second does blame settle, and how much memory does it keep between blocks?

Jobs of 128 ranks as `tests/support/synthetic` builds them, in blocks: one group (no chains), nodes
and world (a chain per step), a pipeline (chains through chains). Reading and matching the same
spans, from where the analysis of the nodes keeps them, is measured as well.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from dataclasses import fields
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from clusterprof.analysis.attribution.wait_for.blame import blame_waits
from clusterprof.analysis.attribution.wait_for.totals import WaitTotals
from clusterprof.analysis.timeline.collectives.matching import RankEntry
from clusterprof.analysis.timeline.collectives.stream import OperationStream
from tests.support.synthetic.jobs import CATEGORIES, MS, Fault, Job
from tests.support.synthetic.matching import CollectiveSpans, build_rank_entries, get_block
from tests.support.synthetic.scenarios import LAYOUTS

RANKS = 128
BLOCK = 32_000
STEPS = {"data parallel": 8000, "nodes and world": 4000, "pipeline": 250}
TARGET = 2.0


def settle_job(job: Job) -> int:
    """Blame a job block by block; return the bytes kept between blocks."""
    books, carry = WaitTotals(job.ranks, CATEGORIES), None
    ops = job.ops
    edges = np.searchsorted(ops.first, np.arange(0, int(ops.first[-1]) + BLOCK, BLOCK))
    edges = np.minimum(edges, ops.process_group.size)
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
        block = ops.take_range(begin, end)
        spent = job.spent[ops.first[begin] : ops.first[end]]
        blamed, carry = blame_waits(block, spent, spent, job.ranks, carry)
        books.add(block, blamed)
    assert int(books.victim_ns.sum()) == int(books.culprit_ns.sum()) == int(ops.blocked_ns.sum())
    assert carry is not None
    kept = sum(getattr(carry.rows, field.name).nbytes for field in fields(carry.rows))
    return kept + sum(column.nbytes for column in carry.entries)


def make_spans(job: Job) -> CollectiveSpans:
    """The spans that recorders of these ranks would have kept."""
    ops = job.ops
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    code = np.unique(ops.process_group, return_inverse=True)[1]
    order = np.argsort(code, kind="stable")
    start = np.searchsorted(code[order], np.arange(code.max() + 1))
    number = np.empty_like(order)
    number[order] = np.arange(order.size) - start[code[order]]
    n = op.size
    flat = np.full(n, -1)
    return CollectiveSpans(
        ops.rank,
        ops.rank,
        np.zeros(n, np.int64),
        ops.arrive_ns,
        ops.leave_ns,
        ops.blocked_ns,
        ops.leave_ns,
        ops.process_group[op] + 1,
        number[op],
        flat,
        np.ones(n, np.int64),
        flat,
        np.arange(n),
    )


def match_ranks(ranks: list[RankEntry]) -> None:
    """Read the rows of all ranks and match them, block by block."""
    rows = sum(
        read_batch.operations.rank.size
        for read_batch in OperationStream(ranks, {}, (0,), get_block).read_batches(BLOCK)
    )
    assert rows == sum(int(rank.operations.counts.sum()) for rank in ranks)


def measure_cpu_s(do: object, rounds: int = 3) -> float:
    """Least CPU time of a few rounds: the machine is shared."""
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        do()  # type: ignore[operator]
        best = min(best, time.process_time() - began)
    return best


def main() -> None:
    """Print one line per layout."""
    for layout, steps in STEPS.items():
        job = LAYOUTS[layout](RANKS, (Fault(5, 0),), (8 * MS,), steps, MS, 1, 0.5)
        spans = job.ops.rank.size
        kept = settle_job(job)
        rate = spans / measure_cpu_s(lambda job=job: settle_job(job)) / 1e6
        ranks = build_rank_entries(make_spans(job))
        matching = spans / measure_cpu_s(lambda ranks=ranks: match_ranks(ranks)) / 1e6
        tracemalloc.start()
        settle_job(job)
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        print(
            f"{layout:<16}{rate:6.2f} M spans per CPU-s (target {TARGET:.0f}); matching "
            f"{matching:5.2f} M; {kept / 2**20:6.1f} MiB kept between blocks, {peak:5.0f} at most"
        )


if __name__ == "__main__":
    main()
