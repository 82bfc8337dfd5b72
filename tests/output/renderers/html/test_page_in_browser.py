"""The page in a real browser: it draws and listens, fetches nothing, and no name is markup."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.output.renderers.html.page import Html
from clusterprof.report.model import CulpritGroup, Report
from clusterprof.units import format_quantity
from tests.support.browser import NAMES, Browser, find_chromium
from tests.support.histories import make_one_hour_job
from tests.support.hostile_names import HOSTILE
from tests.support.hostile_reports import make_full_report, poison_strings
from tests.support.reports import ALL, make_storage_report

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_chromium() is None, reason=f"no browser: none of {', '.join(NAMES)}"),
]
LINES = "document.querySelector('.rows canvas')"
RANGE = "document.querySelector('.range').textContent"
# how many pixels of a canvas are not its first one's colour
INK = """(canvas => {
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const words = new Uint32Array(data.buffer);
  return words.reduce((sum, word) => sum + (word !== words[0]), 0) / words.length;
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.start(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Any:
    def open_(report: Report, hash_: str = "", width: int = 1280) -> Browser:
        file = tmp_path / "report.html"
        file.write_text(Html(2.5, "EUR").render(report), encoding="utf-8")
        browser.open(file, width=width, hash_=hash_)
        return browser

    yield open_
    assert browser.list_errors() == []
    asked = browser.list_requests()
    assert len(asked) == 1 and asked[0].startswith("file://")  # the page itself


def middle(page: Browser, element: str) -> tuple[float, float, float, float]:
    """Bring an element into view; return where it is: left, top, width, height."""
    page.evaluate(f"{element}.scrollIntoView({{block: 'center'}})")
    page.wait_for_frame()
    box = page.evaluate(
        f"(r => [r.left, r.top, r.width, r.height])({element}.getBoundingClientRect())"
    )
    return tuple(box)


def click(page: Browser, element: str) -> None:
    left, top, width, height = middle(page, element)
    for kind in ("mousePressed", "mouseReleased"):
        page.send_mouse_event(kind, left + width / 2, top + height / 2)
    page.wait_for_frame()


@pytest.mark.parametrize("name", ALL)
def test_every_report_opens_without_console_errors(name: str, show: Any) -> None:
    page = show(ALL[name]())
    drawn = page.evaluate("document.getElementById('when-body').textContent")
    assert drawn == "Not in this report: the history was not requested in this analysis."


def test_charts_are_drawn_in_both_themes(show: Any) -> None:
    page = show(make_one_hour_job(4, 4, 120, 400))
    page.set_color_scheme("light")
    back = "getComputedStyle(document.body).backgroundColor"
    for theme, colour in (("light", "rgb(244, 245, 247)"), ("dark", "rgb(14, 18, 22)")):
        page.set_color_scheme(theme)
        assert page.evaluate(back) == colour
        for canvas in (".mini canvas", ".loss canvas", ".rows canvas"):
            assert page.evaluate(f"{INK}(document.querySelector('{canvas}'))") > 0.5, canvas
    click(page, "document.getElementById('theme')")  # the button beats the system
    assert page.evaluate(back) == "rgb(244, 245, 247)"
    assert page.evaluate("document.getElementById('theme').textContent") == "Dark"


def test_drag_zooms_double_click_resets_and_the_url_follows(show: Any) -> None:
    page = show(make_one_hour_job(4, 4, 120, 400))
    assert page.evaluate(RANGE) == "0:00 to 1:00:12 of 1:00:12"
    left, top, width, _ = middle(page, LINES)
    place = [left + 160 + (width - 168) * part for part in (0.25, 0.5)]
    page.drag((place[0], top + 20), (place[1], top + 30))
    assert page.evaluate(RANGE) == "15:03 to 30:06 of 1:00:12"
    page.wait_until("location.hash === '#t=903-1806'")
    page.drag((place[1], top + 20), (place[0], top + 20), modifiers=8)  # Shift: move
    assert page.evaluate(RANGE).startswith("18:49 to 33:52")
    page.send_mouse_event(
        "mouseWheel", place[0], top + 20, deltaX=0, deltaY=-120, modifiers=2
    )  # Ctrl: zoom
    page.wait_for_frame()
    zoomed = page.evaluate(RANGE)
    assert zoomed.startswith("19:") and zoomed != "18:49 to 33:52 of 1:00:12"
    page.evaluate(
        "document.querySelector('.rows canvas').dispatchEvent(new MouseEvent('dblclick'))"
    )
    page.wait_for_frame()
    assert page.evaluate(RANGE) == "0:00 to 1:00:12 of 1:00:12"


def test_the_timeline_is_operable_by_keyboard(show: Any) -> None:
    page = show(make_one_hour_job(4, 4, 120, 400))
    page.evaluate(f"{LINES}.focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.press_key(key)
    drawn = page.evaluate("document.querySelector('.spoken').textContent")
    assert drawn.startswith("rank 2 \u00b7 gpu-a10:30 to 1:00 (")  # of the run, and UTC
    page.press_key("+")
    assert page.evaluate(RANGE) == "0:15 to 30:21 of 1:00:12"
    page.press_key("Enter")
    assert page.evaluate("document.getElementById('filters').textContent").startswith("node gpu-a1")
    page.press_key("Escape")
    assert page.evaluate("document.getElementById('filters').textContent") == ""
    assert page.evaluate(RANGE) == "0:00 to 1:00:12 of 1:00:12"


def test_clicks_select_a_finding_a_node_and_a_wait(show: Any) -> None:
    page = show(make_one_hour_job(4, 4, 120, 400))
    click(page, "document.querySelector('details.finding button:not(.copy button)')")
    chips = "[...document.querySelectorAll('#filters button')].map(b => b.textContent)"
    assert page.evaluate(chips) == ["cause storage-remote \u00d7"]
    assert page.evaluate("document.querySelectorAll('details.finding.chosen').length") == 1
    click(page, "document.querySelectorAll('.nodes button')[3]")
    assert page.evaluate(chips) == ["node gpu-a4 \u00d7", "cause storage-remote \u00d7"]
    rows = "[...document.querySelectorAll('.heat tbody tr')].map(r => r.firstChild.textContent)"
    assert page.evaluate(rows) == ["rank 15", "rank 14", "rank 13", "rank 12"]
    click(page, "document.querySelector('#waits button')")
    assert page.evaluate("document.querySelector('#waits button').ariaPressed") == "true"
    page.wait_until("location.hash.startsWith('#node=gpu-a4&t=')")
    assert page.evaluate("location.hash").endswith("&finding=storage-remote")
    for _ in range(3):
        click(page, "document.querySelector('#filters button')")
    page.wait_until("location.hash === ''")


def test_a_link_restores_filters_and_zoom(show: Any) -> None:
    page = show(make_one_hour_job(4, 4, 120, 400), "#node=gpu-a2&t=600-1200&finding=net-transfer")
    chips = "[...document.querySelectorAll('#filters button')].map(b => b.textContent)"
    assert page.evaluate(chips) == [
        "node gpu-a2 \u00d7",
        "cause net-transfer \u00d7",
        "10:00 to 20:00 \u00d7",
    ]
    page.evaluate("location.hash = '#t=0-60'")
    page.wait_until(f"{RANGE} === '0:00 to 1:00 of 1:00:12'")
    for broken in ("#node=%E0%A4%A&t=9-1&finding=", "#t=1e9-x", "#t=0-0&t=5-5", "#node=no-such"):
        page.evaluate(f"location.hash = '{broken}'")
        page.wait_for_frame()
        assert page.evaluate(RANGE) == "0:00 to 1:00:12 of 1:00:12", broken


def test_the_copy_button_copies_commands_unchanged(show: Any) -> None:
    page = show(make_one_hour_job(2, 2, 20, 40))
    page.evaluate(
        "navigator.clipboard ? navigator.clipboard.writeText = t => Promise.reject(t) : 0;"
        " document.execCommand = name => { window.copied = [name, getSelection().toString()];"
        " return true; }; 0"
    )
    click(page, "document.querySelector('pre.copy button')")
    page.wait_until("document.querySelector('pre.copy button').textContent === 'Copied'")
    assert page.evaluate("window.copied") == [
        "copy",
        "sudo sysctl -w sunrpc.tcp_slot_table_entries=128\nmount -o remount,nconnect=8 /data",
    ]


def test_scripts_format_amounts_like_python(show: Any) -> None:
    page = show(make_storage_report())
    cells = page.evaluate(
        "[...document.querySelectorAll('.heat tbody tr')].map(r => r.children[2].textContent)"
    )
    assert cells == [format_quantity(136 * 10**9, "ns"), format_quantity(90 * 10**9 + 7, "ns")]


def test_hostile_names_add_no_elements(show: Any) -> None:
    def counted(page: Browser) -> Any:
        return page.evaluate(
            "[document.scripts.length, document.styleSheets.length,"
            " document.querySelectorAll('img, a:not([href^=\"#\"]), iframe, [onerror]').length]"
        )

    assert counted(show(poison_strings(make_full_report(1), "x"))) == [2, 1, 0]
    for at in range(0, len(HOSTILE), 40):
        poison = " ".join(text[:20] for text in HOSTILE[at : at + 40])
        assert counted(show(poison_strings(make_full_report(1), poison))) == [2, 1, 0], ascii(
            poison
        )
    page = show(poison_strings(make_full_report(1), "</script><script>window.owned = 1</script>"))
    assert counted(page) == [2, 1, 0]
    assert page.evaluate("typeof window.owned") == "undefined"
    page = show(
        poison_strings(make_full_report(1), "<img src=x onerror=alert(1)>" + "\ud800\u202e" * 5000)
    )
    assert counted(page) == [2, 1, 0]
    click(page, "document.querySelector('.chips button')")
    assert counted(page) == [2, 1, 0]


def test_a_phone_needs_no_horizontal_scrolling(show: Any) -> None:
    page = show(make_one_hour_job(4, 4, 60, 100), width=390)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_printing_uses_the_light_theme_and_opens_all_details(show: Any, tmp_path: Path) -> None:
    page = show(make_one_hour_job(4, 4, 60, 100))
    page.set_color_scheme("dark")
    page.evaluate(
        "addEventListener('beforeprint', () => { window.seen = [document.documentElement.dataset"
        ".theme, document.querySelectorAll('details:not([open])').length]; })"
    )
    page.save_pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert page.evaluate("window.seen") == ["light", 0]
    assert page.evaluate("document.documentElement.dataset.theme") is None
    assert page.evaluate("document.querySelectorAll('details:not([open])').length") > 3


def test_a_page_of_a_thousand_nodes_is_usable(show: Any) -> None:
    page = show(make_one_hour_job(1000, 2, 120, 100))
    assert page.evaluate("document.querySelectorAll('.nodes button').length") == 1000
    click(page, "document.querySelectorAll('.nodes button')[3]")
    chips = "[...document.querySelectorAll('#filters button')].map(b => b.textContent)"
    assert page.evaluate(chips) == ["node gpu-a0004 \u00d7"]
    rows = "[...document.querySelectorAll('.heat tbody tr')].map(r => r.firstChild.textContent)"
    # Above 512 ranks rows are nodes; the chosen one is open.
    shown = page.evaluate(rows)
    assert shown[0] == "\u25be gpu-a0004" and sorted(shown[1:]) == ["rank 6", "rank 7"]


def test_node_and_rack_rows_expand_to_their_ranks(show: Any) -> None:
    report = make_one_hour_job(300, 2, 60, 50)
    nodes = [
        dataclasses.replace(node, rack=f"leaf{at // 100}") for at, node in enumerate(report.nodes)
    ]
    groups = (CulpritGroup("stage 0", (0, 7)),)
    page = show(dataclasses.replace(report, nodes=tuple(nodes), groups=groups))
    rows = "[...document.querySelectorAll('.heat tbody tr')].map(r => r.firstChild.textContent)"
    assert page.evaluate(rows)[0] == "\u25b8 gpu-a005"  # the fifth node: ranks 8 and 9, the culprit
    page.evaluate("document.querySelector('.heat tbody button').click()")
    page.wait_for_frame()
    assert page.evaluate(rows)[:2] == ["\u25be gpu-a005", "rank 9"]
    assert sorted(page.evaluate(rows)[1:4])[:2] == ["rank 8", "rank 9"]
    for by, expected in (("rack", ["leaf0", "leaf2", "leaf1"]), ("group", ["stage 0"])):
        page.evaluate(
            "(() => { const rows = document.querySelector('select[aria-label=Rows]');"
            f" rows.value = '{by}'; rows.dispatchEvent(new Event('change')); }})()"
        )
        page.wait_for_frame()
        assert page.evaluate(rows) == [f"\u25b8 {name}" for name in expected]
    counts = "[...document.querySelectorAll('.heat tbody tr')].map(r => r.children[1].textContent)"
    assert page.evaluate(counts) == ["2"]


def test_without_scripts_the_text_remains_readable(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    report = dataclasses.replace(make_storage_report(), title="runs/no-script")
    html = Html().render(report)
    forbidden = html.replace("script-src &#x27;sha256-", "script-src &#x27;sha256-not")
    assert forbidden != html
    file.write_text(forbidden, encoding="utf-8")
    browser.open(file, wait=False)
    browser.wait_until("document.readyState === 'complete'")
    text = browser.evaluate("document.body.innerText")
    assert "storage-local" in text and "runs/no-script" in text
    assert "Charts need scripts" in text
