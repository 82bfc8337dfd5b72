"""The job that this process belongs to: its launchers, its name, its processes on this node.

The processes are those that registered with a recorder of the job; without a recorder,
those of our own user that carry a launcher's rank and an equal job name. Of nested
processes with equal rank (a shell, dataloader workers) the outermost counts.

A suggested change to the job or the node, and who can make it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.agent.launch import identity
from clusterprof.agent.launch.election import build_run_dir_path, choose_base, read_small_json
from clusterprof.agent.linux.files import Roots, read_text
from clusterprof.agent.processes.registry import parse_registration

# Outermost first, each with the variables that reveal it.
_LAUNCHERS = (
    ("Kubernetes", ("KUBERNETES_SERVICE_HOST",)),
    ("Slurm", ("SLURM_JOB_ID",)),
    ("PBS", ("PBS_JOBID",)),
    ("LSF", ("LSB_JOBID",)),
    ("Flux", ("FLUX_JOB_ID",)),
    ("Ray", ("RAY_JOB_ID",)),
    ("PALS", ("PALS_RANKID",)),
    ("Open MPI", ("OMPI_COMM_WORLD_RANK",)),
    ("MVAPICH", ("MV2_COMM_WORLD_RANK",)),
    ("MPI", ("PMI_RANK",)),
    ("torchrun", ("TORCHELASTIC_RUN_ID",)),
)
DEVICE_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
    "HABANA_VISIBLE_DEVICES",
    "NEURON_RT_VISIBLE_CORES",
    "TPU_VISIBLE_CHIPS",
    "SLURM_JOB_GPUS",
    "SLURM_STEP_GPUS",
    "SLURM_GPUS",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
)
"""Variables that select the accelerators a process may use."""
_TASK_VARIABLES = ("SLURM_PROCID", "SLURM_LOCALID")
_MAX_ENVIRON_BYTES = 1 << 20
_MAX_SCANNED = 8192
_VALUE_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of one rank on this node."""

    pid: int
    rank: int | None
    node_local_rank: int | None
    device: str
    """The device stated in its registration; "" = not stated."""
    chosen: Mapping[str, str]
    """Those of DEVICE_VARIABLES that are set in its environment."""
    here: bool
    """True if doctor itself was started within this process."""
    below: tuple[int, ...] = ()
    """Its child processes that carry its rank too."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """What is known of the job."""

    launchers: tuple[str, ...]
    """The launchers whose variables are set, the outermost first; () = started manually."""
    job: str
    """Name of the job; "" = it has none."""
    facts: Mapping[str, Any]
    """rank, world_size, node_local_rank, node_number, node."""
    allocation_only: bool
    """True inside a Slurm allocation but in none of its steps."""
    run_dir: Path | None
    """Run directory of a recorder of this job, None when there is none."""
    processes: tuple[RankProcess, ...]
    from_recorder: bool
    """True when the processes are those that registered with the recorder."""


def find_job_context(
    roots: Roots, environ: Mapping[str, str], pid: int, parent_pid: int
) -> JobContext:
    """Identify the job; reads environments of our own user's processes and starts nothing."""
    allocation_only = _is_allocation_only(environ)
    environ = _drop_batch_variables(environ)
    facts = identity.resolve_placement(environ)
    job = identity.find_launcher_job(environ, parent_pid) or ""
    launchers = [
        name for name, variables in _LAUNCHERS if any(variable in environ for variable in variables)
    ]
    if not launchers and facts["rank"] is not None:
        launchers = ["a launcher that sets RANK"]
    run_dir, registered = _find_recorded_run(roots, environ, job)
    processes = registered or _find_rank_processes(roots, environ, pid)
    if processes and not any(process.here for process in processes):
        facts = {**facts, "rank": None, "world_size": None, "node_local_rank": None}
    return JobContext(
        tuple(launchers),
        job,
        {
            "rank": facts["rank"],
            "world_size": facts["world_size"],
            "node_local_rank": facts["node_local_rank"],
            "node_number": facts["node_number"],
            "node": identity.get_display_name(environ),
        },
        allocation_only,
        run_dir,
        tuple(sorted(processes, key=_make_sort_key)),
        bool(registered),
    )


def _make_sort_key(process: RankProcess) -> tuple[int, int, int]:
    local, rank = process.node_local_rank, process.rank
    return (1 << 30 if local is None else local, 1 << 30 if rank is None else rank, process.pid)


def _find_recorded_run(
    roots: Roots, environ: Mapping[str, str], job: str
) -> tuple[Path | None, list[RankProcess]]:
    """Return the run directory of a recorder of this job, and its registered live processes."""
    if not job:
        return None, []
    own_run_dir = build_run_dir_path(choose_base(environ), identity.read_short_boot_id(roots), job)
    slurm_job = environ.get("SLURM_JOB_ID", "")
    run_dirs = (
        own_run_dir.parent.glob(f"{own_run_dir.name[: -len(job)]}{slurm_job}.*")
        if slurm_job.isalnum()
        else ()
    )
    for run_dir in (own_run_dir, *sorted(run_dirs)):
        registered = _list_registered(roots, run_dir)
        if registered:
            return run_dir, registered
    return None, []


def _list_registered(roots: Roots, run_dir: Path) -> list[RankProcess]:
    processes: dict[int, RankProcess] = {}
    for path in sorted((run_dir / "register").glob("*.json")):
        entry = parse_registration(read_small_json(str(path)) or {})
        if entry is None:
            continue
        pid = int(entry["pid"])
        if identity.read_start_ticks(str(roots.proc), pid) != entry["started_ticks"]:
            continue
        variables = _read_environ(roots, pid) or entry["variables"]
        processes[pid] = _make_process(
            pid, {**entry["variables"], **variables}, str(entry["device"]), False
        )
    ranks = [process for process in processes.values() if process.rank is not None]
    return ranks or list(processes.values())


def _find_rank_processes(
    roots: Roots, environ: Mapping[str, str], own_pid: int
) -> list[RankProcess]:
    """Return the processes of our user that have a rank in the job of equal name.

    Agents and doctors are left out where other processes have ranks. Where another Slurm
    step has ranks, our own step is left out, because it was started only to observe.
    """
    job = _find_job_without_step(environ)
    candidates: dict[int, tuple[int, RankProcess]] = {}
    steps: dict[int, str] = {}
    numbers = [int(name) for name in _list_folder(roots.proc) if name.isdigit()]
    for pid in sorted(numbers)[-_MAX_SCANNED:]:  # the newest: a job is younger than its node
        variables = (
            dict(environ)
            if pid == own_pid
            else _drop_batch_variables(_read_environ(roots, pid) or {})
        )
        if not variables or _find_job_without_step(variables) != job:
            continue
        fields = identity.read_stat_fields(str(roots.proc), pid)
        process = _make_process(pid, variables, "", pid == own_pid)
        if process.rank is not None and fields is not None:
            candidates[pid] = (int(fields[1]), process)
            steps[pid] = variables.get("SLURM_STEP_ID", "")
    own_tools = {
        pid for pid in candidates if pid != own_pid and _is_clusterprof_process(roots, pid)
    }
    if set(candidates) - own_tools - {own_pid}:
        candidates = {
            pid: candidate for pid, candidate in candidates.items() if pid not in own_tools
        }
    own_step = environ.get("SLURM_STEP_ID", "")
    if any(steps[pid] != own_step for pid in candidates):
        candidates = {
            pid: candidate for pid, candidate in candidates.items() if steps[pid] != own_step
        }
    tops: dict[int, RankProcess] = {}
    for pid, (_, process) in candidates.items():
        top = pid
        while top in candidates and _has_parent_of_same_rank(candidates, top):
            top = candidates[top][0]
        here = process.here or (top in tops and tops[top].here)
        first = candidates[top][1]
        below = (*tops[top].below, pid) if top in tops else (pid,)
        tops[top] = RankProcess(
            first.pid,
            first.rank,
            first.node_local_rank,
            "",
            first.chosen,
            here,
            tuple(member for member in below if member != top),
        )
    return list(tops.values())


def _is_clusterprof_process(roots: Roots, pid: int) -> bool:
    words = read_text(roots.proc / str(pid) / "cmdline").split("\0")
    named = any(os.path.basename(word) == "clusterprof" for word in words)
    return "clusterprof.agent" in words or (named and "doctor" in words)


def _is_allocation_only(variables: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in variables and "SLURM_STEP_ID" not in variables


def _drop_batch_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those of a task.

    The variables of a batch script look like those of its job's first task.
    """
    drop = _TASK_VARIABLES if _is_allocation_only(variables) else ()
    return {name: value for name, value in variables.items() if name not in drop}


def _find_job_without_step(variables: Mapping[str, str]) -> str | None:
    return identity.find_job_name({k: v for k, v in variables.items() if k != "SLURM_STEP_ID"})


def _has_parent_of_same_rank(candidates: Mapping[int, tuple[int, RankProcess]], pid: int) -> bool:
    """Return whether the parent is in the list too and has an equal rank."""
    parent = candidates[pid][0]
    return (
        parent in candidates
        and parent != pid
        and candidates[parent][1].rank == candidates[pid][1].rank
    )


def _make_process(pid: int, variables: Mapping[str, str], device: str, here: bool) -> RankProcess:
    device_variables = {
        name: variables[name][:_VALUE_CHARACTERS] for name in DEVICE_VARIABLES if name in variables
    }
    rank, local = identity.find_global_rank(variables), identity.find_node_local_rank(variables)
    return RankProcess(pid, rank, local, device, device_variables, here)


def _read_environ(roots: Roots, pid: int) -> dict[str, str] | None:
    """Return the environment of a process of our own user; None for any other."""
    folder = roots.proc / str(pid)
    try:
        if os.stat(folder).st_uid != os.stat(roots.proc / "self/status").st_uid:
            return None
        with open(folder / "environ", "rb") as environ:
            content = environ.read(_MAX_ENVIRON_BYTES)
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in content.split(b"\0"))
    return {
        name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs
    }


def _list_folder(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


USER = "you"
JOB = "job"
ADMIN = "cluster admin"


@dataclass(frozen=True, slots=True)
class SuggestedChange:
    """One problem and what can be changed about it."""

    about: str
    """devices, affinity, files, fabric, kernel, sources."""
    message: str
    """The problem and its cost."""
    remedy: str
    owner: str
    """USER (an option, a variable, a package), JOB (how the job is submitted) or ADMIN."""
