"""The signals of a device: exact ones of the emulated page, and those of NVML in its own steps.

A device "emulated-0" has the signals of its page from `gpu_emulated` and the others from
`gpu_nvidia`. Any other device has all of them as NVML reports them: utilization from samples of
20 ms in whole percents, snapshots, and values that are read once a second or less.
`gpu.sm_active_ratio` (GPM) is written as well.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.agent.collectors.gpu.emulated import SIGNALS as EMULATED
from clusterprof.agent.collectors.gpu.nvml_queries import CALLS
from clusterprof.probe import layout
from clusterprof.signals import BY_NAME, GPU_SM_ACTIVE, Signal
from clusterprof_lab.synth.interval_sums import measure_covered_ns, sum_amounts
from clusterprof_lab.synth.record_node import Column
from clusterprof_lab.synth.recorder_view import TICK_NS, RecorderView
from clusterprof_lab.synth.story import Rank

Int = NDArray[np.int64]
Float = NDArray[np.float64]

SM_HERTZ, MEMORY_HERTZ = 1.98e9, 2.619e9
MEMORY_BYTES, USED_BYTES = 80 << 30, 40 << 30
IDLE_WATTS, BUSY_WATTS, SPIN_WATTS, LIMIT_WATTS = 90.0, 660.0, 200.0, 700.0
COLLECTIVE_SM_RATIO = 0.05  # at most: it waits with a handful of blocks
STEP_HERTZ = 15e6  # clocks move in such steps
SAMPLE_NS, SNAPSHOT_NS = 20_000_000, 166_666_667  # of NVML's buffer; of its utilization
PCIE_WINDOW_NS = 20_000_000
THERMAL_BITS, POWER_BITS = 0x8 | 0x20 | 0x40, 0x4 | 0x80
_SECOND_NS = 1_000_000_000


class Device:
    """One device on its node's clock."""

    def __init__(self, sight: RecorderView, rank: Rank) -> None:
        work = sorted(operation for operation in rank.work if operation.end_ns > operation.start_ns)
        columns = list(zip(*work)) or [()] * 6
        start, end = (sight.clock.read(np.array(c, np.int64)) for c in columns[:2])
        what, ratio, clock, bits = columns[2:]
        kernels = np.array([kind != "copy" for kind in what], np.bool_)
        spins = np.array([kind == "collective" for kind in what], np.bool_)
        self.start_ns, self.end_ns = start[kernels], end[kernels]
        self.copies = start[~kernels], end[~kernels]
        spins = spins[kernels]
        sm_ratio = np.array(ratio, np.float64)[kernels]
        self.sm_ratio = np.where(spins, np.minimum(sm_ratio, COLLECTIVE_SM_RATIO), sm_ratio)
        self.clock_ratio = np.array(clock, np.float64)[kernels]
        self.bits = np.array(bits, np.int64)[kernels]
        full = IDLE_WATTS + (BUSY_WATTS - IDLE_WATTS) * self.sm_ratio / 0.9 * self.clock_ratio
        self.watts = np.where(spins, np.maximum(full, SPIN_WATTS), full)
        marks = [m for m in rank.main.marks if m.kind == layout.H2D and m.end_ns > m.start_ns]
        self.copied = np.array([max(m.a, 0) for m in marks], np.float64)
        if not len(self.copies[0]):
            times = np.array([(m.start_ns, m.end_ns) for m in marks], np.int64).reshape(-1, 2)
            self.copies = sight.clock.read(times[:, 0]), sight.clock.read(times[:, 1])
        elif len(self.copied) != len(self.copies[0]):
            self.copied = 12.0 * (self.copies[1] - self.copies[0])  # 12 GB/s, hooked or not

    def compute_busy_ns(self, t_ns: Int) -> Float:
        """Return the time with a kernel resident up to each instant."""
        return measure_covered_ns(self.start_ns, self.end_ns, t_ns)

    def compute_sampled_busy_ns(self, t_ns: Int, origin_ns: int) -> Float:
        """Return the same as summed from samples of whole percents, as far as there are any."""
        grid = np.arange(origin_ns, int(t_ns[-1]) + 1, SAMPLE_NS)
        grown = np.diff(self.compute_busy_ns(grid))
        total = np.concatenate([[0.0], np.cumsum(np.rint(grown * 100 / SAMPLE_NS))])
        last = np.searchsorted(grid, t_ns, side="right") - 1
        return total[np.maximum(last, 0)] * SAMPLE_NS / 100

    def compute_busy_share(self, t_ns: Int, window_ns: int) -> Float:
        """Return the share of the window before each instant with a kernel resident."""
        return (self.compute_busy_ns(t_ns) - self.compute_busy_ns(t_ns - window_ns)) / window_ns

    def compute_mean(self, values: Float, t_ns: Int, window_ns: int) -> Float:
        """Return the mean over the window before each instant of what work adds up to."""
        amounts = values * (self.end_ns - self.start_ns)
        now = sum_amounts(self.start_ns, self.end_ns, amounts, t_ns)
        return (
            now - sum_amounts(self.start_ns, self.end_ns, amounts, t_ns - window_ns)
        ) / window_ns

    def get_last_value(self, values: Float | Int, t_ns: Int, otherwise: float) -> Float:
        """Return the value of the work at hand, or of the one before."""
        if not len(self.start_ns):
            return np.full(len(t_ns), otherwise)
        row = np.searchsorted(self.start_ns, t_ns, side="right") - 1
        return np.where(row >= 0, values[np.maximum(row, 0)], otherwise).astype(np.float64)

    def compute_throttled_ns(self, bits: int, t_ns: Int) -> Float:
        """Return for how long work had run with one of these reasons to be slow."""
        of = (self.bits & bits) != 0
        return measure_covered_ns(self.start_ns[of], self.end_ns[of], t_ns)


def list_devices(sight: RecorderView) -> dict[str, list[Rank]]:
    """Return the devices of a node and the ranks that used each, restarted ones too."""
    ranks_by_device: dict[str, list[Rank]] = {}
    for rank in sight.ranks:
        if rank.device:
            ranks_by_device.setdefault(rank.device, []).append(rank)
    return ranks_by_device


def is_emulated(device: str) -> bool:
    """True for a device of the emulator."""
    return device.startswith("emulated-")


def _make_device(sight: RecorderView, ranks: list[Rank]) -> Device:
    if len(ranks) == 1:
        return Device(sight, ranks[0])
    marks = [mark for rank in ranks for mark in rank.main.marks]
    work = [operation for rank in ranks for operation in rank.work]
    main = replace(ranks[0].main, marks=marks)
    return Device(sight, replace(ranks[0], work=work, main=main))


def list_resident_times(sight: RecorderView) -> dict[str, Int]:
    """Return when kernels were resident on each device of a node, int64[2, n], on its clock."""
    devices = {name: _make_device(sight, ranks) for name, ranks in list_devices(sight).items()}
    return {name: np.array([device.start_ns, device.end_ns]) for name, device in devices.items()}


def make_emulator_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """The pages of emulated devices."""
    columns = []
    for name, ranks in list_devices(sight).items():
        if is_emulated(name):
            values = _make_exact(_make_device(sight, ranks), sight.t_ns[ticks])
            columns += [
                _make_column(sight, signal, name, values[signal.name], ticks) for signal in EMULATED
            ]
    return columns


def make_nvml_columns(sight: RecorderView, ticks: Int) -> list[Column]:
    """What NVML is asked and a synthetic GPU has (no NVLink, no MIG), as old as its last call."""
    columns = []
    exact = {signal.name for signal in EMULATED}
    for name, ranks in list_devices(sight).items():
        device = _make_device(sight, ranks)
        for call in CALLS:
            stride = max(1, call.every_ns // 100_000_000)
            t_ns = sight.t_ns[ticks // stride * stride]
            values = _read_polled(device, sight, t_ns, call.signals)
            for signal in values:
                if not (is_emulated(name) and signal in exact):
                    column = _make_column(sight, BY_NAME[signal], name, values[signal], ticks)
                    columns.append(column)
        if not is_emulated(name):
            active = _compute_active(device, sight.t_ns[ticks])
            columns.append(_make_column(sight, GPU_SM_ACTIVE, name, active, ticks))
    return columns


def _make_column(
    sight: RecorderView, signal: Signal, device: str, values: Float, ticks: Int
) -> Column:
    if signal.is_counter:
        return Column(
            signal, device, values + sight.compute_story_growth(signal.name, device, ticks)
        )
    return Column(signal, device, sight.get_story_gauge(signal.name, device, ticks, values))


def _make_exact(device: Device, t_ns: Int) -> dict[str, Float]:
    return {
        signals.GPU_BUSY_TIME.name: device.compute_busy_ns(t_ns),
        signals.GPU_SM_CLOCK.name: SM_HERTZ * device.get_last_value(device.clock_ratio, t_ns, 1.0),
        signals.GPU_THROTTLE.name: device.get_last_value(device.bits, t_ns, 0.0),
        signals.GPU_MEMORY_USED.name: np.full(len(t_ns), float(USED_BYTES)),
        signals.GPU_SM_CLOCK_MAX.name: np.full(len(t_ns), SM_HERTZ),
        signals.GPU_SM_ACTIVE.name: _compute_active(device, t_ns),
        signals.GPU_POWER.name: _compute_power_w(device, t_ns),
        signals.GPU_PCIE_RECEIVE.name: _compute_pcie(device, t_ns, TICK_NS),
    }


def _read_polled(
    device: Device, sight: RecorderView, t_ns: Int, names: tuple[str, ...]
) -> dict[str, Float]:
    ones = np.ones(len(t_ns))
    return {name: _ASKED[name](device, sight, t_ns) * ones for name in names if name in _ASKED}


def _compute_active(device: Device, t_ns: Int) -> Float:
    return np.clip(device.compute_mean(device.sm_ratio, t_ns, 100_000_000), 0, 1)


def _compute_pcie(device: Device, t_ns: Int, window_ns: int = PCIE_WINDOW_NS) -> Float:
    start, end = device.copies
    if not len(start):
        return np.zeros(len(t_ns))
    grown = sum_amounts(start, end, device.copied, t_ns)
    grown = grown - sum_amounts(start, end, device.copied, t_ns - window_ns)
    return grown * _SECOND_NS / window_ns


def _compute_power_w(device: Device, t_ns: Int) -> Float:
    return IDLE_WATTS + device.compute_mean(device.watts - IDLE_WATTS, t_ns, 100_000_000)


def _compute_energy_j(device: Device, sight: RecorderView, t_ns: Int) -> Float:
    more = (device.watts - IDLE_WATTS) * (device.end_ns - device.start_ns)
    idle = IDLE_WATTS * (t_ns - sight.start_ns)
    return (idle + sum_amounts(device.start_ns, device.end_ns, more, t_ns)) / _SECOND_NS


def _compute_temperature(device: Device, sight: RecorderView, t_ns: Int) -> Float:
    bits = device.get_last_value(device.bits, t_ns, 0.0).astype(np.int64)
    return np.where(bits & THERMAL_BITS, 87.0, 64.0)


_ASKED = {
    "gpu.busy_ratio": lambda d, s, t: np.rint(100 * d.compute_busy_share(t, SNAPSHOT_NS)) / 100,
    "gpu.memory_busy_ratio": lambda d, s, t: (
        np.rint(100 * np.clip(d.compute_mean(d.sm_ratio, t, SNAPSHOT_NS), 0, 1) / 2) / 100
    ),
    "gpu.busy_ns_total": lambda d, s, t: d.compute_sampled_busy_ns(t, s.start_ns),
    "gpu.sm_clock_hertz": lambda d, s, t: (
        np.rint(SM_HERTZ * d.get_last_value(d.clock_ratio, t, 1.0) / STEP_HERTZ) * STEP_HERTZ
    ),
    "gpu.throttle_bits": lambda d, s, t: d.get_last_value(d.bits, t, 0.0),
    "gpu.memory_used_bytes": lambda d, s, t: float(USED_BYTES),
    "gpu.memory_total_bytes": lambda d, s, t: float(MEMORY_BYTES),
    "gpu.power_watts": lambda d, s, t: _compute_power_w(d, t),
    "gpu.power_limit_watts": lambda d, s, t: LIMIT_WATTS,
    "gpu.energy_joules_total": lambda d, s, t: _compute_energy_j(d, s, t),
    "gpu.temperature_celsius": lambda d, s, t: _compute_temperature(d, s, t),
    "gpu.memory_clock_hertz": lambda d, s, t: MEMORY_HERTZ,
    "gpu.sm_clock_max_hertz": lambda d, s, t: SM_HERTZ,
    "gpu.thermal_violation_ns_total": lambda d, s, t: d.compute_throttled_ns(THERMAL_BITS, t),
    "gpu.power_violation_ns_total": lambda d, s, t: d.compute_throttled_ns(POWER_BITS, t),
    "gpu.pcie_receive_bytes_per_second": lambda d, s, t: _compute_pcie(d, t),
    "gpu.pcie_transmit_bytes_per_second": lambda d, s, t: 0.02 * _compute_pcie(d, t),
    "gpu.pcie_generation_count": lambda d, s, t: 5.0,
    "gpu.pcie_width_count": lambda d, s, t: 16.0,
    "gpu.pcie_replays_total": lambda d, s, t: 0.0,
    "gpu.ecc_corrected_total": lambda d, s, t: 0.0,
    "gpu.ecc_uncorrected_total": lambda d, s, t: 0.0,
    "gpu.processes_count": lambda d, s, t: 1.0,
}
