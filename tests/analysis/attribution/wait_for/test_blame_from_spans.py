"""From spans on clocks that disagree to books: match, align, blame; also without some ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clusterprof.analysis.attribution.wait_for.totals import WaitTotals
from clusterprof.analysis.timeline.clock_sync import align_clocks
from tests.support.synthetic.clocks import draw_clocks
from tests.support.synthetic.jobs import MS, Fault, Job
from tests.support.synthetic.matching import CollectiveSpans, match_spans
from tests.support.synthetic.scenarios import LAYOUTS, make_data_parallel_job, make_hierarchical_job
from tests.support.synthetic.score import blame_job, rank_culprits
from tests.support.synthetic.spans import make_spans

RANKS, NODE = 16, 8


def on_their_clocks(job: Job) -> tuple[Job, CollectiveSpans]:
    """Read every time off the clock of its node; order by the clocks as they can be aligned."""
    ops = job.ops
    node = ops.rank // NODE
    clocks = draw_clocks(RANKS // NODE, np.random.default_rng(3))
    arrive, leave = clocks.read_clock(node, ops.arrive_ns), clocks.read_clock(node, ops.leave_ns)
    op = np.repeat(np.arange(ops.process_group.size), np.diff(ops.first))
    aligned = align_clocks(op, node, leave, RANKS // NODE)
    when = np.empty_like(leave)
    for number in range(RANKS // NODE):
        when[node == number] = aligned.to_common_ns(number, leave[node == number])
    shown = replace(ops, arrive_ns=arrive, leave_ns=leave, blocked_ns=leave - arrive)
    return replace(job, ops=shown), make_spans(job, arrive, leave, when)


def test_matched_and_aligned_spans_give_the_exact_blame() -> None:
    for layout in sorted(LAYOUTS):
        job = LAYOUTS[layout](RANKS, (Fault(5, 1),), (9 * MS,), 12, MS, 4)
        job, spans = on_their_clocks(job)
        matching = match_spans(spans)
        assert matching.unmatched == {}
        assert matching.operations.complete.all()
        again = blame_job(
            replace(job, ops=matching.operations, spent=job.spent[matching.operations.source])
        )
        np.testing.assert_array_equal(again.victim_ns, blame_job(job).victim_ns)
        np.testing.assert_array_equal(again.culprit_ns, blame_job(job).culprit_ns)
        assert (
            rank_culprits(again, None if layout != "pipeline" else np.arange(RANKS) % 4)[0][0] == 5
        )


def found_in(books: WaitTotals) -> set[tuple[int, str]]:
    return {(int(who), books.causes[cause]) for who, cause in zip(*np.nonzero(books.culprit_ns))}


def without(job: Job, rank: int) -> WaitTotals:
    """Blame a job of which one rank was not recorded, though its group was announced."""
    spans = make_spans(job, job.ops.arrive_ns, job.ops.leave_ns, job.ops.leave_ns)
    spans = spans.take(spans.rank != rank)
    groups = {
        (0, int(team) + 1): np.unique(
            job.ops.rank[np.repeat(job.ops.process_group, np.diff(job.ops.first)) == team]
        )
        for team in np.unique(job.ops.process_group)
    }
    matching = match_spans(spans, groups)
    return blame_job(
        replace(job, ops=matching.operations, spent=job.spent[matching.operations.source])
    )


def test_an_unrecorded_culprit_is_not_replaced_by_another_rank() -> None:
    for make in (make_data_parallel_job, make_hierarchical_job):
        job = make(RANKS, (Fault(5, 1),), (30 * MS,), seed=2)
        books = without(job, 5)
        unknown = int(books.victim_ns[:, books.causes.index("sync-unknown-peer")].sum())
        assert unknown > 0.4 * job.truth.waited_ns
        inside = [rank for rank, ns in rank_culprits(books) if ns > 0]
        assert inside == []
        assert {cause for (_, cause) in found_in(books)} <= {
            "net-transfer",
            "sync-unknown-peer",
            "unattributed",
        }
        network = books.victim_ns[:, books.causes.index("net-transfer")].sum()
        assert int(network) <= job.truth.transferred_ns


def test_an_unrecorded_victim_does_not_hide_the_culprit() -> None:
    job = make_data_parallel_job(RANKS, (Fault(5, 1),), (30 * MS,), jitter_ns=MS, seed=2)
    assert rank_culprits(without(job, 9))[0][0] == 5
