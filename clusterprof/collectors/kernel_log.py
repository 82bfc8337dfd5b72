"""Errors of GPUs and NVSwitches that the NVIDIA driver writes to the kernel's log (Xid, SXid).

Read is what comes while the recorder runs, once a second, without ever waiting for it. Every error
is an event, `gpu-xid` or `nvswitch-sxid`: `pci` (domain:bus:device, as the driver writes it),
`code`, `text`, `logged_ns` (of the log's clock), `count` where the same came several times within a
second, and `gpu_instance` of a MIG instance. At most 32 events a second; the counter has all.

Only nodes on which the NVIDIA driver is loaded are asked.

## Source

`/dev/kmsg` (docs.kernel.org: ABI/testing/dev-kmsg), lines of NVIDIA's driver
(docs.nvidia.com/deploy/xid-errors).

## Privilege

Readable for everybody unless kernel.dmesg_restrict is 1, which is so on many systems: then
CAP_SYSLOG is needed. Containers have no /dev/kmsg as a rule.

## Cost

One read a second that does not wait, and none where the NVIDIA driver is not loaded.

## Where it is blind

Errors from before the recording, and those that the log's ring buffer has overwritten within a
second. Process numbers in the text are the node's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from clusterprof.collectors.base import Context, Value
from clusterprof.errors import Unavailable
from clusterprof.linux.kmsg import DriverError, KernelLog, driver_error
from clusterprof.linux.roots import Roots
from clusterprof.signals import KERNEL_GPU_ERRORS, Signal

_EVENTS_AT_MOST = 32
_NO_DRIVER = Unavailable("absent", "the NVIDIA driver is not loaded")


class KernelLogCollector:
    """Errors that the NVIDIA driver writes to the kernel's log (Xid)."""

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
        """Say why nobody misses it on this node; None where there may be something to read."""
        there = (roots.proc / "driver/nvidia/version").exists()
        return None if there else _NO_DRIVER

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open the log at its end; raises Unavailable."""
        why = self.why_absent(self._roots)
        if why is not None:
            raise why.with_traceback(None)
        self._log = self._open_log()
        return [(KERNEL_GPU_ERRORS, "")]

    def sample(self) -> Sequence[Value]:
        """Return how many errors have come so far."""
        assert self._log is not None, "sample() needs open()"
        found = [error for record in self._log.records() if (error := driver_error(record))]
        self._total += len(found)
        self._events += _events(found)
        return (self._total,)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the errors that came since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()
            self._log = None


def _events(found: Sequence[DriverError]) -> list[tuple[str, dict[str, Any]]]:
    """One event for each kind of error of each device, the first of its kind speaking for all."""
    alike: dict[tuple[bool, str, int, int | None], list[DriverError]] = {}
    for error in found:
        key = (error.of_switch, error.pci, error.code, error.instance)
        alike.setdefault(key, []).append(error)
    events = []
    for same in list(alike.values())[:_EVENTS_AT_MOST]:
        one = same[0]
        about: dict[str, Any] = {
            "pci": one.pci,
            "code": one.code,
            "text": one.text,
            "logged_ns": one.t_ns,
            "count": len(same),
        }
        if one.instance is not None:
            about["gpu_instance"] = one.instance
        events.append(("nvswitch-sxid" if one.of_switch else "gpu-xid", about))
    return events
