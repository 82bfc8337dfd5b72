"""Run queues, clocks, reclaim, shared memory and kernel threads: fixture machines and bad input."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.cpu import CpuClockCollector, RunqueueCollector
from clusterprof.agent.collectors.kernel import KernelThreadsCollector
from clusterprof.agent.collectors.memory import ReclaimCollector, ShmCollector
from clusterprof.agent.linux.cpu import describe_topology, find_accelerator_nodes, parse_schedstat
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from tests.support.opened_collector import OpenedCollector

S = 1_000_000_000
NOT_COUNTED = Unavailable("absent", "this kernel does not count it", "")


def values(kind: Any, roots: Roots) -> dict[tuple[str, str], Any]:
    return {
        (name, device): value for name, device, value in OpenedCollector(kind, roots).read_all()
    }


def test_run_delay_is_read_for_each_cpu(host) -> None:
    assert values(RunqueueCollector, host("hidepid-node")) == {
        ("cpu.run_delay_ns_total", "0"): 20_000_000,
        ("cpu.run_delay_ns_total", "1"): 30_000_000,
        ("cpu.run_delay_ns_total", "2"): 40_000_000,
        ("cpu.run_delay_ns_total", "3"): 276_500_000_000,
    }


def test_a_cpu_that_goes_offline_changes_the_columns(host_copy) -> None:
    roots = host_copy("hidepid-node")
    runqueue = OpenedCollector(RunqueueCollector, roots)
    file = roots.proc / "schedstat"
    file.write_text(file.read_text().partition("cpu3")[0])
    with pytest.raises(DevicesChanged):
        runqueue.read_all()


@pytest.mark.parametrize("text", ["", "version 15\n", "version 99\ncpu0 what is this\n", "cpu0"])
def test_an_unknown_schedstat_format_is_a_reason(tmp_path: Path, text: str) -> None:
    (tmp_path / "schedstat").write_text(text)
    with pytest.raises(Unavailable, match="no CPU in a known format"):
        OpenedCollector(RunqueueCollector, Roots(tmp_path))


def test_schedstat_text_instead_of_numbers_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "schedstat").write_text("version 15\ncpu0 0 0 0 0 0 0 many 2 3\n")
    with pytest.raises(Unavailable, match="no CPU in a known format"):
        OpenedCollector(RunqueueCollector, Roots(tmp_path))


def test_additional_schedstat_fields_do_not_shift_the_waits() -> None:
    (waits,) = parse_schedstat(b"version 17\ncpu7 0 0 0 0 0 0 0 0 11 22 33\n").values()
    assert waits == (11, 22)


def test_a_throttled_package_reports_clocks_throttles_and_temperature(host) -> None:
    assert values(CpuClockCollector, host("hidepid-node")) == {
        ("cpu.clock_hertz", "package0"): (1_000_000 * 3 + 2_000_000) / 4 * 1000,
        ("cpu.clock_limit_hertz", "package0"): 3_000_000_000,
        ("cpu.core_throttles_total", "package0"): 1 + 4,  # each of both hyper-threads counts it
        ("cpu.package_throttles_total", "package0"): 6,  # as all four do
        ("cpu.throttled_ns_total", "package0"): 1_200_000_000,  # the worst core's, not 5 or 800 ms
        ("cpu.temperature_celsius", "coretemp/temp1"): 97.0,
    }


def test_clocks_are_read_once_and_vanished_files_have_reasons(host_copy) -> None:
    roots = host_copy("hidepid-node")
    now_ns = 0
    collector = CpuClockCollector(
        Context(roots, None, tuple), lambda: now_ns, first_wait_seconds=20.0
    )
    columns = collector.open()
    collector.sample()
    with pytest.raises(NothingNew):
        collector.sample()
    for file in roots.sys.glob("devices/system/cpu/cpu*/thermal_throttle/*"):
        file.write_text("N/A\n")
    (roots.sys / "class/hwmon/hwmon0/temp1_input").unlink()
    now_ns = 5 * S
    with pytest.raises(NothingNew):
        collector.sample()  # asks the thread
    collector._reader.wait(20.0)
    printed = dict(zip([(signal.name, device) for signal, device in columns], collector.sample()))
    reason = Unavailable("absent", "this machine does not report it", "")
    assert printed["cpu.clock_hertz", "package0"] == 1_250_000_000.0
    assert {name for name, value in printed.items() if value == reason} == {
        ("cpu.core_throttles_total", "package0"),
        ("cpu.package_throttles_total", "package0"),
        ("cpu.throttled_ns_total", "package0"),
        ("cpu.temperature_celsius", "coretemp/temp1"),
    }
    (roots.sys / "devices/system/cpu/online").write_text("0-2\n")
    now_ns = 10 * S
    collector._reader.take()
    collector._reader.wait(20.0)
    with pytest.raises(DevicesChanged):
        collector.sample()
    collector.close()


def test_a_virtual_machine_has_no_clock_readings(host) -> None:
    with pytest.raises(Unavailable, match="neither clocks nor temperatures"):
        OpenedCollector(CpuClockCollector, host("vm-two-cores"))


def test_cpu_topology_lists_cores_packages_and_nodes(host) -> None:
    assert describe_topology(host("hidepid-node")) == {
        "online": "0-3",
        "cores": ["0-1", "2-3"],
        "packages": {"0": "0-3"},
        "nodes": {"0": "0-1", "1": "2-3"},
    }
    assert describe_topology(host("container-no-sys")) == {}


def test_accelerators_are_assigned_to_numa_nodes(tmp_path: Path) -> None:
    for address, kind, node in (
        ("0000:3b:00.0", "0x030200", "1"),  # a GPU without a display
        ("0000:3C:00.0", "0x120000", "0"),  # a processing accelerator
        ("0000:3d:00.0", "0x030000", "-1"),  # the firmware does not say
        ("0000:3e:00.0", "0x020000", "1"),  # a network card
    ):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "class").write_text(kind + "\n")
        (folder / "numa_node").write_text(node + "\n")
    roots = Roots(tmp_path / "proc", tmp_path)
    assert find_accelerator_nodes(roots) == {"0000:3b:00.0": 1, "0000:3c:00.0": 0}


def test_reclaim_and_numa_allocation_counters_are_read(host) -> None:
    assert values(ReclaimCollector, host("hidepid-node")) == {
        ("memory.faults_total", ""): 7_000_000,
        ("memory.kswapd_scan_pages_total", ""): 1000,
        ("memory.kswapd_freed_pages_total", ""): 900,
        ("memory.direct_freed_pages_total", ""): 90,
        ("memory.allocation_stalls_total", ""): 0 + 1 + 20 + 300 + 0,
        ("memory.huge_faults_total", ""): 3000,
        ("memory.huge_fallbacks_total", ""): 30,
        ("memory.compaction_stalls_total", ""): 7,
        ("memory.numa_hits_total", "node0"): 1000,
        ("memory.numa_local_total", "node0"): 900,
        ("memory.numa_remote_total", "node0"): 105,
        ("memory.numa_hits_total", "node1"): 2000,
        ("memory.numa_local_total", "node1"): 2000,
        ("memory.numa_remote_total", "node1"): 0,
    }


def test_an_uncounted_value_is_unknown_and_not_zero(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 7\npgfault 3\nallocstall 5\n")
    roots = Roots(tmp_path, tmp_path / "no-sys")
    assert [value for _, _, value in OpenedCollector(ReclaimCollector, roots).read_all()] == [
        3,
        *[NOT_COUNTED] * 3,
        5,
        *[NOT_COUNTED] * 3,
    ]


def test_missing_fields_and_files_have_reasons(host_copy) -> None:
    roots = host_copy("hidepid-node")
    reclaim = OpenedCollector(ReclaimCollector, roots)
    vmstat = roots.proc / "vmstat"
    vmstat.write_text(vmstat.read_text().replace("pgfault 7000000", "pgfault many"))
    (roots.sys / "devices/system/node/node1/numastat").write_text("numa_hit 1\n")
    words = Unavailable("failed", "the kernel's file contains words instead of numbers", "")
    assert [value for _, _, value in reclaim.read_all()] == [
        *[words] * 8,
        1000,
        900,
        105,
        1,
        NOT_COUNTED,
        NOT_COUNTED,
    ]


def shm(roots: Roots, used: int, blocks: int = 16384) -> ShmCollector:
    statistics = SimpleNamespace(f_blocks=blocks, f_frsize=4096, f_bfree=blocks - used)
    return ShmCollector(Context(roots, None, lambda: [4711]), lambda path: statistics)


def test_shared_memory_is_read_from_the_jobs_mounts(host) -> None:
    collector = shm(host("hidepid-node"), 16000)
    assert [device for _, device in collector.open()] == ["/dev/shm", "/dev/shm"]
    assert collector.sample() == [16000 * 4096, 16384 * 4096]


def test_shared_memory_outside_tmpfs_is_not_queried(host_copy) -> None:
    roots = host_copy("hidepid-node")
    mounts = roots.proc / "4711/mountinfo"
    text = mounts.read_text()
    mounts.write_text(text.replace("tmpfs tmpfs", "nfs4 server:/shm"))
    with pytest.raises(Unavailable, match="is not in memory but on nfs4"):
        shm(roots, 1).open()
    mounts.write_text(text.replace("/dev/shm", "/run"))
    with pytest.raises(Unavailable, match="nothing is mounted at /dev/shm"):
        shm(roots, 1).open()
    mounts.unlink()
    with pytest.raises(Unavailable, match="mounted with hidepid"):
        shm(roots, 1).open()
    (roots.proc / "self/mounts").unlink()
    with pytest.raises(Unavailable, match="no such file"):
        shm(roots, 1).open()


def test_shared_memory_without_a_limit_has_no_size(host) -> None:
    collector = shm(host("hidepid-node"), 0, blocks=0)
    collector.open()
    with pytest.raises(Unavailable, match="has no limit"):
        collector.sample()


def test_shared_memory_of_this_machine_equals_statvfs() -> None:
    """Beside statvfs itself, on whatever is mounted here."""
    context = Context(Roots(), None, lambda: [os.getpid()])
    collector = ShmCollector(context)
    try:
        collector.open()
    except Unavailable as reason:
        pytest.skip(str(reason))
    used, size = collector.sample()
    assert size == os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize
    assert 0 <= used <= size


class Kernel:
    """Kernel threads below a process 2 of our own."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.pids: list[int] = []
        self.write(2, "kthreadd", 0)
        self.pids.clear()

    def write(self, pid: int, name: str, on_cpu_ns: int) -> None:
        folder = self.proc / str(pid)
        (folder / f"task/{pid}").mkdir(parents=True, exist_ok=True)
        (folder / "comm").write_text(name + "\n")
        (folder / "schedstat").write_text(f"{on_cpu_ns} 5 1\n")
        self.pids = sorted({*self.pids, pid})
        (self.proc / "2/task/2/children").write_text(" ".join(map(str, self.pids)) + " ")

    def end(self, pid: int) -> None:
        (self.proc / f"{pid}/schedstat").write_text("")
        (self.proc / f"{pid}/comm").unlink()
        self.pids.remove(pid)
        (self.proc / "2/task/2/children").write_text(" ".join(map(str, self.pids)))


def test_kernel_thread_cpu_time_is_summed_by_family(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    names = (
        "kswapd0",
        "kswapd1",
        "ksoftirqd/0",
        "kworker/0:1H-kblockd",
        "irq/24-nvme0q0",
        "rcu_gp",
    )
    for pid, name in enumerate((*names, "ptlrpcd_00_01", "kworkers"), 10):
        kernel.write(pid, name, 1000 * pid)
    now_ns = 0
    collector = KernelThreadsCollector(Context(Roots(tmp_path), None, tuple), lambda: now_ns)
    families = [device for _, device in collector.open()]
    assert families == ["irq", "ksoftirqd", "kswapd", "kworker", "ptlrpcd"]
    assert collector.sample() == [0, 0, 0, 0, 0]  # what they ran before is not of this recording
    kernel.write(10, "kswapd0", 10_000 + 70)
    kernel.write(11, "kswapd1", 11_000 + 7)
    kernel.write(15, "rcu_gp", 99_000)
    assert collector.sample() == [0, 0, 77, 0, 0]
    kernel.end(11)
    kernel.write(10, "kswapd0", 5)  # as no kernel does: it never falls
    kernel.write(30, "kworker/1:2", 400)
    now_ns = 11 * S
    assert collector.sample() == [0, 0, 77, 0, 0]
    kernel.write(30, "kworker/1:2", 430)
    assert collector.sample() == [0, 0, 77, 30, 0]
    kernel.write(31, "kcompactd0", 1)
    now_ns = 22 * S
    with pytest.raises(DevicesChanged):
        collector.sample()
    collector.close()


def test_invisible_kernel_threads_are_a_reason(host, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="mounted with hidepid"):
        OpenedCollector(KernelThreadsCollector, host("hidepid-node"))
    with pytest.raises(Unavailable, match="as in most containers"):
        OpenedCollector(KernelThreadsCollector, Roots(tmp_path))
    Kernel(tmp_path).write(2, "bash", 0)  # a container's second process
    with pytest.raises(Unavailable, match="as in most containers"):
        OpenedCollector(KernelThreadsCollector, Roots(tmp_path))
