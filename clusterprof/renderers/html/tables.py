"""What stands below the findings: fill, unknowns, measures, the exact ledger, the recording."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.findings import Report
from clusterprof.renderers import header, underfill, unseen, whose, words
from clusterprof.renderers.books import columns_of, exact_seconds, rows_of
from clusterprof.renderers.html.swatch import BAR_WIDTH, bar, swatch
from clusterprof.renderers.html.tags import Markup, tag
from clusterprof.units import human

_MOST_RANKS = 8  # columns of the ledger
_ALONE = 8  # up to so many nodes have a line of their own
_FILL = (
    ("lost", "k-waiting", "in the ledger of lost time"),
    ("filled", "k-productive", "filled"),
    ("underfilled", "k-underfilled", "under-filled"),
    ("unmeasured", "k-unattributed", "not known"),
)


def slow_steps(report: Report) -> Markup | None:
    """Say how long steps take and who sets the slow ones."""
    return _list(whose.tail(report))


def fill(report: Report) -> Markup | None:
    """Return the ledger of how work filled the devices, None where nothing was looked at."""
    found = report.underfill
    if found is None:
        return None
    said: list[Markup | str | None] = []
    if found.busy_ns:
        parts = [(label, colour, getattr(found, f"{field}_ns")) for field, colour, label in _FILL]
        told = [
            tag("li", swatch(colour), f" {label} ", tag("b", words.share(ns, found.busy_ns)),
                f" {human(ns, 'ns')}")
            for label, colour, ns in parts if ns
        ]  # fmt: skip
        segments = [(colour, ns) for _, colour, ns in parts]
        label = "how busy devices were filled"
        said.append(bar(segments, found.busy_ns, label, BAR_WIDTH))
        said.append(tag("ul", *told, class_="legend"))
    said.append(_list(underfill.sentences(report)))
    if found.why_missing:
        said.append(tag("p", f"Not known: {found.why_missing}.", class_="note"))
    elif not underfill.sentences(report):
        said.append(tag("p", "Nothing is advised.", class_="note"))
    return tag(
        "section",
        tag("h2", "How full the devices were, apart from lost time"),
        tag(
            "p",
            "A device can be busy and hardly filled. None of this is idle, nor counted as lost.",
            class_="note",
        ),
        *said, id="fill", class_="card",
    )  # fmt: skip


def unknown(report: Report) -> Markup:
    """Return *Unattributed* and *Not seen*, always."""
    part = words.share(report.unattributed_ns, report.lost_ns)
    amount = human(report.unattributed_ns, "ns")
    reasons = [
        f"{human(ns, 'ns')}: {unseen.reason(code)}" for code, ns in report.unattributed_reasons
    ]
    blinds = unseen.blinds(report)
    return tag(
        "section",
        tag("div", tag("h2", "Unattributed"),
            tag("p", f"{amount}, {part} of the loss, without sufficient evidence of a cause."),
            _list(reasons)),
        tag("div", tag("h2", "Not seen"),
            _list(blinds) or tag("p", "Nothing is known to be missing.")),
        id="unknown", class_="card two",
    )  # fmt: skip


def books(report: Report) -> Markup:
    """Return what a reader looks up: measures, yardsticks, ledger, recording, notes."""
    parts = [
        ("Measures", _measures(report)),
        ("Yardsticks", _yardsticks(report)),
        ("Ledger, in seconds, exact to the nanosecond", _ledger(report)),
        ("Recording", _list(header.recordings(report, _ALONE, " recorded"))),
        ("Notes", _list([*report.notes, words.LEGEND])),
    ]
    made = [
        tag("details", tag("summary", tag("h2", name)), body, class_="card book")
        for name, body in parts
        if body is not None
    ]
    return tag("section", *made, id="books")


def _list(lines: Sequence[str]) -> Markup | None:
    return tag("ul", *(tag("li", line) for line in lines), class_="lines") if lines else None


def _measures(report: Report) -> Markup | None:
    rows = []
    for metric in report.metrics:
        if metric.value is None:
            cells = [tag("td", "not known", class_="n"), tag("td", metric.why_missing)]
        else:
            bound = "" if metric.bound == "exact" else f"{metric.bound} "
            value = bound + human(metric.value, metric.unit)
            cells = [tag("td", value, class_="n"), tag("td", "")]
        rows.append(tag("tr", tag("th", metric.name, scope="row"), *cells))
    return _table(rows) if rows else None


def _yardsticks(report: Report) -> Markup | None:
    worth = report.worth
    if worth is None:
        return None
    rows = [
        tag(
            "tr",
            tag("th", name, scope="row"),
            tag("td", "not known" if value is None else f"{value:,.4g}", class_="n"),
            tag("td", how),
        )
        for name, value, how in worth.yardsticks
    ]
    pairs = (
        ("tokens per second", worth.tokens_per_second, worth.tokens_per_second_if_fixed, ""),
        ("samples per second", worth.samples_per_second, None, ""),
        (
            "cost per million tokens", worth.cost_per_million_tokens,
            worth.cost_per_million_tokens_if_fixed, f" {worth.currency}",
        ),
    )  # fmt: skip
    for name, now, fixed, unit in pairs:
        if now is not None:
            then = "" if fixed is None else f"{fixed:,.2f}{unit} with every finding fixed"
            cells = (tag("td", f"{now:,.2f}{unit}", class_="n"), tag("td", then))
            rows.append(tag("tr", tag("th", name, scope="row"), *cells))
    return _table(rows) if rows else None


def _table(rows: Sequence[Markup]) -> Markup:
    return tag("div", tag("table", tag("tbody", *rows)), class_="scroll")


def _ledger(report: Report) -> Markup | None:
    if not report.ranks:
        return None
    columns = columns_of(report, _MOST_RANKS)
    head = [tag("th", "", scope="col")]
    for column in columns:
        node = None if column.rank is None else tag("span", f" {column.rank.node}")
        head.append(tag("th", column.heading, node, scope="col", class_="n"))
    lines = [
        tag(
            "tr",
            tag("th", row.label, scope="row", class_=f"depth{row.depth}"),
            *(tag("td", exact_seconds(ns), class_="n") for ns in row.ns),
        )
        for row in rows_of(columns)
    ]
    left = len(report.ranks) - _MOST_RANKS
    more = f"{left:,} ranks that lost less are left out; --json has them all." if left > 0 else ""
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *lines), class_="ledger")
    return tag("div", table, tag("p", more, class_="note") if more else None, class_="scroll")
