"""From a trial to a story and its truth: constructed, not measured.

The same job runs several times with the same random numbers: without its fault (`clean_step_ns`),
and with fault sizes that are searched until the fault costs the drawn share of the time in steps.
The last run is the story.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from clusterprof_lab.scenario import Trial
from clusterprof_lab.synth import simulate_outside_steps
from clusterprof_lab.synth.simulate_faults import Faults
from clusterprof_lab.synth.simulate_job import Job
from clusterprof_lab.synth.simulate_nodes import make_nodes
from clusterprof_lab.synth.simulate_plan import MS, Plan, draw_plan
from clusterprof_lab.synth.simulate_truth import TAIL_NS, build_truth, compute_step_ns
from clusterprof_lab.synth.story import Story
from clusterprof_lab.synth.wait_truth import sum_lost
from clusterprof_lab.truth import Truth

SMALL = 8
SHORT = 24
"""Ranks and steps of the job on which the size of a fault is searched for."""
_ROUNDS = 8


def simulate_trial(
    trial: Trial, ranks: int | None = None, sizes: Sequence[float] | None = None, shape: str = ""
) -> tuple[Story, Truth]:
    """Simulate a trial; return its story and its truth, the same at every call.

    `ranks` makes the job as large as asked for (of at most 20 steps). `sizes` are what each fault
    costs whom it strikes, in ns per step; None = searched for, so that they cost what the scenario
    aims at. `shape` is one of `SHAPES`. Raises PlanError when the scenario's
    `synth:` section says something unknown.
    """
    synth = dict(trial.scenario.synth or {})
    plan, faults = draw_plan(trial, ranks, shape)
    low, high = trial.scenario.lost[trial.severity]
    aim = float(np.random.default_rng([plan.seed, 7]).uniform(low, high))
    if synth.get("outside"):
        return simulate_outside_steps.simulate_outside_steps(
            trial, plan, faults, synth["outside"], aim
        )
    size = _find_sizes(trial, plan, faults, aim, shape) if sizes is None else sizes
    clean = run_job(plan, faults.set_sizes(()))
    jobs = run_job(plan, faults.set_sizes(size)) if any(size) else clean
    start = _choose_start(synth, jobs)
    end = max(player.t for job in jobs for player in job.players) + TAIL_NS
    story = Story(
        [player.rank for job in jobs for player in job.players],
        make_nodes(plan, jobs, faults, end),
        start,
        end,
        f"synth-{trial.scenario.id}",
        plan.ranks,
    )
    parameters = {
        **asdict(plan),
        "aim_ratio": aim,
        "size_ns": list(size),
        "struck": [list(fault.ranks) for fault in faults.all],
    }
    return story, build_truth(trial, jobs, faults, start, end, compute_step_ns(clean), parameters)


def run_job(plan: Plan, faults: Faults) -> list[Job]:
    """Run a job with what its faults are now set to; two where two share the nodes."""
    jobs = [Job(plan, faults)]
    if plan.layout == "two-jobs":
        jobs.append(Job(plan, faults, plan.ranks))
    for job in jobs:
        job.run(plan.startup_ns)
    return jobs


def compute_lost_ratio(jobs: Sequence[Job], of: str) -> float:
    """Return what a cause cost of the time in steps."""
    lost = whole = 0
    for job in jobs:
        for player in job.players:
            start, end = player.steps[0][0], player.steps[-1][1]
            whole += end - start
            shares = sum_lost(player.lost, start, end)
            lost += sum(ns for (cause, _), ns in shares.items() if cause == of)
    return lost / whole


def _choose_start(synth: Mapping[str, Any], jobs: Sequence[Job]) -> int:
    """Return when recording began: with the job, or in the middle of it."""
    onset = float(synth.get("record_from", 0))
    if not onset:
        return 0
    steps = jobs[0].players[0].steps
    return steps[round(onset * len(steps))][0] + 37 * MS


def _find_sizes(
    trial: Trial, plan: Plan, faults: Faults, aim: float, shape: str
) -> Sequence[float]:
    """Search for the size of each fault at which together they cost as much as is aimed at."""
    if not aim:
        return [0.0] * len(faults.all)
    by_turns = any(fault.pattern in ("turns", "wandering") for fault in faults.all)
    if plan.ranks > (2 * SMALL if by_turns else SMALL):
        plan, faults = draw_plan(trial, SMALL, shape)
    elif not by_turns and not any(fault.onset for fault in faults.all):
        # Who strikes by turns, or later, needs all its turns.
        plan = replace(plan, steps=min(plan.steps, SHORT))
    sizes, part = [0.0] * len(faults.all), aim / len(faults.all)
    for _ in faults.all:  # each changes a little what the others cost
        for i, fault in enumerate(faults.all):
            sizes[i] = 0.0
            before = compute_lost_ratio(run_job(plan, faults.set_sizes(sizes)), fault.cause)
            sizes[i] = _find_size(plan, faults, sizes, i, part + before)
    return sizes


def _find_size(plan: Plan, faults: Faults, sizes: Sequence[float], which: int, aim: float) -> float:
    """Narrow down the size of one fault by regula falsi, weakened as in the Illinois rule."""

    def over(size: float) -> float:
        now = [*sizes[:which], size, *sizes[which + 1 :]]
        return (
            compute_lost_ratio(run_job(plan, faults.set_sizes(now)), faults.all[which].cause) - aim
        )

    low, high = 0.0, aim * plan.compute_ns
    under, beyond = -aim, over(high)
    while beyond < 0 and high < 1000 * plan.compute_ns:  # far enough?
        low, high, under = high, high * 2, beyond
        beyond = over(high)
    middle = high
    for _ in range(_ROUNDS):
        middle = (low * beyond - high * under) / (beyond - under)
        off = over(middle)
        if abs(off) <= 0.03 * aim:
            break
        if off > 0:
            high, beyond, under = middle, off, under / 2
        else:
            low, under, beyond = middle, off, beyond / 2
    return middle
