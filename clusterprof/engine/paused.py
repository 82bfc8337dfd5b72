"""Ranks that stop together to compute on their CPUs: an evaluation, where nobody marked one.

A collector of garbage, or a compiler, stops one rank, and the others wait for it. When the devices
of all ranks of a job do nothing for some windows while their main threads are on a CPU, and nobody
waits for anybody, the program says so: metrics of a validation, a log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterprof.attribution.hosting import PAUSED
from clusterprof.attribution.ledger import RankBooks, charged
from clusterprof.attribution.partial import SHARE
from clusterprof.engine.jobs import UNCLEAR
from clusterprof.engine.node import NodeResult

ALIKE_RATIO = 0.5
"""Of what the rank paused that did so most: what each does at least."""
WAITED_RATIO = 0.5
"""Of what it paused: waits of a rank for CPUs of others are less."""
MOSTLY_RATIO = 0.5
"""Of what it lost to its CPU by itself: what fell into pauses."""
_CPU, _EVAL = "cpu", "eval"


def paused_together(nodes: Sequence[NodeResult]) -> tuple[NodeResult, ...]:
    """Call what all ranks of a job computed in pauses at once `eval`."""
    by_job: dict[int, list[RankBooks]] = {}
    for node in nodes:
        for one in node.books:
            if one.job != UNCLEAR:
                by_job.setdefault(one.job, []).append(one)
    jobs = {job for job, books in by_job.items() if _together(books)}
    return tuple(
        replace(node, books=tuple(_moved(one) if one.job in jobs else one for one in node.books))
        for node in nodes
    )


def _together(books: Sequence[RankBooks]) -> bool:
    paused = [one.partial.totals.get(PAUSED, 0) for one in books]
    if len(books) < 2 or min(paused) <= 0 or min(paused) < ALIKE_RATIO * max(paused):
        return False
    if any(units < MOSTLY_RATIO * _computed(one) for one, units in zip(books, paused)):
        return False
    waited = sum(one.felt.get(_CPU, 0) for one in books) * SHARE
    return waited < WAITED_RATIO * sum(paused)


def _computed(one: RankBooks) -> int:
    claimed = sum(units for (cause, _, _), units in one.partial.claimed.items() if cause == _CPU)
    return claimed - one.felt.get(_CPU, 0) * SHARE


def _moved(one: RankBooks) -> RankBooks:
    left = _computed(one)  # with what ran into windows at the edges of pauses
    claimed = dict(one.partial.claimed)
    for key in sorted(claimed):
        cause, grade, source = key
        if cause == _CPU and grade == "C":
            part = min(left, claimed[key])
            left -= part
            claimed[key] -= part
            claimed[_EVAL, grade, source] = claimed.get((_EVAL, grade, source), 0) + part
    claimed = {key: units for key, units in claimed.items() if units}
    return charged(one, replace(one.partial, claimed=claimed), one.felt, one.caused)
