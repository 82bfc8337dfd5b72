"""PyTorch's device allocator: how often it called the driver, read about once a second.

Reading its counters costs some tens of microseconds, so it is done at the end of a step
and at most once a second. Only differences of the counters are recorded.
"""

from time import monotonic_ns
from typing import Any, Tuple

from .. import layout, ring

READ_INTERVAL_NS = 1_000_000_000
_COUNTERS = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_ooms")

_read_ns = 0
_previous: Tuple[int, ...] = ()
_unavailable = False


def record_allocator_counters(module: Any) -> None:
    """Read the counters if due; `module` is that of a device which the job has initialized."""
    global _read_ns, _previous, _unavailable
    now = monotonic_ns()
    if _unavailable or (now - _read_ns < READ_INTERVAL_NS and _previous):
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
        ring.emit(layout.ALLOCATOR, _read_ns, now, *differences)
    _read_ns, _previous = now, values


def _clear_allocator_state() -> None:
    global _read_ns, _previous
    _read_ns, _previous = 0, ()


ring.after_fork.append(_clear_allocator_state)
