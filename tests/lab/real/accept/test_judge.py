"""The stopwatches' truth, by hand, and what the judge makes of findings beside it."""

from __future__ import annotations

from typing import Any

from clusterprof_lab.real.accept.faults import (
    CONTENTION,
    NETWORK,
    PREPROCESSING,
    STORAGE,
    Expected,
    Scenario,
)
from clusterprof_lab.real.accept.judge import format_rows, format_summary, judge_findings
from clusterprof_lab.real.accept.truth import NOBODY, compute_shares, compute_truth

MS = 1_000_000
TIMES = ("asked_ns", "got_ns", "received_ns", "passed_ns", "arrived_ns", "left_ns")
DELAYS = ("asked_delay_ns", "got_delay_ns", "arrived_delay_ns", "left_delay_ns")


def printed(
    rank: int,
    times_ms: list[tuple[int, ...]],
    delays_ms: list[tuple[int, ...]],
    items_ms: list[tuple[int, ...]],
    chain: bool = False,
) -> dict[str, Any]:
    """What a rank prints; every row of times is a step, every row of items one of the loader's."""
    stamps = dict(zip(TIMES, ([MS * t for t in column] for column in zip(*times_ms))))
    stamps |= dict(zip(DELAYS, ([MS * t for t in column] for column in zip(*delays_ms))))
    columns = [[MS * t for t in column] for column in zip(*items_ms)] or [[]] * 5
    return {
        "rank": rank,
        "host": f"node{rank // 2}",
        "steps": len(times_ms),
        "chain": chain,
        "began_ns": 0,
        "total_ns": MS * times_ms[-1][-1],
        "stamps": stamps,
        "items": dict(zip(("begun", "read", "made", "read_delay", "decode_delay"), columns)),
    }


def test_a_data_wait_is_charged_to_worker_activities() -> None:
    """Rank 1 waits 80 ms for a batch, rank 0 not at all; both compute 100, then exchange for 20.

    Of the 80: 40 reading, 30 decoding of which a third without a CPU, 10 on the way, 4 of them
    because the main thread had no CPU. In the second step rank 0 leaves 5 ms later than rank 1,
    which is the network's, and nobody waits for anything else.
    """
    zero = printed(
        0,
        [(0, 0, 0, 0, 100, 200), (200, 200, 200, 200, 300, 310)],
        [(0, 0, 0, 0), (0, 0, 0, 0)],
        [],
    )
    item = printed(
        1,
        [(0, 80, 80, 80, 180, 195), (195, 195, 195, 195, 295, 310)],
        [(0, 4, 4, 4), (4, 4, 4, 4)],
        [(-5, 40, 70, 0, 10)],
    )
    result = compute_truth([zero, item])
    own = {
        ("storage-local", 1): 40,
        ("cpu-preprocess", 1): 20,
        ("cpu-contention", 1): 14,
        ("hand-over", 1): 6,
    }
    expected = {(*key, rank): ns for key, ns in own.items() for rank in (0, 1)}
    # 20 and 15 of the first exchange; in the second 10 each, and 5 that rank 1 waited.
    expected |= {("net-transfer", NOBODY, 0): 30, ("net-transfer", NOBODY, 1): 15 + 15}
    assert {(c, who, rank): ns / MS for c, who, rank, ns in result["lost"]} == expected
    assert [row["waited_for_others_ns"] / MS for row in result["ranks"]] == [80, 5]
    assert [row["kept_others_waiting_ns"] / MS for row in result["ranks"]] == [5, 80]
    assert [row["last_times"] for row in result["ranks"]] == [1, 1]
    assert compute_shares(result)["storage-local"] == {1: 80 / 620}


def test_a_chain_of_waits_is_charged_to_its_first_rank() -> None:
    """Rank 0 decodes for 60 ms, then sends for 10; rank 1 waits for it, rank 2 for rank 1.

    Rank 1 has received at 70 and sends until 80, when rank 2 has received. All compute 100; ranks
    1 and 2 come to the exchange at 180, rank 0 ten earlier: it waits for the network, as rank 2 has
    more of its transfers and nothing else. The exchange takes 20.
    """
    zero = printed(0, [(0, 60, 60, 70, 170, 200)], [(0, 0, 0, 0)], [(0, 0, 60, 0, 0)], chain=True)
    item = printed(1, [(0, 0, 70, 80, 180, 200)], [(0, 0, 0, 0)], [], chain=True)
    two = printed(2, [(0, 0, 80, 80, 180, 200)], [(0, 0, 0, 0)], [], chain=True)
    by_key = {(c, who, r): ns / MS for c, who, r, ns in compute_truth([zero, item, two])["lost"]}
    assert by_key == {
        ("cpu-preprocess", 0, 0): 60,  # its own
        ("cpu-preprocess", 0, 1): 60,  # until rank 0 began to send
        ("cpu-preprocess", 0, 2): 60,  # handed on: of its 70 until rank 1 began to send
        ("net-transfer", NOBODY, 0): 10 + 10 + 20,
        ("net-transfer", NOBODY, 1): 10 + 10 + 20,
        ("net-transfer", NOBODY, 2): 10 + 10 + 20,
    }


def finding(cause: str, share: float, *culprits: tuple[str, int]) -> dict[str, Any]:
    named = [{"node": node, "rank": rank} for node, rank in culprits]
    return {"cause": cause, "share_ratio": share, "culprits": named}


def stopwatches(*lost: tuple[str, int, float]) -> dict[str, Any]:
    """Four ranks of 250 ns each: shares are lost ns over 1,000."""
    ranks = [{"rank": rank, "host": f"node{rank // 2}", "total_ns": 250} for rank in range(4)]
    rows = [(cause, who, 0, round(1000 * share)) for cause, who, share in lost]
    return {"ranks": ranks, "lost": rows}


DISK = Scenario("disk", "", (Expected(STORAGE, nodes=frozenset({1})),))
TRUE_DISK = stopwatches(("storage-local", 2, 0.15), ("storage-local", 3, 0.05))


def test_a_first_finding_with_right_culprit_and_share_is_right() -> None:
    collected = [finding("storage-local", 0.22, ("node1", 3), ("node1", 2))]
    run = judge_findings(DISK, collected, TRUE_DISK)
    assert run.right and run.guilty == {2, 3}
    assert format_rows(2, run) == [
        "  2  disk           storage-local      node1 rank 3    22.0%   20.0%   +2.0  ok"
    ]


def test_a_wrong_share_a_wrong_order_and_a_wrong_rank_are_reported() -> None:
    collected = [
        finding("cpu-contention", 0.25, ("node1", 2)),
        finding("storage-local", 0.16, ("node0", 1)),
    ]
    run = judge_findings(DISK, collected, TRUE_DISK)
    assert run.lines[0].wrong == ("first is cpu-contention 25.0%", "not the culprit", "share")
    # Rank 2 has caused something, though not this; rank 1 has caused nothing.
    assert run.inversions == ("storage-local: node0 rank 1",)
    assert judge_findings(DISK, [], TRUE_DISK).lines[0].wrong == ("not found", "share")


def test_two_faults_must_both_be_found() -> None:
    both = Scenario("both", "", (*DISK.expected, Expected(NETWORK)))
    true = stopwatches(("storage-local", 2, 0.2), ("net-transfer", NOBODY, 0.1))
    storage = finding("storage-local", 0.2, ("node1", 2))
    collected = [storage, finding("net-transfer", 0.06), finding("net-link", 0.03)]
    assert judge_findings(
        both, collected, true
    ).right  # what several causes of the network say counts together
    assert judge_findings(both, collected[:2], true).lines[1].wrong == ("share",)
    assert judge_findings(both, [storage], true).lines[1].wrong == ("not found", "share")


def test_both_causes_of_slower_work_are_summed() -> None:
    slow = Scenario(
        "slow",
        "",
        (Expected(frozenset({"sync-imbalance", "sync-slow-compute"}), ranks=frozenset({3})),),
    )
    collected = [
        finding("sync-imbalance", 0.15, ("node1", 3)),
        finding("sync-slow-compute", 0.1, ("node1", 3)),
    ]
    run = judge_findings(slow, collected, stopwatches(("work", 3, 0.24)))
    assert run.right and (run.lines[0].share_ratio, run.lines[0].truth_ratio) == (0.25, 0.24)


def test_a_three_percent_finding_in_a_clean_run_is_wrong() -> None:
    clean = Scenario("clean", "")
    small = [finding("net-transfer", 0.029)]
    assert judge_findings(clean, small, stopwatches(("net-transfer", NOBODY, 0.029))).right
    large = [finding("cpu-contention", 0.031, ("node0", 0))]
    assert judge_findings(clean, large, stopwatches()).lines[0].wrong == ("3% or more",)
    disturbed = judge_findings(clean, large, stopwatches(("cpu-contention", 0, 0.04)))
    assert disturbed.lines[0].wrong == (
        "3% or more; so say the stopwatches: the machine was not clean",
    )
    assert not disturbed.inversions
    assert judge_findings(clean, large, stopwatches()).inversions == (
        "cpu-contention: node0 rank 0",
    )


def test_the_summary_counts_right_and_wrong_blame_per_rule() -> None:
    from dataclasses import replace

    right = judge_findings(DISK, [finding("storage-local", 0.2, ("node1", 2))], TRUE_DISK)
    wrong = judge_findings(DISK, [finding("storage-local", 0.2, ("node0", 0))], TRUE_DISK)
    clean = judge_findings(Scenario("clean", ""), [], stopwatches())
    runs = [
        replace(run, rules={"a rule": rank}) for run, rank in ((right, 2), (wrong, 3), (clean, 1))
    ]
    assert format_summary(runs) == [
        "2 of 3 runs right, 1 with a victim blamed",
        "who is to blame                  right    blamed though nobody was",
        "clusterprof                    1 of  2                     0 of  1",
        "a rule                         2 of  2                     1 of  1",
    ]


def test_every_scenario_expects_the_causes_of_its_fault() -> None:
    from clusterprof_lab.real.accept.faults import SCENARIOS, SYNCHRONIZATION

    expected = {
        scenario.name: [part.causes for part in scenario.expected] for scenario in SCENARIOS
    }
    assert expected == {
        "clean": [],
        "slow-disk": [STORAGE],
        "cpu-hogs": [CONTENTION],
        "slow-rank": [SYNCHRONIZATION],
        "slow-link": [NETWORK],
        "latency": [NETWORK],
        "loss": [NETWORK],
        "disk-and-link": [STORAGE, NETWORK],
        "chain": [PREPROCESSING],
    }
