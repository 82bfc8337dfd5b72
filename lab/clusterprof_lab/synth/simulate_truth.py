"""The truth of a simulated job: lost device time, summed to the nanosecond."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof_lab.scenario import Trial
from clusterprof_lab.synth.simulate_faults import Faults
from clusterprof_lab.synth.simulate_job import Job
from clusterprof_lab.synth.simulate_plan import MS
from clusterprof_lab.synth.simulated_rank import SimulatedRank
from clusterprof_lab.synth.wait_truth import Label, add_amounts, sum_lost
from clusterprof_lab.truth import OTHER, Injected, Lost, Place, Truth

TAIL_NS = 600 * MS
"""From the end of the job to the end of the recording."""


def compute_step_ns(jobs: Sequence[Job]) -> float:
    """Return the mean time of a step."""
    players = [player for job in jobs for player in job.players]
    return sum((p.steps[-1][1] - p.steps[0][0]) / len(p.steps) for p in players) / len(players)


def build_truth(
    trial: Trial,
    jobs: Sequence[Job],
    faults: Faults,
    start: int,
    end: int,
    clean_ns: float,
    parameters: Mapping[str, Any],
    more: Sequence[Lost] = (),
    injected: Sequence[Injected] | None = None,
    tail: bool = True,
) -> Truth:
    """Return the truth of steps that lie wholly between two moments."""
    places, lost, outside = [], [], list(more)
    for job in jobs:
        for player in job.players:
            steps = [step for step in player.steps if step[0] >= start and step[1] <= end]
            first, last = steps[0][0], steps[-1][1]
            lost += list_lost(player, first, last)
            places.append(Place(player.number, player.rank.node, last - first, len(steps)))
            if player.steps[0][0] > start:
                ns = player.steps[0][0] - start
                outside.append(Lost("startup", None, player.number, ns))
            if tail and end > last:
                outside.append(Lost(OTHER, None, player.number, end - last))
    struck = _list_injected(faults, lost) if injected is None else tuple(injected)
    return Truth(
        trial.scenario.id,
        "synth",
        trial.split,
        trial.severity,
        trial.seed,
        dict(parameters),
        tuple(places),
        tuple(lost),
        struck,
        tuple(outside),
        compute_step_ns(jobs),
        clean_ns,
        {name: (0, 0.0) for name in sorted({place.node for place in places})},
    )


def compute_lost_from_work_ns(player: SimulatedRank, start: int, end: int) -> int:
    """Return a device's lost time between two moments from its work alone, whatever the causes.

    That is all but computing, less what slowed kernels took beyond their due.
    """
    busy = 0
    for operation in player.rank.work:
        if operation.what == "compute":
            busy += max(0, min(operation.end_ns, end) - max(operation.start_ns, start))
    slowed = sum(max(0, min(late, end) - max(early, start)) for early, late in player.slowed)
    return end - start - busy + slowed


def list_lost(player: SimulatedRank, start: int, end: int) -> list[Lost]:
    """Return why a device lost time between two moments; all of it, to the nanosecond."""
    shares = sum_lost(player.lost, start, end)
    assert sum(shares.values()) == compute_lost_from_work_ns(player, start, end)
    order = sorted(shares.items(), key=lambda share: (-share[1], share[0][0], share[0][1] or 0))
    return [Lost(cause, culprit, player.number, ns) for (cause, culprit), ns in order]


def _list_injected(faults: Faults, lost: Sequence[Lost]) -> tuple[Injected, ...]:
    """Return the faults that struck, largest first, each with those at fault, worst first."""
    costs = []
    for fault in faults.all:
        if fault.kind == "none" or fault.size <= 0:
            continue
        by: dict[Label, int] = {}
        for row in lost:
            if row.cause == fault.cause and (row.culprit in fault.culprits or not fault.culprits):
                add_amounts(by, {(row.cause, row.culprit): row.ns})
        order = sorted(fault.culprits, key=lambda rank: -by.get((fault.cause, rank), 0))
        costs.append((sum(by.values()), Injected(fault.cause, tuple(order))))
    costs.sort(key=lambda cost: -cost[0])
    return tuple(injected for _, injected in costs)
