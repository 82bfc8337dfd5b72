"""One scenario of the corpus: its fault, how the fault is made, and the expected truth.

A scenario is one YAML file of `corpus/`, named after its id:

    id: storage-io-cap
    group: storage                 # storage, cpu, h2d-launch, network, sync, phase-device, null
    title: One node's data disk gives few bytes per second
    what: >-                       # what happens, in words, for people
      ...
    truth:
      family: storage              # "" in a null: nothing may be found
      leaves: [storage-local]      # any of them is right; the first is what best says it
      culprit: node                # rank, node, everybody, nobody, several (see CULPRITS)
      outside_steps: false         # true: the time lies before, after or between steps
      also: []                     # further [family, leaf] that must be found (two culprits)
    lost: {mild: [0.05, 0.10], medium: [0.15, 0.30], severe: [0.40, 0.60]}
                                   # share of in-step time the fault is aimed to cost, by severity
    synth: {fault: slow-read, ...}           # how the generator makes it; null: it can't
    real: {fault: disk-cap, needs: [root]}   # how real processes make it; null: they can't

What is drawn at random (rank, share, sizes) comes from `draw`: the seeds of the split "test" are
never looked at while the analysis is being improved.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import yaml

from clusterprof_lab.families import FAMILIES, FAMILY_OF

Split = Literal["dev", "test"]
Severity = Literal["mild", "medium", "severe"]
Group = Literal["storage", "cpu", "h2d-launch", "network", "sync", "phase-device", "null"]
CulpritKind = Literal["rank", "node", "everybody", "nobody", "several"]
"""rank: one; node: all ranks of one node; everybody: all alike; nobody: no rank (a network between
nodes, a structure); several: more than one rank, named in `Truth.culprits`."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
CORPUS = Path(__file__).resolve().parents[1] / "corpus"
_KEYS = {"id", "group", "title", "what", "truth", "lost", "synth", "real"}
_TRUTH_KEYS = {"family", "leaves", "culprit", "outside_steps", "also"}


class ScenarioError(ValueError):
    """A scenario file says something it may not; the text names the file and the key."""


@dataclass(frozen=True, slots=True)
class ExpectedVerdict:
    """The verdict a scenario must yield."""

    family: str
    """Top-level group of the dominant cause; "" when nothing may be found."""
    leaves: tuple[str, ...]
    culprit: CulpritKind
    outside_steps: bool = False
    also: tuple[tuple[str, str], ...] = ()
    """(family, leaf) of further faults of the same run."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One file of the corpus."""

    id: str
    group: Group
    title: str
    what: str
    wanted: ExpectedVerdict
    lost: Mapping[Severity, tuple[float, float]]
    synth: Mapping[str, Any] | None
    real: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a scenario: what the score counts."""

    scenario: Scenario
    severity: Severity
    seed: int
    split: Split

    @property
    def name(self) -> str:
        """What its folder is called."""
        return f"{self.scenario.id}.{self.severity}.{self.split}{self.seed}"

    def draw(self) -> np.random.Generator:
        """Return the source of all that is random in this trial, the same at every call."""
        number = zlib.crc32(self.scenario.id.encode())
        return np.random.default_rng(
            [number, SEVERITIES.index(self.severity), self.seed, self.split == "test"]
        )


def load_corpus(folder: Path = CORPUS) -> tuple[Scenario, ...]:
    """Return all scenarios, by id; ScenarioError for the first that is wrong."""
    return tuple(load_scenario(path) for path in sorted(folder.glob("*.yaml")))


def load_scenario(path: Path) -> Scenario:
    """Read one scenario file."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ScenarioError(f"{path}: not a mapping")
    _check_keys(path, document, _KEYS, _KEYS)
    truth = document["truth"]
    _check_keys(path, truth, _TRUTH_KEYS, {"family", "leaves", "culprit"})
    if document["id"] != path.stem:
        raise ScenarioError(f"{path}: id is {document['id']!r}, not the file's name")
    if document["group"] not in get_args(Group):
        raise ScenarioError(f"{path}: group {document['group']!r} is none of {get_args(Group)}")
    if document["synth"] is None and document["real"] is None:
        raise ScenarioError(f"{path}: neither synth nor real can make it")
    return Scenario(
        document["id"],
        document["group"],
        document["title"],
        document["what"],
        _parse_wanted(path, truth),
        _parse_lost(path, document["lost"]),
        document["synth"],
        document["real"],
    )


def _check_keys(path: Path, given: Mapping[str, Any], known: set[str], needed: set[str]) -> None:
    wrong = sorted(set(given) - known) or sorted(needed - set(given))
    if wrong:
        raise ScenarioError(f"{path}: {', '.join(wrong)}: keys are {', '.join(sorted(known))}")


def _parse_wanted(path: Path, truth: Mapping[str, Any]) -> ExpectedVerdict:
    family, leaves = truth["family"], tuple(truth["leaves"])
    also = tuple((pair[0], pair[1]) for pair in truth.get("also", ()))
    if family and family not in FAMILIES:
        raise ScenarioError(f"{path}: family {family!r} is none of {', '.join(FAMILIES)}")
    for leaf in (*leaves, *(leaf for _, leaf in also)):
        if leaf not in FAMILY_OF:
            raise ScenarioError(f"{path}: leaf {leaf!r} is none of {', '.join(FAMILY_OF)}")
    if any(FAMILY_OF[leaf] != family for leaf in leaves):
        raise ScenarioError(f"{path}: a leaf is not of the family {family!r}")
    if truth["culprit"] not in get_args(CulpritKind):
        raise ScenarioError(f"{path}: culprit is one of {', '.join(get_args(CulpritKind))}")
    return ExpectedVerdict(family, leaves, truth["culprit"], bool(truth.get("outside_steps")), also)


def _parse_lost(
    path: Path, lost: Mapping[str, Any] | None
) -> Mapping[Severity, tuple[float, float]]:
    if lost is None:  # of a null
        return dict.fromkeys(SEVERITIES, (0.0, 0.0))
    if set(lost) != set(SEVERITIES):
        raise ScenarioError(f"{path}: lost needs {', '.join(SEVERITIES)}")
    return {severity: (float(lost[severity][0]), float(lost[severity][1])) for severity in lost}
