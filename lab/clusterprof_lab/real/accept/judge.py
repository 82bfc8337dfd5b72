"""Compare analyses of recorded scenarios with the stopwatches, and count blamed victims.

An analysis is right when the expected cause comes first, with the right culprit, and its share of
the time in steps is within `OFF_AT_MOST_RATIO` of the stopwatches' share. A clean run is right when
it has no finding of `CLEAN_BELOW_RATIO` or more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterprof_lab.real.accept.faults import SYNCHRONIZATION, Expected, Scenario
from clusterprof_lab.real.accept.truth import WORK, compute_shares

OFF_AT_MOST_RATIO = 0.03
CLEAN_BELOW_RATIO = 0.03
NAMED_FROM_RATIO = 0.03
"""A rank named as culprit of a finding of at least this much must have caused something."""
CAUSED_AT_LEAST_RATIO = 0.01
Shares = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class ExpectedResult:
    """An expected cause and what the analysis said of it."""

    found: str
    """The finding in that place."""
    culprits: str
    share_ratio: float
    truth_ratio: float
    wrong: tuple[str, ...]
    """Why it is not right."""


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """One judged recording."""

    scenario: str
    lines: tuple[ExpectedResult, ...]
    inversions: tuple[str, ...]
    """Who was named and had caused nothing."""
    guilty: frozenset[int]
    """Ranks that may be named; empty if no rank is at fault."""
    rules: Mapping[str, int] = field(default_factory=dict)
    """Rule of thumb -> rank it names, -1 for none."""

    @property
    def right(self) -> bool:
        """True when nothing is wrong."""
        return not self.inversions and not any(line.wrong for line in self.lines)


def analyze_recording(recording: Path) -> list[dict[str, Any]]:
    """Return the findings inside steps, largest first, as the command line gives them."""
    command = [sys.executable, "-m", "clusterprof", "analyze", str(recording), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{recording}: {done.stderr.strip()}")
    return [
        finding for finding in json.loads(done.stdout)["findings"] if not finding["outside_steps"]
    ]


def judge_findings(
    scenario: Scenario, findings: Sequence[dict[str, Any]], measured: dict[str, Any]
) -> JudgedRun:
    """Judge the findings of one run; `said` is what `truth` returned."""
    true = _sum_by_cause(measured)
    host = {row["rank"]: row["host"] for row in measured["ranks"]}
    inversions = [
        f"{finding['cause']}: {_format_cause(finding)}"
        for finding in findings
        if finding["share_ratio"] >= NAMED_FROM_RATIO
        and _get_cause_id(finding) is not None
        and _sum_caused(true, _get_cause_id(finding)) < CAUSED_AT_LEAST_RATIO
    ]
    if not scenario.expected:
        lines = [_judge_clean_run(findings, true)]
    else:
        lines = [
            _judge_expected(place, expected, findings, true, _find_culprits(expected, host))
            for place, expected in enumerate(scenario.expected)
        ]
    guilty = frozenset().union(*(_find_culprits(expected, host) for expected in scenario.expected))
    return JudgedRun(scenario.name, tuple(lines), tuple(inversions), guilty)


def _sum_by_cause(measured: dict[str, Any]) -> Shares:
    """Sum the truth by cause as an analysis names them: work that others wait for is
    synchronization."""
    out = dict(compute_shares(measured))
    work = out.pop(WORK, {})
    return {**out, **dict.fromkeys(SYNCHRONIZATION, work)}


def _sum_causes(true: Shares, causes: frozenset[str]) -> float:
    kept = causes - (SYNCHRONIZATION - {min(SYNCHRONIZATION)})  # both names stand for one amount
    return sum(sum(true.get(cause, {}).values()) for cause in kept)


def _sum_caused(true: Shares, rank: int) -> float:
    names = true.keys() - (SYNCHRONIZATION - {min(SYNCHRONIZATION)})
    return sum(true[cause].get(rank, 0.0) for cause in names)


def _find_culprits(expected: Expected, host: Mapping[int, str]) -> frozenset[int]:
    names = {f"node{node}" for node in expected.nodes}
    return expected.ranks | {rank for rank, name in host.items() if name in names}


def _get_cause_id(finding: dict[str, Any]) -> Any:
    return finding["culprits"][0]["rank"] if finding["culprits"] else None


def _format_cause(finding: dict[str, Any] | None) -> str:
    if finding is None or not finding["culprits"]:
        return "nobody"
    first = finding["culprits"][0]
    rank = "" if first["rank"] is None else f" rank {first['rank']}"
    return f"{first['node']}{rank}"


def _judge_clean_run(findings: Sequence[dict[str, Any]], true: Shares) -> ExpectedResult:
    first = findings[0] if findings else None
    share = first["share_ratio"] if first else 0.0
    wrong = (f"{CLEAN_BELOW_RATIO:.0%} or more",) if share >= CLEAN_BELOW_RATIO else ()
    culprits = true.get(first["cause"], {}) if first else {}
    most = sum(culprits.values())
    if wrong and most >= CLEAN_BELOW_RATIO:
        wrong = (f"{wrong[0]}; so say the stopwatches: the machine was not clean",)
    return ExpectedResult(
        first["cause"] if first else "nothing", _format_cause(first), share, most, wrong
    )


def _judge_expected(
    place: int,
    expected: Expected,
    findings: Sequence[dict[str, Any]],
    true: Shares,
    guilty: frozenset[int],
) -> ExpectedResult:
    """What was found of one expected thing; the first must come first, others must be there."""
    mine = [finding for finding in findings if finding["cause"] in expected.causes]
    share, wanted = (
        sum(finding["share_ratio"] for finding in mine),
        _sum_causes(true, expected.causes),
    )
    first = mine[0] if mine else None
    wrong = []
    if not place and findings and findings[0]["cause"] not in expected.causes:
        wrong.append(f"first is {findings[0]['cause']} {findings[0]['share_ratio']:.1%}")
    if first is None:
        wrong.append("not found")
    elif guilty and _get_cause_id(first) not in guilty:
        wrong.append("not the culprit")
    if abs(share - wanted) > OFF_AT_MOST_RATIO:
        wrong.append("share")
    name = first["cause"] if first else "/".join(sorted(expected.causes))
    return ExpectedResult(name, _format_cause(first), share, wanted, tuple(wrong))


def format_rows(number: int, run: JudgedRun) -> list[str]:
    """Return the rows of a run in the table."""
    out = []
    for line in run.lines:
        verdict = f"FAIL: {', '.join(line.wrong)}" if line.wrong else "ok"
        off = 100 * (line.share_ratio - line.truth_ratio)
        out.append(
            f"{number:>3}  {run.scenario:<14} {line.found:<18} {line.culprits:<14}"
            f"{line.share_ratio:>7.1%} {line.truth_ratio:>7.1%} {off:>+6.1f}  {verdict}"
        )
    out += [f"     INVERSION: a victim was named: {inversion}" for inversion in run.inversions]
    return out


HEADER = (
    f"run  {'scenario':<14} {'first finding':<18} {'whose':<14}"
    f"{'share':>7} {'truth':>7} {'points':>6}  verdict"
)


def format_summary(runs: Sequence[JudgedRun]) -> list[str]:
    """Return totals, and how rules of thumb did on the same recordings."""
    right, inverted = sum(run.right for run in runs), sum(bool(run.inversions) for run in runs)
    lines = [f"{right} of {len(runs)} runs right, {inverted} with a victim blamed"]
    faulty = [run for run in runs if run.guilty]
    nobodys = [run for run in runs if not run.guilty]
    ours = sum(not any("culprit" in w for line in run.lines for w in line.wrong) for run in faulty)
    blamed = sum(any(line.culprits != "nobody" for line in run.lines) for run in nobodys)
    lines.append(f"{'who is to blame':<26}{'right':>12}{'blamed though nobody was':>28}")
    scores = {"clusterprof": (ours, blamed)}
    for name in dict.fromkeys(name for run in runs for name in run.rules):
        hits = sum(run.rules[name] in run.guilty for run in faulty)
        scores[name] = hits, sum(run.rules[name] >= 0 for run in nobodys)
    for name, (hits, wrongly) in scores.items():
        lines.append(f"{name:<26}{hits:>6} of {len(faulty):>2}{wrongly:>22} of {len(nobodys):>2}")
    return lines
