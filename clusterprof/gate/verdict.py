"""What a gate says: an exit code, an outcome, and a line for every rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from clusterprof.errors import EXIT_GATE_CANNOT_TELL, EXIT_GATE_FAILED, EXIT_OK
from clusterprof.findings import Report
from clusterprof.gate.rules import AnyRule, Change, Policy
from clusterprof.units import human

Outcome = Literal["pass", "fail", "cannot tell"]
_SHOWN = {"pass": "pass", "fail": "FAIL", "cannot tell": "????"}


@dataclass(frozen=True, slots=True)
class Moved:
    """How a metric moved from the baselines to now, with what is known for certain."""

    baseline: float
    """Mean of the baselines, in the metric's unit."""
    estimate: float
    """Of the change: a ratio of the baseline, or in the metric's unit."""
    low: float
    high: float
    """Between these it lies, with 95 %."""
    relative: bool
    """True when the three are ratios of the baseline."""
    found_from: float
    """The smallest true change that would fail in 95 % of runs like these."""
    steps: int
    """Steps of the shortest run."""
    steps_needed: int | None
    """What would be needed to tell, if the change stays what it is; None when steps do not help."""
    runs: tuple[int, int]
    """Candidates and baselines."""


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What became of one rule."""

    rule: AnyRule
    metric: str
    """Full name of the metric that was tested."""
    unit: str
    value: float | None
    """None when there is none; see `why`."""
    limit: float
    """In the metric's unit; of a change see `rule`."""
    outcome: Outcome
    why: str
    """Half a sentence, for people."""
    moved: Moved | None = None
    """Of a rule on a change, when it could be worked out."""

    @property
    def wanted(self) -> str:
        """The rule with full name and limit, as people read it."""
        if isinstance(self.rule, Change):
            return f"{self.metric}: {limit_of(self.rule)}"
        return f"{self.metric} {self.rule.operator} {human(self.limit, self.unit)}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The exit code, the lines that explain it (verdict first), and the results behind them."""

    exit_code: int
    outcome: Outcome
    lines: tuple[str, ...]
    results: tuple[RuleResult, ...]
    doubts: tuple[str, ...] = field(default=())
    """Why rules could not be told; empty when the recordings are good enough."""
    notes: tuple[str, ...] = ()
    """What a reader should know, without bearing on the outcome."""
    title: str = ""
    """The recording."""
    emulated: bool = False
    on_inconclusive: str = "fail"


def verdict_of(
    report: Report,
    results: Sequence[RuleResult],
    policy: Policy,
    doubts: Sequence[str],
    notes: Sequence[str] = (),
) -> Verdict:
    """Put the results together: a failure for certain outweighs what cannot be told; rules at
    level "warn" bear on neither."""
    outcomes = {one.outcome for one in results if one.rule.level == "error"}
    outcome: Outcome = "pass"
    exit_code = EXIT_OK
    if "fail" in outcomes:
        outcome, exit_code = "fail", EXIT_GATE_FAILED
    elif "cannot tell" in outcomes:
        outcome = "cannot tell"
        exit_code = EXIT_GATE_CANNOT_TELL if policy.on_inconclusive == "fail" else EXIT_OK
    told = [f"  {line}" for line in (*doubts, *notes)]
    lines = (_headline(outcome, exit_code, results, report, policy), *map(_line, results), *told)
    return Verdict(
        exit_code, outcome, lines, tuple(results), tuple(doubts), tuple(notes),
        report.title, report.emulated, policy.on_inconclusive,
    )  # fmt: skip


def limit_of(rule: Change) -> str:
    """Write the limit of a change: "+5 %", "+2 pt", "-250 ms"."""
    if rule.unit == "%":
        size = f"{100 * rule.limit:g} %"
    elif rule.unit == "pt":
        size = f"{100 * rule.limit:g} pt"
    else:
        size = human(rule.limit, rule.unit) if rule.unit else f"{rule.limit:g}"
    return f"{rule.direction}{size}"


def _headline(
    outcome: Outcome,
    exit_code: int,
    results: Sequence[RuleResult],
    report: Report,
    policy: Policy,
) -> str:
    total = len(results)
    count = sum(one.outcome == outcome and one.rule.level == "error" for one in results)
    rules = "rule" if total == 1 else "rules"
    text = {
        "pass": f"gate PASSED: {total} {rules}",
        "fail": f"gate FAILED: {count} of {total} {rules}",
        "cannot tell": f"gate CANNOT TELL: {count} of {total} {rules}",
    }[outcome]
    warned = sum(one.outcome != "pass" and one.rule.level == "warn" for one in results)
    if warned:
        text += f", {warned} {'warning' if warned == 1 else 'warnings'}"
    if outcome == "cannot tell" and exit_code == EXIT_OK:
        text += f" (exit 0: --on-inconclusive {policy.on_inconclusive})"
    return text + (" · EMULATED accelerators" if report.emulated else "")


def _line(result: RuleResult) -> str:
    word = _SHOWN[result.outcome]
    if result.rule.level == "warn" and result.outcome != "pass":
        word = "warn"
    why = f"cannot tell: {result.why}" if result.outcome == "cannot tell" else result.why
    return f"  {word}  {result.wanted:<38}  {why}"
