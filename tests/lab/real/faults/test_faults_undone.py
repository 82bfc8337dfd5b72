"""Every real fault says why it cannot be made, and leaves nothing behind."""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import clusterprof_lab.real.faults
from clusterprof_lab.real.faults import cgroups, disks, remote_files
from clusterprof_lab.real.faults.registry import FAULTS
from tests.support.fault_places import NODE, make_place, read_lines, require_fault

ANYBODY = {"free-neighbour", "object-store"}
LINKS = {name for name in FAULTS if name.startswith("link-")}
ELSEWHERE = LINKS | {"nfs"}
LAB = Path(__file__).parents[4] / "lab"


class BoomError(Exception):
    pass


@pytest.fixture(autouse=True)
def images_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "IMAGES", tmp_path)  # where `traces` finds them


def traces(folder: Path) -> Mapping[str, Any]:
    """What a fault might leave behind."""
    return {
        "mounts": [line for line in read_lines("/proc/self/mounts") if str(folder) in line],
        "swaps": [line for line in read_lines("/proc/swaps") if "loop" in line],
        "loops": [
            str(file)
            for file in Path("/sys/block").glob("loop*/loop/backing_file")
            if str(folder) in file.read_text()
        ],
        "groups": cgroups.list_remaining_groups(),
        "children": read_lines(f"/proc/self/task/{threading.get_native_id()}/children"),
        "threads": threading.active_count(),
        "files": [file.name for file in folder.iterdir() if file.suffix != ".jsonl"],
    }


def test_every_fault_is_registered_under_its_name() -> None:
    assert all(fault.name == name for name, fault in FAULTS.items())
    modules = [
        importlib.import_module(f"clusterprof_lab.real.faults.{module.name}")
        for module in pkgutil.iter_modules(clusterprof_lab.real.faults.__path__)
    ]
    kept = [vars(module).get("FAULT") for module in modules]
    assert {fault.name for fault in kept if fault} | {
        way.name for way in remote_files.WAYS
    } | LINKS == set(FAULTS)


@pytest.mark.parametrize("name", sorted(set(FAULTS) - ANYBODY))
def test_faults_that_need_root_state_the_reason(name: str, as_nobody: Any) -> None:
    with as_nobody():
        reason = FAULTS[name].why_not_here()
    if name == "pinned" and len(os.sched_getaffinity(0)) < 2:
        assert reason.startswith("one CPU only")
    else:
        assert "needs root" in reason or "need root" in reason or "no cgroup" in reason


def test_unprivileged_faults_are_available_without_root(as_nobody: Any) -> None:
    with as_nobody():
        assert [FAULTS[name].why_not_here() for name in sorted(ANYBODY)] == ["", ""]


CASES = [(name, False) for name in sorted(set(FAULTS) - ELSEWHERE)]
CASES += [(name, True) for name in ("disk-neighbour", "fuse-slots", "cpu-quota", "memory-short")]


@pytest.mark.parametrize(("name", "clean"), CASES)
def test_an_exception_removes_every_trace_of_the_fault(
    name: str, clean: bool, tmp_path: Path
) -> None:
    if name.startswith("fuse"):
        require_fault(name)
        remote_files.build_server()  # is kept as long as this process lives
    before = traces(tmp_path)
    with (
        pytest.raises(BoomError),
        FAULTS[require_fault(name)].apply(make_place(tmp_path, NODE, clean)) as options,
    ):
        assert options.log is not None and options.log.exists()
        if options.cgroup is not None:
            assert (options.cgroup / "cgroup.procs").exists()
        during = traces(tmp_path)
        if not clean:
            assert during != before
        raise BoomError
    assert traces(tmp_path) == before


def test_killing_the_process_removes_every_trace_of_its_faults(tmp_path: Path) -> None:
    faults = [
        require_fault(name)
        for name in ("disk-cap", "fuse-latency", "cpu-hogs", "cpu-quota", "memory-short")
    ]
    script = f"""
import numpy, sys
from contextlib import ExitStack
from pathlib import Path
from clusterprof_lab.real.faults import disks
from clusterprof_lab.real.faults.base import Place
from clusterprof_lab.real.faults.registry import FAULTS
disks.IMAGES = Path({str(tmp_path)!r})
place = Place(None, Path({str(tmp_path)!r}), numpy.random.default_rng(0), 0.3, 300_000_000,
              {{"data_mb": 4}})
with ExitStack() as stack:
    for name in {faults!r}:
        stack.enter_context(FAULTS[name].apply(place))
    print("on", flush=True)
    sys.stdin.read()
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(LAB), str(LAB.parent)])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": env}
    before = traces(tmp_path)
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as victim:
        assert victim.stdout is not None and victim.stdout.readline() == b"on\n"
        groups = cgroups.list_remaining_groups(victim.pid)
        assert len(groups) == 2
        assert len(traces(tmp_path)["mounts"]) == 2
        victim.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while (traces(tmp_path) != before or any(g.exists() for g in groups)) and (
        time.monotonic() < end
    ):
        time.sleep(0.05)
    assert traces(tmp_path) == before
    assert not any(group.exists() for group in groups)
