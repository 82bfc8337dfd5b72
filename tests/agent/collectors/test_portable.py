"""The portable collectors, forced on Linux: against /proc, real processes, and a fixed psutil."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from clusterprof.agent.collectors import processes
from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.cpu import CpuCollector
from clusterprof.agent.collectors.portable import (
    PROCESS_COLUMNS,
    PortableCollector,
    PortableProcessesCollector,
)
from clusterprof.agent.collectors.registry import COLLECTORS, select_collectors
from clusterprof.agent.launch.identity import read_start_ticks
from clusterprof.agent.linux import psutil_host
from clusterprof.agent.linux.files import Roots
from clusterprof.agent.options import build_plan
from clusterprof.errors import DevicesChanged, Unavailable
from tests.support.opened_collector import OpenedCollector

PATIENCE_S = 20.0
FILE_BYTES = 3 << 20
NOT_COUNTED = "psutil does not count it on this system"
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]], stdin=sys.stdin)
"""
READER = """
import sys
content = open(sys.argv[1], "rb", buffering=0).read()
print(flush=True)
sys.stdin.readline()
"""


class Counters(SimpleNamespace):
    """A named tuple of psutil, with the fields that a system has."""


def make_mac() -> SimpleNamespace:
    """Make a psutil as it is on a Mac, with its fields and with values by hand."""
    disk = Counters(read_count=5, write_count=7, read_bytes=4096, write_bytes=512)
    disk.read_time, disk.write_time = 3, 4  # ms
    nic = Counters(bytes_sent=20, bytes_recv=10, errin=1, errout=2, dropin=4, dropout=0)
    return SimpleNamespace(
        MACOS=True,
        NETBSD=False,
        LINUX=False,
        cpu_times=lambda: Counters(user=2.5, nice=0.5, system=1.25, idle=10.0),
        virtual_memory=lambda: Counters(available=8 << 30, total=16 << 30),
        swap_memory=lambda: Counters(free=1 << 30, sin=99, sout=98),
        disk_io_counters=lambda perdisk: {"disk1": disk, "disk10": disk},
        net_io_counters=lambda pernic: {"lo0": nic, "en0": nic},
        net_if_stats=lambda: {"en0": Counters(isup=True, speed=1000)},
    )


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = make_mac()
    monkeypatch.setattr(psutil_host, "import_psutil", lambda: module)
    return module


def read_texts(collector: OpenedCollector) -> list[str]:
    return [
        f"{signal} {device}".strip() + ("" if isinstance(value, Unavailable) else f" = {value}")
        for signal, device, value in collector.read_all()
    ]


def test_all_values_on_a_mac_are_read(mac: SimpleNamespace) -> None:
    """Values by hand; a line without a value has the reason NOT_COUNTED."""
    collector = OpenedCollector(PortableCollector, Roots())
    disk = [
        "disk.read_bytes_total {} = 4096",
        "disk.reads_total {} = 5",
        "disk.read_ns_total {} = 3000000",
        "disk.write_bytes_total {} = 512",
        "disk.writes_total {} = 7",
        "disk.write_ns_total {} = 4000000",
        "disk.busy_ns_total {}",
        "disk.queue_ns_total {}",
    ]
    assert read_texts(collector) == [
        "cpu.user_ns_total all = 3000000000",  # 2.5 s and 0.5 s nice
        "cpu.system_ns_total all = 1250000000",
        "cpu.idle_ns_total all = 10000000000",
        "cpu.iowait_ns_total all",
        "cpu.steal_ns_total all",
        f"memory.available_bytes = {8 << 30}",
        f"memory.swap_free_bytes = {1 << 30}",
        "memory.swap_in_bytes_total",  # on a Mac it counts pages of files too
        "memory.swap_out_bytes_total",
        "cpu.runnable_count",
        "cpu.blocked_count",
        "memory.cached_bytes",
        "memory.dirty_bytes",
        "memory.writeback_bytes",
        "memory.major_faults_total",
        "memory.direct_reclaim_pages_total",
        "memory.refaults_total",
        "memory.oom_kills_total",
        "tcp.segments_sent_total",
        "tcp.retransmits_total",
        "tcp.timeouts_total",
        *(line.format("disk1") for line in disk),
        *(line.format("disk10") for line in disk),  # a Mac's disk10 is no partition of disk1
        "network.receive_bytes_total en0 = 10",
        "network.transmit_bytes_total en0 = 20",
        "network.receive_drops_total en0 = 4",
        "network.transmit_drops_total en0",  # psutil always has 0 there
        "network.errors_total en0 = 3",
        "network.link_bytes_per_second en0 = 125000000.0",
        "network.carrier_changes_total en0",
    ]
    reasons = {value.message for _, _, value in collector.read_all() if hasattr(value, "message")}
    assert reasons == {NOT_COUNTED}


def test_a_failed_psutil_call_is_a_reason_in_its_columns(mac: SimpleNamespace) -> None:
    def deny(**_: bool) -> None:
        raise PermissionError

    mac.disk_io_counters = deny
    del mac.net_if_stats
    collector = OpenedCollector(PortableCollector, Roots())
    assert collector.read_value("cpu.user_ns_total", "all") == 3_000_000_000
    reads = collector.read_value("disk.reads_total")
    assert isinstance(reads, Unavailable)
    assert (reads.kind, reads.message) == ("denied", "psutil.disk_io_counters: permission denied")
    speed = collector.read_value("network.link_bytes_per_second", "en0")
    assert isinstance(speed, Unavailable) and speed.kind == "absent"


def test_a_changed_set_of_disks_or_interfaces_changes_the_columns(mac: SimpleNamespace) -> None:
    collector = OpenedCollector(PortableCollector, Roots())
    mac.net_io_counters = lambda pernic: {}
    with pytest.raises(DevicesChanged):
        collector.read_all()


def test_placeholders_of_psutil_are_rejected(mac: SimpleNamespace) -> None:
    """Where /proc/vmstat cannot be read, psutil warns and returns zeros."""
    import warnings

    def swap() -> Counters:
        warnings.warn("'sin' and 'sout' were set to 0", RuntimeWarning, stacklevel=1)
        return Counters(free=7, sin=0, sout=0)

    mac.LINUX, mac.swap_memory = True, swap
    collector = OpenedCollector(PortableCollector, Roots())
    assert collector.read_value("memory.swap_free_bytes") == 7
    assert isinstance(collector.read_value("memory.swap_in_bytes_total"), Unavailable)


def test_counters_never_decrease(mac: SimpleNamespace) -> None:
    collector = OpenedCollector(PortableCollector, Roots())
    collector.read_all()
    mac.cpu_times = lambda: Counters(user=2.0, nice=0.5, system=1.5, idle=9.0)
    assert collector.read_value("cpu.idle_ns_total", "all") == 10_000_000_000
    assert collector.read_value("cpu.system_ns_total", "all") == 1_500_000_000


def test_a_missing_psutil_is_absent_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    for kind in (PortableCollector, PortableProcessesCollector):
        with pytest.raises(Unavailable) as caught:
            kind(Context(Roots(), None, list)).open()
        assert (caught.value.kind, caught.value.remedy) == ("absent", "pip install psutil")


def test_portable_values_agree_with_the_linux_collectors() -> None:
    """Each Linux value is read before and after: a counter of psutil lies between the two."""
    kinds = {kind.name: kind for kind in COLLECTORS}  # type: ignore[attr-defined]
    linux = [OpenedCollector(kinds[name], Roots()) for name in ("cpu", "memory", "disk", "network")]
    portable = OpenedCollector(PortableCollector, Roots())

    def read_linux() -> dict[tuple[str, str], Any]:
        return {reading[:2]: reading[2] for each in linux for reading in each.read_all()}

    before, here, after = read_linux(), portable.read_all(), read_linux()
    counters = 0
    for signal, device, value in here:
        if isinstance(value, Unavailable) or not signal.endswith("_total"):
            continue
        low, high = before[signal, device], after[signal, device]
        grain = 1_000 if signal.endswith("_ns_total") else 0  # psutil has seconds as floats
        assert low - grain <= value <= high + grain, (signal, device)
        counters += 1
    assert counters >= 5
    values = {reading[:2]: reading[2] for reading in here}
    available = values["memory.available_bytes", ""]
    assert available == pytest.approx(after["memory.available_bytes", ""], rel=0.2)
    for each in (*linux, portable):
        each.close()


def test_counters_never_shrink_and_cpu_time_advances() -> None:
    collector = OpenedCollector(PortableCollector, Roots())
    first = collector.read_all()
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
    second = collector.read_all()
    for (signal, device, before), (_, _, after) in zip(first, second):
        if signal.endswith("_total") and not isinstance(before, Unavailable):
            assert after >= before, (signal, device)
    cpu = [sum(value for _, _, value in sample[:5]) for sample in (first, second)]  # type: ignore[misc]
    cores = os.cpu_count() or 1
    assert 0 < cpu[1] - cpu[0] < 60 * cores * 1e9


# --- processes ---


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process whose child has read a file of FILE_BYTES and waits."""
    path = tmp_path / "data"
    path.write_bytes(bytes(FILE_BYTES))
    command = [sys.executable, "-c", PARENT, READER, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    yield process, path
    process.stdin.close()
    process.wait(PATIENCE_S)
    process.stdout.close()


def open_processes(roots: Roots, pids: Callable[[], list[int]]) -> PortableProcessesCollector:
    collector = PortableProcessesCollector(Context(roots, None, pids), clock=lambda: 5)
    assert tuple(collector.open()) == PROCESS_COLUMNS
    return collector


def read_rows(collector: PortableProcessesCollector) -> dict[int, dict[str, int]]:
    rows = [dict(zip(PROCESS_COLUMNS, row)) for row in collector.sample()]
    return {row["pid"]: row for row in rows}


def test_the_portable_process_table_has_the_linux_columns() -> None:
    assert PROCESS_COLUMNS == processes.PROCESS_COLUMNS
    assert PortableProcessesCollector.table == processes.ProcessesCollector.name


def test_a_child_process_is_listed_with_its_read_bytes(
    reader: tuple[subprocess.Popen[str], Path],
) -> None:
    process, _ = reader
    collector = open_processes(Roots(), lambda: [process.pid])
    rows = read_rows(collector)
    assert len(rows) == 2
    (child,) = (row for pid, row in rows.items() if pid != process.pid)
    assert child["parent_pid"] == process.pid
    assert FILE_BYTES <= child["read_chars_total"] < FILE_BYTES + (64 << 20)
    assert rows[process.pid]["read_chars_total"] < child["read_chars_total"] + (64 << 20)
    assert (child["t_ns"], child["threads_count"]) == (5, 1)
    assert child["rss_bytes"] > 1 << 20
    assert collector.strings()["name"][child["name"]].startswith("python")
    # as registrations on this machine have it
    assert child["started_ticks"] == read_start_ticks("/proc", child["pid"])


def test_portable_and_linux_process_tables_agree(
    reader: tuple[subprocess.Popen[str], Path],
) -> None:
    process, _ = reader
    linux = processes.ProcessesCollector(Context(Roots(), None, lambda: [process.pid]))
    linux.open()
    linux_rows = {row[1]: dict(zip(PROCESS_COLUMNS, row)) for row in linux.sample()}
    rows = read_rows(open_processes(Roots(), lambda: [process.pid]))
    assert set(rows) == set(linux_rows)
    for pid, row in rows.items():
        for column in set(PROCESS_COLUMNS) - {"t_ns", "rss_bytes", "name"}:
            assert row[column] == linux_rows[pid][column], column
    linux.close()


def test_ended_processes_and_the_recorder_have_no_row(
    reader: tuple[subprocess.Popen[str], Path],
) -> None:
    process, _ = reader
    collector = open_processes(Roots(), lambda: [process.pid, os.getpid()])
    before = read_rows(collector)
    assert os.getpid() not in before and len(before) == 2
    assert process.stdin is not None
    process.stdin.close()
    process.wait(PATIENCE_S)
    assert read_rows(collector) == {}


def test_hidden_process_values_are_recorded_as_minus_1(
    monkeypatch: pytest.MonkeyPatch, reader: tuple[subprocess.Popen[str], Path]
) -> None:
    """As on a Mac: `io_counters` does not exist; and threads are denied."""
    process, _ = reader

    def deny(_: psutil.Process) -> None:
        raise psutil.AccessDenied

    monkeypatch.delattr(psutil.Process, "io_counters")
    monkeypatch.setattr(psutil.Process, "num_threads", deny)
    row = read_rows(open_processes(Roots(), lambda: [process.pid]))[process.pid]
    hidden = {name for name, value in row.items() if value == -1}
    assert hidden == {
        "threads_count",
        "read_chars_total",
        "write_chars_total",
        "read_bytes_total",
        "write_bytes_total",
    }


# --- the choice ---


def test_portable_collectors_replace_the_linux_collectors_without_proc(tmp_path: Path) -> None:
    names = [kind.name for kind in select_collectors(Roots())]  # type: ignore[attr-defined]
    assert "cpu" in names and not {"portable", "portable_processes"} & set(names)
    without = select_collectors(Roots(tmp_path / "none", tmp_path / "none"))
    assert without == select_collectors(Roots(), use_portable=True)
    host = [kind.name for kind in without if not kind.name.startswith("gpu_")]  # type: ignore[attr-defined]
    assert host == ["portable", "portable_processes"]
    assert select_collectors(Roots(tmp_path), use_portable=False) == select_collectors(Roots())
    assert CpuCollector not in without


@pytest.mark.parametrize(
    ("settings", "choice"), [({}, None), ({"hz": 2}, None), ({"enabled": True}, True)]
)
def test_the_profile_can_force_the_portable_collectors(
    settings: dict[str, Any], choice: bool | None
) -> None:
    plan = build_plan({"sampling": {"hz": 10, "collectors": {"portable": settings}}})
    assert plan.use_portable() is choice
