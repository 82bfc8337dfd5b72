"""The exact ledger as rows: what every output prints to the nanosecond, so that sums can be redone.

A row is a label, its depth below "observed", and one integer per column; the first column is all
ranks together, when there is more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clusterprof.findings import UNATTRIBUTED, RankLedger, Report
from clusterprof.renderers.text_safety import safe_text
from clusterprof.renderers.words import rank_name, summed


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the ledger."""

    label: str
    depth: int
    ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """One rank, or all of them."""

    heading: str
    rank: RankLedger | None
    """None for all ranks together."""
    window_ns: int
    unmeasured_ns: int
    outside_ns: int
    outside: dict[str, int]
    in_step_ns: int
    productive_ns: int
    lost_ns: int
    causes: dict[str, int]


def columns_of(report: Report, most_ranks: int) -> list[Column]:
    """Return all ranks together, then up to `most_ranks` ranks, those that lost most first."""
    everyone = Column(
        "all ranks", None, report.window_ns, report.unmeasured_ns, report.outside_ns,
        dict(report.outside_buckets), report.in_step_ns, report.productive_ns, report.lost_ns,
        summed(report),
    )  # fmt: skip
    ranks = [_of_rank(rank) for rank in worst_first(report.ranks)[:most_ranks]]
    return ranks if len(report.ranks) == 1 else [everyone, *ranks]


def worst_first(ranks: Sequence[RankLedger]) -> list[RankLedger]:
    """Order ranks by lost time, largest first, then by number: stable."""
    order = {id(rank): index for index, rank in enumerate(ranks)}
    return sorted(ranks, key=lambda rank: (-rank.lost_ns, order[id(rank)]))


def rows_of(columns: Sequence[Column]) -> list[Row]:
    """Lay columns out as rows; a cause that a rank does not have is 0 there: it is known to be."""

    def row(label: str, depth: int, values: Sequence[int]) -> Row:
        return Row(safe_text(label, 60), depth, tuple(values))

    outside = _keys(column.outside for column in columns)
    causes = _keys(column.causes for column in columns)
    rows = [
        row("observed", 0, [c.window_ns for c in columns]),
        row("not measured", 1, [c.unmeasured_ns for c in columns]),
        row("outside steps", 1, [c.outside_ns for c in columns]),
    ]
    rows += [row(cause, 2, [c.outside.get(cause, 0) for c in columns]) for cause in outside]
    rows += [
        row("in steps", 1, [c.in_step_ns for c in columns]),
        row("productive", 2, [c.productive_ns for c in columns]),
        row("lost", 2, [c.lost_ns for c in columns]),
    ]
    rows += [row(cause, 3, [c.causes.get(cause, 0) for c in columns]) for cause in causes]
    return rows


def exact_seconds(ns: int) -> str:
    """Write nanoseconds as seconds without rounding: 1,234.000000005."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 10**9:,}.{ns % 10**9:09d}"


def _of_rank(rank: RankLedger) -> Column:
    return Column(
        rank_name(rank), rank, rank.window_ns, rank.unmeasured_ns, rank.outside_ns,
        _summed(rank.outside_buckets), rank.in_step_ns, rank.productive_ns, rank.lost_ns,
        _summed(rank.buckets),
    )  # fmt: skip


def _summed(buckets: Sequence[tuple[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for cause, ns in buckets:
        sums[cause] = sums.get(cause, 0) + ns
    return sums


def _keys(buckets: object) -> list[str]:
    """Return the causes of all columns, largest in the first column first, unattributed last."""
    sums: dict[str, int] = {}
    for column in buckets:  # type: ignore[attr-defined]
        for cause, ns in column.items():
            sums[cause] = max(sums.get(cause, 0), ns)
    return sorted(sums, key=lambda cause: (cause == UNATTRIBUTED, -sums[cause], cause))
