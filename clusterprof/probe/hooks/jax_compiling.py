"""JAX: tracing, lowering and compiling, as JAX itself tells those who listen (`jax.monitoring`).

Where its steps end nobody can know from outside: calls return before the device has done them, and
a loop looks like any other. `clusterprof.step()` says it.
"""

import sys
from time import monotonic_ns
from types import ModuleType
from typing import Any

from .. import failed, layout, ring

UNKNOWN = -1
NOTABLE_S = 100e-6  # every operation outside of jit is traced once; most take less

_EVENTS = frozenset(
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
        module.register_event_duration_secs_listener(_heard)  # type: ignore[attr-defined]
        module._is_clusterprof_hooked = True  # type: ignore[attr-defined]
    return True


def _heard(event: str, duration: float, **more: Any) -> None:
    try:
        if _probe.on and duration >= NOTABLE_S and event in _EVENTS:  # type: ignore[attr-defined]
            now = monotonic_ns()
            ring.emit(layout.COMPILE, now - int(duration * 1e9), now, UNKNOWN)
    except BaseException as error:
        failed(error)
