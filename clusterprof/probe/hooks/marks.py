"""Evaluations and saves: whole functions of a framework, of which the outermost counts.

A framework's save calls `torch.save` for each part of a checkpoint: one span, with the bytes of all
parts. What another thread than the one that trains does, or a process that only helps, holds nobody
up, and is not recorded.
"""

import os
from _thread import get_ident
from typing import Any, Callable, Dict, List, Optional, Tuple

from .. import layout, ring, steps
from . import seam

UNKNOWN = -1

Size = Callable[[Tuple[Any, ...], Dict[str, Any]], int]
# What is open of its kind, the thread, how many parts had ended before it: -1 for the outermost.
Stretch = Tuple[Dict[int, List[int]], int, int]

evaluating: Dict[int, List[int]] = {}
"""Threads inside an evaluation."""

_saving: Dict[int, List[int]] = {}  # by thread: bytes of the parts of its save that have ended
_OPEN = {layout.EVAL: evaluating, layout.CHECKPOINT: _saving}


def wrap(
    owner: Any, name: str, kind: int, size: Optional[Size] = None, by_parts: bool = True
) -> bool:
    """Let each call of `owner.name` that returns be a span of an evaluation or of a save.

    size(arguments, keywords) -> bytes that a save wrote, -1 unknown. by_parts: where it is unknown,
    the parts that are seen are all there is. Wrapping twice makes no difference.
    """

    def begins(*arguments: Any, **keywords: Any) -> Stretch:
        thread, inside = get_ident(), _OPEN[kind]
        if thread in inside:
            return inside, thread, len(inside[thread])
        inside[thread] = []
        return inside, thread, -1

    def ended(
        stretch: Stretch, start: int, end: int, result: Any, *arguments: Any, **keywords: Any
    ) -> None:
        inside, thread, before = stretch
        wrote = size(arguments, keywords) if size else UNKNOWN
        if before >= 0:
            outer = inside.get(thread, [])
            if wrote >= 0 or len(outer) == before or not by_parts:  # else its parts stand for it
                outer[before:] = [wrote]
            return
        parts = inside.pop(thread, [])
        if not steps.trains_in(thread) or ring.helps():
            return
        if kind != layout.CHECKPOINT:
            wrote = 0
        elif wrote < 0 and by_parts and parts and min(parts) >= 0:
            wrote = sum(parts)
        ring.emit(kind, start, end, wrote)

    return seam.wrap(owner, name, ended, begins, raised=_left)


def _left(stretch: Optional[Stretch]) -> None:
    if stretch is not None and stretch[2] < 0:
        stretch[0].pop(stretch[1], None)


def file_size(target: Any) -> int:
    """Return the bytes of a file that was given by name; -1 for anything else."""
    if not isinstance(target, (str, os.PathLike)):
        return UNKNOWN
    try:
        return os.stat(target).st_size if os.path.isfile(target) else UNKNOWN
    except (OSError, ValueError):
        return UNKNOWN


def _forget() -> None:
    evaluating.clear()
    _saving.clear()


ring.after_fork.append(_forget)
