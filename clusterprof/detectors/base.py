"""What a detector is: looks at lost intervals of one rank and claims a share, or abstains.

A detector words, ranks and totals nothing and knows no other detector: `attribution/` settles the
claims. Its limits are a frozen dataclass whose names carry units; a profile may change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from clusterprof.findings import Cause, Evidence, Grade
from clusterprof.timeline.model import Feeding, Float, Lost, Rank


@dataclass(frozen=True, slots=True)
class Claims:
    """Shares of lost pieces that one cause explains."""

    share: Float
    """float64[n], 0 to 1: which part of each piece's lost time."""
    grade: Grade
    """How good the evidence is."""
    evidence: tuple[Evidence, ...] = ()
    """Numbers over this chunk that a reader can check; merged by name over chunks."""
    resource: str = ""
    """The disk, mount or worker behind it, when one stands out."""


class Detector(Protocol):
    """One cause."""

    cause: ClassVar[Cause]
    needs: ClassVar[tuple[str, ...]]
    """Signal names (or "spans", "threads") without which it must abstain."""
    Limits: ClassVar[type]

    def claim(self, rank: Rank, lost: Lost, feeding: Feeding, limits: Any) -> Claims | None:
        """Claim shares of the lost pieces; None = cannot tell. `feeding` has a row per piece."""
        ...
