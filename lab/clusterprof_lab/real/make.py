"""Make one trial as a real job where the scorer expects it: its recording and its truth."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from clusterprof_lab.real import trial as trials
from clusterprof_lab.scenario import Trial
from clusterprof_lab.truth import Truth, read_truth


def make(trial: Trial, folder: Path) -> Truth:
    """Run a trial; leave `recording/` and `truth.json` in its folder, which bears its name.

    RuntimeError says why it cannot be run here, or how it failed.
    """
    reason = trials.why_not_here(trial.scenario)
    if reason:
        raise RuntimeError(reason)
    clean = folder.parent / "clean"
    if not clean.exists():
        clean.symlink_to(_open_shared(), target_is_directory=True)
    trials.run_trial(trial, folder.parent)
    return read_truth(folder)


@cache
def _open_shared() -> Path:
    """What trials have in common: clean jobs per layout, a file to read; gone with the process."""
    path = Path(tempfile.mkdtemp(prefix="clusterprof-lab-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path
