"""What should come first, and what does: of groups of causes by their sums, of leaves one by one.

The dominant cause is the group that cost most, all its leaves together; a tool that says how much
each cause cost is asked for the sum as well. A tool that gives no amounts is taken at its order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from clusterprof_lab.answer import Answer, Said
from clusterprof_lab.families import FAMILY_OF, UNATTRIBUTED
from clusterprof_lab.scenario import Wanted
from clusterprof_lab.truth import Truth

TIE_BELOW = 1.0
"""Two faults whose costs differ by fewer points are equally large."""


def first_of(answer: Answer, wanted: Wanted) -> tuple[Said | None, Said | None]:
    """Return the two largest causes where the scenario's lie: inside steps, or outside."""
    named = _named(answer, wanted)
    return (named[0] if named else None), (named[1] if len(named) > 1 else None)


def group_of(answer: Answer, wanted: Wanted) -> Said | None:
    """Return the largest cause of the group that cost most, all causes of a group together."""
    named = _named(answer, wanted)
    if not named or wanted.outside_steps or any(one.covers for one in named):
        return named[0] if named else None
    sums = answer.family_ratio or _sums(named)
    return max(named, key=lambda one: sums.get(one.family, 0.0))  # the first of equal ones


def meant(said: Said) -> tuple[str, ...]:
    """Return all groups that a tool's word means without telling them apart."""
    return (said.family, *said.covers)


def leading_group(wanted: Wanted, true: Mapping[str, float], said: Said | None) -> Wanted:
    """Return what is wanted of several faults by their groups' `true` points.

    Of two within a point it is the one that is said.
    """
    faults = _faults(wanted)
    points = [true.get(family, 0.0) for family, _ in faults]
    said_there = [said is not None and family in meant(said) for family, _ in faults]
    return _leading(wanted, faults, points, said_there)


def leading_leaf(wanted: Wanted, truth: Truth, said: Said | None) -> Wanted:
    """Return what is wanted of several faults by what their own leaves cost."""
    faults = _faults(wanted)
    points = [points_of(truth, leaves) for _, leaves in faults]
    said_there = [said is not None and said.leaf in leaves for _, leaves in faults]
    return _leading(wanted, faults, points, said_there)


def points_of(truth: Truth, leaves: Sequence[str]) -> float:
    """Return what leaves cost inside steps, in points."""
    ns = sum(one.ns for one in truth.lost if one.cause in leaves)
    return 100.0 * ns / truth.in_step_ns if truth.in_step_ns else 0.0


def _named(answer: Answer, wanted: Wanted) -> list[Said]:
    return [
        one for one in answer.causes or ()
        if one.outside_steps == wanted.outside_steps and one.family != UNATTRIBUTED
    ]  # fmt: skip


def _sums(named: Sequence[Said]) -> Mapping[str, float]:
    """Sum amounts by group; nothing where one is without."""
    out: dict[str, float] = {}
    for one in named:
        if one.share_ratio is None:
            return {}
        out[one.family] = out.get(one.family, 0.0) + one.share_ratio
    return out


def _faults(wanted: Wanted) -> list[tuple[str, tuple[str, ...]]]:
    return [(wanted.family, wanted.leaves), *((family, (leaf,)) for family, leaf in wanted.also)]


def _leading(
    wanted: Wanted, faults: Sequence[tuple[str, tuple[str, ...]]], points: Sequence[float],
    said: Sequence[bool],
) -> Wanted:  # fmt: skip
    if not wanted.also:
        return wanted
    near = [index for index, one in enumerate(points) if one >= max(points) - TIE_BELOW]
    chosen = max(near, key=lambda index: (said[index], points[index]))
    family, leaves = faults[chosen]
    return replace(wanted, family=family, leaves=leaves)


def missed(truth: Truth, wanted: Wanted, aimed: float | None) -> str:
    """Return why a run asks nothing about its fault: it cost less than half of what was aimed at.

    "" when it did, or when nobody said what was (synthetic faults cost what they are made to cost).
    """
    if aimed is None or not wanted.family or wanted.outside_steps:
        return ""
    families = {family for family, _ in _faults(wanted)}
    ns = sum(one.ns for one in truth.lost if FAMILY_OF.get(one.cause) in families)
    cost = 100.0 * ns / truth.in_step_ns if truth.in_step_ns else 0.0
    if cost >= 50.0 * aimed:
        return ""
    return f"the fault did not hit: it should cost {100.0 * aimed:.0f} points and cost {cost:.0f}"
