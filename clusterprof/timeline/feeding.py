"""What the critical thread did: the split of a data wait among the things that can hold it up."""

from __future__ import annotations

from clusterprof.timeline.model import Feeding, Int, Rank


def feed(rank: Rank, start_ns: Int, end_ns: Int) -> Feeding:
    """Return for each interval, sorted by start, what the critical thread did, in shares."""
    raise NotImplementedError
