"""`score.json`: everything that was scored, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from typing import Any

from clusterprof import __version__
from clusterprof_lab.score.ablate import ABLATIONS
from clusterprof_lab.score.clusterprof_answer import TOOL
from clusterprof_lab.score.figures import compute_ratio
from clusterprof_lab.score.metrics import (
    JudgedRun,
    Score,
    compute_figures,
    compute_scores,
    list_errors,
)
from clusterprof_lab.score.plan import ScoredRun
from clusterprof_lab.score.work import RunResult

FORMAT = "clusterprof-score"
SCHEMA = 2


def make_document(
    done: Sequence[RunResult], split: str, size: str, seconds: float, calibrated: bool = True
) -> dict[str, Any]:
    """Return the whole score.

    Claims, from which confidence is learnt (how sure, whether right, which leaf, mode, testbed,
    run), and what went wrong are of the split dev only: the other is not looked at.
    """
    rows = [row for result in done for row in result.rows]
    ours = [row for row in rows if row.tool == TOOL]
    full = [row for row in ours if row.mode == "M0"]
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "clusterprof": __version__,
        "split": split,
        "slice": size,
        "date": date.today().isoformat(),
        "seconds": round(seconds),
        "calibrated": calibrated,
        "tools": {row.tool: row.label for row in rows},
        "coverage": _count_coverage(done),
        "scores": [
            {"testbed": testbed, "tool": tool, "mode": mode, **_format_score(score)}
            for (testbed, tool, mode), score in compute_scores(rows).items()
        ],
        "scenarios": [
            _summarize_scenario(*key, full)
            for key in dict.fromkeys((row.testbed, row.scenario) for row in full)
        ],
        "ablation": _format_ablation(done, split),
        "claims": [
            [round(sure, 6), right, leaf, row.mode, row.testbed, row.trial]
            for row in ours
            for leaf, sure, right in (*row.judged.emitted, *row.judged.emitted_groups)
            if sure is not None
        ]
        if split == "dev"
        else [],
        "wrong_count": sum(bool(list_errors(row)) for row in ours),
        "wrong": [_format_wrong(row) for row in ours if list_errors(row)] if split == "dev" else [],
    }


def _format_score(score: Score) -> dict[str, Any]:
    return {
        "figures": {name: _round_values(asdict(figure)) for name, figure in score.figures.items()},
        "by_cause": {
            name: _round_values(asdict(figure)) for name, figure in score.by_cause.items()
        },
        "confusion": {name: dict(line) for name, line in score.confusion.items()},
        "reliability": [_round_values(asdict(bin_)) for bin_ in score.reliability],
    }


def _round_values(values: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}


def _count_coverage(done: Sequence[RunResult]) -> dict[str, Any]:
    missing: dict[tuple[str, str, str], int] = {}
    for result in done:
        if result.not_run:
            key = _get_scenario(result.work), result.work.testbed, result.not_run
            missing[key] = missing.get(key, 0) + 1
    return {
        "planned": len(done),
        "scored": sum(not result.not_run for result in done),
        "not_run": [
            {"scenario": scenario, "testbed": testbed, "trials": n, "reason": reason}
            for (scenario, testbed, reason), n in missing.items()
        ],
    }


def _get_scenario(work: ScoredRun) -> str:
    return work.trial.scenario.id if work.trial is not None else work.name


_OF_A_PART = (
    "family_top1",
    "leaf_top1",
    "culprit_top1",
    "culprit_top1_easy",
    "bucket_error_active_mean",
)


def _summarize_scenario(testbed: str, name: str, rows: Sequence[JudgedRun]) -> dict[str, Any]:
    mine = [row for row in rows if (row.testbed, row.scenario) == (testbed, name)]
    healthy = [not row.judged.false_causes for row in mine if row.judged.false_causes is not None]
    figures = {**compute_figures(mine, _OF_A_PART), "no_false_cause": compute_ratio(healthy)}
    return {
        "scenario": name,
        "testbed": testbed,
        "group": mine[0].group,
        "trials": len(mine),
        "right": sum(not list_errors(row) for row in mine),
        **{figure: _round_values(asdict(value)) for figure, value in figures.items()},
    }


def _format_ablation(done: Sequence[RunResult], split: str) -> dict[str, Any]:
    asked = [result for result in done if result.sideways is not None]
    moves = [
        {"trial": result.work.name if split == "dev" else "", **_round_values(asdict(step))}
        for result in asked
        for step in result.sideways or ()
    ]
    return {"runs": len(asked), "signals": len(ABLATIONS), "sideways": moves}


def _format_wrong(row: JudgedRun) -> dict[str, Any]:
    return {
        "trial": row.trial,
        "testbed": row.testbed,
        "mode": row.mode,
        "what": list(list_errors(row)),
        "said": row.named_family,
        "blamed": row.judged.first_blamed,
        "true": row.true,
        "notes": list(row.judged.notes),
        "folder": row.folder,
    }
