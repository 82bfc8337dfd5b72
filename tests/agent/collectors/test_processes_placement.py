"""Where processes may run and ran: this very process, and hand-made /proc folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.processes import PLACEMENT_COLUMNS, PlacementCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import Unavailable
from clusterprof.util.ranges import format_cpulist

S = 1_000_000_000
STAT = "{pid} (a) b) S" + " 0" * 35 + " {cpu} 0 0\n"


def collector_of(
    roots: Roots, pids: Sequence[int], now: list[int] | None = None
) -> PlacementCollector:
    now = now or [0]
    collector = PlacementCollector(Context(roots, None, lambda: pids), lambda: now[0])
    assert tuple(collector.open()) == PLACEMENT_COLUMNS
    return collector


def write(proc: Path, pid: int, cpus: str, nodes: str = "0", cpu: int = 0) -> None:
    (proc / f"{pid}/task/{pid}").mkdir(parents=True, exist_ok=True)
    status = (
        f"Name:\ta\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{nodes}\n"
    )
    (proc / f"{pid}/status").write_text(status if cpus else "Name:\ta\n")
    (proc / f"{pid}/task/{pid}/stat").write_text(STAT.format(pid=pid, cpu=cpu))


def test_allowed_cpus_equal_the_affinity_of_this_process() -> None:
    collector = collector_of(Roots(), [os.getpid()])
    ((_, pid, processor, cpus, nodes),) = collector.sample()
    allowed = os.sched_getaffinity(0)
    assert pid == os.getpid() and processor in allowed
    assert collector.strings()["cpus_allowed"][cpus] == format_cpulist(allowed)
    assert nodes == 0 and collector.strings()["nodes_allowed"]


def test_equal_cpu_lists_are_stored_once_and_missing_lists_unknown(tmp_path: Path) -> None:
    write(tmp_path, 10, "3", "0-1", cpu=3)
    write(tmp_path, 11, "3", "0-1", cpu=2)
    write(tmp_path, 12, "")
    collector = collector_of(Roots(tmp_path), [10, 11, 12, 13])
    assert list(collector.sample()) == [(0, 10, 3, 0, 0), (0, 11, 2, 0, 0), (0, 12, 0, -1, -1)]
    assert collector.strings() == {"cpus_allowed": ["3"], "nodes_allowed": ["0-1"]}


def test_new_processes_are_read_at_once_and_others_in_rotation(tmp_path: Path) -> None:
    now, pids = [0], list(range(100, 200))
    for pid in (*pids, 300):
        write(tmp_path, pid, "0")
    collector = collector_of(Roots(tmp_path), pids, now)
    seen = []
    for tick in range(3):
        now[0] = tick * S // 2
        seen.append([row[1] for row in collector.sample()])
    assert seen == [pids[:64], pids[64:], []]
    pids.append(300)
    now[0] = 2 * S - 1
    assert [row[1] for row in collector.sample()] == [300]
    now[0] = 2 * S
    assert [row[1] for row in collector.sample()] == pids[:64]


def test_a_changed_cpu_affinity_is_recorded(tmp_path: Path) -> None:
    now = [0]
    write(tmp_path, 10, "0-7")
    collector = collector_of(Roots(tmp_path), [10], now)
    collector.sample()
    write(tmp_path, 10, "7", cpu=7)
    now[0] = 2 * S
    assert list(collector.sample()) == [(2 * S, 10, 7, 1, 0)]
    assert collector.strings()["cpus_allowed"] == ["0-7", "7"]


def test_a_job_hidden_by_hidepid_has_denied_placement(host) -> None:
    with pytest.raises(Unavailable, match="mounted with hidepid") as caught:
        collector_of(host("hidepid-node"), [5000]).sample()
    assert caught.value.kind == "denied"
