"""How reliable is the gate? Repeated runs of the same jobs, clean and with a planted regression.

    python -m clusterprof_lab.repeats [--jobs 3] [--runs 20] [--steps 120] [--baselines 5]
                                      [--jitter 0.1]

Each job is simulated and recorded many times. Its layout and times stay the same; random numbers
are drawn anew, and compute varies from run to run by up to 1 % (standard deviation 0.3 %). Some
runs are baselines. Half of the others are clean; in the other half the loaders of every node read
from a slow disk, which makes a step 5 % longer. Exits with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from clusterprof.analysis.pipeline import analyze
from clusterprof.gate import Policy, judge_runs, parse_any_rule
from clusterprof.gate.compare import compare_runs
from clusterprof.report.model import Report
from clusterprof_lab.scenario import Trial, load_corpus
from clusterprof_lab.synth.make import JITTER_NS
from clusterprof_lab.synth.record import RecordingQuality, draw_clocks, write_story
from clusterprof_lab.synth.simulate import run_job
from clusterprof_lab.synth.simulate_faults import Faults
from clusterprof_lab.synth.simulate_nodes import make_nodes
from clusterprof_lab.synth.simulate_plan import Plan, draw_plan
from clusterprof_lab.synth.simulate_truth import TAIL_NS
from clusterprof_lab.synth.story import Story

SCENARIO = "storage-io-cap"
PLANTED_RATIO = 0.05
BETWEEN_RATIO = 0.003
RANKS = 4
RULES = (
    "gpu.busy_ratio >= 70%",
    "stall.cpu <= 10%",
    "stall.checkpoint <= 5%",
    "step.p50_ns: +2.5%",
    "step.mean_ns: +2.5%",
    "lost.ratio: +2pt",
    "stall.storage_ratio: +2pt",
)
FOUND_AT_LEAST, FALSE_AT_MOST = 0.95, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how often the gate was right, and why it could not tell where it could not."""
    options = _parse_options(arguments)
    clean: Counter[str] = Counter()
    planted: Counter[str] = Counter()
    blamed = flips = 0
    last_report = None
    for number in range(options.jobs):
        job = RepeatableJob(number, options.steps, options.jitter)
        before = [job.make_report(f"baseline{i}", i, 0.0) for i in range(options.baselines)]
        for i in range(options.runs):
            for kind, ratio, count in (("clean", 0.0, clean), ("slow", PLANTED_RATIO, planted)):
                report = job.make_report(
                    f"{kind}{i}", options.baselines + 2 * i + (ratio > 0), ratio
                )
                verdict = judge_runs(
                    report, [parse_any_rule(rule) for rule in RULES], Policy(), (), before
                )
                count[verdict.outcome] += 1
                if verdict.outcome != ("fail" if ratio else "pass"):
                    print(f"job {number}, {kind}{i}:", *verdict.lines, sep="\n  ")
                if ratio:
                    rows = compare_runs(before[0], report, (), Policy(allow_unlike=("order",))).rows
                    blamed += rows[0].name.startswith("storage") and rows[0].significance == "more"
                last_report = report
        print(f"job {number}: {job.plan.nodes} nodes, clean {dict(clean)}, slow {dict(planted)}")
    if last_report is not None:
        rules = [parse_any_rule(rule) for rule in RULES[:3]]
        says = {judge_runs(last_report, rules, Policy()).lines for _ in range(200)}
        flips = len(says) - 1
    slow = options.jobs * options.runs
    detected = planted["fail"] + planted["cannot tell"]
    print(f"false failures: {clean['fail']} of {slow} clean runs (at most {FALSE_AT_MOST})")
    print(
        f"a regression of {PLANTED_RATIO:.0%}: found {planted['fail']} of {slow}, cannot tell"
        f" {planted['cannot tell']}, passed {planted['pass']}"
    )
    print(f"compare names its cause first: {blamed} of {slow}")
    print(f"200 verdicts on one run: {flips} flips")
    good = clean["fail"] <= FALSE_AT_MOST and detected >= FOUND_AT_LEAST * slow and not flips
    return 0 if good else 1


class RepeatableJob:
    """A simulated job that can be run repeatedly with new noise."""

    def __init__(self, number: int, steps: int, jitter: float | None) -> None:
        """Draw it; its number decides everything that does not vary from run to run."""
        scenario = next(scenario for scenario in load_corpus() if scenario.id == SCENARIO)
        trial = Trial(scenario, "mild", 1000 + number, "dev")
        plan, faults = draw_plan(trial, RANKS)
        plan = replace(plan, nodes=2, per_node=RANKS // 2, steps=steps)
        if jitter is not None:
            plan = replace(plan, jitter=jitter)
        # The generator drew for as many steps as the trial has.
        fault = replace(
            faults.all[0], ranks=tuple(range(RANKS)), noise=np.ones((RANKS, steps)), onset=0
        )
        self.plan, self._faults = plan, Faults((fault,))
        self._number, self._size = number, 0.0
        self._size = self._find_size()

    def make_report(self, name: str, number: int, slower: float) -> Report:
        """Run it, record it and analyze the recording; `slower`: by how much of a step."""
        folder = Path(tempfile.mkdtemp(prefix="clusterprof-repeats-"))
        try:
            self._record(folder, number, slower > 0)
            report = analyze(folder)
        finally:
            shutil.rmtree(folder)
        assert report.fingerprint is not None
        # All of them begin at the same simulated time.
        facts = replace(report.fingerprint, started_at_ns=number + 1, recordings=(f"run {number}",))
        return replace(report, title=name, fingerprint=facts)

    def _record(self, folder: Path, number: int, slow: bool) -> None:
        random = np.random.default_rng([self._number, number])
        plan = self._repeat_plan(self.plan, random)
        faults = self._faults.set_sizes((self._size,) if slow else ())
        jobs = run_job(plan, faults)
        end = max(player.t for job in jobs for player in job.players) + TAIL_NS
        ranks = [player.rank for job in jobs for player in job.players]
        where = make_nodes(plan, jobs, faults, end)
        story = Story(ranks, where, 0, end, f"repeats-{self._number}", plan.ranks)
        seen = RecordingQuality(clocks=draw_clocks(random, where), jitter_ns=JITTER_NS)
        write_story(story, folder, random, seen, [])

    @staticmethod
    def _repeat_plan(plan: Plan, random: np.random.Generator) -> Plan:
        factor = 1 + float(np.clip(BETWEEN_RATIO * random.standard_normal(), -0.01, 0.01))
        seed = int(random.integers(1 << 31))
        return replace(plan, seed=seed, compute_ns=round(plan.compute_ns * factor))

    def _find_size(self) -> float:
        """Search for the size at which the steps take `PLANTED_RATIO` longer."""
        short = replace(self.plan, steps=40)

        def lasts(size: float) -> float:
            steps = run_job(short, self._faults.set_sizes((size,)))[0].players[0].steps
            return float(np.median([end - start for start, end, *_ in steps]))

        low, high, aim = 0.0, 8.0 * self.plan.compute_ns, (1 + PLANTED_RATIO) * lasts(0.0)
        for _ in range(16):
            middle = (low + high) / 2
            low, high = (middle, high) if lasts(middle) < aim else (low, middle)
        return high


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="clusterprof_lab.repeats", description="Is the gate to be trusted?"
    )
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--baselines", type=int, default=5)
    parser.add_argument("--jitter", type=float, help="of kernels (default: 1 to 3 %%)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
