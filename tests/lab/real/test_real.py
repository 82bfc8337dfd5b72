"""`clusterprof-lab`: what can be run here, the device's queue, and one scenario for real."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from clusterprof_lab import truth
from clusterprof_lab.real.__main__ import main
from clusterprof_lab.real.fault_strength import AIMS as FAULTS
from clusterprof_lab.real.fault_strength import FaultAim, FaultOptions
from clusterprof_lab.real.launch import SCRIPT
from clusterprof_lab.real.layout import read_layout
from tests.support.job_python import require_torch
from tests.support.recording_runs import list_events

MS = 1_000_000
SCENARIO = """
id: {id}
group: cpu
title: t
what: w
truth: {{family: cpu, leaves: [cpu-gc], culprit: rank}}
lost: {{mild: [0.05, 0.1], medium: [0.3, 0.3], severe: [0.4, 0.6]}}
synth: {{fault: x}}
real: {real}
"""


def corpus(folder: Path, **real: str) -> list[str]:
    for name, section in real.items():
        (folder / f"{name}.yaml").write_text(SCENARIO.format(id=name, real=section))
    return ["--corpus", str(folder)]


def test_unavailable_scenarios_are_reported_and_do_not_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require_torch()
    options = corpus(tmp_path, never="null", unknown="{fault: moon-phase}", can="{fault: gc}")
    assert main([*options, "list"]) == 0
    reasons = {
        "never": "no real processes can make it: see its file",
        "unknown": "there is no fault 'moon-phase' yet",
    }
    values = dict(line.split(None, 2)[::2] for line in capsys.readouterr().out.splitlines())
    assert values == {"can": "ok", **{name: f"not run: {why}" for name, why in reasons.items()}}
    out = tmp_path / "out"
    run = ["run", "--scenario", *reasons, "--severity", "mild", "--seeds", "1", "--out", str(out)]
    assert main([*options, *run]) == 4
    assert json.loads((out / "not-run.json").read_text()) == {
        f"{name}.mild.dev0": why for name, why in reasons.items()
    }
    assert main([*options, "run", "--scenario", "nobody", "--out", str(out)]) == 2


def aim(culprits: list[int], world: int = 4, share: float = 0.2) -> FaultAim:
    return FaultAim(share, 120.0, world, culprits, np.random.default_rng(0))


def test_fault_options_match_the_aimed_share_and_ranks() -> None:
    assert aim([2]).stall_ms == pytest.approx(30)  # 30 of 150 is a fifth
    assert FAULTS["allocator-churn"](aim([2])) == FaultOptions(["--own", "2", "alloc-ms=30.0000"])
    assert FAULTS["gc"](aim([0, 1, 2, 3])).script == ["--gc-every=4", "--gc-ms=120.0000"]
    # Three of four wait for the late one: they lose a fifth of all time when it needs 4/15 more.
    lateness_ms = 120 * (4 / 15) / (11 / 15)
    assert FAULTS["slow-rank"](aim([1])).script == [
        "--own",
        "1",
        f"compute-ms={120 + lateness_ms:.4f}",
    ]
    [rate] = [link.rate_bits_per_second for link in FAULTS["rate-cap"](aim([])).links.values()]
    assert rate == round(4 * (1 << 20) * 8 / 0.030)


def test_the_training_script_accepts_every_fault_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import options as script

    for name, fault in FAULTS.items():
        words = fault(aim([2, 0])).script
        monkeypatch.setattr(sys, "argv", ["train.py", "--folder=x", *words])
        parsed = script.parse_options()
        for rank in range(4):
            assert script.apply_rank_options(parsed, rank) is parsed, name


def test_a_scenario_determines_the_job_layout() -> None:
    two = read_layout({"layout": "two-nodes", "ranks": 1, "script": {"chain": True, "steps": 9}})
    assert (two.nodes, two.world) == (2, 2)
    assert two.words == ("--collectives=device", "--chain", "--steps=9")
    assert read_layout({"collectives": "host"}).key == "0x2_collectives=host"


def test_work_queued_behind_a_collective_waits_for_the_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CLUSTERPROF_RUN_DIR", raising=False)
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from device import Device, Event

    device, transferred, reached = Device(16), threading.Event(), threading.Event()

    def transfer() -> None:
        reached.set()
        transferred.wait(10)

    before, after = Event(device), Event(device)
    device.submit(20 * MS)
    device.collective(transfer)
    before.record()  # on the stream of the computation, which the collective is not on
    device.join()
    after.record()
    device.submit(5 * MS)
    assert [row[2] for row in device.log] == ["compute"]  # the host has gone on
    assert reached.wait(10) and not after.query()
    time.sleep(0.03)
    transferred.set()
    device.synchronize()
    (start, end, *_), (come, left, what, _, number), (begun, done, *_) = device.log
    assert (end - start, what, number, done - begun) == (20 * MS, "collective", 0, 5 * MS)
    assert (come, begun) == (end, left)  # no gap: the device was never idle
    assert left - come >= 30 * MS
    assert before.elapsed_time(after) == (left - end) / MS
    assert device.accelerator.busy_ns(done) == done - start


@pytest.mark.torch
def test_a_scenario_runs_as_a_real_job(tmp_path: Path) -> None:
    """Two ranks, twelve steps, a rank that collects garbage: recorded, and accounted for."""
    require_torch()
    section = "{fault: gc, collectives: host, script: {steps: 12, compute-ms: 60}}"
    options, out = corpus(tmp_path, mine=section), tmp_path / "out"
    key = read_layout({"collectives": "host", "script": {"steps": 12, "compute-ms": 60}}).key
    (out / "clean").mkdir(parents=True)
    (out / "clean" / f"{key}.json").write_text('{"step_ns": 64000000.0}')  # spares a job
    assert main([*options, "run", "--severity", "medium", "--seeds", "1", "--out", str(out)]) == 0
    folder = out / "mine.medium.dev0"
    readings = truth.read_truth(folder)
    [fault] = readings.injected
    assert (fault.cause, readings.clean_step_ns) == ("cpu-gc", 64_000_000)
    assert [(place.rank, place.steps) for place in readings.places] == [(0, 12), (1, 12)]
    # 0.3 of the time would be 27 ms a step: a pause of 110 in every fourth, felt by both ranks.
    caused = {bucket.rank: bucket.ns for bucket in readings.lost if bucket.cause == "cpu-gc"}
    assert {bucket.culprit for bucket in readings.lost if bucket.cause == "cpu-gc"} == set(
        fault.culprits
    )
    assert set(caused) == {0, 1} and min(caused.values()) > 3 * 50 * MS
    assert sum(bucket.ns for bucket in readings.lost) < readings.in_step_ns
    ranks = [
        event.attributes["rank"]
        for event in list_events(folder / "recording", "process-registered")
    ]
    assert {0, 1} <= set(ranks)
