"""A GPU in MIG mode that crashes the helper: its instances go with it and come back with it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from clusterprof.errors import DevicesChanged, NothingNew
from tests.support.nvml.isolated_gpus import SECOND_NS, IsolatedGpuRig, wait_for_exit
from tests.support.nvml.simulated import make_uuid

SLICE = "MIG-00000000-0000-0000-0000-000000000007"
SPLIT_UP = (
    "0 GetMigMode = 1 1",
    "0 GetMaxMigDeviceCount = 7",
    f"0/5 GetUUID = {SLICE}",
    "0/5 GetGpuInstanceId = 9",
    "0/5 GetComputeInstanceId = 0",
    "0/5 GetMemoryInfo = 1048576 10468982784",
)


def until_changed(rig: IsolatedGpuRig) -> list[str]:
    """Tick until the devices are others, and open anew as the recorder's loop does."""
    with pytest.raises(DevicesChanged):
        rig.tick_until(lambda _: False)
    rig.collector.close()
    while True:
        try:
            return list(dict.fromkeys(device for _, device in rig.collector.open()))
        except NothingNew:
            time.sleep(0.02)


def test_mig_instances_disappear_and_return_with_the_parent_gpu(tmp_path: Path) -> None:
    rig = IsolatedGpuRig(tmp_path)
    now_ns = [SECOND_NS]  # it stands still, so that a rest lasts however slow the machine is
    rig.collector._clock = lambda: now_ns[0]
    rig.scenario.write(*SPLIT_UP)
    columns = rig.collector.open()
    memory = [(signal.name, device) for signal, device in columns].index(
        ("gpu.memory_used_bytes", SLICE)
    )
    assert list(dict.fromkeys(device for _, device in columns)) == [
        make_uuid(0),
        make_uuid(1),
        SLICE,
    ]
    assert rig.tick()[memory] == 1 << 20

    rig.scenario.write(*SPLIT_UP, "0 GetPowerUsage segv")
    assert until_changed(rig) == [make_uuid(0), make_uuid(1)]
    assert "helper-died" in rig.list_event_kinds() or "helper-died" in [
        k for k, _ in rig.collector.events()
    ]
    rig.scenario.write(*SPLIT_UP)
    now_ns[0] += 2 * SECOND_NS  # its rest is over
    assert until_changed(rig) == [make_uuid(0), make_uuid(1), SLICE]
    assert rig.tick_until(lambda values: values[memory] == 1 << 20)
    rig.collector.close()
    wait_for_exit(rig.pids)
