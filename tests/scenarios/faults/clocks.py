"""The wall clock steps while a job is recorded; sample times and durations do not."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

from clusterprof.analysis.pipeline import analyze
from clusterprof.trace.schema import Clock, Spans
from tests.scenarios.faults.model import Fault, Trial
from tests.scenarios.faults.rig import (
    RecordedJob,
    fail_calls,
    list_times,
    read_recording,
    wait_until_gone,
)
from tests.support.recording_runs import wait_until

HOUR_NS = 3600 * 10**9
SHIFTS_NS = (HOUR_NS, -HOUR_NS, 10**9, -(10**9), 37 * 10**9, -400 * 24 * HOUR_NS)
LOGGED_AT_MOST_S = 11.0
"""The clocks are read together every 10 s."""
TOLERANCE_NS = 50_000_000


def step_clock(folder: Path, number: int) -> Trial:
    """Step the recorder's wall clock by up to 400 days, once or back and forth."""
    draw = random.Random(number)
    shift_ns = SHIFTS_NS[number % len(SHIFTS_NS)]
    page = folder / "shift"
    page.write_bytes(struct.pack("<q", 0))
    variables = fail_calls(folder, CLOCK_SHIFT=page)
    with RecordedJob(folder, number, **variables) as job:
        job.wait_for_rings()
        agent = job.find_recorder()
        time.sleep(draw.uniform(0.2, 2.0))
        with page.open("r+b") as file:
            file.write(struct.pack("<q", shift_ns))
        stepped_ns = time.monotonic_ns()
        wait_until(lambda: find_step(_read_clocks(job.out), shift_ns), 2 * LOGGED_AT_MOST_S)
        job.end()
        wait_until_gone(agent)
    records, _ = read_recording(job.out)
    logged = find_step([record for record in records if isinstance(record, Clock)], shift_ns)
    assert logged is not None
    logged_s = (logged.monotonic_ns - stepped_ns) / 1e9
    assert logged_s <= LOGGED_AT_MOST_S, f"logged after {logged_s:.1f} s"
    times = list_times(records)
    assert times == sorted(times), "samples go back in time"
    spans = [record.columns for record in records if isinstance(record, Spans)]
    assert all((columns["end_ns"] >= columns["start_ns"]).all() for columns in spans)
    assert analyze(job.out).nodes
    return Trial(0.0, facts={"logged after, s": round(logged_s, 1)})


def _read_clocks(out: Path) -> list[Clock]:
    return [record for record in read_recording(out)[0] if isinstance(record, Clock)]


def find_step(clocks: list[Clock], shift_ns: int) -> Clock | None:
    """Return the first reading of the clocks after a step of the wall clock."""
    began_ns = clocks[0].realtime_ns - clocks[0].monotonic_ns
    for clock in clocks[1:]:
        if abs(clock.realtime_ns - clock.monotonic_ns - began_ns - shift_ns) <= TOLERANCE_NS:
            return clock
    return None


FAULTS = (
    Fault(
        "clock-step",
        "the wall clock steps: ±1 s, ±1 h, 37 s, 400 days back",
        "a library loaded with LD_PRELOAD shifts CLOCK_REALTIME of the recorder",
        step_clock,
        12,
        300,
        "ns of negative durations",
        at_once=6,
    ),
)
