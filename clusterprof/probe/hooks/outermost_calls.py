"""Evaluations and saves: whole functions of a framework; only the outermost call is recorded.

A framework's save calls `torch.save` for each part of a checkpoint: one span, with the
bytes of all parts. Calls in other threads than the training thread, or in helper
processes, do not delay training and are not recorded.
"""

import os
from _thread import get_ident
from typing import Any, Callable, Dict, List, Optional, Tuple

from .. import annotations, layout, ring
from . import wrap as hooks_wrap

UNKNOWN = -1

SizeReader = Callable[[Tuple[Any, ...], Dict[str, Any]], int]
# Open marks of this kind, the thread, the number of parts ended before: -1 for the outermost.
OpenMark = Tuple[Dict[int, List[int]], int, int]

evaluating_threads: Dict[int, List[int]] = {}
"""Threads inside an evaluation."""

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
    _saved_part_bytes.clear()


ring.after_fork.append(_clear_marks)
