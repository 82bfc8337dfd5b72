from __future__ import annotations

import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context, Value
from clusterprof.agent.collectors.gpu.amd import SIGNALS, GpuAmdCollector, build_torch_uuid
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable

PATIENCE = 20.0
S = 1_000_000_000
ONE, TWO = "GPU-1f2e3d4c5b6a7980", "GPU-00c0ffee00c0ffee"
THREE = ["GPU-aaaabbbbccccdddd/0", "GPU-aaaabbbbccccdddd/1"]
MI250, NEWER, ASLEEP = "GPU-5555666677778888", "GPU-9999aaaabbbbcccc", "0000:e5:00.0"
DEVICES = [ONE, TWO, *THREE, MI250, NEWER, ASLEEP]
SECOND = Unavailable("absent", "available from the second sample on")
BEGIN = 1_000_000_000  # where an integral begins
# Of table v1.7: offsets of the cycle counter, the limiters and the sum of activity.
CYCLES, PPT, SOCKET, ACC = 40, 48, 52, 76


class Rig:
    """A collector whose clock the test moves: nothing is read until half a second has passed."""

    def __init__(self, roots: Roots, pids: tuple[int, ...] = (4711, 4712)) -> None:
        self.roots, self.now_ns = roots, 100 * S
        context = Context(roots, None, lambda: pids)
        waits = {"first_wait_seconds": PATIENCE, "rest_ns": S // 2}
        self.collector = GpuAmdCollector(context, lambda: self.now_ns, **waits)
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

    def file(self, card: int, name: str) -> Path:
        return self.roots.sys / f"class/drm/card{card}/device" / name

    def tell(self, card: int, **words: int) -> None:
        """Change numbers of 32 bits in the card's table: offset (`o40`) -> value."""
        data = bytearray(self.file(card, "gpu_metrics").read_bytes())
        for place, value in words.items():
            struct.pack_into("=I", data, int(place[1:]), value)
        self.file(card, "gpu_metrics").write_bytes(bytes(data))


_rigs: list[Rig] = []


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    while _rigs:
        _rigs.pop().collector.close()


def of(values: dict[tuple[str, str], Value], device: str) -> list[Value]:
    return [values[signal.name.removeprefix("gpu."), device] for signal in SIGNALS]


def absent(message: str) -> Unavailable:
    return Unavailable("absent", message)


def test_each_device_has_all_columns_in_order(host: Any) -> None:
    rig = Rig(host("mi300x-node"))
    expected = [(signal, device) for device in DEVICES for signal in SIGNALS]
    assert list(rig.columns) == expected


def test_an_mi300x_reports_all_values_of_a_whole_device(host: Any) -> None:
    assert of(Rig(host("mi300x-node")).sample(), ONE) == [
        0.87,
        0.33,
        BEGIN,
        2.1e9,
        SECOND,
        68_719_476_736,
        206_141_652_992,
        68_000_000_000,
        612.0,
        750.0,
        1000.0,
        61.0,
        1.3e9,
        2.1e9,
        SECOND,
        SECOND,
        5,
        16,
        3,
        4,
        0,
        7 * 100 * 1024,
        7 * 50 * 1024,
        2,
    ]


def test_a_slowed_pcie_link_is_reported_beside_its_maximum(host: Any) -> None:
    rig = Rig(host("mi300x-node"))
    assert rig.sample()["pcie_generation_count", TWO] == 4
    entry = next(device for device in rig.collector.inventory() if device["id"] == TWO)
    assert (entry["pcie_generation_max"], entry["pcie_width_max"]) == (5, 16)


def test_partitions_have_separate_busy_times_and_share_the_cards_clock(host: Any) -> None:
    sample = Rig(host("mi300x-node")).sample()
    whole = absent("counted for all partitions together, see the first")
    assert of(sample, THREE[1]) == [
        0.1,
        whole,
        BEGIN,
        2.1e9,
        SECOND,
        whole,
        whole,
        9_000_000_000,
        whole,
        whole,
        whole,
        61.0,
        1.3e9,
        2.1e9,
        SECOND,
        SECOND,
        5,
        16,
        *[whole] * 6,
    ]
    assert [sample[name, THREE[0]] for name in ("busy_ratio", "power_watts")] == [0.9, 612.0]


def test_an_older_metrics_table_reports_only_the_current_throttle_reasons(host: Any) -> None:
    older = absent("the firmware's table v1.3 does not report it")
    no_list = absent("the driver's compute part (amdkfd) lists no processes")
    assert of(Rig(host("mi300x-node")).sample(), MI250) == [
        0.64,
        0.2,
        BEGIN,
        1.41e9,
        0x20 | 0x4,
        68_719_476_736,
        206_141_652_992,
        0,
        480.0,
        750.0,
        older,
        71.0,
        1.6e9,
        1.7e9,
        older,
        older,
        5,
        16,
        9,
        4,
        0,
        older,
        older,
        no_list,
    ]


def test_an_unsupported_metrics_table_leaves_the_values_of_sysfs_files(host: Any) -> None:
    newer = Unavailable(
        "absent",
        "gpu_metrics v1.9 of 8 bytes is not supported",
        "a newer clusterprof may support it",
        by_user=True,
    )
    no_list = absent("the driver's compute part (amdkfd) lists no processes")
    assert of(Rig(host("mi300x-node")).sample(), NEWER) == [
        0.42,
        0.17,
        BEGIN,
        newer,
        newer,
        68_719_476_736,
        206_141_652_992,
        0,
        300.0,
        750.0,
        newer,
        64.0,
        newer,
        2.1e9,
        newer,
        newer,
        5,
        16,
        9,
        4,
        0,
        newer,
        newer,
        no_list,
    ]


def test_a_sleeping_device_counts_as_idle_and_is_not_woken(host: Any) -> None:
    rig = Rig(host("mi300x-node"))
    sleeps = absent("the device is suspended, and reading would wake it")
    expected: list[Value] = [sleeps] * len(SIGNALS)
    expected[2], expected[7] = BEGIN, 0
    assert of(rig.sample(), ASLEEP) == expected
    assert rig.at(1)["busy_ns_total", ASLEEP] == BEGIN


def test_the_inventory_describes_each_device(host: Any) -> None:
    rig = Rig(host("mi300x-node"))
    rig.sample()
    entries = rig.collector.inventory()
    assert [entry["id"] for entry in entries] == DEVICES
    assert entries[1] == {
        "id": TWO,
        "vendor": "amd",
        "index": 1,
        "emulated": False,
        "pci_bus_id": "0000:85:00.0",
        "pci_id": "1002:74a1",
        "driver": "amdgpu",
        "numa_node": 1,
        "pcie_generation_max": 5,
        "pcie_width_max": 16,
        "uuid": build_torch_uuid("00c0ffee00c0ffee"),
        "name": "AMD Instinct MI300X",
        "memory_bytes": 206_141_652_992,
        "partition": {"compute": "SPX", "memory": "NPS1"},
    }
    assert [entries[3][key] for key in ("index", "partition_number", "partition")] == [
        2,
        1,
        {"compute": "DPX", "memory": "NPS1"},
    ]
    assert "memory_bytes" not in entries[3] and "numa_node" in entries[3]
    assert build_torch_uuid("1f2e3d4c5b6a7980") == "GPU-31663265-3364-3463-3562-366137393830"


def test_busy_time_follows_the_firmware_counter_once_units_are_known(host_copy: Any) -> None:
    rig = Rig(host_copy("mi300x-node"))
    start = rig.sample()["busy_ns_total", ONE]
    # 1,000 cycles of 40 %: the sum rises by percent, and the 87 % of the instant do not count.
    rig.tell(1, o40=1_001_000, o76=80_000_000 + 40_000)
    assert rig.at(1)["busy_ns_total", ONE] == start + 4 * S // 10
    rig.tell(1, o40=1_002_000, o76=80_000_000 + 50_000)
    assert rig.at(2)["busy_ns_total", ONE] == start + 5 * S // 10
    # The sum begins anew (a reset of the device): the percentage stands in for that time.
    rig.tell(1, o40=1_003_000, o76=5)
    assert rig.at(3)["busy_ns_total", ONE] == start + 5 * S // 10 + 87 * S // 100


def test_an_unchanged_metrics_table_gives_no_new_values(host_copy: Any) -> None:
    rig = Rig(host_copy("mi300x-node"))
    start = rig.sample()["busy_ns_total", ONE]
    assert rig.at(1)["busy_ns_total", ONE] == start
    rig.tell(1, o40=1_001_000, o76=80_000_000 + 40_000)
    assert rig.at(2)["busy_ns_total", ONE] == start + 2 * 4 * S // 10


def test_active_limiters_become_throttle_reasons_and_times(host_copy: Any) -> None:
    rig = Rig(host_copy("mi300x-node"))
    names = ("throttle_bits", "thermal_violation_ns_total", "power_violation_ns_total")
    rig.sample()
    rig.tell(1, o40=1_001_000, o48=200 + 250)
    sample = rig.at(1)
    assert [sample[name, ONE] for name in names] == [0x4, BEGIN, BEGIN + S // 4]
    rig.tell(1, o40=1_002_000, o52=50 + 100, o44=20)
    sample = rig.at(2)
    assert [sample[name, ONE] for name in names] == [0x20 | 0x8, BEGIN + S // 10, BEGIN + S // 4]
    rig.tell(1, o40=1_003_000)
    assert rig.at(3)["throttle_bits", ONE] == 0


def test_impossible_values_and_text_become_reasons(host_copy: Any) -> None:
    roots = host_copy("mi300x-node")
    device = roots.sys / "class/drm/card5/device"
    (device / "gpu_busy_percent").write_text("101\n")
    (device / "mem_busy_percent").write_text("N/A\n")
    (device / "mem_info_vram_used").write_text("-5\n")
    (device / "ras/umc_err_count").write_text("ue: many\nce: 4\n")
    (device / "pp_dpm_sclk").write_text("\n")
    shutil.rmtree(device / "hwmon")
    sample = Rig(roots).sample()
    assert sample["busy_ratio", NEWER] == Unavailable(
        "failed", f"{device}/gpu_busy_percent: impossible value 101"
    )
    assert sample["busy_ns_total", NEWER] == sample["busy_ratio", NEWER]
    assert sample["memory_busy_ratio", NEWER] == Unavailable(
        "failed", f"{device}/mem_busy_percent: 'N/A' is not a number"
    )
    assert sample["memory_used_bytes", NEWER].message.endswith("impossible value -5")  # type: ignore[union-attr]
    assert sample["ecc_uncorrected_total", NEWER] == Unavailable(
        "failed", "umc_err_count contains no count"
    )
    assert sample["ecc_corrected_total", NEWER] == 4
    assert sample["sm_clock_max_hertz", NEWER] == Unavailable(
        "failed", "pp_dpm_sclk contains no clock"
    )
    assert sample["temperature_celsius", NEWER] == absent("the driver does not report temp2_input")
    assert sample["power_limit_watts", NEWER] == absent("the driver does not report power1_cap")


def test_processes_per_device_are_reported_once(host_copy: Any) -> None:
    rig = Rig(host_copy("mi300x-node"))
    rig.sample()
    assert rig.collector.events() == [
        ("device-used", {"pid": 4711, "started_ticks": 500, "device": ONE}),
        ("device-used", {"pid": 4712, "started_ticks": 501, "device": THREE[1]}),
    ]
    held = rig.roots.sys / "class/kfd/kfd/proc/4712"
    (held / "vram_5001").write_text("90000000000\n")
    events: list[Any] = []
    end, seconds = time.monotonic() + PATIENCE, 10
    while not events and time.monotonic() < end:
        seconds += 1
        rig.at(seconds)
        events = rig.collector.events()
    assert events == [("device-used", {"pid": 4712, "started_ticks": 501, "device": THREE[0]})]


def test_a_device_that_disappears_and_returns_changes_the_columns(
    host_copy: Any, tmp_path: Path
) -> None:
    rig = Rig(host_copy("mi300x-node"))
    rig.sample()
    card = rig.roots.sys / "class/drm/card2"
    shutil.move(str(card), tmp_path / "card2")
    with pytest.raises(DevicesChanged):
        rig.at(1)
    rig.collector.close()
    rig.columns = rig.collector.open()
    assert TWO not in {device for _, device in rig.columns}
    assert rig.sample()["busy_ratio", ONE] == 0.87
    shutil.copytree(tmp_path / "card2", card)
    rig.now_ns += 11 * S
    with pytest.raises(DevicesChanged):
        rig.sample()
    rig.collector.close()
    rig.columns = rig.collector.open()
    assert rig.sample()["busy_ratio", TWO] == 0.12


@pytest.mark.parametrize("name", ["h100-node", "container-no-sys", "intel-max-node"])
def test_machines_without_an_amd_gpu_are_absent(host: Any, name: str) -> None:
    with pytest.raises(Unavailable) as raised:
        Rig(host(name))
    assert raised.value.kind == "absent"


def test_integrated_graphics_are_not_an_accelerator(host_copy: Any) -> None:
    roots = host_copy("mi300x-node")
    for card in range(1, 7):
        shutil.rmtree(roots.sys / f"class/drm/card{card}")
    with pytest.raises(Unavailable, match="less than 4 GiB"):
        Rig(roots)


def test_files_and_threads_are_released_on_close(host: Any, open_files: Any) -> None:
    before = open_files()
    rig = Rig(host("mi300x-node"))
    rig.sample()
    assert open_files() > before
    rig.collector.close()
    assert open_files() == before
