"""Which calls are made of which device: a whole GPU, one that is split up (MIG), an instance.

A device has the signals that its kind can have; what this very device does not tell has a reason.
"""

from __future__ import annotations

from typing import Any

from clusterprof.collectors.nvml import gpm
from clusterprof.collectors.nvml.calls import (
    BY_METRIC,
    CALLS,
    GPM_NS,
    NEVER_NS,
    WITHOUT_GPM,
    Call,
    Memory,
    Values,
    gpm_call,
    no_gpm,
)
from clusterprof.collectors.nvml.gpm import Gpm
from clusterprof.errors import Unavailable

OF_INSTANCE = (gpm.GRAPHICS, gpm.SM, gpm.OCCUPANCY, gpm.TENSOR, gpm.DRAM)
"""Metrics of GPM that are asked of a MIG instance."""
NO_UTILISATION = Unavailable(
    "absent", "NVML does not tell the utilisation of MIG instances, and there is no GPM"
)
SHARED = Unavailable("absent", "GPM tells it of a GPU instance, which others share here")
OLD_DRIVER = Unavailable(
    "absent", "beside MIG GPM is used from driver 550 on", "update the NVIDIA driver"
)
GONE = Unavailable("failed", "the MIG instance is no longer there")
_NOT_READ = Unavailable("failed", "GPM was not read")
_BUSY = ("gpu.busy_ratio", "gpu.busy_ns_total")
_MEANS = tuple(BY_METRIC[metric] for metric in OF_INSTANCE[1:])
_UTILISATION = frozenset({"GetUtilizationRates", "GetSamples", WITHOUT_GPM[0].name})
_NVLINK = frozenset({"GetFieldValues:NVLINK_BYTES", "GetNvLinkState",
                     "GetFieldValues:NVLINK_ERRORS"})  # fmt: skip
_PROCESSES = "GetComputeRunningProcesses"
_AMPERE = 8  # major number of the compute capability


def metrics(entry: dict[str, Any]) -> tuple[int, ...]:
    """Return the metrics of GPM that a GPU can have."""
    links = {gpm.NVLINK_RECEIVE, gpm.NVLINK_TRANSMIT}
    has_links = entry.get("nvlink_count") != 0
    return tuple(metric for metric in BY_METRIC if has_links or metric not in links)


def plan(entry: dict[str, Any], counters: Gpm | Unavailable) -> tuple[Call, ...]:
    """Return the calls for a GPU that is not split up; `entry` is what is known of it.

    Without NVLink nothing is asked of links; from Ampere on rows are remapped, before pages were
    retired. Of a GPU that is too old for GPM one signal says so for all.
    """
    first = CALLS.index(WITHOUT_GPM[0])
    before, after = CALLS[:first], CALLS[first + len(WITHOUT_GPM) :]
    if isinstance(counters, Gpm):
        middle: tuple[Call, ...] = (gpm_call(metrics(entry)),)
    else:
        known = (BY_METRIC[metric] for metric in metrics(entry))
        signals = tuple(one for one in known if one in WITHOUT_GPM[0].signals)
        if counters in (gpm.UNSUPPORTED, gpm.OFF):
            signals = signals[:1]
        middle = (Call(WITHOUT_GPM[0].name, NEVER_NS, signals, no_gpm), *WITHOUT_GPM[1:])
    return _that_apply((*before, *middle, *after), entry)


def plan_of_split(entry: dict[str, Any]) -> tuple[Call, ...]:
    """Return the calls for a GPU in MIG mode: who uses how much of it is told by its instances."""
    return tuple(
        Call(call.name, call.every_ns, call.signals, _counted) if call.name == _PROCESSES else call
        for call in _that_apply(CALLS, entry)
        if call.name not in _UTILISATION
    )


def plan_of_instance(has_gpm: bool) -> tuple[Call, ...]:
    """Return the calls for a compute instance: what is told of it, and not of its GPU."""
    own = {call.name: call for call in CALLS}
    every_ns, later_ns = (GPM_NS, 0) if has_gpm else (NEVER_NS, NEVER_NS)
    return (
        Call("GpmMetricsGet", every_ns, _BUSY, _instance_busy if has_gpm else _instance_silent),
        own["GetMemoryInfo"],
        Call("GpmMetricsGet", later_ns, _MEANS, _instance_means if has_gpm else no_gpm),
        own[_PROCESSES],
    )


def _that_apply(calls: tuple[Call, ...], entry: dict[str, Any]) -> tuple[Call, ...]:
    left_out = set(_NVLINK) if entry.get("nvlink_count") == 0 else set()
    major = str(entry.get("compute_capability", "")).partition(".")[0]
    if major.isdecimal():
        left_out.add("GetRetiredPages" if int(major) >= _AMPERE else "GetRemappedRows")
    return tuple(call for call in calls if call.name not in left_out)


def _counted(nvml: Any, handle: Any, memory: Memory) -> Values:
    """The processes of all instances; which is whose, the instances say."""
    return (len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),)


def _instance_silent(nvml: Any, handle: Any, memory: Memory) -> Values:
    why = memory.gpm
    if isinstance(why, Gpm) or why is gpm.UNSUPPORTED:
        why = NO_UTILISATION
    return (why, why)


def _instance_busy(nvml: Any, handle: Any, memory: Memory) -> Values:
    """Busy time by GPM's activity of the graphics engine: kernels of the instance were resident.

    Means that leave no gap add up to an integral; after a gap of more than 10 s it begins anew.
    """
    assert isinstance(memory.gpm, Gpm)
    memory.means = {}
    means = memory.means = memory.gpm.read()
    share = means[gpm.GRAPHICS]
    if isinstance(share, Unavailable):
        memory.integral.total_ns = 0
        return (share, share)
    if not memory.gpm.unbroken:
        memory.integral.total_ns = 0
    memory.integral.total_ns += round(share * memory.gpm.elapsed_ns)
    return (share, memory.integral.total_ns)


def _instance_means(nvml: Any, handle: Any, memory: Memory) -> Values:
    return tuple(memory.means.get(metric, _NOT_READ) for metric in OF_INSTANCE[1:])
