"""torch.compile: every compilation, and how often the code object had been compiled before.

TorchDynamo calls its callbacks at the first and the last of nested compilations.
Callbacks are removed by `torch._dynamo.reset()`, so the two functions that call them
are wrapped.
"""

import sys
from types import ModuleType
from typing import Any

from .. import layout, ring
from .wrap import wrap_function

_compile_began_ns = 0


def install(module: ModuleType) -> bool:
    """Wrap the functions that TorchDynamo calls when compilation begins and ends."""
    handler: Any = module.CompilationCallbackHandler  # type: ignore[attr-defined]
    wrap_function(handler, "run_start_callbacks", _begin_compile)
    return wrap_function(handler, "run_end_callbacks", _finish_compile)


def _begin_compile(
    token: None, start: int, end: int, result: Any, *arguments: Any, **keywords: Any
) -> None:
    global _compile_began_ns
    _compile_began_ns = start


def _finish_compile(
    token: None, start: int, end: int, result: Any, *arguments: Any, **keywords: Any
) -> None:
    global _compile_began_ns
    began, _compile_began_ns = _compile_began_ns, 0
    if began:
        ring.emit(layout.COMPILE, began, start, _count_recompiles(arguments))


def _count_recompiles(arguments: Any) -> int:
    """Return the second number of an id like "3/1" or "[0/2]"; -1 when there is none."""
    compile_id = getattr(arguments[-1], "compile_id", None)
    if compile_id is None:  # versions that pass no arguments to their callbacks
        context = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
        current = getattr(context, "current_compile_id", None)
        compile_id = current() if current else None
    words = str(compile_id).strip("[]!").rsplit("/", 1)
    number = words[-1].partition("_")[0]
    return int(number) if len(words) == 2 and number.isdigit() else -1


def _clear_compile_state() -> None:
    global _compile_began_ns
    _compile_began_ns = 0


ring.after_fork.append(_clear_compile_state)
