"""A call of torch.distributed that is no collective of a whole group: wrapped, with its own reader.

`distributed` has the wrapper of collectives, which is called often enough to be one function. This
one asks a `begin` what the call is, and serves whatever is rarer.
"""

import functools
import sys
from time import monotonic_ns
from typing import Any, Callable, Dict, Optional, Set, Tuple

from .. import failed, layout, ring, without_our_frame
from . import cuda, groups, seam, works

inside: Set[int] = set()
"""Threads that are in a wrapped function: what that calls is its own matter."""

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]

Call = Tuple[int, groups.Group, int, int, int, Any, int]  # thread, group, b, c, d, mark, start
Begin = Callable[[Tuple[Any, ...], Dict[str, Any]], Optional[Call]]


def wrap(original: Any, begin: Begin) -> Any:
    """Return `original` between a `begin` that may say None, and the span of what it said."""
    if getattr(original, "_is_clusterprof", False):
        return original

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if seam.is_compiling():
            return original(*arguments, **keywords)
        call = None
        try:
            if _probe.on:  # type: ignore[attr-defined]
                call = begin(arguments, keywords)
        except BaseException as error:
            failed(error)
        try:
            result = original(*arguments, **keywords)
        except BaseException as error:
            if call is not None:
                inside.discard(call[0])
            without_our_frame(error)
            raise
        if call is not None:
            try:
                _ended(call, monotonic_ns(), result)
            except BaseException as error:
                failed(error)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    return wrapper


def _ended(call: Call, end: int, result: Any) -> None:
    thread, group, b, size, d, mark, start = call
    inside.discard(thread)
    sequence = ring.emit(layout.COLLECTIVE, start, end, group.number, b, size, d)
    if d >> layout.FORM_SHIFT & layout.FORM_MASK == layout.BLOCKING:
        if mark is not None:
            cuda.after_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
        return
    if thread in works.gathering:
        works.gathering[thread].append((group.number, b, size, d))
    if result is not None:
        works.remember(result, group.number, b, size, d)


def names_of(function: Any) -> Tuple[str, ...]:
    """Return the names that the arguments of a function have in this version."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = function.__code__
    return tuple(code.co_varnames[: code.co_argcount])


def bytes_of(brought: Any) -> int:
    """Return the bytes of a tensor or of the tensors in a list; 0 for none, -1 unknown."""
    if brought is None:
        return 0
    try:
        if isinstance(brought, (list, tuple)):
            return sum([_bytes(each) for each in brought])
        return int(_bytes(brought))
    except (AttributeError, TypeError, RuntimeError):
        return groups.UNKNOWN  # not what it should be: torch will say so


def tensor_with_bytes() -> Any:
    """Return PyTorch's tensor, None where it does not tell its bytes: before 2.1."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor if hasattr(tensor, "nbytes") else None


def _bytes(tensor: Any) -> int:
    if hasattr(tensor, "nbytes"):
        return tensor.nbytes  # type: ignore[no-any-return]
    return tensor.element_size() * tensor.nelement()  # type: ignore[no-any-return]


ring.after_fork.append(inside.clear)
