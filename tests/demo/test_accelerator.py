"""The emulated accelerator against its own log, and as the recorder sees it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.gpu.emulated import GpuEmulatedCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.demo.accelerator import CLOCK_HERTZ, EmulatedAccelerator
from clusterprof.errors import ClusterprofError, DevicesChanged, Unavailable

MS = 1_000_000


class Watch:
    """The module's clock: a look at it takes a microsecond, and only sleep takes more."""

    def __init__(self) -> None:
        self.now_ns = time.monotonic_ns()

    def monotonic_ns(self) -> int:
        self.now_ns += 1_000
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A host that is never held up between two calls, as one on a busy machine is."""
    made = Watch()
    monkeypatch.setattr("clusterprof.demo.accelerator.time", made)
    return made


def busy_by_log(log: list[tuple[int, int]], t_ns: int) -> int:
    return sum(max(0, min(end, t_ns) - start) for start, end in log)


def test_submitted_work_queues_and_busy_time_matches_the_log(watch: Watch) -> None:
    device = EmulatedAccelerator(None)
    began_ns = watch.monotonic_ns()
    ends = [device.submit(3 * MS), device.submit(2 * MS)]
    assert ends[1] - ends[0] == 2 * MS  # the second waits for the first
    assert device.log == [(ends[0] - 3 * MS, ends[0]), (ends[0], ends[1])]
    assert device.log[0][0] >= began_ns
    device.synchronize()
    assert watch.now_ns >= ends[1]
    late = device.submit(MS)
    assert late - MS > ends[1]  # the host was late: idle in between
    for t_ns in (late - MS, late - MS // 2, late, late + 7 * MS):
        assert device.busy_ns(t_ns) == busy_by_log(device.log, t_ns)
    assert device.busy_ns(late) == 6 * MS


def test_a_full_queue_blocks_the_host_until_work_ends() -> None:
    device = EmulatedAccelerator(None, queue_depth=2)
    first = device.submit(20 * MS)
    device.submit(20 * MS)
    device.submit(20 * MS)
    assert time.monotonic_ns() >= first
    assert [end - start for start, end in device.log] == [20 * MS] * 3


def test_a_throttled_device_takes_longer_for_the_same_work() -> None:
    device = EmulatedAccelerator(None)
    device.throttle(0.5, 0x40)
    assert device.log == []
    device.submit(3 * MS)
    assert [end - start for start, end in device.log] == [6 * MS]


def test_only_a_pageable_copy_blocks_the_host() -> None:
    device = EmulatedAccelerator(None)
    busy_until = device.submit(5 * MS)
    done = device.copy(60_000_000)  # 10 ms at 6 GB/s
    assert done - busy_until >= 10 * MS
    assert time.monotonic_ns() >= done
    ready = device.copy(250_000_000, pinned=True)  # 10 ms at 25 GB/s
    end = device.submit(MS)
    assert end - MS >= ready
    assert device.busy_ns(end) == 6 * MS  # a copy is not busy time


def test_a_forked_child_cannot_use_the_device() -> None:
    device = EmulatedAccelerator(None)
    pid = os.fork()
    if pid == 0:
        try:
            device.submit(MS)
        except ClusterprofError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_the_device_page_has_the_documented_layout(tmp_path: Path) -> None:
    path = tmp_path / "0.emulated"
    device = EmulatedAccelerator(path)
    device.use_memory(123)
    device.throttle(1.0, 0x20)
    end = device.submit(4 * MS)
    page = path.read_bytes()
    assert len(page) == 4096
    magic, version, pid, ticks = struct.unpack_from("<8sQQQ", page)
    started = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    assert (magic, version % 2, pid, ticks) == (b"CPEMU02\n", 0, os.getpid(), started)
    first = device.log[0][0]
    body = struct.unpack_from("<qqqqqqq", page, 32)
    assert body[:6] == (4 * MS, end, CLOCK_HERTZ, 0x20, 123, 1)
    assert 0 < body[6] <= first


def test_ranks_never_take_the_device_number_of_a_running_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERPROF_RUN_DIR", str(tmp_path))
    code = "from clusterprof.demo.accelerator import EmulatedAccelerator as E; E.from_environment()"
    environment = {**os.environ, "LOCAL_RANK": "3"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    names = []
    for rank in ("3", "3", "5", ""):  # the first takes over from a process that has ended
        monkeypatch.setenv("LOCAL_RANK", rank)
        path = EmulatedAccelerator.from_environment().path
        assert path is not None
        names.append(path.name)
    assert names == ["3.emulated", "0.emulated", "5.emulated", "1.emulated"]
    assert sorted(p.name for p in (tmp_path / "devices").iterdir()) == sorted(names)


def test_without_a_run_directory_the_device_writes_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERPROF_RUN_DIR", raising=False)
    assert EmulatedAccelerator.from_environment().path is None


def collector(run_dir: Path | None, t_ns: int = 0) -> GpuEmulatedCollector:
    return GpuEmulatedCollector(Context(Roots(), run_dir, lambda: []), clock=lambda: t_ns)


def test_the_collector_reads_the_submitted_work_exactly(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    devices = [EmulatedAccelerator(tmp_path / f"devices/{n}.emulated") for n in (10, 2)]
    devices[1].throttle(0.5, 0x40)
    devices[1].use_memory(1 << 30)
    end = devices[1].submit(4 * MS)  # 8 ms at half the clock
    opened = collector(tmp_path, end - 3 * MS)
    columns = opened.open()
    names = ["gpu.busy_ns_total", "gpu.sm_clock_hertz", "gpu.throttle_bits"]
    names += ["gpu.memory_used_bytes", "gpu.sm_clock_max_hertz", "gpu.sm_active_ratio"]
    names += ["gpu.power_watts", "gpu.pcie_receive_bytes_per_second"]
    assert [(signal.name, device) for signal, device in columns] == [
        (name, device) for device in ("emulated-2", "emulated-10") for name in names
    ]
    unknown = [Unavailable("absent", "available from the second sample on", "")] * 3
    first = [5 * MS, CLOCK_HERTZ // 2, 0x40, 1 << 30, CLOCK_HERTZ, *unknown]
    assert list(opened.sample()) == [*first, 0, CLOCK_HERTZ, 0, 0, CLOCK_HERTZ, *unknown]
    inventory = opened.inventory()
    assert [entry["id"] for entry in inventory] == ["emulated-2", "emulated-10"]
    assert all(entry["emulated"] and entry["pid"] == os.getpid() for entry in inventory)
    opened.close()


def test_a_resident_collective_counts_as_busy_without_computing(
    tmp_path: Path, watch: Watch
) -> None:
    """4 ms of work, then 30 ms or more in a collective; looked at while it waits and afterwards."""
    (tmp_path / "devices").mkdir()
    device = EmulatedAccelerator(tmp_path / "devices/0.emulated")
    now_ns = [0]
    opened = GpuEmulatedCollector(Context(Roots(), tmp_path, lambda: []), clock=lambda: now_ns[0])
    opened.open()
    begun = device.submit(4 * MS)
    samples = []

    def wait() -> None:
        for after in (0, 10 * MS):
            now_ns[0] = begun + after
            samples.append(list(opened.sample()))
        watch.sleep(0.03)

    start, end = device.wait_on_device(wait)
    assert start == begun and end - start >= 30 * MS
    device.copy(60_000_000)  # takes 10 ms at 6 GB/s, in which the device is idle
    now_ns[0] = end + 10 * MS
    samples.append(list(opened.sample()))
    assert [sample[0] for sample in samples] == [4 * MS, 14 * MS, 4 * MS + end - start]
    _, waiting, after = samples
    assert waiting[5:] == [0.05, 90 + 110 + 500 * 0.05, 0.0]
    part = (end - start - 10 * MS) / (end - start)  # of the time since, the rest is idle
    assert after[5:7] == pytest.approx([0.05 * part, 90 + 135 * part])
    assert after[7] == pytest.approx(60_000_000e9 / (end - start))
    assert device.busy_ns(end) == 4 * MS + end - start
    queued = device.submit(2 * MS, at_ns=end + 5 * MS)  # by a host that did not wait
    assert device.log[-1] == (end + 5 * MS, queued)


def test_a_new_or_replaced_device_requests_reopening(tmp_path: Path) -> None:
    opened = collector(tmp_path)
    assert list(opened.open()) == []
    assert list(opened.sample()) == []
    path = tmp_path / "devices" / "0.emulated"
    path.parent.mkdir()
    EmulatedAccelerator(path)
    with pytest.raises(DevicesChanged):
        opened.sample()
    opened.close()
    assert len(opened.open()) == 8
    assert len(opened.sample()) == 8
    page = path.read_bytes()
    path.unlink()
    path.write_bytes(page)
    with pytest.raises(DevicesChanged):
        opened.sample()
    opened.close()


def test_a_half_written_page_gives_a_reason_instead_of_values(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    path = tmp_path / "devices" / "0.emulated"
    EmulatedAccelerator(path)
    page = bytearray(path.read_bytes())
    page[8:16] = struct.pack("<Q", 5)  # odd: being written, for ever
    path.write_bytes(page)
    opened = collector(tmp_path)
    opened.open()
    torn = Unavailable("failed", "its process stopped while it wrote the device's page", "")
    assert list(opened.sample()) == [torn] * 8
    opened.close()


def test_files_without_a_valid_page_are_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "devices"
    folder.mkdir()
    (folder / "0.emulated").write_bytes(b"short")
    (folder / "1.emulated").write_bytes(bytes(4096))
    (folder / "2.emulated").symlink_to("/etc/passwd")
    (folder / "name.emulated").write_bytes(bytes(4096))
    assert list(collector(tmp_path).open()) == []


def test_without_a_run_directory_the_collector_is_absent() -> None:
    with pytest.raises(Unavailable) as raised:
        collector(None).open()
    assert raised.value.kind == "absent"
