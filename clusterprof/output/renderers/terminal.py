"""The report for people at a terminal: the verdict within 25 lines of 80 columns, then the books.

The head says how much was lost, why, whose cause it was, what was seen, what to do next and what
that wins, then when it was, and the other causes. Below it stand the tables that were asked for,
every cause in full, the ledger to the nanosecond, *Unattributed* with its reasons and *Not seen*,
always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from clusterprof.findings import Finding, Report
from clusterprof.renderers import (
    changes,
    course,
    header,
    numbers,
    sparks,
    sure,
    unseen,
    whose,
    words,
)
from clusterprof.renderers.by import tables
from clusterprof.renderers.card import CHANGE, card, spoken_of
from clusterprof.renderers.paint import Paint
from clusterprof.renderers.terminal_books import books
from clusterprof.renderers.terminal_tables import table_lines
from clusterprof.renderers.text_safety import ascii_only, columns, fit, safe_text, wrap
from clusterprof.units import human

HEAD_LINES = 25
NARROWEST, WIDEST = 40, 200
_LABEL = 8  # columns before the texts of the card
_MOST_SEEN = 3  # numbers of the evidence on the first screen
# columns of the table of causes: cause, lost, share, sure, fixing wins
_LOST, _SHARE, _SURE, _WINS = 12, 9, 8, 13
_WITH_SURE, _WITH_WINS = 58, 70  # so wide is a screen that has these columns, too
# (causes on the first screen, lines about each, lines of each text of the card, and of what is
# left out last: blank lines, the one above the table, what was seen, what lay outside steps), the
# first that fits is taken
_DENSITIES = (
    (4, 2, 3, "btso"), (3, 2, 3, "btso"), (3, 1, 3, "btso"), (3, 1, 3, "tso"), (3, 1, 3, "so"),
    (2, 1, 3, "tso"), (2, 1, 3, "so"), (2, 1, 3, "ts"), (2, 1, 3, "s"), (2, 1, 2, "so"),
    (3, 1, 2, "s"), (2, 1, 2, "s"), (2, 1, 3, ""), (2, 1, 2, ""), (1, 1, 2, ""), (0, 0, 2, ""),
    (0, 0, 1, ""),
)  # fmt: skip


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
        by: Sequence[str] = (),
        top: int | None = None,
        plain_letters: bool = False,
    ) -> None:
        """`by`: the tables of `renderers.by` below the first screen, of `top` rows;
        `plain_letters`: nothing that is not ASCII."""
        self._width = min(max(width, NARROWEST), WIDEST)
        self._paint = Paint(color)
        self._price = gpu_price_per_hour
        self._currency = currency
        self._most_ranks = top or most_ranks
        self._by, self._top = tuple(by), top
        self._plain_letters = plain_letters

    def render(self, report: Report) -> str:
        """Return the whole report."""
        lines = self._head(report)
        for table in tables(report, self._by, self._top):
            lines += ["", *table_lines(table, self._width, self._paint)]
        lines += ["", *books(report, self._width, self._paint, self._most_ranks)]
        text = "\n".join(lines) + "\n"
        return ascii_only(text) if self._plain_letters else text

    # --- the first screen -----------------------------------------------------------------------

    def _head(self, report: Report) -> list[str]:
        """Show as many causes, with as much about each, as the first screen holds."""
        head: list[str] = []
        bars = self._over_time(report) if report.in_step_ns else []
        for shown, lines_each, most, extras in _DENSITIES:
            head = self._head_with(report, bars, shown, lines_each, most, extras)
            if len(head) <= HEAD_LINES - 1:  # one line for the prompt
                break
        return head

    def _head_with(
        self,
        report: Report,
        bars: Sequence[str],
        shown: int,
        lines_each: int,
        most: int,
        extras: str,
    ) -> list[str]:
        lines = [*self._masthead(report), *self._place(report)]
        blank = [""] if "b" in extras else []
        lines += [*blank, *self._card(report, most, extras)]
        for warning in words.warnings(report):
            lines += [self._paint("warn", line) for line in self._text(f"! {warning}", 1, 2)]
        if report.in_step_ns:
            lines += [*blank, *bars]
            above = [""] if "t" in extras else []
            lines += [*above, *self._causes(report, shown, lines_each)]
        lines += [*blank, " " + self._pointer(report)]
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

    def _card(self, report: Report, most: int, extras: str) -> list[str]:
        """Lay the card out; without time inside steps say why nothing can be said."""
        rows, first = card(report, self._price, self._currency), spoken_of(report)
        if not rows:
            told = [self._paint("bold", line) for line in self._text(words.verdict(report), 1)]
            return told + self._text(words.outside(report), 1)
        lines: list[str] = []
        under = ""
        for label, text in rows:
            under = label or under
            if label == "SEEN":
                text = self._seen(first, most) if "s" in extras else ""
            elif not label and under == "LOST" and "o" not in extras:
                text = ""
            if first is not None and text.startswith(CHANGE) and not label:
                lines += self._change(first, most)
            elif text.strip():
                lines += self._row_of_card(label, under, text, most)
        return lines

    def _change(self, first: Finding, most: int) -> list[str]:
        """The edit or command of the first advice, never cut within."""
        room = self._width - _LABEL - 1
        every = changes.laid_out(first.advice[0], room, CHANGE)
        return [" " * _LABEL + line.text for line in changes.shortened(every, most, room)]

    def _row_of_card(self, label: str, under: str, text: str, most: int) -> list[str]:
        # a number is not parted from what it counts
        kept = text.replace(" % sure)", "\0%\0sure)").replace(" %", "\0%")
        broken = [line.replace("\0", " ") for line in wrap(kept, self._width - _LABEL - 1)]
        if len(broken) > most:
            broken = [*broken[: most - 1], fit(f"{broken[most - 1]} …", self._width - _LABEL - 1)]
        brush = (
            "bold" if label in ("LOST", "WHY", "NEXT", "WINS") else "dim" if under == "SEEN" else ""
        )
        told = [self._paint(brush, line.rstrip()) if brush else line.rstrip() for line in broken]
        name = self._paint("heading", label) + " " * (_LABEL - 1 - len(label))
        return [f" {name}{told[0]}", *(" " * _LABEL + line for line in told[1:])]

    def _over_time(self, report: Report) -> list[str]:
        """Busy and lost time over the run as small bars; without a history one bar of the whole."""
        room = self._width - _LABEL - 1
        some = sparks.parts(report, room)
        if len(some) < 2:
            return [self._bar(report), self._under_bar(report)]
        each = max(room // len(some), 1)
        busy, lost = ("".join(bar * each for bar in line) for line in sparks.sparklines(some))
        last_ns = some[-1].end_ns
        begin, end = (sparks.clock_of(ns, last_ns) for ns in (some[0].start_ns, last_ns))
        axis = f"{begin}{end.rjust(len(busy) - len(begin))}"
        for middle in course.below_bars(report, some):
            if columns(begin) + columns(middle) + columns(end) + 4 <= len(busy):
                left = len(busy) - columns(begin) - columns(end)
                axis = f"{begin}{middle.center(left)}{end}"
                break
        return [
            f" {self._paint('dim', 'busy')}   {self._paint('good', busy.rstrip())}".rstrip(),
            f" {self._paint('dim', 'lost')}   {self._paint('bad', lost.rstrip())}".rstrip(),
            " " * _LABEL + self._paint("dim", axis),
        ]

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
            # The card has said it of the first.
            told = 1 if number == 1 and words.chief(report) is not None else lines_each
            lines += self._cause(number, finding, told)
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
            sure.certainty(finding),
            words.recoverable(finding, "unknown"),
        )
        more = words.more_why(finding) if number > 1 else ""  # the card says it of the first
        row_lines = [row, self._paint("dim", self._one_line(more))] if more else [row]
        if lines_each < 2:
            return row_lines
        who = whose.culprits(finding, 2)
        about = f"{words.title(finding)}{f': {who}' if who else ''}"
        return [*row_lines, self._paint("dim", self._one_line(about))]

    def _seen(self, finding: Finding | None, most: int) -> str:
        """Say as much of the evidence as some lines hold, each number with what it says."""
        if finding is None:
            return ""
        said = finding.compared  # beside the culprits, one line above
        some = [one for one in finding.evidence if said is None or one.name != said.name]
        some = some[:_MOST_SEEN]
        for items in range(len(some), 1, -1):
            seen = "; ".join(numbers.evidence(item) for item in some[:items])
            if len(wrap(seen, self._width - _LABEL - 1)) <= most:
                return seen
        return numbers.evidence(some[0]) if some else ""

    def _row(self, mark: str, label: str, lost: str, part: str, sure: str, wins: str) -> str:
        cells = [lost.rjust(_LOST), part.rjust(_SHARE)]
        cells += [sure.rjust(_SURE)] if self._width >= _WITH_SURE else []
        cells += [wins.rjust(_WINS)] if self._width >= _WITH_WINS else []
        room = self._width - 4 - sum(map(columns, cells))
        return (f" {mark:<2} {fit(label, room)}" + "".join(cells)).rstrip()

    def _pointer(self, report: Report) -> str:
        """The last line of the first screen: what is not on it."""
        findings = words.in_step(report)
        blinds = unseen.blind_count(report)
        hidden = f"Not seen: {blinds} {'thing' if blinds == 1 else 'things'}, listed below."
        hidden = hidden if blinds else "Not seen: nothing known."
        if not findings:
            return self._paint("dim", hidden)
        more = f"More: clusterprof explain {safe_text(findings[0].cause.id, 60)}"
        room = self._width - 2
        short = hidden.replace(", listed below", "")
        told = (f"{hidden}  {more}", f"{short}  {more}", hidden)  # a command that is cut is none
        text = next((one for one in told if columns(one) <= room), hidden)
        return self._paint("dim", fit(text, room).rstrip())

    def _one_line(self, text: str) -> str:
        return " " * 4 + fit(text, self._width - 4).rstrip()

    def _text(self, text: str, indent: int, hanging: int = 0) -> list[str]:
        lines = wrap(text, self._width - indent - hanging)
        return [" " * (indent + (hanging if i else 0)) + line for i, line in enumerate(lines)]
