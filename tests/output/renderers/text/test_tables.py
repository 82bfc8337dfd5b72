"""The law of the ledger, redone from the printed digits of every output for people."""

from __future__ import annotations

import re

import pytest

from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text.tables import format_exact_seconds
from tests.support.reports import ALL

Ledger = list[tuple[int, str, list[int]]]


def ns(text: str) -> int:
    return int(text.replace(",", "").replace(".", ""))


def from_terminal(text: str) -> Ledger:
    body = text.split("LEDGER, in seconds")[1].split("UNATTRIBUTED")[0]
    rows = re.findall(r"^ ( *)(\S[a-z -]*?) {2,}((?:[\d,]+\.\d{9} *)+)$", body, re.MULTILINE)
    return [(len(i) // 2, label, [ns(n) for n in numbers.split()]) for i, label, numbers in rows]


def from_plain(text: str) -> Ledger:
    rows = re.findall(r"^  ( *)([a-z -]+): ([\d,]+\.\d{9})$", text, re.MULTILINE)
    return [(len(i) // 2, label, [ns(number)]) for i, label, number in rows]


def from_markdown(text: str) -> Ledger:
    rows = re.findall(r"^\| ((?:&emsp;)*)([a-z -]+) \|((?: [\d,.]+ \|)+)$", text, re.MULTILINE)
    return [
        (i.count("&emsp;"), label, [ns(n) for n in re.findall(r"[\d,]+\.\d{9}", numbers)])
        for i, label, numbers in rows
    ]


def check(ledger: Ledger) -> int:
    """Every row that has rows below it is their sum, column by column; return how many were."""
    checked = 0
    for at, (depth, label, amounts) in enumerate(ledger):
        below = []
        for deeper, _, parts in ledger[at + 1 :]:
            if deeper <= depth:
                break
            if deeper == depth + 1:
                below.append(parts)
        if below:
            assert [sum(column) for column in zip(*below, strict=True)] == amounts, label
            checked += len(amounts)
    return checked


@pytest.mark.parametrize("name", ALL)
def test_printed_amounts_sum_exactly(name: str) -> None:
    report = ALL[name]()
    sums = 4 if report.outside_buckets else 3  # observed, outside, in steps, lost
    # of more ranks than they can hold the outputs show few
    for renderer, parse, of_many in (
        (Terminal(), from_terminal, 2),
        (Plain(), from_plain, 8),
        (Markdown(), from_markdown, 8),
    ):
        shown = len(report.ranks) if len(report.ranks) <= 8 else of_many
        columns = 1 if shown == 1 else 1 + shown
        assert check(parse(renderer.render(report))) == columns * sums, renderer.name


def test_the_sum_check_detects_a_wrong_digit() -> None:
    ledger = from_terminal(Terminal().render(ALL["storage"]()))
    wrong = [
        (depth, label, [amount + (label == "lost") for amount in amounts])
        for depth, label, amounts in ledger
    ]
    with pytest.raises(AssertionError, match=r"in steps|lost"):
        check(wrong)


def test_nanoseconds_are_never_rounded() -> None:
    assert format_exact_seconds(0) == "0.000000000"
    assert format_exact_seconds(1) == "0.000000001"
    assert format_exact_seconds(1_234_000_000_005) == "1,234.000000005"
    assert format_exact_seconds(-1) == "-0.000000001"
