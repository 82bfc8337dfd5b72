"""CPU, memory, disks and network of the node by psutil, where there is no Linux /proc.

It stands in for the Linux collectors on macOS and BSD and in sandboxes without /proc. The
profile key `sampling: {collectors: {portable: {enabled: true}}}` chooses it anywhere,
`enabled: false` never. It writes the signals of `cpu`, `memory`, `disk` and `network` with
the same meaning and unit. A value that psutil does not have on this system, or that means
something else there, carries that reason. Left out are the loopback, disks without any I/O
so far and interfaces that are down and have carried nothing; a disk or interface that
appears, disappears or starts changes the columns.

## Source

`psutil.cpu_times`, `virtual_memory`, `swap_memory`, `disk_io_counters`, `net_io_counters`,
`net_if_stats` (psutil.readthedocs.io). Counters that the system keeps in 32 bits are
extended beyond a wrap by psutil.

## Privilege

None.

## Cost

Six calls of psutil, once a second. On Linux each reads the files that the Linux collectors
hold open, so it costs several times as much as they do.

## Where it is blind

It has no pressure, cgroup, threads, run queue, sockets or file servers, nothing counts the
tasks that want a CPU, and iowait and stolen time exist on Linux only. Times of requests are
in milliseconds. One value a second cannot show short stalls. On macOS there are no outgoing
drops (psutil reports 0), no swap traffic (psutil counts file pages too) and no busy time of
disks.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux import psutil_host
from clusterprof.agent.linux.storage.disks import is_partition
from clusterprof.agent.linux.threads import StringTable
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.signals import Signal

if TYPE_CHECKING:
    import psutil

_NS_PER_S = 1_000_000_000
_NS_PER_MS = 1_000_000
_BYTES_PER_MEGABIT = 125_000
_LOOPBACK = re.compile(r"lo\d*")
_NOT_COUNTED = Unavailable("absent", "psutil does not count it on this system", "")

# Signal, the fields of psutil that are added, and the factor to the signal's unit. psutil has all
# fields after the first on some systems only; no field: it has none that means the same.
_Columns = tuple[tuple[Signal, tuple[str, ...], int], ...]
_CPU_COLUMNS: _Columns = (
    (signals.CPU_USER, ("user", "nice"), _NS_PER_S),
    (signals.CPU_SYSTEM, ("system", "irq", "softirq"), _NS_PER_S),
    (signals.CPU_IDLE, ("idle",), _NS_PER_S),
    (signals.CPU_IOWAIT, ("iowait",), _NS_PER_S),
    (signals.CPU_STEAL, ("steal",), _NS_PER_S),
)
_DISK_COLUMNS: _Columns = (
    (signals.DISK_READ_BYTES, ("read_bytes",), 1),
    (signals.DISK_READS, ("read_count",), 1),
    (signals.DISK_READ_TIME, ("read_time",), _NS_PER_MS),
    (signals.DISK_WRITE_BYTES, ("write_bytes",), 1),
    (signals.DISK_WRITES, ("write_count",), 1),
    (signals.DISK_WRITE_TIME, ("write_time",), _NS_PER_MS),
    (signals.DISK_BUSY, ("busy_time",), _NS_PER_MS),
    (signals.DISK_QUEUE, (), 1),
)
_NIC_COLUMNS: _Columns = (
    (signals.NET_RECEIVE, ("bytes_recv",), 1),
    (signals.NET_TRANSMIT, ("bytes_sent",), 1),
    (signals.NET_RECEIVE_DROPS, ("dropin",), 1),
    (signals.NET_TRANSMIT_DROPS, ("dropout",), 1),
    (signals.NET_ERRORS, ("errin", "errout"), 1),
)
_SPEED_COLUMNS: tuple[Signal, ...] = (signals.NET_LINK_SPEED, signals.NET_CARRIER_CHANGES)
_MEMORY_SIGNALS: tuple[Signal, ...] = (
    signals.MEMORY_AVAILABLE,
    signals.MEMORY_SWAP_FREE,
    signals.MEMORY_SWAP_IN,
    signals.MEMORY_SWAP_OUT,
)
_UNKNOWN_SIGNALS: tuple[Signal, ...] = (
    signals.CPU_RUNNABLE,
    signals.CPU_BLOCKED,
    signals.MEMORY_CACHED,  # psutil adds other caches to the page cache
    signals.MEMORY_DIRTY,
    signals.MEMORY_WRITEBACK,
    signals.MEMORY_MAJOR_FAULTS,
    signals.MEMORY_RECLAIM_DIRECT,
    signals.MEMORY_REFAULTS,
    signals.MEMORY_OOM_KILLS,
    signals.TCP_SEGMENTS,
    signals.TCP_RETRANSMITS,
    signals.TCP_TIMEOUTS,
)
_Devices = Mapping[str, Any]  # by name: psutil's counters, or the reason why there are none


class PortableCollector:
    """CPU, memory, disks and network of the node by psutil."""

    name: ClassVar[str] = "portable"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context) -> None:
        self._cpu_ns: list[Value] = []

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Import psutil, choose disks and interfaces, and read the speed of the links.

        Raises: Unavailable when psutil cannot be imported.
        """
        self._psutil = psutil_host.import_psutil()
        # What psutil fills with zeros on a system: no value at all.
        zeros_dropped = self._psutil.MACOS or self._psutil.NETBSD
        self._no_nic_fields = {"dropout"} if zeros_dropped else set()
        links = self._list_links()
        self._disks = tuple(self._read_disks())
        nics = self._read_nics(links)
        self._nics = tuple(nics)
        self._speeds = {
            nic: counters if isinstance(counters, Unavailable) else _get_link_speed(links, nic)
            for nic, counters in nics.items()
        }
        columns = [(signal, "all") for signal, _, _ in _CPU_COLUMNS]
        columns += [(signal, "") for signal in _MEMORY_SIGNALS + _UNKNOWN_SIGNALS]
        columns += [(signal, disk) for disk in self._disks for signal, _, _ in _DISK_COLUMNS]
        nic_signals = (*(signal for signal, _, _ in _NIC_COLUMNS), *_SPEED_COLUMNS)
        return columns + [(signal, nic) for nic in self._nics for signal in nic_signals]

    def sample(self) -> Sequence[Value]:
        """Return times, counts and bytes since boot, and current bytes.

        Raises: DevicesChanged when a disk or interface appeared or disappeared.
        """
        disks, nics = self._read_disks(), self._read_nics(self._list_links())
        if tuple(disks) != self._disks or tuple(nics) != self._nics:
            raise DevicesChanged
        values = [*self._read_cpu(), *self._read_memory(), *[_NOT_COUNTED] * len(_UNKNOWN_SIGNALS)]
        for counters in disks.values():
            values += _select_values(counters, _DISK_COLUMNS)
        for nic, counters in nics.items():
            values += _select_values(counters, _NIC_COLUMNS, self._no_nic_fields)
            values += [self._speeds[nic], _NOT_COUNTED]
        return values

    def close(self) -> None:
        """Do nothing: psutil holds nothing open."""

    def _read_cpu(self) -> list[Value]:
        values = _select_values(self._call("cpu_times"), _CPU_COLUMNS)
        if self._cpu_ns:  # the kernel's idle and iowait may step back; a counter must not
            values = [
                value
                if isinstance(value, Unavailable) or isinstance(before, Unavailable)
                else max(value, before)
                for value, before in zip(values, self._cpu_ns)
            ]
        self._cpu_ns = values
        return values

    def _read_memory(self) -> list[Value]:
        """Read the values of `_MEMORY_SIGNALS`.

        psutil warns when it puts zeros in place of what it cannot read.
        """
        with warnings.catch_warnings(record=True) as memory_warnings:
            warnings.simplefilter("always")
            memory = self._call("virtual_memory")
        with warnings.catch_warnings(record=True) as swap_warnings:
            warnings.simplefilter("always")
            swap = self._call("swap_memory")
        invented = any("available" in str(warning.message) for warning in memory_warnings)
        available = _NOT_COUNTED if invented else _select_value(memory, ("available",))
        traffic = (
            [_select_value(swap, ("sin",)), _select_value(swap, ("sout",))]
            if self._psutil.LINUX and not swap_warnings
            else [_NOT_COUNTED, _NOT_COUNTED]
        )
        return [available, _select_value(swap, ("free",)), *traffic]

    def _read_disks(self) -> _Devices:
        """Return the counters of every whole disk with any I/O; device "" has the reason."""
        disks = self._call("disk_io_counters", perdisk=True)
        if isinstance(disks, Unavailable):
            return {"": disks}
        names = set(disks or {})  # psutil: None = no disk
        return {
            name: counters
            for name, counters in sorted((disks or {}).items())
            if counters.read_count + counters.write_count > 0
            and not (self._psutil.LINUX and is_partition(name, names))
        }

    def _read_nics(self, links: Any) -> _Devices:
        """Return the counters of every interface in use; device "" has the reason."""
        nics = self._call("net_io_counters", pernic=True)
        if isinstance(nics, Unavailable):
            return {"": nics}
        up = () if isinstance(links, Unavailable) else [nic for nic in links if links[nic].isup]
        return {
            name: counters
            for name, counters in sorted((nics or {}).items())
            if not _LOOPBACK.fullmatch(name)
            and (name in up or counters.bytes_recv + counters.bytes_sent > 0)
        }

    def _list_links(self) -> Any:
        return self._call("net_if_stats")

    def _call(self, function: str, **arguments: bool) -> Any:
        """Call a function of psutil; return the reason if it fails."""
        try:
            return getattr(self._psutil, function)(**arguments)
        except Exception as error:
            return psutil_host.convert_psutil_error(error, f"psutil.{function}")


def _select_values(
    counters: Any, columns: _Columns, without: frozenset[str] | set[str] = frozenset()
) -> list[Value]:
    """Return the values of the columns; `without`: fields that are no counts on this system."""
    return [
        _NOT_COUNTED if without.intersection(fields) else _select_value(counters, fields, factor)
        for _, fields, factor in columns
    ]


def _select_value(counters: Any, fields: Sequence[str], factor: int = 1) -> Value:
    """Return the sum of the fields times the factor, or the reason why there is no value."""
    if isinstance(counters, Unavailable):
        return counters
    if not fields or not hasattr(counters, fields[0]):
        return _NOT_COUNTED
    return round(sum(getattr(counters, field, 0) for field in fields) * factor)


def _get_link_speed(links: Any, nic: str) -> Value:
    """Return the speed of a link in bytes per second."""
    if isinstance(links, Unavailable):
        return links
    megabits = links[nic].speed if nic in links else 0
    if megabits <= 0:  # psutil: 0 = not known
        return Unavailable("absent", f"the system does not report the speed of {nic}", "")
    return float(megabits * _BYTES_PER_MEGABIT)


PROCESS_COLUMNS = (
    "t_ns",
    "pid",
    "parent_pid",
    "started_ticks",
    "rss_bytes",
    "read_chars_total",
    "write_chars_total",
    "read_bytes_total",
    "write_bytes_total",
    "threads_count",
    "name",
)
"""Names of the values of a row, all int64, in order; -1 = not available."""
_IO_FIELDS = ("read_chars", "write_chars", "read_bytes", "write_bytes")


class PortableProcessesCollector:
    """Memory, I/O and threads of the job's processes by psutil, where there is no Linux /proc.

    The job is the registered processes, or that of `--pid`, and all their descendants. The
    rows go into the table `processes`. It is chosen together with the collector `portable`.

    ## Source

    `psutil.pids` and `ppid` for the tree; of every process `create_time`, `memory_info`,
    `io_counters`, `num_threads` and `name` (psutil.readthedocs.io).

    ## Privilege

    The job's user, or root: most systems show memory and I/O of other users' processes to
    root only.

    ## Cost

    The list of all processes, the parent of each new one, and five calls for each process of
    the job, once a second.

    ## Where it is blind

    A process that lives for less than a second is rarely seen. The bytes that a process
    reads and writes (`read_chars`, `read_bytes`, …) exist on Linux only and are -1 elsewhere:
    macOS has none, BSD counts blocks. It has no threads and no waiting times. The parent is
    the one that a process had when first seen. `started_ticks` are hundredths of a second
    since 1970 where there is no /proc.
    """

    name: ClassVar[str] = "portable_processes"
    table: ClassVar[str] = "processes"
    """The table of its rows, as written by the collector `processes`."""
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._context = context
        self._clock = clock

    def open(self) -> Sequence[str]:
        """Import psutil; the first `sample()` finds the processes.

        Raises: Unavailable when psutil cannot be imported.
        """
        self._tree = psutil_host.PsutilProcessTree()
        self._names = StringTable()
        self._started_ticks: dict[psutil.Process, int] = {}
        return PROCESS_COLUMNS

    def sample(self) -> Sequence[tuple[int, ...]]:
        """Return the rows of this tick."""
        now_ns = self._clock()
        rows = []
        processes = self._tree.refresh(self._context.job_pids())
        for process in processes:
            row = self._build_row(process)
            if row is not None:
                rows.append((now_ns, process.pid, *row))
        alive = set(processes)
        self._started_ticks = {
            process: ticks for process, ticks in self._started_ticks.items() if process in alive
        }
        return rows

    def strings(self) -> dict[str, Sequence[str]]:
        """Return the process names that the column `name` refers to."""
        return {"name": self._names.all}

    def close(self) -> None:
        """Do nothing: psutil holds nothing open."""

    def _build_row(self, process: psutil.Process) -> tuple[int, ...] | None:
        """Build the row from `parent_pid` on; None if the process has ended."""
        import psutil

        try:
            with process.oneshot():
                memory = _read_fact(process, "memory_info")
                io = _read_fact(process, "io_counters")
                threads = _read_fact(process, "num_threads")
                name = _read_fact(process, "name")
        except psutil.NoSuchProcess:
            return None
        if process not in self._started_ticks:
            ticks = psutil_host.find_start_ticks(self._context.roots, process.pid)
            self._started_ticks[process] = -1 if ticks is None else ticks
        return (
            self._tree.get_parent(process.pid),
            self._started_ticks[process],
            getattr(memory, "rss", -1),
            *(max(-1, getattr(io, field, -1)) for field in _IO_FIELDS),
            -1 if threads is None else threads,
            self._names.index(name or ""),
        )


def _read_fact(process: psutil.Process, method: str) -> Any:
    """Call a method of psutil's process; None where the system hides or lacks the fact.

    Raises: psutil.NoSuchProcess when the process has ended.
    """
    import psutil

    try:
        return getattr(process, method)()
    except (psutil.AccessDenied, AttributeError, NotImplementedError, OSError):
        return None
