"""When a cause was there: since when, and whether it is always the same who wait for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Persistence:
    """How the ranks that others waited for change over the run (docs/design.md, section 12)."""

    kind: Literal["steady", "transient", "wandering"]
    """The same culprits all the time; one stretch of the run only; culprits that change."""
    from_ns: int
    """Run time at which the stretches that hold most of the waiting begin, and end."""
    to_ns: int
    stretches: int
    """How many stretches of the run hold nine tenths of the waiting."""
    seen: int
    """How many stretches of the run had operations."""
    culprits: int
    """How many ranks came first in at least one of `stretches`."""
    most: int
    """In how many of `stretches` the chief culprits had their part."""


@dataclass(frozen=True, slots=True)
class Since:
    """When a cause began that was not there from the first step on."""

    run_ns: int
    """Run time from which on it costs time."""
    step: int | None = None
    """How many steps the chief culprit had done by then; None unknown."""
    steps: int | None = None
    """Of how many in all."""
