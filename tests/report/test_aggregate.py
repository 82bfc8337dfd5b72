"""Sums of ranks by node, rack and group: exact, whatever is listed and however it is cut."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from clusterprof.report import aggregate
from clusterprof.report.history import History, Wait
from clusterprof.report.model import CulpritGroup, NodeFacts, RankLedger, RankSum, Report
from tests.support.cluster_report import S, make_cluster_report

FIELDS = ("window_ns", "unmeasured_ns", "outside_ns", "in_step_ns", "productive_ns", "lost_ns")


def test_up_to_512_ranks_are_all_listed() -> None:
    report = make_cluster_report(64, 8)
    assert aggregate.select_listed_ranks(report) == list(range(512))
    assert aggregate.sum_unlisted_ranks(report, range(512)) == ()


def test_above_512_ranks_only_notable_ranks_are_listed() -> None:
    # 576 ranks. Culprits: 27 of storage, 568-575 of preprocessing, the first 64 of the imbalance
    # of all. They lost most: 568-575 52 s each, 27 51 s, then 23 of those with 50 s + r ns.
    # The same 32 caused most.
    assert aggregate.select_listed_ranks(make_cluster_report(72, 8)) == [
        *range(64),
        *range(545, 576),
    ]


def test_ranks_of_the_longest_waits_are_listed() -> None:
    waits = tuple(Wait(0, 100 - k, 100 + k, 200 + k, "", None) for k in range(21))
    history = History(None, S, 1, (), waits)
    listed = aggregate.select_listed_ranks(replace(make_cluster_report(72, 8), history=history))
    assert set(range(100, 120)) | set(range(200, 220)) <= set(listed)
    assert 120 not in listed and 220 not in listed  # the 21st is one too many


def test_unlisted_ranks_are_summed_by_node() -> None:
    report = make_cluster_report(72, 8)
    sums = aggregate.sum_unlisted_ranks(report, aggregate.select_listed_ranks(report))
    # Ranks 64-544: 60 whole nodes, and the first rank of the node after them.
    assert [ranks.ranks for ranks in sums] == [8] * 60 + [1]
    # 30 storage + 12 transfer + 3 preprocessing + 4 imbalance + 1 unknown, and r ns of rank r.
    rest = 64 + 65 + 66 + 67 + 68 + 69 + 70 + 71
    assert sums[0] == RankSum(
        grouped_by="node",
        name="gpu-a09",
        ranks=8,
        steps=8 * 406,
        fewest_steps=406,
        lowest_coverage_ratio=0.998,
        window_ns=8 * 301 * S,
        unmeasured_ns=0,
        outside_ns=8 * S,
        in_step_ns=8 * 300 * S,
        productive_ns=8 * 250 * S - rest,
        lost_ns=8 * 50 * S + rest,
        buckets=(
            ("storage-remote", 8 * 30 * S),
            ("net-transfer", 8 * 12 * S),
            ("sync-imbalance", 8 * 4 * S),
            ("cpu-preprocess", 8 * 3 * S),
            ("unattributed", 8 * S + rest),
        ),
        outside_buckets=(("startup", 8 * S),),
        caused=(("sync-imbalance", 8 * 4 * S), ("unattributed", 8 * S + rest)),
    )


def test_racks_and_named_groups_sum_all_ranks() -> None:
    report = make_cluster_report(72, 8)
    nodes = tuple(
        replace(node, rack="leaf1" if at < 40 else "leaf2") for at, node in enumerate(report.nodes)
    )
    stages = (CulpritGroup("stage 0", (0, 1, 2)), CulpritGroup("stage 9", (9000,)))
    sums = aggregate.sum_groups(replace(report, nodes=nodes, groups=stages))
    assert [(ranks.grouped_by, ranks.name, ranks.ranks) for ranks in sums] == [
        ("rack", "leaf1", 320),
        ("rack", "leaf2", 256),
        ("group", "stage 0", 3),  # no rank of stage 9 was recorded
    ]
    assert sums[0].lost_ns + sums[1].lost_ns == report.lost_ns
    assert sums[2].lost_ns == 3 * 50 * S + 0 + 1 + 2


def test_ranks_with_a_duplicate_number_belong_to_no_group() -> None:
    report = make_cluster_report(72, 8)
    ranks = (*report.ranks[:-1], replace(report.ranks[-1], rank=0))
    twice = replace(report, ranks=ranks, groups=(CulpritGroup("stage 0", (0, 1)),))
    assert aggregate.sum_groups(twice) == ()


def test_unlisted_culprits_are_summed() -> None:
    imbalance = make_cluster_report(72, 8).findings[2]
    assert aggregate.sum_culprits(imbalance) == (576 - 64, 0, (576 - 64) * 4 * S)
    unknown = replace(imbalance.culprits[-1], others_ns=None)
    culprits = (*imbalance.culprits[:-1], unknown)
    assert aggregate.sum_culprits(replace(imbalance, culprits=culprits)) == (512, 0, None)


def test_an_unknown_coverage_makes_the_lowest_coverage_unknown() -> None:
    rank = make_cluster_report(1, 1).ranks[0]
    ranks = [rank, replace(rank, coverage_ratio=float("nan"))]
    assert aggregate.sum_ranks("node", "n", ranks).lowest_coverage_ratio is None


AMOUNTS = st.integers(0, 1 << 50)
BUCKETS = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), AMOUNTS), max_size=3)


@st.composite
def ledgers(draw: st.DrawFn) -> RankLedger:
    buckets = tuple(dict(draw(BUCKETS)).items())
    outside = tuple(dict(draw(BUCKETS)).items())
    lost, away = (sum(ns for _, ns in pairs) for pairs in (buckets, outside))
    productive, unmeasured = draw(AMOUNTS), draw(AMOUNTS)
    in_step = productive + lost
    return RankLedger(
        draw(st.sampled_from(["n1", "n2", "n3"])),
        draw(st.integers(0, 9)),
        1,
        "",
        "device-samples",
        in_step + away + unmeasured,
        unmeasured,
        away,
        in_step,
        productive,
        lost,
        buckets,
        outside,
        draw(st.integers(0, 1000)),
        draw(st.floats(0, 1)),
        tuple(dict(draw(BUCKETS)).items()),
        draw(AMOUNTS),
    )


def report_of(ranks: list[RankLedger]) -> Report:
    sums = {name: sum(getattr(rank, name) for rank in ranks) for name in FIELDS}
    nodes = tuple(NodeFacts(name, name, name, 1, 0, 0, None) for name in ("n1", "n2", "n3"))
    return Report(
        "r", False, nodes, tuple(ranks), **sums, **dict.fromkeys(EMPTY, ()), unattributed_ns=0
    )


EMPTY = ("findings", "unattributed_reasons", "outside_buckets", "metrics", "coverage_gaps")


@settings(max_examples=200, deadline=None)
@given(st.lists(ledgers(), min_size=1, max_size=30), st.data())
def test_listed_ranks_and_sums_equal_the_total_for_any_list(
    ranks: list[RankLedger], data: st.DataObject
) -> None:
    listed = sorted(data.draw(st.sets(st.sampled_from(range(len(ranks))))))
    report = report_of(ranks)
    kept = tuple(ranks[at] for at in listed)
    few = replace(report, ranks=kept, unlisted=aggregate.sum_unlisted_ranks(report, listed))
    assert few.rank_count == len(ranks)
    assert few.fewest_steps == min(rank.steps for rank in ranks)
    for name in (*FIELDS, "unobserved_ns", "steps"):
        assert sum(getattr(ledger, name) for ledger in few.ledgers) == sum(
            getattr(rank, name) for rank in ranks
        )
    for name in ("buckets", "outside_buckets", "caused"):
        assert aggregate.sum_amounts(
            getattr(ledger, name) for ledger in few.ledgers
        ) == aggregate.sum_amounts(getattr(rank, name) for rank in ranks)
    lows = [rank.coverage_ratio for rank in kept]
    lows += [ranks.lowest_coverage_ratio for ranks in few.unlisted]
    assert min(low for low in lows if low is not None) == min(rank.coverage_ratio for rank in ranks)
