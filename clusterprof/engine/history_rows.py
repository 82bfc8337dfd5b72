"""One rank's lost time in stretches, as its ledger names and sums it.

What a rank lost is known stretch by stretch under the names of causes; the ledger may say a family
instead, and has moved the time in operations to its causes. Here every line of the ledger that is
the rank's own keeps its sum, and what it felt waiting for others is `WAITING`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from clusterprof.attribution.ledger import RankBooks
from clusterprof.attribution.local import PEERS as PEERS_LEFT
from clusterprof.attribution.over_time import IN_STEP, MAYBE, PEERS, PERHAPS, REST
from clusterprof.attribution.partial import SHARE
from clusterprof.engine.caused import Amounts
from clusterprof.findings import UNATTRIBUTED
from clusterprof.history import WAITING
from clusterprof.timeline.model import Int

_MOVED = {"eval": "cpu"}
"""Causes that were told of all ranks together, and where their time was before."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Amounts by row and stretch of the run: whole ns, and what is left in 1/SHARE ns."""

    names: tuple[str, ...]
    whole: Int
    """int64[names, stretches]."""
    rest: Int

    def of(self, names: tuple[str, ...]) -> tuple[Int, Int]:
        """Return the sum of some rows."""
        at = [number for number, name in enumerate(self.names) if name in names]
        return self.whole[at].sum(axis=0), self.rest[at].sum(axis=0)


def laid_on(edges_ns: Int, whole: Int, rest: Int, at_ns: Int) -> tuple[Int, Int]:
    """Return amounts between the times `at_ns`, from those between `edges_ns`.

    int64[rows, stretches] of whole ns and 1/SHARE ns. What lies outside the first and the last of
    `at_ns` goes to the stretch next to it; where edges do not meet, amounts are taken as even.
    """
    row = np.clip(np.searchsorted(edges_ns, at_ns, side="right") - 1, 0, edges_ns.size - 2)
    length = np.maximum(edges_ns[row + 1] - edges_ns[row], 1)
    part = np.clip((at_ns - edges_ns[row]) / length, 0.0, 1.0)
    out = []
    for amounts in (whole, rest):
        before = np.concatenate([np.zeros((len(amounts), 1), np.int64), amounts], axis=1)
        before = np.cumsum(before, axis=1)
        until = before[:, row] + np.floor(amounts[:, row] * part).astype(np.int64)
        until[:, 0], until[:, -1] = 0, before[:, -1]
        out.append(np.diff(until, axis=1))
    return out[0], out[1]


def own_and_waiting(books: RankBooks, own: Amounts) -> dict[str, int]:
    """Return the lines of a ledger that are the rank's own (`caused.Doing.own`), and `WAITING`.

    Together they are what it lost, and none is negative.
    """
    lines = dict(own)
    left = min(dict(books.reasons).get(PEERS_LEFT, 0), max(lines.get(UNATTRIBUTED, 0), 0))
    lines[UNATTRIBUTED] = lines.get(UNATTRIBUTED, 0) - left
    lines[WAITING] = books.ledger.lost_ns - sum(lines.values())
    for name in [name for name, ns in lines.items() if ns < 0]:
        most = max(lines, key=lambda one: lines[one])
        lines[most] += lines[name]
        lines[name] = 0
    return {name: ns for name, ns in lines.items() if ns}


def lost_by_stretch(books: RankBooks, own: Amounts, rows: Rows) -> dict[str, Int]:
    """Return what a rank lost, by line and stretch; sums are those of its ledger to the ns."""
    lines = own_and_waiting(books, own)
    shape = _shapes(books, lines, rows)
    every = rows.of(tuple(name for name in rows.names if name not in (IN_STEP, PERHAPS)))
    out = {}
    for name, ns in lines.items():
        whole, rest = shape.get(name, every)
        if not (whole.any() or rest.any()):
            whole, rest = every if every[0].any() else rows.of((IN_STEP,))
        out[name] = spread(ns, whole, rest)
    _within(out, rows.of((IN_STEP,))[0])
    return out


def _shapes(books: RankBooks, lines: Mapping[str, int], rows: Rows) -> dict[str, tuple[Int, Int]]:
    """Return for each line the rows that say when it was."""
    named = {leaf for bucket in books.buckets for leaf in bucket.leaves}
    known = set(rows.names)
    shapes = {}
    for bucket in books.buckets:
        leaves = tuple(leaf for leaf in bucket.leaves if leaf in known)
        if not leaves and bucket.id in _MOVED:
            leaves = (_MOVED[bucket.id],)
        shapes[bucket.id] = rows.of(leaves)
    special = {IN_STEP, PEERS, MAYBE, PERHAPS, REST}
    unsure = tuple(name for name in rows.names if name not in named and name not in special)
    pool = (PEERS, MAYBE, PERHAPS) if spun(books, rows) else (PEERS, MAYBE)
    waited = rows.of(pool)
    shapes[WAITING] = waited
    rest = rows.of((REST, *unsure))
    pooled = int(waited[0].sum())
    over = max(pooled - lines.get(WAITING, 0), 0)
    if over > 1:  # of what may have been waiting this was not: it has no cause
        rest = (rest[0] + spread(over, *waited), rest[1])
    shapes[UNATTRIBUTED] = rest
    return shapes


def spun(books: RankBooks, rows: Rows) -> bool:
    """Return whether what a device perhaps span counts as lost (`engine.perhaps`)."""
    some = tuple(name for name in rows.names if name != IN_STEP)
    whole, rest = rows.of(some)
    perhaps = int(rows.of((PERHAPS,))[0].sum())
    return books.ledger.lost_ns > int(whole.sum()) + int(rest.sum()) // SHARE - perhaps // 2 - 1


def spread(total_ns: int, whole: Int, rest: Int) -> Int:
    """Share whole ns out by amounts that need not add up to them; largest remainders go first.

    10 by 1.5, 1.5 and 2.0 is 3, 3 and 4.
    """
    out = whole + rest // SHARE
    left = rest % SHARE
    apart = (total_ns - int(whole.sum())) * SHARE - int(rest.sum())
    if abs(apart) < SHARE:
        missing = total_ns - int(out.sum())
        out[np.argsort(-left, kind="stable")[:missing]] += 1
        return out
    weights = [int(a) * SHARE + int(b) for a, b in zip(whole.tolist(), rest.tolist())]
    of = sum(weights)
    if not of:
        weights, of = [1] * len(weights), len(weights)
    parts = [divmod(total_ns * one, of) for one in weights]
    out = np.array([part for part, _ in parts], np.int64)
    missing = total_ns - int(out.sum())
    order = sorted(range(len(parts)), key=lambda at: (-parts[at][1], at))
    out[order[:missing]] += 1
    return out


def _within(lost: dict[str, Int], in_step: Int) -> None:
    """Move the odd ns by which rounding put more into a stretch than it holds."""
    if not lost:
        return
    over = sum(lost.values()) - in_step
    for at in np.flatnonzero(over > 0).tolist():
        for name in sorted(lost, key=lambda one: -int(lost[one][at])):
            room = np.flatnonzero(over < 0)
            for to in room[np.argsort(np.abs(room - at), kind="stable")].tolist():
                moved = min(int(over[at]), -int(over[to]), int(lost[name][at]))
                lost[name][at] -= moved
                lost[name][to] += moved
                over[at] -= moved
                over[to] += moved
                if over[at] <= 0:
                    break
            if over[at] <= 0:
                break
