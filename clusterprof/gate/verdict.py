"""Describe the result of a gate: an exit code, an outcome, and a line for every rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from clusterprof.errors import EXIT_GATE_CANNOT_TELL, EXIT_GATE_FAILED, EXIT_OK
from clusterprof.gate.rules import AnyRule, ChangeRule, Policy
from clusterprof.report.model import Report
from clusterprof.units import format_quantity

Outcome = Literal["pass", "fail", "cannot tell"]
_OUTCOME_LABELS = {"pass": "pass", "fail": "FAIL", "cannot tell": "????"}


@dataclass(frozen=True, slots=True)
class MetricChange:
    """Change of a metric from the baselines to the candidates, with its 95 % interval."""

    baseline: float
    """Mean of the baselines, in the metric's unit."""
    estimate: float
    """The change: a ratio of the baseline, or in the metric's unit."""
    low: float
    high: float
    """`low` to `high` is the 95 % interval of the change."""
    relative: bool
    """True when the three are ratios of the baseline."""
    smallest_detectable: float
    """The smallest true change that would fail in 95 % of runs like these."""
    steps: int
    """Steps of the shortest run."""
    steps_needed: int | None
    """Steps needed for a decision if the change stays as it is; None when steps do not help."""
    runs: tuple[int, int]
    """Candidates and baselines."""


@dataclass(frozen=True, slots=True)
class RuleResult:
    """Result of one rule."""

    rule: AnyRule
    metric: str
    """Full name of the metric that was tested."""
    unit: str
    value: float | None
    """None when there is no value; see `why`."""
    limit: float
    """Limit in the metric's unit; for a change see `rule`."""
    outcome: Outcome
    why: str
    """Reason as half a sentence, for a reader."""
    change: MetricChange | None = None
    """The measured change, for a rule on a change; None when it could not be computed."""

    @property
    def requirement(self) -> str:
        """The rule with full metric name and limit, in readable form."""
        if isinstance(self.rule, ChangeRule):
            return f"{self.metric}: {format_limit(self.rule)}"
        return f"{self.metric} {self.rule.operator} {format_quantity(self.limit, self.unit)}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit code, the lines that explain it (verdict first), and the results behind them."""

    exit_code: int
    outcome: Outcome
    lines: tuple[str, ...]
    results: tuple[RuleResult, ...]
    unmet_preconditions: tuple[str, ...] = field(default=())
    """Why rules could not be decided; empty if the recordings are good enough."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader that do not affect the outcome."""
    title: str = ""
    """Title of the recording."""
    emulated: bool = False
    on_inconclusive: str = "fail"


def summarize_results(
    report: Report,
    results: Sequence[RuleResult],
    policy: Policy,
    unmet_preconditions: Sequence[str],
    notes: Sequence[str] = (),
) -> Verdict:
    """Combine the results of all rules into a verdict.

    A certain failure outweighs "cannot tell"; rules at level "warn" affect neither.
    """
    outcomes = {result.outcome for result in results if result.rule.level == "error"}
    outcome: Outcome = "pass"
    exit_code = EXIT_OK
    if "fail" in outcomes:
        outcome, exit_code = "fail", EXIT_GATE_FAILED
    elif "cannot tell" in outcomes:
        outcome = "cannot tell"
        exit_code = EXIT_GATE_CANNOT_TELL if policy.on_inconclusive == "fail" else EXIT_OK
    remarks = [f"  {line}" for line in (*unmet_preconditions, *notes)]
    lines = (
        _format_headline(outcome, exit_code, results, report, policy),
        *map(_format_line, results),
        *remarks,
    )
    return Verdict(
        exit_code,
        outcome,
        lines,
        tuple(results),
        tuple(unmet_preconditions),
        tuple(notes),
        report.title,
        report.emulated,
        policy.on_inconclusive,
    )


def format_limit(rule: ChangeRule) -> str:
    """Format the limit of a change: "+5 %", "+2 pt", "-250 ms"."""
    if rule.unit == "%":
        size = f"{100 * rule.limit:g} %"
    elif rule.unit == "pt":
        size = f"{100 * rule.limit:g} pt"
    else:
        size = format_quantity(rule.limit, rule.unit) if rule.unit else f"{rule.limit:g}"
    return f"{rule.direction}{size}"


def _format_headline(
    outcome: Outcome, exit_code: int, results: Sequence[RuleResult], report: Report, policy: Policy
) -> str:
    total = len(results)
    count = sum(result.outcome == outcome and result.rule.level == "error" for result in results)
    rules = "rule" if total == 1 else "rules"
    text = {
        "pass": f"gate PASSED: {total} {rules}",
        "fail": f"gate FAILED: {count} of {total} {rules}",
        "cannot tell": f"gate CANNOT TELL: {count} of {total} {rules}",
    }[outcome]
    warned = sum(result.outcome != "pass" and result.rule.level == "warn" for result in results)
    if warned:
        text += f", {warned} {'warning' if warned == 1 else 'warnings'}"
    if outcome == "cannot tell" and exit_code == EXIT_OK:
        text += f" (exit 0: --on-inconclusive {policy.on_inconclusive})"
    return text + (" · EMULATED accelerators" if report.emulated else "")


def _format_line(result: RuleResult) -> str:
    word = _OUTCOME_LABELS[result.outcome]
    if result.rule.level == "warn" and result.outcome != "pass":
        word = "warn"
    why = f"cannot tell: {result.why}" if result.outcome == "cannot tell" else result.why
    return f"  {word}  {result.requirement:<38}  {why}"
