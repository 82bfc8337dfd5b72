"""Which calls are made of which device: a whole GPU, one that is split up (MIG), an instance.

Every device has the same signals in the same order; what is not told of it has a reason.
"""

from __future__ import annotations

from typing import Any

from clusterprof.collectors.nvml import gpm
from clusterprof.collectors.nvml.calls import (
    CALLS,
    NEVER_NS,
    WITH_GPM,
    WITHOUT_GPM,
    Call,
    Memory,
    Values,
    no_gpm,
)
from clusterprof.collectors.nvml.gpm import Gpm
from clusterprof.errors import Unavailable

OF_INSTANCE = (gpm.GRAPHICS, gpm.SM, gpm.OCCUPANCY, gpm.TENSOR, gpm.DRAM)
"""Metrics of GPM that are asked of a MIG instance."""
OF_GPU = Unavailable("absent", "told of the whole GPU only, which is a device of its own")
SPLIT = Unavailable("absent", "the GPU is in MIG mode: its instances are devices of their own")
NO_UTILISATION = Unavailable(
    "absent", "NVML does not tell the utilisation of MIG instances, and there is no GPM"
)
SHARED = Unavailable("absent", "GPM tells it of a GPU instance, which others share here")
OLD_DRIVER = Unavailable(
    "absent", "beside MIG GPM is used from driver 550 on", "update the NVIDIA driver"
)
GONE = Unavailable("failed", "the MIG instance is no longer there")
_BUSY = ("gpu.busy_ratio", "gpu.memory_busy_ratio", "gpu.busy_ns_total")
_PROCESSES = "GetComputeRunningProcesses"
_KEPT = frozenset({"GetMemoryInfo", _PROCESSES})


def plan(has_gpm: bool) -> tuple[Call, ...]:
    """Return the calls for a GPU that is not split up."""
    if not has_gpm:
        return CALLS
    first = CALLS.index(WITHOUT_GPM[0])
    return (*CALLS[:first], WITH_GPM, *CALLS[first + len(WITHOUT_GPM) :])


def plan_of_split() -> tuple[Call, ...]:
    """Return the calls for a GPU in MIG mode: who uses how much of it is told by its instances."""
    busy = {"GetUtilizationRates", "GetSamples", "GpmQueryDeviceSupport"}
    return tuple(
        _told(call, SPLIT)
        if call.name in busy
        else Call(call.name, call.every_ns, call.signals, _counted)
        if call.name == _PROCESSES
        else call
        for call in CALLS
    )


def plan_of_instance(has_gpm: bool) -> tuple[Call, ...]:
    """Return the calls for a compute instance."""
    utilisation, samples, *others = CALLS
    assert utilisation.signals + samples.signals == _BUSY
    first = (
        (Call("GpmMigMetricsGet", WITH_GPM.every_ns, _BUSY, _instance_busy),)
        if has_gpm
        else (Call("GpmQueryDeviceSupport", NEVER_NS, _BUSY, _instance_silent),)
    )
    later = []
    for call in others:
        if call is WITHOUT_GPM[0]:
            every_ns = 0 if has_gpm else NEVER_NS
            read = _instance_means if has_gpm else no_gpm
            later.append(Call("GpmMigMetrics", every_ns, call.signals, read))
        else:
            later.append(call if call.name in _KEPT else _told(call, OF_GPU))
    return (*first, *later)


def _told(call: Call, reason: Unavailable) -> Call:
    """The call as it is where there is only a reason instead of its values."""

    def read(nvml: Any, handle: Any, memory: Memory) -> Values:
        return (reason,) * len(call.signals)

    return Call(call.name, NEVER_NS, call.signals, read)


def _counted(nvml: Any, handle: Any, memory: Memory) -> Values:
    """The processes of all instances; which is whose, the instances say."""
    return (len(nvml.nvmlDeviceGetComputeRunningProcesses(handle)),)


def _instance_silent(nvml: Any, handle: Any, memory: Memory) -> Values:
    why = memory.gpm
    if isinstance(why, Gpm) or why is gpm.UNSUPPORTED:
        why = NO_UTILISATION
    return (why, OF_GPU, why)


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
        return (share, OF_GPU, share)
    if not memory.gpm.unbroken:
        memory.integral.total_ns = 0
    memory.integral.total_ns += round(share * memory.gpm.elapsed_ns)
    return (share, OF_GPU, memory.integral.total_ns)


def _instance_means(nvml: Any, handle: Any, memory: Memory) -> Values:
    links = (OF_GPU, OF_GPU)
    if not memory.means:
        failed = Unavailable("failed", "GPM was not read")
        return (*(failed for _ in OF_INSTANCE[1:]), *links)
    return (*(memory.means[metric] for metric in OF_INSTANCE[1:]), *links)
