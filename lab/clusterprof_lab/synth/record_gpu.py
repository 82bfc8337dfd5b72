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
from clusterprof_lab.synth.record_node import Column
from clusterprof_lab.synth.record_sight import TICK_NS, Sight
from clusterprof_lab.synth.record_sums import accrued, covered
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

    def __init__(self, sight: Sight, rank: Rank) -> None:
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

    def busy_ns(self, t_ns: Int) -> Float:
        """Return the time with a kernel resident up to each instant."""
        return covered(self.start_ns, self.end_ns, t_ns)

    def percents_ns(self, t_ns: Int, origin_ns: int) -> Float:
        """Return the same as summed from samples of whole percents, as far as there are any."""
        grid = np.arange(origin_ns, int(t_ns[-1]) + 1, SAMPLE_NS)
        grown = np.diff(self.busy_ns(grid))
        total = np.concatenate([[0.0], np.cumsum(np.rint(grown * 100 / SAMPLE_NS))])
        last = np.searchsorted(grid, t_ns, side="right") - 1
        return total[np.maximum(last, 0)] * SAMPLE_NS / 100

    def share(self, t_ns: Int, window_ns: int) -> Float:
        """Return the share of the window before each instant with a kernel resident."""
        return (self.busy_ns(t_ns) - self.busy_ns(t_ns - window_ns)) / window_ns

    def mean(self, values: Float, t_ns: Int, window_ns: int) -> Float:
        """Return the mean over the window before each instant of what work adds up to."""
        amounts = values * (self.end_ns - self.start_ns)
        now = accrued(self.start_ns, self.end_ns, amounts, t_ns)
        return (now - accrued(self.start_ns, self.end_ns, amounts, t_ns - window_ns)) / window_ns

    def last(self, values: Float | Int, t_ns: Int, otherwise: float) -> Float:
        """Return the value of the work at hand, or of the one before."""
        if not len(self.start_ns):
            return np.full(len(t_ns), otherwise)
        row = np.searchsorted(self.start_ns, t_ns, side="right") - 1
        return np.where(row >= 0, values[np.maximum(row, 0)], otherwise).astype(np.float64)

    def slowed_ns(self, bits: int, t_ns: Int) -> Float:
        """Return for how long work had run with one of these reasons to be slow."""
        of = (self.bits & bits) != 0
        return covered(self.start_ns[of], self.end_ns[of], t_ns)


def devices_of(sight: Sight) -> dict[str, list[Rank]]:
    """Return the devices of a node and the ranks that used each, restarted ones too."""
    ranks_by_device: dict[str, list[Rank]] = {}
    for rank in sight.ranks:
        if rank.device:
            ranks_by_device.setdefault(rank.device, []).append(rank)
    return ranks_by_device


def is_emulated(device: str) -> bool:
    """True for a device of the emulator."""
    return device.startswith("emulated-")


def _device(sight: Sight, ranks: list[Rank]) -> Device:
    if len(ranks) == 1:
        return Device(sight, ranks[0])
    marks = [mark for rank in ranks for mark in rank.main.marks]
    work = [operation for rank in ranks for operation in rank.work]
    main = replace(ranks[0].main, marks=marks)
    return Device(sight, replace(ranks[0], work=work, main=main))


def list_resident_times(sight: Sight) -> dict[str, Int]:
    """Return when kernels were resident on each device of a node, int64[2, n], on its clock."""
    devices = {name: _device(sight, ranks) for name, ranks in devices_of(sight).items()}
    return {name: np.array([device.start_ns, device.end_ns]) for name, device in devices.items()}


def emulated(sight: Sight, ticks: Int) -> list[Column]:
    """The pages of emulated devices."""
    columns = []
    for name, ranks in devices_of(sight).items():
        if is_emulated(name):
            values = _exact(_device(sight, ranks), sight.t_ns[ticks])
            columns += [
                _column(sight, signal, name, values[signal.name], ticks) for signal in EMULATED
            ]
    return columns


def nvidia(sight: Sight, ticks: Int) -> list[Column]:
    """What NVML is asked and a synthetic GPU has (no NVLink, no MIG), as old as its last call."""
    columns = []
    exact = {signal.name for signal in EMULATED}
    for name, ranks in devices_of(sight).items():
        device = _device(sight, ranks)
        for call in CALLS:
            stride = max(1, call.every_ns // 100_000_000)
            t_ns = sight.t_ns[ticks // stride * stride]
            values = _asked(device, sight, t_ns, call.signals)
            for signal in values:
                if not (is_emulated(name) and signal in exact):
                    column = _column(sight, BY_NAME[signal], name, values[signal], ticks)
                    columns.append(column)
        if not is_emulated(name):
            active = _active(device, sight.t_ns[ticks])
            columns.append(_column(sight, GPU_SM_ACTIVE, name, active, ticks))
    return columns


def _column(sight: Sight, signal: Signal, device: str, values: Float, ticks: Int) -> Column:
    if signal.is_counter:
        return Column(signal, device, values + sight.risen(signal.name, device, ticks))
    return Column(signal, device, sight.held(signal.name, device, ticks, values))


def _exact(device: Device, t_ns: Int) -> dict[str, Float]:
    return {
        signals.GPU_BUSY_TIME.name: device.busy_ns(t_ns),
        signals.GPU_SM_CLOCK.name: SM_HERTZ * device.last(device.clock_ratio, t_ns, 1.0),
        signals.GPU_THROTTLE.name: device.last(device.bits, t_ns, 0.0),
        signals.GPU_MEMORY_USED.name: np.full(len(t_ns), float(USED_BYTES)),
        signals.GPU_SM_CLOCK_MAX.name: np.full(len(t_ns), SM_HERTZ),
        signals.GPU_SM_ACTIVE.name: _active(device, t_ns),
        signals.GPU_POWER.name: _watts(device, t_ns),
        signals.GPU_PCIE_RECEIVE.name: _pcie(device, t_ns, TICK_NS),
    }


def _asked(device: Device, sight: Sight, t_ns: Int, names: tuple[str, ...]) -> dict[str, Float]:
    ones = np.ones(len(t_ns))
    return {name: _ASKED[name](device, sight, t_ns) * ones for name in names if name in _ASKED}


def _active(device: Device, t_ns: Int) -> Float:
    return np.clip(device.mean(device.sm_ratio, t_ns, 100_000_000), 0, 1)


def _pcie(device: Device, t_ns: Int, window_ns: int = PCIE_WINDOW_NS) -> Float:
    start, end = device.copies
    if not len(start):
        return np.zeros(len(t_ns))
    grown = accrued(start, end, device.copied, t_ns)
    grown = grown - accrued(start, end, device.copied, t_ns - window_ns)
    return grown * _SECOND_NS / window_ns


def _watts(device: Device, t_ns: Int) -> Float:
    return IDLE_WATTS + device.mean(device.watts - IDLE_WATTS, t_ns, 100_000_000)


def _joules(device: Device, sight: Sight, t_ns: Int) -> Float:
    more = (device.watts - IDLE_WATTS) * (device.end_ns - device.start_ns)
    idle = IDLE_WATTS * (t_ns - sight.start_ns)
    return (idle + accrued(device.start_ns, device.end_ns, more, t_ns)) / _SECOND_NS


def _hot(device: Device, sight: Sight, t_ns: Int) -> Float:
    bits = device.last(device.bits, t_ns, 0.0).astype(np.int64)
    return np.where(bits & THERMAL_BITS, 87.0, 64.0)


_ASKED = {
    "gpu.busy_ratio": lambda d, s, t: np.rint(100 * d.share(t, SNAPSHOT_NS)) / 100,
    "gpu.memory_busy_ratio": lambda d, s, t: (
        np.rint(100 * np.clip(d.mean(d.sm_ratio, t, SNAPSHOT_NS), 0, 1) / 2) / 100
    ),
    "gpu.busy_ns_total": lambda d, s, t: d.percents_ns(t, s.start_ns),
    "gpu.sm_clock_hertz": lambda d, s, t: (
        np.rint(SM_HERTZ * d.last(d.clock_ratio, t, 1.0) / STEP_HERTZ) * STEP_HERTZ
    ),
    "gpu.throttle_bits": lambda d, s, t: d.last(d.bits, t, 0.0),
    "gpu.memory_used_bytes": lambda d, s, t: float(USED_BYTES),
    "gpu.memory_total_bytes": lambda d, s, t: float(MEMORY_BYTES),
    "gpu.power_watts": lambda d, s, t: _watts(d, t),
    "gpu.power_limit_watts": lambda d, s, t: LIMIT_WATTS,
    "gpu.energy_joules_total": lambda d, s, t: _joules(d, s, t),
    "gpu.temperature_celsius": lambda d, s, t: _hot(d, s, t),
    "gpu.memory_clock_hertz": lambda d, s, t: MEMORY_HERTZ,
    "gpu.sm_clock_max_hertz": lambda d, s, t: SM_HERTZ,
    "gpu.thermal_violation_ns_total": lambda d, s, t: d.slowed_ns(THERMAL_BITS, t),
    "gpu.power_violation_ns_total": lambda d, s, t: d.slowed_ns(POWER_BITS, t),
    "gpu.pcie_receive_bytes_per_second": lambda d, s, t: _pcie(d, t),
    "gpu.pcie_transmit_bytes_per_second": lambda d, s, t: 0.02 * _pcie(d, t),
    "gpu.pcie_generation_count": lambda d, s, t: 5.0,
    "gpu.pcie_width_count": lambda d, s, t: 16.0,
    "gpu.pcie_replays_total": lambda d, s, t: 0.0,
    "gpu.ecc_corrected_total": lambda d, s, t: 0.0,
    "gpu.ecc_uncorrected_total": lambda d, s, t: 0.0,
    "gpu.processes_count": lambda d, s, t: 1.0,
}
