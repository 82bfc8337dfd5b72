"""What a mended network does not win, and what free CPUs win of transfers, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from clusterprof.analysis.attribution.accumulator import merge_accumulators
from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.network import comm_threads
from clusterprof.analysis.attribution.what_if import (
    ALL,
    BALANCED,
    DELAYS,
    EXTRA_COLUMNS,
    GAPS,
    TRANSFER,
    WhatIfSavings,
)
from clusterprof.analysis.findings.efficiency_metrics import GAPS_ON_CRITICAL_PATH
from clusterprof.analysis.findings.impact import HostOverhead, SavingsModel, estimate_host_overhead
from tests.support.rank_results import S, make_rank_result

MOVED, CONTENTION, QUOTA = "net-transfer", "cpu-contention", "cpu-throttled"


def moving(number: int, moved_s: int, on_cpu_s: int, delayed_s: int) -> RankResult:
    """A rank in operations for 50 of 100 s, whose movers sleep outside them."""
    ms = 1_000_000  # products are of microseconds
    length, inside = [100 * ms], [50 * ms]
    sums = {
        "movers_length": length[0],
        "movers_ll": 2 * (50 * ms) ** 2,
        "movers_lx": 50 * ms * inside[0],
        "movers_xx": inside[0] ** 2,
    }
    for name, used in ((comm_threads.ON_CPU, on_cpu_s), (comm_threads.DELAYED, delayed_s)):
        own = used * ms
        sums |= {name: own, f"{name}_l": own * 50 * ms, f"{name}_x": own * inside[0]}
    rank_result = make_rank_result(number, lost=40 * S, peers=True)
    partial = merge_accumulators(rank_result.accumulator, type(rank_result.accumulator)(sums))
    return replace(rank_result, accumulator=partial, victim_ns={MOVED: moved_s * S})


class Played:
    """A replay in which nothing but transfers of 2 s in each of 10 stretches is won."""

    causes = (CONTENTION, QUOTA)

    def __init__(self, before_s: int = 0) -> None:
        self.before_s = before_s

    def unreplayed_ns(self, job: int) -> int:
        return self.before_s * S

    def savings(self) -> dict[int, WhatIfSavings]:
        sooner = np.zeros((10, 2 + EXTRA_COLUMNS), np.int64)
        sooner[:, 0] = S  # contention, in waits for data
        sooner[:, ALL] = S
        sooner[:, TRANSFER] = 2 * S
        return {0: WhatIfSavings(np.full(10, 10 * S), sooner, False, False)}


def gained(ranks: list[RankResult], felt: dict[str, int], before_s: int = 0) -> SavingsModel:
    lines = tuple((id_, ns * S) for id_, ns in felt.items())
    first = replace(ranks[0], ledger=replace(ranks[0].ledger, buckets=lines))
    rest = [replace(rank, ledger=replace(rank.ledger, buckets=())) for rank in ranks[1:]]
    return SavingsModel([first, *rest], cast(Any, Played(before_s)))


def test_the_slowest_moving_rank_sets_the_host_overhead() -> None:
    ranks = [moving(0, 20, 2, 1), moving(1, 20, 1, 5), replace(make_rank_result(2), victim_ns={})]
    host_overhead = estimate_host_overhead(ranks)
    assert (host_overhead.on_cpu_part, host_overhead.delayed_part) == pytest.approx((0.05, 0.25))
    assert host_overhead.total == pytest.approx(0.3)
    full = estimate_host_overhead([moving(0, 4, 3, 2)])  # more than the transfers took: all of them
    assert (full.on_cpu_part, full.delayed_part) == pytest.approx((0.5, 0.5))
    assert estimate_host_overhead([make_rank_result(0)]) == HostOverhead()


def test_cpu_waits_of_transfers_follow_their_cpu_cause() -> None:
    host_overhead = HostOverhead(0.1, 0.4)
    felt = {CONTENTION: 30, QUOTA: 10, "storage-local": 60}
    assert host_overhead.get_delayed_part([CONTENTION], felt) == pytest.approx(0.3)
    assert host_overhead.get_delayed_part([CONTENTION, QUOTA], felt) == pytest.approx(0.4)
    assert (
        host_overhead.get_delayed_part(["storage-local"], felt)
        == host_overhead.get_delayed_part([QUOTA], {})
        == 0
    )


def test_network_savings_exclude_the_host_overhead_of_transfers() -> None:
    # 20 s of transfers: of those of rank 1 the movers worked 1 s and waited 5 s for a CPU
    ranks = [moving(0, 20, 2, 1), moving(1, 20, 1, 5)]
    known = gained(ranks, {MOVED: 40, CONTENTION: 10})
    assert known.estimate(MOVED, ()).ns == round(20 * S * 0.7)
    # 10 s of the contention itself, and the quarter of the transfers
    assert known.estimate(CONTENTION, (CONTENTION,)).ns == 15 * S
    assert known.estimate_all([(CONTENTION, (CONTENTION,))]).ns == 15 * S
    both = [(CONTENTION, (CONTENTION,)), (MOVED, (MOVED,))]
    assert known.estimate_all(both).ns == 10 * S + round(20 * S * 0.95)


def test_savings_of_a_network_fault_exclude_host_overhead() -> None:
    ranks = [moving(0, 20, 2, 1), moving(1, 20, 1, 5)]
    known = gained(ranks, {MOVED: 10, "net-link": 30})
    assert known.estimate("net-link", ("net-link",)).ns == 15 * S  # three quarters of 20 s
    assert known.estimate(MOVED, ()).ns == round(20 * S * 0.25 * 0.7)


def test_time_after_the_last_operation_saves_at_the_same_rate() -> None:
    # 110 s in steps, 100 s between operations: 4 s before the first, of which all that was lost is
    # in the first; behind the last as much was lost in 6 s as in the 104
    long = [
        replace(rank_result, ledger=replace(rank_result.ledger, in_step_ns=110 * S))
        for rank_result in (moving(0, 20, 2, 1), moving(1, 20, 1, 5))
    ]
    known = gained(long, {MOVED: 40}, before_s=4)
    assert known.estimate(CONTENTION, (CONTENTION,)).ns == round(10 * S * 110 / 104)
    assert known.estimate(MOVED, ()).ns == round(20 * S * 0.7)  # data move in operations alone
    assert gained(long, {}, before_s=40).estimate(CONTENTION, (CONTENTION,)).ns == 10 * S


def test_straggler_slowdown_is_withheld_for_gaps_on_the_critical_path() -> None:
    class Gapped(Played):
        gap_s = 0.0

        def savings(self) -> dict[int, WhatIfSavings]:
            sooner = np.zeros((10, 2 + EXTRA_COLUMNS), np.int64)
            sooner[:, GAPS] = round(self.gap_s * S)
            sooner[:, DELAYS], sooner[:, BALANCED] = 2 * S, 6 * S
            return {0: WhatIfSavings(np.full(10, 10 * S), sooner, False, True)}

    whatif = Gapped()
    ranks = [moving(0, 20, 2, 1), moving(1, 20, 1, 5)]
    # of 10 s each: 8 s without delays, 4 s with balanced work
    assert SavingsModel(ranks, cast(Any, whatif)).compute_straggler_slowdown() == (2.0, "")
    whatif.gap_s = 0.6
    why = SavingsModel(ranks, cast(Any, whatif)).compute_straggler_slowdown()
    assert why == (None, GAPS_ON_CRITICAL_PATH)
