"""What --since, --until, --steps and --by may say."""

from __future__ import annotations

import pytest

from clusterprof.analysis.node.selection import Instant, PartOfRun
from clusterprof.cli.common import parse_tables
from clusterprof.cli.runs import parse_part
from clusterprof.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        ("2min", 120),
        ("1h30m", 5400),
        ("1h 2m 3s", 3723),
        ("250ms", 0.25),
        ("4:05", 245),
        ("1:02:09", 3729),
        ("0:00.5", 0.5),
        (" 12.3 s ", 12.3),
    ],
)
def test_relative_times_count_from_the_start(text: str, seconds: float) -> None:
    asked = parse_part(text, None, None)
    assert asked == PartOfRun(Instant(round(seconds * 1e9)), description=f"--since {text}")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2026-01-31T12:00:00Z", 1_769_860_800), ("2026-01-31T13:00:00.5+01:00", 1_769_860_800.5)],
)
def test_wall_clock_times_are_parsed(text: str, seconds: float) -> None:
    assert parse_part(None, text, None).until == Instant(round(seconds * 1e9), is_wall=True)


@pytest.mark.parametrize("text", ["", "abc", "-5m", "1h30", "5 5", "4:5", "1e3", "nan", "9" * 40])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        parse_part(text, None, None)


@pytest.mark.parametrize(
    ("text", "bounds"), [("3:7", (3, 7)), ("3:", (3, None)), (":7", (None, 7)), ("0:1", (0, 1))]
)
def test_step_ranges_are_parsed(text: str, bounds: tuple[int | None, int | None]) -> None:
    asked = parse_part(None, None, text)
    assert (asked.first_step, asked.end_step, asked.whole) == (*bounds, False)


@pytest.mark.parametrize("text", ["", ":", "5", "a:b", "-1:3", "7:3", "3:3", "1:2:3"])
def test_invalid_step_ranges_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--steps"):
        parse_part(None, None, text)


def test_no_bounds_mean_the_whole_run_and_reversed_bounds_fail() -> None:
    assert parse_part(None, None, None).whole
    with pytest.raises(UsageError, match="--since 9s is not before --until 4s"):
        parse_part("9s", "4s", None)


def test_table_names_are_split_at_commas_and_repeated_options() -> None:
    assert parse_tables(["rank,node", "rank", "time"]) == ("rank", "node", "time")
    with pytest.raises(UsageError, match="unknown table 'nodes'; did you mean 'node'"):
        parse_tables(["nodes"])
