from __future__ import annotations

import os

import pytest

from clusterprof.agent.collectors.cpu import CoresCollector, CpuCollector
from clusterprof.errors import DevicesChanged, Unavailable
from tests.support.opened_collector import OpenedCollector

# All fixtures are written in ticks of 10 ms, which is what Linux uses on every machine we support.
TICK_NS = 10_000_000


def test_this_machine_has_a_tick_of_10_ms() -> None:
    assert os.sysconf("SC_CLK_TCK") == 100


def test_node_cpu_times_are_sums_of_proc_stat_fields(host) -> None:
    assert OpenedCollector(CpuCollector, host("h100-node")).read_all() == [
        ("cpu.user_ns_total", "all", 7200 * TICK_NS),  # 7000 user + 200 nice
        ("cpu.system_ns_total", "all", 3500 * TICK_NS),  # 3000 system + 100 irq + 400 softirq
        ("cpu.idle_ns_total", "all", 90000 * TICK_NS),
        ("cpu.iowait_ns_total", "all", 1500 * TICK_NS),
        ("cpu.steal_ns_total", "all", 30 * TICK_NS),
        ("cpu.runnable_count", "", 5),
        ("cpu.blocked_count", "", 2),
    ]


def test_guest_time_is_part_of_user_time_and_not_added_again(host) -> None:
    assert OpenedCollector(CpuCollector, host("no-psi")).read_all() == [
        ("cpu.user_ns_total", "all", 30 * TICK_NS),  # 10 + 20, not + 5 + 6
        ("cpu.system_ns_total", "all", 160 * TICK_NS),  # 30 + 60 + 70
        ("cpu.idle_ns_total", "all", 40 * TICK_NS),
        ("cpu.iowait_ns_total", "all", 50 * TICK_NS),
        ("cpu.steal_ns_total", "all", 80 * TICK_NS),
        ("cpu.runnable_count", "", 1),
        ("cpu.blocked_count", "", 0),
    ]


def test_each_online_core_has_cpu_times(host) -> None:
    names = ["user", "system", "idle", "iowait", "steal"]
    ticks = {
        "0": [4100, 1250, 20000, 500, 10],  # 4000+100, 1000+50+200, idle, iowait, steal
        "1": [2100, 1130, 30000, 500, 10],
        "2": [1000, 1120, 40000, 500, 10],
    }
    assert OpenedCollector(CoresCollector, host("h100-node")).read_all() == [
        (f"cpu.{name}_ns_total", core, tick * TICK_NS)
        for core, row in ticks.items()
        for name, tick in zip(names, row)
    ]


def test_without_proc_stat_the_collector_is_absent(host_copy) -> None:
    roots = host_copy("two-nics-one-down")
    with pytest.raises(Unavailable) as caught:
        OpenedCollector(CpuCollector, roots)
    assert caught.value == Unavailable(
        "absent", f"{roots.proc}/stat: no such file or directory", ""
    )


def test_a_forbidden_proc_stat_is_denied_with_a_remedy(host_copy, as_nobody) -> None:
    roots = host_copy("h100-node")
    (roots.proc / "stat").chmod(0)
    with as_nobody(), pytest.raises(Unavailable) as caught:
        OpenedCollector(CpuCollector, roots)
    assert caught.value.kind == "denied"
    assert caught.value.message == f"{roots.proc}/stat: permission denied"
    assert caught.value.remedy != ""


def rewrite(roots, core: str, replace: tuple[str, str]) -> None:
    path = roots.proc / "stat"
    lines = path.read_text().splitlines(keepends=True)
    hits = [line.startswith(core + " ") for line in lines]
    assert sum(hits) == 1
    path.write_text(
        "".join(line.replace(*replace) if hit else line for line, hit in zip(lines, hits))
    )


def test_small_backward_steps_of_idle_and_iowait_are_suppressed(host_copy) -> None:
    roots = host_copy("h100-node")
    cpu = OpenedCollector(CpuCollector, roots)
    cpu.read_all()
    rewrite(roots, "cpu", (" 90000 1500 ", " 89999 1498 "))
    assert cpu.read_value("cpu.idle_ns_total", "all") == 90000 * TICK_NS
    rewrite(roots, "cpu", (" 89999 1498 ", " 90007 1499 "))
    assert cpu.read_value("cpu.idle_ns_total", "all") == 90007 * TICK_NS
    assert cpu.read_value("cpu.iowait_ns_total", "all") == 1500 * TICK_NS


def test_a_reset_core_counter_is_reported_unchanged(host_copy) -> None:
    roots = host_copy("h100-node")
    cores = OpenedCollector(CoresCollector, roots)
    cores.read_all()
    rewrite(roots, "cpu2", (" 40000 500 ", " 12 500 "))  # 399.88 s back: no jitter
    assert cores.read_value("cpu.idle_ns_total", "2") == 12 * TICK_NS


def test_a_core_that_goes_offline_or_comes_online_changes_the_columns(host_copy) -> None:
    roots = host_copy("h100-node")
    cores = OpenedCollector(CoresCollector, roots)
    text = (roots.proc / "stat").read_text()
    (roots.proc / "stat").write_text(text.replace("cpu1 ", "cpu3 "))
    with pytest.raises(DevicesChanged):
        cores.read_all()
    assert [device for _, device in cores.collector.open()][::5] == ["0", "3", "2"]
