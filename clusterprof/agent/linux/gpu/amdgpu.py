"""Read one AMD device through its driver's files in /sys/class/drm/card<n>/device.

Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst; drivers/gpu/drm/amd/pm/amdgpu_pm.c.

    gpu_metrics          the firmware's binary table, see below
    gpu_busy_percent     100               used where the table is missing or unknown
    mem_info_vram_used   68719476736
    pp_dpm_sclk          "0: 500Mhz", "1: 2100Mhz *": the highest is the maximum clock
    ras/umc_err_count    "ue: 0", "ce: 4"
    hwmon/hwmon3/power1_cap   750000000 µW

Never read `pcie_bw`: it makes the reader sleep for a second.

drivers/gpu/drm/amd/include/kgd_pp_interface.h defines gpu_metrics (struct gpu_metrics_v1_1 … v1_8),
in the machine's byte order, each field aligned to its size. Its first four bytes are its size and
version:

    u16 structure_size, u8 format_revision, u8 content_revision

The versions do not extend each other, so each has a layout of its own here: v1.1 to v1.3 (MI100,
MI200, Radeon), v1.4 to v1.8 (MI300, MI325, MI350). v2 and v3 are for APUs and leave units
undefined, v1.9 has no fixed layout: these are not supported. The driver sets all bits of fields
that the firmware does not provide; they are treated as missing.

The table also contains why a device runs below its clock, and for how long. v1.6 and later count
the firmware cycles during which each limiter was active:
temperature of the package, of voltage regulators or of memory, the power limit, and PROCHOT, the
board's own alarm (drivers/gpu/drm/amd/pm/swsmu/smu13/smu_v13_0_6_ppt.c). v1.3 has the currently
active limiters as a mask (`indep_throttle_status`, bits of pm/swsmu/inc/amdgpu_smu.h). The other
versions have a field for it that the driver leaves empty.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from clusterprof.agent.linux.counters import EXACT_HOLD_NS, CycleShare, ShareIntegral
from clusterprof.agent.linux.files import Roots, read_text
from clusterprof.agent.linux.gpu.drm import (
    Card,
    DeviceFile,
    KfdNode,
    count_processes,
    find_hwmon_folder,
    is_asleep,
    read_link_generation,
    read_link_width,
    scale_value,
)
from clusterprof.errors import NEEDS_SECOND_SAMPLE, Unavailable
from clusterprof.units import SECOND_NS

HEADER_BYTES = 4
JOULES_PER_UNIT = 2.0**-16
"""Unit of `energy` in joules, in v1.4 and later; the kernel header gives 15.259 µJ."""
XGMI_UNIT_BYTES = 1024
PARTITIONS, PER_PARTITION = 8, 8
_UNSET_VALUES = {"H": 0xFFFF, "I": 0xFFFFFFFF, "Q": 0xFFFFFFFFFFFFFFFF}


class Layout(NamedTuple):
    """Location of the fields of one version: name -> (offset, type, count)."""

    fields: dict[str, tuple[int, str, int]]
    partition: tuple[int, int, int] | None = None
    """Statistics of the partitions: offset, bytes of each, and offset of `gfx_busy_acc` in it."""


class Metrics(NamedTuple):
    """One parsed table; missing fields are not in it."""

    version: str
    """ "1.7"."""
    values: dict[str, int]
    clocks_mhz: tuple[int, ...]
    """Of the compute dies that report one."""
    xgmi_read: int | None
    """Sum over the links, in units of 1,024 bytes."""
    xgmi_write: int | None
    partition_busy: tuple[tuple[int | None, int | None], ...]
    """Per partition (percent now, sum of percent so far), means over its compute dies."""


_V1_1_FIELDS = {
    "temperature": (6, "H", 1),
    "gfx_percent": (16, "H", 1),
    "memory_percent": (18, "H", 1),
    "watts": (22, "H", 1),
    "clocks": (54, "H", 1),
    "memory_mhz": (58, "H", 1),
}


def _build_v1_4_fields(energy: int, counter: bool) -> dict[str, tuple[int, str, int]]:
    """Build the fields of v1.4 to v1.6; v1.6 only inserts counters after the energy."""
    offset = energy + 16
    fields = {
        "temperature": (4, "H", 1),
        "watts": (10, "H", 1),
        "gfx_percent": (12, "H", 1),
        "memory_percent": (14, "H", 1),
        "energy": (energy, "Q", 1),
    }
    if counter:
        names = ("cycles", "prochot", "power", "socket_thermal", "vr_thermal", "memory_thermal")
        fields |= {name: (offset + 4 * i, "I", 1) for i, name in enumerate(names)}
        offset += 24
    return fields | {"link": (offset, "I", 0)}


def _append_link_fields(
    fields: dict[str, tuple[int, str, int]], link: int, gap: int = 0, naks: bool = True
) -> dict[str, tuple[int, str, int]]:
    """Append the fields from the PCIe link on; `gap`: bytes between XGMI sums and clocks."""
    gfx = link + 8
    pcie = (gfx + 8 + 7) // 8 * 8
    read = pcie + 40 + (8 if naks else 0)
    clocks = read + 128 + gap + 8
    fields = {name: field for name, field in fields.items() if name != "link"}
    return fields | {
        "gfx_acc": (gfx, "I", 1),
        "replays": (pcie + 24, "Q", 1),
        "xgmi_read": (read, "Q", 8),
        "xgmi_write": (read + 64, "Q", 8),
        "clocks": (clocks, "H", 8),
        "memory_mhz": (clocks + 40, "H", 1),
        "partitions": (clocks + 42, "H", 1),
    }


def _build_layouts() -> dict[tuple[int, int, int], Layout]:
    """Build the layouts by format, content and size; v1.6 and v1.8 exist in several sizes."""
    v1_3 = Layout({**_V1_1_FIELDS, "throttle": (112, "Q", 1)})
    layouts = {
        (1, 1, 96): Layout(_V1_1_FIELDS),
        (1, 2, 104): Layout(_V1_1_FIELDS),
        (1, 3, 120): v1_3,
    }
    four = _build_v1_4_fields(24, counter=False)
    layouts[1, 4, 288] = _build_layout_without_partitions(_append_link_fields(four, 48, naks=False))
    five = _build_v1_4_fields(88, counter=False)
    layouts[1, 5, 360] = _build_layout_without_partitions(_append_link_fields(five, 112))
    # as in Linux 6.11, with a word of throttle status
    old_six = _build_v1_4_fields(88, counter=True)
    layouts[1, 6, 384] = _build_layout_without_partitions(_append_link_fields(old_six, 136))
    six = _build_v1_4_fields(16, counter=True)
    layouts[1, 6, 1664] = Layout(_append_link_fields(six, 60), (312, 168, 104))
    # v1.7 has 8 bytes of bandwidth before the energy, and the links' states before the clocks.
    seven = _build_v1_4_fields(24, counter=True)
    layouts[1, 7, 2208] = Layout(_append_link_fields(seven, 68, gap=24), (344, 232, 104))
    eight = _append_link_fields(seven, 68, gap=24)
    layouts[1, 8, 3360] = Layout(eight, (344, 376, 120))  # without the sum of all limits
    layouts[1, 8, 3872] = Layout(eight, (344, 440, 120))
    return layouts


def _build_layout_without_partitions(fields: dict[str, tuple[int, str, int]]) -> Layout:
    return Layout({name: field for name, field in fields.items() if name != "partitions"})


LAYOUTS = _build_layouts()


def parse_metrics(data: bytes) -> Metrics:
    """Parse one table.

    Raises: Unavailable when it is too short or of an unsupported version.
    """
    if len(data) < HEADER_BYTES:
        raise Unavailable("failed", f"gpu_metrics: {len(data)} bytes are too few for a table")
    size, form, content = struct.unpack_from("=HBB", data)
    layout = LAYOUTS.get((form, content, size))
    if layout is None:
        message = f"gpu_metrics v{form}.{content} of {size} bytes is not supported"
        raise Unavailable("absent", message, "a newer clusterprof may support it", True)
    if len(data) < size:
        raise Unavailable("failed", f"gpu_metrics: {len(data)} bytes of {size}")
    read = {name: _read_field(data, *field) for name, field in layout.fields.items()}
    lists = ("clocks", "xgmi_read", "xgmi_write")
    values = {name: numbers[0] for name, numbers in read.items() if numbers and name not in lists}
    return Metrics(
        f"{form}.{content}",
        values,
        tuple(read["clocks"]),
        sum(read["xgmi_read"]) if read.get("xgmi_read") else None,
        sum(read["xgmi_write"]) if read.get("xgmi_write") else None,
        _read_partitions(data, layout, values.get("partitions", 0)),
    )


def _read_field(data: bytes, offset: int, kind: str, count: int) -> list[int]:
    """Return the valid numbers of a field; [] when there are none."""
    numbers = struct.unpack_from(f"={count}{kind}", data, offset)
    return [value for value in numbers if value != _UNSET_VALUES[kind]]


def _read_partitions(
    data: bytes, layout: Layout, count: int
) -> tuple[tuple[int | None, int | None], ...]:
    if layout.partition is None:
        return ()
    first, size, sums = layout.partition
    partitions = []
    for number in range(min(count, PARTITIONS)):
        offset = first + number * size
        percents = _read_field(data, offset, "I", PER_PARTITION)
        totals = _read_field(data, offset + sums, "Q", PER_PARTITION)
        partitions.append(
            (
                sum(percents) // len(percents) if percents else None,
                sum(totals) // len(totals) if totals else None,
            )
        )
    return tuple(partitions)


POWER, HARDWARE, THERMAL, HARDWARE_THERMAL = 0x4, 0x8, 0x20, 0x40
"""NVML's mask: power cap, hardware slowdown, thermal slowdown, hardware thermal slowdown."""
_THROTTLE_BIT_RANGES = (
    (range(0, 24), POWER),  # package power, currents
    (range(32, 44), THERMAL),
    (range(44, 46), HARDWARE_THERMAL),  # alarm of the voltage regulators
    (range(46, 48), HARDWARE),  # PROCHOT
    (range(56, 57), POWER),
)
_THERMAL_SUMS = ("socket_thermal", "vr_thermal", "memory_thermal")
_THROTTLE_BITS = "gpu.throttle_bits"
_THERMAL_NS, _POWER_NS = "gpu.thermal_violation_ns_total", "gpu.power_violation_ns_total"


class Slowdown:
    """Throttle reasons and times of one card, from one table to the next."""

    def __init__(self) -> None:
        self._sums = {name: CycleShare(1.0) for name in ("prochot", "power", *_THERMAL_SUMS)}
        self._heat, self._power = ShareIntegral(), ShareIntegral()
        self._last: dict[str, int | Unavailable] = {}

    def values(self, table: Metrics | Unavailable, now_ns: int) -> dict[str, int | Unavailable]:
        """Return the reasons as NVML's mask and both times in ns, or why they are unknown."""
        absent = explain_missing_field(table)
        values: dict[str, int | Unavailable] = dict.fromkeys(
            (_THROTTLE_BITS, _THERMAL_NS, _POWER_NS), absent
        )
        if isinstance(table, Unavailable):
            return values
        if "throttle" in table.values:
            return {**values, _THROTTLE_BITS: compute_throttle_mask(table.values["throttle"])}
        cycles = table.values.get("cycles")
        if cycles is None or not self._sums.keys() <= table.values.keys():
            return values
        shares = {n: sums.share(table.values[n], cycles) for n, sums in self._sums.items()}
        if not self._sums["power"].unchanged or not self._last:
            self._last = self._compute_throttling(shares, now_ns)
        return self._last

    def _compute_throttling(
        self, shares: dict[str, float | None], now_ns: int
    ) -> dict[str, int | Unavailable]:
        known_shares = {name: share for name, share in shares.items() if share is not None}
        if known_shares.keys() != shares.keys():
            for integral in (self._heat, self._power):
                integral.invalidate()
                integral.add(0.0, now_ns)
            return dict.fromkeys((_THROTTLE_BITS, _THERMAL_NS, _POWER_NS), NEEDS_SECOND_SAMPLE)
        heat = max(known_shares[name] for name in _THERMAL_SUMS)
        return {
            _THROTTLE_BITS: POWER * (known_shares["power"] > 0)
            | THERMAL * (heat > 0)
            | HARDWARE * (known_shares["prochot"] > 0),
            _THERMAL_NS: self._heat.add(heat, now_ns, EXACT_HOLD_NS),
            _POWER_NS: self._power.add(known_shares["power"], now_ns, EXACT_HOLD_NS),
        }


def compute_throttle_mask(status: int) -> int:
    """Convert the driver's `indep_throttle_status` to NVML's mask."""
    mask = 0
    for bits, reason in _THROTTLE_BIT_RANGES:
        if any(status >> bit & 1 for bit in bits):
            mask |= reason
    return mask


def explain_missing_field(table: Metrics | Unavailable) -> Unavailable:
    """Explain why a field is missing: there is no table, or its version does not fill it."""
    if isinstance(table, Unavailable):
        return table
    return Unavailable("absent", f"the firmware's table v{table.version} does not report it")


Value = int | float | Unavailable
Values = dict[str, Value]

_SLOW_INTERVAL_NS = 10 * SECOND_NS
_MEGAHERTZ = re.compile(rb"(?m)^\s*\d+:\s*(\d+)\s*Mhz", re.IGNORECASE)
_ERRORS = re.compile(rb"(?m)^(ue|ce):\s*(\d+)\s*$")
_SUSPENDED = Unavailable("absent", "the device is suspended, and reading would wake it")


class AmdCard:
    """One card, read by one thread; `read()` returns the values of each of its partitions."""

    def __init__(
        self, roots: Roots, card: Card, nodes: list[KfdNode], clock: Callable[[], int]
    ) -> None:
        """Open the files of a card.

        nodes: the card's KFD nodes, one per partition; empty where KFD is not loaded.
        """
        self.facts: dict[str, Any] = {}
        """Name, memory and partition modes, after the first reading."""
        self._roots, self._card, self._nodes, self._clock = roots, card, nodes, clock
        device = card.folder / "device"
        files = {
            name: device / name
            for name in (
                "gpu_metrics",
                "gpu_busy_percent",
                "mem_busy_percent",
                "pp_dpm_sclk",
                "mem_info_vram_used",
                "mem_info_vram_total",
                "pcie_replay_count",
            )
        }
        files["errors"] = device / "ras/umc_err_count"
        sensors = find_hwmon_folder(card, "amdgpu") or device / "hwmon"
        for name in ("power1_cap", "power1_input", "power1_average", "temp2_input"):
            files[name] = sensors / name
        self._files = {name: DeviceFile(path) for name, path in files.items()}
        count = max(1, len(nodes))
        self._integrals = [ShareIntegral() for _ in range(count)]
        self._sums = [CycleShare() for _ in range(count)]
        self._slowdown = Slowdown()
        self._rare: Values = {}
        self._rare_ns: int | None = None

    def read(self) -> list[Values]:
        """Return the values by signal for every partition; a missing value has its reason."""
        now_ns = self._clock()
        if is_asleep(self._card):
            idle = [integral.add(0.0, now_ns) for integral in self._integrals]
            return [{"gpu.busy_ns_total": total, "": _SUSPENDED} for total in idle]
        table: Metrics | Unavailable
        try:
            table = parse_metrics(self._files["gpu_metrics"].read())
        except Unavailable as reason:
            table = reason
        common = self._read_fast_values(table) | self._read_slow_values(now_ns)
        common |= self._slowdown.values(table, now_ns)
        partitions = []
        for partition in range(len(self._integrals)):
            values = {**common, **self._compute_busy(table, partition, now_ns)}
            if partition:
                card_wide_reason = "counted for all partitions together, see the first"
                values |= {
                    name: Unavailable("absent", card_wide_reason) for name in _CARD_WIDE_SIGNALS
                }
            partitions.append(values)
        return partitions

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def _compute_busy(self, table: Metrics | Unavailable, partition: int, now_ns: int) -> Values:
        """Return busy share and busy time from the firmware's sums, else from its percentages."""
        several = len(self._integrals) > 1
        percentage = _read_percentage(table, "gfx_percent", self._files["gpu_busy_percent"])
        total = None if isinstance(table, Unavailable) else table.values.get("gfx_acc")
        bits = 32
        if several:
            rows = () if isinstance(table, Unavailable) else table.partition_busy
            percent, total = rows[partition] if partition < len(rows) else (None, None)
            percentage, bits = _check_percentage(percent, "percentage of the partition"), 64
        integral, sums = self._integrals[partition], self._sums[partition]
        cycles = None if isinstance(table, Unavailable) else table.values.get("cycles")
        share = None
        if total is not None and cycles is not None:
            known_percent = percentage if isinstance(percentage, int) else None
            share = sums.share(total, cycles, known_percent, bits)
            if sums.unchanged:
                return _build_busy_values(percentage, integral.total_ns)
        if share is not None:
            return _build_busy_values(percentage, integral.add(share, now_ns, EXACT_HOLD_NS))
        if isinstance(percentage, Unavailable):
            return {"gpu.busy_ratio": percentage, "gpu.busy_ns_total": percentage}
        return _build_busy_values(percentage, integral.add(percentage / 100, now_ns))

    def _read_fast_values(self, table: Metrics | Unavailable) -> Values:
        files = self._files
        values: Values = {
            "gpu.memory_busy_ratio": scale_value(
                _read_percentage(table, "memory_percent", files["mem_busy_percent"]), 0.01
            ),
            "gpu.memory_used_bytes": files["mem_info_vram_used"].number(),
        }
        metrics = {} if isinstance(table, Unavailable) else table.values
        absent = explain_missing_field(table)
        watts = metrics.get("watts")
        values["gpu.power_watts"] = absent if watts is None else float(watts)
        if watts is None:
            for name in ("power1_input", "power1_average"):
                microwatts = files[name].number()
                if not isinstance(microwatts, Unavailable):
                    values["gpu.power_watts"] = microwatts / 1e6
                    break
        degrees = metrics.get("temperature")
        values["gpu.temperature_celsius"] = (
            scale_value(files["temp2_input"].number(), 0.001) if degrees is None else float(degrees)
        )
        energy, memory, replays = (
            metrics.get(name) for name in ("energy", "memory_mhz", "replays")
        )
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

    def _read_slow_values(self, now_ns: int) -> Values:
        """Return values that rarely change, read every 10 s."""
        if self._rare_ns is not None and now_ns - self._rare_ns < _SLOW_INTERVAL_NS:
            return self._rare
        self._rare_ns = now_ns
        files, card = self._files, self._card
        if not self.facts:
            self.facts = self._describe()
        corrected, uncorrected = _read_memory_errors(files["errors"])
        total = files["mem_info_vram_total"].number(1)
        users = [count_processes(self._roots, node.gpu_id) for node in self._nodes]
        known_counts = [count for count in users if count is not None]
        self._rare = {
            "gpu.memory_total_bytes": total,
            "gpu.power_limit_watts": scale_value(files["power1_cap"].number(1), 1e-6),
            "gpu.sm_clock_max_hertz": _read_highest_clock(files["pp_dpm_sclk"]),
            "gpu.pcie_generation_count": read_link_generation(card),
            "gpu.pcie_width_count": read_link_width(card),
            "gpu.ecc_corrected_total": corrected,
            "gpu.ecc_uncorrected_total": uncorrected,
            "gpu.processes_count": sum(known_counts)
            if known_counts
            else Unavailable("absent", "the driver's compute part (amdkfd) lists no processes"),
        }
        return self._rare

    def _describe(self) -> dict[str, Any]:
        device = self._card.folder / "device"
        facts: dict[str, Any] = {}
        name = read_text(device / "product_name")
        if name:
            facts["name"] = name
        total = self._files["mem_info_vram_total"].number(1)
        if not isinstance(total, Unavailable):
            facts["memory_bytes"] = total
        modes = {
            kind: read_text(device / f"current_{kind}_partition") for kind in ("compute", "memory")
        }
        if any(modes.values()):
            facts["partition"] = {kind: mode for kind, mode in modes.items() if mode}
        return facts


_CARD_WIDE_SIGNALS = (
    "gpu.memory_busy_ratio",
    "gpu.memory_used_bytes",
    "gpu.memory_total_bytes",
    "gpu.power_watts",
    "gpu.power_limit_watts",
    "gpu.energy_joules_total",
    "gpu.pcie_replays_total",
    "gpu.ecc_corrected_total",
    "gpu.ecc_uncorrected_total",
    "gpu.xgmi_read_bytes_total",
    "gpu.xgmi_write_bytes_total",
    "gpu.processes_count",
)
"""Signals counted once per card; the other signals apply to each partition."""


def _build_busy_values(percent: int | Unavailable, total_ns: int) -> Values:
    return {"gpu.busy_ratio": scale_value(percent, 0.01), "gpu.busy_ns_total": total_ns}


def _read_percentage(
    table: Metrics | Unavailable, name: str, file: DeviceFile
) -> int | Unavailable:
    if isinstance(table, Unavailable) or name not in table.values:
        return file.number(0, 100)
    return _check_percentage(table.values[name], f"{name} of gpu_metrics")


def _check_percentage(percent: int | None, name: str) -> int | Unavailable:
    if percent is None:
        return Unavailable("absent", f"the firmware does not report the {name}")
    if percent > 100:
        return Unavailable("failed", f"{name}: impossible value {percent} %")
    return percent


def _read_highest_clock(file: DeviceFile) -> float | Unavailable:
    try:
        content = file.read()
    except Unavailable as reason:
        return reason
    steps = [int(step) for step in _MEGAHERTZ.findall(content)]
    return (
        max(steps) * 1e6 if steps else Unavailable("failed", f"{file.path.name} contains no clock")
    )


def _read_memory_errors(file: DeviceFile) -> tuple[int | Unavailable, int | Unavailable]:
    try:
        errors = dict(_ERRORS.findall(file.read()))
    except Unavailable as reason:
        return reason, reason
    absent = Unavailable("failed", f"{file.path.name} contains no count")
    corrected, uncorrected = errors.get(b"ce"), errors.get(b"ue")
    return (
        absent if corrected is None else int(corrected),
        absent if uncorrected is None else int(uncorrected),
    )
