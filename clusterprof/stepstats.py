"""A job step by step, in few numbers: what gate and compare need to know how much it varies.

Steps are counted by every rank from 0, and so many following ones of all ranks are one block. For
all ranks together, to the nanosecond:

    sum over blocks of in_step_ns           = Report.in_step_ns
    sum over blocks of lost_ns              = Report.lost_ns
    sum over blocks of the loss of a cause  = its buckets, of all ranks

Causes that are told for the run as a whole, as of time in operations with other ranks, are spread
over the blocks as the waiting was.
"""

from __future__ import annotations

from dataclasses import dataclass

BINS_PER_OCTAVE = 128
"""Lengths of steps are kept in bins that are 0.54 % wide."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Sums over all ranks by block; every tuple has a number for each block."""

    width: int
    """Steps of a rank in a block; the last block has what is left."""
    steps: tuple[int, ...]
    """Steps of all ranks that ended in it."""
    step_ns: tuple[int, ...]
    """Their lengths, summed."""
    in_step_ns: tuple[int, ...]
    measured_ns: tuple[int, ...]
    """Of it with samples of the device."""
    busy_ns: tuple[int, ...]
    """Of that with work on the device."""
    lost_ns: tuple[int, ...]
    lost: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(cause id, its family, lost ns by block), "unattributed" included, the largest first."""
    lengths: tuple[tuple[tuple[int, int], ...], ...]
    """By block (bin, how many steps); the bin of a length is `floor(128 * log2(ns))`."""

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self.steps)

    def of_causes(self, causes: frozenset[str] | set[str]) -> tuple[int, ...]:
        """Return lost ns by block, of some causes together."""
        found = [ns for cause, _, ns in self.lost if cause in causes]
        return tuple(map(sum, zip(*found))) if found else (0,) * self.blocks

    def of_family(self, family: str) -> tuple[int, ...]:
        """Return lost ns by block of a family."""
        return self.of_causes({cause for cause, own, _ in self.lost if own == family})


def lower_edge_ns(bin_: int) -> float:
    """Return the shortest length in a bin."""
    return float(2.0 ** (bin_ / BINS_PER_OCTAVE))
