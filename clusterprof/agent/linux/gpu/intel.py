"""Read one Intel device through the files of its driver, i915 or xe.

drivers/gpu/drm/i915/gt/intel_gt_sysfs_pm.c, drivers/gpu/drm/xe/{xe_gt_freq,xe_gt_throttle}.c and
Documentation/ABI/testing/sysfs-driver-intel-{i915,xe}-hwmon.

    i915: card0/gt/gt0/rps_act_freq_mhz, rps_RP0_freq_mhz, throttle_reason_thermal, …
    xe:   card0/device/tile0/gt0/freq0/act_freq, rp0_freq, throttle/reason_thermal, …
    card0/device/hwmon/hwmon2/energy1_input    µJ of the card; if missing, energy2_input of the
                                               package (xe)
                              power1_max       µW; 0 = no limit; likewise power2_max
                              temp2_input      millidegrees of the package (xe)

A sleeping graphics engine block (GT) runs at 0 MHz. Blocks for video have a lower maximum clock
than the first block and are ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from clusterprof.agent.linux.files import list_folder
from clusterprof.agent.linux.gpu.drm import (
    Card,
    DeviceFile,
    find_hwmon_folder,
    is_asleep,
    scale_value,
)
from clusterprof.errors import NEEDS_SECOND_SAMPLE, Unavailable

Value = int | float | Unavailable
Values = dict[str, Value]

_MEGAHERTZ = 1e6
_GT = re.compile(r"gt\d+")
_PREFIXES = {"i915": "throttle_reason_", "xe": "reason_"}
# Reason -> NVML's mask: 0x4 power cap, 0x8 hardware slowdown, 0x20 thermal slowdown, 0x40
# hardware thermal slowdown, 0x80 power brake. Electrical limits count as power; p0_freq is none.
_THROTTLE_REASONS = {
    "pl1": 0x4,
    "pl2": 0x4,
    "pl4": 0x4,
    "vr_tdc": 0x4,
    "iccmax": 0x4,
    "fastvmode": 0x4,
    "psys_pl1": 0x4,
    "psys_pl2": 0x4,
    "prochot": 0x8,
    "thermal": 0x20,
    "ratl": 0x20,
    "soc_thermal": 0x20,
    "mem_thermal": 0x20,
    "soc_avg_thermal": 0x20,
    "vr_thermalert": 0x40,
    "vr_thermal": 0x40,
    "psys_crit": 0x80,
}
_SUSPENDED = Unavailable("absent", "the device is suspended, and reading would wake it")


class IntelCard:
    """One card, read by one thread."""

    def __init__(self, card: Card, clock: Callable[[], int]) -> None:
        self._card, self._clock = card, clock
        blocks = [_Block(folder, card.driver) for folder in _list_blocks(card)]
        highest = [block.highest.number() for block in blocks]
        self._blocks = [block for block, mhz in zip(blocks, highest) if mhz == highest[0]]
        for block in blocks:
            if block not in self._blocks:
                block.close()
        sensors = find_hwmon_folder(card, card.driver) or card.folder / "device/hwmon"
        self._files = {
            "energy": DeviceFile(_choose_existing_file(sensors, "energy1_input", "energy2_input")),
            "limit": DeviceFile(_choose_existing_file(sensors, "power1_max", "power2_max")),
            "temperature": DeviceFile(sensors / "temp2_input"),
        }
        self._energy: tuple[int, int] | None = None
        """Time of the last energy reading and its value."""

    def read(self) -> Values:
        """Return the values by signal; a missing value is replaced by its reason."""
        now_ns = self._clock()
        if is_asleep(self._card):
            self._energy = None
            return {"": _SUSPENDED}
        energy = self._files["energy"].number()
        limit = self._files["limit"].number()
        return {
            "gpu.sm_clock_hertz": self._compute_mean_clock("actual"),
            "gpu.sm_clock_max_hertz": self._compute_mean_clock("highest"),
            "gpu.throttle_bits": self._read_throttle_reasons(),
            "gpu.energy_joules_total": scale_value(energy, 1e-6),
            "gpu.power_watts": self._compute_power(energy, now_ns),
            "gpu.power_limit_watts": Unavailable("absent", "no power limit is set")
            if limit == 0
            else scale_value(limit, 1e-6),
            "gpu.temperature_celsius": scale_value(self._files["temperature"].number(), 1e-3),
        }

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        for block in self._blocks:
            block.close()

    def _compute_mean_clock(self, which: str) -> Value:
        """Return the mean clock of the blocks that are awake, 0 when all sleep."""
        clocks = [getattr(block, which).number() for block in self._blocks]
        if not clocks:
            return Unavailable(
                "absent", f"the driver {self._card.driver} does not report its clock"
            )
        for clock in clocks:
            if isinstance(clock, Unavailable):
                return clock
        awake = [clock for clock in clocks if clock]
        return sum(awake) * _MEGAHERTZ / len(awake) if awake else 0.0

    def _read_throttle_reasons(self) -> Value:
        """Return the reasons of all blocks as NVML's mask, known only when all are readable."""
        files = [pair for block in self._blocks for pair in block.reasons]
        if not files:
            return Unavailable(
                "absent", f"the driver {self._card.driver} does not report why clocks are lowered"
            )
        mask = 0
        for bits, file in files:
            set_ = file.number(0, 1)
            if isinstance(set_, Unavailable):
                return set_
            mask |= bits if set_ else 0
        return mask

    def _compute_power(self, energy: int | Unavailable, now_ns: int) -> Value:
        """Return the mean power since the last reading, from the increase of the energy."""
        before = self._energy
        if isinstance(energy, Unavailable):
            self._energy = None
            return energy
        self._energy = (now_ns, energy)
        if before is None or now_ns <= before[0] or energy < before[1]:
            return NEEDS_SECOND_SAMPLE
        return (energy - before[1]) * 1000 / (now_ns - before[0])  # µJ/ns = 1,000 W


class _Block:
    """The files of one GT."""

    def __init__(self, folder: Path, driver: str) -> None:
        clocks = folder / "freq0" if driver == "xe" else folder
        names = (
            ("act_freq", "rp0_freq") if driver == "xe" else ("rps_act_freq_mhz", "rps_RP0_freq_mhz")
        )
        self.actual, self.highest = (DeviceFile(clocks / name) for name in names)
        reasons = clocks / "throttle" if driver == "xe" else folder
        prefix = _PREFIXES[driver]
        self.reasons = [
            (_THROTTLE_REASONS[name], DeviceFile(path))
            for path in list_folder(reasons)
            if (name := path.name.removeprefix(prefix)) != path.name and name in _THROTTLE_REASONS
        ]

    def close(self) -> None:
        """Close all files."""
        for file in (self.actual, self.highest, *(file for _, file in self.reasons)):
            file.close()


def _choose_existing_file(folder: Path, name: str, otherwise: str) -> Path:
    """Return the path of `name`, or of `otherwise` where only that exists."""
    use_otherwise = os.path.exists(folder / otherwise) and not os.path.exists(folder / name)
    return folder / (otherwise if use_otherwise else name)


def is_integrated(card: Card) -> bool:
    """Return whether this is the processor's graphics, which has a fixed PCI address."""
    return card.pci == "0000:00:02.0"


def _list_blocks(card: Card) -> list[Path]:
    if card.driver == "i915":
        places = [card.folder / "gt"]
    else:
        tiles = list_folder(card.folder / "device")
        places = [path for path in tiles if path.name.startswith("tile") and path.is_dir()]
    blocks = [
        path
        for folder in places
        for path in list_folder(folder)
        if _GT.fullmatch(os.path.basename(path))
    ]
    return sorted(blocks, key=lambda path: int(path.name[2:]))
