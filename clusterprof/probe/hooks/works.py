"""The works of asynchronous operations: which are under way, and who waits for their end.

The wait goes through the class of all works; the job's own objects stay as they are. With CUDA the
host does not wait; how long the default stream stood still is told by events.
"""

import functools
import sys
import weakref
from time import monotonic_ns
from typing import Any, Callable, Dict, List, Sequence, Tuple

from .. import failed, layout, ring, without_our_frame
from . import cuda, seam

WORKS_AT_MOST = 512  # operations under way whose wait we would recognise

_WAITS = layout.WAIT - layout.ISSUE << layout.FORM_SHIFT
_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
Span = Tuple[int, int, int, int]  # a, b, c, d
Known = Tuple[Callable[[], Any], int, int, int, int, Sequence[Span]]  # the work, a, b, c, d, more
_works: Dict[int, Known] = {}  # by id(), oldest first
gathering: Dict[int, List[Span]] = {}
"""By thread: what was issued since its coalescing manager opened; one work may stand for all."""


def remember(work: Any, group: int, b: int, size: int, d: int, also: Sequence[Span] = ()) -> None:
    """Recognise the wait for this work: of the operation issued as `d`, and of others with it."""
    if len(_works) >= WORKS_AT_MOST:
        for key in list(_works)[: WORKS_AT_MOST // 4]:  # nobody waits for these any more
            _works.pop(key, None)
    _works[id(work)] = (weakref.ref(work), group, b, size, d + _WAITS, also)


def wrap_wait(original: Any) -> Any:
    """Wrap the wait of every work.

    It has to be called `wait` and to take `self` first: by this pybind11 recognises that a
    subclass written in Python has come from here and not from its own override.
    """
    if getattr(original, "_is_clusterprof", False):
        return original

    @functools.wraps(original)
    def wait(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if seam.is_traced() or not _works:
            return original(self, *arguments, **keywords)
        known = None
        mark = None
        start = 0
        try:
            if _probe.on and not seam.compiler._is_compiling_flag:  # type: ignore[attr-defined]
                known = _works.pop(id(self), None)
                if known is not None and known[0]() is not self:
                    known = None
                if known is not None:
                    mark = cuda.before_wait(cuda.COLLECTIVES, default_stream=True)
                    start = ring.enter(*known[1:5])
        except BaseException as error:
            failed(error)
        try:
            result = original(self, *arguments, **keywords)
        except BaseException as error:
            without_our_frame(error)
            raise
        try:
            if start and known is not None:
                end = monotonic_ns()
                sequence = ring.emit(layout.COLLECTIVE, start, end, *known[1:5])
                for a, b, size, d in known[5]:
                    ring.emit(layout.COLLECTIVE, start, end, a, b, size, d + _WAITS)
                if mark is not None:
                    cuda.after_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
        except BaseException as error:
            failed(error)
        return result

    wait._is_clusterprof = True  # type: ignore[attr-defined]
    return wait


ring.after_fork.append(_works.clear)
