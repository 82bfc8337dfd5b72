"""All NVML calls for a GPU, as one table.

Percent, MHz, mW, mJ, KB (1,000 bytes), KiB and MiB are converted to ratios, hertz,
watts, joules and bytes here. GPM, where the GPU has it, gives gapless means; without it
PCIe traffic is a measurement of 20 ms during which NVML blocks its caller.

The calls for each kind of device: a whole GPU, a partitioned one (MIG), an instance.

A device has the signals that its kind can have; a value that this device does not
provide has a reason.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from clusterprof.agent.collectors.gpu import nvml_counters
from clusterprof.agent.collectors.gpu.nvml_counters import BusyIntegral, Gpm, LinkWatch, Value
from clusterprof.agent.collectors.gpu.nvml_errors import FATAL_CODES, NOT_FOUND_CODE
from clusterprof.errors import Unavailable
from clusterprof.units import SECOND_NS

Values = tuple[Value, ...]
_EVERY_SAMPLE = 0
GPM_NS = 150_000_000  # every second sample at 10 Hz: NVML requires more than 100 ms between two
MAX_CALL_LOAD_RATIO, MAX_GPM_LOAD_RATIO = 0.002, 0.005
NEVER_NS = 1 << 62
_MAX_PIDS = 256
_LINK_ERRORS = "GetFieldValues:NVLINK_ERRORS"
_BUSY_PERCENT, _MAX_CONTRADICTIONS = 90, 5
_NO_PERIOD = Unavailable("failed", "NVML: no sampling period has ended yet")
_MAX_WATTS = 100_000.0
"""W; more than any device or board draws. Some drivers answer 0xFFFFFFFF mW for "unknown"."""
_GPM_STUCK = Unavailable(
    "failed", "GPM counts nothing while the GPU is busy", "check for Xid lines in the kernel log"
)


class DeviceState:
    """State that the calls of one device share."""

    __slots__ = (
        "clock",
        "contradictions",
        "counts_busy",
        "gpm",
        "integral",
        "links",
        "max_rates",
        "means",
        "notes",
        "percent",
        "processes",
        "wall_clock",
    )

    def __init__(
        self,
        clock: Callable[[], int],
        notes: deque[tuple[str, dict[str, Any]]],
        wall_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self.clock = clock
        self.wall_clock = wall_clock
        """The clock of the driver's timestamps, ns."""
        self.notes = notes
        self.integral = BusyIntegral()
        self.links = LinkWatch()
        self.percent: int | None = None
        """Utilization of this sample; None = not available."""
        self.gpm: Gpm | Unavailable = nvml_counters.GPM_UNSUPPORTED
        self.counts_busy = False
        """True while GPM, which knows when each of its means begins and ends, counts busy time."""
        self.contradictions = 0
        """Number of consecutive contradictions between GPM and the utilization."""
        self.means: dict[int, Value] = {}
        """Last values of GPM; empty = none."""
        self.max_rates = (math.inf, math.inf)
        """Maximum bytes per second and direction of PCIe and of NVLink."""
        self.processes: list[list[int]] | None = None
        """[pid, bytes] of the processes reported last."""


class NvmlCall:
    """One call of NVML: its name, its interval, the signals it fills, and its reader function."""

    __slots__ = ("every_ns", "max_load_ratio", "name", "read", "signals")

    def __init__(
        self,
        name: str,
        every_ns: int,
        signals: tuple[str, ...],
        read: Callable[[Any, Any, DeviceState], Values],
        max_load_ratio: float = MAX_CALL_LOAD_RATIO,
    ) -> None:
        self.name, self.every_ns, self.signals, self.read = name, every_ns, signals, read
        self.max_load_ratio = max_load_ratio
        """Part of the time that it may take; where it is slow it is made less often."""


def _read_utilization(nvml: Any, handle: Any, memory: DeviceState) -> Values:
    memory.percent = None
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    memory.percent = _check_percent(rates.gpu)
    return (memory.percent / 100, _check_percent(rates.memory) / 100)


def _read_busy_time(nvml: Any, handle: Any, memory: DeviceState) -> Values:
    if memory.counts_busy and memory.integral.until_ns is not None:
        return (memory.integral.total_ns, memory.integral.until_ns)
    samples: list[tuple[int, int]] = []
    has_buffer = True
    try:
        kind = nvml.NVML_GPU_UTILIZATION_SAMPLES
        _, buffer = nvml.nvmlDeviceGetSamples(handle, kind, memory.integral.last_us)
        samples = [
            (sample.timeStamp, _check_percent(sample.sampleValue.uiVal)) for sample in buffer
        ]
    except nvml.NVMLError as error:
        # An idle GPU returns "not found"; with a driver without a buffer the snapshots are used.
        if error.value in FATAL_CODES or memory.percent is None:
            raise
        has_buffer = error.value == NOT_FOUND_CODE
    if not samples and memory.percent is None:
        raise Unavailable("failed", "NVML: neither samples nor utilization")
    integral = memory.integral
    integral.add(samples, memory.percent, memory.clock(), memory.wall_clock(), has_buffer)
    if integral.until_ns is None:
        return (integral.total_ns, _NO_PERIOD)
    return (integral.total_ns, integral.until_ns)


def _read_throttle_reasons(nvml: Any, handle: Any, _: DeviceState) -> Values:
    try:
        return (nvml.nvmlDeviceGetCurrentClocksEventReasons(handle),)
    # the function's name before driver 535
    except (nvml.NVMLError_FunctionNotFound, AttributeError):
        return (nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),)


def _read_power(nvml: Any, handle: Any, _: DeviceState) -> Values:
    watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
    if watts > _MAX_WATTS:
        return (Unavailable("failed", f"NVML: impossible value {watts:g} W"),)
    return (watts,)


def _read_memory(nvml: Any, handle: Any, _: DeviceState) -> Values:
    info = nvml.nvmlDeviceGetMemoryInfo(handle)
    return (info.used, info.total)


def _read_violation_ns(nvml: Any, handle: Any, policy: int) -> int:
    return int(nvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime)  # nanoseconds


def _build_violation_call(name: str) -> NvmlCall:
    """Build the call for a rare throttle reason."""

    def read(nvml: Any, handle: Any, _: DeviceState) -> Values:
        return (_read_violation_ns(nvml, handle, getattr(nvml, f"NVML_PERF_POLICY_{name}")),)

    signals = (f"gpu.{name.lower()}_violation_ns_total",)
    return NvmlCall(f"GetViolationStatus:{name}", 10 * SECOND_NS, signals, read)


def _read_ecc_errors(nvml: Any, handle: Any, kind: int) -> int:
    return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))


def _check_percent(value: int) -> int:
    if not 0 <= value <= 100:
        raise ValueError(f"impossible value {value} %")
    return value


def _read_processes(nvml: Any, handle: Any, memory: DeviceState) -> Values:
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    memory_by_pid = sorted(
        [int(process.pid), int(process.usedGpuMemory or 0)] for process in processes
    )[:_MAX_PIDS]
    if memory_by_pid != memory.processes:
        memory.processes = memory_by_pid
        memory.notes.append(("device-processes", {"held": memory_by_pid}))
    return (len(processes),)


def report_missing_gpm(nvml: Any, handle: Any, memory: DeviceState) -> Values:
    """Raise the reason why there is no GPM.

    Raises: Unavailable always.
    """
    if isinstance(memory.gpm, Unavailable):
        raise memory.gpm.with_traceback(None)
    raise nvml_counters.GPM_UNSUPPORTED.with_traceback(None)


def _is_gpm_stuck(means: dict[int, Value], memory: DeviceState) -> bool:
    """Return whether GPM has shown no activity for a second on a GPU that NVML calls busy.

    Counters have been observed to stay at 0 after an error; that must not be taken for
    waiting.
    """
    busy = memory.percent is not None and memory.percent >= _BUSY_PERCENT
    nothing = means.get(nvml_counters.SM) == 0 and means.get(nvml_counters.DRAM) == 0
    memory.contradictions = memory.contradictions + 1 if busy and nothing else 0
    return memory.contradictions >= _MAX_CONTRADICTIONS


def build_gpm_call(metrics: tuple[int, ...]) -> NvmlCall:
    """Build the call that reads these GPM metrics of a whole GPU."""

    def read(nvml: Any, handle: Any, memory: DeviceState) -> Values:
        assert isinstance(memory.gpm, Gpm)
        memory.counts_busy = False
        means = memory.gpm.read()
        if _is_gpm_stuck(means, memory):
            return (_GPM_STUCK,) * len(metrics)
        _count_busy_time(memory, means[nvml_counters.GRAPHICS])
        pcie, nvlink = memory.max_rates
        limits = {
            nvml_counters.NVLINK_RECEIVE: nvlink,
            nvml_counters.NVLINK_TRANSMIT: nvlink,
            nvml_counters.PCIE_RECEIVE: pcie,
            nvml_counters.PCIE_TRANSMIT: pcie,
        }
        return tuple(_check_rate(means[metric], limits.get(metric, math.inf)) for metric in metrics)

    signals = tuple(SIGNAL_BY_METRIC[metric] for metric in metrics)
    return NvmlCall("GpmMetricsGet", GPM_NS, signals, read, MAX_GPM_LOAD_RATIO)


def _count_busy_time(memory: DeviceState, share: Value) -> None:
    """Add the activity of the compute engine since the last reading to the busy time.

    Without it the samples of the driver go on from where it ended.
    """
    if isinstance(share, Unavailable):
        return
    assert isinstance(memory.gpm, Gpm)
    ended_ns = memory.gpm.taken_ns
    driver_ns = memory.wall_clock() - (memory.clock() - ended_ns)
    memory.integral.add_mean(share, memory.gpm.elapsed_ns, ended_ns, driver_ns)
    memory.counts_busy = True


def _read_pcie_rate(nvml: Any, handle: Any, memory: DeviceState, direction: int) -> Values:
    return (
        _check_rate(
            nvml.nvmlDeviceGetPcieThroughput(handle, direction) * 1000, memory.max_rates[0]
        ),
    )


def _check_rate(value: Value, limit: float) -> Value:
    """Return a rate, or a reason if it exceeds its link's maximum."""
    if isinstance(value, Unavailable) or value <= limit:
        return value
    return Unavailable("failed", f"NVML: impossible value {value:g} bytes/s for its link")


def _count_active_links(nvml: Any, handle: Any, memory: DeviceState) -> Values:
    up = nvml_counters.read_nvlink_states(nvml, handle)
    change = memory.links.note_states(nvml, handle, up, memory.clock())
    if change is not None:
        memory.notes.append(("nvlink-states", change))
    return (sum(up),)


def _build_link_error_call(is_blackwell: bool) -> NvmlCall:
    """Build the call for errors of all NVLinks; when they grow, an event says of which links."""

    def read(nvml: Any, handle: Any, memory: DeviceState) -> Values:
        now_ns = memory.clock()
        sums, errors = memory.links.read_errors(nvml, handle, is_blackwell, now_ns)
        if errors is not None:
            memory.notes.append(("nvlink-errors", errors))
        return sums

    signals = nvml_counters.COUNT_SIGNALS if is_blackwell else nvml_counters.ERROR_SIGNALS
    return NvmlCall(_LINK_ERRORS, 10 * SECOND_NS, signals, read)


SIGNAL_BY_METRIC = {
    nvml_counters.SM: "gpu.sm_active_ratio",
    nvml_counters.OCCUPANCY: "gpu.sm_occupancy_ratio",
    nvml_counters.TENSOR: "gpu.tensor_active_ratio",
    nvml_counters.DRAM: "gpu.memory_bandwidth_ratio",
    nvml_counters.NVLINK_RECEIVE: "gpu.nvlink_receive_bytes_per_second",
    nvml_counters.NVLINK_TRANSMIT: "gpu.nvlink_transmit_bytes_per_second",
    nvml_counters.PCIE_RECEIVE: "gpu.pcie_receive_bytes_per_second",
    nvml_counters.PCIE_TRANSMIT: "gpu.pcie_transmit_bytes_per_second",
}
"""The signal that each GPM metric fills."""
_PCIE_SIGNALS = (
    SIGNAL_BY_METRIC[nvml_counters.PCIE_RECEIVE],
    SIGNAL_BY_METRIC[nvml_counters.PCIE_TRANSMIT],
)
_GPM_SIGNALS = tuple(signal for signal in SIGNAL_BY_METRIC.values() if signal not in _PCIE_SIGNALS)
CALLS_WITHOUT_GPM = (
    NvmlCall("GpmQueryDeviceSupport", NEVER_NS, _GPM_SIGNALS, report_missing_gpm),
    NvmlCall(
        "GetPcieThroughput:RX",
        SECOND_NS,
        _PCIE_SIGNALS[:1],
        lambda n, h, m: _read_pcie_rate(n, h, m, n.NVML_PCIE_UTIL_RX_BYTES),
    ),
    NvmlCall(
        "GetPcieThroughput:TX",
        SECOND_NS,
        _PCIE_SIGNALS[1:],
        lambda n, h, m: _read_pcie_rate(n, h, m, n.NVML_PCIE_UTIL_TX_BYTES),
    ),
)

CALLS: tuple[NvmlCall, ...] = (
    NvmlCall(
        "GetUtilizationRates",
        _EVERY_SAMPLE,
        ("gpu.busy_ratio", "gpu.memory_busy_ratio"),
        _read_utilization,
    ),
    NvmlCall(
        "GetSamples", _EVERY_SAMPLE, ("gpu.busy_ns_total", "gpu.busy_until_ns"), _read_busy_time
    ),
    NvmlCall(
        "GetClockInfo:SM",
        _EVERY_SAMPLE,
        ("gpu.sm_clock_hertz",),
        lambda n, h, _: (n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM) * 1_000_000,),
    ),
    NvmlCall(
        "GetCurrentClocksEventReasons",
        _EVERY_SAMPLE,
        ("gpu.throttle_bits",),
        _read_throttle_reasons,
    ),
    NvmlCall(
        "GetMemoryInfo",
        SECOND_NS,
        ("gpu.memory_used_bytes", "gpu.memory_total_bytes"),
        _read_memory,
    ),
    NvmlCall("GetPowerUsage", _EVERY_SAMPLE, ("gpu.power_watts",), _read_power),
    NvmlCall(
        "GetEnforcedPowerLimit",
        10 * SECOND_NS,
        ("gpu.power_limit_watts",),
        lambda n, h, _: (n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,),
    ),
    NvmlCall(
        "GetTotalEnergyConsumption",
        SECOND_NS,
        ("gpu.energy_joules_total",),
        lambda n, h, _: (n.nvmlDeviceGetTotalEnergyConsumption(h) / 1000,),
    ),
    NvmlCall(
        "GetTemperature",
        SECOND_NS,
        ("gpu.temperature_celsius",),
        lambda n, h, _: (n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),),
    ),
    NvmlCall(
        "GetClockInfo:MEM",
        SECOND_NS,
        ("gpu.memory_clock_hertz",),
        lambda n, h, _: (n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM) * 1_000_000,),
    ),
    NvmlCall(
        "GetMaxClockInfo:SM",
        10 * SECOND_NS,
        ("gpu.sm_clock_max_hertz",),
        lambda n, h, _: (n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM) * 1_000_000,),
    ),
    NvmlCall(
        "GetViolationStatus:THERMAL",
        SECOND_NS,
        ("gpu.thermal_violation_ns_total",),
        lambda n, h, _: (_read_violation_ns(n, h, n.NVML_PERF_POLICY_THERMAL),),
    ),
    NvmlCall(
        "GetViolationStatus:POWER",
        SECOND_NS,
        ("gpu.power_violation_ns_total",),
        lambda n, h, _: (_read_violation_ns(n, h, n.NVML_PERF_POLICY_POWER),),
    ),
    *(_build_violation_call(name) for name in ("BOARD_LIMIT", "RELIABILITY", "SYNC_BOOST")),
    *CALLS_WITHOUT_GPM,
    NvmlCall(
        "GetCurrPcieLinkGeneration",
        SECOND_NS,
        ("gpu.pcie_generation_count",),
        lambda n, h, _: (n.nvmlDeviceGetCurrPcieLinkGeneration(h),),
    ),
    NvmlCall(
        "GetCurrPcieLinkWidth",
        SECOND_NS,
        ("gpu.pcie_width_count",),
        lambda n, h, _: (n.nvmlDeviceGetCurrPcieLinkWidth(h),),
    ),
    NvmlCall(
        "GetPcieReplayCounter",
        SECOND_NS,
        ("gpu.pcie_replays_total",),
        lambda n, h, _: (n.nvmlDeviceGetPcieReplayCounter(h),),
    ),
    NvmlCall(
        "GetTotalEccErrors:CORRECTED",
        10 * SECOND_NS,
        ("gpu.ecc_corrected_total",),
        lambda n, h, _: (_read_ecc_errors(n, h, n.NVML_MEMORY_ERROR_TYPE_CORRECTED),),
    ),
    NvmlCall(
        "GetTotalEccErrors:UNCORRECTED",
        10 * SECOND_NS,
        ("gpu.ecc_uncorrected_total",),
        lambda n, h, _: (_read_ecc_errors(n, h, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),),
    ),
    NvmlCall(
        "GetRemappedRows",
        60 * SECOND_NS,
        (
            "gpu.remapped_rows_corrected_count",
            "gpu.remapped_rows_uncorrected_count",
            "gpu.remap_pending_count",
            "gpu.remap_failed_count",
        ),
        lambda n, h, _: nvml_counters.read_remapped_rows(n, h),
    ),
    NvmlCall(
        "GetRetiredPages",
        60 * SECOND_NS,
        ("gpu.retired_pages_count", "gpu.retirement_pending_count"),
        lambda n, h, _: nvml_counters.read_retired_pages(n, h),
    ),
    NvmlCall(
        "GetFieldValues:NVLINK_BYTES",
        SECOND_NS,
        ("gpu.nvlink_receive_bytes_total", "gpu.nvlink_transmit_bytes_total"),
        lambda n, h, _: nvml_counters.read_nvlink_bytes(n, h),
    ),
    NvmlCall("GetNvLinkState", 10 * SECOND_NS, ("gpu.nvlink_active_count",), _count_active_links),
    _build_link_error_call(is_blackwell=False),
    NvmlCall(
        "GetComputeRunningProcesses", 10 * SECOND_NS, ("gpu.processes_count",), _read_processes
    ),
)
"""All calls for a GPU without GPM: name, interval, signals."""

SIGNALS: tuple[str, ...] = tuple(signal for call in CALLS for signal in call.signals)
"""Names of all values that a device may have."""


INSTANCE_METRICS = (
    nvml_counters.GRAPHICS,
    nvml_counters.SM,
    nvml_counters.OCCUPANCY,
    nvml_counters.TENSOR,
    nvml_counters.DRAM,
)
"""GPM metrics that are read for a MIG instance."""
NO_UTILIZATION = Unavailable(
    "absent", "NVML does not report the utilization of MIG instances, and there is no GPM"
)
INSTANCE_SHARED = Unavailable(
    "absent", "GPM reports it per GPU instance, which several compute instances share here"
)
GPM_DRIVER_TOO_OLD = Unavailable(
    "absent", "GPM is used in MIG mode from driver 550 on", "update the NVIDIA driver"
)
INSTANCE_GONE = Unavailable("failed", "the MIG instance no longer exists")
_NOT_READ = Unavailable("failed", "GPM was not read")
_BUSY_SIGNALS = ("gpu.busy_ratio", "gpu.busy_ns_total")
_MEAN_SIGNALS = tuple(SIGNAL_BY_METRIC[metric] for metric in INSTANCE_METRICS[1:])
_UTILIZATION_CALLS = frozenset({"GetUtilizationRates", "GetSamples", CALLS_WITHOUT_GPM[0].name})
_NVLINK_CALLS = frozenset({"GetFieldValues:NVLINK_BYTES", "GetNvLinkState", _LINK_ERRORS})
_PROCESSES_CALL = "GetComputeRunningProcesses"
_AMPERE, _BLACKWELL = 8, 10  # major numbers of the compute capability


def list_gpm_metrics(entry: dict[str, Any]) -> tuple[int, ...]:
    """Return the GPM metrics that a GPU can have."""
    links = {nvml_counters.NVLINK_RECEIVE, nvml_counters.NVLINK_TRANSMIT}
    has_links = entry.get("nvlink_count") != 0
    return tuple(metric for metric in SIGNAL_BY_METRIC if has_links or metric not in links)


def plan_gpu_calls(entry: dict[str, Any], counters: Gpm | Unavailable) -> tuple[NvmlCall, ...]:
    """Return the calls for a GPU that is not partitioned; `entry` has its known facts.

    Without NVLink no link is read; GPUs since Ampere remap rows, older ones retire pages.
    For a GPU that is too old for GPM one signal carries the reason for all.
    """
    first = CALLS.index(CALLS_WITHOUT_GPM[0])
    before, after = CALLS[:first], CALLS[first + len(CALLS_WITHOUT_GPM) :]
    middle: tuple[NvmlCall, ...] = ()
    if isinstance(counters, Gpm):
        # First, so that the busy time of the same sample is that of its means.
        before = (build_gpm_call(list_gpm_metrics(entry)), *before)
    else:
        gpm_signals = (SIGNAL_BY_METRIC[metric] for metric in list_gpm_metrics(entry))
        signals = tuple(signal for signal in gpm_signals if signal in CALLS_WITHOUT_GPM[0].signals)
        if counters in (
            nvml_counters.GPM_UNSUPPORTED,
            nvml_counters.GPM_OFF,
            nvml_counters.GPM_TOO_SLOW,
        ):
            signals = signals[:1]
        middle = (
            NvmlCall(CALLS_WITHOUT_GPM[0].name, NEVER_NS, signals, report_missing_gpm),
            *CALLS_WITHOUT_GPM[1:],
        )
    return _filter_applicable((*before, *middle, *after), entry)


def plan_partitioned_gpu_calls(entry: dict[str, Any]) -> tuple[NvmlCall, ...]:
    """Return the calls for a GPU in MIG mode; its use is reported by its instances."""
    return tuple(
        NvmlCall(call.name, call.every_ns, call.signals, _count_processes)
        if call.name == _PROCESSES_CALL
        else call
        for call in _filter_applicable(CALLS, entry)
        if call.name not in _UTILIZATION_CALLS
    )


def plan_instance_calls(has_gpm: bool) -> tuple[NvmlCall, ...]:
    """Return the calls for a compute instance: values of its own, not of its GPU."""
    call_by_name = {call.name: call for call in CALLS}
    every_ns, later_ns = (GPM_NS, 0) if has_gpm else (NEVER_NS, NEVER_NS)
    return (
        NvmlCall(
            "GpmMetricsGet",
            every_ns,
            _BUSY_SIGNALS,
            _read_instance_busy if has_gpm else _report_missing_busy,
            MAX_GPM_LOAD_RATIO,
        ),
        call_by_name["GetMemoryInfo"],
        NvmlCall(
            "GpmMetricsGet",
            later_ns,
            _MEAN_SIGNALS,
            _get_instance_means if has_gpm else report_missing_gpm,
        ),
        call_by_name[_PROCESSES_CALL],
    )


def _filter_applicable(calls: tuple[NvmlCall, ...], entry: dict[str, Any]) -> tuple[NvmlCall, ...]:
    left_out = set(_NVLINK_CALLS) if entry.get("nvlink_count") == 0 else set()
    major = str(entry.get("compute_capability", "")).partition(".")[0]
    if major.isdecimal():
        left_out.add("GetRetiredPages" if int(major) >= _AMPERE else "GetRemappedRows")
    applicable = [call for call in calls if call.name not in left_out]
    if major.isdecimal() and int(major) >= _BLACKWELL:  # it counts errors of links otherwise
        instead = {_LINK_ERRORS: _build_link_error_call(is_blackwell=True)}
        applicable = [instead.get(call.name, call) for call in applicable]
    return tuple(applicable)


def _count_processes(nvml: Any, handle: Any, memory: DeviceState) -> Values:
    """Return the number of processes of all instances; the instances report which are theirs."""
    return (len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),)


def _report_missing_busy(nvml: Any, handle: Any, memory: DeviceState) -> Values:
    why = memory.gpm
    if isinstance(why, Gpm) or why is nvml_counters.GPM_UNSUPPORTED:
        why = NO_UTILIZATION
    return (why, why)


def _read_instance_busy(nvml: Any, handle: Any, memory: DeviceState) -> Values:
    """Return busy share and time from GPM's graphics engine activity: kernels were resident.

    Gapless means add up to an integral; after a gap of more than 10 s it restarts.
    """
    assert isinstance(memory.gpm, Gpm)
    memory.means = {}
    means = memory.means = memory.gpm.read()
    share = means[nvml_counters.GRAPHICS]
    if isinstance(share, Unavailable):
        memory.integral.restart()
        return (share, share)
    if not memory.gpm.is_gapless:
        memory.integral.restart()
    memory.integral.total_ns += round(share * memory.gpm.elapsed_ns)
    return (share, memory.integral.total_ns)


def _get_instance_means(nvml: Any, handle: Any, memory: DeviceState) -> Values:
    return tuple(memory.means.get(metric, _NOT_READ) for metric in INSTANCE_METRICS[1:])
