"""Copies from host to device: Tensor.to() and Tensor.cuda(), once the job has initialized CUDA.

Likewise with another device: Tensor.xpu(), Tensor.npu(). There is no cheaper way to see these
copies: a dispatch mode would slow every operation. In a process that never uses a device Tensor
stays unchanged. copy_() is not wrapped: optimizers and compiled code call it far too often for
copies within the device.
"""

import functools
import sys
from _thread import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any, Callable

from .. import handle_error, layout, remove_own_frame, ring
from . import device_sync, wrap

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_last_copy = (0, 0)
"""Thread and start, ns, of the last copy that was recorded."""


def install(module: ModuleType, device: str = "cuda") -> bool:
    """Wrap both methods of torch.Tensor; `device` is what PyTorch calls the device."""
    tensor: Any = module.Tensor  # type: ignore[attr-defined]
    is_on_device = wrap.make_device_check(tensor, device)
    for name in ("to", device):
        if hasattr(tensor, name):
            _wrap_copy(tensor, name, is_on_device)
    return True


def _wrap_copy(tensor_class: Any, name: str, is_on_device: Callable[[Any], bool]) -> None:
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
            if is_on_device(result):
                if not is_on_device(self):
                    _record_copy(start, result, keywords)
            elif is_on_device(self) and not keywords.get("non_blocking"):
                device_sync.add_sync_wait(start)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    setattr(tensor_class, name, wrapper)


def _record_copy(start: int, result: Any, keywords: Any) -> None:
    global _last_copy
    try:
        thread = get_ident()
        # The method of an out-of-tree device may call Tensor.to(), which is recorded first.
        is_outer = start <= _last_copy[1] and thread == _last_copy[0]
        if _probe.on and not is_outer:  # type: ignore[attr-defined]
            end = monotonic_ns()
            _last_copy = thread, start
            size = result.numel() * result.element_size()
            ring.emit(layout.H2D, start, end, size, int(bool(keywords.get("non_blocking"))))
    except BaseException as error:
        handle_error(error)
