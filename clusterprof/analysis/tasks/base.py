"""Map a function over items: in this process, or in a pool of processes of this machine.

    with PoolRunner(8) as pool:
        for result in pool.map(function, items):
            ...

Results come in the order of the items, whichever is finished first: a report must not
depend on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from clusterprof.errors import ClusterprofError, UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_POOL_STARTS = 3
"""Pools started for one map: when a process of a pool dies, the pool is unusable."""
_DIED = "the analysis process died, probably because memory ran out"
_DIED_HINT = "analyze with fewer --jobs, or where there is more memory"


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """The reason why a task has no result."""

    why: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Dask cluster that an analysis runs on; at most one field is set."""

    scheduler: str = ""
    """Address of its scheduler, such as tcp://node1:8786."""
    scheduler_file: str = ""
    """File that the scheduler wrote its address to."""
    workers: int = 0
    """Number of workers to start on this machine."""

    def __bool__(self) -> bool:
        return bool(self.scheduler or self.scheduler_file or self.workers)


NO_CLUSTER = Cluster()


def build_cluster(
    scheduler: str | None, scheduler_file: str | None, workers: int | None
) -> Cluster:
    """Build the cluster that the options name.

    Raises: UsageError for more than one of them.
    """
    cluster = Cluster(scheduler or "", scheduler_file or "", workers or 0)
    if bool(cluster.scheduler) + bool(cluster.scheduler_file) + bool(cluster.workers) > 1:
        raise UsageError(
            "--scheduler, --scheduler-file and --workers exclude each other",
            "--workers starts workers on this machine; the others use a cluster that runs",
        )
    return cluster


class TaskRunner(Protocol):
    """Runs the same function on many items."""

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the result of each item, in the order of the items.

        function: at module level, or a partial of such a function.
        Raises: what the function raises; ClusterprofError where an item has no result.
        """
        ...

    def run_tasks(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[Result | TaskFailure]:
        """Yield as `map`, with a TaskFailure in place of each result that is missing."""
        ...


def require_results(results: Iterator[Result | TaskFailure]) -> Iterator[Result]:
    """Yield results.

    Raises: ClusterprofError at the first that is missing.
    """
    for result in results:
        if isinstance(result, TaskFailure):
            raise ClusterprofError(result.why, result.remedy)
        yield result


class PoolRunner:
    """Runs tasks in processes of this machine, which are started for the first task."""

    def __init__(self, processes: int) -> None:
        """Take the number of processes; with 1 all tasks run in this one."""
        self._processes = processes
        self._pool: Any = None

    def __enter__(self) -> PoolRunner:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        self._close(wait=kind is None)

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the result of each item, in order.

        Raises: what the function raises; ClusterprofError when a process dies again and again.
        """
        return require_results(self.run_tasks(function, items))

    def run_tasks(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[Result | TaskFailure]:
        """Yield the result of each item, in order; a TaskFailure where its process died.

        After a death the unfinished items run again, in the end each with nothing beside it. A
        single item runs in this process, unless others run: its memory is then added to theirs.
        """
        if self._processes == 1 or (len(items) == 1 and self._pool is None):
            yield from map(function, items)
            return
        outcomes: dict[int, Result | TaskFailure] = {}
        number = 0
        for attempt in range(MAX_POOL_STARTS):
            remaining = [index for index in range(number, len(items)) if index not in outcomes]
            is_last = attempt == MAX_POOL_STARTS - 1
            for batch in [[index] for index in remaining] if is_last else [remaining]:
                for index, result in self._run_batch(function, items, batch):
                    outcomes[index] = result
                    while number in outcomes:
                        yield outcomes.pop(number)
                        number += 1
                if is_last and batch[0] >= number:
                    outcomes.setdefault(batch[0], TaskFailure(_DIED, _DIED_HINT))
                while number in outcomes:
                    yield outcomes.pop(number)
                    number += 1
            if number == len(items):
                return

    def _run_batch(
        self, function: Callable[[Item], Result], items: Sequence[Item], batch: Sequence[int]
    ) -> Iterator[tuple[int, Result]]:
        """Yield number and result of the items of a batch; without those lost with a process."""
        from concurrent.futures.process import BrokenProcessPool

        self._open()
        remaining, futures = deque(batch), deque[tuple[int, Any]]()
        while remaining or futures:
            # few at a time: an item of a large job holds tables of all its ranks
            while remaining and self._pool is not None and len(futures) < 2 * self._processes:
                try:
                    futures.append((remaining[0], self._pool.submit(function, items[remaining[0]])))
                    remaining.popleft()
                except BrokenProcessPool:
                    self._close(wait=False)
            if not futures:
                return
            index, future = futures.popleft()
            if self._pool is None and not _has_result(future):
                continue
            try:
                yield index, future.result()
            except BrokenProcessPool:
                self._close(wait=False)

    def _open(self) -> None:
        if self._pool is None:
            from concurrent.futures import ProcessPoolExecutor  # not needed in a single process
            from multiprocessing import get_context

            self._pool = ProcessPoolExecutor(
                self._processes, mp_context=get_context("spawn"), initializer=_prepare_process
            )

    def _close(self, wait: bool) -> None:
        """End the pool. wait: let idle workers exit; otherwise cancel their tasks and end them."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        processes: dict[int, Any] = dict(getattr(pool, "_processes", None) or {})
        pool.shutdown(wait=wait, cancel_futures=True)
        if not wait:
            for process in processes.values():
                process.terminate()


def _has_result(future: Any) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _prepare_process() -> None:
    """Leave Ctrl-C, which a terminal sends to all processes, to the parent; end with it."""
    import signal
    import threading

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    import os
    from multiprocessing import parent_process

    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
