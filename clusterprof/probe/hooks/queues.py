"""Queues and futures: waits of the thread that trains for batches of the job's own threads.

A loop may have its batches made by a thread or a process of its own, a buffer around a data loader
or a pool, and take them out of a queue or a future. A queue counts as a source of batches when the
thread that trains takes from it in at least every second step; one that hands over something every
hundred steps, such as a checkpoint's writer, does not. All futures count as one queue.
"""

import functools
import sys
from _thread import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Tuple

from .. import annotations, handle_error, layout, remove_own_frame, ring
from . import batch_size, cuda
from .wrap import wrap_function

UNKNOWN = -1
MIN_WAIT_NS = 100_000
"""Shortest wait that is recorded."""
_MAX_QUEUES = 64
_FUTURES = 0  # key of all futures
_LOADERS = ("torch.utils.data.", "torchdata.stateful_dataloader.")
"""Beginnings of the names of modules whose own queues are part of a wait for a loader, or of its
restart between epochs."""
_FINISHED = "FINISHED"  # state of a future that need not be waited for

_taken: Dict[int, List[int]] = {}
"""By queue: items taken by the thread that trains, and the step in which the first one was."""

_counts: Optional[bool] = None
"""Whether samples are counted here: not if a data loader behind a queue counts them. None = not
known yet."""

WaitToken = Optional[Tuple[int, int, bool, Any]]


def install(module: ModuleType) -> bool:
    """Wrap what waits: of a module with queues itself, or after torch of those it has imported."""
    if module.__name__ == "multiprocessing.queues":
        for name in ("Queue", "SimpleQueue"):
            _wrap(getattr(module, name), "get", _begin_get)
        return True
    queues, futures = sys.modules.get("queue"), sys.modules.get("concurrent.futures._base")
    if queues is not None:
        _wrap(queues.Queue, "get", _begin_get)
    if futures is not None:
        _wrap(futures.Future, "result", _begin_result)
    return True


def _wrap(owner: Any, name: str, before: Callable[..., WaitToken]) -> None:
    """Wrap a function for the thread that trains; for others it costs a comparison."""
    original = getattr(owner, name)
    if getattr(original, "_is_clusterprof", False):
        return
    wrap_function(owner, name, _finish_wait, before, raised=_note_timeout)
    recorded = getattr(owner, name)

    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        try:
            if get_ident() != annotations.training_thread[0]:
                return original(*arguments, **keywords)
            return recorded(*arguments, **keywords)
        except BaseException as error:
            remove_own_frame(error)
            raise

    call._is_clusterprof = True  # type: ignore[attr-defined]
    setattr(owner, name, call)


def _begin_get(queue: Any, block: bool = True, timeout: Any = None) -> WaitToken:
    if not _may_wait():
        return None
    caller = sys._getframe(3).f_globals.get("__name__", "")
    if str(caller).startswith(_LOADERS):
        return None
    waits = block and not getattr(queue, "queue", None)  # else there is an item already
    return id(queue), monotonic_ns(), waits, cuda.begin_wait() if waits else None


def _begin_result(future: Any, timeout: Any = None) -> WaitToken:
    if not _may_wait():
        return None
    waits = getattr(future, "_state", _FINISHED) != _FINISHED
    return _FUTURES, monotonic_ns(), waits, cuda.begin_wait() if waits else None


def _may_wait() -> bool:
    """Return whether this thread trains, and is in no wait of a loader already.

    Processes that only serve others wait for queues, too: without a step nothing is recorded.
    """
    thread = get_ident()
    return (
        annotations.count_steps() > 0
        and annotations.is_training_thread(thread)
        and thread != annotations.loading_thread
    )


def _count_item(key: int) -> bool:
    """Count an item of a queue; return whether it is taken from in at least every second step."""
    step = annotations.count_steps()
    items_taken = _taken.get(key)
    if items_taken is None:
        if len(_taken) >= _MAX_QUEUES:  # those of earlier epochs
            _taken.clear()
        _taken[key] = [1, step]
        return False
    items_taken[0] += 1
    return 2 * (items_taken[0] - 1) >= step - items_taken[1]


def _finish_wait(
    wait: WaitToken, start: int, end: int, item: Any, *arguments: Any, **keywords: Any
) -> None:
    global _counts
    if wait is None:
        return
    key, _, waits, mark = wait
    is_batch = _count_item(key)
    if is_batch and waits and end - start >= MIN_WAIT_NS:
        _record_wait(mark, start, end)
    else:
        cuda.finish_wait(mark, 0, start, end)
    if is_batch:
        _counts = not annotations.has_batches() if _counts is None else _counts
        if _counts:
            batch_size.record_batch(item)


def _note_timeout(wait: Any) -> None:
    """Record a wait that ended without an item: the loop asks again, or gives up."""
    if wait is None:
        return
    key, start, waits, mark = wait
    try:  # the job's own exception is under way: none of ours may take its place
        items_taken, end = _taken.get(key), monotonic_ns()
        if waits and items_taken is not None and items_taken[0] > 1 and end - start >= MIN_WAIT_NS:
            _record_wait(mark, start, end)
        else:
            cuda.finish_wait(mark, 0, start, end)
    except BaseException as error:
        handle_error(error)


def _record_wait(mark: Any, start: int, end: int) -> None:
    sequence = ring.emit(layout.DATA_WAIT, start, end, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
    cuda.finish_wait(mark, sequence, start, end)


def _forget() -> None:
    global _counts
    _counts = None
    _taken.clear()


ring.after_fork.append(_forget)
