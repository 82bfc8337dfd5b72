"""Connect to a Dask cluster, and check that its workers run the same clusterprof.

    with open_client(Cluster(scheduler="tcp://node1:8786")) as client:
        ...

The cluster is the user's; only `Cluster(workers=N)` starts workers, on this machine, and
stops them at the end. distributed is imported here and nowhere else at import time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

from clusterprof import __version__
from clusterprof.analysis.tasks.base import Cluster, Item, Result, TaskFailure, require_results
from clusterprof.errors import ClusterFailed, UsageError

TIMEOUTS = (TimeoutError, asyncio.TimeoutError)
"""The same class from Python 3.11 on."""
CONNECT_TIMEOUT_S = 20
WORKERS_TIMEOUT_S = 30
PATIENCE_S = 30.0
"""Time for which a node waits for a worker that sees it: a supervisor restarts dead workers."""
POLL_S = 2.0
SCHEDULER_LOST = TaskFailure(
    "the Dask scheduler went away before it was analyzed", "start the analysis again"
)
NO_WORKER = TaskFailure(
    "no worker is left that sees it", "start a worker on its node, or copy it to a shared folder"
)
RESULT_S = 10.0
"""Time for a result to arrive, doubled at each attempt: its worker may die on the way."""
NOT_YET = object()
LOST = "lost"
"""Status of a future whose result died with its worker: Dask computes it again."""
_WORKER_VARIABLES = "distributed.nanny.pre-spawn-environ"
RETRIES = 2
"""Further attempts of a task that failed; dead workers are counted by the scheduler itself."""


@contextmanager
def open_client(cluster: Cluster) -> Iterator[Any]:
    """Connect to a cluster that has workers of this version; tasks left over are cancelled.

    Raises: UsageError when distributed is missing, or the versions differ; ClusterFailed when the
    scheduler cannot be reached or has no workers.
    """
    try:
        import distributed
    except ImportError:
        raise UsageError(
            "analyzing on a Dask cluster needs distributed, which is not installed",
            "pip install 'clusterprof[dask]'",
        ) from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are reported by us
    with ExitStack() as stack:
        address: Any = cluster.scheduler or None
        if cluster.workers:
            address = stack.enter_context(_start_workers(distributed, cluster.workers))
        elif cluster.scheduler_file and not os.path.exists(cluster.scheduler_file):
            raise UsageError(
                f"{cluster.scheduler_file}: no such scheduler file",
                "start the scheduler with: dask scheduler --scheduler-file FILE",
            )
        where = cluster.scheduler or cluster.scheduler_file or "this machine"
        try:
            client = distributed.Client(
                address,
                scheduler_file=cluster.scheduler_file or None,
                timeout=CONNECT_TIMEOUT_S,
                set_as_default=False,
            )
        except (OSError, ValueError, TypeError) as error:
            raise ClusterFailed(
                f"cannot connect to the Dask scheduler at {where}: {error}",
                "check the address, that the scheduler runs, and TLS settings",
            ) from error
        stack.callback(client.close)
        try:
            client.wait_for_workers(1, timeout=WORKERS_TIMEOUT_S)
        except TIMEOUTS:
            raise ClusterFailed(
                f"the Dask scheduler at {where} has no workers",
                "start them: dask worker ADDRESS --nworkers N --nthreads 1",
            ) from None
        check_versions(client)
        yield client


@contextmanager
def _start_workers(distributed: Any, count: int) -> Iterator[Any]:
    """Start workers on this machine, one thread each: the analysis holds the interpreter lock."""
    import dask

    variables = dict(dask.config.get(_WORKER_VARIABLES))
    # glibc then maps every large array anew: ten times as many page faults.
    variables.pop("MALLOC_TRIM_THRESHOLD_", None)
    settings = {
        # A driver that answers with an error would keep the cluster from starting.
        "distributed.diagnostics.nvml": False,
        # Stacks of the worker, 100 times a second, for a dashboard that is not started.
        "distributed.worker.profile.enabled": False,
        _WORKER_VARIABLES: variables,
    }
    with (
        dask.config.set(settings),
        distributed.LocalCluster(
            n_workers=count,
            threads_per_worker=1,
            dashboard_address=None,
            scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
            local_directory=tempfile.gettempdir(),
            silence_logs=logging.CRITICAL,
        ) as local,
    ):
        yield local


def check_versions(client: Any) -> None:
    """Check that all workers run this version of clusterprof.

    Raises: UsageError when a worker has another one, or none.
    """
    # a function of the standard library: it can be called where clusterprof is missing
    import pydoc

    versions = client.run(pydoc.locate, "clusterprof.__version__", on_error="return")
    other_versions = Counter(str(found_version) for found_version in versions.values())
    del other_versions[__version__]
    if other_versions:
        (other, count), address = other_versions.most_common(1)[0], ""
        address = next(worker for worker, version in versions.items() if str(version) == other)
        other_text = f"clusterprof {other}" if other != "None" else "no clusterprof"
        raise UsageError(
            f"{count} of {len(versions)} workers have {other_text}, this machine has {__version__}"
            f" (first: {address})",
            f"install clusterprof {__version__} in the environment of the workers",
        )


def describe_failure(error: BaseException) -> TaskFailure:
    """Describe why a task of a cluster has no result."""
    if type(error).__name__ == "KilledWorker":
        return TaskFailure(
            "the workers died during the analysis, probably because memory ran out",
            "give the workers more memory, or start fewer of them per machine",
        )
    if isinstance(error, MemoryError):
        return TaskFailure("the worker's memory ran out", "give the workers more memory")
    return TaskFailure(f"its task failed: {type(error).__name__}: {error}")


def wait_for_futures(
    client: Any, futures: Sequence[Any], restrictions: Sequence[Sequence[str]]
) -> Iterator[tuple[int, Any]]:
    """Yield number and outcome of each future as it comes: its result or a TaskFailure.

    restrictions: for each the hosts or workers that may run it, () = all.
    """
    finished: queue.Queue[int] = queue.Queue()
    for index, future in enumerate(futures):
        future.add_done_callback(partial(put_number, finished, index))
    pending = set(range(len(futures)))
    lost: set[int] = set()
    patience_s = dict.fromkeys(pending, RESULT_S)
    watch = WorkerWatch(client, restrictions)
    while pending:
        for index in [index for index in lost if futures[index].status != LOST]:
            lost.discard(index)
            finished.put(index)
        with suppress(queue.Empty):
            index = finished.get(timeout=POLL_S)
            if index not in pending:
                continue
            is_lost = futures[index].status == LOST
            outcome = NOT_YET if is_lost else get_outcome(futures[index], patience_s[index])
            if outcome is not NOT_YET:
                pending.discard(index)
                yield index, outcome
                continue
            lost.add(index)
            patience_s[index] *= 1 if is_lost else 2
        if client.status != "running":
            yield from ((index, SCHEDULER_LOST) for index in sorted(pending))
            return
        for index in watch.list_unreachable(pending):
            pending.discard(index)
            client.cancel([futures[index]], force=True)
            yield index, NO_WORKER


def put_number(numbers: queue.Queue[int], number: int, _: Any) -> None:
    """Put the number of a future that is finished."""
    numbers.put(number)


def get_outcome(future: Any, timeout_s: float | None = None) -> Any:
    """Return the result of a finished future, or a TaskFailure.

    NOT_YET if the result did not arrive in time: the worker that had it may have died since.
    """
    if future.status == "cancelled":
        return SCHEDULER_LOST
    try:
        return future.result(timeout=timeout_s)
    except Exception as error:
        if type(error).__name__ == "TimeoutError" and future.status != "error":
            return NOT_YET
        is_lost = type(error).__name__ in ("CancelledError", "FutureCancelledError")
        return SCHEDULER_LOST if is_lost else describe_failure(error)


class WorkerWatch:
    """Notices nodes that no living worker sees."""

    def __init__(self, client: Any, restrictions: Sequence[Sequence[str]]) -> None:
        """Take the hosts or workers that see each node, () = all."""
        self._client = client
        self._restrictions = restrictions
        self._since_s: dict[int, float] = {}

    def list_unreachable(self, nodes: Collection[int]) -> list[int]:
        """List those of some nodes that no worker has seen for PATIENCE_S."""
        workers = self._client.nthreads()
        places = {*workers, *map(get_host, workers)}
        now_s, out = time.monotonic(), []
        for index in nodes:
            wanted = self._restrictions[index]
            if places.intersection(wanted) if wanted else workers:
                self._since_s.pop(index, None)
            elif now_s - self._since_s.setdefault(index, now_s) >= PATIENCE_S:
                out.append(index)
        return out


def get_host(worker: str) -> str:
    """Return the host in a worker's address: tcp://10.0.0.1:4000 -> 10.0.0.1."""
    return worker.rpartition("://")[2].rpartition(":")[0]


class DaskRunner:
    """Runs tasks on the workers of a cluster."""

    def __init__(self, client: Any, restrictions: Sequence[Sequence[str]] = ()) -> None:
        """Take a connected client.

        restrictions: for each item the hosts or workers that may run it, () = all.
        """
        self._client = client
        self._restrictions = restrictions

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the result of each item, in order.

        Raises: ClusterprofError for the first that is missing.
        """
        return require_results(self.run_tasks(function, items))

    def run_tasks(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Iterator[Result | TaskFailure]:
        """Yield the result of each item, in order; a TaskFailure where there is none."""
        restrictions = self._restrictions or [()] * len(items)
        futures = [
            self._client.submit(
                function, item, workers=list(readers) or None, pure=False, retries=RETRIES
            )
            for item, readers in zip(items, restrictions)
        ]
        outcomes: dict[int, Result | TaskFailure] = {}
        number = 0
        for index, outcome in wait_for_futures(self._client, futures, restrictions):
            outcomes[index] = outcome
            while number in outcomes:
                yield outcomes.pop(number)
                number += 1
