"""Devices that were less active than usual: did they spin for a rank that was late?

Steps may be too short for a window of spinning alone, and kernels may be small. Other ranks tell:

    s of a stretch of 2 s   rank 0   rank 1   rank 2
    less active                0.4      0.0      0.4     they waited for rank 1: the same program
    less active                0.4      0.4      0.4     its kernels are small, or data moved
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from clusterprof.attribution.ledger import RankBooks, charged
from clusterprof.attribution.local import NO_SIGNAL
from clusterprof.attribution.partial import SHARE, Partial, merge
from clusterprof.attribution.unmarked import PERHAPS, SPINNING
from clusterprof.engine.node import NodeResult
from clusterprof.timeline.model import Float, Int

STRETCH_NS = 2_000_000_000
LEAST_AT_MOST_RATIO = 0.5
"""Of what ranks usually spin, over all stretches: what the rank does that does least."""
AT_LEAST_RATIO = 0.01
"""Of the time: less is noise."""


def borne_out(steps: Sequence[tuple[Int, Int, Int]]) -> bool:
    """Return whether in most stretches the device of one rank span much less than the others.

    `steps`: number, end, and time in which the device perhaps span, in ns, of each rank's steps.
    """
    numbers = steps[0][0]
    for own, _, _ in steps[1:]:
        numbers = np.intersect1d(numbers, own)
    if numbers.size < 2:
        return False
    table = np.stack([stay[np.searchsorted(own, numbers)] for own, _, stay in steps])
    ends = steps[0][1][np.searchsorted(steps[0][0], numbers)]
    stretch = (ends - ends[0]) // STRETCH_NS
    sums: Float = np.stack([np.bincount(stretch, weights=row) for row in table])
    usual = float(np.median(sums, axis=0).sum())
    if usual < AT_LEAST_RATIO * float(ends[-1] - ends[0]):
        return False
    return float(sums.min(axis=0).sum()) <= LEAST_AT_MOST_RATIO * usual


def spins(one: RankBooks) -> bool:
    """Return whether the device of a rank was seen to spin, for more than noise."""
    units = one.partial.unexplained.get(SPINNING, 0)
    return units > SHARE * AT_LEAST_RATIO * one.partial.totals.get("in_step", 0)


def given_back(nodes: Sequence[NodeResult]) -> tuple[NodeResult, ...]:
    """Count time in which a device perhaps span, and nobody bore it out, as work again."""
    return tuple(replace(node, books=tuple(_worked(one) for one in node.books)) for node in nodes)


def _worked(one: RankBooks) -> RankBooks:
    units = one.partial.unexplained.get(PERHAPS, 0)
    if not units:
        return one
    ns, rest = divmod(units, SHARE)
    moved = {PERHAPS: -units, **({NO_SIGNAL: rest} if rest else {})}
    partial = merge(one.partial, Partial(totals={"lost": -ns}, unexplained=moved))
    left = {reason: amount for reason, amount in partial.unexplained.items() if amount}
    ledger = replace(
        one.ledger,
        lost_ns=one.ledger.lost_ns - ns,
        productive_ns=one.ledger.productive_ns + ns,
    )
    books = replace(one, ledger=ledger)
    return charged(books, replace(partial, unexplained=left), one.felt, one.caused)
