"""The ledger as text, Markdown and JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.fleet.database import Price, Source, open_ledger
from clusterprof.fleet.job_entry import JobEntry
from clusterprof.fleet.outputs import render_fleet_json, render_fleet_markdown, render_fleet_text
from clusterprof.fleet.queries import FleetSummary, summarize_ledger
from clusterprof.fleet.sections import build_fleet_document
from tests.support.fleet_jobs import S, make_entry
from tests.support.hostile_names import HOSTILE


def summarize(folder: Path, *entries: JobEntry, price: Price | None = None) -> FleetSummary:
    with open_ledger(folder / "fleet.db") as ledger:
        ledger.connection.execute("PRAGMA synchronous = OFF")
        for entry in entries:
            ledger.put(entry, Source(entry.title, "1", 1), price)
        summary = summarize_ledger(ledger)
    return replace(summary, title="fleet.db")


def make_fleet(folder: Path) -> FleetSummary:
    jobs = [
        make_entry(number, ["a1", "b2", "bad3", "d4"], ["bad3"] if number < 8 else [])
        for number in range(12)
    ]
    return summarize(folder, *jobs, price=Price(36, "EUR"))


def test_the_text_shows_losses_causes_nodes_and_prices(tmp_path: Path) -> None:
    """12 jobs of 8 ranks: 30 s on each of 4 nodes, 40 more in 8 jobs: 1,760 of 8,640 s.

    36 an hour is 1 for 100 s.
    """
    text = render_fleet_text(build_fleet_document(make_fleet(tmp_path)), 80)
    words = " ".join(text.split())
    for sentence in (
        "12 jobs of 1 user on 4 nodes, started 2026-01-05; 160.0 GPU-minutes",
        "20.4 % of GPU time inside steps: 29.3 of 144.0 GPU-minutes, 17.60 EUR.",
        "A network file system: 16.0 GPU-minutes, 54.5 % of the loss, in 12 jobs.",
        "bad3 is a culprit more often than chance explains (p ≤ 0.01 after correction for 4",
        "16.0 GPU-minutes, 10.0 % of the time held, before the first and after the last step",
        "bad3 8 8 2.0 1.5e-05 6.1e-05",
    ):
        assert sentence in words
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "\x1b[1m" in render_fleet_text(build_fleet_document(make_fleet(tmp_path)), 80, True)


def test_markdown_tables_have_equal_column_counts(tmp_path: Path) -> None:
    text = render_fleet_markdown(build_fleet_document(make_fleet(tmp_path)))
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert "| bad3 | leaf-3 | 12 | 40.0 | 11.3 | 9.33 | 8 of 8 | 6.1e-05 |" in tables
    heads = [at for at, line in enumerate(tables) if line.startswith("|---")]
    assert len(heads) >= 7
    for begin, end in zip(heads, [*heads[1:], len(tables) + 1]):
        assert len({line.count("|") for line in tables[begin : end - 1]}) == 1


def test_json_sums_keep_nanoseconds(tmp_path: Path) -> None:
    document = json.loads(render_fleet_json(make_fleet(tmp_path)))
    assert document["format"] == "clusterprof-fleet" and document["schema_version"] == 1
    assert document["sums"]["lost_ns"] == 1760 * S
    assert sum(cause["lost_ns"] for cause in document["causes"]) == 1760 * S
    assert sum(node["lost_ns"] for node in document["nodes"]) == 1760 * S
    assert [node["node"] for node in document["nodes"] if node["is_lemon"]] == ["bad3"]
    assert document["lemons"][0]["causes"][0] == {
        "cause": "sync-slow-compute",
        "caused_ns": 320 * S,
    }


def test_the_text_mentions_upper_bounds_and_emulated_devices(tmp_path: Path) -> None:
    summary = summarize(
        tmp_path,
        make_entry(1, ["a"], is_emulated=True),
        make_entry(2, ["b"], is_upper_bound=True, too_little_seen="a single step"),
    )
    words = " ".join(render_fleet_text(build_fleet_document(summary), 100).split())
    assert "EMULATED ACCELERATORS in 1 job" in words
    assert "1 job had no measured device: what they lost is an upper bound" in words
    assert "Lost at most 16.7 %" in words and "Of 1 job too little was seen" in words
    assert "2 jobs without a price" in words


def test_an_empty_ledger_is_rendered_in_every_format(tmp_path: Path) -> None:
    summary = summarize(tmp_path)
    text = render_fleet_text(build_fleet_document(summary), 80)
    assert "0 jobs on 0 nodes" in text and "No job in the ledger matches the filter" in text
    assert render_fleet_markdown(build_fleet_document(summary))
    assert json.loads(render_fleet_json(summary))["sums"]["lost_cost"] is None


@pytest.mark.parametrize("form", ["text", "markdown", "json"])
def test_hostile_names_emit_no_control_characters(tmp_path: Path, form: str) -> None:
    """They are written into the database as they are, as another program could do."""
    names = HOSTILE[:40]
    entries = [
        make_entry(number, [f"{name}1", f"{name}2"], [f"{name}2"], user=name, name=name)
        for number, name in enumerate(names)
    ]
    summary = summarize(tmp_path, *entries)
    document = build_fleet_document(summary, 100)
    text = {
        "text": lambda: render_fleet_text(document, 120),
        "markdown": lambda: render_fleet_markdown(document),
        "json": lambda: render_fleet_json(summary),
    }[form]()
    assert "\x1b" not in text and "\u202e" not in text and "\r" not in text
