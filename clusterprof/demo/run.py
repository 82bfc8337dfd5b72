"""Run one scenario under the real recorder, analyse the recording, keep the injected truth.

Nothing here is simulated but the accelerator: real processes, real reads from the disk, real CPU
time, the recorder and the analysis that users run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clusterprof.demo.faults import require_real_disk, write_dataset
from clusterprof.demo.rank import worst_case_ns
from clusterprof.demo.scenarios import Scenario, scenario_named
from clusterprof.engine.local import analyze
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.findings import Report

DATASET_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class RankTruth:
    """What the injector knows of one rank."""

    rank: int
    steps: int
    in_step_ns: int
    idle_ns: int
    causes: Mapping[str, int]
    """Idle device time by injected cause; "other" = idle outside every wait."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A finished demo: what the tool says, and what was true."""

    scenario: Scenario
    report: Report
    truth: tuple[RankTruth, ...]
    recording: Path


def run(
    scenario_name: str, keep: Path | None = None, inject: str = "auto", steps: int = 0
) -> DemoResult:
    """Record and analyse one scenario; with `keep` the recording and truth stay there.

    `inject` is that of `record`: with "off" the job is seen from outside only. `steps`: how many
    the job trains; 0 = the scenario's own number.
    Raises UsageError for an unknown scenario and for a `keep` that holds a recording, and
    ClusterprofError when the workload failed or the working folder lies in memory.
    """
    try:
        scenario = scenario_named(scenario_name, steps)
    except KeyError as error:
        raise UsageError(error.args[0], "clusterprof demo --scenario storage") from None
    with _working_folder(keep) as folder:
        require_real_disk(folder.resolve(), Path("/proc/self/mounts").read_text(encoding="utf-8"))
        recording = folder / "recording"
        if recording.exists():  # two runs in one recording would be analysed as one job
            raise UsageError(f"{recording} is there already", "give --keep another folder")
        dataset = folder / "dataset.bin"
        write_dataset(dataset, DATASET_BYTES)
        _record(scenario, recording, dataset, inject)
        dataset.unlink()
        report = analyze(recording, history=True)
        return DemoResult(scenario, report, _read_truth(folder, scenario), recording)


@contextmanager
def _working_folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    folder = Path(tempfile.mkdtemp(prefix="clusterprof-demo-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _record(scenario: Scenario, recording: Path, dataset: Path, inject: str) -> None:
    workload = ["clusterprof.demo.workload", scenario.name, str(scenario.steps)]
    workload += [str(dataset), str(dataset.parent)]
    command = [sys.executable, "-m", "clusterprof", "record", "-o", str(recording)]
    command += ["--inject", inject, "--"]
    command += [sys.executable, "-m", *workload]
    slowest_ns = max(worst_case_ns(work, scenario) for work in scenario.ranks)
    try:
        done = subprocess.run(command, timeout=slowest_ns / 1e9, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterprofError(
            f"the workload did not end within {slowest_ns // 10**9} s",
            "is the machine overloaded, or its disk stuck? try --scenario cpu",
        ) from None
    if done.returncode != 0:
        raise ClusterprofError(f"the workload failed with exit status {done.returncode}")


def _read_truth(folder: Path, scenario: Scenario) -> tuple[RankTruth, ...]:
    truth = []
    for rank in range(len(scenario.ranks)):
        values = json.loads((folder / f"truth-{rank}.json").read_text(encoding="utf-8"))
        truth.append(RankTruth(**values))
    return tuple(truth)
