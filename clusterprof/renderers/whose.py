"""Whose cause it was: culprits, what each caused, how they change over the run, who is slow.

Ranks that caused much alike are named together: `gpu-a[01-02] ranks 0-15 (/data)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from clusterprof.beside import Beside
from clusterprof.findings import Culprit, Finding, Report
from clusterprof.hostlists import fold, fold_numbers
from clusterprof.renderers.sparks import clock
from clusterprof.renderers.text_safety import safe_text
from clusterprof.units import human

_CHIEF_RATIO = 0.1  # a culprit that caused less than this part of the largest is not named
_WAITING_RATIO = 0.4  # of what it caused: from here on the waiting ranks are worth mentioning
_AWAITED_RATIO = 0.4  # of all waiting for them: from here on one of many culprits is singled out
_AWAITED_TIMES = 1.5  # as much waiting as for the next
_HARDLY_RATIO = 0.001  # of the culprits' number: less of the others' is next to nothing
_RANK_NAME = re.compile(r"^rank[-_]?(?=\d)")
_ALWAYS = {"steady": "each time the same", "wandering": "by turns"}
"""Of a kind of persistence: who it is each time. When it was, is told by the bars over time."""


def culprit(one: Culprit) -> str:
    """Name one rank: node, rank, resource."""
    rank = "" if one.rank is None else f"rank {one.rank}"
    node = "" if _is_its_rank(one) else safe_text(one.node, 60)
    return f"{' '.join(part for part in (node, rank) if part)}{_resource(one)}"


def _is_its_rank(one: Culprit) -> bool:
    """True where the node is a trace called by its rank, for want of a host: "rank3"."""
    return _RANK_NAME.sub("", one.node.lower()) == str(one.rank) != one.node


def chiefs_in_short(finding: Finding) -> str:
    """Name those who caused most, in two groups at most."""
    chiefs = chief_culprits(finding)
    return ", ".join(_group(group) for group in _groups(chiefs, 2)) + _awaited(chiefs)


def culprits(finding: Finding, most: int) -> str:
    """Name whose cause it was in at most `most` groups, the largest first."""
    chiefs = chief_culprits(finding)
    groups = _groups(chiefs, most)
    text = ", ".join(_group(group) for group in groups) + _awaited(chiefs)
    rest = len(finding.culprits) - len(chiefs)
    return f"{text} and {rest:,} more that caused little" if rest else text


def _awaited(chiefs: Sequence[Culprit]) -> str:
    """Single out the rank that others waited for most, where many caused much by themselves."""
    if len(chiefs) < 3 or chiefs[0].others_ns is None:
        return ""
    order = sorted(chiefs, key=lambda one: -(one.others_ns or 0))
    first, second = ((one.others_ns or 0) for one in order[:2])
    whole = sum(one.others_ns or 0 for one in chiefs)
    own = sum(one.own_ns or 0 for one in chiefs)
    small = whole < _CHIEF_RATIO * (own + whole)
    if small or first < _AWAITED_RATIO * whole or first < _AWAITED_TIMES * second:
        return ""
    rank = f"rank {order[0].rank}" if order[0].rank is not None else culprit(order[0])
    return f"; others waited for {rank} most, {human(first, 'ns')}"


def chief_culprits(finding: Finding) -> list[Culprit]:
    """Return the culprits that caused at least a tenth of what the first did; all when unknown."""
    if not finding.culprits or finding.culprits[0].own_ns is None:
        return list(finding.culprits)
    least = _CHIEF_RATIO * caused_ns(finding.culprits[0])
    return [one for one in finding.culprits if caused_ns(one) >= least]


def caused_ns(one: Culprit) -> int:
    """Return what a culprit lost itself, and what others lost waiting for it."""
    return (one.own_ns or 0) + (one.others_ns or 0)


def blame(finding: Finding) -> str:
    """Say for the verdict who caused it, and how many waited."""
    if not finding.culprits:
        return "no rank's doing"
    first = finding.culprits[0]
    waited = ""
    if first.victims and (first.others_ns or 0) >= _WAITING_RATIO * caused_ns(first):
        many = "rank" if first.victims == 1 else "ranks"
        waited = f", for which {first.victims:,} other {many} waited"
    chiefs = chief_culprits(finding)
    if len(chiefs) > 1:
        how = finding.persistence
        waited = " in turn" if how is not None and how.kind == "wandering" else ""
    return f"caused by {', '.join(_group(group) for group in _groups(chiefs, 2))}{waited}"


def caused(finding: Finding, most: int, in_step_ns: int) -> list[str]:
    """Say of the first few culprits what they caused; [] when ranks were not compared."""
    if not finding.culprits or finding.culprits[0].others_ns is None:
        return []
    groups = _groups(chief_culprits(finding), most)
    return [_caused(group, finding, in_step_ns) for group in groups]


def _caused(group: Sequence[Culprit], finding: Finding, in_step_ns: int) -> str:
    own_ns = sum(one.own_ns or 0 for one in group)
    others_ns = sum(one.others_ns or 0 for one in group)
    gain_ns = sum(one.recoverable_ns or 0 for one in group)
    if finding.recoverable_ns is not None:  # some of a cause wins no more than all of it
        gain_ns = min(gain_ns, finding.recoverable_ns)
    at_most = "at most " if finding.upper_bound else ""
    victims = group[0].victims if len(group) == 1 else None
    many = "" if victims is None else f"{victims:,} "
    waited = (
        f"{human(others_ns, 'ns')} of {many}{'other' if victims == 1 else 'others'} that waited"
    )
    own = f"{human(own_ns, 'ns')} {'its' if len(group) == 1 else 'their'} own"
    if own_ns and others_ns:
        told = f"{human(own_ns + others_ns, 'ns')}, {own} and {waited}"
    else:
        told = own if own_ns else waited
    text = f"{_group(group)}: {at_most}{told}"
    if not gain_ns or not in_step_ns:
        return text
    amount = f"{human(gain_ns, 'ns')}, {human(gain_ns / in_step_ns, 'ratio')}"
    if len(group) == 1:
        return f"{text}; fixing it alone wins {at_most}{amount}"
    # Of several the sum is too little, of an upper bound too much: of both it is neither.
    return f"{text}; fixing them {'may win' if at_most else 'wins at least'} {amount}"


def beside(finding: Finding) -> str:
    """Say what tells the culprits from the others, in one clause; "" when it is not known."""
    found = finding.compared
    if found is None:
        return ""
    value, others = human(found.value, found.unit), _of_others(found)
    many = "" if found.many == 1 else f"{found.many:,} "
    noun = found.of if found.many == 1 else f"{found.of}s"
    return safe_text(f"{value} {found.note}, the other {many}{noun} {others}")


def _of_others(found: Beside) -> str:
    """Write the others' number; what is not worth a unit is no number a reader can use."""
    if found.others == 0:
        return "nothing"
    if found.others < _HARDLY_RATIO * found.value:
        return "next to nothing"
    return human(found.others, found.unit)


def persistence_in_short(finding: Finding) -> str:
    """Say in a few words whether it is always they."""
    found = finding.persistence
    if found is None:
        return ""
    if found.kind == "transient":
        return f"only from {human(found.from_ns, 'ns')} to {human(found.to_ns, 'ns')}"
    return _ALWAYS.get(found.kind, safe_text(found.kind, 60))


def since(finding: Finding) -> str:
    """Say when a cause began that was not there from the start; "" otherwise."""
    found = finding.since
    if found is None:
        return ""
    text = f"from {clock(found.run_ns)} on"
    if found.step is None or found.steps is None or found.step >= found.steps:
        return text
    return f"{text} (step {found.step + 1:,} of {found.steps:,})"


def persistence(finding: Finding) -> str:
    """Say whether the culprits are the same all the time; "" when that is not known."""
    found = finding.persistence
    if found is None:
        return ""
    if found.kind == "transient":
        span = f"{human(found.from_ns, 'ns')} to {human(found.to_ns, 'ns')} of the run"
        return f"only from {span}"
    always = _ALWAYS.get(found.kind, "")
    if found.kind == "steady":
        return f"{always}: in {found.most:,} of {found.stretches:,} stretches of the run with waits"
    if found.kind == "wandering":
        many = f"{found.culprits:,} ranks came first"
        return f"{always}: {many}, in {found.stretches:,} stretches of the run with waits"
    return safe_text(found.kind, 60)


def tail(report: Report) -> list[str]:
    """Say how long steps take and who sets the slow ones; [] for a rank alone."""
    found = report.tail
    if found is None:
        return []
    lines = []
    if found.p50_ns is not None and found.p99_ns is not None:
        lengths = f"half of them within {human(found.p50_ns, 'ns')}"
        lines.append(f"steps of all ranks: {lengths}, 99 of 100 within {human(found.p99_ns, 'ns')}")
    if not found.set_by:
        why = safe_text(found.why_missing, 300)
        lines.append(f"who set the slow steps is not known: {why}")
        return lines
    names = ", ".join(
        f"{culprit(Culprit(node, rank, ''))} ({steps:,})" for node, rank, steps in found.set_by[:4]
    )
    more = len(found.set_by) - 4
    names += f" and {more:,} more" if more > 0 else ""
    lines.append(f"of the slowest {found.slow:,} of {found.steps:,} steps last came: {names}")
    return lines


def _groups(some: Sequence[Culprit], most: int) -> list[list[Culprit]]:
    """Put culprits together: by node and resource, by node, by resource, or all."""
    keys: tuple[Callable[[Culprit], object], ...] = (
        lambda one: (one.node, one.resource),
        lambda one: one.node,
        lambda one: one.resource,
    )
    for key in keys:
        groups: dict[object, list[Culprit]] = {}
        for one in some:
            groups.setdefault(key(one), []).append(one)
        if len(groups) <= most:
            return list(groups.values())
    return [list(some)]


def _group(group: Sequence[Culprit]) -> str:
    if len(group) == 1:
        return culprit(group[0])
    nodes = "" if all(map(_is_its_rank, group)) else fold(safe_text(c.node, 60) for c in group)
    numbers = [one.rank for one in group if one.rank is not None and one.rank >= 0]
    ranks = f"ranks {fold_numbers(numbers)}" if len(numbers) == len(group) else ""
    ranks = ranks or f"{len(group):,} processes"
    alike = len({one.resource for one in group}) == 1
    return safe_text(f"{nodes} {ranks}".strip(), 400) + (_resource(group[0]) if alike else "")


def _resource(one: Culprit) -> str:
    return f" ({safe_text(one.resource, 60)})" if one.resource else ""
