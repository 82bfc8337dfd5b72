"""What to do about a finding: a remedy chosen by its evidence, and how to see that it worked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do."""

    what: str
    """An instruction, one sentence without a full stop; names node and rank when it is for these
    only."""
    because: str
    """What was measured that speaks for it."""
    change: str
    """The exact edit or command."""
    gain: str
    """What it wins: measured here, or published with its source."""
    verify: str
    """How to see that it worked."""
    worse: str
    """What it would make worse; "" when nothing is known."""
    id: str = ""
    """Name of the remedy, the same in every run ("more-workers")."""
    diagnose: bool = False
    """True: it says what to record or look at to tell the cause, and mends nothing."""
