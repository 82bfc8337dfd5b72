"""`score.json`: everything that was scored, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from clusterprof import __version__
from clusterprof_lab.score.metrics import Row, Score, figures_of, tables, wrong
from clusterprof_lab.score.ours import TOOL
from clusterprof_lab.score.plan import Work
from clusterprof_lab.score.work import Done

FORMAT = "clusterprof-score"
SCHEMA = 1


def document(done: Sequence[Done], split: str, size: str, seconds: float) -> dict[str, Any]:
    """Return the whole score.

    Claims, from which confidence is learnt, and what went wrong are of the split dev only: the
    other is not looked at.
    """
    rows = [row for one in done for row in one.rows]
    ours = [row for row in rows if row.tool == TOOL]
    full = [row for row in ours if row.mode == "M0"]
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "clusterprof": __version__,
        "split": split,
        "slice": size,
        "seconds": round(seconds),
        "coverage": _coverage(done),
        "scores": [
            {"testbed": testbed, "tool": tool, "mode": mode, **_score(score)}
            for (testbed, tool, mode), score in tables(rows).items()
        ],
        "groups": [_group(name, full) for name in dict.fromkeys(row.group for row in full)],
        "scenarios": [_scenario(id_, full) for id_ in dict.fromkeys(row.scenario for row in full)],
        "ablation": _ablation(done),
        "claims": [
            [round(sure, 6), right]
            for row in full for _, sure, right in row.judged.emitted if sure is not None
        ] if split == "dev" else [],
        "wrong_count": sum(bool(wrong(row)) for row in ours),
        "wrong": [_wrong(row) for row in ours if wrong(row)] if split == "dev" else [],
    }  # fmt: skip


def _score(score: Score) -> dict[str, Any]:
    return {
        "figures": {name: _rounded(asdict(one)) for name, one in score.figures.items()},
        "by_cause": {name: _rounded(asdict(one)) for name, one in score.by_cause.items()},
        "confusion": {name: dict(line) for name, line in score.confusion.items()},
        "reliability": [_rounded(asdict(one)) for one in score.reliability],
    }


def _rounded(one: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in one.items()}


def _coverage(done: Sequence[Done]) -> dict[str, Any]:
    missing: dict[tuple[str, str, str], int] = {}
    for one in done:
        if one.not_run:
            key = _scenario_of(one.work), one.work.testbed, one.not_run
            missing[key] = missing.get(key, 0) + 1
    return {
        "planned": len(done),
        "scored": sum(not one.not_run for one in done),
        "not_run": [
            {"scenario": scenario, "testbed": testbed, "trials": n, "reason": reason}
            for (scenario, testbed, reason), n in missing.items()
        ],
    }


def _scenario_of(work: Work) -> str:
    return work.trial.scenario.id if work.trial is not None else work.name


_OF_A_PART = (
    "family_top1", "leaf_top1", "culprit_top1", "culprit_top1_easy", "bucket_error_active_mean",
    "false_on_nulls",
)  # fmt: skip


def _part(rows: Sequence[Row]) -> dict[str, Any]:
    return {name: _rounded(asdict(one)) for name, one in figures_of(rows, _OF_A_PART).items()}


def _group(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    return {"group": name, **_part([row for row in rows if row.group == name])}


def _scenario(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    mine = [row for row in rows if row.scenario == name]
    return {
        "scenario": name,
        "group": mine[0].group,
        "trials": len(mine),
        "right": sum(not wrong(row) for row in mine),
        **_part(mine),
    }


def _ablation(done: Sequence[Done]) -> dict[str, Any]:
    asked = [one for one in done if one.sideways is not None]
    found = [
        {"trial": one.work.name, **_rounded(asdict(step))}
        for one in asked
        for step in one.sideways or ()
    ]
    return {"runs": len(asked), "sideways": found}


def _wrong(row: Row) -> dict[str, Any]:
    return {
        "trial": row.trial,
        "testbed": row.testbed,
        "mode": row.mode,
        "what": list(wrong(row)),
        "said": row.said,
        "blamed": row.judged.first_blamed,
        "true": row.true,
        "notes": list(row.judged.notes),
        "folder": row.folder,
    }
