"""How loss went over the run, in words: of the same parts that are drawn as bars.

    ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁    steady      hardly more in one part than in another
    ▁▁▁▁▂▂▃▃▄▄▅▅▆▆▇▇    rising      a line explains it best; falling, the other way round
    ▁▁▁▁▁▆▆▆▆▆▆▆▆▆▆▆    from        one step up; until, one down
    ▁▁▁▁▁▁▁▆▆▆▆▁▁▁▁▁    between     one stretch of more; apart, one of less
    ▁▁▆▁▁▁▆▁▁▁▆▁▁▁▆▁    bursts      none of these

The share of the time in steps that was lost is asked in 24 parts or fewer. Parts with less than a
quarter of the time in steps that the fullest has (start-up, the end) say nothing. Loss is steady
where nine of ten parts lie within one bar of each other: an eighth of the time, or half of what was
lost in all where that is less, but at least a twentieth. Otherwise the course that explains most of
the differences is said, if it explains half of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from clusterprof.findings import Report
from clusterprof.hostlists import fold_numbers
from clusterprof.renderers.sparks import Part, clock_of, parts, worst
from clusterprof.renderers.sparks import told as part_told
from clusterprof.units import human

MOST_PARTS, FEWEST_PARTS = 24, 8
STEADY_RATIO, LEAST_RATIO = 0.125, 0.05
EXPLAINS_RATIO = 0.5
_OUTER = 0.05  # of the parts on either side: what is beyond is one odd part
_SIMPLER = 0.1  # more must a stretch explain than a step or a line, which have fewer ends
Kind = Literal["steady", "rising", "falling", "from", "until", "between", "apart", "bursts"]


@dataclass(frozen=True, slots=True)
class Course:
    """How much was lost when."""

    kind: Kind
    start_ns: int
    """Run time at which the stretch of which `kind` speaks begins, and ends."""
    end_ns: int
    level_ratio: float
    """Of the time in steps lost in that stretch; of bursts in the worst part, of rising and falling
    at the end."""
    else_ratio: float
    """Lost in the rest; of bursts in the middle part, of rising and falling at the beginning."""
    of_ns: int
    """Run time at which the run ends."""
    ended: str = ""
    """Who ended before the others, and when: what is said is said of the others alone."""


def course_of(report: Report) -> Course | None:
    """Return the course of loss over the run; None without a history, or where it is too short."""
    some = parts(report, MOST_PARTS, _ended(report))
    fullest = max((one.in_step_ns for one in some), default=0)
    known = [one for one in some if one.in_step_ns and 4 * one.in_step_ns >= fullest]
    if len(known) < FEWEST_PARTS:
        return None
    return replace(_judged(known), ended=ended_told(report))


def ended_told(report: Report) -> str:
    """Say which ranks ended before the others, and when; "" where none did."""
    history = report.history
    if history is None or not history.ended:
        return ""
    last_ns = history.begin_ns + history.stretches * history.stretch_ns
    first_ns = min(ns for _, ns in history.ended)
    named = [report.ranks[at].rank for at, _ in history.ended]
    many = len(named)
    if all(rank is not None for rank in named):
        who = f"rank{'' if many == 1 else 's'} {fold_numbers([r for r in named if r is not None])}"
    else:
        who = "1 rank" if many == 1 else f"{many:,} ranks"
    when = clock_of(first_ns, last_ns)
    return f"{who} ended at {when}" if many == 1 else f"{who} ended, the first at {when}"


def _judged(some: Sequence[Part]) -> Course:
    ratios = [one.lost_ns / one.in_step_ns for one in some]
    last_ns = some[-1].end_ns
    whole = _lost(some)
    ordered = sorted(ratios)
    outer = int(_OUTER * len(some))
    spread = ordered[len(some) - 1 - outer] - ordered[outer]
    start, end = some[0].start_ns, last_ns
    if spread < max(LEAST_RATIO, min(STEADY_RATIO, whole / 2)):
        return Course("steady", start, end, whole, whole, last_ns)
    mean = sum(ratios) / len(ratios)
    total = sum((ratio - mean) ** 2 for ratio in ratios)
    slope, line = _line(ratios, mean, total)
    (low, high), box = _stretch(ratios, mean, total, False)
    (left, right), step = _stretch(ratios, mean, total, True)
    best = max(line, step)
    if box >= best + _SIMPLER and box >= EXPLAINS_RATIO:
        return _two_levels(some, low, high, "between", "apart")
    if best < EXPLAINS_RATIO:
        middle = ordered[(len(ordered) - 1) // 2]
        return Course("bursts", start, end, ordered[-1], middle, last_ns)
    if line >= step:
        third = max(len(some) // 3, 1)
        kind: Kind = "rising" if slope > 0 else "falling"
        return Course(kind, start, end, _lost(some[-third:]), _lost(some[:third]), last_ns)
    if left == 0:  # said of the stretch at the end, whichever lost more
        left, right = right, len(some)
    return _two_levels(some, left, right, "from", "until")


def _two_levels(some: Sequence[Part], low: int, high: int, more: Kind, less: Kind) -> Course:
    """Say of a stretch that it lost more, or of what is before (or around) it."""
    inside, outside = _lost(some[low:high]), _lost([*some[:low], *some[high:]])
    start, end, last_ns = some[low].start_ns, some[high - 1].end_ns, some[-1].end_ns
    if inside >= outside:
        return Course(more, start, end, inside, outside, last_ns)
    if less == "until":
        return Course(less, some[0].start_ns, start, outside, inside, last_ns)
    return Course(less, start, end, inside, outside, last_ns)


def _lost(some: Sequence[Part]) -> float:
    in_step = sum(one.in_step_ns for one in some)
    return sum(one.lost_ns for one in some) / in_step if in_step else 0.0


def _line(ratios: Sequence[float], mean: float, total: float) -> tuple[float, float]:
    """Return the slope of the best straight line, and the part of the differences it explains."""
    middle = (len(ratios) - 1) / 2
    width = sum((at - middle) ** 2 for at in range(len(ratios)))
    slope = sum((at - middle) * (one - mean) for at, one in enumerate(ratios)) / width
    return slope, slope * slope * width / total


def _stretch(
    ratios: Sequence[float], mean: float, total: float, at_an_end: bool
) -> tuple[tuple[int, int], float]:
    """Return the stretch of its own level that explains most, and how much: parts low to high."""
    sums = [0.0]
    for ratio in ratios:
        sums.append(sums[-1] + ratio - mean)
    n = len(ratios)
    best, found = -1.0, (0, n)
    for low in range(n):
        for high in range(low + 1, n + 1):
            ends = (low == 0) + (high == n)
            if ends == 2 or (ends == 1) != at_an_end:
                continue
            inside, size = sums[high] - sums[low], high - low
            explained = inside**2 / size + inside**2 / (n - size)
            if explained > best:
                best, found = explained, (low, high)
    return found, best / total


def told(course: Course) -> str:
    """Say the course in one sentence."""
    text = _told(course)
    return f"{course.ended}; the rest: {text}" if course.ended else text


def _told(course: Course) -> str:
    level, other = human(course.level_ratio, "ratio"), human(course.else_ratio, "ratio")
    if course.kind == "steady":
        return "steady"
    if course.kind in ("rising", "falling"):
        return f"{course.kind}: {other} lost at first, {level} at last"
    if course.kind == "bursts":
        return f"in bursts: up to {level} lost, {other} in the middle"
    return f"{_in_short(course)}: {level} lost, else {other}"


def in_short(course: Course) -> str:
    """Say the course in a few words; where ranks ended early, that."""
    return course.ended or _in_short(course)


def _in_short(course: Course) -> str:
    start, end = (clock_of(ns, course.of_ns) for ns in (course.start_ns, course.end_ns))
    return {
        "from": f"from {start} on",
        "until": f"until {end}",
        "between": f"from {start} to {end}",
        "apart": f"all but {start} to {end}",
        "bursts": "in bursts",
    }.get(course.kind, course.kind)


def below_bars(report: Report, some: Sequence[Part]) -> list[str]:
    """Say below the bars of some parts how they go, in fewer and fewer words: the first that fits
    is taken."""
    found = course_of(report)
    ended = _ended(report)
    odd = worst(parts(report, len(some), ended) if ended else some)
    said = "" if odd is None else f"worst: {part_told(odd, some[-1].end_ns)}"
    stands_out = [said, said.split(",")[0]] if said else []
    if found is None:
        return [one for one in (ended_told(report), *stands_out) if one]
    short = in_short(found)
    if found.kind in ("steady", "bursts") and not found.ended:
        return [*(f"{short}; {text}" for text in stands_out), told(found), short]
    return [told(found), short]


def _ended(report: Report) -> set[int]:
    """Places of the ranks that ended while others went on."""
    return {at for at, _ in report.history.ended} if report.history is not None else set()
