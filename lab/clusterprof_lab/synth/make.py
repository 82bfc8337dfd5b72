"""One trial as files: its recording, and its truth beside it."""

from __future__ import annotations

from pathlib import Path

from clusterprof_lab import truth
from clusterprof_lab.scenario import Trial
from clusterprof_lab.synth import record
from clusterprof_lab.synth.simulate import simulate


def make(trial: Trial, folder: Path, ranks: int | None = None) -> truth.Truth:
    """Simulate a trial and write `recording/` and `truth.json` into a new folder.

    Raises FileExistsError when the folder holds a run already, and PlanError for a scenario that
    the generator cannot make.
    """
    story, told = simulate(trial, ranks)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recording").mkdir()
    record.record(story, folder / "recording", trial.draw())
    truth.write(told, folder)
    return told
