"""Copies from host to device: Tensor.to() and Tensor.cuda(), once the job has initialized CUDA.

There is no cheaper way to see these copies: a dispatch mode would slow every operation.
In a process that never uses CUDA Tensor stays unchanged. copy_() is not wrapped:
optimizers and compiled code call it far too often for copies within the device.
"""

import functools
import sys
from time import monotonic_ns
from types import ModuleType
from typing import Any

from .. import handle_error, layout, remove_own_frame, ring
from . import sync

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]


def install(module: ModuleType) -> bool:
    """Wrap both methods of torch.Tensor."""
    for name in ("to", "cuda"):
        _wrap_copy(module.Tensor, name)  # type: ignore[attr-defined]
    return True


def _wrap_copy(tensor_class: Any, name: str) -> None:
    original = getattr(tensor_class, name)
    if getattr(original, "_is_clusterprof", False):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *arguments: Any, **keywords: Any) -> Any:
        start = monotonic_ns()
        try:
            result = original(self, *arguments, **keywords)
        except BaseException as error:
            remove_own_frame(error)
            raise
        if result is not self:
            if result.is_cuda:
                _record_copy(start, self, result, keywords)
            elif self.is_cuda and not keywords.get("non_blocking"):
                sync.add_sync_wait(start)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    setattr(tensor_class, name, wrapper)


def _record_copy(start: int, source: Any, result: Any, keywords: Any) -> None:
    try:
        if _probe.on and not source.is_cuda:  # type: ignore[attr-defined]
            end = monotonic_ns()
            size = result.numel() * result.element_size()
            ring.emit(layout.H2D, start, end, size, int(bool(keywords.get("non_blocking"))))
    except BaseException as error:
        handle_error(error)
