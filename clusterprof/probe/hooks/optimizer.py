"""torch.optim: how long each optimizer step takes, and with it where the steps of the job end."""

import sys
import weakref
from time import monotonic_ns
from types import ModuleType
from typing import Any, Callable, Dict, Optional

from .. import failed, layout, ring, steps
from . import cuda, seam

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_began_ns: Dict[int, int] = {}
_owner: Optional[Callable[[], Any]] = None  # the first optimizer to step is the one that counts


def install(module: ModuleType) -> bool:
    """Register with torch as a hook common to all optimizers (torch 2.0 and later)."""
    # not module.optim.optimizer: torch.optim deletes the names of its submodules
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    if getattr(optimizers, "_is_clusterprof_hooked", False):
        return True
    seam.torch_is_there(module)
    is_compiling = seam.is_compiling

    # torch.compile traces through these hooks when a step is compiled: the first line is all it
    # then sees, and takes for a constant.
    def before(optimizer: Any, arguments: Any, keywords: Any) -> None:
        if not is_compiling():
            _begins(optimizer)

    def after(optimizer: Any, arguments: Any, keywords: Any) -> None:
        if not is_compiling():
            _ended(optimizer)

    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
    optimizers._is_clusterprof_hooked = True
    return True


def _begins(optimizer: Any) -> None:
    global _owner
    try:
        if not _probe.on:  # type: ignore[attr-defined]
            return
        if _owner is None or _owner() is None:
            _owner = weakref.ref(optimizer)
        now = monotonic_ns()
        _began_ns[id(optimizer)] = now
        steps.saw(now)
    except BaseException as error:
        failed(error)


def _ended(optimizer: Any) -> None:
    try:
        began = _began_ns.pop(id(optimizer), 0)
        if not began or not _probe.on:  # type: ignore[attr-defined]
            return
        now = monotonic_ns()
        ring.emit(layout.OPTIMIZER, began, now)
        # With several optimizers (a generator and its critic) one round of the loop is one step.
        if _owner is not None and _owner() is optimizer:
            steps.optimizer_stepped(now)
        cuda.look()
    except BaseException as error:
        failed(error)
