"""Where in a job we are: its launchers, its name, and its processes on this node.

Processes that registered with a recorder of the job are known by that; without one those of our own
user are taken that carry a launcher's rank and the same job's name. Of processes below one another
with the same rank (a shell, dataloader workers) the first counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import text
from clusterprof.recorder import identity
from clusterprof.recorder.registry import checked
from clusterprof.recorder.rundir import choose_base, read_small_json, run_dir_path

# Outermost first; what tells of each.
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
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "HABANA_VISIBLE_DEVICES",
    "NEURON_RT_VISIBLE_CORES", "TPU_VISIBLE_CHIPS", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS",
    "SLURM_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
)  # fmt: skip
"""Variables that say which accelerators a process may use."""
_OF_TASKS = ("SLURM_PROCID", "SLURM_LOCALID")
_ENVIRON_BYTES_AT_MOST = 1 << 20
_SCANNED_AT_MOST = 8192
_VALUE_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Process:
    """One rank's process on this node."""

    pid: int
    rank: int | None
    node_local_rank: int | None
    device: str
    """The device it said it uses when it registered; "" = it did not say."""
    chosen: Mapping[str, str]
    """Those of DEVICE_VARIABLES that it has."""
    here: bool
    """True for the place in which doctor itself was started."""
    below: tuple[int, ...] = ()
    """Processes below it that carry its rank too."""


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of the job."""

    launchers: tuple[str, ...]
    """Those that left variables, the outermost first; () = started by hand."""
    job: str
    """Its name; "" = it has none."""
    facts: Mapping[str, Any]
    """rank, world_size, node_local_rank, node_number, node."""
    allocation_only: bool
    """True within an allocation of Slurm but in none of its steps."""
    run_dir: Path | None
    """Where a recorder of this job would be, None when there was none."""
    processes: tuple[Process, ...]
    from_recorder: bool
    """True when the processes are those that registered with the recorder."""


def find_place(roots: Roots, environ: Mapping[str, str], pid: int, parent_pid: int) -> Place:
    """Return where we are; reads environments of our own user's processes and starts nothing."""
    outside = _in_no_step(environ)
    environ = _of_a_task(environ)
    facts = identity.resolved(environ)
    job = identity.launcher_job(environ, parent_pid) or ""
    launchers = [name for name, marks in _LAUNCHERS if any(mark in environ for mark in marks)]
    if not launchers and facts["rank"] is not None:
        launchers = ["a launcher that sets RANK"]
    run_dir, registered = _recorded(roots, environ, job)
    processes = registered or _ranked(roots, environ, pid)
    if processes and not any(one.here for one in processes):
        facts = {**facts, "rank": None, "world_size": None, "node_local_rank": None}  # beside it
    return Place(
        tuple(launchers),
        job,
        {
            "rank": facts["rank"],
            "world_size": facts["world_size"],
            "node_local_rank": facts["node_local_rank"],
            "node_number": facts["node_number"],
            "node": identity.display_name(environ),
        },
        outside,
        run_dir,
        tuple(sorted(processes, key=_order)),
        bool(registered),
    )


def _order(process: Process) -> tuple[int, int, int]:
    local, rank = process.node_local_rank, process.rank
    return (1 << 30 if local is None else local, 1 << 30 if rank is None else rank, process.pid)


def _recorded(
    roots: Roots, environ: Mapping[str, str], job: str
) -> tuple[Path | None, list[Process]]:
    """Return the run directory of a recorder of this job, and who registered there and lives."""
    if not job:
        return None, []
    mine = run_dir_path(choose_base(environ), identity.boot8(roots), job)
    whole = environ.get("SLURM_JOB_ID", "")
    others = mine.parent.glob(f"{mine.name[: -len(job)]}{whole}.*") if whole.isalnum() else ()
    for run_dir in (mine, *sorted(others)):
        registered = _registered(roots, run_dir)
        if registered:
            return run_dir, registered
    return None, []


def _registered(roots: Roots, run_dir: Path) -> list[Process]:
    found: dict[int, Process] = {}
    for path in sorted((run_dir / "register").glob("*.json")):
        entry = checked(read_small_json(str(path)) or {})
        if entry is None:
            continue
        pid = int(entry["pid"])
        if identity.started_ticks(str(roots.proc), pid) != entry["started_ticks"]:
            continue
        variables = _environ(roots, pid) or entry["variables"]
        found[pid] = _process(pid, {**entry["variables"], **variables}, str(entry["device"]), False)
    ranks = [one for one in found.values() if one.rank is not None]
    return ranks or list(found.values())


def _ranked(roots: Roots, environ: Mapping[str, str], own_pid: int) -> list[Process]:
    """Return the processes of our user with a rank in the job of the same name.

    Agents and doctors have none where others have; and where another step of Slurm has ranks, our
    own was started beside it to look.
    """
    job = _without_step(environ)
    found: dict[int, tuple[int, Process]] = {}
    steps: dict[int, str] = {}
    numbers = [int(name) for name in _list(roots.proc) if name.isdigit()]
    for pid in sorted(numbers)[-_SCANNED_AT_MOST:]:  # the newest: a job is younger than its node
        variables = dict(environ) if pid == own_pid else _of_a_task(_environ(roots, pid) or {})
        if not variables or _without_step(variables) != job:
            continue
        fields = identity.stat_fields(str(roots.proc), pid)
        process = _process(pid, variables, "", pid == own_pid)
        if process.rank is not None and fields is not None:
            found[pid] = (int(fields[1]), process)
            steps[pid] = variables.get("SLURM_STEP_ID", "")
    looking = {pid for pid in found if pid != own_pid and _is_ours(roots, pid)}
    if set(found) - looking - {own_pid}:
        found = {pid: one for pid, one in found.items() if pid not in looking}
    own = environ.get("SLURM_STEP_ID", "")
    if any(steps[pid] != own for pid in found):
        found = {pid: one for pid, one in found.items() if steps[pid] != own}
    tops: dict[int, Process] = {}
    for pid, (_, process) in found.items():
        top = pid
        while top in found and _same_rank(found, top):
            top = found[top][0]
        here = process.here or (top in tops and tops[top].here)
        first = found[top][1]
        below = (*tops[top].below, pid) if top in tops else (pid,)
        tops[top] = Process(
            first.pid, first.rank, first.node_local_rank, "", first.chosen, here,
            tuple(one for one in below if one != top),
        )  # fmt: skip
    return list(tops.values())


def _is_ours(roots: Roots, pid: int) -> bool:
    words = text(roots.proc / str(pid) / "cmdline").split("\0")
    named = any(os.path.basename(word) == "clusterprof" for word in words)
    return "clusterprof.agent" in words or (named and "doctor" in words)


def _in_no_step(variables: Mapping[str, str]) -> bool:
    return "SLURM_JOB_ID" in variables and "SLURM_STEP_ID" not in variables


def _of_a_task(variables: Mapping[str, str]) -> dict[str, str]:
    """A batch script is numbered as the first task of its job, and is none."""
    drop = _OF_TASKS if _in_no_step(variables) else ()
    return {name: value for name, value in variables.items() if name not in drop}


def _without_step(variables: Mapping[str, str]) -> str | None:
    return identity.named_job({k: v for k, v in variables.items() if k != "SLURM_STEP_ID"})


def _same_rank(found: Mapping[int, tuple[int, Process]], pid: int) -> bool:
    """True when the parent is in the list too, and of the same rank."""
    parent = found[pid][0]
    return parent in found and parent != pid and found[parent][1].rank == found[pid][1].rank


def _process(pid: int, variables: Mapping[str, str], device: str, here: bool) -> Process:
    chosen = {
        name: variables[name][:_VALUE_CHARACTERS] for name in DEVICE_VARIABLES if name in variables
    }
    rank, local = identity.global_rank(variables), identity.node_local_rank(variables)
    return Process(pid, rank, local, device, chosen, here)


def _environ(roots: Roots, pid: int) -> dict[str, str] | None:
    """Return the environment of a process of our own user; None for any other."""
    folder = roots.proc / str(pid)
    try:
        if os.stat(folder).st_uid != os.stat(roots.proc / "self/status").st_uid:
            return None
        with open(folder / "environ", "rb") as environ:
            content = environ.read(_ENVIRON_BYTES_AT_MOST)
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in content.split(b"\0"))
    return {
        name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs
    }


def _list(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
