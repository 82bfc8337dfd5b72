"""Performance counters by NVML's GPM, through the unmodified pynvml on a simulated library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.gpu.nvml_library import NvmlLibrary
from clusterprof.agent.isolation import drivers
from clusterprof.errors import Unavailable
from tests.support.nvml.healthy import HEALTHY, MEANS, NO_GPM
from tests.support.nvml.simulated import GPM, Scenario, load

MS = 1_000_000
DENIED = Unavailable(
    "denied",
    "NVML: no permission",
    "an administrator must run it, or set NVreg_RestrictProfilingToAdminUsers=0",
)


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    load()
    made = Scenario(tmp_path / "scenario", devices=1)
    monkeypatch.setenv("FAKENVML_CTL", str(made.path))
    return made


class World:
    """A clock, what waits on it, and the calls made."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * MS
        self.waits: list[float] = []
        self.calls: list[str] = []

    def __call__(self) -> int:
        return self.now_ns

    def pause(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_ns += round(seconds * 1e9)

    def open(self) -> NvmlLibrary:
        return NvmlLibrary(lambda _, call: self.calls.append(call), clock=self, pause=self.pause)


# The first mean: the compute engine is active for 80 % of the 100 ms from 1,000 ms on.
BUSY = {"gpu.busy_ns_total": 80 * MS, "gpu.busy_until_ns": 1_100 * MS}


def sampled(library: NvmlLibrary) -> dict[str, Any]:
    device = library.devices[0]
    return dict(zip(device.signals, device.sample(), strict=True))


def sample(at: float, sm: float) -> str:
    """A line of the counters' integrals: percent × seconds of SM activity, nothing else."""
    return f"0 GpmSample = {at} 2:{sm}"


def test_means_in_base_units_stand_in_for_the_look_at_pcie(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines())
    world = World()
    samples = sampled(world.open())
    assert samples == {**HEALTHY, **BUSY, **MEANS}
    assert "GetPcieThroughput:RX" not in world.calls
    assert world.waits == [0.1]  # the first two samples lie 100 ms apart


def test_a_mean_begins_where_the_one_before_it_ended(scenario: Scenario) -> None:
    scenario.write("* GpmQueryDeviceSupport = 1", sample(10.0, 500))
    world = World()
    library = world.open()
    scenario.write("* GpmQueryDeviceSupport = 1", sample(10.1, 508))
    collected = [sampled(library)["gpu.sm_active_ratio"]]
    for at, sm in ((10.2, 510), (10.3, 518), (10.4, 526)):
        world.now_ns += 100 * MS
        scenario.write("* GpmQueryDeviceSupport = 1", sample(at, sm))
        collected.append(sampled(library)["gpu.sm_active_ratio"])
    # 8 %·s in 0.1 s; 2 in the next 0.1 s; 100 ms later it is not read again; then 16 in 0.2 s.
    assert collected == pytest.approx([0.8, 0.2, 0.2, 0.8])
    assert world.calls.count("GpmMetricsGet") == 3 and world.waits == [0.1]


def test_a_metric_that_is_not_reported_takes_no_other_with_it(scenario: Scenario) -> None:
    lines = [line for line in GPM.splitlines() if ":3 " not in line]
    scenario.write(*lines, "* GpmMetric:10 = nan", "* GpmMetric:5 = 250", "* GpmMetric:2 = 100.4")
    samples = sampled(World().open())
    assert samples == {
        **HEALTHY,
        **BUSY,
        **MEANS,
        "gpu.sm_active_ratio": 1.0,  # rounding
        "gpu.sm_occupancy_ratio": Unavailable("absent", "not supported by this GPU or driver"),
        "gpu.tensor_active_ratio": Unavailable("failed", "NVML: impossible value 250"),
        "gpu.memory_bandwidth_ratio": Unavailable("failed", "NVML: impossible value nan"),
    }


def test_more_than_a_link_can_carry_is_no_value(scenario: Scenario) -> None:
    """16 lanes of generation 5: 63.0 GB/s one way; three NVLinks: 75 GB/s; and 5 % to spare."""
    lines = [
        *GPM.splitlines(),
        "* GpmMetric:20 = 63000",
        "* GpmMetric:21 = 64000",
        "* GpmMetric:60 = 75000",
        "* GpmMetric:61 = 76000",
    ]
    scenario.write(*lines)
    samples = sampled(World().open())
    names = ("pcie_transmit", "pcie_receive", "nvlink_receive", "nvlink_transmit")
    words = "NVML: impossible value {} bytes/s for its link"
    assert [samples[f"gpu.{name}_bytes_per_second"] for name in names] == [
        63000 << 20,
        Unavailable("failed", words.format("6.71089e+10")),
        75000 << 20,
        Unavailable("failed", words.format("7.96918e+10")),
    ]
    scenario.write("* GetPcieThroughput:RX = 67000000")  # KB/s
    looked = sampled(World().open())["gpu.pcie_receive_bytes_per_second"]
    assert looked == Unavailable("failed", words.format("6.7e+10"))


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("* GpmQueryDeviceSupport = 0", NO_GPM),
        ("* GpmQueryDeviceSupport error 13", NO_GPM),  # an older driver
        ("* GpmSampleGet error 4", DENIED),
    ],
)
def test_without_gpm_pcie_is_looked_at_as_before(
    scenario: Scenario, trouble: str, why: Unavailable
) -> None:
    scenario.write(*GPM.splitlines(), trouble)
    names = [name for name in MEANS if "pcie" not in name] if why is DENIED else []
    assert sampled(World().open()) == {**HEALTHY, **dict.fromkeys(names, why)}


def test_where_it_is_switched_off_it_is_never_touched(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines(), "* GpmQueryDeviceSupport segv", "* GpmSampleGet segv")
    calls: list[str] = []
    library = drivers.get_library_opener("gpu_nvidia", {"--gpm": "off"})(
        lambda _, call: calls.append(call), ()
    )
    remedy = "set sampling.gpm in the profile to true"
    off = Unavailable("absent", "GPM is disabled", remedy)
    assert sampled(library) == {**HEALTHY, "gpu.sm_active_ratio": off}
    assert not [call for call in calls if call.startswith("GpmSample")]


def test_a_reading_that_fails_is_a_hole_and_the_next_mean_covers_it(scenario: Scenario) -> None:
    scenario.write("* GpmQueryDeviceSupport = 1", sample(10.0, 500))
    world = World()
    library = world.open()
    collected = []
    for at, sm, trouble in (
        (10.2, 510.0, ""),
        (10.4, 530.0, "0 GpmSampleGet error 10"),
        (10.6, 536.0, ""),
        (30.6, 999.0, ""),
    ):
        world.now_ns += 200 * MS if at < 30 else 20_000 * MS
        scenario.write("* GpmQueryDeviceSupport = 1", sample(at, sm), trouble)
        collected.append(sampled(library)["gpu.sm_active_ratio"])
    timed_out = Unavailable("failed", "NVML: timed out")
    # 10 in 0.2 s; 26 in 0.4 s; what is older than 10 s begins nothing: two samples at one time.
    assert collected[:3] == [pytest.approx(0.5), timed_out, pytest.approx(0.65)]
    assert collected[3] == Unavailable("failed", "NVML (2)") and world.waits == [0.1]


def test_counters_that_stand_still_on_a_busy_gpu_are_not_believed(scenario: Scenario) -> None:
    dead = [*GPM.splitlines(), "* GpmMetric:2 = 0", "* GpmMetric:10 = 0"]
    world = World()
    scenario.write(*dead)
    library = world.open()
    collected = []
    for reading in range(13):
        if reading == 6:
            scenario.write(*dead, "* GetUtilizationRates = 5 0")  # it has nothing to do
        if reading == 7:
            scenario.write(*dead)
        collected.append(sampled(library)["gpu.sm_active_ratio"])
        world.now_ns += 200 * MS
    why = Unavailable(
        "failed",
        "GPM counts nothing while the GPU is busy",
        "check for Xid lines in the kernel log",
    )
    # GPM is read before the utilization: it contradicts that of the sample before, so the first
    # reading contradicts nothing, and the idle utilization of reading 6 excuses reading 7.
    assert collected == [0, 0, 0, 0, 0, why, why, 0, 0, 0, 0, 0, why]


def test_a_gpu_that_is_lost_while_gpm_is_tried_is_left_alone(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines(), "* GpmSampleGet error 15")
    world = World()
    library = world.open()
    made = len(world.calls)
    lost = {value for value in library.devices[0].sample()}
    assert {why.message for why in lost if isinstance(why, Unavailable)} == {"GPU is lost"}
    assert len(lost) == 1 and len(world.calls) == made
