"""The terminal report: first screen, width, colour, and what is said always."""

from __future__ import annotations

import dataclasses
import re

import pytest

from clusterprof.output.renderers.base import Renderer
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text import advice, wording
from clusterprof.output.renderers.text.safety import count_columns
from clusterprof.output.renderers.text.summary import SummaryRow, build_summary
from clusterprof.report.model import Cause, CoverageGap, Finding, NodeFacts, Report
from tests.support.reports import (
    ALL,
    S,
    make_clean_report,
    make_damaged_report,
    make_storage_report,
    make_upper_bound_report,
)

FOR_PEOPLE: list[Renderer] = [Terminal(), Plain(), Markdown()]


def many_causes(number: int) -> Report:
    """`number` causes of 10 s each in 1000 s of steps, and every warning there is."""
    base = make_damaged_report()
    findings = tuple(
        Finding(
            Cause(f"cause-{i}", "cpu", f"The {i}th title " * 6, "Do this and that. " * 20),
            10 * S,
            0.01,
            None,
            0.5,
            "C",
            True,
            False,
            make_storage_report().findings[0].culprits,
            make_storage_report().findings[0].evidence,
        )
        for i in range(number)
    )
    lost = 10 * S * number
    rank = dataclasses.replace(
        base.ranks[0],
        source="host-spans",
        in_step_ns=1000 * S,
        window_ns=1020 * S,
        lost_ns=lost,
        productive_ns=1000 * S - lost,
        buckets=tuple((f.cause.id, f.lost_ns) for f in findings),
    )
    return dataclasses.replace(
        base,
        title="a/very/long/path/" * 5,
        ranks=(rank,),
        findings=findings,
        lost_ns=lost,
        in_step_ns=1000 * S,
        window_ns=1020 * S,
        productive_ns=1000 * S - lost,
        unattributed_ns=0,
        unattributed_reasons=(),
        coverage_gaps=(CoverageGap("x", "absent", "y", "z"),) * 30,
    )


@pytest.mark.parametrize("name", ALL)
def test_the_first_screen_shows_verdict_causes_and_next_step(name: str) -> None:
    report = ALL[name]()
    screen = Terminal(80, False, 2.5).render(report).splitlines()[:24]  # and one for the prompt
    text = " ".join(" ".join(screen).split())
    for label, stated, _ in build_summary(report, 2.5, "USD") or [
        SummaryRow("", wording.describe_verdict(report))
    ]:
        row = f"{label} {' '.join(stated.split())}".strip()
        assert row in text or label == "Evidence" or (label == "Ranks" and row[:100] in text)
    assert "Not seen:" in text
    for warning in wording.list_warnings(report):
        assert warning in text.replace("! ", "")
    if wording.select_in_step_findings(report):
        assert f"Try next {advice.describe_first_step(report.findings[0])}" in text
        for finding in wording.select_in_step_findings(report)[:2]:
            assert finding.cause.id in text
        shown = sum(bool(re.match(r" \d  ", line)) for line in screen)
        more = len(wording.select_in_step_findings(report)) - shown
        assert more <= 0 or f"{more} more cause" in text


@pytest.mark.parametrize("number", [4, 9, 40])
def test_many_causes_with_every_warning_fit_the_screen(number: int) -> None:
    report = many_causes(number)
    assert wording.list_imbalances(report) == []
    screen = "\n".join(Terminal().render(report).splitlines()[:25])
    assert "At most" in screen and "1  cause-0" in screen and "Try next" in screen
    more = number - len(re.findall(r"^ \d  cause-", screen, re.MULTILINE))
    assert f"{more} more {'cause' if more == 1 else 'causes'}, below" in screen
    assert "EMULATED" in screen and "UPPER BOUND" in screen and "DAMAGED" in screen


def test_a_recording_that_was_changed_is_reported_on_the_first_screen() -> None:
    report = ALL["storage"]()
    altered = dataclasses.replace(report.nodes[0], altered_segments=3)
    changed = dataclasses.replace(report, nodes=(altered, *report.nodes[1:]))
    screen = "\n".join(Terminal().render(changed).splitlines()[:25])
    assert "CHANGED: files of the recording are not as the recorder closed them." in screen


@pytest.mark.parametrize("width", [20, 40, 57, 72, 80, 100, 120, 200, 500])
@pytest.mark.parametrize("name", ALL)
def test_no_line_exceeds_the_requested_width(name: str, width: int) -> None:
    for line in Terminal(width).render(ALL[name]()).splitlines():
        assert count_columns(line) <= min(max(width, 40), 200)
        assert line == line.rstrip()


def test_a_large_process_id_keeps_the_width() -> None:
    rank = dataclasses.replace(
        make_clean_report().ranks[0], pid=4_194_303
    )  # the kernel's largest is 2^22 - 1
    for line in (
        Terminal(80).render(dataclasses.replace(make_clean_report(), ranks=(rank,))).splitlines()
    ):
        assert count_columns(line) <= 80


@pytest.mark.parametrize("name", ALL)
def test_colour_adds_only_escape_sequences(name: str) -> None:
    plain, painted = (Terminal(80, color).render(ALL[name]()) for color in (False, True))
    assert "\x1b" not in plain
    assert painted != plain
    bare = re.sub(r"\x1b\[[0-9;]*m", "", painted)
    assert bare == plain


@pytest.mark.parametrize("renderer", FOR_PEOPLE, ids=lambda r: r.name)
@pytest.mark.parametrize("name", ALL)
def test_unattributed_time_and_missing_signals_are_always_shown(
    name: str, renderer: Renderer
) -> None:
    text = renderer.render(ALL[name]()).lower()
    assert "unattributed" in text and "not seen" in text


@pytest.mark.parametrize("renderer", FOR_PEOPLE, ids=lambda r: r.name)
def test_emulated_and_upper_bound_reports_are_marked(renderer: Renderer) -> None:
    assert "EMULATED ACCELERATORS" in renderer.render(make_damaged_report())
    assert "emulated GPU time" in renderer.render(make_damaged_report())
    assert "EMULATED" not in renderer.render(make_clean_report())
    assert "NOT MEASURED: 16.7 %" in " ".join(
        renderer.render(make_damaged_report()).split()
    )  # 20 of 120 s
    text = renderer.render(make_upper_bound_report())
    assert "UPPER BOUND" in text and "At most 30.0 %" in text


def test_signals_missing_for_the_same_reason_share_a_line() -> None:
    why = ("failed", "its process stopped", "")
    coverage_gaps = (
        CoverageGap("a", *why),
        CoverageGap("b", *why),
        CoverageGap("c", "denied", "no", "ask"),
    )
    text = Terminal().render(dataclasses.replace(make_clean_report(), coverage_gaps=coverage_gaps))
    assert "Not seen: 2 gaps" in text
    assert " - a, b, failed: its process stopped.\n - c, denied: no. What to do: ask.\n" in text


def test_cost_is_shown_only_with_a_price_and_real_gpus() -> None:
    assert "USD" not in Terminal().render(make_storage_report())
    assert "USD" not in Terminal(80, False, 2.5).render(make_damaged_report())
    # 226.000000007 s / 3600 s/h * 36 USD/h = 2.26 USD
    text = Terminal(80, False, 36.0).render(make_storage_report())
    assert "about 2.26 USD at 36.00 USD" in " ".join(text.split())


@pytest.mark.parametrize("renderer", FOR_PEOPLE, ids=lambda r: r.name)
def test_an_unbalanced_ledger_is_reported_prominently(renderer: Renderer) -> None:
    report = dataclasses.replace(make_storage_report(), lost_ns=226 * S + 6)
    text = " ".join(renderer.render(report).split())
    assert "LEDGER DOES NOT BALANCE" in text
    assert "lost 226,000,000,006 ns is not 226,000,000,007 ns" in text
    assert "LEDGER" not in renderer.render(make_storage_report()).replace("LEDGER, in seconds", "")


def test_thousands_of_ranks_are_truncated_with_a_count() -> None:
    report = make_storage_report()
    ranks = tuple(dataclasses.replace(report.ranks[0], rank=i) for i in range(3000))
    text = Terminal().render(dataclasses.replace(report, ranks=ranks))
    assert "… and 2,992 ranks that lost less" in text
    assert len(text.splitlines()) < 150


def test_unlisted_ranks_are_included_in_the_sum() -> None:
    facts = (NodeFacts("n", "n", "", 0, 0, 0, None),)
    text = Terminal(most_ranks=1).render(dataclasses.replace(make_storage_report(), nodes=facts))
    line = next(line for line in text.splitlines() if line.startswith("       storage-local"))
    assert line.split() == ["storage-local", "200.000000003", "120.000000000"]
    assert "recorder unknown" in text
