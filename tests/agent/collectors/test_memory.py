from __future__ import annotations

import os

from clusterprof.agent.collectors.memory import MemoryCollector
from clusterprof.errors import Unavailable
from tests.support.opened_collector import OpenedCollector

KIB = 1024
PAGE = os.sysconf("SC_PAGE_SIZE")
NOT_COUNTED = Unavailable("absent", "this kernel does not count it", "")

NODE = [
    ("memory.available_bytes", "", 2_000_000_000 * KIB),
    ("memory.cached_bytes", "", 400_000_000 * KIB),  # not SwapCached's 64
    ("memory.swap_free_bytes", "", 8_000_000 * KIB),
    ("memory.dirty_bytes", "", 1_200 * KIB),
    ("memory.writeback_bytes", "", 300 * KIB),  # not WritebackTmp's 0
    ("memory.major_faults_total", "", 507_162),
    ("memory.swap_in_bytes_total", "", 10 * PAGE),
    ("memory.swap_out_bytes_total", "", 20 * PAGE),
    ("memory.direct_reclaim_pages_total", "", 1_000),  # not pgscan_direct_throttle's 3
    ("memory.refaults_total", "", 2_048),  # files; anonymous pages are swap
    ("memory.oom_kills_total", "", 1),
]


def test_memory_is_read_for_node_and_numa_nodes(host) -> None:
    assert OpenedCollector(MemoryCollector, host("h100-node")).read_all() == [
        *NODE,
        ("memory.numa_misses_total", "node0", 3),
        ("memory.numa_misses_total", "node1", 43),
    ]


def test_a_container_without_sys_has_no_numa_columns(host) -> None:
    assert OpenedCollector(MemoryCollector, host("container-no-sys")).read_all() == NODE


def test_values_missing_in_an_old_kernel_are_unknown(host) -> None:
    assert OpenedCollector(MemoryCollector, host("no-psi")).read_all() == [
        ("memory.available_bytes", "", NOT_COUNTED),
        ("memory.cached_bytes", "", 200_000 * KIB),
        ("memory.swap_free_bytes", "", 0),
        ("memory.dirty_bytes", "", 0),
        ("memory.writeback_bytes", "", 0),
        ("memory.major_faults_total", "", 9),
        ("memory.swap_in_bytes_total", "", 0),
        ("memory.swap_out_bytes_total", "", 0),
        ("memory.direct_reclaim_pages_total", "", 0),
        ("memory.refaults_total", "", 77),  # workingset_refault, one count for all pages
        ("memory.oom_kills_total", "", NOT_COUNTED),
    ]


def test_memory_values_equal_the_files_of_a_captured_machine(host) -> None:
    roots = host("vm-two-cores")
    readings = OpenedCollector(MemoryCollector, roots).read_all()
    assert [(name, device) for name, device, _ in readings] == [
        *((name, device) for name, device, _ in NODE),
        ("memory.numa_misses_total", "node0"),
    ]
    # The same numbers, found the slow way.
    meminfo = dict(line.split(":") for line in (roots.proc / "meminfo").read_text().splitlines())
    vmstat = dict(line.split() for line in (roots.proc / "vmstat").read_text().splitlines())
    assert [value for _, _, value in readings] == [
        *(
            int(meminfo[name].split()[0]) * KIB
            for name in ("MemAvailable", "Cached", "SwapFree", "Dirty", "Writeback")
        ),
        int(vmstat["pgmajfault"]),
        int(vmstat["pswpin"]) * PAGE,
        int(vmstat["pswpout"]) * PAGE,
        int(vmstat["pgscan_direct"]),
        int(vmstat["workingset_refault_file"]),
        int(vmstat["oom_kill"]),
        0,
    ]


def test_fields_that_move_between_samples_are_found_again(host_copy) -> None:
    roots = host_copy("h100-node")
    memory = OpenedCollector(MemoryCollector, roots)
    memory.read_all()
    meminfo = (roots.proc / "meminfo").read_text()
    (roots.proc / "meminfo").write_text(meminfo.replace("MemFree:        15", "MemFree:   1234515"))
    vmstat = (roots.proc / "vmstat").read_text().replace("nr_dirty 300", "nr_dirty 3000000")
    (roots.proc / "vmstat").write_text(vmstat.replace("pgmajfault 507162", "pgmajfault 507163"))
    expected = [
        (name, device, 507_163 if name == "memory.major_faults_total" else value)
        for name, device, value in NODE
    ]
    assert memory.read_all()[: len(NODE)] == expected


def test_a_missing_vmstat_is_a_reason_in_its_columns(host_copy) -> None:
    roots = host_copy("container-no-sys")
    (roots.proc / "vmstat").unlink()
    missing = Unavailable("absent", f"{roots.proc}/vmstat: no such file or directory", "")
    assert [value for _, _, value in OpenedCollector(MemoryCollector, roots).read_all()] == [
        *(value for _, _, value in NODE[:5]),
        *[missing] * 6,
    ]


def test_a_forbidden_numastat_is_a_reason_in_its_column(host_copy, as_nobody) -> None:
    roots = host_copy("h100-node")
    path = roots.sys / "devices/system/node/node1/numastat"
    path.chmod(0)
    with as_nobody():
        readings = OpenedCollector(MemoryCollector, roots).read_all()
    assert readings[:-1] == [*NODE, ("memory.numa_misses_total", "node0", 3)]
    assert readings[-1][2].kind == "denied"
