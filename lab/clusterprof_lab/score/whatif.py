"""`what if` against truth: the predicted gain of removing each fault beside the clean run.

python -m clusterprof_lab whatif --split dev --out DIR          synthetic jobs, made and analyzed
python -m clusterprof_lab whatif --runs DIR --out DIR           existing runs (real ones)
python -m clusterprof_lab whatif --paired DIR --out DIR         real jobs, the fault in turns
python -m clusterprof_lab whatif --store DIR/whatif.json        keep it for docs/what-if.md

The prediction is that of the findings that name the fault: its accepted leaves, or its family where
the leaves are less than half of the family's loss. The prediction of several findings is capped by
the gain of fixing everything. `net-transfer` beside another network finding is the time any
transfer takes, and not the fault. A fault that no finding names has a predicted gain of zero.
Points are hundredths of the time in steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Report
from clusterprof_lab.families import FAMILY_OF
from clusterprof_lab.scenario import SEVERITIES, Scenario, Split, Trial, load_corpus
from clusterprof_lab.score import paired
from clusterprof_lab.score.clean_runs import NoPairError, Pair, make_pairs
from clusterprof_lab.truth import FILE, Truth, read_truth

FORMAT, SCHEMA = "clusterprof-what-if", 1
WITHIN_POINTS = 3.0
TARGET_RATIO = 0.9
STRUCTURAL = "net-transfer"
RECORDING = "recording"
IN_TURNS = "real in turns"
"""The testbed of real jobs whose fault goes on and off (`real/paired.py`)."""


@dataclass(frozen=True, slots=True)
class ComparedFault:
    """One fault: the true gain of removing it and the predicted one, in points."""

    run: str
    scenario: str
    testbed: str
    severity: str
    how: str
    true: float
    said: float
    low: float | None
    high: float | None
    named: tuple[str, ...]
    """Findings the prediction is of; () when none names the fault."""
    stopwatch: float | None
    """Loss to the fault by the ledger of the truth."""
    error: float | None = None
    """Half of the 95 % interval of `true`; None = no noise, or unknown."""

    @property
    def is_conclusive(self) -> bool:
        """Whether the truth is sure enough to hold a prediction against it."""
        return self.error is None or self.error <= WITHIN_POINTS

    @property
    def off(self) -> float:
        """Prediction less truth."""
        return self.said - self.true

    @property
    def within(self) -> bool:
        """Whether the prediction is near enough."""
        return abs(self.off) <= WITHIN_POINTS


def compare_predictions(
    folder: Path, corpus: dict[str, Scenario]
) -> tuple[list[ComparedFault], str]:
    """Compare the predictions of a run's faults with the truth; return the reason if there is no
    truth."""
    truth = read_truth(folder)
    scenario = corpus.get(truth.scenario)
    if scenario is None:
        return [], f"no scenario {truth.scenario!r} in the corpus"
    try:
        pairs = list(make_pairs(truth, scenario))
    except NoPairError as error:
        return [], str(error)
    report = analyze(folder / RECORDING)
    return [_compare_fault(folder.name, report, truth, pair) for pair in pairs], ""


def _compare_fault(run: str, report: Report, truth: Truth, pair: Pair) -> ComparedFault:
    named, points, low, high = find_predicted_gain(report, pair)
    lost = sum(loss.ns for loss in truth.lost if loss.cause in pair.leaves)
    stopwatch = 100.0 * lost / truth.in_step_ns if truth.in_step_ns else None
    return ComparedFault(
        run,
        truth.scenario,
        truth.testbed,
        truth.severity,
        pair.how,
        pair.gain_points(truth),
        points,
        low,
        high,
        named,
        stopwatch,
    )


def compare_turns(folder: Path, corpus: dict[str, Scenario]) -> tuple[list[ComparedFault], str]:
    """Compare as `compare_predictions` for a real job whose fault was switched on and off."""
    job = paired.read_document(folder)
    if job["scenario"] not in corpus:
        return [], f"no scenario {job['scenario']!r} in the corpus"
    turns, pair = paired.read_turns(folder), paired.make_pair(job, corpus)
    truth = paired.compute_truth(turns)
    named, points = paired.find_predictions(folder, turns, pair)
    return [
        ComparedFault(
            folder.name,
            job["scenario"],
            IN_TURNS,
            job["severity"],
            pair.how,
            truth.points,
            points,
            None,
            None,
            named,
            None,
            truth.error,
        )
    ], ""


def find_predicted_gain(
    report: Report, pair: Pair
) -> tuple[tuple[str, ...], float, float | None, float | None]:
    """Return the findings that name a fault, and the gain of fixing them with its bounds."""
    job_impact = report.impact
    if job_impact is None or not job_impact.job_ns:
        return (), 0.0, None, None
    inside = [cause for cause in job_impact.causes if not cause.outside_steps]
    matching = [cause for cause in inside if cause.cause in pair.leaves]
    family = [cause for cause in inside if FAMILY_OF.get(cause.cause, cause.cause) == pair.family]
    if not matching or 2 * sum(cause.lost_ns for cause in matching) < sum(
        cause.lost_ns for cause in family
    ):
        matching = family  # another name for most of it: what it is worth was asked, not what it is
    matching = [cause for cause in matching if cause.cause != STRUCTURAL] or matching
    with_savings = [cause for cause in matching if cause.saved_ns is not None]
    points = 100.0 / job_impact.job_ns
    ns = sum(cause.saved_ns or 0 for cause in with_savings)
    if len(with_savings) > 1 and job_impact.saved_ns is not None:
        ns = min(ns, job_impact.saved_ns)
    low = high = None
    if (
        len(with_savings) == 1
        and with_savings[0].saved_low_ns is not None
        and with_savings[0].saved_high_ns is not None
    ):
        low, high = with_savings[0].saved_low_ns * points, with_savings[0].saved_high_ns * points
    return tuple(cause.cause for cause in with_savings), ns * points, low, high


def _compare_trial(
    trial: Trial, corpus: dict[str, Scenario]
) -> tuple[str, list[ComparedFault], str]:
    from clusterprof_lab.synth.make import make_trial

    with tempfile.TemporaryDirectory(prefix="clusterprof-whatif-") as name:
        folder = Path(name) / trial.name
        make_trial(trial, folder)
        return (trial.name, *compare_predictions(folder, corpus))


def _compare_run(folder: Path, corpus: dict[str, Scenario]) -> tuple[str, list[ComparedFault], str]:
    return (folder.name, *compare_predictions(folder, corpus))


def _compare_turns(
    folder: Path, corpus: dict[str, Scenario]
) -> tuple[str, list[ComparedFault], str]:
    return (folder.name, *compare_turns(folder, corpus))


def make_document(faults: Sequence[ComparedFault], split: str) -> dict[str, Any]:
    """Return all of it as plain values; of the split test only the sums are for looking at."""
    rows = [
        {**asdict(fault), "off": fault.off, "within": fault.within, "told": fault.is_conclusive}
        for fault in faults
    ]
    for row in rows:
        row.update({k: round(v, 3) for k, v in row.items() if isinstance(v, float)})
    return {"format": FORMAT, "schema": SCHEMA, "split": split, "faults": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Hold predictions against truth; 0 when the target is met, 1 when it is not, 2 for nothing."""
    given = _parse_arguments().parse_args(argv)
    if given.store is not None:
        from clusterprof_lab.score.whatif_page import store_results

        print(f"stored {store_results(given.store).name}; now `make docs`")
        return 0
    corpus = {scenario.id: scenario for scenario in load_corpus()}
    if given.paired is not None:
        work: list[Any] = sorted({path.parent for path in given.paired.glob(f"*/{paired.FILE}")})
        compare = partial(_compare_turns, corpus=corpus)
    elif given.runs is not None:
        work = sorted({path.parent for path in given.runs.rglob(FILE)})
        compare = partial(_compare_run, corpus=corpus)
    else:
        work = _list_trials(corpus, given)
        compare = partial(_compare_trial, corpus=corpus)
    faults: list[ComparedFault] = []
    with get_context("spawn").Pool(max(1, min(given.jobs, len(work) or 1))) as pool:
        for number, (name, run_faults, why) in enumerate(pool.imap(compare, work), 1):
            faults += run_faults
            if why and (given.runs is not None or given.paired is not None):
                print(f"{name}: left out: {why}", file=sys.stderr)
            for each in run_faults:
                if not each.within and given.split == "dev":
                    print(f"{_format_line(each)}", file=sys.stderr)
            if number % 20 == 0 or number == len(work):
                print(f"{number} of {len(work)} runs", file=sys.stderr)
    if not faults:
        print("whatif: nothing to hold a prediction against", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "whatif.json"
    path.write_text(
        json.dumps(make_document(faults, given.split), indent=1) + "\n", encoding="utf-8"
    )
    conclusive = [fault for fault in faults if fault.is_conclusive]
    right = sum(fault.within for fault in conclusive)
    ratio = right / max(len(conclusive), 1)
    print(
        f"{right} of {len(conclusive)} faults ({ratio:.1%}) within {WITHIN_POINTS:g} points"
        f" of their clean run; target {TARGET_RATIO:.0%}; every fault in {path}"
    )
    for fault in (fault for fault in faults if not fault.is_conclusive):
        print(f"cannot tell: {fault.run}: its truth is {fault.true:.1f} ± {fault.error:.1f} points")
    return 0 if conclusive and right >= TARGET_RATIO * len(conclusive) else 1


def _format_line(fault: ComparedFault) -> str:
    causes = ", ".join(fault.named) or "nothing"
    true = f"{fault.true:.1f}" if fault.error is None else f"{fault.true:.1f} ± {fault.error:.1f}"
    return f"{fault.run}: {true} points true, {fault.said:.1f} said of {causes} ({fault.off:+.1f})"


def _list_trials(corpus: dict[str, Scenario], given: argparse.Namespace) -> list[Trial]:
    names = [name for name in given.only.split(",") if name] or list(corpus)
    return [
        Trial(corpus[name], severity, seed, given.split)
        for name in names
        if corpus[name].synth is not None
        and corpus[name].wanted.family
        and not corpus[name].wanted.outside_steps
        for severity in given.severity or SEVERITIES
        for seed in range(given.seeds)
    ]


def _parse_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m clusterprof_lab whatif",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--split", choices=get_args(Split), default="dev")
    parser.add_argument("--severity", choices=SEVERITIES, action="append", help="(default: all)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 0 to N - 1")
    parser.add_argument("--only", default="", help="scenarios, by comma")
    parser.add_argument("--runs", type=Path, help="hold the runs under this folder against truth")
    parser.add_argument("--paired", type=Path, help="the same of jobs with the fault in turns")
    parser.add_argument("--out", type=Path, default=Path("whatif"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--store", type=Path, metavar="WHATIF.json", help="keep it for the docs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
