"""The report as Markdown, for a pull request or a CI summary: verdict, causes, ledger, unknowns.

Foreign strings are written as character references where Markdown would read them, so that no
name becomes a link, a tag, a mention or a table cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from clusterprof.findings import Report
from clusterprof.renderers import (
    advised,
    course,
    header,
    numbers,
    sure,
    underfill,
    unseen,
    whose,
    words,
    worth,
)
from clusterprof.renderers.books import columns_of, exact_seconds, rows_of
from clusterprof.renderers.by import Table, tables
from clusterprof.renderers.matrix import amount, matrix_of
from clusterprof.renderers.text_safety import markdown_text as md
from clusterprof.units import human

_MOST_CULPRITS = 3  # whose amounts are told, of so many findings
_MOST_CAUSES = 5  # of the ranks by cause


class Markdown:
    """The report for a pull request, an issue or a CI summary."""

    name: ClassVar[str] = "markdown"
    suffix: ClassVar[str] = ".md"

    def __init__(
        self,
        gpu_price_per_hour: float | None = None,
        currency: str = "USD",
        most_ranks: int = 8,
        by: Sequence[str] = (),
        top: int | None = None,
    ) -> None:
        """`by`: the tables of `renderers.by`, of `top` rows."""
        self._price = gpu_price_per_hour
        self._currency = currency
        self._most_ranks = most_ranks
        self._by, self._top = tuple(by), top

    def render(self, report: Report) -> str:
        """Return the whole report."""
        return "\n".join(self._lines(report)) + "\n"

    def _lines(self, report: Report) -> Iterator[str]:
        yield f"## clusterprof: {md(report.title)}"
        yield ""
        yield f"**{md(words.verdict(report))}**"
        for sentence in (
            words.chief_cause(report),
            words.outside(report),
            words.money(report, self._price, self._currency),
            header.scope(report) + ".",
            header.place(report),
        ):
            if sentence:
                yield md(sentence, 600)
        for warning in words.warnings(report):
            yield ""
            yield f"> **Warning** {md(warning, 600)}"
        yield from _causes(report)
        for table in tables(report, self._by, self._top):
            yield from _table(table)
        yield from self._ranks(report)
        yield from _worth(report)
        yield from _underfilled(report)
        yield from _unknown(report)
        yield from self._ledger(report)

    def _ranks(self, report: Report) -> Iterator[str]:
        for told in whose.tail(report):
            yield from ("", f"{md(told[:1].upper() + told[1:], 600)}.")
        found = matrix_of(report, self._most_ranks, _MOST_CAUSES)
        if found is None:
            return
        yield from ("", "Where each rank stood still, and what it caused:", "")
        yield f"| rank | | {' | '.join(md(cause) for cause in found.causes)} | all |"
        yield "|---|---|" + "---:|" * (len(found.causes) + 1)
        for at, line in enumerate(found.lines):
            name = f"{line.label}, {md(line.node)}"
            if found.rest and at == len(found.lines) - 1:
                name = f"… {found.rest}"
            yield f"| {name} | felt | {' | '.join(map(amount, line.felt))} |"
            yield f"| | caused | {' | '.join(map(amount, line.caused))} |"

    def _ledger(self, report: Report) -> Iterator[str]:
        columns = columns_of(report, self._most_ranks)
        yield from ("", "<details><summary>Ledger, in seconds, exact</summary>", "")
        yield "| | " + " | ".join(column.heading for column in columns) + " |"
        yield "|---|" + "---:|" * len(columns)
        for row in rows_of(columns):
            label = "&emsp;" * row.depth + md(row.label)
            yield f"| {label} | " + " | ".join(exact_seconds(ns) for ns in row.ns) + " |"
        yield from ("", "</details>")


def _causes(report: Report) -> Iterator[str]:
    if not report.in_step_ns and not report.findings:
        return
    yield from ("", "| the accelerators waited for | lost | share | sure | fixing wins | whose |")
    yield "|---|---:|---:|---:|---:|---|"
    for finding in report.findings:
        outside = ", outside steps" if finding.outside_steps else ""
        cells = (
            f"**{md(finding.cause.id)}**: {md(finding.cause.title)}{outside}",
            words.lost(finding),
            human(finding.share_ratio, "ratio"),
            sure.certainty(finding),
            words.recoverable(finding, "cannot be said"),
            md(whose.culprits(finding, 3), 600),
        )
        yield f"| {' | '.join(cells)} |"
    for cause, ns in words.small_causes(report):
        part = words.share(ns, report.in_step_ns)
        yield f"| {md(cause)}, too small to be a finding | {human(ns, 'ns')} | {part} | | | |"
    part = words.share(report.unattributed_ns, report.in_step_ns)
    yield f"| **unattributed** | {human(report.unattributed_ns, 'ns')} | {part} | | | |"
    findings = words.in_step(report)
    for finding in findings[:_MOST_CULPRITS]:
        told = whose.caused(finding, _MOST_CULPRITS, report.in_step_ns)
        told += [text] if (text := whose.beside(finding)) else []
        if told:
            how = ", ".join(
                one for one in (whose.since(finding), whose.persistence(finding)) if one
            )
            yield from (
                "",
                f"{md(finding.cause.id)}, {md(how, 200)}:" if how else md(finding.cause.id),
            )
            yield ""
            yield from (f"- {md(line, 600)}" for line in told)
    if findings:
        evidence = "; ".join(numbers.evidence(item) for item in findings[0].evidence)
        yield from ("", f"**Do next:** {md(advised.first(findings[0]), 600)}")
        for text in advised.withheld(findings[0]):
            yield from ("", f"{md(text, 600)}.")
        if more := words.more_why(findings[0]):
            yield from ("", f"Fixing it wins {md(more, 600)}.")
        if evidence:
            yield from ("", f"Seen: {md(evidence, 600)}")
    found = course.course_of(report)
    if found is not None:
        yield from ("", f"Over time: {md(course.told(found))}")
    yield from advised.markdown(report)


def _table(table: Table) -> Iterator[str]:
    yield from ("", f"**{md(table.title.capitalize())}**")
    if table.rows:
        numbers = len(table.heads) - 1 - table.texts
        yield from ("", f"| {' | '.join(map(md, table.heads))} |")
        yield "|---|" + "---:|" * numbers + "---|" * table.texts
        yield from (f"| {' | '.join(md(cell, 600) for cell in row)} |" for row in table.rows)
    if table.rest:
        yield from ("", md(table.rest, 600))


def _worth(report: Report) -> Iterator[str]:
    told = worth.sentences(report)
    if told:
        yield from ("", "**Worth: with one cause fixed, and yardsticks**", "")
        yield from (f"- {md(line, 1000)}" for line in told)


def _underfilled(report: Report) -> Iterator[str]:
    told = underfill.sentences(report)
    if told:
        yield from ("", "**Under-filled, apart from lost time**", "")
        yield from (f"- {md(line, 1000)}" for line in told)


def _unknown(report: Report) -> Iterator[str]:
    yield from ("", "**Unattributed**", "")
    for reason, ns in report.unattributed_reasons:
        yield f"- {human(ns, 'ns')}: {md(unseen.reason(reason), 400)}"
    if not report.unattributed_reasons:
        yield "- nothing"
    yield from ("", "**Not seen**", "")
    for blind in unseen.blinds(report):
        yield f"- {md(blind, 2000)}"
    if not report.blinds:
        yield "- nothing is known to be missing"
    for note in report.notes:
        yield from ("", f"Note: {md(note, 600)}")
