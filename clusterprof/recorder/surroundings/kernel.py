"""Settings of the kernel and the driver that decide how much of a job can be seen.

docs.kernel.org/admin-guide/sysctl/kernel (dmesg_restrict, perf_event_paranoid, task_delayacct),
filesystems/proc (hidepid), accounting/psi, admin-guide/cgroup-v2; the NVIDIA driver's README
(NVreg_RestrictProfilingToAdminUsers, shown as RmProfilingAdminOnly).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clusterprof.errors import Unavailable
from clusterprof.linux.cgroup import find_cgroup
from clusterprof.linux.mountinfo import parse_mountinfo
from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import number, text
from clusterprof.recorder.surroundings.change import ADMIN, Change

_PARAMS = "driver/nvidia/params"
_CAP_SYS_PTRACE, _CAP_SYS_ADMIN, _CAP_SYSLOG, _CAP_PERFMON = 19, 21, 34, 38


def read_settings(roots: Roots, pid: int | None = None) -> list[dict[str, Any]]:
    """Return one entry per setting: name, value (None = not there), enough, gives, remedy.

    enough: whether it lets us see what it decides about; None = unknown. `gives` says what that is.
    """
    capabilities = _capabilities(roots)
    out = [
        _dmesg(roots, capabilities),
        _perf(roots, capabilities),
        _delays(roots),
        _hidepid(roots, capabilities),
        _pressure(roots),
        *_delegation(roots, pid),
    ]
    profiling = _profiling(roots, capabilities)
    return [*out, profiling] if profiling else out


def _setting(
    name: str, value: int | str | None, enough: bool | None, gives: str, remedy: str
) -> dict[str, Any]:
    return {"name": name, "value": value, "enough": enough, "gives": gives, "remedy": remedy}


def _dmesg(roots: Roots, capabilities: int) -> dict[str, Any]:
    value = number(roots.proc / "sys/kernel/dmesg_restrict")
    enough = None if value is None else value == 0 or bool(capabilities >> _CAP_SYSLOG & 1)
    gives = "the kernel log: Xid errors of NVIDIA GPUs, links that went down, processes killed"
    remedy = "sysctl kernel.dmesg_restrict=0, or give the job's user CAP_SYSLOG"
    return _setting("kernel.dmesg_restrict", value, enough, gives, remedy)


def _perf(roots: Roots, capabilities: int) -> dict[str, Any]:
    value = number(roots.proc / "sys/kernel/perf_event_paranoid")
    able = capabilities >> _CAP_PERFMON & 1 or capabilities >> _CAP_SYS_ADMIN & 1
    enough = None if value is None else value <= 0 or bool(able)
    gives = "counters of the whole machine (memory bandwidth), for other tools; ours need none"
    remedy = "sysctl kernel.perf_event_paranoid=0, or give the job's user CAP_PERFMON"
    return _setting("kernel.perf_event_paranoid", value, enough, gives, remedy)


def _delays(roots: Roots) -> dict[str, Any]:
    value = number(roots.proc / "sys/kernel/task_delayacct")
    enough = None if value is None else value == 1
    gives = "how long each thread waited for block devices"
    remedy = "sysctl kernel.task_delayacct=1"
    return _setting("kernel.task_delayacct", value, enough, gives, remedy)


def _hidepid(roots: Roots, capabilities: int) -> dict[str, Any]:
    """The last mount of /proc counts; in the mount table hidepid is a name or a number."""
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
    gives = "processes of others that keep this node's disks, cores and devices busy"
    remedy = "mount /proc without hidepid, or with gid= a group that the job's user is in"
    return _setting("hidepid of /proc", value, enough, gives, remedy)


def _pressure(roots: Roots) -> dict[str, Any]:
    there = (roots.proc / "pressure/cpu").exists()
    gives = "pressure: how long tasks waited for CPU, I/O and memory"
    remedy = "boot with psi=1; a kernel before 4.20 or without CONFIG_PSI has none"
    return _setting("PSI", "on" if there else None, there, gives, remedy)


def _delegation(roots: Roots, pid: int | None) -> list[dict[str, Any]]:
    """Say which controllers count for the job's own cgroup (version 2)."""
    try:
        place = find_cgroup(roots, pid, "unified")
    except (Unavailable, ValueError):
        return []
    if place.folder == place.root:
        return []
    having = text(place.folder / "cgroup.controllers").split()
    wanted = {"cpu": "throttling by a quota", "memory": "memory of the job", "io": "its disk I/O"}
    lacking = [name for name in wanted if name not in having]
    told = ", ".join(wanted[name] for name in lacking or wanted)
    gives = f"of the job's own cgroup: {told}"
    remedy = "systemd: Delegate=yes, or CPUAccounting, MemoryAccounting and IOAccounting=yes"
    value = " ".join(having)
    return [_setting("cgroup.controllers", value, not lacking, gives, remedy)]


def _profiling(roots: Roots, capabilities: int) -> dict[str, Any] | None:
    for line in text(roots.proc / _PARAMS).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("RmProfilingAdminOnly", "RmProfilingAdminPermission"):
            able = capabilities >> _CAP_SYS_ADMIN & 1
            enough = value.strip() == "0" or bool(able)
            gives = "profiling counters of NVIDIA GPUs (SM active, tensor, DRAM) where GPM is not"
            remedy = "options nvidia NVreg_RestrictProfilingToAdminUsers=0 in /etc/modprobe.d"
            return _setting(name.strip(), value.strip(), enough, gives, remedy)
    return None


def _capabilities(roots: Roots) -> int:
    for line in text(roots.proc / "self/status").splitlines():
        if line.startswith("CapEff:"):
            try:
                return int(line.partition(":")[2], 16)
            except ValueError:
                return 0
    return 0


def changes(settings: Sequence[dict[str, Any]]) -> list[Change]:
    """Say which settings hide something."""
    out = []
    for one in settings:
        if one["enough"] is False:
            value = "" if one["value"] in (None, "") else f" = {one['value']}"
            is_missing = "is missing" if one["value"] is None else "hides"
            message = f"{one['name']}{value} {is_missing}: {one['gives']}"
            out.append(Change("kernel", message, one["remedy"], ADMIN))
    return out
