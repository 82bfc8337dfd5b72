"""CPU time of the kernel's own threads: reclaim, packets, deferred work, interrupts.

Errors of GPUs and NVSwitches in the kernel's log (Xid, SXid of the NVIDIA driver).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof import signals
from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.kernel_log import DriverError, KernelLog, parse_driver_error
from clusterprof.agent.linux.processes import KernelThreadTimes
from clusterprof.agent.linux.threads import DescriptorBudget
from clusterprof.errors import DevicesChanged, Unavailable
from clusterprof.signals import KERNEL_GPU_ERRORS, Signal

_SEARCH_NS = 10_000_000_000
_DESCRIPTORS = 256  # about two per CPU; reading a file that is not open costs ten times as much


class KernelThreadsCollector:
    """CPU time of the kernel's own threads: reclaim, packets, deferred work, interrupts.

    Columns: `kernel.cpu_ns_total` of every family of threads that exists (kswapd,
    kcompactd, khugepaged, ksoftirqd, kworker, irq, ptlrpcd), counted from the first reading
    of a thread. At most 1,024 threads are read.

    ## Source

    `/proc/<pid>/schedstat` of the children of kthreadd (docs.kernel.org/filesystems/proc).

    ## Privilege

    None; in a container with its own PID namespace kernel threads are invisible.

    ## Cost

    At most 1,024 files every 2 s.

    ## Where it is blind

    Interrupts themselves, and packets received right after them, run in the task that they
    interrupt and are in `cpu.system_ns_total`. It does not show for whom a thread worked.
    """

    name: ClassVar[str] = "kernel_threads"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 2_000_000_000

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._roots = context.roots
        self._clock = clock

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Find the threads.

        Raises: Unavailable when /proc shows none.
        """
        self._clocks = KernelThreadTimes(self._roots, DescriptorBudget(_DESCRIPTORS))
        self._clocks.search()
        self._searched_ns = self._clock()
        self._clocks.read()
        self._columns = sorted(self._clocks.total_ns)
        return [(signals.KERNEL_CPU, family) for family in self._columns]

    def sample(self) -> Sequence[Value]:
        """Return the time of every family since its first thread was seen.

        Raises: DevicesChanged when a new family appeared.
        """
        now_ns = self._clock()
        if now_ns - self._searched_ns >= _SEARCH_NS:
            self._clocks.search()
            self._searched_ns = now_ns
        self._clocks.read()
        if sorted(self._clocks.total_ns) != self._columns:
            raise DevicesChanged
        return [self._clocks.total_ns[family] for family in self._columns]

    def close(self) -> None:
        """Close all files."""
        self._clocks.close()


_MAX_EVENTS = 32
_NO_DRIVER = Unavailable("absent", "the NVIDIA driver is not loaded")


class KernelLogCollector:
    """Errors of GPUs and NVSwitches in the kernel's log (Xid, SXid of the NVIDIA driver).

    The collector reads new records once a second while the recorder runs, and never waits
    for them. Every error is an event, `gpu-xid` or `nvswitch-sxid`: `pci`
    (domain:bus:device, as the driver writes it), `code`, `text`, `logged_ns` (of the log's
    clock), `count` for repeated errors within a second, and `gpu_instance` of a MIG
    instance. At most 32 events a second; the counter includes all.

    It reads only on nodes on which the NVIDIA driver is loaded.

    ## Source

    `/dev/kmsg` (docs.kernel.org: ABI/testing/dev-kmsg), lines of NVIDIA's driver
    (docs.nvidia.com/deploy/xid-errors).

    ## Privilege

    None unless kernel.dmesg_restrict is 1, which is the case on many systems: then it needs
    CAP_SYSLOG. Containers usually have no /dev/kmsg.

    ## Cost

    One non-blocking read a second, and none where the NVIDIA driver is not loaded.

    ## Where it is blind

    Errors from before the recording, and those that the log's ring buffer has overwritten
    within a second. Process numbers in the text are those of the node.
    """

    name: ClassVar[str] = "kernel_log"
    isolated: ClassVar[bool] = False
    interval_ns: ClassVar[int] = 1_000_000_000

    def __init__(self, context: Context, log: Callable[[], KernelLog] = KernelLog) -> None:
        self._roots, self._open_log = context.roots, log
        self._log: KernelLog | None = None
        self._total = 0
        self._events: list[tuple[str, dict[str, Any]]] = []

    @staticmethod
    def why_absent(roots: Roots) -> Unavailable | None:
        """Return why there is nothing to read on this node; None where there may be something."""
        has_driver = (roots.proc / "driver/nvidia/version").exists()
        return None if has_driver else _NO_DRIVER

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the log at its end.

        Raises: Unavailable when it cannot be opened or the driver is not loaded.
        """
        why = self.why_absent(self._roots)
        if why is not None:
            raise why.with_traceback(None)
        self._log = self._open_log()
        return [(KERNEL_GPU_ERRORS, "")]

    def sample(self) -> Sequence[Value]:
        """Return the number of errors so far."""
        assert self._log is not None, "sample() needs open()"
        errors = [error for record in self._log.records() if (error := parse_driver_error(record))]
        self._total += len(errors)
        self._events += _build_events(errors)
        return (self._total,)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the errors since the last call as events."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
            self._log = None


def _build_events(errors: Sequence[DriverError]) -> list[tuple[str, dict[str, Any]]]:
    """Build one event per kind of error and device, with the first error's text."""
    groups: dict[tuple[bool, str, int, int | None], list[DriverError]] = {}
    for error in errors:
        key = (error.is_switch, error.pci, error.code, error.instance)
        groups.setdefault(key, []).append(error)
    events = []
    for group in list(groups.values())[:_MAX_EVENTS]:
        first = group[0]
        about: dict[str, Any] = {
            "pci": first.pci,
            "code": first.code,
            "text": first.text,
            "logged_ns": first.t_ns,
            "count": len(group),
        }
        if first.instance is not None:
            about["gpu_instance"] = first.instance
        events.append(("nvswitch-sxid" if first.is_switch else "gpu-xid", about))
    return events
