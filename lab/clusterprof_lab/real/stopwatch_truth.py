"""From stopwatches to `truth.json`: lost time under the causes of the scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof_lab.families import FAMILY_OF
from clusterprof_lab.real import device_ledger
from clusterprof_lab.real.stopwatches import Incarnation, find_last_incarnation
from clusterprof_lab.scenario import ExpectedVerdict, Trial
from clusterprof_lab.truth import OTHER, Injected, Lost, Place, Truth

# Part -> the leaves it may be, the first when the scenario names none of them.
_MAY_BE = {
    device_ledger.DECODE: ("cpu-preprocess", "cpu-loader-config"),
    device_ledger.HAND_OVER: (OTHER,),
    device_ledger.CONTENTION: ("cpu-contention", "cpu-throttled"),
    device_ledger.BLOCKED: (OTHER, "cpu-memory"),
    device_ledger.LOOP: (OTHER, "launch-bound", "h2d-sync"),
    device_ledger.WORK: ("sync-imbalance", "sync-slow-compute", "sync-bubble"),
}
_FAMILIES = {
    device_ledger.STORAGE: ("storage-local", "storage"),
    device_ledger.TRANSFER: ("net-transfer", "network"),
}


BUBBLE = "sync-bubble"


def find_cause(part: str, wanted: ExpectedVerdict) -> str:
    """Return the cause that a part of lost time is in a scenario."""
    if part == device_ledger.WORK and not wanted.family:
        return OTHER  # work that only varies, of a job with nothing wrong
    named = (*wanted.leaves, *(leaf for _, leaf in wanted.also))
    if part in _MAY_BE:
        return next((leaf for leaf in named if leaf in _MAY_BE[part]), _MAY_BE[part][0])
    if part in _FAMILIES:
        usual, family = _FAMILIES[part]
        return next((leaf for leaf in named if FAMILY_OF[leaf] == family), usual)
    return part


def list_lost(
    lives: Sequence[Incarnation], wanted: ExpectedVerdict, stages: Sequence[int] | None = None
) -> tuple[Lost, ...]:
    """Return the lost time of the ranks of one life, exact to the nanosecond.

    `stages`: of a pipeline, those at fault. What others wait for the work of any other stage is the
    order of the pipeline, without a culprit.
    """
    by_rank = {life.rank: life for life in lives}
    sums: dict[tuple[str, int | None, int], int] = {}
    for rank, losses in zip(sorted(by_rank), device_ledger.sum_losses(by_rank)):
        for (part, culprit), ns in losses.items():
            who = {device_ledger.OWN: rank, device_ledger.NOBODY: None}.get(culprit, culprit)
            cause = find_cause(part, wanted)
            if part == device_ledger.WORK and stages is not None and who not in stages:
                cause = BUBBLE
            key = (cause, None if cause in (OTHER, BUBBLE) else who, rank)
            sums[key] = sums.get(key, 0) + ns
    return tuple(Lost(*key, ns) for key, ns in sorted(sums.items(), key=str) if ns)


def list_outside_steps(
    lives: Sequence[Incarnation], culprits: Sequence[int], hung_ns: int
) -> tuple[Lost, ...]:
    """Return what passed before, between and after steps; `hung_ns`: end of a hung job, else 0."""
    rows = []
    for life in lives:
        if life.steps:
            rows.append(Lost("startup", life.rank, life.rank, life.began_ns - life.started_ns))
        if hung_ns and life.steps:
            rows.append(Lost("fail-hang", culprits[0], life.rank, hung_ns - life.ended_ns))
        after = [
            later for later in lives if later.rank == life.rank and later.number == life.number + 1
        ]
        if after and life.steps:
            gap_ns = after[0].started_ns - life.ended_ns
            rows.append(Lost("fail-restart", culprits[0], life.rank, gap_ns))
    return tuple(rows)


def list_injected(
    wanted: ExpectedVerdict, culprits: Sequence[int], also: Sequence[int]
) -> tuple[Injected, ...]:
    """Return what a right answer names; `also`: the culprits of further faults, one each."""
    if not wanted.family:
        return ()
    named = () if wanted.culprit == "nobody" else tuple(culprits)
    further = (Injected(leaf, (rank,)) for (_, leaf), rank in zip(wanted.also, also))
    return (Injected(wanted.leaves[0], named), *further)


def build_truth(
    trial: Trial,
    lives: Sequence[Incarnation],
    culprits: Sequence[int],
    parameters: Mapping[str, Any],
    clean_step_ns: float | None,
    disturbed_ratio: float,
    hung_ns: int = 0,
) -> Truth:
    """Put the truth of one run together."""
    wanted = trial.scenario.wanted
    trained = [life for life in lives if life.steps]
    lost: dict[tuple[str, int | None, int], int] = {}
    script = (trial.scenario.real or {}).get("script", {})
    stages = culprits if script.get("micro-batches") else None
    for number in range(find_last_incarnation(lives) + 1):
        for lost_row in list_lost(
            [life for life in trained if life.number == number], wanted, stages
        ):
            key = (lost_row.cause, lost_row.culprit, lost_row.rank)
            lost[key] = lost.get(key, 0) + lost_row.ns
    places: dict[int, Place] = {}
    for life in trained:
        before = places.get(life.rank, Place(life.rank, life.host, 0, 0))
        in_step_ns = before.in_step_ns + life.ended_ns - life.began_ns
        places[life.rank] = Place(life.rank, life.host, in_step_ns, before.steps + life.steps)
    steps = sum(place.steps for place in places.values())
    both = wanted.also and len(culprits) > 1
    first, also = (culprits[:1], culprits[1:]) if both else (culprits, ())
    return Truth(
        scenario=trial.scenario.id,
        testbed="real",
        split=trial.split,
        severity=trial.severity,
        seed=trial.seed,
        parameters=parameters,
        places=tuple(places[rank] for rank in sorted(places)),
        lost=tuple(Lost(*key, ns) for key, ns in lost.items()),
        injected=list_injected(wanted, first, also),
        outside=list_outside_steps(lives, culprits or (0,), hung_ns),
        step_ns=sum(place.in_step_ns for place in places.values()) / steps if steps else None,
        clean_step_ns=clean_step_ns,
        disturbed_ratio=round(disturbed_ratio, 4),
    )
