"""The legs side by side: own corpus by what was seen, and those measured elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof_lab.score.legs import LEG_TARGETS, Leg, format_legs, list_legs, load_given

FIGURES = ("family_top1", "wrong_first_sure", "unattributed", "bucket_error_active_mean", "ece")


def figures(*values: float) -> dict[str, dict[str, float | int | None]]:
    return {
        name: {"value": value, "low": None, "high": None, "n": 10}
        for name, value in zip(FIGURES, values)
    }


GOOD = (0.96, 0.0, 0.05, 1.5, 0.05)
WITHOUT = (0.95, 0.01, 0.15, 3.0, 0.04)
POOR = (0.7, 0.2, 0.3, 5.0, 0.2)
STORED = {
    "split": "test",
    "slice": "full",
    "scores": [
        {"testbed": "synth", "tool": "clusterprof", "mode": mode, "figures": figures(*values)}
        for mode, values in (("M0", GOOD), ("M1", POOR), ("M2", WITHOUT), ("D0", POOR))
    ],
}


def test_the_table_lists_all_legs_worst_first(tmp_path: Path) -> None:
    lab = {
        "format": "clusterprof-leg",
        "schema": 1,
        "leg": "independent-lab",
        "hooks": True,
        "date": "2026-11-22",
        "clusterprof": "0.1.0",
        "source": "25 jobs",
        "figures": {
            "family_top1": {"hits": 18, "n": 25},
            "bucket_error_active_mean": {"value": 1.2},
        },
    }
    (tmp_path / "independent-lab.json").write_text(json.dumps(lab), encoding="utf-8")
    legs = list_legs([(STORED, "synth")], load_given(tmp_path))
    assert format_legs(legs).splitlines()[2:] == [
        "| synthetic jobs, test, as a driver shows it | yes | ✗ 70.0 % (10) | ✗ 20.0 % (10)"
        " | ✗ 30.0 % (10) | ✗ 5.0 (10) | ✗ 0.200 (10) |",
        "| independent lab (25 jobs; 2026-11-22) | yes | ✗ 72.0 % (52.4–85.7; 25)"
        " | not measured | not measured | ✓ 1.2 | not measured |",
        "| synthetic jobs, test | no | ✓ 95.0 % (10) | ✓ 1.0 % (10) | ✓ 15.0 % (10)"
        " | ✓ 3.0 (10) | ✓ 0.040 (10) |",
        "| synthetic jobs, test | yes | ✓ 96.0 % (10) | ✓ 0.0 % (10) | ✓ 5.0 % (10)"
        " | ✓ 1.5 (10) | ✓ 0.050 (10) |",
        "| public traces | yes |" + " not measured |" * 5,
        "| synthetic jobs, test, as a driver shows it | no |" + " not measured |" * 5,
        "| second job shape | yes |" + " not measured |" * 5,
    ]


def test_a_smaller_dated_slice_fills_unmeasured_legs() -> None:
    scores = [
        {"testbed": testbed, "tool": "clusterprof", "mode": mode, "figures": figures(*GOOD)}
        for testbed, mode in (("synth", "D2"), ("sharded", "M0"))
    ]
    small = {"split": "test", "slice": "ci", "date": "2026-11-23", "scores": scores}
    legs = list_legs([(STORED, "synth"), (small, "synth"), (small, "sharded")], [])
    unmeasured = [leg.name for leg in legs if not leg.figures]
    assert unmeasured == [
        "second job shape, test, ci, 2026-11-23",
        "second job shape, test, ci, 2026-11-23, as a driver shows it",
        "second job shape, test, ci, 2026-11-23, as a driver shows it",
    ]
    assert [leg.name for leg in legs if "ci" in leg.name and leg.figures] == [
        "synthetic jobs, test, ci, 2026-11-23, as a driver shows it",
        "second job shape, test, ci, 2026-11-23",
    ]


def test_a_leg_without_hooks_has_wider_bounds() -> None:
    by_figure = {target.figure: target for target in LEG_TARGETS}
    assert set(by_figure) == set(FIGURES)
    unattributed = by_figure["unattributed"]
    assert [unattributed.meets(0.1, hooks) for hooks in (True, False)] == [False, True]
    assert Leg("poor", False, figures(*POOR)).rank() < Leg("good", True, figures(*GOOD)).rank()


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"format": "clusterprof-score"}', encoding="utf-8")
    with pytest.raises(ValueError, match="not a leg"):
        load_given(tmp_path)
