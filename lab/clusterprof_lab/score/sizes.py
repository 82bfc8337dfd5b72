"""How often a claim is right, by the GPU time it names: the basis of confidence.

    python -m clusterprof_lab.score.sizes RUNS…     # folders of runs of the split dev, nothing else

Real and synthetic jobs have the same total weight, whatever their number. Adjacent bins are pooled
where the hit rate would fall as claims grow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clusterprof.analysis.pipeline import analyze
from clusterprof_lab.scenario import Scenario, load_corpus
from clusterprof_lab.score.clusterprof_answer import make_answer
from clusterprof_lab.score.dominant_cause import explain_weak_fault
from clusterprof_lab.score.judge import judge_answer
from clusterprof_lab.score.plan import list_stored_runs
from clusterprof_lab.score.work import RECORDING
from clusterprof_lab.truth import Truth, read_truth

EDGES_S = (0.3, 0.6, 1.2, 2.4, 4.8, 9.6, float("inf"))


@dataclass(frozen=True, slots=True)
class Claim:
    """A leaf that was named inside steps."""

    testbed: str
    gpu_s: float
    right: bool


def list_claims(folder: Path, truth: Truth, scenario: Scenario) -> Iterator[Claim]:
    """Yield the leaves that our report of a run names inside steps."""
    report = analyze(folder / RECORDING)
    answer = make_answer(report)
    for finding, cause in zip(report.findings, answer.causes or ()):
        alone = judge_answer(replace(answer, causes=(cause,)), truth, scenario.wanted)
        for _, _, right in alone.emitted if not cause.outside_steps else ():
            yield Claim(truth.testbed, finding.lost_ns * 1e-9, right)


def group_by_size(claims: Sequence[Claim]) -> list[tuple[float, float, int]]:
    """Return (up to GPU-seconds, part that was right, claims behind it), never falling."""
    weight: Mapping[str, float] = {
        testbed: 1 / sum(claim.testbed == testbed for claim in claims)
        for testbed in {claim.testbed for claim in claims}
    }
    pooled: list[list[float]] = []  # up to, right, all, claims
    for below, upto in zip((0.0, *EDGES_S), EDGES_S):
        in_range = [claim for claim in claims if below <= claim.gpu_s < upto]
        if not in_range:
            continue
        right = sum(weight[claim.testbed] for claim in in_range if claim.right)
        pooled.append(
            [upto, right, sum(weight[claim.testbed] for claim in in_range), len(in_range)]
        )
        while len(pooled) > 1 and pooled[-2][1] * pooled[-1][2] >= pooled[-1][1] * pooled[-2][2]:
            last = pooled.pop()
            pooled[-1] = [
                last[0],
                *(earlier + later for earlier, later in zip(pooled[-1][1:], last[1:])),
            ]
    return [(upto, right / whole, int(n)) for upto, right, whole, n in pooled]


def main(folders: Sequence[str]) -> int:
    """Print the parts; 2 when there are no runs, or some of the other split."""
    corpus = {scenario.id: scenario for scenario in load_corpus()}
    claims: list[Claim] = []
    for work in (work for name in folders for work in list_stored_runs(Path(name), ("M0",), False)):
        assert work.folder is not None
        truth = read_truth(work.folder)
        if truth.split != "dev":
            print(
                f"{work.folder}: split {truth.split!r}: only dev may be learnt from",
                file=sys.stderr,
            )
            return 2
        wanted = corpus[truth.scenario].wanted
        aimed = truth.parameters.get("share") if truth.testbed == "real" else None
        if not explain_weak_fault(truth, wanted, aimed):
            claims += list_claims(work.folder, truth, corpus[truth.scenario])
    if not claims:
        print("give folders of runs in which leaves are named", file=sys.stderr)
        return 2
    for upto, part, n in group_by_size(claims):
        print(f"below {upto:g} GPU-seconds: {part:.3f} right of {n} claims")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
