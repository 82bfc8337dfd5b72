"""torch.optim: the duration of each optimizer step, and the boundaries of the job's steps."""

import sys
import weakref
from time import monotonic_ns
from types import ModuleType
from typing import Any, Callable, Dict, Optional

from .. import annotations, handle_error, layout, ring
from . import cuda, outermost_calls, wrap

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_began_ns: Dict[int, int] = {}
_owner: Optional[Callable[[], Any]] = None  # the first optimizer that steps marks the steps
_reads = 0  # of an optimizer's own counter

MAX_READS = 64  # a framework may end its step after many optimizer steps


def install(module: ModuleType) -> bool:
    """Register hooks common to all optimizers (torch 2.0 and later)."""
    # not module.optim.optimizer: torch.optim deletes the names of its submodules
    optimizers: Any = sys.modules["torch.optim.optimizer"]
    if getattr(optimizers, "_is_clusterprof_hooked", False):
        return True
    wrap.attach_torch(module)
    is_compiling = wrap.is_compiling

    # torch.compile traces these hooks when a step is compiled: it sees only the first line, whose
    # result it treats as a constant.
    def before(optimizer: Any, arguments: Any, keywords: Any) -> None:
        if not is_compiling():
            _begin_optimizer_step(optimizer)

    def after(optimizer: Any, arguments: Any, keywords: Any) -> None:
        if not is_compiling():
            _finish_optimizer_step(optimizer)

    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
    outermost_calls.wrap_modes(module.nn.Module)
    optimizers._is_clusterprof_hooked = True
    if _probe.config.get("dive"):  # type: ignore[attr-defined]
        from .. import dive  # noqa: F401 - joins the probe's thread by itself
    return True


def _begin_optimizer_step(optimizer: Any) -> None:
    global _owner
    try:
        if not _probe.on:  # type: ignore[attr-defined]
            return
        if _owner is None or _owner() is None:
            _owner = weakref.ref(optimizer)
        if outermost_calls.open_evaluations:  # what trains in evaluation mode does not evaluate
            outermost_calls.open_evaluations.clear()
        now_ns = monotonic_ns()
        _began_ns[id(optimizer)] = now_ns
        annotations.begin_first_step(now_ns)
    except BaseException as error:
        handle_error(error)


def _finish_optimizer_step(optimizer: Any) -> None:
    try:
        began = _began_ns.pop(id(optimizer), 0)
        if not began or not _probe.on:  # type: ignore[attr-defined]
            return
        now_ns = monotonic_ns()
        ring.emit(layout.OPTIMIZER, began, now_ns)
        # With several optimizers (a generator and its critic) one loop iteration is one step.
        if _owner is not None and _owner() is optimizer:
            if _reads < MAX_READS and annotations.needs_job_step():
                annotations.note_job_step(_read_counter(optimizer))
            annotations.finish_optimizer_step(now_ns)
        cuda.collect_finished_waits()
    except BaseException as error:
        handle_error(error)


def _read_counter(optimizer: Any) -> int:
    """Return how many steps the optimizer counts, those before a restart included; -1 = unknown.

    Adam and its relatives count in the state that a checkpoint holds. A counter on the device is
    not read: the host would wait for it.
    """
    global _reads
    _reads += 1
    try:
        for state in optimizer.state.values():
            count = state.get("step") if isinstance(state, dict) else None
            if getattr(getattr(count, "device", None), "type", "cpu") == "cpu":
                return int(count) if count is not None else annotations.UNKNOWN  # type: ignore[call-overload,no-any-return]
            break
    except Exception:  # an optimizer of the user's own, whose state means something else
        pass
    return annotations.UNKNOWN
