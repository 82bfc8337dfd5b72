"""torch.utils.data: what the main process waits for, and what each worker does meanwhile."""

import os
import sys
from time import monotonic_ns
from types import ModuleType
from typing import Any, Tuple

from .. import layout, ring, steps, usage
from . import batch, cuda
from .seam import wrap

UNKNOWN = -1

Wait = Tuple[int, int, int, int, Any]


def install(module: ModuleType) -> bool:
    """Wrap iterators in the main process and the fetch in the workers (and without workers)."""
    utils: Any = module._utils  # type: ignore[attr-defined]
    single = module._SingleProcessDataLoaderIter  # type: ignore[attr-defined]
    several = module._MultiProcessingDataLoaderIter  # type: ignore[attr-defined]
    wrap(module._BaseDataLoaderIter, "__next__", _waited, _waits)  # type: ignore[attr-defined]
    wrap(single, "__init__", started)
    wrap(several, "__init__", started)
    wrap(utils.fetch._MapDatasetFetcher, "fetch", _fetched, _fetches)
    wrap(utils.fetch._IterableDatasetFetcher, "fetch", _fetched, _fetches)
    wrap_worker_loop(utils.worker)
    return True


def _waits(iterator: Any) -> Wait:
    workers = iterator._num_workers
    yielded = iterator._num_yielded
    pid = _critical_pid(iterator) if workers else 0
    return yielded, pid, workers, int(not yielded), cuda.before_wait()


def _waited(wait: Wait, start: int, end: int, data: Any, iterator: Any) -> None:
    number, pid, workers, first, mark = wait
    steps.saw(start)
    sequence = ring.emit(layout.DATA_WAIT, start, end, number, pid, workers, first)
    cuda.after_wait(mark, sequence, start, end)
    batch.handed_over(data)


def _critical_pid(iterator: Any) -> int:
    """Return the pid of the worker that owns the batch to be handed out next.

    Looks where _MultiProcessingDataLoaderIter._next_data() will look, and changes nothing.
    """
    if not getattr(iterator, "_in_order", True):
        return UNKNOWN  # whichever worker is first
    tasks = iterator._task_info
    active = iterator._workers_status
    for index in range(iterator._rcvd_idx, iterator._send_idx):
        task = tasks.get(index)
        if task and (len(task) == 2 or active[task[0]]):
            return int(iterator._workers[task[0]].pid or UNKNOWN)
    return UNKNOWN


def started(
    token: None, start: int, end: int, result: None, iterator: Any, *loader: Any, **keywords: Any
) -> None:
    """Record how a loader is set up, once its iterator is made."""
    steps.saw(start)
    ring.emit(
        layout.LOADER_START,
        start,
        end,
        iterator._num_workers,
        int(bool(iterator._pin_memory)),
        int(getattr(iterator, "_prefetch_factor", 0) or 0),
        int(bool(iterator._persistent_workers)),
    )


def _fetches(fetcher: Any, index: Any) -> Any:
    return usage.usage()


def _fetched(before: Any, start: int, end: int, data: Any, fetcher: Any, index: Any) -> None:
    used = usage.used_since(before)
    items = len(index) if fetcher.auto_collation and hasattr(index, "__len__") else 1
    ring.emit(layout.FETCH, start, end, items, *used)


def wrap_worker_loop(module: Any) -> None:
    """Mark where a worker's loop begins.

    The name is looked up in its module both by the process that starts a worker and, when it is
    spawned, by pickle in the worker; functools.wraps keeps the name that pickle writes.
    """
    code = getattr(module._worker_loop, "__wrapped__", module._worker_loop).__code__
    worker_at = code.co_varnames.index("worker_id")
    workers_at = code.co_varnames.index("num_workers")

    def begins(*arguments: Any) -> None:
        ring.helper = True
        now = monotonic_ns()
        worker, workers = arguments[worker_at], arguments[workers_at]
        ring.emit(layout.WORKER_START, now, now, worker, workers, _loader_pid())

    wrap(module, "_worker_loop", lambda *unused: None, begins)


def _loader_pid() -> int:
    """Return the process whose loader started this worker; with a fork server not its parent."""
    parent = getattr(sys.modules.get("multiprocessing.process"), "parent_process", lambda: None)()
    return getattr(parent, "pid", None) or os.getppid()
