"""What a fault is, what one trial of it says, and what many trials come to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_EXAMPLES = 5
"""Broken trials whose words are kept."""


class NotPossible(Exception):  # noqa: N818 - named after what happened
    """This machine, or this user, cannot inject the fault; the message says why."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One injection that broke no promise. One that did raises AssertionError instead."""

    lost: float | None = None
    """What was lost, in the unit of the fault; None = the fault loses nothing that is counted."""
    injected: int = 1
    """Faults in this trial: failed calls, flipped bits, exits."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further numbers; of all trials the largest is kept."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that is injected many times."""

    name: str
    """Its key in the results."""
    title: str
    """What happens, in words."""
    injection: str
    """How it is brought about."""
    inject: Callable[[Path, int], Trial]
    """(an empty folder, number of the trial) -> what came of it."""
    short: int
    """Trials of `make faults`."""
    long: int
    """Trials of `make faults-long`."""
    unit: str = ""
    """Of what is lost; "" = nothing is counted."""
    counted: str = "trials"
    """What `Trial.injected` counts."""
    at_once: int = 1
    """Trials side by side."""


@dataclass(slots=True)
class Outcome:
    """What many trials of one fault came to."""

    trials: int = 0
    injected: int = 0
    losses: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    not_possible: str = ""

    def add(self, trial: Trial) -> None:
        """Count a trial that kept its promises."""
        self.trials += 1
        self.injected += trial.injected
        if trial.lost is not None:
            self.losses.append(trial.lost)
        for name, value in trial.facts.items():
            self.facts[name] = max(self.facts.get(name, value), value)

    def add_broken(self, number: int, words: str) -> None:
        """Count a trial that broke a promise."""
        self.trials += 1
        self.injected += 1
        self.broken.append(f"trial {number}: {words}")

    def export(self) -> dict[str, Any]:
        """Return the outcome as JSON values."""
        values: dict[str, Any] = {
            "trials": self.trials,
            "injected": self.injected,
            "broken": len(self.broken),
        }
        if self.not_possible:
            values["not_possible"] = self.not_possible
        if self.losses:
            values["lost_median"] = round(statistics.median(self.losses), 4)
            values["lost_worst"] = round(max(self.losses), 4)
        if self.facts:
            values["facts"] = self.facts
        if self.broken:
            values["examples"] = self.broken[:MAX_EXAMPLES]
        return values


def choose_faults(faults: Sequence[Fault], names: Sequence[str]) -> list[Fault]:
    """Return the faults with these names, all when none is given.

    Raises: SystemExit for a name that no fault has.
    """
    unknown = set(names) - {fault.name for fault in faults}
    if unknown:
        known = ", ".join(fault.name for fault in faults)
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}; there are {known}")
    return [fault for fault in faults if not names or fault.name in names]
