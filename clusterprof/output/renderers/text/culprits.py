"""Culprits in words: which ranks, what each caused, when, and who delays slow steps.

Ranks that caused similar loss are grouped: `gpu-a[01-02] ranks 0-15 (/data)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from clusterprof.output.renderers.text.safety import escape_text
from clusterprof.output.renderers.text.trend import format_clock_time
from clusterprof.report.model import UNATTRIBUTED, Culprit, Finding, PeerComparison, Report
from clusterprof.units import format_quantity
from clusterprof.util.ranges import format_host_list, format_number_list

_MAIN_CULPRIT_RATIO = 0.1  # a culprit that caused less than this share of the largest is not named
_NOTABLE_WAITING_RATIO = 0.4  # of what it caused; from here on the waiting ranks are mentioned
_AWAITED_RATIO = 0.4  # of all waiting for the culprits; from here on one of many is singled out
_MIN_LATE_RATIO = 0.5  # of the time without a cause, in which ranks waited for others
_MAX_LATE_RANKS = 4  # that come last; more are no culprits
_AWAITED_FACTOR = 1.5  # times the waiting for the second
_NEGLIGIBLE_PEER_RATIO = 0.001  # of the culprits' value; peers below it have "almost none"
_UNKNOWN_HOST = "unknown-host"  # node of an imported trace that names no host
_RANK_NAME = re.compile(r"^rank[-_]?(?=\d)")
_PERSISTENCE_WORDS = {"steady": "the same ranks each time", "wandering": "different ranks in turn"}
"""Kind of persistence -> which ranks are culprits; the bars show the times."""


def format_culprit(culprit: Culprit) -> str:
    """Format one culprit: node, rank, resource."""
    rank = "" if culprit.rank is None else f"rank {culprit.rank}"
    node = "" if _is_node_named_by_rank(culprit) else escape_text(culprit.node, 60)
    return f"{' '.join(part for part in (node, rank) if part)}{_format_resource(culprit)}"


def _is_node_named_by_rank(culprit: Culprit) -> bool:
    """Return whether the node is a trace named after its rank ("rank3"), or has no name."""
    if culprit.node == _UNKNOWN_HOST and culprit.rank is not None:
        return True
    return _RANK_NAME.sub("", culprit.node.lower()) == str(culprit.rank) != culprit.node


def summarize_main_culprits(finding: Finding) -> str:
    """Name the culprits that caused most, in at most two groups."""
    if finding.culprit_group is not None:
        return _format_named_group(finding)
    chiefs = select_main_culprits(finding)
    return ", ".join(
        _format_group(group) for group in _group_culprits(chiefs, 2)
    ) + _describe_awaited_rank(chiefs)


def format_culprits(finding: Finding, max_names: int) -> str:
    """Name the culprits in at most `max_names` groups, largest first."""
    chiefs = select_main_culprits(finding)
    groups = _group_culprits(chiefs, max_names)
    text = ", ".join(_format_group(group) for group in groups) + _describe_awaited_rank(chiefs)
    if finding.culprit_group is not None:
        text = _format_named_group(finding)
    hidden_count = len(finding.culprits) - len(chiefs)
    little = "" if finding.culprit_group is not None else " that caused little"
    return f"{text} and {hidden_count:,} more{little}" if hidden_count else text


def _describe_awaited_rank(chiefs: Sequence[Culprit]) -> str:
    """Name the rank that others waited for most, if many culprits lost much themselves."""
    if len(chiefs) < 3 or chiefs[0].others_ns is None:
        return ""
    order = sorted(chiefs, key=lambda culprit: -(culprit.others_ns or 0))
    first, second = ((culprit.others_ns or 0) for culprit in order[:2])
    others_ns = sum(culprit.others_ns or 0 for culprit in chiefs)
    own_ns = sum(culprit.own_ns or 0 for culprit in chiefs)
    small = others_ns < _MAIN_CULPRIT_RATIO * (own_ns + others_ns)
    if small or first < _AWAITED_RATIO * others_ns or first < _AWAITED_FACTOR * second:
        return ""
    rank = f"rank {order[0].rank}" if order[0].rank is not None else format_culprit(order[0])
    return f"; others waited for {rank} most, {format_quantity(first, 'ns')}"


def describe_late_ranks(report: Report) -> str:
    """Describe for which ranks the others waited without a known cause; "" = not for a few.

    A rank's culprit time beyond its own loss is what others waited for it.
    """
    waits_ns = [
        dict(rank.caused).get(UNATTRIBUTED, 0) - dict(rank.buckets).get(UNATTRIBUTED, 0)
        for rank in report.ranks
    ]
    waited_ns = sum(ns for ns in waits_ns if ns > 0)
    if waited_ns < _MIN_LATE_RATIO * report.unattributed_ns:
        return ""
    late = [row for row, ns in enumerate(waits_ns) if ns > _MAIN_CULPRIT_RATIO * max(waits_ns)]
    if len(late) > min(_MAX_LATE_RANKS, len(waits_ns) // 2):
        return ""
    culprits = [Culprit(report.ranks[row].node, report.ranks[row].rank, "") for row in late]
    names = ", ".join(_format_group(group) for group in _group_culprits(culprits, 2))
    summed_ns = format_quantity(sum(waits_ns[row] for row in late), "ns")
    return f"{names} came last: the other ranks waited {summed_ns} in all"


def select_main_culprits(finding: Finding) -> list[Culprit]:
    """Select culprits that caused a tenth of the largest or more, or the group; all if unknown."""
    if finding.culprit_group is not None:
        members = finding.culprit_group.ranks
        return [culprit for culprit in finding.culprits if culprit.rank in members]
    if not finding.culprits or finding.culprits[0].own_ns is None:
        return list(finding.culprits)
    least = _MAIN_CULPRIT_RATIO * finding.culprits[0].caused_ns
    return [culprit for culprit in finding.culprits if culprit.caused_ns >= least]


def describe_blame(finding: Finding) -> str:
    """Describe for the verdict who caused a finding and how many ranks waited."""
    if not finding.culprits:
        return "not caused by a single rank"
    first = finding.culprits[0]
    waited = ""
    if first.victims and (first.others_ns or 0) >= _NOTABLE_WAITING_RATIO * first.caused_ns:
        noun = "rank" if first.victims == 1 else "ranks"
        waited = f", for which {first.victims:,} other {noun} waited"
    chiefs = select_main_culprits(finding)
    if len(chiefs) > 1:
        how = finding.persistence
        waited = " in turn" if how is not None and how.kind == "wandering" else ""
    names = ", ".join(_format_group(group) for group in _group_culprits(chiefs, 2))
    if finding.culprit_group is not None:
        names, waited = _format_named_group(finding), ""
    return f"caused by {names}{waited}"


def describe_caused_loss(finding: Finding, max_groups: int, in_step_ns: int) -> list[str]:
    """Describe what each of the first few culprits caused; [] if ranks were not compared."""
    if not finding.culprits or finding.culprits[0].others_ns is None:
        return []
    chiefs = select_main_culprits(finding)
    groups = [chiefs] if finding.culprit_group else _group_culprits(chiefs, max_groups)
    return [_describe_group_loss(group, finding, in_step_ns) for group in groups]


def _describe_group_loss(group: Sequence[Culprit], finding: Finding, in_step_ns: int) -> str:
    own_ns = sum(culprit.own_ns or 0 for culprit in group)
    others_ns = sum(culprit.others_ns or 0 for culprit in group)
    gain_ns = sum(culprit.recoverable_ns or 0 for culprit in group)
    if finding.culprit_group is not None:  # without the cause these ranks work as the median one
        gain_ns = finding.recoverable_ns or 0
    # A part saves no more than all; it is not known where the whole is not.
    gain_ns = min(gain_ns, finding.recoverable_ns or 0)
    at_most = "at most " if finding.upper_bound else ""
    victims = group[0].victims if len(group) == 1 else None
    count_text = "" if victims is None else f"{victims:,} "
    waited = (
        f"{format_quantity(others_ns, 'ns')} of"
        f" {count_text}{'other' if victims == 1 else 'others'} that waited"
    )
    own_text = f"{format_quantity(own_ns, 'ns')} {'its' if len(group) == 1 else 'their'} own"
    if own_ns and others_ns:
        amounts = f"{format_quantity(own_ns + others_ns, 'ns')}, {own_text} and {waited}"
    else:
        amounts = own_text if own_ns else waited
    named = finding.culprit_group is not None
    name = _format_named_group(finding) if named else _format_group(group)
    text = f"{name}: {at_most}{amounts}"
    if not gain_ns or not in_step_ns:
        return text
    amount = f"{format_quantity(gain_ns, 'ns')}, {format_quantity(gain_ns / in_step_ns, 'ratio')}"
    if len(group) == 1 or named:
        return f"{text}; fixing it alone saves {at_most}{amount}"
    # The sum over several culprits is a lower bound; with upper-bound losses it is neither bound.
    return f"{text}; fixing them {'may save' if at_most else 'saves at least'} {amount}"


def describe_peer_comparison(finding: Finding) -> str:
    """Describe in one clause how the culprits differ from their peers; "" if not known."""
    comparison = finding.peer_comparison
    if comparison is None:
        return ""
    value, peers_text = (
        format_quantity(comparison.value, comparison.unit),
        _format_peer_value(comparison),
    )
    count_text = "" if comparison.peer_count == 1 else f"{comparison.peer_count:,} "
    noun = (
        comparison.compared_kind if comparison.peer_count == 1 else f"{comparison.compared_kind}s"
    )
    return escape_text(f"{value} {comparison.note}, the other {count_text}{noun} {peers_text}")


def _format_peer_value(comparison: PeerComparison) -> str:
    """Format the peers' value; a value too small for a useful number becomes words."""
    if comparison.peers_value == 0:
        return "nothing"
    if comparison.peers_value < _NEGLIGIBLE_PEER_RATIO * comparison.value:
        return "almost none"
    return format_quantity(comparison.peers_value, comparison.unit)


def summarize_persistence(finding: Finding) -> str:
    """Summarize in a few words whether the culprits are always the same ranks."""
    persistence = finding.persistence
    if persistence is None or _is_group_in_turn(finding):
        return ""
    if persistence.kind == "transient":
        return (
            f"only from {format_quantity(persistence.from_ns, 'ns')} to"
            f" {format_quantity(persistence.to_ns, 'ns')}"
        )
    return _PERSISTENCE_WORDS.get(persistence.kind, escape_text(persistence.kind, 60))


def _is_group_in_turn(finding: Finding) -> bool:
    """Return whether the ranks that take turns are those of one group, which is always slow."""
    wandering = finding.persistence is not None and finding.persistence.kind == "wandering"
    return wandering and finding.culprit_group is not None


def describe_onset(finding: Finding) -> str:
    """Describe when a cause began if it was not there from the start; "" otherwise."""
    onset = finding.onset
    if onset is None:
        return ""
    text = f"from {format_clock_time(onset.run_ns)} on"
    if onset.step is None or onset.steps is None or onset.step >= onset.steps:
        return text
    return f"{text} (step {onset.step + 1:,} of {onset.steps:,})"


def describe_persistence(finding: Finding) -> str:
    """Describe whether the culprits are the same throughout the run; "" if that is not known."""
    persistence = finding.persistence
    if persistence is None or _is_group_in_turn(finding):
        return ""
    if persistence.kind == "transient":
        span = (
            f"{format_quantity(persistence.from_ns, 'ns')} to"
            f" {format_quantity(persistence.to_ns, 'ns')} of the run"
        )
        return f"only from {span}"
    always = _PERSISTENCE_WORDS.get(persistence.kind, "")
    if persistence.kind == "steady":
        return (
            f"{always}: in {persistence.main_culprit_bins:,} of {persistence.waiting_bins:,}"
            " time bins of the run with waits"
        )
    if persistence.kind == "wandering":
        subject = f"{persistence.culprits:,} ranks were the main culprit"
        return (
            f"{always}: {subject}, in {persistence.waiting_bins:,} time bins of the run with waits"
        )
    return escape_text(persistence.kind, 60)


def describe_slow_steps(report: Report) -> list[str]:
    """Describe how long steps take and which ranks delay the slow ones; [] for a single rank."""
    slow_steps = report.slow_step_summary
    if slow_steps is None:
        return []
    lines = []
    if slow_steps.p50_ns is not None and slow_steps.p99_ns is not None:
        lengths = f"half of them within {format_quantity(slow_steps.p50_ns, 'ns')}"
        lines.append(
            f"steps of all ranks: {lengths}, 99 of 100 within"
            f" {format_quantity(slow_steps.p99_ns, 'ns')}"
        )
    if not slow_steps.late_ranks:
        why = escape_text(slow_steps.why_missing, 300)
        lines.append(f"no rank is named for the slow steps: {why}")
        return lines
    names = ", ".join(
        f"{format_culprit(Culprit(node, rank, ''))} ({steps:,})"
        for node, rank, steps in slow_steps.late_ranks[:4]
    )
    hidden_count = len(slow_steps.late_ranks) - 4
    names += f" and {hidden_count:,} more" if hidden_count > 0 else ""
    lines.append(
        f"last to arrive in the slowest {slow_steps.slow_step_count:,}"
        f" of {slow_steps.steps:,} steps: {names}"
    )
    return lines


def _group_culprits(culprits: Sequence[Culprit], max_groups: int) -> list[list[Culprit]]:
    """Group culprits by node and resource, by node, by resource, or all together."""
    keys: tuple[Callable[[Culprit], object], ...] = (
        lambda culprit: (culprit.node, culprit.resource),
        lambda culprit: culprit.node,
        lambda culprit: culprit.resource,
    )
    for key in keys:
        groups: dict[object, list[Culprit]] = {}
        for culprit in culprits:
            groups.setdefault(key(culprit), []).append(culprit)
        if len(groups) <= max_groups:
            return list(groups.values())
    return [list(culprits)]


def _format_named_group(finding: Finding) -> str:
    name = "" if finding.culprit_group is None else finding.culprit_group.name
    members = select_main_culprits(finding)
    ranks = f"all its {len(members):,} ranks" if len(members) > 1 else f"rank {members[0].rank}"
    return f"{escape_text(name, 60)} ({ranks})"


def _format_group(group: Sequence[Culprit]) -> str:
    if len(group) == 1:
        return format_culprit(group[0])
    nodes = (
        ""
        if all(map(_is_node_named_by_rank, group))
        else format_host_list(escape_text(c.node, 60) for c in group)
    )
    numbers = [culprit.rank for culprit in group if culprit.rank is not None and culprit.rank >= 0]
    ranks = f"ranks {format_number_list(numbers)}" if len(numbers) == len(group) else ""
    where = f" on {nodes}" if nodes else ""
    named = f"{nodes} {ranks}" if ranks else f"{len(group):,} processes{where}"
    similar = len({culprit.resource for culprit in group}) == 1
    return escape_text(named.strip(), 400) + (_format_resource(group[0]) if similar else "")


def _format_resource(culprit: Culprit) -> str:
    return f" ({escape_text(culprit.resource, 60)})" if culprit.resource else ""
