"""AMD's device-metrics-exporter and Omnistat: their names of what a device does."""

from __future__ import annotations

from clusterprof.importers.telemetry.gathered import Meaning

_PERCENT, _MEGA = 0.01, 1e6

OMNISTAT: dict[str, Meaning] = {
    "rocm_utilization_percentage": Meaning("gpu.busy_ratio", _PERCENT),
    "rocm_average_socket_power_watts": Meaning("gpu.power_watts"),
    "rocm_current_socket_power_watts": Meaning("gpu.power_watts", choice=1),
    "rocm_power_cap_watts": Meaning("gpu.power_limit_watts"),
    "rocm_vram_total_bytes": Meaning("gpu.memory_total_bytes"),
    "rocm_vram_busy_percentage": Meaning("gpu.memory_busy_ratio", _PERCENT),
    "rocm_temperature_celsius": Meaning("gpu.temperature_celsius"),
    "rocm_temperature_edge_celsius": Meaning("gpu.temperature_celsius", choice=1),
    "rocm_temperature_hbm_celsius": Meaning("gpu.temperature_celsius", choice=2),
    "rocm_sclk_clock_mhz": Meaning("gpu.sm_clock_hertz", _MEGA),
    "rocm_mclk_clock_mhz": Meaning("gpu.memory_clock_hertz", _MEGA),
}

EXPORTER: dict[str, Meaning] = {
    "gpu_gfx_activity": Meaning("gpu.busy_ratio", _PERCENT),
    "gpu_umc_activity": Meaning("gpu.memory_busy_ratio", _PERCENT),
    "gpu_package_power": Meaning("gpu.power_watts"),
    "gpu_average_package_power": Meaning("gpu.power_watts", choice=1),
    "gpu_junction_temperature": Meaning("gpu.temperature_celsius"),
    "gpu_edge_temperature": Meaning("gpu.temperature_celsius", choice=1),
}
