"""Less activity than usual is spinning only where another rank of the job shows none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from clusterprof.analysis.attribution.accumulator import SHARE_SCALE, Accumulator
from clusterprof.analysis.attribution.rank.unprobed_rank import BUSY_WAIT
from clusterprof.analysis.cross_rank.implicit_collectives import (
    _is_busy_wait_confirmed,
    confirm_busy_wait,
    has_busy_wait,
)
from clusterprof.analysis.cross_rank.step_alignment import has_bounded_step_lead
from clusterprof.analysis.spill import IN_MEMORY

STEP_NS = 500_000_000
N = 40
"""Steps of half a second: ten stretches of four."""


def steps(*spun_ms: list[int]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    number = np.arange(N)
    return [(number, (number + 1) * STEP_NS, np.array(ms) * 1_000_000) for ms in spun_ms]


@pytest.mark.parametrize(
    ("late", "others", "expected"),
    [
        ([0] * N, [100] * N, True),
        ([40] * N, [100] * N, True),
        ([60] * N, [100] * N, False),  # more than half of it is the program's own
        ([100] * N, [100] * N, False),
        ([0] * N, [4] * N, False),  # 16 ms of 2 s
    ],
)
def test_busy_wait_is_confirmed_by_a_rank_that_never_spins(
    late: list[int], others: list[int], expected: bool
) -> None:
    assert confirm_busy_wait(steps(others, late, others)) is expected


def test_busy_wait_is_confirmed_when_the_late_rank_changes() -> None:
    # Rank 0 is late for 20 steps, then rank 1: over the whole run both span 2 s.
    first, second = [0] * 20 + [100] * 20, [100] * 20 + [0] * 20
    assert confirm_busy_wait(steps(first, second, [100] * N))


def test_steps_are_compared_by_number() -> None:
    first, other = steps([0] * N, [100] * N)
    assert confirm_busy_wait(
        [tuple(part[5:] for part in first), tuple(part[:-5] for part in other), other]
    )
    assert not confirm_busy_wait([tuple(part[:1] for part in first), other])


@pytest.mark.parametrize(("spun_ms", "expected"), [(0, False), (100, False), (101, True)])
def test_busy_wait_counts_above_a_hundredth_of_step_time(spun_ms: int, expected: bool) -> None:
    accumulator = Accumulator(
        totals={"in_step": 10_000_000_000},
        unexplained={BUSY_WAIT: spun_ms * 1_000_000 * SHARE_SCALE},
    )
    rank = SimpleNamespace(accumulator=accumulator, suspected_steps=None)
    assert has_busy_wait(rank) is expected  # type: ignore[arg-type]
    # Ranks of a job run one program: what another perhaps did it did then.
    other = SimpleNamespace(accumulator=Accumulator(), suspected_steps=None)
    assert not _is_busy_wait_confirmed([rank, other], IN_MEMORY)  # type: ignore[list-item]
    if expected:
        other.suspected_steps = object()  # is not read
        assert _is_busy_wait_confirmed([rank, other], IN_MEMORY)  # type: ignore[list-item]


def ends(late_ms: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Steps of 0.5 s, each ended by so much later, on a clock of its own."""
    return np.arange(N), (np.arange(N) + 1) * STEP_NS + np.array(late_ms) * 1_000_000


@pytest.mark.parametrize(
    ("late_steps", "own_steps", "spun", "expected"),
    [
        (2.2, 5.0, False, True),  # lost five steps more, and never fell far back: it was waited for
        (2.2, 3.0, False, False),
        (2.2, 0.0, True, True),  # devices span: they wait for somebody
        (4.2, 5.0, True, False),  # four steps behind the others
    ],
)
def test_waiting_ranks_within_a_few_steps_are_synchronous(
    late_steps: float, own_steps: float, spun: bool, expected: bool
) -> None:
    # The other rank's clock is 7 s ahead. Where it ends a step 2.2 steps late the first has ended
    # two more than it; one of its ends tells nothing, for usually it is in time.
    late = [0] * 15 + [int(late_steps * 500)] * 5 + [0] * 20
    number, other = ends(late)
    own_ns = [0, int(own_steps * STEP_NS)]
    both = [ends([0] * N), (number, other + 7_000_000_000)]
    assert has_bounded_step_lead(both, own_ns, spun) is expected


def test_ranks_with_correlated_step_lengths_are_synchronous() -> None:
    draw = np.random.default_rng(4)
    common, first, other = (np.cumsum(draw.integers(0, 60, N)) for _ in range(3))
    apart = draw.integers(0, 5, N)  # of ends that nobody waits for exactly
    alike = [ends(common.tolist()), ends((common + apart).tolist())]
    assert has_bounded_step_lead(alike, [0, 0])
    assert not has_bounded_step_lead([ends(first.tolist()), ends(other.tolist())], [0, 0])
    few = [(number[:20], end[:20]) for number, end in alike]
    assert not has_bounded_step_lead(few, [0, 0])
