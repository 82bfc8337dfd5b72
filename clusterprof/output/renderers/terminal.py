"""The terminal report: the verdict within 25 lines of 80 columns, followed by all details.

The first screen shows how much was lost, why, which rank caused it, the evidence, what
to do next and what it saves, then the loss over time and the other causes. Below it
follow the requested tables and the details (`terminal_tables`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from clusterprof.output.renderers.terminal_screen import draw_screen
from clusterprof.output.renderers.terminal_tables import (
    Prose,
    draw_lines,
    format_lines,
    indent,
    make_grid,
    make_line,
    make_masthead,
    render_details,
    render_labeled,
    render_table,
)
from clusterprof.output.renderers.text import advice, culprits, summary, trend, wording
from clusterprof.output.renderers.text.first_screen import build_first_screen
from clusterprof.output.renderers.text.safety import count_columns, escape_text, wrap_text
from clusterprof.output.renderers.text.summary import CHANGE, build_summary, find_summary_finding
from clusterprof.output.renderers.text.tables import build_tables
from clusterprof.report.model import Finding, Report
from clusterprof.units import format_quantity

HEAD_LINES = 25
MIN_WIDTH, MAX_WIDTH = 40, 200
_BOLD_LABELS = ("Lost", "Main cause", "Known cause", "Try next", "Expected gain")
_CAUSE_HEADS = ("", "CAUSE", "lost", "share", "confidence", "gain")
_CAUSE_COLUMNS = (2, 1, 11, 8, 7, 12)  # at least; names get what is left
_LONG_NAME_COLUMNS = 20  # of a cause, beyond what every column of text has
_LABEL_COLUMNS = 8  # columns before the bars
_SUMMARY_COLUMNS = 16  # columns before the texts of the summary
_MAX_EVIDENCE = 3  # pieces of evidence on the first screen
_MAX_ANSWERS = 4  # of imported files on the first screen
# (causes on the first screen, lines for each, lines for each summary text, extras). The first
# that fits is used. Extras: b blank lines, t a blank line above the table, s evidence, o time
# outside steps.
_DENSITIES = (
    (4, 2, 3, "btso"),
    (3, 2, 3, "btso"),
    (3, 1, 3, "btso"),
    (3, 1, 3, "tso"),
    (3, 1, 3, "so"),
    (2, 1, 3, "tso"),
    (2, 1, 3, "so"),
    (2, 1, 3, "ts"),
    (2, 1, 3, "s"),
    (2, 1, 2, "so"),
    (3, 1, 2, "s"),
    (2, 1, 2, "s"),
    (2, 1, 3, ""),
    (2, 1, 2, ""),
    (1, 1, 2, ""),
    (0, 0, 2, ""),
    (0, 0, 1, ""),
)


class Terminal:
    """The report with color and alignment, for a terminal."""

    name: ClassVar[str] = "terminal"
    suffix: ClassVar[str] = ".txt"

    def __init__(
        self,
        width: int = 80,
        color: bool = False,
        gpu_price_per_hour: float | None = None,
        currency: str = "USD",
        most_ranks: int = 8,
        by: Sequence[str] = (),
        top: int | None = None,
        plain_letters: bool = False,
        full: bool = True,
        section: str = "",
    ) -> None:
        """by: tables (`TABLE_NAMES`) below the first screen, each with `top` rows.

        plain_letters: write only ASCII. full: write all sections, not only the first screen.
        section: write only this section (`SECTION_NAMES`).
        """
        self._width = min(max(width, MIN_WIDTH), MAX_WIDTH)
        self._color = color
        self._price = gpu_price_per_hour
        self._currency = currency
        self._most_ranks = top or most_ranks
        self._by, self._top = tuple(by), top
        self._plain_letters = plain_letters
        self._full, self._section = full, section

    def render(self, report: Report) -> str:
        """Return the report: the first screen, all of it, or one section."""
        if self._section:
            parts = render_details(report, self._width, self._most_ranks, self._section)
            lines = list(parts)[1:] or [make_line(f" Nothing to show: {self._section}.")]
            return format_lines(lines, self._color, self._plain_letters)
        lines = self._head(report) if self._full else self._screen(report)
        if self._full and len(report.answers) > _MAX_ANSWERS:
            answers = summary.select_answers(report, len(report.answers))[_MAX_ANSWERS:]
            lines += self._draw(*(indent(Prose(answer, "", 2), right=0) for answer in answers))
        for table in build_tables(report, self._by, self._top):
            lines += [Text(), *render_table(table, self._width)]
        if self._full:
            lines += render_details(report, self._width, self._most_ranks)
        return format_lines(lines, self._color, self._plain_letters)

    def _screen(self, report: Report) -> list[Text]:
        """Build the first screen, which is the whole output without `full`."""
        bins = self._width - _LABEL_COLUMNS - 1
        screen = build_first_screen(report, self._price, self._currency, bins)
        answers = summary.select_answers(report, _MAX_ANSWERS)
        return draw_screen(screen, self._width, answers, summary.describe_nodes(report))

    # --- the summary above the full report ----------------------------------------------------

    def _head(self, report: Report) -> list[Text]:
        """Build the first screen with as many causes and details as it holds."""
        head: list[Text] = []
        above = self._draw(*self._masthead(report), *self._answers(report))
        warnings = self._draw(*self._warnings(report))
        is_measured = any(map(wording.is_measured, report.ranks)) or bool(report.lost_ns)
        bars = self._draw(*self._over_time(report)) if report.in_step_ns and is_measured else []
        pointer = self._draw(indent(make_line(self._pointer(report), "dim")))
        draw_summary = cache(lambda *wanted: self._draw(*self._summary(report, *wanted)))
        draw_causes = cache(lambda *wanted: list(self._causes(report, *wanted)))
        for shown, lines_each, max_lines, extras in _DENSITIES:
            blank = [Text()] if "b" in extras else []
            head = [
                *above,
                *blank,
                *draw_summary(max_lines, "s" in extras, "o" in extras),
                *warnings,
            ]
            if report.in_step_ns:
                head += [*blank, *bars, *([Text()] if "t" in extras else [])]
                head += draw_causes(shown, lines_each)
            head += [*blank, *pointer]
            if len(head) <= HEAD_LINES - 1:  # one line for the prompt
                break
        return head

    def _draw(self, *parts: RenderableType) -> list[Text]:
        return draw_lines(Group(*parts), self._width)

    def _masthead(self, report: Report) -> Iterator[RenderableType]:
        """Yield the title and, in at most two lines, the nodes."""
        title = f"clusterprof  {escape_text(report.title)}"
        yield make_masthead(title, summary.describe_scope(report), self._width)
        yield indent(Prose(summary.describe_nodes(report), "dim", 2), right=0)

    def _answers(self, report: Report) -> Iterator[RenderableType]:
        shown = summary.select_answers(report, _MAX_ANSWERS)
        yield from (indent(Prose(answer, "bold", 2), right=0) for answer in shown)

    def _warnings(self, report: Report) -> Iterator[RenderableType]:
        for warning in wording.list_warnings(report):
            yield render_labeled([("!", Prose(warning, "warn"))], 1, 1, 1, "warn")

    def _summary(
        self, report: Report, most: int, with_evidence: bool, with_outside: bool
    ) -> Iterator[RenderableType]:
        """Lay out the summary; without time inside steps, the reason why there is none."""
        rows = build_summary(report, self._price, self._currency)
        first = find_summary_finding(report)
        if not rows:
            yield indent(Prose(wording.describe_verdict(report), "bold"), right=0)
            yield indent(Prose(wording.describe_time_outside_steps(report)), right=0)
            return
        shown: list[tuple[str, RenderableType]] = []
        under = ""
        for label, text, is_change in rows:
            under = label or under
            if label == "Evidence":
                text = self._evidence(first, most) if with_evidence else ""
            elif not label and under == "Lost" and not with_outside:
                text = ""
            if first is not None and is_change:
                shown.append(("", self._change(first, most)))
            elif text.strip():
                style = "dim" if under == "Evidence" else "bold" if label in _BOLD_LABELS else ""
                shown.append((label, Prose(text, style, most)))
        yield render_labeled(shown, 1, _SUMMARY_COLUMNS - 2, right=1, label_style="heading")

    def _change(self, first: Finding, most: int) -> Text:
        """Return the edit or command of the first recommendation; a command is never cut."""
        room = self._width - _SUMMARY_COLUMNS - 1
        all_lines = advice.wrap_change(first.advice[0], room, CHANGE)
        return Text("\n".join(line.text for line in advice.limit_lines(all_lines, most, room)))

    def _over_time(self, report: Report) -> Iterator[RenderableType]:
        """Draw busy and lost time over the run as small bars; one bar without a history."""
        room = self._width - _LABEL_COLUMNS - 1
        bins = trend.split_run(report, room)
        if len(bins) < 2:
            yield from self._bar(report)
            return
        bin_columns = max(room // len(bins), 1)
        busy, lost = (
            "".join(bar * bin_columns for bar in line) for line in trend.draw_sparklines(bins)
        )
        last_ns = bins[-1].end_ns
        begin, end = (trend.format_time_in_run(ns, last_ns) for ns in (bins[0].start_ns, last_ns))
        spare_columns = len(busy) - count_columns(begin) - count_columns(end)
        captions = trend.list_bar_captions(report, bins)
        middle = next((text for text in captions if count_columns(text) + 4 <= spare_columns), "")
        grid = Grid.grid(padding=(0, 1, 0, 0))
        grid.add_column(style="dim", width=_LABEL_COLUMNS - 2)
        label, style = ("rest", "dim") if wording.is_unbounded(report) else ("busy", "good")
        grid.add_row(label, make_line(busy, style))
        grid.add_row("lost", make_line(lost, "bad"))
        grid.add_row("", make_line(f"{begin}{middle.center(spare_columns)}{end}", "dim"))
        yield indent(grid)

    def _bar(self, report: Report) -> Iterator[RenderableType]:
        """Draw one line: productive time filled, lost time hollow; any loss shows one cell."""
        room = self._width - 2
        cells = round(room * report.lost_ns / report.in_step_ns)
        cells = min(max(cells, 1 if report.lost_ns else 0), room)
        yield indent(Text.assemble(("█" * (room - cells), "good"), ("░" * cells, "bad")))
        left = f"productive {wording.format_share(report.productive_ns, report.in_step_ns)}"
        right = f"lost {wording.format_share(report.lost_ns, report.in_step_ns)}"
        yield indent(make_line(left + right.rjust(room - len(left)), "dim"))

    def _causes(self, report: Report, shown: int, lines_each: int) -> Iterator[Text]:
        """Yield the table of causes; below some rows a line explains the cause."""
        rows, explanations = [], list[list[str]]()
        findings = wording.select_in_step_findings(report)
        for number, finding in enumerate(findings[:shown], 1):
            rows.append(
                (
                    str(number),
                    escape_text(finding.cause.id, 60),
                    wording.format_lost_time(finding, "≤ "),
                    format_quantity(finding.share_ratio, "ratio"),
                    wording.format_confidence(finding),
                    wording.format_recoverable_time(finding, "unknown"),
                )
            )
            # The summary already describes the first cause.
            is_known = number == 1 and report.main_cause is not None
            explanations.append(_explain_cause(number, finding, lines_each > 1 and not is_known))
        small_ns = [finding.lost_ns for finding in findings[shown:]]
        small_ns += [ns for _, ns in wording.list_small_causes(report)]
        for mark, label, ns in (
            (
                "+",
                f"{len(small_ns)} more {'cause' if len(small_ns) == 1 else 'causes'}, below",
                sum(small_ns),
            ),
            ("?", "unattributed", report.unattributed_ns),
        ):
            if mark == "+" and not small_ns:
                continue
            at_most = "≤ " if wording.is_upper_bound(report) and ns else ""
            part = wording.format_share(ns, report.in_step_ns)
            rows.append((mark, label, at_most + format_quantity(ns, "ns"), part, "", ""))
        room = self._width - 1 - _LONG_NAME_COLUMNS  # names are worth more than two columns
        grid = make_grid(_CAUSE_HEADS, rows, (0, 1), room, droppable=(5, 4), gap=1)
        for column, columns in zip(grid.columns, _CAUSE_COLUMNS):
            column.min_width = columns
        grid.columns[1].ratio, grid.expand = 1, True
        heading, *lines = self._draw(indent(grid, right=0))
        yield heading
        for line, texts in zip(lines, explanations):
            yield line
            for text in texts:
                yield from self._draw(indent(make_line(text, "dim"), 4, 0))
        yield from lines[len(explanations) :]

    def _evidence(self, finding: Finding | None, most: int) -> str:
        """Join as many pieces of evidence with their notes as fit into `most` lines."""
        if finding is None:
            return ""
        comparison = finding.peer_comparison  # already given with the culprits, one line above
        evidence = [
            item for item in finding.evidence if comparison is None or item.name != comparison.name
        ]
        evidence = evidence[:_MAX_EVIDENCE]
        for items in range(len(evidence), 1, -1):
            shown_evidence = "; ".join(wording.format_evidence(item) for item in evidence[:items])
            if len(wrap_text(shown_evidence, self._width - _SUMMARY_COLUMNS - 1)) <= most:
                return shown_evidence
        return wording.format_evidence(evidence[0]) if evidence else ""

    def _pointer(self, report: Report) -> str:
        """Return the last line of the first screen, which points to what is not on it."""
        findings = wording.select_in_step_findings(report)
        gaps = wording.count_coverage_gaps(report)
        count = f"Not seen: {gaps} {'gap' if gaps == 1 else 'gaps'}"
        hidden = f"{count}, listed below." if gaps else "Not seen: no known gaps."
        if not findings:
            return hidden
        hint = f"More: clusterprof explain {escape_text(findings[0].cause.id, 60)}"
        short = f"{count}." if gaps else hidden
        candidates = (f"{hidden}  {hint}", f"{short}  {hint}")  # a command is never cut
        return next((text for text in candidates if count_columns(text) <= self._width - 2), hidden)


def _explain_cause(number: int, finding: Finding, in_full: bool) -> list[str]:
    """Explain a cause in lines below its row; the summary has the savings of the first."""
    savings = wording.explain_extra_savings(finding) if number > 1 else ""
    culprit_names = culprits.format_culprits(finding, 2) if in_full else ""
    about = (
        f"{wording.format_title(finding)}{f': {culprit_names}' if culprit_names else ''}"
        if in_full
        else ""
    )
    return [text for text in (savings, about) if text]
