"""Our readers of hosts on the trees of node_exporter and the procfs library: what both know.

Which of theirs is which of ours are the tables of docs/agreement.md, read here. The trees are not
ours to ship: they are read where they lie, beside the repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.collectors.cgroup import PressureCollector
from clusterprof.agent.collectors.cpu import (
    CoresCollector,
    CpuClockCollector,
    CpuCollector,
    RunqueueCollector,
)
from clusterprof.agent.collectors.gpu.amd import GpuAmdCollector
from clusterprof.agent.collectors.memory import MemoryCollector, ReclaimCollector
from clusterprof.agent.collectors.network import NetworkCollector
from clusterprof.agent.collectors.rdma import RdmaCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.network.netdev import (
    NetstatParser,
    SnmpParser,
    read_link_bytes_per_second,
)
from clusterprof.agent.linux.processes import parse_allowed
from clusterprof.agent.linux.threads import (
    parse_io,
    parse_process_stat,
    parse_processor,
    parse_thread_stat,
)
from clusterprof.signals import BY_NAME
from tests.support.archives import unpack_archive
from tests.support.node_exporter import PAGE, SHARED, list_values
from tests.support.opened_collector import OpenedCollector

LIBRARY = SHARED.parent / "procfs-fixtures/fixtures.tar.gz"
pytestmark = pytest.mark.skipif(
    not SHARED.exists(), reason="the third-party fixture trees do not lie beside the repository"
)
CPUS = ("devices/system/", "class/hwmon", "class/thermal", "platform/coretemp", "virtual/thermal")
SECTIONS = {
    "cores": ("cpu", ""),
    "runqueue": ("cpu", ""),
    "cpu_clock": ("package", "package"),
    "numa": ("node", "node"),
    "network": ("device", ""),
    "rdma": ("device/port", ""),
}
"""By section: their label that is our device, and what our name has before it."""


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Roots:
    folder = tmp_path_factory.mktemp("exporter")
    files = ("proc/stat", "proc/schedstat", "proc/pressure", "proc/vmstat", "proc/net/", "meminfo")
    unpack_archive(SHARED / "proc.tar.gz", folder, *files)
    unpack_archive(SHARED / "sys.tar.gz", folder, *CPUS, "infiniband", "/net/")
    return Roots(folder / "proc", folder / "sys")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Roots:
    folder = tmp_path_factory.mktemp("library")
    files = ("proc/schedstat", "proc/pressure", "proc/net/dev", "proc/net/snmp", "proc/26231/")
    unpack_archive(LIBRARY, folder, *files, *CPUS, "infiniband", "drm/card0", "drivers/amdgpu")
    return Roots(folder / "fixtures/proc", folder / "fixtures/sys")


def readings(kind: type, roots: Roots) -> dict[tuple[str, str], Value]:
    return {
        (name, device): value for name, device, value in OpenedCollector(kind, roots).read_all()
    }


def table(section: str) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]], float]]:
    """Ours, theirs with the labels they must have (several: their sum), and the factor."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    matches = re.findall(r"^\| `(\S+)` \| (`node_[^|]+) \| (\S+) \|$", text, re.MULTILINE)
    assert matches, section
    for signal, named, factor in matches:
        metrics = [
            (name, dict(re.findall(r'(\w+)="([^"]*)"', labels)))
            for name, labels in re.findall(r"`(\w+)(?:\{([^`]*)\})?`", named)
        ]
        yield signal, metrics, float(factor)


def summed(theirs: dict, metrics: list, key: str, before: str) -> dict[str, float]:
    """Their values by our device."""
    collected: dict[str, float] = {}
    for name, wanted in metrics:
        for labels, value in list_values(theirs, name).items():
            label = dict(labels)
            if wanted.items() <= label.items():
                device = before + "/".join(label[part] for part in key.split("/") if part)
                collected[device] = collected.get(device, 0.0) + value
    assert collected, metrics
    return collected


def agree(section: str, mine: dict, theirs: dict) -> int:
    """Compare what a section lists, device by device; return how many values there were."""
    key, before = SECTIONS.get(section, ("", ""))
    compared = 0
    for signal, metrics, factor in table(section):
        assert signal in BY_NAME
        for device, number in summed(theirs, metrics, key, before).items():
            assert mine[signal, device] == pytest.approx(number * factor, rel=1e-12), (
                signal,
                device,
            )
            compared += 1
    return compared


@pytest.mark.parametrize(
    ("section", "kind", "values"),
    [
        ("cores", CoresCollector, 5 * 8),
        ("cpu", CpuCollector, 2),
        ("runqueue", RunqueueCollector, 2),
        ("pressure", PressureCollector, 5),
        ("cpu_clock", CpuClockCollector, 4),
        ("rdma", RdmaCollector, 13),
    ],
)
def test_host_values_equal_the_output_of_node_exporter(
    exporter: Roots, theirs: dict, section: str, kind: type, values: int
) -> None:
    assert agree(section, readings(kind, exporter), theirs) == values


def test_numa_and_fault_counters_equal_node_exporter(exporter: Roots, theirs: dict) -> None:
    mine = {**readings(MemoryCollector, exporter), **readings(ReclaimCollector, exporter)}
    assert agree("numa", mine, theirs) == 4 * 3
    assert agree("reclaim", mine, theirs) == 1


def test_package_clocks_and_temperatures_match_node_exporter(exporter: Roots, theirs: dict) -> None:
    mine = readings(CpuClockCollector, exporter)
    cores = list_values(theirs, "node_cpu_core_throttles_total")
    assert len(cores) == 4  # two packages of two CPUs each, 0 and 1, 2 and 3
    for metric, signal, both in (
        ("node_cpu_scaling_frequency_hertz", "cpu.clock_hertz", lambda a, b: (a + b) / 2),
        ("node_cpu_scaling_frequency_max_hertz", "cpu.clock_limit_hertz", max),
    ):
        by_cpu = {
            dict(labels)["cpu"]: value for labels, value in list_values(theirs, metric).items()
        }
        for package, cpus in (("package0", "01"), ("package1", "23")):
            assert mine[signal, package] == both(*(by_cpu[cpu] for cpu in cpus))
    text = PAGE.read_text(encoding="utf-8").partition("## cpu_clock\n")[2].partition("\n## ")[0]
    sensors = re.findall(r"^\| `(\S+)` \| `(\S+)` \| (`node_[^|]+) \| 1 \|$", text, re.MULTILINE)
    assert len(sensors) == 3
    for signal, device, named in sensors:
        name, labels = re.findall(r"`(\w+)\{([^`]*)\}`", named)[0]
        wanted = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert mine[signal, device] == sum(summed(theirs, [(name, wanted)], "", "").values())


def test_tcp_and_link_values_equal_node_exporter(exporter: Roots, theirs: dict) -> None:
    net = exporter.proc / "net"
    sent, again = SnmpParser()((net / "snmp").read_bytes())
    timeouts = NetstatParser()((net / "netstat").read_bytes())
    names = ("tcp.segments_sent_total", "tcp.retransmits_total", "tcp.timeouts_total")
    mine = {(name, ""): value for name, value in zip(names, (sent, again, timeouts), strict=True)}
    assert agree("tcp", mine, theirs) == 3
    for device in ("eth0", "bond0"):
        mine["network.link_bytes_per_second", device] = read_link_bytes_per_second(exporter, device)
        changes = (exporter.sys / "class/net" / device / "carrier_changes").read_text()
        mine["network.carrier_changes_total", device] = int(changes)
    assert agree("network", mine, theirs) == 3  # the bond says no speed


def stated(width: int) -> list[list[str]]:
    """Rows of the tables about the procfs library with that many columns."""
    text = PAGE.read_text(encoding="utf-8").partition("## procfs library\n")[2]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return [cell for cell in cells if len(cell) == width]


def test_host_values_equal_those_of_the_procfs_library(library: Roots) -> None:
    mine: dict[tuple[str, str], Value] = {}
    for kind in (NetworkCollector, RunqueueCollector, CpuClockCollector, RdmaCollector):
        mine |= readings(kind, library)
    compared = stated(5)
    assert len(compared) == 32
    for signal, device, _, number, factor in compared:
        assert mine[signal, device] == float(number) * float(factor), (signal, device)


def test_process_values_equal_those_of_the_procfs_library(library: Roots) -> None:
    folder = library.proc / "26231"
    stat = (folder / "stat").read_bytes()
    name, _, _, started_ticks, rss_bytes = parse_process_stat(stat)
    _, user_ns, system_ns, block_io_ns, _ = parse_thread_stat(stat)
    on_cpu_ns, run_delay_ns, _ = map(int, (folder / "schedstat").read_bytes().split())
    io = parse_io((folder / "io").read_bytes())
    mine = {
        "threads.user_ns_total": user_ns,
        "threads.system_ns_total": system_ns,
        "threads.block_io_delay_ns_total": block_io_ns,
        "threads.on_cpu_ns_total": on_cpu_ns,
        "threads.run_delay_ns_total": run_delay_ns,
        "processes.started_ticks": started_ticks,
        "processes.rss_bytes": rss_bytes,
        "processes.read_chars_total": io.read_chars,
        "processes.write_chars_total": io.write_chars,
        "processes.read_bytes_total": io.read_bytes,
        "processes.write_bytes_total": io.write_bytes,
        "placement.processor": parse_processor(stat),
    }
    of_processes = [row for row in stated(4) if not row[0].startswith("gpu.")]
    assert mine == {ours: float(number) * float(f) for ours, _, number, f in of_processes}
    assert name == b"vim"
    assert parse_allowed((folder / "status").read_bytes()) == ("0-7", "0")


def test_amd_card_values_equal_those_of_the_procfs_library(library: Roots) -> None:
    collector = GpuAmdCollector(Context(library, None, tuple), first_wait_seconds=20.0)
    columns = collector.open()
    mine = {signal.name: value for (signal, _), value in zip(columns, collector.sample())}
    collector.close()
    cards = [row for row in stated(4) if row[0].startswith("gpu.")]
    assert len(cards) == 3
    for ours, _, number, factor in cards:
        assert mine[ours] == pytest.approx(float(number) * float(factor))
