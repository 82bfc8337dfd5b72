"""All figures of the score, computed from the judged runs of one tool in one mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof_lab.families import FAMILIES
from clusterprof_lab.score.calibrate import Bin, compute_reliability, estimate_ece
from clusterprof_lab.score.figures import (
    NO_FIGURE,
    Figure,
    bootstrap_trials,
    compute_p95,
    compute_ratio,
    compute_wilson,
)
from clusterprof_lab.score.judge import NOTHING, Judgment

DISTURBED_ABOVE = 0.05


@dataclass(frozen=True, slots=True)
class JudgedRun:
    """One judged trial of one tool in one mode."""

    trial: str
    scenario: str
    group: str
    testbed: str
    """"synth" or "real"; runs that others disturbed are "real, disturbed"."""
    severity: str
    seed: int
    tool: str
    mode: str
    easy: bool | None
    """True when the rule "slowest total compute" names the culprit; None = it was not applied."""
    judged: Judgment
    named_family: str = ""
    true: str = ""
    folder: str = ""
    split: str = "dev"
    label: str = ""
    """What the tool calls itself: name, version, how it was run."""


@dataclass(frozen=True, slots=True)
class Score:
    """All figures of one tool in one mode on one testbed."""

    figures: Mapping[str, Figure]
    by_cause: Mapping[str, Figure]
    """Bucket error of each group, in points, over runs in which it is active."""
    confusion: Mapping[str, Mapping[str, int]]
    """Family wanted -> family said -> runs."""
    reliability: tuple[Bin, ...]


def compute_score(rows: Sequence[JudgedRun]) -> Score:
    """Return the figures of one tool, mode and testbed."""
    judged = [row.judged for row in rows]
    bins, _ = compute_reliability(_list_claims(judged))
    return Score(
        compute_figures(rows, FIGURES), _score_by_cause(judged), _count_confusion(judged), bins
    )


def compute_figures(rows: Sequence[JudgedRun], names: Iterable[str]) -> dict[str, Figure]:
    """Return some figures of `FIGURES`, by name."""
    return {name: FIGURES[name](rows) for name in names}


def compute_scores(rows: Sequence[JudgedRun]) -> dict[tuple[str, str, str], Score]:
    """Return the score of every (testbed, tool, mode), in order of first appearance."""
    sets: dict[tuple[str, str, str], list[JudgedRun]] = {}
    for row in rows:
        sets.setdefault((row.testbed, row.tool, row.mode), []).append(row)
    return {key: compute_score(group) for key, group in sets.items()}


def list_errors(row: JudgedRun) -> tuple[str, ...]:
    """Return in what a run is wrong, for the list of runs to go and look at."""
    run = row.judged
    asked: dict[str, bool | None] = {
        "family": run.family_right,
        "leaf": None if run.abstained and row.mode in NO_LEAVES else run.leaf_top1,
        "culprit": run.culprit_right,
        "blamed though nobody's": run.nobody_right,
        "not both": run.both_found,
        "inversion": None if run.inverted is None else not run.inverted,
        "residual": _is_complete(run),
    }
    out = [name for name, right in asked.items() if right is False]
    out += [f"false {name}" for name in run.false_causes or ()]
    most = max(run.errors.items(), key=lambda p: p[1]) if run.errors else ("", 0.0)
    if most[1] >= WRONG_FROM_POINTS:
        out.append(f"{most[0]} off by {most[1]:.1f}")
    return tuple(out)


WRONG_FROM_POINTS = 5.0
NO_LEAVES = ("M2", "M3")
"""Modes in which to stop at the group is all that can be done."""


def _is_leaf_right(run: Judgment) -> bool | None:
    """Right or wrong, where a leaf was named first."""
    return run.leaf_top1 if run.named_leaf is not None else None


def _compute_precision(judged: Sequence[Judgment]) -> Figure:
    right = [right for run in judged for _, _, right in run.emitted]
    return compute_wilson(sum(right), len(right))


def _count_false(run: Judgment) -> bool | None:
    return None if run.false_causes is None else bool(run.false_causes)


def _is_complete(run: Judgment) -> bool | None:
    return None if run.residual_ns is None else run.residual_ns == 0


def _find_largest_residual(judged: Sequence[Judgment]) -> Figure:
    known = [abs(run.residual_ns) for run in judged if run.residual_ns is not None]
    return Figure(float(max(known)), None, None, len(known)) if known else NO_FIGURE


def _score_by_cause(judged: Sequence[Judgment]) -> dict[str, Figure]:
    out = {}
    for name in FAMILIES:
        trials = [[run.errors[name]] for run in judged if run.errors and name in run.active]
        if trials:
            out[name] = bootstrap_trials(trials)
    return out


def _count_confusion(judged: Sequence[Judgment]) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for run in judged:
        if run.named_family is not None:
            line = out.setdefault(run.wanted, {})
            line[run.named_family] = line.get(run.named_family, 0) + 1
    return out


def _list_claims(judged: Sequence[Judgment]) -> list[tuple[float, bool]]:
    return [
        (sure, right)
        for run in judged
        for _, sure, right in (*run.emitted, *run.emitted_groups)
        if sure is not None
    ]


def _estimate_ece(rows: Sequence[JudgedRun]) -> Figure:
    return estimate_ece([_list_claims([row.judged]) for row in rows])


def _list_errors(rows: Sequence[JudgedRun], active: bool) -> list[list[float]]:
    return [
        [value for name, value in errors.items() if not active or name in row.judged.active]
        for row in rows
        if (errors := row.judged.errors) is not None
    ]


def _make_ratio(ask: Callable[[Judgment], bool | None]) -> Callable[[Sequence[JudgedRun]], Figure]:
    return lambda rows: compute_ratio([ask(row.judged) for row in rows])


def _score_culprits(rows: Sequence[JudgedRun], easy: bool) -> Figure:
    return compute_ratio([row.judged.culprit_right for row in rows if bool(row.easy) == easy])


def _score_false_alarms(rows: Sequence[JudgedRun], null: bool) -> Figure:
    return compute_ratio(
        [_count_false(row.judged) for row in rows if (row.judged.wanted == NOTHING) == null]
    )


def _make_mean(ask: Callable[[Judgment], float | None]) -> Callable[[Sequence[JudgedRun]], Figure]:
    def mean(rows: Sequence[JudgedRun]) -> Figure:
        known = [value for row in rows if (value := ask(row.judged)) is not None]
        return bootstrap_trials([[abs(value)] for value in known])

    return mean


FIGURES: Mapping[str, Callable[[Sequence[JudgedRun]], Figure]] = {
    "bucket_error_mean": lambda rows: bootstrap_trials(_list_errors(rows, False)),
    "bucket_error_p95": lambda rows: bootstrap_trials(_list_errors(rows, False), compute_p95),
    "bucket_error_active_mean": lambda rows: bootstrap_trials(_list_errors(rows, True)),
    "bucket_error_active_p95": lambda rows: bootstrap_trials(_list_errors(rows, True), compute_p95),
    "family_top1": _make_ratio(lambda run: run.family_right),
    "leaf_top1": _make_ratio(lambda run: run.leaf_top1),
    "leaf_top2": _make_ratio(lambda run: run.leaf_top2),
    "leaf_abstained": _make_ratio(lambda run: run.abstained),
    "leaf_precision": _make_ratio(_is_leaf_right),
    "leaf_precision_all": lambda rows: _compute_precision([row.judged for row in rows]),
    "culprit_top1": lambda rows: _score_culprits(rows, False),
    "culprit_top1_easy": lambda rows: _score_culprits(rows, True),
    "nobody_blamed": _make_ratio(lambda run: run.nobody_right),
    "both_found": _make_ratio(lambda run: run.both_found),
    "inversions": _make_ratio(lambda run: run.inverted),
    "false_on_nulls": lambda rows: _score_false_alarms(rows, True),
    "false_anywhere": lambda rows: _score_false_alarms(rows, False),
    "unattributed": _make_mean(lambda run: run.unattributed_ratio),
    "ece": _estimate_ece,
    "wrong_first_sure": _make_ratio(lambda run: run.wrong_first_sure),
    "conserved": _make_ratio(_is_complete),
    "residual_ns": lambda rows: _find_largest_residual([row.judged for row in rows]),
    "gain_error": _make_mean(lambda run: run.gain_error),
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure is measured against."""

    name: str
    """As people read it."""
    figure: str
    meets: Callable[[float], bool]
    words: str
    modes: tuple[str, ...] = ("M0",)
    testbed: str = ""
    """"" = any."""


def _make_lower_bound(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


def _make_upper_bound(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound + float(np.finfo(float).eps)


EVERY_MODE = ("M0", "M1", "M2", "M3", "M4", "D0", "D2")
TARGETS: tuple[Target, ...] = (
    Target("Conservation residual 0 ns", "conserved", _make_lower_bound(1.0), "100 %", EVERY_MODE),
    Target("Bucket error, mean", "bucket_error_active_mean", _make_upper_bound(1.0), "≤ 1.0"),
    Target("Bucket error, p95", "bucket_error_active_p95", _make_upper_bound(2.0), "≤ 2.0"),
    Target(
        "Bucket error, mean", "bucket_error_active_mean", _make_upper_bound(1.5), "≤ 1.5", ("M1",)
    ),
    Target(
        "Bucket error, mean", "bucket_error_active_mean", _make_upper_bound(3.0), "≤ 3.0", ("M2",)
    ),
    Target("Dominant cause", "family_top1", _make_lower_bound(0.95), "≥ 95 %"),
    Target("Dominant cause", "family_top1", _make_lower_bound(0.85), "≥ 85 %", ("M2",)),
    Target("Leaf, first", "leaf_top1", _make_lower_bound(0.90), "≥ 90 %"),
    Target("Culprit rank", "culprit_top1", _make_lower_bound(0.97), "≥ 97 %", testbed="real"),
    Target("Culprit rank", "culprit_top1", _make_lower_bound(0.99), "≥ 99 %", testbed="synth"),
    Target("Two culprits, both found", "both_found", _make_lower_bound(0.95), "≥ 95 %"),
    Target("Inversions", "inversions", _make_upper_bound(0.005), "≤ 0.5 %"),
    Target("False cause of 3 points on nulls", "false_on_nulls", _make_upper_bound(0.01), "≤ 1 %"),
    Target("Unattributed, of lost", "unattributed", _make_upper_bound(0.05), "≤ 5 %"),
    Target("Unattributed, of lost", "unattributed", _make_upper_bound(0.15), "≤ 15 %", ("M1",)),
    Target("Leaf precision when emitted", "leaf_precision_all", _make_lower_bound(0.95), "≥ 95 %"),
    Target("Calibration error (ECE)", "ece", _make_upper_bound(0.05), "≤ 0.05"),
)
