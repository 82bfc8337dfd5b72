"""The words about time are those of the bars: series made by hand, and what both say of them."""

from __future__ import annotations

import dataclasses
import random

import pytest

from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text.trend import (
    BARS,
    describe_trend,
    detect_trend,
    draw_sparklines,
    split_run,
    summarize_trend,
)
from clusterprof.report.history import History, RankHistory
from clusterprof.report.model import Report
from tests.support.reports import S, make_storage_report


def over(percents: list[int], in_step: list[int] | None = None, each_ns: int = S) -> Report:
    """A rank that lost so much of each stretch."""
    in_step_ns = tuple(each_ns * value // 100 for value in in_step or [100] * len(percents))
    lost = tuple(ns * percent // 100 for ns, percent in zip(in_step_ns, percents))
    rank = RankHistory(0, in_step_ns, (("storage-local", lost),), ())
    return dataclasses.replace(
        make_storage_report(), history=History(0, each_ns, len(percents), (rank,))
    )


SERIES: dict[str, tuple[list[int], str]] = {
    "even": ([20] * 24, "steady"),
    "one odd part": ([20] * 10 + [90] + [20] * 13, "steady"),
    "within a bar": ([30, 40] * 12, "steady"),
    "up": (list(range(10, 58, 2)), "rising: 17.0 % lost at the beginning, 49.0 % at the end"),
    "down": (list(range(56, 8, -2)), "falling: 49.0 % lost at the beginning, 17.0 % at the end"),
    "from a third on": ([2] * 8 + [40] * 16, "from 8.0 s on: 40.0 % lost, otherwise 2.0 %"),
    "until a third": ([40] * 8 + [2] * 16, "until 8.0 s: 40.0 % lost, otherwise 2.0 %"),
    "in between": (
        [2] * 8 + [60] * 4 + [2] * 12,
        "from 8.0 s to 12.0 s: 60.0 % lost, otherwise 2.0 %",
    ),
    "but for": (
        [50] * 8 + [5] * 6 + [50] * 10,
        "all but 8.0 s to 14.0 s: 5.0 % lost, otherwise 50.0 %",
    ),
    "bursts": ([5, 5, 5, 60] * 6, "in bursts: up to 60.0 % lost, 5.0 % in the median"),
}


@pytest.mark.parametrize("name", SERIES)
def test_trend_kinds_match_the_series(name: str) -> None:
    percents, words = SERIES[name]
    trend = detect_trend(over(percents))
    assert trend is not None and describe_trend(trend) == words


@pytest.mark.parametrize("name", SERIES)
def test_the_trend_below_the_bars_matches_their_heights(name: str) -> None:
    report = over(SERIES[name][0])
    trend = detect_trend(report)
    assert trend is not None
    screen = Terminal(80).render(report).splitlines()
    at = next(i for i, line in enumerate(screen) if line.startswith(" lost "))
    assert summarize_trend(trend) in screen[at + 1]
    assert f"Over time: {describe_trend(trend)}" in Plain().render(report).splitlines()
    heights = [BARS.find(bar) for bar in draw_sparklines(split_run(report, 24))[1]]
    inner = sorted(heights)[1:-1]
    if trend.kind == "steady":
        assert max(inner) - min(inner) <= 1  # one bar, and that may be its edge
    else:
        assert max(inner) - min(inner) >= 2


def test_noise_around_an_even_level_is_a_steady_trend() -> None:
    dice = random.Random(7)
    for _ in range(50):
        trend = detect_trend(over([20 + dice.randint(-4, 4) for _ in range(24)]))
        assert trend is not None and trend.kind == "steady"


def test_time_outside_steps_and_short_runs_give_no_trend() -> None:
    begun = over([0, 0] + [30] * 22, in_step=[0, 10] + [100] * 22)
    trend = detect_trend(begun)
    assert trend is not None and (trend.kind, trend.start_ns) == ("steady", 2 * S)
    assert detect_trend(over([5, 5, 5, 40, 40, 40, 40])) is None  # seven parts
    assert detect_trend(make_storage_report()) is None


def test_a_very_short_run_shows_bars_and_times_in_milliseconds() -> None:
    report = over([2] * 8 + [40] * 16, each_ns=400_000)  # 9.6 ms
    trend = detect_trend(report)
    assert trend is not None and summarize_trend(trend) == "from 3.2 ms on"
    screen = Terminal(80, by=("time",)).render(report)
    assert "0.0 ms" in screen and "9.6 ms" in screen
    longer = over([2] * 8 + [40] * 16, each_ns=40_000_000)  # 0.96 s
    assert "from 320 ms on" in Terminal(80).render(longer)
