"""How fast the CPUs are clocked, and whether heat slows them.

Columns, of every package ("package0", …): its clock, the highest one its governor may ask for, how
often and how long heat slowed it, and the temperature of every package's sensor. An idle CPU is
clocked low too: a low clock alone says nothing.

A thread reads, at most a 200th of the time and every 5 s: old kernels measure a clock for 10 ms,
and a sensor may lie behind a slow bus. What a machine does not tell (most virtual ones nothing) is
a reason in its column.

## Source

`/sys/devices/system/cpu/*/{cpufreq,thermal_throttle}`, `/sys/class/{hwmon,thermal}`
(docs.kernel.org/admin-guide/pm/cpufreq, ABI/testing/sysfs-devices-system-cpu).

## Privilege

None.

## Cost

A thread of its own, every 5 s and at most a 200th of the time: 12.5 ms where there are 256 CPUs.

## Where it is blind

Most virtual machines tell neither clock nor heat. What lowers a clock besides heat (power limits,
instructions that draw much) is not told apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.collectors.base import Context, Value
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.linux.aside import Aside
from clusterprof.linux.cpu_clock import packages, read_package, sensors
from clusterprof.linux.topology import online_cpus
from clusterprof.linux.tree import number
from clusterprof.signals import Signal

_PACKAGE: tuple[Signal, ...] = (
    signals.CPU_CLOCK,
    signals.CPU_CLOCK_LIMIT,
    signals.CPU_CORE_THROTTLES,
    signals.CPU_PACKAGE_THROTTLES,
    signals.CPU_THROTTLED,
)
_REST_NS = 4_000_000_000
_NOT_TOLD = Unavailable("absent", "this machine does not tell it", "")
_NOTHING = Unavailable("absent", "this machine tells neither clocks nor heat of its CPUs", "")


class CpuClockCollector:
    """Clock, throttling and temperature of CPU packages."""

    name: ClassVar[str] = "cpu_clock"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 5_000_000_000

    def __init__(
        self, context: Context, clock: Callable[[], int] = time.monotonic_ns, **waits: Any
    ) -> None:
        self._roots = context.roots
        self.sampled_ns = 0
        """When the values that `sample()` returned were read."""
        self._aside: Aside[list[Value]] = Aside(self._read, clock, rest_ns=_REST_NS, **waits)
        self._first: tuple[int, list[Value]] | None = None

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find packages and sensors and read them once; raises Unavailable where none tells."""
        self._online = online_cpus(self._roots)
        self._packages = packages(self._roots)
        self._sensors = sensors(self._roots)
        columns = [(signal, package) for package in self._packages for signal in _PACKAGE]
        columns += [(signals.CPU_TEMPERATURE, name) for name in self._sensors]
        try:
            self._first = self._aside.first()
            if all(isinstance(value, Unavailable) for value in self._first[1]):
                raise _NOTHING.with_traceback(None)
        except BaseException:
            self.close()
            raise
        return columns

    def sample(self) -> Sequence[Value]:
        """Return what has been read since the last call; raises NothingNew when nothing has."""
        taken = self._first or self._aside.take()
        self._first = None
        if taken is None:
            raise NothingNew
        if online_cpus(self._roots) != self._online:
            raise DevicesChanged
        self.sampled_ns, values = taken
        return values

    def close(self) -> None:
        """Let the thread end, when it comes back."""
        self._aside.close()

    def _read(self) -> list[Value]:
        values: list[Value] = []
        for members in self._packages.values():
            found = read_package(self._roots, members)
            values += [_NOT_TOLD if value is None else value for value in found]
        for file in self._sensors.values():
            millidegrees = number(file)
            values.append(_NOT_TOLD if millidegrees is None else millidegrees / 1000)
        return values
