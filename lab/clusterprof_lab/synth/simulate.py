"""From a trial to what happened and the truth of it: nothing is measured, all is constructed.

The same job runs with the same random numbers several times: without its fault (`clean_step_ns`),
and with sizes of the fault between which it is searched for the one that costs the drawn share of
the time in steps. The last run is the story.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from clusterprof_lab.scenario import Trial
from clusterprof_lab.synth import simulate_outside
from clusterprof_lab.synth.simulate_blame import clipped
from clusterprof_lab.synth.simulate_faults import Faults
from clusterprof_lab.synth.simulate_job import Job
from clusterprof_lab.synth.simulate_nodes import nodes
from clusterprof_lab.synth.simulate_plan import MS, Plan, draw
from clusterprof_lab.synth.simulate_truth import TAIL_NS, step_ns, truth_of
from clusterprof_lab.synth.story import Story
from clusterprof_lab.truth import Truth

SMALL = 16
"""Ranks of the job on which the size of a fault is searched for."""
_ROUNDS = 12


def simulate(trial: Trial, ranks: int | None = None) -> tuple[Story, Truth]:
    """Return what happened in a trial, and the truth; the same at every call.

    `ranks` makes the job as large as asked for (of at most 20 steps). Raises PlanError when the
    scenario's `synth:` section says something unknown.
    """
    synth = dict(trial.scenario.synth or {})
    plan, faults = draw(trial, ranks)
    low, high = trial.scenario.lost[trial.severity]
    aim = float(np.random.default_rng([plan.seed, 7]).uniform(low, high))
    if synth.get("outside"):
        return simulate_outside.simulate(trial, plan, synth["outside"], aim)
    size = _sized(trial, plan, faults, aim)
    clean = run(plan, faults.scaled(0))
    jobs = run(plan, faults.scaled(size)) if size else clean
    start = _start(synth, jobs)
    end = max(player.t for job in jobs for player in job.players) + TAIL_NS
    story = Story(
        [player.rank for job in jobs for player in job.players],
        nodes(plan, jobs, faults, end), start, end, f"synth-{trial.scenario.id}", plan.ranks,
    )  # fmt: skip
    parameters = {**asdict(plan), "aim_ratio": aim, "size_ns": size,
                  "struck": [list(fault.ranks) for fault in faults.all]}  # fmt: skip
    return story, truth_of(trial, jobs, faults, start, end, step_ns(clean), parameters)


def run(plan: Plan, faults: Faults) -> list[Job]:
    """Run a job with what its faults are now set to; two where two share the nodes."""
    jobs = [Job(plan, faults)]
    if plan.layout == "two-jobs":
        jobs.append(Job(plan, faults, plan.ranks))
    for job in jobs:
        job.run(plan.startup_ns)
    return jobs


def lost_ratio(jobs: Sequence[Job], causes: set[str]) -> float:
    """Return what causes cost of the time in steps."""
    lost = whole = 0
    for job in jobs:
        for player in job.players:
            start, end = player.steps[0][0], player.steps[-1][1]
            whole += end - start
            shares = clipped(player.lost, start, end)
            lost += sum(ns for (cause, _), ns in shares.items() if cause in causes)
    return lost / whole


def _start(synth: Mapping[str, Any], jobs: Sequence[Job]) -> int:
    """Return when recording began: with the job, or in the middle of it."""
    onset = float(synth.get("record_from", 0))
    if not onset:
        return 0
    steps = jobs[0].players[0].steps
    return steps[round(onset * len(steps))][0] + 37 * MS


def _sized(trial: Trial, plan: Plan, faults: Faults, aim: float) -> float:
    """Search for the size of the fault that costs as much as is aimed at."""
    if plan.ranks > SMALL:
        plan, faults = draw(trial, SMALL if plan.layout != "two-jobs" else None)
    if not aim:
        return 0.0
    causes = {fault.cause for fault in faults.all}
    before = lost_ratio(run(plan, faults.scaled(0)), causes)
    low, high = 0.0, float(plan.compute_ns)
    aim += before
    for _ in range(8):  # far enough?
        if lost_ratio(run(plan, faults.scaled(high)), causes) >= aim:
            break
        low, high = high, high * 2
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        ratio = lost_ratio(run(plan, faults.scaled(middle)), causes)
        if math.isclose(ratio, aim, rel_tol=0.02):
            return middle
        low, high = (middle, high) if ratio < aim else (low, middle)
    return (low + high) / 2
