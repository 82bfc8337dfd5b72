"""Lines of code in words: short names of files, WHERE, and lost time by line."""

from __future__ import annotations

import dataclasses
import math

import pytest

from clusterprof.output.renderers.json import Json
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import HEAD_LINES, Terminal
from clusterprof.output.renderers.text import code
from clusterprof.output.renderers.text.tables import build_tables
from clusterprof.report.code import CodeLine, CodeLocation, CodeProfile, StackTime
from clusterprof.report.model import Report
from tests.support.code_profiles import (
    AUGMENT,
    COLLATE,
    LINES,
    MAIN,
    OTHER_UTILS,
    PROFILE,
    RESIZE,
    S,
    add_code_profile,
    add_training_thread_line,
    make_report_with_code,
)
from tests.support.reports import ALL, make_clean_report, make_storage_report

SITE = "site-packages"
WHERE = "train.py:42 in Images.augment → PIL/Image.py:2450 Image.resize: 71 % ± 4 of it"


def names_of(*files: str) -> dict[str, str]:
    profile = CodeProfile(tuple(CodeLocation(file, 1, "f") for file in files))
    return code.build_file_names(dataclasses.replace(make_clean_report(), code=profile))


def test_file_names_show_the_shortest_unique_path() -> None:
    files = ("/a/b/train.py", "/a/b/x/utils.py", "/a/c/x/utils.py", "/a/c/y/utils.py")
    assert list(names_of(*files).values()) == [
        "train.py",
        "y/utils.py",  # distinct with two parts already
        "b/x/utils.py",
        "c/x/utils.py",
    ]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (f"/venv/lib/python3.12/{SITE}/PIL/Image.py", "PIL/Image.py"),
        ("/usr/lib/python3/dist-packages/yaml/reader.py", "yaml/reader.py"),
        ("/usr/lib/python3.12/json/decoder.py", "json/decoder.py"),
        ("/opt/lib/python3.13t/json/decoder.py", "json/decoder.py"),
        ("<string>", "<string>"),
        ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap>"),
        ("/tmp/ipykernel_7/12.py", "12.py"),
        ("train.py", "train.py"),
        ("", ""),
    ],
)
def test_library_files_are_named_from_their_package(file: str, name: str) -> None:
    assert names_of(file) == {file: name}


def test_paths_differing_only_near_the_root_are_shown_in_full() -> None:
    deep = "/b/c/d/e/f/g/h/i/j/train.py"
    assert names_of("/x" + deep, "/y" + deep) == {
        "/x" + deep: "/x" + deep,
        "/y" + deep: "/y" + deep,
    }


def test_missing_file_line_or_function_is_shown_as_unknown() -> None:
    place = CodeLocation("", 0, "")
    assert code.format_file_line(place, {}) == "unknown file"
    assert code.format_function(place) == "unknown function"
    assert (
        code.format_file_line(CodeLocation("x" * 99 + ".py", 7, ""), {}) == "…" + "x" * 56 + ".py:7"
    )


def test_the_first_screen_names_the_line() -> None:
    screen = Terminal(110).render(make_report_with_code()).splitlines()[:HEAD_LINES]
    at = next(number for number, line in enumerate(screen) if line.startswith(" Where "))
    assert screen[at : at + 2] == [
        f" Where          {WHERE}, in the data",
        "                loader's transform Resize",
    ]
    assert screen[at - 1].startswith(" Ranks ") and screen[at + 2].startswith(" Evidence ")


def test_the_first_screen_names_the_busiest_line() -> None:
    report = add_training_thread_line(ALL["upper-bound"](), 0.82)
    text = " ".join(Terminal(80, full=False).render(report).split())
    assert "Busiest line train.py:42 in Images.augment: 82 % ± 4 of step time, at work in" in text
    assert "Move it out of the step" in text  # it calls no library: it may be no training
    assert '"share_ratio": 0.82' in Json().render(report)
    for without in (add_training_thread_line(report, 0.24), make_report_with_code()):
        assert "Busiest line" not in Terminal(80, full=False).render(without)


def test_the_source_line_of_unattributed_time_is_shown() -> None:
    line = CodeLine(AUGMENT, RESIZE, 6 * S, 0.6, 0.0957, 60)
    profile = dataclasses.replace(PROFILE, unattributed=(line,))
    report = add_code_profile(make_storage_report(), (), profile)
    assert code.describe_unknown_where(report) == (
        "train.py:42 in Images.augment → PIL/Image.py:2450 Image.resize: 60 % ± 10 of the time"
        " without a cause"
    )
    finding = dataclasses.replace(report.findings[0], lost_ns=3 * S)
    unknown = dataclasses.replace(report, findings=(finding,), unattributed_ns=5 * S)
    screen = " ".join(Terminal(110, full=False).render(unknown).split())
    assert "Main cause Not known" in screen and "Where train.py:42 in Images.augment" in screen
    assert "Largest known cause: " in screen and "Confidence" not in screen
    seen = dataclasses.replace(unknown, coverage_gaps=())
    screen = " ".join(Terminal(110, full=False).render(seen).split())
    assert "Try next To learn the cause: see what that line does or waits for." in screen
    for weak in (dataclasses.replace(line, samples=7), dataclasses.replace(line, share_ratio=0.24)):
        profile = dataclasses.replace(PROFILE, unattributed=(weak,))
        assert not code.describe_unknown_where(add_code_profile(make_storage_report(), (), profile))


def test_without_lines_the_report_has_no_code_section() -> None:
    report = add_code_profile(make_storage_report(), ())
    for text in (Terminal().render(report), Plain().render(report), Markdown().render(report)):
        assert "where:" not in text.lower() and " lines " not in text and " Where " not in text


def test_compared_ranks_are_mentioned_with_the_lines() -> None:
    report = make_report_with_code()
    first = dataclasses.replace(report.findings[0], lines_compared=True, lines=LINES[1:])
    assert code.describe_where(report, first) == (
        "data/utils.py:7 in collate: 20 % ± 4 of it, more than the other ranks, in the data"
        " loader's collate function"
    )
    assert code.describe_lines_rest(first, 1) == (
        "in these lines it spends more time than the other ranks; 1 more line: see --json"
    )


@pytest.mark.parametrize(
    ("share", "error", "text"),
    [
        (0.714, 0.041, "71 % ± 4"),
        (1.0, 0.0, "100.0 % ± 0.0"),
        (0.012, 0.0021, "1.2 % ± 0.2"),
        (0.5, math.nan, "50 %"),
        (math.nan, 0.1, "an unknown share"),
    ],
)
def test_line_shares_are_shown_with_their_error(share: float, error: float, text: str) -> None:
    line = CodeLine(MAIN, None, S, share, error, 1)
    assert code.format_line_share(line) == text


def test_source_lines_are_listed_with_the_evidence() -> None:
    text = Terminal(94).render(make_report_with_code())
    section = text.split("CAUSES IN FULL")[1].split("cpu-preprocess:")[0].splitlines()
    at = next(number for number, line in enumerate(section) if line.startswith("   lines "))
    assert [line[14:] for line in section[at : at + 7]] == [
        "       share     lost  line",
        "    71 % ± 4  2.4 min  train.py:42 in Images.augment → PIL/Image.py:2450",
        "                       Image.resize, in the data loader's transform Resize",
        "    20 % ± 4  40.00 s  data/utils.py:7 in collate, in the data loader's collate",
        "                       function",
        " 1.0 % ± 0.5   2.00 s  model/utils.py:12 in log → json/decoder.py:355 raw_decode",
        " On rank 1: pack samples into large records and read these in order",
    ]


def test_only_five_lines_are_shown() -> None:
    lines = tuple(
        dataclasses.replace(LINES[1], place=CodeLocation("/t.py", n, "f")) for n in range(1, 8)
    )
    report = add_code_profile(make_storage_report(), lines)
    assert Terminal().render(report).count(" in f, in the data") == 5
    plain = Plain().render(report).splitlines()
    assert [line for line in plain if line.startswith("  Line")][4:] == [
        "  Line: t.py:5 in f, in the data loader's collate function: 20 % +- 4, 40.00 s",
        "  Lines: 2 more lines: see --json",
    ]


def test_plain_and_markdown_name_the_line_before_the_details() -> None:
    words = "in the data loader's transform Resize"
    ascii_ = WHERE.replace("→", "->").replace("±", "+-")
    plain = Plain().render(make_report_with_code())
    assert plain.isascii() and f"\nWhere: {ascii_}, {words}\n" in plain
    assert plain.index("Where:") < plain.index("Next:")
    markdown = Markdown().render(make_report_with_code()).splitlines()
    assert f"**Where:** {WHERE}, {words}" in markdown
    row = "| model/utils.py:12 | 1.0 % ± 0.5 | 2.00 s | log | json/decoder.py:355 raw&#95;decode |"
    assert row in markdown


def test_a_terminal_without_the_arrow_shows_ascii() -> None:
    text = Terminal(100, plain_letters=True).render(make_report_with_code())
    assert " augment > PIL/Image.py:2450 Image.resize: 71 % ~ 4 of it" in text.replace(
        "Images.", " "
    )
    assert text.isascii()


def test_lost_time_by_line_counts_every_stack_once() -> None:
    totals = code.sum_lines(PROFILE)
    assert [(line.place, line.cause, line.lost_ns, line.samples) for line in totals.lines] == [
        (AUGMENT, "storage-local", 7 * S, 140),  # 5 s and 2 s; the first cause has more
        (COLLATE, "storage-local", 2 * S, 40),
    ]
    assert (totals.total_ns, totals.unknown_ns) == (10 * S, S)


def test_a_library_only_stack_counts_for_its_outermost_line() -> None:
    profile = CodeProfile((RESIZE, OTHER_UTILS), (True, True), (StackTime("a", 0, (0, 1), 5, 1),))
    assert [line.place for line in code.sum_lines(profile).lines] == [RESIZE]


def table_lines(report: Report, top: int | None = None) -> list[str]:
    (table,) = build_tables(report, ["line"], top)
    return [" ".join(row) for row in table.rows] + [table.rest]


def test_lost_time_by_line_is_shown_as_a_table() -> None:
    assert table_lines(make_report_with_code()) == [
        "train.py:42 7.00 s 70.0 % Images.augment storage-local",
        "data/utils.py:7 2.00 s 20.0 % collate storage-local",
        "and 1.00 s (10.0 %) without a known stack",
    ]
    assert table_lines(make_report_with_code(), 1)[1:] == [
        "and 1 more line with 2.00 s, 1.00 s (10.0 %) without a known stack"
    ]


def test_thirty_lines_are_shown_and_the_rest_counted() -> None:
    places = tuple(CodeLocation("/t.py", line, "f") for line in range(1, 41))
    stacks = tuple(StackTime("a", 0, (at,), S, 1) for at in range(40))
    report = add_code_profile(
        make_storage_report(), (), CodeProfile(places, (False,) * 40, stacks, 40)
    )
    rows = table_lines(report)
    assert len(rows) == 31
    assert rows[29:] == ["t.py:30 1.00 s 2.5 % f a", "and 10 more lines with 10.00 s"]


def test_a_report_without_stacks_states_the_reason() -> None:
    assert table_lines(make_storage_report()) == ["no Python stacks were recorded"]
    profile = CodeProfile(why_missing="--stacks off was given")
    assert table_lines(add_code_profile(make_storage_report(), (), profile)) == [
        "--stacks off was given"
    ]
