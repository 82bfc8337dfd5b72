"""Two ranks leave an operation apart: what one comes late by then is the network's, not its own.

rank 0   leave |== work 100 ==| arrive ------- 50 ------ | leave
rank 1              30 leave |== work 100 ==| arrive 20  | leave
"""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.analysis.attribution.wait_for.blame import blame_waits
from clusterprof.analysis.attribution.wait_for.totals import WaitTotals
from clusterprof.analysis.timeline.collectives.operations import Operations

CATEGORIES = ("storage-local", "work")
ALL_REDUCE = 1


def felt_and_caused(
    come: tuple[int, int], spent: tuple[tuple[int, int], tuple[int, int]], gone: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Rank 0 leaves a first operation at 0, rank 1 at 30; then both come to one more and leave it.

    `spent`: of each rank since, by category. Returns what rank 0 felt there, what rank 1 caused.
    """
    arrive, leave = np.array([-10, -10, *come]), np.array([0, 30, *gone])
    ops = Operations(
        np.array([0, 2, 4]),
        np.array([1, 1]),
        np.full(2, ALL_REDUCE),
        np.full(2, -1),
        np.ones(2, np.bool_),
        np.array([0, 1, 0, 1]),
        arrive,
        leave,
        leave - arrive,
        np.arange(4),
    )
    at = np.array([(0, 0), (0, 0), *spent])
    blamed, _ = blame_waits(ops, at, at, 2)
    books = WaitTotals(2, CATEGORIES)
    books.add(ops, blamed)
    assert books.victim_ns.sum() == books.culprit_ns.sum() == ops.blocked_ns.sum()
    felt = dict(zip(books.causes, books.victim_ns[0].tolist()))
    felt["net-transfer"] -= 10  # of the first operation
    caused = dict(zip(books.causes, books.culprit_ns[1].tolist()))
    return {c: ns for c, ns in felt.items() if ns}, {c: ns for c, ns in caused.items() if ns}


def test_late_arrival_after_a_late_leave_is_transfer() -> None:
    felt, caused = felt_and_caused((100, 130), ((0, 100), (0, 100)), (150, 150))
    assert felt == {"net-transfer": 50}  # 30 until rank 1 came, 20 after it
    assert caused == {}


def test_own_delay_of_a_late_leaver_is_still_blamed() -> None:
    # Rank 1 comes another 15 later: 10 of them reading, 5 that nothing explains.
    felt, caused = felt_and_caused((100, 145), ((0, 100), (10, 100)), (165, 165))
    assert felt == {"storage-local": 10, "unattributed": 5, "net-transfer": 30 + 20}
    assert caused == {"storage-local": 10, "unattributed": 5}


@pytest.mark.parametrize("gone", [(150, 150), (170, 150)])
def test_leaving_after_the_last_rank_is_transfer(gone: tuple[int, int]) -> None:
    felt, caused = felt_and_caused((100, 130), ((0, 100), (0, 100)), gone)
    assert (felt, caused) == ({"net-transfer": gone[0] - 100}, {})
