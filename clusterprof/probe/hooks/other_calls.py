"""Wraps calls of torch.distributed that are no collectives of a whole group.

`probe.hooks.distributed` wraps collectives, which are frequent enough to justify
one large function. This wrapper calls a `begin` function that reads the arguments, and
serves rarer calls.
"""

import functools
import sys
from time import monotonic_ns
from typing import Any, Callable, Dict, Optional, Set, Tuple

from .. import handle_error, layout, remove_own_frame, ring
from . import cuda, pending_work, process_groups
from . import wrap as hooks_wrap

active_threads: Set[int] = set()
"""Threads inside a wrapped function; calls made from there are not recorded."""

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]

PendingCall = Tuple[
    int, process_groups.Group, int, int, int, Any, int
]  # thread, group, b, c, d, mark, start
CallReader = Callable[[Tuple[Any, ...], Dict[str, Any]], Optional[PendingCall]]


def wrap_call(original: Any, begin: CallReader) -> Any:
    """Wrap `original`: `begin` reads each call and may return None, else its span is recorded."""
    if getattr(original, "_is_clusterprof", False):
        return original

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if hooks_wrap.is_compiling():
            return original(*arguments, **keywords)
        call = None
        try:
            if _probe.on:  # type: ignore[attr-defined]
                call = begin(arguments, keywords)
        except BaseException as error:
            handle_error(error)
        try:
            result = original(*arguments, **keywords)
        except BaseException as error:
            if call is not None:
                active_threads.discard(call[0])
            remove_own_frame(error)
            raise
        if call is not None:
            try:
                _finish_call(call, monotonic_ns(), result)
            except BaseException as error:
                handle_error(error)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    return wrapper


def _finish_call(call: PendingCall, end: int, result: Any) -> None:
    thread, group, b, size, d, mark, start = call
    active_threads.discard(thread)
    sequence = ring.emit(layout.COLLECTIVE, start, end, group.number, b, size, d)
    if d >> layout.FORM_SHIFT & layout.FORM_MASK == layout.BLOCKING:
        if mark is not None:
            cuda.finish_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
        return
    if thread in pending_work.coalescing_spans:
        pending_work.coalescing_spans[thread].append((group.number, b, size, d))
    if result is not None:
        pending_work.register_work(result, group.number, b, size, d)


def list_argument_names(function: Any) -> Tuple[str, ...]:
    """Return the argument names of a function in the installed version."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = function.__code__
    return tuple(code.co_varnames[: code.co_argcount])


def sum_tensor_bytes(tensors: Any) -> int:
    """Return the bytes of a tensor or of the tensors in a list; 0 for None, -1 unknown."""
    if tensors is None:
        return 0
    try:
        if isinstance(tensors, (list, tuple)):
            return sum([_get_tensor_bytes(tensor) for tensor in tensors])
        return int(_get_tensor_bytes(tensors))
    except (AttributeError, TypeError, RuntimeError):
        return process_groups.UNKNOWN  # invalid argument: torch will report it


def get_tensor_class() -> Any:
    """Return torch.Tensor, None where it has no `nbytes` (PyTorch before 2.1)."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor if hasattr(tensor, "nbytes") else None


def _get_tensor_bytes(tensor: Any) -> int:
    if hasattr(tensor, "nbytes"):
        return tensor.nbytes  # type: ignore[no-any-return]
    return tensor.element_size() * tensor.nelement()  # type: ignore[no-any-return]


ring.after_fork.append(active_threads.clear)
