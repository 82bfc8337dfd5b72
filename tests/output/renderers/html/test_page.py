"""The page: one file that holds everything, words that need no script, nothing foreign in it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest

from clusterprof.analysis.attribution.taxonomy import CAUSES
from clusterprof.output.renderers.html import markup
from clusterprof.output.renderers.html import page as page_module
from clusterprof.output.renderers.html.markup import (
    build_element,
    make_slug,
    mark_trusted,
    render_patterns,
)
from clusterprof.output.renderers.html.page import Html
from clusterprof.report.families import BUCKETS, FAMILIES
from clusterprof.report.history import WAITING_FOR_RANKS
from clusterprof.report.model import UNATTRIBUTED, Cause, Report
from tests.support.histories import make_one_hour_job
from tests.support.hostile_names import HOSTILE
from tests.support.hostile_reports import make_full_report, poison_strings
from tests.support.reports import ALL, make_clean_report, make_storage_report, make_underused_report

VOID = {"meta", "br"}


class Page(HTMLParser):
    """What a browser would make of a page, as far as the tests ask."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str, str]] = []
        self.styles: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attributes).get("type", ""), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag  # everything is closed, in order

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif inside == "style":
            self.styles.append(data)
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def ids(self) -> list[str]:
        return [printed["id"] for _, printed in self.elements if printed.get("id")]  # type: ignore[misc]


def page(report: Report) -> Page:
    return Page(Html(2.5, "EUR").render(report))


@pytest.mark.parametrize("name", ALL)
def test_every_report_renders_a_well_formed_page(name: str) -> None:
    page_text = page(ALL[name]())
    assert page_text.open == []
    assert len(page_text.ids()) == len(set(page_text.ids()))
    links = {printed["href"] for element, printed in page_text.elements if element == "a"}
    assert {link for link in links if link[1:] not in page_text.ids() or link[0] != "#"} == set()  # type: ignore[index]
    sections = ["verdict", "causes", "when", "who", "unknown", "books"]
    assert [value for value in page_text.ids() if value in sections] == sections


def test_the_page_loads_no_resources_and_runs_only_its_script() -> None:
    html = Html().render(make_full_report())
    result = Page(html)
    assert html.isascii() and html.startswith("<!doctype html>\n")
    assert [kind for kind, _ in result.scripts] == ["application/json", ""]
    assert result.scripts[1][1] == page_module.load_script()
    assert "".join(result.styles) == page_module.load_style()
    names = {name for _, printed in result.elements for name in printed}
    assert [name for name in names if name.startswith("on") or name in ("src", "style")] == []
    assert {element for element, _ in result.elements} & {"link", "img", "iframe", "base"} == set()
    for text in (page_module.load_script(), page_module.load_style()):
        assert "://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "</" not in text and "<!--" not in text


def test_the_content_security_policy_lists_script_and_style_hashes() -> None:
    page_text = page(make_storage_report())
    (element,) = [s for e, s in page_text.elements if e == "meta" and "http-equiv" in s]
    assert element["http-equiv"] == "Content-Security-Policy"

    def hashed(text: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"

    assert element["content"] == (
        f"default-src 'none'; script-src {hashed(page_text.scripts[1][1])};"
        f" style-src {hashed(''.join(page_text.styles))}; base-uri 'none'; form-action 'none'"
    )


def test_the_page_begins_with_the_verdict_and_the_first_screen() -> None:
    text = page(make_full_report()).text
    places = [
        text.index(words)
        for words in (
            "runs/cluster",
            "The data path waits for a network file system (storage-remote). This cost the most:"
            " 0.40 of 4.0 GPU-hours (10.1 %), caused by gpu-a1 rank 0",
            "17.1 % of device time in steps lost",
            "Lost 17.1 % of GPU time inside steps: 0.68 of 4.0 GPU-hours. That is about 1.71 EUR",
            "Main cause The data path waits for a network file system: 0.40 GPU-hours, 10.1 %."
            " storage-remote",
            "Where train.py:42 in Images.augment → PIL/Image.py:2450 Image.resize: 71 % ± 4",
            "gpu-a1 rank 0 (/data): 12.0 ms a read, the other node 400.0 µs; the same ranks",
            "Evidence 91.0 % of the waits, the loading thread was blocked on the file system",
            "Try next Raise the number of requests that may be outstanding on /data.",
            "mount -o remount,nconnect=8 /data",
            "Expected gain About 3.0 min, 5.0 % of the time in steps.",
            "Confidence 95 % (high): measured by one signal.",
            "Over time in bursts",
            "Causes, the largest first",
        )
    ]
    assert places == sorted(places)


def test_known_cost_and_time_savings_are_reported() -> None:
    report = make_one_hour_job(
        2, 2, 4, 4
    )  # 4 GPU-hours, of which 2,464 s were lost: 1.71 EUR at 2.50
    text = page(report).text
    assert "1.71 EUR lost at 2.50 EUR per GPU-hour" in text
    assert "3.0 min sooner finished with storage-remote fixed (2.4 min to 3.8 min)" in text
    assert "how much sooner the job would end is not known: the span graph has holes" in text
    assert "41,200 tokens per second; 46,900 if all were fixed" in text
    assert "MLPerf AU not known no accelerator time without input was measured" in text
    without = page(dataclasses.replace(report, impact=None)).text
    assert "That is about 1.71 EUR at 2.50 EUR per GPU-hour." in without
    assert "sooner finished" not in without
    assert "EUR" not in Page(Html().render(dataclasses.replace(report, impact=None))).text


def test_commands_keep_their_line_breaks() -> None:
    report = make_full_report()
    html = Html().render(report)
    assert "tcp_slot_table_entries=128\nmount -o remount,nconnect=8 /data</code></pre>" in html
    bare = tuple(dataclasses.replace(finding, advice=()) for finding in report.findings)
    html = Html().render(dataclasses.replace(report, findings=bare))
    assert "clusterprof explain net-transfer</code></pre>" in html


def test_unattributed_time_and_missing_signals_are_always_shown() -> None:
    for make in ALL.values():
        text = page(make()).text
        assert "without sufficient evidence of a cause" in text and "Not seen" in text
    assert (
        "no process loaded the probe. What to do: record with --inject auto."
        in page(ALL["nothing"]()).text
    )
    assert "Nothing is known to be missing." in page(ALL["clean"]()).text


def test_the_ledger_table_is_exact() -> None:
    text = page(make_storage_report()).text
    assert "lost 226.000000007 136.000000000 90.000000007" in text


def test_under_used_device_time_is_shown_separately() -> None:
    text = page(make_underused_report()).text
    assert (
        "under-used 66.8 % 2.2 min" in text and "Raise the batch size (84 % sure: measured" in text
    )


class TestHostileNames:
    """Every string of a report is one that a machine may have chosen."""

    def test_hostile_strings_add_no_page_elements(self) -> None:
        def shape(report: Report) -> list[tuple[str, list[str]]]:
            page_text = page(report)
            return [(element, sorted(printed)) for element, printed in page_text.elements]

        clean = shape(poison_strings(make_full_report(1), "x"))
        for at in range(0, len(HOSTILE), 24):
            poison = " ".join(text[:60] for text in HOSTILE[at : at + 24])
            report = poison_strings(make_full_report(1), poison)
            assert shape(report) == clean, ascii(poison)
            html = Html().render(report)
            assert html.isascii()
            bare = [line for line in html.splitlines() if line.lstrip().startswith("::")]
            assert "\x1b" not in html and bare == []

    def test_hostile_strings_are_cut_to_a_bounded_length(self) -> None:
        html = Html().render(poison_strings(make_full_report(1), "<\udc9b\u202e" * 4000))
        assert len(html) < 1_000_000
        assert re.search(r"[\ud800-\udfff]", html) is None

    def test_hostile_strings_stay_inside_the_data_block(self) -> None:
        poison = "</script><script>alert(1)</script><!--\u2028\ud800&"
        (_, data), (_, code) = page(poison_strings(make_full_report(1), poison)).scripts
        assert "<" not in data and ">" not in data and "&" not in data and data.isascii()
        assert json.loads(data)["nodes"][0].startswith("</script><script>alert(1)</script><!--")
        assert code == page_module.load_script()


def test_build_element_escapes_text_and_attributes() -> None:
    made = build_element(
        "p", '<b>&"', mark_trusted("<i></i>"), None, class_='a"b', data_x=3, hidden=True, id=None
    )
    assert made == '<p class="a&quot;b" data-x="3" hidden>&lt;b&gt;&amp;&quot;<i></i></p>'
    assert build_element("meta", charset="utf-8") == '<meta charset="utf-8">'
    with pytest.raises(ValueError, match="is not the name of an attribute"):
        build_element("p", **{"on x=": "1"})
    assert make_slug("</Script>::a b") == "script-a-b" and make_slug("漢字") == "x"


def test_every_cause_has_a_color_and_every_family_a_pattern() -> None:
    known = dataclasses.replace(make_clean_report(), causes=CAUSES)
    leaves = [cause for cause in CAUSES.values() if cause.manual_check]
    colors = {cause.id: markup.get_color(cause.id, known) for cause in leaves}
    assert colors == {cause.id: (cause.family, cause.tone) for cause in leaves}
    # A family has four tones; of more causes than that, two or more share one.
    families = {cause.family for cause in leaves}
    for family in families:
        tones = [cause.tone for cause in leaves if cause.family == family]
        assert set(tones) == set(range(min(4, len(tones)))), family
    assert markup.get_color(UNATTRIBUTED, known) == ("unattributed", 0)
    assert markup.get_color(WAITING_FOR_RANKS, known) == ("waiting", 0)
    assert markup.get_color("new-cause", known) == ("other", 0)
    unknown = Cause("new-cause", "new", "", "")
    assert (
        markup.get_color("new-cause", dataclasses.replace(known, causes={"new-cause": unknown}))[0]
        == "other"
    )
    plain = {"storage", "unattributed"}  # one solid color, and gray
    painted = {family.name for family in (*FAMILIES, *BUCKETS)}
    drawn = set(re.findall(r'id="p-([a-z0-9]+)"', render_patterns()))
    assert drawn == painted - plain
    assert {family.name for family in (*FAMILIES, *BUCKETS) if family.tile} == drawn
    assert all(len(family.tile) in (0, 16) for family in (*FAMILIES, *BUCKETS))


def test_both_themes_have_every_color() -> None:
    light: dict[str, str] = {}
    by_system: dict[str, str] = {}
    by_choice: dict[str, str] = {}
    for selector, body in re.findall(r"([^{}]*)\{([^{}]*)\}", page_module.load_style()):
        theme = {":root": light, ':root[data-theme="dark"]': by_choice}.get(
            selector.split("*/")[-1].strip(), by_system if ":root:not(" in selector else None
        )
        if theme is not None:
            theme.update(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", body))
    assert by_system == by_choice and set(light) == set(by_choice)
    assert {*(family.name for family in (*FAMILIES, *BUCKETS)), "other"} - set(light) == set()


def test_assets_are_kept_small() -> None:
    folder = resources.files("clusterprof.output.renderers.html") / "assets"
    names = {file.name for file in folder.iterdir()}
    assert names == {*page_module.STYLES, *page_module.SCRIPTS}
    for name in page_module.SCRIPTS:
        lines = (folder / name).read_text(encoding="ascii").splitlines()
        assert len(lines) <= 300 and max(map(len, lines)) <= 100, name
        assert lines[0].startswith("// "), f"{name} does not say what it is for"
        text = "\n".join(lines)
        assert re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text) is None
