"""Two runs side by side: which cause makes a step longer or shorter, not only that it is.

The time of a step is what was productive in it and what each cause lost, so the differences of
these add up to the difference of the step, to the nanosecond before rounding:

    per step       A        B        difference
    a step       170.1    182.9     +12.8 ms
    storage        0.1     12.0     +11.9 ms      more: beyond what chance explains
    productive   161.0    161.2      +0.2 ms      the same
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from clusterprof.errors import UsageError
from clusterprof.findings import UNATTRIBUTED, Report
from clusterprof.gate.alike import Unlike, unlike
from clusterprof.gate.doubts import doubts_of
from clusterprof.gate.judge import judge
from clusterprof.gate.noise import FEWEST_BLOCKS, Difference, Sample, compared, drawn_ratio
from clusterprof.gate.rules import AnyRule, Policy
from clusterprof.gate.verdict import Verdict
from clusterprof.stepstats import StepStats

Said = Literal["more", "less", "the same", "within chance", "cannot tell"]
"""Beyond chance; for certain next to nothing; no more than chance explains; chance is not known."""
STEP, PRODUCTIVE = "a step", "productive"
WORTH_RATIO = 0.005
"""Of a step: a difference that is smaller for certain is none."""
_SMALL_RATIO = 0.001  # of a step in both runs: not worth a line


@dataclass(frozen=True, slots=True)
class Row:
    """One part of a step in both runs; times per step of a rank."""

    name: str
    """`STEP`, `PRODUCTIVE`, a cause, or "unattributed"."""
    title: str
    """What the cause is, in words; "" for what is none."""
    a_ns: float
    b_ns: float
    difference_ns: float
    low_ns: float | None
    """Bounds of the difference, 95 %; None when chance cannot be judged."""
    high_ns: float | None
    said: Said
    whose: str = ""
    """Node, and device or place, that stands behind it in the run that has more of it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed from A to B."""

    a: Report
    b: Report
    step: Row
    rows: tuple[Row, ...]
    """The parts of the step: what changed for certain first, then by size; they add up to it."""
    unlike: tuple[Unlike, ...]
    doubts: tuple[str, ...]
    """Why nothing may be concluded; said beside the figures."""
    verdict: Verdict | None
    """Of the rules that were given; None without any."""


def compare(a: Report, b: Report, rules: Sequence[AnyRule], policy: Policy) -> Comparison:
    """Lay B beside A, cause by cause; rules are judged with A as the baseline.

    Raises UsageError for a run without marked steps: there is nothing to compare step by step.
    """
    for one in (a, b):
        if one.steps is None or not sum(one.steps.steps):
            raise UsageError(
                f"{one.title}: no steps were marked, so there is nothing to compare step by step",
                "record with the probe (--inject auto), or with an analysis of this version",
            )
    assert a.steps is not None and b.steps is not None
    found = unlike(b, a, policy.allow_unlike)
    doubts = [f"{one.title}: {text}" for one in (a, b) for text in doubts_of(one, policy)]
    prior = policy.between_runs_ratio
    size_ns = sum(a.steps.in_step_ns) / sum(a.steps.steps)
    step = _row(STEP, "", a, b, None, prior, size_ns)
    names = [PRODUCTIVE, *dict.fromkeys(_causes(a) + _causes(b))]
    rows = [_row(name, _title(name, a, b), a, b, name, prior, size_ns) for name in names]
    rows = _without_small(rows, size_ns)
    rows.sort(key=lambda one: (one.said not in ("more", "less"), -abs(one.difference_ns)))
    verdict = judge(b, rules, policy, (), (a,)) if rules else None
    return Comparison(a, b, step, tuple(rows), found, tuple(doubts), verdict)


def _causes(report: Report) -> list[str]:
    assert report.steps is not None
    return [cause for cause, _, _ in report.steps.lost]


def _row(
    name: str, title: str, a: Report, b: Report, part: str | None, prior: float, size_ns: float
) -> Row:
    both = [_sample(report, part) for report in (a, b)]
    values = [value for value, _ in both]
    difference = values[1] - values[0]
    if any(math.isnan(variance) for _, variance in both):
        return Row(name, title, values[0], values[1], difference, None, None, "cannot tell")
    samples = [Sample(value, variance, 0) for value, variance in both]
    # Runs differ by so much of a step; in a part of it by so much of ten times the part at most.
    least = WORTH_RATIO * size_ns
    own = size_ns if part is None else min(size_ns, 10 * max(*values, least))
    found = compared(samples[1:], samples[:1], prior * own, logarithms=False)
    whose = _whose(name, b if difference > 0 else a)
    said = _said(found, least)
    return Row(name, title, values[0], values[1], difference, found.low, found.high, said, whose)


def _said(found: Difference, least_ns: float) -> Said:
    if found.low > 0 and found.estimate >= least_ns:
        return "more"
    if found.high < 0 and found.estimate <= -least_ns:
        return "less"
    near = 2 * least_ns
    return "the same" if -near <= found.low and found.high <= near else "within chance"


def _sample(report: Report, part: str | None) -> tuple[float, float]:
    """Return ns per step of a part, and its variance by chance; NaN where there are few blocks."""
    steps = report.steps
    assert steps is not None
    column = _column(steps, part)
    value = sum(column) / sum(steps.steps)
    drawn = drawn_ratio(column, steps.steps) if steps.blocks >= FEWEST_BLOCKS else None
    return value, math.nan if drawn is None else float(drawn.var())


def _column(steps: StepStats, part: str | None) -> Sequence[int]:
    if part is None:
        return steps.in_step_ns
    if part == PRODUCTIVE:
        return [all_ - lost for all_, lost in zip(steps.in_step_ns, steps.lost_ns)]
    return steps.of_causes({part})


def _title(name: str, a: Report, b: Report) -> str:
    if name == PRODUCTIVE:
        return "Time that was not lost"
    if name == UNATTRIBUTED:
        return "Lost without a known cause"
    titles = {one.cause.id: one.cause.title for one in (*a.findings, *b.findings)}
    return titles.get(name, "")


def _whose(name: str, report: Report) -> str:
    for finding in report.findings:
        if finding.cause.id == name and finding.culprits and not finding.outside_steps:
            first = finding.culprits[0]
            rank = "" if first.rank is None else f"rank {first.rank}"
            return " ".join(word for word in (first.node, rank, first.resource) if word)
    return ""


def _without_small(rows: list[Row], size_ns: float) -> list[Row]:
    """Lay what is next to nothing in both runs together, so that rows still add up."""
    small = [
        one
        for one in rows
        if one.name != PRODUCTIVE
        and max(one.a_ns, one.b_ns) < _SMALL_RATIO * size_ns
        and one.said not in ("more", "less")
    ]
    if len(small) < 2:
        return rows
    a_ns, b_ns = sum(one.a_ns for one in small), sum(one.b_ns for one in small)
    name = f"{len(small)} small causes"
    rest = Row(name, "", a_ns, b_ns, b_ns - a_ns, None, None, "the same")
    return [one for one in rows if one not in small] + [rest]
