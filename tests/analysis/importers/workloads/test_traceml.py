"""TraceML summaries: averages become steps that all look alike; numbers by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.importers.workloads.traceml import TraceML
from tests.support.import_results import import_folder, list_ranks, list_spans

MS = 1_000_000


def summary(path: Path, rows: Any, steps: Any = 2) -> Path:
    reported = {
        "schema_version": 1.6,
        "primary_diagnosis": {"status": "INPUT-BOUND", "summary": "input wait is 1/3"},
        "step_time": {
            "global": {"window": {"steps_analyzed": steps, "start_step": 5}},
            "groups": {"by": "global_rank", "rows": rows},
        },
    }
    path.write_text(json.dumps(reported))
    return path


def test_averages_become_identical_steps(tmp_path: Path) -> None:
    row = {
        "identity": {"global_rank": 3, "world_size": 8, "hostname": "n1"},
        "metrics": {
            "input_wait_ms": 10.0,
            "step_time_ms": 20.0,
            "h2d_ms": 1.0,
            "forward_ms": None,
            "backward_ms": 12.0,
            "optimizer_ms": 30.0,
        },
    }
    (node,), (account,), _ = import_folder(
        TraceML(), summary(tmp_path / "final_summary.json", {"3": row})
    )
    assert node.name == "n1"
    assert list_ranks(node) == {4: (3, 8, "")}
    recorded_spans = list_spans(node)
    assert recorded_spans == {
        "4 step": [(0, 30 * MS, 5, 2, -1, -1), (30 * MS, 60 * MS, 6, 2, -1, -1)],
        "4 data_wait": [(0, 10 * MS, -1, -1, -1, -1), (30 * MS, 40 * MS, -1, -1, -1, -1)],
        "4 h2d": [(10 * MS, 11 * MS, -1, -1, 0, 0), (40 * MS, 41 * MS, -1, -1, 0, 0)],
        "4 backward": [(11 * MS, 23 * MS, -1, -1, 0, 0), (41 * MS, 53 * MS, -1, -1, 0, 0)],
        # Parts of several averages may be more than the step: the last is cut.
        "4 optimizer": [(23 * MS, 30 * MS, -1, -1, 0, 0), (53 * MS, 60 * MS, -1, -1, 0, 0)],
    }
    assert account.notes == [
        "TraceML's own diagnosis: INPUT-BOUND: input wait is 1/3",
        "averages over all steps: differences between steps are unknown",
    ]


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        ({}, 2),
        ([], 2),
        ({"0": {"metrics": {"step_time_ms": "NaN"}}}, 2),
        ({"0": {"metrics": {"step_time_ms": 5}}}, None),
        ({"x": {"metrics": {"step_time_ms": 5}}}, 2),
        ({"0": {"metrics": {"step_time_ms": 1e308}}}, 2),
        ({"0": 3}, 2),
        ({"0": {"metrics": {"step_time_ms": float("inf")}}}, 2),
    ],
)
def test_a_summary_without_step_times_is_reported(tmp_path: Path, rows: Any, steps: Any) -> None:
    path = summary(tmp_path / "final_summary.json", rows, steps)
    assert import_folder(TraceML(), path)[2] == "no rank has a step time"
