"""The tree of a job: on real processes, and on hand-made /proc folders."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from clusterprof.agent.linux.files import Roots
from clusterprof.agent.linux.processes import (
    ProcessTree,
    explain_invisible_processes,
    read_identity,
)
from clusterprof.agent.linux.threads import DescriptorBudget
from clusterprof.errors import Unavailable

STAT = "{pid} (python) S {parent} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0" + " 0" * 30


def write_process(proc: Path, pid: int, parent: int, children: str | None) -> None:
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (proc / str(pid) / "stat").write_text(STAT.format(pid=pid, parent=parent, started=pid * 10))
    if children is not None:
        (task / "children").write_text(children)


def tree_of(proc: Path, most: int = 1024) -> ProcessTree:
    return ProcessTree(Roots(proc), DescriptorBudget(), most)


def test_descendants_are_found_by_children_files(tmp_path: Path) -> None:
    write_process(tmp_path, 10, 1, "11 12 ")
    write_process(tmp_path, 11, 10, "")
    write_process(tmp_path, 12, 10, "13 ")
    write_process(tmp_path, 13, 12, "")
    write_process(tmp_path, 99, 1, "")
    tree = tree_of(tmp_path)
    assert sorted(tree.refresh([10])) == [10, 11, 12, 13]
    # 12 ends and 13 is adopted by init: it stays in the tree
    tree.forget(12)
    (tmp_path / "10/task/10/children").write_text("11 ")
    assert sorted(tree.refresh([10])) == [10, 11, 13]
    tree.close()


def test_without_children_files_descendants_are_found_by_parent_pid(tmp_path: Path) -> None:
    for pid, parent in ((10, 1), (11, 10), (12, 11), (13, 12), (99, 1)):
        write_process(tmp_path, pid, parent, None)
    assert sorted(tree_of(tmp_path).refresh([10])) == [10, 11, 12, 13]


def test_children_of_other_threads_need_a_thorough_search(tmp_path: Path) -> None:
    write_process(tmp_path, 10, 1, "")
    write_process(tmp_path, 11, 10, "")
    other = tmp_path / "10/task/15"
    other.mkdir()
    (other / "children").write_text("11 ")
    tree = tree_of(tmp_path)
    assert tree.refresh([10]) == [10]
    assert sorted(tree.refresh([10], thorough=True)) == [10, 11]


def test_a_bounded_process_tree_counts_omitted_processes(tmp_path: Path) -> None:
    write_process(tmp_path, 10, 1, "11 12 13 ")
    for pid in (11, 12, 13):
        write_process(tmp_path, pid, 10, "")
    tree = tree_of(tmp_path, most=3)
    assert len(tree.refresh([10])) == 3
    assert tree.omitted_count == 1


def test_new_processes_are_detected_by_the_newest_pid(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("0.20 0.18 0.12 1/80 11206\n")
    tree = tree_of(tmp_path)
    assert [tree.has_new_tasks(), tree.has_new_tasks()] == [True, False]
    (tmp_path / "loadavg").write_text("0.21 0.18 0.12 9/88 11206\n")
    assert not tree.has_new_tasks()
    (tmp_path / "loadavg").write_text("0.21 0.18 0.12 9/88 11207\n")
    assert tree.has_new_tasks()
    tree.close()


def test_descendants_of_a_real_process_exclude_the_recorder(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', sys.argv[1]"
    code += "]); print(flush=True); time.sleep(60)"
    parent = subprocess.Popen(
        [sys.executable, "-S", "-c", code, "import time; time.sleep(60)"], stdout=subprocess.PIPE
    )
    tree = tree_of(Path("/proc"))
    child = 0
    try:
        assert parent.stdout is not None
        parent.stdout.readline()
        pids = tree.refresh([parent.pid])
        assert pids[0] == parent.pid and len(pids) == 2
        child = pids[1]
        parent.kill()
        parent.wait()
        tree.forget(parent.pid)
        assert tree.refresh([]) == [child]  # somebody else's now, but still of this job
        # We are below the shell that started the tests and never part of the job we look at.
        above = tree_of(Path("/proc"))
        assert os.getpid() not in above.refresh([os.getppid()], thorough=True)
        above.close()
    finally:
        parent.kill()
        if child:
            os.kill(child, 9)
        tree.close()


def test_process_identity_is_pid_and_start_time(tmp_path: Path) -> None:
    write_process(tmp_path, 10, 1, "")
    assert read_identity(Roots(tmp_path), 10) == (10, 100)
    assert read_identity(Roots(tmp_path), 11) is None


def test_processes_hidden_by_hidepid_are_denied(tmp_path: Path) -> None:
    roots = Roots(tmp_path)
    write_process(tmp_path, 10, 1, "")
    assert explain_invisible_processes(roots, [10, 11]) is None  # 11 has ended
    mounts = tmp_path / "self" / "mounts"
    mounts.parent.mkdir()
    remedy = "run as the job's user or as root, or mount /proc without hidepid"
    hidden = Unavailable("denied", f"{tmp_path}: mounted with hidepid", remedy)
    for options, expected in (
        ("rw,hidepid=0", None),
        ("rw,hidepid=off", None),
        ("rw,hidepid=2", hidden),
        ("rw,gid=5,hidepid=invisible", hidden),
    ):
        mounts.write_text(f"/dev/root / ext4 rw 0 0\nproc /proc proc {options} 0 0\n")
        assert explain_invisible_processes(roots, [11]) == expected


def test_a_forbidden_process_is_denied(
    host_copy: Callable[[str], Roots], as_nobody: Callable[[], AbstractContextManager[None]]
) -> None:
    roots = host_copy("vm-two-cores")
    write_process(roots.proc, 10, 1, "")
    os.chmod(roots.proc / "10", 0o700)
    with as_nobody():
        if os.access(roots.proc / "10" / "stat", os.R_OK, effective_ids=True):
            os.chmod(roots.proc / "10", 0)  # the tests do not run as root
        reason = explain_invisible_processes(roots, [10])
    assert reason is not None and reason.kind == "denied"
    assert reason.message == f"{roots.proc}/10: permission denied"
    os.chmod(roots.proc / "10", 0o700)
