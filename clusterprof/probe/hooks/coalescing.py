"""Operations gathered by a coalescing manager: one operation of the group, at the manager's end.

    with _coalescing_manager(group, async_ops=True) as manager:
        all_reduce(a)      no span: nothing happens here yet, or nothing that could be told apart
        all_reduce(b)
                           one span: an all_reduce with the bytes of both
    manager.wait()         its wait

Sends and receives keep their own spans and numbers; where the backend makes one work of them all,
its wait is the wait of each, receives first.
"""

import functools
import sys
from _thread import get_ident
from time import monotonic_ns
from typing import Any, List, Optional, Tuple

from .. import failed, layout, ring, without_our_frame
from . import calls, groups, seam, works

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
_open: "dict[int, Batch]" = {}  # by thread: the innermost batch that is being gathered


def takes(operation: int, size: int, group: groups.Group) -> bool:
    """Leave a collective of this thread to the batch it is gathered in, if it is in one."""
    batch = _open.get(get_ident())
    if batch is None or batch.group is not group:
        return False
    batch.operation = batch.operation or operation
    batch.bytes = groups.UNKNOWN if min(size, batch.bytes) < 0 else batch.bytes + size
    return True


def wrap_manager(c10d: Any, original: Any) -> Any:
    """Wrap the function that makes coalescing managers.

    That of PyTorch 2.0 makes no work of its own: each operation in it is waited for by itself.
    """
    names = calls.names_of(original)
    if "async_ops" not in names:
        return original
    group_at, async_at = names.index("group"), names.index("async_ops")

    @functools.wraps(original)
    def manager(*arguments: Any, **keywords: Any) -> Any:
        made = original(*arguments, **keywords)
        if seam.is_compiling():
            return made
        try:
            given = len(arguments)
            asked = arguments[group_at] if given > group_at else keywords.get("group")
            late = arguments[async_at] if given > async_at else keywords.get("async_ops")
            group = groups.find(c10d, asked) if _probe.on else None  # type: ignore[attr-defined]
            return made if group is None else Batch(made, group, bool(late))
        except BaseException as error:
            failed(error)
        return made

    manager._is_clusterprof = True  # type: ignore[attr-defined]
    return manager


class Batch:
    """What stands in a `with` statement for the manager, and does what that does."""

    def __init__(self, made: Any, group: groups.Group, late: bool) -> None:
        self._made = made
        self._late = late
        self._outer: Optional[Batch] = None
        self._manager: Any = None
        self.group = group
        self.operation = 0
        self.bytes = 0
        self.messages: List[Tuple[int, int, int, int]] = []

    def __enter__(self) -> Any:
        try:
            self._manager = self._made.__enter__()
        except BaseException as error:
            without_our_frame(error)
            raise
        thread = get_ident()
        self._outer = _open.get(thread)
        _open[thread] = self
        works.gathering[thread] = self.messages
        return self._manager

    def __exit__(self, *exception: Any) -> Any:
        start = self._end()
        try:
            result = self._made.__exit__(*exception)
        except BaseException as error:
            without_our_frame(error)
            raise
        try:
            if start and exception[0] is None and _probe.on:  # type: ignore[attr-defined]
                self._ended(start, monotonic_ns())
        except BaseException as error:
            failed(error)
        return result

    def _end(self) -> int:
        thread = get_ident()
        if self._outer is None:
            _open.pop(thread, None)
            works.gathering.pop(thread, None)
        else:
            _open[thread] = self._outer
            works.gathering[thread] = self._outer.messages
        if not self.operation:
            return monotonic_ns()
        # Its number is taken when it ends: until then it is the next of its group.
        return ring.enter(self.group.number, groups.UNKNOWN, self.bytes, self.operation)

    def _ended(self, start: int, end: int) -> None:
        made = getattr(self._manager, "works", None) if self._late else None
        work = made[-1] if made else None
        number = self.group.number
        if self.operation:
            b = next(self.group.operations)
            form = layout.ISSUE if self._late else layout.BLOCKING
            d = self.operation | form << layout.FORM_SHIFT
            ring.emit(layout.COLLECTIVE, start, end, number, b, self.bytes, d)
            if work is not None:
                works.remember(work, number, b, self.bytes, d)
        elif self.messages and work is not None:
            first = sorted(self.messages, key=_receives_first)
            works.remember(work, *first[0], also=first[1:])


def _receives_first(message: Tuple[int, int, int, int]) -> bool:
    return message[3] & layout.OPERATION_MASK != layout.RECV


ring.after_fork += [_open.clear, works.gathering.clear]
