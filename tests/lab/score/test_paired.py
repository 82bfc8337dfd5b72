"""Jobs whose fault goes on and off: what the script makes of it, and the stopwatches' truth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterprof_lab.real.launch import SCRIPT
from clusterprof_lab.real.paired import FILE, FORMAT, SCHEMA, compute_period_steps
from clusterprof_lab.score.paired import Turn, compute_truth, read_turns

MS = 10**6


def turns(monkeypatch: pytest.MonkeyPatch, *words: str):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from turns import Turns

    return Turns(["--folder=x", *words])


def test_turns_alternate_calm_and_faulty_options(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--steps=20", "--in-turns=4", "--warm-up=2", "--data=calm", "--model-mb=1"]
    fault = ["--fault", "--decode-ms=90", "--own", "1", "workers=0", "--data=slow", "--model-mb=4"]
    made = turns(monkeypatch, *words, *fault)
    made.apply_rank_options(1)
    assert [made.is_on(step) for step in range(20)] == 6 * [False] + 8 * [True] + 6 * [False]
    assert [step for step in range(20) if made.begins_turn(step)] == [6, 14]
    assert (
        made.get_options(5).decode_ms,
        made.get_options(5).data,
        made.get_options(5).workers,
    ) == (4.0, "calm", 1)
    assert (
        made.get_options(6).decode_ms,
        made.get_options(6).data,
        made.get_options(6).workers,
    ) == (90.0, "slow", 0)
    assert made.loader_options == [made.faulty, made.calm]  # a loader's workers cannot change
    assert made.calm.features == made.faulty.features  # of one model only a part is sent


def test_without_turns_the_options_stay_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    made = turns(monkeypatch, "--decode-ms=90", "--steps=3")
    assert [made.is_on(step) for step in range(3)] == [True, True, True]
    assert not any(made.begins_turn(step) for step in range(3)) and made.loader_options == [
        made.faulty
    ]
    assert made.get_options(2).decode_ms == 90.0


def job(folder: Path, length_ms: list[float], period: int = 1) -> Path:
    """Stopwatches of two ranks, the second of which ends every step a while later."""
    (folder / "stopwatches").mkdir(parents=True)
    reported = {"format": FORMAT, "schema": SCHEMA, "in_turns": 12, "blocks": 4, "warm_up": 8}
    (folder / FILE).write_text(json.dumps({**reported, "period_steps": period}), encoding="utf-8")
    for rank in range(2):
        end, lines = rank * MS, [{"rank": rank}]
        for step, ms in enumerate(length_ms):
            end += round(ms * MS)
            lines.append({"step": step, "ended_ns": end})
        path = folder / "stopwatches" / f"rank-{rank}.life-0.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def test_the_truth_compares_mean_steps_with_and_without_the_fault(tmp_path: Path) -> None:
    length = [500.0] * 8 + [100.0] * 12 + [125.0] * 24 + [100.0] * 12 + [400.0] * 2
    length[20:28] = [100.0] * 8  # the loader was ahead: these count for nothing
    result = read_turns(job(tmp_path / "a", length))
    # (on, first step, first that is no longer in it)
    assert [(item.on, item.first_step, item.end_step) for item in result] == [
        (False, 8, 20),
        (True, 28, 44),
        (False, 52, 56),
    ]
    truth = compute_truth(result)
    assert truth.points == pytest.approx(20.0) and truth.error == pytest.approx(0.0)
    whole = read_turns(job(tmp_path / "b", length, period=5))
    assert [(item.first_step, item.end_step) for item in whole] == [(10, 20), (29, 44), (55, 56)]


def test_the_error_of_the_truth_matches_a_hand_computation() -> None:
    # Without the fault stretches of 4 steps take 98, 102, 98, 102 ms: variance 16 / 3 of 4 draws.
    steps = (98.0,) * 4 + (102.0,) * 4
    calm = [Turn(False, 0, 8, steps), Turn(False, 16, 24, steps)]
    truth = compute_truth([calm[0], Turn(True, 8, 16, (125.0,) * 8), calm[1]])
    # of 2 stretches that were not trained without it, and of the 4 they are guessed by; t of 3
    error = 100 * 3.18 * (16 / 3 / 2 + 16 / 3 / 4) ** 0.5 / 125
    assert truth.points == pytest.approx(20.0) and truth.error == pytest.approx(error)


def test_the_period_of_a_fault_is_read_from_its_options() -> None:
    assert compute_period_steps(["--gc-every=4", "--gc-ms=120"]) == 4
    assert compute_period_steps(["--own", "1", "turn-ms=9", "--turns=2", "--turn-every=6"]) == 12
    assert compute_period_steps(["--decode-ms=200"]) == 1
