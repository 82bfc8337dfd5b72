"""Who am I: the job, the rank, the node and the process, from what launchers leave behind.

docs/design.md, section 3, lists the variables that are kept; nothing else of an environment ever
enters a recording, because environments carry secrets.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence

from clusterprof.linux.roots import Roots
from clusterprof.probe.layout import NODE_LOCAL_RANK_VARIABLES, VALUE_CHARACTERS, VARIABLES

LAUNCHER_VARIABLES = VARIABLES
# Where a rank stands, and next to it the size of the world that it counts in: the innermost
# launcher first, since a job inherits the variables of those around it.
_RANKS_AND_WORLDS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PALS_RANKID", "PMI_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("SLURM_PROCID", "SLURM_NTASKS"),  # under `srun torchrun` it numbers nodes
    ("JOB_COMPLETION_INDEX", ""),  # numbers pods
)
# Resource managers number machines, launchers their own groups of workers.
_NODE_VARIABLES = (
    "SLURM_NODEID",
    "PALS_NODEID",
    "GROUP_RANK",
    "NODE_RANK",
    "PET_NODE_RANK",
    "CROSS_RANK",
    "JOB_COMPLETION_INDEX",
)
# One value on all nodes of a job; the innermost first. A rendezvous nobody named is called "none".
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "PET_RDZV_ID",
    "RAY_JOB_ID",
    "FLUX_JOB_ID",
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "JOBSET_NAME",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
)
# A job that its manager starts anew keeps its id: the count tells the recordings apart.
_RESTARTS_OF_THE_JOB = {
    "SLURM_JOB_ID": "SLURM_RESTART_COUNT",
    "JOBSET_NAME": "JOBSET_RESTART_ATTEMPT",
}
# One parent per node and launch: without a job id it is what the ranks of a node have in common.
_PARENTED_RANKS = (
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMI_RANK",
    "PALS_RANKID",
)
_TORCH_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate")
_RUN_ID_OPTIONS = ("--rdzv-id", "--rdzv_id")
_JOB_CHARACTERS = 64


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher variables found, each cut to 256 characters."""
    return {
        name: environ[name][:VALUE_CHARACTERS] for name in LAUNCHER_VARIABLES if name in environ
    }


def resolved(variables: Mapping[str, str]) -> dict[str, int | str | None]:
    """Return what the variables of a process say of its place in the job; None = they do not.

    `job`: its name, alike on all nodes; `rank` and `world_size` (of the same launcher),
    `node_local_rank`, `node_number`, and `restart`: how often torchrun had restarted the workers
    within the job.
    """
    rank, world_size = _rank_and_world(variables)
    return {
        "job": named_job(variables),
        "rank": rank,
        "world_size": world_size,
        "node_local_rank": node_local_rank(variables),
        "node_number": _first_integer(variables, _NODE_VARIABLES),
        "restart": _first_integer(variables, ("TORCHELASTIC_RESTART_COUNT",)),
    }


def global_rank(variables: Mapping[str, str]) -> int | None:
    """Return the rank of the process in its job, None when no launcher gave one."""
    return _rank_and_world(variables)[0]


def node_local_rank(variables: Mapping[str, str]) -> int | None:
    """Return the rank of the process on its node, None when no launcher gave one."""
    return _first_integer(variables, NODE_LOCAL_RANK_VARIABLES)


def named_job(environ: Mapping[str, str]) -> str | None:
    """Return the name by which all nodes of a job know it, None when it has none.

    Torchrun's own run id is "none" unless somebody chose one.
    """
    for name in _JOB_VARIABLES:
        value = environ.get(name, "")
        if value and value != "none":
            return _safe(_with_step_and_restart(name, environ))
    index, host = environ.get("JOB_COMPLETION_INDEX", ""), environ.get("HOSTNAME", "")
    if index and host.endswith(f"-{index}"):  # a pod of an Indexed Job: <job>-<index>
        return _safe(host[: -len(index) - 1])
    return None


def launcher_job(environ: Mapping[str, str], parent_pid: int) -> str | None:
    """Return the job's name if a launcher gave the processes of this node something in common.

    Without a name, as under MPI without a resource manager, the ranks of a node share their parent
    process.
    """
    named = named_job(environ)
    if named is not None:
        return named
    if any(name in environ for name in _PARENTED_RANKS):
        return f"launch-{parent_pid}"
    return None


def command_job(command: Sequence[str]) -> str | None:
    """Return the run id on the command line of torchrun or accelerate, None when it has none.

    `record -- torchrun` begins before there are workers with variables, and every node's does so
    on its own: the run id is all that their command lines have in common.
    """
    if not any(os.path.basename(word) in _TORCH_LAUNCHERS for word in command):
        return None
    for word, following in zip(command, [*command[1:], ""]):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if name in _RUN_ID_OPTIONS and value and value != "none":
            return _safe(value)
    return None


def own_job() -> str:
    """Return a job name nobody else has: pid and monotonic time of this process."""
    return f"{os.getpid()}-{time.monotonic_ns()}"


def is_name(job: str) -> bool:
    """Return whether other nodes may know the job by this name: we did not make it up here."""
    return bool(job) and not re.fullmatch(r"launch-\d+|\d+-\d{6,}", job)


def boot_id(roots: Roots) -> str:
    """Return the kernel's boot id, "" when it cannot be read."""
    try:
        return (roots.proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def boot8(roots: Roots) -> str:
    """Return the first 8 hex digits of the boot id, "00000000" when there is none."""
    return boot_id(roots).replace("-", "")[:8] or "00000000"


def hostname() -> str:
    """Return the host name as the kernel has it."""
    return os.uname().nodename


def display_name(environ: Mapping[str, str]) -> str:
    """Return what people call this node: the resource manager's name, else the host name."""
    return environ.get("SLURMD_NODENAME") or environ.get("K8S_NODE_NAME") or hostname()


def node_key(roots: Roots, realtime_ns: int) -> str:
    """Return the name of this node's folder: host name, boot, start of the recorder (UTC) and pid.

    Recorders of two jobs may start on one node in the same millisecond.
    """
    seconds, rest = divmod(realtime_ns, 1_000_000_000)
    start = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
    return f"{_safe(hostname())}-{boot8(roots)}-{start}.{rest // 1_000_000:03d}-{os.getpid()}"


def started_ticks(proc: str, pid: int) -> int | None:
    """Return field 22 of /proc/<pid>/stat, None when there is no such process."""
    fields = stat_fields(proc, pid)
    return int(fields[19]) if fields is not None else None


def stat_fields(proc: str, pid: int) -> list[bytes] | None:
    """Return the fields of /proc/<pid>/stat from the third on (state first), None if gone."""
    try:
        descriptor = os.open(f"{proc}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(descriptor, 1024)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    # The name in parentheses may hold spaces and parentheses; the last one ends it.
    fields = text[text.rfind(b")") + 2 :].split()
    return fields if len(fields) >= 20 else None


def _with_step_and_restart(name: str, environ: Mapping[str, str]) -> str:
    job = environ[name]
    step = environ.get("SLURM_STEP_ID", "") if name == "SLURM_JOB_ID" else ""
    restart = environ.get(_RESTARTS_OF_THE_JOB.get(name, ""), "")
    job = f"{job}.{step}" if step else job
    return f"{job}-restart{restart}" if restart.strip("0") else job


def _rank_and_world(variables: Mapping[str, str]) -> tuple[int | None, int | None]:
    for rank_name, world_name in _RANKS_AND_WORLDS:
        rank = _first_integer(variables, (rank_name,))
        if rank is not None:
            return rank, _first_integer(variables, (world_name,))
    return None, None


def _first_integer(variables: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = variables.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return None


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).strip(".")[:_JOB_CHARACTERS] or "job"
