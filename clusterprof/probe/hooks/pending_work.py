"""Work objects of asynchronous operations: which are pending, and who waits for their end.

The wait is wrapped in the class of all works; the job's own objects stay unchanged.
With CUDA the host does not wait; events measure how long the default stream was idle.
"""

import functools
import sys
import weakref
from time import monotonic_ns
from typing import Any, Callable, Dict, List, Sequence, Tuple

from .. import handle_error, layout, remove_own_frame, ring
from . import cuda, wrap

MAX_PENDING_WORKS = 512  # pending operations whose wait can be recognized

_WAIT_OFFSET = layout.WAIT - layout.ISSUE << layout.FORM_SHIFT
_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
SpanFields = Tuple[int, int, int, int]  # a, b, c, d
PendingWork = Tuple[
    Callable[[], Any], int, int, int, int, Sequence[SpanFields]
]  # work, a, b, c, d, others
_pending_works: Dict[int, PendingWork] = {}  # by id(), oldest first
coalescing_spans: Dict[int, List[SpanFields]] = {}
"""By thread: spans issued since its coalescing manager opened; one work may represent all."""


def register_work(
    work: Any, group: int, b: int, size: int, d: int, further_spans: Sequence[SpanFields] = ()
) -> None:
    """Register a work, so that the wait for it is recognized.

    d: the operation as it was issued. further_spans: further operations that the wait covers.
    """
    if len(_pending_works) >= MAX_PENDING_WORKS:
        for key in list(_pending_works)[: MAX_PENDING_WORKS // 4]:  # these are no longer waited for
            _pending_works.pop(key, None)
    _pending_works[id(work)] = (weakref.ref(work), group, b, size, d + _WAIT_OFFSET, further_spans)


def wrap_wait(original: Any) -> Any:
    """Wrap the wait of every work.

    The wrapper has to be called `wait` and to take `self` first: this is how pybind11
    recognizes that a subclass written in Python called it through super() and not through
    its own override.
    """
    if getattr(original, "_is_clusterprof", False):
        return original

    @functools.wraps(original)
    def wait(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if wrap.is_traced() or not _pending_works:
            return original(self, *arguments, **keywords)
        pending = None
        mark = None
        start = 0
        try:
            if _probe.on and not wrap.compiler._is_compiling_flag:  # type: ignore[attr-defined]
                pending = _pending_works.pop(id(self), None)
                if pending is not None and pending[0]() is not self:
                    pending = None
                if pending is not None:
                    mark = cuda.begin_wait(cuda.MAX_PENDING_COLLECTIVES, default_stream=True)
                    start = ring.enter(*pending[1:5])
        except BaseException as error:
            handle_error(error)
        try:
            result = original(self, *arguments, **keywords)
        except BaseException as error:
            remove_own_frame(error)
            raise
        try:
            if start and pending is not None:
                end = monotonic_ns()
                sequence = ring.emit(layout.COLLECTIVE, start, end, *pending[1:5])
                for a, b, size, d in pending[5]:
                    ring.emit(layout.COLLECTIVE, start, end, a, b, size, d + _WAIT_OFFSET)
                if mark is not None:
                    cuda.finish_wait(mark, sequence, start, end, layout.EXPOSED_COLLECTIVE)
        except BaseException as error:
            handle_error(error)
        return result

    wait._is_clusterprof = True  # type: ignore[attr-defined]
    return wait


ring.after_fork.append(_pending_works.clear)
