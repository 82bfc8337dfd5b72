"""What repeats in a series, by hand."""

from __future__ import annotations

import numpy as np

from clusterprof.analysis.timeline.series import MIN_CONFIDENT_ACF, estimate_period


def test_a_series_that_repeats_has_its_period() -> None:
    period = estimate_period(np.array([0.0, 1, 1, 0, 0, 0] * 40))
    assert period is not None
    assert period.samples == 6
    assert period.acf > 0.999


def test_a_period_between_samples_shows_at_its_multiple() -> None:
    # every 4.5 samples: 0.45 s at ten a second
    t = np.arange(600)
    period = estimate_period(np.cos(2 * np.pi * t / 4.5))
    assert period is not None
    assert (period.samples, period.acf > MIN_CONFIDENT_ACF) == (9.0, True)


def test_noise_and_flat_series_have_no_confident_period() -> None:
    noise = estimate_period(np.random.default_rng(1).normal(size=600))
    assert noise is None or noise.acf < 0.5
    assert estimate_period(np.ones(600)) is None
    assert estimate_period(np.array([0.0, 1.0] * 5)) is None
