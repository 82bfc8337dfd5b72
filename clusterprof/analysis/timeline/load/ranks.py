"""Find the training processes of a chunk, their workers and their accelerators.

A training process has spans of steps or data waits and is not a dataloader worker. In a
recording without spans, training processes are those to which a launcher gave a rank;
without such, those that own an accelerator; else the busiest of the command and its
descendants. The launcher itself (torchrun's agent) does not train.

Identity of a process in its job, from its registration.

The recorder resolves the variables of launchers once (docs/design/recording-format.md). Older
recordings contain only the variables; in that case they are resolved here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterprof.analysis.timeline.load.buffers import TRAINING_KINDS
from clusterprof.analysis.timeline.model import Chunk, Process, Rank
from clusterprof.probe.layout import FETCH, FIRST_USER_KIND, WORKER_START

_RANK_VARIABLES = (
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
)
_WORLD_SIZE_VARIABLES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "FLUX_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_RESTART_VARIABLES = ("TORCHELASTIC_RESTART_COUNT",)


@dataclass(frozen=True, slots=True)
class JobPosition:
    """Position of a process in its job, as its launcher stated it; None = not known."""

    job: str | None = None
    """Name of the job, equal on all nodes."""
    rank: int | None = None
    """Global rank."""
    world_size: int | None = None
    node_local_rank: int | None = None
    restart: int = 0
    """Number of times the launcher has restarted the ranks."""
    rendezvous: str = ""
    """Rendezvous address and port of the job's ranks (`MASTER_ADDR:MASTER_PORT`); "" if
    unknown.
    """
    attached: bool = False
    """Whether the recorder attached to it while it ran: no probe can be loaded then."""


UNREGISTERED = JobPosition()
"""Position of a process that never registered."""


_MAX_PARSED = 1024
_parsed: dict[int, tuple[Mapping[str, Any], JobPosition]] = {}
"""Registrations parsed before, by id: each is asked for in every chunk, many times."""


def parse_job_position(registration: Mapping[str, Any]) -> JobPosition:
    """Parse the position of a process in its job from the attributes of its registration."""
    entry = _parsed.get(id(registration))
    if entry is not None and entry[0] is registration:
        return entry[1]
    if len(_parsed) >= _MAX_PARSED:
        _parsed.clear()
    identity = _parse_identity(registration)
    _parsed[id(registration)] = registration, identity
    return identity


def _parse_identity(registration: Mapping[str, Any]) -> JobPosition:
    variables = registration.get("variables") or {}

    def parse_number(name: str, variable_names: tuple[str, ...]) -> int | None:
        if name in registration:
            registered = registration[name]
            if isinstance(registered, int) and not isinstance(registered, bool):
                return registered
            return None
        return next(
            (int(v) for v in _list_values(variables, variable_names) if v.strip().isdecimal()), None
        )

    job = registration.get("job")
    if "job" not in registration:
        job = next(
            (value for value in _list_values(variables, _JOB_VARIABLES) if value != "none"), None
        )
    address, port = (str(variables.get(name, "")) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return JobPosition(
        job=job if isinstance(job, str) and job else None,
        rank=parse_number("rank", _RANK_VARIABLES),
        world_size=parse_number("world_size", _WORLD_SIZE_VARIABLES),
        node_local_rank=parse_number("node_local_rank", _LOCAL_RANK_VARIABLES),
        restart=parse_number("restart", _RESTART_VARIABLES) or 0,
        rendezvous=f"{address}:{port}" if address and port else "",
        attached=registration.get("attached") is True,
    )


def _list_values(variables: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    return [str(variables[name]) for name in names if variables.get(name) not in (None, "")]


def find_ranks(chunk: Chunk) -> tuple[Rank, ...]:
    """Find the training processes of a chunk, sorted by rank, then pid.

    Those without a rank last.
    """
    mains = _find_training_processes(chunk)
    marked = bool(mains)
    if not marked:
        mains = _guess_training_processes(chunk)
    devices = _assign_devices(chunk, mains)
    emulated = {str(d.get("id")) for d in chunk.header.devices if d.get("emulated")}
    pids = {p.pid for p in mains}
    ranks = [
        Rank(
            chunk=chunk,
            rank=get_global_rank(main.registration),
            pid=main.pid,
            device=devices[main.pid],
            emulated=devices[main.pid] in emulated or devices[main.pid].startswith("emulated-"),
            main=main,
            workers=_find_workers(chunk, main, pids, marked),
            marked=marked,
        )
        for main in mains
    ]
    return tuple(sorted(ranks, key=lambda r: (r.rank is None, r.rank or 0, r.pid)))


def get_global_rank(registration: Mapping[str, Any]) -> int | None:
    """Return the global rank that a launcher gave to a process, None if it gave none."""
    return parse_job_position(registration).rank


def _find_training_processes(chunk: Chunk) -> list[Process]:
    """Find processes with steps or waits, then those with user-defined spans only.

    User-defined spans alone are weak evidence: they may be in dataset code that a worker
    runs.
    """
    mains = [
        p
        for p in chunk.processes.values()
        if _has_training_spans(p) and WORKER_START not in p.spans
    ]
    pids = {p.pid for p in mains}
    user_marked = [
        p
        for p in chunk.processes.values()
        if any(kind >= FIRST_USER_KIND for kind in p.spans)
        and p.pid not in pids
        and not {FETCH, WORKER_START} & p.spans.keys()
        and not pids & set(_list_ancestors(chunk, p))
    ]
    return mains + user_marked


def _has_training_spans(process: Process) -> bool:
    return any(kind in process.spans for kind in TRAINING_KINDS)


def _guess_training_processes(chunk: Chunk) -> list[Process]:
    """Guess the training processes: those with a rank, else a device, else the busiest one."""
    registered = [p for p in chunk.processes.values() if p.registration]
    ranked = [
        p
        for p in registered
        if p.registration.get("role") == "python" and get_global_rank(p.registration) is not None
    ]
    if ranked:
        # A child inherits its parent's variables: the process nearest to the launcher is the rank.
        ranked_pids = {p.pid for p in ranked}
        return [p for p in ranked if not ranked_pids & set(_list_ancestors(chunk, p))]
    owners = {device.get("pid") for device in chunk.header.devices}
    owners |= {pid for device in chunk.header.devices for pid in _list_users(device)}
    owning = [process for process in chunk.processes.values() if process.pid in owners]
    if owning:
        return owning
    commands = {p.pid for p in registered if p.registration.get("role") == "command"}
    family = [
        p
        for p in chunk.processes.values()
        if p.pid in commands or commands & set(_list_ancestors(chunk, p))
    ]
    family = family or registered or list(chunk.processes.values())
    busiest = max(family, key=lambda p: (_sum_cpu_time(p), -p.pid), default=None)
    return [busiest] if busiest is not None else []


def _sum_cpu_time(process: Process) -> int:
    """Sum the CPU time of all sampled threads in this chunk."""
    return sum(
        int(thread.on_cpu_ns[-1] - thread.on_cpu_ns[0])
        for thread in process.threads.values()
        if len(thread.t_ns) and thread.on_cpu_ns[0] >= 0
    )


def _list_ancestors(chunk: Chunk, process: Process) -> list[int]:
    """List the pids of a process's ancestors, nearest first."""
    ancestors: list[int] = []
    current = process
    while (
        current.parent_pid > 0
        and current.parent_pid not in ancestors
        and current.parent_pid != process.pid
    ):
        ancestors.append(current.parent_pid)
        parent = chunk.processes.get(current.parent_pid)
        if parent is None:
            break
        current = parent
    return ancestors


def _find_workers(
    chunk: Chunk, main: Process, mains: set[int], marked: bool
) -> tuple[Process, ...]:
    """Find the descendants that fetch.

    If none has fetch spans, all that belong to no other rank.
    """
    below = [
        process
        for process in chunk.processes.values()
        if process.pid not in mains
        and next((pid for pid in _list_ancestors(chunk, process) if pid in mains), None) == main.pid
    ]
    fetching = [p for p in below if FETCH in p.spans or WORKER_START in p.spans]
    chosen = fetching if marked and (fetching or FETCH in main.spans) else below
    return tuple(sorted(chosen, key=lambda p: p.pid))


def _assign_devices(chunk: Chunk, mains: list[Process]) -> dict[int, str]:
    """Assign an accelerator to each training process, "" if it cannot be determined.

    Sources, best first: the device that the process registered; the owner that the device
    names, or the users that the recorder saw; the only device for the only process; the
    devices in the order of the local ranks. A device without busy times (`tells_busy` false
    in the header) is assigned to no process: host data must replace it.
    """
    listed = [d for d in chunk.header.devices if "id" in d]
    unmeasured = [d for d in listed if d.get("tells_busy") is False]
    unmeasured_names = {str(d[key]) for d in unmeasured for key in ("id", "uuid") if key in d} | {
        ""
    }
    measured = [d for d in listed if str(d["id"]) not in unmeasured_names]
    device_ids = [str(d["id"]) for d in measured]
    device_ids += sorted(
        {d for name, d in chunk.series if name.startswith("gpu.")}
        - set(device_ids)
        - unmeasured_names
    )
    named = {str(d["uuid"]): str(d["id"]) for d in measured if "uuid" in d}
    owned = _map_owners(measured)
    assigned = {}
    for main in mains:
        declared = str(main.registration.get("device") or "")
        declared = "" if declared in unmeasured_names else declared
        declared = declared if declared in device_ids else named.get(declared, declared)
        owned_device = "" if declared in device_ids else _find_owned_device(chunk, main, owned)
        assigned[main.pid] = owned_device or declared
    free_ids = [d for d in device_ids if d not in assigned.values()]
    unassigned = [p for p in mains if not assigned[p.pid]]
    if len(unassigned) == 1 and len(free_ids) == 1:
        assigned[unassigned[0].pid] = free_ids[0]
    elif len(free_ids) >= len(unassigned) and len(mains) == len(unassigned):
        for process in unassigned:
            local_rank = parse_job_position(process.registration).node_local_rank
            if local_rank is not None and local_rank < len(device_ids):
                assigned[process.pid] = device_ids[local_rank]
    return assigned


def _map_owners(devices: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """Map each process to its device: owners before users; of several devices, the first."""
    owned: dict[Any, str] = {}
    for device in devices:
        if "pid" in device:
            owned.setdefault(device["pid"], str(device["id"]))
    for device in devices:
        for pid in _list_users(device):
            owned.setdefault(pid, str(device["id"]))
    return owned


def _list_users(device: Mapping[str, Any]) -> list[int]:
    """List the processes that the recorder saw using a device."""
    users = device.get("users")
    return [pid for pid in users if isinstance(pid, int)] if isinstance(users, list) else []


def _find_owned_device(chunk: Chunk, main: Process, owned: Mapping[int, str]) -> str:
    """Find the device opened by a process or by one of its children; "" if there is none."""
    if main.pid in owned:
        return owned[main.pid]
    for pid, device in owned.items():
        process = chunk.processes.get(pid)
        if process is not None and main.pid in _list_ancestors(chunk, process):
            return device
    return ""
