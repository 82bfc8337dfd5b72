"""Faults of the generator: how a scenario's `synth:` section changes ranks, batches and links.

    fault    effect
    loader   every batch takes longer to make (in a worker, or in the main thread without workers)
    main     the main thread sleeps or computes at a place of the step (`where`)
    compute  kernels take longer
    copy     copies to the device take longer
    launch   every kernel takes the host longer to launch; the kernels are tiny
    transfer data of collectives take longer on their way
    none     nothing

`size` sets the severity: ns per stroke.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clusterprof_lab.synth.simulated_rank import ExtraKernelTime, HostPart
from clusterprof_lab.synth.wait_truth import Label, add_amounts

KINDS = ("loader", "main", "compute", "copy", "launch", "transfer", "none")
STRETCH = 6
"""Steps for which one rank is struck before it is another's turn."""
_PER_SECOND = 1_000_000_000


@dataclass
class Fault:
    """One fault of one run; what it does depends on rank and step only, and on its size."""

    kind: str
    cause: str
    ranks: tuple[int, ...]
    """Whom it strikes."""
    culprits: tuple[int, ...]
    acts: Sequence[Mapping[str, Any]] = ({"doing": "user"},)
    """What the thread does meanwhile, `ratio` of the time each."""
    where: str = "forward"
    """Of `main`: before, forward, backward, after (the optimizer)."""
    mark: int = 0
    """Span kind around it; 0 = none."""
    every: int = 1
    """Strikes in one of so many steps (batches)."""
    times: int = 1
    """Strokes per step, each after a synchronisation when `synchronise`."""
    synchronise: bool = False
    onset: int = 0
    """First step."""
    pattern: str = "steady"
    """steady; wandering: one rank after the other, for some steps each; turns: on in some steps,
    off in others; skew: drawn for every step."""
    phase: int = 0
    """Of turns: 1 strikes when 0 doesn't."""
    main_ratio: float = 0.0
    """Of a loader fault: what strikes the main thread too, as it launches."""
    throttle_bits: int = 0
    size: float = 0.0
    noise: np.ndarray = field(default_factory=lambda: np.ones((1, 1)))
    """[ranks, steps] factors around 1."""
    extra: str = ""
    """What else shows on the node (simulate_nodes)."""

    def get_delay_ns(self, rank: int, step: int) -> int:
        """Return what one stroke costs this rank in this step; 0 when it is spared."""
        if rank not in self._set or step < self.onset or (step + 1) % self.every:
            return 0
        turn = step // STRETCH
        if self.pattern == "wandering" and self.ranks[turn % len(self.ranks)] != rank:
            return 0
        if self.pattern == "turns" and (turn + self.phase) % 2:
            return 0
        return round(self.size * float(self.noise[rank, step]))

    def __post_init__(self) -> None:
        self._set = frozenset(self.ranks)

    def list_parts(self, rank: int, step: int, ratio: float = 1.0) -> list[HostPart]:
        """Return what a thread does for one stroke."""
        ns = round(self.get_delay_ns(rank, step) * ratio)
        if ns <= 0:
            return []
        whole = sum(float(act.get("ratio", 1.0)) for act in self.acts)
        out, left = [], ns
        for i, act in enumerate(self.acts):
            part = round(ns * float(act.get("ratio", 1.0)) / whole)
            part = left if i == len(self.acts) - 1 else part
            left -= part
            out.append(_make_part(act, part, self.cause))
        return out

    def compute(self, rank: int, step: int) -> ExtraKernelTime | None:
        """Return by how much a step's kernels are slowed."""
        ns = self.get_delay_ns(rank, step)
        if ns <= 0:
            return None
        return ExtraKernelTime(ns, self.cause, bool(self.throttle_bits), self.throttle_bits)


def _make_part(act: Mapping[str, Any], ns: int, cause: str) -> HostPart:
    size = round(ns * float(act.get("mib_per_second", 0)) * (1 << 20) / _PER_SECOND)
    operations = round(ns * float(act.get("operations_per_second", 0)) / _PER_SECOND)
    return HostPart(
        ns,
        act.get("doing", "user"),
        str(act.get("cause", cause)),
        str(act.get("resource", "")),
        size,
        operations,
        round(ns * float(act.get("queued_ratio", 0))),
        str(act.get("what", "")),
    )


@dataclass
class Faults:
    """All faults of one run, the first of which is the scenario's."""

    all: tuple[Fault, ...]

    def set_sizes(self, sizes: Sequence[float]) -> Faults:
        """Set what each costs in one step, in the mean; () = no fault."""
        for fault, size in zip(self.all, sizes or [0.0] * len(self.all)):
            fault.size = size * fault.every
        return self

    def list_by_kind(self, kind: str) -> list[Fault]:
        """Return the faults of a kind."""
        return [fault for fault in self.all if fault.kind == kind and fault.size > 0]

    def list_loader_parts(self, rank: int, batch: int) -> list[HostPart]:
        """Return what a batch takes beyond its due."""
        return [
            part for fault in self.list_by_kind("loader") for part in fault.list_parts(rank, batch)
        ]

    def compute(self, rank: int, step: int) -> ExtraKernelTime | None:
        """Return the first fault that slows this rank's kernels in this step."""
        extras = [fault.compute(rank, step) for fault in self.list_by_kind("compute")]
        return next((extra for extra in extras if extra), None)

    def get_copy_delay_ns(self, rank: int, step: int) -> int:
        """Return what a copy takes beyond its due."""
        return sum(fault.get_delay_ns(rank, step) for fault in self.list_by_kind("copy"))

    def get_transfer_delay(self, step: int) -> dict[Label, int]:
        """Return what the data of a step's collectives take beyond their due."""
        out: dict[Label, int] = {}
        for fault in self.list_by_kind("transfer"):
            add_amounts(out, {(fault.cause, None): fault.get_delay_ns(fault.ranks[0], step)})
        return out

    def get_launch_delay_ns(self, rank: int, step: int) -> int:
        """Return what a launch takes beyond its due."""
        return sum(fault.get_delay_ns(rank, step) for fault in self.list_by_kind("launch"))
