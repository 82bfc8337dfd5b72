"""One report of `neuron-monitor`, which prints one JSON object per period, in our words.

    {"neuron_runtime_data": [{"pid": 1, "error": "", "report": {
        "neuroncore_counters": {"period": 1.0, "neuroncores_in_use": {
            "0": {"neuroncore_utilization": 42.0}}, "error": ""},
        "memory_used": {"neuron_runtime_used_bytes": {"neuron_device": …, "usage_breakdown": {
            "neuroncore_memory_usage": {"0": {"constants": …, "tensors": …}}}}},
        "execution_stats": {"error_summary": {"numerical": 0}, "execution_summary":
            {"completed": 123}, "latency_stats": {"device_latency": {"p50": 0.01, "p99": 0.02}}}}}],
     "system_data": {"neuron_hw_counters": {"neuron_devices": [{"neuron_device_index": 0,
        "mem_ecc_corrected": 0, "mem_ecc_uncorrected": 0, "sram_ecc_corrected": 0, …}]}},
     "neuron_hardware_info": {"neuron_device_count": 16, "neuroncore_per_device_count": 2, …}}

Neuron Monitor User Guide. Utilisation is in percent of the captured period; latencies are in
seconds. Executions, errors and ECC events are counts of the period (the companion script
neuron-monitor-prometheus.py adds them up). A core nobody uses is not listed: it executed nothing,
provided that every process could be asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from clusterprof.errors import Unavailable

Value = int | float | Unavailable
_SECOND_NS = 1_000_000_000
_SLACK = 1.0  # percent points that an average over a period may overshoot


class Hardware(NamedTuple):
    """What a node has, in logical cores as its processes number them."""

    kind: str
    devices: int
    cores_per_device: int
    memory_bytes: int | None
    """Of each device."""


class Core(NamedTuple):
    """What one report says of one core."""

    busy_ratio: Value
    period_ns: Value
    memory_bytes: Value
    executions: Value
    """Of the period, as are errors and ECC events."""
    errors: Value
    p50_ns: Value
    p99_ns: Value
    processes: Value
    corrected: Value
    uncorrected: Value
    pids: tuple[int, ...]


def decode(line: bytes) -> dict[str, Any]:
    """Return the JSON object in a line; raises Unavailable when there is none."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        said = line[:60].decode("utf-8", "replace").strip()
        raise Unavailable("failed", f"neuron-monitor printed no report: {said!r}")
    return found


def hardware(report: dict[str, Any]) -> Hardware:
    """Return what the node has; raises Unavailable with the tool's own words when it has none."""
    info = _group(report, "neuron_hardware_info")
    if isinstance(info, Unavailable):
        raise Unavailable("absent", f"no Neuron device: {info.message}")
    devices, cores = (
        _count(info, key) for key in ("neuron_device_count", "neuroncore_per_device_count")
    )
    if isinstance(devices, Unavailable) or isinstance(cores, Unavailable) or not devices * cores:
        raise Unavailable("absent", "neuron-monitor knows no Neuron device")
    memory = _count(info, "neuron_device_memory_size")
    kind = info.get("neuron_device_type")
    return Hardware(
        kind[:64] if isinstance(kind, str) and kind else "Neuron device",
        int(devices),
        int(cores),
        None if isinstance(memory, Unavailable) else int(memory),
    )


def cores(report: dict[str, Any], known: Hardware) -> list[Core]:
    """Return what the report says of every core of the node, by index."""
    runtimes = report.get("neuron_runtime_data")
    listed = runtimes if isinstance(runtimes, list) else []
    processes = [_Process(one if isinstance(one, dict) else {}) for one in listed]
    unseen = next((one.unseen for one in processes if one.unseen is not None), None)
    if runtimes is not None and not isinstance(runtimes, list):
        unseen = Unavailable("failed", "neuron-monitor lists no processes")
    ecc = _ecc(report)
    out = []
    for index in range(known.devices * known.cores_per_device):
        device = index // known.cores_per_device
        nothing = Unavailable("failed", "neuron-monitor says nothing of this device")
        out.append(_core(index, processes, unseen, ecc.get(device, (nothing, nothing))))
    return out


class _Process:
    """What a report says of one process that uses Neuron devices."""

    def __init__(self, entry: dict[str, Any]) -> None:
        pid = entry.get("pid")
        self.pid = pid if isinstance(pid, int) and pid > 0 else 0
        error = entry.get("error")
        report = entry.get("report")
        report = report if isinstance(report, dict) else {}
        counters = _group(report, "neuroncore_counters")
        self.unseen: Unavailable | None = None
        """Why it cannot be told which cores it uses."""
        self.used: dict[int, Any] = {}
        if error:
            self.unseen = Unavailable("failed", f"neuron-monitor: {str(error)[:100]}")
        elif isinstance(counters, Unavailable):
            self.unseen = counters
        else:
            used = counters.get("neuroncores_in_use") or {}
            if not isinstance(used, dict) or not all(str(key).isdigit() for key in used):
                self.unseen = Unavailable("failed", "neuron-monitor names no cores")
            else:
                self.used = {int(key): value for key, value in used.items()}
        self.period_ns = _nanoseconds(counters, "period")
        self.memory = _group(report, "memory_used")
        self.stats = _group(report, "execution_stats")

    def busy_ratio(self, core: int) -> Value:
        entry = self.used[core]
        percent = _number(entry if isinstance(entry, dict) else {}, "neuroncore_utilization")
        if isinstance(percent, Unavailable):
            return percent
        if not 0 <= percent <= 100 + _SLACK:
            return Unavailable("failed", f"neuron-monitor: impossible value {percent:g} %")
        return min(percent / 100, 1.0)

    def memory_bytes(self, core: int) -> Value:
        if isinstance(self.memory, Unavailable):
            return self.memory
        used = _inner(self.memory, "neuron_runtime_used_bytes")
        by_core = _inner(_inner(used, "usage_breakdown"), "neuroncore_memory_usage")
        parts = by_core.get(str(core))
        if isinstance(parts, dict) and parts:
            return _sum(_count(parts, key) for key in parts)
        if len(self.used) == 1:
            return _count(used, "neuron_device" if "neuron_device" in used else "device")
        return Unavailable("absent", "neuron-monitor does not say it core by core")

    def executions(self) -> Value:
        if isinstance(self.stats, Unavailable):
            return self.stats
        return _count(_inner(self.stats, "execution_summary"), "completed")

    def errors(self) -> Value:
        if isinstance(self.stats, Unavailable):
            return self.stats
        summary = _inner(self.stats, "error_summary")
        if not summary:
            return Unavailable("failed", "neuron-monitor does not say error_summary")
        return _sum(_count(summary, key) for key in summary)

    def latency_ns(self, quantile: str) -> Value:
        if isinstance(self.stats, Unavailable):
            return self.stats
        stats = _inner(self.stats, "latency_stats").get("device_latency")
        if stats is None:
            return Unavailable("absent", "no program ended in this period")
        return _nanoseconds(stats if isinstance(stats, dict) else {}, quantile)


def _core(
    index: int,
    processes: list[_Process],
    unseen: Unavailable | None,
    ecc: tuple[Value, Value],
) -> Core:
    users = [one for one in processes if index in one.used]
    if not users:
        zero: Value = 0 if unseen is None else unseen
        idle = unseen or Unavailable("absent", "no process uses this core")
        busy: Value = 0.0 if unseen is None else unseen
        return Core(busy, idle, zero, zero, zero, idle, idle, zero, *ecc, ())
    busy = _sum(one.busy_ratio(index) for one in users)
    if not isinstance(busy, Unavailable) and busy > 1 + _SLACK / 100:
        busy = Unavailable("failed", f"neuron-monitor: impossible value {100 * busy:g} %")
    alone = users[0] if len(users) == 1 else None
    shared = Unavailable("absent", "several processes use this core")
    return Core(
        busy,
        _longest([one.period_ns for one in users]),
        _sum(one.memory_bytes(index) for one in users),
        _sum(one.executions() for one in users),
        _sum(one.errors() for one in users),
        shared if alone is None else alone.latency_ns("p50"),
        shared if alone is None else alone.latency_ns("p99"),
        len(users),
        *ecc,
        tuple(sorted(one.pid for one in users if one.pid)),
    )


def _ecc(report: dict[str, Any]) -> dict[int, tuple[Value, Value]]:
    counters = _group(_inner(report, "system_data"), "neuron_hw_counters")
    if isinstance(counters, Unavailable):
        return {}
    devices = counters.get("neuron_devices")
    found = {}
    for entry in devices if isinstance(devices, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("neuron_device_index"), int):
            corrected, uncorrected = (
                _sum(_count(entry, f"{memory}_ecc_{kind}") for memory in ("mem", "sram"))
                for kind in ("corrected", "uncorrected")
            )
            found[entry["neuron_device_index"]] = (corrected, uncorrected)
    return found


def _group(parent: dict[str, Any], name: str) -> dict[str, Any] | Unavailable:
    """A group of metrics, or why there is none: each carries the tool's own error."""
    group = parent.get(name)
    if not isinstance(group, dict):
        return Unavailable("failed", f"neuron-monitor does not say {name}")
    if group.get("error"):
        return Unavailable("failed", f"neuron-monitor: {str(group['error'])[:100]}")
    return group


def _inner(parent: dict[str, Any], name: str) -> dict[str, Any]:
    inner = parent.get(name)
    return inner if isinstance(inner, dict) else {}


def _number(parent: dict[str, Any] | Unavailable, name: str) -> float | Unavailable:
    if isinstance(parent, Unavailable):
        return parent
    value = parent.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**62:
        said = "nothing" if value is None else repr(value)[:40]
        return Unavailable("failed", f"neuron-monitor says {said} for {name}")
    return value


def _count(parent: dict[str, Any], name: str) -> int | Unavailable:
    value = _number(parent, name)
    return value if isinstance(value, Unavailable) else int(value)


def _nanoseconds(parent: dict[str, Any] | Unavailable, name: str) -> int | Unavailable:
    value = _number(parent, name)
    return value if isinstance(value, Unavailable) else round(value * _SECOND_NS)


def _sum(values: Iterator[Any]) -> Any:
    """The sum, or the first reason there is none."""
    total = 0
    for value in values:
        if isinstance(value, Unavailable):
            return value
        total += value
    return total


def _longest(values: list[Any]) -> Any:
    """The largest, or the first reason that one is not known."""
    reasons = [value for value in values if isinstance(value, Unavailable)]
    return reasons[0] if reasons else max(values)
