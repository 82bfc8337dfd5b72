"""Host and device meeting: `.item()`, copies to the host, `synchronize()`, once CUDA is in use.

A host that waits until the device has done all its work leaves it with none, and what follows is
launched to an idle device. Calls are many where this hurts: those that begin within 5 ms of the
first are one record, which says how many they were and how long they took together.
"""

import functools
import sys
from time import monotonic_ns
from types import ModuleType
from typing import Any

from .. import failed, layout, ring, steps, without_our_frame
from . import seam

TOGETHER_NS = 5_000_000
_METHODS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__")

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_began_ns = _ended_ns = _waited_ns = _count = 0


def install(module: ModuleType) -> bool:
    """Wrap methods of torch.Tensor and torch.cuda.synchronize; those that are there."""
    tensor: Any = module.Tensor  # type: ignore[attr-defined]
    for name in _METHODS:
        if hasattr(tensor, name):
            _wrap(tensor, name, of_tensor=True)
    cuda: Any = sys.modules["torch.cuda"]
    if hasattr(cuda, "synchronize"):
        _wrap(cuda, "synchronize", of_tensor=False)
    return True


def _wrap(owner: Any, name: str, of_tensor: bool) -> None:
    original = getattr(owner, name)
    if getattr(original, "_is_clusterprof", False):
        return

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if seam.is_compiling() or (of_tensor and not arguments[0].is_cuda):
            return original(*arguments, **keywords)
        start = monotonic_ns()
        try:
            result = original(*arguments, **keywords)
        except BaseException as error:
            without_our_frame(error)
            raise
        waited(start)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def waited(start: int) -> None:
    """Note that the host has waited for the device since `start`."""
    global _began_ns, _ended_ns, _waited_ns, _count
    try:
        if not _probe.on:  # type: ignore[attr-defined]
            return
        now = monotonic_ns()
        if _count and start - _began_ns >= TOGETHER_NS:
            flush()
        if not _count:
            _began_ns = start
        _ended_ns = now
        _waited_ns += now - start
        _count += 1
    except BaseException as error:
        failed(error)


def flush() -> None:
    """Record what has been gathered; called before a step ends, so that it lies in its step."""
    global _waited_ns, _count
    if _count:
        count, waited_ns = _count, _waited_ns
        _count = _waited_ns = 0
        ring.emit(layout.SYNC, _began_ns, _ended_ns, waited_ns, count)


def _forget() -> None:
    global _waited_ns, _count
    _count = _waited_ns = 0


ring.after_fork.append(_forget)
steps.before_end.append(flush)
