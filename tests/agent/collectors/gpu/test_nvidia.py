"""NVML through the unmodified pynvml, on a simulated library in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.collectors.gpu.nvidia import GpuNvidiaCollector
from clusterprof.agent.collectors.gpu.nvml_library import NvmlLibrary
from clusterprof.agent.collectors.gpu.nvml_queries import CALLS, NEVER_NS
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import Unavailable
from tests.support.nvml.healthy import HEALTHY, make_device_entry
from tests.support.nvml.simulated import Scenario, load_library, make_uuid

SECOND_NS = 1_000_000_000
NOT_SUPPORTED = Unavailable("absent", "not supported by this GPU or driver")
LOST = Unavailable(
    "failed",
    "GPU is lost",
    "check for Xid lines in the kernel log; the GPU needs a reset or the node a reboot",
)


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    load_library()
    made = Scenario(tmp_path / "scenario", devices=2)
    monkeypatch.setenv("FAKENVML_CTL", str(made.path))
    return made


class Clock:
    def __init__(self) -> None:
        self.now_ns = SECOND_NS

    def __call__(self) -> int:
        return self.now_ns


def unmarked(index: int, call: str) -> None:
    pass


def collected() -> dict[str, dict[str, Any]]:
    """Open, sample and close the collector: device -> signal -> value."""
    collector = GpuNvidiaCollector(Context(Roots(), None, lambda: []))
    columns = collector.open()
    values = collector.sample()
    collector.close()
    result: dict[str, dict[str, Any]] = {}
    for (signal, device), value in zip(columns, values, strict=True):
        result.setdefault(device, {})[signal.name] = value
    return result


def named(values: list[Any]) -> dict[str, Any]:
    return dict(zip(HEALTHY, values, strict=True))


def test_two_gpus_report_all_values(scenario: Scenario) -> None:
    scenario.write("1 GetUtilizationRates = 0 0", "1 GetPowerUsage = 75000")
    idle = {"gpu.busy_ratio": 0.0, "gpu.memory_busy_ratio": 0.0, "gpu.power_watts": 75.0}
    assert collected() == {make_uuid(0): HEALTHY, make_uuid(1): {**HEALTHY, **idle}}


def test_the_inventory_describes_each_device(scenario: Scenario) -> None:
    scenario.write("1 GetName error 3")
    library = NvmlLibrary(unmarked)
    library.close()
    second = make_device_entry(1)
    del second["name"]  # not supported: left out, not guessed
    assert library.inventory == [make_device_entry(0), second]


def test_unsupported_features_of_a_gpu_have_no_column(scenario: Scenario) -> None:
    """A Volta, whose pages are retired (4 for repeated errors, 1), beside a GPU without NVLink."""
    scenario.write("0 GetCudaComputeCapability = 7 0", "1 GetNvLinkState error 3")
    repair = {"gpu.retired_pages_count": 5, "gpu.retirement_pending_count": 1}
    assert collected() == {
        make_uuid(0): {**{k: v for k, v in HEALTHY.items() if "remap" not in k}, **repair},
        make_uuid(1): {k: v for k, v in HEALTHY.items() if "nvlink" not in k},
    }
    library = NvmlLibrary(unmarked)
    library.close()
    without = {**make_device_entry(1), "nvlink_count": 0}
    del without["nvlink_bytes_per_second"]
    assert library.inventory == [{**make_device_entry(0), "compute_capability": "7.0"}, without]


def test_an_unsupported_value_leaves_the_other_values(scenario: Scenario) -> None:
    scenario.write("1 GetPowerUsage error 3")
    samples = collected()
    assert samples[make_uuid(0)] == HEALTHY
    assert samples[make_uuid(1)] == {**HEALTHY, "gpu.power_watts": NOT_SUPPORTED}


def test_counters_for_administrators_only_are_denied_with_a_remedy(scenario: Scenario) -> None:
    scenario.write("* GetPcieThroughput:RX error 4", "* GetPcieThroughput:TX error 4")
    denied = Unavailable(
        "denied",
        "NVML: no permission",
        "an administrator must run it, or set NVreg_RestrictProfilingToAdminUsers=0",
    )
    expected = {
        **HEALTHY,
        "gpu.pcie_receive_bytes_per_second": denied,
        "gpu.pcie_transmit_bytes_per_second": denied,
    }
    assert collected() == {make_uuid(0): expected, make_uuid(1): expected}


def test_an_impossible_percentage_is_rejected(scenario: Scenario) -> None:
    scenario.write("0 GetUtilizationRates = 137 40", "0 GetSamples error 6")
    result = collected()[make_uuid(0)]
    impossible = Unavailable("failed", "NVML: impossible value 137 %")
    assert result["gpu.busy_ratio"] == result["gpu.memory_busy_ratio"] == impossible
    # Neither samples nor a utilisation: not a busy time that stands still.
    not_found = Unavailable("absent", "NVML: not found")
    assert result["gpu.busy_ns_total"] == result["gpu.busy_until_ns"] == not_found


def test_an_impossible_sample_is_not_counted_as_busy_time(scenario: Scenario) -> None:
    scenario.write("0 GetSamples = 1000000:50 1200000:137")
    result = collected()[make_uuid(0)]
    impossible = Unavailable("failed", "NVML: impossible value 137 %")
    assert result["gpu.busy_ns_total"] == result["gpu.busy_until_ns"] == impossible
    assert result["gpu.busy_ratio"] == 0.97


def test_a_lost_gpu_is_not_queried_again(scenario: Scenario) -> None:
    clock = Clock()
    library = NvmlLibrary(unmarked, clock=clock)
    lost_one, other = library.devices
    for tick in range(10):
        if tick == 5:
            scenario.write("0 GetMemoryInfo error 15")
        if tick == 7:
            scenario.write("0 * segv")  # any call on that handle would end this test run
        # Without samples the utilization of 97 % counts, each second up to the reading.
        since = {"gpu.busy_ns_total": tick * 970_000_000, "gpu.busy_until_ns": clock.now_ns}
        busy = since if tick else {}
        values = lost_one.sample()
        if tick < 5:
            assert named(values) == {**HEALTHY, **busy}
        else:
            assert values == [LOST] * len(HEALTHY)
        assert named(other.sample()) == {**HEALTHY, **busy}
        clock.now_ns += SECOND_NS
    processes = ("device-processes", {"held": [[901, 5], [902, 6], [903, 7]]})
    lost = ("device-lost", {"message": "GPU is lost", "call": "GetMemoryInfo"})
    assert list(lost_one.notes) == [processes, lost]
    assert list(other.notes) == [processes]


def test_a_gpu_that_cannot_be_opened_is_listed_with_its_reason(scenario: Scenario) -> None:
    scenario.write("0 GetHandleByIndex error 15")
    samples = collected()
    assert list(samples) == ["nvidia-0", make_uuid(1)]
    assert set(samples["nvidia-0"].values()) == {LOST}
    assert samples[make_uuid(1)] == HEALTHY


def test_a_driver_that_is_not_loaded_is_absent(scenario: Scenario) -> None:
    scenario.write("* Init error 9")
    with pytest.raises(Unavailable) as raised:
        NvmlLibrary(unmarked)
    remedy = "install the NVIDIA driver, or run the container with the NVIDIA runtime"
    assert raised.value == Unavailable("absent", "the NVIDIA driver is not loaded", remedy)


def test_a_node_without_gpus_is_absent(scenario: Scenario) -> None:
    scenario.devices = 0
    scenario.write()
    with pytest.raises(Unavailable) as raised:
        NvmlLibrary(unmarked)
    assert raised.value == Unavailable("absent", "the driver lists no NVIDIA GPU", "")


def test_busy_time_is_the_sum_of_driver_samples(scenario: Scenario) -> None:
    clock = Clock()
    scenario.write("0 GetSamples = 1000000:50 1200000:90")
    device = NvmlLibrary(unmarked, clock=clock).devices[0]
    at = list(HEALTHY).index("gpu.busy_ns_total")
    busy = [device.sample()[at]]  # the first look only learns where the buffer ends
    scenario.write("0 GetSamples = 1000000:50 1200000:90 1400000:100 1500000:10")
    clock.now_ns += SECOND_NS // 10
    busy.append(device.sample()[at])
    scenario.write("0 GetSamples = 1500000:10")  # nothing new: "not found", which is no error
    clock.now_ns += SECOND_NS // 10
    busy.append(device.sample()[at])
    # 200 ms at 100 % + 100 ms at 10 %
    assert busy == [0, 210_000_000, 210_000_000]


def test_without_samples_utilization_counts_as_busy_time_every_second(scenario: Scenario) -> None:
    clock = Clock()
    scenario.write("0 GetUtilizationRates = 25 0", "0 GetSamples error 6")
    device = NvmlLibrary(unmarked, clock=clock).devices[0]
    at = list(HEALTHY).index("gpu.busy_ns_total")
    busy = []
    for _ in range(5):
        busy.append(device.sample()[at])
        clock.now_ns += SECOND_NS // 2
    # 25 % of each full second; half a second without samples is not yet an idle buffer
    assert busy == [0, 0, 250_000_000, 250_000_000, 500_000_000]


def test_without_a_sample_buffer_utilization_counts_as_busy_time(scenario: Scenario) -> None:
    clock = Clock()
    scenario.write("0 GetUtilizationRates = 50 0", "0 GetSamples error 3")
    device = NvmlLibrary(unmarked, clock=clock).devices[0]
    at = list(HEALTHY).index("gpu.busy_ns_total")
    busy = []
    for _ in range(3):
        busy.append(device.sample()[at])
        clock.now_ns += SECOND_NS // 10
    assert busy == [0, 50_000_000, 100_000_000]  # half of 100 ms each


def test_a_slow_call_is_made_ten_times_less_often_and_reported(scenario: Scenario) -> None:
    clock = Clock()
    made: dict[str, int] = {}

    def mark(index: int, call: str) -> None:
        made[call] = made.get(call, 0) + 1
        if call == "GetPcieThroughput:RX":
            clock.now_ns += 6_000_000  # the call takes 6 ms

    device = NvmlLibrary(mark, clock=clock).devices[0]
    for _ in range(30):
        device.sample()
        clock.now_ns += SECOND_NS
    # RX: at 0, 1 and 2 s, whose median is 6 ms; then every 10 s: at 12 and 22 s.
    assert made["GetPcieThroughput:RX"] == 5
    assert made["GetPcieThroughput:TX"] == 30
    slowed = {"call": "GetPcieThroughput:RX", "median_ns": 6_000_000}
    assert [note for note in device.notes if note[0] != "device-processes"] == [
        ("call-slowed", slowed)
    ]


def test_a_call_slowed_by_a_starved_node_recovers_its_rate(scenario: Scenario) -> None:
    clock = Clock()
    made: list[int] = []

    def mark(index: int, call: str) -> None:
        if call == "GetPcieThroughput:RX":
            made.append(clock.now_ns // SECOND_NS)
            clock.now_ns += 6_000_000 if len(made) <= 3 else 10_000

    device = NvmlLibrary(mark, clock=clock).devices[0]
    for _ in range(40):
        device.sample()
        clock.now_ns += SECOND_NS
    # Three slow calls; three quick ones, every 10 s; from then on each second.
    assert made == [1, 2, 3, 13, 23, *range(33, 41)]
    notes = [attributes for kind, attributes in device.notes if kind == "call-slowed"]
    assert [note["median_ns"] for note in notes] == [6_000_000, 0]


def test_a_call_that_waits_for_a_cpu_keeps_its_rate(scenario: Scenario) -> None:
    clock = Clock()
    made: list[int] = []

    def mark(index: int, call: str) -> None:
        if call == "GetPcieThroughput:RX":
            made.append(clock.now_ns)
            clock.now_ns += 1_000_000 if len(made) % 3 == 1 else 20_000_000  # two of three are late

    device = NvmlLibrary(mark, clock=clock).devices[0]
    for _ in range(30):
        device.sample()
        clock.now_ns += SECOND_NS
    assert len(made) == 30


def test_slowly_changing_values_are_queried_less_often(scenario: Scenario) -> None:
    clock = Clock()
    made: dict[str, int] = {}

    def mark(index: int, call: str) -> None:
        made[call] = made.get(call, 0) + 1

    device = NvmlLibrary(mark, clock=clock).devices[0]
    made.clear()
    for _ in range(100):  # 10 s at 10 Hz
        device.sample()
        clock.now_ns += SECOND_NS // 10
    expected = {0: 100, SECOND_NS: 10, 10 * SECOND_NS: 1, 60 * SECOND_NS: 1, NEVER_NS: 1}
    del made[""]  # every call is back
    asked = [call for call in CALLS if call.name != "GetRetiredPages"]  # of older GPUs only
    assert made == {call.name: expected[call.every_ns] for call in asked}
