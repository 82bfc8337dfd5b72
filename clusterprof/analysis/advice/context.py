"""What a recommendation may use: finding, evidence, and the setup of rank and node.

The engine fills it for the rank (or node) that caused most. Values that were not recorded are None
or empty, and a rule that needs them does not hold: unknown is not zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterprof.analysis.attribution.confidence import MIN_SCORE_TO_NAME
from clusterprof.report.code import CodeLocation
from clusterprof.report.model import UNKNOWN_RESOURCE, Evidence, Finding, ResourceFacts

MIN_JUDGED_NS = 50_000_000
"""Time in steps of a rank from which a job is judged; what start-up leaves behind is shorter."""


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Settings of the data loader that a rank waits for, as read by the probe."""

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
    """Connections to its server; None if not counted."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A block device that is not a partition."""

    name: str
    rotational: bool | None = None
    underlying_devices: tuple[str, ...] = ()
    """Devices it is built on (LVM, md, loop)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One node."""

    name: str
    launcher: str = ""
    """"slurm", "kubernetes", or "" for anything else."""
    cpus: int | None = None
    """Online."""
    numa_nodes: int | None = None
    memory_bytes: int | None = None
    min_available_bytes: int | None = None
    """The smallest amount that was available without swapping."""
    quota_cpus: float | None = None
    """CPUs that the quota of the job's cgroup allows; None = no quota, or unknown."""
    throttled_ratio: float | None = None
    """Share of the quota periods in which the quota ran out."""
    other_processes_cpu_ratio: float | None = None
    """Share of the CPU time used on the node by processes outside the job; None if unknown."""
    job_cpus_wanted: float | None = None
    """CPUs that the threads of ranks and workers used or waited for, in the mean; None if not
    sampled.
    """
    cpu_users: tuple[tuple[str, int, float], ...] = ()
    """Processes of the job that used most CPU time: name, pid, CPUs kept busy; largest first."""
    busy_side_processes: tuple[tuple[str, int, float], ...] = ()
    """Those that are neither a rank nor a worker, though others are."""
    memory_limit_bytes: int | None = None
    """Memory limit of the job's cgroup; None = none, or unknown."""
    reclaims: int | None = None
    """How often the job's cgroup exceeded its `memory.high` and had to reclaim memory."""
    mounts: tuple[Mount, ...] = ()
    disks: tuple[Disk, ...] = ()
    hcas: tuple[str, ...] = ()
    nics: tuple[str, ...] = ()
    """Hardware network interfaces."""

    @property
    def is_memory_short(self) -> bool:
        """True if less than a tenth of the memory was available at some time."""
        if not self.memory_bytes or self.min_available_bytes is None:
            return False
        return self.min_available_bytes < self.memory_bytes / 10


@dataclass(frozen=True, slots=True)
class RankSetup:
    """The setup of one rank on its node."""

    loader: LoaderSettings | None = None
    cpus_allowed: int | None = None
    """CPUs that affinity and cpuset leave to the rank and its workers."""
    cores_allowed: int | None = None
    ranks_sharing_cpus: int = 1
    """Ranks of the node, this one included, that may use some of these CPUs."""
    ranks_on_node: int = 1
    """Ranks of the node."""
    gpu_memory_free_ratio: float | None = None
    """Share of the accelerator's memory that was never in use."""
    step_ns: int | None = None
    """Mean length of its steps."""
    steps: int = 0
    has_device: bool = True
    """False if no accelerator of it was measured."""
    has_framework: bool = True
    """False if a trace shows nothing of PyTorch or another framework."""
    has_xla: bool = False
    """True if XLA compiled and ran its programs, as in a profile of JAX."""
    has_optimizer: bool = False
    """True if steps of an optimizer or backward passes were seen: the job trains."""
    debug_mode_ratios: Mapping[int, float] = field(default_factory=dict)
    """Part of the time in steps in which a mode for debugging was on, by its bit in `layout`."""
    own_loss_ratio: float | None = None
    """Share of its time in steps that it lost to the cause itself."""
    message_wait_ratio: float = 0.0
    """Part of the waits for its work that was in messages between two ranks (send, receive)."""


@dataclass(frozen=True, slots=True)
class CodePath:
    """Time of a finding that was lost in one stack, from the line of the user on."""

    location: CodeLocation
    """The line of the user's own code; the outermost known line where there is none."""
    called: tuple[CodeLocation, ...] = ()
    """Lines of libraries below it, outermost first."""
    share_ratio: float = 0.0
    """Part of the finding's lost time, 0 to 1."""
    samples: int = 0
    source_calls: tuple[str, ...] = ()
    """Functions that the source line calls ("loss.item"), if it could be read."""


_NO_MACHINE, _NO_SETUP = Machine(""), RankSetup()

MIN_SINGLE_STEP_NS = 2_000_000_000
"""Time in ns from which a single step, often a trace without marks, is more than a start."""


@dataclass(frozen=True, slots=True)
class AdviceContext:
    """One finding and everything that recommendations may consult."""

    finding: Finding
    evidence: tuple[Evidence, ...]
    """Every number behind the cause, of the rank that caused most."""
    setup: RankSetup = _NO_SETUP
    machine: Machine = _NO_MACHINE
    ranks: int = 1
    """Ranks of the job."""
    nodes: int = 1
    has_probe: bool = True
    """True if the job's processes carried the probe."""
    has_host_names: bool = True
    """False for an imported trace that names no host."""
    is_window: bool = False
    """True if only a window of the job was recorded, such as a few steps in a profiler."""
    is_family: bool = False
    """True if only the family of the cause could be determined."""
    saves_nothing: bool = False
    """True if the job without the cause, replayed, ends no sooner."""
    other_causes: frozenset[str] = frozenset()
    """Ids of the other causes that lost a quarter as much or more."""
    missing_signals: tuple[str, ...] = ()
    """Signals without which causes of this family could not be determined."""
    coverage_gaps: tuple[tuple[str, str], ...] = ()
    """(what was not seen, what would make it visible) of what matters to this family."""
    code: tuple[CodePath, ...] = ()
    """Where in the code the time was lost; empty without samples."""
    values: Mapping[str, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", {item.name: item.value for item in self.evidence})

    @property
    def cause(self) -> str:
        """Id of the cause."""
        return self.finding.cause.id

    @property
    def resource(self) -> str:
        """The disk, mount or worker of the chief culprit; "" unknown."""
        return self.finding.culprits[0].resource if self.finding.culprits else ""

    @property
    def is_certain(self) -> bool:
        """True if the cause is certain enough to recommend a change."""
        sure = self.finding.confidence_ratio >= MIN_SCORE_TO_NAME
        return not self.is_family and sure and not self.is_brief

    @property
    def is_brief(self) -> bool:
        """True if less of the rank was seen than is needed to judge it."""
        step_ns, steps = self.setup.step_ns, self.setup.steps
        needed_ns = MIN_JUDGED_NS if steps > 1 else MIN_SINGLE_STEP_NS
        return step_ns is not None and step_ns * steps < needed_ns

    @property
    def resource_facts(self) -> ResourceFacts:
        """What is known of the resource, for code."""
        culprits = self.finding.culprits
        return culprits[0].resource_facts if culprits else UNKNOWN_RESOURCE

    @property
    def resource_name(self) -> str:
        """The mount or disk of the chief culprit, without what is below it."""
        return self.resource_facts.name or self.resource

    @property
    def workers(self) -> int | None:
        """Data loader workers of the rank; None if unknown."""
        if self.setup.loader is not None:
            return self.setup.loader.workers
        count = self.value("loader.workers_count")
        return round(count) if count else None  # 0: perhaps not PyTorch's loader

    @property
    def mount(self) -> Mount | None:
        """The named mount, as the header of the recording describes it."""
        name = self.resource_name
        return next(
            (mount for mount in self.machine.mounts if name in (mount.point, mount.source)), None
        )

    @property
    def file_system(self) -> str:
        """ "nfs", "lustre" or "cifs" for the named mount; "" if unknown."""
        kinds = {name.partition(".")[0] for name in self.values}
        known = next((kind for kind in ("nfs", "lustre", "cifs") if kind in kinds), "")
        if not known and self.mount is not None:
            mount_type = self.mount.type.lower()
            known = next(
                (kind for kind in ("nfs", "lustre", "cifs") if mount_type.startswith(kind)), ""
            )
        return known

    def value(self, name: str) -> float | None:
        """Return the value of a piece of evidence by name; None if there is none."""
        return self.values.get(name)

    def find_evidence(self, ending: str) -> Evidence | None:
        """Find the evidence whose name ends with `ending`, with any file system before it."""
        return next((item for item in self.evidence if item.name.endswith(ending)), None)
