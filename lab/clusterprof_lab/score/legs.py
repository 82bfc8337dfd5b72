"""Scores by origin of the job and by visible signals, side by side and never averaged.

Legs of the corpus come from the stored scores. The others are measured elsewhere and entered by
hand, one file per leg under `lab/results/legs/`:

    {"format": "clusterprof-leg", "schema": 1, "leg": "independent-lab", "hooks": true,
     "date": "2026-11-22", "clusterprof": "0.1.0", "source": "25 faults, real torchrun jobs",
     "figures": {"family_top1": {"hits": 18, "n": 25}, "bucket_error_active_mean": {"value": 5.0}}}

`leg` is a key of `GIVEN`; one file per value of `hooks`. A missing figure was not measured. Parts
have `hits` and `n`; other figures have a `value`, and `n` where it is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof_lab.score.clusterprof_answer import TOOL
from clusterprof_lab.score.figures import compute_wilson
from clusterprof_lab.score.markdown import (
    LINES,
    Column,
    format_column_name,
    format_figure,
    format_table,
    list_scores,
)

FORMAT, SCHEMA = "clusterprof-leg", 1
GIVEN: Mapping[str, str] = {"independent-lab": "independent lab", "public-traces": "public traces"}
"""Legs that are measured elsewhere, and what they are called."""
NOT_MEASURED = "not measured"
_HOOKED_MODES: Mapping[str, tuple[str, bool]] = {
    "M0": ("", True),
    "M2": ("", False),
    "D0": (", as a driver shows it", True),
    "D2": (", as a driver shows it", False),
}
"""Mode of the corpus -> how the leg is called, and whether the job has hooks."""
_TESTBED_WORDS = {"synth": "synthetic jobs", "real": "real jobs", "sharded": "second job shape"}
_SECOND_SHAPE = "sharded"


@dataclass(frozen=True, slots=True)
class LegTarget:
    """What one figure of every leg is measured against."""

    figure: str
    words: str
    bound: float
    bound_without: float
    """Of jobs without hooks."""
    at_least: bool = False

    def meets(self, value: float, hooks: bool) -> bool:
        """Return whether a value is on the right side of the bound."""
        bound = self.bound if hooks else self.bound_without
        return value >= bound if self.at_least else value <= bound


LEG_TARGETS = (
    LegTarget("family_top1", "first group right (≥ 95 %)", 0.95, 0.95, at_least=True),
    LegTarget("wrong_first_sure", "wrong, said with ≥ 80 % (≤ 1 %)", 0.01, 0.01),
    LegTarget("unattributed", "unattributed (≤ 5 %; without hooks ≤ 15 %)", 0.05, 0.15),
    LegTarget("bucket_error_active_mean", "error of a group (≤ 1.5; ≤ 3)", 1.5, 3.0),
    LegTarget("ece", "calibration error (≤ 0.05)", 0.05, 0.05),
)


@dataclass(frozen=True, slots=True)
class Leg:
    """One line: where the jobs are from, what was seen of them, and what was measured."""

    name: str
    hooks: bool
    figures: Mapping[str, Mapping[str, Any]]

    def rank(self) -> tuple[float, float]:
        """Return what sorts the worst leg first, and those that are not measured last."""
        values = [(target, self.figures.get(target.figure)) for target in LEG_TARGETS]
        known = [
            (t, measured["value"])
            for t, measured in values
            if measured and measured["value"] is not None
        ]
        if not known:
            return (1.0, 0.0)
        met = sum(target.meets(value, self.hooks) for target, value in known) / len(known)
        first = self.figures.get("family_top1")
        return (met - 1, first["value"] if first and first["value"] is not None else 1.0)


def load_given(folder: Path) -> list[Leg]:
    """Load the legs measured elsewhere; of one without a file the name alone.

    Raises: ValueError for a file of another format.
    """
    legs = []
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if (document.get("format"), document.get("schema")) != (FORMAT, SCHEMA):
            raise ValueError(f"{path}: not a leg of schema {SCHEMA}")
        if document["leg"] not in GIVEN:
            raise ValueError(f"{path}: leg {document['leg']!r} is none of {', '.join(GIVEN)}")
        figures = {name: _read_figure(values) for name, values in document["figures"].items()}
        name = f"{GIVEN[document['leg']]} ({document['source']}; {document['date']})"
        legs.append(Leg(name, bool(document["hooks"]), figures))
    for words in GIVEN.values():
        if not any(leg.name.startswith(words) for leg in legs):
            legs.append(Leg(words, True, {}))
    return legs


def _read_figure(given: Mapping[str, Any]) -> dict[str, Any]:
    if "hits" in given:
        part = compute_wilson(int(given["hits"]), int(given["n"]))
        return {"value": part.value, "low": part.low, "high": part.high, "n": part.n}
    return {"value": float(given["value"]), "low": None, "high": None, "n": given.get("n", "")}


def list_legs(columns: Sequence[Column], given: Sequence[Leg]) -> list[Leg]:
    """List all legs, worst first; of one that no score measured the name alone.

    columns: stored scores and their testbeds. A smaller slice is named with its date.
    """
    legs, unmeasured = list(given), {}
    measured: set[tuple[str, str]] = set()
    for column in columns:
        document, testbed = column
        words = format_column_name(column).replace(testbed, _TESTBED_WORDS.get(testbed, testbed), 1)
        if document["slice"] != "full":
            words += f", {document['date']}"
        for mode, (view, hooks) in _HOOKED_MODES.items():
            scores = list_scores(document, testbed=testbed, tool=TOOL, mode=mode)
            if scores:
                measured.add((testbed, mode))
                legs.append(Leg(words + view, hooks, scores[0]["figures"]))
            else:
                unmeasured[testbed, mode] = Leg(words + view, hooks, {})
    legs += [leg for key, leg in unmeasured.items() if key not in measured]
    if not any(testbed == _SECOND_SHAPE for _, testbed in columns):
        legs.append(Leg(_TESTBED_WORDS[_SECOND_SHAPE], True, {}))
    return sorted(legs, key=Leg.rank)


def format_legs(legs: Sequence[Leg]) -> str:
    """Return the legs as a table, each figure with ✓ or ✗."""
    lines = []
    for leg in legs:
        cells = [_format_cell(leg, target) for target in LEG_TARGETS]
        lines.append([leg.name, "yes" if leg.hooks else "no", *cells])
    return format_table(["jobs", "hooks", *(target.words for target in LEG_TARGETS)], lines)


def _format_cell(leg: Leg, target: LegTarget) -> str:
    measured = leg.figures.get(target.figure)
    if measured is None or measured["value"] is None:
        return NOT_MEASURED
    met = target.meets(measured["value"], leg.hooks)
    text = format_figure(measured, LINES[target.figure][1], digits=1, trials=measured["n"] != "")
    return f"{'✓' if met else '✗'} {text}"
