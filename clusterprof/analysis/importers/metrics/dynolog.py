"""The log of the Dynolog daemon: the host and each GPU.

## How to make the file

    dynolog --enable_gpu_monitor --use_JSON > dynolog.log 2>&1

## How to analyze it

    clusterprof analyze dynolog.log

## What is read

The log of one host, with `time = 2026-03-21T15:22:47.123Z data = {…}` in each line, and JSON lines
with a time (`timestamp`, `time`) and the same keys.

## How the numbers are computed

Samples with `device` belong to that GPU; other samples belong to the host. CPU times and bytes of
interfaces are differences from the previous sample, and are added up. The log writes local time but
labels it UTC (`Z`), so its times are not aligned with those of other hosts.

## What it cannot see

By default samples are one minute apart (10 s for GPUs). The idle time of the CPUs is recorded only
in percent, and is left out. The log has no ranks or steps, so no loss is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from clusterprof.analysis.importers.core.base import Account, CannotImportError, Source
from clusterprof.analysis.importers.core.node_tables import NodeTables
from clusterprof.analysis.importers.core.text import name_trace
from clusterprof.analysis.importers.metrics.labeled_series import DCGM_FIELDS
from clusterprof.analysis.importers.metrics.metric_readings import (
    ALL_CPUS,
    MAX_READINGS,
    MetricMapping,
    MetricReadings,
    ReadingColumn,
    parse_time,
    read_stripped_lines,
)

_LOG_TIME = re.compile(rb"time = (\S{10,40})$")
_DATA_MARKER = b" data = "
_TIMES = ("timestamp", "time")
_NS_PER_MS = 1e6
_USER, _SYSTEM = ("cpu_u_ms", "cpu_n_ms"), ("cpu_s_ms", "cpu_x_ms", "cpu_y_ms")

GPU_METRICS: dict[str, MetricMapping] = {
    name: DCGM_FIELDS["DCGM_FI_" + dcgm]
    for name, dcgm in {
        "gpu_device_utilization": "DEV_GPU_UTIL",
        "gpu_memory_utilization": "DEV_MEM_COPY_UTIL",
        "graphics_engine_active_ratio": "PROF_GR_ENGINE_ACTIVE",
        "sm_active_ratio": "PROF_SM_ACTIVE",
        "sm_occupancy": "PROF_SM_OCCUPANCY",
        "tensorcore_active": "PROF_PIPE_TENSOR_ACTIVE",
        "hbm_mem_bw_util": "PROF_DRAM_ACTIVE",
        "pcie_tx_bytes": "PROF_PCIE_TX_BYTES",
        "pcie_rx_bytes": "PROF_PCIE_RX_BYTES",
        "nvlink_tx_bytes": "PROF_NVLINK_TX_BYTES",
        "nvlink_rx_bytes": "PROF_NVLINK_RX_BYTES",
        "gpu_power_draw": "DEV_POWER_USAGE",
        "gpu_frequency_mhz": "DEV_SM_CLOCK",
    }.items()
}
HOST_METRICS: dict[str, MetricMapping] = {
    **{name: MetricMapping("cpu.user_ns_total", _NS_PER_MS, name, parts=_USER) for name in _USER},
    **{
        name: MetricMapping("cpu.system_ns_total", _NS_PER_MS, name, parts=_SYSTEM)
        for name in _SYSTEM
    },
    "cpu_w_ms": MetricMapping("cpu.iowait_ns_total", _NS_PER_MS),
    "cpu_z_ms": MetricMapping("cpu.steal_ns_total", _NS_PER_MS),
}
_NIC_METRICS: dict[str, MetricMapping] = {
    "rx_bytes_": MetricMapping("network.receive_bytes_total"),
    "tx_bytes_": MetricMapping("network.transmit_bytes_total"),
    "rx_drops_": MetricMapping("network.receive_drops_total"),
    "tx_drops_": MetricMapping("network.transmit_drops_total"),
}


class Dynolog:
    """Importer of the daemon's log."""

    name: ClassVar[str] = "dynolog"
    title: ClassVar[str] = "Dynolog log"
    combines_files: ClassVar[bool] = False

    def recognizes(self, head: bytes, path: Path) -> bool:
        """Return whether the first line with a sample has a known metric."""
        for line in head.split(b"\n")[:200]:
            sample = _parse_sample(line)
            if sample is not None:
                return bool(
                    GPU_METRICS.keys() & sample[1].keys() or HOST_METRICS.keys() & sample[1].keys()
                )
        return False

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the host.

        Raises: CannotImportError when the file holds no known sample.
        """
        source, account = sources[0], accounts[0]
        reader = _Reader(account)
        for line in read_stripped_lines(source, account):
            sample = _parse_sample(line)
            if sample is None:
                if line.strip():
                    account.skipped["lines without a sample"] += 1
                continue
            reader.add_sample(*sample)
        has_nodes = False
        stem = name_trace(source.path)
        for node in reader.readings.nodes(self.name, account, stem):
            node.display_name = stem
            has_nodes = True
            yield node
        if not has_nodes:
            raise CannotImportError("the file holds no known sample", "")


def _parse_sample(line: bytes) -> tuple[tuple[int, bool], dict[str, Any]] | None:
    """Parse the time of a line, whether its zone is known, and its values; else None."""
    prefix, _, payload = line.partition(_DATA_MARKER)
    match = _LOG_TIME.search(prefix[-64:]) if payload else None
    try:
        data = msgspec.json.decode(payload if match else line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    if match:
        time = parse_time(match[1].decode("latin-1"))
        return ((time[0], False), data) if time else None
    time_value = next((data[name] for name in _TIMES if name in data), None)
    time = parse_time(str(time_value)) if time_value is not None else None
    inner = data.get("data")
    return (time, inner if isinstance(inner, dict) else data) if time else None


class _Reader:
    """Collector of samples."""

    def __init__(self, account: Account) -> None:
        self.readings = MetricReadings()
        self._account = account
        self._totals: dict[ReadingColumn, float] = {}
        self._remaining_readings = MAX_READINGS

    def add_sample(self, time: tuple[int, bool], data: dict[str, Any]) -> None:
        t_ns, zoned = time
        self.readings.has_wall_clock &= zoned
        self._account.read["samples"] += 1
        device = data.get("device")
        if isinstance(device, int):
            id_ = str(data.get("gpu_uuid") or f"gpu{device}")
            self.readings.device(
                "",
                id_,
                vendor="nvidia",
                name=str(data.get("gpu_name", "")),
                uuid=str(data.get("gpu_uuid", "")),
            )
            for name, meaning in GPU_METRICS.items():
                if name in data:
                    self._add(meaning, id_, t_ns, data[name], total=False)
            return
        for name, value in data.items():
            if name in HOST_METRICS:
                self._add(HOST_METRICS[name], ALL_CPUS, t_ns, value, total=True)
            else:
                nic = next((prefix for prefix in _NIC_METRICS if name.startswith(prefix)), "")
                if nic and name != nic + "lo":
                    self._add(_NIC_METRICS[nic], name[len(nic) :], t_ns, value, total=True)

    def _add(self, meaning: MetricMapping, device: str, t_ns: int, value: Any, total: bool) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            self._account.skipped["values that are not numbers"] += 1
            return
        column = self.readings.column("", meaning, device)
        if column is None or self._remaining_readings <= 0:
            self._account.skipped["values beyond the limit"] += 1
            return
        if total:
            number += self._totals.get(column, 0.0)
            self._totals[column] = number
        self._remaining_readings -= 1
        column.add(t_ns, number)
