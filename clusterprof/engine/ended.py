"""Which ranks ended while others of their job went on.

    rank 0  ████████████                  loses 0 %      both together 20 %
    rank 1  ████████████████████████      loses 40 %     then rank 1 alone: 40 %

Nothing changed at the end of rank 0 but that it is no longer counted.
"""

from __future__ import annotations

from collections.abc import Sequence

from clusterprof.attribution.ledger import RankBooks
from clusterprof.history import RankHistory

EARLY_RATIO = 1 / 24
"""Of the run: who ended by less before the others is counted as one that ended with them."""


def ended_early(
    ranks: Sequence[RankHistory],
    books: Sequence[RankBooks],
    begin_ns: int,
    stretch_ns: int,
    step_every: int,
) -> tuple[tuple[int, int], ...]:
    """Return (place, run time) of ranks whose last step ended early, by place.

    A process that was started anew as the same rank has not ended.
    """
    ends: dict[int, int] = {}
    for one in ranks:
        stepped = [at for at, ns in enumerate(one.in_step_ns) if ns]
        if stepped:
            end_ns = begin_ns + (stepped[-1] + 1) * stretch_ns
            known = step_every == 1 and one.step_ends_ns
            ends[one.rank] = min(end_ns, one.step_ends_ns[-1]) if known else end_ns
    last: dict[tuple[int, str, int | None, int], int] = {}
    for at, end_ns in ends.items():
        last[_who(books[at])] = max(last.get(_who(books[at]), 0), end_ns)
    jobs: dict[int, int] = {}
    for who, end_ns in last.items():
        jobs[who[0]] = max(jobs.get(who[0], 0), end_ns)
    return tuple(
        (at, end_ns)
        for at, end_ns in sorted(ends.items())
        if last[_who(books[at])] == end_ns
        and end_ns < jobs[books[at].job] - EARLY_RATIO * (jobs[books[at].job] - begin_ns)
    )


def _who(one: RankBooks) -> tuple[int, str, int | None, int]:
    ledger = one.ledger
    number = ledger.pid if ledger.rank is None else 0
    return one.job, ledger.node if ledger.rank is None else "", ledger.rank, number
