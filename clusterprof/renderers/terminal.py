"""The report for people at a terminal: the verdict within 25 lines of 80 columns, then the books.

The head says how much was lost, why, whose cause it was, how sure that is, what fixing it would
win, and what to do next. Below it stand every cause in full, the ledger to the nanosecond,
*Unattributed* with its reasons and *Not seen*, always.
"""

from __future__ import annotations

from typing import ClassVar

from clusterprof.findings import Finding, Report
from clusterprof.renderers import header, unseen, whose, words
from clusterprof.renderers.paint import Paint
from clusterprof.renderers.terminal_books import books
from clusterprof.renderers.text_safety import columns, fit, safe_text, wrap
from clusterprof.units import human

HEAD_LINES = 25
NARROWEST, WIDEST = 72, 120
# columns of the table of causes: cause, lost, share, sure, fixing wins
_LOST, _SHARE, _SURE, _WINS = 12, 9, 8, 13
# (causes on the first screen, lines about each), the first that fits is taken
_DENSITIES = ((3, 4), (2, 4), (3, 3), (2, 3), (3, 2), (2, 2), (1, 4), (1, 2), (1, 1), (0, 0))


class Terminal:
    """The report with colour and alignment, for a person at a terminal."""

    name: ClassVar[str] = "terminal"
    suffix: ClassVar[str] = ".txt"

    def __init__(
        self,
        width: int = 80,
        color: bool = False,
        gpu_price_per_hour: float | None = None,
        currency: str = "USD",
        most_ranks: int = 8,
    ) -> None:
        self._width = min(max(width, NARROWEST), WIDEST)
        self._paint = Paint(color)
        self._price = gpu_price_per_hour
        self._currency = currency
        self._most_ranks = most_ranks

    def render(self, report: Report) -> str:
        """Return the whole report."""
        head = self._head(report)
        return (
            "\n".join([*head, "", *books(report, self._width, self._paint, self._most_ranks)])
            + "\n"
        )

    # --- the first screen -----------------------------------------------------------------------

    def _head(self, report: Report) -> list[str]:
        """Show as many causes, with as much about each, as the first screen holds."""
        found = len(words.in_step(report))
        for shown, lines_each in _DENSITIES:
            if shown > max(found, 1):
                continue
            head = self._head_with(report, shown, lines_each)
            if len(head) <= HEAD_LINES - 1:  # one line for the prompt
                break
        return head

    def _head_with(self, report: Report, shown: int, lines_each: int) -> list[str]:
        lines = [*self._masthead(report), *self._place(report), ""]
        lines += self._verdict(report)
        warnings = words.warnings(report)
        for warning in warnings:
            lines += [self._paint("warn", line) for line in self._text(f"! {warning}", 1, 2)]
        if report.in_step_ns:
            lines += ["", *self._causes(report, shown, lines_each)]
        lines += ["", *self._next(report)]
        lines.append(" " + self._pointer(report))
        return lines

    def _masthead(self, report: Report) -> list[str]:
        left = f" clusterprof  {safe_text(report.title)}"
        right = header.scope(report)
        if columns(left) + columns(right) + 3 <= self._width:
            gap = " " * (self._width - 1 - columns(left) - columns(right))
            return [self._paint("bold", left) + gap + self._paint("dim", right)]
        lines = [self._paint("bold", fit(left, self._width).rstrip())]
        return lines + [self._paint("dim", line) for line in self._text(right, 1)]

    def _place(self, report: Report) -> list[str]:
        """Name the nodes in at most two lines."""
        lines = self._text(header.place(report), 1)
        if len(lines) > 2:
            lines = [lines[0], fit(f"{lines[1]} …", self._width)]
        return [self._paint("dim", line) for line in lines]

    def _verdict(self, report: Report) -> list[str]:
        lines = [self._paint("bold", line) for line in self._text(words.verdict(report), 1)]
        for sentence in (
            words.chief_cause(report),
            words.outside(report),
            words.money(report, self._price, self._currency),
        ):
            lines += self._text(sentence, 1)
        if report.in_step_ns:
            lines += [self._bar(report), self._under_bar(report)]
        return lines

    def _bar(self, report: Report) -> str:
        """One line: productive time full, lost time hollow; any loss at all shows one cell."""
        room = self._width - 2
        cells = round(room * report.lost_ns / report.in_step_ns)
        cells = min(max(cells, 1 if report.lost_ns else 0), room)
        full = self._paint("good", "█" * (room - cells))
        return f" {full}{self._paint('bad', '░' * cells)}"

    def _under_bar(self, report: Report) -> str:
        left = f"productive {words.share(report.productive_ns, report.in_step_ns)}"
        right = f"lost {words.share(report.lost_ns, report.in_step_ns)}"
        return " " + self._paint("dim", left + right.rjust(self._width - 2 - len(left)))

    def _causes(self, report: Report, shown: int, lines_each: int) -> list[str]:
        heading = self._row(
            "", "THE ACCELERATORS WAITED FOR", "lost", "share", "sure", "fixing wins"
        )
        lines = [self._paint("heading", heading)]
        findings = words.in_step(report)
        for number, finding in enumerate(findings[:shown], 1):
            lines += self._cause(number, finding, lines_each)
        rest = [finding.lost_ns for finding in findings[shown:]]
        rest += [ns for _, ns in words.small_causes(report)]
        if rest:
            ns = sum(rest)
            noun = "cause" if len(rest) == 1 else "causes"
            at_most = "≤ " if words.bounded(report) else ""
            part = words.share(ns, report.in_step_ns)
            label = f"{len(rest)} more {noun}, below"
            lines.append(self._row("+", label, at_most + human(ns, "ns"), part, "", ""))
        part = words.share(report.unattributed_ns, report.in_step_ns)
        at_most = "≤ " if words.bounded(report) and report.unattributed_ns else ""
        amount = at_most + human(report.unattributed_ns, "ns")
        lines.append(self._row("?", "unattributed", amount, part, "", ""))
        return lines

    def _cause(self, number: int, finding: Finding, lines_each: int) -> list[str]:
        row = self._row(
            str(number),
            safe_text(finding.cause.id, 60),
            words.lost(finding, "≤ "),
            human(finding.share_ratio, "ratio"),
            words.certainty(finding),
            words.recoverable(finding, "unknown"),
        )
        lines = [self._paint("bold", row)]
        who = whose.culprits(finding, 2)
        how = whose.persistence_in_short(finding)
        about = words.title(finding)
        if who and lines_each < 4:
            about = f"{who}: {about}"
        if lines_each >= 2:
            lines.append(self._one_line(about))
        if who and lines_each >= 4:
            lines.append(self._one_line(f"whose: {who}{f', {how}' if how else ''}"))
        if lines_each >= 3 and finding.evidence:
            seen = self._seen(finding)
            lines.append(self._paint("dim", self._one_line(seen)))
        return lines

    def _seen(self, finding: Finding) -> str:
        """Say all evidence with its notes when the line holds it, else without, else the first."""
        for items, with_note in ((3, True), (3, False), (2, False), (1, False)):
            numbers = [words.evidence(item, with_note) for item in finding.evidence[:items]]
            seen = f"seen:  {'; '.join(numbers)}"
            if columns(seen) <= self._width - 5:
                break
        return seen

    def _row(self, mark: str, label: str, lost: str, part: str, sure: str, wins: str) -> str:
        room = self._width - 4 - _LOST - _SHARE - _SURE - _WINS
        cells = [fit(label, room), lost.rjust(_LOST), part.rjust(_SHARE), sure.rjust(_SURE)]
        return (f" {mark:<2} " + "".join(cells) + wins.rjust(_WINS)).rstrip()

    def _next(self, report: Report) -> list[str]:
        findings = words.in_step(report)
        if not findings:
            return []
        advice = safe_text(findings[0].cause.advice, 600)
        lines = wrap(advice, self._width - 11)[:3]
        if not lines:
            return []
        first = f" {self._paint('heading', 'DO NEXT')}   {lines[0]}"
        return [first, *(" " * 11 + line for line in lines[1:])]

    def _pointer(self, report: Report) -> str:
        """The last line of the first screen: what is not on it."""
        findings = words.in_step(report)
        blinds = unseen.blind_count(report)
        hidden = f"Not seen: {blinds} {'thing' if blinds == 1 else 'things'}, listed below."
        if not findings:
            return self._paint("dim", hidden)
        more = f"More: clusterprof explain {safe_text(findings[0].cause.id, 60)}."
        return self._paint("dim", fit(f"{hidden}  {more}", self._width - 2).rstrip())

    def _one_line(self, text: str) -> str:
        return " " * 4 + fit(text, self._width - 4).rstrip()

    def _text(self, text: str, indent: int, hanging: int = 0) -> list[str]:
        lines = wrap(text, self._width - indent - hanging)
        return [" " * (indent + (hanging if i else 0)) + line for i, line in enumerate(lines)]
