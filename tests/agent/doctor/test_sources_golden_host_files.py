"""What `doctor` says of the hosts of fixture machines, and what a recording of them holds.

CLUSTERPROF_ACCEPT_GOLDEN=1 writes tests/hosts/<name>/{doctor,recording}.txt anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.cgroup import CgroupCollector, PressureCollector
from clusterprof.agent.collectors.cpu import (
    CoresCollector,
    CpuClockCollector,
    CpuCollector,
    RunqueueCollector,
)
from clusterprof.agent.collectors.disk import DiskCollector
from clusterprof.agent.collectors.kernel import KernelThreadsCollector
from clusterprof.agent.collectors.memory import MemoryCollector, ReclaimCollector, ShmCollector
from clusterprof.agent.collectors.network import NetworkCollector
from clusterprof.agent.collectors.network_filesystems import MountsCollector
from clusterprof.agent.collectors.processes import PlacementCollector, ProcessesCollector
from clusterprof.agent.collectors.threads import ThreadsCollector
from clusterprof.agent.doctor.sources import check_sources
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.sampling.collector_runner import CollectorRunner
from clusterprof.agent.sampling.inventory import build_host_inventory
from clusterprof.cli.doctor import _print_source_checks
from clusterprof.trace.schema import Record, Rows
from tests.support.golden_hosts import HOSTS, PATIENCE, S, format_record, read_golden

NAMES = ("cgroup-v1", "container-no-sys", "hidepid-node", "no-psi", "vm-two-cores")
JOB, HIDDEN = 4711, 5000
SHM = SimpleNamespace(f_blocks=16384, f_frsize=4096, f_bfree=512)  # 62 of 64 MiB


class Clock:
    """A time that the test moves."""

    now_ns = 100 * S

    def __call__(self) -> int:
        return self.now_ns


def shared_memory(path: Any) -> Any:
    return SHM


def kinds(clock: Clock) -> list[Any]:
    """The collectors of a host, on our clock, and with shared memory that does not move."""
    timed = (KernelThreadsCollector, ThreadsCollector, ProcessesCollector, PlacementCollector)
    given: dict[Any, dict[str, Any]] = {kind: {"clock": clock} for kind in timed}
    given[CpuClockCollector] = {"clock": clock, "first_wait_seconds": PATIENCE}
    given[ShmCollector] = {"statvfs": shared_memory}
    plain = (
        CpuCollector,
        CoresCollector,
        RunqueueCollector,
        CpuClockCollector,
        KernelThreadsCollector,
        PressureCollector,
        MemoryCollector,
        ReclaimCollector,
        ShmCollector,
        CgroupCollector,
        ThreadsCollector,
        ProcessesCollector,
        PlacementCollector,
        DiskCollector,
        MountsCollector,
        NetworkCollector,
    )
    return [with_options(kind, given.get(kind, {})) for kind in plain]


def with_options(kind: Any, options: dict[str, Any]) -> Any:
    def init(self: Any, context: Context) -> None:
        kind.__init__(self, context, **options)

    return type(kind.__name__, (kind,), {"__init__": init})


@pytest.fixture(params=NAMES)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Roots]:
    """A machine on which the job is process 4711; where it has none, what we see of ourselves."""
    folder = tmp_path / request.param
    shutil.copytree(HOSTS / request.param, folder, symlinks=True)
    if not (folder / f"proc/{JOB}").exists():
        (folder / f"proc/{JOB}").symlink_to("self")
    return request.param, Roots(folder / "proc", folder / "sys")


def test_doctor_output_matches_the_golden_file(
    machine: tuple[str, Roots], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, roots = machine
    monkeypatch.setattr(os, "getpid", lambda: JOB)  # doctor looks at its own process
    _print_source_checks(check_sources(kinds(Clock()), roots), as_json=False)
    read_golden(name, "doctor.txt", capsys.readouterr().out.replace(f"{roots.proc.parent}/", "/"))


def test_the_recording_matches_the_golden_file(machine: tuple[str, Roots]) -> None:
    name, roots = machine
    lines = [
        f"cpus {build_host_inventory(roots)['cpus']}".replace(f"'count': {os.cpu_count()}", "…")
    ]
    lines += recorded(roots, JOB)
    if name == "hidepid-node":
        lines += ["the job of somebody else, process 5000:", *recorded(roots, HIDDEN)]
    read_golden(
        name, "recording.txt", "\n".join(lines).replace(f"{roots.proc.parent}/", "/") + "\n"
    )


def recorded(roots: Roots, pid: int) -> Iterator[str]:
    """Record two samples a second apart, as lines; of somebody else's job only what is its own."""
    clock = Clock()
    context = Context(roots, None, lambda: [pid])
    of_the_job = ("threads", "processes", "placement", "shm")
    slots = [
        CollectorRunner(kind(context), S // 10, pytest.fail)
        for kind in kinds(clock)
        if pid == JOB or kind.name in of_the_job
    ]
    for slot in slots:
        slot.open(clock.now_ns)
    for _ in range(2):
        for slot in slots:
            slot.tick(clock.now_ns)
        clock.now_ns += S
    for slot in slots:
        for record in slot.take(clock.now_ns):
            yield from (f"{slot.name}: {line}" for line in describe_record(record))
        slot.close()


def describe_record(record: Record) -> Iterator[str]:
    yield from format_record(record)
    if isinstance(record, Rows):
        for row in zip(*record.columns, strict=True):
            yield " ".join(f"{name}={value}" for name, value in zip(record.names, row, strict=True))
        yield f"strings {record.strings}"
