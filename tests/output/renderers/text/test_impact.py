"""What is said of worth, line by line, and the same as values of the schema."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import clusterprof.output.renderers
from clusterprof.output.renderers.json import build_document
from clusterprof.output.renderers.plain import Plain
from clusterprof.output.renderers.text.impact import describe_impact
from clusterprof.report.impact import CauseImpact, Impact
from tests.support.reports import make_clean_report
from tests.support.schema_check import list_errors

S = 10**9
STORAGE = CauseImpact(
    "storage-local", 12.5, 20 * S, 18 * S, 22 * S, lost_ns=30 * S, saved_cost=10.0
)
BUBBLE = CauseImpact("sync-bubble", 3.0, None, None, None, "it is part of the pipeline schedule")
FULL = Impact(
    3.6,
    "EUR",
    15.5,
    100 * S,
    (STORAGE, replace(STORAGE, cause="cpu-gc", saved_ns=S), BUBBLE),
    tokens_per_second=1234.5,
    tokens_per_second_if_fixed=1500.0,
    samples_per_second=2.5,
    cost_per_million_tokens=2.0,
    cost_per_million_tokens_if_fixed=0.0123,
    efficiency_metrics=(
        ("goodput", 0.5, "productive over all"),
        ("load balance", None, "one rank"),
    ),
    gpus=2,
    saved_ns=20 * S + 1,
    saved_low_ns=None,
    saved_high_ns=None,
)


def test_impact_lines_match_the_expected_text() -> None:
    assert describe_impact(replace(make_clean_report(), impact=FULL)) == [
        "The steps took 1.7 min; with one cause fixed and all else unchanged, they would end",
        "storage-local: 20.00 s sooner (20.0 %; 95 %: 18.00 s to 22.00 s); lost 12.50 EUR, fixing"
        " saves 10.00 EUR",
        "cpu-gc: 1.00 s sooner (1.0 %; 95 %: 18.00 s to 22.00 s); lost 12.50 EUR, fixing saves"
        " 10.00 EUR",
        "all fixable causes: 20.00 s sooner (20.0 %) (not the sum: one cause can hide another)",
        "sync-bubble: not known: it is part of the pipeline schedule",
        "tokens per second: 1,234, 1,500 with all fixed (summed over the ranks that read them)",
        "samples per second: 2.5 (summed over the ranks that read them)",
        "a million tokens cost 2.00 EUR, 0.0123 EUR with all fixed",
        "goodput 0.500: productive over all",
    ]


def test_unknown_impact_gives_a_reason_or_no_line() -> None:
    silent = replace(FULL, causes=(BUBBLE,), tokens_per_second=None, samples_per_second=None)
    silent = replace(silent, cost_per_million_tokens=None, efficiency_metrics=(), saved_ns=None)
    assert describe_impact(replace(make_clean_report(), impact=silent)) == [
        "The steps took 1.7 min. What fixing would save is not known: it is part of the"
        " pipeline schedule."
    ]
    assert describe_impact(replace(make_clean_report(), impact=replace(FULL, job_ns=None))) == []
    assert describe_impact(make_clean_report()) == []


def test_external_names_are_escaped() -> None:
    hostile = replace(FULL, currency="\x1b[31m€\u202e", causes=(replace(STORAGE, cause="\x07x"),))
    text = Plain().render(replace(make_clean_report(), impact=hostile))
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text


def test_the_impact_document_matches_the_schema() -> None:
    folder = Path(clusterprof.output.renderers.__file__).parent / "schema"
    schema = json.loads((folder / "report.schema.json").read_text(encoding="utf-8"))
    value = build_document(replace(make_clean_report(), impact=FULL))
    assert list(list_errors(value, schema)) == []
    assert value["worth"]["causes"][2] == {
        "cause": "sync-bubble",
        "outside_steps": False,
        "lost_ns": 0,
        "lost_cost": 3.0,
        "saved_ns": None,
        "saved_low_ns": None,
        "saved_high_ns": None,
        "saved_cost": None,
        "why_missing": "it is part of the pipeline schedule",
    }
    assert value["worth"]["lost_cost"] == 15.5
    del value["worth"]["gpus"]
    assert list(list_errors(value, schema)) == ["$.worth.gpus is missing"]
