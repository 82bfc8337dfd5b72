"""Which process of the job works on which GPU, out of the driver's lists of all processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.isolation.drivers import DeviceProcessMapper
from clusterprof.agent.linux.files import Roots

FIRST_NAMESPACE = "pid:[4026531836]"
GIB = 1 << 30


class Node:
    """A /proc of a few processes."""

    def __init__(self, folder: Path, namespace: str = FIRST_NAMESPACE) -> None:
        self.proc = folder
        (folder / "self/ns").mkdir(parents=True)
        (folder / "self/ns/pid").symlink_to(namespace)
        self.job: list[int] = []
        self.pids = DeviceProcessMapper(Context(Roots(folder, folder), None, lambda: self.job))

    def process(self, pid: int, *files: str) -> None:
        fd = self.proc / str(pid) / "fd"
        fd.mkdir(parents=True)
        fields = " ".join(["S", "1", *["0"] * 17, str(pid + 1000), *["0"] * 30])
        (self.proc / str(pid) / "stat").write_text(f"{pid} (python) {fields}\n")
        for number, name in enumerate(files):
            (fd / str(number)).symlink_to(name)
        self.job.append(pid)

    def map_events(self, **held: list[tuple[int, int]]) -> list[tuple[str, dict[str, Any]]]:
        return self.pids.map_events(
            [("device-processes", {"device": value, "held": of}) for value, of in held.items()]
        )


def used(pid: int, device: str) -> tuple[str, dict[str, Any]]:
    return ("device-used", {"pid": pid, "started_ticks": pid + 1000, "device": device})


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_process_is_assigned_to_the_device_with_most_memory(node: Node) -> None:
    node.process(11)
    node.process(12)
    lost = ("device-lost", {"device": "A"})
    assert node.pids.map_events([lost]) == [lost]
    # 11 has a context on B besides; 12 holds as much of both; 99 is another's.
    held = {"A": [(11, 60 * GIB), (12, GIB)], "B": [(11, GIB), (12, GIB), (99, 70 * GIB)]}
    assert node.map_events(**held) == [used(11, "A")]
    assert node.pids.map_events([]) == []
    assert node.map_events(B=[(11, 200 * GIB), (12, 3 * GIB)]) == [used(11, "B"), used(12, "B")]
    assert node.map_events(A=[]) == []  # what a process ended with stays


def test_a_process_on_a_single_device_needs_no_reported_memory(node: Node) -> None:
    node.process(11)
    assert node.map_events(A=[(11, 0)], B=[]) == [used(11, "A")]


def test_a_process_is_reported_when_joining_the_job(node: Node) -> None:
    assert node.map_events(A=[(11, GIB)]) == []
    node.process(11)
    assert node.pids.map_events([]) == [used(11, "A")]
    assert node.pids.map_events([]) == []


def test_in_pid_namespaces_only_processes_with_open_devices_are_matched(tmp_path: Path) -> None:
    node = Node(tmp_path, "pid:[4026539999]")
    node.process(11, "/dev/null", "/dev/nvidia-uvm", "/dev/nvidia0")
    node.process(12, "/dev/null")  # the driver may mean the node's 12
    node.process(13)
    (tmp_path / "13/fd").rmdir()
    result = node.map_events(A=[(11, GIB), (12, GIB), (13, GIB)])
    assert result == [used(11, "A")]
