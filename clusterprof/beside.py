"""One number of those whose cause it was, and the same number of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Beside:
    """The guilty beside the healthy."""

    name: str
    """What was measured, in the style of a signal's name."""
    unit: str
    """Canonical unit of both numbers."""
    value: float
    """Of the chief culprits, the middle one."""
    others: float
    """Of the others, the middle one."""
    many: int
    """How many others there are."""
    of: Literal["rank", "node"]
    """What is compared."""
    note: str
    """Goes behind the first number ("of work a step")."""
