"""Wraps a function of a framework so that nothing of ours can come between it and its caller."""

import functools
import sys
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any, Callable, Optional

from .. import failed, without_our_frame

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]


def _never() -> bool:
    return False


is_compiling: Callable[[], bool] = _never
"""torch.compiler.is_compiling, once torch is there as a whole (before that nothing is compiled).

torch.compile takes the answer for a constant: what asks this first is traced as if it were not
there. Look it up as `seam.is_compiling` at each call.
"""

is_traced: Callable[[], bool] = _never
"""The half of `is_compiling` that costs a third: is this being traced by torch.compile?"""

compiler: Any = SimpleNamespace(_is_compiling_flag=False)
"""Its `_is_compiling_flag` is the other half, for those who have asked `is_traced` before."""

cuda: Any = SimpleNamespace(_initialized=True)
"""Its `_initialized` False means that nothing of CUDA needs to be asked."""


def torch_is_there(torch: Any) -> None:
    """Ask torch itself from now on."""
    global is_compiling, is_traced, compiler, cuda
    if hasattr(getattr(torch, "cuda", None), "_initialized"):
        cuda = torch.cuda
    found = getattr(torch, "compiler", None)
    # Before PyTorch 2.3 the name that torch.compile takes for a constant is this one.
    earlier = getattr(getattr(torch, "_utils", None), "is_compiling", is_compiling)
    is_traced = is_compiling = getattr(found, "is_compiling", earlier)
    if hasattr(found, "_is_compiling_flag"):
        compiler = found
        is_traced = getattr(found, "is_dynamo_compiling", is_compiling)


def wrap(
    owner: Any,
    name: str,
    after: Callable[..., None],
    before: Callable[..., Any] = lambda *arguments, **keywords: None,
    traced: bool = False,
    raised: Optional[Callable[[Any], None]] = None,
) -> bool:
    """Replace `owner.name` so that each call that returns is followed by `after`.

    before(*arguments) -> token, called ahead of the original; after(token, start_ns, end_ns,
    result, *arguments) once it returned. A call that raises is not recorded: raised(token) clears
    up after it, and cannot fail. An error in `before` or `after` switches the probe off. Wrapping
    twice makes no difference. `traced`: torch.compile may meet the function, and shall find what
    it finds without us.
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
            failed(error)
        try:
            result = original(*arguments, **keywords)
        except BaseException as error:
            if raised is not None:
                raised(token)
            without_our_frame(error)
            raise
        try:
            if start and _probe.on:  # type: ignore[attr-defined]
                after(token, start, monotonic_ns(), result, *arguments, **keywords)
        except BaseException as error:
            failed(error)
        return result

    wrapper._is_clusterprof = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)
    return True
