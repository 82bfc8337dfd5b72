"""The catalogue of signals: the vocabulary that collectors write and detectors read.

A signal is one kind of number about one device of a node ("disk.read_bytes_total" of "vda").
Its name carries its unit; `_total` marks a counter, which is an integral: the difference of two
readings is exact for the time between them, and nothing is known of a point inside.
A collector may not write, and a detector may not read, what is not listed here.
"""

from __future__ import annotations

from clusterprof.signals.made import DECLARED, Signal
from clusterprof.signals.made import declare as _signal

# --- cpu: /proc/stat ---------------------------------------------------------------------------
CPU_USER = _signal("cpu.user_ns_total", "cpu", "Time running user code, nice included.")
CPU_SYSTEM = _signal("cpu.system_ns_total", "cpu", "Time in the kernel, interrupts included.")
CPU_IDLE = _signal("cpu.idle_ns_total", "cpu", "Time with nothing to run and no I/O outstanding.")
CPU_IOWAIT = _signal("cpu.iowait_ns_total", "cpu", "Idle time while a task of it waited for I/O.")
CPU_STEAL = _signal("cpu.steal_ns_total", "cpu", "Time the hypervisor gave to somebody else.")
CPU_RUNNABLE = _signal("cpu.runnable_count", "", "Tasks running or ready to run on the node.")
CPU_BLOCKED = _signal("cpu.blocked_count", "", "Tasks waiting for I/O on the node.")

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
MEMORY_AVAILABLE = _signal("memory.available_bytes", "", "Memory to be had without swapping.")
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
MEMORY_OOM_KILLS = _signal("memory.oom_kills_total", "", "Processes killed for want of memory.")
MEMORY_NUMA_MISSES = _signal(
    "memory.numa_misses_total", "node", "Allocations that fell on another NUMA node."
)

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

# --- disk, mounts, lustre, cifs ------------------------------------------------------------------
from clusterprof.signals.storage import *  # noqa: E402, F403 - in the order of the catalogue

# --- network: /proc/net/dev, /sys/class/net, /proc/net/snmp, netstat ------------------------------
NET_RECEIVE = _signal("network.receive_bytes_total", "nic", "Bytes received.")
NET_TRANSMIT = _signal("network.transmit_bytes_total", "nic", "Bytes sent.")
NET_RECEIVE_DROPS = _signal("network.receive_drops_total", "nic", "Packets dropped on receipt.")
NET_TRANSMIT_DROPS = _signal("network.transmit_drops_total", "nic", "Packets dropped on sending.")
NET_ERRORS = _signal("network.errors_total", "nic", "Packets with errors, both ways.")
NET_LINK_SPEED = _signal(
    "network.link_bytes_per_second", "nic", "Speed the link was brought up at."
)
TCP_SEGMENTS = _signal("tcp.segments_sent_total", "", "TCP segments sent, retransmissions too.")
TCP_RETRANSMITS = _signal("tcp.retransmits_total", "", "TCP segments sent again.")
TCP_TIMEOUTS = _signal("tcp.timeouts_total", "", "TCP retransmission timers that expired.")
NET_CARRIER_CHANGES = _signal(
    "network.carrier_changes_total", "nic", "Times the link went down or came up."
)

# --- sockets: NETLINK_SOCK_DIAG; the job's own connections, by the interface they go out by -------
TCP_JOB_CONNECTIONS = _signal(
    "tcp.job_connections_count", "nic", "Established connections of the job that leave the machine."
)
TCP_JOB_UNSENT = _signal(
    "tcp.job_unsent_bytes", "nic", "Written by the job and not yet acknowledged, sent or not."
)
TCP_JOB_UNREAD = _signal(
    "tcp.job_unread_bytes", "nic", "Received for the job and not yet read by it."
)
TCP_JOB_LOST = _signal(
    "tcp.job_lost_segments_count", "nic", "Segments TCP takes to be lost at the moment."
)
TCP_JOB_RTT = _signal("tcp.job_rtt_ns", "nic", "Smoothed round-trip time, median of connections.")
TCP_JOB_MIN_RTT = _signal(
    "tcp.job_min_rtt_ns", "nic", "Shortest recent round-trip time, median of connections."
)
TCP_JOB_DELIVERY = _signal(
    "tcp.job_delivery_bytes_per_second",
    "nic",
    "Rate at which peers got data, as TCP last estimated it; sum of connections that sent.",
)
TCP_JOB_RETRANSMITS = _signal("tcp.job_retransmits_total", "nic", "Segments sent again.")
TCP_JOB_ECN_MARKED = _signal(
    "tcp.job_ecn_marked_total", "nic", "Segments that reached the peer marked for congestion."
)
TCP_JOB_BUSY = _signal(
    "tcp.job_busy_ns_total", "nic", "Time with data to send or to be acknowledged, all connections."
)
TCP_JOB_RWND_LIMITED = _signal(
    "tcp.job_rwnd_limited_ns_total", "nic", "Part of busy: the peer's receive window was full."
)
TCP_JOB_SNDBUF_LIMITED = _signal(
    "tcp.job_sndbuf_limited_ns_total", "nic", "Part of busy: the send buffer was too small."
)
TCP_JOB_ACKED = _signal("tcp.job_acked_bytes_total", "nic", "Bytes sent and acknowledged.")
TCP_JOB_RECEIVED = _signal("tcp.job_received_bytes_total", "nic", "Bytes received in order.")

# --- ethtool: what the driver of a network card counts; device "<nic> rx" = it was told to stop ---
NET_PAUSE_FRAMES = _signal(
    "network.pause_frames_total",
    "nic direction",
    "Pause frames of all priorities; rx: the peer told us to stop sending, tx: we told the peer.",
)
NET_PAUSED = _signal(
    "network.paused_ns_total",
    "nic direction",
    "Time sending was held back by pause frames, sum over priorities; rx and tx as for the frames.",
)
NET_ECN_MARKED = _signal(
    "network.ecn_marked_total", "nic", "Packets the card marked for congestion, or got marked."
)
NET_CNP = _signal("network.cnp_total", "nic", "Congestion notifications that came, as counted.")
NET_DISCARDS_PHY = _signal(
    "network.discards_phy_total",
    "nic",
    "Packets dropped at the port for want of buffers, both ways.",
)
NET_SHAPED = _signal(
    "network.shaped_total", "nic", "Packets a cloud's limits held back or dropped, both ways."
)

# --- rdma: /sys/class/infiniband; device = "<device>/<port>" --------------------------------------
RDMA_RECEIVE = _signal("rdma.receive_bytes_total", "port", "Bytes received.")
RDMA_TRANSMIT = _signal("rdma.transmit_bytes_total", "port", "Bytes sent.")
RDMA_TRANSMIT_WAIT = _signal(
    "rdma.transmit_wait_total",
    "port",
    "Ticks of the card with data to send and none sent: no credits, or another's turn.",
)
RDMA_CNP = _signal(
    "rdma.cnp_total", "port", "Congestion notifications that came: it was asked to send slower."
)
RDMA_CNP_SENT = _signal("rdma.cnp_sent_total", "port", "Congestion notifications it sent.")
RDMA_ECN_MARKED = _signal(
    "rdma.ecn_marked_total", "port", "Packets that came with a mark of congestion."
)
RDMA_OUT_OF_SEQUENCE = _signal(
    "rdma.out_of_sequence_total", "port", "Packets that came out of sequence."
)
RDMA_RETRANSMITS = _signal(
    "rdma.retransmits_total", "port", "Times it had to send again: refused sequences, timeouts."
)
RDMA_DISCARDS = _signal("rdma.discards_total", "port", "Packets the port dropped, both ways.")
RDMA_LINK_DOWNED = _signal("rdma.link_downed_total", "port", "Times the link failed and went down.")
RDMA_SYMBOL_ERRORS = _signal(
    "rdma.symbol_errors_total", "port", "Minor errors of the link on one or more lanes."
)
RDMA_STATE = _signal(
    "rdma.state_count", "port", "State by its number: 1 down, 2 initialising, 3 armed, 4 active."
)
RDMA_LINK_SPEED = _signal(
    "rdma.link_bytes_per_second", "port", "Rate of the link, while it is active."
)
RDMA_LINK_WIDTH = _signal("rdma.link_width_lanes_count", "port", "Lanes of the link.")

# --- gpu: NVML, or the emulated accelerator; device = UUID or "emulated-<n>" ---------------------
GPU_BUSY = _signal("gpu.busy_ratio", "gpu", "Share of the driver's window with a kernel resident.")
GPU_BUSY_TIME = _signal(
    "gpu.busy_ns_total",
    "gpu",
    "Time with work on the device: an integral, exact where the "
    "device keeps one, else summed from the driver's own sample buffer.",
)
GPU_MEMORY_BUSY = _signal("gpu.memory_busy_ratio", "gpu", "Share of the window memory was in use.")
GPU_SM_ACTIVE = _signal("gpu.sm_active_ratio", "gpu", "Share of multiprocessors with a warp (GPM).")
GPU_MEMORY_USED = _signal("gpu.memory_used_bytes", "gpu", "Device memory in use.")
GPU_MEMORY_TOTAL = _signal("gpu.memory_total_bytes", "gpu", "Device memory there is.")
GPU_POWER = _signal("gpu.power_watts", "gpu", "Power drawn.")
GPU_POWER_LIMIT = _signal("gpu.power_limit_watts", "gpu", "Power limit in force.")
GPU_ENERGY = _signal("gpu.energy_joules_total", "gpu", "Energy used since the driver was loaded.")
GPU_TEMPERATURE = _signal("gpu.temperature_celsius", "gpu", "Temperature of the GPU.")
GPU_SM_CLOCK = _signal("gpu.sm_clock_hertz", "gpu", "Clock of the multiprocessors.")
GPU_MEMORY_CLOCK = _signal("gpu.memory_clock_hertz", "gpu", "Clock of the memory.")
GPU_SM_CLOCK_MAX = _signal("gpu.sm_clock_max_hertz", "gpu", "Highest clock of multiprocessors.")
GPU_THROTTLE = _signal("gpu.throttle_bits", "gpu", "Reasons for lowered clocks, as NVML's mask.")
GPU_THERMAL_VIOLATION = _signal(
    "gpu.thermal_violation_ns_total", "gpu", "Time slowed by temperature."
)
GPU_POWER_VIOLATION = _signal("gpu.power_violation_ns_total", "gpu", "Time slowed by power limit.")
GPU_PCIE_RECEIVE = _signal(
    "gpu.pcie_receive_bytes_per_second", "gpu", "PCIe traffic into the device."
)
GPU_PCIE_TRANSMIT = _signal(
    "gpu.pcie_transmit_bytes_per_second", "gpu", "PCIe traffic out of the device."
)
GPU_PCIE_GENERATION = _signal(
    "gpu.pcie_generation_count", "gpu", "PCIe generation of the link now."
)
GPU_PCIE_WIDTH = _signal("gpu.pcie_width_count", "gpu", "PCIe lanes of the link now.")
GPU_PCIE_REPLAYS = _signal("gpu.pcie_replays_total", "gpu", "PCIe packets sent again.")
GPU_ECC_CORRECTED = _signal("gpu.ecc_corrected_total", "gpu", "Memory errors corrected.")
GPU_ECC_UNCORRECTED = _signal("gpu.ecc_uncorrected_total", "gpu", "Memory errors not corrected.")
GPU_PROCESSES = _signal("gpu.processes_count", "gpu", "Processes with a context on the device.")

# --- self: what recording costs -----------------------------------------------------------------
SELF_CPU = _signal("self.cpu_ns_total", "process", "CPU time used by the recorder or a helper.")
SELF_RSS = _signal("self.rss_bytes", "process", "Memory of the recorder or a helper.")
SELF_LATE = _signal("self.late_ns_total", "", "Sum of time by which samples were taken late.")
SELF_TICKS_MISSED = _signal("self.ticks_missed_total", "", "Samples that were not taken at all.")

CATALOGUE: tuple[Signal, ...] = tuple(DECLARED)
BY_NAME: dict[str, Signal] = {signal.name: signal for signal in CATALOGUE}
