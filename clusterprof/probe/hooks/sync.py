"""Device synchronization: `.item()`, copies to the host, `synchronize()`, once CUDA is in use.

A host that waits until the device has finished all its work leaves its queue empty, and
the next kernel is launched to an idle device. Harmful patterns have many calls: those
that begin within 5 ms of the first are one record, with their number and total
duration. `empty_cache()`, which returns memory to the driver, is recorded too.
"""

import functools
import sys
from time import monotonic_ns
from types import ModuleType
from typing import Any

from .. import annotations, handle_error, layout, remove_own_frame, ring
from . import wrap

MERGE_WINDOW_NS = 5_000_000
_SYNC_METHODS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_began_ns = _ended_ns = _waited_ns = _count = 0


def install(module: ModuleType) -> bool:
    """Wrap the synchronizing methods of torch.Tensor and torch.cuda.synchronize that exist."""
    tensor: Any = module.Tensor  # type: ignore[attr-defined]
    for name in _SYNC_METHODS:
        if hasattr(tensor, name):
            _wrap_sync(tensor, name, of_tensor=True)
    cuda: Any = sys.modules["torch.cuda"]
    if hasattr(cuda, "synchronize"):
        _wrap_sync(cuda, "synchronize", of_tensor=False)
    if hasattr(cuda, "empty_cache"):
        _wrap_empty_cache(cuda)
    return True


def _wrap_empty_cache(cuda: Any) -> None:
    original = cuda.empty_cache
    if getattr(original, "_is_clusterprof", False):
        return

    @functools.wraps(original)
    def wrapper() -> Any:
        start = monotonic_ns()
        result = original()
        try:
            if _probe.on:  # type: ignore[attr-defined]
                ring.emit(layout.HOST_WORK, start, monotonic_ns(), layout.FREEING_MEMORY, -1)
        except BaseException as error:
            handle_error(error)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    cuda.empty_cache = wrapper


def _wrap_sync(owner: Any, name: str, of_tensor: bool) -> None:
    original = getattr(owner, name)
    if getattr(original, "_is_clusterprof", False):
        return

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if wrap.is_compiling() or (of_tensor and not arguments[0].is_cuda):
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
    global _began_ns, _ended_ns, _waited_ns, _count
    try:
        if not _probe.on:  # type: ignore[attr-defined]
            return
        now = monotonic_ns()
        if _count and start - _began_ns >= MERGE_WINDOW_NS:
            record_syncs()
        if not _count:
            _began_ns = start
        _ended_ns = now
        _waited_ns += now - start
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
