"""Dynolog: what its daemon logs of the host and of each GPU.

## What is read

The daemon's own log, `time = 2026-03-21T15:22:47.123Z data = {…}` in each line, and lines of JSON
with a time (`timestamp`, `time`) beside the same keys, of one host:

    dynolog --enable_gpu_monitor --use_JSON > dynolog.log 2>&1

## How it is understood

Samples with `device` are of that GPU; others are of the host. CPU times and bytes of interfaces are
differences since the sample before, and are added up. The log writes local time and calls it UTC
(`Z`): its times are not tied to those of other hosts.

## Where it is blind

Samples are a minute apart unless set otherwise (10 s for GPUs). What a host's CPUs idle is told in
percent, and is left out. Nothing tells of ranks or steps: no loss is claimed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from clusterprof.importers.base import Account, CannotImportError, Source
from clusterprof.importers.tables import NodeTables
from clusterprof.importers.telemetry.dcgm_names import FIELDS
from clusterprof.importers.telemetry.gathered import (
    ALL,
    READINGS_AT_MOST,
    Column,
    Gathered,
    Meaning,
)
from clusterprof.importers.telemetry.lines import lines_of
from clusterprof.importers.telemetry.times import time_ns

_LOGGED = re.compile(rb"time = (\S{10,40})$")
_DATA = b" data = "
_TIMES = ("timestamp", "time")
_NS_PER_MS = 1e6
_USER, _SYSTEM = ("cpu_u_ms", "cpu_n_ms"), ("cpu_s_ms", "cpu_x_ms", "cpu_y_ms")

GPU: dict[str, Meaning] = {
    name: FIELDS["DCGM_FI_" + dcgm]
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
HOST: dict[str, Meaning] = {
    **{name: Meaning("cpu.user_ns_total", _NS_PER_MS, name, parts=_USER) for name in _USER},
    **{name: Meaning("cpu.system_ns_total", _NS_PER_MS, name, parts=_SYSTEM) for name in _SYSTEM},
    "cpu_w_ms": Meaning("cpu.iowait_ns_total", _NS_PER_MS),
    "cpu_z_ms": Meaning("cpu.steal_ns_total", _NS_PER_MS),
}
_NIC: dict[str, Meaning] = {
    "rx_bytes_": Meaning("network.receive_bytes_total"),
    "tx_bytes_": Meaning("network.transmit_bytes_total"),
    "rx_drops_": Meaning("network.receive_drops_total"),
    "tx_drops_": Meaning("network.transmit_drops_total"),
}


class Dynolog:
    """Log of the daemon."""

    name: ClassVar[str] = "dynolog"
    title: ClassVar[str] = "Dynolog log"
    together: ClassVar[bool] = False

    def recognises(self, head: bytes, path: Path) -> bool:
        """By the first line with a sample in it."""
        for line in head.split(b"\n")[:200]:
            found = _sample(line)
            if found is not None:
                return bool(GPU.keys() & found[1].keys() or HOST.keys() & found[1].keys())
        return False

    def nodes(self, sources: Sequence[Source], accounts: Sequence[Account]) -> Iterator[NodeTables]:
        """Yield the host."""
        source, account = sources[0], accounts[0]
        reader = _Reader(account)
        for line in lines_of(source, account):
            found = _sample(line)
            if found is None:
                if line.strip():
                    account.skipped["lines without a sample"] += 1
                continue
            reader.sample(*found)
        some = False
        stem = source.path.name.split(".")[0]
        for node in reader.gathered.nodes(self.name, account, stem):
            node.shown = stem
            some = True
            yield node
        if not some:
            raise CannotImportError("no sample that is known was found", "")


def _sample(line: bytes) -> tuple[tuple[int, bool], dict[str, Any]] | None:
    """The time of a line, whether its zone is known, and its values; None when it has none."""
    said_at, _, written = line.partition(_DATA)
    match = _LOGGED.search(said_at[-64:]) if written else None
    try:
        data = msgspec.json.decode(written if match else line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    if match:
        said = time_ns(match[1].decode("latin-1"))
        return ((said[0], False), data) if said else None
    when = next((data[name] for name in _TIMES if name in data), None)
    said = time_ns(str(when)) if when is not None else None
    inner = data.get("data")
    return (said, inner if isinstance(inner, dict) else data) if said else None


class _Reader:
    """Adds one sample after the other."""

    def __init__(self, account: Account) -> None:
        self.gathered = Gathered()
        self._account = account
        self._totals: dict[Column, float] = {}
        self._left = READINGS_AT_MOST

    def sample(self, when: tuple[int, bool], data: dict[str, Any]) -> None:
        t_ns, zoned = when
        self.gathered.wall &= zoned
        self._account.read["samples"] += 1
        device = data.get("device")
        if isinstance(device, int):
            id_ = str(data.get("gpu_uuid") or f"gpu{device}")
            self.gathered.device(
                "", id_, vendor="nvidia", name=str(data.get("gpu_name", "")),
                uuid=str(data.get("gpu_uuid", "")),
            )  # fmt: skip
            for name, meaning in GPU.items():
                if name in data:
                    self._add(meaning, id_, t_ns, data[name], total=False)
            return
        for name, value in data.items():
            if name in HOST:
                self._add(HOST[name], ALL, t_ns, value, total=True)
            else:
                nic = next((start for start in _NIC if name.startswith(start)), "")
                if nic and name != nic + "lo":
                    self._add(_NIC[nic], name[len(nic) :], t_ns, value, total=True)

    def _add(self, meaning: Meaning, device: str, t_ns: int, value: Any, total: bool) -> None:
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            self._account.skipped["values that are no numbers"] += 1
            return
        column = self.gathered.column("", meaning, device)
        if column is None or self._left <= 0:
            self._account.skipped["values beyond the most that are read"] += 1
            return
        if total:
            number += self._totals.get(column, 0.0)
            self._totals[column] = number
        self._left -= 1
        column.add(t_ns, number)
