"""Which workers may read a recording, by what each of them sees."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterprof.analysis.tasks.dask_client import get_host
from clusterprof.analysis.tasks.remote_nodes import SeenFolder, SeenPath
from clusterprof.analysis.tasks.remote_recordings import (
    RemoteSource,
    find_remote_sources,
    restrict_workers,
)
from clusterprof.errors import ClusterFailed, NoRecording

A1, A2, B1 = "tcp://10.0.0.1:4001", "tcp://10.0.0.1:4002", "tcp://10.0.0.2:4001"
RUN = Path("/local/run")


class FakeClient:
    """Answers for workers that see what a test says."""

    def __init__(self, seen: Mapping[str, Any]) -> None:
        self._seen = seen

    def nthreads(self) -> dict[str, int]:
        return dict.fromkeys(self._seen, 1)

    def run(self, function: object, paths: list[Path], on_error: str) -> dict[str, Any]:
        assert paths == [RUN] and on_error == "return"
        return dict(self._seen)


def sees(*folders: tuple[str, int]) -> list[SeenPath]:
    return [SeenPath(True, tuple(SeenFolder(RUN / name, sum_) for name, sum_ in folders))]


def test_workers_of_a_host_are_merged_unless_different() -> None:
    assert get_host(A1) == "10.0.0.1" and get_host("tls://[fd00::1]:80") == "[fd00::1]"
    assert restrict_workers({A1, A2, B1}, [A1, A2, B1]) == ()
    assert restrict_workers({A1, A2}, [A1, A2, B1]) == ("10.0.0.1",)
    assert restrict_workers({A1}, [A1, A2, B1]) == (A1,)


def test_recordings_on_local_disks_are_read_by_their_hosts() -> None:
    seen = {A1: sees(("node-a", 1)), A2: sees(("node-a", 1)), B1: sees(("node-b", 2))}
    sources, skipped = find_remote_sources(FakeClient(seen), [RUN])
    assert sources == [
        RemoteSource(RUN / "node-a", ("10.0.0.1",)),
        RemoteSource(RUN / "node-b", ("10.0.0.2",)),
    ]
    assert skipped == []


def test_equal_paths_with_other_contents_are_two_recordings() -> None:
    seen = {A1: sees(("node", 1)), B1: sees(("node", 2))}
    sources, _ = find_remote_sources(FakeClient(seen), [RUN])
    assert [source.workers for source in sources] == [("10.0.0.1",), ("10.0.0.2",)]


def test_a_folder_that_some_worker_can_read_is_not_missing() -> None:
    closed = [SeenPath(True, (), ((RUN / "node-a", "permission denied"),), "no recording")]
    open_to_b = {A1: closed, B1: sees(("node-a", 1))}
    sources, skipped = find_remote_sources(FakeClient(open_to_b), [RUN])
    assert [source.workers for source in sources] == [("10.0.0.2",)] and skipped == []
    both = {A1: closed, B1: sees(("node-b", 1))}
    _, skipped = find_remote_sources(FakeClient(both), [RUN])
    assert [(node.path, node.why) for node in skipped] == [(RUN / "node-a", "permission denied")]


def test_missing_remote_recordings_raise_an_error() -> None:
    with pytest.raises(NoRecording, match="no worker sees this path"):
        find_remote_sources(FakeClient({A1: [SeenPath(False)]}), [RUN])
    with pytest.raises(NoRecording, match="/local/run: empty"):
        find_remote_sources(FakeClient({A1: [SeenPath(True, why_none="empty")]}), [RUN])
    with pytest.raises(ClusterFailed, match="no worker can look"):
        find_remote_sources(FakeClient({A1: ImportError("clusterprof")}), [RUN])
