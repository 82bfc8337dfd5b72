"""NVIDIA GPUs as their driver sees them, through NVML; identity of a device is its UUID.

Calls into the driver can hang for ever or crash the process, so the recorder never makes them
itself: it runs `recorder.isolated.IsolatedCollector("gpu_nvidia", …)`, whose helper process uses
the package `nvml` directly. This class is the same source in the process that opens it.

**How often.** At every sample: utilisation, the driver's buffer of busy samples, clock, reasons for
lowered clocks, power. Every second sample: GPM. Every second: memory, energy, temperature, memory
clock, time slowed by heat and power, PCIe link and replays, NVLink bytes; PCIe traffic where there
is no GPM. Every 10 s: power limit, highest clock, other times of slowing, ECC, NVLink states and
errors, the list of processes. Every 60 s: rows and pages of memory out of use. A call whose median
is above 5 ms is made ten times less often, with an event; in between the last value is repeated.

**GPM** (Hopper and newer): multiprocessors active, warps resident, tensor operations, memory
bandwidth, PCIe and NVLink traffic. Each value is the mean since the reading before it, of all
multiprocessors; the first is of 0.1 s. It needs no administrator unless
NVreg_RestrictProfilingToAdminUsers is 1; It is read when a profile says so (`sampling.gpm: true`).
Without GPM, PCIe traffic is a look of 20 ms in which the driver keeps its caller waiting, and the
rest is absent.

**MIG**: each compute instance is a device of its own ("MIG-…", `parent` = UUID of its GPU) with its
memory and its processes. NVML tells no utilisation of a GPU in MIG mode or of its instances; where
GPM can be had (driver 550 and newer, one compute instance in its GPU instance), busy time is the
sum of the instance's activity. Else nobody knows when it is busy (`tells_busy` false), and lost
time is an upper bound by the waits of the host. Clocks, power, heat, links and errors stand at the
GPU, which is nobody's device then. Instances that are made while a recording runs are not seen.

**Who uses which**: of processes of the job, the GPU of which NVML says that they hold most memory
(event `device-used`). In a container of its own PID namespace only processes that have a file of
the driver open count, for older drivers give the node's process numbers.

The header says of each GPU: name, PCI address, memory, NUMA node and processors its slot belongs
to, PCIe generation and width at most, power limit by default and at most, number of NVLinks,
compute capability, MIG, ECC and persistence mode, versions of driver, NVML and CUDA.

## Source

NVML of the driver, `libnvidia-ml.so.1` (docs.nvidia.com/deploy/nvml-api).

## Privilege

None for most; a container needs the driver's library (NVIDIA runtime). Profiling counters may be
kept for root (NVreg_RestrictProfilingToAdminUsers).

## Cost

A process of its own (15 MB) that asks each GPU some 40 questions, each at its own rate; one that
takes more than 5 ms is asked ten times less often. The recorder itself only reads a pipe.

## Where it is blind

Busy means that some kernel ran, whatever it did: a collective that waits is busy too, and only SM
activity, power and traffic tell it apart. Samples of the driver are a sixth of a second to a second
apart. What MIG or a virtual GPU does not tell is a reason. Not read: NVLink errors of Blackwell,
which counts them elsewhere; NVLink bytes before Ampere; retired pages from Ampere on (rows are
remapped); what other processes of a device do apart from the job's.
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
            for entry, device in zip(self._library.inventory, self._library.devices)
            for name in device.signals
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
