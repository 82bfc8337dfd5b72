"""PyTorch's allocator on the device: how often it went to the driver, about once a second.

Reading its counters costs some tens of microseconds, so it is done at the end of a step and at most
once a second. Of the counters only differences are recorded.
"""

from time import monotonic_ns
from typing import Any, Tuple

from .. import layout, ring

EVERY_NS = 1_000_000_000
_NAMES = ("num_alloc_retries", "num_device_alloc", "num_device_free", "num_ooms")

_read_ns = 0
_before: Tuple[int, ...] = ()
_mute = False


def look(cuda: Any) -> None:
    """Read the counters if it is time; `cuda` is torch.cuda, which the job has initialised."""
    global _read_ns, _before, _mute
    now = monotonic_ns()
    if _mute or (now - _read_ns < EVERY_NS and _before):
        return
    reader = getattr(cuda, "memory_stats_as_nested_dict", None)
    if reader is None:
        return
    try:
        told = reader()
    except (AttributeError, RuntimeError):
        _mute = True
        return
    values = tuple([int(told.get(name, -1)) for name in _NAMES])
    if _before:
        rises = [-1 if n < 0 else max(0, n - b) for n, b in zip(values, _before)]
        ring.emit(layout.ALLOCATOR, _read_ns, now, *rises)
    _read_ns, _before = now, values


def _forget() -> None:
    global _read_ns, _before
    _read_ns, _before = 0, ()


ring.after_fork.append(_forget)
