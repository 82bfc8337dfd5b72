"""Ranks by causes, felt and caused, cut to what matters: who suffers and who is at fault.

    rank 27   felt      1.2 s    its device stood still
              caused   76.8 s    itself and all that waited for it

Rows are the ranks that stand out from the middle of all ranks (of a node those that are alike share
one, with what each of them lost); the others share the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterprof.findings import RankLedger, Report
from clusterprof.hostlists import fold_numbers
from clusterprof.units import human

_ALIKE_RATIO = 0.1  # of what most ranks felt: ranks that differ by less are alike
_FEW_RANKS = 2  # so many more than the rows are shown, too
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Line:
    """One rank, or several of a node with the mean of each number."""

    label: str
    node: str
    felt: tuple[int, ...]
    """ns per cause of the matrix, and last of all causes."""
    caused: tuple[int, ...]
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """The table, with a sentence about the ranks that share the last line."""

    causes: tuple[str, ...]
    lines: tuple[Line, ...]
    rest: str
    """"" when every rank has a line of its own."""


def matrix_of(report: Report, most_rows: int, most_causes: int) -> Matrix | None:
    """Return the table; None when ranks were not compared or there is only one."""
    ranks = report.ranks
    if len(ranks) < 2 or not any(rank.caused for rank in ranks):
        return None
    felt = [dict(rank.buckets) for rank in ranks]
    caused = [dict(rank.caused) for rank in ranks]
    causes = _telling(felt, caused, most_causes)
    lines = [
        Line(
            str(rank.pid if rank.rank is None else rank.rank),
            rank.node,
            (*(f.get(cause, 0) for cause in causes), sum(f.values())),
            (*(c.get(cause, 0) for cause in causes), sum(c.values())),
        )
        for rank, f, c in zip(ranks, felt, caused)
    ]
    if len(lines) <= most_rows + _FEW_RANKS:
        order = sorted(range(len(lines)), key=lambda at: (-lines[at].caused[-1], at))
        return Matrix(causes, tuple(lines[at] for at in order), "")
    groups, hidden = _standing_out(lines, most_rows)
    shown = [_shared(lines, group, ranks) for group in groups]
    if not hidden:
        return Matrix(causes, tuple(shown), "")
    rest = _shared(lines, hidden, ranks)
    return Matrix(causes, (*shown, rest), _about([lines[at] for at in hidden]))


def amount(ns: int) -> str:
    """Write a cell; nothing is a dash, so that what there is stands out."""
    return human(ns, "ns") if ns else NOTHING


def _telling(
    felt: Sequence[dict[str, int]], caused: Sequence[dict[str, int]], most: int
) -> tuple[str, ...]:
    """Return the causes in which victims and culprits differ most; of equal ones the largest."""
    moved: dict[str, int] = {}
    size: dict[str, int] = {}
    for f, c in zip(felt, caused):
        for cause in {*f, *c}:
            moved[cause] = moved.get(cause, 0) + abs(f.get(cause, 0) - c.get(cause, 0))
            size[cause] = size.get(cause, 0) + f.get(cause, 0)
    order = sorted(moved, key=lambda cause: (-moved[cause], -size[cause], cause))
    return tuple([cause for cause in order if moved[cause] or size[cause]][:most])


def _standing_out(lines: Sequence[Line], most: int) -> tuple[list[list[int]], list[int]]:
    """Return the ranks that differ most from the middle one, those of a node that are alike
    together, most caused first; and the others."""
    felt, caused = (sorted(all_) for all_ in zip(*((x.felt[-1], x.caused[-1]) for x in lines)))
    felt_ns, caused_ns = felt[len(lines) // 2], caused[len(lines) // 2]
    least = _ALIKE_RATIO * max(felt_ns, caused_ns)

    def apart(at: int) -> int:
        one = lines[at]
        return max(abs(one.felt[-1] - felt_ns), abs(one.caused[-1] - caused_ns))

    groups: list[list[int]] = []
    for at in sorted(range(len(lines)), key=lambda at: (-apart(at), at)):
        if apart(at) <= least and groups:
            break
        mine = next((g for g in groups if _alike(lines[g[0]], lines[at], least)), None)
        if mine is not None:
            mine.append(at)
        elif len(groups) < most:
            groups.append([at])
    groups.sort(key=lambda g: (-lines[g[0]].caused[-1], -lines[g[0]].felt[-1], g[0]))
    told = {at for group in groups for at in group}
    return [sorted(group) for group in groups], sorted(set(range(len(lines))) - told)


def _alike(one: Line, other: Line, least: float) -> bool:
    """True for ranks of a node that differ by less than what makes a rank stand out."""
    pairs = zip((*one.felt, *one.caused), (*other.felt, *other.caused))
    return one.node == other.node and all(abs(a - b) <= least for a, b in pairs)


def _shared(lines: Sequence[Line], group: Sequence[int], ranks: Sequence[RankLedger]) -> Line:
    """Return one line for several ranks: the mean of each cell."""
    some = [lines[at] for at in group]
    if len(some) == 1:
        return some[0]
    felt, caused = _middle([one.felt for one in some]), _middle([one.caused for one in some])
    return Line(_numbers([ranks[at] for at in group]), some[0].node, felt, caused, len(some))


def _middle(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) // len(rows) for column in zip(*rows))


def _numbers(ranks: Sequence[RankLedger]) -> str:
    numbers = [rank.rank for rank in ranks if rank.rank is not None and rank.rank >= 0]
    return fold_numbers(numbers) if len(numbers) == len(ranks) else "others"


def _about(some: Sequence[Line]) -> str:
    """Say how alike the ranks of the last line are."""
    count = f"{len(some):,} more {'rank' if len(some) == 1 else 'ranks'}"
    spans = []
    for word, column in (
        ("felt", [x.felt[-1] for x in some]),
        ("caused", [x.caused[-1] for x in some]),
    ):
        spans.append((word, min(column), max(column)))
    middle = sum(one.felt[-1] for one in some) / len(some)
    if all(high - low <= 2 * _ALIKE_RATIO * middle for _, low, high in spans):
        return f"{count}, all alike; each"
    told = ", ".join(
        f"{word} {human(low, 'ns')} to {human(high, 'ns')}" for word, low, high in spans
    )
    return f"{count} ({told}); on average"
