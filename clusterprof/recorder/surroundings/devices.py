"""Which accelerator is whose: what variables let a process see, and what it was seen to use.

`CUDA_VISIBLE_DEVICES` (CUDA C++ Programming Guide, "CUDA Environment Variables") lists indices,
beginnings of UUIDs ("GPU-8932f937") or MIG instances ("MIG-…"), and ends before the first that is
no device; indices count by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID. `ROCR_VISIBLE_DEVICES` (ROCm
documentation, "GPU isolation techniques") lists indices or UUIDs, `HIP_VISIBLE_DEVICES` indices of
what is left. `ZE_AFFINITY_MASK` (Level Zero specification) lists devices or "device.tile";
`NEURON_RT_VISIBLE_CORES` numbers and ranges ("0-3,5").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof.recorder.inspect import Look
from clusterprof.recorder.surroundings.change import JOB, YOU, Change
from clusterprof.recorder.surroundings.place import Process

Devices = Sequence[Mapping[str, Any]]
SEEN, REGISTERED = "seen using it", "said so"
ONLY, BY_LOCAL_RANK = "the only one it may see", "by its local rank"


def whose(looks: Sequence[Look], processes: Sequence[Process]) -> list[dict[str, Any]]:
    """Return one entry per accelerator of the node, with the ranks it belongs to.

    id, collector, name, pci_bus_id, numa_node, index, emulated where they are known, and `users`:
    pid, rank, how (SEEN, REGISTERED, ONLY, BY_LOCAL_RANK: the surest there is), here (doctor's own
    place). `visible`: whether any process of the job may see it; None without such a process.
    """
    out = []
    for look in looks:
        for device in look.devices:
            entry: dict[str, Any] = {"collector": look.name, "id": str(device.get("id", ""))}
            known = ("name", "pci_bus_id", "numa_node", "index", "emulated", "memory_bytes")
            entry |= {key: device[key] for key in known if key in device}
            entry["visible"] = None
            entry["users"] = []
            out.append(entry)
    by_id = {entry["id"]: entry for entry in out}
    for process in processes:
        mine = [visible(look.name, look.devices, process.chosen) for look in looks if look.devices]
        allowed = [device for devices in mine for device in devices]
        for entry in out:
            entry["visible"] = bool(entry["visible"]) or entry["id"] in allowed
        its, how = _devices_of(process, allowed, looks)
        for id_ in its:
            if id_ in by_id:
                user = {"pid": process.pid, "rank": process.rank, "how": how, "here": process.here}
                by_id[id_]["users"].append(user)
    return out


def _devices_of(
    process: Process, allowed: Sequence[str], looks: Sequence[Look]
) -> tuple[Sequence[str], str]:
    pids = {process.pid, *process.below}
    seen = [device for look in looks for pid, device in look.users if pid in pids]
    if seen:
        return list(dict.fromkeys(seen)), SEEN
    if process.device:
        return [process.device], REGISTERED
    if len(allowed) == 1:
        return allowed, ONLY
    local = process.node_local_rank
    if local is not None and local < len(allowed):
        return [allowed[local]], BY_LOCAL_RANK
    return [], ""


def visible(collector: str, devices: Devices, chosen: Mapping[str, str]) -> list[str]:
    """Return the ids of the devices that a process with these variables may see, in its order."""
    ids = [str(device.get("id", "")) for device in devices]
    if collector == "gpu_nvidia":
        return _cut(ids, chosen.get("CUDA_VISIBLE_DEVICES"))
    if collector == "gpu_amd":
        of_rocr = _cut(ids, chosen.get("ROCR_VISIBLE_DEVICES"))
        return _cut(of_rocr, chosen.get("HIP_VISIBLE_DEVICES"))
    if collector == "gpu_intel":
        mask = chosen.get("ZE_AFFINITY_MASK")
        words = None if not mask else [word.partition(".")[0] for word in mask.split(",")]
        return _cut(ids, None if words is None else ",".join(dict.fromkeys(words)))
    if collector == "gpu_neuron":
        cores = chosen.get("NEURON_RT_VISIBLE_CORES")
        return ids if cores is None else _cut(ids, ",".join(map(str, _numbers(cores))))
    if collector == "gpu_tpu":
        return _cut(ids, chosen.get("TPU_VISIBLE_CHIPS"))
    return ids


def _cut(ids: Sequence[str], words: str | None) -> list[str]:
    """Return what a list of indices and beginnings of names leaves, up to the first wrong one."""
    if words is None:
        return list(ids)
    found: list[str] = []
    for word in (word.strip() for word in words.split(",")):
        if word.isascii() and word.isdigit() and int(word) < len(ids):
            found.append(ids[int(word)])
            continue
        named = [id_ for id_ in ids if len(word) > 4 and id_.startswith(word)]
        if len(named) != 1:
            break
        found += named
    return list(dict.fromkeys(found))


def _numbers(words: str) -> list[int]:
    """Return the numbers of "0-3,5"; raises nothing: what is no number ends the list."""
    found: list[int] = []
    for word in words.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            break
        found += range(int(first), int(last or first) + 1)
        if len(found) > 4096:
            break
    return found


def changes(entries: Sequence[Mapping[str, Any]], processes: Sequence[Process]) -> list[Change]:
    """Say what is wrong with who has which device."""
    out: list[Change] = []
    taken: set[int] = set()
    for entry in entries:
        ranks = sorted({user["rank"] for user in entry["users"] if user["rank"] is not None})
        taken |= {user["pid"] for user in entry["users"]}
        if len(ranks) > 1:
            told = ", ".join(map(str, ranks))
            message = f"ranks {told} share {entry['id']}: they wait for each other's kernels"
            remedy = "start as many tasks per node as it has devices, or set each rank's device"
            out.append(Change("devices", message, f"{remedy} by its local rank", JOB))
    real = [entry for entry in entries if not entry.get("emulated")]
    if not real or not processes:
        return out
    without = [one for one in processes if one.pid not in taken and one.rank is not None]
    if without:
        told = ", ".join(str(one.rank) for one in without)
        word = "rank" if len(without) == 1 else "ranks"
        message = f"no device can be told for {word} {told}"
        remedy = "look at CUDA_VISIBLE_DEVICES (or ROCR_…) of the job, and at tasks per node"
        out.append(Change("devices", message, remedy, YOU))
    allowed = [entry for entry in real if entry["visible"]]
    idle = [entry for entry in allowed if not entry["users"]]
    if idle and taken:
        message = f"{len(idle)} of {len(allowed)} devices that the job may use belong to no rank"
        remedy = "start a rank for each, or ask for fewer: --ntasks-per-node, --nproc-per-node"
        out.append(Change("devices", message, remedy, JOB))
    return out
