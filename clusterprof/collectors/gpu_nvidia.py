"""NVIDIA GPUs as their driver sees them, through NVML; identity of a device is its UUID.

Calls into the driver can hang for ever or crash the process, so the recorder never makes them
itself: it runs `recorder.isolated.IsolatedCollector("gpu_nvidia", …)`, whose helper process uses
the package `nvml` directly. This class is the same source in the process that opens it.

## Source

NVML of the driver, `libnvidia-ml.so.1` (docs.nvidia.com/deploy/nvml-api).

## Privilege

None for most; a container needs the driver's library (NVIDIA runtime). Profiling counters may be
kept for root (NVreg_RestrictProfilingToAdminUsers).

## Cost

A process of its own (15 MB) that asks each GPU some 20 questions; one that takes more than 5 ms is
asked ten times less often. The recorder itself only reads a pipe.

## Where it is blind

Busy means that some kernel ran, whatever it did: a collective that waits is busy too, and only SM
activity, power and traffic tell it apart. Samples of the driver are a sixth of a second to a second
apart. What MIG or a virtual GPU does not tell is a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from clusterprof.collectors.base import Context, Value
from clusterprof.collectors.nvml import Library
from clusterprof.signals import BY_NAME, Signal


class GpuNvidiaCollector:
    """Utilisation, busy time, clocks, power, throttling, PCIe, memory, errors of NVIDIA GPUs."""

    name: ClassVar[str] = "gpu_nvidia"
    isolated: ClassVar[bool] = True
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, context: Context) -> None:
        self._library: Library | None = None

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open NVML in this process; raises Unavailable, and may hang or crash with the driver."""
        self._library = Library(mark=lambda index, call: None)
        return [
            (BY_NAME[name], str(entry["id"]))
            for entry in self._library.inventory
            for name in Library.signals
        ]

    def sample(self) -> Sequence[Value]:
        """Return the values of all devices, one after the other."""
        assert self._library is not None, "sample() needs open()"
        return [value for device in self._library.devices for value in device.sample()]

    def inventory(self) -> list[dict[str, Any]]:
        """Return for the header what each device is."""
        return [] if self._library is None else self._library.inventory

    def close(self) -> None:
        """Close NVML."""
        if self._library is not None:
            self._library.close()
            self._library = None
