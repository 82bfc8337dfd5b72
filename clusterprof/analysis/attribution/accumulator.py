"""Accumulate what segments of a rank add to its ledger: integers, so merging is exact.

Shares of lost time are fixed-point numbers with 20 fractional bits
(SHARE_SCALE), and a claimed amount is `lost_ns` times a share: an
integer. Sums of integers do not depend on their order. A recording read in one chunk or
in a hundred therefore gives the same ledger, and accumulators merge in any grouping:

    merge(merge(a, b), c) == merge(a, merge(b, c)),   merge(zero, a) == a

with EMPTY_ACCUMULATOR as zero.

Round claimed amounts from fixed-point shares to whole nanoseconds.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clusterprof.report.model import ResourceKind

MAX_SLOWEST_STEPS = 64  # steps of a rank that are kept individually
SHARE_SCALE = 1 << 20  # fixed-point scale; 300 s in ns times it is 3e17, well inside int64


@dataclass(frozen=True, slots=True)
class Accumulator:
    """Sums over settled segments of one rank.

    Every field maps a key to an integer; values are added when accumulators merge, except
    for `slowest`, of which the longest steps stay.
    """

    totals: Mapping[str, int] = field(default_factory=dict)
    """in_step, unmeasured, unobserved, measured, busy, lost, wait, first_step, first_step_lost: ns;
    evaluation: ns in evaluations, in steps and not lost;
    not_asked: ns outside the selection, in none of the others; surely_asleep: ns in
    fixed-point shares;
    stream_pieces: a count.
    """
    claimed: Mapping[tuple[str, str, int], int] = field(default_factory=dict)
    """(cause id, grade, source) -> ns in fixed-point shares."""
    unexplained: Mapping[str, int] = field(default_factory=dict)
    """Reason -> ns in fixed-point shares."""
    steps: Mapping[int, int] = field(default_factory=dict)
    """Length of a step in ns, to three significant digits -> number of steps."""
    slowest: Mapping[int, int] = field(default_factory=dict)
    """Start -> length of the longest steps, ns; at most MAX_SLOWEST_STEPS."""
    evidence: Mapping[tuple[str, str, str, str], int] = field(default_factory=dict)
    """(cause id, name, unit, note) -> sum of values, or of value * weight * 1000."""
    weights: Mapping[tuple[str, str, str, str], int] = field(default_factory=dict)
    """(cause id, name, unit, note) -> weight; absent for evidence that is summed (`…_total`)."""
    resources: Mapping[tuple[str, str, ResourceKind, str, int], int] = field(default_factory=dict)
    """(cause id, resource, its kind, name and process id or -1) -> ns in fixed-point
    shares, claimed while that resource was prominent.
    """
    evaluated: Mapping[str, int] = field(default_factory=dict)
    """Cause id -> segments in which its detector was evaluated and did not abstain."""
    missing: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(cause id, missing input) -> times its detector could not be evaluated."""
    utilization: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Utilization of the device while busy: (quantity, level) -> ns
    (analysis.attribution.rank.utilization).
    """


class StepLengths(Mapping[int, int]):
    """Start -> length of steps, ns: a dict in a fifth of its memory, for thousands of ranks."""

    __slots__ = ("_table",)

    def __init__(self, table: NDArray[np.int64]) -> None:
        """table: int64[2, n], starts and lengths."""
        self._table = table

    def __getitem__(self, start_ns: int) -> int:
        return self._unpack()[start_ns]

    def __iter__(self) -> Iterator[int]:
        return iter(self._table[0].tolist())

    def __len__(self) -> int:
        return self._table.shape[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return StepLengths, (self._table,)

    def items(self) -> ItemsView[int, int]:
        """Return the starts and lengths."""
        return self._unpack().items()

    def _unpack(self) -> dict[int, int]:
        return dict(zip(*self._table.tolist()))


def with_packed_slowest_steps(accumulator: Accumulator) -> Accumulator:
    """Return an accumulator to which nothing is added any more, in less memory."""
    pairs = list(accumulator.slowest.items())
    return replace(accumulator, slowest=StepLengths(np.array(pairs, np.int64).reshape(-1, 2).T))


EMPTY_ACCUMULATOR = Accumulator()


def merge_accumulators(*accumulators: Accumulator) -> Accumulator:
    """Merge accumulators; associative and commutative."""
    accumulators = tuple(item for item in accumulators if item is not EMPTY_ACCUMULATOR)
    sums = {
        name: _sum_maps([getattr(accumulator, name) for accumulator in accumulators])
        for name in _SUM_FIELDS
    }
    return Accumulator(
        **sums, slowest=select_slowest(*(accumulator.slowest for accumulator in accumulators))
    )


def select_slowest(*steps: Mapping[int, int]) -> Mapping[int, int]:
    """Select the longest of steps (start -> length, ns); of equal ones the earliest.

    At most MAX_SLOWEST_STEPS.
    """
    if steps and steps[0] and len(steps[0]) <= MAX_SLOWEST_STEPS and not any(steps[1:]):
        return steps[0]
    longest: dict[int, int] = {}
    for rank_steps in steps:
        for start_ns, ns in rank_steps.items():
            if ns > longest.get(start_ns, -1):
                longest[start_ns] = ns
    order = sorted([(-ns, start_ns) for start_ns, ns in longest.items()])
    return {start_ns: -ns for ns, start_ns in order[:MAX_SLOWEST_STEPS]}


_SUM_FIELDS = tuple(field.name for field in fields(Accumulator) if field.name != "slowest")


def _sum_maps(maps: list[Mapping[Any, int]]) -> Mapping[Any, int]:
    """Sum maps; a map to which nothing is added is shared, not copied."""
    if not any(maps[1:]):
        return maps[0] if maps else {}
    total = dict(maps[0])
    get_amount = total.get
    for counts in maps[1:]:  # the first is the sum so far: long, and copied at once
        for key, value in counts.items():
            total[key] = get_amount(key, 0) + value
    return total


def sum_field(accumulators: Iterable[Accumulator], name: str) -> Mapping[Any, int]:
    """Sum one field over accumulators, not `slowest`: cheaper than merging them for it."""
    return _sum_maps([getattr(accumulator, name) for accumulator in accumulators])


def round_by_largest_remainder(shares_ns: Mapping[tuple[str, str], int], total_ns: int) -> dict:
    """Round amounts in fixed-point shares of ns to whole ns that add up to `total_ns`.

    Ties are resolved by key. Requires sum(shares_ns) == total_ns *
    SHARE_SCALE. 1.5, 1.5 and 1.0 of 4 become 2, 1 and 1.
    """
    assert sum(shares_ns.values()) == total_ns * SHARE_SCALE, (
        "claims do not add up to the lost time"
    )
    whole_ns = {key: amount // SHARE_SCALE for key, amount in shares_ns.items()}
    missing = total_ns - sum(whole_ns.values())
    for key in sorted(shares_ns, key=lambda key: (-(shares_ns[key] % SHARE_SCALE), key))[:missing]:
        whole_ns[key] += 1
    return whole_ns
