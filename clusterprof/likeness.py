"""What two runs must have in common before their times may be compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Likeness:
    """Facts of a run; None or empty = not known."""

    started_at_ns: int | None = None
    """Wall clock of its first recorder, ns since 1970."""
    recordings: tuple[str, ...] = ()
    """What tells this recording from every other: the names of its nodes' folders."""
    gpu_models: tuple[tuple[str, int], ...] = ()
    """(model, how many the job had), by name."""
    nodes: int | None = None
    world_size: int | None = None
    batch_size: float | None = None
    """Samples that a rank takes for a step, median over ranks; None when nobody said."""
    tokens: float | None = None
    """Tokens that a rank takes for a step, the same way."""
    measured_by: tuple[str, ...] = ()
    """Where lost time was measured (`RankLedger.source`), of all ranks."""
    frameworks: tuple[tuple[str, str], ...] = ()
    """(name, version) of frameworks the ranks had loaded."""
    drivers: tuple[str, ...] = ()
    """Versions of the driver of its accelerators."""
    recorder: tuple[str, ...] = ()
    """Versions of clusterprof that recorded it."""
    restarts: int = 0
    """How often ranks began anew within it."""
