"""Every finding in full: how much, whose, when, the evidence, how sure, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.findings import Culprit, Finding, Report
from clusterprof.renderers import numbers, sure, whose, words
from clusterprof.renderers.html.advice import remedies
from clusterprof.renderers.html.palette import css_class
from clusterprof.renderers.html.swatch import bar, swatch
from clusterprof.renderers.html.tags import Markup, join, slug, tag
from clusterprof.renderers.html.verdict import certain, cost_of
from clusterprof.renderers.matrix import amount
from clusterprof.units import human

_OPEN = 1  # findings whose details are shown at once
_MOST_CULPRITS = 8
_MOST_GROUPS = 3
_WIDTH = 240
_AMOUNTS = (("its own", "own_ns"), ("of others", "others_ns"), ("wins", "recoverable_ns"))


def causes(report: Report) -> Markup:
    """Return the section of all findings, the largest first."""
    cards = []
    taken: set[str] = set()
    for number, finding in enumerate(report.findings, 1):
        name = f"cause-{slug(finding.cause.id)}"
        name = f"{name}-{number}" if name in taken else name
        taken.add(name)
        cards.append(_card(number, finding, report, name))
    small = [f"{cause} {human(ns, 'ns')}" for cause, ns in words.small_causes(report)]
    if small:
        cards.append(tag("p", f"Too small to be a finding: {', '.join(small)}.", class_="note"))
    if not report.findings:
        cards.append(tag("p", "No cause took enough time to be a finding.", class_="note"))
    return tag("section", tag("h2", "Causes, the largest first"), *cards, id="causes")


def _card(number: int, finding: Finding, report: Report, name: str) -> Markup:
    colour = css_class(finding.cause.id, finding.cause.family)
    part = human(finding.share_ratio, "ratio")
    whole = report.window_ns if finding.outside_steps else report.in_step_ns
    head = tag(
        "summary",
        tag("span", str(number), class_="number"),
        swatch(colour),
        tag("span", tag("b", finding.cause.id), tag("span", words.title(finding)), class_="what"),
        tag("span", tag("b", part), tag("span", words.lost(finding)), class_="much"),
        bar([(colour, finding.lost_ns)], whole or 1, f"{part} of the time", _WIDTH),
        tag(
            "span",
            f"{sure.certainty(finding)} sure",
            class_="sure",
            title=f"how certain the cause is: {certain(finding)}",
        ),
    )
    body = tag(
        "div",
        tag("div", tag("h3", "What to do"), remedies(finding), class_="do-side"),
        tag("div", *_details(finding, report), class_="why-side"),
        class_="body",
    )
    return tag(
        "details", head, body,
        id=name, class_="card finding", data_finding=str(number - 1), open=number <= _OPEN,
    )  # fmt: skip


def _details(finding: Finding, report: Report) -> list[Markup | None]:
    whole = "recorded time, outside steps" if finding.outside_steps else "time in steps"
    facts = [
        ("Lost", f"{words.lost(finding)}, {human(finding.share_ratio, 'ratio')} of the {whole}"),
        ("Fixing only this wins", words.wins(finding)),
        ("Worth", cost_of(finding, report)),
        ("Sure", certain(finding)),
        ("Whose", whose.culprits(finding, _MOST_GROUPS) or "no rank's doing"),
        ("Beside", whose.beside(finding)),
        ("Since", whose.since(finding)),
        ("Waits", whose.persistence(finding)),
    ]
    rows = [tag("div", tag("dt", name), tag("dd", said)) for name, said in facts if said]
    return [tag("dl", *rows, class_="facts"), _evidence(finding), _culprits(finding)]


def _evidence(finding: Finding) -> Markup:
    if not finding.evidence:
        return tag("p", "No single number behind it was kept.", class_="note")
    rows = [
        tag(
            "tr",
            tag("th", item.name, scope="row"),
            tag("td", numbers.number(item), class_="n"),
            tag("td", item.note),
        )
        for item in finding.evidence
    ]
    return tag("table", tag("caption", "Evidence"), tag("tbody", *rows), class_="evidence")


def _culprits(finding: Finding) -> Markup | None:
    """Say of the chief culprits what each caused; None where that is not known."""
    chiefs = whose.chief_culprits(finding)
    if not chiefs or chiefs[0].own_ns is None:
        return None
    shown = chiefs[:_MOST_CULPRITS]
    amounts = [(word, field) for word, field in _AMOUNTS if any(getattr(c, field) for c in shown)]
    head = [tag("th", word, scope="col") for word in ("node", "rank", "resource")]
    head += [tag("th", word, scope="col", class_="n") for word, _ in amounts]
    rows = [_culprit(one, [field for _, field in amounts]) for one in shown]
    left = len(finding.culprits) - len(rows)
    more = tag("p", f"and {left:,} more; --json has them all", class_="note") if left else None
    table = tag(
        "table",
        tag("thead", tag("tr", *head)),
        tag("tbody", *rows),
    )
    about = "Whose: what each lost itself, and what others lost waiting for it"
    return join(tag("p", about, class_="note"), tag("div", table, class_="scroll"), more)


def _culprit(one: Culprit, fields: Sequence[str]) -> Markup:
    cells = [
        tag("th", one.node, scope="row", data_node=one.node),
        tag("td", "" if one.rank is None else str(one.rank)),
        tag("td", one.resource),
        *(
            tag("td", "" if ns is None else amount(ns), class_="n")
            for ns in (getattr(one, field) for field in fields)
        ),
    ]
    return tag("tr", *cells)
