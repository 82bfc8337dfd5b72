"""JAX: tracing, lowering and compiling, as reported to listeners of `jax.monitoring`.

The end of a step is not visible from outside: calls return before the device has
finished, and a training loop looks like any other loop. `clusterprof.step()` marks it.
"""

import sys
from time import monotonic_ns
from types import ModuleType
from typing import Any

from .. import handle_error, layout, ring

UNKNOWN = -1
MIN_COMPILE_S = 100e-6  # every operation outside jit is traced once; most take less time

_COMPILE_EVENTS = frozenset(
    (
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        "/jax/core/compile/backend_compile_duration",
    )
)
_probe = sys.modules[__name__.rpartition(".hooks.")[0]]


def install(module: ModuleType) -> bool:
    """Register as a listener, once."""
    if not getattr(module, "_is_clusterprof_hooked", False):
        module.register_event_duration_secs_listener(_record_event)  # type: ignore[attr-defined]
        module._is_clusterprof_hooked = True  # type: ignore[attr-defined]
    return True


def _record_event(event: str, duration: float, **extra: Any) -> None:
    try:
        if _probe.on and duration >= MIN_COMPILE_S and event in _COMPILE_EVENTS:  # type: ignore[attr-defined]
            now_ns = monotonic_ns()
            ring.emit(layout.COMPILE, now_ns - int(duration * 1e9), now_ns, UNKNOWN)
    except BaseException as error:
        handle_error(error)
