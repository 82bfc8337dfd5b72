"""Operations inside a coalescing manager, recorded as one operation of the group at its end.

    with _coalescing_manager(group, async_ops=True) as manager:
        all_reduce(a)      no span: deferred, or not distinguishable from the others
        all_reduce(b)
                           one span: an all_reduce with the bytes of both
    manager.wait()         its wait

Sends and receives keep their own spans and numbers; where the backend combines them
into one work, the wait for it is recorded for each of them, receives first.
"""

import functools
import sys
from _thread import get_ident
from time import monotonic_ns
from typing import Any, List, Optional, Tuple

from .. import handle_error, layout, remove_own_frame, ring
from . import other_calls, pending_work, process_groups, wrap

_probe = sys.modules[__name__.rpartition(".hooks.")[0]]
# by thread: the innermost open batch
_open_batches: "dict[int, CoalescedBatch]" = {}


def append_to_batch(operation: int, size: int, group: process_groups.Group) -> bool:
    """Add a collective of this thread to the open batch of its group; False if there is none."""
    batch = _open_batches.get(get_ident())
    if batch is None or batch.group is not group:
        return False
    batch.operation = batch.operation or operation
    batch.bytes = process_groups.UNKNOWN if min(size, batch.bytes) < 0 else batch.bytes + size
    return True


def wrap_manager(c10d: Any, original: Any) -> Any:
    """Wrap the function that makes coalescing managers.

    In PyTorch 2.0 it creates no combined work and each operation is waited for separately,
    so it is returned unchanged.
    """
    names = other_calls.list_argument_names(original)
    if "async_ops" not in names:
        return original
    group_at, async_at = names.index("group"), names.index("async_ops")

    @functools.wraps(original)
    def manager(*arguments: Any, **keywords: Any) -> Any:
        original_manager = original(*arguments, **keywords)
        if wrap.is_compiling():
            return original_manager
        try:
            argument_count = len(arguments)
            process_group = (
                arguments[group_at] if argument_count > group_at else keywords.get("group")
            )
            is_async = (
                arguments[async_at] if argument_count > async_at else keywords.get("async_ops")
            )
            group = process_groups.find_group(c10d, process_group) if _probe.on else None  # type: ignore[attr-defined]
            return (
                original_manager
                if group is None
                else CoalescedBatch(original_manager, group, bool(is_async))
            )
        except BaseException as error:
            handle_error(error)
        return original_manager

    manager._is_clusterprof = True  # type: ignore[attr-defined]
    return manager


class CoalescedBatch:
    """Replaces the manager in a `with` statement and forwards to it."""

    def __init__(self, wrapped: Any, group: process_groups.Group, is_async: bool) -> None:
        self._wrapped = wrapped
        self._is_async = is_async
        self._outer: Optional[CoalescedBatch] = None
        self._manager: Any = None
        self.group = group
        self.operation = 0
        self.bytes = 0
        self.messages: List[Tuple[int, int, int, int]] = []

    def __enter__(self) -> Any:
        try:
            self._manager = self._wrapped.__enter__()
        except BaseException as error:
            remove_own_frame(error)
            raise
        thread = get_ident()
        self._outer = _open_batches.get(thread)
        _open_batches[thread] = self
        pending_work.coalescing_spans[thread] = self.messages
        return self._manager

    def __exit__(self, *exception: Any) -> Any:
        start = self._leave()
        try:
            result = self._wrapped.__exit__(*exception)
        except BaseException as error:
            remove_own_frame(error)
            raise
        try:
            if start and exception[0] is None and _probe.on:  # type: ignore[attr-defined]
                self._record(start, monotonic_ns())
        except BaseException as error:
            handle_error(error)
        return result

    def _leave(self) -> int:
        thread = get_ident()
        if self._outer is None:
            _open_batches.pop(thread, None)
            pending_work.coalescing_spans.pop(thread, None)
        else:
            _open_batches[thread] = self._outer
            pending_work.coalescing_spans[thread] = self._outer.messages
        if not self.operation:
            return monotonic_ns()
        # Its number is assigned when it ends; until then it is the next of its group.
        return ring.enter(self.group.number, process_groups.UNKNOWN, self.bytes, self.operation)

    def _record(self, start: int, end: int) -> None:
        pending_works = getattr(self._manager, "works", None) if self._is_async else None
        work = pending_works[-1] if pending_works else None
        number = self.group.number
        if self.operation:
            b = next(self.group.operations)
            form = layout.ISSUE if self._is_async else layout.BLOCKING
            d = self.operation | form << layout.FORM_SHIFT
            ring.emit(layout.COLLECTIVE, start, end, number, b, self.bytes, d)
            if work is not None:
                pending_work.register_work(work, number, b, self.bytes, d)
        elif self.messages and work is not None:
            messages = sorted(self.messages, key=_is_not_receive)
            pending_work.register_work(work, *messages[0], further_spans=messages[1:])


def _is_not_receive(message: Tuple[int, int, int, int]) -> bool:
    return message[3] & layout.OPERATION_MASK != layout.RECV


ring.after_fork += [_open_batches.clear, pending_work.coalescing_spans.clear]
