"""The top of the page: what was lost, how much, why, whose, what next, and what it is worth."""

from __future__ import annotations

from clusterprof.findings import UNATTRIBUTED, Finding, Report
from clusterprof.renderers import advised, course, header, numbers, sure, unseen, whose, words
from clusterprof.renderers.html.advice import advice_of, changed
from clusterprof.renderers.html.palette import css_class
from clusterprof.renderers.html.swatch import BAR_WIDTH, bar, swatch
from clusterprof.renderers.html.tags import Markup, join, tag
from clusterprof.units import human

_MOST_OF_BAR = 12  # causes with a name under the bar
_MOST_SEEN = 3  # numbers behind "why"


def verdict(report: Report, price: float | None, currency: str) -> Markup:
    """Return the section that answers what, how much, why, who and what next."""
    said = [tag("p", line, class_="warning") for line in words.warnings(report)]
    lines = [words.chief_cause(report), words.outside(report)]
    if report.worth is None:
        lines.append(words.money(report, price, currency))
    said += [tag("p", line) for line in lines if line]
    return tag(
        "section",
        masthead(report),
        tag("h1", words.verdict(report)),
        *said,
        _tiles(report),
        _bar(report),
        _answers(report),
        id="verdict", class_="card",
    )  # fmt: skip


def at_most(report: Report) -> str:
    return "≤ " if words.bounded(report) else ""


def _tiles(report: Report) -> Markup | None:
    if not report.in_step_ns:
        return None
    tiles = [
        _tile(
            at_most(report) + words.share(report.lost_ns, report.in_step_ns),
            "of device time in steps lost",
        ),
        _tile(at_most(report) + words.gpu_time(report.lost_ns), "lost in all"),
    ]
    worth = report.worth
    if worth is not None and worth.lost_cost is not None and not report.emulated:
        unit = worth.currency
        rate = worth.price_per_gpu_hour
        per = "" if rate is None else f" at {rate:,.2f} {unit} per GPU-hour"
        tiles.append(_tile(f"{at_most(report)}{worth.lost_cost:,.2f} {unit}", f"lost{per}"))
    best = None if worth is None else next((c for c in worth.causes if c.saved_ns), None)
    if best is not None and best.saved_ns is not None:
        span = ""
        if best.saved_low_ns is not None and best.saved_high_ns is not None:
            span = f" ({human(best.saved_low_ns, 'ns')} to {human(best.saved_high_ns, 'ns')})"
        tiles.append(
            _tile(human(best.saved_ns, "ns"), f"sooner done with {best.cause} fixed{span}")
        )
    tail = report.tail
    if tail is not None and tail.p50_ns is not None and tail.p99_ns is not None:
        tiles.append(
            _tile(human(tail.p50_ns, "ns"), f"median step; 99 of 100 in {human(tail.p99_ns, 'ns')}")
        )
    if worth is not None and worth.tokens_per_second is not None:
        fixed = worth.tokens_per_second_if_fixed
        then = "" if fixed is None else f"; {fixed:,.0f} if all were fixed"
        tiles.append(_tile(f"{worth.tokens_per_second:,.0f}", f"tokens per second{then}"))
    return tag("div", *tiles, class_="tiles")


def _tile(number: str, about: str) -> Markup:
    return tag("div", tag("strong", number), tag("span", about), class_="tile")


def _bar(report: Report) -> Markup | None:
    """Draw time in steps as one bar: productive, then each cause, and name the parts below."""
    if not report.in_step_ns:
        return None
    families = {finding.cause.id: finding.cause.family for finding in report.findings}
    sums = sorted(words.summed(report).items(), key=lambda b: (b[0] == UNATTRIBUTED, -b[1], b[0]))
    parts = [(c, css_class(c, families.get(c, "")), ns) for c, ns in sums if ns]
    told = [_named("productive", "k-productive", report.productive_ns, report)]
    told += [_named(cause, colour, ns, report) for cause, colour, ns in parts[:_MOST_OF_BAR]]
    rest = parts[_MOST_OF_BAR:]
    if rest:
        told.append(tag("li", f"{len(rest):,} smaller causes, in the ledger"))
    label = f"{words.share(report.lost_ns, report.in_step_ns)} of the time in steps was lost"
    segments = [("k-productive", report.productive_ns), *((c, ns) for _, c, ns in parts)]
    return tag(
        "figure",
        bar(segments, report.in_step_ns, label, BAR_WIDTH),
        tag("figcaption", tag("ul", *told, class_="legend")),
        class_="whole",
    )


def _named(name: str, colour: str, ns: int, report: Report) -> Markup:
    part = words.share(ns, report.in_step_ns)
    return tag("li", swatch(colour), f" {name} ", tag("b", part))


def _answers(report: Report) -> Markup | None:
    """Answer the five questions for the first finding."""
    findings = words.in_step(report)
    if not findings or findings[0].lost_ns < report.unattributed_ns:
        return _no_answer(report)
    first = findings[0]
    answers = [
        ("What", join(words.title(first), " ", tag("code", first.cause.id))),
        ("How much", join(_how_much(first, report))),
        ("Why we think so", join(_why(first))),
        ("Who", join(_who(first))),
        ("Next", _next(first)),
    ]
    found = course.course_of(report)
    if found is not None:
        answers.insert(4, ("Over time", join(f"{course.told(found)}.")))
    rows = [tag("div", tag("dt", question), tag("dd", answer)) for question, answer in answers]
    return tag("dl", *rows, class_="answers")


def _no_answer(report: Report) -> Markup | None:
    if not report.ranks:
        return tag("p", "See ", tag("a", "what could not be seen", href="#unknown"), ".")
    if not report.in_step_ns:
        return None
    blinds = unseen.blind_count(report)
    unseen_ = f" and {blinds:,} not seen" if blinds else ""
    link = tag("a", f"what is unattributed{unseen_}", href="#unknown")
    return tag("p", "No cause stands out; see ", link, ".")


def _how_much(first: Finding, report: Report) -> str:
    part = human(first.share_ratio, "ratio")
    said = f"{words.lost(first)} of device time, {part} of the time in steps"
    if first.recoverable_ns is not None:
        said += f"; fixing only this wins {words.wins(first)}"
    cost = cost_of(first, report)
    return f"{said}; {cost}." if cost else f"{said}."


def _why(first: Finding) -> str:
    seen = [numbers.evidence(item) for item in first.evidence[:_MOST_SEEN]]
    said = "; ".join(seen) if seen else "no single number behind it was kept"
    return f"{said}. That is {certain(first)}."


def certain(finding: Finding) -> str:
    """Say how certain a cause is, and on what grounds."""
    return f"{sure.certainty(finding)} sure: {sure.grounds(finding.grade)}"


def _who(first: Finding) -> str:
    names = whose.chiefs_in_short(first) or "no rank's doing"
    told = whose.beside(first)
    parts = [f"{names}: {told}" if told else names, whose.since(first), whose.persistence(first)]
    return "; ".join(part for part in parts if part) + "."


def _next(first: Finding) -> Markup:
    best = advice_of(first)[0]
    withheld = [tag("p", f"{one}.", class_="note") for one in advised.withheld(first)]
    return join(tag("p", best.what), *changed(best), *withheld)


def cost_of(finding: Finding, report: Report) -> str:
    """Say what the lost time of a finding cost and how much sooner the job would be done."""
    worth = report.worth
    one = None
    if worth is not None:
        one = next((w for w in worth.causes if w.cause == finding.cause.id), None)
    if worth is None or one is None or finding.outside_steps:
        return ""
    said = []
    if one.lost_cost is not None and not report.emulated:
        bound = "at most " if finding.upper_bound else ""
        said.append(f"{bound}{one.lost_cost:,.2f} {worth.currency}")
    if one.saved_ns is not None:
        ends = ""
        if one.saved_low_ns is not None and one.saved_high_ns is not None:
            ends = f" ({human(one.saved_low_ns, 'ns')} to {human(one.saved_high_ns, 'ns')}, 95 %)"
        said.append(f"the job would end {human(one.saved_ns, 'ns')} sooner{ends}")
    elif one.why_missing:
        said.append(f"how much sooner the job would end is not known: {one.why_missing}")
    return "; ".join(said)


def masthead(report: Report) -> Markup:
    """Return what was recorded, in two lines."""
    place = header.place(report)
    return tag(
        "div",
        tag("p", report.title, class_="title"),
        tag("p", header.scope(report) + (f" · {place}" if place else ""), class_="scope"),
        class_="masthead",
    )
