"""Declare signals of GPUs and other accelerators.

Declare signals of accelerators other than GPUs whose meaning differs from NVML's
values.

Where the meaning is equal, they use the names of signals.gpu (memory, power, errors
…).
"""

from __future__ import annotations

from clusterprof.signals.signal import register_signal as _signal

# --- gpu: NVML, amdgpu, i915 and xe, or the emulated accelerator; device = UUID, PCI address, … --
GPU_BUSY = _signal("gpu.busy_ratio", "gpu", "Share of the driver's window with a kernel resident.")
GPU_BUSY_TIME = _signal(
    "gpu.busy_ns_total",
    "gpu",
    "Time with work on the device: an integral, exact where the "
    "device keeps one, else summed from the driver's own sample buffer.",
)
GPU_BUSY_UNTIL = _signal(
    "gpu.busy_until_ns",
    "gpu",
    "Time on the recording's clock up to which gpu.busy_ns_total counts: the end of the driver's "
    "newest sampling period. Without it the total counts up to the time of its reading.",
)
GPU_MEMORY_BUSY = _signal("gpu.memory_busy_ratio", "gpu", "Share of the window memory was in use.")
GPU_SM_ACTIVE = _signal("gpu.sm_active_ratio", "gpu", "Share of multiprocessors with a warp (GPM).")
GPU_SM_OCCUPANCY = _signal(
    "gpu.sm_occupancy_ratio",
    "gpu",
    "Resident warps over the maximum; mean since the previous reading (GPM).",
)
GPU_TENSOR_ACTIVE = _signal(
    "gpu.tensor_active_ratio",
    "gpu",
    "Share of the time in which multiprocessors did tensor operations of any kind; mean "
    "since the previous reading (GPM).",
)
GPU_MEMORY_BANDWIDTH = _signal(
    "gpu.memory_bandwidth_ratio",
    "gpu",
    "Device memory bandwidth used, over the theoretical maximum; mean since the previous "
    "reading (GPM).",
)
GPU_MEMORY_USED = _signal("gpu.memory_used_bytes", "gpu", "Device memory in use.")
GPU_MEMORY_TOTAL = _signal("gpu.memory_total_bytes", "gpu", "Total device memory.")
GPU_JOB_MEMORY = _signal("gpu.job_memory_bytes", "gpu", "Device memory the job's processes hold.")
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
GPU_BOARD_LIMIT_VIOLATION = _signal(
    "gpu.board_limit_violation_ns_total", "gpu", "Time slowed by a limit of the board."
)
GPU_RELIABILITY_VIOLATION = _signal(
    "gpu.reliability_violation_ns_total", "gpu", "Time slowed so that voltages stay reliable."
)
GPU_SYNC_BOOST_VIOLATION = _signal(
    "gpu.sync_boost_violation_ns_total", "gpu", "Time slowed to the clock of a slower neighbor GPU."
)
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
GPU_REMAPPED_CORRECTED = _signal(
    "gpu.remapped_rows_corrected_count",
    "gpu",
    "Rows of memory replaced by spare ones for errors that were corrected (Ampere and newer).",
)
GPU_REMAPPED_UNCORRECTED = _signal(
    "gpu.remapped_rows_uncorrected_count",
    "gpu",
    "Rows of memory replaced by spare ones for errors that were not corrected.",
)
GPU_REMAP_PENDING = _signal(
    "gpu.remap_pending_count", "gpu", "1 while a row waits to be replaced: the GPU needs a reset."
)
GPU_REMAP_FAILED = _signal(
    "gpu.remap_failed_count", "gpu", "1 when a row could not be replaced: the GPU needs repair."
)
GPU_RETIRED_PAGES = _signal(
    "gpu.retired_pages_count",
    "gpu",
    "Pages of memory no longer used, for errors of any kind (before Ampere).",
)
GPU_RETIREMENT_PENDING = _signal(
    "gpu.retirement_pending_count", "gpu", "1 while a page waits to be retired by a reset."
)
GPU_NVLINK_RECEIVE_RATE = _signal(
    "gpu.nvlink_receive_bytes_per_second",
    "gpu",
    "NVLink traffic into the device, all links; mean since the previous reading (GPM).",
)
GPU_NVLINK_TRANSMIT_RATE = _signal(
    "gpu.nvlink_transmit_bytes_per_second", "gpu", "NVLink traffic out of the device, likewise."
)
GPU_NVLINK_RECEIVE = _signal(
    "gpu.nvlink_receive_bytes_total", "gpu", "Data received over NVLink, all links."
)
GPU_NVLINK_TRANSMIT = _signal(
    "gpu.nvlink_transmit_bytes_total", "gpu", "Data sent over NVLink, all links."
)
GPU_NVLINK_ACTIVE = _signal("gpu.nvlink_active_count", "gpu", "NVLinks that are up.")
GPU_NVLINK_REPLAYS = _signal("gpu.nvlink_replays_total", "gpu", "NVLink packets sent again.")
GPU_NVLINK_RECOVERIES = _signal(
    "gpu.nvlink_recoveries_total", "gpu", "Times an NVLink had to be trained again."
)
GPU_NVLINK_CRC = _signal("gpu.nvlink_crc_errors_total", "gpu", "Damaged flits and data on NVLinks.")
GPU_NVLINK_SYMBOL_ERRORS = _signal(
    "gpu.nvlink_symbol_errors_total",
    "gpu",
    "Errors in symbols received over NVLink (Blackwell and newer).",
)
GPU_NVLINK_EFFECTIVE_ERRORS = _signal(
    "gpu.nvlink_effective_errors_total",
    "gpu",
    "Sum of the errors in each packet received over NVLink (Blackwell and newer).",
)
GPU_XGMI_READ = _signal(
    "gpu.xgmi_read_bytes_total", "gpu", "Bytes read over AMD's links between devices, all links."
)
GPU_XGMI_WRITE = _signal(
    "gpu.xgmi_write_bytes_total", "gpu", "Bytes written over AMD's links between devices."
)
GPU_PROCESSES = _signal("gpu.processes_count", "gpu", "Processes with a context on the device.")

# --- kernel_log: /dev/kmsg ----------------------------------------------------------------------
KERNEL_GPU_ERRORS = _signal(
    "kernel.gpu_errors_total",
    "",
    "Errors of GPUs and NVSwitches (Xid, SXid) that the NVIDIA driver wrote to the kernel's log "
    "since the recorder began to read it.",
)


GPU_POWER_UTILIZATION = _signal(
    "gpu.power_utilisation_ratio",
    "gpu",
    "Power drawn, from idle power (0) to its limit (1): Gaudi calls it "
    "utilization, but it is not a share of time.",
)
GPU_SOC_CLOCK = _signal("gpu.soc_clock_hertz", "gpu", "Clock of the whole chip (Gaudi).")
GPU_SOC_CLOCK_MAX = _signal(
    "gpu.soc_clock_max_hertz", "gpu", "Highest clock of the whole chip (Gaudi)."
)
CORE_BUSY = _signal(
    "gpu.core_busy_ratio",
    "core",
    "Share of the averaging period in which the core executed, as reported by its tool (Neuron).",
)
CORE_AVERAGED_OVER = _signal(
    "gpu.averaged_over_ns",
    "core",
    "Averaging period of the share in the same sample; absent while no process uses the core.",
)
GPU_DUTY_CYCLE = _signal(
    "gpu.duty_cycle_ratio",
    "gpu",
    "Share of the last seconds in which the device worked: a sliding mean, from which no "
    "integral can be computed (TPU).",
)
GPU_TENSORCORE = _signal(
    "gpu.tensorcore_ratio", "gpu", "Use of the matrix units in one short sample per second (TPU)."
)
CORE_EXECUTIONS = _signal(
    "gpu.executions_total",
    "core",
    "Programs that processes using the core have finished, on all of their cores (Neuron).",
)
CORE_EXECUTION_ERRORS = _signal(
    "gpu.execution_errors_total",
    "core",
    "Errors of the programs of processes that use the core (Neuron).",
)
CORE_EXECUTION_P50 = _signal(
    "gpu.execution_p50_ns", "core", "Median time of a program on the device, last period."
)
CORE_EXECUTION_P99 = _signal(
    "gpu.execution_p99_ns", "core", "99 % quantile of a program's time on it, last period."
)
