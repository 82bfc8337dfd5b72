"""All that is asked of a GPU, as one table.

Percent, MHz, mW, mJ and KB (1,000 bytes) become ratios, hertz, watts, joules and bytes here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clusterprof.collectors.nvml.busy import BusyIntegral
from clusterprof.collectors.nvml.errors import FATAL, NOT_FOUND
from clusterprof.errors import Unavailable

Values = tuple[int | float, ...]
_EVERY_SAMPLE, _SECOND_NS = 0, 1_000_000_000


class Memory:
    """What the calls of one device leave for each other."""

    __slots__ = ("clock", "integral", "percent")

    def __init__(self, clock: Callable[[], int]) -> None:
        self.clock = clock
        self.integral = BusyIntegral()
        self.percent: int | None = None
        """The utilisation of this sample; None = not available."""


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


def _ecc(nvml: Any, handle: Any, kind: int) -> int:
    return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))


def _percent(value: int) -> int:
    if not 0 <= value <= 100:
        raise ValueError(f"impossible value {value} %")
    return value


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
    Call("GetPcieThroughput:RX", _SECOND_NS, ("gpu.pcie_receive_bytes_per_second",),
          lambda n, h, _: (n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_RX_BYTES) * 1000,)),
    Call("GetPcieThroughput:TX", _SECOND_NS, ("gpu.pcie_transmit_bytes_per_second",),
          lambda n, h, _: (n.nvmlDeviceGetPcieThroughput(h, n.NVML_PCIE_UTIL_TX_BYTES) * 1000,)),
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
    Call("GetComputeRunningProcesses", 10 * _SECOND_NS, ("gpu.processes_count",),
          lambda n, h, _: (len(n.nvmlDeviceGetComputeRunningProcesses(h)),)),
)  # fmt: skip
"""All that is asked of a GPU: name of the call, how often, and the signals it fills."""

SIGNALS: tuple[str, ...] = tuple(signal for call in CALLS for signal in call.signals)
"""Names of a device's values, in the order of `Device.sample()`."""
