"""First screens of the reports made by hand: their size, labels, sentences and words."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text.first_screen import (
    LABELS,
    build_first_screen,
    format_evidence_in_words,
)
from clusterprof.report.model import Evidence
from tests.support.cluster_report import make_cluster_report
from tests.support.reports import ALL, make_storage_report

JUDGED = ["storage", "cluster", "two-nodes", "upper-bound"]
"""Reports with a main cause and evidence for it."""


@pytest.mark.parametrize("name", ALL)
def test_a_first_screen_has_at_most_40_lines_of_80_columns(name: str) -> None:
    lines = Terminal(80, False, full=False).render(ALL[name]()).splitlines()
    assert len(lines) <= 40
    assert [line for line in lines if len(line) > 80] == []


@pytest.mark.parametrize("width", [60, 100, 200])
def test_every_width_from_60_to_200_is_kept(width: int) -> None:
    lines = Terminal(width, False, full=False).render(make_cluster_report(16, 8)).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("name", JUDGED)
def test_a_first_screen_has_every_label(name: str) -> None:
    report = ALL[name]()
    labels = [row.label for row in build_first_screen(report).rows if row.label]
    assert labels == list(LABELS[:-1])  # the last is for jobs without a device
    for renderer in (Terminal(80, full=False), Plain(full=False), Markdown(full=False)):
        text = renderer.render(report)
        assert [label for label in LABELS[:-1] if label not in text] == []


@pytest.mark.parametrize("name", ALL)
def test_no_sentence_has_more_than_25_words(name: str) -> None:
    screen = build_first_screen(ALL[name]())
    texts = [*screen.warnings, *(row.text for row in screen.rows if row.change is None)]
    sentences = [part for text in texts for part in re.split(r"(?<=[.!?;]) ", text)]
    assert [part for part in sentences if len(part.split()) > 25] == []


def test_unattributed_loss_above_known_causes_is_listed_first() -> None:
    """3 s have a cause, 5 s have none: the ranking begins with what is not known."""
    report = make_storage_report()
    finding = replace(report.findings[0], lost_ns=3 * 10**9)
    report = replace(report, findings=(finding,), unattributed_ns=5 * 10**9)
    screen = build_first_screen(report)
    assert [cause.name for cause in screen.causes][:2] == ["not known", "storage-local"]
    assert next(row for row in screen.rows if row.label == "Main cause").text.startswith(
        "Not known"
    )


def test_a_job_without_a_device_reports_training_loop_time() -> None:
    text = Terminal(80, full=False).render(ALL["upper-bound"]())
    assert "The training loop waited for 30.0 % of step time: 30.00 s of" in text
    assert [word for word in ("GPU time", "accelerator", "UPPER BOUND") if word in text] == []


def test_plain_letters_give_ascii_output() -> None:
    assert Terminal(80, full=False, plain_letters=True).render(ALL["storage"]()).isascii()


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (
            Evidence("worker.on_cpu_ratio", 0.92, "ratio", "of the waits"),
            "worker on cpu: 92.0 % of the waits",
        ),
        (Evidence("disk.read_bytes", 2048, "bytes", "from vda"), "disk read: 2.0 KiB (from vda)"),
        (Evidence("feeding.user_cpu_ratio", 0.97, "ratio"), "feeding user cpu: 97.0 %"),
    ],
)
def test_evidence_is_described_without_metric_names(evidence: Evidence, words: str) -> None:
    assert format_evidence_in_words(evidence) == words


def test_a_selected_section_is_printed_without_others() -> None:
    text = Terminal(80, section="ranks").render(ALL["storage"]())
    assert text.split()[0] == "RANKS"
    assert "LEDGER" not in text
