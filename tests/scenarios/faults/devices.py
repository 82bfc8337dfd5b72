"""A driver that hangs, crashes, fails or lies about one of two devices."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from clusterprof.analysis.pipeline import analyze
from clusterprof.errors import DEVICES_RELEASED
from clusterprof.trace.schema import Columns, Event, Gap, Record
from tests.scenarios.faults.model import Fault, Trial
from tests.scenarios.faults.rig import (
    RecordedJob,
    draw_pause,
    list_children,
    list_times,
    read_recording,
    simulate_driver,
    wait_until_gone,
)
from tests.support.nvml.simulated import make_uuid
from tests.support.recording_runs import is_alive, list_events, wait_until

TROUBLE_S = 2.5
TICK_NS = 100_000_000
GONE_AT_MOST_S = 2.0
CALLS = ("*", "GetPowerUsage", "GetUtilizationRates", "GetTemperature", "GetMemoryInfo")
CRASHES = ("GetPowerUsage segv", "GetUtilizationRates segv", "GetMemoryInfo segv")
LIES = (
    "0 GetUtilizationRates = 4294967295 4294967295",
    "0 GetUtilizationRates = 250 300",
    "0 GetSamples = 0:0",
    "0 GetSamples = 0:4294967295",
    "0 GetPowerUsage = 4294967295",
    "0 GetPowerUsage = 0",
    "0 GetTotalEnergyConsumption = 1",
    "0 GetTotalEnergyConsumption = 18446744073709551615",
    "0 GetMemoryInfo = 18446744073709551615 85899345920",
    "0 GetMemoryInfo = 85899345920 0",
    "0 GetClockInfo:SM = 4294967295",
    "0 GetTemperature = 4294967295",
    "0 GetPcieThroughput:RX = 4294967295",
    "0 GetCurrPcieLinkWidth = 0",
    "0 GetMaxClockInfo:SM = 0",
    "0 GetComputeRunningProcesses = 4294967295:18446744073709551615",
)
MAX_WATTS = 100_000.0
RELEASED_AT_MOST_S = 2.0
RELEASE_TROUBLES = ("", "* GetPowerUsage slow 400000", "", "0 GetPowerUsage hang")
"""What the driver does at that moment: nothing, a slow call, a call that does not return."""


def hang_driver(folder: Path, number: int) -> Trial:
    """Let the calls for one device hang for ever; the rest goes on."""
    call = CALLS[number % len(CALLS)]
    return _disturb(folder, number, f"0 {call} hang", "collector-hung")


def crash_driver(folder: Path, number: int) -> Trial:
    """Let the calls for one device crash the process that makes them."""
    return _disturb(folder, number, f"0 {CRASHES[number % len(CRASHES)]}", "helper-died")


def lose_device(folder: Path, number: int) -> Trial:
    """Let all calls for one device fail: lost, unknown error, not supported, timeout."""
    code = (15, 999, 3, 10, 16, 17)[number % 6]
    return _disturb(folder, number, f"0 * error {code}", "")


def _disturb(folder: Path, number: int, line: str, event: str) -> Trial:
    """Disturb one device for a while; return the share of the other's samples that was lost."""
    scenario, variables = simulate_driver(folder)
    with RecordedJob(folder, number, **variables) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        wait_until(lambda: list_times(read_recording(job.out)[0], "gpu_nvidia"))
        time.sleep(draw_pause(number, 0, 1.0))
        began_ns = time.monotonic_ns()
        scenario.write(line)
        time.sleep(TROUBLE_S)
        ended_ns = time.monotonic_ns()
        assert is_alive(agent)
        if event:
            wait_until(lambda: list_events(job.out, event))
        helpers = list_children(agent)
        assert len(helpers) <= 2, f"{len(helpers)} helpers"
        job.end()
        gone_s = wait_until_gone(agent)
        scenario.write()
    records, reader = read_recording(job.out)
    assert reader.damage.damaged_places == 0
    assert gone_s <= GONE_AT_MOST_S, f"the recorder was there {gone_s:.1f} s after the job"
    ticks = (ended_ns - began_ns) / TICK_NS
    cpu = [t for t in list_times(records) if began_ns <= t <= ended_ns]
    assert len(cpu) >= ticks / 3, f"{len(cpu)} of {ticks:.0f} samples of the CPUs"
    healthy = [t for t in list_device_times(records, make_uuid(1)) if began_ns <= t <= ended_ns]
    assert len(healthy) >= ticks / 3, f"{len(healthy)} of {ticks:.0f} samples of the other GPU"
    if not event:  # each call failed at once, and its error is the reason
        gaps = [r for r in records if isinstance(r, Gap) and r.device == make_uuid(0)]
        assert gaps and not any("no answer for" in gap.message for gap in gaps), gaps[:2]
    lost_percent = 100 * max(0.0, 1 - len(set(healthy)) / ticks)
    return Trial(round(lost_percent, 1), facts={"recorder gone after, s": round(gone_s, 2)})


def list_device_times(records: list[Record], device: str) -> list[int]:
    """Return when any value of a device was there, ns."""
    times: list[int] = []
    for record in records:
        if not isinstance(record, Columns) or record.collector != "gpu_nvidia":
            continue
        masks = [mask for name, mask in zip(record.devices, record.masks) if name == device]
        times += [
            int(t)
            for row, t in enumerate(record.t_ns)
            if any(mask is None or not mask[row] for mask in masks)
        ]
    return times


def lie_about_device(folder: Path, number: int) -> Trial:
    """Let the driver answer with values that cannot be; none is recorded as a measurement."""
    scenario, variables = simulate_driver(folder)
    draw = random.Random(number)
    lies = {LIES[number % len(LIES)], draw.choice(LIES)}
    with RecordedJob(folder, number, **variables) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        wait_until(lambda: list_times(read_recording(job.out)[0], "gpu_nvidia"))
        scenario.write(*lies)
        time.sleep(TROUBLE_S)
        job.end()
        wait_until_gone(agent)
    records, _ = read_recording(job.out)
    wrong = [value for record in records for value in find_impossible(record)]
    assert not wrong, f"{sorted(lies)}: {wrong[:3]}"
    report = analyze(job.out)
    assert report.nodes
    return Trial(float(len(wrong)), injected=len(lies))


def find_impossible(record: Record) -> list[str]:
    """Return the values of GPU columns that no device can have."""
    if not isinstance(record, Columns) or record.collector != "gpu_nvidia":
        return []
    wrong = []
    for name, values, mask in zip(record.signals, record.values, record.masks):
        present = np.asarray(values, dtype=np.float64)
        if mask is not None:
            present = present[np.frombuffer(mask, np.uint8) == 0]
        if not len(present):
            continue
        low, high = float(present.min()), float(present.max())
        most = float("inf")
        if name.endswith("_ratio"):
            most = 1.0
        elif name.endswith("_watts"):
            most = MAX_WATTS
        if low < 0 or high > most or not np.isfinite(present).all():
            wrong.append(f"{name} {low:g} to {high:g}")
    return wrong


def release_devices(folder: Path, number: int) -> Trial:
    """Ask the recorder to let go of its devices, and later to open them again."""
    scenario, variables = simulate_driver(folder)
    device = folder / "nvidia0"
    device.touch()
    trouble = RELEASE_TROUBLES[number % len(RELEASE_TROUBLES)]
    with RecordedJob(folder, number, FAKENVML_DEVICE=str(device), **variables) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        wait_until(lambda: list_times(read_recording(job.out)[0], "gpu_nvidia"))
        time.sleep(draw_pause(number, 0, 1.0))
        scenario.write(trouble)
        time.sleep(0.3)  # so that a call is under way
        (helper,) = list_holders(device)
        began_s = time.monotonic()
        os.kill(agent, signal.SIGUSR2)
        if "hang" in trouble:
            time.sleep(TROUBLE_S)
            assert list_holders(device) == [helper], "a helper inside a driver call has ended"
            wait_until(lambda: list_events(job.out, "devices-still-held"))
            scenario.write()
            began_s = time.monotonic()  # from here on nothing keeps it
        wait_until_released(device)
        took_s = time.monotonic() - began_s
        end_s = time.monotonic() + TROUBLE_S
        while time.monotonic() < end_s:
            assert not list_holders(device), "a device was opened again without a second signal"
            time.sleep(0.02)
        os.kill(agent, signal.SIGUSR2)
        (resumed,) = wait_until(lambda: list_events(job.out, "devices-resumed"))
        wait_until(lambda: is_read_again(job.out, resumed.t_ns))
        job.end()
        wait_until_gone(agent)
    check_release(job.out)
    assert took_s <= RELEASED_AT_MOST_S, f"the device was held for {took_s:.1f} s"
    return Trial(round(took_s, 2))


def is_read_again(out: Path, since_ns: int) -> bool:
    """Return whether both devices have been read since then."""
    records, _ = read_recording(out)
    return all(max(list_device_times(records, make_uuid(n))) > since_ns for n in (0, 1))


def list_holders(device: Path) -> list[int]:
    """Return the processes that have a file open, as `fuser` does."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            if str(device) in [os.readlink(link) for link in (process / "fd").iterdir()]:
                pids.append(int(process.name))
    return sorted(pids)


def wait_until_released(device: Path) -> None:
    """Wait until no process has the device open."""
    try:
        wait_until(lambda: not list_holders(device))
    except AssertionError:
        raise AssertionError("the device stayed open") from None


def check_release(out: Path) -> None:
    """Check that released devices have no values and a reason, and that all else goes on."""
    records, _ = read_recording(out)
    times = {event.kind: event.t_ns for event in records if isinstance(event, Event)}
    began_ns, ended_ns = times["devices-released"], times["devices-resumed"]
    ticks = (ended_ns - began_ns) / TICK_NS
    cpu = [t for t in list_times(records) if began_ns <= t < ended_ns]
    assert len(cpu) >= ticks / 3, f"{len(cpu)} of {ticks:.0f} samples of the CPUs"
    gaps = {
        (gap.collector, gap.message)
        for gap in records
        if isinstance(gap, Gap) and began_ns <= gap.t_ns < ended_ns
    }
    assert gaps == {("gpu_nvidia", DEVICES_RELEASED.message)}, f"gaps meanwhile: {sorted(gaps)}"
    for index in (0, 1):
        sampled = list_device_times(records, make_uuid(index))
        inside = [t for t in sampled if began_ns < t < ended_ns]
        assert not inside, f"{len(inside)} samples of a device that was released"
        assert max(sampled) > ended_ns, "no sample of a device that was opened again"
    messages = [gap.message for gap in analyze(out).coverage_gaps if gap.what == "gpu_nvidia"]
    is_reported = [text.startswith(f"{DEVICES_RELEASED.message} from ") for text in messages]
    assert is_reported == [True], f"the report states: {messages}"


FAULTS = (
    Fault(
        "driver-hangs",
        "the driver hangs for one of two GPUs",
        "a simulated NVML library, switched at a random moment",
        hang_driver,
        15,
        200,
        "% of the other GPU's samples",
        at_once=4,
    ),
    Fault(
        "driver-crashes",
        "the driver crashes the process that asks it",
        "a simulated NVML library: SIGSEGV in a call",
        crash_driver,
        15,
        200,
        "% of the other GPU's samples",
        at_once=4,
    ),
    Fault(
        "device-lost",
        "one of two GPUs is lost, not supported or times out",
        "a simulated NVML library returns the error for every call",
        lose_device,
        18,
        200,
        "% of the other GPU's samples",
        at_once=4,
    ),
    Fault(
        "driver-lies",
        "the driver returns values that no device can have",
        f"a simulated NVML library, {len(LIES)} lies",
        lie_about_device,
        len(LIES),
        200,
        "impossible values recorded",
        "lies",
        at_once=4,
    ),
    Fault(
        "device-release",
        "a user asks the recorder to release the GPUs, and later to open them again",
        "SIGUSR2 at a random moment, also while a driver call is slow or hangs",
        release_devices,
        16,
        200,
        "s until no process of ours had a device open",
        at_once=2,
    ),
)
