"""Rewrites a recording so that its accelerators show utilization as a vendor's driver does.

An emulated device reports at any instant how long it was busy. NVML reports whole percents of
periods of 1/6 s to 1 s; the driver decides when they end, and hands over several at once, late.
With GPM each second sample is the exact mean since the sample before. PCIe traffic is one
measurement a second, with GPM also a mean. The driver is drawn per trial, the phase of its periods
per device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof import signals
from clusterprof.agent.collectors.gpu.nvml_counters import GPM_OFF
from clusterprof.trace.reader import NodeReader
from clusterprof.trace.schema import Columns, Event, Gap, Header, Record
from clusterprof_lab.synth.interval_sums import measure_covered_ns
from clusterprof_lab.truth import WORK_FILE, Truth

Int = NDArray[np.int64]
Float = NDArray[np.float64]

SECOND_NS = 1_000_000_000
PERIODS_NS = (SECOND_NS // 6, SECOND_NS // 4, SECOND_NS // 2, SECOND_NS)
MAX_LUMP_NS = SECOND_NS
"""A driver hands over at most so much time at once, unless one period is longer."""
_PCIE_POLLS = 10
_GPM_POLLS = 2
_RECORDED = (signals.GPU_BUSY_TIME.name, signals.GPU_SM_ACTIVE.name, signals.GPU_PCIE_RECEIVE.name)
_EMULATED, _NVIDIA = "gpu_emulated", "gpu_nvidia"


@dataclass(frozen=True, slots=True)
class Driver:
    """How one driver shows utilization."""

    period_ns: int
    lump_periods: int
    """Periods that are handed over together."""
    delay_ns: int
    """From the end of the last of them until they can be read."""
    has_gpm: bool


def draw_driver(truth: Truth) -> Driver:
    """Draw the driver of a run's cluster; the same at every call."""
    random = np.random.default_rng(_make_seed(truth, ""))
    period_ns = int(random.choice(PERIODS_NS))
    lump = int(random.integers(1, MAX_LUMP_NS // period_ns + 1))
    return Driver(period_ns, lump, int(random.uniform(0, period_ns)), bool(random.integers(2)))


def _make_seed(truth: Truth, device: str) -> list[int]:
    name = f"{truth.scenario}.{truth.severity}.{truth.testbed}.{device}"
    return [zlib.crc32(name.encode()), truth.seed, truth.split == "test"]


def poll_driver(
    driver: Driver, count_busy_ns: Callable[[Int], Float], phase_ns: int, t_ns: Int
) -> tuple[Int, Int]:
    """Return what polls at `t_ns` read: busy time and up to when it counts, int64[n] each, ns.

    count_busy_ns: busy time up to each instant. phase_ns: when a period ends, modulo the
    period. Busy time counts from what the first poll could see, as the recorder's does.
    """
    if driver.has_gpm:
        row = np.arange(len(t_ns)) // _GPM_POLLS * _GPM_POLLS
        busy_ns = count_busy_ns(t_ns)
        return np.rint(busy_ns - busy_ns[0]).astype(np.int64)[row], t_ns[row]
    period_ns, lump = driver.period_ns, driver.lump_periods
    first = (int(t_ns[0]) - driver.delay_ns - phase_ns) // period_ns - 2 * lump
    number = np.arange(first - first % lump, (int(t_ns[-1]) - phase_ns) // period_ns + 1)
    ends_ns = number * period_ns + phase_ns
    percents = np.rint(100 * np.diff(count_busy_ns(ends_ns)) / period_ns).astype(np.int64)
    total_ns = np.append(0, np.cumsum(percents * period_ns // 100))
    handed_ns = (number // lump * lump + lump - 1) * period_ns + phase_ns + driver.delay_ns
    row = np.searchsorted(handed_ns, t_ns, side="right") - 1
    return total_ns[row] - total_ns[row[0]], ends_ns[row]


class DriverView:
    """Converts the records of one node; see `clusterprof_lab.score.rewrite`."""

    def __init__(self, truth: Truth, run: Path, node: Path) -> None:
        """Read the devices of a node. run: folder of the truth, with `WORK_FILE` or without."""
        self._driver = draw_driver(truth)
        self._polls = _load_polls(node)
        self._shown: dict[str, tuple[Int, Int]] = {}
        work = np.load(run / WORK_FILE) if (run / WORK_FILE).is_file() else {}
        for device, (t_ns, values) in self._polls.items():
            phase = np.random.default_rng(_make_seed(truth, f"{node.name}/{device}"))
            count: Callable[[Int], Float] = partial(np.interp, xp=t_ns, fp=values[_RECORDED[0]])
            if f"{node.name}/{device}" in work:
                count = partial(measure_covered_ns, *work[f"{node.name}/{device}"])
            phase_ns = int(phase.integers(self._driver.period_ns))
            self._shown[device] = poll_driver(self._driver, count, phase_ns, t_ns)

    def convert(self, record: Record) -> Iterator[Record]:
        """Yield what a recorder of this driver would have written in place of a record."""
        if isinstance(record, Header):
            yield self._convert_header(record)
        elif isinstance(record, Columns) and record.collector == _EMULATED:
            yield from self._convert_columns(record)
        elif isinstance(record, Columns) and record.collector == _NVIDIA:
            yield replace(record, devices=[_rename(name) for name in record.devices])
        elif isinstance(record, Event) and record.attributes.get("device"):
            device = _rename(record.attributes["device"])
            yield replace(record, attributes={**record.attributes, "device": device})
        elif not (isinstance(record, Gap) and record.collector in (_EMULATED, _NVIDIA)):
            yield record

    def _convert_header(self, header: Header) -> Header:
        status = {_NVIDIA: "available", _EMULATED: "absent"}
        collectors = [
            {**collector, "status": status.get(str(collector.get("name")), collector.get("status"))}
            for collector in header.collectors
        ]
        devices = [_convert_device(device) for device in header.devices]
        return replace(header, devices=devices, collectors=collectors)

    def _convert_columns(self, record: Columns) -> Iterator[Record]:
        t_ns = np.asarray(record.t_ns)
        names, devices, values, masks = [], [], [], []
        for n, (name, device) in enumerate(zip(record.signals, record.devices)):
            polls = self._polls[device][0]
            row = np.searchsorted(polls, t_ns)
            if name == signals.GPU_SM_ACTIVE.name and not self._driver.has_gpm:
                if t_ns[0] == polls[0]:
                    why = GPM_OFF
                    shown = _rename(device)
                    yield Gap(int(t_ns[0]), _NVIDIA, name, shown, why.kind, why.message, why.remedy)
                continue
            names.append(name)
            devices.append(_rename(device))
            masks.append(record.masks[n])
            if name == signals.GPU_BUSY_TIME.name:
                values.append(self._shown[device][0][row])
                names.append(signals.GPU_BUSY_UNTIL.name)
                devices.append(_rename(device))
                masks.append(record.masks[n])
                values.append(self._shown[device][1][row])
            elif name in _RECORDED:
                values.append(self._hold(device, name)[row])
            else:
                values.append(np.asarray(record.values[n]))
        yield Columns(_NVIDIA, names, devices, record.t_ns, values, masks)

    def _hold(self, device: str, name: str) -> Float:
        """Return a gauge as often as this driver measures it, float64[polls]."""
        values = self._polls[device][1][name]
        at = np.arange(len(values))
        if not self._driver.has_gpm:
            return values[at // _PCIE_POLLS * _PCIE_POLLS]
        means = (values + values[np.maximum(at - 1, 0)]) / 2
        return np.asarray(means[at // _GPM_POLLS * _GPM_POLLS])


def _convert_device(device: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of a device in a header; the recorder sees which process uses it."""
    if not device.get("emulated"):
        return dict(device)
    hidden = ("emulated", "pid", "started_ticks")
    shown = {key: value for key, value in device.items() if key not in hidden}
    used_by = [device["pid"]] if "pid" in device else []
    name = _rename(str(device["id"]))
    return {**shown, "id": name, "vendor": "nvidia", "emulated": False, "users": used_by}


def _rename(device: str) -> str:
    return device.replace("emulated-", "GPU-", 1)


def _load_polls(node: Path) -> dict[str, tuple[Int, dict[str, Float]]]:
    """Read when each emulated device was polled, int64[n], and what of it is shown otherwise."""
    times: dict[str, list[Int]] = {}
    values: dict[tuple[str, str], list[Float]] = {}
    for record in NodeReader(node):
        if not isinstance(record, Columns) or record.collector != _EMULATED:
            continue
        for device in dict.fromkeys(record.devices):
            times.setdefault(device, []).append(np.array(record.t_ns, np.int64))
        for n, (name, device) in enumerate(zip(record.signals, record.devices)):
            if name in _RECORDED:
                column = np.array(record.values[n], np.float64)
                values.setdefault((device, name), []).append(column)
    return {
        device: (
            np.concatenate(parts),
            {name: np.concatenate(values[device, name]) for name in _make_columns(values, device)},
        )
        for device, parts in times.items()
    }


def _make_columns(values: Mapping[tuple[str, str], Sequence[Float]], device: str) -> list[str]:
    return [name for owner, name in values if owner == device]
