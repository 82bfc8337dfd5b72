"""The simulated NVML library: built by the test session, controlled by a text file.

    library = build(folder)                      # folder/libnvidia-ml.so.1; fails without gcc
    scenario = Scenario(folder / "scenario", devices=2)
    scenario.write()                             # two healthy GPUs
    scenario.write("1 GetPowerUsage error 3", "0 * hang")

`make_environment(library, scenario)` makes the unmodified pynvml of a child process find it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "sim.c"
HEALTHY = """\
* GetUtilizationRates = 97 40
* GetSamples = 0:0
* GetClockInfo:SM = 1980
* GetClockInfo:MEM = 2619
* GetMaxClockInfo:SM = 1980
* GetCurrentClocksEventReasons = 4
* GetCurrentClocksThrottleReasons = 4
* GetMemoryInfo = 1073741824 85899345920
* GetPowerUsage = 612500
* GetEnforcedPowerLimit = 700000
* GetTotalEnergyConsumption = 5000500
* GetTemperature = 61
* GetViolationStatus:THERMAL = 7000
* GetViolationStatus:POWER = 9000
* GetPcieThroughput:RX = 12000
* GetPcieThroughput:TX = 3000
* GetCurrPcieLinkGeneration = 5
* GetCurrPcieLinkWidth = 16
* GetPcieReplayCounter = 2
* GetTotalEccErrors:CORRECTED = 1
* GetTotalEccErrors:UNCORRECTED = 0
* GetViolationStatus:BOARD_LIMIT = 11000
* GetViolationStatus:RELIABILITY = 13000
* GetViolationStatus:SYNC_BOOST = 15000
* GetRemappedRows = 2 1 1 0
* GetRetiredPages:SINGLE = 4
* GetRetiredPages:DOUBLE = 1
* GetRetiredPagesPendingStatus = 1
* GetNvLinkState = 1 1 0
* FieldValue:138 = 7
* FieldValue:139 = 5
* FieldValue:90 = 25000
* FieldValue:52 = 21
* FieldValue:59 = 22
* FieldValue:38 = 20
* FieldValue:45 = 3
* GetComputeRunningProcesses = 901:5 902:6 903:7
* GetMaxPcieLinkGeneration = 5
* GetMaxPcieLinkWidth = 16
* GetPersistenceMode = 1
* GetPowerManagementDefaultLimit = 700000
* GetPowerManagementLimitConstraints = 200000 700000
* GetEccMode = 1 1
* GetMigMode = 0 0
* GetCudaComputeCapability = 9 0
* GetCpuAffinity = ff00000000000f 1
* GetMemoryAffinity = 2
* CudaVersion = 12080
* GetName = NVIDIA H100 80GB HBM3
* DriverVersion = 570.00.01
* NVMLVersion = 13.570.00.01
"""


def make_uuid(index: int) -> str:
    """Return the UUID that the simulated device `index` has."""
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


GPM = """\
* GpmQueryDeviceSupport = 1
* GpmMetric:1 = 80
* GpmMetric:2 = 62.5
* GpmMetric:3 = 12.5
* GpmMetric:5 = 25
* GpmMetric:10 = 50
* GpmMetric:20 = 3
* GpmMetric:21 = 4
* GpmMetric:60 = 8
* GpmMetric:61 = 16
"""
"""Lines of GPUs that have GPM."""
_loaded: list[ctypes.CDLL] = []


def load_library() -> None:
    """Let pynvml in this process find the library; once is enough for all tests."""
    if not _loaded:
        with tempfile.TemporaryDirectory() as folder:
            library = build_library(Path(folder))
            # glibc matches by soname: pynvml's own CDLL("libnvidia-ml.so.1") gets this one.
            _loaded.append(ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL))


def build_library(folder: Path, *flags: str) -> Path:
    """Compile the library into `folder` and return its path; fails when there is no compiler."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    soname = "-Wl,-soname,libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", soname, *flags]
    subprocess.run([*command, "-o", str(library), str(SOURCE)], check=True)
    return library


class Scenario:
    """The text file that the library reads at every call."""

    def __init__(self, path: Path, devices: int = 2, gpm: bool = False) -> None:
        self.path = path
        self.devices = devices
        self.gpm = gpm
        self.write()

    def write(self, *lines: str) -> None:
        """Let the devices be healthy but for `lines` from the next call on."""
        text = HEALTHY + GPM * self.gpm + f"* GetCount = {self.devices}\n"
        for index in range(self.devices):
            text += f"{index} GetUUID = {make_uuid(index)}\n"
            text += f"{index} GetPciInfo = 00000000:{index + 1:02X}:00.0\n"
        self.replace(text + "\n".join(lines) + "\n")

    def replace(self, text: str) -> None:
        """Let the whole file be `text` from the next call on."""
        temporary = self.path.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(self.path)


def make_environment(library: Path, scenario: Scenario) -> dict[str, str]:
    """Return an environment in which a child process finds the library and the scenario."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(library.parent),
        "FAKENVML_CTL": str(scenario.path),
    }
