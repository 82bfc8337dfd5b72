"""All figures of the score, computed from the judged runs of one tool in one mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clusterprof_lab.families import FAMILIES
from clusterprof_lab.score.calibrate import Bin, ece_over, reliability
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
    """True when the rule "slowest total compute" names the culprit; None = it was not applied."""
    judged: Judged
    said: str = ""
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


def scored(rows: Sequence[Row]) -> Score:
    """Return the figures of one tool, mode and testbed."""
    judged = [row.judged for row in rows]
    bins, _ = reliability(_claims(judged))
    return Score(figures_of(rows, FIGURES), _by_cause(judged), _confusion(judged), bins)


def figures_of(rows: Sequence[Row], names: Iterable[str]) -> dict[str, Figure]:
    """Return some figures of `FIGURES`, by name."""
    return {name: FIGURES[name](rows) for name in names}


def tables(rows: Sequence[Row]) -> dict[tuple[str, str, str], Score]:
    """Return the score of every (testbed, tool, mode), in order of first appearance."""
    sets: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        sets.setdefault((row.testbed, row.tool, row.mode), []).append(row)
    return {key: scored(group) for key, group in sets.items()}


def wrong(row: Row) -> tuple[str, ...]:
    """Return in what a run is wrong, for the list of runs to go and look at."""
    run = row.judged
    asked: dict[str, bool | None] = {
        "family": run.family_right,
        "leaf": None if run.abstained and row.mode in NO_LEAVES else run.leaf_top1,
        "culprit": run.culprit_right,
        "blamed though nobody's": run.nobody_right,
        "not both": run.both_found,
        "inversion": None if run.inverted is None else not run.inverted,
        "residual": _whole(run),
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


def _dominant(run: Judged) -> bool | None:
    """Right or wrong, where a leaf was named first."""
    return run.leaf_top1 if run.said_leaf is not None else None


def _precision(judged: Sequence[Judged]) -> Figure:
    right = [right for run in judged for _, _, right in run.emitted]
    return wilson(sum(right), len(right))


def _false(run: Judged) -> bool | None:
    return None if run.false_causes is None else bool(run.false_causes)


def _whole(run: Judged) -> bool | None:
    return None if run.residual_ns is None else run.residual_ns == 0


def _largest_residual(judged: Sequence[Judged]) -> Figure:
    known = [abs(run.residual_ns) for run in judged if run.residual_ns is not None]
    return Figure(float(max(known)), None, None, len(known)) if known else NO_FIGURE


def _by_cause(judged: Sequence[Judged]) -> dict[str, Figure]:
    out = {}
    for name in FAMILIES:
        trials = [[run.errors[name]] for run in judged if run.errors and name in run.active]
        if trials:
            out[name] = over_trials(trials)
    return out


def _confusion(judged: Sequence[Judged]) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for run in judged:
        if run.said is not None:
            line = out.setdefault(run.wanted, {})
            line[run.said] = line.get(run.said, 0) + 1
    return out


def _claims(judged: Sequence[Judged]) -> list[tuple[float, bool]]:
    return [
        (sure, right)
        for run in judged
        for _, sure, right in (*run.emitted, *run.emitted_groups)
        if sure is not None
    ]


def _ece(rows: Sequence[Row]) -> Figure:
    return ece_over([_claims([row.judged]) for row in rows])


def _errors(rows: Sequence[Row], active: bool) -> list[list[float]]:
    return [
        [value for name, value in errors.items() if not active or name in row.judged.active]
        for row in rows
        if (errors := row.judged.errors) is not None
    ]


def _each(ask: Callable[[Judged], bool | None]) -> Callable[[Sequence[Row]], Figure]:
    return lambda rows: part_of([ask(row.judged) for row in rows])


def _culprits(rows: Sequence[Row], easy: bool) -> Figure:
    return part_of([row.judged.culprit_right for row in rows if bool(row.easy) == easy])


def _falsely(rows: Sequence[Row], null: bool) -> Figure:
    return part_of([_false(row.judged) for row in rows if (row.judged.wanted == NOTHING) == null])


def _means(ask: Callable[[Judged], float | None]) -> Callable[[Sequence[Row]], Figure]:
    def mean(rows: Sequence[Row]) -> Figure:
        known = [value for row in rows if (value := ask(row.judged)) is not None]
        return over_trials([[abs(value)] for value in known])

    return mean


FIGURES: Mapping[str, Callable[[Sequence[Row]], Figure]] = {
    "bucket_error_mean": lambda rows: over_trials(_errors(rows, False)),
    "bucket_error_p95": lambda rows: over_trials(_errors(rows, False), p95),
    "bucket_error_active_mean": lambda rows: over_trials(_errors(rows, True)),
    "bucket_error_active_p95": lambda rows: over_trials(_errors(rows, True), p95),
    "family_top1": _each(lambda run: run.family_right),
    "leaf_top1": _each(lambda run: run.leaf_top1),
    "leaf_top2": _each(lambda run: run.leaf_top2),
    "leaf_abstained": _each(lambda run: run.abstained),
    "leaf_precision": _each(_dominant),
    "leaf_precision_all": lambda rows: _precision([row.judged for row in rows]),
    "culprit_top1": lambda rows: _culprits(rows, False),
    "culprit_top1_easy": lambda rows: _culprits(rows, True),
    "nobody_blamed": _each(lambda run: run.nobody_right),
    "both_found": _each(lambda run: run.both_found),
    "inversions": _each(lambda run: run.inverted),
    "false_on_nulls": lambda rows: _falsely(rows, True),
    "false_anywhere": lambda rows: _falsely(rows, False),
    "unattributed": _means(lambda run: run.unattributed_ratio),
    "ece": _ece,
    "wrong_first_sure": _each(lambda run: run.wrong_first_sure),
    "conserved": _each(_whole),
    "residual_ns": lambda rows: _largest_residual([row.judged for row in rows]),
    "gain_error": _means(lambda run: run.gain_error),
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


def _least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


def _most(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound + float(np.finfo(float).eps)


EVERY_MODE = ("M0", "M1", "M2", "M3", "M4", "D0", "D2")
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
