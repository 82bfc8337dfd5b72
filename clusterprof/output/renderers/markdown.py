"""The report as Markdown for a pull request, an issue or a CI summary.

Foreign strings are written as character references where Markdown would interpret them,
so that no name becomes a link, a tag, a mention or a table cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from clusterprof.output.renderers.text import (
    advice,
    code,
    culprits,
    impact,
    life,
    summary,
    trend,
    wording,
)
from clusterprof.output.renderers.text.first_screen import build_first_screen
from clusterprof.output.renderers.text.safety import escape_markdown as md
from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.output.renderers.text.tables import (
    TextTable,
    build_cause_matrix,
    build_ledger_columns,
    build_ledger_rows,
    build_tables,
    format_cell,
    format_exact_seconds,
)
from clusterprof.report.model import Report
from clusterprof.units import format_quantity

_MAX_ANSWERS = 4  # of imported files on the first screen
_MAX_CULPRITS = 3  # findings, and culprits of each, whose amounts are written
_MAX_MATRIX_CAUSES = 5  # in the matrix of ranks by causes


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
        full: bool = True,
    ) -> None:
        """by: names of tables (`TABLE_NAMES`), each with `top` rows.

        full: write all sections, not only the first screen.
        """
        self._price = gpu_price_per_hour
        self._currency = currency
        self._most_ranks = most_ranks
        self._by, self._top = tuple(by), top
        self._full = full

    def render(self, report: Report) -> str:
        """Return the report: the first screen, or all of it."""
        parts = self._lines(report) if self._full else self._screen(report)
        return "\n".join(parts) + "\n"

    def _screen(self, report: Report) -> Iterator[str]:
        """Yield the first screen: a list of labeled sentences, and a table of causes."""
        screen = build_first_screen(report, self._price, self._currency)
        yield from (f"## clusterprof: {md(screen.title)}", "", md(screen.scope, 600))
        for text in (*summary.select_answers(report, _MAX_ANSWERS), *screen.warnings):
            yield from ("", f"> {md(text, 600)}")
        yield ""
        for row in screen.rows:
            yield (
                f"- **{row.label}:** {md(row.text, 1000)}"
                if row.label
                else (f"  {md(row.text, 1000)}")
            )
        if screen.causes:
            yield from ("", f"| lost, of {screen.whole} | share |", "|---|---:|")
            for cause in screen.causes:
                yield f"| {md(cause.name)} | {format_quantity(cause.share_ratio, 'ratio')} |"
        if screen.trend:
            yield from ("", f"Over time: {md(screen.trend)}")
        for table in build_tables(report, self._by, self._top):
            yield from _render_table(table)
        yield from ("", f"Not measured: {md(screen.gaps, 600)}")
        yield from ("", f"More: {md('; '.join(screen.more), 600)}")

    def _lines(self, report: Report) -> Iterator[str]:
        yield f"## clusterprof: {md(report.title)}"
        yield ""
        for answer in summary.select_answers(report, len(report.answers)):
            yield from (f"**{md(answer, 600)}**", "")
        yield f"**{md(wording.describe_verdict(report))}**"
        for sentence in (
            wording.describe_main_cause(report),
            wording.describe_time_outside_steps(report),
            wording.describe_cost(report, self._price, self._currency),
            summary.describe_scope(report) + ".",
            summary.describe_nodes(report),
        ):
            if sentence:
                yield md(sentence, 600)
        if where := summary.find_main_line(report):
            yield from ("", f"**Where:** {md(where, 600)}")
        for warning in wording.list_warnings(report):
            yield ""
            yield f"> **Warning** {md(warning, 600)}"
        yield from _render_causes(report)
        yield from _render_lines(report)
        for table in build_tables(report, self._by, self._top):
            yield from _render_table(table)
        yield from self._ranks(report)
        yield from _render_life(report)
        yield from _render_impact(report)
        yield from _render_utilization(report)
        yield from _render_coverage_gaps(report)
        yield from self._ledger(report)

    def _ranks(self, report: Report) -> Iterator[str]:
        for sentence in culprits.describe_slow_steps(report):
            yield from ("", f"{md(sentence[:1].upper() + sentence[1:], 600)}.")
        cause_matrix = build_cause_matrix(report, self._most_ranks, _MAX_MATRIX_CAUSES)
        if cause_matrix is None:
            return
        yield from ("", "Time that each rank lost, and time that it caused:", "")
        yield f"| rank | | {' | '.join(md(cause) for cause in cause_matrix.causes)} | all |"
        yield "|---|---|" + "---:|" * (len(cause_matrix.causes) + 1)
        for index, line in enumerate(cause_matrix.lines):
            name = f"{line.label}, {md(line.node)}"
            if cause_matrix.rest and index == len(cause_matrix.lines) - 1:
                name = f"… {cause_matrix.rest}"
            yield f"| {name} | lost | {' | '.join(map(format_cell, line.victim_ns))} |"
            yield f"| | caused | {' | '.join(map(format_cell, line.culprit_ns))} |"

    def _ledger(self, report: Report) -> Iterator[str]:
        columns = build_ledger_columns(report, self._most_ranks)
        yield from ("", "<details><summary>Ledger, in seconds, exact</summary>", "")
        yield "| | " + " | ".join(column.heading for column in columns) + " |"
        yield "|---|" + "---:|" * len(columns)
        for row in build_ledger_rows(columns):
            label = "&emsp;" * row.depth + md(row.label)
            yield f"| {label} | " + " | ".join(format_exact_seconds(ns) for ns in row.ns) + " |"
        yield from ("", "</details>")


def _render_causes(report: Report) -> Iterator[str]:
    if not report.in_step_ns and not report.findings:
        return
    yield from ("", "| cause | lost | share | confidence | gain | where |")
    yield "|---|---:|---:|---:|---:|---|"
    for finding in report.findings:
        outside = ", outside steps" if finding.outside_steps else ""
        cells = (
            f"**{md(finding.cause.id)}**: {md(finding.cause.title)}{outside}",
            wording.format_lost_time(finding),
            format_quantity(finding.share_ratio, "ratio"),
            wording.format_confidence(finding),
            wording.format_recoverable_time(finding, "not known"),
            md(culprits.format_culprits(finding, 3), 600),
        )
        yield f"| {' | '.join(cells)} |"
    for cause, ns in wording.list_small_causes(report):
        part = wording.format_share(ns, report.in_step_ns)
        yield (
            f"| {md(cause)}, too small for a finding | {format_quantity(ns, 'ns')} | {part} | | | |"
        )
    part = wording.format_share(report.unattributed_ns, report.in_step_ns)
    yield f"| **unattributed** | {format_quantity(report.unattributed_ns, 'ns')} | {part} | | | |"
    findings = wording.select_in_step_findings(report)
    for finding in findings[:_MAX_CULPRITS]:
        sentences = culprits.describe_caused_loss(finding, _MAX_CULPRITS, report.in_step_ns)
        sentences += [text] if (text := culprits.describe_peer_comparison(finding)) else []
        if sentences:
            how = ", ".join(
                detail
                for detail in (
                    culprits.describe_onset(finding),
                    culprits.describe_persistence(finding),
                )
                if detail
            )
            yield from (
                "",
                f"{md(finding.cause.id)}, {md(how, 200)}:" if how else md(finding.cause.id),
            )
            yield ""
            yield from (f"- {md(line, 600)}" for line in sentences)
    if report.main_cause is None and wording.has_significant_loss(report):
        yield from ("", f"**Do next:** {md(wording.describe_what_would_tell(report), 600)}")
    elif findings:
        evidence = "; ".join(wording.format_evidence(item) for item in findings[0].evidence)
        yield from ("", f"**Do next:** {md(advice.describe_first_step(findings[0]), 600)}")
        for text in advice.list_withheld_advice(findings[0]):
            yield from ("", f"{md(text, 600)}.")
        if extra_savings := wording.explain_extra_savings(findings[0]):
            yield from ("", f"Fixing it saves {md(extra_savings, 600)}.")
        if evidence:
            yield from ("", f"Seen: {md(evidence, 600)}")
    trend_text = trend.detect_trend(report)
    if trend_text is not None:
        yield from ("", f"Over time: {md(trend.describe_trend(trend_text))}")
    yield from advice.format_advice_as_markdown(report)


def _render_lines(report: Report) -> Iterator[str]:
    """Render the lines of code of each finding."""
    names = code.build_file_names(report)
    for finding in report.findings:
        rows = code.list_line_rows(finding, names, code.MAX_SHOWN_LINES)
        if rows:
            title = f"By line of code: {escape_text(finding.cause.id, 60)}"
            remainder = code.describe_lines_rest(finding, len(rows))
            yield from _render_table(TextTable(title, code.LINE_HEADS, tuple(rows), 2, remainder))


def _render_table(table: TextTable) -> Iterator[str]:
    yield from ("", f"**{md(table.title.capitalize())}**")
    if table.rows:
        numbers = len(table.heads) - 1 - table.texts
        yield from ("", f"| {' | '.join(map(md, table.heads))} |")
        yield "|---|" + "---:|" * numbers + "---|" * table.texts
        yield from (f"| {' | '.join(md(cell, 600) for cell in row)} |" for row in table.rows)
    if table.rest:
        yield from ("", md(table.rest, 600))


def _render_life(report: Report) -> Iterator[str]:
    sentences = life.describe_life(report)
    if sentences:
        yield from ("", f"**Life of the job{life.LIFE_SCOPE}**", "")
        yield from (f"- {md(line, 600)}" for line in sentences)
    for table in life.build_life_tables(report):
        yield from _render_table(table)


def _render_impact(report: Report) -> Iterator[str]:
    sentences = impact.describe_impact(report)
    if sentences:
        yield from ("", f"**Impact{impact.IMPACT_SCOPE}**", "")
        yield from (f"- {md(line, 1000)}" for line in sentences)


def _render_utilization(report: Report) -> Iterator[str]:
    sentences = impact.describe_utilization(report)
    if sentences:
        yield from ("", "**Under-used devices, separate from lost time**", "")
        yield from (f"- {md(line, 1000)}" for line in sentences)


def _render_coverage_gaps(report: Report) -> Iterator[str]:
    yield from ("", "**Unattributed**", "")
    for reason, ns in report.unattributed_reasons:
        yield (
            f"- {format_quantity(ns, 'ns')}:"
            f" {md(wording.describe_unattributed_reason(reason), 400)}"
        )
    if not report.unattributed_reasons:
        yield "- nothing"
    yield from ("", "**Not seen**", "")
    for blind in wording.list_coverage_gaps(report):
        yield f"- {md(blind, 2000)}"
    if not report.coverage_gaps:
        yield "- nothing"
    for note in report.notes:
        yield from ("", f"Note: {md(note, 600)}")
