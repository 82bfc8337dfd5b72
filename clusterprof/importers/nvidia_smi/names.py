"""Names that nvidia-smi gives to what it prints, by form."""

from __future__ import annotations

from clusterprof.importers.telemetry.dcgm_names import FIELDS
from clusterprof.importers.telemetry.dcgm_names import SHORT as _SHORT
from clusterprof.importers.telemetry.gathered import Meaning

_PERCENT, _MEGA, _MIB = 0.01, 1e6, float(1 << 20)
BUSY = Meaning("gpu.busy_ratio", _PERCENT)
MEMORY_BUSY = Meaning("gpu.memory_busy_ratio", _PERCENT)
MEMORY_USED = Meaning("gpu.memory_used_bytes", _MIB)
MEMORY_TOTAL = Meaning("gpu.memory_total_bytes", _MIB)
POWER = Meaning("gpu.power_watts")
POWER_ELSE = Meaning("gpu.power_watts", choice=1)
POWER_LIMIT = Meaning("gpu.power_limit_watts")
POWER_LIMIT_ELSE = Meaning("gpu.power_limit_watts", choice=1)
TEMPERATURE = Meaning("gpu.temperature_celsius")
SM_CLOCK = Meaning("gpu.sm_clock_hertz", _MEGA)
SM_CLOCK_MAX = Meaning("gpu.sm_clock_max_hertz", _MEGA)
MEMORY_CLOCK = Meaning("gpu.memory_clock_hertz", _MEGA)
THROTTLE = Meaning("gpu.throttle_bits")
GENERATION = Meaning("gpu.pcie_generation_count")
WIDTH = Meaning("gpu.pcie_width_count")
REPLAYS = Meaning("gpu.pcie_replays_total")
CORRECTED = Meaning("gpu.ecc_corrected_total")
UNCORRECTED = Meaning("gpu.ecc_uncorrected_total")
PROCESSES = Meaning("gpu.processes_count")

QUERY: dict[str, Meaning] = {
    "utilization.gpu": BUSY, "utilization.memory": MEMORY_BUSY,
    "memory.used": MEMORY_USED, "memory.total": MEMORY_TOTAL,
    "power.draw": POWER, "power.draw.average": POWER_ELSE,
    "enforced.power.limit": POWER_LIMIT, "power.limit": POWER_LIMIT_ELSE,
    "temperature.gpu": TEMPERATURE,
    "clocks.sm": SM_CLOCK, "clocks.current.sm": SM_CLOCK, "clocks.max.sm": SM_CLOCK_MAX,
    "clocks.mem": MEMORY_CLOCK, "clocks.current.memory": MEMORY_CLOCK,
    "clocks_throttle_reasons.active": THROTTLE, "clocks_event_reasons.active": THROTTLE,
    "pcie.link.gen.current": GENERATION, "pcie.link.gen.gpucurrent": GENERATION,
    "pcie.link.width.current": WIDTH,
    "ecc.errors.corrected.volatile.total": CORRECTED,
    "ecc.errors.uncorrected.volatile.total": UNCORRECTED,
}  # fmt: skip
"""Of `--query-gpu`, without the unit in brackets."""

MONITOR: dict[str, Meaning] = {
    "sm": BUSY, "mem": MEMORY_BUSY, "pwr": POWER, "gtemp": TEMPERATURE, "temp": TEMPERATURE,
    "mclk": MEMORY_CLOCK, "pclk": SM_CLOCK, "fb": MEMORY_USED, "sbecc": CORRECTED,
    "dbecc": UNCORRECTED, "pci": REPLAYS,
    "rxpci": Meaning("gpu.pcie_receive_bytes_per_second", _MEGA),
    "txpci": Meaning("gpu.pcie_transmit_bytes_per_second", _MEGA),
}  # fmt: skip
"""Of `dmon`."""

DCGMI: dict[str, Meaning] = {short: FIELDS["DCGM_FI_" + field] for short, field in _SHORT.items()}
"""Of `dcgmi dmon`."""

_CLOCK_BITS = {
    "gpu_idle": 0x1, "applications_clocks_setting": 0x2, "sw_power_cap": 0x4, "hw_slowdown": 0x8,
    "sync_boost": 0x10, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80, "display_clocks_setting": 0x100,
}  # fmt: skip
CLOCK_REASONS: dict[str, int] = {
    f"{folder}/{start}_{name}": bit
    for name, bit in _CLOCK_BITS.items()
    for folder, start in (
        ("clocks_event_reasons", "clocks_event_reason"),
        ("clocks_throttle_reasons", "clocks_throttle_reason"),
    )
}

_KB = 1e3
XML: dict[str, Meaning] = {
    "utilization/gpu_util": BUSY, "utilization/memory_util": MEMORY_BUSY,
    "fb_memory_usage/used": MEMORY_USED, "fb_memory_usage/total": MEMORY_TOTAL,
    "pci/rx_util": Meaning("gpu.pcie_receive_bytes_per_second", _KB),
    "pci/tx_util": Meaning("gpu.pcie_transmit_bytes_per_second", _KB),
    "pci/replay_counter": REPLAYS,
    "pci/pci_gpu_link_info/pcie_gen/current_link_gen": GENERATION,
    "pci/pci_gpu_link_info/link_widths/current_link_width": WIDTH,
    "clocks/sm_clock": SM_CLOCK, "clocks/mem_clock": MEMORY_CLOCK,
    "max_clocks/sm_clock": SM_CLOCK_MAX, "temperature/gpu_temp": TEMPERATURE,
    "gpu_power_readings/power_draw": POWER, "power_readings/power_draw": POWER,
    "gpu_power_readings/instant_power_draw": POWER,
    "gpu_power_readings/average_power_draw": POWER_ELSE,
    "gpu_power_readings/current_power_limit": POWER_LIMIT,
    "power_readings/enforced_power_limit": POWER_LIMIT,
    "power_readings/power_limit": POWER_LIMIT_ELSE,
    "ecc_errors/volatile/dram_correctable": Meaning(CORRECTED.signal, part="dram"),
    "ecc_errors/volatile/sram_correctable": Meaning(CORRECTED.signal, part="sram"),
    "ecc_errors/volatile/dram_uncorrectable": Meaning(UNCORRECTED.signal, part="dram"),
    "ecc_errors/volatile/sram_uncorrectable": Meaning(UNCORRECTED.signal, part="sram"),
    "remapped_rows/remapped_row_corr": Meaning("gpu.remapped_rows_corrected_count"),
    "remapped_rows/remapped_row_unc": Meaning("gpu.remapped_rows_uncorrected_count"),
}  # fmt: skip
"""Of `-q -x`, by the path below a GPU."""
