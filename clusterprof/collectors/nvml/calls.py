"""All that is asked of a GPU, as one table.

Percent, MHz, mW, mJ, KB (1,000 bytes), KiB and MiB become ratios, hertz, watts, joules and bytes
here. GPM, where the GPU has it, gives means that leave no gap; without it PCIe traffic is a look of
20 ms, for which NVML makes its caller wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from clusterprof.collectors.nvml import gpm, health
from clusterprof.collectors.nvml.busy import BusyIntegral
from clusterprof.collectors.nvml.errors import FATAL, NOT_FOUND
from clusterprof.collectors.nvml.gpm import Gpm, Value
from clusterprof.errors import Unavailable

Values = tuple[Value, ...]
_EVERY_SAMPLE, _SECOND_NS = 0, 1_000_000_000
GPM_NS = 150_000_000  # every second sample at 10 Hz: NVML wants more than 100 ms between two
NEVER_NS = 1 << 62
_PIDS_AT_MOST = 256
_BUSY_PERCENT, _CONTRADICTED_TIMES = 90, 5
_DEAD = Unavailable(
    "failed", "GPM counts nothing while the GPU is busy", "look for Xid lines in the kernel log"
)


class Memory:
    """What the calls of one device leave for each other."""

    __slots__ = ("clock", "contradicted", "gpm", "integral", "means", "most", "notes", "percent",
                 "processes")  # fmt: skip

    def __init__(self, clock: Callable[[], int], notes: deque[tuple[str, dict[str, Any]]]) -> None:
        self.clock = clock
        self.notes = notes
        self.integral = BusyIntegral()
        self.percent: int | None = None
        """The utilisation of this sample; None = not available."""
        self.gpm: Gpm | Unavailable = gpm.UNSUPPORTED
        self.contradicted = 0
        """How often in a row GPM and the utilisation excluded each other."""
        self.means: dict[int, Value] = {}
        """What GPM said last; empty = nothing."""
        self.most = (math.inf, math.inf)
        """Bytes per second that PCIe and NVLink can carry at most, one way."""
        self.processes: list[list[int]] | None = None
        """[pid, bytes] of those that were told last."""


class Call:
    """One call of NVML: its name, how often it is made, the signals it fills, how it is read."""

    __slots__ = ("every_ns", "name", "read", "signals")

    def __init__(
        self,
        name: str,
        every_ns: int,
        signals: tuple[str, ...],
        read: Callable[[Any, Any, Memory], Values],
    ) -> None:
        self.name, self.every_ns, self.signals, self.read = name, every_ns, signals, read


def _utilisation(nvml: Any, handle: Any, memory: Memory) -> Values:
    memory.percent = None
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    memory.percent = _percent(rates.gpu)
    return (memory.percent / 100, _percent(rates.memory) / 100)


def _busy_time(nvml: Any, handle: Any, memory: Memory) -> Values:
    samples: list[tuple[int, int]] = []
    has_buffer = True
    try:
        kind = nvml.NVML_GPU_UTILIZATION_SAMPLES
        _, found = nvml.nvmlDeviceGetSamples(handle, kind, memory.integral.last_us)
        samples = [(one.timeStamp, _percent(one.sampleValue.uiVal)) for one in found]
    except nvml.NVMLError as error:
        # "Not found" is how an idle GPU answers; a driver without a buffer leaves the snapshots.
        if error.value in FATAL or memory.percent is None:
            raise
        has_buffer = error.value == NOT_FOUND
    if not samples and memory.percent is None:
        raise Unavailable("failed", "NVML: neither samples nor utilisation")
    memory.integral.add(samples, memory.percent, memory.clock(), has_buffer)
    return (memory.integral.total_ns,)


def _throttle(nvml: Any, handle: Any, _: Memory) -> Values:
    try:
        return (nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),)
    except (nvml.NVMLError_FunctionNotFound, AttributeError):  # its name before driver 535
        return (nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),)


def _memory(nvml: Any, handle: Any, _: Memory) -> Values:
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return (info.used, info.total)


def _violation(nvml: Any, handle: Any, policy: int) -> int:
    return int(nvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime)  # nanoseconds


def _violation_call(name: str) -> Call:
    """The call for a kind of slowing that is rare."""

    def read(nvml: Any, handle: Any, _: Memory) -> Values:
        return (_violation(nvml, handle, getattr(nvml, f"NVML_PERF_POLICY_{name}")),)

    signals = (f"gpu.{name.lower()}_violation_ns_total",)
    return Call(f"GetViolationStatus:{name}", 10 * _SECOND_NS, signals, read)


def _ecc(nvml: Any, handle: Any, kind: int) -> int:
    return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))


def _percent(value: int) -> int:
    if not 0 <= value <= 100:
        raise ValueError(f"impossible value {value} %")
    return value


def _processes(nvml: Any, handle: Any, memory: Memory) -> Values:
    found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    held = sorted([int(one.pid), int(one.usedGpuMemory or 0)] for one in found)[:_PIDS_AT_MOST]
    if held != memory.processes:
        memory.processes = held
        memory.notes.append(("device-processes", {"held": held}))
    return (len(found),)


def no_gpm(nvml: Any, handle: Any, memory: Memory) -> Values:
    """Say why there is no GPM."""
    if isinstance(memory.gpm, Unavailable):
        raise memory.gpm.with_traceback(None)
    raise gpm.UNSUPPORTED.with_traceback(None)


def _dead(means: dict[int, Value], memory: Memory) -> bool:
    """True once GPM has said for a second that nothing happens on a GPU that NVML calls busy.

    Counters have been seen to stay at 0 after an error; that must not pass for waiting.
    """
    busy = memory.percent is not None and memory.percent >= _BUSY_PERCENT
    nothing = means.get(gpm.SM) == 0 and means.get(gpm.DRAM) == 0
    memory.contradicted = memory.contradicted + 1 if busy and nothing else 0
    return memory.contradicted >= _CONTRADICTED_TIMES


def gpm_call(metrics: tuple[int, ...]) -> Call:
    """Return the call that reads GPM for these metrics of a whole GPU."""

    def read(nvml: Any, handle: Any, memory: Memory) -> Values:
        assert isinstance(memory.gpm, Gpm)
        means = memory.gpm.read()
        if _dead(means, memory):
            return (_DEAD,) * len(metrics)
        pcie, nvlink = memory.most
        most = {gpm.NVLINK_RECEIVE: nvlink, gpm.NVLINK_TRANSMIT: nvlink,
                gpm.PCIE_RECEIVE: pcie, gpm.PCIE_TRANSMIT: pcie}  # fmt: skip
        return tuple(_at_most(means[metric], most.get(metric, math.inf)) for metric in metrics)

    signals = tuple(BY_METRIC[metric] for metric in metrics)
    return Call("GpmMetricsGet", GPM_NS, signals, read)


def _pcie(nvml: Any, handle: Any, memory: Memory, way: int) -> Values:
    return (_at_most(nvml.nvmlDeviceGetPcieThroughput(handle, way) * 1000, memory.most[0]),)


def _at_most(value: Value, most: float) -> Value:
    """A rate, or that it is more than its link can carry."""
    if isinstance(value, Unavailable) or value <= most:
        return value
    return Unavailable("failed", f"NVML: impossible value {value:g} bytes/s for its link")


def _links_up(nvml: Any, handle: Any, _: Memory) -> Values:
    return (sum(health.nvlinks(nvml, handle)),)


BY_METRIC = {
    gpm.SM: "gpu.sm_active_ratio",
    gpm.OCCUPANCY: "gpu.sm_occupancy_ratio",
    gpm.TENSOR: "gpu.tensor_active_ratio",
    gpm.DRAM: "gpu.memory_bandwidth_ratio",
    gpm.NVLINK_RECEIVE: "gpu.nvlink_receive_bytes_per_second",
    gpm.NVLINK_TRANSMIT: "gpu.nvlink_transmit_bytes_per_second",
    gpm.PCIE_RECEIVE: "gpu.pcie_receive_bytes_per_second",
    gpm.PCIE_TRANSMIT: "gpu.pcie_transmit_bytes_per_second",
}
"""The signal that each metric of GPM fills."""
_PCIE = (BY_METRIC[gpm.PCIE_RECEIVE], BY_METRIC[gpm.PCIE_TRANSMIT])
_GPM_SIGNALS = tuple(signal for signal in BY_METRIC.values() if signal not in _PCIE)
WITHOUT_GPM = (
    Call("GpmQueryDeviceSupport", NEVER_NS, _GPM_SIGNALS, no_gpm),
    Call("GetPcieThroughput:RX", _SECOND_NS, _PCIE[:1],
          lambda n, h, m: _pcie(n, h, m, n.NVML_PCIE_UTIL_RX_BYTES)),
    Call("GetPcieThroughput:TX", _SECOND_NS, _PCIE[1:],
          lambda n, h, m: _pcie(n, h, m, n.NVML_PCIE_UTIL_TX_BYTES)),
)  # fmt: skip

CALLS: tuple[Call, ...] = (
    Call("GetUtilizationRates", _EVERY_SAMPLE, ("gpu.busy_ratio", "gpu.memory_busy_ratio"),
          _utilisation),
    Call("GetSamples", _EVERY_SAMPLE, ("gpu.busy_ns_total",), _busy_time),
    Call("GetClockInfo:SM", _EVERY_SAMPLE, ("gpu.sm_clock_hertz",),
          lambda n, h, _: (n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM) * 1_000_000,)),
    Call("GetCurrentClocksEventReasons", _EVERY_SAMPLE, ("gpu.throttle_bits",), _throttle),
    Call("GetMemoryInfo", _SECOND_NS, ("gpu.memory_used_bytes", "gpu.memory_total_bytes"), _memory),
    Call("GetPowerUsage", _EVERY_SAMPLE, ("gpu.power_watts",),
          lambda n, h, _: (n.nvmlDeviceGetPowerUsage(h) / 1000,)),
    Call("GetEnforcedPowerLimit", 10 * _SECOND_NS, ("gpu.power_limit_watts",),
          lambda n, h, _: (n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,)),
    Call("GetTotalEnergyConsumption", _SECOND_NS, ("gpu.energy_joules_total",),
          lambda n, h, _: (n.nvmlDeviceGetTotalEnergyConsumption(h) / 1000,)),
    Call("GetTemperature", _SECOND_NS, ("gpu.temperature_celsius",),
          lambda n, h, _: (n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),)),
    Call("GetClockInfo:MEM", _SECOND_NS, ("gpu.memory_clock_hertz",),
          lambda n, h, _: (n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM) * 1_000_000,)),
    Call("GetMaxClockInfo:SM", 10 * _SECOND_NS, ("gpu.sm_clock_max_hertz",),
          lambda n, h, _: (n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM) * 1_000_000,)),
    Call("GetViolationStatus:THERMAL", _SECOND_NS, ("gpu.thermal_violation_ns_total",),
          lambda n, h, _: (_violation(n, h, n.NVML_PERF_POLICY_THERMAL),)),
    Call("GetViolationStatus:POWER", _SECOND_NS, ("gpu.power_violation_ns_total",),
          lambda n, h, _: (_violation(n, h, n.NVML_PERF_POLICY_POWER),)),
    *(_violation_call(name) for name in ("BOARD_LIMIT", "RELIABILITY", "SYNC_BOOST")),
    *WITHOUT_GPM,
    Call("GetCurrPcieLinkGeneration", _SECOND_NS, ("gpu.pcie_generation_count",),
          lambda n, h, _: (n.nvmlDeviceGetCurrPcieLinkGeneration(h),)),
    Call("GetCurrPcieLinkWidth", _SECOND_NS, ("gpu.pcie_width_count",),
          lambda n, h, _: (n.nvmlDeviceGetCurrPcieLinkWidth(h),)),
    Call("GetPcieReplayCounter", _SECOND_NS, ("gpu.pcie_replays_total",),
          lambda n, h, _: (n.nvmlDeviceGetPcieReplayCounter(h),)),
    Call("GetTotalEccErrors:CORRECTED", 10 * _SECOND_NS, ("gpu.ecc_corrected_total",),
          lambda n, h, _: (_ecc(n, h, n.NVML_MEMORY_ERROR_TYPE_CORRECTED),)),
    Call("GetTotalEccErrors:UNCORRECTED", 10 * _SECOND_NS, ("gpu.ecc_uncorrected_total",),
          lambda n, h, _: (_ecc(n, h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),)),
    Call("GetRemappedRows", 60 * _SECOND_NS,
          ("gpu.remapped_rows_corrected_count", "gpu.remapped_rows_uncorrected_count",
           "gpu.remap_pending_count", "gpu.remap_failed_count"),
          lambda n, h, _: health.remapped_rows(n, h)),
    Call("GetRetiredPages", 60 * _SECOND_NS,
          ("gpu.retired_pages_count", "gpu.retirement_pending_count"),
          lambda n, h, _: health.retired_pages(n, h)),
    Call("GetFieldValues:NVLINK_BYTES", _SECOND_NS,
          ("gpu.nvlink_receive_bytes_total", "gpu.nvlink_transmit_bytes_total"),
          lambda n, h, _: health.nvlink_bytes(n, h)),
    Call("GetNvLinkState", 10 * _SECOND_NS, ("gpu.nvlink_active_count",), _links_up),
    Call("GetFieldValues:NVLINK_ERRORS", 10 * _SECOND_NS,
          ("gpu.nvlink_replays_total", "gpu.nvlink_recoveries_total",
           "gpu.nvlink_crc_errors_total"),
          lambda n, h, _: health.nvlink_errors(n, h)),
    Call("GetComputeRunningProcesses", 10 * _SECOND_NS, ("gpu.processes_count",), _processes),
)  # fmt: skip
"""All that may be asked of a GPU without GPM: name, how often, the signals it fills."""

SIGNALS: tuple[str, ...] = tuple(signal for call in CALLS for signal in call.signals)
"""Names of all values that a device may have."""
