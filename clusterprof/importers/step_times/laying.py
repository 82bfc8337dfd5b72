"""Step times as steps, and as the waits of ranks that leave each step together.

rank 0   |== own time ==|-- waits --|== own …
rank 5   |====== own time =========|====== …
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from clusterprof.importers.base import Account, CannotImportError
from clusterprof.importers.step_times.reading import Table
from clusterprof.importers.tables import Float, Int, NodeTables, group_number
from clusterprof.probe import layout

_SECONDS_BELOW = 60.0
"""Median of durations without a unit: below it they are taken for seconds, else for ms."""
_LATEST_NS = float(1 << 62)
RANKS_AT_MOST = 1 << 14
_TOGETHER = 0.9
"""Of the steps must fit the picture of ranks that wait for each other."""


@dataclass(frozen=True, slots=True)
class Laid:
    """One row per rank and step, in order of steps."""

    rank: Int
    step: Int
    start_ns: Int
    own_end_ns: Int
    """When it had done its own part."""
    end_ns: Int
    """When all had."""
    number: Int
    """Of the operation with which they left the step, from 0; -1 where none is known."""


def nodes_of(table: Table, key: str, source: str, account: Account) -> Iterator[NodeTables]:
    """Yield the nodes of one job."""
    laid = _laid(table, account)
    ranks = np.unique(laid.rank)
    if ranks.size > RANKS_AT_MOST:
        raise CannotImportError(f"{ranks.size:,} ranks are more than {RANKS_AT_MOST:,}")
    by_host: dict[str, list[int]] = {}
    for rank in ranks.tolist():
        by_host.setdefault(table.hosts.get(rank, ""), []).append(rank)
    order = np.argsort(laid.rank, kind="stable")
    edges = laid.rank[order].searchsorted(ranks), laid.rank[order].searchsorted(ranks, "right")
    rows_of = {
        rank: order[a:b] for rank, a, b in zip(ranks.tolist(), *map(np.ndarray.tolist, edges))
    }
    absolute = bool(table.start_ns) and table.start_ns[0] >= 0 and table.zoned
    group = group_number(ranks.tolist())
    for host in sorted(by_host):
        node = NodeTables(host, source, 0 if absolute else None, host or key)
        node.job = node.shown = key
        for rank in by_host[host]:
            pid, mine = rank + 1, rows_of[rank]
            node.rank(pid, rank, int(ranks[-1]) + 1)
            if rank == by_host[host][0]:
                node.group(pid, group, ranks.tolist())
            start, end, own = laid.start_ns[mine], laid.end_ns[mine], laid.own_end_ns[mine]
            node.spans(pid, layout.STEP, start, end, laid.step[mine], 2, -1, -1)
            joined = laid.number[mine] >= 0
            if joined.any():
                node.collectives(
                    pid, own[joined], end[joined], group, laid.number[mine][joined],
                    operation=layout.BARRIER,
                )  # fmt: skip
        yield node
    account.read["ranks"] += ranks.size
    account.read["steps"] += int(np.unique(laid.step).size)


def _laid(table: Table, account: Account) -> Laid:
    rank, step = (np.frombuffer(one, np.int64) for one in (table.rank, table.step))
    start = np.frombuffer(table.start_ns, np.int64)
    duration = np.frombuffer(table.duration, np.float64)
    order = np.lexsort((np.arange(rank.size), rank, step))
    rank, step, start, duration = rank[order], step[order], start[order], duration[order]
    last = np.append((rank[1:] != rank[:-1]) | (step[1:] != step[:-1]), True)
    if not last.all():
        account.skipped["rows of a rank and step of which there is a later one"] += int(
            (~last).sum()
        )
    rank, step, start, duration = rank[last], step[last], start[last], duration[last]
    duration = duration * _unit(table, duration, account)
    if float(duration.sum()) + float(start.max(initial=0)) >= _LATEST_NS:
        raise CannotImportError("the durations add up to more than a century", "state their unit")
    own = np.rint(duration).astype(np.int64)
    first = np.flatnonzero(np.append(True, step[1:] != step[:-1]))
    if start.min(initial=0) >= 0:
        return _as_timed(rank, step, start, own, first, account)
    account.notes.append(
        "durations alone: ranks are taken to begin each step together, and to wait at its end for"
        " the slowest"
    )
    longest = np.maximum.reduceat(own, first)
    begins = np.concatenate([[0], np.cumsum(longest)[:-1]])
    row = np.repeat(np.arange(first.size), np.diff(np.append(first, rank.size)))
    all_there = _complete(rank, first, row, account)
    number = np.where(all_there, np.cumsum(all_there) - 1, -1)[row]
    begin = begins[row]
    end = np.where(number >= 0, begin + longest[row], begin + own)
    return Laid(rank, step, begin, begin + own, end, number)


def _unit(table: Table, duration: Float, account: Account) -> float:
    if table.stated:
        return 1.0
    seconds = float(np.median(duration)) < _SECONDS_BELOW
    account.notes.append(
        f"no unit is stated: durations are taken for {'s' if seconds else 'ms'}; shares and ratios"
        " do not depend on it"
    )
    return 1e9 if seconds else 1e6


def _complete(rank: Int, first: Int, row: Int, account: Account) -> NDArray[np.bool_]:
    """Steps of which every rank's time is known: of others nobody knows who was waited for."""
    present = np.diff(np.append(first, rank.size))
    there = present == np.unique(rank).size
    missing = int((~there).sum())
    if missing:
        account.notes.append(
            f"{missing:,} of {first.size:,} steps are not there of all ranks: who waited for whom"
            " is not told of them"
        )
    return np.asarray(there)


def _as_timed(rank: Int, step: Int, start: Int, own: Int, first: Int, account: Account) -> Laid:
    """Steps where they were; waits where the next step begins only when all have ended this one."""
    end = start + own
    row = np.repeat(np.arange(first.size), np.diff(np.append(first, rank.size)))
    release = np.maximum.reduceat(end, first)
    begins = np.minimum.reduceat(start, first)
    fits = begins[1:] >= release[:-1]
    there = _complete(rank, first, row, account)
    if first.size < 2 or fits.mean() < _TOGETHER:
        account.notes.append(
            "ranks do not begin each step after all have ended the one before: no rank is shown to"
            " wait for another"
        )
        return Laid(rank, step, start, end, end, np.full(rank.size, -1, np.int64))
    joins = there & np.append(fits, True)
    number = np.where(joins, np.cumsum(joins) - 1, -1)[row]
    return Laid(rank, step, start, end, np.where(number >= 0, release[row], end), number)
