"""Workers that each see only the recording of their own node: no folder is shared.

Every worker runs in a network namespace and a mount namespace of its own. They meet on a
bridge; the folder of the recording is empty for all others, the client included.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from clusterprof.analysis.pipeline import AnalysisRequest, analyze_with_request
from clusterprof.analysis.tasks import dask_client
from clusterprof.cli.app import main
from clusterprof.errors import NoRecording
from clusterprof.output.renderers.json import Json
from tests.support.dask_cluster import DaskCluster
from tests.support.recordings import write_recording
from tests.support.waiting_jobs import make_scripts

pytest.importorskip("distributed", reason="needs distributed: pip install 'clusterprof[dask]'")

pytestmark = pytest.mark.alone

NODES = 3
NETWORK = f"10.213.{os.getpid() % 250}"  # what a killed run left has another
_TAG = f"cp{os.getpid() % 10_000}"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def find_obstacle() -> str:
    """Return why namespaces cannot be made here; "" when they can."""
    if os.geteuid() != 0:
        return "only root makes network and mount namespaces"
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"needs the command {tool}"
    name = f"{_TAG}probe"
    try:
        for words in (
            ["ip", "netns", "add", name],
            ["ip", "link", "add", name, "type", "bridge"],
            ["unshare", "-m", "true"],
        ):
            done = run(*words)
            if done.returncode:
                return f"{' '.join(words)}: {done.stderr.strip()}"
    finally:
        run("ip", "netns", "del", name)
        run("ip", "link", "del", name)
    return ""


@dataclass
class SeparateNodes:
    """A cluster whose workers `0`, `1`, `2` see the recording of one node each, at `seen`."""

    cluster: DaskCluster
    seen: Path
    """The folder of the recording; empty here."""
    disks: Path
    """What is mounted there: a folder for each worker, and `all`."""

    def start_worker(self, number: int) -> None:
        mount = f'mount --bind {self.disks}/{number} {self.seen} && exec "$@"'
        prefix = ["ip", "netns", "exec", f"{_TAG}n{number}", "unshare", "-m"]
        prefix += ["sh", "-c", mount, "sh"]
        self.cluster.start_worker(str(number), prefix, f"{NETWORK}.{number + 10}")


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    """A bridge with a network namespace for each node."""
    obstacle = find_obstacle()
    if obstacle:
        pytest.skip(obstacle)
    bridge = f"{_TAG}br"
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "address", "add", f"{NETWORK}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for number in range(NODES):
            name, outside, inside = (f"{_TAG}{kind}{number}" for kind in "nov")
            run("ip", "netns", "add", name)
            run("ip", "link", "add", outside, "type", "veth", "peer", "name", inside)
            run("ip", "link", "set", outside, "master", bridge, "up")
            run("ip", "link", "set", inside, "netns", name)
            inside_ip = ["ip", "-n", name]
            run(*inside_ip, "address", "add", f"{NETWORK}.{number + 10}/24", "dev", inside)
            run(*inside_ip, "link", "set", inside, "up")
            run(*inside_ip, "link", "set", "lo", "up")
        yield
    finally:
        for number in range(NODES):
            run("ip", "netns", "del", f"{_TAG}n{number}")
        run("ip", "link", "del", bridge)


@pytest.fixture(scope="module")
def nodes(network: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeparateNodes]:
    path = tmp_path_factory.mktemp("own-disks")
    disks, seen = path / "disks", path / "seen"
    seen.mkdir()
    for number, script in enumerate(make_scripts((0.2, 0.3), (0.0, 0.3), (0.1, 0.3))):
        write_recording(script, disks / "all" / f"node-{number}")
        write_recording(script, disks / str(number) / f"node-{number}")
    separate = SeparateNodes(DaskCluster(path, host=f"{NETWORK}.1"), seen, disks)
    try:
        separate.cluster.start_scheduler()
        for number in range(NODES):
            separate.start_worker(number)
        separate.cluster.wait_for_workers(NODES)
        yield separate
    finally:
        separate.cluster.stop()


def test_each_node_is_analyzed_by_the_worker_with_its_recording(
    nodes: SeparateNodes, tmp_path: Path
) -> None:
    """The pool sees all recordings in one folder, at the same path."""
    pool, dask = tmp_path / "pool.json", tmp_path / "dask.json"
    analyze = [sys.executable, "-m", "clusterprof", "analyze", str(nodes.seen), "--json", "-o"]
    mount = f'mount --bind {nodes.disks}/all {nodes.seen} && exec "$@"'
    done = run("unshare", "-m", "sh", "-c", mount, "sh", *analyze, str(pool), "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert list(nodes.seen.iterdir()) == []
    on_cluster = ["--scheduler-file", str(nodes.cluster.scheduler_file)]
    assert main([*analyze[3:], str(dask), *on_cluster]) == 0
    assert dask.read_bytes() == pool.read_bytes()
    # what only an export of records needs is said plainly
    with pytest.raises(NoRecording, match="only workers see this recording"):
        from clusterprof.cli.export import export

        export([nodes.seen], "json", output=str(pool), scheduler_file=on_cluster[1])


def test_nodes_with_a_dead_worker_are_missing_in_the_report(
    nodes: SeparateNodes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker of node 1 dies when all nodes are done: its operations cannot come again."""
    monkeypatch.setattr(dask_client, "PATIENCE_S", 1.0)
    monkeypatch.setattr(dask_client, "POLL_S", 0.3)

    def kill_worker(progress: object) -> None:
        if "1" in nodes.cluster.workers:
            nodes.cluster.kill_worker("1")

    request = AnalysisRequest(cluster=nodes.cluster.address, on_progress=kill_worker)
    try:
        report = analyze_with_request([nodes.seen], request)
        assert [rank.rank for rank in report.ranks] == [0, 2]
        [lost] = [blind for blind in report.coverage_gaps if blind.kind == "lost"]
        assert lost.what == str(nodes.seen / "node-1")
        assert "no worker is left that sees it" in lost.message
        assert "waits" in Json().render(report)
        # now its node is not seen at all; the other two are a recording
        words = ["analyze", str(nodes.seen), "--json", "-o", str(tmp_path / "report")]
        assert main([*words, "--scheduler-file", str(nodes.cluster.scheduler_file)]) == 0
    finally:
        nodes.start_worker(1)
        nodes.cluster.wait_for_workers(NODES)
