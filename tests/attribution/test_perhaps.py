"""Less activity than usual is spinning only where another rank of the job shows none."""

from __future__ import annotations

import numpy as np
import pytest

from clusterprof.engine.perhaps import borne_out, kept_together

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
def test_one_rank_that_never_spins_shows_that_the_others_wait(
    late: list[int], others: list[int], expected: bool
) -> None:
    assert borne_out(steps(others, late, others)) is expected


def test_the_late_rank_may_change() -> None:
    # Rank 0 is late for 20 steps, then rank 1: over the whole run both span 2 s.
    first, second = [0] * 20 + [100] * 20, [100] * 20 + [0] * 20
    assert borne_out(steps(first, second, [100] * N))


def test_steps_are_compared_by_number() -> None:
    one, other = steps([0] * N, [100] * N)
    assert borne_out([tuple(part[5:] for part in one), tuple(part[:-5] for part in other), other])
    assert not borne_out([tuple(part[:1] for part in one), other])


@pytest.mark.parametrize(
    ("apart_steps", "own_steps", "expected"),
    [
        (1.5, 5.0, True),  # lost five steps more, and never fell back by two: it was waited for
        (1.5, 3.0, False),
        (2.5, 5.0, False),
    ],
)
def test_ranks_that_should_drift_apart_and_do_not_wait_for_each_other(
    apart_steps: float, own_steps: float, expected: bool
) -> None:
    number = np.arange(N)
    ends = (number + 1) * STEP_NS
    late = ends + np.where(number % 3 == 0, int(apart_steps * STEP_NS), 0)
    assert (
        kept_together([(number, ends), (number, late)], [0, int(own_steps * STEP_NS)]) is expected
    )
