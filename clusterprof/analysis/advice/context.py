"""What a remedy may look at: the finding, its numbers, and how rank and node were set up.

The engine fills it for the rank (or node) that caused most. What was not recorded is None or empty,
and a rule that would need it does not hold: unknown is not zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterprof.attribution.confidence import NAMED_FROM
from clusterprof.findings import Evidence, Finding


@dataclass(frozen=True, slots=True)
class Loader:
    """Settings of the loader a rank waits for, as the probe found them."""

    workers: int
    """0 = the training process loads by itself."""
    prefetch: int | None = None
    """Batches each worker may have ready."""
    pinned: bool | None = None
    persistent: bool | None = None


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system."""

    point: str
    type: str
    source: str = ""
    connections: int | None = None
    """To its server; None = not counted."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A block device that is no partition."""

    name: str
    rotational: bool | None = None
    on: tuple[str, ...] = ()
    """Devices below it (LVM, md, loop)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One node."""

    name: str
    launcher: str = ""
    """slurm, kubernetes, or "" for anything else."""
    cpus: int | None = None
    """Online."""
    numa_nodes: int | None = None
    memory_bytes: int | None = None
    available_least_bytes: int | None = None
    """The least that was to be had without swapping."""
    quota_cpus: float | None = None
    """CPUs that the quota of the job's cgroup allows; None = no quota, or unknown."""
    throttled_ratio: float | None = None
    """Quota periods that ran out, of all."""
    others_cpu_ratio: float | None = None
    """Of the CPU time used on the node: used by others than the job; None = unknown."""
    limit_bytes: int | None = None
    """Memory limit of the job's cgroup; None = none, or unknown."""
    reclaims: int | None = None
    """Times the job's cgroup was over its `memory.high` and had to give memory back."""
    mounts: tuple[Mount, ...] = ()
    disks: tuple[Disk, ...] = ()
    hcas: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    """Of hardware."""

    @property
    def memory_short(self) -> bool:
        """True when at one time less than a tenth of the memory was to be had."""
        if not self.memory_bytes or self.available_least_bytes is None:
            return False
        return self.available_least_bytes < self.memory_bytes / 10


@dataclass(frozen=True, slots=True)
class Setup:
    """One rank on its node."""

    loader: Loader | None = None
    cpus_allowed: int | None = None
    """What affinity and cpuset leave it and its workers."""
    cores_allowed: int | None = None
    sharing: int = 1
    """Ranks of the node, itself among them, that are left some of the same CPUs."""
    on_node: int = 1
    """Ranks of the node."""
    gpu_memory_free_ratio: float | None = None
    """Of the accelerator's memory: never in use."""
    step_ns: int | None = None
    """Mean length of its steps."""
    steps: int = 0
    own_ratio: float | None = None
    """Of its time in steps: lost to the cause by itself."""


_NO_MACHINE, _NO_SETUP = Machine(""), Setup()


@dataclass(frozen=True, slots=True)
class Scene:
    """One finding, and what stands around it."""

    finding: Finding
    evidence: tuple[Evidence, ...]
    """Every number behind the cause, of the rank that caused most."""
    setup: Setup = _NO_SETUP
    machine: Machine = _NO_MACHINE
    ranks: int = 1
    """Of the job."""
    nodes: int = 1
    marked: bool = True
    """Its processes carried the probe."""
    is_family: bool = False
    """Only the family could be told, not the cause."""
    beside: frozenset[str] = frozenset()
    """Ids of the other causes found."""
    missing: tuple[str, ...] = ()
    """Signals without which causes of this family could not be told."""
    holes: tuple[tuple[str, str], ...] = ()
    """(what was not seen, what would let us see it) of what matters to this family."""
    values: Mapping[str, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", {one.name: one.value for one in self.evidence})

    @property
    def cause(self) -> str:
        """Id of the cause."""
        return self.finding.cause.id

    @property
    def resource(self) -> str:
        """The disk, mount or worker of the chief culprit; "" unknown."""
        return self.finding.culprits[0].resource if self.finding.culprits else ""

    @property
    def named(self) -> bool:
        """True when the cause is sure enough to mend something because of it."""
        return not self.is_family and self.finding.confidence_ratio >= NAMED_FROM

    @property
    def workers(self) -> int | None:
        """Dataloader workers of the rank; None unknown."""
        if self.setup.loader is not None:
            return self.setup.loader.workers
        count = self.value("loader.workers_count")
        return round(count) if count else None  # none at all: perhaps it is not PyTorch's

    @property
    def mount(self) -> Mount | None:
        """The mount that was named, as the header of the recording knows it."""
        name = self.resource.partition(" (")[0]
        return next((one for one in self.machine.mounts if name in (one.point, one.source)), None)

    @property
    def file_system(self) -> str:
        """nfs, lustre or cifs: what the named mount is of; "" unknown."""
        kinds = {name.partition(".")[0] for name in self.values}
        known = next((kind for kind in ("nfs", "lustre", "cifs") if kind in kinds), "")
        if not known and self.mount is not None:
            said = self.mount.type.lower()
            known = next((kind for kind in ("nfs", "lustre", "cifs") if said.startswith(kind)), "")
        return known

    def value(self, name: str) -> float | None:
        """Return a number of the evidence by name, None where there is none."""
        return self.values.get(name)

    def number(self, ending: str) -> Evidence | None:
        """Return the evidence whose name ends so, whatever the kind of file system before it."""
        return next((one for one in self.evidence if one.name.endswith(ending)), None)
