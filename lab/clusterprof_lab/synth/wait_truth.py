"""Why a moment is late: the truth of a wait.

Every moment of a rank has a *history*: nanoseconds by (cause, culprit) whose sum is the moment
itself. A rank that waits takes over the history of the rank it waited for, so the reason of the
wait is the difference of two histories. No durations are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from clusterprof_lab.families import FAMILY_OF
from clusterprof_lab.truth import OTHER

Label = tuple[str, int | None]
"""Cause and culprit rank."""
History = dict[Label, int]
WORK: Label = ("work", None)
"""What a rank does without any fault, jitter included: no cause of lost time by itself."""
BUBBLE: Label = ("sync-bubble", None)


class LostSegment(NamedTuple):
    """A stretch in which a device lost all its time."""

    start_ns: int
    end_ns: int
    shares: Mapping[Label, int]
    """Sums to the length of the stretch."""


def split_by_weight(total_ns: int, weights: Mapping[Label, int]) -> dict[Label, int]:
    """Share an amount in proportion to positive weights; the parts sum to it."""
    whole = sum(weights.values())
    if total_ns <= 0 or whole <= 0:
        return {}
    if total_ns == whole:
        return dict(weights)
    parts = {label: total_ns * weight // whole for label, weight in weights.items()}
    missing = total_ns - sum(parts.values())
    by_remainder = sorted(weights, key=lambda label: -(total_ns * weights[label] % whole))
    for label in by_remainder[:missing]:
        parts[label] += 1
    return {label: ns for label, ns in parts.items() if ns}


def add_amounts(into: dict[Label, int], more: Mapping[Label, int]) -> None:
    """Add amounts label by label."""
    for label, ns in more.items():
        into[label] = into.get(label, 0) + ns


def explain_wait(
    late: History, waiting: History, wait_ns: int, last: int, structural: bool
) -> dict[Label, int]:
    """Return why a rank waited for the rank `last`: what `last` spent more of, cause by cause.

    More of plain work is jitter of the last to come, or, if `structural`, a pipeline's bubble.
    """
    if wait_ns <= 0:
        return {}
    net: dict[str, int] = {}
    more: dict[str, History] = {}
    for label in late.keys() | waiting.keys():
        difference = late.get(label, 0) - waiting.get(label, 0)
        if difference:
            net[label[0]] = net.get(label[0], 0) + difference
            if difference > 0:
                more.setdefault(label[0], {})[label] = difference
    weights: dict[Label, int] = {}
    for cause in sorted(net):
        if net[cause] <= 0:
            continue
        if cause == WORK[0]:
            add_amounts(weights, {BUBBLE if structural else (OTHER, last): net[cause]})
        else:
            add_amounts(
                weights,
                split_by_weight(
                    net[cause], {_resolve_culprit(k, last): v for k, v in more[cause].items()}
                ),
            )
    return split_by_weight(wait_ns, weights)


def _resolve_culprit(label: Label, last: int) -> Label:
    cause, culprit = label
    nobody = FAMILY_OF.get(cause) == "network" or label == BUBBLE
    return (cause, last) if culprit is None and not nobody else label


def sum_lost(lost: list[LostSegment], start_ns: int, end_ns: int) -> dict[Label, int]:
    """Sum up what was lost between two moments."""
    out: dict[Label, int] = {}
    for loss in lost:
        inside = min(loss.end_ns, end_ns) - max(loss.start_ns, start_ns)
        if inside > 0:
            add_amounts(out, split_by_weight(inside, loss.shares))
    return out
