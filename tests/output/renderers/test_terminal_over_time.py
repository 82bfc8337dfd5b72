"""What a reader sees of the run over time, and the tables that are asked for, line by line."""

from __future__ import annotations

import dataclasses

import pytest

from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.terminal_tables import render_table
from clusterprof.output.renderers.text.safety import convert_to_ascii, count_columns
from clusterprof.output.renderers.text.tables import TABLE_NAMES, Table, build_tables
from clusterprof.output.renderers.text.trend import (
    BARS,
    describe_bins,
    draw_sparklines,
    find_worst_bin,
    format_clock_time,
    split_run,
)
from clusterprof.report.history import WAITING_FOR_RANKS, History, RankHistory, SlowStep
from clusterprof.report.impact import CauseImpact, Impact
from clusterprof.report.model import Advice, Report
from tests.support.reports import ALL, S, make_clean_report, make_storage_report


def with_history() -> Report:
    """Two ranks of 290 s in steps: 4 stretches of 100 s, start-up in the first."""
    report = make_storage_report()
    first = RankHistory(
        0,
        (0, 90 * S, 100 * S, 100 * S),
        (("storage-local", (0, 9 * S, 50 * S, 10 * S)), (WAITING_FOR_RANKS, (0, 0, 20 * S, 0))),
        (),
    )
    second = RankHistory(
        1, (0, 90 * S, 100 * S, 100 * S), ((WAITING_FOR_RANKS, (0, 0, 10 * S, 0)),), ()
    )
    step = SlowStep(17, 205 * S, 3 * S, 0, (("storage-local", 2 * S), (WAITING_FOR_RANKS, S)))
    odd = SlowStep(3, 110 * S, S, None, ())
    history = History(0, 100 * S, 4, (first, second), slow_steps=(step, odd))
    return dataclasses.replace(report, history=history)


def test_parts_of_the_run_add_up_over_ranks() -> None:
    run = split_run(with_history(), 4)
    assert [(span.start_ns // S, span.end_ns // S) for span in run] == [
        (0, 100),
        (100, 200),
        (200, 300),
        (300, 400),
    ]
    assert [item.in_step_ns // S for item in run] == [0, 180, 200, 200]
    assert run[2].causes == (("storage-local", 50 * S), (WAITING_FOR_RANKS, 30 * S))
    assert [item.lost_ratio for item in run] == [None, 0.05, 0.4, 0.05]
    two = split_run(with_history(), 3)  # two stretches each, so that all parts are alike
    assert [(item.in_step_ns // S, item.lost_ns // S) for item in two] == [(180, 9), (400, 90)]


def test_bars_show_busy_and_lost_shares_of_each_part() -> None:
    # 0.95 and 0.6 of eight bars; 0.05 is the lowest, no time inside steps none.
    assert draw_sparklines(split_run(with_history(), 4)) == ("·█▅█", "·▁▄▁")


def test_only_an_outlier_is_named_as_the_worst_part() -> None:
    run = split_run(with_history(), 4)  # 5, 40 and 5 % lost of 180, 200 and 200 s: 17 % of all
    worst_bin = find_worst_bin(run)
    assert worst_bin is not None and worst_bin.start_ns == 200 * S
    assert find_worst_bin(run[2:3]) is None  # 40 % of all: 40 % is no more
    short = dataclasses.replace(run[2], in_step_ns=99 * S)  # of the fullest less than half
    assert find_worst_bin([run[1], short, run[3]]) is None


def test_the_course_of_the_run_is_described_in_words() -> None:
    assert describe_bins(with_history(), 4) == [
        "0.0 s to 100.0 s: outside steps",
        "100.0 s to 3:20: 5.0 % lost, mainly storage-local",
        "3:20 to 5:00: 40.0 % lost, mainly storage-local",
        "5:00 to 6:40: 5.0 % lost, mainly storage-local",
    ]
    nothing = History(None, 0, 0, (), why_missing="no steps")
    assert describe_bins(dataclasses.replace(make_clean_report(), history=nothing)) == [
        "not known: no steps"
    ]
    assert describe_bins(make_clean_report()) == []


@pytest.mark.parametrize(
    ("ns", "text"),
    [(0, "0.0 s"), (119_900_000_000, "119.9 s"), (245 * S, "4:05"), (3729 * S, "1:02:09")],
)
def test_times_of_the_run_are_formatted_as_a_clock(ns: int, text: str) -> None:
    assert format_clock_time(ns) == text


def test_the_screen_shows_bars_when_there_is_a_history() -> None:
    screen = Terminal(80).render(with_history()).splitlines()
    bars = [line for line in screen[:24] if line.startswith((" busy", " lost"))]
    assert bars == [
        f" busy   {'·' * 17}{'█' * 17}{'▅' * 17}{'█' * 17}",
        f" lost   {'·' * 17}{'▁' * 17}{'▄' * 17}{'▁' * 17}",
    ]
    assert "productive" not in screen[screen.index(bars[1]) + 1]


def test_ascii_output_keeps_line_widths() -> None:
    letters = Terminal(80, plain_letters=True).render(with_history())
    assert letters.isascii()
    marks = Terminal(80).render(with_history())
    assert [count_columns(line) for line in letters.splitlines()] == [
        count_columns(line) for line in marks.splitlines()
    ]
    assert convert_to_ascii(BARS + "░─≤µ") == "_.-:=+*#.-<u"
    assert convert_to_ascii("é") == "\\xe9"


def test_plain_output_has_no_bars_and_puts_advice_before_causes() -> None:
    lines = Plain().render(with_history()).splitlines()
    assert not set(BARS) & set("".join(lines))
    at = [i for i, line in enumerate(lines) if line.startswith(("Next:", "Over time:", "Cause 1:"))]
    assert at == sorted(at)
    assert lines[at[0]].startswith(f"Next: {make_storage_report().findings[0].advice[0].what}")


def test_specific_advice_precedes_general_advice_of_the_cause() -> None:
    report = make_storage_report()
    advice = Advice("Set prefetch to 4.", "3 of 4 waits", "prefetch_factor=4", "10 %", "again", "")
    first = dataclasses.replace(report.findings[0], advice=(advice,))
    job_impact = Impact(
        36.0, "EUR", 2.26, 300 * S, (CauseImpact(first.cause.id, 2.0, 30 * S, 20 * S, 40 * S),)
    )
    report = dataclasses.replace(report, findings=(first, *report.findings[1:]), impact=job_impact)
    screen = " ".join(" ".join(Terminal(80).render(report).splitlines()[:24]).split())
    assert (
        "Try next Set prefetch to 4. Change: prefetch_factor=4 Expected gain About 3.1 min"
        in screen
    )
    assert "of GPU time; the job ends 30.00 s sooner (10.0 %)." in screen
    assert "about 2.26 EUR at 36.00 EUR per GPU-hour" in screen
    assert "Next: Change: prefetch_factor=4" in Plain().render(report)


def test_tables_by_rank_step_and_time_match_expected_rows() -> None:
    report = with_history()
    by_rank, by_step, by_time = build_tables(report, ("rank", "step", "time"), 4)
    assert by_rank.heads[:5] == ("rank", "node", "in steps", "lost", "share")
    assert [row[0] for row in by_rank.rows] == ["1", "0"]  # by what they lost
    assert by_step == Table(
        "BY STEP, the slowest",
        ("step", "began", "took", "lost", "last to arrive", "mainly"),
        (
            ("17", "3:25", "3.00 s", "3.00 s", "rank 0 on node-a", "storage-local"),
            ("3", "110.0 s", "1.00 s", "0 ns", "-", "-"),
        ),
        2,
        "of 406 steps",
    )
    assert by_time.rows[1:3] == (
        ("100.0 s", "3:20", "3.0 min", "95.0 %", "9.00 s", "storage-local"),
        ("3:20", "5:00", "3.3 min", "60.0 %", "80.00 s", "storage-local"),
    )


def test_truncated_and_empty_tables_state_the_reason() -> None:
    (tables,) = build_tables(make_storage_report(), ("rank",), 1)
    assert tables.rest.startswith("and 1 ranks that ") and "--top 2 shows all" in tables.rest
    (none,) = build_tables(make_storage_report(), ("time",))
    assert (none.rows, none.rest) == ((), "the history of lost time was not computed")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("name", ALL)
def test_tables_fit_the_width(name: str, width: int) -> None:
    report = ALL[name]() if name != "storage" else with_history()
    for table in build_tables(report, TABLE_NAMES):
        lines = [line.plain for line in render_table(table, width)]
        assert all(count_columns(line) <= width for line in lines)
        assert len(lines) >= 1 + len(table.rows)


def test_every_text_output_includes_the_requested_tables() -> None:
    report = with_history()
    assert " BY NODE ─" in Terminal(80, by=("node",)).render(report)
    assert "| node | ranks | in steps |" in Markdown(by=("node",)).render(report)
    assert "By node: node node-a, ranks 2, in steps" in Plain(by=("node",)).render(report)
