"""GPUs in MIG mode and their instances, through the unmodified pynvml on a simulated library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.gpu.nvml_library import NvmlLibrary
from clusterprof.agent.collectors.gpu.nvml_queries import (
    GPM_DRIVER_TOO_OLD,
    INSTANCE_SHARED,
    NO_UTILIZATION,
)
from clusterprof.errors import Unavailable
from tests.support.nvml.healthy import HEALTHY, make_device_entry
from tests.support.nvml.simulated import Scenario, load_library, make_uuid

MS = 1_000_000
FIRST, SECOND = "MIG-00000000-0000-0000-0000-000000000001", "MIG-2"
SPLIT_UP = (
    "0 GetMigMode = 1 1",
    "0 GetMaxMigDeviceCount = 7",
    f"0/1 GetUUID = {FIRST}",
    "0/1 GetName = NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "0/1 GetGpuInstanceId = 9",
    "0/1 GetComputeInstanceId = 0",
    "0/1 GetMemoryInfo = 1048576 10468982784",
    "0/1 GetAttributes = 16",
    "0/1 GetComputeRunningProcesses = 4711:1048576",
    f"0/4 GetUUID = {SECOND}",
    "0/4 GetGpuInstanceId = 11",
    "0/4 GetComputeInstanceId = 0",
    "0/4 GetMemoryInfo = 0 10468982784",
    "0/4 GetComputeRunningProcesses =",
)
GPM = (
    "* GpmQueryDeviceSupport = 1",
    "* GpmMetric:2 = 62.5",
    "* GpmMetric:3 = 12.5",
    "* GpmMetric:5 = 25",
    "* GpmMetric:10 = 50",
)
BUSY = ("gpu.busy_ratio", "gpu.busy_ns_total")
OWN = {
    "gpu.memory_used_bytes": 1 << 20,
    "gpu.memory_total_bytes": 10468982784,
    "gpu.processes_count": 1,
}
GPM_SIGNALS = (
    "gpu.sm_active_ratio",
    "gpu.sm_occupancy_ratio",
    "gpu.tensor_active_ratio",
    "gpu.memory_bandwidth_ratio",
)


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    load_library()
    made = Scenario(tmp_path / "scenario", devices=2)
    monkeypatch.setenv("FAKENVML_CTL", str(made.path))
    return made


class World:
    def __init__(self) -> None:
        self.now_ns = 1_000 * MS

    def __call__(self) -> int:
        return self.now_ns

    def pause(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def open(self, **options: Any) -> NvmlLibrary:
        return NvmlLibrary(lambda index, call: None, clock=self, pause=self.pause, **options)


def sampled(library: NvmlLibrary) -> dict[str, dict[str, Any]]:
    return {
        item["id"]: dict(zip(device.signals, device.sample(), strict=True))
        for item, device in zip(library.inventory, library.devices, strict=True)
    }


def test_each_mig_instance_is_listed_as_a_device(scenario: Scenario) -> None:
    scenario.write(*SPLIT_UP)
    place = {"pci_bus_id": "00000000:01:00.0", "numa_node": 1, "cpus": "0-3,48-55,64"}
    common = {
        key: make_device_entry(0)[key] for key in ("vendor", "emulated", "driver", "nvml", "cuda")
    }
    assert World().open().inventory == [
        {**make_device_entry(0), "mig": True, "tells_busy": False},
        make_device_entry(1),
        {
            **common,
            **place,
            "id": FIRST,
            "uuid": FIRST.replace("MIG-", "GPU-"),
            "index": 2,
            "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "parent": make_uuid(0),
            "gpu_instance": 9,
            "compute_instance": 0,
            "memory_bytes": 10468982784,
            "sm_count": 16,
            "tells_busy": False,
        },
        {
            **common,
            **place,
            "id": SECOND,
            "uuid": "GPU-2",
            "index": 3,
            "name": "NVIDIA H100 80GB HBM3",
            "parent": make_uuid(0),
            "gpu_instance": 11,
            "compute_instance": 0,
            "memory_bytes": 10468982784,
            "tells_busy": False,
        },
    ]


def test_without_gpm_a_mig_instance_has_memory_processes_and_a_reason(scenario: Scenario) -> None:
    scenario.write(*SPLIT_UP)
    samples = sampled(World().open())
    gap = Unavailable("absent", "GPM needs a Hopper GPU or a newer one")
    silent = {**dict.fromkeys(BUSY, NO_UTILIZATION), **dict.fromkeys(GPM_SIGNALS, gap)}
    unsaid = (*BUSY, "gpu.busy_until_ns", "gpu.memory_busy_ratio", "gpu.sm_active_ratio")
    assert samples == {
        make_uuid(0): {name: value for name, value in HEALTHY.items() if name not in unsaid},
        make_uuid(1): HEALTHY,
        FIRST: {**silent, **OWN},
        SECOND: {**silent, **OWN, "gpu.memory_used_bytes": 0, "gpu.processes_count": 0},
    }


def test_gpm_means_of_mig_instances_add_up_to_busy_time(scenario: Scenario) -> None:
    first, second = "0.9 GpmSample = {} 1:{}", "0.11 GpmSample = {} 1:0"
    scenario.write(*SPLIT_UP, *GPM, first.format(10.0, 0), second.format(10.0))
    world = World()
    library = world.open()
    assert ["tells_busy" in device for device in library.inventory] == [True, False, False, False]
    collected = []
    # 100 % for 0.3 s, as opening each instance takes 0.1 s; 25 % for 0.2 s; a hole; 35 % for
    # the 0.4 s since; a hole of 20 s; 100 % since
    for step_ms, at, active, trouble in (
        (100, 10.1, 10, ""),
        (200, 10.3, 15, ""),
        (200, 10.5, 25, "0.9 GpmSampleGet error 10"),
        (200, 10.7, 29, ""),
        (200, 10.9, 29, "0.9 GpmSampleGet error 10"),
        (20_000, 30.9, 500, "0.9 GpmSampleGet error 10"),
        (200, 31.1, 520, ""),
    ):
        world.now_ns += step_ms * MS
        lines = (first.format(at, active), second.format(at), trouble)
        scenario.write(*SPLIT_UP, *GPM, *lines)
        collected.append(sampled(library)[FIRST])
    timed_out = Unavailable("failed", "NVML: timed out")
    assert [item["gpu.busy_ratio"] for item in collected] == [
        1.0,
        pytest.approx(0.25),
        timed_out,
        pytest.approx(0.35),
        timed_out,
        timed_out,
        _two_at_once(),
    ]
    totals = [item["gpu.busy_ns_total"] for item in collected[:4]]
    assert totals == [300 * MS, 350 * MS, timed_out, pytest.approx(490 * MS, abs=1)]
    means = dict(zip(GPM_SIGNALS, (0.625, 0.125, 0.25, 0.5), strict=True))
    busy = {"gpu.busy_ratio": 1.0, "gpu.busy_ns_total": 300 * MS}
    assert collected[0] == {**OWN, **busy, **means}
    assert collected[2]["gpu.sm_active_ratio"] == Unavailable("failed", "GPM was not read")


def _two_at_once() -> Unavailable:
    """The simulated counters stand still while the reader waits for a second sample."""
    return Unavailable("failed", "NVML (2)")


def test_shared_gpu_instances_and_old_drivers_do_not_use_gpm(scenario: Scenario) -> None:
    scenario.write(*SPLIT_UP, *GPM, "0/4 GetGpuInstanceId = 9")
    library = World().open()
    for device in (FIRST, SECOND):
        result = sampled(library)[device]
        assert {result[name] for name in (*BUSY, *GPM_SIGNALS)} == {INSTANCE_SHARED}
    scenario.write(*SPLIT_UP, *GPM, "* DriverVersion = 535.54.03")
    result = sampled(World().open())[FIRST]
    assert {result[name] for name in (*BUSY, *GPM_SIGNALS)} == {GPM_DRIVER_TOO_OLD}


def test_a_mig_instance_that_crashed_the_library_is_readmitted_later(scenario: Scenario) -> None:
    scenario.write(*SPLIT_UP, "0/1 * segv")  # any call on that instance would end this test run
    library = World().open(skip={2})
    assert [device["id"] for device in library.inventory] == [
        make_uuid(0),
        make_uuid(1),
        f"{make_uuid(0)}/1",
        SECOND,
    ]
    values = set(sampled(library)[f"{make_uuid(0)}/1"].values())
    assert values == {Unavailable("failed", "not read: it crashed the driver's library")}
    scenario.write(*SPLIT_UP)
    library.adopt(2)
    assert sampled(library)[FIRST]["gpu.memory_used_bytes"] == 1 << 20


def test_mig_instances_of_a_skipped_gpu_are_not_listed(scenario: Scenario) -> None:
    scenario.write(*SPLIT_UP, "0 * segv")
    assert [device["id"] for device in World().open(skip={0}).inventory] == [
        "nvidia-0",
        make_uuid(1),
    ]
