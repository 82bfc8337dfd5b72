"""The page of a ledger: whole without a script, and no name is markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.fleet.database import Price, Source, open_ledger
from clusterprof.fleet.job_entry import JobEntry
from clusterprof.fleet.page import render_fleet_page
from clusterprof.fleet.queries import FleetSummary, summarize_ledger
from tests.support.browser import NAMES, Browser, find_chromium
from tests.support.fleet_jobs import WEEK_NS, make_entry
from tests.support.hostile_names import HOSTILE

WIDTH = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"


def summarize(folder: Path, *entries: JobEntry) -> FleetSummary:
    with open_ledger(folder / "fleet.db") as ledger:
        ledger.connection.execute("PRAGMA synchronous = OFF")
        for entry in entries:
            ledger.put(entry, Source(entry.title, "1", 1), Price(36, "EUR"))
        return replace(summarize_ledger(ledger), title="fleet.db")


def make_fleet(folder: Path) -> FleetSummary:
    entries = []
    for number in range(30):
        entry = make_entry(number, ["a1", "b2", "bad3", "d4"], ["bad3"] if number % 3 else [])
        assert entry.started_ns is not None
        entries.append(replace(entry, started_ns=entry.started_ns + number % 6 * WEEK_NS))
    return summarize(folder, *entries)


def test_the_page_has_every_table_and_no_script(tmp_path: Path) -> None:
    html = render_fleet_page(make_fleet(tmp_path))
    assert html.isascii() and "<script" not in html and "style=" not in html
    assert html.count('<tr><th scope="row">2026-W0') == 2 * 6  # bars, and the table of weeks
    for name in ("summary", "trend", "causes", "lemons", "nodes", "switches", "mounts", "owners"):
        assert f'id="{name}"' in html and f'href="#{name}"' in html
    assert '<th scope="row">bad3</th><td class="n">20</td><td class="n">20</td>' in html
    assert re.search(
        r"default-src 'none'; style-src 'sha256-[^']+'; base-uri", html.replace("&#x27;", "'")
    )


def test_an_empty_ledger_renders_a_page(tmp_path: Path) -> None:
    html = render_fleet_page(summarize(tmp_path))
    assert (
        "No job in the ledger matches the filter" in html
        and "No job has time inside steps." in html
    )


def test_hostile_names_are_escaped_in_their_cells(tmp_path: Path) -> None:
    def render(number: int, name: str) -> str:
        folder = tmp_path / str(number)
        folder.mkdir()
        entry = make_entry(1, [f"{name}1", f"{name}2"], [f"{name}2"], user=name, name=name)
        return render_fleet_page(summarize(folder, entry))

    plain = render(0, "x")
    names = [*HOSTILE[:30], "</td><script>alert(1)</script>", "<img src=x onerror=a()>"]
    for number, name in enumerate(names, 1):
        html = render(number, name)
        assert html.isascii() and "\x1b" not in html
        for tag in ("<td", "<th", "<tr", "<script", "<img", "<a "):
            assert html.count(tag) == plain.count(tag), ascii(name)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.start(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.mark.long
@pytest.mark.skipif(find_chromium() is None, reason=f"no browser: none of {', '.join(NAMES)}")
@pytest.mark.parametrize("width", [480, 1440])
def test_the_page_fits_a_browser_window(browser: Browser, tmp_path: Path, width: int) -> None:
    file = tmp_path / "fleet.html"
    file.write_text(render_fleet_page(make_fleet(tmp_path)), encoding="ascii")
    browser.open(file, width=width, wait=False)
    browser.wait_until("document.readyState === 'complete'")
    assert browser.list_errors() == []
    needed, room = browser.evaluate(WIDTH)
    assert needed <= room == width
    assert (
        browser.evaluate("getComputedStyle(document.querySelector('.card')).borderRadius") != "0px"
    )
    height = browser.evaluate(
        "document.querySelector('.trend .bar').getBoundingClientRect().height"
    )
    assert height == 16  # our own style sheet is in force
