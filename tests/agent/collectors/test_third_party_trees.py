"""Our collectors on the trees other projects test theirs on, against what those must print.

The trees are not ours to ship: they are read where they lie, beside the repository.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterprof.agent.collectors.cgroup import PressureCollector
from clusterprof.agent.collectors.cpu import CoresCollector
from clusterprof.agent.collectors.disk import DiskCollector
from clusterprof.agent.collectors.memory import MemoryCollector
from clusterprof.agent.collectors.network import NetworkCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.storage.network_mounts import parse_mountstats
from clusterprof.errors import Unavailable
from tests.support.archives import unpack_archive
from tests.support.opened_collector import OpenedCollector

SHARED = Path(__file__).parents[3].parent / "shared/data"
pytestmark = pytest.mark.skipif(
    not SHARED.exists(), reason="the third-party fixture trees do not lie beside the repository"
)
SECOND_NS = 1_000_000_000


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the trees once."""
    folder = tmp_path_factory.mktemp("trees")
    for archive in (
        "node-exporter-fixtures/proc.tar.gz",
        "procfs-fixtures/fixtures.tar.gz",
        "dynolog-testroot/root.tar.gz",
    ):
        unpack_archive(SHARED / archive, folder / archive.split("/")[0])
    return folder


def expected() -> dict[tuple[str, str], float]:
    """What node_exporter must print for its tree: (metric, first label's value) -> number."""
    known = json.loads((SHARED / "node-exporter-fixtures/known.json").read_text())
    collected = {}
    for line in known["expected_lines"]:
        match = re.fullmatch(r'(\w+?)(?:\{\w+="([^"]*)"(?:,.*)?\})? (\S+)', line)
        assert match, line
        collected[match[1], match[2] or ""] = float(match[3])
    return collected


@pytest.fixture
def node_exporter(trees: Path) -> Roots:
    return Roots(trees / "node-exporter-fixtures/proc", trees / "no-sys")


def ours(kind: type, roots: Roots) -> Iterator[tuple[str, str, float]]:
    for name, device, value in OpenedCollector(kind, roots).read_all():
        assert not isinstance(value, Unavailable), name
        yield name, device, value


def test_disk_values_equal_node_exporter(node_exporter: Roots) -> None:
    theirs = expected()
    names = {
        "disk.read_bytes_total": ("node_disk_read_bytes_total", 1),
        "disk.write_bytes_total": ("node_disk_written_bytes_total", 1),
        "disk.busy_ns_total": ("node_disk_io_time_seconds_total", SECOND_NS),
    }
    compared = {
        (name, device): value / names[name][1]
        for name, device, value in ours(DiskCollector, node_exporter)
        if name in names
    }
    devices = {device for _, device in compared}
    # fd0 and sr0 are ours by the same rule as theirs; partitions are not ours, idle sr0 neither.
    assert devices == {
        "dm-0",
        "dm-1",
        "dm-2",
        "dm-3",
        "dm-4",
        "dm-5",
        "fd0",
        "mmcblk0",
        "nvme0n1",
        "sda",
        "sdb",
        "sdc",
        "vda",
    }
    assert {k: v for k, v in compared.items() if k[1] != "fd0"} == {
        (name, device): pytest.approx(theirs[metric, device], rel=1e-12)
        for name, (metric, _) in names.items()
        for device in devices - {"fd0"}
    }


def test_pressure_and_faults_equal_node_exporter(node_exporter: Roots) -> None:
    theirs = expected()
    pressure = {name: value for name, _, value in ours(PressureCollector, node_exporter)}
    assert pressure == {
        f"pressure.{what}_ns_total": round(
            theirs[f"node_pressure_{metric}_seconds_total", ""] * 1e9
        )
        for what, metric in {
            "cpu_some": "cpu_waiting",
            "io_some": "io_waiting",
            "io_full": "io_stalled",
            "memory_some": "memory_waiting",
            "memory_full": "memory_stalled",
        }.items()
    }
    memory = OpenedCollector(MemoryCollector, node_exporter)
    assert memory.read_value("memory.major_faults_total") == theirs["node_vmstat_pgmajfault", ""]


def test_core_cpu_times_equal_node_exporter(node_exporter: Roots) -> None:
    lines = json.loads((SHARED / "node-exporter-fixtures/known.json").read_text())["expected_lines"]
    mode = re.compile(r'node_cpu_seconds_total\{cpu="0",mode="(\w+)"\} (\S+)')
    seconds = {m[1]: float(m[2]) for line in lines if (m := mode.fullmatch(line))}
    assert {name: v for name, core, v in ours(CoresCollector, node_exporter) if core == "0"} == {
        "cpu.user_ns_total": round((seconds["user"] + seconds["nice"]) * 1e9),
        "cpu.system_ns_total": round(
            (seconds["system"] + seconds["irq"] + seconds["softirq"]) * 1e9
        ),
        "cpu.idle_ns_total": round(seconds["idle"] * 1e9),
        "cpu.iowait_ns_total": round(seconds["iowait"] * 1e9),
        "cpu.steal_ns_total": round(seconds["steal"] * 1e9),
    }


def test_nfs_mount_values_equal_node_exporter(node_exporter: Roots) -> None:
    theirs = expected()
    mounts = parse_mountstats((node_exporter.proc / "10/mountstats").read_bytes())
    # The tree mounts two exports on one folder; the one mounted last is what a process sees.
    assert [mount.point for mount in mounts] == ["/mnt/nfs/test", "/mnt/nfs/test-dupe"]
    read = mounts[0].operations["READ"]
    assert (read.operations, read.queue_ms, read.rtt_ms, read.execute_ms) == (1298, 6, 79386, 79407)
    export = "192.168.1.1:/srv/test"
    assert (
        mounts[0].transport.backlog
        == theirs["node_mountstats_nfs_transport_backlog_queue_total", export]
    )


def test_network_values_of_the_procfs_tree_are_read(trees: Path) -> None:
    fixtures = trees / "procfs-fixtures/fixtures"
    roots = Roots(fixtures / "proc", fixtures / "sys")
    network = OpenedCollector(NetworkCollector, roots)
    nics = list(dict.fromkeys(device for _, device in network.columns if device))
    assert nics == ["vethf345468", "docker0", "eth0"]
    assert network.read_value("network.receive_bytes_total", "eth0") == 874_354_587
    assert network.read_value("network.link_bytes_per_second", "eth0") == 125_000_000  # 1000 Mb/s


def test_core_cpu_times_equal_the_dynolog_test_values(trees: Path) -> None:
    known = json.loads((SHARED / "dynolog-testroot/known.json").read_text())
    stated = known["stated_by_source"]["dynolog/tests/KernelCollecterTest.cpp"]
    root = trees / "dynolog-testroot/root"
    cores = OpenedCollector(CoresCollector, Roots(root / "proc", root / "sys"))
    assert len(cores.columns) == 5 * stated["cores"]
    ticks = stated["cpu0_raw_ticks"]
    assert (
        cores.read_value("cpu.user_ns_total", "0") == (ticks["user"] + ticks["nice"]) * 10_000_000
    )
    assert cores.read_value("cpu.idle_ns_total", "0") == ticks["idle"] * 10_000_000
