"""Workers on this machine, and outcomes of futures whose results may not arrive."""

from __future__ import annotations

import concurrent.futures
import os

import pytest

pytest.importorskip("distributed", reason="the extra [dask] is not installed")

from clusterprof.analysis.tasks.base import Cluster, TaskFailure
from clusterprof.analysis.tasks.dask_client import NOT_YET, get_outcome, open_client


class Late:
    """A future with a status, whose result does not arrive in time."""

    def __init__(self, status: str) -> None:
        self.status = status

    def result(self, timeout: float | None = None) -> object:
        raise concurrent.futures.TimeoutError


def test_a_finished_but_unfetchable_result_is_pending() -> None:
    # its worker had finished it, and died before it was fetched
    assert get_outcome(Late("finished"), 0.1) is NOT_YET


def test_a_task_failing_with_a_timeout_counts_as_failed() -> None:
    assert isinstance(get_outcome(Late("error"), 0.1), TaskFailure)


def test_workers_of_this_machine_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # Dask sets the first by default; with it every large array costs page faults
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with open_client(Cluster(workers=1)) as client:
        (of_worker,) = client.run(os.getenv, "MALLOC_TRIM_THRESHOLD_").values()
        (threads,) = client.run(os.getenv, "OMP_NUM_THREADS").values()
    assert of_worker is None
    assert threads == "1"
