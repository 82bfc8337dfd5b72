"""When a cause began that was not there from the first step on: `Finding.since`.

    what rank 2 cost, by part of the run    0 0 0 9 9 9 9 9 9 9 9 9      since the fourth part
    what comes and goes                     0 9 0 0 9 0 9 0 0 9 0 0      no answer
    what ended again                        0 0 0 9 9 9 0 0 0 0 0 0      no answer: `Persistence`

Asked of the chief culprit alone: what it lost itself to the cause, and what others waited, where
most of their waiting was for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median_high

from clusterprof.engine.besides import CHIEF_RATIO
from clusterprof.findings import Culprit, Finding, Report
from clusterprof.history import WAITING, History
from clusterprof.persistence import Since

MOST_PARTS, FEWEST_PARTS = 24, 8
BEFORE_RATIO = 0.2
"""Of the level after it: what a cause costs before it began is no more."""
LASTS_RATIO = 0.5
"""Of the level after it: what it costs in the last quarter is at least that."""
LEAST_RATIO = 0.03
"""Of the time in steps: a level below it is no onset worth naming."""
FOR_IT_RATIO = 0.6
"""Of all waiting: so much must be for the culprit, or the waiting says nothing of it."""
_FEWEST_BEFORE = 2  # parts before an onset: the first is warming up
_Series = list[tuple[int, int]]
"""(cost, time in steps) by stretch."""


def with_onsets(report: Report) -> Report:
    """Return the report with the time at which causes began, where they did."""
    history = report.history
    if history is None or not history.stretches:
        return report
    found = tuple(replace(one, since=since(one, report, history)) for one in report.findings)
    return replace(report, findings=found)


def since(finding: Finding, report: Report, history: History) -> Since | None:
    """Return when a cause began; None where it was there from the start, came and went, or
    nobody, or several, caused it."""
    at = _chief(finding, report)
    if at is None:
        return None
    series = _costs(finding.culprits[0], finding.cause.id, at, history)
    stretch = onset(series)
    if stretch is None:
        return None
    run_ns = history.begin_ns + stretch * history.stretch_ns
    steps = report.ranks[at].steps
    own = next((one for one in history.ranks if one.rank == at), None)
    done = None
    if own is not None and own.step_ends_ns:
        done = min(sum(end <= run_ns for end in own.step_ends_ns) * history.step_every, steps)
    return Since(run_ns, done, steps if done is not None else None)


def _chief(finding: Finding, report: Report) -> int | None:
    """The place of the only chief culprit, where it is a rank."""
    if finding.outside_steps or not finding.culprits or finding.culprits[0].rank is None:
        return None
    first, *others = finding.culprits
    if any(_caused(one) >= CHIEF_RATIO * _caused(first) for one in others):
        return None
    named = [
        at for at, one in enumerate(report.ranks)
        if (one.node, one.rank) == (first.node, first.rank) and one.steps
    ]  # fmt: skip
    return named[0] if len(named) == 1 else None


def _caused(one: Culprit) -> int:
    return (one.own_ns or 0) + (one.others_ns or 0)


def _costs(chief: Culprit, cause: str, at: int, history: History) -> _Series:
    """What the chief culprit cost by stretch. Waiting that was not for it (transfers, above all) is
    taken as even over the time in steps."""
    own = [dict(one.lost).get(cause, ()) for one in history.ranks if one.rank == at]
    waits = [dict(one.lost).get(WAITING, ()) for one in history.ranks if one.rank != at]
    in_step = next((one.in_step_ns for one in history.ranks if one.rank == at), ())
    rows = [one for one in own if one]
    waited, whole = sum(sum(one) for one in waits), max(sum(in_step), 1)
    even = 0
    if waited and (chief.others_ns or 0) >= FOR_IT_RATIO * waited:
        rows += [one for one in waits if one]
        even = max(waited - (chief.others_ns or 0), 0)
    return [
        (max(sum(row[number] for row in rows) - even * length // whole, 0), length)
        for number, length in enumerate(in_step)
    ]


def onset(series: Sequence[tuple[int, int]]) -> int | None:
    """Return the stretch with which a cost begins that then stays; None where there is none."""
    each = -(-len(series) // MOST_PARTS) or 1
    parts = [(low, *_summed(series[low : low + each])) for low in range(0, len(series), each)]
    fullest = max((length for _, _, length in parts), default=0)
    known = [one for one in parts if one[2] and 4 * one[2] >= fullest]
    if len(known) < FEWEST_PARTS:
        return None
    levels = [cost / length for _, cost, length in known]
    splits = range(_FEWEST_BEFORE, len(known) - _FEWEST_BEFORE)
    best = max(splits, key=lambda at: _between(levels, at), default=None)
    if best is None:
        return None
    # The part in which it began is half of it: it says nothing of what was before.
    before, after = median_high(levels[:best]), _mean(levels[best:])
    last = _mean(levels[-max(len(levels) // 4, 1) :])
    if after < LEAST_RATIO or before > BEFORE_RATIO * after or last < LASTS_RATIO * after:
        return None
    if min(levels[best:]) < BEFORE_RATIO * after:
        return None  # it comes and goes
    return _first(series, known[best - 1][0], known[best][0] + each, (before + after) / 2)


def _summed(some: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(cost for cost, _ in some), sum(length for _, length in some)


def _between(levels: Sequence[float], at: int) -> float:
    """How much of the differences a step up at a place explains."""
    gap = _mean(levels[at:]) - _mean(levels[:at])
    return gap * abs(gap) * at * (len(levels) - at)


def _mean(some: Sequence[float]) -> float:
    return sum(some) / len(some)


def _first(series: Sequence[tuple[int, int]], low: int, high: int, level: float) -> int:
    """The first stretch of some from which on all of them together are above a level."""
    for at in range(low, high):
        cost, length = _summed(series[at:high])
        begun = series[at][1] and series[at][0] >= level * series[at][1]
        if begun and cost >= level * length:
            return at
    return high
