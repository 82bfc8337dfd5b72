"""What one stretch of one rank adds to the ledger: sums of integers, so that merging is exact.

Shares of lost time are whole numbers of 2**-20 (`SHARE`), and a claimed amount is `lost_ns` times
such a number: an integer. Sums of integers do not depend on their order, therefore a recording read
in one chunk or in a hundred gives the same ledger, and partials merge in any grouping:

    merge(merge(a, b), c) == merge(a, merge(b, c)),   merge(EMPTY, a) == a
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SLOWEST = 64  # steps of a rank that are kept one by one
SHARE = 1 << 20  # parts of a whole; lost_ns * SHARE of 300 s is 3e17, well inside int64


@dataclass(frozen=True, slots=True)
class Partial:
    """Sums over settled stretches of one rank. Every field maps a key to an integer, which adds up
    when partials merge; of `slowest` the longest stay."""

    totals: Mapping[str, int] = field(default_factory=dict)
    """in_step, unmeasured, measured, busy, lost, wait, first_step, first_step_lost: in ns;
    not_asked: in ns, and in none of the others; surely_asleep: in ns * SHARE; stream_pieces: a
    count."""
    claimed: Mapping[tuple[str, str, int], int] = field(default_factory=dict)
    """(cause id, grade, source) -> ns * SHARE."""
    unexplained: Mapping[str, int] = field(default_factory=dict)
    """reason -> ns * SHARE."""
    steps: Mapping[int, int] = field(default_factory=dict)
    """Length of a step in ns, to three significant digits -> how many."""
    slowest: Mapping[int, int] = field(default_factory=dict)
    """Start -> length of the `SLOWEST` longest steps, in ns."""
    evidence: Mapping[tuple[str, str, str, str], int] = field(default_factory=dict)
    """(cause id, name, unit, note) -> sum of values, or of value * weight * 1000."""
    weights: Mapping[tuple[str, str, str, str], int] = field(default_factory=dict)
    """The weights of the same keys; absent for evidence that is summed (`…_total`)."""
    resources: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(cause id, resource) -> ns * SHARE claimed while that resource stood out."""
    asked: Mapping[str, int] = field(default_factory=dict)
    """cause id -> lost pieces about which it was asked and did not abstain."""
    missing: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(cause id, what it needs) -> times it could not be asked."""
    fill: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """How the device was filled while it was busy: (what, level) -> ns (`attribution.filling`)."""


EMPTY = Partial()


def merge(*partials: Partial) -> Partial:
    """Add partials up; associative and commutative, with `EMPTY` as its zero."""
    sums = {name: _added([getattr(p, name) for p in partials]) for name in _SUMS}
    return Partial(**sums, slowest=slowest(*(p.slowest for p in partials)))


def slowest(*steps: Mapping[int, int]) -> dict[int, int]:
    """Return the `SLOWEST` longest of steps (start -> length); of equal ones the earliest."""
    longest: dict[int, int] = {}
    for some in steps:
        for start_ns, ns in some.items():
            longest[start_ns] = max(ns, longest.get(start_ns, 0))
    order = sorted(longest.items(), key=lambda step: (-step[1], step[0]))
    return dict(order[:SLOWEST])


_SUMS = tuple(one.name for one in fields(Partial) if one.name != "slowest")


def _added(maps: list[Mapping[Any, int]]) -> dict[Any, int]:
    total = dict(maps[0]) if maps else {}
    known = total.get
    for one in maps[1:]:  # the first is the sum so far: long, and copied in one go
        for key, value in one.items():
            total[key] = known(key, 0) + value
    return total
