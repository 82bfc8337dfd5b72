from __future__ import annotations

import os

import pytest

from clusterprof.agent.collectors.cgroup import PressureCollector
from clusterprof.agent.linux.cgroup import PSI_REMEDY
from clusterprof.errors import DevicesChanged, Unavailable
from tests.support.opened_collector import OpenedCollector, pread_as_cgroupfs_does

NODE = [  # the files are in µs
    ("pressure.cpu_some_ns_total", "", 14_036_781_000),
    ("pressure.io_some_ns_total", "", 159_886_802_000),
    ("pressure.io_full_ns_total", "", 159_229_614_000),
    ("pressure.memory_some_ns_total", "", 7_001_000),
    ("pressure.memory_full_ns_total", "", 5_003_000),
]


def test_pressure_is_read_for_node_and_job_cgroup(host) -> None:
    assert OpenedCollector(PressureCollector, host("h100-node"), [4711]).read_all() == [
        *NODE,
        ("pressure.cpu_some_ns_total", "cgroup", 101_000),
        ("pressure.io_some_ns_total", "cgroup", 202_000),
        ("pressure.io_full_ns_total", "cgroup", 201_000),
        ("pressure.memory_some_ns_total", "cgroup", 303_000),
        ("pressure.memory_full_ns_total", "cgroup", 302_000),
    ]


def test_a_container_without_sys_reports_only_node_pressure(host) -> None:
    assert OpenedCollector(PressureCollector, host("container-no-sys")).read_all() == NODE


def test_the_root_cgroup_is_not_distinguished_from_the_node(host) -> None:
    columns = OpenedCollector(PressureCollector, host("vm-two-cores")).columns
    assert [device for _, device in columns] == [""] * 5


def test_a_kernel_without_psi_is_absent_with_a_remedy(host) -> None:
    roots = host("no-psi")
    with pytest.raises(Unavailable) as caught:
        OpenedCollector(PressureCollector, roots)
    assert caught.value == Unavailable(
        "absent", f"{roots.proc}/pressure/cpu: no such file or directory", PSI_REMEDY
    )


def test_a_forbidden_file_is_a_reason_only_in_its_columns(host_copy, as_nobody) -> None:
    roots = host_copy("container-no-sys")
    (roots.proc / "pressure/io").chmod(0)
    with as_nobody():
        values = [value for _, _, value in OpenedCollector(PressureCollector, roots).read_all()]
    denied = Unavailable(
        "denied",
        f"{roots.proc}/pressure/io: permission denied",
        "run as the job's user or as root, or mount /proc without hidepid",
    )
    assert values == [14_036_781_000, denied, denied, 7_001_000, 5_003_000]


def test_a_missing_full_line_is_a_reason(host_copy) -> None:
    roots = host_copy("container-no-sys")
    (roots.proc / "pressure/io").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=5\n")
    pressure = OpenedCollector(PressureCollector, roots)
    assert pressure.read_value("pressure.io_some_ns_total") == 5_000
    assert pressure.read_value("pressure.io_full_ns_total") == Unavailable(
        "absent", "this kernel writes no line 'full'", ""
    )


def test_a_removed_cgroup_is_a_reason_while_node_pressure_continues(host_copy, monkeypatch) -> None:
    roots = host_copy("h100-node")
    pressure = OpenedCollector(PressureCollector, roots, [4711])
    task = roots.sys / "fs/cgroup/slurm/job_7/step_0/task_0"
    monkeypatch.setattr(os, "pread", pread_as_cgroupfs_does)
    for name in ("cpu", "io", "memory"):
        (task / f"{name}.pressure").unlink()
    readings = pressure.read_all()
    assert readings[:5] == NODE
    assert {value.kind for _, _, value in readings[5:]} == {"absent"}
    pressure.close()


def test_the_job_replaces_the_recorder_as_observed_process(host) -> None:
    roots = host("h100-node")
    pids: list[int] = []
    before = OpenedCollector(PressureCollector, roots, pids)
    before.read_all()
    pids.append(4711)
    with pytest.raises(DevicesChanged):
        before.read_all()
    before.close()
    opened = OpenedCollector(PressureCollector, roots, pids)
    assert opened.read_value("pressure.cpu_some_ns_total", "cgroup") == 101_000
