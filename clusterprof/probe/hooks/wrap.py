"""Wraps a framework function so that an error of the probe never reaches its caller."""

import functools
import operator
import sys
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any, Callable, Optional

from .. import handle_error, remove_own_frame

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]


def _is_never_compiling() -> bool:
    return False


is_compiling: Callable[[], bool] = _is_never_compiling
"""torch.compiler.is_compiling, once torch is fully imported; before that returns False.

torch.compile treats the result as a constant: a wrapper that calls this first is traced
as if it did not exist. Look it up through this module at each call.
"""

is_traced: Callable[[], bool] = _is_never_compiling
"""Cheaper half of `is_compiling`, at a third of the cost: is this call being traced?"""

compiler: Any = SimpleNamespace(_is_compiling_flag=False)
"""Its `_is_compiling_flag` is the other half of `is_compiling`, for use with `is_traced`."""

cuda: Any = SimpleNamespace(_initialized=True)
"""While its `_initialized` is False, CUDA need not be queried."""


def attach_torch(torch: Any) -> None:
    """Use the functions of torch itself from now on."""
    global is_compiling, is_traced, compiler, cuda
    if hasattr(getattr(torch, "cuda", None), "_initialized"):
        cuda = torch.cuda
    torch_compiler = getattr(torch, "compiler", None)
    # Before PyTorch 2.3 torch.compile treats this name as a constant.
    fallback = getattr(getattr(torch, "_utils", None), "is_compiling", is_compiling)
    is_traced = is_compiling = getattr(torch_compiler, "is_compiling", fallback)
    if hasattr(torch_compiler, "_is_compiling_flag"):
        compiler = torch_compiler
        is_traced = getattr(torch_compiler, "is_dynamo_compiling", is_compiling)


def make_device_check(tensor_class: Any, device: str) -> Callable[[Any], bool]:
    """Return a function that says whether a tensor is on the device."""
    if hasattr(tensor_class, "is_" + device):
        return operator.attrgetter("is_" + device)
    return lambda tensor: bool(tensor.device.type == device)


def wrap_function(
    owner: Any,
    name: str,
    after: Callable[..., None],
    before: Callable[..., Any] = lambda *arguments, **keywords: None,
    traced: bool = False,
    raised: Optional[Callable[[Any], None]] = None,
) -> bool:
    """Replace `owner.name` by a wrapper that calls `after` when the original returns.

    before(*arguments) -> token runs before the original; after(token, start_ns, end_ns,
    result, *arguments) when it has returned. A call that raises is not recorded:
    raised(token) cleans up and must not fail. An error in `before` or `after` switches the
    probe off. Wrapping twice has no effect.
    traced: torch.compile may trace the function, and must see the original code.
    """
    original = getattr(owner, name)
    if getattr(original, "_is_clusterprof", False):
        return True

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        if traced and is_compiling():
            return original(*arguments, **keywords)
        token = None
        start = 0
        try:
            if _probe.on:  # type: ignore[attr-defined]
                token = before(*arguments, **keywords)
                start = monotonic_ns()
        except BaseException as error:
            handle_error(error)
        try:
            result = original(*arguments, **keywords)
        except BaseException as error:
            if raised is not None:
                raised(token)
            remove_own_frame(error)
            raise
        try:
            if start and _probe.on:  # type: ignore[attr-defined]
                after(token, start, monotonic_ns(), result, *arguments, **keywords)
        except BaseException as error:
            handle_error(error)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
    return True
