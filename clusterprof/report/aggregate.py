"""Sum the ranks of a large job by node, rack and process group.

Above MAX_LISTED_RANKS ranks an output lists few of them one by one, and the others as sums:

    10,000 ranks = 120 listed ranks + 9,880 others in 1,250 sums, one for each node

Listed are the ranks that the report names: main culprits, victims and culprits of the longest
waits, the last ranks of slow steps, ranks of the largest stacks, and those that lost or caused
most.
All amounts are integers, so listed ranks and sums add up to the whole to the nanosecond.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Literal

from clusterprof.report.history import History, RankHistory
from clusterprof.report.impact import DeviceUtilization, RankUtilization
from clusterprof.report.model import Finding, NodeFacts, RankLedger, RankSum, Report

MAX_LISTED_RANKS = 512
"""Number of ranks up to which every rank is listed."""
MAX_LISTED_CULPRITS = 64
"""Largest culprits of a finding that are listed above MAX_LISTED_RANKS."""
MAX_OUTLIERS = 32
"""Ranks that lost most, and ranks that caused most, that are listed above MAX_LISTED_RANKS."""
_MAX_WAITS, _MAX_SLOW_STEPS, _MAX_ENDED, _MAX_STACKS = 20, 20, 64, 64
_MAX_GROUPS = 256
"""Named process groups that are summed, the first by name."""


def is_aggregated(report: Report) -> bool:
    """Return whether a report has too many ranks to list all of them."""
    return len(report.ranks) > MAX_LISTED_RANKS


def name_full_list(report: Report) -> str:
    """Return the options of `analyze` that list every rank."""
    return "--json --full" if is_aggregated(report) else "--json"


def select_listed_ranks(report: Report) -> list[int]:
    """Select the ranks to list: places in `Report.ranks`, ascending."""
    if not is_aggregated(report):
        return list(range(len(report.ranks)))
    count = len(report.ranks)
    return sorted({index for index in _iterate_named_ranks(report) if 0 <= index < count})


def _iterate_named_ranks(report: Report) -> Iterator[int]:
    """Iterate over the places of the ranks that the report names, with repetitions."""
    ranks = report.ranks
    by_device = {(rank.node, rank.rank, rank.device): index for index, rank in enumerate(ranks)}
    by_number = {(rank.node, rank.rank): index for index, rank in enumerate(ranks)}
    for finding in report.findings:
        for culprit in finding.culprits[:MAX_LISTED_CULPRITS]:
            yield by_device.get((culprit.node, culprit.rank, culprit.device), -1)
    for node, number, _ in (
        report.slow_step_summary.late_ranks[:MAX_LISTED_CULPRITS]
        if report.slow_step_summary
        else ()
    ):
        yield by_number.get((node, number), -1)
    if report.history is not None:
        longest = sorted(report.history.waits, key=lambda wait: (-wait.duration_ns, wait.start_ns))
        for wait in longest[:_MAX_WAITS]:
            yield from (wait.victim, -1 if wait.culprit is None else wait.culprit)
        for step in report.history.slow_steps[:_MAX_SLOW_STEPS]:
            yield -1 if step.rank is None else step.rank
        yield from (index for index, _ in report.history.ended[:_MAX_ENDED])
    yield from (stack.rank for stack in (report.code.stacks if report.code else ())[:_MAX_STACKS])
    places = range(len(ranks))
    yield from sorted(places, key=lambda index: (-ranks[index].lost_ns, index))[:MAX_OUTLIERS]
    caused = [sum(ns for _, ns in rank.caused) for rank in ranks]
    yield from sorted(places, key=lambda index: (-caused[index], index))[:MAX_OUTLIERS]


def sum_unlisted_ranks(report: Report, listed: Sequence[int]) -> tuple[RankSum, ...]:
    """Sum the ranks that are not listed by node, in the order of their first rank.

    listed: places in `Report.ranks`.
    """
    shown = set(listed)
    by_node: dict[str, list[RankLedger]] = {}
    for rank_index, rank in enumerate(report.ranks):
        if rank_index not in shown:
            by_node.setdefault(rank.node, []).append(rank)
    return tuple(sum_ranks("node", node, ranks) for node, ranks in by_node.items())


def sum_groups(report: Report) -> tuple[RankSum, ...]:
    """Sum all ranks by rack, then by named process group, each by name.

    Ranks are assigned to groups by their numbers: to none where several ranks share a number.
    """
    rack_of = {node.name: node.rack for node in report.nodes}
    by_rack: dict[str, list[RankLedger]] = {}
    by_number: dict[int | None, RankLedger] = {}
    for rank in report.ranks:
        by_rack.setdefault(rack_of.get(rank.node, ""), []).append(rank)
        by_number[rank.rank] = rank
    racks = [] if set(by_rack) == {""} else sorted(by_rack.items())
    sums = [sum_ranks("rack", name, ranks) for name, ranks in racks]
    if None in by_number or len(by_number) != len(report.ranks):
        return tuple(sums)
    for group in report.groups[:_MAX_GROUPS]:
        members = [by_number[number] for number in group.ranks if number in by_number]
        if members:
            sums.append(sum_ranks("group", group.name, members))
    return tuple(sums)


def sum_ranks(
    of: Literal["node", "rack", "group"], name: str, ranks: Sequence[RankLedger]
) -> RankSum:
    """Sum the ledgers of ranks, at least one."""
    coverage = [rank.coverage_ratio for rank in ranks]
    unknown = any(math.isnan(ratio) for ratio in coverage)
    return RankSum(
        grouped_by=of,
        name=name,
        ranks=len(ranks),
        steps=sum(rank.steps for rank in ranks),
        fewest_steps=min(rank.steps for rank in ranks),
        lowest_coverage_ratio=None if unknown else min(coverage),
        window_ns=sum(rank.window_ns for rank in ranks),
        unmeasured_ns=sum(rank.unmeasured_ns for rank in ranks),
        outside_ns=sum(rank.outside_ns for rank in ranks),
        in_step_ns=sum(rank.in_step_ns for rank in ranks),
        productive_ns=sum(rank.productive_ns for rank in ranks),
        lost_ns=sum(rank.lost_ns for rank in ranks),
        buckets=sum_amounts(rank.buckets for rank in ranks),
        outside_buckets=sum_amounts(rank.outside_buckets for rank in ranks),
        caused=sum_amounts(rank.caused for rank in ranks),
        unobserved_ns=sum(rank.unobserved_ns for rank in ranks),
    )


def sum_amounts(lines: Iterable[Iterable[tuple[str, int]]]) -> tuple[tuple[str, int], ...]:
    """Sum (name, ns) by name, the largest first, then by name; without zeros."""
    sums: dict[str, int] = {}
    for pairs in lines:
        for name, ns in pairs:
            sums[name] = sums.get(name, 0) + ns
    return tuple(sorted(((k, ns) for k, ns in sums.items() if ns), key=lambda p: (-p[1], p[0])))


def sum_culprits(
    finding: Finding, most: int = MAX_LISTED_CULPRITS
) -> tuple[int, int | None, int | None]:
    """Sum the culprits of a finding beyond the `most` largest: number, own ns, others' ns.

    None = not known of each of them.
    """
    unlisted = finding.culprits[most:]
    own_ns = [culprit.own_ns for culprit in unlisted]
    others_ns = [culprit.others_ns for culprit in unlisted]
    return len(unlisted), _sum_known(own_ns), _sum_known(others_ns)


def _sum_known(amounts: Sequence[int | None]) -> int | None:
    known_ns = [ns for ns in amounts if ns is not None]
    return sum(known_ns) if len(known_ns) == len(amounts) else None


def split_utilization(
    utilization: DeviceUtilization, listed: Iterable[RankLedger]
) -> tuple[tuple[RankUtilization, ...], tuple[RankUtilization, ...]]:
    """Split the ranks of a utilization ledger into those that are listed and the others."""
    keys = {(rank.node, rank.rank, rank.pid) for rank in listed}
    parts: tuple[list[RankUtilization], list[RankUtilization]] = ([], [])
    for rank in utilization.ranks:
        parts[(rank.node, rank.rank, rank.pid) not in keys].append(rank)
    return tuple(parts[0]), tuple(parts[1])


def merge_unlisted_ranks(report: Report, listed: Sequence[int]) -> tuple[Report, tuple[int, ...]]:
    """Merge the ranks that are not listed into a ledger for each node, at the place of the first.

    listed: places in `Report.ranks`. Returns the report, whose sums are the same, and for each of
    its ranks how many it stands for: 1 for a listed rank. Its history, waits, slow steps and
    stacks refer to the merged ranks. Utilization and groups are unchanged.
    """
    shown = set(listed)
    place_of: list[int] = []
    members: list[list[int]] = []
    rest_of_node: dict[str, int] = {}
    for index, rank in enumerate(report.ranks):
        position = (
            len(members) if index in shown else rest_of_node.setdefault(rank.node, len(members))
        )
        if position == len(members):
            members.append([])
        members[position].append(index)
        place_of.append(position)
    rest_positions = set(rest_of_node.values())
    ranks = tuple(
        _merge_ledgers([report.ranks[index] for index in merged])
        if position in rest_positions
        else report.ranks[merged[0]]
        for position, merged in enumerate(members)
    )
    counts = tuple(
        len(merged) if position in rest_positions else 1 for position, merged in enumerate(members)
    )
    code = report.code and replace(
        report.code,
        stacks=tuple(
            replace(stack, rank=place_of[stack.rank])
            for stack in report.code.stacks
            if 0 <= stack.rank < len(place_of)
        ),
    )
    history = report.history and _merge_histories(report.history, members, place_of)
    return replace(report, ranks=ranks, code=code, history=history), counts


def _merge_ledgers(ranks: Sequence[RankLedger]) -> RankLedger:
    """Merge the ledgers of ranks of a node into one without a rank number."""
    total = sum_ranks("node", ranks[0].node, ranks)
    names = {field.name for field in fields(RankLedger)} & {field.name for field in fields(RankSum)}
    sums = {name: getattr(total, name) for name in names}
    coverage = math.nan if total.lowest_coverage_ratio is None else total.lowest_coverage_ratio
    return RankLedger(
        node=total.name,
        rank=None,
        pid=0,
        device="",
        source=ranks[0].source,
        coverage_ratio=coverage,
        **sums,
    )


def _merge_histories(
    history: History, members: Sequence[Sequence[int]], place_of: Sequence[int]
) -> History:
    """Merge the histories of ranks; step marks stay those of listed ranks and of first members."""

    def find_place(index: int | None) -> int | None:
        return place_of[index] if index is not None and 0 <= index < len(place_of) else None

    count = len(history.ranks)
    ranks = tuple(
        _sum_histories(position, [history.ranks[index] for index in merged if index < count])
        for position, merged in enumerate(members)
    )
    waits = tuple(
        replace(wait, victim=position, culprit=find_place(wait.culprit))
        for wait in history.waits
        if (position := find_place(wait.victim)) is not None
    )
    steps = tuple(replace(step, rank=find_place(step.rank)) for step in history.slow_steps)
    ended = tuple(
        (place_of[index], ns) for index, ns in history.ended if 0 <= index < len(place_of)
    )
    return replace(history, ranks=ranks, waits=waits, slow_steps=steps, ended=ended)


def _sum_histories(position: int, histories: Sequence[RankHistory]) -> RankHistory:
    """Sum the histories of ranks by time bin and cause; the step marks are those of the first."""
    if len(histories) == 1:
        return replace(histories[0], rank=position)
    rows: dict[str, list[tuple[int, ...]]] = {}
    for history in histories:
        for cause, ns in history.lost:
            rows.setdefault(cause, []).append(ns)
    lost = [(cause, _sum_bins(of_cause)) for cause, of_cause in rows.items()]
    lost.sort(key=lambda line: (-sum(line[1]), line[0]))
    ends = histories[0].step_ends_ns if histories else ()
    in_step = _sum_bins([history.in_step_ns for history in histories])
    return RankHistory(position, in_step, tuple(lost), ends)


def _sum_bins(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Sum rows of ns by time bin; a shorter row lacks the last bins."""
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))


def list_processes(
    ranks: Sequence[RankLedger], nodes: Sequence[NodeFacts]
) -> list[tuple[object, ...]]:
    """List a key of the process of each rank: equal for two windows of one process.

    A profiler that records a process several times writes a file each time. The pid identifies it,
    with its host or its rank; without both, each window counts as a process.

    nodes: the node of each rank, or more. Returns a key per rank.
    """
    hosts = {node.name for node in nodes if node.has_host_name}
    windows = {node.name for node in nodes if node.is_window}
    return [
        (rank.node if rank.node in hosts else "", rank.rank, rank.pid, rank.device)
        if rank.node in windows and (rank.rank is not None or rank.node in hosts)
        else (row,)
        for row, rank in enumerate(ranks)
    ]
