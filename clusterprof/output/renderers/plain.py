"""The report as plain sentences: no color, no boxes, no columns, our own text in ASCII.

It suits screen readers, grep and mail. Every line can be read alone: a label, a colon
and a value; indentation groups lines.
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
from clusterprof.output.renderers.text.safety import ASCII_WORDS, escape_text
from clusterprof.output.renderers.text.summary import build_summary
from clusterprof.output.renderers.text.tables import (
    TextTable,
    build_cause_matrix,
    build_ledger_columns,
    build_ledger_rows,
    build_tables,
    format_exact_seconds,
)
from clusterprof.report.aggregate import name_full_list
from clusterprof.report.model import Finding, Report
from clusterprof.units import format_quantity

_MAX_ANSWERS = 4  # of imported files on the first screen
_MAX_CULPRITS = 3  # culprits whose amounts are written
_MAX_MATRIX_ROWS, _MAX_MATRIX_CAUSES = 16, 5  # in the matrix of ranks by causes
_RANKS_WHEN_MANY = 8  # ranks in the ledger if there are more than `most_ranks`
_MAX_SINGLE_NODES = 16  # with more nodes, those without damage share a line


class Plain:
    """The report as sentences, without color, boxes or columns."""

    name: ClassVar[str] = "plain"
    suffix: ClassVar[str] = ".txt"

    def __init__(
        self,
        gpu_price_per_hour: float | None = None,
        currency: str = "USD",
        most_ranks: int = 64,
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
        lines = [line.translate(ASCII_WORDS) for line in parts]
        return "\n".join(lines) + "\n"

    def _screen(self, report: Report) -> Iterator[str]:
        """Yield the first screen as sentences with labels."""
        screen = build_first_screen(report, self._price, self._currency)
        yield f"Recording: {screen.title}: {screen.scope}"
        yield from (f"Answer: {text}" for text in summary.select_answers(report, _MAX_ANSWERS))
        yield from (f"Warning: {text}" for text in screen.warnings)
        label = ""
        for row in screen.rows:
            label = row.label or label
            yield f"{label}: {row.text}"
        for cause in screen.causes:
            part = format_quantity(cause.share_ratio, "ratio")
            yield f"Lost to {cause.name}: {part} of {screen.whole}"
        if screen.trend:
            yield f"Over time: {screen.trend}"
        yield f"Not measured: {screen.gaps}"
        for table in build_tables(report, self._by, self._top):
            yield from _render_table(table)
        yield f"More: {'; '.join(screen.more)}"

    def _lines(self, report: Report) -> Iterator[str]:
        yield f"Recording: {escape_text(report.title)}: {summary.describe_scope(report)}"
        if summary.describe_nodes(report):
            yield f"Nodes: {summary.describe_nodes(report)}"
        for answer in summary.select_answers(report, len(report.answers)):
            yield f"Answer: {answer}"
        yield f"Verdict: {wording.describe_verdict(report)}"
        for sentence in (
            wording.describe_main_cause(report),
            wording.describe_time_outside_steps(report),
            wording.describe_cost(report, self._price, self._currency),
        ):
            if sentence:
                yield f"Verdict: {sentence}"
        for warning in wording.list_warnings(report):
            yield f"Warning: {warning}"
        yield from _render_next_step(report)
        trend_text = trend.detect_trend(report)
        if trend_text is not None:
            yield f"Over time: {trend.describe_trend(trend_text)}"
        for line in trend.describe_bins(report):
            yield f"Over time: {line}"
        for table in build_tables(report, self._by, self._top):
            yield from _render_table(table)
        names = code.build_file_names(report)
        for number, finding in enumerate(report.findings, 1):
            yield from _render_finding(number, finding, report.in_step_ns, names)
        for cause, ns in wording.list_small_causes(report):
            yield f"Too small for a finding: {escape_text(cause)}: {format_quantity(ns, 'ns')}"
        for line in life.describe_life(report):
            yield f"Life of the job: {line}"
        for table in life.build_life_tables(report):
            yield from _render_table(table)
        for line in impact.describe_impact(report):
            yield f"Impact: {line}"
        for line in impact.describe_utilization(report):
            yield f"Under-used devices, separate from lost time: {line}"
        yield from _render_unattributed(report)
        yield from _render_coverage_gaps(report)
        for line in culprits.describe_slow_steps(report):
            yield f"Slow steps: {line}"
        yield from _render_matrix(report)
        yield from self._ledger(report)
        yield from _render_metrics(report)
        yield from _render_recording(report)
        for note in report.notes:
            yield f"Note: {escape_text(note, 600)}"

    def _ledger(self, report: Report) -> Iterator[str]:
        max_ranks = self._most_ranks if len(report.ranks) <= self._most_ranks else _RANKS_WHEN_MANY
        columns = build_ledger_columns(report, max_ranks)
        rows = build_ledger_rows(columns)
        for index, column in enumerate(columns):
            rank, about = column.rank, ""
            if rank is not None:
                device = escape_text(rank.device) or "no accelerator measured"
                about = (
                    f", {escape_text(rank.node)}, {device}, measured by {escape_text(rank.source)}"
                )
                about += f", {rank.steps:,} steps"
            yield f"Ledger of {column.heading}{about}, in seconds:"
            for row in rows:
                yield f"  {'  ' * row.depth}{row.label}: {format_exact_seconds(row.ns[index])}"
        hidden = len(report.ranks) - max_ranks
        if hidden > 0:
            options = name_full_list(report)
            yield f"Ledger: {hidden:,} ranks that lost less are omitted; {options} lists them all."


def _render_finding(
    number: int, finding: Finding, in_step_ns: int, names: code.FileNames
) -> Iterator[str]:
    yield f"Cause {number}: {escape_text(finding.cause.id)}: {wording.format_title(finding)}"
    period = (
        "the recorded time, outside steps" if finding.outside_steps else "the time inside steps"
    )
    part = format_quantity(finding.share_ratio, "ratio")
    yield f"  Lost: {wording.format_lost_time(finding)}, {part} of {period}"
    yield f"  Certainty: {wording.describe_confidence(finding)}"
    yield f"  Fixing only this saves: {wording.describe_savings(finding)}"
    if finding.culprits:
        yield f"  Who: {culprits.format_culprits(finding, 4)}"
    for line in culprits.describe_caused_loss(finding, _MAX_CULPRITS, in_step_ns):
        yield f"  Caused: {line}"
    for label, text in (
        ("Peers", culprits.describe_peer_comparison(finding)),
        ("Since", culprits.describe_onset(finding)),
        ("Waits", culprits.describe_persistence(finding)),
    ):
        if text:
            yield f"  {label}: {text}"
    for item in finding.evidence:
        yield f"  Evidence: {wording.format_evidence(item)}"
    for code_line in finding.lines[: code.MAX_SHOWN_LINES]:
        amount = format_quantity(code_line.lost_ns, "ns")
        text = code.describe_line_in_full(code_line, names)
        yield f"  Line: {text}: {code.format_line_share(code_line)}, {amount}"
    remainder = code.describe_lines_rest(finding, min(len(finding.lines), code.MAX_SHOWN_LINES))
    if remainder:
        yield f"  Lines: {remainder}"
    yield f"  Advice: {advice.describe_first_step(finding)}"
    for label, text in (
        ("Change", advice.get_first_change(finding)),
        ("Effort", advice.describe_effort(finding)),
        ("Or", advice.format_further_advice(finding)),
        ("Not advised", "; ".join(advice.list_withheld_advice(finding))),
    ):
        if text:
            yield f"  {label}: {text}"


def _render_next_step(report: Report) -> Iterator[str]:
    """Render the line of code, the first thing to do and what it saves, before all details."""
    for label, text, is_change in build_summary(report, None, ""):
        if label == "Where":
            yield f"Where: {text}"
        elif label == "Try next" or is_change:
            yield f"Next: {text}"
        elif label == "Expected gain":
            yield f"Next: this saves: {text[:1].lower()}{text[1:]}"


def _render_table(table: TextTable) -> Iterator[str]:
    """Render every row as a sentence of headings and values, independent of columns."""
    title = table.title.capitalize()
    for row in table.rows:
        cells = [f"{head} {value}" for head, value in zip(table.heads, row)]
        yield f"{title}: {', '.join(cells)}"
    if table.rest:
        yield f"{title}: {table.rest}"


def _render_unattributed(report: Report) -> Iterator[str]:
    part = wording.format_share(report.unattributed_ns, report.lost_ns)
    yield f"Unattributed: {format_quantity(report.unattributed_ns, 'ns')}, {part} of the loss"
    for reason, ns in report.unattributed_reasons:
        yield (
            f"  Reason: {format_quantity(ns, 'ns')}: {wording.describe_unattributed_reason(reason)}"
        )


def _render_coverage_gaps(report: Report) -> Iterator[str]:
    coverage_gaps = wording.list_coverage_gaps(report)
    yield f"Not seen: {wording.count_coverage_gaps(report) or 'no known gaps'}"
    yield from (f"  {blind}" for blind in coverage_gaps)


def _render_metrics(report: Report) -> Iterator[str]:
    for metric in report.metrics:
        if metric.value is None:
            value = f"not known: {escape_text(metric.why_missing, 300)}"
        else:
            bound = "" if metric.bound == "exact" else f"{metric.bound} "
            value = bound + format_quantity(metric.value, metric.unit)
        yield f"Measure: {escape_text(metric.name, 60)}: {value}"


def _render_recording(report: Report) -> Iterator[str]:
    for line in summary.describe_recordings(report, _MAX_SINGLE_NODES, " recorded"):
        yield f"Node: {line}"


def _render_matrix(report: Report) -> Iterator[str]:
    cause_matrix = build_cause_matrix(report, _MAX_MATRIX_ROWS, _MAX_MATRIX_CAUSES)
    for index, line in enumerate(cause_matrix.lines if cause_matrix else ()):
        noun = "rank" if line.ranks == 1 else "ranks"
        name = f"{noun} {line.label} of {escape_text(line.node)}"
        if cause_matrix and cause_matrix.rest and index == len(cause_matrix.lines) - 1:
            name = cause_matrix.rest
        for word, ns in (("lost", line.victim_ns), ("caused", line.culprit_ns)):
            causes = zip(cause_matrix.causes if cause_matrix else (), ns)
            parts = [
                f"{escape_text(cause, 60)} {format_quantity(cause_ns, 'ns')}"
                for cause, cause_ns in causes
                if cause_ns
            ]
            breakdown = f", of which {', '.join(parts)}" if parts else ""
            yield f"Ranks: {name}: {word} {format_quantity(ns[-1], 'ns')}{breakdown}"
