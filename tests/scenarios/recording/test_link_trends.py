"""A real recording of GPUs whose links get worse, by the simulated NVML library."""

from __future__ import annotations

import subprocess
from pathlib import Path

from clusterprof.analysis.pipeline import analyze
from tests.support.nvml.simulated import Scenario, build_library, make_environment, make_uuid
from tests.support.recording_runs import PYTHON, RECORD, wait_for_end

# Every second the second GPU has sent 5 packets more again.
JOB = """
import os, sys, time
path, count = sys.argv[1], 2
for second in range(6):
    time.sleep(1)
    count += 5
    with open(path) as file:
        text = file.read()
    with open(path + ".new", "w") as file:
        file.write(text + "1 GetPcieReplayCounter = %d\\n" % count)
    os.replace(path + ".new", path)
"""


def test_pcie_replays_and_width_are_reported_for_the_affected_gpu(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path / "scenario")
    scenario.write("0 GetCurrPcieLinkWidth = 8")
    variables = make_environment(build_library(tmp_path / "library"), scenario)
    out = tmp_path / "run"
    job = [PYTHON, "-c", JOB, str(scenario.path)]
    subprocess.run([*RECORD, "-o", str(out), "--", *job], env=variables, timeout=60, check=True)
    wait_for_end(out)
    notes = [note for note in analyze(out).notes if "PCIe link" in note]
    narrow, replays = sorted(notes, key=lambda note: "replay" in note or "again" in note)
    assert f"the PCIe link of {make_uuid(0)} has 8 lanes at most, not 16 lanes: " in narrow
    assert f"the PCIe link of {make_uuid(1)}: " in replays
    assert "packets sent again" in replays and "(NVIDIA's limit is 8)" in replays
