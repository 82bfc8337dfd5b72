"""Identifies the job, the rank, the node and the process from the variables of launchers.

docs/design/recording-format.md, lists the variables that are kept; nothing else of an
environment ever enters a recording, because environments contain secrets.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterprof.agent.linux.files import Roots
from clusterprof.probe.layout import NODE_LOCAL_RANK_VARIABLES, VALUE_CHARACTERS, VARIABLES

LAUNCHER_VARIABLES = VARIABLES
# The variable of the rank, and the one of the world size it belongs to. The innermost launcher
# comes first, since a job inherits the variables of the launchers around it.
_RANK_AND_WORLD_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PALS_RANKID", "PMI_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ("SLURM_PROCID", "SLURM_NTASKS"),  # under `srun torchrun` it counts nodes
    ("JOB_COMPLETION_INDEX", ""),  # counts pods
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
# Equal on all nodes of a job; the innermost first. "none" is torchrun's default run id.
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "PET_RDZV_ID",
    "RAY_JOB_ID",
    "FLUX_JOB_ID",
    "SLURM_JOB_ID",
    "PBS_JOBID",
    "LSB_JOBID",
    "JOBSET_NAME",
    "K8S_JOB_NAME",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
)
# A requeued job keeps its id: the restart count makes the recordings distinguishable.
_RESTART_VARIABLES = {
    "SLURM_JOB_ID": "SLURM_RESTART_COUNT",
    "JOBSET_NAME": "JOBSET_RESTART_ATTEMPT",
}
# One parent process per node and launch: without a job id, all ranks of a node share it.
_MPI_RANK_VARIABLES = (
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "PMI_RANK",
    "PALS_RANKID",
)
_TORCH_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate")
_RUN_ID_OPTIONS = ("--rdzv-id", "--rdzv_id")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm's ids of the batch script, of an interactive shell, … are at the end of 32 bits
(slurm/slurm.h): these are the job itself and no step of it."""
_KUBERNETES_JOB_VARIABLES = ("JOBSET_NAME", "K8S_JOB_NAME")
_UID_CHARACTERS = 8
"""Of a Kubernetes uid: tells jobs apart that were created one after the other with one name."""
_MAX_JOB_CHARACTERS = 64
_MAX_SCRIPT_CHARACTERS = 32


def select_launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Select the launcher variables of an environment, each cut to 256 characters."""
    return {
        name: environ[name][:VALUE_CHARACTERS] for name in LAUNCHER_VARIABLES if name in environ
    }


def resolve_placement(variables: Mapping[str, str]) -> dict[str, int | str | None]:
    """Resolve the place of a process in its job from its variables; None = not stated.

    `job`: its name, equal on all nodes; `rank` and `world_size` (of one launcher),
    `node_local_rank`, `node_number`, and `restart`: how often torchrun has restarted the
    workers within the job.
    """
    rank, world_size = _find_rank_and_world_size(variables)
    return {
        "job": find_job_name(variables),
        "rank": rank,
        "world_size": world_size,
        "node_local_rank": find_node_local_rank(variables),
        "node_number": _find_first_integer(variables, _NODE_VARIABLES),
        "restart": _find_first_integer(variables, ("TORCHELASTIC_RESTART_COUNT",)),
    }


def find_global_rank(variables: Mapping[str, str]) -> int | None:
    """Return the rank of the process in its job, None when no launcher set one."""
    return _find_rank_and_world_size(variables)[0]


def find_node_local_rank(variables: Mapping[str, str]) -> int | None:
    """Return the rank of the process on its node, None when no launcher set one."""
    return _find_first_integer(variables, NODE_LOCAL_RANK_VARIABLES)


def find_job_name(environ: Mapping[str, str]) -> str | None:
    """Return the job name that is equal on all nodes of the job, None when there is none.

    Torchrun's own run id is "none" unless the user chose one.
    """
    for name in _JOB_VARIABLES:
        value = environ.get(name, "")
        if value and value != "none":
            return escape_name(_append_step_and_restart(name, environ))
    index, host = environ.get("JOB_COMPLETION_INDEX", ""), environ.get("HOSTNAME", "")
    if index and host.endswith(f"-{index}"):  # a pod of an Indexed Job: <job>-<index>
        return escape_name(host[: -len(index) - 1])
    return None


def find_launcher_job(environ: Mapping[str, str], parent_pid: int) -> str | None:
    """Return the job name, or one derived from the parent process; None without a launcher.

    Under MPI without a resource manager there is no name, but the ranks of a node share
    their parent process.
    """
    named = find_job_name(environ)
    if named is not None:
        return named
    if any(name in environ for name in _MPI_RANK_VARIABLES):
        return f"launch-{parent_pid}"
    return None


def find_command_job(command: Sequence[str]) -> str | None:
    """Return the run id on the command line of torchrun or accelerate, None when it has none.

    `record -- torchrun` starts before any worker has variables, independently on every
    node: the run id is the only value that their command lines share.
    """
    if not any(os.path.basename(word) in _TORCH_LAUNCHERS for word in command):
        return None
    for word, next_word in zip(command, [*command[1:], ""]):
        name, equals, value = word.partition("=")
        value = value if equals else next_word
        if name in _RUN_ID_OPTIONS and value and value != "none":
            return escape_name(value)
    return None


def make_job_name(subject: str = "node") -> str:
    """Make a unique job name that people can read: train@20261123-224518-4f2a.

    subject: the script, or what else is recorded. The time is local. No launcher's name has an @.
    """
    when = time.strftime("%Y%m%d-%H%M%S")
    return f"{escape_name(subject)[:_MAX_SCRIPT_CHARACTERS]}@{when}-{os.urandom(2).hex()}"


def find_script_name(command: Sequence[str]) -> str:
    """Return the name of what a command runs: its first Python file or module, else its program."""
    for word, next_word in zip(command, [*command[1:], ""]):
        if word.endswith(".py"):
            return os.path.basename(word).removesuffix(".py")
        if word == "-m" and next_word and not _is_launcher_module(next_word):
            return next_word.rpartition(".")[2]
    return os.path.basename(command[0]) if command else "node"


def _is_launcher_module(name: str) -> bool:
    return name in _TORCH_LAUNCHERS or name.startswith("accelerate.")


def is_job_name(job: str) -> bool:
    """Return whether other nodes may know the job by this name: false for generated names."""
    return bool(job) and not re.fullmatch(r"launch-\d+|\d+-\d{6,}|[^@]*@.*", job)


def read_boot_id(roots: Roots) -> str:
    """Read the kernel's boot id, "" when it cannot be read."""
    try:
        return (roots.proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def read_short_boot_id(roots: Roots) -> str:
    """Read the first 8 hex digits of the boot id, "00000000" when it cannot be read."""
    return read_boot_id(roots).replace("-", "")[:8] or "00000000"


def get_hostname() -> str:
    """Return the kernel's host name."""
    return os.uname().nodename


def get_display_name(environ: Mapping[str, str]) -> str:
    """Return the node's name for reports: the resource manager's name, else the host name."""
    return environ.get("SLURMD_NODENAME") or environ.get("K8S_NODE_NAME") or get_hostname()


def build_node_key(roots: Roots, realtime_ns: int) -> str:
    """Build the name of the node's folder: host name, boot, start of the recorder (UTC), pid.

    The pid is included because recorders of two jobs may start on one node in one
    millisecond.
    """
    seconds, rest_ns = divmod(realtime_ns, 1_000_000_000)
    start = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
    host = f"{escape_name(get_hostname())}-{read_short_boot_id(roots)}"
    return f"{host}-{start}.{rest_ns // 1_000_000:03d}-{os.getpid()}"


def read_start_ticks(proc: str, pid: int) -> int | None:
    """Read field 22 of /proc/<pid>/stat, the start in clock ticks; None without the process.

    Where there is no Linux /proc: hundredths of a second since 1970, from psutil.
    """
    fields = read_stat_fields(proc, pid)
    if fields is not None:
        return int(fields[19])
    from clusterprof.agent.linux import psutil_host  # imported only when needed

    if psutil_host.has_linux_proc(Roots(Path(proc))):
        return None
    return psutil_host.read_start_ticks(pid)


def read_stat_fields(proc: str, pid: int) -> list[bytes] | None:
    """Read the fields of /proc/<pid>/stat from the third on (state first), None if it is gone."""
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


def _append_step_and_restart(name: str, environ: Mapping[str, str]) -> str:
    job = environ[name]
    step = environ.get("SLURM_STEP_ID", "") if name == "SLURM_JOB_ID" else ""
    if step.isdecimal() and int(step) >= _FIRST_SPECIAL_STEP:
        step = ""
    restart = environ.get(_RESTART_VARIABLES.get(name, ""), "")
    job = f"{job}.{step}" if step else job
    uid = environ.get("K8S_JOB_UID", "") if name in _KUBERNETES_JOB_VARIABLES else ""
    job = f"{job}-{uid[:_UID_CHARACTERS]}" if uid else job
    return f"{job}-restart{restart}" if restart.strip("0") else job


def _find_rank_and_world_size(variables: Mapping[str, str]) -> tuple[int | None, int | None]:
    for rank_name, world_name in _RANK_AND_WORLD_VARIABLES:
        rank = _find_first_integer(variables, (rank_name,))
        if rank is not None:
            return rank, _find_first_integer(variables, (world_name,))
    return None, None


def _find_first_integer(variables: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = variables.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return None


def escape_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).strip(".")[:_MAX_JOB_CHARACTERS] or "job"
