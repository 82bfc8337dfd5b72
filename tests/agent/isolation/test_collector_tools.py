"""Accelerators behind tools and libraries, in helpers that hang, die and print anything."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.isolation import drivers
from clusterprof.agent.isolation.collector import IsolatedCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import NothingNew, Unavailable
from clusterprof.signals import BY_NAME
from tests.support.accelerators.simulated import (
    HOSTS,
    SITE,
    SimulatedGaudi,
    prepend_to_path,
    wait_until,
    write_tool,
    write_tpu,
)
from tests.support.recording_runs import is_alive

TOOLS = HOSTS / "trn1-node" / "tools"
CORES = ["neuron-0-core-0", "neuron-0-core-1", "neuron-1-core-2", "neuron-1-core-3"]


class Rig:
    """An isolated collector, ticked as the recorder's loop would."""

    def __init__(self, name: str, **environment: str) -> None:
        self.collector = IsolatedCollector(
            name,
            Context(Roots(), None, lambda: []),
            environment={**os.environ, **environment},
            explain_absence=lambda environ: None,
            first_wait_seconds=20.0,
        )
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.columns: list[tuple[str, str]] = []

    def open(self) -> None:
        self.columns = [(signal.name, device) for signal, device in self.collector.open()]

    def try_to_open(self) -> bool:
        """Open it as the loop does, which tries again; False while it looks for devices."""
        try:
            self.open()
        except NothingNew:
            return False
        return True

    def tick(self) -> dict[tuple[str, str], Any] | None:
        """One turn; None = nothing new."""
        try:
            values = list(self.collector.sample())
        except NothingNew:
            values = []
        self.seen += self.collector.events()
        return dict(zip(self.columns, values)) if values else None

    def next(self, signal: str, device: str) -> Any:
        """The next value that comes, and what comes after a while of nothing new."""
        return wait_until(lambda: (sample := self.tick()) and [sample[signal, device]])[0]


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        child = rig.collector._helper
        rig.collector.close()
        if child is not None:
            wait_until(lambda item=child: item.reap())


def started(rigs: list[Rig], name: str, **environment: str) -> Rig:
    rig = Rig(name, **environment)
    rigs.append(rig)
    rig.open()
    return rig


def below(pid: int | None) -> list[int]:
    """The tools that a helper has started."""
    collected = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"PPid:\t{pid}\n" in (entry / "status").read_text():
                collected.append(int(entry.name))
        except OSError:
            continue
    return collected


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Up to which report the simulated neuron-monitor may print."""
    path = tmp_path / "gate"
    path.write_text("1")
    return path


def test_each_neuron_report_becomes_a_single_sample(rigs: list[Rig], gate: Path) -> None:
    rig = started(rigs, "gpu_neuron", PATH=prepend_to_path(TOOLS), NEURON_GATE=str(gate))
    assert [device for _, device in rig.columns[:: len(rig.columns) // 4]] == CORES
    first = wait_until(rig.tick)
    assert rig.collector.sampled_ns <= time.monotonic_ns()
    busy = "gpu.busy_ns_total"
    assert [first["gpu.core_busy_ratio", core] for core in CORES] == [0.42, 0.0, 1.0, 0.0]
    for _ in range(10):
        assert rig.tick() is None
        time.sleep(0.01)
    gate.write_text("2")
    second = wait_until(rig.tick)
    gained = [second[busy, core] - first[busy, core] for core in CORES]
    assert gained == [500_000_000, 0, 800_000_000, 0]
    owners = [(about["device"], about["pid"]) for kind, about in rig.seen if kind == "device-owner"]
    assert sorted(owners) == [(CORES[0], 4711), (CORES[2], 4712)]
    entry = {**rig.collector.inventory()[2]}
    assert entry == {
        "id": CORES[2],
        "vendor": "aws",
        "index": 2,
        "emulated": False,
        "name": "trainium1",
        "chip": 1,
        "chip_memory_bytes": 32 << 30,
        "pci_bus_id": "0000:00:1f.0",
        "numa_node": 1,
    }


def test_a_killed_tool_is_a_reason_and_is_restarted(rigs: list[Rig], gate: Path) -> None:
    rig = started(rigs, "gpu_neuron", PATH=prepend_to_path(TOOLS), NEURON_GATE=str(gate))
    before = wait_until(rig.tick)["gpu.busy_ns_total", CORES[0]]
    helper = rig.collector.pid
    (monitor,) = below(helper)
    os.kill(monitor, signal.SIGKILL)
    reason = Unavailable("failed", "neuron-monitor has ended (signal 9)")
    assert rig.next("gpu.busy_ns_total", CORES[0]) == reason
    after = wait_until(lambda: isinstance(v := rig.next("gpu.busy_ns_total", CORES[0]), int) and v)
    assert after < before  # what was in between is not known
    assert rig.collector.pid == helper
    assert not [kind for kind, _ in rig.seen if kind.startswith("helper")]


@pytest.mark.parametrize("ending", ["close", "kill"])
def test_a_tool_ends_with_the_helper(rigs: list[Rig], gate: Path, ending: str) -> None:
    rig = started(rigs, "gpu_neuron", PATH=prepend_to_path(TOOLS), NEURON_GATE=str(gate))
    helper = rig.collector.pid
    assert helper is not None
    tools = below(helper)
    assert len(tools) == 1
    if ending == "close":  # as when the recorder itself is gone: its end of the pipe closes
        child = rig.collector._helper
        rig.collector.close()
        assert child is not None
        wait_until(child.reap)
    else:
        os.kill(helper, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in [helper, *tools]))


def test_a_tool_that_prints_garbage_and_ignores_sigterm_has_failed(
    rigs: list[Rig], tmp_path: Path
) -> None:
    write_tool(
        tmp_path / "bin", "neuron-monitor", "trap '' TERM; echo 'usage: neuron-monitor'; exit 2"
    )
    with pytest.raises(Unavailable) as raised:
        started(rigs, "gpu_neuron", PATH=prepend_to_path(tmp_path / "bin"))
    assert raised.value.kind == "failed"
    assert raised.value.message in (
        "neuron-monitor printed no report: 'usage: neuron-monitor'",
        "neuron-monitor has ended (exit code 2)",
    )


def test_a_gaudi_that_crashes_its_library_is_skipped(
    rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SITE)
    gaudis = SimulatedGaudi(tmp_path / "gaudis")
    rig = started(rigs, "gpu_gaudi", FAKEHLML=str(gaudis.path))
    first, second = (device for _, device in rig.columns[:: len(rig.columns) // 2])
    assert rig.next("gpu.power_watts", first) == 612.5  # its prints to stdout do no harm
    gaudis.write(GetPowerUsage=[{"signal": signal.SIGSEGV}, 225000])
    wait_until(lambda: (rig.tick(), "helper-restarted" in [kind for kind, _ in rig.seen])[1])
    died = dict(rig.seen)["helper-died"]
    calls = dict(zip(died["devices"], died["calls"]))
    assert calls[first] == "GetPowerUsage"  # the other device may be in a call at that moment
    wait_until(lambda: (sample := rig.tick()) and sample["gpu.power_watts", second] == 225.0)


def test_a_hanging_gaudi_does_not_affect_the_others(
    rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SITE)
    gaudis = SimulatedGaudi(tmp_path / "gaudis")
    gaudis.write(GetPowerUsage=[612500, {"hang": True}])
    rig = Rig("gpu_gaudi", FAKEHLML=str(gaudis.path))
    rig.collector._first_wait_seconds = 1.0
    rigs.append(rig)
    wait_until(rig.try_to_open)
    first, second = (device for _, device in rig.columns[:: len(rig.columns) // 2])
    hung = Unavailable("failed", "no answer for over a second (inside GetPowerUsage)")
    wait_until(lambda: (sample := rig.tick()) and sample["gpu.power_watts", second] == hung)
    wait_until(lambda: (sample := rig.tick()) and sample["gpu.power_watts", first] == 612.5)
    gaudis.write()


def test_a_tpu_without_values_is_reported_as_unused(
    rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SITE)
    scenario = tmp_path / "tpu"
    write_tpu(scenario)
    rig = started(rigs, "gpu_tpu", FAKETPU=str(scenario))
    assert rig.next("gpu.duty_cycle_ratio", "tpu-0") == pytest.approx(0.981)
    write_tpu(scenario, duty_cycle_pct=[], hbm_capacity_usage=[])
    nobody = Unavailable("absent", "no process holds the TPU")
    wait_until(lambda: (sample := rig.tick()) and sample["gpu.duty_cycle_ratio", "tpu-1"] == nobody)


def test_libraries_use_only_signals_of_the_catalog() -> None:
    from clusterprof.agent.collectors.gpu import gaudi_hlml, neuron, tpu

    for library in (
        gaudi_hlml.HlmlLibrary,
        gaudi_hlml.HlSmiLibrary,
        neuron.NeuronLibrary,
        tpu.TpuInfoLibrary,
        tpu.LibtpuLibrary,
    ):
        assert [name for name in library.signals if name not in BY_NAME] == []
    with pytest.raises(ValueError, match="no such isolated collector: cpu"):
        drivers.get_library_opener("cpu")


def test_nodes_without_accelerator_tools_start_no_helper(tmp_path: Path) -> None:
    nowhere = {"PATH": str(tmp_path)}
    for name in sorted(drivers.OPTIONAL_COLLECTORS):
        reason = drivers.explain_absence(name, nowhere)
        assert reason is not None
        assert reason.kind == "absent"
    for name, called in (
        ("gpu_gaudi", "hl-smi"),
        ("gpu_neuron", "neuron-monitor"),
        ("gpu_tpu", "tpu-info"),
    ):
        folder = write_tool(tmp_path / name, called, "exit 1")
        assert drivers.explain_absence(name, {"PATH": str(folder)}) is None
