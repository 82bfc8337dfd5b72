"""The random draws of one trial: the job's layout and timing, and the culprits of the fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from clusterprof.probe import layout
from clusterprof_lab.scenario import Scenario, Trial
from clusterprof_lab.synth.simulate_faults import Fault, Faults

MS = 1_000_000
_LAYOUTS = ((1, 4), (2, 2), (2, 4), (4, 2), (3, 4), (4, 4))
_JOB_KEYS = {
    "layout",
    "collectives",
    "workers",
    "prefetch",
    "jitter",
    "chunks",
    "stages",
    "nodes",
    "per_node",
    "steps",
    "depth",
    "load_ratio",
    "transfer_ratio",
    "read",
    "epochs",
}
_FAULT_KEYS = {
    "fault",
    "cause",
    "who",
    "acts",
    "where",
    "mark",
    "every",
    "times",
    "synchronise",
    "onset",
    "pattern",
    "main_ratio",
    "throttle_bits",
    "extra",
    "also",
    "phase",
    "outside",
    "record_from",
}
MARKS = {
    "": 0,
    "checkpoint": 5,
    "gc": 6,
    "eval": 12,
    "compile": 13,
    "warm-up": layout.HOST_WORK,
    "memory-free": layout.HOST_WORK,
}


class PlanError(ValueError):
    """A `synth:` section says something the generator does not know."""


@dataclass(frozen=True)
class Plan:
    """A job: everything but its fault."""

    layout: str
    """data-parallel, pipeline, tensor, two-jobs, sharded."""
    nodes: int
    per_node: int
    steps: int
    compute_ns: int
    """Of one rank per step."""
    chunks: int
    """Kernels the host launches per pass, forward and backward."""
    launch_ns: int
    """Of the host, for one."""
    depth: int
    """Of the device's queue."""
    collectives: str
    """host or device."""
    transfer_ns: int
    link_bytes_per_second: int
    copy_ns: int
    workers: int
    prefetch: int
    read_ns: int
    decode_ns: int
    read: Mapping[str, Any]
    """What a loader does as it reads without a fault."""
    jitter: float
    stages: int = 1
    """Of a pipeline, or ranks of a tensor parallel group."""
    startup_ns: int = 1_000 * MS
    epochs: int = 1
    """With more than one, each has new workers, and validation comes between them."""
    seed: int = 0
    """Of all that varies from step to step without the fault."""

    @property
    def ranks(self) -> int:
        """How many ranks of one job."""
        return self.nodes * self.per_node

    def node_of(self, rank: int) -> int:
        """Return the index of a rank's node; ranks of a second job share the nodes."""
        return rank % self.ranks // self.per_node


SHAPES: Mapping[str, Mapping[str, Any]] = {"": {}, "sharded": {"layout": "sharded", "epochs": 3}}
"""Shape of a job -> what it sets of a scenario's `synth:` section."""


def draw_plan(trial: Trial, ranks: int | None = None, shape: str = "") -> tuple[Plan, Faults]:
    """Draw the job and the fault of a trial; `ranks` overrides how many there are.

    Raises PlanError for what the generator does not know.
    """
    synth = {**(trial.scenario.synth or {}), **SHAPES[shape]}
    wrong = set(synth) - _JOB_KEYS - _FAULT_KEYS
    if wrong:
        raise PlanError(f"{trial.scenario.id}: synth: {', '.join(sorted(wrong))}: not known")
    random = trial.draw()
    alone = trial.scenario.group != "network" and trial.scenario.wanted.culprit != "node"
    plan = _draw_job(random, synth, _LAYOUTS if alone else _LAYOUTS[1:])
    if ranks is not None:
        plan = _resize_plan(plan, ranks)
    specs = [synth, *({**spec} for spec in synth.get("also", ()))]
    made: list[Fault] = []
    for spec in specs:
        made.append(_draw_fault(random, plan, trial.scenario, spec, made))
    return plan, Faults(tuple(made))


def _draw_job(
    random: np.random.Generator, synth: Mapping[str, Any], layouts: Sequence[tuple[int, int]]
) -> Plan:
    layout = synth.get("layout", "data-parallel")
    nodes, per_node = layouts[random.integers(len(layouts))]
    steps = int(random.integers(30, 61))
    compute = int(random.integers(80 * MS, 220 * MS))
    collectives = ("host", "device")[random.integers(2)]
    workers, prefetch = int(random.integers(1, 5)), int(random.integers(2, 4))
    load_ratio, transfer_ratio = float(random.uniform(0.04, 0.1)), float(random.uniform(0.01, 0.04))
    stages, jitter = int(random.choice([2, 4])), float(random.uniform(0.01, 0.03))
    seed = int(random.integers(1 << 31))
    if layout == "pipeline" or layout == "tensor":
        nodes, per_node = ((2, 2), (2, 4), (4, 4))[random.integers(3)]
    else:
        stages = 1
    given = {key: synth[key] for key in synth if key in {field.name for field in fields(Plan)}}
    load = round(compute * float(synth.get("load_ratio", load_ratio)))
    plan = Plan(
        layout,
        nodes,
        per_node,
        steps,
        compute,
        chunks=4,
        launch_ns=300_000,
        depth=12,
        collectives=collectives,
        transfer_ns=round(compute * float(synth.get("transfer_ratio", transfer_ratio))),
        link_bytes_per_second=1_250_000_000,
        copy_ns=int(random.integers(300_000, 900_000)),
        workers=workers,
        prefetch=prefetch,
        read_ns=load // 3,
        decode_ns=load - load // 3,
        read={
            "doing": "block-io",
            "resource": "vdb",
            "mib_per_second": 800,
            "operations_per_second": 2000,
        },
        jitter=jitter,
        stages=stages,
        seed=seed,
    )
    plan = replace(plan, **given)
    return replace(plan, stages=min(plan.stages, plan.ranks))


def _resize_plan(plan: Plan, ranks: int) -> Plan:
    per_node = next((n for n in (8, 4, 2) if ranks % n == 0 and ranks > n), 1)
    return replace(plan, nodes=ranks // per_node, per_node=per_node, steps=min(plan.steps, 20))


def _draw_fault(
    random: np.random.Generator,
    plan: Plan,
    scenario: Scenario,
    spec: Mapping[str, Any],
    before: list[Fault],
) -> Fault:
    everyone = tuple(range(plan.ranks * (2 if plan.layout == "two-jobs" else 1)))
    noise = random.uniform(0.9, 1.1, (len(everyone), plan.steps))
    if spec.get("pattern") == "skew":
        noise = random.gamma(1.5, 1 / 1.5, (len(everyone), plan.steps))
    taken = {rank for fault in before for rank in fault.ranks}
    ranks = _draw_culprits(random, plan, spec.get("who", "everybody"), everyone, taken)
    cause = spec.get("cause") or (scenario.wanted.leaves or ("",))[0]
    kind = spec.get("fault", "none")
    culprits = () if kind == "transfer" or spec.get("fault") == "none" else ranks
    return Fault(
        kind,
        cause,
        ranks,
        culprits,
        acts=spec.get("acts", ({"doing": "user"},)),
        where=spec.get("where", "forward"),
        mark=MARKS[spec.get("mark", "")],
        every=int(spec.get("every", 1)),
        times=int(spec.get("times", 1)),
        synchronise=bool(spec.get("synchronise", False)),
        onset=round(float(spec.get("onset", 0)) * plan.steps),
        pattern=spec.get("pattern", "steady"),
        phase=int(spec.get("phase", 0)),
        main_ratio=float(spec.get("main_ratio", 0)),
        throttle_bits=int(spec.get("throttle_bits", 0)),
        noise=noise,
        extra=str(spec.get("extra", "")),
    )


def _draw_culprits(
    random: np.random.Generator, plan: Plan, who: str, everyone: tuple[int, ...], taken: set[int]
) -> tuple[int, ...]:
    """Draw the culprits of a fault; always draws once, so that plans stay comparable."""
    free = [rank for rank in everyone if rank not in taken]
    struck = free[int(random.integers(len(free)))]
    if who == "everybody":
        return everyone
    if who == "wandering":
        return tuple(int(rank) for rank in random.permutation(everyone))
    if who == "node":
        return tuple(rank for rank in everyone if plan.node_of(rank) == plan.node_of(struck))
    if who == "first-stage":
        struck = struck - struck % plan.stages
        return (struck,)
    if who == "last-stage":
        return tuple(r for r in everyone if r % plan.stages == plan.stages - 1)
    if who == "rank":
        return (struck,)
    raise PlanError(f"who: {who!r} is not known")
