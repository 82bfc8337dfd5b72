"""One AMD device by the files of its driver: /sys/class/drm/card<n>/device and its hwmon folder.

Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst; drivers/gpu/drm/amd/pm/amdgpu_pm.c.

    gpu_metrics          the firmware's table, see `gpu_metrics`
    gpu_busy_percent     100               where there is no table that is known
    mem_info_vram_used   68719476736
    pp_dpm_sclk          "0: 500Mhz", "1: 2100Mhz *": the highest is what it may reach
    ras/umc_err_count    "ue: 0", "ce: 4"
    hwmon/hwmon3/power1_cap   750000000 µW

Never read: `pcie_bw`, which makes the reader sleep for a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from clusterprof.errors import Unavailable
from clusterprof.linux import kfd
from clusterprof.linux.amd_slowdown import Slowdown, not_told
from clusterprof.linux.drm import (
    Attribute,
    Card,
    asleep,
    hwmon,
    link_generation,
    link_width,
    scaled,
)
from clusterprof.linux.gpu_metrics import (
    JOULES_PER_UNIT,
    XGMI_UNIT_BYTES,
    Metrics,
    parse_metrics,
)
from clusterprof.linux.integral import EXACT_HOLD_NS, CycleShare, ShareIntegral
from clusterprof.linux.roots import Roots
from clusterprof.linux.tree import text

Value = int | float | Unavailable
Values = dict[str, Value]

SECOND_NS = 1_000_000_000
_RARELY_NS = 10 * SECOND_NS
_MEGAHERTZ = re.compile(rb"(?m)^\s*\d+:\s*(\d+)\s*Mhz", re.IGNORECASE)
_ERRORS = re.compile(rb"(?m)^(ue|ce):\s*(\d+)\s*$")
_SLEEPS = Unavailable("absent", "the device is suspended, and reading would wake it")


class AmdCard:
    """One card, read by one thread; `read()` returns the values of each of its partitions."""

    def __init__(
        self, roots: Roots, card: Card, nodes: list[kfd.Node], clock: Callable[[], int]
    ) -> None:
        """`nodes`: the card's own of KFD, one per partition; none where KFD is not loaded."""
        self.facts: dict[str, Any] = {}
        """Name, memory and partition modes, once it was read."""
        self._roots, self._card, self._nodes, self._clock = roots, card, nodes, clock
        device = card.folder / "device"
        files = {
            name: device / name
            for name in ("gpu_metrics", "gpu_busy_percent", "mem_busy_percent", "pp_dpm_sclk",
                         "mem_info_vram_used", "mem_info_vram_total", "pcie_replay_count")
        }  # fmt: skip
        files["errors"] = device / "ras/umc_err_count"
        sensors = hwmon(card, "amdgpu") or device / "hwmon"
        for name in ("power1_cap", "power1_input", "power1_average", "temp2_input"):
            files[name] = sensors / name
        self._files = {name: Attribute(path) for name, path in files.items()}
        count = max(1, len(nodes))
        self._integrals = [ShareIntegral() for _ in range(count)]
        self._sums = [CycleShare() for _ in range(count)]
        self._slowdown = Slowdown()
        self._rare: Values = {}
        self._rare_ns: int | None = None

    def read(self) -> list[Values]:
        """Return signal -> value for every partition; what is missing has its reason."""
        now_ns = self._clock()
        if asleep(self._card):
            idle = [integral.add(0.0, now_ns) for integral in self._integrals]
            return [{"gpu.busy_ns_total": total, "": _SLEEPS} for total in idle]
        table: Metrics | Unavailable
        try:
            table = parse_metrics(self._files["gpu_metrics"].read())
        except Unavailable as reason:
            table = reason
        common = self._often(table) | self._seldom(now_ns)
        common |= self._slowdown.values(table, now_ns)
        found = []
        for partition in range(len(self._integrals)):
            values = {**common, **self._busy(table, partition, now_ns)}
            if partition:
                whole = "counted for all partitions together, see the first"
                values |= {name: Unavailable("absent", whole) for name in _OF_THE_CARD}
            found.append(values)
        return found

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def _busy(self, table: Metrics | Unavailable, partition: int, now_ns: int) -> Values:
        """Return busy share and busy time: of the firmware's sums, else of its percentages."""
        several = len(self._integrals) > 1
        told = _percentage(table, "gfx_percent", self._files["gpu_busy_percent"])
        total = None if isinstance(table, Unavailable) else table.values.get("gfx_acc")
        bits = 32
        if several:
            rows = () if isinstance(table, Unavailable) else table.partition_busy
            percent, total = rows[partition] if partition < len(rows) else (None, None)
            told, bits = _in_bounds(percent, "percentage of the partition"), 64
        integral, sums = self._integrals[partition], self._sums[partition]
        cycles = None if isinstance(table, Unavailable) else table.values.get("cycles")
        share = None
        if total is not None and cycles is not None:
            sure = told if isinstance(told, int) else None
            share = sums.share(total, cycles, sure, bits)
            if sums.unchanged:
                return _busy_values(told, integral.total_ns)
        if share is not None:
            return _busy_values(told, integral.add(share, now_ns, EXACT_HOLD_NS))
        if isinstance(told, Unavailable):
            return {"gpu.busy_ratio": told, "gpu.busy_ns_total": told}
        return _busy_values(told, integral.add(told / 100, now_ns))

    def _often(self, table: Metrics | Unavailable) -> Values:
        files = self._files
        values: Values = {
            "gpu.memory_busy_ratio": scaled(
                _percentage(table, "memory_percent", files["mem_busy_percent"]), 0.01
            ),
            "gpu.memory_used_bytes": files["mem_info_vram_used"].number(),
        }
        known = {} if isinstance(table, Unavailable) else table.values
        absent = not_told(table)
        watts = known.get("watts")
        values["gpu.power_watts"] = absent if watts is None else float(watts)
        if watts is None:
            for name in ("power1_input", "power1_average"):
                microwatts = files[name].number()
                if not isinstance(microwatts, Unavailable):
                    values["gpu.power_watts"] = microwatts / 1e6
                    break
        degrees = known.get("temperature")
        values["gpu.temperature_celsius"] = (
            scaled(files["temp2_input"].number(), 0.001) if degrees is None else float(degrees)
        )
        energy, memory, replays = (known.get(name) for name in ("energy", "memory_mhz", "replays"))
        values["gpu.energy_joules_total"] = absent if energy is None else energy * JOULES_PER_UNIT
        values["gpu.memory_clock_hertz"] = absent if memory is None else memory * 1e6
        values["gpu.pcie_replays_total"] = (
            files["pcie_replay_count"].number() if replays is None else replays
        )
        clocks = () if isinstance(table, Unavailable) else table.clocks_mhz
        values["gpu.sm_clock_hertz"] = sum(clocks) * 1e6 / len(clocks) if clocks else absent
        read, write = (
            (None, None) if isinstance(table, Unavailable) else (table.xgmi_read, table.xgmi_write)
        )
        values["gpu.xgmi_read_bytes_total"] = absent if read is None else read * XGMI_UNIT_BYTES
        values["gpu.xgmi_write_bytes_total"] = absent if write is None else write * XGMI_UNIT_BYTES
        return values

    def _seldom(self, now_ns: int) -> Values:
        """Return what hardly changes, read every 10 s."""
        if self._rare_ns is not None and now_ns - self._rare_ns < _RARELY_NS:
            return self._rare
        self._rare_ns = now_ns
        files, card = self._files, self._card
        if not self.facts:
            self.facts = self._describe()
        corrected, uncorrected = _memory_errors(files["errors"])
        total = files["mem_info_vram_total"].number(1)
        users = [kfd.users(self._roots, node.gpu_id) for node in self._nodes]
        known = [count for count in users if count is not None]
        self._rare = {
            "gpu.memory_total_bytes": total,
            "gpu.power_limit_watts": scaled(files["power1_cap"].number(1), 1e-6),
            "gpu.sm_clock_max_hertz": _highest(files["pp_dpm_sclk"]),
            "gpu.pcie_generation_count": link_generation(card),
            "gpu.pcie_width_count": link_width(card),
            "gpu.ecc_corrected_total": corrected,
            "gpu.ecc_uncorrected_total": uncorrected,
            "gpu.processes_count": sum(known)
            if known
            else Unavailable("absent", "the driver's compute part (amdkfd) lists no processes"),
        }
        return self._rare

    def _describe(self) -> dict[str, Any]:
        device = self._card.folder / "device"
        facts: dict[str, Any] = {}
        name = text(device / "product_name")
        if name:
            facts["name"] = name
        total = self._files["mem_info_vram_total"].number(1)
        if not isinstance(total, Unavailable):
            facts["memory_bytes"] = total
        modes = {kind: text(device / f"current_{kind}_partition") for kind in ("compute", "memory")}
        if any(modes.values()):
            facts["partition"] = {kind: mode for kind, mode in modes.items() if mode}
        return facts


_OF_THE_CARD = (
    "gpu.memory_busy_ratio", "gpu.memory_used_bytes", "gpu.memory_total_bytes", "gpu.power_watts",
    "gpu.power_limit_watts", "gpu.energy_joules_total", "gpu.pcie_replays_total",
    "gpu.ecc_corrected_total", "gpu.ecc_uncorrected_total", "gpu.xgmi_read_bytes_total",
    "gpu.xgmi_write_bytes_total", "gpu.processes_count",
)  # fmt: skip
"""What a card counts once, whatever its partitions; clocks, heat and reasons hold for each."""


def _busy_values(percent: int | Unavailable, total_ns: int) -> Values:
    return {"gpu.busy_ratio": scaled(percent, 0.01), "gpu.busy_ns_total": total_ns}


def _percentage(table: Metrics | Unavailable, name: str, file: Attribute) -> int | Unavailable:
    if isinstance(table, Unavailable) or name not in table.values:
        return file.number(0, 100)
    return _in_bounds(table.values[name], f"{name} of gpu_metrics")


def _in_bounds(percent: int | None, name: str) -> int | Unavailable:
    if percent is None:
        return Unavailable("absent", f"the firmware does not tell the {name}")
    if percent > 100:
        return Unavailable("failed", f"{name}: impossible value {percent} %")
    return percent


def _highest(file: Attribute) -> float | Unavailable:
    try:
        content = file.read()
    except Unavailable as reason:
        return reason
    steps = [int(step) for step in _MEGAHERTZ.findall(content)]
    return (
        max(steps) * 1e6 if steps else Unavailable("failed", f"{file.path.name} has no clock in it")
    )


def _memory_errors(file: Attribute) -> tuple[int | Unavailable, int | Unavailable]:
    try:
        found = dict(_ERRORS.findall(file.read()))
    except Unavailable as reason:
        return reason, reason
    absent = Unavailable("failed", f"{file.path.name} has no count in it")
    corrected, uncorrected = found.get(b"ce"), found.get(b"ue")
    return (
        absent if corrected is None else int(corrected),
        absent if uncorrected is None else int(uncorrected),
    )
