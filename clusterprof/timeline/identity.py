"""Who a process is in its job, as its registration says.

The recorder resolves the variables of launchers once (docs/design.md, section 3). Recordings from
before it did carry the variables alone: then, and only then, they are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_RANKS = (
    "RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
)
_WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL_RANKS = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_LOCALID",
)
_JOBS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "FLUX_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT",)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands in its job; None = nobody said."""

    job: str | None = None
    """The job's name, alike on all nodes."""
    rank: int | None = None
    """Global."""
    world_size: int | None = None
    node_local_rank: int | None = None
    node_number: int | None = None
    restart: int = 0
    """How often its launcher had begun the ranks anew."""
    meets_at: str = ""
    """Address and port at which the ranks of the job found each other."""


NOBODY = Place()
"""What is known of a process that never registered."""


def place_of(registration: Mapping[str, Any]) -> Place:
    """Return the place of a process by the attributes of its registration."""
    variables = registration.get("variables") or {}

    def number(name: str, older: tuple[str, ...]) -> int | None:
        if name in registration:
            said = registration[name]
            if isinstance(said, int) and not isinstance(said, bool):
                return said
            return None
        return next((int(v) for v in _found(variables, older) if v.strip().isdecimal()), None)

    job = registration.get("job")
    if "job" not in registration:
        job = next((value for value in _found(variables, _JOBS) if value != "none"), None)
    address, port = (str(variables.get(name, "")) for name in ("MASTER_ADDR", "MASTER_PORT"))
    return Place(
        job=job if isinstance(job, str) and job else None,
        rank=number("rank", _RANKS),
        world_size=number("world_size", _WORLD_SIZES),
        node_local_rank=number("node_local_rank", _LOCAL_RANKS),
        node_number=number("node_number", ()),
        restart=number("restart", _RESTARTS) or 0,
        meets_at=f"{address}:{port}" if address and port else "",
    )


def _found(variables: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    return [str(variables[name]) for name in names if variables.get(name) not in (None, "")]
