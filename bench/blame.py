"""How many spans a second does blame settle, and how much memory does it keep between blocks?

Jobs of 128 ranks as `tests/synthetic` builds them, in blocks: one team (no chains), nodes and world
(a chain per step), a pipeline (chains through chains). Beside it reading and matching the same
spans, from where the analysis of the nodes keeps them.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from dataclasses import fields
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from synthetic.jobs import CATEGORIES, MS, Fault, Job
from synthetic.scenarios import LAYOUTS

from clusterprof.attribution.blame import settle_waits
from clusterprof.attribution.blame_books import Books
from clusterprof.timeline.collectives import Arrivals, in_memory, people_of
from clusterprof.timeline.collectives_directory import Person
from clusterprof.timeline.collectives_stream import Stream

RANKS = 128
BLOCK = 32_000
STEPS = {"data parallel": 8000, "nodes and world": 4000, "pipeline": 250}
TARGET = 2.0


def settled(job: Job) -> int:
    """Blame a job block by block; return the bytes kept between blocks."""
    books, carry = Books(job.ranks, CATEGORIES), None
    ops = job.ops
    edges = np.searchsorted(ops.first, np.arange(0, int(ops.first[-1]) + BLOCK, BLOCK))
    edges = np.minimum(edges, ops.team.size)
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
        block = ops.cut(begin, end)
        spent = job.spent[ops.first[begin] : ops.first[end]]
        blamed, carry = settle_waits(block, spent, spent, job.ranks, carry)
        books.add(block, blamed)
    assert int(books.felt_ns.sum()) == int(books.caused_ns.sum()) == int(ops.blocked_ns.sum())
    assert carry is not None
    kept = sum(getattr(carry.rows, one.name).nbytes for one in fields(carry.rows))
    return kept + sum(column.nbytes for column in carry.charges)


def arrivals(job: Job) -> Arrivals:
    """The spans that recorders of these ranks would have kept."""
    ops = job.ops
    op = np.repeat(np.arange(ops.team.size), np.diff(ops.first))
    code = np.unique(ops.team, return_inverse=True)[1]
    order = np.argsort(code, kind="stable")
    start = np.searchsorted(code[order], np.arange(code.max() + 1))
    number = np.empty_like(order)
    number[order] = np.arange(order.size) - start[code[order]]
    n = op.size
    flat = np.full(n, -1)
    return Arrivals(
        ops.rank, ops.rank, np.zeros(n, np.int64), ops.arrive_ns, ops.leave_ns, ops.blocked_ns,
        ops.leave_ns, ops.team[op] + 1, number[op], flat, np.ones(n, np.int64), flat, np.arange(n),
    )  # fmt: skip


def matched(people: list[Person]) -> None:
    """Read the rows of all ranks and match them, block by block."""
    rows = sum(
        one.operations.rank.size for one in Stream(people, {}, (0,), in_memory).stretches(BLOCK)
    )
    assert rows == sum(int(one.operations.counts.sum()) for one in people)


def cpu_s(do: object, rounds: int = 3) -> float:
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
        kept = settled(job)
        rate = spans / cpu_s(lambda job=job: settled(job)) / 1e6
        people = people_of(arrivals(job))
        matching = spans / cpu_s(lambda people=people: matched(people)) / 1e6
        tracemalloc.start()
        settled(job)
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        print(
            f"{layout:<16}{rate:6.2f} M spans per CPU-s (target {TARGET:.0f}); matching "
            f"{matching:5.2f} M; {kept / 2**20:6.1f} MiB kept between blocks, {peak:5.0f} at most"
        )


if __name__ == "__main__":
    main()
