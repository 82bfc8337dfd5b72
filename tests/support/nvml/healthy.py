"""The values expected from the healthy simulated GPU (tests/support/nvml/simulated.py), in base
units.

97 % and 40 %, 1 GiB of 80 GiB, 612,500 mW of 700,000, 5,000,500 mJ, MHz, KB/s of 1,000 bytes,
NVLink in KiB (7 sent, 5 received), two of three links up, 20 + 3 errors of flits and data. It is
no older than Ampere: no pages are retired.
"""

from __future__ import annotations

from typing import Any

from clusterprof.errors import Unavailable
from tests.support.nvml.simulated import make_uuid

NO_GPM = Unavailable("absent", "GPM needs a Hopper GPU or a newer one")
NO_PERIOD = Unavailable("failed", "NVML: no sampling period has ended yet")
HEALTHY: dict[str, Any] = {
    "gpu.busy_ratio": 0.97,
    "gpu.memory_busy_ratio": 0.4,
    "gpu.busy_ns_total": 0,
    "gpu.busy_until_ns": NO_PERIOD,  # its buffer of samples is empty
    "gpu.sm_clock_hertz": 1_980_000_000,
    "gpu.throttle_bits": 4,
    "gpu.memory_used_bytes": 1 << 30,
    "gpu.memory_total_bytes": 80 << 30,
    "gpu.power_watts": 612.5,
    "gpu.power_limit_watts": 700.0,
    "gpu.energy_joules_total": 5000.5,
    "gpu.temperature_celsius": 61,
    "gpu.memory_clock_hertz": 2_619_000_000,
    "gpu.sm_clock_max_hertz": 1_980_000_000,
    "gpu.thermal_violation_ns_total": 7000,
    "gpu.power_violation_ns_total": 9000,
    "gpu.board_limit_violation_ns_total": 11000,
    "gpu.reliability_violation_ns_total": 13000,
    "gpu.sync_boost_violation_ns_total": 15000,
    "gpu.sm_active_ratio": NO_GPM,  # one says it for all
    "gpu.pcie_receive_bytes_per_second": 12_000_000,
    "gpu.pcie_transmit_bytes_per_second": 3_000_000,
    "gpu.pcie_generation_count": 5,
    "gpu.pcie_width_count": 16,
    "gpu.pcie_replays_total": 2,
    "gpu.ecc_corrected_total": 1,
    "gpu.ecc_uncorrected_total": 0,
    "gpu.remapped_rows_corrected_count": 2,
    "gpu.remapped_rows_uncorrected_count": 1,
    "gpu.remap_pending_count": 1,
    "gpu.remap_failed_count": 0,
    "gpu.nvlink_receive_bytes_total": 5 * 1024,
    "gpu.nvlink_transmit_bytes_total": 7 * 1024,
    "gpu.nvlink_active_count": 2,
    "gpu.nvlink_replays_total": 21,
    "gpu.nvlink_recoveries_total": 22,
    "gpu.nvlink_crc_errors_total": 23,
    "gpu.processes_count": 3,
}
MEANS: dict[str, Any] = {
    "gpu.sm_active_ratio": 0.625,
    "gpu.sm_occupancy_ratio": 0.125,
    "gpu.tensor_active_ratio": 0.25,
    "gpu.memory_bandwidth_ratio": 0.5,
    "gpu.nvlink_receive_bytes_per_second": 8 << 20,
    "gpu.nvlink_transmit_bytes_per_second": 16 << 20,
    "gpu.pcie_receive_bytes_per_second": 4 << 20,
    "gpu.pcie_transmit_bytes_per_second": 3 << 20,
}
"""What GPM makes of the lines `simulated.GPM`: MiB per second and percent."""
_FIRST = list(HEALTHY).index("gpu.sm_active_ratio")
NAMES_WITH_GPM = [*MEANS, *list(HEALTHY)[:_FIRST], *list(HEALTHY)[_FIRST + 3 :]]
"""Signals of a GPU that has GPM, in their order: the eight come first, in place of three."""


def make_device_entry(index: int) -> dict[str, Any]:
    """Make the header's entry of device `index`.

    Processors: bits 0-3 and 48-55 of the first word, bit 0 of the second (64). NUMA node: bit 1.
    """
    return {
        "id": make_uuid(index),
        "vendor": "nvidia",
        "index": index,
        "emulated": False,
        "driver": "570.00.01",
        "nvml": "13.570.00.01",
        "cuda": "12.8",
        "name": "NVIDIA H100 80GB HBM3",
        "pci_bus_id": f"00000000:{index + 1:02X}:00.0",
        "memory_bytes": 80 << 30,
        "compute_capability": "9.0",
        "pcie_generation_max": 5,
        "pcie_width_max": 16,
        "numa_node": 1,
        "cpus": "0-3,48-55,64",
        "power_limit_default_watts": 700.0,
        "power_limit_max_watts": 700.0,
        "persistence": True,
        "ecc": True,
        "mig": False,
        "nvlink_count": 3,
        "nvlink_bytes_per_second": 75_000_000_000,
    }
