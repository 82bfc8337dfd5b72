"""Run one scenario under the real recorder, analyze the recording, and keep the ground
truth.

Only the accelerator is simulated: processes, disk reads, CPU time, recorder and
analysis are real.

It also compares the report with the injected ground truth, rank by rank, in points of step time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clusterprof.analysis.pipeline import analyze
from clusterprof.demo.rank import bound_duration_ns
from clusterprof.demo.scenarios import Scenario, find_scenario, require_real_disk, write_dataset
from clusterprof.errors import ClusterprofError, UsageError
from clusterprof.report.model import RankLedger, Report
from clusterprof.units import format_quantity

DATASET_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class RankTruth:
    """Ground truth of one rank."""

    rank: int
    steps: int
    in_step_ns: int
    idle_ns: int
    causes: Mapping[str, int]
    """Idle device time by injected cause; "other" = idle outside every wait."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """A finished demo: the report and the ground truth."""

    scenario: Scenario
    report: Report
    truth: tuple[RankTruth, ...]
    recording: Path


_LASTING = Path("/var/tmp")
"""Temporary files that outlive a restart are on a disk."""


def run_scenario(
    scenario_name: str, keep: Path | None = None, inject: str = "auto", steps: int = 0
) -> DemoResult:
    """Record and analyze one scenario; with `keep` the recording and the ground truth remain
    there.

    inject: as for `record`; with "off" the job is only observed from outside. steps: number
    of training steps; 0 = the scenario's own number.
    Raises: UsageError for an unknown scenario and for a `keep` that holds a recording;
    ClusterprofError when the workload failed or the working folder is in memory.
    """
    try:
        scenario = find_scenario(scenario_name, steps)
    except KeyError as error:
        raise UsageError(error.args[0], "clusterprof demo --scenario storage") from None
    with _open_working_folder(keep) as folder:
        recording = folder / "recording"
        if recording.exists():  # two runs in one recording would be analyzed as one job
            raise UsageError(f"{recording} already exists", "give --keep another folder")
        require_real_disk(folder.resolve(), _read_mounts())
        dataset = folder / "dataset.bin"
        write_dataset(dataset, DATASET_BYTES)
        _record_scenario(scenario, recording, dataset, inject)
        dataset.unlink()
        report = analyze(recording, history=True)
        return DemoResult(scenario, report, _read_truth(folder, scenario), recording)


@contextmanager
def _open_working_folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    folder = Path(tempfile.mkdtemp(prefix="clusterprof-demo-", dir=choose_temporary_folder()))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def choose_temporary_folder() -> Path:
    """Choose the folder for temporary files, or another one if that is in memory."""
    usual = Path(tempfile.gettempdir()).resolve()
    try:
        require_real_disk(usual, _read_mounts())
    except ClusterprofError:
        return _LASTING if os.access(_LASTING, os.W_OK) else usual
    return usual


def _read_mounts() -> str:
    return Path("/proc/self/mounts").read_text(encoding="utf-8")


def _record_scenario(scenario: Scenario, recording: Path, dataset: Path, inject: str) -> None:
    workload = ["clusterprof.demo.workload", scenario.name, str(scenario.steps)]
    workload += [str(dataset), str(dataset.parent)]
    command = [sys.executable, "-m", "clusterprof", "record", "-o", str(recording)]
    command += ["--inject", inject, "--"]
    command += [sys.executable, "-m", *workload]
    slowest_ns = max(bound_duration_ns(work, scenario) for work in scenario.ranks)
    try:
        completed = subprocess.run(command, timeout=slowest_ns / 1e9, check=False)
    except subprocess.TimeoutExpired:
        raise ClusterprofError(
            f"the workload did not finish within {slowest_ns // 10**9} s",
            "is the machine overloaded, or its disk stuck? try --scenario cpu",
        ) from None
    if completed.returncode != 0:
        raise ClusterprofError(f"the workload failed with exit status {completed.returncode}")


def _read_truth(folder: Path, scenario: Scenario) -> tuple[RankTruth, ...]:
    truth = []
    for rank in range(len(scenario.ranks)):
        values = json.loads((folder / f"truth-{rank}.json").read_text(encoding="utf-8"))
        truth.append(RankTruth(**values))
    return tuple(truth)


MIN_SHOWN_RATIO = 0.005  # smaller shares of step time in both columns are left out


def format_truth_comparison(result: DemoResult) -> str:
    """Format a table: cause, reported time, injected time, and the difference in points."""
    lines = [
        f"Ground truth of this run ({result.scenario.name}: {result.scenario.what}),",
        "from timers in the job and the log of the emulated device, not from the recording:",
        "",
        f"  {'rank':<5}{'cause':<20}{'report':>18}{'truth':>18}{'error':>14}",
    ]
    ledgers = {ledger.rank: ledger for ledger in result.report.ranks}
    for truth in result.truth:
        ledger = ledgers.get(truth.rank)
        if ledger is None:
            lines.append(f"  {truth.rank:<5}not in the report")
        else:
            lines.extend(_format_rank(ledger, truth))
    return "\n".join(lines) + "\n"


def _format_rank(ledger: RankLedger, truth: RankTruth) -> list[str]:
    reported = {cause: ns for cause, ns in ledger.buckets if cause != "unattributed"}
    true = {cause: ns for cause, ns in truth.causes.items() if cause != "other"}
    lines = []
    for cause in sorted(
        set(reported) | set(true), key=lambda c: -max(reported.get(c, 0), true.get(c, 0))
    ):
        pair = (reported.get(cause, 0), true.get(cause, 0))
        if max(pair) >= MIN_SHOWN_RATIO * truth.in_step_ns:
            lines.append(_format_row(truth.rank, cause, pair, ledger.in_step_ns, truth.in_step_ns))
    totals = (ledger.lost_ns, truth.idle_ns)
    lines.append(
        _format_row(truth.rank, "all lost time", totals, ledger.in_step_ns, truth.in_step_ns)
    )
    return lines


def _format_row(
    rank: int, cause: str, pair: tuple[int, int], report_in_step_ns: int, truth_in_step_ns: int
) -> str:
    reported_ratio = pair[0] / report_in_step_ns if report_in_step_ns > 0 else 0.0
    true = pair[1] / truth_in_step_ns if truth_in_step_ns > 0 else 0.0
    error = f"{100 * (reported_ratio - true):+.1f} points"
    reported, truth = _format_cell(pair[0], reported_ratio), _format_cell(pair[1], true)
    return f"  {rank:<5}{cause:<20}{reported:>18}{truth:>18}{error:>14}"


def _format_cell(ns: int, ratio: float) -> str:
    return f"{format_quantity(ns, 'ns')} {format_quantity(ratio, 'ratio'):>7}"
