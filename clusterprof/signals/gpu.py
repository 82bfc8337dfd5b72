"""Signals of GPUs and other accelerators."""

from __future__ import annotations

from clusterprof.signals.made import declare as _signal

# --- gpu: NVML, amdgpu, i915 and xe, or the emulated accelerator; device = UUID, PCI address, … --
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
GPU_XGMI_READ = _signal(
    "gpu.xgmi_read_bytes_total", "gpu", "Bytes read over AMD's links between devices, all links."
)
GPU_XGMI_WRITE = _signal(
    "gpu.xgmi_write_bytes_total", "gpu", "Bytes written over AMD's links between devices."
)
GPU_PROCESSES = _signal("gpu.processes_count", "gpu", "Processes with a context on the device.")
