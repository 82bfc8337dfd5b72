"""Predictions against the truth of jobs whose fault went on and off (`real/paired.py`).

The truth compares, within one job, the mean step of the turns with the fault and of those without
it. The prediction comes from analyses that each see one turn with the fault; all such turns are
combined. The first steps of a turn are left out of both: a loader may be ahead, a queue may still
run dry.
Truth and prediction are about the same steps, so the variation of these steps is not noise. Noise
is in the step without the fault, which is known only from other steps of the same job: that of
means over a few steps each, taken as independent. Where the 95 % interval of the truth is wider
than the target, the prediction cannot be judged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.analysis.node.selection import PartOfRun
from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import UsageError
from clusterprof_lab.real.paired import FILE, FORMAT, SCHEMA
from clusterprof_lab.scenario import Scenario

SETTLES_STEPS = 8
"""First steps of a turn that count for nothing; a few more if what is left is no whole number of
the fault's periods: a host that runs ahead would be elsewhere at its end than at its begin."""
STRETCH_STEPS = 4
"""Steps whose mean is one draw of the noise; faults that come every few steps come every fourth."""
_T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Student's t with 1, 2, … degrees of freedom; beyond, 2.1."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Steps one after the other, with the fault or without."""

    on: bool
    first_step: int
    end_step: int
    """The first that is no longer in it."""
    steps_ns: tuple[float, ...]
    """Of each step, the mean of all ranks."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What the fault cost, in points of the step with it."""

    points: float
    error: float
    """Half of its 95 % interval."""
    varies: float
    """The same of another such job: with the noise of the turns with the fault."""


def read_turns(folder: Path) -> list[Turn]:
    """Read the turns of a job, without their first steps; ValueError if it is no such job."""
    job = read_document(folder)
    ends = _read_step_ends(folder / "stopwatches")
    steps, length, first = len(ends[0]), job["in_turns"], job["warm_up"]
    on = [first <= step and (step - first) // length % 4 in (1, 2) for step in range(steps)]
    whole = first + length * job["blocks"]
    out, begin = [], 0
    for step in range(1, whole + 1):
        if step < whole and on[step] == on[begin]:
            continue
        left = step - begin - (SETTLES_STEPS if begin else first)
        counts = range(step - max(left - left % job["period_steps"], 1), step)
        row = [sum(end[k] - end[k - 1] for end in ends) / len(ends) for k in counts]
        out.append(Turn(on[begin], counts[0], step, tuple(row)))
        begin = step
    return out


def read_document(folder: Path) -> dict[str, Any]:
    """Read what is known of a job."""
    document: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if document.get("format") != FORMAT or document.get("schema") != SCHEMA:
        raise ValueError(f"{folder / FILE}: not a paired job of schema {SCHEMA}")
    return document


def _read_step_ends(folder: Path) -> list[list[int]]:
    """Return when each step was over, by rank."""
    out = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
        out.append([line["ended_ns"] for line in lines if line["step"] >= 0])
    return out


def compute_truth(turns: Sequence[Turn]) -> Truth:
    """Return what the fault cost, and how sure that is."""
    with_ns, with_variance, with_count = _estimate_mean(turns, True)
    without_ns, without_variance, without_count = _estimate_mean(turns, False)
    ratio = without_ns / with_ns
    # Of the steps that were not trained without the fault, and of those by which they are guessed.
    own = without_variance / with_count + without_variance / without_count
    error = math.sqrt(own) / with_ns
    varies = ratio * math.hypot(
        math.sqrt(with_variance / with_count) / with_ns,
        math.sqrt(without_variance / without_count) / without_ns,
    )
    return Truth(
        100 * (1 - ratio),
        100 * _find_t_quantile(without_count - 1) * error,
        100 * _find_t_quantile(min(with_count, without_count) - 1) * varies,
    )


def _find_t_quantile(free: int) -> float:
    return _T_975[free - 1] if 0 < free <= len(_T_975) else 2.1


def _estimate_mean(turns: Sequence[Turn], on: bool) -> tuple[float, float, int]:
    """Return the mean step of one half, the variance of stretches, and how many there are."""
    half = [turn.steps_ns for turn in turns if turn.on == on]
    mean = sum(map(sum, half)) / sum(map(len, half))
    draws = [sum(part) / len(part) for row in half for part in _split_turn(row)]
    return mean, sum((d - mean) ** 2 for d in draws) / max(len(draws) - 1, 1), len(draws)


def _split_turn(row: Sequence[float]) -> Iterator[Sequence[float]]:
    """Cut a turn into stretches; what is left over at its end goes with the last."""
    count = max(1, len(row) // STRETCH_STEPS)
    for at in range(count):
        yield row[at * STRETCH_STEPS : (at + 1) * STRETCH_STEPS if at + 1 < count else len(row)]


def find_predictions(
    folder: Path, turns: Sequence[Turn], pair: Any
) -> tuple[tuple[str, ...], float]:
    """Return the findings that name the fault in its turns, and what fixing them would win."""
    from clusterprof_lab.score.whatif import find_predicted_gain

    named: list[str] = []
    saved = whole = 0.0
    for turn in turns:
        if not turn.on:
            continue
        part = PartOfRun(first_step=turn.first_step, end_step=turn.end_step, description="a turn")
        try:
            report = analyze(folder / "recording", part=part)
        except UsageError:
            continue
        length = report.impact.job_ns if report.impact is not None else None
        if not length:
            continue
        causes, points, _, _ = find_predicted_gain(report, pair)
        named += [name for name in causes if name not in named]
        saved += points * length
        whole += length
    return tuple(named), saved / whole if whole else 0.0


def make_pair(document: Mapping[str, Any], corpus: Mapping[str, Scenario]) -> Any:
    """Return which findings name the fault of a job."""
    from clusterprof_lab.score.clean_runs import REMOVED, Pair

    wanted = corpus[document["scenario"]].wanted
    leaves = (*wanted.leaves, *(leaf for _, leaf in wanted.also))
    return Pair(leaves, wanted.family, 0.0, REMOVED)
