"""The dominant cause by truth and by answer: groups of causes by their sums, leaves one by one.

The dominant cause is the group that cost most, all its leaves added up. A tool that gives an amount
for each cause is judged by the same sum. A tool without amounts is judged by its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from clusterprof_lab.answer import Answer, NamedCause
from clusterprof_lab.families import FAMILY_OF, UNATTRIBUTED
from clusterprof_lab.scenario import ExpectedVerdict
from clusterprof_lab.truth import OTHER, Truth

_Name = TypeVar("_Name")

TIE_BELOW = 1.0
"""Two faults whose costs differ by fewer points are equally large."""


def find_first_causes(
    answer: Answer, wanted: ExpectedVerdict
) -> tuple[NamedCause | None, NamedCause | None]:
    """Return the two largest causes where the scenario's lie: inside steps, or outside."""
    named = _list_named(answer, wanted)
    return (named[0] if named else None), (named[1] if len(named) > 1 else None)


def find_dominant_group(answer: Answer, wanted: ExpectedVerdict) -> NamedCause | None:
    """Return the largest cause of the group that cost most, all causes of a group together."""
    named = _list_named(answer, wanted)
    if not named or wanted.outside_steps or any(cause.covers for cause in named):
        return named[0] if named else None
    sums = answer.family_ratio or _sum_groups(named)
    return max(named, key=lambda cause: sums.get(cause.family, 0.0))  # the first of equal ones


def list_meant_groups(cause: NamedCause) -> tuple[str, ...]:
    """Return all groups that a tool's word stands for: it does not distinguish them."""
    return (cause.family, *cause.covers)


def with_dominant_group(
    wanted: ExpectedVerdict, true: Mapping[str, float], claimed: NamedCause | None
) -> ExpectedVerdict:
    """Return `wanted` with the group that leads by its `true` points.

    Of several faults the largest leads; what the job loses without any fault leads when it cost
    more than a mild one. Of two within a point it is the one that is said.
    """
    if not wanted.family or wanted.outside_steps:
        return wanted
    leaves = dict(_list_faults(wanted))
    points = {name: amount for name, amount in true.items() if name != UNATTRIBUTED}
    points.update({family: points.get(family, 0.0) for family in leaves})
    chosen = _find_dominant(
        points, [claimed is not None and name in list_meant_groups(claimed) for name in points]
    )
    return replace(wanted, family=chosen, leaves=leaves.get(chosen, ()))


def with_dominant_leaf(
    wanted: ExpectedVerdict, truth: Truth, claimed: NamedCause | None
) -> ExpectedVerdict:
    """Return `wanted` with the leading leaves; a fault's leaves count as one."""
    if not wanted.family or wanted.outside_steps:
        return wanted
    faults = [leaves for _, leaves in _list_faults(wanted)]
    for loss in truth.lost:
        if loss.cause != OTHER and not any(loss.cause in leaves for leaves in faults):
            faults.append((loss.cause,))
    points = {leaves: sum_points(truth, leaves) for leaves in faults}
    said_there = [claimed is not None and claimed.leaf in leaves for leaves in faults]
    chosen = _find_dominant(points, said_there)
    return replace(wanted, family=FAMILY_OF.get(chosen[0], wanted.family), leaves=chosen)


def sum_points(truth: Truth, leaves: Sequence[str]) -> float:
    """Return what leaves cost inside steps, in points."""
    ns = sum(loss.ns for loss in truth.lost if loss.cause in leaves)
    return 100.0 * ns / truth.in_step_ns if truth.in_step_ns else 0.0


def _list_named(answer: Answer, wanted: ExpectedVerdict) -> list[NamedCause]:
    return [
        cause
        for cause in answer.causes or ()
        if cause.outside_steps == wanted.outside_steps and cause.family != UNATTRIBUTED
    ]


def _sum_groups(named: Sequence[NamedCause]) -> Mapping[str, float]:
    """Sum amounts by group; nothing where one is without."""
    out: dict[str, float] = {}
    for cause in named:
        if cause.share_ratio is None:
            return {}
        out[cause.family] = out.get(cause.family, 0.0) + cause.share_ratio
    return out


def _list_faults(wanted: ExpectedVerdict) -> list[tuple[str, tuple[str, ...]]]:
    return [(wanted.family, wanted.leaves), *((family, (leaf,)) for family, leaf in wanted.also)]


def _find_dominant(points: Mapping[_Name, float], claimed: Sequence[bool]) -> _Name:
    most = max(points.values())
    near = [
        (there, amount, name)
        for (name, amount), there in zip(points.items(), claimed)
        if amount >= most - TIE_BELOW
    ]
    return max(near, key=lambda candidate: candidate[:2])[2]


def explain_weak_fault(truth: Truth, wanted: ExpectedVerdict, aimed: float | None) -> str:
    """Return why a run asks nothing about its fault: it cost less than half of what was aimed at.

    "" when it did, or when nobody said what was (synthetic faults cost what they are made to cost).
    """
    if aimed is None or not wanted.family or wanted.outside_steps:
        return ""
    families = {family for family, _ in _list_faults(wanted)}
    ns = sum(loss.ns for loss in truth.lost if FAMILY_OF.get(loss.cause) in families)
    cost = 100.0 * ns / truth.in_step_ns if truth.in_step_ns else 0.0
    if cost >= 50.0 * aimed:
        return ""
    return f"the fault did not hit: it should cost {100.0 * aimed:.0f} points and cost {cost:.0f}"
