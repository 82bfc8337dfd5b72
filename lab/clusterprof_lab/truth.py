"""The truth of one run: `truth.json` beside its `recording/`.

    FOLDER/recording/    as `clusterprof record` leaves it
    FOLDER/truth.json    this

Times are integer nanoseconds of device time. `lost` is the time inside steps in which devices were
idle, busy-waited in a collective or were throttled, split to the nanosecond among (cause, culprit,
victim). The sum over all rows is the lost time, the sum by culprit is what each rank caused, the
sum by rank is what each rank lost. The truth comes from the generator, or from the stopwatches of
the job and its injector, never from a recording.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clusterprof_lab.families import FAMILY_OF, UNATTRIBUTED

SCHEMA = 1
FILE = "truth.json"
WORK_FILE = "devices.npz"
"""Beside the truth of a synthetic run: when kernels were resident, int64[2, n] by node/device."""
OTHER = "other"
"""A cause of `lost` that nobody injected (jitter, the loop itself): scored as unattributed."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Device time lost by one rank to one cause."""

    cause: str
    """A leaf of `families.FAMILY_OF`, or `OTHER`."""
    culprit: int | None
    """Rank whose cause it was: the rank itself, or whom it waited for; None = no rank's."""
    rank: int
    """The rank that lost the time."""
    ns: int


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault that was injected: what a right answer names."""

    cause: str
    culprits: tuple[int, ...]
    """Ranks at fault, any of which may be named first; () when it is no rank's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank ran."""

    rank: int
    node: str
    """Host name."""
    in_step_ns: int
    steps: int


@dataclass(frozen=True, slots=True)
class Truth:
    """One run."""

    scenario: str
    testbed: str
    """"synth" or "real"."""
    split: str
    severity: str
    seed: int
    parameters: Mapping[str, Any]
    """All that was drawn, for people."""
    places: tuple[Place, ...]
    lost: tuple[Lost, ...]
    injected: tuple[Injected, ...]
    """Largest first; () of a null."""
    outside: tuple[Lost, ...] = ()
    """Device time before, between and after steps."""
    step_ns: float | None = None
    """Mean time of a step, and of the same job without the fault."""
    clean_step_ns: float | None = None
    clocks: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """By node: offset in ns and drift of its monotonic clock against true time."""
    disturbed_ratio: float = 0.0
    """CPU time that others used meanwhile, of all; above 0.05 the run is listed separately."""
    schema: int = SCHEMA

    @property
    def in_step_ns(self) -> int:
        """Device time of all ranks inside steps."""
        return sum(place.in_step_ns for place in self.places)

    def sum_family_ns(self) -> dict[str, int]:
        """Lost time inside steps by top-level group."""
        out: dict[str, int] = {}
        for loss in self.lost:
            family = FAMILY_OF.get(loss.cause, UNATTRIBUTED)
            out[family] = out.get(family, 0) + loss.ns
        return out

    def sum_caused_ns(self) -> dict[int | None, int]:
        """Lost time inside steps by culprit."""
        out: dict[int | None, int] = {}
        for loss in self.lost:
            out[loss.culprit] = out.get(loss.culprit, 0) + loss.ns
        return out


def write_truth(truth: Truth, folder: Path) -> None:
    """Write `truth.json` into the folder of a run."""
    document = {"format": "clusterprof-truth", **asdict(truth)}
    for name in ("lost", "outside"):
        document[name] = [
            [row["cause"], row["culprit"], row["rank"], row["ns"]] for row in document[name]
        ]
    (folder / FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_truth(folder: Path) -> Truth:
    """Read the `truth.json` of a run; ValueError when it is not one."""
    document = json.loads((folder / FILE).read_text(encoding="utf-8"))
    if document.pop("format", "") != "clusterprof-truth" or document["schema"] != SCHEMA:
        raise ValueError(f"{folder / FILE}: not a truth of schema {SCHEMA}")
    document["places"] = tuple(Place(**place) for place in document["places"])
    document["injected"] = tuple(
        Injected(fault["cause"], tuple(fault["culprits"])) for fault in document["injected"]
    )
    document["clocks"] = {node: tuple(clock) for node, clock in document["clocks"].items()}
    for name in ("lost", "outside"):
        document[name] = _make_rows(document[name])
    return Truth(**document)


def _make_rows(rows: Sequence[Sequence[Any]]) -> tuple[Lost, ...]:
    return tuple(Lost(*row) for row in rows)
