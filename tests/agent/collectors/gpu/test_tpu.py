"""TPU: lists as libtpu gives them, a simulated libtpu, and tables of tpu-info written by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.gpu import tpu
from clusterprof.agent.collectors.gpu.tpu import GpuTpuCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import Unavailable
from tests.support.accelerators.simulated import SITE, write_tool, write_tpu

GIB = 1 << 30
NOBODY = Unavailable("absent", "no process holds the TPU")
TABLES = """\
Libtpu version: 0.0.19
Accelerator type: v6e

TPU Chips
┏━━━━━━━━━━━━━┳━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━┓
│ /dev/vfio/0 │ TPU v6e chip │ 1       │ 146 │
TPU Runtime Utilization
┃ Chip ┃ HBM Usage (GiB)       ┃ Duty cycle ┃
│ 8    │ 18.50 GiB / 31.25 GiB │    98.10%  │
│ 9    │ 0.00 GiB / 31.25 GiB  │    N/A     │
TensorCore Utilization
┃ Core ID ┃ TensorCore Utilization ┃
│ 0       │ 13.60%                 │
│ 1       │ 14.80%                 │
TPU Buffer Transfer Latency
│ 8MB+         │ 108978.82 us │ 164849.81 us │
"""


def test_libtpu_lists_become_rows_per_chip() -> None:
    lists: list[Any] = [["98.10", "0.00"], ["34.20", "0.0"], ["17179869184", "0"], [32 * GIB] * 2]
    assert tpu.build_rows(lists, 2) == [
        [pytest.approx(0.981), pytest.approx(0.342), 16 * GIB, 32 * GIB],
        [0.0, 0.0, 0, 32 * GIB],
    ]


def test_two_cores_of_a_chip_are_a_single_device() -> None:
    lists: list[Any] = [["50"], ["10", "30"], ["1", "2"], ["8", "8"]]
    assert tpu.build_rows(lists, 1) == [[0.5, pytest.approx(0.2), 3, 16]]


def test_a_value_that_libtpu_lacks_has_a_reason() -> None:
    failed = Unavailable("failed", "libtpu: boom")
    lists: list[Any] = [["nan", "101"], [], ["1", "2", "3"], failed]
    count = Unavailable("failed", "libtpu reports 3 values of hbm_capacity_usage for 2 chips")
    first = Unavailable("failed", "libtpu: impossible value nan for duty_cycle_pct")
    second = Unavailable("failed", "libtpu: impossible value 101 for duty_cycle_pct")
    assert tpu.build_rows(lists, 2) == [
        [first, NOBODY, count, failed],
        [second, NOBODY, count, failed],
    ]
    ((value, *_),) = tpu.build_rows([["busy"], [], [], []], 1)
    assert value == Unavailable("failed", "libtpu reports 'busy' for duty_cycle_pct")


def test_the_collector_reads_values_through_libtpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = tmp_path / "tpu"
    write_tpu(scenario, tensorcore_util="not supported on this chip")
    monkeypatch.setenv("FAKETPU", str(scenario))
    monkeypatch.syspath_prepend(SITE)
    collector = GpuTpuCollector(Context(Roots(), None, lambda: []))
    columns = collector.open()
    values = dict(zip([(signal.name, device) for signal, device in columns], collector.sample()))
    inventory = collector.inventory()
    collector.close()
    for name in [name for name in sys.modules if name.partition(".")[0] == "libtpu"]:
        del sys.modules[name]
    missing = Unavailable("failed", "libtpu: not supported on this chip")
    assert values == {
        ("gpu.duty_cycle_ratio", "tpu-0"): pytest.approx(0.981),
        ("gpu.tensorcore_ratio", "tpu-0"): missing,
        ("gpu.memory_used_bytes", "tpu-0"): 16 * GIB,
        ("gpu.memory_total_bytes", "tpu-0"): 32 * GIB,
        ("gpu.duty_cycle_ratio", "tpu-1"): 0.0,
        ("gpu.tensorcore_ratio", "tpu-1"): missing,
        ("gpu.memory_used_bytes", "tpu-1"): 0,
        ("gpu.memory_total_bytes", "tpu-1"): 32 * GIB,
    }
    assert inventory[1] == {
        "id": "tpu-1",
        "vendor": "google",
        "index": 1,
        "emulated": False,
        "tells_busy": False,
        "driver": "libtpu 0.0.19",
    }


def test_tpu_info_tables_are_parsed() -> None:
    unknown = Unavailable("absent", "tpu-info reports 'N/A' for the duty cycle")
    assert tpu.parse_tpu_info(TABLES) == {
        8: [pytest.approx(0.981), pytest.approx(0.136), int(18.5 * GIB), int(31.25 * GIB)],
        9: [unknown, pytest.approx(0.148), 0, int(31.25 * GIB)],
    }
    plain = "TPU Runtime Utilization\n| 0    | 1.50 GiB / 16.00 GiB |    100.00% |\n"
    not_said = Unavailable("absent", "tpu-info does not report it")
    assert tpu.parse_tpu_info(plain) == {0: [1.0, not_said, int(1.5 * GIB), 16 * GIB]}
    with pytest.raises(Unavailable) as raised:
        tpu.parse_tpu_info("No TPU chips found.\n")
    assert raised.value.kind == "absent"


def test_a_node_without_libtpu_and_tpu_info_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable) as raised:
        GpuTpuCollector(Context(Roots(), None, lambda: [])).open()
    assert raised.value == Unavailable(
        "absent",
        "the Python package libtpu is missing or too old; tpu-info was not found",
        "pip install --upgrade libtpu",
        by_user=True,
    )


def test_tpu_chips_are_found_on_the_pci_bus(tmp_path: Path) -> None:
    for address, facts in {
        "0000:00:04.0": ("0x1ae0", "0x0063", "0x0000", "0"),
        "0000:00:05.0": ("0x1ae0", "0x0042", "0x0000", "0"),  # a network card of the same maker
        "0000:00:06.0": ("0x1ae0", "0x0027", "0x004f", "-1"),
        "0000:00:07.0": ("0x8086", "0x0063", "0x0000", "0"),
    }.items():
        folder = tmp_path / address
        folder.mkdir()
        for name, text in zip(("vendor", "device", "subsystem_device", "numa_node"), facts):
            (folder / name).write_text(f"{text}\n")
    assert tpu.list_chips(str(tmp_path)) == [
        {"name": "TPU v5e", "pci_bus_id": "0000:00:04.0", "numa_node": 0},
        {"name": "TPU v3", "pci_bus_id": "0000:00:06.0"},
    ]
    assert tpu.explain_absence({"PATH": ""}, str(tmp_path)) is None
    assert (
        tpu.explain_absence({"PATH": str(write_tool(tmp_path / "bin", "tpu-info", ""))}, "/none")
        is None
    )
