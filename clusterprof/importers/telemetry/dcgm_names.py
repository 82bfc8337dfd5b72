"""NVIDIA's DCGM: its fields, and the short names `dcgmi dmon` gives them.

Units as in the field's documentation. Times in violations are ns, whatever the help text of old
exporters says (it said us); rates of PCIe and NVLink are bytes a second, though some exporters call
them counters.
"""

from __future__ import annotations

from clusterprof.importers.telemetry.gathered import Meaning

_PERCENT, _MEGA, _MIB = 0.01, 1e6, float(1 << 20)

FIELDS: dict[str, Meaning] = {
    "DCGM_FI_" + name: meaning
    for name, meaning in {
        "PROF_GR_ENGINE_ACTIVE": Meaning("gpu.busy_ratio"),
        "DEV_GPU_UTIL": Meaning("gpu.busy_ratio", _PERCENT, choice=1),
        "DEV_MEM_COPY_UTIL": Meaning("gpu.memory_busy_ratio", _PERCENT),
        "PROF_SM_ACTIVE": Meaning("gpu.sm_active_ratio"),
        "PROF_SM_OCCUPANCY": Meaning("gpu.sm_occupancy_ratio"),
        "PROF_PIPE_TENSOR_ACTIVE": Meaning("gpu.tensor_active_ratio"),
        "PROF_DRAM_ACTIVE": Meaning("gpu.memory_bandwidth_ratio"),
        "PROF_PCIE_RX_BYTES": Meaning("gpu.pcie_receive_bytes_per_second"),
        "PROF_PCIE_TX_BYTES": Meaning("gpu.pcie_transmit_bytes_per_second"),
        "PROF_NVLINK_RX_BYTES": Meaning("gpu.nvlink_receive_bytes_per_second"),
        "PROF_NVLINK_TX_BYTES": Meaning("gpu.nvlink_transmit_bytes_per_second"),
        "DEV_FB_USED": Meaning("gpu.memory_used_bytes", _MIB),
        "DEV_FB_TOTAL": Meaning("gpu.memory_total_bytes", _MIB),
        "DEV_POWER_USAGE": Meaning("gpu.power_watts"),
        "DEV_ENFORCED_POWER_LIMIT": Meaning("gpu.power_limit_watts"),
        "DEV_POWER_MGMT_LIMIT": Meaning("gpu.power_limit_watts", choice=1),
        "DEV_TOTAL_ENERGY_CONSUMPTION": Meaning("gpu.energy_joules_total", 1e-3),
        "DEV_GPU_TEMP": Meaning("gpu.temperature_celsius"),
        "DEV_SM_CLOCK": Meaning("gpu.sm_clock_hertz", _MEGA),
        "DEV_MEM_CLOCK": Meaning("gpu.memory_clock_hertz", _MEGA),
        "DEV_MAX_SM_CLOCK": Meaning("gpu.sm_clock_max_hertz", _MEGA),
        "DEV_CLOCKS_EVENT_REASONS": Meaning("gpu.throttle_bits"),
        "DEV_CLOCK_THROTTLE_REASONS": Meaning("gpu.throttle_bits", choice=1),
        "DEV_THERMAL_VIOLATION": Meaning("gpu.thermal_violation_ns_total"),
        "DEV_POWER_VIOLATION": Meaning("gpu.power_violation_ns_total"),
        "DEV_BOARD_LIMIT_VIOLATION": Meaning("gpu.board_limit_violation_ns_total"),
        "DEV_RELIABILITY_VIOLATION": Meaning("gpu.reliability_violation_ns_total"),
        "DEV_SYNC_BOOST_VIOLATION": Meaning("gpu.sync_boost_violation_ns_total"),
        "DEV_PCIE_LINK_GEN": Meaning("gpu.pcie_generation_count"),
        "DEV_PCIE_LINK_WIDTH": Meaning("gpu.pcie_width_count"),
        "DEV_PCIE_REPLAY_COUNTER": Meaning("gpu.pcie_replays_total"),
        "DEV_ECC_SBE_VOL_TOTAL": Meaning("gpu.ecc_corrected_total"),
        "DEV_ECC_DBE_VOL_TOTAL": Meaning("gpu.ecc_uncorrected_total"),
        "DEV_CORRECTABLE_REMAPPED_ROWS": Meaning("gpu.remapped_rows_corrected_count"),
        "DEV_UNCORRECTABLE_REMAPPED_ROWS": Meaning("gpu.remapped_rows_uncorrected_count"),
        "DEV_ROW_REMAP_FAILURE": Meaning("gpu.remap_failed_count"),
        "DEV_ROW_REMAP_PENDING": Meaning("gpu.remap_pending_count"),
        "DEV_RETIRED_PENDING": Meaning("gpu.retirement_pending_count"),
        "DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": Meaning("gpu.nvlink_replays_total"),
        "DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": Meaning("gpu.nvlink_recoveries_total"),
        "DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": Meaning("gpu.nvlink_crc_errors_total"),
    }.items()
}

XID = "DCGM_FI_DEV_XID_ERRORS"

SHORT: dict[str, str] = {
    "GPUTL": "DEV_GPU_UTIL", "MCUTL": "DEV_MEM_COPY_UTIL", "GRACT": "PROF_GR_ENGINE_ACTIVE",
    "SMACT": "PROF_SM_ACTIVE", "SMOCC": "PROF_SM_OCCUPANCY", "TENSO": "PROF_PIPE_TENSOR_ACTIVE",
    "DRAMA": "PROF_DRAM_ACTIVE", "PCITX": "PROF_PCIE_TX_BYTES", "PCIRX": "PROF_PCIE_RX_BYTES",
    "NVLTX": "PROF_NVLINK_TX_BYTES", "NVLRX": "PROF_NVLINK_RX_BYTES", "FBUSD": "DEV_FB_USED",
    "FBTTL": "DEV_FB_TOTAL", "POWER": "DEV_POWER_USAGE", "TOTEC": "DEV_TOTAL_ENERGY_CONSUMPTION",
    "TMPTR": "DEV_GPU_TEMP", "SMCLK": "DEV_SM_CLOCK", "MMCLK": "DEV_MEM_CLOCK",
    "DVCCTR": "DEV_CLOCK_THROTTLE_REASONS", "TVIOL": "DEV_THERMAL_VIOLATION",
    "PVIOL": "DEV_POWER_VIOLATION",
}  # fmt: skip
"""Heads of the columns of `dcgmi dmon`, in capitals -> field."""
