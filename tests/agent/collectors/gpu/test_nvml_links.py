"""Errors and states of single NVLinks, through the unmodified pynvml on a simulated library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.gpu.nvml_library import NvmlDevice, NvmlLibrary
from clusterprof.errors import Unavailable
from tests.support.nvml.healthy import HEALTHY
from tests.support.nvml.simulated import Scenario, load_library

MINUTE_NS = 60_000_000_000
REPLAYS, RECOVERIES = "gpu.nvlink_replays_total", "gpu.nvlink_recoveries_total"
CRC = "gpu.nvlink_crc_errors_total"
SYMBOLS, EFFECTIVE = "gpu.nvlink_symbol_errors_total", "gpu.nvlink_effective_errors_total"
NOT_SUPPORTED = Unavailable("absent", "not supported by this GPU or driver")
SWITCH = "00000000:05:00.0"
HOPPER = [  # links 0 to 2; 21 replays, 22 recoveries and 23 CRC errors together
    *("* FieldValue:161/0 = 20", "* FieldValue:161/1 = 1", "* FieldValue:161/2 = 0"),
    *("* FieldValue:162/0 = 22", "* FieldValue:162/1 = 0", "* FieldValue:162/2 = 0"),
    *("* FieldValue:163/0 = 0", "* FieldValue:163/1 = 23", "* FieldValue:163/2 = 0"),
    "* GetNvLinkRemoteDeviceType = 2 0 255",
    f"* GetNvLinkRemotePciInfo = {SWITCH} 00000000:1B:00.0 {SWITCH}",
]


class World:
    """One simulated GPU, and a clock that a test puts forward."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.now_ns = scenario, MINUTE_NS
        self.device: NvmlDevice | None = None

    def __call__(self) -> int:
        return self.now_ns

    def read(self, *lines: str, after_ns: int = MINUTE_NS) -> list[dict[str, Any]]:
        """The events of links that a sample gives, so long after the last one."""
        self.scenario.write(*lines)
        if self.device is None:
            self.device = NvmlLibrary(lambda index, call: None, clock=self).devices[0]
        else:
            self.now_ns += after_ns
        self.values = dict(zip(self.device.signals, self.device.sample(), strict=True))
        events = [{"kind": kind, **event} for kind, event in self.device.notes if "link" in kind]
        self.device.notes.clear()
        return events


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    load_library()
    scenario = Scenario(tmp_path / "scenario", devices=1)
    monkeypatch.setenv("FAKENVML_CTL", str(scenario.path))
    yield World(scenario)


def errors(*grown: tuple[int, str, int], remotes: Any = (), **others: Any) -> dict[str, Any]:
    return {
        "kind": "nvlink-errors",
        "errors": [list(row) for row in grown],
        "remotes": [list(row) for row in remotes],
        **others,
    }


def test_the_nvlink_with_errors_is_named(world: World) -> None:
    assert world.read(*HOPPER) == []  # what was counted before the recording began
    # 4 more replays on link 0, 2 more CRC errors on link 1.
    lines = [*HOPPER, "* FieldValue:161/0 = 24", "* FieldValue:52 = 25"]
    lines += ["* FieldValue:163/1 = 25", "* FieldValue:38 = 22"]
    assert world.read(*lines) == [
        errors(
            (0, REPLAYS, 4),
            (1, CRC, 2),
            remotes=[(0, "a switch", SWITCH), (1, "a GPU", "00000000:1B:00.0")],
        )
    ]
    assert (world.values[REPLAYS], world.values[CRC]) == (25, 25)
    assert world.read(*lines) == []


def test_single_links_are_read_only_when_a_sum_has_grown(world: World) -> None:
    world.read(*HOPPER)
    # Any question about a single link would end this test run: only the sums are asked for.
    traps = [f"* FieldValue:{field}/{link} segv" for field in (161, 162, 163) for link in range(3)]
    for _ in range(5):
        assert world.read(*HOPPER, *traps) == []


def test_nvlinks_with_constant_errors_are_read_less_often(world: World) -> None:
    world.read(*HOPPER)
    seen = []
    for minute in range(1, 65):
        lines = [*HOPPER, f"* FieldValue:161/2 = {minute}", f"* FieldValue:52 = {21 + minute}"]
        for event in world.read(*lines):
            [(link, signal, grown)] = event["errors"]
            assert (link, signal) == (2, REPLAYS) and event["remotes"] == []  # type 255: unknown
            seen.append((minute, grown))
    # After 1, 2, 4, 8 and then always 16 minutes; no error is lost.
    assert seen == [(1, 1), (2, 1), (4, 2), (8, 4), (16, 8), (32, 16), (48, 16), (64, 16)]


def test_an_nvlink_counter_continues_after_being_unreadable(world: World) -> None:
    assert world.read(*HOPPER) == []
    gone = [
        "* FieldValue:161/0 error 3",
        "* FieldValue:162/0 error 3",
        "* FieldValue:163/0 error 3",
    ]
    assert world.read(*HOPPER, *gone, "* FieldValue:161/2 = 1", "* FieldValue:52 = 2") == [
        errors((2, REPLAYS, 1))
    ]
    back = ["* FieldValue:161/0 = 26", "* FieldValue:161/2 = 1", "* FieldValue:52 = 28"]
    assert world.read(*HOPPER, *back, after_ns=2 * MINUTE_NS) == [
        errors((0, REPLAYS, 6), remotes=[(0, "a switch", SWITCH)])
    ]


def test_a_failed_read_of_links_keeps_the_sums(world: World) -> None:
    assert world.read(*BLACKWELL) == []
    failed = [*BLACKWELL, "* FieldValue:221 = 9", "* FieldValue:221/0 = 9"]
    # The second call of this kind within a reading is that of the links.
    assert world.device is not None
    nvml, calls = world.device._nvml, []

    def fail_second(handle: Any, fields: Any) -> Any:
        calls.append(fields)
        if len(calls) == 3:  # bytes, sums, links
            raise nvml.NVMLError(nvml.NVML_ERROR_TIMEOUT)
        return nvml.nvmlDeviceGetFieldValues(handle, fields)

    world.device._nvml = Substitute(nvml, nvmlDeviceGetFieldValues=fail_second)
    assert world.read(*failed) == []
    assert world.values[SYMBOLS] == 9 and len(calls) == 3
    world.device._nvml = nvml
    more = [*failed, "* FieldValue:221 = 10", "* FieldValue:221/0 = 10"]
    [event] = world.read(*more, after_ns=2 * MINUTE_NS)
    assert event["errors"] == [[0, SYMBOLS, 10]]  # none is lost


class Substitute:
    """A module of which some functions are others."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self.module, self.functions = module, functions

    def __getattr__(self, name: str) -> Any:
        return self.functions.get(name) or getattr(self.module, name)


def test_nvlinks_up_to_ampere_are_read_from_separate_fields(world: World) -> None:
    states = "* GetNvLinkState =" + " 1" * 12
    # Replays of links 0 to 5 are 46 to 51, of links 6 to 11 108 to 113; of CRC there are two kinds.
    links = [f"* FieldValue:{field} = 0" for field in (*range(46, 52), *range(108, 114))]
    links += ["* FieldValue:37 = 5", "* FieldValue:44 = 6", "* FieldValue:96 = 7"]
    assert world.read(states, *links) == []
    grown = ["* FieldValue:113 = 3", "* FieldValue:52 = 24"]  # link 11
    grown += ["* FieldValue:37 = 6", "* FieldValue:44 = 8", "* FieldValue:38 = 23"]  # link 5
    assert world.read(states, *links, *grown) == [errors((5, CRC, 3), (11, REPLAYS, 3))]


BLACKWELL = [
    "* GetCudaComputeCapability = 10 0",
    *("* FieldValue:215 = 3", "* FieldValue:219 = 70", "* FieldValue:221 = 0"),
    *("* FieldValue:215/0 = 3", "* FieldValue:215/1 = 0", "* FieldValue:215/2 = 0"),
    *("* FieldValue:219/0 = 30", "* FieldValue:219/1 = 40", "* FieldValue:219/2 = 0"),
    *("* FieldValue:221/0 = 0", "* FieldValue:221/1 = 0", "* FieldValue:221/2 = 0"),
]


def test_blackwell_nvlink_errors_are_read_from_newer_fields(world: World) -> None:
    assert world.read(*BLACKWELL) == []
    counted = {RECOVERIES: 3, SYMBOLS: 0, EFFECTIVE: 70}
    others = {name: value for name, value in HEALTHY.items() if name not in (REPLAYS, CRC)}
    assert world.values == {**others, **counted}
    # Link 1: 5 effective errors and a rate of 0x20B, 2e-11. Link 0: a recovery, no error: 15e-255.
    lines = ["* FieldValue:219 = 75", "* FieldValue:219/1 = 45", "* FieldValue:220/1 = 523"]
    lines += ["* FieldValue:215 = 4", "* FieldValue:215/0 = 4", "* FieldValue:220/0 = 4095"]
    assert world.read(*BLACKWELL, *lines) == [
        errors((0, RECOVERIES, 1), (1, EFFECTIVE, 5), error_rates=[[0, 15e-255], [1, 2e-11]])
    ]


def test_without_a_total_the_counters_of_single_links_are_summed(world: World) -> None:
    sums = ("* FieldValue:215 =", "* FieldValue:219 =", "* FieldValue:221 =")
    lines = [line for line in BLACKWELL if not line.startswith(sums)]
    assert world.read(*(line for line in lines if "221" not in line)) == []
    names = (RECOVERIES, SYMBOLS, EFFECTIVE)
    assert [world.values[name] for name in names] == [3, NOT_SUPPORTED, 70]


def test_a_gpu_without_nvlink_counters_is_queried_once(world: World) -> None:
    assert world.read() == []
    for replays in (30, 40):
        assert world.read(f"* FieldValue:52 = {replays}", "* FieldValue:161/0 segv") == []
        assert world.values[REPLAYS] == replays


def test_a_link_that_goes_down_is_named(world: World) -> None:
    ends = HOPPER[-2:]
    assert world.read(*ends) == []  # the third is down from the beginning
    down = {"down": [0], "up": [], "remotes": [[0, "a switch", SWITCH]]}
    assert world.read(*ends, "* GetNvLinkState = 0 1 0") == [{"kind": "nvlink-states", **down}]
    assert world.read(*ends, "* GetNvLinkState = 0 1 0") == []
    # Within the minute after an event a change waits.
    up = {"down": [], "up": [0, 2], "remotes": []}
    assert world.read(*ends, "* GetNvLinkState = 1 1 1") == [{"kind": "nvlink-states", **up}]
    assert world.read("* GetNvLinkState = 1 0 1", after_ns=MINUTE_NS) == []
    down = {"down": [1], "up": [], "remotes": []}
    assert world.read("* GetNvLinkState = 1 0 1") == [{"kind": "nvlink-states", **down}]


@pytest.mark.parametrize(
    ("address", "kept"), [(SWITCH, SWITCH), ("00000000:00:00.0", ""), ("FFFFFFFF:FF:FF.F", "")]
)
def test_a_remote_address_of_zeros_or_ones_is_dropped(
    world: World, address: str, kept: str
) -> None:
    ends = ["* GetNvLinkRemoteDeviceType = 2 2 2", f"* GetNvLinkRemotePciInfo = {address}"]
    world.read(*ends)
    [event] = world.read(*ends, "* GetNvLinkState = 0 1 0")
    assert event["remotes"] == [[0, "a switch", kept]]


def test_a_gpu_lost_while_reading_nvlinks_is_not_queried_again(world: World) -> None:
    world.read(*HOPPER)
    lost = ["* GetNvLinkState = 0 1 0", "* GetNvLinkRemoteDeviceType error 15"]
    assert world.read(*lost) == []
    assert {value.message for value in world.values.values()} == {"GPU is lost"}
    assert world.read("* * segv") == []
