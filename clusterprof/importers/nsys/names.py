"""What names in a profile mean: CUDA calls, NVTX ranges, NCCL kernels, launchers' variables."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterprof.importers.nsys.database import Database
from clusterprof.probe import layout

# What a CUDA call does to its host.
OTHER_CALL, SYNC_CALL, ALLOC_CALL, COPY_CALL = range(4)
# What an NVTX range says.
NOTHING, STEP, NUMBERED_STEP, WAIT, OPTIMIZER, OPERATOR = range(6)

_SYNC = re.compile(r"(cuda|cu)(Device|Stream|Event|Ctx|Thread)Synchronize")
_ALLOC = re.compile(r"cuda(Malloc|Free|HostAlloc|HostRegister)|cuMem(Alloc|Free|Create|Map|Unmap|"
                    r"Release|SetAccess|Host|Address)")  # fmt: skip
_COPY = re.compile(r"(cuda|cu)Memcpy")
_STEP_WORD = (
    r"(?:profiler|train(?:ing)?|optimi[sz]er|global|mini)?[ _.-]?(?:step|iteration|iter|batch)"
)
_STEPS = re.compile(rf"\s*{_STEP_WORD}\s*[:=#_\[( -]*(\d{{1,15}})?[\])]?\s*", re.IGNORECASE)
_LAST_OF_STEP = re.compile(r"optimizer\.step|optimizer_step|optimizer step", re.IGNORECASE)
_WAITS = re.compile(
    r"data[ _-]?loader|data[ _-]?(wait|fetch|load)|(load|get|next|fetch)[ _-]?(data|batch)\b"
    r"|batch[ _-]?(fetch|load|wait)|wait[ _-]?(for[ _-]?)?(data|batch)",
    re.IGNORECASE,
)
OPERATORS = re.compile(r"::|, op_id|, seq =|nccl")
_NCCL = re.compile(r"(?:nccl|rccl)(?:Dev)?Kernel_?([A-Za-z]+)")
_OPERATIONS = (
    ("AllReduce", layout.ALL_REDUCE), ("AllGather", layout.ALL_GATHER),
    ("ReduceScatter", layout.REDUCE_SCATTER), ("Broadcast", layout.BROADCAST),
    ("Reduce", layout.REDUCE), ("SendRecv", layout.ALL_TO_ALL), ("AllToAll", layout.ALL_TO_ALL),
    ("AlltoAll", layout.ALL_TO_ALL), ("Gather", layout.GATHER), ("Scatter", layout.SCATTER),
)  # fmt: skip
_TEXTS_AT_MOST, _TEXTS_CHARACTERS = 1 << 19, 32 << 20
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLDS = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def call_class(name: str) -> int:
    """Say what a CUDA call does: wait, allocate, copy, or something else."""
    if _SYNC.match(name):
        return SYNC_CALL
    if _ALLOC.match(name):
        return ALLOC_CALL
    return COPY_CALL if _COPY.match(name) else OTHER_CALL


def range_class(text: str) -> tuple[int, int]:
    """Say what an NVTX range is, and the number in its name; -1 for none."""
    if OPERATORS.search(text):
        return OPERATOR, -1
    step = _STEPS.fullmatch(text)
    if step:
        return (NUMBERED_STEP, int(step[1])) if step[1] else (STEP, -1)
    if _WAITS.search(text):
        return WAIT, -1
    return (OPTIMIZER if _LAST_OF_STEP.search(text) else NOTHING), -1


def operation_of(kernel: str) -> int:
    """Return the collective operation of a kernel; 0 for kernels that compute."""
    found = _NCCL.search(kernel)
    if found is None:
        return 0
    name = found[1]
    return next((kind for word, kind in _OPERATIONS if name.startswith(word)), 15)


@dataclass(frozen=True, slots=True)
class Strings:
    """What the strings of a profile mean, by their id; others are left out."""

    calls: dict[int, int]
    """Class of a CUDA call, where it is not OTHER_CALL."""
    kernels: dict[int, int]
    """Collective operation of a kernel."""
    texts: dict[int, str]
    """Texts of NVTX ranges that say anything."""


def strings_of(db: Database) -> Strings:
    """Read the strings of a profile once, however many there are. Raises DamagedError."""
    found = Strings({}, {}, {})
    room = _TEXTS_CHARACTERS
    for rows in db.rows("StringIds", ("id", "value")):
        for id_, value in rows:
            if not isinstance(id_, int) or not isinstance(value, str):
                continue
            if kind := call_class(value):
                found.calls[id_] = kind
            elif operation := operation_of(value):
                found.kernels[id_] = operation
            elif len(found.texts) < _TEXTS_AT_MOST and room > 0 and not value.startswith("/"):
                found.texts[id_] = value
                room -= len(value)
    return found


def launched_as(db: Database) -> tuple[int | None, int | None]:
    """Return rank and world size of what was profiled, from the launcher's variables; None unknown.

    They are those of the profiled command: the rank of each process only when each was profiled by
    itself. No other variable is looked at. Raises DamagedError.
    """
    found: dict[str, int] = {}
    for rows in db.rows("META_DATA_CAPTURE", ("name", "value")):
        for name, value in rows:
            if isinstance(name, str) and name.endswith(":ENVIRONMENT_VARIABLE"):
                key, _, text = str(value).partition("=")
                text = text.strip('"')
                if key in (*_RANKS, *_WORLDS) and text.isdecimal() and len(text) < 9:
                    found[key] = int(text)
    rank = next((found[key] for key in _RANKS if key in found), None)
    world = next((found[key] for key in _WORLDS if key in found), None)
    return (None, None) if rank is None or (world is not None and rank >= world) else (rank, world)
