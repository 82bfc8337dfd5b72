"""A Dask cluster whose workers share the folder of the recording gives the report of the pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clusterprof.analysis.node.selection import Instant, PartOfRun, Progress
from clusterprof.analysis.pipeline import AnalysisRequest, analyze, analyze_with_request
from clusterprof.analysis.tasks import dask_client, dask_engine
from clusterprof.analysis.tasks.base import Cluster
from clusterprof.cli.app import main
from clusterprof.cli.common import choose_cluster
from clusterprof.errors import ClusterFailed, NoRecording, UsageError
from clusterprof.output.renderers.json import Json
from clusterprof.report.model import Report
from tests.support.dask_cluster import DaskCluster, run_cluster
from tests.support.recordings import write_recording
from tests.support.waiting_jobs import make_scripts

pytest.importorskip("distributed", reason="needs distributed: pip install 'clusterprof[dask]'")

WORKERS = 3
NODES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of six nodes, a rank each; the first three wait for storage longer."""
    path = tmp_path_factory.mktemp("shared") / "run"
    rows = [(0.2 if number < 3 else 0.0, 0.3) for number in range(NODES)]
    for number, script in enumerate(make_scripts(*rows)):
        write_recording(script, path / f"node-{number}")
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskCluster]:
    with run_cluster(tmp_path_factory.mktemp("cluster"), WORKERS) as running:
        yield running


@pytest.fixture
def all_workers(cluster: DaskCluster) -> Iterator[DaskCluster]:
    """The cluster with all its workers; those that a test kills are started again."""
    yield cluster
    for number in range(WORKERS):
        if str(number) not in cluster.workers:
            cluster.start_worker(str(number))
    cluster.wait_for_workers(WORKERS)


def render(report: Report) -> str:
    return Json().render(report)


def analyze_on(
    cluster: DaskCluster, folder: Path, on_progress: Callable[[Progress], None] | None = None
) -> Report:
    request = AnalysisRequest(history=True, cluster=cluster.address, on_progress=on_progress)
    return analyze_with_request([folder], request)


def test_every_command_gives_the_same_bytes_as_the_process_pool(
    folder: Path, cluster: DaskCluster, tmp_path: Path
) -> None:
    pool, dask = tmp_path / "pool.json", tmp_path / "dask.json"
    on_cluster = ["--scheduler-file", str(cluster.scheduler_file)]
    for command in (
        ["analyze", str(folder), "--json"],
        ["gate", str(folder), "--json", "--assert", "gpu.busy_ratio >= 1%"],
        ["export", str(folder), "--to", "json"],
    ):
        codes = [
            main([*command, "-o", str(pool), "--jobs", "2"]),
            main([*command, "-o", str(dask), *on_cluster]),
        ]
        assert codes[0] == codes[1]
        assert dask.read_bytes() == pool.read_bytes()
        assert len(pool.read_bytes()) > 500


def test_progress_counts_finished_nodes(folder: Path, cluster: DaskCluster) -> None:
    recorded: list[Progress] = []
    analyze_on(cluster, folder, recorded.append)
    assert [progress.nodes for progress in recorded] == [1, 2, 3, 4, 5, 6]
    assert recorded[-1].read_bytes == recorded[-1].all_bytes > 0


def test_a_part_of_the_run_gives_the_same_report(folder: Path, cluster: DaskCluster) -> None:
    part = PartOfRun(since=Instant(10_000_000_000), description="--since 10s")
    here = analyze_with_request([folder], AnalysisRequest(part=part))
    there = analyze_with_request([folder], AnalysisRequest(part=part, cluster=cluster.address))
    assert there == here


def test_a_worker_killed_after_all_nodes_is_replaced(
    folder: Path, all_workers: DaskCluster
) -> None:
    """It dies when all nodes are done: what it had stored must be computed again."""
    expected = render(analyze(folder, history=True))

    def kill_at_the_end(progress: Progress) -> None:
        if progress.nodes == NODES:
            all_workers.kill_worker("1")

    assert render(analyze_on(all_workers, folder, kill_at_the_end)) == expected


def test_a_worker_killed_during_the_analysis_is_replaced(
    folder: Path, all_workers: DaskCluster
) -> None:
    expected = render(analyze(folder, history=True))

    def kill_at_once(progress: Progress) -> None:
        if progress.nodes == 1:
            all_workers.kill_worker("2")

    assert render(analyze_on(all_workers, folder, kill_at_once)) == expected


def test_damaged_recordings_give_the_same_report(
    folder: Path, cluster: DaskCluster, tmp_path: Path
) -> None:
    for node in folder.iterdir():
        (tmp_path / node.name).mkdir()
        data = bytearray((node / "000001.cpf").read_bytes())
        if node.name == "node-2":
            data[3000:3500] = bytes(500)
        (tmp_path / node.name / "000001.cpf").write_bytes(data)
    expected = analyze(tmp_path)
    assert any("damaged" in blind.message for blind in expected.coverage_gaps)
    assert analyze(tmp_path, cluster=cluster.address) == expected


def test_workers_of_another_version_are_an_error(
    folder: Path, cluster: DaskCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clusterprof import __version__

    monkeypatch.setattr(dask_client, "__version__", "9.9.9")
    with pytest.raises(UsageError) as caught:
        analyze_on(cluster, folder)
    assert f"3 of 3 workers have clusterprof {__version__}" in caught.value.message
    assert "this machine has 9.9.9" in caught.value.message


def test_a_late_worker_of_another_version_is_refused(
    folder: Path, cluster: DaskCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_engine, "__version__", "9.9.9")
    with pytest.raises(NoRecording, match=r"a worker has clusterprof .*, not 9\.9\.9"):
        analyze_on(cluster, folder)


def test_a_path_unseen_by_all_workers_is_an_error(cluster: DaskCluster, tmp_path: Path) -> None:
    with pytest.raises(NoRecording, match="no worker sees this path"):
        analyze_on(cluster, tmp_path / "missing")


def test_an_unreachable_scheduler_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dask_client, "CONNECT_TIMEOUT_S", 1)
    with pytest.raises(ClusterFailed, match="cannot connect to the Dask scheduler") as caught:
        analyze(folder, cluster=Cluster(scheduler="tcp://127.0.0.1:9"))
    assert caught.value.exit_code == 5
    with pytest.raises(UsageError, match="no such scheduler file"):
        analyze(folder, cluster=Cluster(scheduler_file=str(tmp_path / "none.json")))
    with pytest.raises(UsageError, match="exclude each other"):
        choose_cluster("tcp://127.0.0.1:9", None, 2)


def test_a_lost_scheduler_leaves_a_report_of_finished_nodes(folder: Path, tmp_path: Path) -> None:
    """The nodes that were finished are analyzed; the others, and all waits, are missing."""
    with run_cluster(tmp_path, 1) as own:

        def kill_scheduler(progress: Progress) -> None:
            if progress.nodes == 2:
                own.kill_scheduler()

        report = analyze_on(own, folder, kill_scheduler)
    assert 2 <= len(report.nodes) < NODES
    lost = [blind for blind in report.coverage_gaps if blind.kind == "lost"]
    assert len(lost) == NODES - len(report.nodes) + 1
    assert all("scheduler went away" in blind.message for blind in lost)
    assert lost[-1].what.endswith("waits between ranks")


def test_local_workers_give_the_same_report(folder: Path, tmp_path: Path) -> None:
    assert (
        main(["analyze", str(folder), "--json", "-o", str(tmp_path / "a"), "--workers", "1"]) == 0
    )
    assert main(["analyze", str(folder), "--json", "-o", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_ctrl_c_cancels_pending_tasks(folder: Path, cluster: DaskCluster) -> None:
    from distributed import Client

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        analyze_on(cluster, folder, interrupt)
    file = str(cluster.scheduler_file)
    with Client(scheduler_file=file, set_as_default=False) as client:
        until = time.monotonic() + 30
        while sum(map(len, client.processing().values())) or any(client.has_what().values()):
            assert time.monotonic() < until
            time.sleep(0.05)
