"""Who am I: the job, the rank, the node and the process, from what launchers leave behind.

docs/design.md, section 3, lists the variables that are kept; nothing else of an environment ever
enters a recording, because environments carry secrets.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping

from clusterprof.linux.roots import Roots
from clusterprof.probe.layout import NODE_LOCAL_RANK_VARIABLES, VARIABLES

LAUNCHER_VARIABLES = VARIABLES
_RANK_VARIABLES = (
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",  # after every RANK-like one: under `srun torchrun` it numbers nodes
    "JOB_COMPLETION_INDEX",
)
_JOB_VARIABLES = ("SLURM_JOB_ID", "FLUX_JOB_ID", "PBS_JOBID", "LSB_JOBID")
# One parent per node and launch: without a job id it is what the ranks of a node have in common.
_PARENTED_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID")
_VALUE_CHARACTERS = 256
_JOB_CHARACTERS = 64


def launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher variables found, each cut to 256 characters."""
    return {
        name: environ[name][:_VALUE_CHARACTERS] for name in LAUNCHER_VARIABLES if name in environ
    }


def global_rank(variables: Mapping[str, str]) -> int | None:
    """Return the rank of the process in its job, None when no launcher gave one."""
    return _first_integer(variables, _RANK_VARIABLES)


def node_local_rank(variables: Mapping[str, str]) -> int | None:
    """Return the rank of the process on its node, None when no launcher gave one."""
    return _first_integer(variables, NODE_LOCAL_RANK_VARIABLES)


def launcher_job(environ: Mapping[str, str], parent_pid: int) -> str | None:
    """Return the job's name if a launcher gave the processes of this node something in common.

    torchrun's own run id is "none" unless somebody chose one; then, as under MPI without a
    resource manager, the ranks of a node share their parent process.
    """
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id and run_id != "none":
        return _safe(run_id)
    for name in _JOB_VARIABLES:
        if environ.get(name):
            step = environ.get("SLURM_STEP_ID", "") if name == "SLURM_JOB_ID" else ""
            return _safe(f"{environ[name]}.{step}" if step else environ[name])
    if any(name in environ for name in _PARENTED_RANKS):
        return f"launch-{parent_pid}"
    return None


def own_job() -> str:
    """Return a job name nobody else has: pid and monotonic time of this process."""
    return f"{os.getpid()}-{time.monotonic_ns()}"


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
    """Return the name of this node's folder: host name, boot and start of the recorder (UTC)."""
    seconds, rest = divmod(realtime_ns, 1_000_000_000)
    start = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
    return f"{_safe(hostname())}-{boot8(roots)}-{start}.{rest // 1_000_000:03d}"


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


def _first_integer(variables: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        text = variables.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return None


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).strip(".")[:_JOB_CHARACTERS] or "job"
