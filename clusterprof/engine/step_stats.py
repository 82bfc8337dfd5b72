"""The blocks of all ranks laid together, and their sums made those of the report.

What a rank lost by itself is known block by block. What became of its waiting for others is told
for the run as a whole: it is spread over the blocks as the time without a cause of its own was.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from clusterprof.attribution.families import CAUSES
from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.step_blocks import (
    IDLE,
    LOST,
    MEASURED,
    PERHAPS,
    ROWS,
    STEP_NS,
    STEPS,
    TIME,
    Blocks,
    packed,
    parted,
)
from clusterprof.findings import UNATTRIBUTED
from clusterprof.stepstats import StepStats
from clusterprof.timeline.model import Int

_GAPS_BELOW = 0.9


def step_stats(books: Sequence[RankBooks]) -> StepStats | None:
    """Return what all ranks did, by block of steps; None where nobody marked one."""
    known = [(one, one.blocks) for one in books if one.blocks is not None]
    if not known:
        return None
    width = max(blocks.width for _, blocks in known)
    wide = [(one, blocks.widened(width)) for one, blocks in known]
    n = max(blocks.sums.shape[1] for _, blocks in wide)
    in_step, sums = np.zeros(n, np.int64), np.zeros((ROWS, n), np.int64)
    claims: dict[str, Int] = {}
    for one, blocks in wide:
        part = slice(0, blocks.sums.shape[1])
        in_step[part] += spread(one.ledger.in_step_ns, _time(blocks))
        sums[:, part] += blocks.sums
        for cause, ns in blocks.lost.items():
            claims.setdefault(cause, np.zeros(n, np.int64))[part] += ns
    # Ranks without a step have no time inside steps, or it has no block: it lies in the last.
    in_step[-1] += sum(one.ledger.in_step_ns for one in books) - int(in_step.sum())
    total = sum(one.ledger.lost_ns for one in books)
    lost = spread(total, _lost(total, sums[LOST], claims.pop(PERHAPS, None)))
    causes = _causes(_buckets(books), claims, lost)
    return StepStats(
        width=width,
        steps=_whole(sums[STEPS]),
        step_ns=_whole(sums[STEP_NS]),
        in_step_ns=_whole(in_step),
        measured_ns=_whole(sums[MEASURED]),
        busy_ns=_whole(sums[MEASURED] - sums[IDLE]),
        lost_ns=_whole(lost),
        lost=tuple((cause, _family(cause), _whole(ns)) for cause, ns in causes),
        lengths=_lengths([blocks for _, blocks in wide], n),
    )


def spread(total: int, profile: Int) -> Int:
    """Share a total out as a profile is; whole numbers that add up to it, ties by place.

    7 over 1, 1 and 2 is 2, 2 and 3.
    """
    weights = np.maximum(profile, 0).astype(np.float64)
    if not weights.sum() > 0:
        weights = np.ones(profile.size)
    until = np.rint(np.cumsum(weights) / weights.sum() * abs(total)).astype(np.int64)
    until[-1] = abs(total)
    parts = np.diff(until, prepend=0)
    return parts if total >= 0 else -parts


def _time(blocks: Blocks) -> Int:
    """Steps cut time finer than samples do: where these have gaps they say how much was seen."""
    seen, time = blocks.sums[MEASURED], blocks.sums[TIME]
    return seen if 0 < seen.sum() < _GAPS_BELOW * time.sum() else time


def _lost(total: int, sure: Int, perhaps: Int | None) -> Int:
    """What was lost, with that of which it was not sure if the whole has it too."""
    more = total - int(sure.sum())
    if perhaps is None or more <= 0:
        return sure
    return sure + spread(min(more, int(perhaps.sum())), perhaps)


def _buckets(books: Iterable[RankBooks]) -> Counter[str]:
    out: Counter[str] = Counter()
    for one in books:
        out.update(dict(one.ledger.buckets))
    return out


def _causes(
    buckets: Mapping[str, int], claims: Mapping[str, Int], lost: Int
) -> list[tuple[str, Int]]:
    """Return (cause, ns by block) for every bucket, largest first, each with its exact sum."""
    waited = lost - sum(claims.values(), np.zeros_like(lost))
    profiles: dict[str, Int] = {}
    left: dict[str, list[tuple[int, Int]]] = {}  # of leaves that are told by their family
    for cause, ns in claims.items():
        claimed, told = int(ns.sum()), buckets.get(cause, 0)
        profiles[cause] = spread(min(told, claimed), ns)
        if told < claimed:
            left.setdefault(_family(cause), []).append((claimed - told, ns))
    out = []
    for cause, total in buckets.items():
        own = profiles.get(cause, np.zeros_like(lost))
        rest = total - int(own.sum())
        for more, profile in left.pop(cause, []):
            part = spread(min(more, rest), profile)
            own, rest = own + part, rest - int(part.sum())
        if cause != UNATTRIBUTED:
            out.append((cause, own + spread(rest, waited)))
    unexplained = lost - sum((ns for _, ns in out), np.zeros_like(lost))
    out.append((UNATTRIBUTED, spread(buckets.get(UNATTRIBUTED, 0), unexplained)))
    return sorted(out, key=lambda one: (-int(one[1].sum()), one[0]))


def _family(cause: str) -> str:
    return CAUSES[cause].family if cause in CAUSES else cause


def _lengths(blocks: Sequence[Blocks], n: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    keys = packed(np.concatenate([one.keys for one in blocks], axis=1))
    block, bin_ = parted(keys)
    edges = np.searchsorted(block, np.arange(n + 1))
    pairs = list(zip(bin_.tolist(), keys[1].tolist()))
    return tuple(tuple(pairs[low:high]) for low, high in itertools.pairwise(edges))


def _whole(numbers: Int) -> tuple[int, ...]:
    return tuple(numbers.tolist())
