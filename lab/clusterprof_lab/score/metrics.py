"""Every figure of the score, from all the judged runs of one tool in one mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof_lab.families import FAMILIES
from clusterprof_lab.score.calibrate import Bin, reliability
from clusterprof_lab.score.figures import NO_FIGURE, Figure, over_trials, p95, part_of, wilson
from clusterprof_lab.score.judge import NOTHING, Judged

DISTURBED_ABOVE = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One run, judged: a trial of one tool in one mode."""

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
    """True when the rule "slowest total compute" names who is at fault; None = it was not asked."""
    judged: Judged
    said: str = ""
    true: str = ""
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """All figures of one tool in one mode on one testbed."""

    figures: Mapping[str, Figure]
    by_cause: Mapping[str, Figure]
    """Bucket error of each group, in points, over runs in which it is active."""
    confusion: Mapping[str, Mapping[str, int]]
    """Family wanted -> family said -> runs."""
    reliability: tuple[Bin, ...]


def scored(rows: Sequence[Row]) -> Score:
    """Return the figures of one tool, mode and testbed."""
    judged = [row.judged for row in rows]
    every = [list(one.errors.values()) for one in judged if one.errors is not None]
    active = [[one.errors[name] for name in one.active] for one in judged if one.errors is not None]
    pairs = [(sure, right) for one in judged for _, sure, right in one.emitted if sure is not None]
    bins, ece = reliability(pairs)
    unattributed = [
        [one.unattributed_ratio] for one in judged if one.unattributed_ratio is not None
    ]
    gains = [[abs(one.gain_error)] for one in judged if one.gain_error is not None]
    figures = {
        "bucket_error_mean": over_trials(every),
        "bucket_error_p95": over_trials(every, p95),
        "bucket_error_active_mean": over_trials(active),
        "bucket_error_active_p95": over_trials(active, p95),
        "family_top1": part_of([one.family_right for one in judged]),
        "leaf_top1": part_of([one.leaf_top1 for one in judged]),
        "leaf_top2": part_of([one.leaf_top2 for one in judged]),
        "leaf_abstained": part_of([one.abstained for one in judged]),
        "leaf_precision": part_of([_dominant(one) for one in judged]),
        "leaf_precision_all": _precision(judged),
        "culprit_top1": part_of([row.judged.culprit_right for row in rows if not row.easy]),
        "culprit_top1_easy": part_of([row.judged.culprit_right for row in rows if row.easy]),
        "nobody_blamed": part_of([one.nobody_right for one in judged]),
        "both_found": part_of([one.both_found for one in judged]),
        "inversions": part_of([one.inverted for one in judged]),
        "false_on_nulls": part_of([_false(one) for one in judged if one.wanted == NOTHING]),
        "false_anywhere": part_of([_false(one) for one in judged if one.wanted != NOTHING]),
        "unattributed": over_trials(unattributed),
        "ece": Figure(ece, None, None, len(pairs)) if pairs else NO_FIGURE,
        "conserved": part_of([_whole(one) for one in judged]),
        "residual_ns": _largest_residual(judged),
        "gain_error": over_trials(gains),
    }
    return Score(figures, _by_cause(judged), _confusion(judged), bins)


def tables(rows: Sequence[Row]) -> dict[tuple[str, str, str], Score]:
    """Return the score of every (testbed, tool, mode), in order of first appearance."""
    sets: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        sets.setdefault((row.testbed, row.tool, row.mode), []).append(row)
    return {key: scored(some) for key, some in sets.items()}


def wrong(row: Row) -> tuple[str, ...]:
    """Return in what a run is wrong, for the list of runs to go and look at."""
    one = row.judged
    asked: dict[str, bool | None] = {
        "family": one.family_right,
        "leaf": None if one.abstained and row.mode in NO_LEAVES else one.leaf_top1,
        "culprit": one.culprit_right,
        "blamed though nobody's": one.nobody_right,
        "not both": one.both_found,
        "inversion": None if one.inverted is None else not one.inverted,
        "residual": _whole(one),
    }
    out = [name for name, right in asked.items() if right is False]
    out += [f"false {name}" for name in one.false_causes or ()]
    most = max(one.errors.items(), key=lambda p: p[1]) if one.errors else ("", 0.0)
    if most[1] >= WRONG_FROM_POINTS:
        out.append(f"{most[0]} off by {most[1]:.1f}")
    return tuple(out)


WRONG_FROM_POINTS = 5.0
NO_LEAVES = ("M2", "M3")
"""Modes in which to stop at the group is all that can be done."""


def _dominant(one: Judged) -> bool | None:
    """Right or wrong, where a leaf was named first."""
    return one.leaf_top1 if one.said_leaf is not None else None


def _precision(judged: Sequence[Judged]) -> Figure:
    right = [right for one in judged for _, _, right in one.emitted]
    return wilson(sum(right), len(right))


def _false(one: Judged) -> bool | None:
    return None if one.false_causes is None else bool(one.false_causes)


def _whole(one: Judged) -> bool | None:
    return None if one.residual_ns is None else one.residual_ns == 0


def _largest_residual(judged: Sequence[Judged]) -> Figure:
    known = [abs(one.residual_ns) for one in judged if one.residual_ns is not None]
    return Figure(float(max(known)), None, None, len(known)) if known else NO_FIGURE


def _by_cause(judged: Sequence[Judged]) -> dict[str, Figure]:
    out = {}
    for name in FAMILIES:
        trials = [[one.errors[name]] for one in judged if one.errors and name in one.active]
        if trials:
            out[name] = over_trials(trials)
    return out


def _confusion(judged: Sequence[Judged]) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for one in judged:
        if one.said is not None:
            line = out.setdefault(one.wanted, {})
            line[one.said] = line.get(one.said, 0) + 1
    return out


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


def _least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


def _most(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound + float(np.finfo(float).eps)


EVERY_MODE = ("M0", "M1", "M2", "M3", "M4")
TARGETS: tuple[Target, ...] = (
    Target("Conservation residual 0 ns", "conserved", _least(1.0), "100 %", EVERY_MODE),
    Target("Bucket error, mean", "bucket_error_active_mean", _most(1.0), "≤ 1.0"),
    Target("Bucket error, p95", "bucket_error_active_p95", _most(2.0), "≤ 2.0"),
    Target("Bucket error, mean", "bucket_error_active_mean", _most(1.5), "≤ 1.5", ("M1",)),
    Target("Bucket error, mean", "bucket_error_active_mean", _most(3.0), "≤ 3.0", ("M2",)),
    Target("Dominant cause", "family_top1", _least(0.95), "≥ 95 %"),
    Target("Dominant cause", "family_top1", _least(0.85), "≥ 85 %", ("M2",)),
    Target("Leaf, first", "leaf_top1", _least(0.90), "≥ 90 %"),
    Target("Culprit rank", "culprit_top1", _least(0.97), "≥ 97 %", testbed="real"),
    Target("Culprit rank", "culprit_top1", _least(0.99), "≥ 99 %", testbed="synth"),
    Target("Two culprits, both found", "both_found", _least(0.95), "≥ 95 %"),
    Target("Inversions", "inversions", _most(0.005), "≤ 0.5 %"),
    Target("False cause of 3 points on nulls", "false_on_nulls", _most(0.01), "≤ 1 %"),
    Target("Unattributed, of lost", "unattributed", _most(0.05), "≤ 5 %"),
    Target("Unattributed, of lost", "unattributed", _most(0.15), "≤ 15 %", ("M1",)),
    Target("Leaf precision when emitted", "leaf_precision_all", _least(0.95), "≥ 95 %"),
    Target("Calibration error (ECE)", "ece", _most(0.05), "≤ 0.05"),
)
