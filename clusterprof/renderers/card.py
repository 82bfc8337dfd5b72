"""The verdict as a card: what was lost, why, whose cause it was, what was seen, what to do next.

    LOST   27.2 % of GPU time inside steps: 7.46 of 27.4 GPU-seconds.
    WHY    A bad link slows the data down: 5.95 s, 21.7 % (93 % sure).
    WHO    node0 (eth0)
    SEEN   tcp.retransmit_ratio 0.2 % (of the segments were sent again)
    NEXT   Drain the link that is named, then reseat or replace cable, transceiver or port
    WINS   About 5.90 s of GPU time; the job ends 2.95 s sooner (21.5 %).

Every line stands for itself, so that half a minute of reading is enough.
"""

from __future__ import annotations

from clusterprof.findings import Finding, Report
from clusterprof.renderers import advised, sure, whose, words
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human

CHANGE = "Change:"
TAKES_TIME = "net-transfer"
"""As long as data take on their way some of it stays, whatever is done."""
_WORTH_SAYING_RATIO = 0.01  # of the job's time: less is no reason to do anything


def card(report: Report, price_per_hour: float | None, currency: str) -> list[tuple[str, str]]:
    """Return labels and texts; [] for a report without ranks or time inside steps."""
    if not report.ranks or not report.in_step_ns:
        return []
    money = words.money(report, price_per_hour, currency)
    lines = [("LOST", words.total(report, was_lost="") + (f" {money}" if money else ""))]
    outside = words.outside(report)
    if outside:
        lines.append(("", outside))
    if not words.worth_mending(report):
        return [*lines, ("NEXT", words.nothing_lost(report))]
    first = words.chief(report)
    if first is None:
        lines.append(("WHY", words.WITHOUT_EVIDENCE))
        found = words.in_step(report)
        if not found:
            return [*lines, ("NEXT", "Remedy what is listed under Not seen, and record again.")]
        first = found[0]
        lines.append(("", f"What is known best: {_why(first)}"))
    else:
        lines.append(("WHY", _why(first)))
    who = _who(first)
    if who:
        lines.append(("WHO", who))
    lines += [("SEEN", ""), *_next(report, first)]
    return lines


def spoken_of(report: Report) -> Finding | None:
    """Return the finding of which the card speaks; None where it speaks of none."""
    found = words.in_step(report)
    return words.chief(report) or (found[0] if found else None)


def _why(first: Finding) -> str:
    part = human(first.share_ratio, "ratio")
    return f"{words.title(first)}: {words.lost(first)}, {part} ({sure.certainty(first)} sure)."


def _who(first: Finding) -> str:
    """Name whose cause it was, who waited for them, and whether it is always they."""
    if not first.culprits:
        return "No rank's doing: all suffer alike."
    chief = first.culprits[0]
    told = whose.beside(first)
    parts = [whose.chiefs_in_short(first) + (f": {told}" if told else "")]
    if len(whose.chief_culprits(first)) == 1 and chief.victims and chief.others_ns:
        many = "rank" if chief.victims == 1 else "ranks"
        who = f"{chief.victims:,} other {many}"
        if first.compared is not None and (first.compared.of, first.compared.many) == (
            "rank",
            chief.victims,
        ):  # they were named just before
            who = "which" if chief.victims == 1 else "these"
        parts.append(f"{who} lost {human(chief.others_ns, 'ns')} waiting for it")
    # Since then it was always they, or no onset would have been found.
    parts.append(whose.since(first) or whose.persistence_in_short(first))
    return "; ".join(part for part in parts if part)


def _next(report: Report, first: Finding) -> list[tuple[str, str]]:
    """Say the first thing to do, what one may expect in its place, and what it wins."""
    text = advised.first(first)
    if not text:
        return []
    said = [text, *advised.withheld(first)]
    lines = [("NEXT", " ".join(_stopped(one) for one in said) if len(said) > 1 else text)]
    told = first.advice[0] if first.advice else None
    if told is not None and told.change:
        lines.append(("", f"{CHANGE} {safe_text(told.change, 400)}"))
    wins = wins_of(report, first)
    return [*lines, ("WINS", wins)] if wins else lines


def _stopped(text: str) -> str:
    return text if text[-1] in ".!?" else f"{text}."


def wins_of(report: Report, first: Finding) -> str:
    """Say what fixing a finding wins, in device time and in time of the job; "" if unknown."""
    if first.recoverable_ns is None or not report.in_step_ns:
        return ""
    at_most = "At most " if first.upper_bound or first.cause.id == TAKES_TIME else "About "
    text = f"{at_most}{human(first.recoverable_ns, 'ns')} of GPU time"
    worth = report.worth
    of = [] if worth is None else [one for one in worth.causes if one.cause == first.cause.id]
    saved = of[0].saved_ns if of else None
    job_ns = worth.job_ns if worth is not None else None
    if saved and job_ns and saved >= _WORTH_SAYING_RATIO * job_ns:
        # The same of the job, and one part of it: of device time it would differ by what ranks do.
        part = human(saved / job_ns, "ratio")
        text = f"{text}; the job ends {human(saved, 'ns')} sooner ({part})"
    else:
        text = f"{text}, {human(first.recoverable_ns / report.in_step_ns, 'ratio')}"
    more = words.more_why(first)
    return f"{text}. That is {more}." if more else f"{text}."
