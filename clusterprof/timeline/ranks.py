"""Which processes train, which work for them, and on which accelerator."""

from __future__ import annotations

from clusterprof.timeline.model import Chunk, Rank


def ranks_of(chunk: Chunk) -> tuple[Rank, ...]:
    """Return the training processes of a chunk, by rank and pid."""
    raise NotImplementedError
