"""The report as plain sentences: no colour, no boxes, no columns, nothing but ASCII of our own.

Made to be read aloud by a screen reader, to be grepped and to be mailed. Every line stands for
itself: a label, a colon and a value; indentation says what belongs together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from clusterprof.findings import Finding, Report
from clusterprof.renderers import (
    advised,
    course,
    header,
    numbers,
    sparks,
    sure,
    underfill,
    unseen,
    whose,
    words,
    worth,
)
from clusterprof.renderers.books import columns_of, exact_seconds, rows_of
from clusterprof.renderers.by import Table, tables
from clusterprof.renderers.card import card
from clusterprof.renderers.matrix import matrix_of
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human

_MOST_CULPRITS = 3  # whose amounts are told
_MOST_ROWS, _MOST_CAUSES = 16, 5  # of the ranks by cause
_OF_MANY = 8  # ranks in the ledger when there are more than it can hold
_ALONE = 16  # up to so many nodes have a line of their own
_ASCII = {ord("µ"): "u", ord("°"): "degrees ", ord("…"): "...", ord("≤"): "at most "}


class Plain:
    """The report as sentences, without colour, boxes or columns."""

    name: ClassVar[str] = "plain"
    suffix: ClassVar[str] = ".txt"

    def __init__(
        self,
        gpu_price_per_hour: float | None = None,
        currency: str = "USD",
        most_ranks: int = 64,
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
        lines = [line.translate(_ASCII) for line in self._lines(report)]
        return "\n".join(lines) + "\n"

    def _lines(self, report: Report) -> Iterator[str]:
        yield f"Recording: {safe_text(report.title)}: {header.scope(report)}"
        if header.place(report):
            yield f"Nodes: {header.place(report)}"
        yield f"Verdict: {words.verdict(report)}"
        for sentence in (
            words.chief_cause(report),
            words.outside(report),
            words.money(report, self._price, self._currency),
        ):
            if sentence:
                yield f"Verdict: {sentence}"
        for warning in words.warnings(report):
            yield f"Warning: {warning}"
        yield from _next(report)
        found = course.course_of(report)
        if found is not None:
            yield f"Over time: {course.told(found)}"
        for line in sparks.sentences(report):
            yield f"Over time: {line}"
        for table in tables(report, self._by, self._top):
            yield from _table(table)
        for number, finding in enumerate(report.findings, 1):
            yield from _finding(number, finding, report.in_step_ns)
        for cause, ns in words.small_causes(report):
            yield f"Too small to be a finding: {safe_text(cause)}: {human(ns, 'ns')}"
        for line in worth.sentences(report):
            yield f"Worth: {line}"
        for line in underfill.sentences(report):
            yield f"Under-filled, apart from lost time: {line}"
        yield from _unattributed(report)
        yield from _not_seen(report)
        for line in whose.tail(report):
            yield f"Slow steps: {line}"
        yield from _matrix(report)
        yield from self._ledger(report)
        yield from _measures(report)
        yield from _recording(report)
        for note in report.notes:
            yield f"Note: {safe_text(note, 600)}"

    def _ledger(self, report: Report) -> Iterator[str]:
        most = self._most_ranks if len(report.ranks) <= self._most_ranks else _OF_MANY
        columns = columns_of(report, most)
        rows = rows_of(columns)
        for index, column in enumerate(columns):
            rank, about = column.rank, ""
            if rank is not None:
                device = safe_text(rank.device) or "no accelerator measured"
                about = f", {safe_text(rank.node)}, {device}, measured by {safe_text(rank.source)}"
                about += f", {rank.steps:,} steps"
            yield f"Ledger of {column.heading}{about}, in seconds:"
            for row in rows:
                yield f"  {'  ' * row.depth}{row.label}: {exact_seconds(row.ns[index])}"
        hidden = len(report.ranks) - most
        if hidden > 0:
            yield f"Ledger: {hidden:,} ranks that lost less are left out; --json has them all."


def _finding(number: int, finding: Finding, in_step_ns: int) -> Iterator[str]:
    yield f"Cause {number}: {safe_text(finding.cause.id)}: {words.title(finding)}"
    whole = "the recorded time, outside steps" if finding.outside_steps else "the time inside steps"
    part = human(finding.share_ratio, "ratio")
    yield f"  Lost: {words.lost(finding)}, {part} of {whole}"
    yield f"  Certainty: {sure.in_full(finding)}"
    yield f"  Fixing only this wins: {words.wins(finding)}"
    if finding.culprits:
        yield f"  Whose: {whose.culprits(finding, 4)}"
    for line in whose.caused(finding, _MOST_CULPRITS, in_step_ns):
        yield f"  Caused: {line}"
    for label, text in (
        ("Beside", whose.beside(finding)),
        ("Since", whose.since(finding)),
        ("Waits", whose.persistence(finding)),
    ):
        if text:
            yield f"  {label}: {text}"
    for item in finding.evidence:
        yield f"  Evidence: {numbers.evidence(item)}"
    yield f"  Advice: {advised.first(finding)}"
    for label, text in (
        ("Change", advised.change(finding)),
        ("Effort", advised.effort(finding)),
        ("Or", advised.more(finding)),
        ("Not advised", "; ".join(advised.withheld(finding))),
    ):
        if text:
            yield f"  {label}: {text}"


def _next(report: Report) -> Iterator[str]:
    """The first thing to do and what it wins, so that nobody has to listen to the end."""
    for label, text in card(report, None, ""):
        if label == "NEXT" or text.startswith("Change:"):
            yield f"Next: {text}"
        elif label == "WINS":
            yield f"Next: it wins: {text[:1].lower()}{text[1:]}"


def _table(table: Table) -> Iterator[str]:
    """Every row is a sentence: heads and values, so that nothing depends on columns."""
    title = table.title.capitalize()
    for row in table.rows:
        cells = [f"{head} {value}" for head, value in zip(table.heads, row)]
        yield f"{title}: {', '.join(cells)}"
    if table.rest:
        yield f"{title}: {table.rest}"


def _unattributed(report: Report) -> Iterator[str]:
    part = words.share(report.unattributed_ns, report.lost_ns)
    yield f"Unattributed: {human(report.unattributed_ns, 'ns')}, {part} of the loss"
    for reason, ns in report.unattributed_reasons:
        yield f"  Reason: {human(ns, 'ns')}: {unseen.reason(reason)}"


def _not_seen(report: Report) -> Iterator[str]:
    blinds = unseen.blinds(report)
    yield f"Not seen: {unseen.blind_count(report) or 'nothing is known to be missing'}"
    yield from (f"  {blind}" for blind in blinds)


def _measures(report: Report) -> Iterator[str]:
    for metric in report.metrics:
        if metric.value is None:
            value = f"not known: {safe_text(metric.why_missing, 300)}"
        else:
            bound = "" if metric.bound == "exact" else f"{metric.bound} "
            value = bound + human(metric.value, metric.unit)
        yield f"Measure: {safe_text(metric.name, 60)}: {value}"


def _recording(report: Report) -> Iterator[str]:
    for line in header.recordings(report, _ALONE, " recorded"):
        yield f"Node: {line}"


def _matrix(report: Report) -> Iterator[str]:
    found = matrix_of(report, _MOST_ROWS, _MOST_CAUSES)
    for at, line in enumerate(found.lines if found else ()):
        many = "rank" if line.ranks == 1 else "ranks"
        name = f"{many} {line.label} of {safe_text(line.node)}"
        if found and found.rest and at == len(found.lines) - 1:
            name = found.rest
        for word, ns in (("felt", line.felt), ("caused", line.caused)):
            causes = zip(found.causes if found else (), ns)
            parts = [f"{safe_text(cause, 60)} {human(one, 'ns')}" for cause, one in causes if one]
            of_it = f", of it {', '.join(parts)}" if parts else ""
            yield f"Ranks: {name}: {word} {human(ns[-1], 'ns')}{of_it}"
