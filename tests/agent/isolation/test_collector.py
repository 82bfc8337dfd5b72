"""The helper process under everything a driver can do: real processes, a simulated library."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterprof.agent.collectors.base import Context
from clusterprof.agent.isolation.collector import IsolatedCollector
from clusterprof.agent.linux.files import Roots
from clusterprof.errors import DevicesChanged, NothingNew, Unavailable
from tests.support.nvml.healthy import MEANS, NAMES_WITH_GPM
from tests.support.nvml.isolated_gpus import (
    LIVENESS_SECONDS,
    SECOND_NS,
    IsolatedGpuRig,
    wait_for_exit,
)
from tests.support.nvml.simulated import make_uuid

WIDTH = len(NAMES_WITH_GPM)
BUSY_RATIO = NAMES_WITH_GPM.index("gpu.busy_ratio")
PARKED = "paused after it crashed the driver's library"


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[IsolatedGpuRig]:
    made = IsolatedGpuRig(tmp_path)
    yield made
    made.collector.close()
    made.scenario.write()  # whatever hangs may go on
    wait_for_exit(made.pids)


def events_without_slow_calls(rig: IsolatedGpuRig) -> list[tuple[str, dict[str, Any]]]:
    """Return what was seen but for calls that took long, which is a busy machine's doing."""
    return [row for row in rig.seen if row[0] != "call-slowed"]


def first(values: list[Any]) -> list[Any]:
    return values[:WIDTH]


def is_read(values: list[Any]) -> bool:
    """Return whether the values of a device hold its utilization."""
    return bool(values[BUSY_RATIO] == 0.97)


def second(values: list[Any]) -> list[Any]:
    return values[WIDTH:]


def message(value: Any) -> str:
    return value.message if isinstance(value, Unavailable) else ""


def test_the_first_sample_has_values_from_the_helper(rig: IsolatedGpuRig) -> None:
    columns = rig.collector.open()
    assert [(signal.name, device) for signal, device in columns] == [
        (name, make_uuid(index)) for index in (0, 1) for name in NAMES_WITH_GPM
    ]
    assert [entry["id"] for entry in rig.collector.inventory()] == [make_uuid(0), make_uuid(1)]
    before_ns = time.monotonic_ns()
    values = rig.tick()
    assert all(isinstance(value, int | float) for value in values)
    assert first(values)[: len(MEANS)] == list(MEANS.values())
    assert first(values)[BUSY_RATIO : BUSY_RATIO + 2] == [0.97, 0.4]
    assert 0 < rig.collector.sampled_ns < before_ns
    until_ns = first(values)[NAMES_WITH_GPM.index("gpu.busy_until_ns")]
    assert 0 < until_ns < before_ns  # on the recording's clock
    assert events_without_slow_calls(rig) == []


def test_a_missing_value_arrives_with_its_reason(rig: IsolatedGpuRig) -> None:
    rig.scenario.write("1 GetPowerUsage error 3")
    rig.collector.open()
    values = rig.tick()
    holes = [at for at, value in enumerate(values) if isinstance(value, Unavailable)]
    assert holes == [WIDTH + NAMES_WITH_GPM.index("gpu.power_watts")]
    assert values[holes[0]] == Unavailable("absent", "not supported by this GPU or driver", "")


def test_an_old_driver_makes_only_unsupported_values_unknown(tmp_path: Path) -> None:
    rig = IsolatedGpuRig(tmp_path, "-DOLD_DRIVER")
    rig.collector.open()
    values = dict(zip(NAMES_WITH_GPM, first(rig.tick())))
    rig.collector.close()
    wait_for_exit(rig.pids)
    assert values["gpu.throttle_bits"] == 4  # under the name the call had before
    assert values["gpu.pcie_replays_total"] == Unavailable(
        "absent", "the NVIDIA driver is too old for this value", "update the NVIDIA driver"
    )
    assert values["gpu.power_watts"] == 612.5


def test_a_missing_library_stays_absent_without_a_helper(
    rig: IsolatedGpuRig, tmp_path: Path
) -> None:
    (tmp_path / "lib" / "libnvidia-ml.so.1").write_bytes(b"")  # the loader finds it and refuses
    for _ in range(2):
        with pytest.raises(Unavailable) as raised:
            rig.collector.open()
        assert raised.value.kind == "absent"
        assert raised.value.message == "libnvidia-ml.so.1 was not found"
        assert "install the NVIDIA driver" in raised.value.remedy
        assert rig.collector.pid is None


def test_a_hanging_device_does_not_cost_samples_of_other_devices(rig: IsolatedGpuRig) -> None:
    rig.collector.open()
    rig.tick_until(lambda values: is_read(second(values)))
    rig.scenario.write("1 GetPowerUsage hang")
    rig.tick_until(lambda _: "collector-hung" in rig.list_event_kinds())
    where = {"collector": "gpu_nvidia", "device": make_uuid(1), "call": "GetPowerUsage"}
    assert events_without_slow_calls(rig) == [("collector-hung", where)]

    taken = set()
    for _ in range(20):
        values = rig.tick_until(lambda values: is_read(first(values)))
        taken.add(rig.collector.sampled_ns)
        hung = Unavailable("failed", "no answer for over a second (inside nvml GetPowerUsage)")
        assert second(values) == [hung] * WIDTH
    assert len(taken) == 20  # each a sample of its own, none repeated

    rig.scenario.write()
    rig.tick_until(lambda values: is_read(second(values)))
    hung, recovered = events_without_slow_calls(rig)
    assert (hung[0], recovered[0]) == ("collector-hung", "collector-recovered")
    assert recovered[1]["hung_ns"] >= SECOND_NS
    assert len(rig.pids) == 1


def test_closing_neither_waits_for_nor_kills_the_helper(rig: IsolatedGpuRig) -> None:
    rig.collector.open()
    rig.tick()
    rig.scenario.write("* * hang")
    rig.tick_until(lambda _: rig.list_event_kinds().count("collector-hung") == 2)
    pid = rig.collector.pid
    assert pid is not None
    rig.collector.close()
    # The simulated hang sleeps where signals reach it, so after its grace (0 here) the helper
    # goes by itself; in the D state it would stay until the driver lets go.
    wait_for_exit({pid})
    child = rig.collector._abandoned[0]
    while not child.reap():  # the main thread may be dead a moment before the others are
        time.sleep(0.01)
    assert (child.pid, child.exit_signal) == (pid, 0)


def test_a_helper_exits_only_after_a_driver_call_returns(tmp_path: Path) -> None:
    rig = IsolatedGpuRig(tmp_path, grace_ns=3600 * SECOND_NS)
    rig.collector.open()
    rig.tick()
    rig.scenario.write("* * hang")
    rig.tick_until(lambda _: rig.list_event_kinds().count("collector-hung") == 2)
    rig.collector.close()
    child = rig.collector._abandoned[0]
    time.sleep(0.5)
    assert not child.reap()  # still inside: its pipe is closed, and nobody killed it
    assert rig.collector.list_ending_pids() == [child.pid]
    rig.scenario.write()
    wait_for_exit({child.pid})
    assert child.exit_signal == 0
    assert rig.collector.list_ending_pids() == []


def test_a_signal_meant_for_the_recorder_does_not_end_a_helper(rig: IsolatedGpuRig) -> None:
    rig.collector.open()
    rig.tick_until(lambda values: is_read(first(values)))
    pid = rig.collector.pid
    assert pid is not None
    os.kill(pid, signal.SIGUSR2)
    taken = rig.collector.sampled_ns
    rig.tick_until(lambda values: is_read(first(values)) and rig.collector.sampled_ns > taken)
    assert rig.collector.pid == pid


def test_a_closed_collector_opens_its_devices_again(rig: IsolatedGpuRig) -> None:
    columns = rig.collector.open()
    rig.tick_until(lambda values: is_read(first(values)))
    rig.collector.close()
    wait_for_exit(rig.pids)
    assert rig.collector.pid is None
    end = time.monotonic() + LIVENESS_SECONDS
    again: list[Any] = []
    while not again and time.monotonic() < end:
        try:
            again = list(rig.collector.open())
        except NothingNew:
            time.sleep(0.02)
    assert again == list(columns)
    rig.tick_until(lambda values: is_read(first(values)) and is_read(second(values)))
    assert len(rig.pids) == 2


def test_a_library_that_hangs_at_start_keeps_the_same_helper(rig: IsolatedGpuRig) -> None:
    rig.scenario.write("* Init hang")
    with pytest.raises(Unavailable) as raised:
        rig.collector.open()
    assert raised.value.message == "NVML does not answer"
    pid = rig.collector.pid
    with pytest.raises(Unavailable):
        rig.collector.open()
    hung = {"collector": "gpu_nvidia", "device": "", "call": "Init"}
    assert rig.collector.events() == [("collector-hung", hung)]
    rig.scenario.write()
    end = time.monotonic() + LIVENESS_SECONDS
    while time.monotonic() < end:
        try:
            rig.collector.open()
            break
        except Unavailable:
            time.sleep(0.02)
    rig.tick_until(lambda values: is_read(first(values)))
    assert rig.pids == {pid}  # the same helper all along
    assert [kind for kind, _ in events_without_slow_calls(rig)] == ["collector-recovered"]


def test_a_crash_names_the_device_and_other_devices_continue(rig: IsolatedGpuRig) -> None:
    rig.collector.open()
    rig.tick_until(lambda values: is_read(second(values)))
    rig.scenario.write("1 GetPowerUsage segv")
    rig.tick_until(lambda _: "helper-restarted" in rig.list_event_kinds())
    values = rig.tick_until(lambda values: is_read(first(values)))
    assert {message(value) for value in second(values)} == {PARKED}
    died = {
        "collector": "gpu_nvidia",
        "signal": signal.SIGSEGV,
        "devices": [make_uuid(1)],
        "calls": ["GetPowerUsage"],
    }
    restarted = ("helper-restarted", {"collector": "gpu_nvidia"})
    assert events_without_slow_calls(rig) == [("helper-died", died), restarted]


def test_a_repeatedly_crashing_device_is_retried_less_often(rig: IsolatedGpuRig) -> None:
    rig.collector.open()
    rig.scenario.write("1 GetPowerUsage segv")
    rests = []
    for crashes in range(1, 8):
        rig.tick_until(lambda _, n=crashes: rig.list_event_kinds().count("helper-died") == n)
        parked = rig.collector._devices[1].parked
        rests.append(parked._rest_ns // SECOND_NS)
        rig.tick_until(lambda values: is_read(first(values)))
        rig.clock.shift_ns += parked.until_ns - rig.clock()  # the rest is over
    assert rests == [1, 2, 4, 8, 16, 32, 60]
    rig.scenario.write()
    rig.tick_until(lambda values: is_read(second(values)))
    # Putting the clock forward also makes answers late: only what the helpers did is compared.
    helpers = [kind for kind in rig.list_event_kinds() if kind.startswith("helper")]
    assert helpers == ["helper-died", "helper-restarted"] * 7


def test_a_library_that_crashes_at_start_is_retried_later(rig: IsolatedGpuRig) -> None:
    rig.scenario.write("* Init segv")
    with pytest.raises(Unavailable):
        rig.collector.open()
    with pytest.raises(Unavailable) as raised:
        rig.collector.open()
    assert raised.value.message == "NVML crashed its process; it is retried after a pause"
    assert [kind for kind, _ in rig.collector.events()] == ["helper-died"]
    rig.scenario.write()
    rig.clock.shift_ns += SECOND_NS
    rig.collector._first = True  # wait as at the start, instead of a loop here
    rig.collector.open()
    assert is_read(first(rig.tick()))


def test_a_device_that_crashes_when_opened_leaves_the_others_readable(rig: IsolatedGpuRig) -> None:
    rig.scenario.write("1 GetUUID segv")
    columns = rig.collector.open()
    assert {device for _, device in columns} == {make_uuid(0), "nvidia-1"}
    values = rig.tick()
    assert is_read(first(values))
    assert {message(value) for value in second(values)} == {PARKED}
    rig.scenario.write()
    rig.clock.shift_ns += SECOND_NS
    with pytest.raises(DevicesChanged):  # its name was not known until now
        rig.tick_until(lambda _: False)


def test_a_killed_helper_is_replaced(rig: IsolatedGpuRig) -> None:
    rig.collector.open()
    rig.tick()
    pid = rig.collector.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    rig.tick_until(lambda _: "helper-died" in rig.list_event_kinds())
    assert rig.seen[0][1] == {
        "collector": "gpu_nvidia",
        "signal": signal.SIGKILL,
        "devices": [],
        "calls": [],
    }
    values = rig.tick_until(lambda values: is_read(first(values)) and is_read(second(values)))
    assert len(values) == 2 * WIDTH
    assert rig.collector.pid != pid
    assert [kind for kind, _ in events_without_slow_calls(rig)] == [
        "helper-died",
        "helper-restarted",
    ]


def test_a_repeatedly_killed_helper_is_restarted_less_often(rig: IsolatedGpuRig) -> None:
    rig.collector.open()
    rig.tick()
    rests = []
    for kills in range(1, 5):
        assert rig.collector.pid is not None
        os.kill(rig.collector.pid, signal.SIGKILL)
        rig.tick_until(lambda _, n=kills: rig.list_event_kinds().count("helper-died") == n)
        rest = rig.collector._rest
        rests.append(rest._rest_ns // SECOND_NS)
        if rig.collector.pid is None:  # killed within the pause of the kill before
            rig.clock.shift_ns += rest.until_ns - rig.clock()
        rig.tick_until(lambda values: is_read(first(values)))
    assert rests == [1, 2, 4, 8]


def test_a_python_that_cannot_be_started_is_a_reason(tmp_path: Path) -> None:
    collector = IsolatedCollector(
        "gpu_nvidia",
        Context(Roots(), None, lambda: []),
        python=str(tmp_path / "python"),
        explain_absence=lambda environ: None,
    )
    with pytest.raises(Unavailable) as raised:
        collector.open()
    assert raised.value.kind == "failed"
    assert raised.value.message == f"cannot start {tmp_path}/python: No such file or directory"
