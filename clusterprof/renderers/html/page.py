"""`--format html`: the whole report as one file that needs nothing but a browser.

The words are HTML, made here, so that they can be read, printed and searched where no script may
run; the charts are drawn by `assets/*.js` from a block of JSON. A content security policy lets
exactly our style and our script in, by their hashes, and nothing out: no name in a recording could
fetch, send or run anything even if it became markup.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import ClassVar

from clusterprof.findings import Report
from clusterprof.renderers import words
from clusterprof.renderers.html.causes import causes
from clusterprof.renderers.html.data import block
from clusterprof.renderers.html.swatch import patterns
from clusterprof.renderers.html.tables import books, fill, slow_steps, unknown
from clusterprof.renderers.html.tags import Markup, join, raw, tag
from clusterprof.renderers.html.verdict import verdict

STYLES = ("colors.css", "page.css", "charts.css", "print.css")
SCRIPTS = (
    "words.js", "data.js", "state.js", "theme.js", "paint.js", "view.js", "loss.js",
    "timeline.js", "links.js", "input.js", "nodes.js", "heat.js", "lists.js", "cards.js", "main.js",
)  # fmt: skip
"""In this order; they share one function, so that the page has no global name."""
_NAV = (
    ("verdict", "Verdict"),
    ("causes", "Causes"),
    ("when", "When"),
    ("who", "Who"),
    ("unknown", "Unknown"),
    ("books", "Ledger"),
)


class Html:
    """The whole report as one file for a browser, with charts, offline."""

    name: ClassVar[str] = "html"
    suffix: ClassVar[str] = ".html"

    def __init__(self, gpu_price_per_hour: float | None = None, currency: str = "USD") -> None:
        self._price = gpu_price_per_hour
        self._currency = currency

    def render(self, report: Report) -> str:
        """Return the page; only ASCII, so that no encoding on its way can harm it."""
        page = join(
            raw("<!doctype html>\n"),
            tag("html", _head(report), raw("\n"), self._body(report), lang="en"),
            raw("\n"),
        )
        return page.encode("ascii", "xmlcharrefreplace").decode("ascii")

    def _body(self, report: Report) -> Markup:
        main = tag(
            "main",
            verdict(report, self._price, self._currency),
            causes(report),
            _when(),
            _who(report),
            fill(report),
            unknown(report),
            books(report),
        )
        data = tag("script", raw(block(report)), type="application/json", id="data")
        code = tag("script", raw(script()))
        return tag("body", patterns(), _top(), main, _foot(), data, code)


@cache
def style() -> str:
    """Return the whole style sheet."""
    return "\n".join(_asset(name) for name in STYLES)


@cache
def script() -> str:
    """Return the whole script."""
    parts = "\n".join(_asset(name) for name in SCRIPTS)
    return f"(function () {{\n'use strict';\n{parts}\n}})();\n"


def policy() -> str:
    """Return the content security policy: our style, our script, and nothing else."""
    return (
        f"default-src 'none'; script-src '{_hash(script())}'; style-src '{_hash(style())}';"
        " base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("ascii")).digest()).decode()


def _asset(name: str) -> str:
    folder = resources.files("clusterprof.renderers.html") / "assets"
    return (folder / name).read_text(encoding="ascii")


def _head(report: Report) -> Markup:
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy()),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{report.title} - clusterprof"),
        tag("style", raw(style())),
    )


def _top() -> Markup:
    links = [tag("a", label, href=f"#{name}") for name, label in _NAV]
    return tag(
        "header",
        tag("a", "clusterprof", href="#verdict", class_="brand"),
        tag("nav", *links, aria_label="Sections"),
        tag("div", id="tools"),
    )


def _when() -> Markup:
    return tag(
        "section",
        tag("h2", "When: the run over time"),
        tag("div", _no_script(), id="when-body"),
        id="when", class_="card",
    )  # fmt: skip


def _who(report: Report) -> Markup:
    return tag(
        "section",
        tag("h2", "Who: nodes, and ranks by cause"),
        tag("div", _no_script(), id="who-body"),
        slow_steps(report),
        id="who", class_="card",
    )  # fmt: skip


def _no_script() -> Markup:
    return tag("p", "Charts need scripts; everything else on this page does not.", class_="note")


def _foot() -> Markup:
    return tag(
        "footer",
        tag("p", words.LEGEND),
        tag("p", "Made by clusterprof. This file fetches nothing and sends nothing."),
    )
