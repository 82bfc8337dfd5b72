"""All collectors, in the order of their documentation."""

from __future__ import annotations

from typing import Any

from clusterprof.agent.collectors.cgroup import CgroupCollector, PressureCollector
from clusterprof.agent.collectors.cpu import (
    CoresCollector,
    CpuClockCollector,
    CpuCollector,
    RunqueueCollector,
)
from clusterprof.agent.collectors.disk import DiskCollector
from clusterprof.agent.collectors.gpu.amd import GpuAmdCollector
from clusterprof.agent.collectors.gpu.emulated import GpuEmulatedCollector
from clusterprof.agent.collectors.gpu.gaudi import GpuGaudiCollector
from clusterprof.agent.collectors.gpu.intel import GpuIntelCollector
from clusterprof.agent.collectors.gpu.neuron import GpuNeuronCollector
from clusterprof.agent.collectors.gpu.nvidia import GpuNvidiaCollector
from clusterprof.agent.collectors.gpu.tpu import GpuTpuCollector
from clusterprof.agent.collectors.kernel import KernelLogCollector, KernelThreadsCollector
from clusterprof.agent.collectors.memory import MemoryCollector, ReclaimCollector, ShmCollector
from clusterprof.agent.collectors.network import EthtoolCollector, NetworkCollector
from clusterprof.agent.collectors.network_filesystems import (
    CifsCollector,
    LustreCollector,
    MountsCollector,
)
from clusterprof.agent.collectors.portable import PortableCollector, PortableProcessesCollector
from clusterprof.agent.collectors.processes import PlacementCollector, ProcessesCollector
from clusterprof.agent.collectors.rdma import RdmaCollector
from clusterprof.agent.collectors.sockets import SocketsCollector
from clusterprof.agent.collectors.threads import ThreadsCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.psutil_host import has_linux_proc

COLLECTORS: tuple[type[Any], ...] = (
    CpuCollector,
    CoresCollector,
    RunqueueCollector,
    CpuClockCollector,
    KernelThreadsCollector,
    PressureCollector,
    MemoryCollector,
    ReclaimCollector,
    ShmCollector,
    CgroupCollector,
    ThreadsCollector,  # before processes, which uses its readings
    ProcessesCollector,
    PlacementCollector,  # after threads, whose processes it uses
    DiskCollector,
    MountsCollector,
    LustreCollector,
    CifsCollector,
    NetworkCollector,
    EthtoolCollector,
    RdmaCollector,
    SocketsCollector,  # after threads, whose processes it uses
    GpuNvidiaCollector,
    KernelLogCollector,
    GpuAmdCollector,
    GpuIntelCollector,
    GpuGaudiCollector,
    GpuNeuronCollector,
    GpuTpuCollector,
    GpuEmulatedCollector,
    PortableCollector,
    PortableProcessesCollector,
)
_PORTABLE: tuple[type[Any], ...] = (PortableCollector, PortableProcessesCollector)


def select_collectors(roots: Roots, use_portable: bool | None = None) -> tuple[type[Any], ...]:
    """Select the collectors of this machine: those of Linux, or the portable ones.

    Where there is no Linux /proc, the portable collectors stand in for all that read it or
    /sys; the collectors of accelerators remain, since a driver's library may be there.
    use_portable: the profile's choice (`Plan.use_portable`); None = decide by /proc.
    """
    if use_portable is None:
        use_portable = not has_linux_proc(roots)
    if not use_portable:
        return tuple(kind for kind in COLLECTORS if kind not in _PORTABLE)
    return tuple(kind for kind in COLLECTORS if kind in _PORTABLE or kind.name.startswith("gpu_"))
