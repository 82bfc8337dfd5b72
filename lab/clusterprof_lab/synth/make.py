"""Write one trial as files: its recording and its truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clusterprof_lab import truth
from clusterprof_lab.scenario import Trial
from clusterprof_lab.synth.record import RecordingQuality, draw_clocks, write_story
from clusterprof_lab.synth.simulate import simulate_trial
from clusterprof_lab.synth.story import Rank, Story

JITTER_NS = 300_000
LOST_RATIOS = (0.0, 0.0, 0.0, 0.1)
"""Samples that are not taken: in one trial of four a tenth of them."""


def make_sharded(trial: Trial, folder: Path, ranks: int | None = None) -> truth.Truth:
    """Make the same fault in a job of the second shape: see `simulate_sharded`."""
    return make_trial(trial, folder, ranks, "sharded")


def make_trial(
    trial: Trial, folder: Path, ranks: int | None = None, shape: str = ""
) -> truth.Truth:
    """Simulate a trial and write `recording/`, `truth.json` and the times of the devices' work.

    The folder is new. Raises FileExistsError when it holds a run already, and PlanError for a
    scenario that the generator cannot make.
    """
    story, run_truth = simulate_trial(trial, ranks, shape=shape)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recording").mkdir()
    random = np.random.default_rng([int(trial.draw().integers(1 << 32)), 1])
    off = draw_clocks(random, story.nodes)
    lost = float(random.choice(LOST_RATIOS))
    seen = RecordingQuality(clocks=off, jitter_ns=JITTER_NS, lost_samples_ratio=lost)
    jobs = _split_jobs(story)
    resident: dict[str, NDArray[np.int64]] = {}
    for job in jobs:
        others = [other_job for other_job in jobs if other_job is not job]
        resident |= write_story(job, folder / "recording", random, seen, others)
    np.savez_compressed(folder / truth.WORK_FILE, **resident)  # type: ignore[arg-type]
    run_truth = replace(
        run_truth,
        testbed=shape or run_truth.testbed,
        clocks=off,
        parameters={**run_truth.parameters, "lost_samples_ratio": lost},
    )
    truth.write_truth(run_truth, folder)
    return run_truth


def _split_jobs(story: Story) -> list[Story]:
    """Jobs have a rendezvous each, and a recorder per node each."""
    ranks_by_port: dict[str, list[Rank]] = {}
    for rank in story.ranks:
        ranks_by_port.setdefault(rank.variables.get("MASTER_PORT", ""), []).append(rank)
    if len(ranks_by_port) == 1:
        return [story]
    return [
        replace(story, ranks=ranks, job=f"{story.job}-{port}")
        for port, ranks in ranks_by_port.items()
    ]
