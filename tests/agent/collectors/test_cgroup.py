from __future__ import annotations

import os
import shutil

import pytest

from clusterprof.agent.collectors.cgroup import CgroupCollector
from clusterprof.errors import DevicesChanged, Unavailable
from tests.support.opened_collector import OpenedCollector, pread_as_cgroupfs_does

NO_QUOTA = Unavailable("absent", "no CPU quota is set", "")
NO_LIMIT = Unavailable("absent", "no memory limit is set", "")
NO_HIGH_V1 = Unavailable("absent", "cgroup version 1 has no memory.high", "")


def test_version_2_reads_the_level_whose_limit_is_tightest(host) -> None:
    # slurm allows 4.0 CPUs, job_7 2.5, task_0 any; job_7 128 GiB, step_0 64 GiB.
    assert OpenedCollector(CgroupCollector, host("h100-node"), [4711]).read_all() == [
        ("cgroup.cpu_ns_total", "", 81_234_567_000),
        ("cgroup.quota_periods_total", "", 9200),
        ("cgroup.throttled_periods_total", "", 811),
        ("cgroup.throttled_ns_total", "", 72_911_223_000),
        ("cgroup.cpu_quota_ratio", "", 2.5),
        ("cgroup.memory_bytes", "", 60_000_000_000),
        ("cgroup.memory_limit_bytes", "", 64 << 30),
        ("cgroup.memory_high_events_total", "", 17),
        ("cgroup.oom_kills_total", "", 1),
    ]


def test_version_2_without_a_job_reads_the_recorders_cgroup(host) -> None:
    assert OpenedCollector(CgroupCollector, host("h100-node")).read_all() == [
        ("cgroup.cpu_ns_total", "", 1_000_000),
        ("cgroup.quota_periods_total", "", 0),
        ("cgroup.throttled_periods_total", "", 0),
        ("cgroup.throttled_ns_total", "", 0),
        ("cgroup.cpu_quota_ratio", "", NO_QUOTA),
        ("cgroup.memory_bytes", "", 1_000_000),
        ("cgroup.memory_limit_bytes", "", NO_LIMIT),
        ("cgroup.memory_high_events_total", "", 0),
        ("cgroup.oom_kills_total", "", 0),
    ]


def test_version_1_reads_the_cgroup_of_the_job(host) -> None:
    assert OpenedCollector(CgroupCollector, host("cgroup-v1"), [4711]).read_all() == [
        ("cgroup.cpu_ns_total", "", 81_234_567_890),
        ("cgroup.quota_periods_total", "", 9200),
        ("cgroup.throttled_periods_total", "", 811),
        ("cgroup.throttled_ns_total", "", 72_911_223_000),  # version 1 counts ns
        ("cgroup.cpu_quota_ratio", "", 1.5),
        ("cgroup.memory_bytes", "", 20_000_000_000),
        ("cgroup.memory_limit_bytes", "", 32 << 30),  # the user's; the job's own has none
        ("cgroup.memory_high_events_total", "", NO_HIGH_V1),
        ("cgroup.oom_kills_total", "", 2),
    ]


def test_cpu_and_cpuacct_mounted_separately_are_read(host) -> None:
    roots = host("vm-two-cores")
    cgroups = roots.sys / "fs/cgroup"
    own = cgroups / "memory/level1/level2"
    assert [value for _, _, value in OpenedCollector(CgroupCollector, roots).read_all()] == [
        int((cgroups / "cpuacct/cpuacct.usage").read_text()),
        *(0, 0, 0),
        NO_QUOTA,
        int((own / "memory.usage_in_bytes").read_text()),
        NO_LIMIT,
        NO_HIGH_V1,
        0,
    ]


def test_a_container_without_sys_is_absent_with_a_remedy(host) -> None:
    with pytest.raises(Unavailable) as caught:
        OpenedCollector(CgroupCollector, host("container-no-sys"))
    assert caught.value == Unavailable(
        "absent",
        "the cgroup / lies outside the mounted part of the hierarchy",
        "run the recorder on the node, or in the container of the job",
    )


def test_a_missing_cgroup_file_system_is_absent_with_a_remedy(host) -> None:
    with pytest.raises(Unavailable) as caught:
        OpenedCollector(CgroupCollector, host("no-psi"))
    assert caught.value == Unavailable(
        "absent",
        "no cgroup file system for process self is mounted",
        "mount the cgroup file system at /sys/fs/cgroup",
    )


def test_an_unknown_process_is_absent(host) -> None:
    with pytest.raises(Unavailable) as caught:
        OpenedCollector(CgroupCollector, host("h100-node"), [999])
    assert caught.value.kind == "absent"


def test_forbidden_memory_files_leave_the_cpu_columns(host_copy, as_nobody) -> None:
    roots = host_copy("h100-node")
    step = roots.sys / "fs/cgroup/slurm/job_7/step_0"
    (step / "memory.events").chmod(0)
    with as_nobody():
        values = [
            value for _, _, value in OpenedCollector(CgroupCollector, roots, [4711]).read_all()
        ]
    denied = Unavailable(
        "denied",
        f"{step}/memory.events: permission denied",
        "run as the job's user or as root, or mount /proc without hidepid",
    )
    assert values == [
        *(81_234_567_000, 9200, 811, 72_911_223_000, 2.5),
        *(60_000_000_000, 64 << 30, denied, denied),
    ]


def test_the_root_cgroup_counts_no_throttling(host_copy) -> None:
    roots = host_copy("h100-node")
    (roots.proc / "self/cgroup").write_text("0::/\n")
    root_files = roots.sys / "fs/cgroup/cpu.stat"
    root_files.write_text("usage_usec 7\nuser_usec 6\nsystem_usec 1\n")
    cgroup = OpenedCollector(CgroupCollector, roots)
    not_counted = Unavailable("absent", "the kernel does not count it for this cgroup", "")
    assert cgroup.read_value("cgroup.cpu_ns_total") == 7_000
    assert cgroup.read_value("cgroup.throttled_ns_total") == not_counted
    value = cgroup.read_value("cgroup.memory_bytes")
    assert isinstance(value, Unavailable) and value.kind == "absent"


def test_counters_are_reread_and_a_removed_cgroup_becomes_a_reason(host_copy, monkeypatch) -> None:
    roots = host_copy("h100-node")
    cgroup = OpenedCollector(CgroupCollector, roots, [4711])
    stat = roots.sys / "fs/cgroup/slurm/job_7/cpu.stat"
    stat.write_text(stat.read_text().replace("nr_throttled 811", "nr_throttled 1000"))
    assert cgroup.read_value("cgroup.throttled_periods_total") == 1000
    monkeypatch.setattr(os, "pread", pread_as_cgroupfs_does)
    shutil.rmtree(roots.sys / "fs/cgroup/slurm")
    kinds = [v.kind if isinstance(v, Unavailable) else v for _, _, v in cgroup.read_all()]
    assert kinds == [*["absent"] * 4, 2.5, "absent", 64 << 30, "absent", "absent"]
    cgroup.close()


def test_the_job_replaces_the_recorder_as_observed_process(host) -> None:
    roots = host("h100-node")
    pids: list[int] = []
    before = OpenedCollector(CgroupCollector, roots, pids)
    before.read_all()
    pids.append(4711)
    with pytest.raises(DevicesChanged):
        before.read_all()
    before.close()
    opened = OpenedCollector(CgroupCollector, roots, pids)
    assert opened.read_value("cgroup.cpu_quota_ratio") == 2.5
