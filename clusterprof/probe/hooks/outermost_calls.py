"""Evaluations and saves: whole functions of a framework; only the outermost call is recorded.

A loop without a framework evaluates between `model.eval()` and `model.train()`: if no optimizer
steps meanwhile, that is an evaluation, too, unless every step has one. It ends earlier if the loop
asks for a batch with gradients enabled.

A framework's save calls `torch.save` for each part of a checkpoint: one span, with the
bytes of all parts. Calls in other threads than the training thread, or in helper
processes, do not delay training and are not recorded.
"""

import functools
import os
import sys
import weakref
from _thread import get_ident
from time import monotonic_ns
from types import CodeType
from typing import Any, Callable, Dict, List, Optional, Tuple

from .. import annotations, handle_error, layout, ring
from . import wrap as hooks_wrap

UNKNOWN = -1
MAX_OPEN_EVALUATIONS = 8  # models in evaluation mode that may still be trained

SizeReader = Callable[[Tuple[Any, ...], Dict[str, Any]], int]
# Open marks of this kind, the thread, the number of parts ended before: -1 for the outermost.
OpenMark = Tuple[Dict[int, List[int]], int, int]

evaluating_threads: Dict[int, List[int]] = {}
"""Threads inside an evaluation."""

open_evaluations: Dict[int, List[Any]] = {}
"""By id(): weak references to models that are being evaluated, start and end, ns; end 0 = open."""

_evaluated_at = -2  # steps at the end of the last evaluation
_saved_part_bytes: Dict[int, List[int]] = {}  # by thread: bytes of the ended parts of its save
_OPEN_MARKS = {layout.EVAL: evaluating_threads, layout.CHECKPOINT: _saved_part_bytes}


def wrap_outermost(
    owner: Any, name: str, kind: int, size: Optional[SizeReader] = None, by_parts: bool = True
) -> bool:
    """Record each call of `owner.name` that returns as a span of an evaluation or of a save.

    size(arguments, keywords) -> bytes that a save wrote, -1 unknown. by_parts: where the
    size is unknown, sum the sizes of its recorded parts. Wrapping twice has no effect.
    """

    def open_mark(*arguments: Any, **keywords: Any) -> OpenMark:
        thread, inside = get_ident(), _OPEN_MARKS[kind]
        if thread in inside:
            return inside, thread, len(inside[thread])
        inside[thread] = []
        return inside, thread, -1

    def record_mark(
        mark: OpenMark, start: int, end: int, result: Any, *arguments: Any, **keywords: Any
    ) -> None:
        inside, thread, part_count = mark
        written_bytes = size(arguments, keywords) if size else UNKNOWN
        if part_count >= 0:
            outer = inside.get(thread, [])
            if (
                written_bytes >= 0 or len(outer) == part_count or not by_parts
            ):  # else its parts count
                outer[part_count:] = [written_bytes]
            return
        parts = inside.pop(thread, [])
        if not annotations.is_training_thread(thread) or ring.is_helper():
            return
        if kind != layout.CHECKPOINT:
            written_bytes = 0
        elif written_bytes < 0 and by_parts and parts and min(parts) >= 0:
            written_bytes = sum(parts)
        ring.emit(kind, start, end, written_bytes)

    return hooks_wrap.wrap_function(owner, name, record_mark, open_mark, raised=_close_mark)


def _close_mark(mark: Optional[OpenMark]) -> None:
    if mark is not None and mark[2] < 0:
        mark[0].pop(mark[1], None)


def begin_evaluation(model: Any) -> None:
    """Note that a model was set to evaluation mode; its evaluation may begin."""
    key, now_ns = id(model), monotonic_ns()
    open_evaluation = open_evaluations.get(key)
    if (open_evaluation is not None and open_evaluation[0]() is model) or len(
        open_evaluations
    ) >= MAX_OPEN_EVALUATIONS:
        return
    thread = get_ident()
    if thread in evaluating_threads or ring.is_helper():
        return  # a framework's evaluation is recorded as a whole
    if annotations.is_training_thread(thread):
        open_evaluations[key] = [weakref.ref(model), now_ns, 0]


def bound_evaluations(now_ns: int) -> None:
    """End open evaluations if the loop, which asks for a batch, has gradients enabled."""
    computes_gradients = getattr(sys.modules.get("torch"), "is_grad_enabled", None)
    if computes_gradients is not None and computes_gradients():
        for evaluation in list(open_evaluations.values()):
            evaluation[2] = evaluation[2] or now_ns


def finish_evaluation(model: Any, caller: CodeType, train: CodeType) -> None:
    """Record the evaluation of a model that was set to training mode by the job itself.

    One in every step is none, except for the first.

    caller, train: code of the function that called `train`, and that of `train`, which sets the
    modules within a model: a layer that stays in evaluation mode is no evaluation.
    """
    global _evaluated_at
    wrapped = model.__dict__.get("_modules", {}).get("module")  # of DistributedDataParallel
    for trained in (model, wrapped):
        evaluation = open_evaluations.get(id(trained))
        if evaluation is not None and evaluation[0]() is trained:
            break
    if evaluation is None or evaluation[0]() is not trained or caller is train:
        return
    open_evaluations.clear()
    steps, _evaluated_at = annotations.count_steps() - _evaluated_at, annotations.count_steps()
    if steps <= 1:
        return  # in every step: part of training, such as rollouts or text that is generated
    if annotations.is_training_thread(get_ident()) and not ring.is_helper():
        ring.emit(layout.EVAL, evaluation[1], evaluation[2] or monotonic_ns(), 0)


def wrap_modes(module_class: Any) -> None:
    """Wrap `eval` and `train` of torch.nn.Module: they enclose evaluations of plain loops."""
    original = module_class.train
    if getattr(original, "_is_clusterprof", False):
        return
    code = original.__code__

    def train(self: Any, mode: bool = True) -> Any:
        if open_evaluations and mode and not hooks_wrap.is_compiling():
            try:
                finish_evaluation(self, sys._getframe(1).f_code, code)
            except BaseException as error:
                handle_error(error)
        return original(self, mode)

    functools.update_wrapper(train, original)
    train._is_clusterprof = True  # type: ignore[attr-defined]
    module_class.train = train
    hooks_wrap.wrap_function(
        module_class,
        "eval",
        lambda token, start, end, result, model: begin_evaluation(model),
        traced=True,
    )


def read_file_size(target: Any) -> int:
    """Return the size of a file given by name, in bytes; -1 for anything else."""
    if not isinstance(target, (str, os.PathLike)):
        return UNKNOWN
    try:
        return os.stat(target).st_size if os.path.isfile(target) else UNKNOWN
    except (OSError, ValueError):
        return UNKNOWN


def _clear_marks() -> None:
    evaluating_threads.clear()
    open_evaluations.clear()
    _saved_part_bytes.clear()


ring.after_fork.append(_clear_marks)
