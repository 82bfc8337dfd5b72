"""Define the course of a run: lost time by cause in equal time bins, waits, and slow
steps.

Times are run time: 0 is the start of the run on the common clock of its nodes. For
every rank

    sum over bins of in_step_ns      = RankLedger.in_step_ns
    sum over bins and causes of lost = RankLedger.lost_ns, to the nanosecond

A cause has the ids of the rank's buckets. Time in operations with other ranks, whose
causes are known only for the run as a whole, is booked as WAITING_FOR_RANKS.

Define per-block step statistics, from which gate and compare estimate the variance of a
run.

Every rank counts its steps from 0; a fixed number of consecutive steps of all ranks is
one block. Over all ranks, to the nanosecond:

    sum over blocks of in_step_ns           = Report.in_step_ns
    sum over blocks of lost_ns              = Report.lost_ns
    sum over blocks of the loss of a cause  = its buckets, of all ranks

Causes known only for the run as a whole, such as those of time in operations with other
ranks, are spread over the blocks in proportion to the waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

WAITING_FOR_RANKS = "waiting-for-ranks"
"""Time lost in operations with other ranks; the findings name the culprits."""


@dataclass(frozen=True, slots=True)
class RankHistory:
    """Lost time of one rank over the run."""

    rank: int
    """Index into `Report.ranks`."""
    in_step_ns: tuple[int, ...]
    """Time inside steps, by time bin."""
    lost: tuple[tuple[str, tuple[int, ...]], ...]
    """(cause id, "unattributed" or WAITING_FOR_RANKS; lost ns by time bin), the largest first;
    their sum does not exceed `in_step_ns`.
    """
    step_ends_ns: tuple[int, ...]
    """Ends of steps, or of every nth step (`History.step_stride`)."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One of the longest waits of a rank for another."""

    start_ns: int
    duration_ns: int
    victim: int
    """Index into `Report.ranks`."""
    culprit: int | None
    """Index into `Report.ranks` of the last arrival; None when it is not known."""
    cause: str
    """Why the culprit was late; "" when it is not known."""
    step: int | None
    """Number of the step, None when it is not known."""


@dataclass(frozen=True, slots=True)
class SlowStep:
    """One of the slowest steps of the job."""

    number: int
    start_ns: int
    duration_ns: int
    """Duration on the rank that took longest."""
    rank: int | None
    """Index into `Report.ranks` of the rank that arrived last; None when it is not known."""
    lost: tuple[tuple[str, int], ...]
    """(cause id or WAITING_FOR_RANKS, lost ns) of all ranks in this step, the largest first."""


@dataclass(frozen=True, slots=True)
class History:
    """Course of the run in equal time bins."""

    started_at_ns: int | None
    """Wall clock at run time 0, ns since 1970; None when it is not known."""
    bin_ns: int
    bin_count: int
    ranks: tuple[RankHistory, ...]
    """In the order of `Report.ranks`."""
    waits: tuple[Wait, ...] = ()
    """The longest waits, by start."""
    slow_steps: tuple[SlowStep, ...] = ()
    """The slowest steps, slowest first."""
    step_stride: int = 1
    """Every nth step is in `step_ends_ns`."""
    why_missing: str = ""
    """Reason when the history is missing in whole or in part."""
    begin_ns: int = 0
    """Run time at which the first time bin begins: 0, unless only a part of the run was
    analyzed.
    """
    ended: tuple[tuple[int, int], ...] = ()
    """(index into `Report.ranks`, run time) of ranks that took no more steps while other ranks
    of the job continued. Later losses are spread over fewer ranks, which is no change of
    any rank.
    """


BINS_PER_OCTAVE = 128
"""Step lengths are counted in logarithmic bins that are 0.54 % wide."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """Sums over all ranks by block; every tuple has one entry per block."""

    width: int
    """Steps of a rank in a block; the last block has the remainder."""
    steps: tuple[int, ...]
    """Steps of all ranks that ended in the block."""
    step_ns: tuple[int, ...]
    """Sum of their lengths."""
    in_step_ns: tuple[int, ...]
    measured_ns: tuple[int, ...]
    """The part of `in_step_ns` with samples of the device."""
    busy_ns: tuple[int, ...]
    """The part of `measured_ns` with work on the device."""
    lost_ns: tuple[int, ...]
    lost: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(cause id, its family, lost ns by block), "unattributed" included, the largest first."""
    lengths: tuple[tuple[tuple[int, int], ...], ...]
    """By block (bin, number of steps); the bin of a length is `floor(128 * log2(ns))`."""

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.steps)

    def of_causes(self, causes: frozenset[str] | set[str]) -> tuple[int, ...]:
        """Return the lost ns by block, summed over the given causes."""
        columns = [ns for cause, _, ns in self.lost if cause in causes]
        return tuple(map(sum, zip(*columns))) if columns else (0,) * self.blocks

    def of_family(self, family: str) -> tuple[int, ...]:
        """Return the lost ns by block of a cause family."""
        return self.of_causes(
            {cause for cause, cause_family, _ in self.lost if cause_family == family}
        )


def compute_lower_edge_ns(bin_: int) -> float:
    """Compute the shortest step length in a bin, ns."""
    return float(2.0 ** (bin_ / BINS_PER_OCTAVE))


@dataclass(frozen=True, slots=True)
class SlowStepSummary:
    """The slowest steps of a job, and the ranks that determined them."""

    steps: int
    """Steps of the rank whose steps were examined."""
    slow_step_count: int
    """Number of slow steps examined: the slowest hundredth, and at least the slowest few."""
    p50_ns: int | None
    """Median step time over all ranks."""
    p99_ns: int | None
    late_ranks: tuple[tuple[str, int | None, int], ...] = ()
    """(node, rank, number of slow steps in which it arrived last), most first."""
    why_missing: str = ""
    """Reason when the responsible ranks are not known."""
