"""torch.compile: every compilation, and how often the same code had been compiled before.

TorchDynamo tells its own callbacks of the first and the last of nested compilations. Those are
forgotten by `torch._dynamo.reset()`, so the two functions that call them are wrapped.
"""

import sys
from types import ModuleType
from typing import Any

from .. import layout, ring
from .seam import wrap

_began_ns = 0


def install(module: ModuleType) -> bool:
    """Wrap what TorchDynamo calls when compilation begins and ends."""
    handler: Any = module.CompilationCallbackHandler  # type: ignore[attr-defined]
    wrap(handler, "run_start_callbacks", _begun)
    return wrap(handler, "run_end_callbacks", _ended)


def _begun(
    token: None, start: int, end: int, result: Any, *arguments: Any, **keywords: Any
) -> None:
    global _began_ns
    _began_ns = start


def _ended(
    token: None, start: int, end: int, result: Any, *arguments: Any, **keywords: Any
) -> None:
    global _began_ns
    began, _began_ns = _began_ns, 0
    if began:
        ring.emit(layout.COMPILE, began, start, _compiled_before(arguments))


def _compiled_before(arguments: Any) -> int:
    """Return the second number of an id such as "3/1" or "[0/2]"; -1 when there is none."""
    told = getattr(arguments[-1], "compile_id", None)
    if told is None:  # versions that tell their callbacks nothing
        context = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
        current = getattr(context, "current_compile_id", None)
        told = current() if current else None
    words = str(told).strip("[]!").rsplit("/", 1)
    number = words[-1].partition("_")[0]
    return int(number) if len(words) == 2 and number.isdigit() else -1


def _forget() -> None:
    global _began_ns
    _began_ns = 0


ring.after_fork.append(_forget)
