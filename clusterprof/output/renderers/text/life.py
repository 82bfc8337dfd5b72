"""The life of a job as a waterfall: from the wall time of all its devices down to what counts.

    in the queue        8.00 min    6.7 %  ###
    starting up         4.00 min    3.3 %     ##
    training            1.80 h     90.0 %       ################

Below it stands what every attempt did. Parts without time are left out; one that is not known has
its reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.output.renderers.text.tables import TextTable
from clusterprof.report.life import TRAINING, Attempt, Life, LifePart
from clusterprof.report.model import Report
from clusterprof.units import format_quantity

LIFE_SCOPE = ", wall time of all its devices"
LIFE_HEADING = f"LIFE OF THE JOB{LIFE_SCOPE}"
BAR_COLUMNS = 24
"""Width of the bars, columns."""
MAX_ATTEMPTS = 20
"""Attempts that are listed; the last ones are."""
_UNKNOWN = "not known"
_PART_HEADS = ("part", "device time", "share")
_ATTEMPT_HEADS = ("attempt", "began", "lasted", "ranks", "steps", "done again", "failure")


def describe_life(report: Report) -> list[str]:
    """Describe the length of the life in one sentence, and each reason why a part is not known."""
    life = report.life
    if life is None:
        return []
    if life.why_missing:
        return [f"The life of the job is not known: {escape_text(life.why_missing, 300)}."]
    counts = _count_nouns(life.devices, "device"), _count_nouns(len(life.attempts), "attempt")
    wall = format_quantity(life.wall_ns, "ns")
    total = format_quantity(life.total_ns, "ns")
    sentences = [f"{wall} on {counts[0]} in {counts[1]}: {total} of device time."]
    return [*sentences, *(_describe_unknown(part) for part in life.parts if part.why_missing)]


def _count_nouns(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _describe_unknown(part: LifePart) -> str:
    how = f"only part of it is known, {format_quantity(part.ns, 'ns')}" if part.ns else _UNKNOWN
    return f"{part.title}: {how}: {escape_text(part.why_missing, 300)}"


def build_life_tables(report: Report, bars: bool = False) -> list[TextTable]:
    """Build the waterfall, and the table of attempts if there are several; [] without a life.

    bars: with a column of bars, of letters that ASCII has not.
    """
    life = report.life
    if life is None or not life.total_ns:
        return []
    rows = tuple(_build_part_rows(life, bars))
    heads = (*_PART_HEADS, *(("",) if bars else ()))
    tables = [TextTable("PARTS OF ITS LIFE", heads, rows, int(bars), "", has_long_names=True)]
    if len(life.attempts) > 1:
        tables.append(_build_attempt_table(life.attempts))
    return tables


def list_shown_parts(life: Life) -> list[LifePart]:
    """List the parts with time, and those that are not known, in order."""
    return [part for part in life.parts if part.ns != 0 or part.name == TRAINING]


def _build_part_rows(life: Life, bars: bool) -> Iterator[tuple[str, ...]]:
    before_ns = 0
    for part in list_shown_parts(life):
        if part.ns is None:
            yield (part.title, _UNKNOWN, "", *(("",) if bars else ()))
            continue
        share = format_quantity(part.ns / life.total_ns, "ratio")
        at_least = "≥ " if part.why_missing else ""
        row = (part.title, at_least + format_quantity(part.ns, "ns"), share)
        yield (*row, *((_draw_bar(before_ns, part.ns, life.total_ns),) if bars else ()))
        before_ns += part.ns


def _draw_bar(before_ns: int, ns: int, total_ns: int) -> str:
    """Draw a bar that begins where the one above ends; any time has at least one column."""
    begin = round(BAR_COLUMNS * before_ns / total_ns)
    end = round(BAR_COLUMNS * (before_ns + ns) / total_ns)
    begin = min(begin, BAR_COLUMNS - 1)
    return " " * begin + "█" * max(end - begin, 1 if ns else 0)


def _build_attempt_table(attempts: Sequence[Attempt]) -> TextTable:
    shown = list(enumerate(attempts, 1))[-MAX_ATTEMPTS:]
    hidden_count = len(attempts) - len(shown)
    rows = tuple(
        (
            str(number),
            format_quantity(attempt.start_ns, "ns"),
            format_quantity(attempt.end_ns - attempt.start_ns, "ns"),
            f"{attempt.ranks:,}",
            f"{attempt.steps:,}",
            _UNKNOWN if attempt.repeated_steps is None else f"{attempt.repeated_steps:,}",
            escape_text(attempt.ended, 60) or "none seen",
        )
        for number, attempt in shown
    )
    remainder = f"{hidden_count:,} earlier attempts are not listed" if hidden_count else ""
    return TextTable("ATTEMPTS", _ATTEMPT_HEADS, rows, 1, remainder)
