"""Which trials a slice has, and in which modes each is scored.

ci     every scenario twice at one severity, one of each group without each signal: minutes
full   three severities, three seeds, more nulls, and a few scenarios at up to 4,096 ranks
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
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
_NULL_SEEDS = {"ci": 4, "full": 20}
_CI_SEEDS = 2
_FULL_SEEDS = 3


@dataclass(frozen=True, slots=True)
class Work:
    """One run to make, or one that lies there, and what to do with it."""

    testbed: str
    """"synth", "real"; "" = of `folder`, whose truth says."""
    trial: Trial | None
    folder: Path | None
    """Where the run lies; None = it is made."""
    modes: tuple[str, ...] = ("M0",)
    ablate: bool = False
    ranks: int | None = None
    """Size of a large job; None = what the trial draws."""

    @property
    def name(self) -> str:
        """What the run is called in lists."""
        if self.trial is None:
            return self.folder.name if self.folder is not None else "?"
        size = f".{self.ranks}ranks" if self.ranks else ""
        return f"{self.testbed}.{self.trial.name}{size}"


def planned(
    corpus: Sequence[Scenario], split: Split, size: Slice, testbeds: Collection[str]
) -> list[Work]:
    """Return the work of a slice, scenario by scenario."""
    out: list[Work] = []
    for testbed in ("synth", "real"):
        if testbed in testbeds:
            for scenario in corpus:
                first = not any(work.trial and work.trial.scenario.group == scenario.group
                                for work in out)  # fmt: skip
                out += _of_scenario(scenario, split, size, testbed, first or size == "full")
    return out


def _of_scenario(
    scenario: Scenario, split: Split, size: Slice, testbed: str, ablate: bool
) -> Iterator[Work]:
    if testbed == "real" and size == "ci" and scenario.id not in _REAL_IN_CI:
        return
    null = not scenario.wanted.family
    severities = SEVERITIES if size == "full" and not null else SEVERITIES[1:2]
    seeds = _FULL_SEEDS if size == "full" else 1 if testbed == "real" else _CI_SEEDS
    if null and testbed == "synth":
        seeds = _NULL_SEEDS[size]
    for severity in severities:
        for seed in range(seeds):
            first = seed == 0
            yield Work(
                testbed,
                Trial(scenario, severity, seed, split),
                None,
                modes=MODES if first or size == "full" else ("M0",),
                ablate=ablate and first and severity == "medium" and testbed == "synth",
            )
    if size == "full" and testbed == "synth" and scenario.id in LARGE_SCENARIOS:
        for ranks in LARGE[:1] if scenario.id in PIPELINES else LARGE:
            yield Work(testbed, Trial(scenario, "medium", 0, split), None, ranks=ranks)


def lying_in(folder: Path, modes: tuple[str, ...], ablate: bool) -> list[Work]:
    """Return the runs under a folder: every folder with a truth, by name."""
    found = sorted({path.parent for path in folder.rglob(FILE)})
    return [Work("", None, path, modes, ablate) for path in found]
