"""/proc/stat: CPU time of the node and of every core, in clock ticks.

https://docs.kernel.org/filesystems/proc.html (section 1.7)

          user nice system idle iowait irq softirq steal guest guest_nice
    cpu  7812 0 4128 213569 1792 0 115 2771 0 0
    cpu0 1260 0 1554 110721 190 0 10 1416 0 0
    intr 157918 0 0 …
    procs_running 3
    procs_blocked 0

`user` includes `guest` and `nice` includes `guest_nice`, so neither is added again. Offline cores
have no line. idle and iowait may decrease by a few ticks, because the kernel estimates the share of
a sleeping core; the page above documents this for iowait.

/proc/schedstat: how long tasks ran on every CPU and how long they waited for it.

https://docs.kernel.org/scheduler/sched-stats.html

    version 15
    timestamp 15819019232
    cpu0 498494191 0 3533438552 … 2045936778163039 343796328169361 4767485306
    domain0 00000000,00000003 212499247 …

In every version since 10 the last three numbers of a CPU's line are: the ns that tasks ran on it,
the ns that they were ready and waited for it, and how often a task was scheduled on it. They are
counted regardless of the switch kernel.sched_schedstats.

/sys/devices/system/cpu and …/node: which CPUs share a core, a package, a NUMA node.

https://docs.kernel.org/admin-guide/cputopology.html, Documentation/ABI/testing/sysfs-devices-node

    cpu/online                            0-127
    cpu/cpu0/topology/thread_siblings_list   0,64     hyper-threads of one core
    cpu/cpu0/topology/physical_package_id    0
    cpu/cpu0/topology/core_id                0        a number within the package
    node/node0/cpulist                       0-31,64-95

Facts that the kernel does not report (a container without /sys, ids of -1) are omitted.

Clock, throttling and temperature of CPU packages: cpufreq, thermal_throttle, hwmon.

Documentation/ABI/testing/sysfs-devices-system-cpu, drivers/thermal/intel/therm_throt.c,
https://docs.kernel.org/admin-guide/pm/cpufreq.html, https://docs.kernel.org/hwmon/coretemp.html

    cpu0/cpufreq/scaling_cur_freq                         1699981   kHz
    cpu0/cpufreq/scaling_max_freq                         3700000   kHz, may be lowered
    cpu0/thermal_throttle/core_throttle_count             5         Intel only
    cpu0/thermal_throttle/package_throttle_total_time_ms  812
    class/hwmon/hwmon0/{name,temp1_label,temp1_input}     coretemp, Package id 0, 55000 (m°C)

Both hyper-threads of a core count the core's events, and all CPUs of a package count the package's
events, so the largest count is that of the core or package. On x86 before Linux 5.18 the kernel
measures the clock of a CPU for 10 ms unless it was read recently: only eight CPUs of a package are
read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clusterprof.agent.linux.files import Roots, list_folder, parse_integers, read_int, read_text
from clusterprof.agent.linux.memory import list_numa_nodes
from clusterprof.agent.linux.threads import read_file_start
from clusterprof.util.ranges import format_cpulist, parse_cpulist

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_MAX_BACKWARD_STEP_NS = 3_000_000_000
_TOTAL_OFFSET = len("cpu  ")


class CpuTimes(NamedTuple):
    """CPU time of one core or of the node, in nanoseconds since boot."""

    user_ns: int
    """user + nice."""
    system_ns: int
    """system + irq + softirq."""
    idle_ns: int
    iowait_ns: int
    steal_ns: int


class Tasks(NamedTuple):
    """Tasks of the node at this instant."""

    running: int
    """Running or ready to run."""
    blocked: int
    """Waiting for I/O."""


def select_needed_lines(data: bytes) -> bytes:
    """Return only the lines with the totals and the tasks.

    Raises: ValueError when a line is missing.
    """
    return data[: data.index(b"\n") + 1] + data[data.rindex(b"procs_running") :]


def parse_total(data: bytes) -> CpuTimes:
    """Parse the CPU times of all cores together from the first line."""
    try:
        return _build_cpu_times(parse_integers(data[_TOTAL_OFFSET : data.index(b"\n") + 1]))
    except ValueError:  # a sandbox that imitates /proc may separate the fields differently
        return _build_cpu_times([int(word) for word in data[: data.index(b"\n")].split()[1:]])


def parse_tasks(data: bytes) -> Tasks:
    """Parse the number of runnable tasks and of tasks that wait for I/O.

    Raises: ValueError when the lines are missing.
    """
    # Search from the end: the line before them lists every interrupt and can be 100 KB long.
    words = data[data.rindex(b"procs_running") :].split(None, 4)
    if words[2] != b"procs_blocked":
        raise ValueError(f"/proc/stat has no line 'procs_blocked': {words[2]!r}")
    return Tasks(int(words[1]), int(words[3]))


def parse_cores(data: bytes) -> dict[str, CpuTimes]:
    """Parse the CPU times of every online core; keys are core numbers as text."""
    lines = data[: data.index(b"\nintr")].split(b"\n")[1:]
    fields = [line.split(None, 9) for line in lines]
    return {
        row[0][3:].decode(): _build_cpu_times([int(word) for word in row[1:9]]) for row in fields
    }


def remove_backward_steps(current: CpuTimes, before: CpuTimes | None) -> CpuTimes:
    """Return `current` without small backward steps of idle and iowait.

    A decreasing counter looks like a reset and invalidates the interval. A step of more than 3 s is
    a reset (the core was offline in between) and stays.
    """
    if before is None or (
        current.idle_ns >= before.idle_ns and current.iowait_ns >= before.iowait_ns
    ):
        return current
    return current._replace(
        idle_ns=_limit_backward_step(current.idle_ns, before.idle_ns),
        iowait_ns=_limit_backward_step(current.iowait_ns, before.iowait_ns),
    )


def _limit_backward_step(now_ns: int, before_ns: int) -> int:
    return before_ns if now_ns < before_ns <= now_ns + _MAX_BACKWARD_STEP_NS else now_ns


def _build_cpu_times(row: list[int]) -> CpuTimes:
    # Kernels before 2.6.11 lack steal; nothing that runs PyTorch is that old, but a sandbox that
    # imitates /proc may write fewer fields.
    user, nice, system, idle, iowait, irq, softirq = row[:7]
    return CpuTimes(
        (user + nice) * TICK_NS,
        (system + irq + softirq) * TICK_NS,
        idle * TICK_NS,
        iowait * TICK_NS,
        row[7] * TICK_NS if len(row) > 7 else 0,
    )


class CpuWaits(NamedTuple):
    """Time of all tasks on one CPU since boot, in ns."""

    running_ns: int
    waiting_ns: int
    """Summed over tasks: eight tasks that each wait for one second make eight seconds."""


def parse_schedstat(data: bytes) -> dict[str, CpuWaits]:
    """Parse the times of every CPU in the file; keys are CPU numbers as text."""
    waits = {}
    offset = data.find(b"\ncpu")
    while offset >= 0:
        stop = data.find(b"\n", offset + 1)
        words = data[offset + 4 : stop if stop >= 0 else len(data)].split()
        if len(words) >= 10:
            waits[words[0].decode()] = CpuWaits(int(words[-3]), int(words[-2]))
        offset = data.find(b"\ncpu", offset + 1)
    return waits


_MAX_CPUS = 4096
_ACCELERATORS = ("0x03", "0x12")


class Cpu(NamedTuple):
    """Core and package of one CPU."""

    number: int
    package: int
    """-1 = the kernel does not report it."""
    core: int
    """Number within its package; -1 = the kernel does not report it."""
    siblings: str
    """CPUs of the same core, including this one, as a list; "" = not reported."""


def list_online_cpus(roots: Roots) -> frozenset[int]:
    """Return the numbers of the online CPUs; empty where the kernel does not report them.

    Without the kernel's list, these are all CPUs that have a folder and are not marked offline.
    """
    folder = roots.sys / "devices/system/cpu"
    listed = _parse_cpulist_or_empty(read_text(folder / "online"))
    if listed:
        return listed
    folders = [path for path in folder.glob("cpu*") if path.name[3:].isdecimal()]
    return frozenset(int(path.name[3:]) for path in folders if read_text(path / "online") != "0")


def list_cpus(roots: Roots) -> list[Cpu]:
    """Return the online CPUs, sorted by number."""
    cpus = []
    for cpu in sorted(list_online_cpus(roots))[:_MAX_CPUS]:
        folder = get_cpu_folder(roots, cpu) / "topology"
        package, core = read_int(folder / "physical_package_id"), read_int(folder / "core_id")
        siblings = read_text(folder / "thread_siblings_list") or read_text(
            folder / "core_cpus_list"
        )
        cpus.append(
            Cpu(cpu, -1 if package is None else package, -1 if core is None else core, siblings)
        )
    return cpus


def get_cpu_folder(roots: Roots, cpu: int) -> Path:
    """Return the folder of one CPU."""
    return roots.sys / "devices/system/cpu" / f"cpu{cpu}"


def describe_topology(roots: Roots) -> dict[str, Any]:
    """Describe the CPU topology for the header: `online`, `cores`, `packages` and `nodes`.

    All are CPU lists in the kernel's notation; `cores` only where CPUs share a core; `nodes` is
    keyed by NUMA node number.
    """
    online = list_cpus(roots)
    if not online:
        return {}
    facts: dict[str, Any] = {"online": format_cpulist(cpu.number for cpu in online)}
    cores = list(dict.fromkeys(cpu.siblings for cpu in online))
    if "" not in cores and len(cores) < len(online):
        facts["cores"] = cores
    packages = sorted({cpu.package for cpu in online if cpu.package >= 0})
    if packages:
        facts["packages"] = {
            str(number): format_cpulist(cpu.number for cpu in online if cpu.package == number)
            for number in packages
        }
    nodes = {node.name[4:]: read_text(node / "cpulist") for node in list_numa_nodes(roots)}
    nodes = {name: listed for name, listed in nodes.items() if _parse_cpulist_or_empty(listed)}
    if nodes:
        facts["nodes"] = nodes
    return facts


def find_accelerator_nodes(roots: Roots) -> dict[str, int]:
    """Find the NUMA node of every PCI display device or accelerator, by PCI address.

    These are the classes 03 (display) and 12 (processing accelerator); devices whose node the
    firmware does not report (-1) are omitted. Source: Documentation/ABI/testing/sysfs-bus-pci
    """
    numa_nodes = {}
    for device in list_folder(roots.sys / "bus/pci/devices"):
        if read_text(device / "class").startswith(_ACCELERATORS):
            node = read_int(device / "numa_node")
            if node is not None and node >= 0:
                numa_nodes[device.name.lower()] = node
    return numa_nodes


def _parse_cpulist_or_empty(listed: str) -> frozenset[int]:
    try:
        return parse_cpulist(listed)
    except ValueError:
        return frozenset()


MAX_CLOCKS = 8
_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
_PACKAGE_LABELS = ("Package", "Physical", "Tctl")
_ZONES, _INTEL_ZONE = ("cpu-thermal", "cpu_thermal", "soc_thermal"), "x86_pkg_temp"
_NS_PER_MS = 1_000_000


class PackageState(NamedTuple):
    """The state of one CPU package; None = the kernel does not report it."""

    clock_hertz: float | None
    limit_hertz: int | None
    core_throttles: int | None
    package_throttles: int | None
    throttled_ns: int | None


def group_cpus_by_package(roots: Roots) -> dict[str, list[Cpu]]:
    """Group the online CPUs by package; keys are names like "package0"."""
    packages: dict[str, list[Cpu]] = {}
    for cpu in list_cpus(roots):
        packages.setdefault(f"package{max(cpu.package, 0)}", []).append(cpu)
    return packages


def read_package(roots: Roots, members: Sequence[Cpu]) -> PackageState:
    """Read the state of one package; a missing or unreadable value is None."""
    step = max(1, -(-len(members) // MAX_CLOCKS))
    policies = [f"{get_cpu_folder(roots, cpu.number)}/cpufreq" for cpu in members[::step]]
    clocks = _read_counts(f"{policy}/scaling_cur_freq" for policy in policies)
    limits = _read_counts(f"{policy}/scaling_max_freq" for policy in policies)
    core_counts, core_ms = _read_throttles_by_core(roots, members, "core_throttle")
    counts = _read_throttle_counts(roots, members, "package_throttle_count")
    package_ms = _read_throttle_counts(roots, members, "package_throttle_total_time_ms")
    times = [*core_ms, *package_ms]
    return PackageState(
        sum(clocks) * 1000 / len(clocks) if clocks else None,
        max(limits) * 1000 if limits else None,
        sum(core_counts) if core_counts else None,
        max(counts) if counts else None,
        max(times) * _NS_PER_MS if times else None,
    )


def find_temperature_sensors(roots: Roots) -> dict[str, Path]:
    """Find the files with the temperature of CPU packages, in m°C, by sensor name.

    A name is the chip's device and the sensor ("coretemp.0/temp1"), or a thermal zone. Intel
    packages appear as both with equal values; the chip is used.
    """
    sensors = {}
    for chip in list_folder(roots.sys / "class/hwmon"):
        if read_text(chip / "name") not in _CHIPS:
            continue
        for label in chip.glob("temp*_label"):
            if read_text(label).startswith(_PACKAGE_LABELS):
                sensor = label.name.removesuffix("_label")
                device = chip / "device"
                name = os.path.realpath(device) if device.exists() else read_text(chip / "name")
                sensors[f"{os.path.basename(name)}/{sensor}"] = chip / f"{sensor}_input"
    for zone in list_folder(roots.sys / "class/thermal"):
        kind = read_text(zone / "type")
        if kind in _ZONES or (kind == _INTEL_ZONE and not sensors):
            sensors[zone.name] = zone / "temp"
    return dict(sorted(sensors.items()))


def _read_throttles_by_core(
    roots: Roots, members: Sequence[Cpu], stem: str
) -> tuple[list[int], list[int]]:
    """Read throttle events and milliseconds per core, once for both hyper-threads."""
    cores: dict[int, list[Cpu]] = {}
    for cpu in members:
        cores.setdefault(cpu.core if cpu.core >= 0 else -1 - cpu.number, []).append(cpu)
    counts = [
        _read_throttle_counts(roots, core_cpus, f"{stem}_count") for core_cpus in cores.values()
    ]
    times = [
        _read_throttle_counts(roots, core_cpus, f"{stem}_total_time_ms")
        for core_cpus in cores.values()
    ]
    return [max(values) for values in counts if values], [max(values) for values in times if values]


def _read_throttle_counts(roots: Roots, members: Sequence[Cpu], file: str) -> list[int]:
    base = f"{roots.sys}/devices/system/cpu/cpu"
    return _read_counts(f"{base}{cpu.number}/thermal_throttle/{file}" for cpu in members)


def _read_counts(paths: Iterable[str]) -> list[int]:
    """Read the counts in the files that hold one; a node may have thousands of them."""
    counts = []
    for path in paths:
        try:
            count = int(read_file_start(path))
        except (OSError, ValueError):
            continue
        if count >= 0:
            counts.append(count)
    return counts
