"""The terminal report: the verdict within 25 lines of 80 columns, followed by all details.

The first screen shows how much was lost, why, which rank caused it, the evidence, what
to do next and what it saves, then the loss over time and the other causes. Below it
follow the requested tables and the details (`terminal_tables`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof.output.renderers.terminal_tables import Paint, render_details, render_table
from clusterprof.output.renderers.text import advice, culprits, summary, trend, wording
from clusterprof.output.renderers.text.safety import (
    convert_to_ascii,
    count_columns,
    escape_text,
    fit_to_width,
    wrap_text,
)
from clusterprof.output.renderers.text.summary import CHANGE, build_summary, find_summary_finding
from clusterprof.output.renderers.text.tables import build_tables
from clusterprof.report.model import Finding, Report
from clusterprof.units import format_quantity

HEAD_LINES = 25
MIN_WIDTH, MAX_WIDTH = 40, 200
_LABEL_COLUMNS = 8  # columns before the texts of the summary
_MAX_EVIDENCE = 3  # pieces of evidence on the first screen
# columns of the table of causes: lost, share, confidence, savings
_LOST_COLUMNS, _SHARE_COLUMNS, _CONFIDENCE_COLUMNS, _SAVINGS_COLUMNS = 12, 9, 8, 13
_MIN_WIDTH_FOR_CONFIDENCE, _MIN_WIDTH_FOR_SAVINGS = (
    58,
    70,
)  # a screen at least this wide has these columns too
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
    ) -> None:
        """by: tables (`TABLE_NAMES`) below the first screen, each with `top` rows.

        plain_letters: write only ASCII.
        """
        self._width = min(max(width, MIN_WIDTH), MAX_WIDTH)
        self._paint = Paint(color)
        self._price = gpu_price_per_hour
        self._currency = currency
        self._most_ranks = top or most_ranks
        self._by, self._top = tuple(by), top
        self._plain_letters = plain_letters

    def render(self, report: Report) -> str:
        """Return the complete report."""
        lines = self._head(report)
        for table in build_tables(report, self._by, self._top):
            lines += ["", *render_table(table, self._width, self._paint)]
        lines += ["", *render_details(report, self._width, self._paint, self._most_ranks)]
        text = "\n".join(lines) + "\n"
        return convert_to_ascii(text) if self._plain_letters else text

    # --- the first screen -----------------------------------------------------------------------

    def _head(self, report: Report) -> list[str]:
        """Build the first screen with as many causes and details as it holds."""
        head: list[str] = []
        bars = self._over_time(report) if report.in_step_ns else []
        for shown, lines_each, most, extras in _DENSITIES:
            head = self._build_head(report, bars, shown, lines_each, most, extras)
            if len(head) <= HEAD_LINES - 1:  # one line for the prompt
                break
        return head

    def _build_head(
        self,
        report: Report,
        bars: Sequence[str],
        shown: int,
        lines_each: int,
        most: int,
        extras: str,
    ) -> list[str]:
        lines = [*self._masthead(report), *self._nodes(report)]
        blank = [""] if "b" in extras else []
        lines += [*blank, *self._summary(report, most, extras)]
        for warning in wording.list_warnings(report):
            lines += [self._paint("warn", line) for line in self._text(f"! {warning}", 1, 2)]
        if report.in_step_ns:
            lines += [*blank, *bars]
            above = [""] if "t" in extras else []
            lines += [*above, *self._causes(report, shown, lines_each)]
        lines += [*blank, " " + self._pointer(report)]
        return lines

    def _masthead(self, report: Report) -> list[str]:
        left = f" clusterprof  {escape_text(report.title)}"
        right = summary.describe_scope(report)
        if count_columns(left) + count_columns(right) + 3 <= self._width:
            gap = " " * (self._width - 1 - count_columns(left) - count_columns(right))
            return [self._paint("bold", left) + gap + self._paint("dim", right)]
        lines = [self._paint("bold", fit_to_width(left, self._width).rstrip())]
        return lines + [self._paint("dim", line) for line in self._text(right, 1)]

    def _nodes(self, report: Report) -> list[str]:
        """Name the nodes in at most two lines."""
        lines = self._text(summary.describe_nodes(report), 1)
        if len(lines) > 2:
            lines = [lines[0], fit_to_width(f"{lines[1]} …", self._width)]
        return [self._paint("dim", line) for line in lines]

    def _summary(self, report: Report, most: int, extras: str) -> list[str]:
        """Lay out the summary; without time inside steps, the reason why there is none."""
        rows, first = (
            build_summary(report, self._price, self._currency),
            find_summary_finding(report),
        )
        if not rows:
            verdict_lines = [
                self._paint("bold", line)
                for line in self._text(wording.describe_verdict(report), 1)
            ]
            return verdict_lines + self._text(wording.describe_time_outside_steps(report), 1)
        lines: list[str] = []
        under = ""
        for label, text in rows:
            under = label or under
            if label == "SEEN":
                text = self._evidence(first, most) if "s" in extras else ""
            elif not label and under == "LOST" and "o" not in extras:
                text = ""
            if first is not None and text.startswith(CHANGE) and not label:
                lines += self._change(first, most)
            elif text.strip():
                lines += self._summary_row(label, under, text, most)
        return lines

    def _change(self, first: Finding, most: int) -> list[str]:
        """Return the edit or command of the first recommendation; a command is never cut."""
        room = self._width - _LABEL_COLUMNS - 1
        all_lines = advice.wrap_change(first.advice[0], room, CHANGE)
        return [
            " " * _LABEL_COLUMNS + line.text for line in advice.limit_lines(all_lines, most, room)
        ]

    def _summary_row(self, label: str, under: str, text: str, most: int) -> list[str]:
        # no line break between a number and its unit
        kept = text.replace(" % sure)", "\0%\0sure)").replace(" %", "\0%")
        broken = [
            line.replace("\0", " ") for line in wrap_text(kept, self._width - _LABEL_COLUMNS - 1)
        ]
        if len(broken) > most:
            broken = [
                *broken[: most - 1],
                fit_to_width(f"{broken[most - 1]} …", self._width - _LABEL_COLUMNS - 1),
            ]
        brush = (
            "bold" if label in ("LOST", "WHY", "NEXT", "WINS") else "dim" if under == "SEEN" else ""
        )
        colored = [self._paint(brush, line.rstrip()) if brush else line.rstrip() for line in broken]
        name = self._paint("heading", label) + " " * (_LABEL_COLUMNS - 1 - len(label))
        return [f" {name}{colored[0]}", *(" " * _LABEL_COLUMNS + line for line in colored[1:])]

    def _over_time(self, report: Report) -> list[str]:
        """Draw busy and lost time over the run as small bars; one bar without a history."""
        room = self._width - _LABEL_COLUMNS - 1
        bins = trend.split_run(report, room)
        if len(bins) < 2:
            return [self._bar(report), self._under_bar(report)]
        each = max(room // len(bins), 1)
        busy, lost = ("".join(bar * each for bar in line) for line in trend.draw_sparklines(bins))
        last_ns = bins[-1].end_ns
        begin, end = (trend.format_time_in_run(ns, last_ns) for ns in (bins[0].start_ns, last_ns))
        axis = f"{begin}{end.rjust(len(busy) - len(begin))}"
        for middle in trend.list_bar_captions(report, bins):
            if count_columns(begin) + count_columns(middle) + count_columns(end) + 4 <= len(busy):
                left = len(busy) - count_columns(begin) - count_columns(end)
                axis = f"{begin}{middle.center(left)}{end}"
                break
        return [
            f" {self._paint('dim', 'busy')}   {self._paint('good', busy.rstrip())}".rstrip(),
            f" {self._paint('dim', 'lost')}   {self._paint('bad', lost.rstrip())}".rstrip(),
            " " * _LABEL_COLUMNS + self._paint("dim", axis),
        ]

    def _bar(self, report: Report) -> str:
        """Draw one line: productive time filled, lost time hollow; any loss shows one cell."""
        room = self._width - 2
        cells = round(room * report.lost_ns / report.in_step_ns)
        cells = min(max(cells, 1 if report.lost_ns else 0), room)
        full = self._paint("good", "█" * (room - cells))
        return f" {full}{self._paint('bad', '░' * cells)}"

    def _under_bar(self, report: Report) -> str:
        left = f"productive {wording.format_share(report.productive_ns, report.in_step_ns)}"
        right = f"lost {wording.format_share(report.lost_ns, report.in_step_ns)}"
        return " " + self._paint("dim", left + right.rjust(self._width - 2 - len(left)))

    def _causes(self, report: Report, shown: int, lines_each: int) -> list[str]:
        heading = self._row(
            "", "THE ACCELERATORS WAITED FOR", "lost", "share", "sure", "fixing wins"
        )
        lines = [self._paint("heading", heading)]
        findings = wording.select_in_step_findings(report)
        for number, finding in enumerate(findings[:shown], 1):
            # The summary already describes the first cause.
            cause_lines = (
                1 if number == 1 and wording.find_main_cause(report) is not None else lines_each
            )
            lines += self._cause(number, finding, cause_lines)
        rest = [finding.lost_ns for finding in findings[shown:]]
        rest += [ns for _, ns in wording.list_small_causes(report)]
        if rest:
            ns = sum(rest)
            noun = "cause" if len(rest) == 1 else "causes"
            at_most = "≤ " if wording.is_upper_bound(report) else ""
            part = wording.format_share(ns, report.in_step_ns)
            label = f"{len(rest)} more {noun}, below"
            lines.append(self._row("+", label, at_most + format_quantity(ns, "ns"), part, "", ""))
        part = wording.format_share(report.unattributed_ns, report.in_step_ns)
        at_most = "≤ " if wording.is_upper_bound(report) and report.unattributed_ns else ""
        amount = at_most + format_quantity(report.unattributed_ns, "ns")
        lines.append(self._row("?", "unattributed", amount, part, "", ""))
        return lines

    def _cause(self, number: int, finding: Finding, lines_each: int) -> list[str]:
        row = self._row(
            str(number),
            escape_text(finding.cause.id, 60),
            wording.format_lost_time(finding, "≤ "),
            format_quantity(finding.share_ratio, "ratio"),
            wording.format_confidence(finding),
            wording.format_recoverable_time(finding, "unknown"),
        )
        more = (
            wording.explain_extra_savings(finding) if number > 1 else ""
        )  # the summary has the first's
        row_lines = [row, self._paint("dim", self._one_line(more))] if more else [row]
        if lines_each < 2:
            return row_lines
        who = culprits.format_culprits(finding, 2)
        about = f"{wording.format_title(finding)}{f': {who}' if who else ''}"
        return [*row_lines, self._paint("dim", self._one_line(about))]

    def _evidence(self, finding: Finding | None, most: int) -> str:
        """Join as many pieces of evidence with their notes as fit into `most` lines."""
        if finding is None:
            return ""
        comparison = finding.compared  # already given with the culprits, one line above
        evidence = [
            item for item in finding.evidence if comparison is None or item.name != comparison.name
        ]
        evidence = evidence[:_MAX_EVIDENCE]
        for items in range(len(evidence), 1, -1):
            seen = "; ".join(wording.format_evidence(item) for item in evidence[:items])
            if len(wrap_text(seen, self._width - _LABEL_COLUMNS - 1)) <= most:
                return seen
        return wording.format_evidence(evidence[0]) if evidence else ""

    def _row(self, mark: str, label: str, lost: str, part: str, sure: str, wins: str) -> str:
        cells = [lost.rjust(_LOST_COLUMNS), part.rjust(_SHARE_COLUMNS)]
        cells += (
            [sure.rjust(_CONFIDENCE_COLUMNS)] if self._width >= _MIN_WIDTH_FOR_CONFIDENCE else []
        )
        cells += [wins.rjust(_SAVINGS_COLUMNS)] if self._width >= _MIN_WIDTH_FOR_SAVINGS else []
        room = self._width - 4 - sum(map(count_columns, cells))
        return (f" {mark:<2} {fit_to_width(label, room)}" + "".join(cells)).rstrip()

    def _pointer(self, report: Report) -> str:
        """Return the last line of the first screen, which points to what is not on it."""
        findings = wording.select_in_step_findings(report)
        blinds = wording.count_coverage_gaps(report)
        hidden = f"Not seen: {blinds} {'thing' if blinds == 1 else 'things'}, listed below."
        hidden = hidden if blinds else "Not seen: nothing known."
        if not findings:
            return self._paint("dim", hidden)
        more = f"More: clusterprof explain {escape_text(findings[0].cause.id, 60)}"
        room = self._width - 2
        short = hidden.replace(", listed below", "")
        candidates = (f"{hidden}  {more}", f"{short}  {more}", hidden)  # a command is never cut
        text = next(
            (candidate for candidate in candidates if count_columns(candidate) <= room), hidden
        )
        return self._paint("dim", fit_to_width(text, room).rstrip())

    def _one_line(self, text: str) -> str:
        return " " * 4 + fit_to_width(text, self._width - 4).rstrip()

    def _text(self, text: str, indent: int, hanging: int = 0) -> list[str]:
        lines = wrap_text(text, self._width - indent - hanging)
        return [" " * (indent + (hanging if i else 0)) + line for i, line in enumerate(lines)]
