"""Every collector, in the order in which people should read about them."""

from __future__ import annotations

from clusterprof.collectors.cgroup import CgroupCollector
from clusterprof.collectors.cifs import CifsCollector
from clusterprof.collectors.cores import CoresCollector
from clusterprof.collectors.cpu import CpuCollector
from clusterprof.collectors.cpu_clock import CpuClockCollector
from clusterprof.collectors.disk import DiskCollector
from clusterprof.collectors.ethtool import EthtoolCollector
from clusterprof.collectors.gpu_amd import GpuAmdCollector
from clusterprof.collectors.gpu_emulated import GpuEmulatedCollector
from clusterprof.collectors.gpu_gaudi import GpuGaudiCollector
from clusterprof.collectors.gpu_intel import GpuIntelCollector
from clusterprof.collectors.gpu_neuron import GpuNeuronCollector
from clusterprof.collectors.gpu_nvidia import GpuNvidiaCollector
from clusterprof.collectors.gpu_tpu import GpuTpuCollector
from clusterprof.collectors.kernel_log import KernelLogCollector
from clusterprof.collectors.kernel_threads import KernelThreadsCollector
from clusterprof.collectors.lustre import LustreCollector
from clusterprof.collectors.memory import MemoryCollector
from clusterprof.collectors.mounts import MountsCollector
from clusterprof.collectors.network import NetworkCollector
from clusterprof.collectors.placement import PlacementCollector
from clusterprof.collectors.pressure import PressureCollector
from clusterprof.collectors.processes import ProcessesCollector
from clusterprof.collectors.rdma import RdmaCollector
from clusterprof.collectors.reclaim import ReclaimCollector
from clusterprof.collectors.runqueue import RunqueueCollector
from clusterprof.collectors.shm import ShmCollector
from clusterprof.collectors.sockets import SocketsCollector
from clusterprof.collectors.threads import ThreadsCollector

COLLECTORS: tuple[type, ...] = (
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
    ThreadsCollector,  # before processes, which takes what it has read
    ProcessesCollector,
    PlacementCollector,  # after threads, whose processes it takes
    DiskCollector,
    MountsCollector,
    LustreCollector,
    CifsCollector,
    NetworkCollector,
    EthtoolCollector,
    RdmaCollector,
    SocketsCollector,  # after threads, whose processes it takes
    GpuNvidiaCollector,
    KernelLogCollector,
    GpuAmdCollector,
    GpuIntelCollector,
    GpuGaudiCollector,
    GpuNeuronCollector,
    GpuTpuCollector,
    GpuEmulatedCollector,
)
