"""Three deliberate faults in the attribution: does the score notice each of them?

    python -m clusterprof_lab.score.attribution_mutations [--runs DIR]

swap-causes       time blocked on a disk and time of compute of a thread are exchanged
longest-waiter    a wait is blamed on the rank that waited longest, not on the last to arrive
zero-gap          a device counts as idle where it was not sampled (samples are removed for this)

A fault is caught when one of `WATCHED` gets worse by more than both intervals allow. Exit status 1
when one is not caught.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from clusterprof.analysis.attribution.rank import chunk_boundary, claims, lost_time
from clusterprof.analysis.cross_rank import run_slices
from clusterprof.analysis.timeline.model import DataWaitBreakdown
from clusterprof_lab.scenario import Scenario, Trial, load_corpus
from clusterprof_lab.score.clusterprof_answer import TOOL, analyze_recording
from clusterprof_lab.score.figures import Figure
from clusterprof_lab.score.judge import judge_answer
from clusterprof_lab.score.metrics import JudgedRun, compute_score
from clusterprof_lab.score.plan import ScoredRun, list_stored_runs
from clusterprof_lab.score.rewrite import RemovedSignals, rewrite_recording
from clusterprof_lab.score.work import RECORDING, make_run
from clusterprof_lab.truth import read_truth

SCENARIOS = ("storage-io-cap", "cpu-heavy-transform", "sync-slow-rank", "null-clean")
SEEDS = 4
WATCHED: Mapping[str, int] = {
    "family_top1": 1,
    "leaf_top1": 1,
    "culprit_top1": 1,
    "bucket_error_active_mean": -1,
    "inversions": -1,
    "false_on_nulls": -1,
    "unattributed": -1,
    "conserved": 1,
}
"""Figure -> 1 when more is better, -1 when less is."""
GAPS = RemovedSignals("gaps", "3 of 10 s of the device's samples lost", device_gaps_s=(3, 10))
_LONG_GAP = 2.0  # windows longer than this many usual ones are gaps


def _swap_breakdown(feed: Callable[..., DataWaitBreakdown]) -> Callable[..., DataWaitBreakdown]:
    def feed_swapped(*given: Any) -> DataWaitBreakdown:
        breakdown = feed(*given)
        return replace(breakdown, block_io=breakdown.user_cpu, user_cpu=breakdown.block_io)

    return feed_swapped


def _blame_longest_waiter(settle: Callable[..., Any]) -> Callable[..., Any]:
    def settle_wrong(ops: Any, *more: Any) -> Any:
        blamed, carry = settle(ops, *more)
        size = np.diff(ops.first)
        op = np.repeat(np.arange(size.size), size)
        order = np.lexsort((-ops.blocked_ns, op))
        longest = ops.rank[order[ops.first[:-1]]]
        culprit = np.where(blamed.culprit >= 0, longest[op[blamed.row]], blamed.culprit)
        return replace(blamed, culprit=culprit), carry

    return settle_wrong


def _fill_gaps_with_zeros(windows: Callable[..., Any]) -> Callable[..., Any]:
    def with_zeros(rank: Any) -> Any:
        measured = windows(rank)
        if measured is None or not measured.start_ns.size:
            return measured
        length = measured.end_ns - measured.start_ns
        gap = length > _LONG_GAP * np.median(length)
        return replace(
            measured,
            idle_ns=np.where(gap, length, measured.idle_ns),
            slowed_ns=np.where(gap, 0, measured.slowed_ns),
        )

    return with_zeros


@contextmanager
def apply_mutation(fault: str) -> Iterator[None]:
    """Apply one fault to the attribution of this process while the context is open; "" applies
    none."""
    with ExitStack() as stack:
        if fault == "swap-causes":
            bad = _swap_breakdown(claims.split_data_wait)
            stack.enter_context(patch.object(claims, "split_data_wait", bad))
        elif fault == "longest-waiter":
            stack.enter_context(
                patch.object(
                    run_slices, "blame_waits", _blame_longest_waiter(run_slices.blame_waits)
                )
            )
        elif fault == "zero-gap":
            for module in (lost_time, chunk_boundary):
                bad = _fill_gaps_with_zeros(module.build_device_windows)
                stack.enter_context(patch.object(module, "build_device_windows", bad))
        elif fault:
            raise ValueError(f"no such fault: {fault!r}; there are {', '.join(FAULTS)}")
        yield


FAULTS = ("swap-causes", "longest-waiter", "zero-gap")


def list_worse_figures(sound: Mapping[str, Figure], bad: Mapping[str, Figure]) -> list[str]:
    """Return the watched figures that got worse beyond both intervals, in words."""
    out = []
    for name, sign in WATCHED.items():
        sound_figure, bad_figure = sound[name], bad[name]
        if sound_figure.value is None or bad_figure.value is None:
            continue
        sound_edge = sound_figure.low if sign > 0 else sound_figure.high
        bad_edge = bad_figure.high if sign > 0 else bad_figure.low
        sound_edge = sound_figure.value if sound_edge is None else sound_edge
        bad_edge = bad_figure.value if bad_edge is None else bad_edge
        if sign * (sound_edge - bad_edge) > 0:
            out.append(f"{name} {sound_figure.value:.3g} -> {bad_figure.value:.3g}")
    return out


def compute_figures(
    runs: Sequence[Path], corpus: Mapping[str, Scenario], fault: str, gaps: bool
) -> Mapping[str, Figure]:
    """Analyze runs with a fault held, and return the figures."""
    rows = []
    for folder in runs:
        truth = read_truth(folder)
        with tempfile.TemporaryDirectory(prefix="clusterprof-score-") as place:
            recording = folder / RECORDING
            if gaps:
                recording = rewrite_recording(recording, Path(place) / GAPS.name, GAPS)
            with apply_mutation(fault):
                answer = analyze_recording(recording)
        scenario = corpus[truth.scenario]
        judged = judge_answer(answer, truth, scenario.wanted)
        rows.append(
            JudgedRun(
                folder.name,
                scenario.id,
                scenario.group,
                truth.testbed,
                truth.severity,
                truth.seed,
                TOOL,
                "M0",
                None,
                judged,
            )
        )
    return compute_score(rows).figures


def main(argv: Sequence[str] | None = None) -> int:
    """Put each fault in and see whether the score moves; 1 when one goes unnoticed."""
    parser = argparse.ArgumentParser(prog="python -m clusterprof_lab.score.attribution_mutations")
    parser.add_argument("--runs", type=Path, help="runs that lie there, instead of a small slice")
    given = parser.parse_args(argv)
    corpus = {scenario.id: scenario for scenario in load_corpus()}
    with tempfile.TemporaryDirectory(prefix="clusterprof-score-") as place:
        runs = _make_runs(given.runs, Path(place), corpus)
        if not runs:
            print("sabotage: no runs to score", file=sys.stderr)
            return 2
        sound = {gaps: compute_figures(runs, corpus, "", gaps) for gaps in (False, True)}
        missed = 0
        for fault in FAULTS:
            gaps = fault == "zero-gap"
            moved = list_worse_figures(sound[gaps], compute_figures(runs, corpus, fault, gaps))
            missed += not moved
            print(f"{fault:<16} {'caught: ' + '; '.join(moved) if moved else 'NOT CAUGHT'}")
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} faults caught on {len(runs)} runs")
    return 1 if missed else 0


def _make_runs(folder: Path | None, place: Path, corpus: Mapping[str, Scenario]) -> list[Path]:
    if folder is not None:
        return [work.folder for work in list_stored_runs(folder, ("M0",), False) if work.folder]
    out = []
    for name in SCENARIOS:
        for seed in range(SEEDS if name in corpus else 0):
            work = ScoredRun("synth", Trial(corpus[name], "medium", seed, "dev"), None)
            folder, reason = make_run(work, place)
            if folder is None:
                print(f"sabotage: {work.name} was not run: {reason}", file=sys.stderr)
            else:
                out.append(folder)
    return out


if __name__ == "__main__":
    sys.exit(main())
