"""`--format html`: the complete report as one file that needs only a browser.

The text is HTML, made here, so that it can be read, printed and searched where scripts
are disabled; the charts are drawn by `assets/*.js` from a block of JSON. A content
security policy admits exactly our style and our script, by their hashes, and nothing
else: a name in a recording could not fetch, send or run anything even if it became
markup.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import ClassVar

from clusterprof.output.renderers.html.code import render_code
from clusterprof.output.renderers.html.data import build_script_json, count_embedded_ranks
from clusterprof.output.renderers.html.markup import (
    Markup,
    build_element,
    build_family_script,
    build_family_style,
    join_markup,
    mark_trusted,
    render_patterns,
)
from clusterprof.output.renderers.html.tables import (
    render_coverage_gaps,
    render_details,
    render_life,
    render_slow_steps,
    render_utilization,
)
from clusterprof.output.renderers.html.verdict import render_causes, render_verdict
from clusterprof.output.renderers.text import wording
from clusterprof.report.model import Report

STYLES = ("colors.css", "page.css", "charts.css", "flame.css", "print.css")
SCRIPTS = (
    "words.js",
    "data.js",
    "state.js",
    "theme.js",
    "paint.js",
    "view.js",
    "loss.js",
    "timeline.js",
    "links.js",
    "input.js",
    "nodes.js",
    "heat.js",
    "lists.js",
    "cards.js",
    "frames.js",
    "flame.js",
    "main.js",
)
"""In load order; they share one function, so that the page defines no global name."""
_NAV = (
    ("verdict", "Verdict"),
    ("causes", "Causes"),
    ("when", "Timeline"),
    ("who", "Ranks"),
    ("where", "Lines of code"),
    ("life", "Life"),
    ("unknown", "Not seen"),
    ("books", "Ledger"),
)


class Html:
    """The complete report as one file for a browser, with charts, offline."""

    name: ClassVar[str] = "html"
    suffix: ClassVar[str] = ".html"

    def __init__(
        self, gpu_price_per_hour: float | None = None, currency: str = "USD", full: bool = False
    ) -> None:
        """full: embed the details of every rank, however many there are."""
        self._price = gpu_price_per_hour
        self._currency = currency
        self._full = full

    def render(self, report: Report) -> str:
        """Return the page; ASCII only, so that no change of encoding can damage it."""
        page = join_markup(
            mark_trusted("<!doctype html>\n"),
            build_element(
                "html", _render_head(report), mark_trusted("\n"), self._body(report), lang="en"
            ),
            mark_trusted("\n"),
        )
        return page.encode("ascii", "xmlcharrefreplace").decode("ascii")

    def _body(self, report: Report) -> Markup:
        main = build_element(
            "main",
            render_verdict(report, self._price, self._currency),
            render_causes(report),
            _render_timeline(),
            _render_ranks(report, self._full),
            render_code(report, _render_script_note()),
            render_life(report),
            render_utilization(report),
            render_coverage_gaps(report),
            render_details(report),
        )
        data = build_element(
            "script",
            mark_trusted(build_script_json(report, self._full)),
            type="application/json",
            id="data",
        )
        code = build_element("script", mark_trusted(load_script()))
        return build_element(
            "body", render_patterns(), _render_header(report), main, _render_footer(), data, code
        )


@cache
def load_style() -> str:
    """Load the complete style sheet."""
    return "\n".join((build_family_style(), *(_load_asset(name) for name in STYLES)))


@cache
def load_script() -> str:
    """Load the complete script."""
    parts = "\n".join((build_family_script(), *(_load_asset(name) for name in SCRIPTS)))
    return f"(function () {{\n'use strict';\n{parts}\n}})();\n"


def build_policy() -> str:
    """Build the content security policy: our style, our script, and nothing else."""
    return (
        f"default-src 'none'; script-src '{_compute_hash(load_script())}'; style-src"
        f" '{_compute_hash(load_style())}';"
        " base-uri 'none'; form-action 'none'"
    )


def _compute_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("ascii")).digest()).decode()


def _load_asset(name: str) -> str:
    folder = resources.files("clusterprof.output.renderers.html") / "assets"
    return (folder / name).read_text(encoding="ascii")


def _render_head(report: Report) -> Markup:
    return build_element(
        "head",
        build_element("meta", charset="utf-8"),
        build_element("meta", http_equiv="Content-Security-Policy", content=build_policy()),
        build_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        build_element("meta", name="referrer", content="no-referrer"),
        build_element("meta", name="color-scheme", content="light dark"),
        build_element("title", f"{report.title} - clusterprof"),
        build_element("style", mark_trusted(load_style())),
    )


def _render_header(report: Report) -> Markup:
    missing = {"where"} if report.code is None else set()
    missing |= {"life"} if report.life is None else set()
    links = [
        build_element("a", label, href=f"#{name}") for name, label in _NAV if name not in missing
    ]
    return build_element(
        "header",
        build_element("a", "clusterprof", href="#verdict", class_="brand"),
        build_element("nav", *links, aria_label="Sections"),
        build_element("div", id="tools"),
    )


def _render_timeline() -> Markup:
    return build_element(
        "section",
        build_element("h2", "Timeline: the run over time"),
        build_element("div", _render_script_note(), id="when-body"),
        id="when",
        class_="card",
    )


def _render_ranks(report: Report, full: bool) -> Markup:
    count = count_embedded_ranks(report, full)
    left_out = None
    if count < len(report.ranks):
        left_out = build_element(
            "p",
            f"Of {len(report.ranks):,} ranks {count:,} are listed one by one: culprits, and those"
            " that lost or caused most. The others are summed by node; all sums are exact. ",
            build_element("code", "clusterprof analyze RUN --format html --full -o report.html"),
            " lists all, and so does --json with --full.",
            class_="note",
        )
    return build_element(
        "section",
        build_element("h2", "Ranks: nodes, and ranks by cause"),
        left_out,
        build_element("div", _render_script_note(), id="who-body"),
        render_slow_steps(report),
        id="who",
        class_="card",
    )


def _render_script_note() -> Markup:
    return build_element(
        "p", "Charts need scripts; everything else on this page does not.", class_="note"
    )


def _render_footer() -> Markup:
    return build_element(
        "footer",
        build_element("p", wording.LEGEND),
        build_element("p", "Made by clusterprof. This file fetches nothing and sends nothing."),
    )
