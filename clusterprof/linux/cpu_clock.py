"""Clocks, throttling and heat of CPU packages, from cpufreq, thermal_throttle and hwmon.

Documentation/ABI/testing/sysfs-devices-system-cpu, drivers/thermal/intel/therm_throt.c,
https://docs.kernel.org/admin-guide/pm/cpufreq.html, https://docs.kernel.org/hwmon/coretemp.html

    cpu0/cpufreq/scaling_cur_freq                         1699981   kHz
    cpu0/cpufreq/scaling_max_freq                         3700000   kHz, may be lowered
    cpu0/thermal_throttle/core_throttle_count             5         Intel only
    cpu0/thermal_throttle/package_throttle_total_time_ms  812
    class/hwmon/hwmon0/{name,temp1_label,temp1_input}     coretemp, Package id 0, 55000 (m°C)

Both hyper-threads of a core count the core's events, and all CPUs of a package the package's, so
the largest count is the core's or the package's. On x86 before Linux 5.18 the clock of a CPU that
nobody asked for lately is measured for 10 ms: only eight of a package are asked.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from clusterprof.linux.roots import Roots
from clusterprof.linux.task import read_unheld
from clusterprof.linux.topology import Cpu, cpu_folder, cpus
from clusterprof.linux.tree import entries, text

CLOCKS_AT_MOST = 8
_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
_PACKAGE_LABELS = ("Package", "Physical", "Tctl")
_ZONES, _INTEL_ZONE = ("cpu-thermal", "cpu_thermal", "soc_thermal"), "x86_pkg_temp"
_NS_PER_MS = 1_000_000


class Package(NamedTuple):
    """The state of one CPU package; None = the kernel does not tell."""

    clock_hertz: float | None
    limit_hertz: int | None
    core_throttles: int | None
    package_throttles: int | None
    throttled_ns: int | None


def packages(roots: Roots) -> dict[str, list[Cpu]]:
    """Return the CPUs of every package that is online, by its name ("package0")."""
    found: dict[str, list[Cpu]] = {}
    for cpu in cpus(roots):
        found.setdefault(f"package{max(cpu.package, 0)}", []).append(cpu)
    return found


def read_package(roots: Roots, members: Sequence[Cpu]) -> Package:
    """Read one package; what is not there or no number is None."""
    step = max(1, -(-len(members) // CLOCKS_AT_MOST))
    policies = [f"{cpu_folder(roots, cpu.number)}/cpufreq" for cpu in members[::step]]
    clocks = _numbers(f"{policy}/scaling_cur_freq" for policy in policies)
    limits = _numbers(f"{policy}/scaling_max_freq" for policy in policies)
    core_counts, core_ms = _by_core(roots, members, "core_throttle")
    counts = _throttle(roots, members, "package_throttle_count")
    package_ms = _throttle(roots, members, "package_throttle_total_time_ms")
    times = [*core_ms, *package_ms]
    return Package(
        sum(clocks) * 1000 / len(clocks) if clocks else None,
        max(limits) * 1000 if limits else None,
        sum(core_counts) if core_counts else None,
        max(counts) if counts else None,
        max(times) * _NS_PER_MS if times else None,
    )


def sensors(roots: Roots) -> dict[str, Path]:
    """Return the files that hold the temperature of CPU packages, in m°C, by a name for each.

    The chip's device and the sensor ("coretemp.0/temp1"), or a thermal zone; of Intel's packages
    both tell the same, and the chip is taken.
    """
    found = {}
    for chip in entries(roots.sys / "class/hwmon"):
        if text(chip / "name") not in _CHIPS:
            continue
        for label in chip.glob("temp*_label"):
            if text(label).startswith(_PACKAGE_LABELS):
                sensor = label.name.removesuffix("_label")
                device = chip / "device"
                name = os.path.realpath(device) if device.exists() else text(chip / "name")
                found[f"{os.path.basename(name)}/{sensor}"] = chip / f"{sensor}_input"
    for zone in entries(roots.sys / "class/thermal"):
        kind = text(zone / "type")
        if kind in _ZONES or (kind == _INTEL_ZONE and not found):
            found[zone.name] = zone / "temp"
    return dict(sorted(found.items()))


def _by_core(roots: Roots, members: Sequence[Cpu], stem: str) -> tuple[list[int], list[int]]:
    """What every core counted, once for both of its hyper-threads: events and milliseconds."""
    cores: dict[int, list[Cpu]] = {}
    for cpu in members:
        cores.setdefault(cpu.core if cpu.core >= 0 else -1 - cpu.number, []).append(cpu)
    counts = [_throttle(roots, cpus, f"{stem}_count") for cpus in cores.values()]
    times = [_throttle(roots, cpus, f"{stem}_total_time_ms") for cpus in cores.values()]
    return [max(one) for one in counts if one], [max(one) for one in times if one]


def _throttle(roots: Roots, members: Sequence[Cpu], file: str) -> list[int]:
    base = f"{roots.sys}/devices/system/cpu/cpu"
    return _numbers(f"{base}{cpu.number}/thermal_throttle/{file}" for cpu in members)


def _numbers(paths: Iterable[str]) -> list[int]:
    """The counts in some files, of those that hold one; a node may have thousands of them."""
    found = []
    for path in paths:
        try:
            count = int(read_unheld(path))
        except (OSError, ValueError):
            continue
        if count >= 0:
            found.append(count)
    return found
