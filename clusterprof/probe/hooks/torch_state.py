"""What PyTorch and Python say about themselves: read at the end of a step, about once a second.

The device's memory allocator counts how often it called the driver. Reading its counters costs some
tens of microseconds; only their differences are recorded.

Modes for debugging slow a job down, and are forgotten in it: PyTorch's profiler, anomaly detection,
a debugger or a coverage tool that follows every line, launches that wait for their kernel. A record
says which were on, and covers the time since the reading before.
"""

import os
import sys
from time import monotonic_ns
from typing import Any, Tuple

from .. import annotations, layout, ring

READ_INTERVAL_NS = 1_000_000_000
_COUNTERS = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_ooms")
_LAUNCH_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "HIP_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL")
_MONITORING_TOOLS = (
    (0, layout.LINE_TRACING),  # debuggers
    (1, layout.LINE_TRACING),  # coverage
    (2, layout.PYTHON_PROFILER),
)
"""Tools of `sys.monitoring` by their agreed numbers (PEP 669)."""

_read_ns = _modes_read_ns = 0
_previous: Tuple[int, ...] = ()
_unavailable = False


def record_allocator_counters(module: Any) -> None:
    """Read the counters if due; `module` is that of a device which the job has initialized."""
    global _read_ns, _previous, _unavailable
    now_ns = monotonic_ns()
    if _unavailable or (now_ns - _read_ns < READ_INTERVAL_NS and _previous):
        return
    reader = getattr(module, "memory_stats_as_nested_dict", None)
    if reader is None:
        return
    try:
        counters = reader()
        values = tuple([int(counters.get(name, -1)) for name in _COUNTERS])
    except (AttributeError, TypeError, RuntimeError):
        _unavailable = True
        return
    if _previous:
        differences = [
            -1 if value < 0 else max(0, value - previous)
            for value, previous in zip(values, _previous)
        ]
        ring.emit(layout.ALLOCATOR, _read_ns, now_ns, *differences)
    _read_ns, _previous = now_ns, values


def record_debug_modes() -> None:
    """Record which modes for debugging are on, if a reading is due."""
    global _modes_read_ns
    now_ns = monotonic_ns()
    if now_ns - _modes_read_ns < READ_INTERVAL_NS:
        return
    since_ns, _modes_read_ns = _modes_read_ns, now_ns
    modes = read_debug_modes()
    if modes and since_ns:
        ring.emit(layout.DEBUG_MODES, since_ns, now_ns, modes)


def read_debug_modes() -> int:
    """Read which modes for debugging are on in this process: bits as in `layout`."""
    modes = _modes_of_environment
    dive: Any = sys.modules.get(__name__.rpartition(".hooks.")[0] + ".dive")
    if dive is not None and dive.is_profiling():
        return modes  # its profiler is ours
    is_detecting = getattr(sys.modules.get("torch"), "is_anomaly_enabled", None)
    if is_detecting is not None and is_detecting():
        modes |= layout.ANOMALY_DETECTION
    if sys.gettrace() is not None:
        modes |= layout.LINE_TRACING
    if getattr(sys.modules.get("torch.autograd.profiler"), "_is_profiler_enabled", False):
        modes |= layout.TORCH_PROFILER
    elif sys.getprofile() is not None:  # PyTorch's profiler sets one, too
        modes |= layout.PYTHON_PROFILER
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if monitoring is not None:
        for tool, mode in _MONITORING_TOOLS:
            if monitoring.get_tool(tool) is not None:
                modes |= mode
    return modes


def _read_environment() -> int:
    """Read the modes that PyTorch and the driver take from variables when they start."""
    modes = 0
    if any(os.environ.get(name, "0") not in ("", "0") for name in _LAUNCH_VARIABLES):
        modes |= layout.BLOCKING_LAUNCHES
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        modes |= layout.COLLECTIVE_CHECKS
    return modes


_modes_of_environment = _read_environment()


def _clear_state() -> None:
    global _read_ns, _previous, _modes_read_ns
    _read_ns, _previous, _modes_read_ns = 0, (), 0


ring.after_fork.append(_clear_state)
annotations.before_step_end.append(record_debug_modes)
