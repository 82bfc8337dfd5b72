"""The works of asynchronous operations: which are under way, and who waits for their end.

The wait goes through the class of all works; the job's own objects stay as they are. With CUDA the
host does not wait; how long the default stream stood still is told by events.
"""

import functools
import sys
import weakref
from time import monotonic_ns
from typing import Any, Callable, Dict, Tuple

from .. import failed, layout, ring, without_our_frame
from . import cuda, seam

WORKS_AT_MOST = 512  # operations under way whose wait we would recognise

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
Known = Tuple[Callable[[], Any], int, int, int, int]  # the work, a, b, c, d
_works: Dict[int, Known] = {}  # by id(), oldest first


def remember(work: Any, group: int, b: int, size: int, d: int) -> None:
    """Recognise the wait for this work: the operation that was issued as `d`."""
    if len(_works) >= WORKS_AT_MOST:
        for key in list(_works)[: WORKS_AT_MOST // 4]:  # nobody waits for these any more
            _works.pop(key, None)
    waits = d + (layout.WAIT - layout.ISSUE << layout.FORM_SHIFT)
    _works[id(work)] = (weakref.ref(work), group, b, size, waits)


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
                    start = ring.enter(*known[1:])
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
                sequence = ring.emit(layout.COLLECTIVE, start, end, *known[1:])
                if mark is not None:
                    cuda.after_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
        except BaseException as error:
            failed(error)
        return result

    wait._is_clusterprof = True  # type: ignore[attr-defined]
    return wait


ring.after_fork.append(_works.clear)
