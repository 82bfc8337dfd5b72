"""AWS Trainium and Inferentia through `neuron-monitor`; a device is one NeuronCore.

    neuron-monitor -c <1 s; cores, memory, executions, ECC>      kept running, one report a second
    neuron-ls --json-output                                      once: PCI and NUMA location

`gpu.busy_ns_total` is the sum over reports of utilization × period, so the device's
windows are one second long: lost time is measured, and its cause is known at that
resolution (docs/design/devices-and-isolation.md). Executions, their errors and times are those of
the processes that use a core; ECC events are those of the chip it belongs to. The event
`device-owner` reports which process uses a core.

The tools run below the helper process and end with it. A report that is missing, late
or garbled is a reason and restarts the totals: it never counts as an idle second.

The driver's sysfs is not used, because its nodes move from version to version. Instance
identity (`instance_info`), command lines, tags and names of models are never recorded.

## Source

`neuron-monitor` and `neuron-ls` of aws-neuronx-tools (AWS Neuron documentation, "Neuron
Monitor User Guide",
https://awsdocs-neuron.readthedocs-hosted.com/en/latest/tools/neuron-sys-tools/).

## Privilege

None with the driver's device nodes and the tools.

## Cost

A helper process and below it `neuron-monitor`, which reports once a second.

## Where it is blind

Events within a second and within an execution; the single engines of a core.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from clusterprof.agent.collectors.base import InProcessLibraryCollector
from clusterprof.agent.linux.reader_threads import LatestRows, PollingThread, RowReader, Value
from clusterprof.agent.linux.vendor_tools import find_program, run_streaming_tool, run_tool
from clusterprof.errors import Unavailable
from clusterprof.units import SECOND_NS

NEURON_MONITOR, NEURON_LS = "neuron-monitor", "neuron-ls"
FOLDER = "/opt/aws/neuron/bin"
INSTALL = "install aws-neuronx-tools"
_DRIVER_PATHS = ("/dev/neuron0", "/sys/module/neuron")


def find_tool(name: str, environ: Mapping[str, str]) -> str | None:
    """Find the path of a tool: on PATH, else in its package's folder; None when it is missing."""
    return find_program(name, environ, f"{FOLDER}/{name}")


def explain_absence(
    environ: Mapping[str, str], driver_paths: Sequence[str] = _DRIVER_PATHS
) -> Unavailable | None:
    """Return why this node has no Neuron device; None when it may have one."""
    if find_tool(NEURON_MONITOR, environ):
        return None
    if any(os.path.exists(path) for path in driver_paths):
        return Unavailable("absent", "neuron-monitor was not found", INSTALL)
    return Unavailable(
        "absent", "no Neuron device: neither its driver nor neuron-monitor was found"
    )


def open_library(mark: Callable[[int, str], None], skip: Collection[int] = ()) -> Any:
    """Start neuron-monitor.

    Raises: Unavailable when it is missing or lists no device.
    """
    return NeuronLibrary(mark, skip)


class GpuNeuronCollector(InProcessLibraryCollector):
    """Utilization, memory, executions, errors of the cores of Trainium and Inferentia."""

    name: ClassVar[str] = "gpu_neuron"
    interval_ns: ClassVar[int] = 1_000_000_000

    def open_library(self, mark: Callable[[int, str], None]) -> Any:
        """Start neuron-monitor below this process."""
        return open_library(mark)


ValueReport = int | float | Unavailable
_PERCENT_TOLERANCE = 1.0  # percentage points by which an average over a period may overshoot


class NeuronHardware(NamedTuple):
    """The devices of a node, in logical cores as its processes number them."""

    kind: str
    devices: int
    cores_per_device: int
    memory_bytes: int | None
    """Of each device."""


class CoreReport(NamedTuple):
    """Values of one core in one report."""

    busy_ratio: ValueReport
    period_ns: ValueReport
    memory_bytes: ValueReport
    executions: ValueReport
    """Of the period, as are errors and ECC events."""
    errors: ValueReport
    p50_ns: ValueReport
    p99_ns: ValueReport
    processes: ValueReport
    corrected: ValueReport
    uncorrected: ValueReport
    pids: tuple[int, ...]


def decode_report(line: bytes) -> dict[str, Any]:
    """Decode the JSON object in a line; `neuron-monitor` prints one per period.

        {"neuron_runtime_data": [{"pid": 1, "error": "", "report": {
            "neuroncore_counters": {"period": 1.0, "neuroncores_in_use": {
                "0": {"neuroncore_utilization": 42.0}}, "error": ""},
            "memory_used": {"neuron_runtime_used_bytes": {"neuron_device": …, "usage_breakdown": {
                "neuroncore_memory_usage": {"0": {"constants": …, "tensors": …}}}}},
            "execution_stats": {"error_summary": {"numerical": 0}, "execution_summary":
                {"completed": 123}, "latency_stats": {"device_latency": {"p50": 0.01, …}}}}}],
         "system_data": {"neuron_hw_counters": {"neuron_devices": [{"neuron_device_index": 0,
            "mem_ecc_corrected": 0, "mem_ecc_uncorrected": 0, "sram_ecc_corrected": 0, …}]}},
         "neuron_hardware_info": {"neuron_device_count": 16, "neuroncore_per_device_count": 2, …}}

    Utilization is in percent of the captured period; latencies are in seconds. Executions,
    errors and ECC events are counts of the period (neuron-monitor-prometheus.py sums them). An
    unused core is not listed: it executed nothing, if every process could be read.
    Source: Neuron Monitor User Guide.
    Raises: Unavailable when the line is no JSON object.
    """
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        excerpt = line[:60].decode("utf-8", "replace").strip()
        raise Unavailable("failed", f"neuron-monitor printed no report: {excerpt!r}")
    return parsed


def parse_hardware(report: dict[str, Any]) -> NeuronHardware:
    """Parse the devices of the node.

    Raises: Unavailable with the tool's own message when there are none.
    """
    info = _get_group(report, "neuron_hardware_info")
    if isinstance(info, Unavailable):
        raise Unavailable("absent", f"no Neuron device: {info.message}")
    devices, cores = (
        _parse_count(info, key) for key in ("neuron_device_count", "neuroncore_per_device_count")
    )
    if isinstance(devices, Unavailable) or isinstance(cores, Unavailable) or not devices * cores:
        raise Unavailable("absent", "neuron-monitor lists no Neuron device")
    memory = _parse_count(info, "neuron_device_memory_size")
    kind = info.get("neuron_device_type")
    return NeuronHardware(
        kind[:64] if isinstance(kind, str) and kind else "Neuron device",
        int(devices),
        int(cores),
        None if isinstance(memory, Unavailable) else int(memory),
    )


def parse_cores(report: dict[str, Any], hardware: NeuronHardware) -> list[CoreReport]:
    """Parse the values of every core of the node, by index."""
    runtimes = report.get("neuron_runtime_data")
    listed = runtimes if isinstance(runtimes, list) else []
    processes = [_ProcessReport(entry if isinstance(entry, dict) else {}) for entry in listed]
    unseen = next(
        (process.unknown_cores for process in processes if process.unknown_cores is not None), None
    )
    if runtimes is not None and not isinstance(runtimes, list):
        unseen = Unavailable("failed", "neuron-monitor lists no processes")
    ecc = _parse_ecc_counts(report)
    out = []
    for index in range(hardware.devices * hardware.cores_per_device):
        device = index // hardware.cores_per_device
        nothing = Unavailable("failed", "neuron-monitor does not report this device")
        out.append(_build_core(index, processes, unseen, ecc.get(device, (nothing, nothing))))
    return out


class _ProcessReport:
    """Values of one process that uses Neuron devices."""

    def __init__(self, entry: dict[str, Any]) -> None:
        pid = entry.get("pid")
        self.pid = pid if isinstance(pid, int) and pid > 0 else 0
        error = entry.get("error")
        report = entry.get("report")
        report = report if isinstance(report, dict) else {}
        counters = _get_group(report, "neuroncore_counters")
        self.unknown_cores: Unavailable | None = None
        """Why the cores that it uses are unknown; None = they are known."""
        self.used: dict[int, Any] = {}
        if error:
            self.unknown_cores = Unavailable("failed", f"neuron-monitor: {str(error)[:100]}")
        elif isinstance(counters, Unavailable):
            self.unknown_cores = counters
        else:
            used = counters.get("neuroncores_in_use") or {}
            if not isinstance(used, dict) or not all(str(key).isdigit() for key in used):
                self.unknown_cores = Unavailable("failed", "neuron-monitor lists no cores")
            else:
                self.used = {int(key): value for key, value in used.items()}
        self.period_ns = _parse_nanoseconds(counters, "period")
        self.memory = _get_group(report, "memory_used")
        self.stats = _get_group(report, "execution_stats")

    def busy_ratio(self, core: int) -> ValueReport:
        entry = self.used[core]
        percent = _parse_number(entry if isinstance(entry, dict) else {}, "neuroncore_utilization")
        if isinstance(percent, Unavailable):
            return percent
        if not 0 <= percent <= 100 + _PERCENT_TOLERANCE:
            return Unavailable("failed", f"neuron-monitor: impossible value {percent:g} %")
        return min(percent / 100, 1.0)

    def memory_bytes(self, core: int) -> ValueReport:
        if isinstance(self.memory, Unavailable):
            return self.memory
        used = _get_object(self.memory, "neuron_runtime_used_bytes")
        by_core = _get_object(_get_object(used, "usage_breakdown"), "neuroncore_memory_usage")
        parts = by_core.get(str(core))
        if isinstance(parts, dict) and parts:
            return _sum_values(_parse_count(parts, key) for key in parts)
        if len(self.used) == 1:
            return _parse_count(used, "neuron_device" if "neuron_device" in used else "device")
        return Unavailable("absent", "neuron-monitor does not report it per core")

    def executions(self) -> ValueReport:
        if isinstance(self.stats, Unavailable):
            return self.stats
        return _parse_count(_get_object(self.stats, "execution_summary"), "completed")

    def errors(self) -> ValueReport:
        if isinstance(self.stats, Unavailable):
            return self.stats
        summary = _get_object(self.stats, "error_summary")
        if not summary:
            return Unavailable("failed", "neuron-monitor does not report error_summary")
        return _sum_values(_parse_count(summary, key) for key in summary)

    def latency_ns(self, quantile: str) -> ValueReport:
        if isinstance(self.stats, Unavailable):
            return self.stats
        stats = _get_object(self.stats, "latency_stats").get("device_latency")
        if stats is None:
            return Unavailable("absent", "no program ended in this period")
        return _parse_nanoseconds(stats if isinstance(stats, dict) else {}, quantile)


def _build_core(
    index: int,
    processes: list[_ProcessReport],
    unseen: Unavailable | None,
    ecc: tuple[ValueReport, ValueReport],
) -> CoreReport:
    users = [process for process in processes if index in process.used]
    if not users:
        zero: ValueReport = 0 if unseen is None else unseen
        idle = unseen or Unavailable("absent", "no process uses this core")
        busy: ValueReport = 0.0 if unseen is None else unseen
        return CoreReport(busy, idle, zero, zero, zero, idle, idle, zero, *ecc, ())
    busy = _sum_values(process.busy_ratio(index) for process in users)
    if not isinstance(busy, Unavailable) and busy > 1 + _PERCENT_TOLERANCE / 100:
        busy = Unavailable("failed", f"neuron-monitor: impossible value {100 * busy:g} %")
    only_user = users[0] if len(users) == 1 else None
    shared = Unavailable("absent", "several processes use this core")
    return CoreReport(
        busy,
        _find_longest([process.period_ns for process in users]),
        _sum_values(process.memory_bytes(index) for process in users),
        _sum_values(process.executions() for process in users),
        _sum_values(process.errors() for process in users),
        shared if only_user is None else only_user.latency_ns("p50"),
        shared if only_user is None else only_user.latency_ns("p99"),
        len(users),
        *ecc,
        tuple(sorted(process.pid for process in users if process.pid)),
    )


def _parse_ecc_counts(report: dict[str, Any]) -> dict[int, tuple[ValueReport, ValueReport]]:
    counters = _get_group(_get_object(report, "system_data"), "neuron_hw_counters")
    if isinstance(counters, Unavailable):
        return {}
    devices = counters.get("neuron_devices")
    counts = {}
    for entry in devices if isinstance(devices, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("neuron_device_index"), int):
            corrected, uncorrected = (
                _sum_values(
                    _parse_count(entry, f"{memory}_ecc_{kind}") for memory in ("mem", "sram")
                )
                for kind in ("corrected", "uncorrected")
            )
            counts[entry["neuron_device_index"]] = (corrected, uncorrected)
    return counts


def _get_group(parent: dict[str, Any], name: str) -> dict[str, Any] | Unavailable:
    """Return a group of metrics, or why it is missing: each carries the tool's own error."""
    group = parent.get(name)
    if not isinstance(group, dict):
        return Unavailable("failed", f"neuron-monitor does not report {name}")
    if group.get("error"):
        return Unavailable("failed", f"neuron-monitor: {str(group['error'])[:100]}")
    return group


def _get_object(parent: dict[str, Any], name: str) -> dict[str, Any]:
    inner = parent.get(name)
    return inner if isinstance(inner, dict) else {}


def _parse_number(parent: dict[str, Any] | Unavailable, name: str) -> float | Unavailable:
    if isinstance(parent, Unavailable):
        return parent
    value = parent.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**62:
        excerpt = "nothing" if value is None else repr(value)[:40]
        return Unavailable("failed", f"neuron-monitor reports {excerpt} for {name}")
    return value


def _parse_count(parent: dict[str, Any], name: str) -> int | Unavailable:
    value = _parse_number(parent, name)
    return value if isinstance(value, Unavailable) else int(value)


def _parse_nanoseconds(parent: dict[str, Any] | Unavailable, name: str) -> int | Unavailable:
    value = _parse_number(parent, name)
    return value if isinstance(value, Unavailable) else round(value * SECOND_NS)


def _sum_values(values: Iterator[Any]) -> Any:
    """Return the sum, or the first reason why a value is unknown."""
    total = 0
    for value in values:
        if isinstance(value, Unavailable):
            return value
        total += value
    return total


def _find_longest(values: list[Any]) -> Any:
    """Return the largest value, or the first reason why a value is unknown."""
    reasons = [value for value in values if isinstance(value, Unavailable)]
    return reasons[0] if reasons else max(values)


SIGNALS = (
    "gpu.busy_ns_total",
    "gpu.core_busy_ratio",
    "gpu.averaged_over_ns",
    "gpu.memory_used_bytes",
    "gpu.executions_total",
    "gpu.execution_errors_total",
    "gpu.execution_p50_ns",
    "gpu.execution_p99_ns",
    "gpu.processes_count",
    "gpu.ecc_corrected_total",
    "gpu.ecc_uncorrected_total",
)
PERIOD_SECONDS = 1
_SILENCE_LIMIT_NS = 5_000_000_000
_FIRST_SECONDS, _LS_SECONDS = 10.0, 5.0
_MAX_REPORT_DELAY_NS = 500_000_000  # by this much a report may be late without a missed period
_COUNTER_START = 1_000_000  # has no meaning
# The period must be whole seconds: "1.0s" and "500ms" are ignored and give 5 s.
_CONFIG = {
    "period": f"{PERIOD_SECONDS}s",
    "neuron_runtimes": [
        {
            "tag_filter": ".*",
            "metrics": [
                {"type": "neuroncore_counters"},
                {"type": "memory_used"},
                {"type": "execution_stats"},
            ],
        }
    ],
    "system_metrics": [{"type": "neuron_hw_counters"}],
}


class PeriodCounter:
    """A counter that sums the amounts of the periods: 1 s with 42 % busy adds 0.42 s.

    A missed period would look like an idle one, so the counter restarts after a gap, slightly
    lower each time: a reader that takes differences treats that window as unknown.
    """

    def __init__(self) -> None:
        self.value = self._start = _COUNTER_START
        self._hole = True  # activity before the first report is not part of the recording

    def add(self, amount: Value, missed: bool) -> Value:
        """Add the amount of a period and return the counter.

        missed: periods before this one were missed, so the counter restarts.
        """
        if isinstance(amount, Unavailable):
            self._hole = True
            return amount
        if missed or self._hole:
            self._start -= 1
            self.value, self._hole = self._start, False
        else:
            self.value += int(amount)
        return self.value


class CoreDevice(RowReader):
    """One core: its totals, and the process that uses it."""

    def __init__(self, feed: LatestRows, index: int) -> None:
        super().__init__(feed, index)
        self.totals = [PeriodCounter() for _ in range(5)]
        self._owner = 0

    def build_row(self, core: CoreReport, missed: bool) -> list[Value]:
        """Return a core's values after a report; `missed`: time before it was not reported."""
        ratio, period_ns = core.busy_ratio, core.period_ns
        busy_ns: Value = ratio
        if not isinstance(ratio, Unavailable):
            busy_ns = 0
            if ratio:
                busy_ns = period_ns
                if not isinstance(period_ns, Unavailable):
                    busy_ns = round(ratio * period_ns)
        busy, executions, errors, corrected, uncorrected = (
            total.add(amount, missed)
            for total, amount in zip(
                self.totals,
                (busy_ns, core.executions, core.errors, core.corrected, core.uncorrected),
            )
        )
        owner = core.pids[0] if len(core.pids) == 1 else 0
        if owner and owner != self._owner:
            self.notes.append(("device-owner", {"pid": owner}))
        self._owner = owner or self._owner
        return [
            busy,
            ratio,
            period_ns,
            core.memory_bytes,
            executions,
            errors,
            core.p50_ns,
            core.p99_ns,
            core.processes,
            corrected,
            uncorrected,
        ]


class NeuronLibrary:
    """The cores of a node.

    Raises: Unavailable when there are none or the tool does not report them.
    """

    signals = SIGNALS

    def __init__(self, mark: Callable[[int, str], None], skip: Collection[int] = ()) -> None:
        path = find_tool(NEURON_MONITOR, os.environ)
        if path is None:
            raise Unavailable("absent", "neuron-monitor was not found", INSTALL)
        seconds = _SILENCE_LIMIT_NS // 10**9
        silence = Unavailable("failed", f"neuron-monitor has printed nothing for {seconds} s")
        self._path = path
        self._latest = LatestRows(len(SIGNALS), _SILENCE_LIMIT_NS, lambda: silence)
        self._known: NeuronHardware | None = None
        self._before_ns: int | None = None
        self._period_ns = PERIOD_SECONDS * 10**9
        self._opened = threading.Event()
        self.devices: list[CoreDevice] = []
        self._poller = PollingThread(self._latest, self._work, 0.0)
        self._poller.start()
        if not self._opened.wait(_FIRST_SECONDS) or self._known is None:
            newest = self._latest.newest
            self._poller.stop()
            why = newest[1] if newest is not None else None
            raise why if isinstance(why, Unavailable) else silence
        self.inventory = _build_inventory(self._known)

    def adopt(self, index: int) -> CoreDevice:
        """Return a core; none is ever skipped, because the tool is a separate process."""
        return self.devices[index]

    def close(self) -> None:
        """Stop the tool."""
        self._poller.stop()

    end_tools = close

    def _work(self, wanted: Callable[[], bool]) -> None:
        self._before_ns = None
        config = os.memfd_create("neuron-monitor.json", 0)
        try:
            os.write(config, json.dumps(_CONFIG).encode())
            argv = [self._path, "-c", f"/proc/self/fd/{config}"]
            run_streaming_tool(argv, self._handle_line, wanted, keep_fds=[config])
        except Unavailable as reason:
            if self._known is None:
                self._latest.put(reason)
                self._opened.set()
            raise
        finally:
            os.close(config)

    def _handle_line(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            parsed = decode_report(line)
            if self._known is None:
                self._set_hardware(parse_hardware(parsed))
        except Unavailable as reason:
            self._before_ns = None
            self._latest.put(reason)
            if self._known is None and reason.kind == "absent":
                self._opened.set()
            return
        assert self._known is not None
        now_ns = self._latest.clock()
        cores = parse_cores(parsed, self._known)
        periods = [core.period_ns for core in cores if isinstance(core.period_ns, int)]
        # an idle node does not report its period
        self._period_ns = max(periods, default=self._period_ns)
        before_ns, self._before_ns = self._before_ns, now_ns
        missed = before_ns is None or now_ns - before_ns > self._period_ns + _MAX_REPORT_DELAY_NS
        self._latest.put(
            [device.build_row(core, missed) for device, core in zip(self.devices, cores)]
        )
        self._opened.set()

    def _set_hardware(self, hardware: NeuronHardware) -> None:
        count = hardware.devices * hardware.cores_per_device
        self.devices = [CoreDevice(self._latest, index) for index in range(count)]
        self._known = hardware


def _build_inventory(hardware: NeuronHardware) -> list[dict[str, Any]]:
    """Build the header entries: id, vendor, name, index, chip, its memory, location."""
    locations = _list_device_locations()
    out = []
    for index in range(hardware.devices * hardware.cores_per_device):
        device = index // hardware.cores_per_device
        entry: dict[str, Any] = {"id": f"neuron-{device}-core-{index}", "vendor": "aws"}
        entry |= {"index": index, "emulated": False, "name": hardware.kind, "chip": device}
        if hardware.memory_bytes is not None:
            entry["chip_memory_bytes"] = hardware.memory_bytes
        out.append(entry | locations.get(device, {}))
    return out


def _list_device_locations() -> dict[int, dict[str, Any]]:
    """Return each device's location from `neuron-ls`; {} when it reports nothing useful."""
    path = find_tool(NEURON_LS, os.environ)
    try:
        entries = json.loads(run_tool([path, "--json-output"], _LS_SECONDS)) if path else []
    except (Unavailable, ValueError, RecursionError):
        return {}
    locations = {}
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("neuron_device"), int):
            continue
        location: dict[str, Any] = {}
        if isinstance(entry.get("bdf"), str):
            location["pci_bus_id"] = entry["bdf"][:32]
        try:
            numa = int(entry.get("numa_node", -1))  # a string in JSON
        except (TypeError, ValueError):
            numa = -1
        if numa >= 0:  # -1: the machine does not report it
            location["numa_node"] = numa
        locations[entry["neuron_device"]] = location
    return locations
