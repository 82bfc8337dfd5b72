"""The waterfall of a job's life as text: its rows, its bars, and what is not known."""

from __future__ import annotations

from dataclasses import replace

from clusterprof.output.renderers.html.page import Html
from clusterprof.output.renderers.json import build_document
from clusterprof.output.renderers.markdown import Markdown
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.terminal import Terminal
from clusterprof.output.renderers.text.life import build_life_tables, describe_life
from clusterprof.report.life import LIFE_PARTS, Attempt, Life, LifePart
from clusterprof.report.model import Report
from tests.support.reports import make_storage_report

SECOND = 1_000_000_000
TIMES = {"startup": 20, "down": 10, "restart": 20, "lost": 30, "repeated": 5, "training": 115}
LIFE = Life(
    begin_at_ns=0,
    wall_ns=100 * SECOND,
    devices=2,
    total_ns=200 * SECOND,
    parts=tuple(
        LifePart(name, None, "nobody stated it")
        if name == "queued"
        else LifePart(name, TIMES.get(name, 0) * SECOND)
        for name in LIFE_PARTS
    ),
    attempts=(
        Attempt(0, 40 * SECOND, 2, 60, 1, 7, "signal 9"),
        Attempt(45 * SECOND, 100 * SECOND, 2, 90, 54, 0, ""),
    ),
)


def make_report(life: Life | None = LIFE) -> Report:
    return replace(make_storage_report(), life=life)


def test_job_phases_are_rows_with_shares_and_consecutive_bars() -> None:
    parts, attempts = build_life_tables(make_report(), bars=True)
    assert parts.rows == (
        ("in the queue", "not known", "", ""),
        ("starting up", "20.00 s", "10.0 %", "██"),
        ("down between attempts", "10.00 s", "5.0 %", "  ██"),  # 2.4 to 3.6 columns
        ("starting up again", "20.00 s", "10.0 %", "    ██"),
        ("lost to other causes", "30.00 s", "15.0 %", "      ████"),
        ("training done again", "5.00 s", "2.5 %", "          █"),
        ("training", "1.9 min", "57.5 %", "          ██████████████"),
    )
    assert attempts.rows == (
        ("1", "0 ns", "40.00 s", "2", "60", "7", "signal 9"),
        ("2", "45.00 s", "55.00 s", "2", "90", "0", "none seen"),
    )
    assert describe_life(make_report()) == [
        "1.7 min on 2 devices in 2 attempts: 3.3 min of device time.",
        "in the queue: not known: nobody stated it",
    ]


def test_a_missing_job_life_gives_a_reason_or_no_section() -> None:
    missing = Life(0, 0, 0, 0, (), (), "recordings of different jobs were given")
    assert describe_life(make_report(missing)) == [
        "The life of the job is not known: recordings of different jobs were given."
    ]
    assert build_life_tables(make_report(missing)) == []
    assert describe_life(make_report(None)) == []
    assert "LIFE" not in Terminal().render(make_report(None))


def test_every_output_shows_the_same_job_life_numbers() -> None:
    report = make_report()
    outputs = (Terminal(), Plain(), Markdown(), Html())
    for text in (output.render(report) for output in outputs):
        assert "down between attempts" in text and "57.5 %" in text and "signal 9" in text
    stored = build_document(report)["life"]
    assert sum(part["ns"] or 0 for part in stored["parts"]) == stored["total_ns"]
    assert stored["parts"][0] == {
        "name": "queued",
        "title": "in the queue",
        "ns": None,
        "why_missing": "nobody stated it",
    }
    assert stored["attempts"][0]["repeated_steps"] == 7
    section = Terminal(section="life").render(report)
    assert section.lstrip().startswith("LIFE OF THE JOB") and "CAUSES IN FULL" not in section
