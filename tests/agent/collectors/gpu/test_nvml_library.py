"""Inventories of real and modelled NVIDIA machines, through the real pynvml, come out as stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.gpu.nvml_library import NvmlLibrary
from tests.support.nvml.inventories import ExpectedInventory, read_profile
from tests.support.nvml.nvidia_smi_output import read_nvidia_smi
from tests.support.nvml.simulated import Scenario, load_library

SHARED = Path(__file__).parents[4].parent / "shared/data"
PROFILES, PRINTED = SHARED / "nvml-mock-profiles", SHARED / "nvidia-smi-xml"
pytestmark = pytest.mark.skipif(
    not (PROFILES.exists() and PRINTED.exists()),
    reason="the inventories of other people do not lie beside the repository",
)


def read(
    stated: ExpectedInventory, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> ExpectedInventory:
    """Feed an inventory to the library and read it back through pynvml."""
    load_library()
    scenario = Scenario(folder / "scenario")
    scenario.replace("\n".join(stated.lines) + "\n")
    monkeypatch.setenv("FAKENVML_CTL", str(scenario.path))
    library = NvmlLibrary(lambda index, call: None)
    values = [dict(zip(device.signals, device.sample(), strict=True)) for device in library.devices]
    library.close()
    return ExpectedInventory(stated.lines, library.inventory, values)


@pytest.mark.parametrize("kind", ["a100", "gb200", "h100", "l40s"])
def test_values_equal_the_mock_nvml_profile(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = read_profile((PROFILES / f"mock-nvml-config-{kind}.yaml").read_text())
    readings = read(stated, tmp_path, monkeypatch)
    assert readings.inventory == stated.inventory
    assert readings.values == stated.values
    assert [device["index"] for device in readings.inventory] == list(range(8))


@pytest.mark.parametrize("name", ["a100-sxm4-v12", "a10g", "gtx-1070-ti", "rtx-3080-v12"])
def test_values_equal_the_output_of_nvidia_smi(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = read_nvidia_smi((PRINTED / f"{name}.xml").read_text())
    readings = read(stated, tmp_path, monkeypatch)
    assert readings.inventory == stated.inventory
    assert readings.values == stated.values
    known = json.loads((PRINTED / "known.json").read_text())["files"][f"{name}.xml"]
    gpus = [at for at, device in enumerate(readings.inventory) if "parent" not in device]
    assert readings.inventory[0].get("driver") == known["driver"]
    assert [
        as_printed(readings.inventory[at], readings.values[at], known["gpus"][0]) for at in gpus
    ] == [{key: value for key, value in known["gpus"][0].items() if key != "pstate"}]


def as_printed(entry: dict[str, Any], values: dict[str, Any], known: Any) -> dict[str, Any]:
    """Our values as nvidia-smi writes them; what is unknown is N/A, or not printed."""

    def word(signal: str, unit: str, scale: float, missing: Any, digits: int = 0) -> Any:
        value = values.get(f"gpu.{signal}")
        return f"{value / scale:.{digits}f} {unit}" if isinstance(value, int | float) else missing

    watts = word("power_watts", "W", 1, None, 2)
    return {
        "name": entry["name"],
        "util": word("busy_ratio", "%", 0.01, "N/A"),
        "mem_util": word("memory_busy_ratio", "%", 0.01, "N/A"),
        "fb_used": word("memory_used_bytes", "MiB", 1 << 20, "N/A"),
        "fb_total": word("memory_total_bytes", "MiB", 1 << 20, "N/A"),
        "tx": word("pcie_transmit_bytes_per_second", "KB/s", 1000, None),
        "rx": word("pcie_receive_bytes_per_second", "KB/s", 1000, None),
        "sm": word("sm_clock_hertz", "MHz", 1_000_000, "N/A"),
        # It looked for the readings under one of their two names only.
        "power": watts if known["power"] is not None else None,
    }


def test_mig_instances_in_nvidia_smi_output_are_separate_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = read_nvidia_smi((PRINTED / "a100-sxm4-v12.xml").read_text())
    readings = read(stated, tmp_path, monkeypatch)
    keys = ("parent", "gpu_instance", "compute_instance", "memory_bytes", "sm_count")
    gpu = "GPU-513536b6-7d19-9063-b049-1e69664bb298"
    assert [tuple(device.get(key) for key in keys) for device in readings.inventory] == [
        (None, None, None, 81920 << 20, None),
        *((gpu, instance, 0, 19968 << 20, 14) for instance in (3, 4, 5, 6)),
    ]
