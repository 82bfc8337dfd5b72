"""Sections below the findings: utilization, coverage gaps, metrics, ledger, recording."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.output.renderers.html.markup import (
    BAR_WIDTH,
    Markup,
    build_element,
    render_bar,
    render_swatch,
)
from clusterprof.output.renderers.text import culprits, impact, life, summary, wording
from clusterprof.output.renderers.text.tables import (
    TextTable,
    build_ledger_columns,
    build_ledger_rows,
    format_exact_seconds,
)
from clusterprof.report.aggregate import name_full_list
from clusterprof.report.life import Life
from clusterprof.report.model import Report
from clusterprof.units import format_quantity

_MAX_RANKS = 8  # columns of the ledger
_MAX_SINGLE_NODES = 8  # with more nodes, those without damage share a line
_UTILIZATION_PARTS = (
    ("lost", "k-waiting", "in the ledger of lost time"),
    ("well_used", "k-productive", "well used"),
    ("under_used", "k-underfilled", "under-used"),
    ("unmeasured", "k-unattributed", "not known"),
)


def render_slow_steps(report: Report) -> Markup | None:
    """Render how long steps take and which ranks delay the slow ones."""
    return _render_list(culprits.describe_slow_steps(report))


def render_utilization(report: Report) -> Markup | None:
    """Render the utilization ledger of busy devices; None if it was not computed."""
    utilization_totals = report.device_utilization
    if utilization_totals is None:
        return None
    content: list[Markup | str | None] = []
    if utilization_totals.busy_ns:
        parts = [
            (label, color, getattr(utilization_totals, f"{field}_ns"))
            for field, color, label in _UTILIZATION_PARTS
        ]
        legend = [
            build_element(
                "li",
                render_swatch(color),
                f" {label} ",
                build_element("b", wording.format_share(ns, utilization_totals.busy_ns)),
                f" {format_quantity(ns, 'ns')}",
            )
            for label, color, ns in parts
            if ns
        ]
        segments = [(color, ns) for _, color, ns in parts]
        label = "how well busy devices were used"
        content.append(render_bar(segments, utilization_totals.busy_ns, label, BAR_WIDTH))
        content.append(build_element("ul", *legend, class_="legend"))
    content.append(_render_list(impact.describe_utilization(report)))
    if utilization_totals.why_missing:
        content.append(
            build_element("p", f"Not known: {utilization_totals.why_missing}.", class_="note")
        )
    elif not impact.describe_utilization(report):
        content.append(build_element("p", "No recommendation.", class_="note"))
    return build_element(
        "section",
        build_element("h2", "Device utilization while busy, separate from lost time"),
        build_element(
            "p",
            "A device can be busy and under-used. None of this is idle time or counted as lost.",
            class_="note",
        ),
        *content,
        id="fill",
        class_="card",
    )


_LIFE_COLORS = {
    "queued": "k-other tone3",
    "startup": "k-startup",
    "down": "k-fail",
    "restart": "k-startup tone2",
    "hang": "k-fail tone2",
    "after": "k-other",
    "unmeasured": "k-unattributed",
    "checkpoint": "k-checkpoint",
    "evaluation": "k-eval",
    "lost": "k-waiting",
    "repeated": "k-fail tone1",
    "training": "k-productive",
}
"""Part of a life -> its color."""


def render_life(report: Report) -> Markup | None:
    """Render the life of the job as a bar and its parts; None without a life."""
    whole = report.life
    if whole is None:
        return None
    sentences = _render_list(life.describe_life(report))
    content: list[Markup | None] = [sentences]
    if whole.total_ns:
        segments = [(_LIFE_COLORS[part.name], part.ns or 0) for part in whole.parts]
        label = "what the wall time of all devices was"
        content = [render_bar(segments, whole.total_ns, label, BAR_WIDTH)]
        content.append(_render_life_legend(whole))
        content.append(sentences)
        content += [_render_text_table(table) for table in life.build_life_tables(report)[1:]]
    return build_element(
        "section", build_element("h2", "Life of the job"), *content, id="life", class_="card"
    )


def _render_life_legend(whole: Life) -> Markup:
    items = [
        build_element(
            "li",
            render_swatch(_LIFE_COLORS[part.name]),
            f" {part.title} ",
            build_element("b", wording.format_share(part.ns, whole.total_ns)),
            f" {format_quantity(part.ns, 'ns')}",
        )
        for part in life.list_shown_parts(whole)
        if part.ns is not None
    ]
    return build_element("ul", *items, class_="legend")


def _render_text_table(table: TextTable) -> Markup:
    """Render a table of finished text; the first column names the row."""
    first_text = len(table.heads) - table.texts
    classes = [
        None if column == 0 or column >= first_text else "n" for column in range(len(table.heads))
    ]
    head = [
        build_element("th", name, scope="col", class_=class_)
        for name, class_ in zip(table.heads, classes)
    ]
    rows = [
        build_element(
            "tr",
            build_element("th", row[0], scope="row"),
            *(
                build_element("td", cell, class_=class_)
                for cell, class_ in zip(row[1:], classes[1:])
            ),
        )
        for row in table.rows
    ]
    body = build_element(
        "table", build_element("thead", build_element("tr", *head)), build_element("tbody", *rows)
    )
    note = build_element("p", table.rest, class_="note") if table.rest else None
    return build_element("div", body, note, class_="scroll")


def render_coverage_gaps(report: Report) -> Markup:
    """Render *Unattributed* and *Not seen*, always."""
    part = wording.format_share(report.unattributed_ns, report.lost_ns)
    amount = format_quantity(report.unattributed_ns, "ns")
    reasons = [
        f"{format_quantity(ns, 'ns')}: {wording.describe_unattributed_reason(code)}"
        for code, ns in report.unattributed_reasons
    ]
    coverage_gaps = wording.list_coverage_gaps(report)
    return build_element(
        "section",
        build_element(
            "div",
            build_element("h2", "Unattributed"),
            build_element(
                "p", f"{amount}, {part} of the loss, without sufficient evidence of a cause."
            ),
            _render_list(reasons),
        ),
        build_element(
            "div",
            build_element("h2", "Not seen"),
            _render_list(coverage_gaps) or build_element("p", "Nothing is known to be missing."),
        ),
        id="unknown",
        class_="card two",
    )


def render_details(report: Report) -> Markup:
    """Render the reference sections: metrics, efficiency metrics, ledger, recording, notes."""
    parts = [
        ("Measures", _render_metrics(report)),
        ("Efficiency metrics", _render_efficiency_metrics(report)),
        ("Ledger, in seconds, exact to the nanosecond", _render_ledger(report)),
        (
            "Recording",
            _render_list(summary.describe_recordings(report, _MAX_SINGLE_NODES, " recorded")),
        ),
        ("Notes", _render_list([*report.notes, wording.LEGEND])),
    ]
    sections = [
        build_element(
            "details", build_element("summary", build_element("h2", name)), body, class_="card book"
        )
        for name, body in parts
        if body is not None
    ]
    return build_element("section", *sections, id="books")


def _render_list(lines: Sequence[str]) -> Markup | None:
    return (
        build_element("ul", *(build_element("li", line) for line in lines), class_="lines")
        if lines
        else None
    )


def _render_metrics(report: Report) -> Markup | None:
    rows = []
    for metric in report.metrics:
        if metric.value is None:
            cells = [
                build_element("td", "not known", class_="n"),
                build_element("td", metric.why_missing),
            ]
        else:
            bound = "" if metric.bound == "exact" else f"{metric.bound} "
            value = bound + format_quantity(metric.value, metric.unit)
            cells = [build_element("td", value, class_="n"), build_element("td", "")]
        rows.append(build_element("tr", build_element("th", metric.name, scope="row"), *cells))
    return _render_table(rows) if rows else None


def _render_efficiency_metrics(report: Report) -> Markup | None:
    job_impact = report.impact
    if job_impact is None:
        return None
    rows = [
        build_element(
            "tr",
            build_element("th", name, scope="row"),
            build_element("td", "not known" if value is None else f"{value:,.4g}", class_="n"),
            build_element("td", how),
        )
        for name, value, how in job_impact.efficiency_metrics
    ]
    pairs = (
        (
            "tokens per second",
            job_impact.tokens_per_second,
            job_impact.tokens_per_second_if_fixed,
            "",
        ),
        ("samples per second", job_impact.samples_per_second, None, ""),
        (
            "cost per million tokens",
            job_impact.cost_per_million_tokens,
            job_impact.cost_per_million_tokens_if_fixed,
            f" {job_impact.currency}",
        ),
    )
    for name, current, fixed, unit in pairs:
        if current is not None:
            fixed_text = "" if fixed is None else f"{fixed:,.2f}{unit} with every finding fixed"
            cells = (
                build_element("td", f"{current:,.2f}{unit}", class_="n"),
                build_element("td", fixed_text),
            )
            rows.append(build_element("tr", build_element("th", name, scope="row"), *cells))
    return _render_table(rows) if rows else None


def _render_table(rows: Sequence[Markup]) -> Markup:
    return build_element(
        "div", build_element("table", build_element("tbody", *rows)), class_="scroll"
    )


def _render_ledger(report: Report) -> Markup | None:
    if not report.ranks:
        return None
    columns = build_ledger_columns(report, _MAX_RANKS)
    head = [build_element("th", "", scope="col")]
    for column in columns:
        node = None if column.rank is None else build_element("span", f" {column.rank.node}")
        head.append(build_element("th", column.heading, node, scope="col", class_="n"))
    lines = [
        build_element(
            "tr",
            build_element("th", row.label, scope="row", class_=f"depth{row.depth}"),
            *(build_element("td", format_exact_seconds(ns), class_="n") for ns in row.ns),
        )
        for row in build_ledger_rows(columns)
    ]
    hidden = len(report.ranks) - _MAX_RANKS
    note = f"{hidden:,} ranks that lost less are omitted; {name_full_list(report)} lists them all."
    table = build_element(
        "table",
        build_element("thead", build_element("tr", *head)),
        build_element("tbody", *lines),
        class_="ledger",
    )
    return build_element(
        "div",
        table,
        build_element("p", note, class_="note") if hidden > 0 else None,
        class_="scroll",
    )
