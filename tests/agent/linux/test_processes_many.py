"""Nodes with very many processes: what is read is the job's own tree, whatever else lives there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.processes import PlacementCollector, ProcessesCollector
from clusterprof.agent.collectors.threads import ThreadsCollector
from clusterprof.agent.linux import processes
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.processes import ProcessTree
from clusterprof.agent.linux.threads import DescriptorBudget

S = 1_000_000_000
STAT = "{pid} (a) S {parent} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {pid} 0 0" + " 0" * 30
OTHERS = 2000


def write(proc: Path, pid: int, parent: int, children: str | None) -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    for folder in (proc / str(pid), task):
        (folder / "stat").write_text(STAT.format(pid=pid, parent=parent))
    (task / "schedstat").write_text("7 7 7\n")
    (proc / str(pid) / "status").write_text("Cpus_allowed_list:\t0-3\n")
    if children is not None:
        (task / "children").write_text(children)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every path that is opened or listed."""
    paths: list[str] = []

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any) -> Any:
            paths.append(str(path))
            return real(path, *rest)

        return call

    monkeypatch.setattr(os, "open", noted(os.open))
    monkeypatch.setattr(os, "listdir", noted(os.listdir))
    return paths


def sampled(proc: Path) -> list[int]:
    """The processes of three samples of all that read the job's tree."""
    now_ns = 0
    context = Context(Roots(proc), None, lambda: [10])
    kinds = (ThreadsCollector, ProcessesCollector, PlacementCollector)
    collectors = [kind(context, lambda: now_ns) for kind in kinds]
    for collector in collectors:
        collector.open()
    seen = []
    for _ in range(3):
        for collector in collectors:
            seen += [row[1] for row in collector.sample()]
        (proc / "loadavg").write_text(f"1 1 1 1/9 {now_ns}\n")  # somebody was born
        now_ns += S
    for collector in collectors:
        collector.close()
    return seen


def test_processes_outside_the_job_cause_no_file_reads(tmp_path: Path, asked: list[str]) -> None:
    write(tmp_path, 10, 1, "11 ")
    write(tmp_path, 11, 10, "")
    (tmp_path / "loadavg").write_text("1 1 1 1/9 11\n")
    alone = sampled(tmp_path)
    before, asked[:] = list(asked), []
    for pid in range(1000, 1000 + OTHERS):
        (tmp_path / str(pid)).mkdir()
    among_many = sampled(tmp_path)
    assert among_many == alone and set(alone) == {10, 11}
    assert asked == before  # file by file
    assert str(tmp_path) not in asked  # not even listed


def test_without_children_files_a_scan_reads_few_processes_per_search(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_MAX_SCANNED", 50)
    for pid in range(1, 126):
        write(tmp_path, pid, 1, None)
    write(tmp_path, 900, 1, None)
    write(tmp_path, 901, 900, None)
    tree = ProcessTree(Roots(tmp_path), DescriptorBudget())
    counts = []
    for _ in range(4):
        asked.clear()
        assert sorted(tree.refresh([900], thorough=True)) == [900, 901]  # the youngest come first
        counts.append(sum(path.endswith("/stat") for path in asked))
    assert counts == [50, 50, 27, 0]
    write(tmp_path, 902, 901, None)
    assert sorted(tree.refresh([900], thorough=True)) == [900, 901, 902]
    tree.close()


def test_a_search_of_the_node_is_followed_by_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 0

    def takes_ten_ms() -> int:
        nonlocal now_ns
        now_ns += 5_000_000
        return now_ns

    monkeypatch.setattr(processes.time, "monotonic_ns", takes_ten_ms)
    write(tmp_path, 10, 1, None)
    tree = ProcessTree(Roots(tmp_path), DescriptorBudget())
    assert tree.refresh([10]) == [10]
    write(tmp_path, 11, 10, None)
    assert tree.refresh([10]) == [10]  # it took 5 ms: it rests for 250
    now_ns += 250_000_000
    assert sorted(tree.refresh([10])) == [10, 11]
    write(tmp_path, 12, 10, None)
    assert sorted(tree.refresh([10], thorough=True)) == [10, 11, 12]  # which does not
    tree.close()
