"""Which trials a slice has, and in which modes each is scored.

ci     every scenario twice at one severity, one of each group without each signal, and once in the
       second shape of a job: minutes
full   three severities, three seeds, 384 nulls, and a few scenarios at up to 4,096 ranks; of real
       jobs and of the second shape one seed per severity, three of each null: 144 jobs of 20 s
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from clusterprof_lab.scenario import SEVERITIES, Scenario, Split, Trial
from clusterprof_lab.score.modes import MODES
from clusterprof_lab.truth import FILE

Slice = Literal["ci", "full"]
LARGE = (256, 1024, 4096)
"""Ranks of the large jobs of the full slice."""
LARGE_SCENARIOS = ("storage-io-cap", "cpu-gc", "sync-slow-rank", "sync-chain", "null-jitter")
PIPELINES = ("sync-chain",)
"""They are simulated message by message: of the large jobs the smallest alone."""
_REAL_IN_CI = ("storage-io-cap", "cpu-heavy-transform", "sync-slow-rank", "null-clean")
_NULL_SEEDS = {"ci": 4, "full": 64}
"""0 false of 6 x 64 bounds the true part to 1 % (Wilson, 95 %)."""
_SEEDS = {("synth", "ci"): 2, ("synth", "full"): 3}
"""1 by default."""
TESTBEDS = ("synth", "sharded", "real")
SHARDED_MODES = ("M0", "M2", "D0", "D2")
_REAL_NULLS = 3
_MODES_UP_TO = 3
"""Seeds from which on a run is scored with everything seen alone."""
NOT_RECORDED = "not recorded: it takes hours, `--no-recording` was given"


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """One run to make, or an existing one, and what to do with it."""

    testbed: str
    """One of `TESTBEDS`; "" = of `folder`, whose truth says."""
    trial: Trial | None
    folder: Path | None
    """Where the run lies; None = it is made."""
    modes: tuple[str, ...] = ("M0",)
    ablate: bool = False
    ranks: int | None = None
    """Size of a large job; None = what the trial draws."""
    not_now: str = ""
    """Why it is not made, if it does not exist."""

    @property
    def name(self) -> str:
        """What the run is called in lists."""
        if self.trial is None:
            return self.folder.name if self.folder is not None else "?"
        size = f".{self.ranks}ranks" if self.ranks else ""
        return f"{self.testbed}.{self.trial.name}{size}"


def plan_runs(
    corpus: Sequence[Scenario], split: Split, size: Slice, testbeds: Collection[str]
) -> list[ScoredRun]:
    """Return the work of a slice, scenario by scenario."""
    out: list[ScoredRun] = []
    for testbed in TESTBEDS:
        if testbed in testbeds:
            for scenario in corpus:
                first = not any(
                    work.trial and work.trial.scenario.group == scenario.group for work in out
                )
                out += _plan_scenario(scenario, split, size, testbed, first or size == "full")
    return out


def _plan_scenario(
    scenario: Scenario, split: Split, size: Slice, testbed: str, ablate: bool
) -> Iterator[ScoredRun]:
    if testbed == "real" and size == "ci" and scenario.id not in _REAL_IN_CI:
        return
    if testbed == "sharded" and not _can_be_sharded(scenario):
        return
    null = not scenario.wanted.family
    severities = SEVERITIES if size == "full" and not null else SEVERITIES[1:2]
    seeds = _SEEDS.get((testbed, size), 1)
    if null and (testbed == "synth" or size == "full"):
        seeds = _NULL_SEEDS[size] if testbed == "synth" else _REAL_NULLS
    all_modes = SHARDED_MODES if testbed == "sharded" else MODES
    for severity in severities:
        for seed in range(seeds):
            first = seed == 0
            yield ScoredRun(
                testbed,
                Trial(scenario, severity, seed, split),
                None,
                modes=all_modes if seed < (_MODES_UP_TO if size == "full" else 1) else ("M0",),
                ablate=ablate and first and severity == "medium" and testbed == "synth",
            )
    if size == "full" and testbed == "synth" and scenario.id in LARGE_SCENARIOS:
        for ranks in LARGE[:1] if scenario.id in PIPELINES else LARGE:
            yield ScoredRun(testbed, Trial(scenario, "medium", 0, split), None, ranks=ranks)


def _can_be_sharded(scenario: Scenario) -> bool:
    """Return whether the scenario leaves the layout of its job open and lies inside steps."""
    return scenario.synth is not None and not {"layout", "outside"} & set(scenario.synth)


def select_recorded(
    works: Sequence[ScoredRun], folder: Path, others: bool = True
) -> list[ScoredRun]:
    """Return the work with the real jobs taken that lie under a folder by name.

    Those that do not are made, or with `others` False are not run.
    """
    out = []
    for work in works:
        if work.testbed == "real" and work.trial is not None:
            lies = folder / work.trial.name
            if (lies / FILE).is_file():
                work = replace(work, folder=lies)
            elif not others:
                work = replace(work, not_now=NOT_RECORDED)
        out.append(work)
    return out


def list_stored_runs(folder: Path, modes: tuple[str, ...], ablate: bool) -> list[ScoredRun]:
    """Return the runs under a folder: every folder with a truth, by name."""
    folders = sorted({path.parent for path in folder.rglob(FILE)})
    return [ScoredRun("", None, path, modes, ablate) for path in folders]
