"""Performance counters by NVML's GPM, through the unmodified pynvml on a simulated library."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.gpu.nvml_counters import GPM_OFF, GPM_TOO_SLOW
from clusterprof.agent.collectors.gpu.nvml_library import NvmlLibrary
from clusterprof.agent.isolation import drivers
from clusterprof.errors import Unavailable
from tests.support.nvml.healthy import HEALTHY, MEANS, NO_GPM
from tests.support.nvml.simulated import GPM, Scenario, load_library

MS = 1_000_000
DAY_MS = 1_790_000_000_000
DENIED = Unavailable(
    "denied",
    "NVML: no permission",
    "an administrator must run it, or set NVreg_RestrictProfilingToAdminUsers=0",
)


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    load_library()
    made = Scenario(tmp_path / "scenario", devices=1)
    monkeypatch.setenv("FAKENVML_CTL", str(made.path))
    return made


class World:
    """A clock, what waits on it, and the calls made."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * MS
        self.waits: list[float] = []
        self.calls: list[str] = []
        self.reading_ns: Iterator[int] = repeat(0)
        """How long each of the readings of GPM takes with which a device is opened."""

    def __call__(self) -> int:
        return self.now_ns

    def pause(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_ns += round(seconds * 1e9)

    def mark(self, _: int, call: str) -> None:
        self.calls.append(call)
        if call == "GpmMetricsGet":
            self.now_ns += next(self.reading_ns)

    def open(self, gpm: str = "auto") -> NvmlLibrary:
        return NvmlLibrary(self.mark, clock=self, pause=self.pause, gpm=gpm)


# The first mean: the compute engine is active for 80 % of the 100 ms from 1,000 ms on.
BUSY = {"gpu.busy_ns_total": 80 * MS, "gpu.busy_until_ns": 1_100 * MS}


def sampled(library: NvmlLibrary) -> dict[str, Any]:
    device = library.devices[0]
    return dict(zip(device.signals, device.sample(), strict=True))


def sample(at: float, sm: float) -> str:
    """A line of the counters' integrals: percent × seconds of SM activity, nothing else."""
    return f"0 GpmSample = {at} 2:{sm}"


def test_gpm_means_in_base_units_replace_the_pcie_snapshot(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines())
    world = World()
    samples = sampled(world.open())
    assert samples == {**HEALTHY, **BUSY, **MEANS}
    assert "GetPcieThroughput:RX" not in world.calls
    assert world.waits == [0.1]  # the first two samples lie 100 ms apart


def test_each_gpm_mean_begins_where_the_previous_mean_ended(scenario: Scenario) -> None:
    scenario.write("* GpmQueryDeviceSupport = 1", sample(10.0, 500))
    world = World()
    library = world.open()
    scenario.write("* GpmQueryDeviceSupport = 1", sample(10.1, 508))
    collected = [sampled(library)["gpu.sm_active_ratio"]]
    for passed_ms, at, sm in ((200, 10.2, 510), (100, 10.3, 518), (100, 10.4, 526)):
        world.now_ns += passed_ms * MS
        scenario.write("* GpmQueryDeviceSupport = 1", sample(at, sm))
        collected.append(sampled(library)["gpu.sm_active_ratio"])
    # 8 %·s in 0.1 s; 2 in the next 0.1 s; 100 ms later it is not read again; then 16 in 0.2 s.
    assert collected == pytest.approx([0.8, 0.2, 0.2, 0.8])
    # Five readings when it was opened, and three means.
    assert world.calls.count("GpmMetricsGet") == 8 and world.waits == [0.1]


def test_a_missing_metric_leaves_the_other_metrics(scenario: Scenario) -> None:
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


def test_a_rate_above_the_link_speed_is_rejected(scenario: Scenario) -> None:
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
def test_without_gpm_the_pcie_snapshot_is_used(
    scenario: Scenario, trouble: str, why: Unavailable
) -> None:
    scenario.write(*GPM.splitlines(), trouble)
    names = [name for name in MEANS if "pcie" not in name] if why is DENIED else []
    assert sampled(World().open()) == {**HEALTHY, **dict.fromkeys(names, why)}


SLOW_NS = 5 * MS + 1


def test_slow_gpm_is_not_used_and_the_reason_names_the_option(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines())
    world = World()
    world.reading_ns = repeat(SLOW_NS)
    library = world.open()
    scenario.write(*GPM.splitlines(), "* GpmSampleGet segv")
    assert sampled(library) == {**HEALTHY, "gpu.sm_active_ratio": GPM_TOO_SLOW}
    assert world.calls.count("GetPcieThroughput:RX") == 1
    # The first sample also loads what it needs; then five whole readings are timed.
    assert (world.calls.count("GpmSampleGet"), world.calls.count("GpmMetricsGet")) == (1, 5)
    assert (GPM_TOO_SLOW.kind, GPM_TOO_SLOW.remedy) == (
        "absent",
        "set sampling.gpm in the profile to true to read it anyway",
    )


def test_a_single_quick_reading_of_five_enables_gpm(scenario: Scenario) -> None:
    """The others waited for a processor: the machine is shared."""
    scenario.write(*GPM.splitlines())
    world = World()
    world.reading_ns = chain([9 * MS, 9 * MS, SLOW_NS, 2 * MS, 9 * MS], repeat(0))
    sample = sampled(world.open())
    assert {name: sample[name] for name in MEANS} == MEANS


def test_a_slow_gpm_reading_is_made_less_often(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines())
    world = World()
    world.reading_ns = repeat(4 * MS)  # at most 0.5 % of the time: every 800 ms after the third
    library = world.open()
    opened = world.calls.count("GpmMetricsGet")
    for _ in range(40):
        sampled(library)
        world.now_ns += 100 * MS
    assert (opened, world.calls.count("GpmMetricsGet")) == (5, 12)


def test_a_gpm_reading_that_fails_while_timed_keeps_gpm_enabled(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines(), "* GpmMetricsGet error 4")
    world = World()
    world.reading_ns = repeat(SLOW_NS)
    library = world.open()  # each reading gives the reason, as long as there is one
    assert sampled(library)["gpu.sm_active_ratio"] == DENIED
    world.now_ns += 2_000 * MS
    scenario.write(*GPM.splitlines())
    assert sampled(library)["gpu.sm_active_ratio"] == MEANS["gpu.sm_active_ratio"]


def test_a_profile_can_force_slow_gpm(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines())
    world = World()
    world.reading_ns = repeat(50 * MS)
    sample = sampled(world.open("on"))
    assert {name: sample[name] for name in MEANS} == MEANS
    assert world.calls.count("GpmSampleGet") == 1  # and no time is spent on measuring it


def test_a_gpu_lost_while_timing_a_reading_is_not_queried_again(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines())
    world = World()

    def lose() -> Iterator[int]:
        yield 0
        scenario.write(*GPM.splitlines(), "* GpmSampleGet error 15")
        yield 0

    world.reading_ns = lose()  # a third reading would end this test
    device = world.open().devices[0]
    scenario.write("0 * segv")  # and so would any call
    (lost,) = set(device.sample())
    assert isinstance(lost, Unavailable) and lost.message == "GPU is lost"


def test_busy_time_switches_from_gpm_to_samples_and_back(scenario: Scenario) -> None:
    world = World()
    scenario.write(*GPM.splitlines())
    library = world.open()
    library.devices[0]._memory.wall_clock = lambda: world.now_ns + DAY_MS * MS
    stamps = " ".join(f"{(DAY_MS + end_ms) * 1000}:100" for end_ms in (900, 1_050, 1_200))
    collected = []
    for trouble in ("", "0 GpmSampleGet error 10", "0 GpmMetricsGet error 10", ""):
        scenario.write(*GPM.splitlines(), trouble, f"0 GetSamples = {stamps}")
        sample = sampled(library)
        collected.append((sample["gpu.busy_ns_total"] / MS, sample["gpu.busy_until_ns"] / MS))
        world.now_ns += 200 * MS
    # 80 % from 1,000 to 1,100 ms; samples at 100 % up to 1,200; none newer; 80 % of the 500 ms
    # since, though the mean began at 1,100.
    assert collected == [(80, 1_100), (180, 1_200), (180, 1_200), (580, 1_700)]


def test_without_gpm_graphics_activity_samples_count_busy_time(scenario: Scenario) -> None:
    lines = [line for line in GPM.splitlines() if ":1 " not in line]
    world = World()
    scenario.write(*lines)
    library = world.open()
    library.devices[0]._memory.wall_clock = lambda: world.now_ns + DAY_MS * MS
    collected = []
    for end_ms in (1_000, 1_200):
        scenario.write(*lines, f"0 GetSamples = {(DAY_MS + end_ms) * 1000}:40")
        sample = sampled(library)
        collected.append((sample["gpu.busy_ns_total"] / MS, sample["gpu.busy_until_ns"] / MS))
        world.now_ns += 200 * MS
    assert sample["gpu.sm_active_ratio"] == MEANS["gpu.sm_active_ratio"]
    assert collected == [(0, 1_000), (80, 1_200)]


def test_disabled_gpm_is_not_called(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines(), "* GpmQueryDeviceSupport segv", "* GpmSampleGet segv")
    calls: list[str] = []
    library = drivers.get_library_opener("gpu_nvidia", {"--gpm": "off"})(
        lambda _, call: calls.append(call), ()
    )
    assert sampled(library) == {**HEALTHY, "gpu.sm_active_ratio": GPM_OFF}
    # The name under which the reason is kept; nothing is called: the scenario would crash.
    assert [call for call in calls if call.startswith("Gpm")] == ["GpmQueryDeviceSupport"]


def test_the_next_mean_covers_the_gap_of_a_failed_reading(scenario: Scenario) -> None:
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
    assert collected[3] == Unavailable("failed", "NVML (2)") and world.waits == [0.1, 0.1]


def test_constant_counters_on_a_busy_gpu_are_rejected(scenario: Scenario) -> None:
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


def test_a_gpu_lost_while_trying_gpm_is_not_queried_again(scenario: Scenario) -> None:
    scenario.write(*GPM.splitlines(), "* GpmSampleGet error 15")
    world = World()
    library = world.open()
    made = len(world.calls)
    lost = {value for value in library.devices[0].sample()}
    assert {why.message for why in lost if isinstance(why, Unavailable)} == {"GPU is lost"}
    assert len(lost) == 1 and len(world.calls) == made
