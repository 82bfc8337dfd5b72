"""Which processes train, which work for them, and on which accelerator.

A training process is one that marked steps or waits for data and is not a dataloader worker. A
recording without spans knows the processes that a launcher gave a rank; where there is none, those
that own an accelerator, else the busiest of the command and its descendants. The launcher itself
(torchrun's agent) trains nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof.probe.layout import FETCH, FIRST_USER_KIND, WORKER_START
from clusterprof.timeline.identity import place_of
from clusterprof.timeline.model import Chunk, Process, Rank
from clusterprof.timeline.spans import TRAINING


def ranks_of(chunk: Chunk) -> tuple[Rank, ...]:
    """Return the training processes of a chunk, by rank, then pid; those without a rank last."""
    mains = _training(chunk)
    marked = bool(mains)
    if not marked:
        mains = _without_spans(chunk)
    devices = _devices(chunk, mains)
    emulated = {str(d.get("id")) for d in chunk.header.devices if d.get("emulated")}
    pids = {p.pid for p in mains}
    ranks = [
        Rank(
            chunk=chunk,
            rank=rank_number(main.registration),
            pid=main.pid,
            device=devices[main.pid],
            emulated=devices[main.pid] in emulated or devices[main.pid].startswith("emulated-"),
            main=main,
            workers=_workers(chunk, main, pids, marked),
            marked=marked,
        )
        for main in mains
    ]
    return tuple(sorted(ranks, key=lambda r: (r.rank is None, r.rank or 0, r.pid)))


def rank_number(registration: Mapping[str, Any]) -> int | None:
    """Return the global rank a launcher gave to a process, None when it gave none."""
    return place_of(registration).rank


def _training(chunk: Chunk) -> list[Process]:
    """Processes with steps or waits; without any, those that only a user marked.

    Marks of a user alone are no proof: they may stand in dataset code that a worker runs.
    """
    mains = [p for p in chunk.processes.values() if _marks(p) and WORKER_START not in p.spans]
    pids = {p.pid for p in mains}
    own = [
        p
        for p in chunk.processes.values()
        if any(kind >= FIRST_USER_KIND for kind in p.spans)
        and p.pid not in pids
        and not {FETCH, WORKER_START} & p.spans.keys()
        and not pids & set(_ancestors(chunk, p))
    ]
    return mains + own


def _marks(process: Process) -> bool:
    return any(kind in process.spans for kind in TRAINING)


def _without_spans(chunk: Chunk) -> list[Process]:
    """The processes with a rank, else those with a device, else the busiest of the command's."""
    registered = [p for p in chunk.processes.values() if p.registration]
    ranked = [
        p
        for p in registered
        if p.registration.get("role") == "python" and rank_number(p.registration) is not None
    ]
    if ranked:
        # A child inherits its parent's variables: the one nearest to the launcher is the rank.
        own = {p.pid for p in ranked}
        return [p for p in ranked if not own & set(_ancestors(chunk, p))]
    owners = {device.get("pid") for device in chunk.header.devices}
    owners |= {pid for device in chunk.header.devices for pid in _users(device)}
    owning = [process for process in chunk.processes.values() if process.pid in owners]
    if owning:
        return owning
    commands = {p.pid for p in registered if p.registration.get("role") == "command"}
    family = [
        p
        for p in chunk.processes.values()
        if p.pid in commands or commands & set(_ancestors(chunk, p))
    ]
    family = family or registered or list(chunk.processes.values())
    busiest = max(family, key=lambda p: (_cpu_ns(p), -p.pid), default=None)
    return [busiest] if busiest is not None else []


def _cpu_ns(process: Process) -> int:
    """CPU time of all sampled threads in this chunk."""
    return sum(
        int(thread.on_cpu_ns[-1] - thread.on_cpu_ns[0])
        for thread in process.threads.values()
        if len(thread.t_ns) and thread.on_cpu_ns[0] >= 0
    )


def _ancestors(chunk: Chunk, process: Process) -> list[int]:
    """The pids above a process, nearest first."""
    found: list[int] = []
    at = process
    while at.parent_pid > 0 and at.parent_pid not in found and at.parent_pid != process.pid:
        found.append(at.parent_pid)
        parent = chunk.processes.get(at.parent_pid)
        if parent is None:
            break
        at = parent
    return found


def _workers(chunk: Chunk, main: Process, mains: set[int], marked: bool) -> tuple[Process, ...]:
    """Descendants that fetch; when none says so, all that belong to no other training process."""
    below = [
        process
        for process in chunk.processes.values()
        if process.pid not in mains
        and next((pid for pid in _ancestors(chunk, process) if pid in mains), None) == main.pid
    ]
    fetching = [p for p in below if FETCH in p.spans or WORKER_START in p.spans]
    chosen = fetching if marked and (fetching or FETCH in main.spans) else below
    return tuple(sorted(chosen, key=lambda p: p.pid))


def _devices(chunk: Chunk, mains: list[Process]) -> dict[int, str]:
    """The accelerator of each training process, "" where it cannot be told.

    What the process said, by a name the device has; else what the device says of its owner, or
    the recorder saw of its users; else the only device of the only process, else the devices in
    order of the local ranks. A device that does not tell when it is busy (`tells_busy` false in the
    header) is nobody's: what it cannot say, the host must.
    """
    listed = [d for d in chunk.header.devices if "id" in d]
    mute = [d for d in listed if d.get("tells_busy") is False]
    silent = {str(d[key]) for d in mute for key in ("id", "uuid") if key in d} | {""}
    telling = [d for d in listed if str(d["id"]) not in silent]
    known = [str(d["id"]) for d in telling]
    known += sorted(
        {d for name, d in chunk.series if name.startswith("gpu.")} - set(known) - silent
    )
    named = {str(d["uuid"]): str(d["id"]) for d in telling if "uuid" in d}
    owned = _owners(telling)
    found = {}
    for main in mains:
        said = str(main.registration.get("device") or "")
        said = "" if said in silent else said
        said = said if said in known else named.get(said, said)
        seen = "" if said in known else _owned_by(chunk, main, owned)
        found[main.pid] = seen or said
    free = [d for d in known if d not in found.values()]
    left = [p for p in mains if not found[p.pid]]
    if len(left) == 1 and len(free) == 1:
        found[left[0].pid] = free[0]
    elif len(free) >= len(left) and len(mains) == len(left):
        for process in left:
            number = place_of(process.registration).node_local_rank
            if number is not None and number < len(known):
                found[process.pid] = known[number]
    return found


def _owners(devices: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """The device of each process that one names: its owner first, of several devices the first."""
    owned: dict[Any, str] = {}
    for device in devices:
        if "pid" in device:
            owned.setdefault(device["pid"], str(device["id"]))
    for device in devices:
        for pid in _users(device):
            owned.setdefault(pid, str(device["id"]))
    return owned


def _users(device: Mapping[str, Any]) -> list[int]:
    """The processes that the recorder saw to work on a device."""
    users = device.get("users")
    return [pid for pid in users if isinstance(pid, int)] if isinstance(users, list) else []


def _owned_by(chunk: Chunk, main: Process, owned: Mapping[int, str]) -> str:
    """The device opened by a process, or by a child of it."""
    if main.pid in owned:
        return owned[main.pid]
    for pid, device in owned.items():
        process = chunk.processes.get(pid)
        if process is not None and main.pid in _ancestors(chunk, process):
            return device
    return ""
