"""One of two GPUs hangs, crashes its driver or falls off the bus while a real job is recorded."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from clusterprof.trace.schema import Columns, Gap, Record, Rows
from tests.support.nvml.simulated import Scenario, build_library, make_uuid
from tests.support.nvml.simulated import make_environment as nvml_environment
from tests.support.recording_runs import (
    RECORD,
    find_recorder_pid,
    is_alive,
    list_counter_options,
    list_events,
    make_environment,
    make_job_id,
    read_records,
    wait_until,
)

TICK_NS = 100_000_000
TROUBLE_S = 3.0

TROUBLES = {
    "hangs": ("0 * hang", "collector-hung"),
    "crashes": ("0 GetPowerUsage segv", "helper-died"),
    "is lost": ("0 * error 15", ""),
}


def now() -> int:
    return time.monotonic_ns()


def times_of(records: list[Record], collector: str) -> set[int]:
    """Return when a collector's rows were taken."""
    collected: set[int] = set()
    for record in records:
        if isinstance(record, Columns) and record.collector == collector:
            collected |= {int(t) for t in record.t_ns}
        elif isinstance(record, Rows) and record.table == collector:
            collected |= {int(t) for t in record.columns[0]}
    return collected


def times_of_device(records: list[Record], device: str) -> set[int]:
    """Return when every value of a device was there."""
    collected: set[int] = set()
    for record in records:
        if (
            isinstance(record, Columns)
            and record.collector == "gpu_nvidia"
            and device in record.devices
        ):
            masks = [mask for name, mask in zip(record.devices, record.masks) if name == device]
            for row, t in enumerate(record.t_ns):
                if not any(mask is not None and mask[row] for mask in masks):
                    collected.add(int(t))
    return collected


def find_gaps(records: list[Record], began_ns: int) -> set[str]:
    """Return the GPUs that could not be read at some time since then."""
    return {
        gap.device
        for gap in records
        if isinstance(gap, Gap) and gap.t_ns >= began_ns and gap.collector == "gpu_nvidia"
    }


def enough(times: set[int], began_ns: int, ended_ns: int, tick_ns: float = TICK_NS) -> bool:
    """Return whether a third of the ticks between two times were taken.

    A machine with other work may cost some; a loop that waits for a driver takes one in ten.
    """
    inside = [t for t in times if began_ns <= t <= ended_ns]
    return len(inside) >= (ended_ns - began_ns) / tick_ns / 3


def measure_tick_ns(out: Path) -> float:
    """Wait for ten ticks; return how far apart they are, more than asked for on a busy machine."""
    times = sorted(wait_until(lambda: len(t := times_of(read_records(out), "cpu")) > 10 and t))
    return max(TICK_NS, (times[-1] - times[0]) / (len(times) - 1))


@pytest.mark.parametrize(("line", "event"), TROUBLES.values(), ids=TROUBLES.keys())
def test_a_failing_gpu_leaves_gaps_only_for_itself(line: str, event: str, tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "scenario", devices=2, gpm=True)
    nvml = nvml_environment(build_library(tmp_path / "lib"), scenario)
    own = {name: nvml[name] for name in ("LD_LIBRARY_PATH", "FAKENVML_CTL")}
    job, out = make_job_id("gpu"), tmp_path / "out"
    profile = list_counter_options(tmp_path)
    process = subprocess.Popen(
        [*RECORD, "-o", str(out), *profile, "--inject", "off", "--", "/bin/sleep", "60"],
        env=make_environment(job, **own),
    )
    wait_until(lambda: out.exists() and times_of_device(read_records(out), make_uuid(0)))
    agent, tick_ns = find_recorder_pid(job), measure_tick_ns(out)
    began_ns = now()  # before: the gap may come at once
    scenario.write(line)
    time.sleep(TROUBLE_S)
    if event == "helper-died":  # both were in the process that died: one of them comes back
        died, *_ = wait_until(lambda: list_events(out, event))
        wait_until(lambda: max(times_of_device(read_records(out), make_uuid(1))) > died.t_ns)
    wait_until(lambda: make_uuid(0) in find_gaps(read_records(out), began_ns))
    # In the end, should the machine have been busy with other work for a while.
    wait_until(lambda: enough(times_of(read_records(out), "cpu"), began_ns, now(), tick_ns))
    ended_ns = now()
    process.terminate()
    process.wait()
    wait_until(lambda: not is_alive(agent))  # whatever the driver still holds up
    scenario.write()

    records = read_records(out)
    others = {name: times_of(records, name) for name in ("cpu", "pressure", "disk", "threads")}
    seen = {name for name, times in others.items() if times}  # not every kernel has them all
    assert {"cpu", "threads"} <= seen
    for name in seen:
        assert enough(others[name], began_ns, ended_ns, tick_ns), name
    assert not enough(
        times_of_device(records, make_uuid(0)), began_ns, ended_ns, tick_ns
    )  # in trouble
    healthy = times_of_device(records, make_uuid(1))
    if event != "helper-died":
        assert enough(healthy, began_ns, ended_ns, tick_ns)
    if event:
        assert list_events(out, event)
    gaps = find_gaps(records, began_ns)
    assert make_uuid(0) in gaps
    if event != "helper-died":
        assert gaps == {make_uuid(0)}
