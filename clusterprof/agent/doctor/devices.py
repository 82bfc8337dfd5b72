"""Maps accelerators to ranks: the devices that variables make visible, and those seen in use.

`CUDA_VISIBLE_DEVICES` (CUDA C++ Programming Guide, "CUDA Environment Variables") lists
indices, prefixes of UUIDs ("GPU-8932f937") or MIG instances ("MIG-…"), and ends at the
first entry that is no device; indices are ordered by speed unless
CUDA_DEVICE_ORDER=PCI_BUS_ID. `ROCR_VISIBLE_DEVICES` (ROCm documentation, "GPU isolation
techniques") lists indices or UUIDs, `HIP_VISIBLE_DEVICES` indices among the devices
that remain. `ZE_AFFINITY_MASK` (Level Zero specification) lists devices or
"device.tile"; `NEURON_RT_VISIBLE_CORES` numbers and ranges ("0-3,5").

Settings of the kernel and the driver that limit what can be measured of a job.

docs.kernel.org/admin-guide/sysctl/kernel (dmesg_restrict, perf_event_paranoid,
task_delayacct), filesystems/proc (hidepid), accounting/psi, admin-guide/cgroup-v2; the
NVIDIA driver's README (NVreg_RestrictProfilingToAdminUsers, shown as
RmProfilingAdminOnly).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clusterprof.agent.doctor.environment import ADMIN, JOB, USER, RankProcess, SuggestedChange
from clusterprof.agent.doctor.sources import SourceCheck
from clusterprof.agent.linux.cgroup import find_cgroup
from clusterprof.agent.linux.files import Roots, read_int, read_text
from clusterprof.agent.linux.storage.disks import parse_mountinfo
from clusterprof.errors import Unavailable

Devices = Sequence[Mapping[str, Any]]
SEEN, REGISTERED = "seen using it", "said so"
ONLY_VISIBLE, BY_LOCAL_RANK = "the only one it may see", "by its local rank"


def map_devices_to_ranks(
    checks: Sequence[SourceCheck], processes: Sequence[RankProcess]
) -> list[dict[str, Any]]:
    """Return one entry per accelerator of the node, with the ranks that use it.

    id, collector, name, pci_bus_id, numa_node, index, emulated where known, and `users`:
    pid, rank, how (SEEN, REGISTERED, ONLY_VISIBLE, BY_LOCAL_RANK: the most reliable one
    available), here (doctor's own process). `visible`: whether any process of the job may
    see it; None without processes.
    """
    out = []
    for check in checks:
        for device in check.devices:
            entry: dict[str, Any] = {"collector": check.name, "id": str(device.get("id", ""))}
            keys = ("name", "pci_bus_id", "numa_node", "index", "emulated", "memory_bytes")
            entry |= {key: device[key] for key in keys if key in device}
            entry["visible"] = None
            entry["users"] = []
            out.append(entry)
    by_id = {entry["id"]: entry for entry in out}
    for process in processes:
        visible_by_collector = [
            list_visible_devices(check.name, check.devices, process.chosen)
            for check in checks
            if check.devices
        ]
        allowed = [device for devices in visible_by_collector for device in devices]
        for entry in out:
            entry["visible"] = bool(entry["visible"]) or entry["id"] in allowed
        device_ids, how = _find_process_devices(process, allowed, checks)
        for id_ in device_ids:
            if id_ in by_id:
                user = {"pid": process.pid, "rank": process.rank, "how": how, "here": process.here}
                by_id[id_]["users"].append(user)
    return out


def _find_process_devices(
    process: RankProcess, allowed: Sequence[str], checks: Sequence[SourceCheck]
) -> tuple[Sequence[str], str]:
    pids = {process.pid, *process.below}
    device_ids = [device for check in checks for pid, device in check.users if pid in pids]
    if device_ids:
        return list(dict.fromkeys(device_ids)), SEEN
    if process.device:
        return [process.device], REGISTERED
    if len(allowed) == 1:
        return allowed, ONLY_VISIBLE
    local = process.node_local_rank
    if local is not None and local < len(allowed):
        return [allowed[local]], BY_LOCAL_RANK
    return [], ""


def list_visible_devices(
    collector: str, devices: Devices, variables: Mapping[str, str]
) -> list[str]:
    """Return the ids of the devices visible to a process with these variables, in its order."""
    ids = [str(device.get("id", "")) for device in devices]
    if collector == "gpu_nvidia":
        return _select_visible(ids, variables.get("CUDA_VISIBLE_DEVICES"))
    if collector == "gpu_amd":
        rocr_ids = _select_visible(ids, variables.get("ROCR_VISIBLE_DEVICES"))
        return _select_visible(rocr_ids, variables.get("HIP_VISIBLE_DEVICES"))
    if collector == "gpu_intel":
        mask = variables.get("ZE_AFFINITY_MASK")
        words = None if not mask else [word.partition(".")[0] for word in mask.split(",")]
        return _select_visible(ids, None if words is None else ",".join(dict.fromkeys(words)))
    if collector == "gpu_neuron":
        cores = variables.get("NEURON_RT_VISIBLE_CORES")
        return (
            ids
            if cores is None
            else _select_visible(ids, ",".join(map(str, _parse_numbers(cores))))
        )
    if collector == "gpu_tpu":
        return _select_visible(ids, variables.get("TPU_VISIBLE_CHIPS"))
    return ids


def _select_visible(ids: Sequence[str], words: str | None) -> list[str]:
    """Return the ids selected by a list of indices and name prefixes, up to an invalid entry."""
    if words is None:
        return list(ids)
    selected: list[str] = []
    for word in (word.strip() for word in words.split(",")):
        if word.isascii() and word.isdigit() and int(word) < len(ids):
            selected.append(ids[int(word)])
            continue
        matches = [id_ for id_ in ids if len(word) > 4 and id_.startswith(word)]
        if len(matches) != 1:
            break
        selected += matches
    return list(dict.fromkeys(selected))


def _parse_numbers(words: str) -> list[int]:
    """Parse "0-3,5" into numbers; anything that is not a number ends the list."""
    numbers: list[int] = []
    for word in words.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            break
        numbers += range(int(first), int(last or first) + 1)
        if len(numbers) > 4096:
            break
    return numbers


def find_device_changes(
    entries: Sequence[Mapping[str, Any]], processes: Sequence[RankProcess]
) -> list[SuggestedChange]:
    """Return suggested changes for devices that are shared, unassigned or unused."""
    out: list[SuggestedChange] = []
    pids_with_device: set[int] = set()
    for entry in entries:
        ranks = sorted({user["rank"] for user in entry["users"] if user["rank"] is not None})
        pids_with_device |= {user["pid"] for user in entry["users"]}
        if len(ranks) > 1:
            rank_list = ", ".join(map(str, ranks))
            message = f"ranks {rank_list} share {entry['id']}: they wait for each other's kernels"
            remedy = "start as many tasks per node as it has devices, or set each rank's device"
            out.append(SuggestedChange("devices", message, f"{remedy} by its local rank", JOB))
    real = [entry for entry in entries if not entry.get("emulated")]
    if not real or not processes:
        return out
    without_device = [
        process
        for process in processes
        if process.pid not in pids_with_device and process.rank is not None
    ]
    if without_device:
        rank_list = ", ".join(str(process.rank) for process in without_device)
        word = "rank" if len(without_device) == 1 else "ranks"
        message = f"the device is unknown for {word} {rank_list}"
        remedy = "look at CUDA_VISIBLE_DEVICES (or ROCR_…) of the job, and at tasks per node"
        out.append(SuggestedChange("devices", message, remedy, USER))
    allowed = [entry for entry in real if entry["visible"]]
    idle = [entry for entry in allowed if not entry["users"]]
    if idle and pids_with_device:
        message = f"{len(idle)} of {len(allowed)} devices that the job may use are used by no rank"
        remedy = "start a rank for each, or ask for fewer: --ntasks-per-node, --nproc-per-node"
        out.append(SuggestedChange("devices", message, remedy, JOB))
    return out


_NVIDIA_PARAMS = "driver/nvidia/params"
_CAP_SYS_PTRACE, _CAP_SYS_ADMIN, _CAP_SYSLOG, _CAP_PERFMON = 19, 21, 34, 38


def read_kernel_settings(roots: Roots, pid: int | None = None) -> list[dict[str, Any]]:
    """Return one entry per setting: name, value (None = absent), enough, gives, remedy.

    enough: whether the setting permits the measurements it controls; None = unknown.
    `gives` describes them.
    """
    capabilities = _read_capabilities(roots)
    out = [
        _read_dmesg_setting(roots, capabilities),
        _read_perf_setting(roots, capabilities),
        _read_delay_setting(roots),
        _read_hidepid_setting(roots, capabilities),
        _read_pressure_setting(roots),
        *_read_delegation_setting(roots, pid),
    ]
    profiling = _read_profiling_setting(roots, capabilities)
    return [*out, profiling] if profiling else out


def _make_setting(
    name: str, value: int | str | None, enough: bool | None, gives: str, remedy: str
) -> dict[str, Any]:
    return {"name": name, "value": value, "enough": enough, "gives": gives, "remedy": remedy}


def _read_dmesg_setting(roots: Roots, capabilities: int) -> dict[str, Any]:
    value = read_int(roots.proc / "sys/kernel/dmesg_restrict")
    enough = None if value is None else value == 0 or bool(capabilities >> _CAP_SYSLOG & 1)
    gives = "the kernel log: Xid errors of NVIDIA GPUs, links that went down, processes killed"
    remedy = "sysctl kernel.dmesg_restrict=0, or give the job's user CAP_SYSLOG"
    return _make_setting("kernel.dmesg_restrict", value, enough, gives, remedy)


def _read_perf_setting(roots: Roots, capabilities: int) -> dict[str, Any]:
    value = read_int(roots.proc / "sys/kernel/perf_event_paranoid")
    is_capable = capabilities >> _CAP_PERFMON & 1 or capabilities >> _CAP_SYS_ADMIN & 1
    enough = None if value is None else value <= 0 or bool(is_capable)
    gives = "counters of the whole machine (memory bandwidth), for other tools; ours need none"
    remedy = "sysctl kernel.perf_event_paranoid=0, or give the job's user CAP_PERFMON"
    return _make_setting("kernel.perf_event_paranoid", value, enough, gives, remedy)


def _read_delay_setting(roots: Roots) -> dict[str, Any]:
    value = read_int(roots.proc / "sys/kernel/task_delayacct")
    enough = None if value is None else value == 1
    gives = "how long each thread waited for block devices"
    remedy = "sysctl kernel.task_delayacct=1"
    return _make_setting("kernel.task_delayacct", value, enough, gives, remedy)


def _read_hidepid_setting(roots: Roots, capabilities: int) -> dict[str, Any]:
    """Read hidepid from the last mount of /proc; the mount table has a name or a number."""
    value = None
    try:
        data = (roots.proc / "self/mountinfo").read_bytes()
    except OSError:
        data = b""
    for mount in parse_mountinfo(data):
        if mount.type == "proc" and mount.point == "/proc":
            words = [option[8:] for option in mount.options if option.startswith("hidepid=")]
            value = words[0] if words else "off"
    sees_all = bool(capabilities >> _CAP_SYS_PTRACE & 1)
    enough = None if value is None else value in ("0", "off") or sees_all
    gives = "processes of other users that load this node's disks, cores and devices"
    remedy = "mount /proc without hidepid, or with gid= a group that the job's user is in"
    return _make_setting("hidepid of /proc", value, enough, gives, remedy)


def _read_pressure_setting(roots: Roots) -> dict[str, Any]:
    available = (roots.proc / "pressure/cpu").exists()
    gives = "pressure: how long tasks waited for CPU, I/O and memory"
    remedy = "boot with psi=1; a kernel before 4.20 or without CONFIG_PSI has none"
    return _make_setting("PSI", "on" if available else None, available, gives, remedy)


def _read_delegation_setting(roots: Roots, pid: int | None) -> list[dict[str, Any]]:
    """Read which controllers are enabled in the job's own cgroup (version 2)."""
    try:
        cgroup = find_cgroup(roots, pid, "unified")
    except (Unavailable, ValueError):
        return []
    if cgroup.folder == cgroup.root:
        return []
    controllers = read_text(cgroup.folder / "cgroup.controllers").split()
    wanted = {"cpu": "throttling by a quota", "memory": "memory of the job", "io": "its disk I/O"}
    lacking = [name for name in wanted if name not in controllers]
    shown = ", ".join(wanted[name] for name in lacking or wanted)
    gives = f"of the job's own cgroup: {shown}"
    remedy = "systemd: Delegate=yes, or CPUAccounting, MemoryAccounting and IOAccounting=yes"
    value = " ".join(controllers)
    return [_make_setting("cgroup.controllers", value, not lacking, gives, remedy)]


def _read_profiling_setting(roots: Roots, capabilities: int) -> dict[str, Any] | None:
    for line in read_text(roots.proc / _NVIDIA_PARAMS).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("RmProfilingAdminOnly", "RmProfilingAdminPermission"):
            is_capable = capabilities >> _CAP_SYS_ADMIN & 1
            enough = value.strip() == "0" or bool(is_capable)
            gives = "profiling counters of NVIDIA GPUs (SM active, tensor, DRAM) without GPM"
            remedy = "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d"
            return _make_setting(name.strip(), value.strip(), enough, gives, remedy)
    return None


def _read_capabilities(roots: Roots) -> int:
    for line in read_text(roots.proc / "self/status").splitlines():
        if line.startswith("CapEff:"):
            try:
                return int(line.partition(":")[2], 16)
            except ValueError:
                return 0
    return 0


def find_setting_changes(settings: Sequence[dict[str, Any]]) -> list[SuggestedChange]:
    """Return a suggested change for each setting that prevents a measurement."""
    out = []
    for setting in settings:
        if setting["enough"] is False:
            value = "" if setting["value"] in (None, "") else f" = {setting['value']}"
            effect = "is missing" if setting["value"] is None else "hides"
            message = f"{setting['name']}{value} {effect}: {setting['gives']}"
            out.append(SuggestedChange("kernel", message, setting["remedy"], ADMIN))
    return out
