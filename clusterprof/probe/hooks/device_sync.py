"""Device synchronization: `.item()`, copies to the host, `synchronize()`, once a device is in use.

A host that waits until the device has finished all its work leaves its queue empty, and
the next kernel is launched to an idle device. Harmful patterns have many calls: those
that begin within 5 ms of the first are one record, with their number and total
duration. `empty_cache()`, which returns memory to the driver, is recorded too.
"""

import functools
import sys
from _thread import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any, Callable, Optional

from .. import annotations, handle_error, layout, remove_own_frame, ring
from . import wrap

MERGE_WINDOW_NS = 5_000_000
_SYNC_METHODS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_began_ns = _ended_ns = _waited_ns = _count = 0
_last_wait = (0, 0)
"""Thread and start, ns, of the last wait that was added."""


def install(module: ModuleType, device: str = "cuda") -> bool:
    """Wrap the synchronizing functions that exist: of torch.Tensor, the device, torch.accelerator.

    device: what PyTorch calls the device.
    """
    tensor: Any = module.Tensor  # type: ignore[attr-defined]
    is_on_device = wrap.make_device_check(tensor, device)
    for name in _SYNC_METHODS:
        if hasattr(tensor, name):
            _wrap_sync(tensor, name, is_on_device)
    owner: Any = module.__dict__.get(device)
    for synchronizer in (owner, module.__dict__.get("accelerator")):
        if hasattr(synchronizer, "synchronize"):
            _wrap_sync(synchronizer, "synchronize", None)
    if hasattr(owner, "empty_cache"):
        _wrap_empty_cache(owner)
    return True


def _wrap_empty_cache(owner: Any) -> None:
    original = owner.empty_cache
    if getattr(original, "_is_clusterprof", False):
        return

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        start = monotonic_ns()
        result = original(*arguments, **keywords)
        try:
            if _probe.on:  # type: ignore[attr-defined]
                ring.emit(layout.HOST_WORK, start, monotonic_ns(), layout.FREEING_MEMORY, -1)
        except BaseException as error:
            handle_error(error)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    owner.empty_cache = wrapper


def _wrap_sync(owner: Any, name: str, is_on_device: Optional[Callable[[Any], bool]]) -> None:
    """Wrap a method of tensors, or a function of a module if `is_on_device` is None."""
    original = getattr(owner, name)
    if getattr(original, "_is_clusterprof", False):
        return

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if wrap.is_compiling() or (is_on_device is not None and not is_on_device(arguments[0])):
            return original(*arguments, **keywords)
        start = monotonic_ns()
        try:
            result = original(*arguments, **keywords)
        except BaseException as error:
            remove_own_frame(error)
            raise
        add_sync_wait(start)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def add_sync_wait(start: int) -> None:
    """Add a host wait for the device that began at `start`, ns."""
    global _began_ns, _ended_ns, _waited_ns, _count, _last_wait
    try:
        thread = get_ident()
        # A function that calls another one of them counts once: the inner one has been added.
        is_outer = start <= _last_wait[1] and thread == _last_wait[0]
        if is_outer or not _probe.on:  # type: ignore[attr-defined]
            return
        _last_wait = thread, start
        now_ns = monotonic_ns()
        if _count and start - _began_ns >= MERGE_WINDOW_NS:
            record_syncs()
        if not _count:
            _began_ns = start
        _ended_ns = now_ns
        _waited_ns += now_ns - start
        _count += 1
    except BaseException as error:
        handle_error(error)


def record_syncs() -> None:
    """Record the accumulated waits; called before a step ends, so that they lie within it."""
    global _waited_ns, _count
    if _count:
        count, waited_ns = _count, _waited_ns
        _count = _waited_ns = 0
        ring.emit(layout.SYNC, _began_ns, _ended_ns, waited_ns, count)


def _clear_syncs() -> None:
    global _waited_ns, _count
    _count = _waited_ns = 0


ring.after_fork.append(_clear_syncs)
annotations.before_step_end.append(record_syncs)
