"""Faults whose time lies outside the steps: a long startup, a restart, a hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from clusterprof.probe import layout
from clusterprof_lab.scenario import Trial
from clusterprof_lab.synth import simulate_truth
from clusterprof_lab.synth.simulate_faults import Faults
from clusterprof_lab.synth.simulate_job import Job
from clusterprof_lab.synth.simulate_nodes import make_nodes
from clusterprof_lab.synth.simulate_plan import MS, Plan, PlanError
from clusterprof_lab.synth.simulated_rank import HostPart, SimulatedRank
from clusterprof_lab.synth.story import Act, Mark, Story
from clusterprof_lab.truth import Injected, Lost, Place, Truth

HANG_MS = {"mild": 14_000, "medium": 25_000, "severe": 45_000}
"""A rank that has not moved for 10 s and twice as long as ever before hangs."""


def simulate_outside_steps(
    trial: Trial, plan: Plan, faults: Faults, what: str, aim: float
) -> tuple[Story, Truth]:
    """Return the story and truth of a fault outside the steps that takes `aim` of the whole run."""
    made = {"startup": _simulate_startup, "restart": _simulate_restart, "hang": _simulate_hang}.get(
        what
    )
    if made is None:
        raise PlanError(f"{trial.scenario.id}: outside: {what!r} is not known")
    plain = replace(plan, collectives="host") if what == "hang" else plan
    clean = Job(plain, faults.set_sizes(()))
    clean.run(plan.startup_ns)
    inside = sum(p.steps[-1][1] - p.steps[0][0] for p in clean.players) // plan.ranks
    jobs, more, injected, end = made(trial, plain, faults, round(inside * aim / (1 - aim)))
    story = Story(
        [player.rank for job in jobs for player in job.players],
        make_nodes(plain, jobs, faults, end),
        0,
        end,
        f"synth-{trial.scenario.id}",
        plan.ranks,
    )
    parameters: dict[str, Any] = {**asdict(plain), "outside": what, "aim_ratio": aim}
    truth = simulate_truth.build_truth(
        trial,
        jobs[:1],
        faults,
        0,
        end,
        simulate_truth.compute_step_ns([clean]),
        parameters,
        more,
        injected,
        tail=what == "startup",
    )
    return story, _add_restarted_steps(truth, jobs[1:])


Made = tuple[list[Job], list[Lost], list[Injected], int]


def _simulate_startup(trial: Trial, plan: Plan, faults: Faults, ns: int) -> Made:
    job = Job(plan, faults.set_sizes(()))
    job.run(max(ns, 3_000 * MS))
    ranks = tuple(player.number for player in job.players)
    return [job], [], [Injected("startup", ranks)], _find_end([job])


def _simulate_restart(trial: Trial, plan: Plan, faults: Faults, ns: int) -> Made:
    """All ranks die together; a launcher starts them again after a while."""
    first, cut = Job(plan, faults.set_sizes(())), plan.steps // 2
    first.run(plan.startup_ns, cut)
    died = max(player.t for player in first.players) + 20 * MS
    for player in first.players:
        player.rank.exit_ns = died
    setup = 1_000 * MS
    second = Job(plan, faults.set_sizes(()), 0, died + max(ns, 2_000 * MS) - setup, life=1)
    second.run(setup, plan.steps - cut, cut)
    more = [
        Lost("fail-restart", None, old.number, new.steps[0][0] - old.steps[-1][1])
        for old, new in zip(first.players, second.players)
    ]
    ranks = tuple(player.number for player in first.players)
    return [first, second], more, [Injected("fail-restart", ranks)], _find_end([first, second])


def _simulate_hang(trial: Trial, plan: Plan, faults: Faults, ns: int) -> Made:
    """One rank never comes to an all-reduce, where all others wait until the recording ends."""
    job, culprit = Job(plan, faults.set_sizes(())), faults.all[0].ranks[0]
    job.run(plan.startup_ns)
    end = _find_end([job]) + HANG_MS[trial.severity] * MS
    stuck = plan.steps
    for player in job.players:
        player.run_part(HostPart(plan.compute_ns, "device", "fail-hang"))
        number = next(iter(player.rank.groups))
        if player.number == culprit:
            player.rank.main.acts.append(Act(player.t, end, "lock"))
            continue
        player.rank.main.acts.append(Act(player.t, end, "peer"))
        size = round(plan.transfer_ns * 1e-9 * plan.link_bytes_per_second)
        player.rank.main.marks.append(
            Mark(player.t, end + 1, layout.COLLECTIVE, number, stuck, size, layout.GRADIENTS)
        )
    more = [
        Lost("fail-hang", culprit, player.number, end - player.steps[-1][1])
        for player in job.players
    ]
    return [job], more, [Injected("fail-hang", (culprit,))], end


def _find_end(jobs: Sequence[Job]) -> int:
    return max(player.t for job in jobs for player in job.players) + simulate_truth.TAIL_NS


def _add_restarted_steps(truth: Truth, jobs: Sequence[Job]) -> Truth:
    """Add the steps of ranks that were started again."""
    if not jobs:
        return truth
    again = {p.number: p for job in jobs for p in job.players}
    places, lost = [], list(truth.lost)
    for place in truth.places:
        player: SimulatedRank = again[place.rank]
        window = (player.steps[0][0], player.steps[-1][1])
        places.append(
            Place(
                place.rank,
                place.node,
                place.in_step_ns + window[1] - window[0],
                place.steps + len(player.steps),
            )
        )
        lost += simulate_truth.list_lost(player, *window)
    merged: dict[tuple[str, int | None, int], int] = {}
    for loss in lost:
        key = (loss.cause, loss.culprit, loss.rank)
        merged[key] = merged.get(key, 0) + loss.ns
    return replace(truth, places=tuple(places), lost=_list_lost(merged))


def _list_lost(merged: Mapping[tuple[str, int | None, int], int]) -> tuple[Lost, ...]:
    return tuple(Lost(*key, ns) for key, ns in merged.items())
