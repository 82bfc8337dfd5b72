"""Render the ledger of a cluster as one HTML file that needs only a browser.

It has the style sheet of the report's page (`output.renderers.html`) and no script. A content
security policy admits that style sheet and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from clusterprof.fleet.queries import CauseSums, FleetSummary
from clusterprof.fleet.sections import (
    FleetDocument,
    FleetTable,
    TimeFormat,
    build_fleet_document,
    format_ratio,
)
from clusterprof.output.renderers.html.markup import (
    BAR_WIDTH,
    Markup,
    build_element,
    join_markup,
    mark_trusted,
    render_bar,
    render_patterns,
    render_swatch,
)
from clusterprof.output.renderers.html.page import load_style
from clusterprof.report.families import BUCKETS, FAMILIES
from clusterprof.report.model import UNATTRIBUTED
from clusterprof.units import format_quantity

_FAMILY_NAMES = {family.name for family in (*FAMILIES, *BUCKETS)}
_MAX_LEGEND = 10
_MAX_WEEKS = 53
_OTHERS = "smaller causes"
_CODE = re.compile(r"`([^`]+)`")


def render_fleet_page(summary: FleetSummary, top: int = 50) -> str:
    """Render the page; ASCII only, so that no change of encoding can damage it."""
    document = build_fleet_document(summary, top)
    time = TimeFormat(summary.sums.window_ns)
    main = build_element(
        "main",
        _render_summary(document, summary, time),
        _render_trend(summary),
        *(_render_section(table) for table in document.tables),
    )
    page = join_markup(
        mark_trusted("<!doctype html>\n"),
        build_element(
            "html",
            _render_head(document.title),
            mark_trusted("\n"),
            build_element(
                "body", render_patterns(), _render_header(document), main, _render_footer(document)
            ),
            lang="en",
        ),
        mark_trusted("\n"),
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _load_page_style() -> str:
    folder = resources.files("clusterprof.fleet") / "assets"
    return "\n".join((load_style(), (folder / "fleet.css").read_text(encoding="ascii")))


def _render_head(title: str) -> Markup:
    style = _load_page_style()
    digest = base64.b64encode(hashlib.sha256(style.encode("ascii")).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return build_element(
        "head",
        build_element("meta", charset="utf-8"),
        build_element("meta", http_equiv="Content-Security-Policy", content=policy),
        build_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        build_element("meta", name="referrer", content="no-referrer"),
        build_element("meta", name="color-scheme", content="light dark"),
        build_element("title", f"{title} - clusterprof fleet"),
        build_element("style", mark_trusted(style)),
    )


def _render_header(document: FleetDocument) -> Markup:
    links = [("summary", "Summary"), ("trend", "Trend")]
    links += [(table.name, table.name.capitalize()) for table in document.tables]
    return build_element(
        "header",
        build_element("a", "clusterprof", href="#summary", class_="brand"),
        build_element(
            "nav",
            *(build_element("a", label, href=f"#{name}") for name, label in links),
            aria_label="Sections",
        ),
    )


def _render_summary(document: FleetDocument, summary: FleetSummary, time: TimeFormat) -> Markup:
    warnings = [
        build_element("p", f"{warning}.", class_="warning", role="note")
        for warning in document.warnings
    ]
    facts = [
        build_element("div", build_element("dt", label), build_element("dd", text))
        for label, text in document.facts
    ]
    return build_element(
        "section",
        build_element(
            "div",
            build_element("h1", "Where the GPU time of the cluster goes"),
            build_element("p", document.title, class_="title"),
            build_element("p", document.scope, class_="scope"),
            class_="masthead",
        ),
        *warnings,
        _render_tiles(summary, time),
        _render_causes_bar(summary),
        build_element("dl", *facts, class_="answers"),
        id="summary",
        class_="card",
    )


def _render_tiles(summary: FleetSummary, time: TimeFormat) -> Markup:
    sums = summary.sums
    bound = "≤ " if summary.upper_bound and sums.lost_ns else ""
    tiles = [
        (bound + format_ratio(sums.lost_ns, sums.in_step_ns), "lost, of GPU time in steps"),
        (bound + time.format(sums.lost_ns), f"lost {time.unit}"),
        (time.format(sums.outside_ns), f"{time.unit} held but idle"),
        (time.format(sums.window_ns), f"{time.unit} held"),
        (f"{sums.jobs:,}", "jobs"),
        (f"{len(summary.lemons):,}", f"lemons of {len(summary.nodes):,} nodes"),
    ]
    if sums.lost_cost is not None:
        cost = format_quantity(sums.lost_cost, "cost")
        tiles.insert(2, (f"{cost} {summary.currency}", "lost"))
    return build_element(
        "div",
        *(
            build_element(
                "div", build_element("strong", value), build_element("span", label), class_="tile"
            )
            for value, label in tiles
        ),
        class_="tiles",
    )


def _get_color(cause: CauseSums | None) -> str:
    """Return the CSS classes of a cause's color; those of "other" where its family is unknown."""
    if cause is not None and cause.cause == UNATTRIBUTED:
        return "k-unattributed tone0"
    if cause is None or cause.family not in _FAMILY_NAMES:
        return "k-other tone0"
    return f"k-{cause.family} tone{cause.tone if 0 <= cause.tone <= 3 else 0}"


def _render_causes_bar(summary: FleetSummary) -> Markup | None:
    """Render all lost time by cause as one bar with a legend; the smallest causes are summed."""
    causes = [cause for cause in summary.causes if cause.lost_ns]
    if not causes:
        return None
    parts = [(cause.cause, _get_color(cause), cause.lost_ns) for cause in causes[:_MAX_LEGEND]]
    rest_ns = sum(cause.lost_ns for cause in causes[_MAX_LEGEND:])
    parts += [(_OTHERS, _get_color(None), rest_ns)] if rest_ns else []
    whole_ns = sum(ns for _, _, ns in parts)
    legend = [
        build_element(
            "li",
            render_swatch(color),
            f" {name if name != UNATTRIBUTED else 'not known'} ",
            build_element("b", format_ratio(ns, whole_ns)),
        )
        for name, color, ns in parts
    ]
    bars = [(color, ns) for _, color, ns in parts]
    return build_element(
        "figure",
        render_bar(bars, whole_ns, "lost time by cause", BAR_WIDTH),
        build_element("ul", *legend, class_="legend"),
    )


def _render_trend(summary: FleetSummary) -> Markup:
    """Render the lost share of each week as a bar by cause, all on one scale."""
    weeks = [week for week in summary.weeks if week.sums.in_step_ns][-_MAX_WEEKS:]
    causes = {cause.cause: cause for cause in summary.causes}
    order = {cause.cause: number for number, cause in enumerate(summary.causes)}
    largest = max((week.sums.lost_ns / week.sums.in_step_ns for week in weeks), default=0.0)
    rows = []
    for week in weeks:
        parts = sorted(week.causes, key=lambda part: order.get(part[0], len(order)))
        bars = [(_get_color(causes.get(cause)), ns) for cause, ns in parts]
        whole_ns = max(round(week.sums.in_step_ns * largest), 1)
        share = format_ratio(week.sums.lost_ns, week.sums.in_step_ns)
        label = f"lost in week {week.week or 'not known'}: {share}"
        rows.append(
            build_element(
                "tr",
                build_element("th", week.week or "not known", scope="row"),
                build_element("td", share, class_="n"),
                build_element(
                    "td", render_bar(bars, whole_ns, label, BAR_WIDTH), class_="bar-cell"
                ),
            )
        )
    return build_element(
        "section",
        build_element("h2", "Lost share of GPU time in steps, by week and cause"),
        build_element("table", build_element("tbody", *rows), class_="trend")
        if rows
        else build_element("p", "No job has time inside steps.", class_="note"),
        build_element(
            "p", "Colors as above. Weeks by the start of the job, in UTC.", class_="note"
        ),
        id="trend",
        class_="card",
    )


def _render_section(table: FleetTable) -> Markup:
    heads = [
        build_element("th", heading.text, scope="col", class_="n" if heading.is_number else None)
        for heading in table.headings
    ]
    rows = []
    for row in table.rows:
        cells = [build_element("th", row[0], scope="row")]
        cells += [
            build_element("td", text, class_="n" if heading.is_number else "name")
            for text, heading in zip(row[1:], table.headings[1:])
        ]
        rows.append(build_element("tr", *cells))
    omitted_text = f"{table.left_out:,} more: --top N. " if table.left_out else ""
    return build_element(
        "section",
        build_element("h2", table.title),
        build_element(
            "div",
            build_element(
                "table",
                build_element("thead", build_element("tr", *heads)),
                build_element("tbody", *rows),
                class_="grid",
            ),
            class_="scroll",
        ),
        build_element("p", *_render_note(omitted_text + table.note), class_="note"),
        id=table.name,
        class_="card lemons" if table.name == "lemons" else "card",
    )


def _render_note(text: str) -> list[Markup | str]:
    """Render a note of ours, in which words between backquotes are code."""
    parts = _CODE.split(text)
    return [
        build_element("code", part) if number % 2 else part for number, part in enumerate(parts)
    ]


def _render_footer(document: FleetDocument) -> Markup:
    return build_element(
        "footer",
        *(build_element("p", note) for note in document.notes),
        build_element("p", "Made by clusterprof. This file fetches nothing and sends nothing."),
    )
