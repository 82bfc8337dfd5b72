"""What columns of GPU readings mean: by their heads alone, or with labels in other columns.

timestamp,Hostname,gpu,DCGM_FI_DEV_GPU_UTIL            fields of DCGM (also with {labels})
timestamp,gpu,gfx_activity,umc_activity,socket_power   amd-smi metric --csv
_timestamp,system.gpu.0.gpu,system.gpu.0.powerWatts    system metrics of Weights & Biases
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clusterprof.importers.telemetry.exposition import labels_of
from clusterprof.importers.telemetry.gathered import Meaning
from clusterprof.importers.telemetry.labelled import (
    HOST_LABELS,
    gpu_of,
    host_of,
    is_known,
    meaning_of,
)

_PERCENT, _MEGA, _MB = 0.01, 1e6, 1e6
TIMES = ("timestamp", "time", "_timestamp", "time (s)", "date", "datetime")
LABELS = (*HOST_LABELS, "gpu", "card", "gpu_id", "UUID", "uuid", "device", "modelName")
_NAMED = re.compile(r"([A-Za-z_:][\w:]*)(\{.*\})?")
_WANDB = re.compile(r"(?:system[./])?gpu\.(\d{1,4})\.(\w+)")

AMD_SMI: dict[str, Meaning] = {
    "gfx_activity": Meaning("gpu.busy_ratio", _PERCENT),
    "umc_activity": Meaning("gpu.memory_busy_ratio", _PERCENT),
    "socket_power": Meaning("gpu.power_watts"),
    "current_socket_power": Meaning("gpu.power_watts"),
    "average_socket_power": Meaning("gpu.power_watts", choice=1),
    "gfx_0_clk": Meaning("gpu.sm_clock_hertz", _MEGA),
    "mem_0_clk": Meaning("gpu.memory_clock_hertz", _MEGA),
    "hotspot": Meaning("gpu.temperature_celsius"),
    "edge": Meaning("gpu.temperature_celsius", choice=1),
    "used_vram": Meaning("gpu.memory_used_bytes", _MB),
    "total_vram": Meaning("gpu.memory_total_bytes", _MB),
}
WANDB: dict[str, Meaning] = {
    "gpu": Meaning("gpu.busy_ratio", _PERCENT),
    "memory": Meaning("gpu.memory_busy_ratio", _PERCENT),
    "memoryAllocatedBytes": Meaning("gpu.memory_used_bytes"),
    "temp": Meaning("gpu.temperature_celsius"),
    "powerWatts": Meaning("gpu.power_watts"),
    "enforcedPowerLimitWatts": Meaning("gpu.power_limit_watts"),
    "smClock": Meaning("gpu.sm_clock_hertz", _MEGA),
    "memoryClock": Meaning("gpu.memory_clock_hertz", _MEGA),
    "correctedMemoryErrors": Meaning("gpu.ecc_corrected_total"),
    "uncorrectedMemoryErrors": Meaning("gpu.ecc_uncorrected_total"),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One column of readings."""

    meaning: Meaning | None
    """None where the labels in a row decide."""
    name: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    device: str = ""


@dataclass(frozen=True, slots=True)
class Heads:
    """What the columns of a table are."""

    time: int
    labels: Mapping[int, str]
    readings: Mapping[int, Reading]
    maker: str

    def of_row(self, number: int, row: Mapping[str, str]) -> tuple[str, Meaning, str] | None:
        """Return the host, the meaning and the device of a reading in a row of some labels."""
        reading = self.readings[number]
        host = host_of(row)[0]
        if reading.meaning is not None:
            device = reading.device or gpu_of(row)
            return (host, reading.meaning, device) if device else None
        labels = {**row, **reading.labels}
        found = meaning_of(reading.name, labels)
        return (host_of(labels)[0], *found) if found else None


def heads_of(cells: Sequence[str]) -> Heads | None:
    """Return what the columns are; None when no column is a reading of a GPU with a time."""
    cells = [cell.strip().strip('"').lstrip("\ufeff") for cell in cells]
    time = next((at for at, cell in enumerate(cells) if cell.lower() in TIMES), None)
    if time is None:
        return None
    labels = {at: cell for at, cell in enumerate(cells) if cell in LABELS}
    dcgm = {at: found for at, cell in enumerate(cells) if (found := _labelled(cell)) is not None}
    wandb = {
        at: Reading(WANDB[match[2]], device=f"gpu{match[1]}")
        for at, cell in enumerate(cells)
        if (match := _WANDB.fullmatch(cell)) and match[2] in WANDB
    }
    amd = {at: Reading(AMD_SMI[cell]) for at, cell in enumerate(cells) if cell in AMD_SMI}
    for readings, maker in ((dcgm, ""), (wandb, ""), (amd, "amd")):
        if len(readings) >= 2 or (readings and maker == ""):
            return Heads(time, labels, readings, maker)
    return None


def _labelled(cell: str) -> Reading | None:
    match = _NAMED.fullmatch(cell)
    if match is None or not is_known(match[1]):
        return None
    return Reading(None, match[1], labels_of(match[2] or ""))
