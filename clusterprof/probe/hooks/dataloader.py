"""torch.utils.data: the waits of the main process and the fetches of each worker.

torchdata's StatefulDataLoader waits through torch's base class, and its workers fetch with torch's
fetchers; only the starts of its iterators and workers are its own.
"""

import os
import sys
from time import monotonic_ns
from types import ModuleType
from typing import Any, Optional, Tuple

from .. import annotations, layout, ring, stacks
from . import batch_size, cuda, outermost_calls
from .wrap import wrap_function

UNKNOWN = -1
MIN_PRIMING_NS = 1_000_000
"""The least time for the first tasks of an epoch that is recorded."""

WaitToken = Optional[Tuple[int, int, int, int, Any]]


_STATEFUL_ITERATORS = (
    "_StatefulSingleProcessDataLoaderIter",
    "_StatefulMultiProcessingDataLoaderIter",
)


def install(module: ModuleType) -> bool:
    """Wrap iterators in the main process, and the fetches of workers or of the main process."""
    if str(getattr(module, "__name__", "")).startswith("torchdata."):
        return _install_stateful(module)
    utils: Any = module._utils  # type: ignore[attr-defined]
    single = module._SingleProcessDataLoaderIter  # type: ignore[attr-defined]
    multiple = module._MultiProcessingDataLoaderIter  # type: ignore[attr-defined]
    iterator: Any = module._BaseDataLoaderIter  # type: ignore[attr-defined]
    wrap_function(iterator, "__next__", _finish_wait, _begin_wait, raised=end_wait)
    wrap_function(single, "__init__", record_loader_start)
    wrap_function(multiple, "__init__", record_loader_start)
    if hasattr(multiple, "_reset"):
        wrap_function(multiple, "_reset", _finish_priming, _begin_priming, raised=end_wait)
    wrap_function(utils.fetch._MapDatasetFetcher, "fetch", _finish_fetch, _begin_fetch)
    wrap_function(utils.fetch._IterableDatasetFetcher, "fetch", _finish_fetch, _begin_fetch)
    wrap_worker_loop(utils.worker)
    return True


def _install_stateful(module: ModuleType) -> bool:
    """Wrap the worker loop in its module, and the iterators in theirs."""
    if hasattr(module, "_worker_loop") and module.__name__.endswith(".worker"):
        wrap_worker_loop(module)
        return True
    for name in _STATEFUL_ITERATORS:
        iterator = getattr(module, name)
        wrap_function(iterator, "__init__", record_loader_start)
        if "_reset" in vars(iterator) and hasattr(iterator, "_try_put_index"):
            wrap_function(iterator, "_reset", _finish_priming, _begin_priming, raised=end_wait)
    return True


def _begin_wait(iterator: Any) -> WaitToken:
    if not annotations.begin_loading():
        return None  # a thread that fetches ahead delays the loop only if its buffer is empty
    workers = iterator._num_workers
    yielded = iterator._num_yielded
    if outermost_calls.open_evaluations:
        outermost_calls.bound_evaluations(monotonic_ns())
    pid = _find_critical_pid(iterator) if workers else 0
    return yielded, pid, workers, int(not yielded), cuda.begin_wait()


def _finish_wait(wait: WaitToken, start: int, end: int, data: Any, iterator: Any) -> None:
    if wait is None:
        annotations.begin_first_step(start)
        batch_size.record_batch(data)
        return
    annotations.end_loading()
    number, pid, workers, first, mark = wait
    annotations.begin_first_step(start)
    annotations.note_batch(id(getattr(iterator, "_dataset", iterator)), start)
    sequence = ring.emit(layout.DATA_WAIT, start, end, number, pid, workers, first)
    cuda.finish_wait(mark, sequence, start, end)
    batch_size.record_batch(data)


def _begin_priming(*unused: Any, **keywords: Any) -> Optional[bool]:
    return annotations.begin_loading() or None


def _finish_priming(
    wait: Optional[bool],
    start: int,
    end: int,
    result: None,
    iterator: Any,
    *rest: Any,
    **names: Any,
) -> None:
    """Record how long an epoch took to begin: the loop waits while its thread draws indices.

    Here a sampler sorts or shuffles its data set. The first tasks go to the workers.
    """
    if wait is not None:
        annotations.end_loading()
        annotations.begin_first_step(start)
        if end - start >= MIN_PRIMING_NS:
            ring.emit(layout.DATA_WAIT, start, end, UNKNOWN, 0, iterator._num_workers, 0)


def end_wait(wait: Any) -> None:
    """Note that a loader raised instead of delivering a batch, at the end of an epoch."""
    if wait is not None:
        annotations.end_loading()


def _find_critical_pid(iterator: Any) -> int:
    """Return the pid of the worker that builds the next batch to be delivered, -1 if unknown.

    Inspects the state that _MultiProcessingDataLoaderIter._next_data() uses, and changes
    nothing.
    """
    if not getattr(iterator, "_in_order", True):
        return UNKNOWN  # any worker may deliver first
    tasks = iterator._task_info
    active = iterator._workers_status
    for index in range(iterator._rcvd_idx, iterator._send_idx):
        task = tasks.get(index)
        if task and (len(task) == 2 or active[task[0]]):
            return int(iterator._workers[task[0]].pid or UNKNOWN)
    return UNKNOWN


def record_loader_start(
    token: None, start: int, end: int, result: None, iterator: Any, *loader: Any, **keywords: Any
) -> None:
    """Record the configuration of a loader, once its iterator is created."""
    annotations.begin_first_step(start)
    ring.emit(
        layout.LOADER_START,
        start,
        end,
        iterator._num_workers,
        int(bool(iterator._pin_memory)),
        int(getattr(iterator, "_prefetch_factor", 0) or 0),
        int(bool(iterator._persistent_workers)),
    )


def _begin_fetch(fetcher: Any, index: Any) -> Any:
    stacks.note_fetch()
    return annotations.read_usage()


def _finish_fetch(before: Any, start: int, end: int, data: Any, fetcher: Any, index: Any) -> None:
    used = annotations.compute_usage_since(before)
    items = len(index) if fetcher.auto_collation and hasattr(index, "__len__") else 1
    ring.emit(layout.FETCH, start, end, items, *used)


def wrap_worker_loop(module: Any) -> None:
    """Record where a worker's loop begins.

    The name is looked up in its module both by the process that starts a worker and, when
    it is spawned, by pickle in the worker; functools.wraps keeps the name that pickle
    writes.
    """
    code = getattr(module._worker_loop, "__wrapped__", module._worker_loop).__code__
    worker_at = code.co_varnames.index("worker_id")
    workers_at = code.co_varnames.index("num_workers")

    def record_start(*arguments: Any) -> None:
        ring.helper = True
        now_ns = monotonic_ns()
        worker, workers = arguments[worker_at], arguments[workers_at]
        ring.emit(layout.WORKER_START, now_ns, now_ns, worker, workers, _find_loader_pid())

    wrap_function(module, "_worker_loop", lambda *unused: None, record_start)


def _find_loader_pid() -> int:
    """Return the process whose loader started this worker; not always its parent process."""
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)()
    return getattr(parent, "pid", None) or os.getppid()
