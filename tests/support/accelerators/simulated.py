"""Simulated accelerators: a `pyhlml` and a `libtpu` to import, and tools to put on PATH."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SITE = Path(__file__).parent / "site"
HOSTS = Path(__file__).parents[2] / "hosts"
PATIENCE_SECONDS = 20.0
HEALTHY_GAUDI: dict[str, Any] = {
    "GetUUID": ["01P0-HL3080A0-15-TN-00", "01P0-HL3080A0-15-TN-01"],
    "GetName": "HL-325L",
    "GetModuleID": [3, 1],
    "GetPCIInfo": [{"bus_id": "0000:33:00.0"}, {"bus_id": "0000:4d:00.0"}],
    "hlmlGetDriverVersion": "1.24.2",
    "GetUtilizationRates": [{"aip": 62}, {"aip": 5}],
    "GetMemoryInfo": {"used": 6 << 30, "total": 128 << 30, "free": 122 << 30},
    "GetPowerUsage": [612500, 225000],
    "GetPowerManagementDefaultLimit": 850000,
    "GetTotalEnergyConsumption": 5000500,
    "GetTemperature": 47,
    "GetClockInfo": 1600,
    "GetMaxClockInfo": 1650,
    "GetCurrentClocksThrottleReasons": [0, 3],
    "GetPCIEReplayCounter": 2,
    "GetCurrPCIELinkGeneration": 5,
    "GetCurrPCIELinkWidth": 16,
    "GetTotalECCErrors:0": 4,
    "GetTotalECCErrors:1": 0,
}


class SimulatedGaudi:
    """The file that the simulated `pyhlml` reads at every call."""

    def __init__(self, path: Path, count: int = 2) -> None:
        self.path, self.count = path, count
        self.write()

    def write(self, flavour: str = "", **changes: Any) -> None:
        """Report healthy devices with these `changes` from the next call on; "A__0" is "A:0"."""
        values = HEALTHY_GAUDI | {name.replace("__", ":"): v for name, v in changes.items()}
        _replace(self.path, {"count": self.count, "flavour": flavour, "values": values})


def write_tpu(path: Path, **lists: Any) -> None:
    """Write what the simulated `libtpu` reports from the next call on."""
    healthy: dict[str, Any] = {
        "duty_cycle_pct": ["98.10", "0.00"],
        "tensorcore_util": ["34.20", "0.00"],
        "hbm_capacity_usage": ["17179869184", "0"],
        "hbm_capacity_total": ["34359738368", "34359738368"],
    }
    _replace(path, healthy | lists)


def write_tool(folder: Path, name: str, script: str) -> Path:
    """Write a tool (shell) into a folder that goes on PATH; returns the folder."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.new"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    path.replace(folder / name)
    return folder


def prepend_to_path(folder: Path) -> str:
    """Return a PATH on which a folder's tools come first."""
    return f"{folder}:{os.environ.get('PATH', os.defpath)}"


def wait_until(what: Callable[[], Any]) -> Any:
    """Return the first true value of `what()`; fail after a timeout."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        if value := what():
            return value
        time.sleep(0.02)
    raise AssertionError("it never came")


def _replace(path: Path, content: Any) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)
