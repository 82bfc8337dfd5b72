"""NVIDIA GPUs through their driver's library NVML; a device is identified by its UUID.

Calls into the driver can hang forever or crash the process, so the recorder never makes
them itself: it runs `IsolatedCollector`, whose helper process
uses the NVML modules directly. This class reads the device in the process that opens
it.

**How often.** At every sample: utilization, the driver's buffer of busy samples, clock,
throttle reasons, power. Every second sample: GPM. Every second: memory, energy,
temperature, memory clock, time throttled by heat and power, PCIe link and replays,
NVLink bytes; PCIe traffic where there is no GPM. Every 10 s: power limit, highest
clock, other throttle times, ECC, NVLink states and errors, the list of processes. Every
60 s: remapped rows and retired pages of memory. Calls are spaced so that
each takes at most 0.2 % of the time (GPM: 0.5 %), judged by the quickest of its last nine. A
call of which three quarters take more than 5 ms is made ten times less often, with an event;
in between the last value is repeated.

**Busy time** carries the time up to which it counts. Where GPM is read it is the activity
of the compute engine, over exactly the time between two readings. Elsewhere it is the
driver's buffer of samples, at the driver's own time stamps: a sample covers a sixth of a
second to a second and is handed over up to that much later. A time stamp that cannot be
of the time of day is replaced by the time of the reading.

**GPM** (Hopper and newer): active multiprocessors, resident warps, tensor operations,
memory bandwidth, PCIe and NVLink traffic. Each value is the mean since the previous
reading, over all multiprocessors; the first covers 0.1 s. It needs no administrator
unless NVreg_RestrictProfilingToAdminUsers is 1. It is read unless one reading takes more
than 5 ms when the recorder starts; a profile can force it (`sampling.gpm: true`) or
disable it (`false`). Without GPM, PCIe traffic is a measurement of 20 ms during which
the driver blocks its caller, and the rest is absent.

**NVLinks**: the errors of all links together are sampled: replays, recoveries and CRC errors, from
Blackwell on recoveries, symbol errors and effective errors. When they have grown, the counters of
each link are read, and an event `nvlink-errors` says of which links the new errors are, what is at
their other ends, and from Blackwell on their bit error rates. An event `nvlink-states` says which
links went down or came up. Both come at most once a minute, and every 16 minutes from the fifth on.

**MIG**: each compute instance is a device of its own ("MIG-…", `parent` = UUID of its
GPU) with its memory and its processes. NVML reports no utilization of a GPU in MIG mode
or of its instances. Where GPM is available (driver 550 and newer, one compute instance
in its GPU instance), busy time is the sum of the instance's activity. Otherwise it is
unknown when the instance is busy (`tells_busy` false), and lost time is an upper bound
by the waits of the host. Clocks, power, temperature, links and errors are reported for
the GPU, which is then not the device of any process. Instances that are created while a
recording runs are not seen.

**Device of a process**: for a process of the job, the GPU on which NVML reports the
most memory held by it (event `device-used`). In a container with its own PID namespace
only processes with an open file of the driver count, because older drivers report the
node's process numbers.

The header lists for each GPU: name, PCI address, memory, NUMA node and processors of
its slot, maximum PCIe generation and width, default and maximum power limit, number of
NVLinks, compute capability, MIG, ECC and persistence mode, versions of driver, NVML and
CUDA.

## Source

NVML of the driver, `libnvidia-ml.so.1` (docs.nvidia.com/deploy/nvml-api).

## Privilege

None for most values; a container needs the driver's library (NVIDIA runtime). Profiling
counters may be restricted to root (NVreg_RestrictProfilingToAdminUsers).

## Cost

A process of its own (15 MB) that makes some 40 calls per GPU, each at its own rate; a
call that takes more than 5 ms is made ten times less often. The recorder itself only
reads a pipe.

## Where it is blind

Busy means that some kernel ran: a collective that waits is busy too, and only SM
activity, power and traffic distinguish it. Samples of the driver are a sixth of a
second to a second apart. A value that MIG or a virtual GPU does not provide is a
reason. Not read: NVLink bytes before Ampere; retired pages from Ampere on (rows are
remapped); activity of other processes of a device separately from the job's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.collectors.gpu.nvml_library import NvmlLibrary
from clusterprof.signals import BY_NAME, Signal


class GpuNvidiaCollector:
    """Utilization, busy time, clocks, power, throttling, PCIe, memory, errors of NVIDIA GPUs."""

    name: ClassVar[str] = "gpu_nvidia"
    isolated: ClassVar[bool] = True
    interval_ns: ClassVar[int] = 100_000_000

    def __init__(self, context: Context) -> None:
        self._library: NvmlLibrary | None = None

    def open(self) -> Sequence[tuple[Signal, str]]:
        """Open NVML in this process; it may hang or crash with the driver.

        Raises: Unavailable when NVML cannot be opened.
        """
        self._library = NvmlLibrary(mark=lambda index, call: None)
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
        """Return the header entries of the devices."""
        return [] if self._library is None else self._library.inventory

    def close(self) -> None:
        """Close NVML."""
        if self._library is not None:
            self._library.close()
            self._library = None
