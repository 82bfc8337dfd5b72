"""Compare the main culprits of a finding with the other ranks in one number.

    rank 1  148 ms of work a step       the other 3 ranks  96 ms

Only numbers measured on both sides are compared: a rank that was not checked for a cause is left
out.

It also compares the work per step of an awaited rank with that of the waiting ranks: the evidence
behind `sync-slow-compute` and `sync-imbalance`. By its time alone, a rank that was slow from its
first step on looks like a rank with more to do. If the job reports how many samples or tokens its
steps held, that decides: as many as the others' is no larger batch (though sequences may be
longer). Where ranks bring different sizes to all-to-all operations, as when some experts of a
mixture get more tokens than others, the bytes of the late rank are compared too:

    bytes in a step    1, 1, 1, 2 MB      2 MB is 1.6 times the mean: evidence if that rank is late

Add to the size of reads how many there were, which decides whether larger records help.

    disk.read_size_bytes 64.0 KiB (a read asked for on average; 16,000 a second,
    1,860 in the waits of a step)

Reads are counted at the disk or mount while a rank waited: what it reads ahead is not included, and
what others read from it is.

Add to the culprits' number of dataloader workers the number on other ranks.

loader.workers_count 1 (on this rank; the other rank has 4)

It also finds when a cause began that was not there from the first step on: `Finding.onset`.

    loss caused by rank 2, by part of run    0 0 0 9 9 9 9 9 9 9 9 9    from part 4 on
    intermittent                             0 9 0 0 9 0 9 0 0 9 0 0    no onset
    ended again                              0 0 0 9 9 9 0 0 0 0 0 0    no onset

Only the single main culprit is examined: its own loss to the cause, and the waits of the others,
where most of their waiting was for it. A cause that ended again is described by `Persistence`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_high, median_low

from clusterprof.analysis.attribution.ledger import RankResult
from clusterprof.analysis.attribution.rank.claims import collect_evidence
from clusterprof.analysis.attribution.wait_for.blame import IMBALANCE, SLOW_COMPUTE
from clusterprof.analysis.attribution.wait_for.totals import ALL_TO_ALL_TOTALS
from clusterprof.analysis.cross_rank.waits import GROUP_ANNOUNCED
from clusterprof.analysis.findings.impact import MIN_KNOWN_STEPS_RATIO
from clusterprof.analysis.node.analyze import NodeResult
from clusterprof.analysis.node.setup import ProcessSetup
from clusterprof.report.history import WAITING_FOR_RANKS, History
from clusterprof.report.model import (
    Culprit,
    CulpritGroup,
    Evidence,
    Finding,
    Onset,
    PeerComparison,
    RankLedger,
    Report,
)
from clusterprof.units import format_quantity

OWN_LOSS_METRIC = "step.own_lost_ns"
WORK_METRIC = "step.worked_ns"
CHIEF_RATIO = 0.1
"""Least part of the first culprit's loss that a main culprit caused.

A smaller culprit is no main culprit, and no example of a healthy rank either.
"""
MIN_DIFFERENCE_RATIO = 1.2
"""Smallest ratio of two numbers that counts as a difference."""
_READ_TIME_NOTES: Mapping[str, str] = {
    "disk.read_latency_ns": "a read",
    "nfs.read_latency_ns": "a read",
    "cifs.read_latency_ns": "a read",
    "lustre.read_rpc_ns": "a read",
}


def with_comparisons(
    findings: Iterable[Finding], ranks: Sequence[RankResult]
) -> tuple[Finding, ...]:
    """Return the findings with a comparison to other ranks, where there is one.

    Findings that have a comparison keep it.
    """
    return tuple(
        finding
        if finding.peer_comparison is not None
        else replace(finding, peer_comparison=compare_finding(finding, ranks))
        for finding in findings
    )


def list_named_groups(nodes: Iterable[NodeResult]) -> tuple[CulpritGroup, ...]:
    """List the process groups to which the job gave a name, without duplicates."""
    groups = {
        CulpritGroup(event.attributes["name"], tuple(event.attributes.get("ranks", ())))
        for node in nodes
        for event in node.loaded.events
        if event.kind == GROUP_ANNOUNCED and isinstance(event.attributes.get("name"), str)
    }
    return tuple(sorted(groups, key=repr))


def with_culprit_groups(
    findings: Iterable[Finding], nodes: Sequence[NodeResult], ranks: Sequence[RankResult]
) -> tuple[Finding, ...]:
    """Return the findings about work with the named group of ranks that are all alike slow."""
    slow = [group for group in list_named_groups(nodes) if _is_slow_group(group, ranks)]
    return tuple(
        replace(finding, culprit_group=next((g for g in slow if _has_caused(g, finding)), None))
        if finding.cause.id in (IMBALANCE, SLOW_COMPUTE)
        else finding
        for finding in findings
    )


def _is_slow_group(group: CulpritGroup, ranks: Sequence[RankResult]) -> bool:
    """Return whether each rank of a group works longer than each other rank.

    At most half of the ranks are a group: what-if without a cause takes the median rank as normal.
    """
    work = {rank.ledger.rank: _compute_work_ns(rank.ledger) for rank in ranks if rank.ledger.steps}
    members = [work.pop(rank) for rank in group.ranks if rank in work]
    if not 0 < len(members) == len(group.ranks) <= len(work) or None in work:
        return False
    return len(work) + len(members) == len(ranks) and (
        min(members) >= MIN_DIFFERENCE_RATIO * max(work.values())
    )


def _has_caused(group: CulpritGroup, finding: Finding) -> bool:
    """Return whether all ranks of a group are culprits, and caused most of a finding."""
    caused = {culprit.rank: culprit.caused_ns for culprit in finding.culprits}
    caused_ns = sum(caused.get(rank, 0) for rank in group.ranks)
    return caused.keys() >= set(group.ranks) and 2 * caused_ns > sum(caused.values())


def compare_finding(finding: Finding, ranks: Sequence[RankResult]) -> PeerComparison | None:
    """Compare the main culprits of a finding with the other ranks or nodes.

    None where a culprit is no rank, where there is no other rank, or where the numbers do not
    differ.
    """
    main_culprits = _select_main_culprits(finding)
    names = {(culprit.node, culprit.rank) for culprit in main_culprits}
    if (
        not main_culprits
        or finding.outside_steps
        or any(culprit.rank is None for culprit in main_culprits)
    ):
        return None
    stepped = [rank for rank in ranks if rank.ledger.steps]
    culprit_ranks = [rank for rank in stepped if _get_rank_name(rank) in names]
    peers = [rank for rank in stepped if _get_rank_name(rank) not in names]
    if len(culprit_ranks) != len(main_culprits) or not peers:
        return None
    if finding.cause.id in (IMBALANCE, SLOW_COMPUTE):
        waited = [rank for rank in peers if dict(rank.ledger.buckets).get(finding.cause.id, 0)]
        worked = (
            [_compute_work_ns(rank.ledger) for rank in culprit_ranks],
            [_compute_work_ns(rank.ledger) for rank in waited],
        )
        return _build_comparison(WORK_METRIC, "rank", "of work a step", *worked)
    return _compare_read_times(finding, culprit_ranks, peers) or _compare_own_loss(
        finding, main_culprits, culprit_ranks, peers
    )


def _select_main_culprits(finding: Finding) -> list[Culprit]:
    """Select the culprits that caused a good part of what the first one caused, or the group."""
    if finding.culprit_group is not None:
        members = finding.culprit_group.ranks
        return [culprit for culprit in finding.culprits if culprit.rank in members]
    caused = [culprit.caused_ns for culprit in finding.culprits]
    largest_ns = max(caused, default=0)
    pairs = zip(finding.culprits, caused)
    return [culprit for culprit, ns in pairs if ns > 0 and ns >= CHIEF_RATIO * largest_ns]


def _get_rank_name(rank: RankResult) -> tuple[str, int | None]:
    return rank.ledger.node, rank.ledger.rank


def _compute_work_ns(ledger: RankLedger) -> float:
    return ledger.productive_ns / ledger.steps


def _compare_read_times(
    finding: Finding, culprit_ranks: Sequence[RankResult], peers: Sequence[RankResult]
) -> PeerComparison | None:
    """Compare the time of a read on the culprits' nodes and on other nodes that counted it."""
    nodes = {rank.ledger.node for rank in culprit_ranks}
    for name, note in _READ_TIME_NOTES.items():
        culprit_values = _collect_by_node(finding, name, culprit_ranks)
        other_values = _collect_by_node(
            finding, name, [rank for rank in peers if rank.ledger.node not in nodes]
        )
        if culprit_values and other_values:
            return _build_comparison(
                name, "node", note, list(culprit_values.values()), list(other_values.values())
            )
    return None


def _collect_by_node(finding: Finding, name: str, ranks: Iterable[RankResult]) -> dict[str, float]:
    """Collect a metric of the evidence by node: the median over its ranks."""
    values_by_node: dict[str, list[float]] = {}
    for rank in ranks:
        for item in collect_evidence(rank.accumulator, finding.cause.id):
            if item.name == name:
                values_by_node.setdefault(rank.ledger.node, []).append(item.value)
    return {node: median_low(values) for node, values in values_by_node.items()}


def _compare_own_loss(
    finding: Finding,
    main_culprits: Sequence[Culprit],
    culprit_ranks: Sequence[RankResult],
    peers: Sequence[RankResult],
) -> PeerComparison | None:
    """Compare own loss per step with the other ranks that were checked for the cause."""
    own_ns = {(culprit.node, culprit.rank): culprit.own_ns for culprit in finding.culprits}
    checked = [rank for rank in peers if finding.cause.id in rank.accumulator.evaluated]
    if not checked or any(not culprit.own_ns for culprit in main_culprits):
        return None
    culprit_values, other_values = (
        [(own_ns.get(_get_rank_name(rank)) or 0) / rank.ledger.steps for rank in group]
        for group in (culprit_ranks, checked)
    )
    bound = " at most" if finding.upper_bound else ""
    return _build_comparison(
        OWN_LOSS_METRIC, "rank", f"lost to it in a step{bound}", culprit_values, other_values
    )


def _build_comparison(
    name: str, kind: str, note: str, culprit_values: Sequence[float], other_values: Sequence[float]
) -> PeerComparison | None:
    if not culprit_values or not other_values:
        return None
    value, other_value = median_low(culprit_values), median_low(other_values)
    if value < MIN_DIFFERENCE_RATIO * other_value or value <= 0:
        return None
    return PeerComparison(name, "ns", value, other_value, len(other_values), kind, note)  # type: ignore[arg-type]


BATCH_UNITS = ("samples", "tokens")
MIN_EXCESS_RATIO = 0.1
"""A late rank with that many more samples or tokens in a step has more work."""


def with_work_evidence(
    findings: Iterable[Finding], ledgers: Sequence[RankLedger], ranks: Sequence[RankResult] = ()
) -> tuple[Finding, ...]:
    """Add to findings about a rank's work its time, batch size and all-to-all bytes per step.

    They are given next to the values of the waiting ranks. ranks: results of `ledgers`, in their
    order; they know what steps held.
    """
    batch_sizes = [_compute_batch_sizes(rank) for rank in ranks] or [{} for _ in ledgers]
    return tuple(_add_work_evidence(finding, ledgers, batch_sizes) for finding in findings)


def _compute_batch_sizes(rank: RankResult) -> dict[str, float]:
    """Compute samples and tokens per step, where nearly all steps report them.

    Also bytes brought to all-to-all operations per step, and their ratio to the mean of the ranks.
    """
    totals, sizes = rank.accumulator.totals, {}
    for unit in BATCH_UNITS:
        if size := _compute_per_step(totals, unit):
            sizes[unit] = size
    brought, mean = (totals.get(name, 0) for name in ALL_TO_ALL_TOTALS)
    if mean and rank.ledger.steps:
        sizes.update(all_to_all=brought / rank.ledger.steps, all_to_all_ratio=brought / mean)
    return sizes


def _add_work_evidence(
    finding: Finding, ledgers: Sequence[RankLedger], batch_sizes: Sequence[Mapping[str, float]]
) -> Finding:
    if finding.cause.id not in (IMBALANCE, SLOW_COMPUTE) or not finding.culprits:
        return finding
    culprit = finding.culprits[0]
    pairs = [pair for pair in zip(ledgers, batch_sizes) if pair[0].steps]
    late = [pair for pair in pairs if _is_culprit(pair[0], culprit)]
    waiting = [
        pair
        for pair in pairs
        if not _is_culprit(pair[0], culprit) and dict(pair[0].buckets).get(finding.cause.id, 0) > 0
    ]
    if len(late) != 1 or culprit.rank is None or not waiting:
        return finding
    own_ns = _compute_work_ns(late[0][0])
    usual_ns = median_low(_compute_work_ns(ledger) for ledger, _ in waiting)
    if own_ns <= usual_ns:
        return finding  # late now and then, or by turns: means over all steps show nothing
    note = f"a step of rank {culprit.rank}; waiting ranks: {format_quantity(usual_ns, 'ns')}"
    evidence = [Evidence(WORK_METRIC, own_ns, "ns", note)]
    own_sizes = late[0][1]
    evidence += _compare_batches(culprit.rank, own_sizes, [sizes for _, sizes in waiting])
    evidence += _compare_all_to_all(culprit.rank, own_sizes, [sizes for _, sizes in waiting])
    return replace(finding, evidence=(*evidence, *finding.evidence))


def _compare_batches(
    rank: int, sizes: Mapping[str, float], waiting: Sequence[Mapping[str, float]]
) -> list[Evidence]:
    """Return evidence of the samples and tokens in a step of a late rank, as far as known.

    Whether it has more of them is judged by tokens, if known: samples may be of unequal length.
    """
    evidence: list[Evidence] = []
    larger: list[Evidence] = []
    for unit in BATCH_UNITS:
        own_size, peer_sizes = sizes.get(unit), [peer[unit] for peer in waiting if unit in peer]
        if own_size is None or not peer_sizes:
            continue
        usual = median_low(peer_sizes)
        note = f"{unit} in a step of rank {rank}; waiting ranks: {usual:,.0f}"
        evidence.append(Evidence(f"step.{unit}_count", own_size, "count", note))
        excess = own_size / usual - 1 if usual > 0 else 0.0
        note = f"more {unit} in a step than the waiting ranks have"
        excess_evidence = Evidence(f"step.{unit}_excess_ratio", excess, "ratio", note)
        larger = [excess_evidence] if excess >= MIN_EXCESS_RATIO else []
    return evidence + larger


def _compare_all_to_all(
    rank: int, sizes: Mapping[str, float], waiting: Sequence[Mapping[str, float]]
) -> list[Evidence]:
    """Return evidence of the bytes that a late rank brings, if no waiting rank brings as many."""
    ratio = sizes.get("all_to_all_ratio", 0.0)
    peer_ratios = [peer["all_to_all_ratio"] for peer in waiting if "all_to_all_ratio" in peer]
    if not peer_ratios or ratio < MIN_DIFFERENCE_RATIO or ratio <= max(peer_ratios):
        return []
    usual_ratio = median_low(peer_ratios)
    note = (
        f"brought to all-to-all in a step by rank {rank}, {ratio:.1f} times the mean of the ranks"
        f" (the load of its experts, if it has any); waiting ranks: {usual_ratio:.1f} times"
    )
    return [Evidence("step.all_to_all_bytes", sizes["all_to_all"], "bytes", note)]


def _is_culprit(ledger: RankLedger, culprit: Culprit) -> bool:
    return (ledger.node, ledger.rank) == (culprit.node, culprit.rank)


READ_SIZE_SUFFIX, READ_COUNT_SUFFIX, READ_RATE_SUFFIX = (
    ".read_size_bytes",
    ".reads_total",
    ".reads_per_second_count",
)
_FEW_READS = 10  # a step: below this tenths are shown


def with_read_counts(findings: Iterable[Finding], ranks: Sequence[RankResult]) -> Iterator[Finding]:
    """Yield the findings; evidence with the size of reads gets their number."""
    for finding in findings:
        note = _describe_reads(finding, ranks)
        yield _append_note(finding, READ_SIZE_SUFFIX, note)


def _append_note(finding: Finding, ending: str, note: str) -> Finding:
    """Append a nonempty note to the evidence whose name has this suffix."""
    noted = (
        replace(item, note="; ".join(text for text in (item.note, note) if text))
        if item.name.endswith(ending)
        else item
        for item in finding.evidence
    )
    return replace(finding, evidence=tuple(noted))


def _describe_reads(finding: Finding, ranks: Sequence[RankResult]) -> str:
    """Describe how many reads the largest culprit made per second and per step."""
    if not finding.culprits or not any(
        item.name.endswith(READ_SIZE_SUFFIX) for item in finding.evidence
    ):
        return ""
    culprit = finding.culprits[0]
    for rank in ranks:
        if (rank.ledger.node, rank.ledger.rank) == (
            culprit.node,
            culprit.rank,
        ) and rank.ledger.steps:
            return _describe_reads_of_rank(rank, finding.cause.id)
    return ""


def _describe_reads_of_rank(rank: RankResult, cause: str) -> str:
    counted = {item.name: item.value for item in collect_evidence(rank.accumulator, cause)}
    parts = [
        f"{_format_count(n)} a second"
        for name, n in counted.items()
        if name.endswith(READ_RATE_SUFFIX)
    ]
    for name, reads in counted.items():
        if name.endswith(READ_COUNT_SUFFIX):
            parts.append(f"{_format_count(reads / rank.ledger.steps)} in the waits of a step")
            samples = _compute_per_step(rank.accumulator.totals, "samples")
            if samples:
                parts.append(f"{_format_count(reads / rank.ledger.steps / samples)} a sample")
    return ", ".join(parts)


def _compute_per_step(totals: Mapping[str, int], unit: str) -> float:
    """Compute the samples or tokens per step, if nearly all steps report them; 0 = unknown."""
    steps = totals.get(f"{unit}_steps", 0)
    all_steps = steps + totals.get(f"{unit}_unknown_steps", 0)
    if not steps or steps < MIN_KNOWN_STEPS_RATIO * all_steps:
        return 0.0
    return totals.get(unit, 0) / steps


def _format_count(count: float) -> str:
    return f"{count:,.1f}" if count < _FEW_READS else f"{count:,.0f}"


WORKER_COUNT_METRIC = "loader.workers_count"


def with_worker_counts(
    findings: Iterable[Finding], nodes: Sequence[NodeResult]
) -> Iterator[Finding]:
    """Yield the findings; evidence that counts workers gets the count on other ranks."""
    for finding in findings:
        if any(item.name == WORKER_COUNT_METRIC for item in finding.evidence):
            note = describe_other_workers(finding.culprits, nodes)
            finding = _append_note(finding, WORKER_COUNT_METRIC, note)
        yield finding


def describe_other_workers(culprits: Sequence[Culprit], nodes: Sequence[NodeResult]) -> str:
    """Describe how many workers ranks have that are no main culprits; "" where unknown."""
    largest_ns = max((culprit.caused_ns for culprit in culprits), default=0)
    main_culprits = {(c.node, c.rank) for c in culprits if c.caused_ns >= CHIEF_RATIO * largest_ns}
    counts = []
    for node in nodes:
        for rank in node.ranks:
            ledger = rank.ledger
            setup = node.setup.ranks.get((ledger.pid, rank.started_ticks), ProcessSetup())
            if (ledger.node, ledger.rank) not in main_culprits and setup.workers is not None:
                counts.append(setup.workers)
    if not counts or not main_culprits:
        return ""
    low, high = min(counts), max(counts)
    amount = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    owner = "the other rank" if len(counts) == 1 else f"each of the other {len(counts):,} ranks"
    return f"{owner} has {amount}"


MAX_PARTS, MIN_PARTS = 24, 8
MAX_LEVEL_BEFORE_RATIO = 0.2
"""Largest loss before the onset, relative to the level after it."""
MIN_LAST_LEVEL_RATIO = 0.5
"""Smallest loss in the last quarter, relative to the level after the onset."""
MIN_LEVEL_RATIO = 0.03
"""Smallest level after an onset worth reporting, relative to the time in steps."""
MIN_CULPRIT_WAIT_RATIO = 0.6
"""Part of all waiting that must be for the culprit; with less, waiting shows nothing."""
_MIN_PARTS_BEFORE = 2  # parts before an onset: the first one is warm-up
_Series = list[tuple[int, int]]
"""(loss, time in steps) by time bin, ns."""


def with_onsets(report: Report) -> Report:
    """Return the report with the time at which causes began, where they did."""
    history = report.history
    if history is None or not history.bin_count:
        return report
    findings = tuple(
        replace(finding, onset=find_cause_start(finding, report, history))
        for finding in report.findings
    )
    return replace(report, findings=findings)


def find_cause_start(finding: Finding, report: Report, history: History) -> Onset | None:
    """Find when the cause of a finding began.

    None where it was there from the start or was intermittent, or where it has no culprit or
    several.
    """
    rank_index = _find_only_culprit(finding, report)
    if rank_index is None:
        return None
    series = _compute_losses(finding.culprits[0], finding.cause.id, rank_index, history)
    time_bin = find_onset(series)
    if time_bin is None:
        return None
    run_ns = history.begin_ns + time_bin * history.bin_ns
    steps = report.ranks[rank_index].steps
    rank_history = next((rank for rank in history.ranks if rank.rank == rank_index), None)
    done_steps = None
    if rank_history is not None and rank_history.step_ends_ns:
        ended_steps = sum(end <= run_ns for end in rank_history.step_ends_ns) * history.step_stride
        done_steps = min(ended_steps, steps)
    return Onset(run_ns, done_steps, steps if done_steps is not None else None)


def _find_only_culprit(finding: Finding, report: Report) -> int | None:
    """Find the place of the only main culprit in the report's ranks; None where it is no rank."""
    if finding.outside_steps or not finding.culprits or finding.culprits[0].rank is None:
        return None
    first, *other_culprits = finding.culprits
    if any(culprit.caused_ns >= CHIEF_RATIO * first.caused_ns for culprit in other_culprits):
        return None
    named = [
        rank_index
        for rank_index, ledger in enumerate(report.ranks)
        if (ledger.node, ledger.rank) == (first.node, first.rank) and ledger.steps
    ]
    return named[0] if len(named) == 1 else None


def _compute_losses(culprit: Culprit, cause: str, index: int, history: History) -> _Series:
    """Compute the loss that the main culprit caused, by time bin.

    Waiting that was not for it (above all transfers) is taken as even over the time in steps.
    """
    own_losses = [dict(rank.lost).get(cause, ()) for rank in history.ranks if rank.rank == index]
    victims = [rank for rank in history.ranks if rank.rank != index]
    waits = [dict(rank.lost).get(WAITING_FOR_RANKS, ()) for rank in victims]
    in_step = next((rank.in_step_ns for rank in history.ranks if rank.rank == index), ())
    rows = [row for row in own_losses if row]
    waited_ns, in_step_ns = sum(sum(row) for row in waits), max(sum(in_step), 1)
    even_ns = 0
    if waited_ns and (culprit.others_ns or 0) >= MIN_CULPRIT_WAIT_RATIO * waited_ns:
        rows += [row for row in waits if row]
        even_ns = max(waited_ns - (culprit.others_ns or 0), 0)
    return [
        (max(sum(row[number] for row in rows) - even_ns * length // in_step_ns, 0), length)
        for number, length in enumerate(in_step)
    ]


def find_onset(series: Sequence[tuple[int, int]]) -> int | None:
    """Find the time bin in which a loss begins that then lasts; None where there is none.

    series: (loss, time in steps) by time bin, ns.
    """
    part_bins = -(-len(series) // MAX_PARTS) or 1
    parts = [
        (low, *_sum_pairs(series[low : low + part_bins]))
        for low in range(0, len(series), part_bins)
    ]
    fullest = max((length for _, _, length in parts), default=0)
    full_parts = [part for part in parts if part[2] and 4 * part[2] >= fullest]
    if len(full_parts) < MIN_PARTS:
        return None
    levels = [cost / length for _, cost, length in full_parts]
    splits = range(_MIN_PARTS_BEFORE, len(full_parts) - _MIN_PARTS_BEFORE)
    onset = max(splits, key=lambda split: _evaluate_split(levels, split), default=None)
    if onset is None:
        return None
    # The onset may lie within its part, which therefore shows nothing about the time before.
    before, after = median_high(levels[:onset]), _compute_mean(levels[onset:])
    last = _compute_mean(levels[-max(len(levels) // 4, 1) :])
    if (
        after < MIN_LEVEL_RATIO
        or before > MAX_LEVEL_BEFORE_RATIO * after
        or last < MIN_LAST_LEVEL_RATIO * after
    ):
        return None
    if min(levels[onset:]) < MAX_LEVEL_BEFORE_RATIO * after:
        return None  # intermittent
    return _find_first_bin(
        series, full_parts[onset - 1][0], full_parts[onset][0] + part_bins, (before + after) / 2
    )


def _sum_pairs(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(cost for cost, _ in pairs), sum(length for _, length in pairs)


def _evaluate_split(levels: Sequence[float], split: int) -> float:
    """Compute how much of the variance of the levels a step up at index `split` explains."""
    gap = _compute_mean(levels[split:]) - _compute_mean(levels[:split])
    return gap * abs(gap) * split * (len(levels) - split)


def _compute_mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _find_first_bin(series: Sequence[tuple[int, int]], low: int, high: int, level: float) -> int:
    """Find the first time bin from which on the loss is above a level."""
    for bin_index in range(low, high):
        cost, length = _sum_pairs(series[bin_index:high])
        has_begun = series[bin_index][1] and series[bin_index][0] >= level * series[bin_index][1]
        if has_begun and cost >= level * length:
            return bin_index
    return high
