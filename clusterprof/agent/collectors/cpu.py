"""CPU time of the node, all cores together, and how many tasks want a CPU.

CPU time of each core: which cores are full while others are idle.

How long tasks waited for each CPU: which CPUs are overloaded while others are idle.

Clock of the CPUs, and whether heat throttles them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, FileCollector, Value
from clusterprof.agent.linux.cpu import (
    CpuTimes,
    CpuWaits,
    find_temperature_sensors,
    group_cpus_by_package,
    list_online_cpus,
    parse_cores,
    parse_schedstat,
    parse_tasks,
    parse_total,
    read_package,
    remove_backward_steps,
    select_needed_lines,
)
from clusterprof.agent.linux.files import LONG_RECORDS, OpenFile, read_int
from clusterprof.agent.linux.reader_threads import BackgroundReader
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from clusterprof.signals import Signal

_NODE_TIMES: tuple[Signal, ...] = (
    signals.CPU_USER,
    signals.CPU_SYSTEM,
    signals.CPU_IDLE,
    signals.CPU_IOWAIT,
    signals.CPU_STEAL,
)


class CpuCollector(FileCollector):
    """CPU time of the node, all cores together, and how many tasks want a CPU.

    Columns: the five `cpu.*_ns_total` of device "all", `cpu.runnable_count` and
    `cpu.blocked_count` of the node. The collector `cores` has each core separately, at a
    tenth of the rate: on a node with 256 cores their lines cost more than all other files
    together.

    ## Source

    `/proc/stat`: the line `cpu` and the lines `procs_*` (docs.kernel.org/filesystems/proc,
    section 1.7).

    ## Privilege

    None.

    ## Cost

    One read of a file that grows with the cores and interrupts of the node; two of its
    lines are parsed.

    ## Where it is blind

    It covers the whole node, even in a container: it cannot distinguish the job from its
    neighbors. Times advance by clock ticks (10 ms on most kernels). iowait depends on where
    the waiting task last ran, and means little where other work fills the cores.
    """

    name: ClassVar[str] = "cpu"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, context: Context) -> None:
        self._path = context.roots.proc / "stat"

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open /proc/stat."""
        self._stat = OpenFile(self._path)
        self.open_files = [self._stat]
        self._last: CpuTimes | None = None
        return [(signal, "all") for signal in _NODE_TIMES] + [
            (signals.CPU_RUNNABLE, ""),
            (signals.CPU_BLOCKED, ""),
        ]

    def read(self) -> Sequence[bytes]:
        """Read /proc/stat; of a long file keep only the lines that `parse` needs."""
        data = self._stat.read()
        return [data if self._stat.fits_single_read else select_needed_lines(data)]

    def parse(self, contents: Sequence[bytes]) -> Sequence[Value]:
        """Return the node's times since boot and the number of tasks at that instant."""
        (data,) = contents
        self._last = remove_backward_steps(parse_total(data), self._last)
        return self._last + parse_tasks(data)

    def close(self) -> None:
        """Close /proc/stat."""
        self._stat.close()


_CORE_COLUMNS: tuple[Signal, ...] = (
    signals.CPU_USER,
    signals.CPU_SYSTEM,
    signals.CPU_IDLE,
    signals.CPU_IOWAIT,
    signals.CPU_STEAL,
)


class CoresCollector:
    """CPU time of each core: which cores are full while others are idle.

    Columns: the five `cpu.*_ns_total` of every online core, device "0", "1", … A core that
    goes offline or comes online changes the columns.

    ## Source

    `/proc/stat`: the lines `cpu0`, `cpu1`, …

    ## Privilege

    None.

    ## Cost

    One read, and one line to parse for every core, once a second: with 256 cores this is
    the most expensive file of all.

    ## Where it is blind

    It does not show which process used a core (the tables `threads` and `processes` do for
    the job). Times advance by clock ticks; two hyper-threads of one core count as two
    cores.
    """

    name: ClassVar[str] = "cores"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context) -> None:
        self._path = context.roots.proc / "stat"

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open /proc/stat and find the online cores."""
        self._stat = OpenFile(self._path)
        self._last: dict[str, CpuTimes] = parse_cores(self._stat.read())
        return [(signal, core) for core in self._last for signal in _CORE_COLUMNS]

    def sample(self) -> Sequence[Value]:
        """Return the times of every core since boot.

        Raises: DevicesChanged when the set of online cores changed.
        """
        cores = parse_cores(self._stat.read())
        if cores.keys() != self._last.keys():
            raise DevicesChanged
        self._last = {
            core: remove_backward_steps(current, self._last[core])
            for core, current in cores.items()
        }
        return [value for times in self._last.values() for value in times]

    def close(self) -> None:
        """Close /proc/stat."""
        self._stat.close()


_UNKNOWN_FORM = Unavailable("failed", "/proc/schedstat: no CPU in a known format", "")


class RunqueueCollector:
    """How long tasks waited for each CPU: which CPUs are overloaded while others are idle.

    Columns: `cpu.run_delay_ns_total` of every online CPU, device "0", "1", … All tasks
    count, including those of other jobs: a CPU to which too many tasks are bound shows
    here. A CPU that goes offline or comes online changes the columns.

    ## Source

    `/proc/schedstat`, field 8 of every CPU (docs.kernel.org/scheduler/sched-stats).

    ## Privilege

    None; the kernel must have been built with CONFIG_SCHEDSTATS.

    ## Cost

    One file every 2 s: 1.6 ms where it lists 256 CPUs.

    ## Where it is blind

    It does not show which tasks waited: `threads` does for the job.
    """

    name: ClassVar[str] = "runqueue"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 2_000_000_000

    def __init__(self, context: Context) -> None:
        self._path = context.roots.proc / "schedstat"

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open /proc/schedstat and find the CPUs."""
        self._file = OpenFile(self._path, longest_record=LONG_RECORDS)
        self._cpus = list(self._read())
        return [(signals.CPU_RUN_DELAY, cpu) for cpu in self._cpus]

    def sample(self) -> Sequence[Value]:
        """Return the waiting time at every CPU since boot.

        Raises: DevicesChanged when the set of CPUs changed.
        """
        waits = self._read()
        if list(waits) != self._cpus:
            raise DevicesChanged
        return [times.waiting_ns for times in waits.values()]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> dict[str, CpuWaits]:
        try:
            waits = parse_schedstat(self._file.read())
        except ValueError:
            waits = {}
        if not waits:
            raise _UNKNOWN_FORM.with_traceback(None)
        return waits


_PACKAGE_COLUMNS: tuple[Signal, ...] = (
    signals.CPU_CLOCK,
    signals.CPU_CLOCK_LIMIT,
    signals.CPU_CORE_THROTTLES,
    signals.CPU_PACKAGE_THROTTLES,
    signals.CPU_THROTTLED,
)
_REST_NS = 4_000_000_000
_NOT_REPORTED = Unavailable("absent", "this machine does not report it", "")
_NO_SENSORS = Unavailable(
    "absent", "this machine reports neither clocks nor temperatures of its CPUs", ""
)


class CpuClockCollector:
    """Clock of the CPUs, and whether heat throttles them.

    Columns of every package ("package0", …): its clock, the highest clock that its governor
    may request, how often and how long heat throttled it, and the temperature of every
    package sensor. An idle CPU has a low clock too: a low clock alone means nothing.

    A thread reads them every 5 s and for at most a 200th of the time: old kernels measure a
    clock for 10 ms, and a sensor may be behind a slow bus. A value that the machine does
    not report (most virtual machines report none) is a reason in its column.

    ## Source

    `/sys/devices/system/cpu/*/{cpufreq,thermal_throttle}`, `/sys/class/{hwmon,thermal}`
    (docs.kernel.org/admin-guide/pm/cpufreq, ABI/testing/sysfs-devices-system-cpu).

    ## Privilege

    None.

    ## Cost

    A separate thread, every 5 s and at most a 200th of the time: 12.5 ms with 256 CPUs.

    ## Where it is blind

    Most virtual machines report neither clock nor temperature. Causes of a lower clock
    other than heat (power limits, power-hungry instructions) are not distinguished.
    """

    name: ClassVar[str] = "cpu_clock"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 5_000_000_000

    def __init__(
        self, context: Context, clock: Callable[[], int] = time.monotonic_ns, **waits: Any
    ) -> None:
        self._roots = context.roots
        self.sampled_ns = 0
        """When the values that `sample()` returned were read."""
        self._reader: BackgroundReader[list[Value]] = BackgroundReader(
            self._read, clock, rest_ns=_REST_NS, **waits
        )
        self._first: tuple[int, list[Value]] | None = None

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find packages and sensors and read them once.

        Raises: Unavailable where none of them reports a value.
        """
        self._online = list_online_cpus(self._roots)
        self._packages = group_cpus_by_package(self._roots)
        self._sensors = find_temperature_sensors(self._roots)
        columns = [(signal, package) for package in self._packages for signal in _PACKAGE_COLUMNS]
        columns += [(signals.CPU_TEMPERATURE, name) for name in self._sensors]
        try:
            self._first = self._reader.first()
            if all(isinstance(value, Unavailable) for value in self._first[1]):
                raise _NO_SENSORS.with_traceback(None)
        except BaseException:
            self.close()
            raise
        return columns

    def sample(self) -> Sequence[Value]:
        """Return the values read since the last call.

        Raises: NothingNew when there are none, DevicesChanged when the set of online CPUs
        changed.
        """
        reading = self._first or self._reader.take()
        self._first = None
        if reading is None:
            raise NothingNew
        if list_online_cpus(self._roots) != self._online:
            raise DevicesChanged
        self.sampled_ns, values = reading
        return values

    def close(self) -> None:
        """End the thread once its reading returns."""
        self._reader.close()

    def _read(self) -> list[Value]:
        values: list[Value] = []
        for members in self._packages.values():
            package = read_package(self._roots, members)
            values += [_NOT_REPORTED if value is None else value for value in package]
        for file in self._sensors.values():
            millidegrees = read_int(file)
            values.append(_NOT_REPORTED if millidegrees is None else millidegrees / 1000)
        return values
