"""What a simulated cluster is: its size, its density, its process groups and its faults.

Densities (spans and operations of a rank a second, without faults). `data-parallel` is the planned
density of a recording, 200 spans a second; the other two are those of large-model training, where
steps are longer and operations more frequent.

    topology        step    operations of a rank in a step                          a second
    data-parallel   0.25 s  3 gradient buckets over all ranks, 1 in the node        16
    3d              2.5 s   8 micro-batches: 2 to 4 messages between 4 stages,      20 to 26
                            4 tensor all-reduces each; gradients, their norm
    moe             1.0 s   8 layers: 4 all-to-alls each; gradients of experts,     35
                            2 gradient buckets over all ranks

Every rank of the first stage has a data loader with workers of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from clusterprof.probe import layout

MS = 1_000_000
SECOND_NS = 1_000 * MS
LINK_BYTES_PER_SECOND = 50_000_000_000
"""Of each node's RDMA port: 400 Gb/s."""
HAND_OVER_NS = 200_000
"""Of a batch that is ready."""
Topology = Literal["data-parallel", "3d", "moe"]
Scope = Literal["world", "inner", "outer", "pair"]
"""Members of an operation: all ranks; the inner group (node, tensor or expert parallel); the outer
group (data or expert-data parallel); two ranks of neighboring stages."""
FaultKind = Literal["straggler", "slow-node", "slow-storage", "late-loader", "slow-link"]
CAUSES: Mapping[str, tuple[str, ...]] = {
    "straggler": ("sync-imbalance", "sync-slow-compute"),
    "slow-node": ("sync-imbalance", "sync-slow-compute"),
    "slow-storage": ("storage-local",),
    "late-loader": ("cpu-preprocess",),
    "slow-link": ("net-link",),
}
"""Fault -> causes that name it rightly, the best first."""
OF_NODES = ("slow-node", "slow-storage", "slow-link")
OF_LOADERS = ("slow-storage", "late-loader")


class ClusterPlanError(ValueError):
    """A cluster cannot be simulated with these options."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One injected fault: what, where, how much and when."""

    kind: FaultKind
    place: int = 0
    """Its rank, or its node for the kinds in `OF_NODES`."""
    share: float = 0.2
    """What it adds to a step, of the step's time without it."""
    begin: float = 0.0
    """Part of the run after which it is active."""
    end: float = 1.0
    every: int = 0
    """With `active` steps of every so many it is intermittent; 0 = active in all."""
    active: int = 1

    def is_active(self, step: int, steps: int) -> bool:
        """Return whether it strikes in a step of a run of so many."""
        inside = self.begin * steps <= step < self.end * steps
        return inside and (not self.every or step % self.every < self.active)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a step, with the work before it."""

    stages: tuple[int, ...]
    """Stages that take part; of a message the sender is first."""
    scope: Scope
    code: int
    """Operation in `clusterprof.probe.layout`."""
    work: float
    """Work before it, as share of `ClusterPlan.compute_ns`."""
    work_kind: int
    """Kind of the spans of that work; 0 = no span."""
    due_ns: int
    """Time that its data are in transfer."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class ClusterPlan:
    """A cluster and its job; picklable, and all that a simulation depends on."""

    topology: Topology = "data-parallel"
    nodes: int = 2
    per_node: int = 8
    seconds: int = 60
    step_ns: int = 250 * MS
    """Time of a step without faults, about."""
    stages: int = 1
    """Pipeline stages."""
    inner: int = 8
    """Ranks of an inner group, consecutive: of the node, tensor or expert parallel."""
    micro_batches: int = 1
    layers: int = 1
    buckets: int = 3
    """Gradient all-reduces over all ranks (data parallel and MoE)."""
    modules: int = 20
    """Spans that the work before an operation consists of."""
    workers: int = 2
    prefetch: int = 2
    jitter: float = 0.01
    """Standard deviation of the work before an operation."""
    barrier: bool = True
    """Operations over all ranks, where a topology can do without: 3d and moe."""
    threads: bool = True
    """Write the table of threads: a row per main thread and worker ten times a second."""
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    operations: tuple[Operation, ...] = field(default=(), repr=False)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    @property
    def outer(self) -> int:
        """Number of inner groups of a stage."""
        return self.ranks // (self.stages * self.inner)

    @property
    def compute_ns(self) -> int:
        """Work of a rank in a step, ns: what bubbles, transfers and the loader leave."""
        waves = (self.micro_batches + self.stages - 1) / self.micro_batches
        due = sum(op.due_ns for op in self.operations if 0 in op.stages)
        return round((self.step_ns * 0.96 - HAND_OVER_NS - due) / waves)

    @property
    def read_ns(self) -> int:
        """Reading of a batch by a worker."""
        return round(self.step_ns * self.workers * 0.2)

    @property
    def decode_ns(self) -> int:
        """Decoding of a batch by a worker."""
        return round(self.step_ns * self.workers * 0.2)

    @property
    def startup_ns(self) -> int:
        """When the first step begins: the first batches are there by then."""
        return -(-(self.read_ns + self.decode_ns) * 5 // (4 * SECOND_NS)) * SECOND_NS

    def list_stage_operations(self, stage: int) -> list[Operation]:
        """List what a rank of a stage takes part in during a step, in order."""
        return [op for op in self.operations if stage in op.stages]

    def find_fault_ranks(self, fault: Fault) -> range:
        """Find the ranks that a fault strikes."""
        if fault.kind in OF_NODES:
            return range(fault.place * self.per_node, (fault.place + 1) * self.per_node)
        return range(fault.place, fault.place + 1)


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "data-parallel": {},
    "3d": {
        "step_ns": 2_500 * MS,
        "stages": 4,
        "micro_batches": 8,
        "layers": 2,
        "buckets": 1,
        "modules": 1,
    },
    "moe": {"step_ns": 1_000 * MS, "inner": 32, "layers": 8, "buckets": 2, "modules": 2},
}
"""Topology -> density and groups, see above."""


def make_plan(topology: str, nodes: int, per_node: int = 8, **given: Any) -> ClusterPlan:
    """Make the plan of a cluster; what is not given has the topology's density.

    Raises: ClusterPlanError for sizes that do not divide, and faults that strike nobody.
    """
    if topology not in get_args(Topology):
        raise ClusterPlanError(f"topology {topology!r} is none of {get_args(Topology)}")
    fields = {**DEFAULTS[topology], **{k: v for k, v in given.items() if v is not None}}
    inner = fields.pop("inner", per_node)
    ranks = nodes * per_node
    if topology == "moe" and "inner" not in given and ranks % inner:
        inner = per_node
    plan = ClusterPlan(topology, nodes, per_node, inner=inner, **fields)  # type: ignore[arg-type]
    if ranks % (plan.stages * plan.inner) or (plan.stages > 1 and nodes % plan.stages):
        raise ClusterPlanError(
            f"{ranks} ranks on {nodes} nodes are no {plan.stages} stages of groups of {plan.inner}"
        )
    if plan.inner % per_node and per_node % plan.inner:
        raise ClusterPlanError(f"groups of {plan.inner} do not fit nodes of {per_node}")
    if topology == "data-parallel" and not plan.barrier:
        raise ClusterPlanError("data-parallel ranks meet in operations over all ranks")
    for fault in plan.faults:
        _check_fault(plan, fault)
    values = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    return ClusterPlan(**{**values, "operations": _list_operations(plan)})


def restore_plan(parameters: Mapping[str, Any]) -> ClusterPlan:
    """Make the plan again from the parameters that a truth keeps."""
    fields = dict(parameters)
    topology, nodes, per_node = (fields.pop(n) for n in ("topology", "nodes", "per_node"))
    fields["faults"] = tuple(Fault(**fault) for fault in fields["faults"])
    return make_plan(topology, nodes, per_node, **fields)


def _check_fault(plan: ClusterPlan, fault: Fault) -> None:
    ranks = plan.find_fault_ranks(fault)
    if fault.kind not in CAUSES or ranks.start < 0 or ranks.stop > plan.ranks:
        raise ClusterPlanError(f"{fault}: no such kind or place")
    if fault.kind in OF_LOADERS and ranks.stop > plan.ranks // plan.stages:
        raise ClusterPlanError(f"{fault}: only ranks of the first stage have loaders")


def parse_fault(text: str) -> Fault:
    """Parse KIND:PLACE[,share=X][,begin=X][,end=X][,every=N][,active=N].

    Raises: ClusterPlanError for anything else.
    """
    head, *options = text.split(",")
    kind, _, place = head.partition(":")
    types = {"share": float, "begin": float, "end": float, "every": int, "active": int}
    try:
        values = {k: types[k](v) for k, _, v in (option.partition("=") for option in options)}
        return Fault(kind, int(place or 0), **values)  # type: ignore[arg-type]
    except (KeyError, ValueError) as error:
        raise ClusterPlanError(f"fault {text!r}: {error}") from error


def _list_operations(plan: ClusterPlan) -> tuple[Operation, ...]:
    if plan.topology == "data-parallel":
        return tuple(_list_data_parallel(plan))
    listed = _list_pipeline(plan) if plan.topology == "3d" else _list_moe(plan)
    return tuple(op for op in listed if plan.barrier or op.scope != "world")


def _make_operation(
    plan: ClusterPlan,
    stages: Sequence[int],
    scope: Scope,
    code: int,
    share: float,
    work: float = 0.0,
    kind: int = 0,
) -> Operation:
    """Make an operation whose transfer takes a share of a step.

    The RDMA port of a node is shared by all groups that cross it; a ring sends its data twice.
    """
    due = round(plan.step_ns * share)
    crosses = scope != "inner" or plan.inner > plan.per_node
    rate = LINK_BYTES_PER_SECOND if crosses else 8 * LINK_BYTES_PER_SECOND
    lanes = plan.per_node if scope in ("outer", "pair") else 1
    size = round(due * 1e-9 * rate / lanes / (1 if scope == "pair" else 2))
    return Operation(tuple(stages), scope, code, work, kind, due, size)


def _list_data_parallel(plan: ClusterPlan) -> list[Operation]:
    inner = _make_operation(plan, (0,), "inner", layout.ALL_REDUCE, 0.004, 0.35, layout.FORWARD)
    first = [(0.35, layout.BACKWARD), *[(0.25 / max(1, plan.buckets - 1), 0)] * (plan.buckets - 1)]
    return [
        inner,
        *(
            _make_operation(plan, (0,), "world", layout.ALL_REDUCE, 0.06 / plan.buckets, work, kind)
            for work, kind in first
        ),
    ]


def _list_moe(plan: ClusterPlan) -> list[Operation]:
    operations = []
    for kind, work in ((layout.FORWARD, 0.3), (layout.BACKWARD, 0.6)):
        for _ in range(2 * plan.layers):
            work_before = work / (2 * plan.layers)
            operations.append(
                _make_operation(
                    plan,
                    (0,),
                    "inner",
                    layout.ALL_TO_ALL,
                    0.08 / 4 / plan.layers,
                    work_before,
                    kind,
                )
            )
    operations.append(_make_operation(plan, (0,), "outer", layout.ALL_REDUCE, 0.02, 0.02))
    for _ in range(plan.buckets):
        operations.append(
            _make_operation(
                plan, (0,), "world", layout.ALL_REDUCE, 0.04 / plan.buckets, 0.05 / plan.buckets
            )
        )
    return operations


def _list_pipeline(plan: ClusterPlan) -> list[Operation]:
    """List all micro-batches forward through the stages, then backward (GPipe)."""
    operations, last = [], plan.stages - 1
    for kind, whole in ((layout.FORWARD, 0.32), (layout.BACKWARD, 0.64)):
        down = kind == layout.FORWARD
        order = range(plan.stages) if down else range(last, -1, -1)
        work = whole / plan.micro_batches / plan.layers
        for _ in range(plan.micro_batches):
            for stage in order:
                operations += [
                    _make_operation(plan, (stage,), "inner", layout.ALL_REDUCE, 0.0004, work, kind)
                    for _ in range(plan.layers)
                ]
                if stage != (last if down else 0):
                    pair = (stage, stage + (1 if down else -1))
                    operations.append(_make_operation(plan, pair, "pair", layout.SEND, 0.0005))
    stages = range(plan.stages)
    operations.append(_make_operation(plan, stages, "outer", layout.REDUCE_SCATTER, 0.02, 0.01))
    operations.append(_make_operation(plan, stages, "world", layout.ALL_REDUCE, 0.0002))
    return operations
