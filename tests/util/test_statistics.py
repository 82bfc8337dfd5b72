"""Tails of the binomial distribution, and p-values of many tests."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest

from clusterprof.util.statistics import adjust_p_values, compute_binomial_tail


def exact_tail(trials: int, successes: int, p: Fraction) -> Fraction:
    return sum(
        (comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(successes, trials + 1)),
        Fraction(0),
    )


@pytest.mark.parametrize("trials", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("p", [Fraction(1, 100), Fraction(1, 3), Fraction(9, 10)])
def test_binomial_tails_match_exact_fractions(trials: int, p: Fraction) -> None:
    for successes in {0, 1, trials // 3, trials // 2, trials - 1, trials, trials + 1}:
        exact = float(exact_tail(trials, successes, p))
        assert compute_binomial_tail(trials, successes, float(p)) == pytest.approx(exact, rel=1e-9)


def test_binomial_tails_are_exact_at_the_edges() -> None:
    assert compute_binomial_tail(10, 0, 0.0) == 1.0
    assert compute_binomial_tail(10, 1, 0.0) == 0.0
    assert compute_binomial_tail(10, 10, 1.0) == 1.0
    assert compute_binomial_tail(0, 1, 0.5) == 0.0
    assert 0 <= compute_binomial_tail(5000, 5000, 0.01) < 1e-300


def test_the_tail_of_the_mean_chance_bounds_unequal_chances() -> None:
    """Chances 0, 0, 1/2, 1/2 and two successes: 1/4 exactly; by their mean, 1/4: 67/256."""
    assert compute_binomial_tail(4, 2, 0.25) == pytest.approx(67 / 256)
    assert 67 / 256 > 1 / 4


def test_holm_adjustment_matches_a_hand_computation() -> None:
    """Sorted .001 .01 .03 .04, times 4 3 2 1: .004 .03 .06 .04, of which the last may not fall."""
    assert adjust_p_values([0.04, 0.001, 0.03, 0.01]) == pytest.approx([0.06, 0.004, 0.06, 0.03])
    assert adjust_p_values([]) == []
    assert adjust_p_values([0.9, 1.0]) == [1.0, 1.0]
