from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.collectors.gpu.intel import SIGNALS, GpuIntelCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable

PATIENCE = 20.0
S = 1_000_000_000
XE, I915 = "0000:29:00.0", "0000:9a:00.0"
SECOND = Unavailable("absent", "available from the second sample on")
BEGIN = 1_000_000_000


class Rig:
    """A collector whose clock the test moves: nothing is read until half a second has passed."""

    def __init__(self, roots: Roots, pids: tuple[int, ...] = (4711, 4712)) -> None:
        self.roots, self.now_ns = roots, 100 * S
        context = self.context = Context(roots, None, lambda: pids)
        waits = {"first_wait_seconds": PATIENCE, "rest_ns": S // 2}
        self.collector = GpuIntelCollector(context, lambda: self.now_ns, **waits)
        _rigs.append(self)
        self.columns = self.collector.open()

    def sample(self) -> dict[tuple[str, str], Value]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                values = self.collector.sample()
            except NothingNew:
                time.sleep(0.001)
                continue
            keys = [(signal.name.removeprefix("gpu."), where) for signal, where in self.columns]
            return dict(zip(keys, values, strict=True))
        raise AssertionError("nothing was read")

    def at(self, seconds: float) -> dict[tuple[str, str], Value]:
        """Return what is read so many seconds after the beginning."""
        self.now_ns = 100 * S + round(seconds * S)
        return self.sample()

    def sample_until_events(self) -> None:
        """Take samples a second apart until one brings events."""
        self.events: list[Any] = []
        end = time.monotonic() + PATIENCE
        while not self.events and time.monotonic() < end:
            self.now_ns += S
            self.sample()
            self.events = self.collector.events()

    def file(self, card: int, name: str) -> Path:
        return self.roots.sys / f"class/drm/card{card}" / name


_rigs: list[Rig] = []


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    while _rigs:
        _rigs.pop().collector.close()


def of(values: dict[tuple[str, str], Value], device: str) -> list[Value]:
    return [values[signal.name.removeprefix("gpu."), device] for signal in SIGNALS]


def test_integrated_graphics_of_the_processor_are_skipped(host: Any) -> None:
    rig = Rig(host("intel-max-node"))
    assert list(rig.columns) == [(signal, device) for device in (XE, I915) for signal in SIGNALS]


def test_an_xe_gpu_reports_the_mean_clock_of_its_tiles(host: Any) -> None:
    # The clock is the mean of the two tiles; the block for video at 700 MHz does not count.
    assert of(Rig(host("intel-max-node")).sample(), XE) == [
        BEGIN,
        1.4e9,
        0x20 | 0x4,
        1 << 30,
        SECOND,
        600.0,
        5000.0,
        55.0,
        1.6e9,
    ]


def test_an_idle_i915_gpu_reports_zero_clock_and_reasons(host: Any) -> None:
    no_limit = Unavailable("absent", "no power limit is set")
    no_sensor = Unavailable("absent", "the driver does not report temp2_input")
    assert of(Rig(host("intel-max-node")).sample(), I915) == [
        BEGIN,
        0.0,
        0,
        512 << 20,
        SECOND,
        no_limit,
        7.0,
        no_sensor,
        2.05e9,
    ]


def test_the_inventory_describes_each_device(host: Any) -> None:
    assert Rig(host("intel-max-node")).collector.inventory() == [
        {
            "id": XE,
            "vendor": "intel",
            "index": 0,
            "emulated": False,
            "pci_bus_id": XE,
            "pci_id": "8086:0bd5",
            "driver": "xe",
            "numa_node": 0,
            "name": "Intel Data Center GPU Max 1550",
        },
        {
            "id": I915,
            "vendor": "intel",
            "index": 1,
            "emulated": False,
            "pci_bus_id": I915,
            "pci_id": "8086:56c0",
            "driver": "i915",
            "numa_node": 1,
            "name": "Intel Data Center GPU Flex 170",
        },
    ]


def test_job_busy_time_and_power_come_from_counter_differences(host_copy: Any) -> None:
    rig = Rig(host_copy("intel-max-node"))
    rig.sample()
    path = rig.roots.proc / "4712/fdinfo/8"
    path.write_text(path.read_text().replace("compute:\t2000000000", "compute:\t2600000000"))
    rig.file(1, "device/hwmon/hwmon2/energy1_input").write_text("5900000000\n")
    sample = rig.at(2)
    assert (sample["busy_ns_total", I915], sample["busy_ns_total", XE]) == (
        BEGIN + 6 * S // 10,
        BEGIN,
    )
    assert sample["power_watts", XE] == 450.0  # 900 J in 2 s
    assert sample["power_watts", I915] == 0.0
    rig.file(1, "device/hwmon/hwmon2/energy1_input").write_text("4\n")  # it began anew
    assert rig.at(3)["power_watts", XE] == SECOND
    rig.file(1, "device/hwmon/hwmon2/energy1_input").write_text("off\n")
    assert rig.at(4)["power_watts", XE].message.endswith("'off' is not a number")  # type: ignore[union-attr]


def test_hidden_processes_of_the_job_make_busy_time_unmeasured(
    host_copy: Any, as_nobody: Any
) -> None:
    rig = Rig(host_copy("intel-max-node"))
    before = rig.sample()["busy_ns_total", I915]
    fdinfo = rig.roots.proc / "4712/fdinfo/8"
    os.chmod(fdinfo, 0)
    with as_nobody():
        sample = rig.at(1)
    denied = sample["busy_ns_total", I915]
    assert isinstance(denied, Unavailable) and denied.kind == "denied"
    assert sample["job_memory_bytes", XE] == denied
    os.chmod(fdinfo, 0o644)
    after = rig.at(2)["busy_ns_total", I915]
    assert isinstance(after, int) and isinstance(before, int) and after < before


def test_a_suspended_device_reports_only_job_busy_time_and_memory(host_copy: Any) -> None:
    roots = host_copy("intel-max-node")
    (roots.sys / "class/drm/card2/device/power/runtime_status").write_text("suspended\n")
    sleeps = Unavailable("absent", "the device is suspended, and reading would wake it")
    expected: list[Value] = [sleeps] * len(SIGNALS)
    expected[0], expected[3] = BEGIN, 512 << 20
    assert of(Rig(roots).sample(), I915) == expected


def test_an_unreadable_throttle_reason_makes_the_bit_mask_unknown(host_copy: Any) -> None:
    roots = host_copy("intel-max-node")
    path = roots.sys / "class/drm/card2/gt/gt0/throttle_reason_thermal"
    path.write_text("2\n")
    assert Rig(roots).sample()["throttle_bits", I915] == Unavailable(
        "failed", f"{path}: impossible value 2"
    )


def test_processes_per_device_are_reported(host: Any) -> None:
    rig = Rig(host("intel-max-node"))
    rig.sample()
    assert rig.collector.events() == [
        ("device-used", {"pid": 4711, "started_ticks": 500, "device": XE}),
        ("device-used", {"pid": 4712, "started_ticks": 501, "device": I915}),
    ]
    rig.at(1)
    assert rig.collector.events() == []


def test_children_of_registered_processes_are_reported(host: Any) -> None:
    rig = Rig(host("intel-max-node"), (4711,))
    rig.sample()
    assert [about["pid"] for _, about in rig.collector.events()] == [4711]
    rig.context.readings.share(
        4712, SimpleNamespace(line=b"", line_ns=0)
    )  # the collector `threads` has found it
    rig.sample_until_events()
    assert rig.events == [("device-used", {"pid": 4712, "started_ticks": 501, "device": I915})]


def test_a_removed_device_changes_the_columns(host_copy: Any) -> None:
    rig = Rig(host_copy("intel-max-node"))
    rig.sample()
    shutil.rmtree(rig.roots.sys / "class/drm/card2")
    with pytest.raises(DevicesChanged):
        rig.at(1)
    rig.collector.close()
    rig.columns = rig.collector.open()
    assert {device for _, device in rig.columns} == {XE}
    assert rig.sample()["sm_clock_hertz", XE] == 1.4e9
    shutil.rmtree(rig.roots.sys / "class/drm/card1")
    with pytest.raises(DevicesChanged):
        rig.at(2)
    rig.collector.close()
    with pytest.raises(Unavailable, match="only integrated graphics"):
        rig.collector.open()


@pytest.mark.parametrize("name", ["h100-node", "container-no-sys", "mi300x-node"])
def test_machines_without_an_intel_gpu_are_absent(host: Any, name: str) -> None:
    with pytest.raises(Unavailable) as raised:
        Rig(host(name))
    assert raised.value.kind == "absent"


def test_open_files_are_released_on_close(host: Any, open_files: Any) -> None:
    before = open_files()
    rig = Rig(host("intel-max-node"))
    rig.sample()
    assert open_files() > before
    rig.collector.close()
    assert open_files() == before
