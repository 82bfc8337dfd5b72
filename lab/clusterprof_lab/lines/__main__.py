"""Record jobs that lose time in a known line, and compare what the analysis names.

    python -m clusterprof_lab.lines --out RUNS [--steps 600] [SCRIPT ...]

Each script runs alone and as two ranks of which the last one has the fault. A row says which line
the main finding names first, its share of all lost time, and what the script measured. The sampling
error of a job of a minute is several points; --steps 10000 (some ten minutes a job) makes it small.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from clusterprof.analysis.node.selection import PartOfRun
from clusterprof.analysis.pipeline import analyze
from clusterprof.report.model import Report

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = ("jpegs", "collate", "tokenizer", "logging_each_step", "sleeping_hook")
FRAMEWORKS = ("lightning_module", "transformers_trainer")
"""Scripts that need `lightning` and `transformers`; with one rank only."""
FIRST_STEP = 10
"""The scripts measure from here on, and the analysis counts from here on, too."""
_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Row:
    """One job: what was true, and what the analysis says."""

    name: str
    ranks: int
    expected: str
    named: str
    """The first line of the main finding, as file:line."""
    cause: str
    true_ratio: float
    """Part of the lost time of the job that passes through the guilty line."""
    named_ratio: float
    error_ratio: float
    """Half width of the interval that the analysis gives."""


def record_job(name: str, ranks: int, steps: int, folder: Path) -> None:
    """Run a script under the recorder.

    Raises: subprocess.CalledProcessError when it fails.
    """
    folder.mkdir(parents=True)
    script = str(SCRIPTS / f"{name}.py")
    environment = {**os.environ, "STEPS": str(steps), "TRUTH": str(folder), "OMP_NUM_THREADS": "1"}
    job = [sys.executable, script]
    if ranks > 1:
        job = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        job += [f"--nproc-per-node={ranks}", script]
    command = [sys.executable, "-m", "clusterprof", "record", "--out", str(folder / "recording")]
    subprocess.run([*command, "--", *job], env=environment, check=True, timeout=_TIMEOUT_S)


def judge_job(name: str, ranks: int, folder: Path) -> Row:
    """Compare the analysis of a recorded job with what its script measured."""
    report = analyze(folder / "recording", part=PartOfRun(first_step=FIRST_STEP))
    source = (SCRIPTS / f"{name}.py").read_text().splitlines()
    (line,) = (number for number, text in enumerate(source, 1) if "# guilty" in text)
    expected = f"{name}.py:{line}"
    truths = [json.loads(path.read_text()) for path in sorted(folder.glob("truth-*.json"))]
    (slow,) = (truth for truth in truths if truth["slow"])
    idle_ns = slow["idle_ns"]
    if slow["fetch_ratio"] is None:
        true_ratio = slow["in_line_ns"] / idle_ns
    else:
        true_ratio = slow["fetch_ratio"] * _measure_wait_ratio(report)
    finding = report.findings[0] if report.findings else None
    if finding is None or not finding.lines:
        cause = finding.cause.id if finding is not None else "-"
        return Row(name, ranks, expected, "-", cause, true_ratio, 0.0, 0.0)
    first = finding.lines[0]
    named = f"{Path(first.place.file).name}:{first.place.line}"
    named_ns = _sum_line(report, expected)
    return Row(
        name,
        ranks,
        expected,
        named,
        finding.cause.id,
        true_ratio,
        named_ns / max(report.lost_ns, 1),
        first.error_ratio,
    )


def _sum_line(report: Report, line: str) -> int:
    """Sum the lost time of a line over all causes and ranks, unattributed time included."""
    code = report.code
    if code is None:
        return 0
    names = [f"{Path(place.file).name}:{place.line}" for place in code.places]
    stacks = (stack for stack in code.stacks if stack.user_place >= 0)
    return sum(stack.lost_ns for stack in stacks if names[stack.user_place] == line)


def _measure_wait_ratio(report: Report) -> float:
    """Return the part of the lost time in which the data of the slow rank were waited for."""
    causes = [finding for finding in report.findings if finding.cause.family in ("cpu", "input")]
    return sum(finding.lost_ns for finding in causes) / max(report.lost_ns, 1)


def main() -> None:
    """Record the jobs that have no recording yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="SCRIPT", help=", ".join(NAMES + FRAMEWORKS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    print("script, ranks: cause, line named (guilty line), share of lost time, truth, points off")
    for name in arguments.names or NAMES:
        for ranks in (1,) if name in FRAMEWORKS else (1, 2):
            folder = arguments.out / f"{name}-{ranks}"
            if not (folder / "recording").exists():
                record_job(name, ranks, arguments.steps, folder)
            row = judge_job(name, ranks, folder)
            right = "right" if row.named == row.expected else "WRONG"
            off = 100 * (row.named_ratio - row.true_ratio)
            print(
                f"{row.name}, {row.ranks}: {row.cause}, {row.named} ({row.expected}) {right}, "
                f"{row.named_ratio:.1%} +- {row.error_ratio:.1%}, {row.true_ratio:.1%}, {off:+.1f}"
            )


if __name__ == "__main__":
    main()
