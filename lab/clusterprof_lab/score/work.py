"""One run: make or find it, analyze it in every mode, judge it, and apply all baseline rules.

A run that cannot be made here is "not run: reason". A failed analysis is judged as an answer
without claims.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from clusterprof.analysis.attribution import confidence
from clusterprof_lab import answer as answers
from clusterprof_lab.answer import Answer
from clusterprof_lab.scenario import Scenario
from clusterprof_lab.score.ablate import MisplacedTime, ablate
from clusterprof_lab.score.clusterprof_answer import TOOL, analyze_recording
from clusterprof_lab.score.dominant_cause import explain_weak_fault
from clusterprof_lab.score.judge import judge_answer, list_culprits
from clusterprof_lab.score.metrics import DISTURBED_ABOVE, JudgedRun, list_errors
from clusterprof_lab.score.modes import restrict_truth, rewrite_for_mode
from clusterprof_lab.score.plan import ScoredRun
from clusterprof_lab.score.summaries import format_causes, format_truth
from clusterprof_lab.truth import Truth, read_truth

MAKERS = {
    "synth": ("clusterprof_lab.synth.make", "make"),
    "real": ("clusterprof_lab.real.make", "make"),
    "sharded": ("clusterprof_lab.synth.make", "make_sharded"),
}
"""Functions `make(trial, folder)`, which leave `recording/` and `truth.json` in a folder."""
RECORDING = "recording"
SLOWEST = ("slowest", "compute")
"""Words in the name of the rule of `bench/baselines/registry.py` by which a run is called easy."""
ROOT = Path(__file__).resolve().parents[3]
Rule = Callable[[Path, Truth], Answer]


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for every run."""

    rules: bool = True
    answers: Mapping[str, Path] = field(default_factory=dict)
    """By tool, folders with answers by name of run; "" = by the name the tool gives itself."""
    keep: Path | None = None
    """Where runs go that were judged wrong; None = nothing is kept."""
    scenarios: Mapping[str, Scenario] = field(default_factory=dict)
    calibrated: bool = True
    """False: confidence as it is before its calibration, which is fitted to it."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run gave."""

    work: ScoredRun
    rows: tuple[JudgedRun, ...] = ()
    sideways: tuple[MisplacedTime, ...] | None = None
    """None when no signal was left out."""
    not_run: str = ""


def load_rules() -> Mapping[str, Rule]:
    """Return the baseline rules; none where they are missing."""
    folder = str(ROOT / "bench")  # `baselines` finds what else it needs by itself
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        registry = importlib.import_module("baselines.registry")
    except ImportError:
        return {}
    registered: Mapping[str, Rule] = registry.RULES
    return registered


def score_run(work: ScoredRun, settings: Settings) -> RunResult:
    """Make, analyze and judge one run; what it needs on disk is gone afterwards."""
    if not settings.calibrated:
        confidence.CALIBRATION.clear()
    with tempfile.TemporaryDirectory(prefix="clusterprof-score-") as name:
        place = Path(name)
        folder, reason = make_run(work, place)
        if folder is None:
            return RunResult(work, not_run=reason)
        try:
            truth = read_truth(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            return RunResult(work, not_run=f"its truth cannot be read: {error}")
        scenario = settings.scenarios.get(truth.scenario)
        if scenario is None:
            return RunResult(work, not_run=f"no scenario {truth.scenario!r} in the corpus")
        aimed = truth.parameters.get("share") if truth.testbed == "real" else None
        reason = explain_weak_fault(truth, scenario.wanted, aimed)
        if reason:
            return RunResult(work, not_run=reason)
        try:
            rows = tuple(_judge_run(work, folder, truth, scenario, settings, place))
            sideways = ablate(folder / RECORDING, place / "less") if work.ablate else None
        except Exception as error:  # ours: one run may not cost the score of all others
            traceback.print_exc()
            return RunResult(work, not_run=f"the scorer failed: {type(error).__name__}: {error}")
        return RunResult(work, _keep_wrong_run(work, rows, folder, settings), sideways)


def make_run(work: ScoredRun, place: Path) -> tuple[Path | None, str]:
    """Return the folder of a run, made when it has to be, or None and why it cannot be."""
    if work.folder is not None or work.not_now:
        return work.folder, work.not_now
    trial = work.trial
    assert trial is not None
    if getattr(trial.scenario, "real" if work.testbed == "real" else "synth") is None:
        return None, f"{work.testbed} cannot make it"
    folder = place / trial.name
    folder.mkdir()
    try:
        module, name = MAKERS[work.testbed]
        make = getattr(importlib.import_module(module), name)
        make(trial, folder, **({"ranks": work.ranks} if work.ranks else {}))
    except ImportError as error:
        return None, f"{MAKERS[work.testbed][0]} is not there: {error}"
    except Exception as error:  # whatever a fault needs and this machine has not
        return None, str(error) or type(error).__name__
    return folder, ""


def _judge_run(
    work: ScoredRun, folder: Path, truth: Truth, scenario: Scenario, settings: Settings, place: Path
) -> Iterator[JudgedRun]:
    recording = folder / RECORDING
    other_rules = dict(load_rules()) if settings.rules else {}
    rule_answers = {
        name: _apply_rule(rule, recording, truth, name) for name, rule in other_rules.items()
    }
    easy = None
    for name in rule_answers:
        if all(word in name.lower() for word in SLOWEST):
            blamed = rule_answers[name].culprits
            easy = bool(blamed) and blamed[0] in list_culprits(truth)
    testbed = truth.testbed
    if truth.disturbed_ratio > DISTURBED_ABOVE:
        testbed += ", disturbed"

    def row(answer: Answer, mode: str, tool: str) -> JudgedRun:
        true, wanted = restrict_truth(truth, scenario.wanted, mode)
        claimed = format_causes(answer.causes) if answer.causes is not None else "-"
        return JudgedRun(
            work.name,
            scenario.id,
            scenario.group,
            testbed,
            truth.severity,
            truth.seed,
            tool,
            mode,
            easy,
            judge_answer(answer, true, wanted),
            claimed,
            format_truth(true),
            split=truth.split,
            label=answer.tool,
        )

    for mode in work.modes:
        if mode == "M4" and len(truth.places) < 2:
            continue
        yield row(_analyze_in_mode(recording, mode, place / mode, truth), mode, TOOL)
        shutil.rmtree(place / mode, ignore_errors=True)
    for name, answer in rule_answers.items():
        yield row(answer, "M0", name)
    for tool, answers_folder in settings.answers.items():
        for answer in _load_answer(work.name, answers_folder):
            yield row(answer, "M0", tool or answer.tool)


def _analyze_in_mode(recording: Path, mode: str, folder: Path, truth: Truth) -> Answer:
    try:
        return analyze_recording(rewrite_for_mode(recording, mode, folder, truth))
    except Exception as error:
        return _make_failed_answer(TOOL, error)


def _apply_rule(rule: Rule, recording: Path, truth: Truth, name: str) -> Answer:
    try:
        return rule(recording, truth)
    except Exception as error:
        return _make_failed_answer(name, error)


def _make_failed_answer(tool: str, error: Exception) -> Answer:
    """Make an answer without causes: what a user learns from a tool that fails."""
    print(f"{tool}: {type(error).__name__}: {error}", file=sys.stderr)
    return Answer(tool, causes=(), culprits=())


def _load_answer(run: str, folder: Path) -> Iterator[Answer]:
    for path in (
        folder / run / "answer.json",
        folder / f"{run}.json",
        *sorted(folder.glob(f"*/{run}.json")),
    ):
        if path.is_file():
            yield answers.load(path)


def _keep_wrong_run(
    work: ScoredRun, rows: tuple[JudgedRun, ...], folder: Path, settings: Settings
) -> tuple[JudgedRun, ...]:
    """Keep the files of a run with a wrong answer for debugging."""
    mine = [row for row in rows if row.tool == TOOL and list_errors(row)]
    if not mine or (settings.keep is None and work.folder is None):
        return rows
    place = folder
    if work.folder is None and settings.keep is not None:
        place = settings.keep / work.name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
    return tuple(replace(row, folder=str(place)) if row in mine else row for row in rows)
