"""What to do about a finding: a remedy chosen by its evidence, and how to see that it worked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EFFORTS: Mapping[str, str] = {
    "look": "a look: nothing is changed",
    "setting": "an option of the job or of its submission, and another run",
    "code": "lines of the training code or of its image",
    "site": "whoever runs the node, the network or the server",
    "data": "data written anew, copied or moved",
}
"""How much a remedy asks of a person, the least first."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do."""

    what: str
    """An instruction, one sentence without a full stop; names node and rank when it is for these
    only."""
    because: str
    """What was measured that speaks for it."""
    change: str
    """The exact edit or command, and what a person must know about it."""
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
    effort: str = ""
    """A word of `EFFORTS`; "" unknown."""
    commands: tuple[str, ...] = ()
    """The parts of `change` that are pasted as they are, in its order, each word for word."""
