"""Declare signals of the host: CPUs, pressure, memory and the job's cgroup.

Declare signals of the recorder's own cost.

It also lists collectors whose absence is normal on a node and not a coverage gap, with readable
names.
"""

from __future__ import annotations

from clusterprof.signals.signal import register_signal as _signal

# --- cpu: /proc/stat ---------------------------------------------------------------------------
CPU_USER = _signal("cpu.user_ns_total", "cpu", "Time running user code, nice included.")
CPU_SYSTEM = _signal("cpu.system_ns_total", "cpu", "Time in the kernel, interrupts included.")
CPU_IDLE = _signal("cpu.idle_ns_total", "cpu", "Time with nothing to run and no I/O outstanding.")
CPU_IOWAIT = _signal("cpu.iowait_ns_total", "cpu", "Idle time while its tasks waited for I/O.")
CPU_STEAL = _signal("cpu.steal_ns_total", "cpu", "Time the hypervisor gave to other VMs.")
CPU_RUNNABLE = _signal("cpu.runnable_count", "", "Tasks running or ready to run on the node.")
CPU_BLOCKED = _signal("cpu.blocked_count", "", "Tasks waiting for I/O on the node.")

# --- runqueue: /proc/schedstat --------------------------------------------------------------------
CPU_RUN_DELAY = _signal(
    "cpu.run_delay_ns_total", "cpu", "Time tasks on its run queue waited for it; sum over tasks."
)

# --- cpu_clock: cpufreq, thermal_throttle, hwmon; device = package, temperatures: sensor ----------
CPU_CLOCK = _signal("cpu.clock_hertz", "package", "Clock; mean of up to eight of its CPUs.")
CPU_CLOCK_LIMIT = _signal(
    "cpu.clock_limit_hertz", "package", "Highest clock its governor may ask for now."
)
CPU_CORE_THROTTLES = _signal(
    "cpu.core_throttles_total", "package", "Times a core was too hot and slowed; sum of cores."
)
CPU_PACKAGE_THROTTLES = _signal(
    "cpu.package_throttles_total", "package", "Times the package was too hot and slowed."
)
CPU_THROTTLED = _signal(
    "cpu.throttled_ns_total", "package", "Time slowed by heat: of the package or its worst core."
)
CPU_TEMPERATURE = _signal("cpu.temperature_celsius", "sensor", "Temperature of a CPU package.")

# --- kernel_threads: /proc/<pid>/schedstat of the kernel's own threads ----------------------------
KERNEL_CPU = _signal(
    "kernel.cpu_ns_total", "family", "CPU time of the kernel threads of this name since first seen."
)

# --- pressure: /proc/pressure, <cgroup>/*.pressure; device "" = node, "cgroup" = the job's --------
PRESSURE_CPU_SOME = _signal(
    "pressure.cpu_some_ns_total", "scope", "Time at least one task waited for a CPU."
)
PRESSURE_IO_SOME = _signal(
    "pressure.io_some_ns_total", "scope", "Time at least one task waited for I/O."
)
PRESSURE_IO_FULL = _signal(
    "pressure.io_full_ns_total", "scope", "Time every non-idle task waited for I/O."
)
PRESSURE_MEMORY_SOME = _signal(
    "pressure.memory_some_ns_total", "scope", "Time at least one task waited for memory."
)
PRESSURE_MEMORY_FULL = _signal(
    "pressure.memory_full_ns_total", "scope", "Time every non-idle task waited for memory."
)

# --- memory: /proc/meminfo, /proc/vmstat, node*/numastat ----------------------------------------
MEMORY_AVAILABLE = _signal("memory.available_bytes", "", "Memory available without swapping.")
MEMORY_CACHED = _signal("memory.cached_bytes", "", "The page cache.")
MEMORY_DIRTY = _signal("memory.dirty_bytes", "", "Cache that still has to be written.")
MEMORY_WRITEBACK = _signal("memory.writeback_bytes", "", "Cache being written now.")
MEMORY_SWAP_FREE = _signal("memory.swap_free_bytes", "", "Unused swap.")
MEMORY_MAJOR_FAULTS = _signal("memory.major_faults_total", "", "Page faults that needed I/O.")
MEMORY_SWAP_IN = _signal("memory.swap_in_bytes_total", "", "Bytes read back from swap.")
MEMORY_SWAP_OUT = _signal("memory.swap_out_bytes_total", "", "Bytes written to swap.")
MEMORY_RECLAIM_DIRECT = _signal(
    "memory.direct_reclaim_pages_total", "", "Pages an allocating task had to scan itself."
)
MEMORY_REFAULTS = _signal(
    "memory.refaults_total", "", "File pages read again soon after they were evicted."
)
MEMORY_OOM_KILLS = _signal("memory.oom_kills_total", "", "Processes killed for lack of memory.")
MEMORY_NUMA_MISSES = _signal(
    "memory.numa_misses_total", "node", "Allocations placed on another NUMA node."
)

# --- reclaim: /proc/vmstat, node*/numastat --------------------------------------------------------
MEMORY_FAULTS = _signal("memory.faults_total", "", "Page faults of all kinds.")
MEMORY_KSWAPD_SCAN = _signal(
    "memory.kswapd_scan_pages_total", "", "Pages that kswapd scanned for pages to free."
)
MEMORY_KSWAPD_STEAL = _signal("memory.kswapd_freed_pages_total", "", "Pages that kswapd freed.")
MEMORY_DIRECT_STEAL = _signal(
    "memory.direct_freed_pages_total", "", "Pages an allocating task had to free itself."
)
MEMORY_STALLS = _signal(
    "memory.allocation_stalls_total", "", "Times an allocating task began to free pages itself."
)
MEMORY_HUGE_FAULTS = _signal(
    "memory.huge_faults_total", "", "Page faults that were given a huge page."
)
MEMORY_HUGE_FALLBACKS = _signal(
    "memory.huge_fallbacks_total", "", "Page faults for which no huge page was free."
)
MEMORY_COMPACTION_STALLS = _signal(
    "memory.compaction_stalls_total", "", "Times a task moved pages itself to make a huge one."
)
MEMORY_NUMA_HITS = _signal(
    "memory.numa_hits_total", "node", "Allocations placed on the intended NUMA node."
)
MEMORY_NUMA_LOCAL = _signal(
    "memory.numa_local_total", "node", "Allocations on this node by tasks that ran on it."
)
MEMORY_NUMA_REMOTE = _signal(
    "memory.numa_remote_total", "node", "Allocations on this node by tasks that ran on another."
)

# --- shm: statvfs of /dev/shm, as the job's first process sees it ---------------------------------
SHM_USED = _signal("shm.used_bytes", "folder", "Bytes in shared memory, including batches.")
SHM_SIZE = _signal("shm.size_bytes", "folder", "Capacity of shared memory.")

# --- cgroup: the job's own, v1 and v2 -----------------------------------------------------------
CGROUP_CPU = _signal("cgroup.cpu_ns_total", "", "CPU time used by the job's cgroup.")
CGROUP_PERIODS = _signal("cgroup.quota_periods_total", "", "Quota periods that began.")
CGROUP_THROTTLED_PERIODS = _signal(
    "cgroup.throttled_periods_total", "", "Quota periods in which the quota ran out."
)
CGROUP_THROTTLED = _signal(
    "cgroup.throttled_ns_total", "", "Time runnable tasks were held back by the CPU quota."
)
CGROUP_QUOTA = _signal("cgroup.cpu_quota_ratio", "", "CPUs the quota allows; absent = no quota.")
CGROUP_MEMORY = _signal("cgroup.memory_bytes", "", "Memory charged to the job's cgroup.")
CGROUP_MEMORY_LIMIT = _signal("cgroup.memory_limit_bytes", "", "Its limit; absent = none.")
CGROUP_MEMORY_HIGH = _signal(
    "cgroup.memory_high_events_total", "", "Times the cgroup was throttled to reclaim memory."
)
CGROUP_OOM_KILLS = _signal("cgroup.oom_kills_total", "", "Processes of the job killed for memory.")


# --- self: cost of recording ---------------------------------------------------------------------
SELF_CPU = _signal("self.cpu_ns_total", "process", "CPU time used by the recorder or a helper.")
SELF_RSS = _signal("self.rss_bytes", "process", "Memory of the recorder or a helper.")
SELF_LATE = _signal("self.late_ns_total", "", "Sum of the delays of samples.")
SELF_TICKS_MISSED = _signal("self.ticks_missed_total", "", "Samples that were skipped.")


OPTIONAL_COLLECTORS: dict[str, str] = {
    "mounts": "NFS",
    "lustre": "Lustre",
    "cifs": "CIFS",
    "ethtool": "cards that count pauses",
    "rdma": "RDMA",
    "cpu_clock": "CPU clocks",
    "gpu_nvidia": "NVIDIA GPUs",
    "kernel_log": "NVIDIA's kernel log",
    "gpu_amd": "AMD GPUs",
    "gpu_intel": "Intel GPUs",
    "gpu_gaudi": "Gaudi",
    "gpu_neuron": "Trainium",
    "gpu_tpu": "TPU",
    "gpu_emulated": "emulated devices",
}
"""Collector -> what it reads. For every other collector the reason of its absence is
reported.
"""
_EXPECTED_COLLECTOR = "gpu_nvidia"


def is_absence_normal(collector: str, kind: str, remedy: str, accelerators: bool) -> bool:
    """Return whether a collector is absent because the node lacks this kind of hardware or
    file system.

    kind, remedy: of the reason; software that could be installed is a gap. accelerators:
    whether the node has any accelerator; a node without one reports NVIDIA's collector as
    missing, for all vendors.
    """
    if kind != "absent" or collector not in OPTIONAL_COLLECTORS:
        return False
    return accelerators if collector == _EXPECTED_COLLECTOR else not remedy
