"""Every collector, in the order in which people should read about them."""

from __future__ import annotations

from clusterprof.collectors.cgroup import CgroupCollector
from clusterprof.collectors.cores import CoresCollector
from clusterprof.collectors.cpu import CpuCollector
from clusterprof.collectors.disk import DiskCollector
from clusterprof.collectors.memory import MemoryCollector
from clusterprof.collectors.mounts import MountsCollector
from clusterprof.collectors.network import NetworkCollector
from clusterprof.collectors.pressure import PressureCollector

COLLECTORS: tuple[type, ...] = (
    CpuCollector,
    CoresCollector,
    PressureCollector,
    MemoryCollector,
    CgroupCollector,
    # the job's tree (processes, threads) goes here
    DiskCollector,
    MountsCollector,
    NetworkCollector,
    # accelerators go here
)
