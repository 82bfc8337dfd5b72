"""A recording in an object store, read through s3:// by this process, the pool and a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import AnalysisRequest, analyze, analyze_with_request
from clusterprof.analysis.tasks.base import NO_CLUSTER, Cluster
from clusterprof.cli.app import main
from clusterprof.errors import NoRecording, UsageError
from clusterprof.trace import remote
from clusterprof.trace.reader import NodeReader, list_node_folders
from clusterprof.trace.remote import RemotePath, resolve_path
from tests.support.dask_cluster import run_cluster
from tests.support.recordings import write_recording
from tests.support.waiting_jobs import make_scripts

pytest.importorskip("s3fs", reason="needs s3fs")
moto_server = pytest.importorskip("moto.server", reason="needs moto[server]")

BUCKET = "recordings"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("local") / "run"
    for number, script in enumerate(make_scripts((0.2, 0.3), (0.0, 0.3))):
        write_recording(script, path / f"node-{number}")
    return path


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """The address of a copy of the recording in a store on this machine."""
    import fsspec

    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    settings = {
        "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        fsspec.config.set_conf_env(fsspec.config.conf)
        store = fsspec.filesystem("s3")
        store.mkdir(BUCKET)
        store.put(str(folder), f"{BUCKET}/run", recursive=True)
        remote._open_store.cache_clear()
        yield f"s3://{BUCKET}/run"
        fsspec.config.conf.pop("s3", None)
    remote._open_store.cache_clear()
    server.stop()


def test_an_object_store_recording_is_read_like_a_local_folder(folder: Path, address: str) -> None:
    path = resolve_path(Path(address))  # which has one slash too few
    assert isinstance(path, RemotePath) and str(path) == address
    nodes = list_node_folders(path)
    assert [str(node) for node in nodes] == [f"{address}/node-0", f"{address}/node-1"]
    for node in nodes:
        assert list(map(repr, NodeReader(node))) == list(map(repr, NodeReader(folder / node.name)))


def test_the_report_equals_that_of_the_local_recording(
    folder: Path, address: str, tmp_path: Path
) -> None:
    expected = analyze(folder)
    assert replace(analyze(address), title=expected.title) == expected
    files = [tmp_path / name for name in ("serial", "pool", "dask")]
    with run_cluster(tmp_path, 2) as cluster:
        ways = [[], ["--jobs", "2"], ["--scheduler-file", str(cluster.scheduler_file)]]
        for file, words in zip(files, ways):
            assert main(["analyze", address, "--json", "-o", str(file), *words]) == 0
    assert files[0].read_bytes() == files[1].read_bytes() == files[2].read_bytes()
    assert f'"title": "{address}"' in files[0].read_text()


@pytest.mark.parametrize("cluster", [NO_CLUSTER, Cluster(workers=1)])
def test_a_missing_object_path_is_an_error(address: str, cluster: Cluster) -> None:
    with pytest.raises(NoRecording, match=r"s3://recordings/nothing: no such"):
        analyze_with_request([Path(f"s3://{BUCKET}/nothing")], AnalysisRequest(cluster=cluster))


def test_an_unreachable_store_is_an_error(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def info(self, path: str) -> object:
            raise RuntimeError("no route")

    monkeypatch.setattr(remote, "_open_store", lambda scheme: Broken())
    with pytest.raises(NoRecording, match="RuntimeError: no route"):
        analyze(address)


def test_a_store_without_its_client_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec", reason="needs fsspec: pip install 'clusterprof[remote]'")
    for name in ("gcsfs",):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(UsageError) as caught:
        analyze("gs://bucket/run")
    assert caught.value.remedy == "pip install 'clusterprof[remote]' gcsfs"


def test_a_local_folder_precedes_a_remote_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:" / "run").mkdir(parents=True)
    assert not isinstance(resolve_path(Path("s3://run")), RemotePath)
    assert isinstance(resolve_path(Path("s3://other")), RemotePath)
