"""Compare one answer with one truth: what is right, what is wrong, by how much.

    judged = judge(answer, truth, scenario.wanted)

A field is None where the tool makes no such claim or the run does not ask the question; None is
never counted. Shares are in points: hundredths of the in-step time of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterprof_lab.answer import Answer, NamedCause
from clusterprof_lab.families import FAMILIES, FAMILY_OF, UNATTRIBUTED
from clusterprof_lab.scenario import ExpectedVerdict
from clusterprof_lab.score.dominant_cause import (
    find_dominant_group,
    find_first_causes,
    list_meant_groups,
    with_dominant_group,
    with_dominant_leaf,
)
from clusterprof_lab.truth import OTHER, Truth

ACTIVE_FROM = 0.1
"""A bucket is active when truth or answer puts as many points there."""
FALSE_FROM = 3.0
TRUE_BELOW = 0.5
EMITTED_FROM = 1.0
"""Leaves of fewer points are not judged."""
SURE_FROM = 0.8
RIGHT_RATIO = 0.5
"""An emitted leaf is right when that part of the share it is given is true."""
INVERTED_BELOW, INVERTED_ABOVE = 1.0, 3.0
LOST_FROM = 3.0
"""The unattributed part of the lost time is judged where that many points were lost."""
NOTHING = "nothing"
STARTUP = "startup"


@dataclass(frozen=True, slots=True)
class Judgment:
    """How one answer did."""

    wanted: str
    """Family that should come first; "nothing" of a null."""
    named_family: str | None
    """Family that came first; "nothing" when no cause was named; None = not claimed."""
    named_leaf: str | None = None
    errors: Mapping[str, float] | None = None
    """|answer - truth| of each of the 13 groups, in points."""
    active: tuple[str, ...] = ()
    family_right: bool | None = None
    leaf_top1: bool | None = None
    leaf_top2: bool | None = None
    abstained: bool | None = None
    """True when the first cause stops at its group."""
    emitted: tuple[tuple[str, float | None, bool], ...] = ()
    """(leaf, confidence, right) of every leaf of `EMITTED_FROM` points."""
    emitted_groups: tuple[tuple[str, float | None, bool], ...] = ()
    """The same of causes that stop at their group."""
    wrong_first_sure: bool | None = None
    """True when the first cause has a confidence of `SURE_FROM` or more and is wrong: another group
    than the wanted one; in a null, a share `FALSE_FROM` points above the truth."""
    culprit_right: bool | None = None
    """Of runs with a rank, a node or several ranks at fault."""
    nobody_right: bool | None = None
    """Of runs in which no rank may be blamed: by truth they caused less than a point."""
    both_found: bool | None = None
    inverted: bool | None = None
    false_causes: tuple[str, ...] | None = None
    """Groups said `FALSE_FROM` points above the truth, of a null; in other runs said that large and
    all but absent in truth."""
    unattributed_ratio: float | None = None
    """Of the lost time, beyond what is so by truth."""
    residual_ns: int | None = None
    gain_error: float | None = None
    """(gain said - what the fault cost) in points of the step time."""
    first_blamed: int | None = None
    notes: tuple[str, ...] = field(default=())


def judge_answer(answer: Answer, truth: Truth, wanted: ExpectedVerdict) -> Judgment:
    """Compare an answer with the truth of its run."""
    true = _compute_points(truth.sum_family_ns(), truth.in_step_ns)
    claimed_points = _sum_group_points(answer)
    first, second = find_first_causes(answer, wanted)
    group = find_dominant_group(answer, wanted)
    all_wanted = wanted
    of_leaf = with_dominant_leaf(all_wanted, truth, first)
    wanted = with_dominant_group(all_wanted, true, group)
    null = not wanted.family
    errors = None
    apart = not any(cause.covers for cause in answer.causes or ())
    if answer.family_ratio is not None and apart:  # else it gives no amount to a single group
        errors = {
            name: abs(claimed_points.get(name, 0.0) - true.get(name, 0.0)) for name in FAMILIES
        }
    false = _list_false_causes(answer, claimed_points, true, null)
    active = tuple(
        name
        for name in FAMILIES
        if max(claimed_points.get(name, 0.0), true.get(name, 0.0)) >= ACTIVE_FROM
    )
    return Judgment(
        wanted=wanted.family or NOTHING,
        named_family=None
        if answer.causes is None
        else _find_group(group, wanted)
        if group
        else NOTHING,
        named_leaf=first.leaf if first else None,
        errors=errors,
        active=active if errors is not None else (),
        family_right=None
        if answer.causes is None or not wanted.family
        else group is not None and wanted.family in list_meant_groups(group),
        leaf_top1=None if not _names_leaves(answer, of_leaf) else _find_leaf(first, of_leaf),
        leaf_top2=None
        if not _names_leaves(answer, of_leaf)
        else _find_leaf(first, of_leaf) or _find_leaf(second, of_leaf),
        abstained=None
        if not _names_leaves(answer, of_leaf)
        else first is not None and first.leaf is None,
        emitted=_list_emitted(answer, truth, of_leaf),
        emitted_groups=_list_emitted_groups(answer, true),
        wrong_first_sure=None
        if answer.causes is None
        else _get_wrong_confidence(group, wanted, false),
        culprit_right=_is_culprit_right(answer, truth, wanted),
        nobody_right=_is_absent_culprit_right(answer, truth, wanted),
        both_found=_are_all_faults_named(answer, truth, all_wanted),
        inverted=_is_blame_inverted(answer, truth),
        false_causes=false,
        unattributed_ratio=_measure_unattributed(answer, true, null),
        residual_ns=answer.residual_ns,
        gain_error=_measure_gain_error(answer, truth, null or wanted.outside_steps),
        first_blamed=answer.culprits[0] if answer.culprits else None,
        notes=_list_notes(true, all_wanted),
    )


def _compute_points(ns: Mapping[str, int], whole: int) -> dict[str, float]:
    return {name: 100.0 * value / whole for name, value in ns.items()} if whole else {}


def _sum_group_points(answer: Answer) -> dict[str, float]:
    """Amount of each group: from the table of groups, else from the named causes."""
    if answer.family_ratio is not None:
        return {name: 100.0 * ratio for name, ratio in answer.family_ratio.items()}
    out: dict[str, float] = {}
    for cause in answer.causes or ():
        if not cause.outside_steps:
            # a cause without an amount is a claim all the same
            share = FALSE_FROM if cause.share_ratio is None else 100.0 * cause.share_ratio
            out[cause.family] = out.get(cause.family, 0.0) + share
    return out


def _find_group(cause: NamedCause, wanted: ExpectedVerdict) -> str:
    return wanted.family if wanted.family in list_meant_groups(cause) else cause.family


def _names_leaves(answer: Answer, wanted: ExpectedVerdict) -> bool:
    """A tool that never says a leaf, in words of the corpus, does not claim any."""
    return answer.causes is not None and bool(wanted.leaves) and answer.leaves


def _find_leaf(cause: NamedCause | None, wanted: ExpectedVerdict) -> bool:
    return cause is not None and cause.leaf in wanted.leaves


def _list_emitted(
    answer: Answer, truth: Truth, wanted: ExpectedVerdict
) -> tuple[tuple[str, float | None, bool], ...]:
    inside = _compute_points(_sum_by_cause(truth, outside=False), truth.in_step_ns)
    outside = _sum_by_cause(truth, outside=True)
    out = []
    for cause in answer.causes or ():
        if cause.leaf is None or (cause.share_ratio is not None and _is_small(cause.share_ratio)):
            continue
        accepted = wanted.leaves if cause.leaf in wanted.leaves else (cause.leaf,)
        if cause.outside_steps:
            if cause.leaf == STARTUP and STARTUP not in outside:
                continue  # every run starts up: a truth need not say so
            right = any(outside.get(leaf, 0) > 0 for leaf in accepted)
        else:
            true = sum(inside.get(leaf, 0.0) for leaf in accepted)
            share = EMITTED_FROM if cause.share_ratio is None else 100.0 * cause.share_ratio
            right = true >= RIGHT_RATIO * share
        out.append((cause.leaf, cause.confidence_ratio, right))
    return tuple(out)


def _list_emitted_groups(
    answer: Answer, true: Mapping[str, float]
) -> tuple[tuple[str, float | None, bool], ...]:
    return tuple(
        (
            cause.family,
            cause.confidence_ratio,
            sum(true.get(name, 0.0) for name in list_meant_groups(cause))
            >= RIGHT_RATIO * 100 * cause.share_ratio,
        )
        for cause in answer.causes or ()
        if cause.leaf is None
        and not cause.outside_steps
        and cause.share_ratio is not None
        and not _is_small(cause.share_ratio)
    )


def _get_wrong_confidence(
    first: NamedCause | None, wanted: ExpectedVerdict, false: tuple[str, ...] | None
) -> bool | None:
    if first is None or first.confidence_ratio is None:
        return None if first is not None else False
    right = (
        wanted.family in list_meant_groups(first)
        if wanted.family
        else first.family not in (false or ())
    )
    return not right and first.confidence_ratio >= SURE_FROM


def _is_small(share_ratio: float) -> bool:
    return 100.0 * share_ratio < EMITTED_FROM


def _sum_by_cause(truth: Truth, outside: bool) -> dict[str, int]:
    out: dict[str, int] = {}
    for loss in truth.outside if outside else truth.lost:
        out[loss.cause] = out.get(loss.cause, 0) + loss.ns
    return out


def list_culprits(truth: Truth) -> frozenset[int]:
    """Return the ranks at fault, of all that was injected."""
    return frozenset(rank for fault in truth.injected for rank in fault.culprits)


def _is_culprit_right(answer: Answer, truth: Truth, wanted: ExpectedVerdict) -> bool | None:
    ranks = list_culprits(truth)
    if answer.culprits is None or wanted.culprit not in ("rank", "node", "several") or not ranks:
        return None
    return bool(answer.culprits) and answer.culprits[0] in ranks


def _is_absent_culprit_right(answer: Answer, truth: Truth, wanted: ExpectedVerdict) -> bool | None:
    if answer.culprits is None or wanted.culprit != "nobody":
        return None
    ranks_ns = sum(
        loss.ns for loss in truth.lost if loss.culprit is not None and loss.cause != OTHER
    )
    if 100.0 * ranks_ns >= EMITTED_FROM * max(truth.in_step_ns, 1):
        return None  # ranks did cause something, if not what the scenario is about
    return not answer.culprits or answer.culprits[0] in list_culprits(truth)


def _are_all_faults_named(answer: Answer, truth: Truth, wanted: ExpectedVerdict) -> bool | None:
    """Each of several faults has its cause named, with a rank at fault for it first."""
    faults = [fault for fault in truth.injected if fault.culprits]
    if len(faults) < 2 or not wanted.also or answer.culprits is None:
        return None
    causes = [cause for cause in answer.causes or () if cause.culprits is not None]
    if not causes:  # no cause has culprits of its own: take those of the run
        leading = answer.culprits[: len(faults)]
        return all(set(leading) & set(fault.culprits) for fault in faults)
    return all(
        any(
            FAMILY_OF.get(fault.cause) in list_meant_groups(cause)
            and bool(cause.culprits)
            and cause.culprits[0] in fault.culprits
            and not _is_small(cause.share_ratio or 1.0)
            for cause in causes
        )
        for fault in faults
    )


def _is_blame_inverted(answer: Answer, truth: Truth) -> bool | None:
    """The rank blamed first caused next to nothing, while another caused much."""
    if answer.culprits is None or not truth.in_step_ns:
        return None
    if not answer.culprits:
        return False
    caused = {
        rank: 100.0 * ns / truth.in_step_ns
        for rank, ns in truth.sum_caused_ns().items()
        if rank is not None
    }
    most = max(caused.values(), default=0.0)
    return caused.get(answer.culprits[0], 0.0) < INVERTED_BELOW and most >= INVERTED_ABOVE


def _list_false_causes(
    answer: Answer, claimed_points: Mapping[str, float], true: Mapping[str, float], null: bool
) -> tuple[str, ...] | None:
    if answer.causes is None and answer.family_ratio is None:
        return None
    means = {
        cause.family: list_meant_groups(cause)
        for cause in answer.causes or ()
        if not cause.outside_steps
    }
    out = []
    for name, points in claimed_points.items():
        real = sum(true.get(family, 0.0) for family in set(means.get(name, (name,))))
        false = points - real >= FALSE_FROM if null else real < TRUE_BELOW
        if name != UNATTRIBUTED and points >= FALSE_FROM and false:
            out.append(name)
    return tuple(sorted(out))


def _measure_unattributed(answer: Answer, true: Mapping[str, float], null: bool) -> float | None:
    """By truth some time has no cause; only what exceeds it counts as unattributed."""
    if null or answer.family_ratio is None or answer.lost_ratio is None:
        return None
    if 100.0 * answer.lost_ratio < LOST_FROM:
        return None
    beyond = answer.family_ratio.get(UNATTRIBUTED, 0.0) - true.get(UNATTRIBUTED, 0.0) / 100.0
    return max(beyond, 0.0) / answer.lost_ratio


def _measure_gain_error(answer: Answer, truth: Truth, no_fault_inside: bool) -> float | None:
    if no_fault_inside or answer.gain_ratio is None:
        return None
    if not truth.step_ns or truth.clean_step_ns is None:
        return None
    return 100.0 * (answer.gain_ratio - (1 - truth.clean_step_ns / truth.step_ns))


def _list_notes(true: Mapping[str, float], wanted: ExpectedVerdict) -> tuple[str, ...]:
    """List how the truth itself differs from what the scenario expects."""
    if not wanted.family or wanted.outside_steps:
        return ()
    named = {name: points for name, points in true.items() if name != UNATTRIBUTED}
    most = max(named, key=lambda name: named[name], default="")
    if most != wanted.family:
        return (f"truth has most {most or 'nowhere'}, the scenario wants {wanted.family}",)
    return ()
