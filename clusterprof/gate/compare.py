"""Compare two runs cause by cause: which cause makes a step longer or shorter.

The time of a step is its productive time plus what each cause lost, so the differences
of these parts add up to the difference of the step, to the nanosecond before rounding:

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
from clusterprof.gate.judge import judge_runs
from clusterprof.gate.preconditions import Mismatch, check_preconditions, find_mismatches
from clusterprof.gate.regression import (
    MIN_BLOCKS,
    Difference,
    Sample,
    estimate_difference,
    sample_ratio,
)
from clusterprof.gate.rules import AnyRule, Policy
from clusterprof.gate.verdict import Verdict
from clusterprof.report.history import StepStats
from clusterprof.report.model import UNATTRIBUTED, Report

Significance = Literal["more", "less", "the same", "within chance", "cannot tell"]
"""Beyond chance (more, less); certainly negligible; explained by chance; variance not
known.
"""
STEP, PRODUCTIVE = "a step", "productive"
MIN_DIFFERENCE_RATIO = 0.005
"""Smallest difference worth reporting, as a ratio of a step."""
_SMALL_CAUSE_RATIO = 0.001  # of a step in both runs: too small for a line of its own


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One part of a step in both runs; times are per step of a rank."""

    name: str
    """`STEP`, `PRODUCTIVE`, a cause, or "unattributed"."""
    title: str
    """Description of the cause; "" when the part is no cause."""
    a_ns: float
    b_ns: float
    difference_ns: float
    low_ns: float | None
    """Bounds of the difference at 95 % confidence; None when the variance is not known."""
    high_ns: float | None
    significance: Significance
    culprit: str = ""
    """Node and device or resource of the first culprit, in the run with the larger value."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What changed from A to B."""

    a: Report
    b: Report
    step: ComparisonRow
    rows: tuple[ComparisonRow, ...]
    """The parts of the step: significant changes first, then by size; they add up to the step."""
    mismatches: tuple[Mismatch, ...]
    unmet_preconditions: tuple[str, ...]
    """Why nothing may be concluded; printed with the figures."""
    verdict: Verdict | None
    """Verdict on the given rules; None without rules."""


def compare_runs(a: Report, b: Report, rules: Sequence[AnyRule], policy: Policy) -> Comparison:
    """Compare run B with run A cause by cause; rules are judged with A as the baseline.

    Raises: UsageError when a run has no marked steps, so that there is no step to compare.
    """
    for report in (a, b):
        if report.steps is None or not sum(report.steps.steps):
            raise UsageError(
                f"{report.title}: no steps were marked, so there is nothing to compare step by"
                f" step",
                "record with the probe (--inject auto), or with an analysis of this version",
            )
    assert a.steps is not None and b.steps is not None
    mismatches = find_mismatches(b, a, policy.allow_unlike)
    differences = [
        f"{report.title}: {text}"
        for report in (a, b)
        for text in check_preconditions(report, policy)
    ]
    prior = policy.between_runs_ratio
    size_ns = sum(a.steps.in_step_ns) / sum(a.steps.steps)
    step = _build_row(STEP, "", a, b, None, prior, size_ns)
    names = [PRODUCTIVE, *dict.fromkeys(_list_causes(a) + _list_causes(b))]
    rows = [_build_row(name, _find_title(name, a, b), a, b, name, prior, size_ns) for name in names]
    rows = _merge_small_causes(rows, size_ns)
    rows.sort(key=lambda row: (row.significance not in ("more", "less"), -abs(row.difference_ns)))
    verdict = judge_runs(b, rules, policy, (), (a,)) if rules else None
    return Comparison(a, b, step, tuple(rows), mismatches, tuple(differences), verdict)


def _list_causes(report: Report) -> list[str]:
    assert report.steps is not None
    return [cause for cause, _, _ in report.steps.lost]


def _build_row(
    name: str, title: str, a: Report, b: Report, part: str | None, prior: float, size_ns: float
) -> ComparisonRow:
    both = [_estimate_sample(report, part) for report in (a, b)]
    values = [value for value, _ in both]
    difference = values[1] - values[0]
    if any(math.isnan(variance) for _, variance in both):
        return ComparisonRow(
            name, title, values[0], values[1], difference, None, None, "cannot tell"
        )
    samples = [Sample(value, variance, 0) for value, variance in both]
    # Runs differ by this share of a step; a part of it by at most this share of ten times the part.
    least = MIN_DIFFERENCE_RATIO * size_ns
    scale_ns = size_ns if part is None else min(size_ns, 10 * max(*values, least))
    estimate = estimate_difference(samples[1:], samples[:1], prior * scale_ns, logarithms=False)
    culprit = _find_culprit(name, b if difference > 0 else a)
    significance = _decide_significance(estimate, least)
    return ComparisonRow(
        name,
        title,
        values[0],
        values[1],
        difference,
        estimate.low,
        estimate.high,
        significance,
        culprit,
    )


def _decide_significance(estimate: Difference, least_ns: float) -> Significance:
    if estimate.low > 0 and estimate.estimate >= least_ns:
        return "more"
    if estimate.high < 0 and estimate.estimate <= -least_ns:
        return "less"
    near = 2 * least_ns
    return "the same" if -near <= estimate.low and estimate.high <= near else "within chance"


def _estimate_sample(report: Report, part: str | None) -> tuple[float, float]:
    """Return ns per step of a part and its variance; NaN variance where there are few blocks."""
    steps = report.steps
    assert steps is not None
    column = _select_column(steps, part)
    value = sum(column) / sum(steps.steps)
    drawn = sample_ratio(column, steps.steps) if steps.blocks >= MIN_BLOCKS else None
    return value, math.nan if drawn is None else float(drawn.var())


def _select_column(steps: StepStats, part: str | None) -> Sequence[int]:
    if part is None:
        return steps.in_step_ns
    if part == PRODUCTIVE:
        return [in_step_ns - lost for in_step_ns, lost in zip(steps.in_step_ns, steps.lost_ns)]
    return steps.of_causes({part})


def _find_title(name: str, a: Report, b: Report) -> str:
    if name == PRODUCTIVE:
        return "Time that was not lost"
    if name == UNATTRIBUTED:
        return "Lost time without a known cause"
    titles = {finding.cause.id: finding.cause.title for finding in (*a.findings, *b.findings)}
    return titles.get(name, "")


def _find_culprit(name: str, report: Report) -> str:
    for finding in report.findings:
        if finding.cause.id == name and finding.culprits and not finding.outside_steps:
            first = finding.culprits[0]
            rank = "" if first.rank is None else f"rank {first.rank}"
            return " ".join(word for word in (first.node, rank, first.resource) if word)
    return ""


def _merge_small_causes(rows: list[ComparisonRow], size_ns: float) -> list[ComparisonRow]:
    """Merge causes that are negligible in both runs into one row, so that rows still add up."""
    small = [
        row
        for row in rows
        if row.name != PRODUCTIVE
        and max(row.a_ns, row.b_ns) < _SMALL_CAUSE_RATIO * size_ns
        and row.significance not in ("more", "less")
    ]
    if len(small) < 2:
        return rows
    a_ns, b_ns = sum(row.a_ns for row in small), sum(row.b_ns for row in small)
    name = f"{len(small)} small causes"
    merged = ComparisonRow(name, "", a_ns, b_ns, b_ns - a_ns, None, None, "the same")
    return [row for row in rows if row not in small] + [merged]
