"""Gaudi: a simulated `pyhlml` in this process, and answers of `hl-smi` written by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.gpu import gaudi_hlml
from clusterprof.agent.collectors.gpu.gaudi import GpuGaudiCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import Unavailable
from tests.support.accelerators.simulated import SITE, SimulatedGaudi, wait_until, write_tool

FIRST, SECOND = "01P0-HL3080A0-15-TN-00", "01P0-HL3080A0-15-TN-01"
SECOND_NS = 1_000_000_000
# What the simulated device says (tests/support/accelerators/simulated.py) in base units: 62 %,
# 6 of 128 GiB, 612,500 of 850,000 mW, 5,000,500 mJ, MHz; no reason for a lowered clock.
HEALTHY = {
    "gpu.power_utilisation_ratio": 0.62,
    "gpu.memory_used_bytes": 6 << 30,
    "gpu.memory_total_bytes": 128 << 30,
    "gpu.power_watts": 612.5,
    "gpu.power_limit_watts": 850.0,
    "gpu.energy_joules_total": 5000.5,
    "gpu.temperature_celsius": 47,
    "gpu.soc_clock_hertz": 1_600_000_000,
    "gpu.soc_clock_max_hertz": 1_650_000_000,
    "gpu.throttle_bits": 0,
    "gpu.pcie_replays_total": 2,
    "gpu.pcie_generation_count": 5,
    "gpu.pcie_width_count": 16,
    "gpu.ecc_corrected_total": 4,
    "gpu.ecc_uncorrected_total": 0,
}
# Of the second: 5 %, 225 W; power limit and temperature lower its clock (NVML's 0x4 and 0x20).
OTHER = HEALTHY | {
    "gpu.power_utilisation_ratio": 0.05,
    "gpu.power_watts": 225.0,
    "gpu.throttle_bits": 0x24,
}
LOST = Unavailable(
    "failed",
    "the Gaudi is lost",
    "check the kernel log; the device needs a reset or the node a reboot",
)


@pytest.fixture
def gaudis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedGaudi]:
    made = SimulatedGaudi(tmp_path / "gaudis")
    monkeypatch.setenv("FAKEHLML", str(made.path))
    monkeypatch.setenv("PATH", str(tmp_path))  # no hl-smi
    monkeypatch.syspath_prepend(SITE)
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyhlml"]:
        del sys.modules[name]


def collected() -> dict[str, dict[str, Any]]:
    """One sample of the real collector: device -> signal -> value."""
    collector = GpuGaudiCollector(Context(Roots(), None, lambda: []))
    columns = collector.open()
    result: dict[str, dict[str, Any]] = {}
    for (signal, device), value in zip(columns, collector.sample()):
        result.setdefault(device, {})[signal.name] = value
    collector.close()
    return result


def test_gaudi_values_are_in_base_units_without_busy_time(gaudis: SimulatedGaudi) -> None:
    assert collected() == {FIRST: HEALTHY, SECOND: OTHER}
    assert not {name for name in gaudi_hlml.SIGNALS if "busy" in name}


def test_the_inventory_describes_each_device(gaudis: SimulatedGaudi) -> None:
    library = gaudi_hlml.HlmlLibrary(lambda index, call: None)
    assert library.inventory[1] == {
        "id": SECOND,
        "vendor": "intel",
        "index": 1,
        "emulated": False,
        "tells_busy": False,
        "name": "HL-325L",
        "module": 1,
        "pci_bus_id": "0000:4d:00.0",
        "memory_bytes": 128 << 30,
        "driver": "1.24.2",
    }


def test_old_bindings_with_a_shared_handle_distinguish_the_devices(gaudis: SimulatedGaudi) -> None:
    gaudis.write(flavour="old-handles", GetUtilizationRates=[62, 5])  # a number, not a structure
    assert collected() == {FIRST: HEALTHY, SECOND: OTHER}


def test_old_bindings_that_hide_errors_are_not_used(gaudis: SimulatedGaudi) -> None:
    gaudis.write(flavour="old-errors", GetPowerUsage={"error": "HLML_ERROR_NO_DATA"})
    with pytest.raises(Unavailable) as raised:
        collected()
    assert raised.value == Unavailable(
        "absent",
        "this habana-pyhlml hides errors behind zeros; hl-smi was not found",
        "pip install --upgrade habana-pyhlml",
        by_user=True,
    )


@pytest.mark.parametrize(
    ("changes", "signals", "reason"),
    [
        (
            {"GetPowerUsage": {"error": "HLML_ERROR_NOT_SUPPORTED"}},
            ["gpu.power_watts"],
            Unavailable("absent", "not supported by this Gaudi or driver"),
        ),
        (
            {"GetPowerUsage": {"error": "HLML_ERROR_MEMORY"}},
            ["gpu.power_watts"],
            Unavailable("failed", "HLML: error 20"),
        ),
        (
            {"GetUtilizationRates": 137},
            ["gpu.power_utilisation_ratio"],
            Unavailable("failed", "HLML: impossible value 137 %"),
        ),
        (
            {"GetTotalECCErrors__0": -1},
            ["gpu.ecc_corrected_total"],
            Unavailable("failed", "HLML: impossible count -1"),
        ),
        (
            {"GetMemoryInfo": {"used": 9, "total": 8}},
            ["gpu.memory_used_bytes", "gpu.memory_total_bytes"],
            Unavailable("failed", "HLML: impossible: 9 of 8 bytes"),
        ),
    ],
)
def test_an_unreadable_value_leaves_the_other_values(
    gaudis: SimulatedGaudi, changes: dict[str, Any], signals: list[str], reason: Unavailable
) -> None:
    ((call, bad),) = changes.items()
    healthy = {
        "GetUtilizationRates": {"aip": 5},
        "GetPowerUsage": 225000,
        "GetMemoryInfo": {"used": 6 << 30, "total": 128 << 30},
    }.get(call, 4)
    gaudis.write(**{call: [bad, healthy]})
    assert collected() == {FIRST: HEALTHY | dict.fromkeys(signals, reason), SECOND: OTHER}


def test_a_lost_device_is_not_queried_again(gaudis: SimulatedGaudi) -> None:
    now = [0]
    library = gaudi_hlml.HlmlLibrary(lambda index, call: None, clock=lambda: now[0])
    lost_one, other = library.devices
    assert dict(zip(gaudi_hlml.SIGNALS, lost_one.sample())) == HEALTHY
    now[0] += SECOND_NS
    gaudis.write(GetPowerUsage=[{"error": "HLML_ERROR_AIP_IS_LOST"}, 225000])
    assert lost_one.sample() == [LOST] * len(gaudi_hlml.SIGNALS)
    gaudis.write(GetUtilizationRates=[{"signal": 9}, {"aip": 5}])  # would end this test run
    now[0] += SECOND_NS
    assert lost_one.sample() == [LOST] * len(gaudi_hlml.SIGNALS)
    assert dict(zip(gaudi_hlml.SIGNALS, other.sample())) == OTHER
    lost = ("device-lost", {"message": "the Gaudi is lost", "call": "GetPowerUsage"})
    assert (list(lost_one.notes), list(other.notes)) == ([lost], [])


def test_no_driver_and_no_device_are_absent(gaudis: SimulatedGaudi) -> None:
    gaudis.count = 0
    gaudis.write()
    with pytest.raises(Unavailable) as raised:
        collected()
    assert raised.value.message == "the driver lists no Gaudi; hl-smi was not found"
    assert raised.value.kind == "absent"


LINE = "0, AB-1, HL-325L, 0000:33:00.0, 1.24, 3, {}, {}, {}, {}, {}"


def test_hl_smi_values_are_parsed_with_and_without_units() -> None:
    plain = gaudi_hlml.parse_hl_smi("noise\n" + LINE.format(62, 6144, 131072, 612, 47) + "\n")
    units = gaudi_hlml.parse_hl_smi(
        LINE.format("62 %", "6144 MiB", "131072 MiB", "612.5 W", "47 C")
    )
    assert plain[0][1] == [0.62, 6 << 30, 128 << 30, 612.0, 47.0]
    assert units[0][1] == [0.62, 6 << 30, 128 << 30, 612.5, 47.0]


def test_hl_smi_text_instead_of_a_number_is_a_reason() -> None:
    ((_, values),) = gaudi_hlml.parse_hl_smi(LINE.format(137, "N/A", "-5", "1e9 W", ""))
    assert values == [
        Unavailable("failed", "hl-smi: impossible value 137 %"),
        Unavailable("absent", "hl-smi does not report memory.used"),
        Unavailable("failed", "hl-smi reports '-5' for memory.total"),
        Unavailable("failed", "hl-smi reports '1e9 W' for power.draw"),
        Unavailable("absent", "hl-smi does not report temperature.aip"),
    ]
    with pytest.raises(Unavailable) as raised:
        gaudi_hlml.parse_hl_smi("ERROR: no devices\n")
    assert raised.value.message == "hl-smi printed no list of devices: 'ERROR: no devices'"


def test_a_device_missing_from_hl_smi_recovers_when_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*rows: int) -> None:
        row_of = "{0}, ID-{0}, HL, 0000:0{0}:00.0, 1, {0}, 10, 1, 2, 3, 4".format
        lines = [f"echo '{row_of(row)}'" for row in rows]
        write_tool(tmp_path / "bin", "hl-smi", "\n".join(lines) or "exit 1")

    answer(0, 1)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    library = gaudi_hlml.HlSmiLibrary(every_seconds=3600)
    first, second = library.devices
    healthy = [0.1, 1 << 20, 2 << 20, 3.0, 4.0]
    gone = Unavailable("failed", "hl-smi no longer lists this Gaudi", "check the kernel log")
    wait_until(lambda: not library._first)
    seen = []
    for rows in ((0, 1), (1,), (0, 1)):
        answer(*rows)
        library._work(lambda: True)
        seen.append((first.sample(), second.sample()))
    library.close()
    assert seen == [(healthy, healthy), ([gone] * 5, healthy), (healthy, healthy)]
    assert first.sample() is None  # nothing new
