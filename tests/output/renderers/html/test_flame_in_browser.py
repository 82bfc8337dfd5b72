"""The flame graph in a real browser: widths, filters, zoom, search, keys, comparison."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.output.renderers.html.page import Html
from clusterprof.report.model import Report
from tests.support.browser import NAMES, Browser, find_chromium
from tests.support.code_profiles import make_report_with_code
from tests.support.hostile_reports import make_full_report, poison_strings

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_chromium() is None, reason=f"no browser: none of {', '.join(NAMES)}"),
]
ABOUT = "document.querySelector('.about').textContent"
FRAMES = """[...document.querySelectorAll('.flame .frame')].map(g => [
  g.dataset.at, Math.round(g.querySelector('rect').getAttribute('width'))])"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.start(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Any:
    def open_(report: Report, width: int = 1280) -> Browser:
        file = tmp_path / "report.html"
        file.write_text(Html().render(report), encoding="utf-8")
        browser.open(file, width=width)
        return browser

    yield open_
    assert browser.list_errors() == []


def choose(page: Browser, label: str, text: str) -> None:
    page.evaluate(
        f"(s => {{ s.value = [...s.options].find(o => o.textContent === '{text}').value;"
        " s.dispatchEvent(new Event('change')); })"
        f"(document.querySelector('#where select[aria-label={label}]'))"
    )
    page.wait_for_frame()


def press(page: Browser, text: str) -> None:
    page.evaluate(
        "[...document.querySelectorAll('#where button')]"
        f".find(b => b.textContent === '{text}').click()"
    )
    page.wait_for_frame()


def parts(page: Browser) -> dict[str, float]:
    """Return the width of each frame as a share of the first."""
    widths = dict(page.evaluate(FRAMES))
    return {at: round(width / widths["0"], 2) for at, width in widths.items()}


def test_frame_width_is_proportional_to_lost_time(show: Any) -> None:
    page = show(make_report_with_code())
    # all, main, loader: 10, 9, 9 s; augment and resize 7 s; collate 2 s; not known 1 s
    assert parts(page) == {"0": 1, "1": 0.9, "2": 0.9, "3": 0.7, "4": 0.7, "5": 0.2, "6": 0.1}
    assert page.evaluate(ABOUT).startswith("all lost device time · 10.00 s · 100.0 % of what")


def test_cause_and_rank_filter_the_flame_graph(show: Any) -> None:
    page = show(make_report_with_code())
    choose(page, "Cause", "cpu-preprocess")
    assert parts(page) == {"0": 1, "1": 1, "2": 1, "3": 1, "4": 1}
    assert page.evaluate("document.getElementById('filters').textContent") == (
        "cause cpu-preprocess ×"
    )
    choose(page, "Cause", "All causes")
    choose(page, "Rank", "rank 0")
    assert parts(page) == {"0": 1, "1": 0.67, "2": 0.67, "5": 0.67, "6": 0.33}
    assert page.evaluate(ABOUT).startswith("all lost device time · 3.00 s")


def test_a_rank_is_compared_with_the_others(show: Any) -> None:
    page = show(make_report_with_code())
    choose(page, "Rank", "rank 1")
    press(page, "Compare with others")
    about = page.evaluate(ABOUT)
    assert about == "all lost device time · rank 1: 7.00 s · the other rank: 3.00 s"
    kinds = "[...document.querySelectorAll('.flame .frame')].map(g => g.dataset.at + "
    kinds += "(g.classList.contains('more') ? '+' : '-') + g.style.getPropertyValue('--v'))"
    # augment, resize: only rank 1; collate, not known: only rank 0; main 7 s against 2 s of 9 s
    assert sorted(page.evaluate(kinds)) == [
        "0+40",
        "1+56",
        "2+56",
        "3+100",
        "4+100",
        "5-100",
        "6-100",
    ]


def test_zoom_search_and_keys_change_the_flame_graph(show: Any) -> None:
    page = show(make_report_with_code())
    page.evaluate("document.querySelector('.flame').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        page.press_key(key)
    assert page.evaluate(ABOUT).startswith("collate data/utils.py:7 · 2.00 s · 20.0 % of what")
    page.press_key("Enter")
    assert parts(page) == {"0": 1, "1": 1, "2": 1, "5": 1}
    page.press_key("Escape")
    assert len(parts(page)) == 7
    page.evaluate(
        "document.querySelector('.flame [data-at=\"3\"]').dispatchEvent(new MouseEvent("
        "'click', { bubbles: true }))"
    )
    page.wait_for_frame()
    assert parts(page) == {"0": 1, "1": 1, "2": 1, "3": 1, "4": 1}
    press(page, "Whole graph")
    page.evaluate(
        "(s => { s.value = ' UTILS.py'; s.dispatchEvent(new Event('input')); })"
        "(document.getElementById('frames'))"
    )
    page.wait_for_frame()
    hits = "[...document.querySelectorAll('.flame .hit')].map(g => g.dataset.at)"
    assert page.evaluate(hits) == ["5"]
    assert "20.0 % matched" in page.evaluate("document.getElementById('where').innerText")


def test_the_flame_graph_fits_a_phone_and_themes_differ(show: Any) -> None:
    page = show(make_report_with_code(), width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    fill = "getComputedStyle(document.querySelector('.flame [data-at=\"3\"] rect')).fill"
    colors = []
    for theme in ("light", "dark"):
        page.set_color_scheme(theme)
        colors.append(page.evaluate(fill))
    assert len(set(colors)) == 2


def test_hostile_names_are_shown_as_text(show: Any) -> None:
    page = show(poison_strings(make_full_report(2), "<img src=x onerror=window.owned=1>"))
    assert page.evaluate("document.querySelectorAll('img, [onerror]').length") == 0
    assert page.evaluate("document.querySelectorAll('.flame .frame').length") > 3
    assert page.evaluate("typeof window.owned") == "undefined"
